"""evaluation.json, read with care, as charts and tables.

A file of another version, or of a stranger, must cost a table and not the page: parts that cannot
be read are left out by themselves.  Letters: C classes, T confidences, R recalls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from ppdist.report.charts import Chart, Point, Series, chart

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


_MOST_CURVES = 7  # classes with a curve of their own, beside the mean
_MOST_CELLS = 40  # classes of a confusion matrix that is drawn
_MOST_NUMBERED = 16  # classes of one whose cells have room for a number
_MOST_PAIRS = 15
_MOST_PICTURES = 12
_SIZES = {"mAP": "all sizes", "mAP_small": "small", "mAP_medium": "medium", "mAP_large": "large"}
_SIZE_RULES = {
    "all sizes": "",
    "small": "below 32² pixels",
    "medium": "32² to 96² pixels",
    "large": "above 96² pixels",
}


@dataclass(frozen=True)
class Table:
    """Columns, and rows of cells; the first column names a row.

    A cell is text or a number, None where there is nothing; `bars` is the column whose shares are
    drawn as bars, too, as parts of `full`.
    """

    columns: list[str]
    rows: list[list[Any]]
    bars: int | None = None
    full: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """A field of the confusion matrix: where, how many, and how much of its row."""

    row: int
    column: int
    count: int
    share: float


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix that can be drawn."""

    names: list[str]
    cells: list[Cell]
    numbered: bool


@dataclass
class Scores:
    """What is shown of an evaluation; None or empty where it does not say."""

    charts: list[Chart]
    sizes: Table | None
    metrics: Table | None
    classes: Table | None
    matrix: Matrix | None
    confused: Table | None
    errors: Table | None
    folder: str  # of the images below, where it is one
    worst: list[Picture]
    best: list[Picture]


def scores_of(found: Evaluation) -> Scores:
    """Works out what is shown of an evaluation."""
    names = found.class_names or [row.name for row in found.per_class]
    matrix, confused = _matrix(found.confusion, names)
    folder = _folder([*found.worst, *found.best])
    charts = [*_class_charts(found, names), _calibration(found)]
    return Scores(
        charts=[each for each in charts if each],
        sizes=_sizes(found),
        metrics=_metrics(found),
        classes=_classes(found.per_class),
        matrix=matrix,
        confused=confused,
        errors=_errors(found),
        folder=folder,
        worst=_inside(folder, found.worst),
        best=_inside(folder, found.best),
    )


def _folder(pictures: Sequence[Picture]) -> str:
    folders = {picture.file.rpartition("/")[0] for picture in pictures}
    return folders.pop() if len(folders) == 1 else ""


def _inside(folder: str, pictures: Sequence[Picture]) -> list[Picture]:
    start = len(folder) + 1 if folder else 0
    shown = pictures[:_MOST_PICTURES]
    return [picture.model_copy(update={"file": picture.file[start:]}) for picture in shown]


def _class_charts(found: Evaluation, names: Sequence[str]) -> Iterator[Chart | None]:
    """The mean over classes, and the classes with most objects."""
    curves = found.curves
    if curves is None:
        return
    objects = [row.objects or 0 for row in found.per_class]
    own = [label if 0 <= label < len(objects) else -1 for label in curves.curve_classes]
    weight = [objects[label] if label >= 0 else 0 for label in own]
    order = sorted(range(len(own)), key=lambda place: (-weight[place], place))[:_MOST_CURVES]
    x_T, x_R = curves.confidence_T, curves.recall_R
    for title, x, rows, mean in (
        ("precision over recall", x_R, curves.precision_CR, curves.mean_precision_R),
        ("F1 over confidence", x_T, curves.f1_CT, curves.mean_f1_T),
        ("precision over confidence", x_T, curves.precision_CT, curves.mean_precision_T),
        ("recall over confidence", x_T, curves.recall_CT, curves.mean_recall_T),
    ):
        series = [
            Series(_named(names, curves.curve_classes[place]), list(zip(x, rows[place])), number)
            for number, place in enumerate(order, start=1)
        ]
        if len(own) != 1:
            series.insert(0, Series("mean of the classes", list(zip(x, mean)), 0))
        x_label = title.split()[-1]
        yield chart(title, series, x_label=x_label, x_limits=(0.0, 1.0), y_limits=(0.0, 1.02))


def _named(names: Sequence[str], label: int) -> str:
    return names[label] if 0 <= label < len(names) else f"#{label}"


