"""Exports a trained model to Paddle Inference and ONNX, checked against eager.

    model -> fuse_for_deployment -> RawModel or ModelWithNMS -> save_graph -> Paddle Inference
                                                             -> convert_to_onnx -> ONNX
    every file is loaded again and compared with the model before it is moved into place

The graph takes raw RGB pixels 0..255, or normalised pixels if requested, and contains
normalisation, decoding and, optionally for detectors, the non-maximum suppression. `infer.yml`
beside it (ppdist/export/spec.py) contains the other settings. An export can be evaluated on images
of a data set, by the COCO mAP of the model and of its files on the same images.
"""

import copy
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import paddle
from paddle import Tensor, nn

import ppdist
from ppdist.common.child import python, run_command
from ppdist.common.drafts import remove_drafts
from ppdist.common.errors import DataError, ExportError
from ppdist.common.files import draft_of, replace_file, require_no_link
from ppdist.common.manifest import CARD_NOTE
from ppdist.common.opener import DISK, Opener
from ppdist.config.evaluate import NMSConfig
from ppdist.config.export import INT8_LOSS
from ppdist.config.runtime import RuntimeOptions
from ppdist.cpu.switch import use_plain_layers
from ppdist.data.image import read_image
from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.distributed import device
from ppdist.export.predictor import (
    EagerPredictor,
    ExportedPredictor,
    Predictor,
    detect,
    graph_input,
    prepare,
    prepare_centre,
)
from ppdist.export.spec import (
    SPEC_FILE,
    InferenceSpec,
    InputSection,
    ModelFileSection,
    OutputSection,
    SampleSection,
    make_card,
    read_spec,
    write_spec,
)
from ppdist.export.verify import (
    PLAIN,
    Agreement,
    cache_outputs,
    check_images,
    compare_raw,
    compare_rows,
    compare_suppressed,
    decided_batches,
    eager_outputs,
    load_graphs,
    load_onnx,
    load_openvino,
    measure_raw,
    merge_agreements,
)
from ppdist.losses.nms import multiclass_nms
from ppdist.metrics.coco import evaluate_boxes
from ppdist.models.base import Detector, ImageModel
from ppdist.runtime.predictor import digest

Model = TypeVar("Model", bound=ImageModel)
Format = Literal["paddle", "onnx", "openvino"]
FORMATS: tuple[Format, ...] = ("paddle", "onnx", "openvino")
_FILES: dict[Format, tuple[str, ...]] = {
    "paddle": ("model.json", "model.pdiparams"),
    "onnx": ("model.onnx",),
    "openvino": ("model.onnx",),
}
_INT8_FILES = ("model_int8.onnx",)
_GENERATED = 3  # the first images of a check, at most these, are generated
ONNX_OPSET = 16
SAMPLE_IMAGES = 100  # at most, for mAP before and after quantisation
_LOGGER = logging.getLogger("ppdist")
CONVERSION_SECONDS = 900  # ends a conversion that hangs; the largest models take a tenth of it

_RAW_OUTPUTS = (
    ("scores", "[B, N, C]", "probability of each class, 0..1"),
    ("boxes", "[B, N, 4]", "x1, y1, x2, y2 in input pixels, not clipped"),
)
_CLASS_OUTPUTS = (("probabilities", "[B, C]", "of each class, 0..1; they add up to 1"),)
_KEPT_OUTPUTS = (
    ("rows", "[R, 6]", "class, score, x1, y1, x2, y2 in input pixels; image after image"),
    ("count", "[B]", "how many of the rows belong to each image"),
)


@dataclass(frozen=True)
class ExportReport:
    """The result of an export, and how well it agreed with eager.

    image: path of an image of the validation set; "": none was available.
    """

    directory: Path
    spec: InferenceSpec
    agreement: dict[Format, Agreement]
    megabytes: float
    seconds: float
    image: str = ""


