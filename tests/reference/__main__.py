"""Compares this code with what it follows:

  python -m tests.reference parity --reference DIR       our numbers against the original's
  python -m tests.reference coco --reference DIR         COCO's own example of its metrics
  python -m tests.reference export [--models NAME ...] [--weights NAME=DIR ...] [--images DIR]
                                                         exported files against eager

parity compares our models with stored outputs, losses and gradients of the original
implementations, made with weights of a formula (DIR/parity_weights.py is run).  A line per model
shows the largest error of each group beside its tolerance.

coco evaluates the example of the COCO API and shows its 12 numbers beside the published ones and,
where it is installed, those of pycocotools.

export writes models in every form ppdist export knows, opens each file as its user would, and
compares scores and boxes on 20 images, of trained weights (DIR: the output_dir of a run) mAP on its
validation set, too.  --document replaces the table in a Markdown file
(docs/dev/export_matrix.md has one).

Exit code 1 when anything is further off than its tolerance, 2 when a file cannot be understood.
"""

import argparse
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from ppdist.common import errors, process
from ppdist.common.files import make_parent, write_json
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm
from tests.reference import export_matrix as matrix
from tests.reference.coco_example import compare, lines
from tests.reference.export_subjects import MODELS, images_of, require_known, trained, untrained
from tests.reference.parity import ModelReport, verify
from tests.reference.parity.report import header

CONFIGS = Path(__file__).parents[2] / "configs"


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.reference", None, __doc__, formatter_class=form
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parity = commands.add_parser("parity", help="our numbers against the original's")
    parity.add_argument("--reference", required=True, help="folder of reference files")
    coco = commands.add_parser("coco", help="COCO's own example of its metrics")
    coco.add_argument("--reference", required=True, type=Path, help="folder of the example")
    export = commands.add_parser("export", help="exported files against eager")
    export.add_argument(
        "--models", nargs="+", metavar="NAME",
        help="with random weights (all known ones that have no --weights)",
    )  # fmt: skip
    export.add_argument(
        "--weights", nargs="+", default=[], metavar="NAME=DIR",
        help="a model as a run trained it; DIR is the run's output_dir",
    )  # fmt: skip
    export.add_argument("--images", type=Path, metavar="DIR", help="to compare on (made-up shapes)")
    export.add_argument("--document", type=Path, metavar="FILE", help="put the table in here")
    for command in (parity, coco, export):
        command.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.json:
        make_parent(arguments.json)
    return COMMANDS[arguments.command](arguments)


def parity(arguments: argparse.Namespace) -> int:

    reports: list[ModelReport] = []
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
        raise errors.DataError("\n".join(unclear), code="reference_invalid")
    return 0 if verdict == "PASS" else 1


def coco(arguments: argparse.Namespace) -> int:

    rows = compare(arguments.reference)
    print("\n".join(lines(rows)))
    if arguments.json:
        write_json(arguments.json, [asdict(row) for row in rows], indent=1)
    return 0 if all(row.equal for row in rows) else 1


def export(arguments: argparse.Namespace) -> int:

    runs = {}
    for item in arguments.weights:
        name, _, run = item.partition("=")
        if not (Path(run) / "config.yml").is_file():
            raise errors.ConfigError(
                "expected NAME=DIR, DIR with config.yml and checkpoints/best",
                code="option_invalid",
                where=f"--weights {item}",
            )
        runs[name] = Path(run)
    models = [name for name in MODELS if name not in runs]
    models = models if arguments.models is None else arguments.models
    require_known(models)
    comm.init("cpu", DistributedConfig())  # not with a card's TF32
    images = images_of(arguments.images)
    rows = []
    for name in [*runs, *models]:
        subject = (
            trained(name, runs[name], images, process.warn)
            if name in runs
            else untrained(name, CONFIGS / MODELS[name], images)
        )
        for row in matrix.measure(subject):
            print(matrix.line(row), flush=True)
            rows.append(row)
    if arguments.json:
        write_json(arguments.json, [matrix.as_json(row) for row in rows], indent=1)
    if arguments.document:
        matrix.write_table(arguments.document, matrix.table(rows))
    missed = sum(not row.passed for row in rows)
    print(f"{'FAIL' if missed else 'PASS'}: {len(rows) - missed} of {len(rows)} files")
    return 1 if missed else 0


COMMANDS = {"parity": parity, "coco": coco, "export": export}

if __name__ == "__main__":
    process.run(main)
