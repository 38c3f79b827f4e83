"""Writes an HTML report of one run.

ppdist report RUN [--out FILE]
ppdist report RUN --csv FILE

RUN is the output_dir of a training, also of one still running or killed, or the --out folder
of ppdist eval.  The page holds all it shows, pictures too, and loads nothing.  --csv writes a row
an epoch instead (and one an evaluation amid an epoch), as `ppdist.Run(RUN).history()` has them.
"""

import argparse
import shlex
import sys
from pathlib import Path

from ppdist.cli import make_parser, print_commands


def parse() -> argparse.Namespace:
    parser = make_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="the page; by default report.html in the folder of the run",
    )  # fmt: skip
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="instead, write the epochs as a CSV table"
    )
    arguments = parser.parse_args()
    if len(arguments.runs) > 1:
        parser.error(
            "a report shows one RUN; several beside one another: visualdl --logdir DIR, where DIR "
            "holds them, and the table of `ppdist tune`"
        )
    if arguments.csv and arguments.out:
        parser.error("--csv cannot be combined with --out")
    return arguments


def main() -> int:
    arguments = parse()
    from ppdist.common.records import extension, next_commands
    from ppdist.metrics.run import read_run, require_run, write_history
    from ppdist.report.content import judge_if_ended
    from ppdist.report.page import write_report
    from ppdist.viz.run_plots import draw_run

    (folder,) = arguments.runs
    require_run(folder)
    if arguments.csv:
        write_history(folder, arguments.csv)
        print(arguments.csv)
        return 0
    draw_run(folder)
    out = arguments.out or folder / "report.html"
    for problem in write_report(folder, out):
        print(f"not in the page: {problem}", file=sys.stderr)
    run = read_run(folder)
    findings = judge_if_ended(run)
    for finding in findings:
        print(finding.text)
    print(out)
    if (folder / "checkpoints").is_dir():  # not of ppdist eval
        worst = (run.evaluation or {}).get("worst") or [{}]
        test = any(key.startswith("data.test.") for key in run.config)
        weights = f"-w {shlex.quote(str(folder))}"
        commands = next_commands(weights, str(worst[0].get("file", "")), test=test)
        if any(finding.code == "still_rising" for finding in findings):
            epochs, steps = run.config.get("train.epochs", 0), run.config.get("train.steps")
            words = ["ppdist", "train", "--resume", str(folder), *extension(epochs, steps)]
            commands.insert(0, ("longer", shlex.join(words)))
        print_commands(commands)
    return 0
