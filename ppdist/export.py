"""From a trained model to files other programs run, each checked against eager before it is kept.

    model -> deployment copy (plain layers, re-parameterised) -> static graph -> Paddle Inference
                                                              \\-> ONNX
    every file is loaded again and compared with the model; only then the folder gets its name

The graph takes raw RGB pixels 0..255 and contains normalisation, decoding and, of a detector where
asked, the non-maximum suppression.  `infer.yml` beside it (ppdist/infer_spec.py) says the rest.
"""

import copy
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import paddle
from paddle import Tensor, nn

import ppdist
from ppdist.errors import ExportError
from ppdist.export_check import (
    Agreement,
    check_images,
    compare_kept,
    compare_raw,
    load_graphs,
    run_onnx,
)
from ppdist.infer_spec import (
    SPEC_FILE,
    InferenceSpec,
    InputSection,
    ModelFileSection,
    OutputSection,
    write_spec,
)
from ppdist.models.cpu_conv import plain_convolutions
from ppdist.models.detector import Detector, ImageModel
from ppdist.postprocess import NMSConfig, multiclass_nms

Format = Literal["paddle", "onnx"]
Model = TypeVar("Model", bound=ImageModel)
FORMATS: tuple[Format, ...] = ("paddle", "onnx")
ONNX_OPSET = 16

_RAW_OUTPUTS = (
    ("scores", "[B, N, C]", "probability of each class, 0..1"),
    ("boxes", "[B, N, 4]", "x1, y1, x2, y2 in input pixels, not clipped"),
)
_CLASS_OUTPUTS = (("probabilities", "[B, C]", "of each class, 0..1; they add up to 1"),)
_KEPT_OUTPUTS = (
    ("rows", "[R, 6]", "class, score, x1, y1, x2, y2 in input pixels; image after image"),
    ("count", "[B]", "how many of the rows belong to each image"),
)


