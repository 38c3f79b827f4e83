"""Finds objects in images and videos.

tools/infer.py [-c cfg.yml] -w WEIGHTS --source X --out DIR

Without -c the configuration is the one in the checkpoint or its model card.
With `--model DIR` instead of -w an exported model runs, in Paddle Inference or ONNX Runtime;
all give the same boxes.  DIR gets every picture with its boxes drawn, and detections.json: a COCO
data set of what was found (`annotations` is also a COCO result list).  A classifier draws its five
surest classes instead, and writes them to classes.json.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ppdist.cli import OR_OF_WEIGHTS, add_config
from ppdist.common import errors, process
from ppdist.common.arguments import described

if TYPE_CHECKING:
    from ppdist.export.predictor import Report

THRESHOLD = 0.5


def parse() -> argparse.Namespace:
    parser = described(__doc__)
    add_config(parser, required=False, config=OR_OF_WEIGHTS)
    parser.add_argument("-w", "--weights", help="weight file, checkpoint, or published name")
    parser.add_argument("--model", type=Path, metavar="DIR",
                        help="an exported model, instead of -c and -w")  # fmt: skip
    parser.add_argument("--backend", choices=["paddle", "onnx"],
                        help="what runs --model (default: paddle where DIR has it)")  # fmt: skip
    parser.add_argument("--int8", action="store_true", help="--model: its quantised ONNX file")
    parser.add_argument("--threads", type=int, help="CPU threads of --model (default: 1)")
    parser.add_argument("--source", required=True, type=Path, metavar="IMAGE|DIR|VIDEO",
                        help="input image, folder (searched recursively) or video")  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write")
    parser.add_argument("--threshold", type=float,
                        help="confidence threshold, 0..1 "
                        f"(default: {THRESHOLD})")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.common.files import make_folder
    from ppdist.export.predictor import (
        find_sources,
        picture_names,
        require_no_foreign_pictures,
        require_own_folder,
    )

    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        raise errors.ConfigError(
            "expected 0..1", code="option_invalid", where=f"--threshold {arguments.threshold:g}"
        )
    require_own_folder(arguments.out, arguments.source)
    sources = find_sources(arguments.source, leave_out=arguments.out)
    root = arguments.source if arguments.source.is_dir() else arguments.source.parent
    names = [str(file.relative_to(root)) for file in sources]
    pictures = picture_names(names)
    require_no_foreign_pictures(arguments.out, pictures)
    report = of_config(arguments) if arguments.model is None else of_export(arguments)
    make_folder(arguments.out)
    for file, name, picture in zip(sources, names, pictures):
        said = report.look_at(file, name, picture)
        if said:
            print(process.printable(f"{name}: {said}"))
    if report.unreadable:
        process.warn(f"{report.unreadable} of {len(sources)} files could not be read")
    if not report.images:
        raise errors.DataError(
            "no image or video there could be read",
            code="no_good_image",
            where=str(arguments.source),
        )
    written = report.write()
    print(f"{report.total()}; pictures and {written.name} in {arguments.out}")
    return 0


def of_config(arguments: argparse.Namespace) -> "Report":
    """What to do with the answers of the eager model."""
    if not arguments.weights:
        raise errors.ConfigError(
            "give -w WEIGHTS, or --model DIR (an export)", code="option_missing"
        )
    if arguments.backend or arguments.int8:
        raise errors.ConfigError(
            "--backend and --int8 are for --model, an exported model", code="options_conflict"
        )
    if arguments.threads is not None:
        raise errors.ConfigError(
            "--threads is for --model",
            code="options_conflict",
            fix="without it the environment variable OMP_NUM_THREADS counts",
        )
    from ppdist.config import load_config
    from ppdist.distributed import comm
    from ppdist.engine.build import build_model
    from ppdist.export.predictor import (
        Classes,
        EagerClassifier,
        EagerPredictor,
        Objects,
    )
    from ppdist.export.spec import describe, validation_set
    from ppdist.models.model_card import config_of_weights, read_card_or_warn
    from ppdist.models.weights import load_all_weights

    if arguments.config:
        config = load_config(arguments.config, arguments.override)
    else:
        config = config_of_weights(arguments.weights, arguments.override)
    threshold = threshold_of(arguments, config.model.task)
    comm.init(config.device, config.distributed)
    model = build_model(config)
    card = read_card_or_warn(arguments.weights, process.warn)
    load_all_weights(model, Path(arguments.weights))
    model.fuse()
    known = card is not None and len(card.class_names) == config.model.num_classes
    alone = known and not arguments.config  # of the data only the names would be needed
    dataset = None if alone else validation_set(config, process.warn, card)
    spec = describe(config, dataset, card)
    if spec.task == "classify":
        return Classes(arguments.out, spec, EagerClassifier(model), process.warn)
    return Objects(
        arguments.out, spec, EagerPredictor(model, config.suppression), threshold, process.warn
    )


def of_export(arguments: argparse.Namespace) -> "Report":
    """What to do with the answers of an exported model."""
    if arguments.config or arguments.weights or arguments.override:
        raise errors.ConfigError(
            "--model takes everything from its infer.yml",
            code="options_conflict",
            fix="leave out -c, -w and -o",
        )
    threads = 1 if arguments.threads is None else arguments.threads
    if threads < 1:
        raise errors.ConfigError(
            "expected 1 or more", code="option_invalid", where=f"--threads {threads}"
        )
    if arguments.int8 and arguments.backend == "paddle":
        raise errors.ConfigError(
            "--int8 is an ONNX file: leave out --backend paddle", code="options_conflict"
        )
    from ppdist.config.runtime import RuntimeOptions
    from ppdist.distributed import device
    from ppdist.export.predictor import Classes, ExportedClassifier, ExportedPredictor, Objects
    from ppdist.export.spec import read_spec

    directory, out = arguments.model, arguments.out
    spec = read_spec(directory)
    threshold = threshold_of(arguments, spec.task)
    only_onnx = arguments.int8 or spec.paddle is None
    backend: Literal["paddle", "onnx"] = arguments.backend or ("onnx" if only_onnx else "paddle")
    options = RuntimeOptions(
        backend=backend,
        device="gpu" if backend == "paddle" and "gpu" in device.accelerators() else "cpu",
        precision="int8" if arguments.int8 else "float32",
        threads=threads,
    )
    if spec.task == "classify":
        return Classes(out, spec, ExportedClassifier(directory, options), process.warn)
    return Objects(out, spec, ExportedPredictor(directory, options), threshold, process.warn)


def threshold_of(arguments: argparse.Namespace, task: str) -> float:
    if task == "classify" and arguments.threshold is not None:
        raise errors.ConfigError(
            "--threshold is for boxes, and a classifier has none",
            code="options_conflict",
            fix="leave it out",
        )
    return THRESHOLD if arguments.threshold is None else arguments.threshold
