"""The content of the page about an evaluation and a run."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from ppdist.common.errors import ConfigError
from ppdist.common.eta import duration
from ppdist.config.experiment import experiment_of
from ppdist.config.parse import leaves
from ppdist.metrics.analysis import CLASS_HEADINGS, EXTRA, MISSED, counts_objects_twice
from ppdist.metrics.findings import Finding
from ppdist.metrics.run import Numbers, Run
from ppdist.metrics.verdict import judge_run
from ppdist.runtime.predictor import USUAL_THRESHOLD

# The content about an evaluation.

_MOST_PAIRS = 15
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
    """A table of columns and rows; the first column names a row.

    A cell is text, a number, or None if it is empty; the numbers of the column `bars` are also
    drawn as bars, as fractions of `full`.
    """

    columns: list[str]
    rows: list[list[Any]]
    bars: int | None = None
    full: float = 1.0


@dataclass
class Scores:
    """The tables about an evaluation; None where there is nothing to show.

    counts_twice: the confusion matrix is of an earlier version, which counted some objects twice.
    """

    sizes: Table | None
    metrics: Table | None
    classes: Table | None
    confused: Table | None
    errors: Table | None
    counts_twice: bool


def make_scores(evaluation: Mapping[str, Any]) -> Scores:
    """Builds the tables about an evaluation.

    Args: evaluation: as `Run.evaluation`.
    """
    metrics = {name: share(value) for name, value in (evaluation.get("metrics") or {}).items()}
    values = [[*about, *map(metrics.get, keys)] for keys, about in _SIZES.items()]
    sizes = [row for row in values if row[2:] != [None, None]]
    return Scores(
        sizes=Table(["objects", "area", "AP", "AR"], sizes, bars=2) if len(sizes) > 1 else None,
        metrics=Table(["metric", "value"], [list(row) for row in metrics.items()])
        if metrics
        else None,
        classes=_class_table(evaluation.get("per_class") or ()),
        confused=_confusion_table(evaluation),
        errors=_error_table(evaluation.get("errors")),
        counts_twice=counts_objects_twice(evaluation),
    )


def share(value: float | None) -> float | None:
    """Returns None for COCO's -1, which means nothing to measure."""
    return None if value is None or value < 0 else float(value)


def _class_table(per_class: Sequence[Mapping[str, Any]]) -> Table | None:
    keys = [key for key in CLASS_HEADINGS if any(row.get(key) for row in per_class)]
    bars = next((1 + place for place, key in enumerate(keys) if key in ("AP", "top1")), None)
    rows = [[row.get("name"), *(_cell(row.get(key)) for key in keys)] for row in per_class]
    return Table(["class", *(CLASS_HEADINGS[key] for key in keys)], rows, bars) if rows else None


def _cell(value: object) -> object:
    return share(value) if isinstance(value, float) else value


def _confusion_table(evaluation: Mapping[str, Any]) -> Table | None:
    """Lists the pairs of classes confused most often, then missed objects and extra detections."""
    confusion = evaluation.get("confusion") or {}
    counts, true_counts, cells = (
        confusion.get(key) or [] for key in ("counts", "true_counts", "cells")
    )
    if counts:
        true_counts = [sum(row) for row in counts]
        cells = [
            (true, called, times)
            for true, row in enumerate(counts)
            for called, times in enumerate(row)
        ]
    rows = evaluation.get("per_class") or ()
    true_counts = [
        row.get("objects") or sums for row, sums in zip(rows, true_counts)
    ] + true_counts[len(rows) :]
    labels = [*(evaluation.get("class_names") or [row.get("name") for row in rows])]
    background = len(labels) if len(true_counts) == len(labels) + 1 else None
    labels += [f"#{label}" for label in range(len(labels), len(true_counts))]
    mistakes = sorted(
        (cell for cell in cells if cell[0] != cell[1]),
        key=lambda cell: (background in cell[:2], -cell[2]),
    )
    pairs: list[list[Any]] = []
    for true, predicted, times in mistakes[:_MOST_PAIRS]:
        if times > 0:
            # Extra detections have no true class, so there is no share.
            part = None if true == background else times / max(1, true_counts[true])
            names = [
                EXTRA if true == background else labels[true],
                MISSED if predicted == background else labels[predicted],
            ]
            pairs.append([*names, times, part])
    return Table(["true", "predicted", "times", "of the true"], pairs) if pairs else None


