"""Measured correctness:

  tools/verify.py equivalence -c cfg.yml [-o k=v ...]      many ranks train like one
  tools/verify.py parity --reference DIR                   our numbers against the original's
  tools/verify.py coco --reference DIR                     COCO's own example of its metrics

equivalence trains some steps on the user's own configuration and data, on as many ranks as fleetrun
starts of it (`fleetrun --ips A,B tools/verify.py equivalence -c ...`) or, without a launcher, on 1
and 2 (--processes) of this machine; then the same on one rank alone.  A table shows how far losses,
gradient norms and weights are off, beside how far rounding alone carries such a run, and says
INCONCLUSIVE where that is too far to tell right from wrong.  With train.sync_bn the one rank needs
memory for the images of all ranks on one card.  Nothing is left in output_dir.

parity compares our models with stored outputs, losses and gradients of the original
implementations, made with weights of a formula (DIR/parity_weights.py is run).  A line per model
shows the largest error of each group beside its tolerance.

coco evaluates the example of the COCO API and shows its 12 numbers beside the published ones and,
where it is installed, those of pycocotools.

Exit code 1 when anything is further off than its tolerance or nothing could tell whether it is, 2
when a file or a configuration cannot be understood.
"""

import argparse
import os
import sys
from math import isfinite
from pathlib import Path

from ppdist import errors


def parse() -> argparse.Namespace:
    from ppdist.arguments import add_config, at_least

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    equivalence = commands.add_parser("equivalence", help="many ranks train like one")
    add_config(equivalence, required=True)
    equivalence.add_argument("--steps", type=at_least(1), default=20, help="to train (20)")
    equivalence.add_argument(
        "--processes", type=at_least(1), nargs="+", default=[1, 2], metavar="N",
        help="without a launcher: one after the other on so many ranks of this machine (1 2)",
    )  # fmt: skip
    equivalence.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    parity = commands.add_parser("parity", help="our numbers against the original's")
    parity.add_argument("--reference", required=True, help="folder of reference files")
    coco = commands.add_parser("coco", help="COCO's own example of its metrics")
    coco.add_argument("--reference", required=True, type=Path, help="folder of the example")
    for command in (equivalence, parity, coco):
        command.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.files import make_parent

    if arguments.json:
        make_parent(arguments.json)
    commands = {"equivalence": equivalence, "parity": parity, "coco": coco}
    return commands[arguments.command](arguments)


def equivalence(arguments: argparse.Namespace) -> int:
    from ppdist import dist
    from ppdist import equivalence as check
    from ppdist.config import load_config
    from ppdist.files import write_json

    steps = [f"train.max_steps={arguments.steps}", "log.visualdl=false"]
    config = load_config(arguments.config, [*arguments.override, *steps])
    if arguments.alone:
        check.judge(config, arguments.alone)
        return 0
    check.require_comparable(config)
    script = [str(Path(__file__).resolve()), "equivalence", "-c", arguments.config]
    script += ["--steps", str(arguments.steps)]
    if arguments.override:
        script += ["-o", *arguments.override]
    reports = []
    launched = dist.world_size() > 1 or errors.EXIT_DIR_VARIABLE in os.environ
    if launched:
        dist.init(config.device, config.distributed)
        reports.append(check.verify_ranks(config, arguments.steps, [sys.executable, *script]))
    else:
        launcher = [sys.executable, str(Path(__file__).with_name("launch.py"))]
        for count in arguments.processes:
            reports.append(check.verify_on(launcher, script, count))
            print("\n".join(check.lines(reports[-1])), flush=True)
    if launched and dist.is_main():
        print("\n".join(check.lines(reports[0])), flush=True)
    if arguments.json and dist.is_main():
        write_json(arguments.json, reports, indent=1)
    return 0 if all(check.verdict(report) == "PASS" for report in reports) else 1


def parity(arguments: argparse.Namespace) -> int:
    from ppdist.files import write_json
    from ppdist.parity import verify
    from ppdist.parity.report import header

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


def coco(arguments: argparse.Namespace) -> int:
    from ppdist.coco_example import compare, lines
    from ppdist.files import write_json

    rows = compare(arguments.reference)
    print("\n".join(lines(rows)))
    if arguments.json:
        write_json(arguments.json, [row._asdict() for row in rows], indent=1)
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    errors.run(main)
