"""What the page shows: of an evaluation, of one run, of several.

Runs that differ in nothing but the seed are one group; its numbers are means, with the standard
deviation over its runs as their spread.
"""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from ppdist.common.eta import duration
from ppdist.metrics.analysis import CLASS_HEADINGS
from ppdist.metrics.verdict import Finding, verdict
from ppdist.report.charts import COLOURS, INK, Chart, Point, Series, chart
from ppdist.report.run import (
    Calibration,
    ClassRow,
    Confusion,
    Evaluation,
    Numbers,
    Picture,
    Run,
    written,
)
from ppdist.runtime.predictor import USUAL_THRESHOLD

# An evaluation.

_MOST_CURVES = 7  # classes with a curve of their own, beside the mean
_CLASS_COLOURS = (1, 5, 2, 7, 0, 3, 4, 6)  # of page.css, in the order of ppdist/viz's PALETTE
_MOST_CELLS = 40  # classes of a confusion matrix that is drawn
_MOST_NUMBERED = 16  # classes of one whose cells have room for a number
_MOST_PAIRS = 15
_MOST_PICTURES = 12
_SIZES = {  # key of `metrics` -> which objects, and their area
    "mAP": ("all sizes", ""),
    "mAP_small": ("small", "below 32² pixels"),
    "mAP_medium": ("medium", "32² to 96² pixels"),
    "mAP_large": ("large", "above 96² pixels"),
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
    drawn = {place: curves.curve_classes[place] for place in order}
    colours = _colours_of_classes([*drawn.values()])
    x_T, x_R = curves.confidence_T, curves.recall_R
    for title, x, rows, mean in (
        ("precision over recall", x_R, curves.precision_CR, curves.mean_precision_R),
        ("F1 over confidence", x_T, curves.f1_CT, curves.mean_f1_T),
        ("precision over confidence", x_T, curves.precision_CT, curves.mean_precision_T),
        ("recall over confidence", x_T, curves.recall_CT, curves.mean_recall_T),
    ):
        series = [
            Series(_named(names, label), list(zip(x, rows[place])), colours[label])
            for place, label in drawn.items()
        ]
        if len(own) != 1:
            series.insert(0, Series("mean of the classes", list(zip(x, mean)), INK))
        x_label = title.split()[-1]
        yield chart(title, series, x_label=x_label, x_limits=(0.0, 1.0), y_limits=(0.0, 1.02))


def _colours_of_classes(labels: Sequence[int]) -> dict[int, int]:
    """Those of their boxes in pictures (ppdist/viz), where these tell the classes apart."""
    own = {label: _CLASS_COLOURS[label % COLOURS] for label in labels}
    return (
        own
        if len({*own.values()}) == len(own)
        else {label: colour for colour, label in enumerate(labels)}
    )


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
        [Series("ideal", [(0.0, 0.0), (1.0, 1.0)], INK, True), Series("detections", points, 0)],
        x_label="confidence",
        x_limits=(0.0, 1.0),
        y_limits=(0.0, 1.02),
        note="" if error is None else f"expected error {error:.3f}{_from(bins)}",
    )


def _from(bins: Calibration) -> str:
    """Over which detections the expected error is."""
    least = bins.expected_error_from
    return "" if least is None else f" of detections with a confidence of {least:.2f} or more"


def _sizes(found: Evaluation) -> Table | None:
    rows: list[list[Any]] = []
    for key, (name, area) in _SIZES.items():
        recall = "AR100" if key == "mAP" else key.replace("mAP_", "AR_")
        values = [share(found.metrics.get(each)) for each in (key, recall)]
        if any(value is not None for value in values):
            rows.append([name, area, *values])
    columns = ["objects", "area", "AP", "AR"]
    return Table(columns, rows, bars=2) if len(rows) > 1 else None


def _metrics(found: Evaluation) -> Table | None:
    rows = [[name, share(value)] for name, value in found.metrics.items()]
    return Table(["metric", "value"], rows) if rows else None


