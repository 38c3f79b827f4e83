"""Writes an HTML report of one run, or a comparison of several.

ppdist report RUN... [--out FILE]

RUN is the output_dir of a training, also of one that goes on or was killed, or the --out folder
of ppdist eval.  The page holds all it shows, pictures too, and loads nothing.  Of several runs
those that differ only in their seed are grouped.
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
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.report.content import verdict_on
    from ppdist.report.page import write_report
    from ppdist.report.run import read_run, require_run
    from ppdist.viz.run_plots import draw_run

    alone = len(arguments.runs) == 1
    for folder in arguments.runs:
        require_run(folder)
    if alone:
        draw_run(arguments.runs[0])
    out = arguments.out or (arguments.runs[0] if alone else Path()) / "report.html"
    for problem in write_report(arguments.runs, out):
        print(f"not in the page: {problem}", file=sys.stderr)
    for finding in verdict_on(read_run(arguments.runs[0])) if alone else ():
        print(finding.text)
    print(out)
    return 0