def _error_table(errors: Mapping[str, Any] | None) -> Table | None:
    if not errors or not errors["counts"]:
        return None
    gains = {name: share(gain) for name, gain in errors["AP50_gain"].items()}
    rows = [
        [name, _ERRORS.get(name, ""), count, gains.get(name)]
        for name, count in errors["counts"].items()
    ]
    full = max((gain for gain in gains.values() if gain is not None), default=0.0)
    columns = ["what", "meaning", "times", "AP50 gained without"]
    return Table(columns, rows, bars=3, full=full or 1.0)


# The content about a run.

_PLACES = (("step", ".0f"), ("epoch", ".1f"))
_SLOW = 1.1  # a rank above this multiple of the median is slow
_MOST_RANKS = 8  # slow ranks that are named


@dataclass(frozen=True)
class Tile:
    """A headline number of the page."""

    name: str
    value: str
    beside: str = ""


@dataclass
class Page:
    """The content of a run's page; empty parts are not shown."""

    run: Run
    status: tuple[str, str]  # a word, and a sentence
    verdict: list[Finding] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    slow_ranks: str = ""
    scores: Scores | None = None
    events: list[str] = field(default_factory=list)


def show(run: Run) -> Page:
    """Builds the content of a run's page."""
    page = Page(run, describe_status(run), judge_if_ended(run), list(_tiles(run)))
    page.slow_ranks = slow_ranks(run)
    page.events = list(_list_events(run))
    page.scores = make_scores(run.evaluation) if run.evaluation else None
    return page


def judge_if_ended(run: Run) -> list[Finding]:
    """Judges a run; [] while it trains or without data."""
    return [] if run.running or not (run.train or run.measured) else judge_run(run)


def describe_status(run: Run) -> tuple[str, str]:
    """Describes the state of a run: a word, and its meaning."""
    if run.is_evaluation:
        return "evaluated", "by ppdist eval"
    of_total = f" of {run.total_steps}" if run.total_steps else ""
    if run.running:
        return "running", f"step {run.steps}{of_total}"
    if run.finished == "early_stopping":
        return "finished", f"stopped early after step {run.steps}{of_total}"
    if run.finished == "hours":
        return (
            "finished",
            f"train.hours was over after step {run.steps}{of_total}; --resume continues it",
        )
    if run.ended:
        return "finished", f"all {run.steps} steps"
    if not run.train and not run.evaluations:
        return "no records", "it has not recorded a step yet"
    if run.finished == "signal":
        return "stopped", f"by a signal after step {run.steps}{of_total}; --resume continues it"
    return "not finished", f"last record at step {run.steps}{of_total}; --resume continues it"


def _tiles(run: Run) -> Iterator[Tile]:
    best, name = run.best, run.metric
    if run.is_evaluation and run.evaluation:
        for key in ("mAP", "mAP50", "mAP75", "f1", "precision", "recall", "top1", "top5"):
            value = share((run.evaluation.get("metrics") or {}).get(key))
            if value is not None:
                yield Tile(key, f"{value:.4f}")
    elif best:
        position = [f"{unit} {best[unit]:{form}}" for unit, form in _PLACES if unit in best]
        yield Tile(f"best {run.metric_text}", f"{best[name]:.4f}", ", ".join(position))
        for metric in ("mAP", "mAP50", "top5"):
            if metric in best and metric != name:
                yield Tile(metric, f"{best[metric]:.4f}", "of the same evaluation")
        if "f1" in best:
            yield Tile("F1", f"{best['f1']:.3f}", _operating_points(best))
    losses = [record for record in run.train if "loss" in record]
    if losses:
        measured = [record for record in run.evaluations if "val_loss" in record]
        note = f"validation {measured[-1]['val_loss']:.3f}" if measured else "last record"
        yield Tile("training loss", f"{losses[-1]['loss']:.3f}", note)
    speed = median_speed(run)
    if speed:
        ranks = run.derived_value("ranks")
        yield Tile(
            "images per second",
            f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}",
            f"median, {ranks} {'rank' if ranks == '1' else 'ranks'}" * bool(ranks),
        )
    seconds = total_seconds(run)
    if seconds:
        waiting = _waiting_share(run.train)
        waiting_text = f"{waiting:.1%} of a step waits for images" if waiting is not None else ""
        yield Tile("time", duration(seconds), waiting_text)


