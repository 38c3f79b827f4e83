"""What the pages of VisualDL and TensorBoard show, before it takes either's own form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

_BINS = 50


class Counts(NamedTuple):
    """A precision-recall curve at K confidence thresholds."""

    precision_K: np.ndarray
    recall_K: np.ndarray
    true_positives_K: np.ndarray  # whole numbers, like the next two
    false_positives_K: np.ndarray
    false_negatives_K: np.ndarray


@dataclass(frozen=True)
class PRCurve:
    """Precision and recall of a class over T confidence thresholds, rising; NaN: not defined."""

    confidence_T: np.ndarray
    precision_T: np.ndarray
    recall_T: np.ndarray
    objects: int

    def at(self, confidence_K: np.ndarray) -> Counts:
        """Sampled at other thresholds, linearly between those that it has.

        Where nothing is found any more the recall is 0 and the precision, undefined, counts as 1:
        the end at which curves are drawn to begin.
        """
        recall_K = np.interp(confidence_K, self.confidence_T, np.nan_to_num(self.recall_T))
        precision_T = np.nan_to_num(self.precision_T, nan=1.0)
        precision_K = np.interp(confidence_K, self.confidence_T, precision_T)
        found_K = np.rint(recall_K * self.objects)
        wrong_K = np.rint(found_K * (1 / np.maximum(precision_K, 1e-9) - 1))
        return Counts(precision_K, recall_K, found_K, wrong_K, self.objects - found_K)


class Histogram(NamedTuple):
    """How often values lie between two edges, and their sums."""

    counts_K: np.ndarray
    edges_K1: np.ndarray
    total: float
    total_of_squares: float


class CurveFile(Protocol):
    """A file that one of the two programs reads.  Each method raises what goes wrong."""

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None: ...

    def add_histograms(self, step: int, values: Mapping[str, Histogram]) -> None: ...

    def add_pr_curves(self, step: int, curves: Mapping[str, PRCurve]) -> None: ...

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None: ...

    def go_back(self, step: int) -> None: ...

    def close(self) -> None: ...


def scalar_points(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of metrics.jsonl, by tag.

    A record with `eval_seconds` is one of an evaluation.  There a value below 0 says that there was
    nothing to measure, such as no small object.
    """
    evaluation = "eval_seconds" in record
    points = {}
    for key, value in record.items():
        if key in ("step", "epoch", "time") or isinstance(value, bool):
            continue
        if not isinstance(value, (int, float, np.number)) or not np.isfinite(value):
            continue
        tag = _evaluation_tag(key) if evaluation else _training_tag(key)
        if value >= 0 or not tag.startswith("eval"):
            points[tag] = float(value)
    return points


def _training_tag(key: str) -> str:
    """Its part before the slash is the group on the page, which sorts groups by name and unfolds
    the first."""
    if "/" in key:
        return key
    if key in ("lr", "momentum"):
        return f"lr/{key}"
    return _speed_tag(key) or f"train/{key}"


def _evaluation_tag(key: str) -> str:
    group, slash, name = key.partition("/")
    if slash:
        return f"eval_per_class/{name}" if group == "AP" else f"eval_per_class_{group}/{name}"
    if key.startswith("val_"):  # beside train/..., under the same name
        return f"val/{key.removeprefix('val_')}"
    return _speed_tag(key) or f"eval/{key}"


def _speed_tag(key: str) -> str:
    speeds = ("_seconds", "_per_second", "_mb", "_gb")
    return f"speed/{key}" if key.endswith(speeds) else ""


def pr_curves(analysis: Mapping[str, Any]) -> dict[str, PRCurve]:
    """The curves of an evaluation.json by tag; a class without objects has none."""
    curves = analysis.get("curves")
    if not curves:  # a classifier has none
        return {}
    confidence_T = np.array(curves["confidence_T"], dtype=float)
    # With very many classes only some have curves, and behind these is the mean of all.
    classes = curves.get("curve_classes", range(len(analysis["class_names"])))
    found = {}
    rows = zip(classes, curves["precision_CT"], curves["recall_CT"])
    for index, precision_T, recall_T in rows:
        objects = analysis["per_class"][index]["objects"]
        if not objects or recall_T is None or precision_T is None:
            continue
        found[f"PR/{analysis['class_names'][index]}"] = PRCurve(
            confidence_T,
            np.array(precision_T, dtype=float),  # null becomes NaN
            np.array(recall_T, dtype=float),
            objects,
        )
    return found


def histogram(values: np.ndarray) -> Histogram | None:
    """Of the finite values of an array; None where there are none."""
    values_N = values.astype(np.float64).ravel()
    values_N = values_N[np.isfinite(values_N)]
    if not len(values_N):
        return None
    low, high = float(values_N.min()), float(values_N.max())
    # numpy refuses bins narrower than the digits of a number are apart.
    high = max(high, low + 1e-6 * abs(low), low + 1e-30)
    counts_K, edges_K1 = np.histogram(values_N, _BINS, (low, high))
    squares = float(np.dot(values_N, values_N))
    return Histogram(counts_K, edges_K1, float(values_N.sum()), squares)
