"""Exports weights for deployment.

ppdist export -w RUN [--format paddle,onnx] [--out DIR]
ppdist export [-c cfg.yml] -w WEIGHTS [--out DIR]

Without -c the configuration is the one in the checkpoint or its model card.
DIR is RUN/export, of other weights output/NAME_export.  It gets model.json and model.pdiparams
(Paddle Inference), model.onnx where asked, and infer.yml, which says how to prepare an image and
read the outputs (of a classifier: probabilities).  Nothing is kept that does not compute what the
model computes.  Other formats are made of model.onnx: docs/deploy.md.
"""

import argparse
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist.cli import (
    OR_OF_WEIGHTS,
    add_config,
    default_folder,
    load_config_of,
    make_parser,
    print_commands,
)
from ppdist.common import errors, process
from ppdist.common.arguments import at_least, share
from ppdist.config.export import CALIBRATION, INT8_LOSS, ExportOptions

if TYPE_CHECKING:
    from ppdist.export.export import ExportReport, Format


def parse() -> argparse.Namespace:
    parser = make_parser("export", __doc__)
    add_config(parser, required=False, config=OR_OF_WEIGHTS)
    parser.add_argument("-w", "--weights", required=True, help="weight file or checkpoint")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="output folder (RUN/export, or output/NAME_export)")  # fmt: skip
    parser.add_argument("--format", metavar="LIST", default="paddle",
                        help="comma-separated: paddle, onnx, openvino (default: paddle); onnx is "
                        "also tested in OpenVINO if that is installed; openvino writes the same "
                        "file and fails if OpenVINO's results differ; for other formats see "
                        "docs/deploy.md")  # fmt: skip
    parser.add_argument("--without-nms", action="store_true",
                        help="end with scores and boxes of all predictions")  # fmt: skip
    parser.add_argument("--fixed-batch", action="store_true", help="the graph takes one image only")
    parser.add_argument("--fixed-size", action="store_true",
                        help="the graph takes model.image_size only")  # fmt: skip
    parser.add_argument("--normalised-input", action="store_true",
                        help="the graph takes (x / 255 - mean) / std instead of pixels x; "
                        "infer.yml has the numbers")  # fmt: skip
    parser.add_argument("--int8", action="store_true",
                        help="the ONNX model in 8-bit integers, too; needs the training "
                        "images")  # fmt: skip
    parser.add_argument("--calibration", type=at_least(1), metavar="N",
                        help="training images that tell --int8 what numbers occur "
                        f"({CALIBRATION})")  # fmt: skip
    parser.add_argument("--int8-loss", type=share, metavar="X",
                        help="mAP that --int8 may lose; an export that loses more is not kept "
                        f"({INT8_LOSS:g})")  # fmt: skip
    parser.add_argument("--class-names", type=Path, metavar="FILE",
                        help="one name a line, where the data set is not at hand")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.data.datasets.annotations import read_class_names
    from ppdist.distributed import comm
    from ppdist.engine.build import build_model
    from ppdist.export.run import export_weights

    formats = formats_of(arguments)
    config = load_config_of(arguments)
    if config.model.task == "classify" and arguments.without_nms:
        raise errors.ConfigError(
            "--without-nms only applies to detectors",
            code="options_conflict",
            fix="leave it out",
        )
    comm.init("cpu", config.distributed)  # same files, and checked without TF32 of a GPU
    signal.signal(signal.SIGTERM, stop)  # Ctrl-C does the same
    options = ExportOptions(
        formats=tuple(formats),
        nms=not arguments.without_nms,
        fixed_batch=arguments.fixed_batch,
        fixed_size=arguments.fixed_size,
        normalised_input=arguments.normalised_input,
        int8=arguments.int8,
        calibration=arguments.calibration or CALIBRATION,
        int8_loss=INT8_LOSS if arguments.int8_loss is None else arguments.int8_loss,
    )
    names = read_class_names(arguments.class_names) if arguments.class_names else ()
    out = arguments.out or default_folder(Path(arguments.weights), "export")
    report = export_weights(
        config, build_model(config), Path(arguments.weights), out, options, process.warn, names
    )
    tell(report)
    if "openvino" in formats:
        print("OpenVINO reads model.onnx as it is; `ovc model.onnx` makes an .xml of it")
    show_graph(Path(arguments.weights), report)
    return 0


