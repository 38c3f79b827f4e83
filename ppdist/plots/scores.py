"""Scores of each class, whether confidences can be believed, what kinds of errors there are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ppdist.plots.style import COLOURS, as_written, drawable, legend

_MOST_BARS = 100
# What is drawn of a class: a bar, and where there is one a point.
_DETECTED, _CLASSIFIED = ("AP", "AP50"), ("top1", "top5")
_KINDS = {
    "correct": "correct",
    "localisation": "badly placed",
    "class": "another class",
    "duplicate": "found twice",
    "background": "nothing there",
    "missed": "missed",
}


def per_class(evaluation: Mapping[str, Any]) -> Figure | None:
    """A bar for each class that has objects, the best above."""
    bar, point = _DETECTED if any("AP" in row for row in evaluation["per_class"]) else _CLASSIFIED
    rows = [
        (drawable(str(row["name"]), label), row)
        for label, row in enumerate(evaluation["per_class"])
        if row.get(bar) is not None
    ]
    if not rows:
        return None
    rows.sort(key=lambda named: -named[1][bar])
    score_C = np.array([row[bar] for _, row in rows])
    if len(rows) > _MOST_BARS:
        return _points(score_C, bar)
    figure = Figure(figsize=(8.5, 1.4 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(rows))
    axes.barh(places, score_C, 0.75, color=COLOURS[0], label=bar)
    point_C = np.array([row.get(point) for _, row in rows], np.float64)  # None: NaN
    axes.plot(point_C, places, "D", color=COLOURS[1], markersize=4.5, label=point)
    for place, (_, row) in enumerate(rows):
        count = row.get("objects", row.get("images"))
        text = f"{row[bar]:.3f}" + (f"  of {count}" if count is not None else "")
        axes.text(1.01, place, text, va="center", fontsize=8)
    axes.set_yticks(places, [name for name, _ in rows], fontsize=8)
    as_written(*axes.get_yticklabels())
    axes.axvline(score_C.mean(), color="0.3", linewidth=0.8, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
    axes.set_title(f"{bar} of each class; mean {score_C.mean():.3f}", pad=24)
    legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def _points(score_C: np.ndarray, name: str) -> Figure:
    """Where there are too many classes for bars."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(score_C, ".", color=COLOURS[0], markersize=3)
    axes.axhline(score_C.mean(), color="0.3", linewidth=0.8, linestyle="--")
    axes.set(xlabel="classes, the best first", ylabel=name, ylim=(0, 1))
    axes.set_title(f"{name} of each class; mean {score_C.mean():.3f}")
    axes.grid(alpha=0.25)
    return figure


def calibration(evaluation: Mapping[str, Any]) -> Figure | None:
    """How often detections of a confidence are right, and how many there are."""
    found = evaluation.get("calibration")
    if not found or not sum(found["count"]):
        return None
    edges = np.array(found["edges"], np.float64)
    precision_B = np.array(found["precision"], np.float64)  # null: NaN
    confidence_B = np.array(found["confidence"], np.float64)
    count_B = np.array(found["count"], np.float64)
    figure = Figure(figsize=(6, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    widths_B = np.diff(edges)
    above.bar(
        edges[:-1], precision_B, 0.96 * widths_B, align="edge", color=COLOURS[5], label="precision"
    )
    above.plot([0, 1], [0, 1], "--", color="0.4", linewidth=1, label="as confident as right")
    above.plot(confidence_B, precision_B, "o-", color=COLOURS[0], markersize=4, linewidth=1)
    above.set(ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
    error = found.get("expected_error")
    said = "" if error is None else f"; expected calibration error {error:.3f}"
    above.set_title(f"calibration{said}")
    above.legend(loc="upper left")
    below.bar(edges[:-1], count_B, 0.96 * widths_B, align="edge", color="0.5")
    below.set(xlabel="confidence", ylabel="detections", yscale="log", ylim=(0.7, None))
    for axes in (above, below):
        axes.grid(alpha=0.25)
    return figure


def errors(evaluation: Mapping[str, Any]) -> Figure | None:
    """How many of each kind, and what AP50 would gain without them."""
    found = evaluation.get("errors")
    if not found:
        return None
    gains = {kind: gain for kind, gain in found["AP50_gain"].items() if gain is not None}
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, values, text in zip(
        figure.subplots(1, 2), (found["counts"], gains), ("{:.0f}", "+{:.3f}")
    ):
        names = [_KINDS.get(kind, kind) for kind in values]
        colours = [COLOURS[2] if kind == "correct" else COLOURS[3] for kind in values]
        bars = axes.barh(names, list(values.values()), 0.7, color=colours)
        axes.bar_label(bars, [text.format(value) for value in values.values()], padding=3)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(1e-9, *values.values()) if values else 1)
        axes.grid(axis="x", alpha=0.25)
    left, right = figure.axes
    left.set(title="detections and objects by kind", xlabel="number")
    right.set(title="what AP50 gains where a kind is put right", xlabel="AP50")
    return figure
