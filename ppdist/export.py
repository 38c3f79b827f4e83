"""From a trained model to files other programs run, each checked against eager before it is kept.

    model -> deployed copy (ppdist/export_graph.py) -> static graph -> Paddle Inference
                                                               \\-> ONNX
    every file is loaded again and compared with the model; only then the folder gets its name

The graph takes raw RGB pixels 0..255, unless asked for normalised ones, and contains normalisation,
decoding and, of a detector where asked, the non-maximum suppression.  `infer.yml` beside it
(ppdist/infer_spec.py) says the rest.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import paddle

import ppdist
from ppdist.data.sample import DetectionSet
from ppdist.errors import ExportError
from ppdist.export_check import (
    Agreement,
    check_images,
    compare_kept,
    compare_raw,
    eager_outputs,
    load_graphs,
    load_onnx,
    measure_raw,
)
from ppdist.export_graph import (
    KeptModel,
    RawModel,
    convert_to_onnx,
    deployed,
    deployment_copy,
    require_onnx,
    save_graph,
)
from ppdist.infer_spec import (
    SPEC_FILE,
    InferenceSpec,
    ModelFileSection,
    OutputSection,
    write_spec,
)
from ppdist.inference import EagerPredictor, graph_input
from ppdist.models.detector import Detector, ImageModel
from ppdist.sample_accuracy import SAMPLE_IMAGES, take_sample, with_accuracy

Format = Literal["paddle", "onnx"]
FORMATS: tuple[Format, ...] = ("paddle", "onnx")

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
    calibration: Sequence[np.ndarray] = (),
    validation: DetectionSet | None = None,
    sampled: int = SAMPLE_IMAGES,
) -> ExportReport:
    """Writes `directory` with the model in each format, and infer.yml.

    Everything is written beside `directory`, loaded again and compared with `model` in eager mode
    on the CPU (generated pictures and `samples`; Paddle's with and without oneDNN); only when all
    agree (ppdist/export_check.py has the tolerances) the folder gets its name.  An earlier export
    there is replaced, any other folder refused.  `model` itself is not changed.  One process calls
    this.

    Args:
        spec: input size, thresholds and class names; the `paddle` and `onnx` parts are filled in
            here.  `input.dynamic_batch` / `dynamic_size` decide what stays free in the graph, and
            `input.normalised` whether it takes normalised pixels (export_graph.normalisation_of).
        samples: pictures_3HW, float32 RGB 0..255, of the size in `spec`.
        calibration: likewise, of the training split; with any the ONNX model is written in 8-bit
            integers, too.  How far that is off is noted, not bounded.
        validation: `sampled` of its images give mAP before and after export, for infer.yml.

    Raises: ExportError: the model cannot be exported, or a file does not compute what it does.
    """
    return _export(
        model, directory, spec, formats, samples, nms_in_graph, calibration, validation, sampled
    )


def export_classifier(
    model: ImageModel,
    directory: Path,
    spec: InferenceSpec,
    formats: Sequence[Format] = ("paddle",),
    samples: Sequence[np.ndarray] = (),
    calibration: Sequence[np.ndarray] = (),
) -> ExportReport:
    """As `export_detector`, for a model that gives probabilities_BC.

    Raises: ExportError: as `export_detector`.
    """
    return _export(model, directory, spec, formats, samples, False, calibration, None, 0)


def _export(
    model: ImageModel,
    directory: Path,
    spec: InferenceSpec,
    formats: Sequence[Format],
    samples: Sequence[np.ndarray],
    nms_in_graph: bool,
    calibration: Sequence[np.ndarray],
    validation: DetectionSet | None,
    sampled: int,
) -> ExportReport:
    start = time.monotonic()
    multiple = spec.input.model_copy(update={"size_multiple": model.size_multiple})
    spec = spec.model_copy(update={"input": multiple})
    _require_usable(model, spec)
    if "onnx" in formats:
        require_onnx(int8=bool(calibration))
    with _on_cpu(), _draft_of(directory) as draft:
        images = check_images(spec.input, samples)
        cases = _Cases(
            [graph_input(batch, spec) for batch in images],
            eager_outputs(deployment_copy(model), images),
        )
        fused = deployed(model, spec.input.normalised is not None)
        scratch = draft / ".raw"
        save_graph(RawModel(fused), scratch, spec.input)
        agreement: dict[Format, Agreement] = {}
        if "paddle" in formats:
            agreement["paddle"] = _write_paddle(fused, scratch, draft, spec, cases, nms_in_graph)
        if "onnx" in formats:
            agreement["onnx"] = _write_onnx(scratch, draft, spec, cases, nms_in_graph)
        spec = _complete(spec, agreement, nms_in_graph)
        if "onnx" in formats and calibration:
            int8 = _write_int8(scratch, draft, spec, cases, calibration)
            spec = spec.model_copy(update={"onnx_int8": int8})
        shutil.rmtree(scratch)
        write_spec(draft, spec)
        if validation is not None and spec.nms is not None:
            eager = EagerPredictor(deployment_copy(model), spec.nms)
            spec = with_accuracy(draft, spec, take_sample(validation, eager, spec, sampled))
            write_spec(draft, spec)
        size = sum(file.stat().st_size for file in draft.iterdir()) / 1e6
    return ExportReport(directory, spec, agreement, size, time.monotonic() - start)


@dataclass(frozen=True)
class _Cases:
    """What every file is tried on: batches_B3HW as the graph takes them, and eager's answers."""

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
    """Writes and checks the Paddle model; scratch: holds the graph without suppression."""
    raw = load_graphs(scratch)
    agreement = compare_raw(raw, cases.images, cases.expected)
    if nms_in_graph and isinstance(fused, Detector) and spec.nms is not None:
        save_graph(KeptModel(fused, spec.nms), draft, spec.input)
        names = compare_kept(load_graphs(draft), raw, cases.images, spec.nms)
        return replace(agreement, output_names=names)
    for file in scratch.iterdir():
        shutil.copy2(file, draft / file.name)
    return agreement


def _write_onnx(
    scratch: Path, draft: Path, spec: InferenceSpec, cases: _Cases, nms_in_graph: bool
) -> Agreement:
    """Writes and checks the ONNX model; scratch: as _write_paddle."""
    from ppdist.onnx_nms import append_nms

    file = draft / "model.onnx"
    raw_file = scratch / "model.onnx"
    names = ("probabilities",) if spec.nms is None else ("scores", "boxes")
    convert_to_onnx(scratch, raw_file, names)
    raw = load_onnx(raw_file)
    agreement = compare_raw(raw, cases.images, cases.expected)
    if nms_in_graph and spec.nms is not None:
        append_nms(raw_file, file, spec.nms)
        kept = compare_kept(load_onnx(file), raw, cases.images, spec.nms)
        return replace(agreement, output_names=kept)
    shutil.copy2(raw_file, file)
    return agreement


def _write_int8(
    scratch: Path,
    draft: Path,
    spec: InferenceSpec,
    cases: _Cases,
    calibration: Sequence[np.ndarray],
) -> ModelFileSection:
    """Writes the ONNX model in 8-bit integers; scratch: holds it in float32 without suppression."""
    from ppdist.onnx_nms import append_nms
    from ppdist.quantize import quantize_onnx

    assert spec.onnx is not None
    raw_file, file = scratch / "model_int8.onnx", draft / "model_int8.onnx"
    quantize_onnx(scratch / "model.onnx", raw_file, calibration, spec)
    raw = load_onnx(raw_file)
    off = measure_raw(raw, cases.images, cases.expected)
    if spec.onnx.nms_in_graph and spec.nms is not None:
        append_nms(raw_file, file, spec.nms)
        compare_kept(load_onnx(file), raw, cases.images, spec.nms)
    else:
        shutil.copy2(raw_file, file)
    noted = {"files": (file.name,), "max_score_error": off.score, "max_box_error": off.box}
    return spec.onnx.model_copy(update=noted)


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
    for name in spec.class_names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ExportError(
                f"class name {name!r} holds half a character (a lone surrogate), and no file can",
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


def _complete(
    spec: InferenceSpec, agreement: dict[Format, Agreement], nms_in_graph: bool
) -> InferenceSpec:
    """The description with what was written filled in."""
    parts: dict[str, ModelFileSection] = {}
    kept = nms_in_graph and spec.nms is not None
    outputs = _CLASS_OUTPUTS if spec.nms is None else _KEPT_OUTPUTS if kept else _RAW_OUTPUTS
    if "paddle" in agreement:
        files = ("model.json", "model.pdiparams")
        parts["paddle"] = _describe(files, outputs, kept, agreement["paddle"])
    if "onnx" in agreement:
        parts["onnx"] = _describe(("model.onnx",), outputs, kept, agreement["onnx"])
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
            f"is there already and is not an export (no {SPEC_FILE})",
            code="out_not_ours",
            where=str(directory),
            fix="choose another --out or remove it",
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
        raise ExportError(
            f"cannot write the export: {error}", code="folder_unwritable", where=str(directory)
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(old, ignore_errors=True)


def _replaceable(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    return (directory / SPEC_FILE).is_file() or not any(directory.iterdir())
