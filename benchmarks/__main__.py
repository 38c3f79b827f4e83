"""Measures what is for whoever changes the code; JSON on stdout.

python -m benchmarks WHAT [-c cfg.yml] [-o k=v ...]

  startup  seconds and CPU seconds from the command to the end of the first training step, and their
           parts, alone and through fleetrun on 2 (--processes) processes, in turns; what importing
           takes by package
  runtimes the same for four models of 640 pixels, with 1 and 2 threads, and the mAP that each
           runtime reaches, on a set that they learn by heart before (--steps); no -c
  models   parameters, operations, CPU time and memory of all recipes, or of those that are named
           (--names); written to ppdist/models/figures.yml, from where pages take them; no -c
  coco     seconds of COCO's numbers on a made-up set (--images), beside pycocotools; no -c
  checkpoint
           how long a checkpoint blocks training, what writing it beside the steps takes, and what
           waiting for the write would
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import measure_saving
from benchmarks.coco import measure_coco
from benchmarks.inference import measure_runtimes
from benchmarks.models import measure_models
from benchmarks.startup import measure_startup
from ppdist.cli import add_config, script_words
from ppdist.common import process
from ppdist.common.arguments import at_least
from ppdist.common.files import make_parent, write_json
from ppdist.config.experiment import load_config
from ppdist.distributed import comm
from ppdist.lab.benchmark.step import describe_machine


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", None, __doc__, formatter_class=form)
    parser.add_argument("what", choices=sorted(MEASURES), help="what to measure")
    add_config(parser, required=False)
    parser.add_argument("--steps", type=at_least(1), default=200, help="runtimes: learned (200)")
    parser.add_argument(
        "--repeats",
        type=at_least(1),
        help="coco (1), startup (3), checkpoint (5), runtimes (10), models (30)",
    )
    parser.add_argument(
        "--processes", type=at_least(1), nargs="+", default=[1, 2], help="startup: on so many each"
    )
    parser.add_argument(
        "--images", type=at_least(1), default=5000, help="coco: of the made-up set (5000)"
    )
    parser.add_argument("--names", nargs="+", default=[], help="models: of these (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON here as well")
    arguments = parser.parse_args()
    if not arguments.config and arguments.what in ("startup", "checkpoint"):
        parser.error("the following arguments are required: -c/--config")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.json:
        make_parent(arguments.json)
    with tempfile.TemporaryDirectory() as scratch:
        report = {"what": arguments.what, "config": arguments.config}
        report |= {"overrides": arguments.override, "vs": []}
        report["result"] = MEASURES[arguments.what](arguments, Path(scratch))
        report["machine"] = describe_machine()
    if comm.is_main():  # checkpoint may run on several ranks, under fleetrun
        print(json.dumps(report, indent=1))
        if arguments.json:
            write_json(arguments.json, report, indent=1)
    return 0


def checkpoint(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    config = load_config(arguments.config, arguments.override)
    comm.init(config.device, config.distributed)
    return measure_saving(config, saves=arguments.repeats or 5, scratch=scratch / "run")


def startup(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    options = ["-c", arguments.config]
    options += ["-o", *arguments.override] if arguments.override else []
    return measure_startup(
        [sys.executable, *script_words("launch")],
        options,
        counts=arguments.processes,
        repeats=arguments.repeats or 3,
        out=scratch / "startup",
    )


def coco(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    repeats = arguments.repeats or 1
    return measure_coco(images=arguments.images, detections=100, classes=80, repeats=repeats)


def runtimes(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    return measure_runtimes(scratch, steps=arguments.steps, rounds=arguments.repeats or 10)


def models(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    return measure_models(arguments.names, scratch, rounds=arguments.repeats or 30)


MEASURES = {
    "checkpoint": checkpoint,
    "startup": startup,
    "coco": coco,
    "models": models,
    "runtimes": runtimes,
}

if __name__ == "__main__":
    process.run(main)
