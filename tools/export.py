"""Exports weights for deployment: tools/export.py -c cfg.yml -w WEIGHTS --out DIR [--format ...]

DIR gets model.json and model.pdiparams (Paddle Inference), model.onnx where asked, and infer.yml,
which says how to prepare an image and read the outputs.  Nothing is kept that does not compute
what the model computes.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist import errors

if TYPE_CHECKING:
    import numpy as np

    from ppdist.data.sample import DetectionSet

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
    from ppdist.engine.experiment import build_model
    from ppdist.export import FORMATS, export_detector
    from ppdist.inference import describe, load_all_weights, validation_set

    wanted = [word.strip() for word in arguments.format.split(",")]
    unknown = [word for word in wanted if word not in FORMATS]
    if unknown:
        raise errors.ConfigError(f"--format: {unknown[0]!r}: expected one of {', '.join(FORMATS)}")
    config = load_config(arguments.config, arguments.override)
    dist.init("cpu", config.distributed)  # files are the same, and checked without a card's TF32
    model = build_model(config)
    load_all_weights(model, Path(arguments.weights))
    dataset = validation_set(config, warn)
    spec = describe(config, dataset)
    if arguments.class_names:
        spec = spec.model_copy(update={"class_names": read_names(arguments.class_names)})
    free = {"dynamic_batch": not arguments.fixed_batch, "dynamic_size": not arguments.fixed_size}
    spec = spec.model_copy(update={"input": spec.input.model_copy(update=free)})
    report = export_detector(
        model,
        arguments.out,
        spec,
        [name for name in FORMATS if name in wanted],
        nms_in_graph=not arguments.without_nms,
        samples=read_samples(dataset, config.model.image_size) if dataset else [],
    )
    for name, agreement in report.agreement.items():
        print(
            f"{name}: equals eager: scores within {agreement.score:.1e}, "
            f"boxes within {agreement.box:.1e} px"
        )
    print(f"{report.directory}: {report.megabytes:.1f} MB, {report.seconds:.0f} s; read infer.yml")
    return 0


def read_names(file: Path) -> tuple[str, ...]:
    if not file.is_file():
        raise errors.DataError(f"--class-names {file}: no such file")
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def read_samples(dataset: "DetectionSet", size: tuple[int, int]) -> "list[np.ndarray]":
    """The first validation images that can be read, as the model gets them."""
    from ppdist.data.transforms import read_image
    from ppdist.inference import prepare

    samples = []
    for record in dataset.records[:SAMPLES]:
        try:
            image_HW3 = read_image(record.path, (record.height, record.width))
        except errors.DataError as error:
            warn(f"{error}; left out of the check")
        else:
            samples.append(prepare(image_HW3, size))
    return samples


def warn(text: str) -> None:
    print(f"ppdist: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    errors.run(main)
