"""Measured correctness: tools/verify.py parity --reference DIR

parity compares our models with stored outputs, losses and gradients of the original
implementations, made with weights of a formula (DIR/parity_weights.py is run).  Exit code 1 when
anything is further off than its tolerance.
"""

import argparse
import json
from pathlib import Path

from ppdist import errors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    parity = commands.add_parser("parity", help="our numbers against the original's")
    parity.add_argument("--reference", required=True, help="folder of reference files")
    parity.add_argument("--json", metavar="FILE", help="write every measurement here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.parity import compare, compare_keys, read_references

    folder = Path(arguments.reference)
    groups = {reference.name: compare(reference) for reference in read_references(folder)}
    rows, failed = [], 0
    for group, measurements in {**groups, "keys": compare_keys(folder)}.items():
        measured = list(measurements)
        rows += [[group, *m] for m in measured]
        missed = [m for m in measured if not m.passed]
        failed += len(missed)
        print(f"{group}: {len(measured) - len(missed)} of {len(measured)} within tolerance")
        for m in missed:
            print(f"  {m.name}: off by {m.error:.3g}, allowed {m.tolerance:.3g}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    errors.run(main)