class RawModel(nn.Layer):
    """images_B3HW (float32 RGB 0..255) -> what the model decodes: scores_BNC and boxes_BN4 in
    input pixels of a detector, probabilities_BC of a classifier."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.model.predict(images)


class KeptModel(nn.Layer):
    """images_B3HW (float32 RGB 0..255) -> rows_R6 (class, score, xyxy input pixels), count_B."""

    def __init__(self, detector: Detector, nms: NMSConfig) -> None:
        super().__init__()
        self.detector = detector
        self.nms = nms

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = self.detector.predict(images)
        return multiclass_nms(scores, boxes, self.nms)


@dataclass(frozen=True)
class ExportReport:
    """What an export left, and how well it agreed with eager."""

    directory: Path
    spec: InferenceSpec
    agreement: dict[Format, Agreement]
    megabytes: float
    seconds: float


def export_detector(
    model: Detector,
    directory: Path,
    spec: InferenceSpec,
    formats: Sequence[Format] = ("paddle",),
    nms_in_graph: bool = True,
    samples: Sequence[np.ndarray] = (),
) -> ExportReport:
    """Writes `directory` with the model in each format, and infer.yml.

    Everything is written beside `directory`, loaded again and compared with `model` in eager mode
    on the CPU (generated pictures and `samples`; with and without oneDNN); only when all agree
    (ppdist/export_check.py has the tolerances) the folder gets its name.  An earlier export there
    is replaced, any other folder refused.  `model` itself is not changed.  One process calls this.

    Args:
        spec: input size, thresholds and class names; the `paddle` and `onnx` parts are filled in
            here.  `input.dynamic_batch` / `dynamic_size` decide what stays free in the graph.
        nms_in_graph: of the Paddle model; ONNX is always without (its converter cannot).
        samples: pictures_3HW, float32 RGB 0..255, of the size in `spec`.

    Raises: ExportError: the model cannot be exported, or a file does not compute what it does.
    """
    return _export(model, directory, spec, formats, samples, nms_in_graph)


def export_classifier(
    model: ImageModel,
    directory: Path,
    spec: InferenceSpec,
    formats: Sequence[Format] = ("paddle",),
    samples: Sequence[np.ndarray] = (),
) -> ExportReport:
    """As `export_detector`, for a model that gives probabilities_BC.

    Raises: ExportError: as `export_detector`.
    """
    return _export(model, directory, spec, formats, samples, False)


def _export(
    model: ImageModel,
    directory: Path,
    spec: InferenceSpec,
    formats: Sequence[Format],
    samples: Sequence[np.ndarray],
    nms_in_graph: bool,
) -> ExportReport:
    start = time.monotonic()
    multiple = spec.input.model_copy(update={"size_multiple": model.size_multiple})
    spec = spec.model_copy(update={"input": multiple})
    _require_usable(model, spec)
    if "onnx" in formats:
        _require_onnx()
    with _on_cpu(), _draft_of(directory) as draft:
        fused = deployment_copy(model)
        fused.fuse()
        images = check_images(spec.input, samples)
        expected = _eager(deployment_copy(model), images)
        scratch = draft / ".raw"
        save_graph(RawModel(fused), scratch, spec.input)
        agreement: dict[Format, Agreement] = {}
        if "paddle" in formats:
            raw = load_graphs(scratch)
            agreement["paddle"] = compare_raw(raw, images, expected)
            if nms_in_graph and isinstance(fused, Detector) and spec.nms is not None:
                save_graph(KeptModel(fused, spec.nms), draft, spec.input)
                names = compare_kept(load_graphs(draft), raw, images, spec.nms)
                agreement["paddle"] = replace(agreement["paddle"], output_names=names)
            else:
                for file in scratch.iterdir():
                    shutil.copy2(file, draft / file.name)
        if "onnx" in formats:
            convert_to_onnx(scratch, draft / "model.onnx")
            agreement["onnx"] = run_onnx(draft / "model.onnx", images, expected)
        shutil.rmtree(scratch)
        spec = _complete(spec, agreement, nms_in_graph)
        write_spec(draft, spec)
        size = sum(file.stat().st_size for file in draft.iterdir()) / 1e6
    return ExportReport(directory, spec, agreement, size, time.monotonic() - start)


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
        raise ExportError(f"Paddle cannot make a static graph of this model: {error}") from error


def convert_to_onnx(directory: Path, file: Path) -> None:
    """Converts a graph that `save_graph` left.  Raises: ExportError: the converter refused."""
    _require_onnx()
    import paddle2onnx

    try:
        paddle2onnx.export(
            str(directory / "model.json"),
            str(directory / "model.pdiparams"),
            str(file),
            opset_version=ONNX_OPSET,
            enable_onnx_checker=True,
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise ExportError(f"paddle2onnx cannot convert this model: {error}") from error
    if not file.is_file():
        raise ExportError("paddle2onnx gave no file; its own output above says why")


def _require_onnx() -> None:
    # paddle2onnx's dependency polygraphy would install packages of its own while it runs.
    os.environ.setdefault("POLYGRAPHY_AUTOINSTALL_DEPS", "0")
    missing = []
    for name in ("paddle2onnx", "onnxruntime"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ExportError(
            f"ONNX export needs {' and '.join(missing)} (one converts, the other checks what came "
            "out): pip install 'ppdist[onnx]', or leave onnx out of --format"
        )


def _require_usable(model: ImageModel, spec: InferenceSpec) -> None:
    height, width = spec.input.size
    step = spec.input.size_multiple
    if height % step or width % step:
        raise ExportError(
            f"image size {height}x{width}: height and width must be multiples of {step}; "
            "set model.image_size"
        )
    if len(spec.class_names) != model.num_classes:
        raise ExportError(
            f"{len(spec.class_names)} class names for a model of {model.num_classes} classes; "
            "give the names of the classes the model was trained on"
        )
    for key, value in model.state_dict().items():
        if value.dtype in (paddle.float16, paddle.bfloat16):
            raise ExportError(f"{key} is {value.dtype}: export the float32 weights")
        if not bool(paddle.isfinite(value).all()):
            raise ExportError(f"{key} holds values that are not finite; these weights are broken")


@paddle.no_grad()
def _eager(model: ImageModel, images: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    """What the model decodes of each batch."""
    outputs = [RawModel(model)(paddle.to_tensor(batch)) for batch in images]
    return [
        (found.numpy(),) if isinstance(found, Tensor) else tuple(part.numpy() for part in found)
        for found in outputs
    ]


def _complete(
    spec: InferenceSpec, agreement: dict[Format, Agreement], nms_in_graph: bool
) -> InferenceSpec:
    """The description with what was written filled in."""
    parts: dict[str, ModelFileSection] = {}
    raw_outputs = _CLASS_OUTPUTS if spec.task == "classify" else _RAW_OUTPUTS
    if "paddle" in agreement:
        outputs = _KEPT_OUTPUTS if nms_in_graph else raw_outputs
        files = ("model.json", "model.pdiparams")
        parts["paddle"] = _describe(files, outputs, nms_in_graph, agreement["paddle"])
    if "onnx" in agreement:
        parts["onnx"] = _describe(("model.onnx",), raw_outputs, False, agreement["onnx"])
    made_with = f"ppdist {ppdist.__version__}, paddle {paddle.__version__}"
    return spec.model_copy(update={**parts, "made_with": made_with})


def _describe(
    files: tuple[str, ...],
    outputs: tuple[tuple[str, str, str], ...],
    nms_in_graph: bool,
    agreement: Agreement,
) -> ModelFileSection:
    return ModelFileSection(
        files=files,
        nms_in_graph=nms_in_graph,
        outputs=tuple(
            OutputSection(name=name, shape=shape, meaning=f"{what}: {meaning}")
            for name, (what, shape, meaning) in zip(agreement.output_names, outputs)
        ),
        max_score_error=agreement.score,
        max_box_error=agreement.box,
    )


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Tensors made inside are on the CPU: the check must not depend on a card's rounding."""
    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


@contextmanager
def _draft_of(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` that takes its name when the block ends well, else vanishes."""
    directory = directory.resolve()
    if directory.exists() and not _replaceable(directory):
        raise ExportError(
            f"{directory}: is there already and is not an export (no {SPEC_FILE}); "
            "choose another --out or remove it"
        )
    draft = directory.with_name(f".{directory.name}.{os.getpid()}")
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    try:
        draft.mkdir(parents=True)
        yield draft
        if directory.exists():
            directory.rename(old)
        draft.rename(directory)
    except OSError as error:
        raise ExportError(f"{directory}: cannot write the export: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(old, ignore_errors=True)


def _replaceable(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    return (directory / SPEC_FILE).is_file() or not any(directory.iterdir())