def export_model(
    model: ImageModel,
    directory: Path,
    spec: InferenceSpec,
    formats: Sequence[Format] = ("paddle",),
    nms_in_graph: bool = True,
    samples: Sequence[np.ndarray] = (),
    calibration: Sequence[np.ndarray] = (),
    validation: DetectionSet | None = None,
    int8_loss: float = INT8_LOSS,
) -> ExportReport:
    """Writes the model in each format, and infer.yml, to `directory`.

    Everything is written to a draft folder, loaded again and compared with `model` in eager mode on
    the CPU (on generated pictures and `samples`; Paddle's files with and without oneDNN). Only if
    all agree (ppdist/export/verify.py has the tolerances) is the draft moved into place. In the
    folder of an earlier export, files of the same names are replaced and all others stay; any other
    existing folder is refused. `model` itself is not changed. Only one process may call this.

    Args:
        model: a detector, or a classifier, which outputs probabilities_BC.
        spec: input size, thresholds and class names; the `paddle` and `onnx` parts are filled in
            here.  `input.dynamic_batch` / `dynamic_size` decide which axes are dynamic in the
            graph, and `input.normalised` whether it takes normalised pixels (`normalisation_of`).
        nms_in_graph: whether the graph of a detector ends with non-maximum suppression.
        samples: pictures_3HW, float32 RGB 0..255, of the size in `spec`.
        calibration: pictures like `samples`, from the training split; if there are any, the ONNX
            model is also written in 8-bit integers.
        validation: SAMPLE_IMAGES of its images are used to measure mAP before and after
            quantisation, for infer.yml; None: mAP is not measured.
        int8_loss: see `ExportOptions`; without `validation`, raw scores may be off by this or
            INT8_SCORE, whichever is greater.

    Raises: ExportError: the model cannot be exported, or a file computes something else.
    """
    start = time.monotonic()
    needs_openvino = "openvino" in formats
    if needs_openvino:
        require_openvino()
        formats = [name for name in ("paddle", "onnx") if name == "onnx" or name in formats]
    multiple = spec.input.model_copy(update={"size_multiple": model.size_multiple})
    spec = spec.model_copy(update={"input": multiple})
    _require_usable(model, spec)
    if "onnx" in formats:
        require_onnx(int8=bool(calibration))
    names = [name for format in formats for name in _FILES[format]]
    names += _INT8_FILES if "onnx" in formats and calibration else []
    earlier = _require_free(directory, {SPEC_FILE, *names})
    spec = spec.model_copy(update={"earlier": tuple(sorted(earlier))})
    refused: dict[str, str] = {}
    # The check must not depend on the rounding of a GPU.
    with device.on_cpu(), draft_folder(directory) as draft:
        eager = deployment_copy(model)
        images = decided_batches(eager, check_images(spec.input, samples))
        _LOGGER.info("tracing the model; %d batches to compare its files on", len(images))
        cases = _Cases([graph_input(batch, spec) for batch in images], eager_outputs(eager, images))
        fused = fuse_for_deployment(model, spec.input.normalised is not None)
        scratch = draft / ".raw"
        save_graph(RawModel(fused), scratch, spec.input)
        agreement: dict[Format, Agreement] = {}
        if "paddle" in formats:
            _LOGGER.info("Paddle Inference: comparing with the trained model")
            agreement["paddle"] = _write_paddle(fused, scratch, draft, spec, cases, nms_in_graph)
        if "onnx" in formats:
            _LOGGER.info("ONNX: converting, and comparing with the trained model")
            agreement["onnx"] = _write_onnx(scratch, draft, spec, cases, nms_in_graph)
            if find_spec("openvino"):
                _LOGGER.info("OpenVINO: comparing with the trained model")
                with _openvino_required(needs_openvino, refused, "openvino"):
                    difference = _check_in_openvino(scratch, draft, spec, cases, nms_in_graph)
                    output_names = agreement["onnx"].output_names
                    agreement["openvino"] = replace(difference, output_names=output_names)
        spec = _add_sections(spec, agreement, nms_in_graph)
        if "onnx" in formats and calibration:
            _LOGGER.info("ONNX in 8-bit integers: calibrating")
            int8 = _write_int8(scratch, draft, spec, cases, calibration)
            spec = spec.model_copy(update={"onnx_int8": int8})
            if "openvino" in agreement:
                with _openvino_required(needs_openvino, refused, "openvino_int8"):
                    int8 = _check_int8_in_openvino(scratch, draft, spec, cases)
                    spec = spec.model_copy(update={"openvino_int8": int8})
        shutil.rmtree(scratch)
        if spec.onnx_int8 is not None and validation is not None and spec.nms is not None:
            predict = EagerPredictor(eager, spec.nms)
            sample = take_sample(validation, predict, spec)
            if sample is not None:
                spec = add_accuracy(draft, spec, sample, needs_openvino)
        require_int8("ONNX Runtime", spec.onnx_int8, int8_loss)
        openvino_int8 = None  # None if its INT8 loses too much in OpenVINO
        with _openvino_required(needs_openvino, refused, "openvino_int8"):
            require_int8("OpenVINO", spec.openvino_int8, int8_loss)
            openvino_int8 = spec.openvino_int8
        digests = {
            file.name: digest(file) for file in sorted(draft.iterdir()) if file.name != SPEC_FILE
        }
        update = {
            "openvino_int8": openvino_int8,
            "refused": spec.refused | refused,
            "sha256": digests,
        }
        spec = spec.model_copy(update=update)
        write_spec(draft, spec)
        size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file()) / 1e6
    return ExportReport(directory, spec, agreement, size, time.monotonic() - start)