def _classes(per_class: Sequence[ClassRow]) -> Table | None:
    if not per_class:
        return None
    keys = [key for key in CLASS_HEADINGS if any(getattr(row, key) for row in per_class)]
    counts = ("objects", "images")
    rows = [
        [
            row.name,
            *(getattr(row, key) if key in counts else share(getattr(row, key)) for key in keys),
        ]
        for row in per_class
    ]
    bars = next((1 + place for place, key in enumerate(keys) if key in ("AP", "top1")), None)
    return Table(["class", *(CLASS_HEADINGS[key] for key in keys)], rows, bars)


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
    pairs = Table(["true", "predicted", "times", "of the true"], rows) if rows else None
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


# One run.

# Keys of a record, which name their curves here, in plots/ and in VisualDL -> colour of page.css.
_PARTS_OF_EVALUATION = {"mAP": 0, "mAP50": 1, "mAP75": 2, "top1": 0, "top5": 1}
_PARTS_OF_F1 = {"precision": 0, "recall": 1, "f1": 2}
_PLACES = (("step", ".0f"), ("epoch", ".1f"))
_SLOW = 1.1  # times the median
_MOST_RANKS = 8  # with a curve each; of more the fastest, the median, the slowest


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    name: str
    value: str
    beside: str = ""


@dataclass
class OneRun:
    """The page of one run; what is empty is not shown."""

    run: Run
    status: tuple[str, str]  # a word, and a sentence
    verdict: list[Finding] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    training: list[Chart] = field(default_factory=list)
    speed: list[Chart] = field(default_factory=list)
    slow_ranks: str = ""
    scores: Scores | None = None
    happened: list[str] = field(default_factory=list)


def show(run: Run) -> OneRun:
    """Works out everything the page of one run shows."""
    page = OneRun(run, status_of(run), verdict_on(run), list(_tiles(run)))
    page.training = _course(run)
    page.speed = [each for each in (_throughput(run), _seconds(run), *_of_ranks(run)) if each]
    page.slow_ranks = slow_ranks(run)
    page.happened = list(_happened(run))
    page.scores = scores_of(run.evaluation) if run.evaluation else None
    return page


def verdict_on(run: Run) -> list[Finding]:
    """What came of a run; [] while it goes on, and where there is nothing to judge by."""
    if run.running or not (run.train or run.measured):
        return []
    return verdict(
        run.measured,
        steps=run.train,
        evaluation=_plain(run.evaluation),
        fine_tuned=run.config.get("model.pretrained") is not None,
        finished=run.finished,
    )


def _plain(found: Evaluation | None) -> dict[str, Any]:
    """What the verdict reads of evaluation.json, as the file has it."""
    if found is None:
        return {}
    return {
        "images": found.images,
        "left_out": [each.model_dump() for each in found.left_out],
        "per_class": [each.model_dump() for each in found.per_class],
    }


def status_of(run: Run) -> tuple[str, str]:
    """How the run stands: a word, and what it means."""
    if run.alone_evaluated:
        return "evaluated", "by ppdist eval"
    of = f" of {run.total_steps}" if run.total_steps else ""
    if run.running:
        return "running", f"step {run.steps}{of}"
    if run.finished == "early_stopping":
        return "finished", f"stopped early after step {run.steps}{of}"
    if run.finished == "hours":
        return "finished", f"train.hours was over after step {run.steps}{of}; --resume goes on"
    if run.ended:
        return "finished", f"all {run.steps} steps"
    if not run.train and not run.evaluations:
        return "no records", "it has not yet written down a step"
    if run.finished == "signal":
        return "stopped", f"by a signal after step {run.steps}{of}; --resume goes on"
    return "not finished", f"last record at step {run.steps}{of}; --resume goes on"


