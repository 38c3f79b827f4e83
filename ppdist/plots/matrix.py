"""The confusion matrix: what each true class was taken for.

Letters: C classes; rows are true, columns predicted, and the last of both is the background.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

from ppdist.plots.style import MAP, as_written, drawable

_BESIDE = 20  # classes; of more, the two matrices stand one below the other
_MOST_NAMED = 100  # classes; of more, neither names nor numbers could be read
_MOST_DRAWN = 2000  # classes; about as many as the picture has pixels
_NAME = 18  # letters
_LETTERS_ACROSS = 50  # of names that lie below a matrix; if there are more, they stand
_BACKGROUND = "background"


def confusion(evaluation: Mapping[str, Any]) -> Figure | None:
    """Shares of each true class in percent, and the counts; None: there is no matrix."""
    found = evaluation.get("confusion")
    counts = _counts(found) if found else None
    if found is None or counts is None:
        return None
    names = [drawable(name, at, _NAME) for at, name in enumerate(evaluation["class_names"])]
    if len(counts) == len(names) + 1:  # of a classifier there is no background
        names.append(_BACKGROUND)
    size = float(np.clip(0.205 * len(names), 3.2, 18)) + 2.4
    beside = len(names) <= _BESIDE
    figure = Figure(
        figsize=(2 * size, size) if beside else (size + 0.6, 2 * size), layout="constrained"
    )
    shares_axes, counts_axes = figure.subplots(*((1, 2) if beside else (2, 1)))
    known = np.maximum(found.get("true_counts") or counts.sum(1), 1)
    percent = 100 * counts / known[:, None]
    _matrix(shares_axes, percent, names, Normalize(0, 100))
    _matrix(counts_axes, counts, names, PowerNorm(0.4, 0, max(1.0, counts.max())))
    shares_axes.set_title("% of each row")
    counts_axes.set_title("objects" if _BACKGROUND in names[-1:] else "images")
    as_written(figure.suptitle(_limits(found)))
    return figure


def _counts(found: Mapping[str, Any]) -> np.ndarray | None:
    """float64 [size, size]; None: too large to be seen."""
    if "counts" in found:
        return np.array(found["counts"], np.float64)
    size = len(found["true_counts"])
    if size > _MOST_DRAWN:
        return None
    counts = np.zeros((size, size))
    for row, column, count in found["cells"]:
        counts[row, column] = count
    return counts


def _limits(found: Mapping[str, Any]) -> str:
    iou, confidence = found.get("iou"), found.get("confidence")
    if iou is None or confidence is None:
        return "confusion"
    return f"confusion of boxes that meet with IoU {iou:g} or more, confidence {confidence:.3g}"


def _matrix(axes: Axes, value: np.ndarray, names: Sequence[str], norm: Normalize) -> None:
    """Fields below a half stay white, in others stands a number."""
    axes.imshow(np.ma.masked_less(value, 0.5), cmap=MAP, norm=norm, interpolation="nearest")
    axes.set(xlabel="predicted", ylabel="true")
    if len(names) > _MOST_NAMED + 1:
        return
    letters = 10.0 if len(names) <= 12 else 7.5 if len(names) <= 40 else 6.5
    places = range(len(names))
    upright = len(names) * max(map(len, names)) > _LETTERS_ACROSS
    axes.set_xticks(places, names, rotation=90 if upright else 0, fontsize=letters)
    axes.set_yticks(places, names, fontsize=letters)
    as_written(*axes.get_xticklabels(), *axes.get_yticklabels())
    digits = 9.0 if len(names) <= 12 else 6.5 if len(names) <= 40 else 5.0
    for row, column in zip(*np.nonzero(value >= 0.5)):
        dark = norm(value[row, column]) > 0.5
        axes.text(
            column, row, _short(value[row, column]), ha="center", va="center", fontsize=digits,
            color="white" if dark else "black",
        )  # fmt: skip


def _short(value: float) -> str:
    """Three characters at most: 7, 42, 650, 3k, 20k."""
    if value < 999.5:
        return f"{max(1.0, value):.0f}"
    return f"{value / 1e3:.0f}k" if value < 999.5e3 else f"{value / 1e6:.0f}M"