@dataclass(frozen=True)
class _Cases:
    """The test inputs of every exported file, with the eager model's outputs.

    images: batches_B3HW in the form that the graph takes.
    """

    images: list[np.ndarray]
    expected: list[tuple[np.ndarray, ...]]


def _write_paddle(
    fused: ImageModel,
    scratch: Path,
    draft: Path,
    spec: InferenceSpec,
    cases: _Cases,
    nms_in_graph: bool,
) -> Agreement:
    """Writes and checks the Paddle model; `scratch` receives the graph without suppression.

    Without oneDNN, a run takes several times as long and computes the same graph, so a few images
    are enough.
    """
    raw = cache_outputs(load_graphs(scratch))
    parts = {name: slice(_GENERATED if name == PLAIN else None) for name in raw}
    agreement = merge_agreements(
        [
            compare_raw({name: graph}, cases.images[parts[name]], cases.expected[parts[name]])
            for name, graph in raw.items()
        ]
    )
    if nms_in_graph and isinstance(fused, Detector) and spec.nms is not None:
        # The graph with suppression is compared with the graph without it, which has already been
        # found to agree with eager.
        save_graph(ModelWithNMS(fused, spec.nms), draft, spec.input)
        for name, graph in load_graphs(draft).items():
            few = cases.images[: 1 if name == PLAIN else None]
            names = compare_suppressed({name: graph}, raw, few, spec.nms)
        return replace(agreement, output_names=names)
    for file in scratch.iterdir():
        shutil.copy2(file, draft / file.name)
    return agreement


def _write_onnx(
    scratch: Path, draft: Path, spec: InferenceSpec, cases: _Cases, nms_in_graph: bool
) -> Agreement:
    """Writes and checks the ONNX model; scratch: as _write_paddle."""
    from ppdist.export.onnx import append_nms, sign

    file = draft / "model.onnx"
    raw_file = scratch / "model.onnx"
    names = ("probabilities",) if spec.nms is None else ("scores", "boxes")
    convert_to_onnx(scratch, raw_file, names)
    sign(raw_file, {CARD_NOTE: make_card(spec).text()})
    raw = cache_outputs(load_onnx(raw_file))
    agreement = compare_raw(raw, cases.images, cases.expected)
    if nms_in_graph and spec.nms is not None:
        append_nms(raw_file, file, spec.nms)
        output_names = compare_suppressed(load_onnx(file), raw, cases.images, spec.nms)
        return replace(agreement, output_names=output_names)
    shutil.copy2(raw_file, file)
    return agreement


@contextmanager
def _openvino_required(needed: bool, refused: dict[str, str], section: str) -> Iterator[None]:
    """Raises OpenVINO's ExportError if OpenVINO was requested; otherwise warns.

    Args:
        refused: receives the reason under the key `section`, for infer.yml.
        section: the part of infer.yml that is then left out.
    """
    try:
        yield
    except ExportError as error:
        if needed:
            raise
        refused[section] = error.what
        _LOGGER.warning("%s: %s; kept for the other runtimes alone", section, error.what)


def _check_in_openvino(
    scratch: Path, draft: Path, spec: InferenceSpec, cases: _Cases, nms_in_graph: bool
) -> Agreement:
    """Checks the files of _write_onnx in OpenVINO.

    If the graph with suppression is exported, the graph without it is checked on the first images
    only.
    """
    raw = load_openvino(scratch / "model.onnx")
    if spec.nms is None or not nms_in_graph:
        return compare_raw(raw, cases.images, cases.expected)
    first_images = slice(_GENERATED)
    agreement = compare_raw(raw, cases.images[first_images], cases.expected[first_images])
    suppressed = load_openvino(draft / "model.onnx")
    return merge_agreements(
        [agreement, compare_rows(suppressed, cases.images, cases.expected, spec.nms)]
    )