def _tiles(run: Run) -> Iterator[Tile]:
    best, name = run.best, run.metric
    if run.alone_evaluated and run.evaluation:
        for key in ("mAP", "mAP50", "mAP75", "f1", "precision", "recall", "top1", "top5"):
            value = share(run.evaluation.metrics.get(key))
            if value is not None:
                yield Tile(key, f"{value:.4f}")
    elif best:
        at = [f"{unit} {best[unit]:{form}}" for unit, form in _PLACES if unit in best]
        yield Tile(f"best {name}", f"{best[name]:.4f}", ", ".join(at))
        for other in ("mAP", "mAP50", "top5"):
            if other in best and other != name:
                yield Tile(other, f"{best[other]:.4f}", "of the same evaluation")
        if "f1" in best:
            yield Tile("F1", f"{best['f1']:.3f}", _operating_points(best))
    losses = [record for record in run.train if "loss" in record]
    if losses:
        measured = [record for record in run.evaluations if "val_loss" in record]
        beside = f"validation {measured[-1]['val_loss']:.3f}" if measured else "last record"
        yield Tile("training loss", f"{losses[-1]['loss']:.3f}", beside)
    speed = speed_of(run)
    if speed:
        ranks = run.derived_value("ranks")
        yield Tile(
            "images per second",
            f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}",
            f"median, {ranks} {'rank' if ranks == '1' else 'ranks'}" * bool(ranks),
        )
    seconds = seconds_of(run)
    if seconds:
        waiting = _waiting(run.train)
        waits = f"{waiting:.1%} of a step waits for images" if waiting is not None else ""
        yield Tile("time", duration(seconds), waits)


def _operating_points(best: Numbers) -> str:
    """Precision and recall at the confidence of the best F1, and at 0.25."""
    points = [("precision", "recall", best.get("best_f1_threshold"))]
    points.append(("precision_at_25", "recall_at_25", USUAL_THRESHOLD))
    return "; ".join(
        f"precision {best[precision]:.3f}, recall {best[recall]:.3f}"
        + (f" at confidence {confidence:.3g}" if confidence is not None else "")
        for precision, recall, confidence in points
        if precision in best and recall in best
    )


def speed_of(run: Run) -> float | None:
    """Images a second, the median of the records but the first, which holds what happens once."""
    name = "images_per_second"
    speeds = [record[name] for record in run.train if name in record]
    return statistics.median(speeds[1:] or speeds) if speeds else None


def seconds_of(run: Run) -> float | None:
    """From the first record to the last, with all between, pauses too."""
    return run.times[1] - run.times[0] if run.times else None


def _waiting(records: Sequence[Numbers]) -> float | None:
    both = [each for each in records if "data_seconds" in each and "step_seconds" in each]
    total = sum(each["step_seconds"] for each in both)
    return sum(each["data_seconds"] for each in both) / total if total > 0 else None


def _axis(*runs: Run) -> str:
    """`epoch`, or `step` where a record does not know its epoch."""
    records = [each for run in runs for each in [*run.train, *run.evaluations]]
    return "epoch" if all("epoch" in each for each in records) else "step"


def _course(run: Run) -> list[Chart]:
    """Losses, scores, rate and gradients over the epochs."""
    x = _axis(run)

    def series(records: Sequence[Numbers], key: str, *look: Any) -> Series:
        return Series(look[0], [(each[x], each.get(key)) for each in records], *look[1:])

    parts = [key for key in (run.train[-1] if run.train else {}) if key.startswith("loss_")]
    losses = []  # each part in one colour: training, and validation dashed
    for colour, key in enumerate(parts):
        name, measured = key.removeprefix("loss_"), f"val_{key}"
        colour %= COLOURS
        losses.append(series(run.train, key, name, colour))
        losses.append(series(run.evaluations, measured, f"{name}, validation", colour, True))
    whole = [series(run.train, "loss", "training", 0)]
    whole.append(series(run.evaluations, "val_loss", "validation", 3))
    scores, f1 = (
        [series(run.evaluations, key, key, colour) for key, colour in keys.items()]
        for keys in (_PARTS_OF_EVALUATION, _PARTS_OF_F1)
    )
    rate = [series(run.train, "lr", "learning rate", 0)]
    norm = [series(run.train, "gradient_norm", "gradient norm", 0)]
    charts = [
        chart("loss", whole, x_label=x),
        chart("parts of the loss", losses, x_label=x),
        chart("scores on the validation set", scores, x_label=x, whole=True),
        chart("at the confidence of the best F1", f1, x_label=x, whole=True),
        chart("learning rate", rate, x_label=x, from_zero=True),
        chart("gradient norm", norm, x_label=x, from_zero=True),
    ]
    return [each for each in charts if each]


