"""Runs hyper-parameter searches and studies with several seeds:

ppdist tune run -c configs/studies/x.yml --out DIR [--workers 2] [-o key=value ...]
    makes the trials that are left; stopped or killed, the same command continues.  The same command
    in another terminal, or on another machine that shares DIR, takes its part
ppdist tune show DIR                     the table of settings, the best first
"""

import argparse
import os
import sys
import time
from pathlib import Path

from ppdist.cli import add_config, make_parser, print_table, script_words
from ppdist.common import errors, process
from ppdist.common.arguments import at_least, time_in


def parse() -> argparse.Namespace:
    from ppdist.launch.cards import split_cards

    parser = make_parser("tune", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="make the trials of a study")
    add_config(run, required=True, config="YAML file of the study",
               override="overrides of the experiment's keys")  # fmt: skip
    run.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the study")
    run.add_argument("--workers", type=at_least(1), metavar="N", help="trials at a time")
    run.add_argument("--nproc_per_node", type=at_least(1), metavar="N", help="processes of each")
    run.add_argument("--cards", metavar="0,1|2-3", help="cards of each worker, instead of both")
    run.add_argument("--trials", type=at_least(1), metavar="N", help="maximum number of trials")
    run.add_argument(
        "--budget", type=time_in("minutes"), metavar="MIN", help="stop after this many minutes"
    )
    run.add_argument("--retry_failed", action="store_true", help="again what has failed before")
    show = commands.add_parser("show", help="the table of settings, the best first")
    show.add_argument("folder", type=Path, metavar="DIR", help="folder of a study")
    if sys.argv[1:2] == ["table"]:
        raise errors.ConfigError(
            "the tables of variants are gone",
            code="option_invalid",
            where="ppdist tune table",
            fix="`ppdist tune show DIR` has a line for each variant",
        )
    arguments = parser.parse_args()
    if arguments.command == "run" and arguments.cards:
        if arguments.workers or arguments.nproc_per_node:
            parser.error("--cards says how many workers and processes there are")
        arguments.cards = split_cards(arguments.cards)
    return arguments


def main() -> int:
    arguments = parse()
    return COMMANDS[arguments.command](arguments)


def run(arguments: argparse.Namespace) -> int:
    require_optuna()
    from ppdist.common.machine import available_cores
    from ppdist.config.study import load_study
    from ppdist.lab.tune.results import export
    from ppdist.lab.tune.search import Search
    from ppdist.lab.tune.store import Store
    from ppdist.lab.tune.trial import Launcher
    from ppdist.launch.signals import collect_signals

    started = time.monotonic()
    study = load_study(Path(arguments.config), tuple(arguments.override))
    workers = arguments.workers or study.workers
    processes = arguments.nproc_per_node or study.processes
    if cards_WC := arguments.cards or deal_cards(workers, processes):
        workers, processes = len(cards_WC), len(cards_WC[0])
        worker_options = [["--devices", ",".join(cards_C)] for cards_C in cards_WC]
    else:
        worker_options = [["--nproc_per_node", str(processes)]] * workers
    study = study.model_copy(update={"workers": workers, "processes": processes})
    launcher = Launcher(
        command=[sys.executable, *script_words("launch")],
        script=script_words("train"),
        # All trials share the cores of this machine.
        threads=max(1, int(available_cores()) // (workers * processes)),
    )
    # A signal ends the study once every trial has saved a checkpoint, so it must not raise here.
    with collect_signals() as signals:
        budget = arguments.budget

        def asked_to_stop() -> bool:
            is_over_budget = budget is not None and time.monotonic() - started > budget * 60
            return bool(signals) or is_over_budget

        store = Store(arguments.out, study)
        search = Search(store, launcher, worker_options, asked_to_stop, say, arguments.retry_failed)
        try:
            code = search.run(arguments.trials)
        finally:
            store.close()
    export(store)
    if code:
        say("stopped early; run the same command to continue")
    return code


def require_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise errors.ConfigError(
            "ppdist tune run needs Optuna: pip install 'ppdist[tune]'", code="package_missing"
        ) from error


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {process.printable(text)}", flush=True)


def deal_cards(workers: int, processes: int) -> list[list[str]]:
    """Distributes the visible cards among the workers; returns [] if trials run on the CPU."""
    from ppdist.launch.cards import deal_out, detect_cards, visible_labels
    from ppdist.launch.topology import paddle_build

    visible = visible_labels(detect_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not visible or paddle_build() == "cpu":
        return []
    return deal_out(visible, workers, processes)


def show(arguments: argparse.Namespace) -> int:
    from ppdist.lab.tune.results import rank_settings, read_rows

    rows = read_rows(arguments.folder)
    if not rows:
        print("no trial has ended yet")
        return 0
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states))
    print(f"{rows[0]['study']}: {counts}")
    settings, metric = rank_settings(rows), rows[0]["metric"]
    heads = ["setting", "trials", "state", "epochs", "minutes", f"{metric}, last", "best"]
    print_table(heads, [setting.cells() for setting in settings])
    best = settings[0]
    if best.is_complete:
        print(f"best: {best.name}" + (f": -o {' '.join(best.overrides)}" if best.overrides else ""))
    return 0


COMMANDS = {"run": run, "show": show}
