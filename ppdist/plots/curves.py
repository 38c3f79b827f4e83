"""Precision, recall and F1 over the confidence, precision over recall; at IoU 0.5.

Letters: C classes, T confidences, R recalls.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppdist.plots.style import COLOURS, DASHES, drawable, legend

_MOST_NAMED = 16  # classes with a line and a name of their own
_NAME = 24  # letters


def precision_over_recall(evaluation: Mapping[str, Any]) -> Figure | None:
    return _figure(evaluation, ("recall_R", "precision_CR", "mean_precision_R"), "AP50")


def precision_over_confidence(evaluation: Mapping[str, Any]) -> Figure | None:
    return _figure(evaluation, ("confidence_T", "precision_CT", "mean_precision_T"), "precision")


def recall_over_confidence(evaluation: Mapping[str, Any]) -> Figure | None:
    return _figure(evaluation, ("confidence_T", "recall_CT", "mean_recall_T"), "recall")


def f1_over_confidence(evaluation: Mapping[str, Any]) -> Figure | None:
    return _figure(evaluation, ("confidence_T", "f1_CT", "mean_f1_T"), "f1")


def _figure(evaluation: Mapping[str, Any], keys: tuple[str, str, str], score: str) -> Figure | None:
    """A line for each class, and a thick one for their mean; None: there are no such curves.

    Args:
        keys: of `curves`: what lies across, the curves of classes, their mean.
        score: of `per_class`, to stand beside the names.
    """
    curves = evaluation.get("curves") or {}
    across, each, mean = keys
    if not curves.get(each):
        return None
    at_X, value_CX = _numbers(curves[across]), _numbers(curves[each])
    labels = [name.split("_")[0].replace("f1", "F1") for name in (across, each)]
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots()
    names = [_named(evaluation, label, score) for label in curves["curve_classes"]]
    _lines(axes, at_X, value_CX, names)
    _mean(axes, at_X, _numbers(curves[mean]), evaluation.get("metrics") or {}, score)
    axes.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, 1), ylim=(0, 1.01))
    axes.set_title(f"{labels[1]} over {labels[0]}, IoU 0.5")
    axes.grid(alpha=0.25)
    legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    return figure


def _lines(axes: Axes, at_X: np.ndarray, value_CX: np.ndarray, names: Sequence[str]) -> None:
    known_C = np.isfinite(value_CX).any(1)
    if known_C.sum() > _MOST_NAMED:
        axes.plot(at_X, value_CX[known_C].T, color="0.7", linewidth=0.6, alpha=0.7)
        axes.plot([], [], color="0.7", label=f"{known_C.sum()} classes")
        return
    for position, index in enumerate(np.flatnonzero(known_C).tolist()):
        colour = COLOURS[position % len(COLOURS)]
        dashes = DASHES[position // len(COLOURS)]
        axes.plot(
            at_X, value_CX[index], dashes, color=colour, linewidth=1.4, label=names[index]
        )  # fmt: skip


def _mean(
    axes: Axes, at_X: np.ndarray, mean_X: np.ndarray, metrics: Mapping[str, Any], score: str
) -> None:
    """The mean of the classes that have objects, with its number where there is one."""
    value = metrics.get({"AP50": "mAP50"}.get(score, score))
    if not np.isfinite(mean_X).any():
        return
    text = "mean" if value is None else f"mean {value:.3f}"
    axes.plot(at_X, mean_X, color="black", linewidth=3, label=text)
    confidence = metrics.get("confidence")
    if score != "AP50" and confidence is not None:
        label = f"confidence {confidence:.3f}:\nthe best mean F1"
        axes.axvline(confidence, color="black", linewidth=0.8, linestyle=":", label=label)


def _named(evaluation: Mapping[str, Any], label: int, score: str) -> str:
    """A class and its score."""
    name = drawable(evaluation["class_names"][label], label, _NAME)
    value = evaluation["per_class"][label].get(score)
    return name if value is None else f"{name} {value:.3f}"


def _numbers(values: Any) -> np.ndarray:
    """float64, NaN for null."""
    return np.array(values, np.float64)