def _over(run: Run, key: str) -> list[Point]:
    return [(record["step"], record.get(key)) for record in run.train]


def _throughput(run: Run) -> Chart | None:
    series = [Series("images per second", _over(run, "images_per_second"), 0)]
    return chart("images per second, all ranks", series, x_label="step", from_zero=True)


def _seconds(run: Run) -> Chart | None:
    series = [
        Series("whole step", _over(run, "step_seconds"), 0),
        Series("waiting for images", _over(run, "data_seconds"), 1),
    ]
    return chart("step time, s", series, x_label="step", from_zero=True)


def _of_ranks(run: Run) -> Iterator[Chart | None]:
    for key, what in (
        ("rank_own_seconds", "a step's own work"),
        ("rank_data_seconds", "waiting for images"),
    ):
        lists = _of_present_ranks(run, key)
        ranks = len(lists[-1][1]) if lists else 0
        if ranks < 2:
            continue
        if ranks <= _MOST_RANKS:
            series = [
                Series(f"rank {rank}", [(step, _known(each[rank])) for step, each in lists], rank)
                for rank in range(ranks)
            ]
        else:
            picks: dict[str, Callable[[list[float]], float]] = {
                "slowest": max,
                "median": statistics.median,
                "fastest": min,
            }
            series = [
                Series(name, [(step, _known(pick(each))) for step, each in lists], colour)
                for colour, (name, pick) in enumerate(picks.items())
            ]
        title = f"seconds of each rank: {what}"
        yield chart(title, series, x_label="step", from_zero=True)


def _of_present_ranks(run: Run, key: str) -> list[tuple[float, list[float]]]:
    """(step, a number for each rank) of the records with as many ranks as the last has: a run may
    be resumed on others."""
    lists = [(step, found[key]) for step, found in run.ranks if found.get(key)]
    return [each for each in lists if len(each[1]) == len(lists[-1][1])]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def slow_ranks(run: Run) -> str:
    """Which ranks work longer than the median one, usually; "" for a single rank."""
    lists = [seconds_W for _, seconds_W in _of_present_ranks(run, "rank_own_seconds")]
    ranks = len(lists[-1]) if lists else 0
    if ranks < 2:
        return ""
    ratios_W: list[list[float]] = [[] for _ in range(ranks)]
    for seconds_W in lists:
        middle = statistics.median_low(seconds_W)  # of two ranks the faster one
        for ratios, seconds in zip(ratios_W, seconds_W):
            if middle > 0 and math.isfinite(seconds):
                ratios.append(seconds / middle)
    usual = [(statistics.median(ratios), rank) for rank, ratios in enumerate(ratios_W) if ratios]
    slow = sorted((each for each in usual if each[0] > _SLOW), reverse=True)
    if not slow:
        return "All ranks take the same time for their own work of a step, within 10 %."
    named = ", ".join(f"rank {rank} {ratio:.2f}x" for ratio, rank in slow[:_MOST_RANKS])
    return f"Own work of a step, against the median rank: {named}."


def _happened(run: Run) -> Iterator[str]:
    for step, _ in run.starts[1:]:
        yield f"Started again, from step {step:.0f}."
    for came, went, why in run.rollbacks:
        yield f"Went back from step {came:.0f} to step {went:.0f}: {why}."
    if run.bad_images:
        yield f"{run.bad_images} images could not be used; others took their places."


# Several runs.

# Keys that make no other experiment: where files lie, what is said, and chance.
_SAME_EXPERIMENT = ("seed", "output_dir", "log.")
_NOT_COMPARED = ("output_dir", "log.")
_DERIVED = ("ranks", "total_batch", "lr", "steps", "steps_per_epoch", "warmup_steps")
_SOFTWARE = ("paddle", "ppdist", "code", "python", "cpus", "cards_on_this_host", "platform")
_BETWEEN = " | "  # several values of one group
_MOST_COMPARED_CLASSES = 100
_SEED_AT_END = re.compile(r"[-_. ]*(?:s|seed)?[-_. ]*$", re.IGNORECASE)


