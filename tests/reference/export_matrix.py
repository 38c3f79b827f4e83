"""The export matrix: every model in every exported form beside the model itself, on real images.

What tools/export.py checks before it keeps a file is checked here once more from the outside: each
export is opened as a user would open it, by its infer.yml, and its scores and boxes are compared
with those of eager.  Of trained weights COCO's mAP on the whole validation set, too.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppdist.common.errors import ConfigError, ExportError
from ppdist.config.runtime import RuntimeOptions
from ppdist.export.export import (
    Format,
    deployment_copy,
    export_model,
    measure_precision,
)
from ppdist.export.predictor import ExportedPredictor, graph_input, open_exported
from ppdist.export.spec import read_spec
from ppdist.export.verify import (
    BOX_TOLERANCE,
    SCORE_TOLERANCE,
    Agreement,
    Raw,
    eager_outputs,
    merge_agreements,
    raw_differences,
    suppressed_differences,
)
from ppdist.models.base import Detector
from ppdist.models.model_card import normalisation_of
from tests.reference.export_subjects import Subject, batches

MAP_LIMIT = 0.001  # 0..1; those of scores and boxes are export_check's
BEGIN, END = "<!-- export matrix -->", "<!-- end of the export matrix -->"


class Form(NamedTuple):
    """One way to export a model."""

    name: str
    nms_in_graph: bool = True
    dynamic: bool = True
    normalised: bool = False


FORMS = (
    Form("any batch and size"),
    Form("without NMS", nms_in_graph=False),
    Form("one image of one size", dynamic=False),
    Form("normalised input", normalised=True),
)


@dataclass(frozen=True)
class Row:
    """How far one exported file is from eager.

    score, box, boxes, ties: those of export_check.Agreement.
    mAP_eager, mAP: on the validation set; None: untrained weights, or no set at hand.
    error: why there is no file.  judged: whether the limits hold for it (not for INT8).
    """

    model: str
    format: str
    form: str
    weights: str
    score: float | None = None
    box: float | None = None
    boxes: int = 0
    ties: int = 0
    mAP_eager: float | None = None
    mAP: float | None = None
    megabytes: float = 0.0
    error: str = ""
    judged: bool = True

    @property
    def passed(self) -> bool:
        if self.error:
            return False
        if not self.judged:
            return True
        if self.box is not None and not self.boxes:
            return False  # nothing was compared
        lost = abs((self.mAP or 0.0) - (self.mAP_eager or 0.0))
        within = (self.score or 0.0) <= SCORE_TOLERANCE and (self.box or 0.0) <= BOX_TOLERANCE
        return within and lost <= MAP_LIMIT


# What runs each file; of several the worst counts, and the first gives mAP.
_FILES: tuple[Format, ...] = ("paddle", "onnx")
_OPENVINO = (RuntimeOptions(backend="openvino"),) if find_spec("openvino") else ()
_RUNTIMES = {
    "paddle": (RuntimeOptions(), RuntimeOptions(onednn=False)),
    "onnx": (RuntimeOptions(backend="onnx"), *_OPENVINO),
}


def measure(subject: Subject) -> Iterator[Row]:
    """Exports a model in every form and compares each file with eager; a row for each file."""
    for form in FORMS:
        if subject.spec.nms is None and not form.nms_in_graph:
            continue  # a classifier has none
        with tempfile.TemporaryDirectory(prefix="ppdist-matrix-") as folder:
            directory = Path(folder) / "model"
            calibration = subject.calibration if form == FORMS[0] else ()
            try:
                _export(subject, form, directory, calibration)
            except ExportError as error:
                yield Row(subject.name, "all", form.name, subject.weights, error=str(error))
                continue
            for name in _FILES:
                try:
                    yield _row(subject, name, form, directory)
                except ExportError as error:
                    yield Row(subject.name, name, form.name, subject.weights, error=str(error))
            if calibration:
                yield _int8_row(subject, directory)


def _export(
    subject: Subject, form: Form, directory: Path, calibration: Sequence[np.ndarray]
) -> None:
    takes = {
        "dynamic_batch": form.dynamic,
        "dynamic_size": form.dynamic,
        "normalised": normalisation_of(subject.model) if form.normalised else None,
    }
    changed = {"input": subject.spec.input.model_copy(update=takes)}
    spec = subject.spec.model_copy(update=changed)
    if isinstance(subject.model, Detector):
        export_model(
            subject.model,
            directory,
            spec,
            _FILES,
            form.nms_in_graph,
            calibration=calibration,
            int8_loss=1,
        )
    else:
        export_model(subject.model, directory, spec, _FILES, calibration=calibration, int8_loss=1)


def _row(subject: Subject, name: Format, form: Form, directory: Path) -> Row:
    """One exported file, by all its runtimes."""
    batch = 2 if form.dynamic else 1
    expected = eager_outputs(deployment_copy(subject.model), batches(subject.images_N3HW, batch))
    each = [
        _differences(subject, directory, options, batch, expected) for options in _RUNTIMES[name]
    ]
    boxes = [found.box for found in each if found.box is not None]
    return Row(
        subject.name, name, form.name, subject.weights,
        score=max(found.score for found in each),
        box=max(boxes, default=None),
        boxes=each[0].boxes,
        ties=max(found.ties for found in each),
        mAP_eager=subject.sample.mAP if subject.sample else None,
        mAP=_precision(subject, directory, _RUNTIMES[name][0]),
        megabytes=_megabytes(directory, name),
    )  # fmt: skip


def _int8_row(subject: Subject, directory: Path) -> Row:
    """The INT8 file; it is shown, not judged."""
    section = read_spec(directory).onnx_int8
    assert section is not None
    return Row(
        subject.name, "onnx int8", FORMS[0].name, subject.weights,
        score=section.max_score_error,
        box=section.max_box_error,
        mAP_eager=subject.sample.mAP if subject.sample else None,
        mAP=_precision(subject, directory, RuntimeOptions(backend="onnx", precision="int8")),
        megabytes=_megabytes(directory, "onnx_int8"),
        judged=False,
    )  # fmt: skip


def _differences(
    subject: Subject,
    directory: Path,
    options: RuntimeOptions,
    batch: int,
    expected: Sequence[Raw],
) -> Agreement:
    """Of one runtime over all images, opened by infer.yml as a user would."""
    spec = read_spec(directory)
    form, graph = open_exported(directory, spec, options)
    found = []
    for images, true in zip(batches(subject.images_N3HW, batch), expected, strict=True):
        got = graph(graph_input(images, spec))
        if form.nms_in_graph:
            assert spec.nms is not None
            found.append(suppressed_differences(got, true, spec.nms, options.backend))
        else:
            found.append(raw_differences(got, true, options.backend))
    return merge_agreements(found)


def _precision(subject: Subject, directory: Path, options: RuntimeOptions) -> float | None:
    if subject.sample is None:
        return None
    return measure_precision(subject.sample, ExportedPredictor(directory, options), subject.spec)


def _megabytes(directory: Path, section: str) -> float:
    files = getattr(read_spec(directory), section).files
    return sum((directory / file).stat().st_size for file in files) / 1e6


_HEAD = (
    "| model | weights | file | form | scores | boxes, px | compared | mAP (eager) | MB | |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return "\n".join([_HEAD, *map(line, rows)])


def line(row: Row) -> str:
    """A line of the table."""
    begin = f"| {row.model} | {row.weights} | {row.format} | {row.form} | "
    if row.error:
        return f"{begin} | | | | | FAILED: {row.error} |"
    mAP = "" if row.mAP is None else f"{row.mAP:.4f} ({row.mAP_eager:.4f})"
    box = "" if row.box is None else f"{row.box:.1g}"
    compared = f"{row.boxes} boxes" + (f", ties: {row.ties}" if row.ties else "")
    verdict = ("ok" if row.passed else "MISSED") if row.judged else "not judged"
    return (
        f"{begin}{row.score:.1g} | {box} | {compared if row.boxes else ''} | {mAP} | "
        f"{row.megabytes:.1f} | {verdict} |"
    )


def as_json(row: Row) -> dict[str, object]:
    return {**asdict(row), "passed": row.passed}


def write_table(document: Path, text: str) -> None:
    """Puts the table between the marks of a Markdown file.

    Raises: ConfigError: the file has no such marks.
    """
    content = document.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(
            f"expected a line {BEGIN} and below it a line {END}",
            code="document_marks_missing",
            where=str(document),
        )
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
