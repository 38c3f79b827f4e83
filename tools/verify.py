"""Measured correctness: tools/verify.py parity --reference DIR

parity compares our models with stored outputs, losses and gradients of the original
implementations, made with weights of a formula (DIR/parity_weights.py is run).  A line per model
shows the largest error of each group beside its tolerance.  Exit code 1 when anything is further
off than its tolerance or nothing was compared with it, 2 when a file cannot be understood.
"""

import argparse
from math import isfinite
from pathlib import Path

from ppdist import errors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parity = commands.add_parser("parity", help="our numbers against the original's")
    parity.add_argument("--reference", required=True, help="folder of reference files")
    parity.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.files import make_parent, write_json
    from ppdist.parity import verify
    from ppdist.parity.report import header

    if arguments.json:
        make_parent(arguments.json)
    reports = []
    for report in verify(Path(arguments.reference)):
        if not reports:
            print(header())
        print("\n".join(report.lines()), flush=True)
        reports.append(report)
    if arguments.json:
        rows: list[list] = [
            [report.name, m.group, m.name, m.error if isfinite(m.error) else None, m.tolerance]
            for report in reports
            for m in report.measurements
        ]
        rows += [[report.name, "error", report.error] for report in reports if report.error]
        write_json(arguments.json, rows, indent=1)
    measured = [m for report in reports for m in report.measurements]
    missed = sum(not m.passed for m in measured)
    unclear = [report.error for report in reports if report.error]
    verdict = "PASS" if all(report.passed for report in reports) else "FAIL"
    if verdict == "FAIL" and all(report.verdict in ("PASS", "INCOMPLETE") for report in reports):
        verdict = "INCOMPLETE"
    print(
        f"{verdict}: {len(reports)} models, {len(measured) - missed} of {len(measured)} "
        f"measurements within tolerance, {len(unclear)} files not understood"
    )
    if unclear and not missed:
        raise errors.DataError("\n".join(unclear))
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    errors.run(main)