def _operating_points(best: Numbers) -> str:
    """Formats precision and recall at the best-F1 confidence and at 0.25."""
    points = [("precision", "recall", best.get("best_f1_threshold"))]
    points.append(("precision_at_25", "recall_at_25", USUAL_THRESHOLD))
    return "; ".join(
        f"precision {best[precision]:.3f}, recall {best[recall]:.3f}"
        + (f" at confidence {confidence:.3g}" if confidence is not None else "")
        for precision, recall, confidence in points
        if precision in best and recall in best
    )


def median_speed(run: Run) -> float | None:
    """Returns the median images per second of the records after the first.

    The first contains one-time work.
    """
    name = "images_per_second"
    speeds = [record[name] for record in run.train if name in record]
    return statistics.median(speeds[1:] or speeds) if speeds else None


def total_seconds(run: Run) -> float | None:
    """Returns the seconds from the first record to the last, pauses included."""
    return run.times[1] - run.times[0] if run.times else None


def _waiting_share(records: Sequence[Numbers]) -> float | None:
    timed = [r for r in records if "data_seconds" in r and "step_seconds" in r]
    total = sum(record["step_seconds"] for record in timed)
    return sum(record["data_seconds"] for record in timed) / total if total > 0 else None


def slow_ranks(run: Run) -> str:
    """Names the ranks that usually take longer than the median for a micro-batch.

    Returns "" if fewer than two ranks have micro-batches.
    """
    seconds_RW = run.rank_seconds("rank_micro_batch_seconds")[1][:, 0]
    if not seconds_RW.size:  # an earlier version, where all ranks had equally many
        seconds_RW = run.rank_seconds("rank_own_seconds")[1][:, 0]
    ranks_K = np.flatnonzero(np.median(seconds_RW, axis=0) > 0) if seconds_RW.size else ()
    if len(ranks_K) < 2:
        return ""
    seconds_RK = seconds_RW[:, ranks_K]
    # The lower median: with two ranks, the faster rank.
    median_R1 = np.quantile(seconds_RK, 0.5, axis=1, keepdims=True, method="lower")
    usual_K = np.median(seconds_RK / np.maximum(median_R1, 1e-12), axis=0).tolist()
    slow = sorted(
        ((ratio, rank) for rank, ratio in zip(ranks_K, usual_K) if ratio > _SLOW), reverse=True
    )
    if not slow:
        return "All ranks take the same time for their own work of a micro-batch, within 10 %."
    rank_texts = ", ".join(f"rank {rank} {ratio:.2f}x" for ratio, rank in slow[:_MOST_RANKS])
    return f"Own work of a micro-batch, against the median rank: {rank_texts}."


def _list_events(run: Run) -> Iterator[str]:
    for step in run.starts[1:]:
        yield f"Resumed from step {step:.0f}."
    for from_step, to_step, reason in run.rollbacks:
        yield f"Rolled back from step {from_step:.0f} to step {to_step:.0f}: {reason}."
    if run.bad_images:
        yield f"{run.bad_images} images could not be used and were substituted by others."


# The configuration against the defaults.


def format_value(value: object) -> str:
    """Formats a value on one line, nearly as in YAML."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def changed_settings(tree: Mapping[str, Any]) -> tuple[list[tuple[str, str]], str]:
    """Compares a configuration with the defaults of this version.

    Returns: the keys that differ with their values, in the order of the file; and "", or the reason
        why they could not be compared.
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
    return [(key, format_value(value)) for key, value in leaves(tree) if key in differing], ""