# Formats of other tools, under all their names: (options of our export, tool that converts
# model.onnx); see docs/deploy.md.
_WITH_NMS = "--format onnx"
_PLAIN = "--format onnx --without-nms --fixed-batch --fixed-size"
CONVERSIONS: dict[tuple[str, ...], tuple[str, str]] = {
    ("engine", "tensorrt", "trt"): (
        _PLAIN, "trtexec --onnx=model.onnx --saveEngine=model.engine --fp16",
    ),
    ("tflite", "litert", "saved_model", "pb", "edgetpu", "tfjs"): (_PLAIN, "onnx2tf -i model.onnx"),
    ("coreml", "mlmodel", "mlpackage"): (
        _PLAIN, "onnx2torch, torch.jit.trace and coremltools.convert",
    ),
    ("torchscript", "torch"): (_PLAIN, "onnx2torch and torch.jit.trace"),
    ("ncnn", "pnnx"): (_PLAIN, "pnnx model.onnx"),
    ("rknn",): (_PLAIN, "rknn-toolkit2: load_onnx, build, export_rknn"),
    ("mnn",): (_PLAIN, "MNNConvert -f ONNX --modelFile model.onnx --MNNModel model.mnn"),
    ("xml", "ir"): (_WITH_NMS, "ovc model.onnx"),
}  # fmt: skip


def formats_of(arguments: argparse.Namespace) -> "list[Format]":
    from ppdist.export.export import FORMATS

    names_given = [word.strip() for word in arguments.format.split(",")]
    unknown = [word for word in names_given if word not in FORMATS]
    conversion = next(
        (conversion for names, conversion in CONVERSIONS.items() if {*unknown} & {*names}), None
    )
    if conversion:
        raise errors.ConfigError(
            f"ppdist does not write {unknown[0]!r}; convert it from model.onnx",
            code="format_of_others",
            where="--format",
            fix=f"`ppdist export -w {arguments.weights} {conversion[0]}`, then {conversion[1]} "
            "(docs/deploy.md, Which runtime reads which file)",
        )
    if unknown:
        raise errors.ConfigError(
            f"{unknown[0]!r}: expected one of {', '.join(FORMATS)}",
            code="option_invalid",
            where="--format",
        )
    if arguments.int8 and not {"onnx", "openvino"} & {*names_given}:
        raise errors.ConfigError(
            "--int8 needs the ONNX model", code="option_missing", fix="add --format onnx"
        )
    for name in ("calibration", "int8_loss"):
        if getattr(arguments, name) is not None and not arguments.int8:
            raise errors.ConfigError(
                f"--{name.replace('_', '-')} needs --int8",
                code="option_missing",
                fix="add --int8, or leave both out",
            )
    return [name for name in FORMATS if name in names_given]


def tell(report: "ExportReport") -> None:
    from ppdist.common.records import next_commands

    spec = report.spec
    sections = {
        "paddle: equals eager": spec.paddle,
        "onnx: equals eager": spec.onnx,
        "openvino (the ONNX file): equals eager": spec.openvino,
        "onnx int8, beside eager": spec.onnx_int8,
        "openvino (the ONNX file) int8, beside eager": spec.openvino_int8,
    }
    for name, section in sections.items():
        if section is None:
            continue
        score_kind = "probabilities" if spec.task == "classify" else "scores"
        line = f"{name}: {score_kind} within {section.max_score_error:.1e}"
        if section.max_box_error is not None:
            line += f", boxes within {section.max_box_error:.1e} px"
        if section.sample is not None:
            sample = section.sample
            line += (
                f"; mAP {sample.mAP:.4f} on {sample.images} images, eager {sample.mAP_eager:.4f}"
            )
        print(line)
    if spec.earlier:
        print(f"{', '.join(spec.earlier)}: left as an earlier export wrote it")
    print(f"{report.directory}: {report.megabytes:.1f} MB, {report.seconds:.0f} s")
    model = f"--model {shlex.quote(str(report.directory))}"
    (predict, *_) = next_commands(model, report.image)
    print_commands([predict, ("speed", f"ppdist benchmark infer {model}")])


def show_graph(weights: Path, report: "ExportReport") -> None:
    """Writes the exported graph to the VisualDL folder of the run."""
    from ppdist.common.records import visualdl_command
    from ppdist.viz.graph import write_graph

    weights = weights.resolve()
    folders = [folder / "vdl" for folder in (weights, *weights.parents[:2])]
    curves = next((folder for folder in folders if folder.is_dir()), None)
    if report.spec.paddle is None or curves is None:
        return
    try:
        write_graph(report.directory / "model.json", curves)
    except (OSError, KeyError) as error:  # the export is complete without it
        process.warn(f"no graph for VisualDL in {curves}: {type(error).__name__}: {error}")
    else:
        print(f"its graph: {visualdl_command(curves)}, page GRAPHS")


def stop(number: int, frame: object) -> None:
    """Handles a signal: ends the export as an error would, so that it cleans up."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