def _check_int8_in_openvino(
    scratch: Path, draft: Path, spec: InferenceSpec, cases: _Cases
) -> ModelFileSection:
    """Checks the files of _write_int8 in OpenVINO, as _write_int8 does in ONNX Runtime."""
    assert spec.onnx_int8 is not None
    raw = load_openvino(scratch / "model_int8.onnx")
    difference = measure_raw(raw, cases.images, cases.expected)
    if spec.onnx_int8.nms_in_graph and spec.nms is not None:
        compare_suppressed(load_openvino(draft / "model_int8.onnx"), raw, cases.images, spec.nms)
    errors = {"max_score_error": difference.score, "max_box_error": difference.box}
    return spec.onnx_int8.model_copy(update=errors)


def _write_int8(
    scratch: Path,
    draft: Path,
    spec: InferenceSpec,
    cases: _Cases,
    calibration: Sequence[np.ndarray],
) -> ModelFileSection:
    """Writes the ONNX model in 8-bit integers.

    Args: scratch: contains the float32 model without suppression.
    """
    from ppdist.export.onnx import append_nms, quantize_onnx, sign

    assert spec.onnx is not None
    raw_file, file = scratch / "model_int8.onnx", draft / "model_int8.onnx"
    quantize_onnx(scratch / "model.onnx", raw_file, calibration, spec)
    sign(raw_file, {CARD_NOTE: make_card(spec).text()})
    raw = load_onnx(raw_file)
    difference = measure_raw(raw, cases.images, cases.expected)
    if spec.onnx.nms_in_graph and spec.nms is not None:
        append_nms(raw_file, file, spec.nms)
        compare_suppressed(load_onnx(file), raw, cases.images, spec.nms)
    else:
        shutil.copy2(raw_file, file)
    section = {
        "files": _INT8_FILES,
        "max_score_error": difference.score,
        "max_box_error": difference.box,
    }
    return spec.onnx.model_copy(update=section)


def require_int8(runtime: str, section: ModelFileSection | None, max_loss: float) -> None:
    """Checks that a quantised file loses little accuracy.

    Args: max_loss: largest loss of mAP; without a measured mAP, the raw scores may be off by this
        or INT8_SCORE, whichever is greater.

    Raises: ExportError: the file loses more.
    """
    if section is None:
        return
    sample = section.sample
    if sample is not None:
        loses_too_much = sample.mAP_eager - sample.mAP > max_loss
        loss_text = (
            f"mAP is {sample.mAP:.4f} on {sample.images} validation images, eager "
            f"{sample.mAP_eager:.4f}; it may lose {max_loss:g}"
        )
    else:
        allowed = max(max_loss, INT8_SCORE)
        loses_too_much = section.max_score_error > allowed
        loss_text = (
            f"scores are off by up to {section.max_score_error:.2f}, and may be by {allowed:g}"
        )
    if loses_too_much:
        raise ExportError(
            f"in {runtime} {loss_text}",
            code="int8_loses",
            where=section.files[0],
            fix="nothing was kept: leave out --int8, give more --calibration images, or allow more "
            "with --int8-loss",
        )


def _require_usable(model: ImageModel, spec: InferenceSpec) -> None:
    height, width = spec.input.size
    step = spec.input.size_multiple
    if height % step or width % step:
        raise ExportError(
            f"height and width must be multiples of {step}",
            code="image_size_not_multiple",
            where=f"image size {height}x{width}",
            fix="set model.image_size",
        )
    if len(spec.class_names) != model.num_classes:
        raise ExportError(
            f"{len(spec.class_names)} class names for a model of {model.num_classes} classes",
            code="class_names_count",
            fix="give the names of the classes the model was trained on",
        )
    # JSON annotations can hold such names.
    for name in spec.class_names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ExportError(
                f"class name {name!r} contains a lone surrogate, which no file can store",
                code="class_name_unwritable",
                fix="correct it in the annotations or give --class-names",
            )
    for key, value in model.state_dict().items():
        if value.dtype in (paddle.float16, paddle.bfloat16):
            raise ExportError(
                f"{key} is {value.dtype}: export the float32 weights", code="weights_not_float32"
            )
        if not bool(paddle.isfinite(value).all()):
            raise ExportError(
                f"{key} holds values that are not finite; these weights are broken",
                code="weights_not_finite",
            )


