"""What the page shows of an evaluation, and of a run."""

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
from ppdist.metrics.analysis import CLASS_HEADINGS
from ppdist.metrics.findings import Finding
from ppdist.metrics.run import Numbers, Run
from ppdist.metrics.verdict import verdict_of
from ppdist.runtime.predictor import USUAL_THRESHOLD

# An evaluation.

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
    """Columns, and rows of cells; the first column names a row.

    A cell is text or a number, None where there is nothing; `bars` is the column whose shares are
    drawn as bars, too, as parts of `full`.
    """

    columns: list[str]
    rows: list[list[Any]]
    bars: int | None = None
    full: float = 1.0


@dataclass
class Scores:
    """What the page shows of an evaluation; None or empty if absent."""

    sizes: Table | None
    metrics: Table | None
    classes: Table | None
    confused: Table | None
    errors: Table | None


def scores_of(found: Mapping[str, Any]) -> Scores:
    """Works out what is shown of an evaluation.

    Args: found: as `Run.evaluation`.
    """
    metrics = {name: share(value) for name, value in (found.get("metrics") or {}).items()}
    values = [[*about, *map(metrics.get, keys)] for keys, about in _SIZES.items()]
    sizes = [row for row in values if row[2:] != [None, None]]
    return Scores(
        sizes=Table(["objects", "area", "AP", "AR"], sizes, bars=2) if len(sizes) > 1 else None,
        metrics=Table(["metric", "value"], [list(row) for row in metrics.items()])
        if metrics
        else None,
        classes=_classes(found.get("per_class") or ()),
        confused=_confused(found),
        errors=_errors(found.get("errors")),
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


# A run.

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
class Page:
    """The page of a run; what is empty is not shown."""

    run: Run
    status: tuple[str, str]  # a word, and a sentence
    verdict: list[Finding] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    slow_ranks: str = ""
    scores: Scores | None = None
    happened: list[str] = field(default_factory=list)


def show(run: Run) -> Page:
    """Works out everything the page of a run shows."""
    page = Page(run, status_of(run), verdict_on(run), list(_tiles(run)))
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


# The configuration, beside the defaults.


def written(value: object) -> str:
    """A value on one line, nearly as YAML has it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def settings_of(tree: Mapping[str, Any]) -> tuple[list[tuple[str, str]], str]:
    """Compares a configuration with the defaults of this version.

    Returns: the keys that differ with their values, in the order of the file; and "", or why none
        could be compared.
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
    return [(key, written(value)) for key, value in leaves(tree) if key in differing], ""
