"""A run over its epochs, from metrics.jsonl: losses and scores, learning rate, speed.

Letters: R records, W ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppdist.plots.style import COLOURS, MARKERS, as_written, empty, legend
from ppdist.run_records import Record, RunRecords

# Panels of scores that are read together; those that the run has are drawn.
_SCORES = {
    "mean average precision": ("mAP", "mAP50", "mAP75"),
    "mAP by size of the objects": ("mAP_small", "mAP_medium", "mAP_large"),
    "average recall": ("AR1", "AR10", "AR100"),
    "at the confidence of the best F1": ("precision", "recall", "f1"),
    "accuracy": ("top1", "top5"),
}
_RULING = ("mAP", "top1")  # what a run is judged by, if its configuration says nothing else
_ACROSS = 4  # panels
_SPREAD = 20  # times as much: a linear axis would show the beginning of a curve and a flat rest
_LOW = 0.3  # a best score below it would lie at the bottom of an axis that ends at 1
_FEW = 60  # records that are drawn as they are; of more, their running mean, too
_MOST_RANKS = 64  # whose numbers stand below their bars


@dataclass(frozen=True)
class History:
    """What metrics.jsonl says, as far as it is drawn."""

    steps: list[Record]
    evaluations: list[Record]
    ranks: list[Record]  # such as `_shares` understands
    derived: Mapping[str, Any]  # what the run made of its configuration
    metric: str  # what its best evaluation is the best in; "" without evaluations

    @classmethod
    def of(cls, found: RunRecords, metric: str = "") -> "History":
        """Args: metric: `evaluate.metric`; one that no evaluation has: the usual one."""
        have = {name for each in found.evaluations for name in each}
        return cls(
            steps=found.steps,
            evaluations=found.evaluations,
            ranks=[each for each in found.ranks if _shares(each) is not None],
            derived=found.starts[-1]["derived"] if found.starts else {},
            metric=next((name for name in (metric, *_RULING) if name in have), ""),
        )

    def axis(self, records: Sequence[Record]) -> np.ndarray:
        """[R] the epochs at which records stand; their steps where no record knows its epoch."""
        step_R = column(records, "step")
        pairs = np.array([[0.0, 0.0], *self._places()])
        if len(pairs) == 1:
            return step_R
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        return np.interp(step_R, pairs[:, 0], pairs[:, 1])

    @property
    def unit(self) -> str:
        return "epoch" if self._places() else "step"

    def _places(self) -> list[list[float]]:
        known = (*self.steps, *self.evaluations)
        pairs = [[_number(each.get("step")), _number(each.get("epoch"))] for each in known]
        return [pair for pair in pairs if np.isfinite(pair).all()]


def column(records: Sequence[Record], name: str) -> np.ndarray:
    """float64 [R], NaN where a record has no such number."""
    return np.array([_number(each.get(name)) for each in records], np.float64)


def results(history: History, title: str) -> Figure | None:
    """Each loss in training and validation, then scores."""
    losses = _losses(history.steps)
    scores = {
        what: [name for name in names if np.isfinite(_scores(history, name)).any()]
        for what, names in _SCORES.items()
    }
    scores = {what: names for what, names in scores.items() if names}
    count = len(losses) + len(scores)
    if not count:
        return None
    rows = -(-count // _ACROSS)
    figure = Figure(figsize=(4 * min(count, _ACROSS), 3.1 * rows + 0.4), layout="constrained")
    panels = list(np.ravel(figure.subplots(rows, min(count, _ACROSS), squeeze=False)))
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes, name in zip(panels, losses):
        _loss(axes, history, name)
    for axes, (what, names) in zip(panels[len(losses) :], scores.items()):
        _score(axes, history, names)
        axes.set_title(what)
    for axes in panels[:count]:
        axes.set_xlabel(history.unit)
        axes.grid(alpha=0.25)
    as_written(figure.suptitle(title))
    return figure


def rate(history: History, title: str) -> Figure | None:
    """The learning rate with its warm-up, the norm of the gradient, recorded momentum."""
    names = {"lr": "learning rate", "momentum": "momentum", "gradient_norm": "norm of the gradient"}
    names = {
        name: said for name, said in names.items() if np.isfinite(column(history.steps, name)).any()
    }
    if "lr" not in names:
        return None
    figure = Figure(figsize=(8, 1 + 3 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    at_R, step_R = history.axis(history.steps), column(history.steps, "step")
    for axes, (name, said) in zip(panels, names.items()):
        if name == "gradient_norm":
            _curve(axes, at_R, column(history.steps, name), "")
        else:
            axes.plot(at_R, column(history.steps, name), color=COLOURS[0])
        _scale(axes, [column(history.steps, name)])
        axes.set_title(said)
        axes.grid(alpha=0.25)
    warm = _fact(history, "warmup_steps")
    if warm > 0 and step_R[-1] > 0:
        panels[0].set_title(f"learning rate; warm-up: {warm:g} steps (shaded)")
        end = min(warm / step_R[-1], 1) * at_R[-1]
        panels[0].axvspan(0, end, color=COLOURS[1], alpha=0.2, linewidth=0)
    panels[-1].set_xlabel(history.unit)
    as_written(figure.suptitle(title))
    return figure


def speed(history: History, title: str) -> Figure | None:
    """Images a second, and where the time of a step goes: over the run and rank by rank."""
    if not np.isfinite(column(history.steps, "images_per_second")).any():
        return None
    count = 2 + bool(history.ranks)
    figure = Figure(figsize=(5.3 * count, 4.2), layout="constrained")
    panels = figure.subplots(1, count)
    at_R = history.axis(history.steps)
    images_R = column(history.steps, "images_per_second")
    _curve(panels[0], at_R, images_R, "")
    middle = np.nanmedian(images_R)
    panels[0].axhline(middle, color="0.4", linewidth=0.8, linestyle="--")
    panels[0].text(
        0.98, 0.03, f"median {middle:.3g}", transform=panels[0].transAxes, ha="right", color="0.3"
    )
    panels[0].set_title("images per second, all ranks")
    names = {"step_seconds": "whole step", "data_seconds": "waiting for images"}
    for colour, (name, label) in zip(COLOURS, names.items()):
        _curve(panels[1], at_R, column(history.steps, name), f"{label}, rank 0", colour)
    panels[1].set_title("seconds of a step")
    if history.ranks:
        _own_seconds(panels[1], history)
        _ranks(panels[2], history)
    legend(panels[1])
    for axes in panels[:2]:
        axes.set_xlabel(history.unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    as_written(figure.suptitle(title))
    return figure


def _own_seconds(axes: Axes, history: History) -> None:
    """The band between the fastest and the slowest rank, without the waiting for each other."""
    records = _of_most_ranks(history.ranks)
    own_RW = np.stack([_shares(each)[1] for each in records])  # type: ignore[index]
    axes.fill_between(
        history.axis(records),
        own_RW.min(1),
        own_RW.max(1),
        color=COLOURS[2],
        alpha=0.35,
        linewidth=1,
        label="own seconds, fastest to slowest rank",
    )


def _ranks(axes: Axes, history: History) -> None:
    """A bar for each rank: medians over the run, from below data, computing, waiting."""
    records = _of_most_ranks(history.ranks)
    step_W, own_W, data_W = np.median([_shares(each) for each in records], axis=0)
    ranks_W = np.arange(len(step_W))
    computing_W = np.maximum(own_W - data_W, 0)
    waiting_W = np.maximum(step_W - own_W, 0)
    parts = {
        "waiting for images": (data_W, COLOURS[1]),
        "computing": (computing_W, COLOURS[2]),
        "waiting for other ranks": (waiting_W, COLOURS[6]),
    }
    below_W = np.zeros(len(step_W))
    for label, (part_W, colour) in parts.items():
        axes.bar(ranks_W, part_W, 0.85, bottom=below_W, color=colour, label=label)
        below_W += part_W
    axes.set(title="seconds of a step by rank", xlabel="rank", xlim=(-0.6, len(step_W) - 0.4))
    axes.set_ylim(0, 1.35 * max(below_W.max(), 1e-9))  # room for the legend
    if len(step_W) <= _MOST_RANKS:
        axes.set_xticks(ranks_W[:: -(-len(step_W) // 16)])
    legend(axes, loc="upper left")


def _losses(steps: Sequence[Record]) -> list[str]:
    """Names of the losses: the whole one, then its parts."""
    names = dict.fromkeys(name for each in steps for name in each)
    parts = [name for name in names if name.startswith("loss_")]
    return [name for name in ("loss", *parts) if np.isfinite(column(steps, name)).any()]


def _loss(axes: Axes, history: History, name: str) -> None:
    trained_R = column(history.steps, name)
    measured_R = _scores(history, f"val_{name}")
    _curve(axes, history.axis(history.steps), trained_R, "training")
    if np.isfinite(measured_R).any():
        axes.plot(
            history.axis(history.evaluations),
            measured_R,
            color=COLOURS[3],
            marker=MARKERS[1],
            markersize=3.5,
            label="validation",
        )
    _scale(axes, [trained_R, measured_R])
    axes.set_title(name)
    legend(axes, fontsize=8)


def _score(axes: Axes, history: History, names: Sequence[str]) -> None:
    """Curves of scores between 0 and 1; on the chief of them a mark at the best evaluation."""
    at_R, most = history.axis(history.evaluations), 0.0
    for colour, marker, name in zip(COLOURS, MARKERS, names):
        value_R = _scores(history, name)
        most = max(most, np.nanmax(value_R))
        axes.plot(at_R, value_R, color=colour, marker=marker, markersize=3.5, label=name)
    judged_R = _scores(history, history.metric)
    if names[0] in _RULING and np.isfinite(judged_R).any():
        place = int(np.nanargmax(judged_R))
        on = history.metric if history.metric in names else names[0]  # fitness has no curve
        axes.plot(
            at_R[place], _scores(history, on)[place], "o", markersize=10, markerfacecolor="none",
            color="black", label=f"best {history.metric}: {judged_R[place]:.3f}",
        )  # fmt: skip
    axes.set_ylim(0, 1 if most > _LOW or not most else 1.2 * most)
    legend(axes, fontsize=8)


def _scores(history: History, name: str) -> np.ndarray:
    """[R] of the evaluations; COCO's -1 means that there was nothing to measure."""
    value_R = column(history.evaluations, name)
    return value_R if name.startswith("val_") else np.where(value_R < 0, np.nan, value_R)


