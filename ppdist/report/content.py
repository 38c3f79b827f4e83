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
from ppdist.report.run import ClassRow, Confusion, Evaluation, Numbers, Picture, Run, written
from ppdist.runtime.predictor import USUAL_THRESHOLD

# An evaluation.

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


@dataclass
class Scores:
    """What the page shows of an evaluation; None or empty if absent."""

    sizes: Table | None
    metrics: Table | None
    classes: Table | None
    confused: Table | None
    errors: Table | None
    folder: str  # of the images below, where it is one
    worst: list[Picture]
    best: list[Picture]


def scores_of(found: Evaluation) -> Scores:
    """Works out what is shown of an evaluation."""
    names = found.class_names or [row.name for row in found.per_class]
    folder = _folder([*found.worst, *found.best])
    return Scores(
        sizes=_sizes(found),
        metrics=_metrics(found),
        classes=_classes(found.per_class),
        confused=_confused(found.confusion, names),
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


def _named(names: Sequence[str], label: int) -> str:
    return names[label] if 0 <= label < len(names) else f"#{label}"


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


def _confused(found: Confusion | None, names: Sequence[str]) -> Table | None:
    """The pairs of classes that are confused most often."""
    size = len(found.counts or found.true_counts) if found else 0
    if found is None or not size:
        return None
    labels = [_named(names, label) for label in range(size)]
    if size == len(names) + 1:
        labels[-1] = "background"
    of_true, cells = found.true_counts, found.cells
    if found.counts:
        of_true = [sum(counts) for counts in found.counts]
        cells = [
            (row, column, count)
            for row, counts in enumerate(found.counts)
            for column, count in enumerate(counts)
        ]
    wrong = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    rows = [
        [labels[row], labels[column], count, count / max(1, of_true[row])]
        for row, column, count in wrong[:_MOST_PAIRS]
        if count > 0
    ]
    return Table(["true", "predicted", "times", "of the true"], rows) if rows else None


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

_PLACES = (("step", ".0f"), ("epoch", ".1f"))
_SLOW = 1.1  # times the median
_MOST_RANKS = 8  # that are named


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
    slow_ranks: str = ""
    scores: Scores | None = None
    happened: list[str] = field(default_factory=list)


def show(run: Run) -> OneRun:
    """Works out everything the page of one run shows."""
    page = OneRun(run, status_of(run), verdict_on(run), list(_tiles(run)))
    page.slow_ranks = slow_ranks(run)
    page.happened = list(_happened(run))
    page.scores = scores_of(run.evaluation) if run.evaluation else None
    return page


def verdict_on(run: Run) -> list[Finding]:
    """Verdicts on a run; [] while it trains or without data."""
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
    """Precision and recall at the best-F1 confidence and at 0.25."""
    points = [("precision", "recall", best.get("best_f1_threshold"))]
    points.append(("precision_at_25", "recall_at_25", USUAL_THRESHOLD))
    return "; ".join(
        f"precision {best[precision]:.3f}, recall {best[recall]:.3f}"
        + (f" at confidence {confidence:.3g}" if confidence is not None else "")
        for precision, recall, confidence in points
        if precision in best and recall in best
    )


def speed_of(run: Run) -> float | None:
    """Median images per second of the records after the first.

    The first contains one-time work.
    """
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


def _of_present_ranks(run: Run, key: str) -> list[tuple[float, list[float]]]:
    """Pairs of step and per-rank values, for the current rank count.

    A run may be resumed with another number of ranks; the last record gives the current one.
    """
    lists = [(step, found[key]) for step, found in run.ranks if found.get(key)]
    return [each for each in lists if len(each[1]) == len(lists[-1][1])]


def slow_ranks(run: Run) -> str:
    """Ranks that are usually slower than the median; "" for one rank."""
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
    """Runs of one experiment."""

    name: str
    runs: list[Run]


@dataclass(frozen=True)
class SeveralRuns:
    """The page of several runs."""

    groups: list[Group]
    summary: Table
    each: Table | None  # run by run, where a group has several
    differing: Table | None
    classes: Table | None
    note: str


def compare(runs: Sequence[Run]) -> SeveralRuns:
    """Computes everything the page of several runs shows.

    The first run is the baseline of speed.  Gives each run a unique name.
    """
    for run, name in zip(runs, distinct([run.folder for run in runs])):
        run.name = name
    groups = grouped(runs)
    several = any(len(group.runs) > 1 for group in groups)
    note = "± is the standard deviation over the runs of a group." if several else ""
    one_each = [Group(run.name, [run]) for group in groups for run in group.runs]
    return SeveralRuns(
        groups=groups,
        summary=_summary(groups),
        each=_summary(one_each) if several else None,
        differing=_differing(groups),
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
    """Groups runs that differ only in the seed, in the given order."""
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
    members = list(found.values())
    return [Group(name, runs) for name, runs in zip(_names(members), members)]


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
    """A row per group; columns without any value are left out."""
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


def _differing(groups: Sequence[Group]) -> Table | None:
    """Keys of config, schedule and software that differ between groups."""
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