@dataclass(frozen=True)
class Group:
    """Runs of one experiment; `colour` as in page.css, beyond the eighth dashed."""

    name: str
    runs: list[Run]
    colour: int
    dashed: bool


@dataclass(frozen=True)
class SeveralRuns:
    """The page of several runs."""

    groups: list[Group]
    summary: Table
    each: Table | None  # run by run, where a group has several
    differing: Table | None
    charts: list[Chart]
    classes: Table | None
    note: str


def compare(runs: Sequence[Run]) -> SeveralRuns:
    """Works out everything the page of several runs shows; the first run is the measure of speed.

    Gives each run a name that the others do not have.
    """
    for run, name in zip(runs, distinct([run.folder for run in runs])):
        run.name = name
    groups = grouped(runs)
    several = any(len(group.runs) > 1 for group in groups)
    note = "± is the standard deviation over the runs of a group." if several else ""
    one_each = [Group(run.name, [run], 0, False) for group in groups for run in group.runs]
    return SeveralRuns(
        groups=groups,
        summary=_summary(groups),
        each=_summary(one_each) if several else None,
        differing=_differing(groups),
        charts=_courses(groups),
        classes=_classes_of_best(groups),
        note=note,
    )


def distinct(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    names = [part[-1] for part in parts]
    for length in range(2, longest + 1):
        common = {name for name, count in Counter(names).items() if count > 1}
        names = [
            str(Path(*part[-length:])) if name in common else name
            for name, part in zip(names, parts)
        ]
    return names


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs of one configuration but for the seed, in the order in which they were given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = {
            key: value for key, value in run.config.items() if not key.startswith(_SAME_EXPERIMENT)
        }
        derived = [run.derived_value(key) for key in _DERIVED]
        # A run without a configuration is like no other.
        own = "" if run.config else f"{run.folder.resolve()}"
        key = json.dumps([settings, derived, own], sort_keys=True, default=str)
        found.setdefault(key, []).append(run)
    return [
        Group(name, members, place % COLOURS, place >= COLOURS)
        for place, (name, members) in enumerate(zip(_names(list(found.values())), found.values()))
    ]


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    names = []
    for runs in groups:
        letters = takewhile(lambda each: len(set(each)) == 1, zip(*(run.name for run in runs)))
        common = "".join(each[0] for each in letters)
        stripped = _SEED_AT_END.sub("", common) if len(runs) > 1 else common
        names.append(stripped or runs[0].name)
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{name} ({place + 1})" if name in repeated else name for place, name in enumerate(names)
    ]