def _curve(
    axes: Axes, at_R: np.ndarray, value_R: np.ndarray, label: str, colour: str = COLOURS[0]
) -> None:
    """A curve; of many values a faint one, with their running mean over it."""
    if len(value_R) <= _FEW:
        axes.plot(at_R, value_R, color=colour, marker=".", markersize=3, label=label)
        return
    axes.plot(at_R, value_R, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(at_R, _smooth(value_R, len(value_R) // _FEW + 2), color=colour, label=label)


def _smooth(value_R: np.ndarray, reach: int) -> np.ndarray:
    """Means of each value and so many before and behind it; NaNs do not count."""
    window = np.ones(2 * reach + 1)
    known_R = np.isfinite(value_R)
    total_R = np.convolve(np.where(known_R, value_R, 0), window, "same")
    count_R = np.convolve(known_R.astype(np.float64), window, "same")
    return np.where(count_R > 0, total_R / np.maximum(count_R, 1), np.nan)


def _scale(axes: Axes, values: Sequence[np.ndarray]) -> None:
    """A logarithmic axis where values lie far apart, else one from 0."""
    known = np.concatenate(values)
    known = known[np.isfinite(known)]
    if not len(known):
        empty(axes, "nothing was finite")
    elif known.min() > 0 and known.max() > _SPREAD * np.median(known):
        axes.set_yscale("log")
    elif known.min() >= 0:
        axes.set_ylim(0, 1.05 * known.max() or 1)


def _fact(history: History, key: str) -> float:
    fact = history.derived.get(key)
    return _number(fact.get("value")) if isinstance(fact, Mapping) else np.nan


def _shares(record: Record) -> np.ndarray | None:
    """[3, W] seconds of a step, own, for data, of each rank; None: it is another record."""
    names = ("rank_step_seconds", "rank_own_seconds", "rank_data_seconds")
    found = [record.get(name) for name in names]
    if not all(isinstance(each, list) and each for each in found):
        return None
    if len({len(each) for each in found if each}) != 1:
        return None
    seconds_3W = np.array([[_number(value) for value in each or ()] for each in found])
    return seconds_3W if np.isfinite(seconds_3W).all() else None


def _of_most_ranks(records: Sequence[Record]) -> list[Record]:
    """Those with as many ranks as the last: a resumed run may have others."""
    count = len(records[-1]["rank_step_seconds"])
    return [each for each in records if len(each["rank_step_seconds"]) == count]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else np.nan
