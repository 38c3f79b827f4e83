"""Verifies cards, equivalence, parity, metrics and exports:

  ppdist verify accelerator [-c cfg.yml] [--out DIR]     this machine's cards train as they should
  ppdist verify equivalence -c cfg.yml [-o k=v ...]      many ranks train like one
  ppdist verify parity --reference DIR                   our numbers against the original's
  ppdist verify coco --reference DIR                     COCO's own example of its metrics
  ppdist verify export [--models NAME ...] [--weights NAME=DIR ...] [--images DIR]
                                                           exported files against eager
  ppdist verify zoo [NAME | FILE | DIR ...] [-o k=v ...] published weights: list, or their AP

accelerator is one command of proof for whoever has cards; it takes less than 30 minutes, on those
that fleetrun gives it (`fleetrun --selected_gpus 0-7 ppdist verify accelerator`) or on one.  Its
parts: kernels against numpy, losses and gradients of a batch against the CPU, training in float32,
AMP in bfloat16 and float16 against that, N cards like one with a partial last step, images a second
on 1, 2, 4, ... cards, peaks of memory, and a resumed run against one that was not interrupted.
Each says PASS, FAIL, or NOT RUN and why.  Without -c it trains a small model on images that it
makes.  --out gets accelerator.json, accelerator.md and the logs; exit code 1 when a part failed.

equivalence trains some steps on the user's own configuration and data, on as many ranks as fleetrun
starts of it (`fleetrun --ips A,B ppdist verify equivalence -c ...`) or, without a launcher, on 1
and 2 (--processes) of this machine; then the same on one rank alone.  A table shows how far losses,
gradient norms and weights are off, beside how far rounding alone carries such a run, and says
INCONCLUSIVE where that is too far to tell right from wrong.  With train.sync_bn the one rank needs
memory for the images of all ranks on one card.  Nothing is left in output_dir.

parity compares our models with stored outputs, losses and gradients of the original
implementations, made with weights of a formula (DIR/parity_weights.py is run).  A line per model
shows the largest error of each group beside its tolerance.

coco evaluates the example of the COCO API and shows its 12 numbers beside the published ones and,
where it is installed, those of pycocotools.

export writes models in every form ppdist export knows, opens each file as its user would, and
compares scores and boxes on 20 images, of trained weights (DIR: the output_dir of a run) mAP on its
validation set, too.  --document replaces the table in a Markdown file
(docs/dev/export_matrix.md has one).

zoo without a word lists published weights by name (docs/model_zoo.md).  With names, files of
published names or folders of them, each is evaluated as its publisher did, which the line names,
and its AP stands beside the published one.  The data are the validation set of its config (-o
data.root=... says where); it runs on the ranks that fleetrun starts of it.

Exit code 1 when anything is further off than its tolerance or nothing could tell whether it is, 2
when a file or a configuration cannot be understood.
"""

import argparse
import os
import sys
from math import isfinite
from pathlib import Path

from ppdist.cli import CLONE, add_config, parser_of, script_of, use_clone
from ppdist.common import errors, process
from ppdist.common.arguments import at_least, time_in