def _spread(values: Sequence[float | None], places: int = 4) -> str | None:
    """`0.561`, or `0.561 ± 0.004` of several."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = f"{statistics.fmean(known):.{places}f}"
    return f"{mean} ± {statistics.stdev(known):.{places}f}" if len(known) > 1 else mean


def _of_best(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.best.get(key) if run.best else None


def _summary(groups: Sequence[Group]) -> Table:
    """A row for each group; columns in which no run has a value are left out."""
    metrics = {run.metric for group in groups for run in group.runs if run.metric}
    metric = next(iter(metrics)) if len(metrics) == 1 else "own metric"
    columns: list[tuple[str, Callable[[Group], object]]] = [
        ("runs", lambda group: len(group.runs)),
        ("state", lambda group: ", ".join(sorted({status_of(run)[0] for run in group.runs}))),
        (f"best {metric}", _of_group(lambda run: run.best[run.metric] if run.best else None)),
        (f"last {metric}", _of_group(lambda run: run.last[run.metric] if run.last else None)),
    ]
    for key in ("mAP", "mAP50", "mAP75", "f1", "val_loss", "top5"):
        if key != metric:
            columns.append((key, _of_group(_of_best(key))))
    first = _mean_speed(groups[0])
    columns += [
        ("steps", lambda group: ", ".join(map(str, sorted({run.steps for run in group.runs})))),
        ("images a second", lambda group: _spread([speed_of(run) for run in group.runs], 1)),
        ("speed", lambda group: _ratio(_mean_speed(group), first)),
        ("time", _mean_time),
    ]
    cells = {name: [value_of(group) for group in groups] for name, value_of in columns}
    shown = [name for name, values in cells.items() if any(value is not None for value in values)]
    if all(len(group.runs) == 1 for group in groups):
        shown.remove("runs")
    rows = [
        [group.name, *(cells[name][place] for name in shown)] for place, group in enumerate(groups)
    ]
    best = f"Other scores are those of the evaluation with the best {metric}." if metrics else ""
    speed = f"Speed: images a second against {groups[0].name}." if first else ""
    return Table(["", *shown], rows, note=f"{best} {speed}".strip())


def _of_group(value_of: Callable[[Run], float | None]) -> Callable[[Group], object]:
    return lambda group: _spread([value_of(run) for run in group.runs])


def _mean_speed(group: Group) -> float | None:
    speeds = [speed for run in group.runs if (speed := speed_of(run))]
    return statistics.fmean(speeds) if speeds else None


def _ratio(speed: float | None, first: float | None) -> str | None:
    return f"{speed / first:.2f}x" if speed and first else None


def _mean_time(group: Group) -> str | None:
    times = [seconds for run in group.runs if (seconds := seconds_of(run)) is not None]
    return duration(statistics.fmean(times)) if times else None


def _courses(groups: Sequence[Group]) -> list[Chart]:
    """Losses, scores, rate, gradients and speed of all runs over one another."""
    drawn = [(group, run) for group in groups for run in group.runs]
    x, metric = _axis(*(run for _, run in drawn)), drawn[0][1].metric

    def over(title: str, key: str, evaluated: bool = False, **limits: Any) -> Chart | None:
        series = []
        for group, run in drawn:
            records = run.evaluations if evaluated else run.train
            points: list[Point] = [(each[x], each.get(key)) for each in records]
            series.append(Series(run.name, points, group.colour, group.dashed, group.name))
        return chart(title, series, x_label=x, **limits)

    scores = dict.fromkeys([metric, "mAP", "mAP50", "f1"])
    charts = [
        over("training loss", "loss"),
        over("validation loss", "val_loss", True),
        *(over(key, key, True, whole=True) for key in scores),
        over("learning rate", "lr", from_zero=True),
        over("gradient norm", "gradient_norm", from_zero=True),
        over("images per second", "images_per_second", from_zero=True),
    ]
    return [each for each in charts if each]


def _differing(groups: Sequence[Group]) -> Table | None:
    """Keys of configuration, derived numbers and software that are not the same everywhere."""
    configured = dict.fromkeys(key for group in groups for run in group.runs for key in run.config)
    facts: dict[str, Callable[[Run], str | None]] = {
        key: partial(_setting, key=key) for key in configured if not key.startswith(_NOT_COMPARED)
    }
    facts |= {f"{key} (derived)": partial(Run.derived_value, key=key) for key in _DERIVED}
    facts |= {f"{key} (environment)": partial(_software, key=key) for key in _SOFTWARE}
    rows = [[name, *_values(groups, value_of)] for name, value_of in facts.items()]
    rows = [row for row in rows if len(set(row[1:])) > 1 or _BETWEEN in row[1]]
    return Table(["key", *(group.name for group in groups)], rows) if rows else None


def _values(groups: Sequence[Group], value_of: Callable[[Run], str | None]) -> list[str]:
    """One for each group, or all that its runs have."""
    return [
        _BETWEEN.join(dict.fromkeys(value_of(run) or "–" for run in group.runs)) for group in groups
    ]


def _setting(run: Run, key: str) -> str | None:
    return written(run.config[key]) if key in run.config else None


def _software(run: Run, key: str) -> str | None:
    value = run.environment.get(key)
    return None if value is None else written(value)


def _classes_of_best(groups: Sequence[Group]) -> Table | None:
    """AP of each class at the best evaluation."""
    names = dict.fromkeys(
        key
        for group in groups
        for run in group.runs
        for key in (run.best or {})
        if key.startswith("AP/")
    )
    if not names or len(names) > _MOST_COMPARED_CLASSES:
        return None
    rows = [
        [key.removeprefix("AP/"), *(_of_group(_of_best(key))(group) for group in groups)]
        for key in names
    ]
    return Table(["class", *(group.name for group in groups)], rows)
