"""evaluation.json as its writer meant it; parts that are otherwise are left out by themselves.

A file of another version, or of a stranger, must cost a table and not the page.  Letters: C
classes, T confidences, R recalls.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

Share = float | None  # null: nothing to measure
_MOST_CLASSES = 100_000


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ClassRow(_Part):
    """One class; of classifiers `images`, `precision` and the last two."""

    name: str
    objects: int | None = None
    images: int | None = None
    AP: Share = None
    AP50: Share = None
    AP75: Share = None
    AP_small: Share = None
    AP_medium: Share = None
    AP_large: Share = None
    AR100: Share = None
    VOC_11_point: Share = None
    VOC_area: Share = None
    precision: Share = None
    recall: Share = None
    f1: Share = None
    top1: Share = None
    top5: Share = None


class Curves(_Part):
    """At IoU 0.5.  Rows are the classes `curve_classes`; means are over all classes."""

    curve_classes: list[int]
    confidence_T: list[float]
    precision_CT: list[list[Share]]
    recall_CT: list[list[Share]]
    f1_CT: list[list[Share]]
    mean_precision_T: list[Share]
    mean_recall_T: list[Share]
    mean_f1_T: list[Share]
    recall_R: list[float]
    precision_CR: list[list[Share]]
    mean_precision_R: list[Share]

    @model_validator(mode="after")
    def _of_one_length(self) -> "Curves":
        for x, rows_C, mean in (
            (self.confidence_T, self.precision_CT, self.mean_precision_T),
            (self.confidence_T, self.recall_CT, self.mean_recall_T),
            (self.confidence_T, self.f1_CT, self.mean_f1_T),
            (self.recall_R, self.precision_CR, self.mean_precision_R),
        ):
            if len(rows_C) != len(self.curve_classes):
                raise ValueError("it has not one curve for each of its classes")
            if any(len(row) != len(x) for row in (*rows_C, mean)):
                raise ValueError("its curves are not of one length")
        return self


class Confusion(_Part):
    """Rows are true classes, columns predicted ones; of detectors the last is background.

    Of very many classes there are only the largest `cells` (row, column, count), and sums of rows.
    """

    counts: list[list[int]] = []
    cells: list[tuple[int, int, int]] = []
    true_counts: list[int] = []
    iou: float | None = None
    confidence: float | None = None

    @model_validator(mode="after")
    def _is_square(self) -> "Confusion":
        if any(len(row) != len(self.counts) for row in self.counts):
            raise ValueError("it is not square")
        if any(not 0 <= at < len(self.true_counts) for cell in self.cells for at in cell[:2]):
            raise ValueError("a cell lies outside")
        return self


class Calibration(_Part):
    """Of detections in bins of confidence: how sure they were, and how many were right."""

    edges: list[float]
    confidence: list[Share]
    precision: list[Share]
    count: list[int]
    expected_error: Share = None

    @model_validator(mode="after")
    def _of_one_length(self) -> "Calibration":
        if len({len(self.confidence), len(self.precision), len(self.count)}) != 1:
            raise ValueError("its lists are not of one length")
        return self


class Errors(_Part):
    """How many detections went wrong how, and what AP50 would gain without."""

    counts: dict[str, int]
    AP50_gain: dict[str, Share] = {}


class Picture(_Part):
    """One image, and how the model did on it."""

    file: str
    objects: int | None = None
    found: int | None = None
    missed: int | None = None
    wrong: int | None = None


@dataclass
class Evaluation:
    """What evaluation.json holds; None or empty where a part is missing."""

    step: int | None = None
    images: int | None = None
    class_names: list[str] = field(default_factory=list)
    metrics: dict[str, Share] = field(default_factory=dict)
    per_class: list[ClassRow] = field(default_factory=list)
    curves: Curves | None = None
    confusion: Confusion | None = None
    calibration: Calibration | None = None
    errors: Errors | None = None
    worst: list[Picture] = field(default_factory=list)
    best: list[Picture] = field(default_factory=list)


PartT = TypeVar("PartT")


def read_evaluation(content: Mapping[str, Any]) -> tuple[Evaluation, list[str]]:
    """Returns: what could be understood; and for each part that could not, why."""
    problems: list[str] = []

    def part(name: str, kind: Any, otherwise: PartT) -> PartT:
        value = content.get(name)
        if value is None:
            return otherwise
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(each) for each in (name, *first["loc"]))
            problems.append(f"{where}: {first['msg']}")
            return otherwise

    empty = Evaluation()
    evaluation = Evaluation(
        step=part("step", int, empty.step),
        images=part("images", int, empty.images),
        class_names=part("class_names", list[str], empty.class_names)[:_MOST_CLASSES],
        metrics=part("metrics", dict[str, Share], empty.metrics),
        per_class=part("per_class", list[ClassRow], empty.per_class)[:_MOST_CLASSES],
        curves=part("curves", Curves, empty.curves),
        confusion=part("confusion", Confusion, empty.confusion),
        calibration=part("calibration", Calibration, empty.calibration),
        errors=part("errors", Errors, empty.errors),
        worst=part("worst", list[Picture], empty.worst),
        best=part("best", list[Picture], empty.best),
    )
    return evaluation, problems
