"""Measures training, loading and inference speed; JSON on stdout.

ppdist benchmark WHAT -c cfg.yml [-o k=v ...]

  train    img/s, the step split into its parts and, under fleetrun, what a rank sends over TCP in
           a step (nothing between ranks of one CPU host: they share memory)
  loader   img/s of the training loader, over all workers and per worker
  infer    milliseconds of one call, interleaved on validation images, drawn ones where none are at
           hand: eager, and exported in Paddle Inference with and without oneDNN, in ONNX
           Runtime and in OpenVINO (`--backend` names some of them); `--model DIR` measures that
           export instead of one made here, beside eager with -c and -w
  scaling  `train` through fleetrun on 1 and 2 (--processes) processes in turn: img/s, speed-up,
           efficiency

`--synthetic` draws a small data set instead of reading `data.root` (model.num_classes becomes 3).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdist.cli import add_config, make_parser, script_words
from ppdist.common import errors, process
from ppdist.common.arguments import at_least, time_in

if TYPE_CHECKING:
    from ppdist.config.experiment import ExperimentConfig


def parse() -> argparse.Namespace:
    parser = make_parser("benchmark", __doc__)
    parser.add_argument("what", choices=sorted(MEASURES), help="what to measure")
    add_config(parser, required=False)
    parser.add_argument("-w", "--weights", help="infer: weights; none: fresh ones")
    parser.add_argument("--model", type=Path, metavar="DIR", help="infer: an exported model")
    parser.add_argument("--backend", nargs="+", default=[], metavar="NAME",
                        choices=("paddle", "onnx", "openvino"),
                        help="infer: what runs the export (default: all)")  # fmt: skip
    parser.add_argument("--synthetic", type=at_least(1), nargs="?", const=64, metavar="IMAGES",
                        help="measure on data it draws itself (default: 64 images)")  # fmt: skip
    parser.add_argument(
        "--steps", type=at_least(1), default=10, help="train, scaling: measured (10)"
    )
    parser.add_argument(
        "--warmup", type=at_least(0), default=2, help="steps before that, not counted"
    )
    parser.add_argument(
        "--seconds", type=time_in("seconds"), default=10, help="loader: how long (10)"
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=5, help="infer, scaling: how often (5)"
    )
    parser.add_argument("--batch", type=at_least(1), default=1, help="infer: images in one call")
    parser.add_argument(
        "--threads", type=at_least(1), default=1, help="infer: CPU threads of a prediction"
    )
    parser.add_argument(
        "--processes", type=at_least(1), nargs="+", default=[1, 2], help="scaling: numbers (1 2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON here as well")
    if sys.argv[1:2] == ["eval"]:
        raise errors.ConfigError(
            "evaluations are measured by training and `ppdist eval`",
            code="option_invalid",
            where="ppdist benchmark eval",
            fix="metrics.jsonl has `eval_seconds` of each; write `time ppdist eval -w WEIGHTS`",
        )
    arguments = parser.parse_args()
    if not arguments.config and not (arguments.what == "infer" and arguments.model):
        parser.error("the following arguments are required: -c/--config")
    if not arguments.config and (arguments.weights or arguments.override or arguments.synthetic):
        parser.error("-w, -o and --synthetic go with -c/--config")
    processes = arguments.processes
    if len(set(processes)) < len(processes):
        parser.error(f"--processes {' '.join(map(str, processes))}: give each number once")
    return arguments


def main() -> int:
    arguments = parse()
    from ppdist.common.files import make_parent, write_json

    if arguments.json:
        make_parent(arguments.json)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.synthetic and arguments.config:
            arguments.override = [
                *synthetic_data(arguments, Path(scratch) / "data"),
                *arguments.override,
            ]
        report = {"what": arguments.what, "config": arguments.config}
        report["overrides"] = arguments.override
        report["result"] = MEASURES[arguments.what](arguments, Path(scratch))
        from ppdist.distributed import comm
        from ppdist.lab.benchmark.step import describe_machine

        report["machine"] = describe_machine()
        if comm.is_main():
            print(json.dumps(report, indent=1))
            if arguments.json:
                write_json(arguments.json, report, indent=1)
    return 0


def synthetic_data(arguments: argparse.Namespace, root: Path) -> list[str]:
    """Generates a data set, the same on every rank; returns the overrides that select it."""
    from ppdist.data.datasets.synthetic import make_shapes

    overrides = [f"data.root={root}", "model.num_classes=3"]
    for split in ("train", "val"):
        overrides += [
            f"data.{split}.images=images",
            f"data.{split}.annotations=annotations/instances_{split}.json",
        ]
    config = load(arguments, *overrides)
    if config.model.task == "classify":
        raise errors.ConfigError(
            f"--synthetic draws objects for detectors, but model.name: {config.model.name} is a "
            "classifier",
            code="needs_detector",
            fix="leave it out and set data.root",
        )
    images = arguments.synthetic
    make_shapes(root, train=images, val=max(1, images // 2), size=256, seed=0)
    return ["data.format=coco", *overrides]


def load(arguments: argparse.Namespace, *overrides: str) -> "ExperimentConfig":
    from ppdist.engine.recipe import load_config_with_data

    return load_config_with_data(arguments.config, [*arguments.override, *overrides])


def join_ranks(arguments: argparse.Namespace) -> "ExperimentConfig":
    from ppdist.distributed import comm

    config = load(arguments)
    comm.init(config.device, config.distributed)
    return config


def train(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from ppdist.lab.benchmark.step import measure_training

    return measure_training(
        join_ranks(arguments), steps=arguments.steps, warmup=arguments.warmup, scratch=scratch
    )


def loader(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from ppdist.data.datasets.build import read_split
    from ppdist.lab.benchmark.loader import measure_loading

    config = join_ranks(arguments)
    dataset = read_split(config.data, "train", config.model.num_classes)
    return measure_loading(
        dataset,
        config.data,
        image_size=config.model.image_size,
        batch_size=config.train.images_per_card,
        seconds=arguments.seconds,
    )


def inference(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from ppdist.export.export import export_model
    from ppdist.export.spec import describe, read_spec, validation_set
    from ppdist.lab.benchmark.latency import (
        exportable_formats,
        make_predictors,
        measure_predictors,
        sample_images,
    )
    from ppdist.lab.benchmark.step import require_detector

    model: Any = None
    dataset = None
    directory = arguments.model
    if arguments.config:
        config = join_ranks(arguments)
        require_detector(config, "inference")
        dataset = validation_set(config, process.warn)
        if directory is None or arguments.weights:
            model = build(config, arguments.weights)
    if directory is None:
        directory = scratch / "exported"
        export_model(model, directory, describe(config, dataset), exportable_formats())
    spec = read_spec(directory)
    return measure_predictors(
        make_predictors(model, directory, spec, arguments.threads, arguments.backend),
        spec,
        sample_images(dataset),
        batch=arguments.batch,
        threads=arguments.threads,
        rounds=arguments.repeats,
    )


def build(config: "ExperimentConfig", weights: str | None) -> Any:
    from ppdist.engine.build import build_model
    from ppdist.models.weights import load_weights

    model = build_model(config)
    if weights:
        load_weights(model, Path(weights))
    return model


def scaling(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from ppdist.lab.benchmark.scaling import measure_scaling

    launcher = [sys.executable, *script_words("launch")]
    script = [*script_words("benchmark"), "train", "-c", arguments.config]
    script += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    if arguments.override:
        script += ["-o", *arguments.override]
    return measure_scaling(launcher, script, counts=arguments.processes, rounds=arguments.repeats)


MEASURES = {"train": train, "loader": loader, "infer": inference, "scaling": scaling}