def parse() -> argparse.Namespace:
    parser = parser_of("verify", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    accelerator = commands.add_parser("accelerator", help="this machine's cards train right")
    add_config(accelerator, required=False)
    accelerator.add_argument(
        "--out", type=Path, default=Path("output/accelerator"), metavar="DIR",
        help="for the JSON, the page and the logs (output/accelerator)",
    )  # fmt: skip
    accelerator.add_argument(
        "--steps", type=at_least(1), default=200, help="of each training (200)"
    )
    accelerator.add_argument(
        "--efficiency", type=float, default=0.8, metavar="PART",
        help="of N times the rate of one card, the least that N cards may reach (0.8)",
    )  # fmt: skip
    accelerator.add_argument(
        "--minutes", type=time_in("minutes"), default=30, help="what is left then is not done (30)"
    )
    accelerator.set_defaults(json=None)
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
    zoo = commands.add_parser("zoo", help="published weights: list, or AP beside the published one")
    zoo.add_argument("weights", nargs="*", metavar="WEIGHTS", help="names, files, folders of files")
    zoo.add_argument(
        "-o", "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="configuration keys, such as data.root=datasets/coco",
    )  # fmt: skip
    for command in (equivalence, parity, coco, export, zoo):
        command.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.common.files import make_parent

    if arguments.json:
        make_parent(arguments.json)
    return COMMANDS[arguments.command](arguments)


def accelerator(arguments: argparse.Namespace) -> int:
    from ppdist.verify.accelerator import Options, failed, verify_accelerator

    report = verify_accelerator(
        arguments.config,
        arguments.override,
        arguments.out,
        lambda name: [sys.executable, *script_of(name)],
        Options(arguments.steps, arguments.efficiency, arguments.minutes),
    )
    return 1 if failed(report) else 0


def equivalence(arguments: argparse.Namespace) -> int:
    from ppdist.common.files import write_json
    from ppdist.config import load_config
    from ppdist.distributed import comm
    from ppdist.verify import dp_equivalence
    from ppdist.verify.dp_equivalence import lines, verdict

    steps = [f"train.max_steps={arguments.steps}", "log.visualdl=false"]
    config = load_config(arguments.config, [*arguments.override, *steps])
    if arguments.alone:
        dp_equivalence.judge(config, arguments.alone)
        return 0
    dp_equivalence.require_comparable(config)
    script = [*script_of("verify"), "equivalence", "-c", arguments.config]
    script += ["--steps", str(arguments.steps)]
    if arguments.override:
        script += ["-o", *arguments.override]
    reports = []
    launched = comm.world_size() > 1 or process.EXIT_DIR_VARIABLE in os.environ
    if launched:
        comm.init(config.device, config.distributed)
        reports.append(
            dp_equivalence.verify_ranks(config, arguments.steps, [sys.executable, *script])
        )
    else:
        launcher = [sys.executable, *script_of("launch")]
        for count in arguments.processes:
            reports.append(dp_equivalence.verify_on(launcher, script, count))
            print("\n".join(lines(reports[-1])), flush=True)
    if launched and comm.is_main():
        print("\n".join(lines(reports[0])), flush=True)
    if arguments.json and comm.is_main():
        write_json(arguments.json, reports, indent=1)
    return 0 if all(verdict(report) == "PASS" for report in reports) else 1


def parity(arguments: argparse.Namespace) -> int:
    use_clone("tests/reference")
    from ppdist.common.files import write_json
    from tests.reference.parity import ModelReport, verify
    from tests.reference.parity.report import header

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
    use_clone("tests/reference")
    from ppdist.common.files import write_json
    from tests.reference.coco_example import compare, lines

    rows = compare(arguments.reference)
    print("\n".join(lines(rows)))
    if arguments.json:
        write_json(arguments.json, [row._asdict() for row in rows], indent=1)
    return 0 if all(row.equal for row in rows) else 1


def export(arguments: argparse.Namespace) -> int:
    use_clone("tests/reference")
    from ppdist.common.files import write_json
    from ppdist.config.distributed import DistributedConfig
    from ppdist.distributed import comm
    from tests.reference import export_matrix as matrix
    from tests.reference.export_subjects import MODELS, images_of, require_known, trained, untrained

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
            else untrained(name, CLONE / "configs" / MODELS[name], images)
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


def zoo(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ppdist.common.files import write_json
    from ppdist.config.distributed import DistributedConfig
    from ppdist.distributed import comm
    from ppdist.models.zoo import zoo as published
    from ppdist.verify.zoo import FAIL, NOT_RUN, PASS, line, listing, verify_zoo

    if not arguments.weights:
        print(listing())
        if arguments.json:
            write_json(arguments.json, [asdict(entry) for entry in published().values()], indent=1)
        return 0
    device = [item for item in arguments.override if item.startswith("device=")]
    comm.init(device[-1].partition("=")[2] if device else "auto", DistributedConfig())
    rows = []
    for row in verify_zoo(arguments.weights, arguments.override):
        rows.append(row)
        if comm.is_main():
            print(line(row), flush=True)
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
    "parity": parity,
    "coco": coco,
    "export": export,
    "zoo": zoo,
}
