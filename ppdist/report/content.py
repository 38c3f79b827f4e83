"""What the page shows: of an evaluation, of one run, of several.

Runs that differ in nothing but the seed are one group; its numbers are means, with the standard
deviation over its runs as their spread.
"""

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from ppdist.common.errors import ConfigError
from ppdist.common.eta import duration
from ppdist.config.base import leaves
from ppdist.config.experiment import experiment_of
from ppdist.metrics.analysis import CLASS_HEADINGS
from ppdist.metrics.run import Numbers, Run
from ppdist.metrics.verdict import Finding, verdict_of
from ppdist.runtime.predictor import USUAL_THRESHOLD

# An evaluation.

_MOST_PAIRS = 15
_MOST_PICTURES = 12
_SIZES = {  # keys of `metrics` -> which objects, and their area
    ("mAP", "AR100"): ("all sizes", ""),
    ("mAP_small", "AR_small"): ("small", "below 32² pixels"),
    ("mAP_medium", "AR_medium"): ("medium", "32² to 96² pixels"),
    ("mAP_large", "AR_large"): ("large", "above 96² pixels"),
}
_ERRORS = {
    "correct": "right",
    "localisation": "right class, box too far off",
    "class": "right box, wrong class",
    "duplicate": "an object that was found already",
    "background": "where nothing is",
    "missed": "objects not found",
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
    worst: list[dict[str, Any]]
    best: list[dict[str, Any]]


def scores_of(found: Mapping[str, Any]) -> Scores:
    """Works out what is shown of an evaluation.

    Args: found: as `Run.evaluation`.
    """
    metrics = {name: share(value) for name, value in (found.get("metrics") or {}).items()}
    values = [[*about, *map(metrics.get, keys)] for keys, about in _SIZES.items()]
    sizes = [row for row in values if row[2:] != [None, None]]
    pictures = {name: (found.get(name) or [])[:_MOST_PICTURES] for name in ("worst", "best")}
    folders = {each["file"].rpartition("/")[0] for both in pictures.values() for each in both}
    folder = folders.pop() if len(folders) == 1 else ""
    start = len(folder) + 1 if folder else 0
    worst, best = (
        [{**each, "file": each["file"][start:]} for each in both] for both in pictures.values()
    )
    return Scores(
        sizes=Table(["objects", "area", "AP", "AR"], sizes, bars=2) if len(sizes) > 1 else None,
        metrics=Table(["metric", "value"], [list(row) for row in metrics.items()])
        if metrics
        else None,
        classes=_classes(found.get("per_class") or ()),
        confused=_confused(found),
        errors=_errors(found.get("errors")),
        folder=folder,
        worst=worst,
        best=best,
    )


def share(value: float | None) -> float | None:
    """COCO says -1 where there is nothing to measure."""
    return None if value is None or value < 0 else float(value)


def _classes(per_class: Sequence[Mapping[str, Any]]) -> Table | None:
    keys = [key for key in CLASS_HEADINGS if any(row.get(key) for row in per_class)]
    bars = next((1 + place for place, key in enumerate(keys) if key in ("AP", "top1")), None)
    rows = [[row.get("name"), *(_cell(row.get(key)) for key in keys)] for row in per_class]
    return Table(["class", *(CLASS_HEADINGS[key] for key in keys)], rows, bars) if rows else None


def _cell(value: object) -> object:
    return share(value) if isinstance(value, float) else value


def _confused(evaluation: Mapping[str, Any]) -> Table | None:
    """The pairs of classes that are confused most often."""
    found = evaluation.get("confusion") or {}
    counts, of_true, cells = (found.get(key) or [] for key in ("counts", "true_counts", "cells"))
    if counts:
        of_true = [sum(row) for row in counts]
        cells = [
            (true, at, times) for true, row in enumerate(counts) for at, times in enumerate(row)
        ]
    rows = evaluation.get("per_class") or ()
    of_true = [row.get("objects") or sums for row, sums in zip(rows, of_true)] + of_true[
        len(rows) :
    ]
    labels = [*(evaluation.get("class_names") or [row.get("name") for row in rows])]
    if len(of_true) == len(labels) + 1:
        labels.append("background")
    labels += [f"#{label}" for label in range(len(labels), len(of_true))]
    wrong = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    pairs = [
        [labels[true], labels[predicted], times, times / max(1, of_true[true])]
        for true, predicted, times in wrong[:_MOST_PAIRS]
        if times > 0
    ]
    return Table(["true", "predicted", "times", "of the true"], pairs) if pairs else None


def _errors(found: Mapping[str, Any] | None) -> Table | None:
    if not found or not found["counts"]:
        return None
    gains = {name: share(gain) for name, gain in found["AP50_gain"].items()}
    rows = [
        [name, _ERRORS.get(name, ""), count, gains.get(name)]
        for name, count in found["counts"].items()
    ]
    full = max((gain for gain in gains.values() if gain is not None), default=0.0)
    columns = ["what", "meaning", "times", "AP50 gained without"]
    return Table(columns, rows, bars=3, full=full or 1.0)


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
    return [] if run.running or not (run.train or run.measured) else verdict_of(run)


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
        return "finished", f"train.hours was over after step {run.steps}{of}; --resume continues it"
    if run.ended:
        return "finished", f"all {run.steps} steps"
    if not run.train and not run.evaluations:
        return "no records", "it has not recorded a step yet"
    if run.finished == "signal":
        return "stopped", f"by a signal after step {run.steps}{of}; --resume continues it"
    return "not finished", f"last record at step {run.steps}{of}; --resume continues it"


def _tiles(run: Run) -> Iterator[Tile]:
    best, name = run.best, run.metric
    if run.alone_evaluated and run.evaluation:
        for key in ("mAP", "mAP50", "mAP75", "f1", "precision", "recall", "top1", "top5"):
            value = share((run.evaluation.get("metrics") or {}).get(key))
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


def slow_ranks(run: Run) -> str:
    """Ranks that usually take longer than the median for a micro-batch.

    "": fewer than two have micro-batches.
    """
    seconds_RW = run.rank_seconds("rank_micro_batch_seconds")[1][:, 0]
    if not seconds_RW.size:  # of an earlier version, where all ranks had equally many
        seconds_RW = run.rank_seconds("rank_own_seconds")[1][:, 0]
    ranks_K = np.flatnonzero(np.median(seconds_RW, axis=0) > 0) if seconds_RW.size else ()
    if len(ranks_K) < 2:
        return ""
    seconds_RK = seconds_RW[:, ranks_K]
    middle_R1 = np.quantile(
        seconds_RK, 0.5, axis=1, keepdims=True, method="lower"
    )  # of two the faster
    usual_K = np.median(seconds_RK / np.maximum(middle_R1, 1e-12), axis=0).tolist()
    slow = sorted(
        ((ratio, rank) for rank, ratio in zip(ranks_K, usual_K) if ratio > _SLOW), reverse=True
    )
    if not slow:
        return "All ranks take the same time for their own work of a micro-batch, within 10 %."
    named = ", ".join(f"rank {rank} {ratio:.2f}x" for ratio, rank in slow[:_MOST_RANKS])
    return f"Own work of a micro-batch, against the median rank: {named}."


def _happened(run: Run) -> Iterator[str]:
    for step in run.starts[1:]:
        yield f"Resumed from step {step:.0f}."
    for came, went, why in run.rollbacks:
        yield f"Rolled back from step {came:.0f} to step {went:.0f}: {why}."
    if run.bad_images:
        yield f"{run.bad_images} images could not be used and were substituted by others."


# Several runs.

# Keys that do not change the experiment: paths, logging, and seeds.
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


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _spread(values: Iterable[float | None], places: int = 4) -> str | None:
    """`0.561`, or `0.561 ± 0.004` of several."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = f"{statistics.fmean(known):.{places}f}"
    return f"{mean} ± {statistics.stdev(known):.{places}f}" if len(known) > 1 else mean


def _summary(groups: Sequence[Group]) -> Table:
    """A row per group; columns without any value are left out."""
    metrics = {run.metric for group in groups for run in group.runs if run.metric}
    metric = next(iter(metrics)) if len(metrics) == 1 else "own metric"
    scores = [key for key in ("mAP", "mAP50", "mAP75", "f1", "val_loss", "top5") if key != metric]
    first = _mean(map(speed_of, groups[0].runs))
    rows = []
    for group in groups:
        runs = group.runs
        best, last = [run.best or {} for run in runs], [run.last or {} for run in runs]
        speed, seconds = _mean(map(speed_of, runs)), _mean(map(seconds_of, runs))
        rows.append({
            "": group.name,
            "runs": len(runs),
            "state": ", ".join(sorted({status_of(run)[0] for run in runs})),
            f"best {metric}": _spread(each.get(run.metric) for each, run in zip(best, runs)),
            f"last {metric}": _spread(each.get(run.metric) for each, run in zip(last, runs)),
            **{key: _spread(each.get(key) for each in best) for key in scores},
            "steps": ", ".join(map(str, sorted({run.steps for run in runs}))),
            "images a second": _spread(map(speed_of, runs), 1),
            "speed": f"{speed / first:.2f}x" if speed and first else None,
            "time": None if seconds is None else duration(seconds),
        })  # fmt: skip
    shown = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    if all(len(group.runs) == 1 for group in groups):
        shown.remove("runs")
    note = f"Other scores are those of the evaluation with the best {metric}." if metrics else ""
    note += f" Speed: images a second against {groups[0].name}." if first else ""
    return Table(shown, [[row[name] for name in shown] for row in rows], note=note.strip())


def _differing(groups: Sequence[Group]) -> Table | None:
    """Keys of config, schedule and software that differ between groups."""
    configured = dict.fromkeys(
        key
        for group in groups
        for run in group.runs
        for key in run.config
        if not key.startswith(_NOT_COMPARED)
    )
    sources: list[tuple[str, Iterable[str], Callable[[Run], Mapping[str, Any]]]] = [
        ("", configured, lambda run: run.config),
        (" (derived)", _DERIVED, lambda run: {key: said for key, (said, _) in run.derived.items()}),
        (" (environment)", _SOFTWARE, lambda run: run.environment),
    ]
    rows = []
    for suffix, keys, facts_of in sources:
        for key in keys:
            said = [
                _BETWEEN.join(
                    dict.fromkeys(written(facts_of(run).get(key, "–")) for run in group.runs)
                )
                for group in groups
            ]
            if len(set(said)) > 1 or _BETWEEN in said[0]:
                rows.append([key + suffix, *said])
    return Table(["key", *(group.name for group in groups)], rows) if rows else None


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
        [
            key.removeprefix("AP/"),
            *(_spread((run.best or {}).get(key) for run in group.runs) for group in groups),
        ]
        for key in names
    ]
    return Table(["class", *(group.name for group in groups)], rows)


# The configuration, beside the defaults.


class Setting(NamedTuple):
    """A key, its value and default as YAML; "" without default."""

    key: str
    value: str
    default: str


def written(value: object) -> str:
    """A value on one line, nearly as YAML has it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def settings_of(tree: Mapping[str, Any]) -> tuple[list[Setting], str]:
    """Compares a configuration with the defaults of this version.

    Returns: the keys that differ, in the order of the file; and "", or why none could be compared.
    """
    if not tree:
        return [], "there is no configuration"
    try:
        config = experiment_of(tree)
    except ConfigError as error:
        return [], f"{error}"
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return [], f"another version wrote it: {where}: {first['msg']}"
    differing = dict(leaves(config.model_dump(mode="json", exclude_defaults=True)))
    return [
        Setting(key, written(value), _default(config, key.split(".")))
        for key, value in leaves(tree)
        if key in differing
    ], ""


def _default(config: BaseModel, path: list[str]) -> str:
    section: Any = config
    for part in path[:-1]:
        section = getattr(section, part, None)
    field = type(section).model_fields.get(path[-1]) if isinstance(section, BaseModel) else None
    value = PydanticUndefined if field is None else field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    return written(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)