def _calibration(found: Evaluation) -> Chart | None:
    bins = found.calibration
    if bins is None:
        return None
    points: list[Point] = sorted(
        (sure, right)
        for sure, right in zip(bins.confidence, bins.precision)
        if sure is not None and right is not None
    )
    if not points:
        return None
    error = bins.expected_error
    return chart(
        "calibration: share that is right over confidence",
        [Series("ideal", [(0.0, 0.0), (1.0, 1.0)], 7, True), Series("detections", points, 0)],
        x_label="confidence",
        x_limits=(0.0, 1.0),
        y_limits=(0.0, 1.02),
        note="" if error is None else f"expected error {error:.3f}",
    )


def _sizes(found: Evaluation) -> Table | None:
    rows: list[list[Any]] = []
    for key, name in _SIZES.items():
        recall = "AR100" if key == "mAP" else key.replace("mAP_", "AR_")
        values = [share(found.metrics.get(each)) for each in (key, recall)]
        if any(value is not None for value in values):
            rows.append([name, _SIZE_RULES[name], *values])
    columns = ["objects", "area", "AP", "AR"]
    return Table(columns, rows, bars=2) if len(rows) > 1 else None


def _metrics(found: Evaluation) -> Table | None:
    rows = [[name, share(value)] for name, value in found.metrics.items()]
    return Table(["metric", "value"], rows) if rows else None


_CLASS_COLUMNS = {
    "top1": "top 1", "top5": "top 5",
    "AP": "AP", "AP50": "AP50", "AP75": "AP75", "AP_small": "small", "AP_medium": "medium",
    "AP_large": "large", "AR100": "AR100", "precision": "P", "recall": "R", "f1": "F1",
    "VOC_11_point": "VOC 11", "VOC_area": "VOC area",
}  # fmt: skip


def _classes(per_class: Sequence[ClassRow]) -> Table | None:
    if not per_class:
        return None
    counts = [name for name in ("objects", "images") if getattr(per_class[0], name) is not None]
    keys = [key for key in _CLASS_COLUMNS if any(share(getattr(row, key)) for row in per_class)]
    rows = [
        [row.name, *(getattr(row, name) for name in counts)]
        + [share(getattr(row, key)) for key in keys]
        for row in per_class
    ]
    bars = 1 + len(counts) if keys else None
    return Table(["class", *counts, *(_CLASS_COLUMNS[key] for key in keys)], rows, bars)


def share(value: float | None) -> float | None:
    """COCO says -1 where there is nothing to measure."""
    return None if value is None or value < 0 else float(value)


def _matrix(found: Confusion | None, names: Sequence[str]) -> tuple[Matrix | None, Table | None]:
    """The matrix, where there is room for it, and the pairs confused most often."""
    size = len(found.counts or found.true_counts) if found else 0
    if found is None or not size:
        return None, None
    labels = [_named(names, label) for label in range(size)]
    if size == len(names) + 1:
        labels[-1] = "background"
    of_true, places = found.true_counts, found.cells
    if found.counts:
        of_true = [sum(counts) for counts in found.counts]
        places = [
            (row, column, count)
            for row, counts in enumerate(found.counts)
            for column, count in enumerate(counts)
        ]
    cells = [
        Cell(row, column, count, count / max(1, of_true[row]))
        for row, column, count in places
        if count > 0
    ]
    wrong = sorted((each for each in cells if each.row != each.column), key=lambda c: -c.count)
    rows = [[labels[c.row], labels[c.column], c.count, c.share] for c in wrong[:_MOST_PAIRS]]
    pairs = Table(["truth", "prediction", "times", "of the truth"], rows) if rows else None
    if size > _MOST_CELLS + 1:
        return None, pairs
    return Matrix(labels, cells, size <= _MOST_NUMBERED + 1), pairs


_ERRORS = {
    "correct": "right",
    "localisation": "right class, box too far off",
    "class": "right box, wrong class",
    "duplicate": "an object that was found already",
    "background": "where nothing is",
    "missed": "objects not found",
}


def _errors(found: Evaluation) -> Table | None:
    if found.errors is None:
        return None
    gains = {name: share(gain) for name, gain in found.errors.AP50_gain.items()}
    rows = [
        [name, _ERRORS.get(name, ""), count, gains.get(name)]
        for name, count in found.errors.counts.items()
    ]
    full = max((gain for gain in gains.values() if gain is not None), default=0.0)
    columns = ["what", "meaning", "times", "AP50 gained without"]
    return Table(columns, rows, bars=3, full=full or 1.0) if rows else None