def _add_sections(
    spec: InferenceSpec, agreement: dict[Format, Agreement], nms_in_graph: bool
) -> InferenceSpec:
    """Adds sections about the written files to the description."""
    is_suppressed = nms_in_graph and spec.nms is not None
    outputs = (
        _CLASS_OUTPUTS if spec.nms is None else _KEPT_OUTPUTS if is_suppressed else _RAW_OUTPUTS
    )
    parts: dict[str, ModelFileSection] = {
        name: ModelFileSection(
            files=_FILES[name],
            nms_in_graph=is_suppressed,
            outputs=tuple(
                OutputSection(name=name, shape=shape, meaning=f"{content}: {meaning}")
                for name, (content, shape, meaning) in zip(difference.output_names, outputs)
            ),
            max_score_error=difference.score,
            max_box_error=difference.box,
        )
        for name, difference in agreement.items()
    }
    made_with = f"ppdist {ppdist.__version__}, paddle {paddle.__version__}"
    return spec.model_copy(update={**parts, "made_with": made_with})


def _require_free(directory: Path, names: set[str]) -> set[str]:
    """Checks that this export may write to a folder.

    Returns: files of an earlier export that this one does not replace.
    Raises: ExportError: the folder is not an export, or it has a file of one of these names that
        does not belong to an export.
    """
    with _writing_to(directory):
        _move_into_place(directory)  # finish an interrupted export
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return set()
    if not (directory / SPEC_FILE).is_file():
        raise ExportError(
            f"the folder is not empty and not an export (it has no {SPEC_FILE})",
            code="out_not_ours",
            where=str(directory),
            fix="choose another --out, or remove the folder",
        )
    earlier_files = read_spec(directory).file_names()
    foreign = sorted(name for name in names - earlier_files if os.path.lexists(directory / name))
    if foreign:
        raise ExportError(
            f"the file exists, but {SPEC_FILE} beside it does not list it",
            code="out_not_ours",
            where=", ".join(str(directory / name) for name in foreign),
            fix="choose another --out, or move the file elsewhere",
        )
    return {name for name in earlier_files - names if (directory / name).is_file()}


# Drafts are kept inside the folder: a mounted folder cannot be renamed, and may be on another disk
# than its parent. This name, without host and process, marks a draft that is complete and checked.
_DRAFT = ".export"


@contextmanager
def draft_folder(directory: Path) -> Iterator[Path]:
    """Creates a temporary folder whose files are moved into `directory` if the block succeeds.

    Other files in `directory` are not touched. If a move is interrupted, the next export finishes
    it.
    """
    is_new = not directory.exists()
    draft = draft_of(directory.resolve() / _DRAFT[1:])
    try:
        with _writing_to(directory):
            draft.mkdir(parents=True)
            yield draft
            draft.replace(draft.with_name(_DRAFT))
            _move_into_place(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # the folder holds an export
                directory.rmdir()


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot write the export: {error}", code="folder_unwritable", where=str(directory)
        ) from error


def _move_into_place(directory: Path) -> None:
    """Moves a complete draft into place; removes drafts of ended processes.

    infer.yml is removed first and moved last: a folder without it is not an export, so a mixture of
    two exports can never be loaded.
    """
    draft = directory / _DRAFT
    if draft.is_symlink():  # an archive may hold a link: nothing is moved from where it leads
        draft.unlink()
    if (draft / SPEC_FILE).is_file():
        # From here until the last move, the folder is not an export, so no mixture can be loaded.
        (directory / SPEC_FILE).unlink(missing_ok=True)
        files = [path for path in draft.rglob("*") if path.is_file()]
        for file in sorted(files, key=lambda file: file.name == SPEC_FILE):
            place = directory / file.relative_to(draft)
            # A folder in an export may have been replaced by a link, which would lead elsewhere.
            if place.parent != directory:
                require_no_link(place.parent)
            place.parent.mkdir(exist_ok=True)
            file.replace(place)
    for folder in (*draft.glob("*"), draft):
        with suppress(OSError):  # it is a file, or absent
            folder.rmdir()
    remove_drafts(directory, _DRAFT[1:])


# --- the graph -----------------------------------------------------------------------------------

# No code called by a `forward` branches on a tensor, and sizes come from `paddle.shape`. So the
# source need not be translated: `not_to_static` builds the same graph faster.


class RawModel(nn.Layer):
    """A model without suppression, in the form that is exported as a graph.

    images_B3HW (float32 RGB 0..255) -> decoded outputs: scores_BNC and boxes_BN4 in input pixels of
    a detector, probabilities_BC of a classifier.
    """

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    @paddle.jit.not_to_static
    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.model.predict(images)


