"""What an export writes: the model as a static graph of Paddle, and that graph as ONNX.

model -> deployed(model) -> RawModel or KeptModel -> save_graph -> convert_to_onnx
"""

import copy
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import paddle
from paddle import Tensor, nn

from ppdist.config.evaluate import NMSConfig
from ppdist.errors import ExportError
from ppdist.infer_spec import InputSection, NormalisationSection
from ppdist.models.cpu_conv import plain_convolutions
from ppdist.models.detector import Detector, ImageModel
from ppdist.postprocess import multiclass_nms

Model = TypeVar("Model", bound=ImageModel)
ONNX_OPSET = 16
CONVERSION_SECONDS = 900  # against hanging; the largest models take a tenth of it

# The converter ends the whole process on some models, and its last step (optimize_tool) installs
# packages while it runs; so it gets a process of its own, and that step is left out.
_CONVERT = """
import sys, paddle2onnx
program, weights, file, opset = sys.argv[1:]
paddle2onnx.export(program, weights, file, opset_version=int(opset), optimize_tool="none")
"""


# Nothing below a forward branches on a tensor, and sizes are asked for by `paddle.shape`: not
# translating its source (`not_to_static`) makes the same graph, sooner.


class RawModel(nn.Layer):
    """images_B3HW (float32 RGB 0..255) -> what the model decodes: scores_BNC and boxes_BN4 in
    input pixels of a detector, probabilities_BC of a classifier."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    @paddle.jit.not_to_static
    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.model.predict(images)


class KeptModel(nn.Layer):
    """images_B3HW (float32 RGB 0..255) -> rows_R6 (class, score, xyxy input pixels), count_B."""

    def __init__(self, detector: Detector, nms: NMSConfig) -> None:
        super().__init__()
        self.detector = detector
        self.nms = nms

    @paddle.jit.not_to_static
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = self.detector.predict(images)
        return multiclass_nms(scores, boxes, self.nms)


def deployment_copy(model: Model) -> Model:
    """A copy in eval mode whose layers are Paddle's plain ones; `model` is not touched.

    Undone are the convolutions of CPU training and every synchronised batch norm: in eval mode
    they compute the same as the plain layers but have no static graph (or no CPU kernel).
    """
    copied = copy.deepcopy(model)
    copied.to(device="cpu")
    plain_convolutions(copied)
    for layer in copied.sublayers():
        if isinstance(layer, nn.SyncBatchNorm | nn.BatchNorm2D):
            layer.__class__ = nn.BatchNorm2D  # same attributes; only forward differs
    copied.eval()
    return copied


def deployed(model: Model, normalised_input: bool) -> Model:
    """A deployment copy with as few operations as compute the same: branches merged, batch norms
    and the pixels' scale folded into convolutions; or without any normalisation of pixels."""
    copied = deployment_copy(model)
    copied.fuse()
    copied.fold_norms()
    if normalised_input:
        copied.set_pixel_statistics([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    else:
        copied.fold_pixel_scale()
    return copied


def normalisation_of(model: ImageModel) -> NormalisationSection:
    """The normalisation of a model's pixels, for `input.normalised` of infer.yml."""
    mean = [round(value / 255, 9) for value in model.pixel_mean]
    std = [round(value / 255, 9) for value in model.pixel_std]
    return NormalisationSection(mean=(mean[0], mean[1], mean[2]), std=(std[0], std[1], std[2]))


def save_graph(model: nn.Layer, directory: Path, description: InputSection) -> None:
    """Saves a layer of one image input as directory/model.{json,pdiparams}; it becomes static.

    Raises: ExportError: Paddle cannot trace or save it.
    """
    height, width = description.size
    shape = [
        None if description.dynamic_batch else 1,
        3,
        None if description.dynamic_size else height,
        None if description.dynamic_size else width,
    ]
    model.eval()
    images = paddle.static.InputSpec(shape, "float32", description.name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Tensor do not have 'place'")  # Paddle's full_like
            # backend: 3.3's default is CINN, which not every build has.
            static = paddle.jit.to_static(model, input_spec=[images], backend=None, full_graph=True)
            paddle.jit.save(static, str(directory / "model"))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise ExportError(
            f"Paddle cannot make a static graph of this model: {error}", code="no_static_graph"
        ) from error


def require_onnx(int8: bool) -> None:
    """Raises: ExportError: a package that makes or checks ONNX files is missing."""
    needed = ["paddle2onnx", "onnx", "onnxruntime"]
    needed += ["ml_dtypes"] if int8 else []  # for its quantisation; onnxruntime does not bring it
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"ONNX export needs {', '.join(missing)}: pip install 'ppdist[onnx]', or leave onnx "
            "out of --format",
            code="package_missing",
        )


def convert_to_onnx(directory: Path, file: Path, outputs: Sequence[str]) -> None:
    """Converts a graph that `save_graph` left.

    Args: outputs: names the file's outputs get.
    Raises: ExportError: the converter refused or crashed, or the disk is full.
    """
    program, weights = (str(directory / name) for name in ("model.json", "model.pdiparams"))
    need, free = 2 * os.path.getsize(weights), shutil.disk_usage(file.parent).free
    if free < need:
        raise ExportError(
            f"the disk of --out has {free / 1e6:.0f} MB left, but making the ONNX model "
            f"takes {need / 1e6:.0f} MB",
            code="disk_full",
            fix="make room or choose another --out",
        )
    command = [sys.executable, "-c", _CONVERT, program, weights, str(file), str(ONNX_OPSET)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=CONVERSION_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ExportError(
            f"paddle2onnx was not done after {CONVERSION_SECONDS} seconds and was ended",
            code="conversion_timeout",
        ) from None
    if done.returncode or not file.is_file():
        raise ExportError(
            f"paddle2onnx cannot convert this model: {_reason(done.stdout + done.stderr)} (it "
            f"ended with {done.returncode})",
            code="conversion_failed",
            fix="leave onnx out of --format",
        )
    _tidy(file, outputs)


def _reason(output: str) -> str:
    """The line of the converter's output that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for mark in ("Failed to convert", "[ERROR]", "Error:", "Error Message"):
        said = [line for line in lines if mark in line and "UnboundLocalError" not in line]
        if said:
            return said[-1]
    return lines[-1] if lines else "it said nothing"


def _tidy(file: Path, outputs: Sequence[str]) -> None:
    """Computes beforehand what does not depend on the image, merges what can be merged with
    standard operators, and names the outputs: of PP-YOLOE 1480 nodes become 417."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(file)
    try:
        onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no narrower base
        raise ExportError(
            f"ONNX Runtime cannot load the exported model: {error}", code="runtime_load_failed"
        ) from error
    model = onnx.load(str(file))
    standard = [opset for opset in model.opset_import if not opset.domain]
    del model.opset_import[:]  # it names domains of its own, which no node is of
    model.opset_import.extend(standard)
    renamed = {output.name: name for output, name in zip(model.graph.output, outputs, strict=True)}
    for node in model.graph.node:
        for values in (node.input, node.output):
            for place, value in enumerate(values):
                values[place] = renamed.get(value, value)
    for output in model.graph.output:
        output.name = renamed[output.name]
    onnx.checker.check_model(model)
    onnx.save(model, str(file))
