"""Exports weights for deployment: tools/export.py -c cfg.yml -w WEIGHTS --out DIR [--format ...]

DIR gets model.json and model.pdiparams (Paddle Inference), model.onnx where asked, and infer.yml,
which says how to prepare an image and read the outputs (of a classifier: probabilities).  Nothing
is kept that does not compute what the model computes.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist import errors

if TYPE_CHECKING:
    import numpy as np

    from ppdist.data.sample import DetectionSet
    from ppdist.infer_spec import InferenceSpec

SAMPLES = 4  # validation images that take part in the check, when they are there


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--config", required=True, help="YAML file of the experiment")
    parser.add_argument("-w", "--weights", required=True, help="weight file or checkpoint")
    parser.add_argument("-o", "--override", nargs="+", action="extend", default=[],
                        metavar="KEY=VALUE", help="overrides of config keys")  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write")
    parser.add_argument("--format", default="paddle", metavar="LIST",
                        help="paddle, onnx, or paddle,onnx (default: paddle)")  # fmt: skip
    parser.add_argument("--without-nms", action="store_true",
                        help="end with scores and boxes (ONNX always does)")  # fmt: skip
    parser.add_argument("--fixed-batch", action="store_true", help="the graph takes one image only")
    parser.add_argument("--fixed-size", action="store_true",
                        help="the graph takes model.image_size only")  # fmt: skip
    parser.add_argument("--class-names", type=Path, metavar="FILE",
                        help="one name a line, where the data set is not at hand")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist import dist
    from ppdist.config import load_config
    from ppdist.data.formats.names import read_names
    from ppdist.engine.experiment import build_model
    from ppdist.export import FORMATS, export_classifier, export_detector
    from ppdist.infer_spec import describe, validation_set
    from ppdist.inference import load_all_weights

    wanted = [word.strip() for word in arguments.format.split(",")]
    unknown = [word for word in wanted if word not in FORMATS]
    if unknown:
        raise errors.ConfigError(f"--format: {unknown[0]!r}: expected one of {', '.join(FORMATS)}")
    config = load_config(arguments.config, arguments.override)
    if arguments.without_nms and config.data.classifies:
        raise errors.ConfigError(
            "--without-nms: a classifier has no boxes to suppress; leave it out"
        )
    dist.init("cpu", config.distributed)  # files are the same, and checked without a card's TF32
    model = build_model(config)
    load_all_weights(model, Path(arguments.weights))
    dataset = validation_set(config, warn)
    spec = describe(config, dataset)
    if arguments.class_names:
        spec = spec.model_copy(update={"class_names": read_names(arguments.class_names)})
    free = {"dynamic_batch": not arguments.fixed_batch, "dynamic_size": not arguments.fixed_size}
    spec = spec.model_copy(update={"input": spec.input.model_copy(update=free)})
    formats = [name for name in FORMATS if name in wanted]
    samples = read_samples(dataset, spec) if dataset else []
    if spec.task == "classify":
        report = export_classifier(model, arguments.out, spec, formats, samples)
    else:
        report = export_detector(
            model, arguments.out, spec, formats, not arguments.without_nms, samples
        )
    for name, agreement in report.agreement.items():
        boxes = f", boxes within {agreement.box:.1e} px" if agreement.box is not None else ""
        what = "probabilities" if spec.task == "classify" else "scores"
        print(f"{name}: equals eager: {what} within {agreement.score:.1e}{boxes}")
    print(f"{report.directory}: {report.megabytes:.1f} MB, {report.seconds:.0f} s; read infer.yml")
    return 0


def read_samples(dataset: "DetectionSet", spec: "InferenceSpec") -> "list[np.ndarray]":
    """The first validation images that can be read, as the model gets them."""
    from ppdist.classification import prepare_centre
    from ppdist.data.images import read_image
    from ppdist.inference import prepare

    size, mode, samples = spec.input.size, spec.resize.mode, []
    for record in dataset.records[:SAMPLES]:
        known = (record.height, record.width) if record.height else None
        try:
            image_HW3 = read_image(record.path, known)
        except errors.DataError as error:
            warn(f"{error}; left out of the check")
        else:
            samples.append(
                prepare_centre(image_HW3, size)
                if mode == "centre_crop"
                else prepare(image_HW3, size, mode)
            )
    return samples


def warn(text: str) -> None:
    print(f"ppdist: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    errors.run(main)