class ModelWithNMS(nn.Layer):
    """A detector with its suppression, in the form that is exported as a graph.

    images_B3HW (float32 RGB 0..255) -> rows_R6 (class, score, xyxy input pixels), count_B.
    """

    def __init__(self, detector: Detector, nms: NMSConfig) -> None:
        super().__init__()
        self.detector = detector
        self.nms = nms

    @paddle.jit.not_to_static
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = self.detector.predict(images)
        return multiclass_nms(scores, boxes, self.nms)


def deployment_copy(model: Model) -> Model:
    """Copies a model in eval mode, with Paddle's plain layers.

    It replaces the convolutions of CPU training and every synchronised batch norm: in eval mode
    they compute the same as the plain layers but have no static graph.  `model` is not touched.
    """
    plain_model = copy.deepcopy(model)
    plain_model.to(device="cpu")
    use_plain_layers(plain_model)
    for layer in plain_model.sublayers():
        if isinstance(layer, nn.BatchNorm2D):
            layer.__class__ = nn.BatchNorm2D  # same attributes; only forward differs
    plain_model.eval()
    return plain_model


def fuse_for_deployment(model: Model, normalised_input: bool) -> Model:
    """Creates a deployment copy that computes the same with the fewest operations.

    Branches are merged, and batch norms and the pixel scale are folded into convolutions.

    Args: normalised_input: the copy takes normalised pixels and does not normalise them itself.
    """
    fused = deployment_copy(model)
    fused.fuse()
    fused.fuse_conv_bn()
    if normalised_input:
        fused.set_pixel_statistics([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    else:
        fused.fold_pixel_scale()
    return fused


def save_graph(model: nn.Layer, directory: Path, description: InputSection) -> None:
    """Saves a layer with one image input as directory/model.{json,pdiparams}; makes it static.

    Raises: ExportError: Paddle cannot trace or save the layer.
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


# --- ONNX ----------------------------------------------------------------------------------------

# The converter ends the whole process on some models, so it runs in a separate one.  Its last step
# (optimize_tool) installs packages while it runs, so it is left out.
_CONVERT = """
import sys, paddle2onnx
program, weights, file, opset = sys.argv[1:]
paddle2onnx.export(program, weights, file, opset_version=int(opset), optimize_tool="none")
"""


def require_onnx(int8: bool) -> None:
    """Checks that the packages that create and check ONNX files are installed.

    Raises: ExportError: one is missing.
    """
    needed = ["paddle2onnx", "onnx", "onnxruntime"]
    needed += ["ml_dtypes"] if int8 else []  # for its quantisation; onnxruntime does not install it
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"ONNX export needs {', '.join(missing)}: pip install 'ppdist[onnx]', or leave onnx "
            "out of --format",
            code="package_missing",
        )


def require_openvino() -> None:
    """Checks that OpenVINO is installed.

    Raises: ExportError: it is not installed.
    """
    if find_spec("openvino") is None:
        raise ExportError(
            "OpenVINO, in which the exported model is checked, is not installed",
            code="package_missing",
            fix="pip install 'ppdist[openvino]', or use --format onnx (same file, unchecked)",
        )


def convert_to_onnx(directory: Path, file: Path, outputs: Sequence[str]) -> None:
    """Converts a graph that `save_graph` wrote.

    Args: outputs: names of the file's outputs.
    Raises: ExportError: the converter rejects the graph or crashes, or the disk is full.
    """
    weights = str(directory / "model.pdiparams")
    need, free = 2 * os.path.getsize(weights), shutil.disk_usage(file.parent).free
    if free < need:
        raise ExportError(
            f"the disk of --out has {free / 1e6:.0f} MB left, but making the ONNX model "
            f"takes {need / 1e6:.0f} MB",
            code="disk_full",
            fix="make room or choose another --out",
        )
    # The conversion runs on the CPU and should not occupy a GPU.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        log, program = Path(folder) / "log", Path(folder) / "model.json"
        replace_file(program, program_for_converter((directory / "model.json").read_bytes()))
        command = python(_CONVERT, str(program), weights, str(file), str(ONNX_OPSET))
        code = run_command(command, log, CONVERSION_SECONDS, environment=environment)
        output = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        raise ExportError(
            f"paddle2onnx did not finish within {CONVERSION_SECONDS} seconds",
            code="conversion_timeout",
        )
    if code or not file.is_file():
        raise ExportError(
            f"paddle2onnx cannot convert this model: {_find_reason(output)} (exit code {code})",
            code="conversion_failed",
            fix="leave onnx out of --format",
        )
    _simplify(file, outputs)


def program_for_converter(program: bytes) -> bytes:
    """Rewrites a saved program so that paddle2onnx reads every setting of its operators.

    Paddle 3.3 stores the value of a padding, the slope of a leaky ReLU and the epsilon of a group
    norm as doubles.  paddle2onnx 2.1 expects floats there, and takes whatever the memory holds for
    a double, another number at each conversion.
    """

    def use_floats(operator: dict[str, Any]) -> dict[str, Any]:
        attributes = operator.get("A")
        if isinstance(attributes, list) and operator.get("#") not in _READ_AS_DOUBLES:
            for attribute in attributes:
                if isinstance(attribute, dict) and attribute["AT"]["#"] == "0.a_f64":
                    attribute["AT"]["#"] = "0.a_f32"
        return operator

    return json.dumps(json.loads(program, object_hook=use_floats)).encode()


_READ_AS_DOUBLES = ("1.full",)  # operators whose double paddle2onnx reads as such


def _find_reason(output: str) -> str:
    """Returns the most telling line of the converter's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for mark in ("Failed to convert", "[ERROR]", "Error:", "Error Message"):
        reasons = [line for line in lines if mark in line and "UnboundLocalError" not in line]
        if reasons:
            return reasons[-1]
    return lines[-1] if lines else "it said nothing"


def _simplify(file: Path, outputs: Sequence[str]) -> None:
    """Folds constants, merges operations into standard operators, names outputs and axes.

    It reduces the graph of PP-YOLOE from 1480 nodes to 417.
    """
    import onnx
    import onnxruntime

    from ppdist.export.onnx import INPUT_AXES, OUTPUT_AXES, name_axes

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Higher levels fuse nodes into operators that only ONNX Runtime has.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(file)
    try:
        onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no narrower common base
        raise ExportError(
            f"ONNX Runtime cannot load the exported model: {error}", code="runtime_load_failed"
        ) from error
    model = onnx.load(str(file))
    standard = [opset for opset in model.opset_import if not opset.domain]
    del model.opset_import[:]  # ONNX Runtime adds domains that no node uses
    model.opset_import.extend(standard)
    renamed = {output.name: name for output, name in zip(model.graph.output, outputs, strict=True)}
    for node in model.graph.node:
        for values in (node.input, node.output):
            for index, value in enumerate(values):
                values[index] = renamed.get(value, value)
    name_axes(model.graph.input[0], INPUT_AXES)
    for output in model.graph.output:
        output.name = renamed[output.name]
        name_axes(output, OUTPUT_AXES)
    onnx.checker.check_model(model)
    onnx.save(model, str(file))


# --- images to try it on -------------------------------------------------------------------------


def spread_evenly(records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Reorders records so that every prefix is spread evenly over the list.

    Records come in the order of the fractional part of their index times the golden ratio.
    """
    order = np.argsort(np.arange(len(records)) * ((5**0.5 - 1) / 2) % 1.0)
    return [records[index] for index in order]


def read_record(record: ImageRecord, opener: Opener) -> np.ndarray:
    """Reads the image of a record, uint8 RGB [H, W, 3].

    Raises: DataError: as read_image.
    """
    size = (record.height, record.width) if record.height else None
    return read_image(record.path, size, opener=opener)


def prepare_input(image_HW3: np.ndarray, spec: InferenceSpec) -> np.ndarray:
    """Resizes a uint8 RGB image of any size to the model's input.

    Returns: float32 [3, H, W], 0..255.
    """
    if spec.resize.mode == "centre_crop":
        return prepare_centre(image_HW3, spec.input.size)
    return prepare(image_HW3, spec.input.size, spec.resize.mode)


class Pictures(Sequence[np.ndarray]):
    """The images of records as model inputs; each is read on access to save memory."""

    def __init__(
        self, records: Sequence[ImageRecord], spec: InferenceSpec, opener: Opener = DISK
    ) -> None:
        self._records, self._spec, self._opener = records, spec, opener

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        """Returns the input of a single index; slices are not supported."""
        return prepare_input(read_record(self._records[index], self._opener), self._spec)


def select_readable(
    records: Sequence[ImageRecord],
    count: int,
    warn: Callable[[str], None],
    opener: Opener = DISK,
) -> list[ImageRecord]:
    """Selects the first `count` readable records.

    Only the first 2 * count records are tried: if the files are missing, none can be read.

    Args: warn: gets one line if unreadable images were replaced.
    """
    selected: list[ImageRecord] = []
    reasons: list[str] = []
    for record in records[: 2 * count]:
        try:
            read_record(record, opener)
        except DataError as error:
            reasons.append(str(error))
        else:
            selected.append(record)
        if len(selected) == count:
            break
    if reasons:
        warn(f"{len(reasons)} images cannot be read and are left out, the first: {reasons[0]}")
    return selected


# --- mAP before and after ------------------------------------------------------------------------

# Largest accepted error of a raw score where no mAP shows the cost of quantisation. Correct files
# were off by 0.05 to 0.25, a wrong one by 0.33 to 0.54.
INT8_SCORE = 0.3


@dataclass(frozen=True)
class Sample:
    """A sample of images with ground-truth boxes, and the model's accuracy on it before export."""

    dataset: DetectionSet
    mAP: float


def take_sample(
    dataset: DetectionSet,
    predict: Predictor,
    spec: InferenceSpec,
    count: int = SAMPLE_IMAGES,
) -> Sample | None:
    """Samples images evenly from a data set and measures mAP on them before export.

    An unreadable image is replaced by the next one.

    Args:
        predict: the model before export.
    Returns: the sample; None: no image is readable, or none of them contains an object.
    """
    records: list[ImageRecord] = []
    rows: list[np.ndarray] = []
    for record in spread_evenly(dataset.records):
        if len(records) >= count:
            break
        try:
            image_HW3 = read_record(record, dataset.opener)
        except DataError:
            continue
        rows.append(_detect_rows(len(records), predict, image_HW3, spec))
        records.append(record)
    sampled = replace(dataset, records=records, unreadable={}, duplicates={})
    if all(record.crowd_M.all() for record in records):  # also True without objects, or images
        return None
    return Sample(sampled, _precision(sampled, rows))


def measure_precision(sample: Sample, predict: Predictor, spec: InferenceSpec) -> float:
    """Measures the mAP of another form of the model on the same images."""
    rows = [
        _detect_rows(index, predict, read_record(record, sample.dataset.opener), spec)
        for index, record in enumerate(sample.dataset.records)
    ]
    return _precision(sample.dataset, rows)


def add_accuracy(
    directory: Path,
    spec: InferenceSpec,
    sample: Sample,
    needs_openvino: bool = True,
) -> InferenceSpec:
    """Adds the mAP of the quantised file on the sample to the spec.

    Args:
        directory: folder with the files that the spec names.
        needs_openvino: if False, files that fail in OpenVINO are left out of the spec.
    """
    options = {
        "onnx_int8": RuntimeOptions(backend="onnx", precision="int8"),
        "openvino_int8": RuntimeOptions(backend="openvino", precision="int8"),
    }
    sections: dict[str, ModelFileSection | None] = {name: getattr(spec, name) for name in options}
    changed: dict[str, ModelFileSection | None] = {}
    refused = {**spec.refused}
    for name, section in sections.items():
        if section is None:
            continue
        # Left out if the block below fails.
        changed[name] = None
        with _openvino_required(needs_openvino or not name.startswith("openvino"), refused, name):
            predict = ExportedPredictor(directory, options[name], spec)
            mAP = measure_precision(sample, predict, spec)
            count = len(sample.dataset.records)
            sample_section = SampleSection(images=count, mAP_eager=sample.mAP, mAP=mAP)
            changed[name] = section.model_copy(update={"sample": sample_section})
    return spec.model_copy(update={**changed, "refused": refused})


def _detect_rows(
    index: int, predict: Predictor, image_HW3: np.ndarray, spec: InferenceSpec
) -> np.ndarray:
    """Detects the objects of one image, float32 [R, 7].

    A row is (index of the image, class, score, x1, y1, x2, y2), in pixels of the image.
    """
    assert spec.resize.mode != "centre_crop"  # only classifiers have it
    rows_R6 = detect(predict, image_HW3, spec.input.size, spec.resize.mode)
    return np.concatenate([np.full((len(rows_R6), 1), index, np.float32), rows_R6], axis=1)


def _precision(dataset: DetectionSet, rows: list[np.ndarray]) -> float:
    return evaluate_boxes(dataset, np.concatenate(rows))["mAP"]
