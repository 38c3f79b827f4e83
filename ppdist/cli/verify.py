"""Verifies cards, equivalence and published weights:

  ppdist verify accelerator [-c cfg.yml] [--out DIR]     this machine's cards train as they should
  ppdist verify equivalence -c cfg.yml [-o k=v ...]      many ranks train like one
  ppdist verify zoo [NAME | FILE | DIR ...] [-o k=v ...] published weights: list, or their AP

accelerator answers "do my cards train right?" on the cards that fleetrun gives it (`fleetrun
--selected_gpus 0-7 ppdist verify accelerator`) or on one.  equivalence: some steps on all cards and
on one alone; of one card, on it and on the CPU.  speed: images a second on all cards and on one.
resume: a run that is resumed in its middle, and one that was not interrupted.  Each says PASS,
FAIL, or NOT RUN and why.  Without -c it trains a small model on images that it makes.  --out gets
accelerator.json; exit code 1 when a part failed.

equivalence trains some steps on the user's own configuration and data, on as many ranks as fleetrun
starts of it (`fleetrun --nproc_per_node 2 ppdist verify equivalence -c ...`); then the same on one
rank alone, each step from what the ranks began it with.  A table shows how far losses, gradient
norms and weights are off, beside how far rounding alone carries such a step.  It says INCONCLUSIVE
where rounding carries too far to tell right from wrong.  With train.sync_bn the one rank needs
memory for the images of all ranks on one card.
Nothing is left in output_dir.

zoo without a word lists published weights by name (docs/model_zoo.md).  With names, files of
published names or folders of them, each is evaluated as its publisher did, which the line names,
and its AP is shown beside the published one.  The data are the validation set of its config (-o
data.root=... says where); it runs on the ranks that fleetrun starts of it.

Exit code 1 when anything is further off than its tolerance or nothing could tell whether it is, 2
when a file or a configuration cannot be understood.
"""

import argparse
import sys
from pathlib import Path

from ppdist.cli import add_config, make_parser, script_words
from ppdist.common.arguments import at_least


def parse() -> argparse.Namespace:
    parser = make_parser("verify", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    accelerator = commands.add_parser("accelerator", help="this machine's cards train right")
    add_config(accelerator, required=False)
    accelerator.add_argument(
        "--out", type=Path, default=Path("output/accelerator"), metavar="DIR",
        help="for the JSON, and while it runs for what runs leave (output/accelerator)",
    )  # fmt: skip
    accelerator.add_argument(
        "--steps", type=at_least(2), default=20, help="that measure speed, and of each run (20)"
    )
    accelerator.add_argument(
        "--efficiency", type=float, default=0.8, metavar="PART",
        help="of N times the rate of one card, the least that N cards may reach (0.8)",
    )  # fmt: skip
    accelerator.set_defaults(json=None)
    equivalence = commands.add_parser("equivalence", help="many ranks train like one")
    add_config(equivalence, required=True)
    equivalence.add_argument("--steps", type=at_least(1), default=20, help="to train (20)")
    equivalence.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    zoo = commands.add_parser("zoo", help="published weights: list, or AP beside the published one")
    zoo.add_argument("weights", nargs="*", metavar="WEIGHTS", help="names, files, folders of files")
    zoo.add_argument(
        "-o", "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="configuration keys, such as data.root=datasets/coco",
    )  # fmt: skip
    for command in (equivalence, zoo):
        command.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.common.files import make_parent

    if arguments.json:
        make_parent(arguments.json)
    return COMMANDS[arguments.command](arguments)


def accelerator(arguments: argparse.Namespace) -> int:
    from ppdist.lab.verify.accelerator import has_failed, verify_accelerator

    report = verify_accelerator(
        arguments.config,
        arguments.override,
        arguments.out,
        lambda name: [sys.executable, *script_words(name)],
        steps=arguments.steps,
        efficiency=arguments.efficiency,
    )
    return 1 if has_failed(report) else 0


def equivalence(arguments: argparse.Namespace) -> int:
    from ppdist.common.errors import ConfigError
    from ppdist.common.files import write_json
    from ppdist.distributed import comm
    from ppdist.engine.recipe import load_config_with_data
    from ppdist.lab.verify import dp_equivalence
    from ppdist.lab.verify.dp_equivalence import format_lines, verdict

    steps = [f"train.max_steps={arguments.steps}", "log.visualdl=false"]
    config = load_config_with_data(arguments.config, [*arguments.override, *steps])
    if arguments.alone:
        dp_equivalence.judge(config, arguments.alone)
        return 0
    comm.init(config.device, config.distributed)
    if comm.world_size() == 1:
        raise ConfigError(
            "one rank trains like one rank: there is nothing to compare",
            code="needs_ranks",
            where="ppdist verify equivalence",
            fix="start it on several: `fleetrun --nproc_per_node 2 ppdist verify equivalence ...`; "
            "one card and its CPU: `ppdist verify accelerator -c ...`",
        )
    # The single-rank process runs the same command with different overrides.
    script = [*script_words("verify"), "equivalence", "-c", arguments.config]
    script += ["--steps", str(arguments.steps)]
    if arguments.override:
        script += ["-o", *arguments.override]
    report = dp_equivalence.verify_ranks(config, arguments.steps, [sys.executable, *script])
    if comm.is_main():
        print("\n".join(format_lines(report)), flush=True)
        if arguments.json:
            write_json(arguments.json, [report], indent=1)
    return 0 if verdict(report) == "PASS" else 1


def zoo(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ppdist.common.files import write_json
    from ppdist.config.distributed import DistributedConfig
    from ppdist.distributed import comm
    from ppdist.lab.verify.zoo import FAIL, NOT_RUN, PASS, format_listing, format_row, verify_zoo
    from ppdist.models.zoo import zoo as published

    if not arguments.weights:
        print(format_listing())
        if arguments.json:
            write_json(arguments.json, [asdict(entry) for entry in published().values()], indent=1)
        return 0
    # The device is needed before any configuration is read: each weight file has its own.
    device = [override for override in arguments.override if override.startswith("device=")]
    comm.init(device[-1].partition("=")[2] if device else "auto", DistributedConfig())
    rows = []
    try:
        for row in verify_zoo(arguments.weights, arguments.override):
            rows.append(row)
            if comm.is_main():
                print(format_row(row), flush=True)
    finally:  # after Ctrl-C, too
        if comm.is_main() and arguments.json:
            write_json(arguments.json, [asdict(row) for row in rows], indent=1)
    passed, failed, not_run = (
        sum(row.verdict == verdict for row in rows) for verdict in (PASS, FAIL, NOT_RUN)
    )
    if comm.is_main():
        print(f"{passed} of {len(rows)} as published, {failed} not, {not_run} not run")
    return 1 if failed or not_run == len(rows) else 0


COMMANDS = {
    "accelerator": accelerator,
    "equivalence": equivalence,
    "zoo": zoo,
}
