"""Writes an HTML report of one run, or a comparison of several.

ppdist report RUN... [--out FILE]
ppdist report RUN --csv FILE

RUN is the output_dir of a training, also of one still running or killed, or the --out folder
of ppdist eval.  The page holds all it shows, pictures too, and loads nothing.  Of several runs
those that differ only in their seed are grouped.  --csv writes a row an epoch instead, as
`ppdist.Run(RUN).history()` has them.
"""

import argparse
import sys
from pathlib import Path

from ppdist.cli import parser_of


def parse() -> argparse.Namespace:
    parser = parser_of("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="the page; by default report.html in the folder of a single run, else here",
    )  # fmt: skip
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="instead, write the epochs of a single run as a CSV table",
    )
    arguments = parser.parse_args()
    if arguments.csv and (arguments.out or len(arguments.runs) > 1):
        parser.error("--csv takes exactly one RUN and cannot be combined with --out")
    return arguments


def main() -> int:
    arguments = parse()
    from ppdist.metrics.run import read_run, require_run, write_history
    from ppdist.report.content import verdict_on
    from ppdist.report.page import write_report
    from ppdist.viz.run_plots import draw_run

    alone = len(arguments.runs) == 1
    for folder in arguments.runs:
        require_run(folder)
    if arguments.csv:
        write_history(arguments.runs[0], arguments.csv)
        print(arguments.csv)
        return 0
    if alone:
        draw_run(arguments.runs[0])
    out = arguments.out or (arguments.runs[0] if alone else Path()) / "report.html"
    for problem in write_report(arguments.runs, out):
        print(f"not in the page: {problem}", file=sys.stderr)
    for finding in verdict_on(read_run(arguments.runs[0])) if alone else ():
        print(finding.text)
    print(out)
    return 0
