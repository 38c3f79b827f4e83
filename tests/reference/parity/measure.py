"""One compared quantity, and the comparisons that several families share."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import paddle

from ppdist.common.errors import DataError

GROUPS = (
    "keys",
    "features",
    "scores",
    "boxes",
    "NMS",
    "losses",
    "assignment",
    "gradients",
    "BN statistics",
)
GRADIENT_FLOOR = 1e-3  # of the largest norm: smaller ones are compared as if this large
SAME_IOU = 0.999  # two kept boxes of one class that overlap more are the same box


class Measurement(NamedTuple):
    """One compared quantity: how far off, and how far is allowed.

    error and tolerance are relative, or absolute in the unit that the name gives, or how many
    things differ (tolerance 0).
    """

    group: str  # of GROUPS
    name: str
    error: float
    tolerance: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return 0 <= self.error <= self.tolerance  # False for nan

    @property
    def strain(self) -> float:
        """The error in units of its tolerance; inf for what had to be equal and is not."""
        if self.tolerance > 0 and 0 <= self.error < np.inf:
            return self.error / self.tolerance
        return 0.0 if self.passed else np.inf


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """The largest absolute difference; 0 of nothing.

    Raises: DataError: the two have different shapes.
    """
    if got.shape != want.shape:
        raise DataError(
            f"expected values of shape {list(got.shape)}, found {list(want.shape)}",
            code="reference_invalid",
        )
    return float(np.abs(got.astype("float64") - want).max(initial=0.0))


def off(got: float | paddle.Tensor, want: float | np.ndarray) -> float:
    """The relative error of a number; inf where 0 was wanted and is not there."""
    return _share(abs(float(got) - float(want)), abs(float(want)))


def _share(error: float, size: float) -> float:
    return error / size if size else 0.0 if error == 0 else np.inf


def differ(group: str, name: str, got: object, want: object) -> Measurement:
    """What has to be equal: arrays of any kind, or lists of numbers."""
    return Measurement(group, name, float(not np.array_equal(np.array(got), np.array(want))), 0)


def compare_features(
    prefix: str, features: Iterable[paddle.Tensor], values: dict[str, np.ndarray], tolerance: float
) -> Iterator[Measurement]:
    """Levels `prefix0`, `prefix1`, ...: shape, sampled values, mean and deviation of the whole."""
    level = -1
    for level, feature in enumerate(features):
        name = f"{prefix}{level}"
        yield differ("features", f"{name} shape", feature.shape, values[f"{name}_shape"])
        if feature.shape != values[f"{name}_shape"].tolist():
            continue
        whole, want = feature.numpy().astype("float64"), values[f"{name}_val"]
        error = apart(whole.ravel()[places(values, f"{name}_idx")], want)
        yield Measurement(
            "features", f"{name} / largest", _share(error, float(np.abs(want).max())), tolerance
        )
        mean, deviation = values[f"{name}_stat"]
        error = max(abs(whole.mean() - mean), abs(whole.std() - deviation)) / whole.std()
        yield Measurement("features", f"{name} mean and deviation", float(error), tolerance)
    theirs = sum(key.startswith(prefix) and key.endswith("_shape") for key in values)
    yield differ("features", f"{prefix} levels", level + 1, theirs)


def places(values: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """Indices of a file's samples.  Raises: DataError: of none, which would prove nothing."""
    found = values[key]
    if found.size == 0:
        raise DataError("expected indices, found none", code="reference_invalid", where=key)
    return found


def compare_statistics(
    group: str, name: str, got: np.ndarray, want: np.ndarray, tolerance: float
) -> Measurement:
    """Mean, deviation, smallest and largest of all predictions, in the unit of the predictions."""
    exact = got.astype("float64")
    found = np.array([exact.mean(), exact.std(), exact.min(), exact.max()])
    return Measurement(group, f"{name}: mean, std, min, max", apart(found, want), tolerance)


def compare_gradients(
    label: str,
    gradients: dict[str, paddle.Tensor | None],
    names: Iterable[str],
    want: np.ndarray,
    tolerances: tuple[float, float],
) -> Iterator[Measurement]:
    """L2 norms of the gradients of all trainable parameters, by their original names.

    Args:
        tolerances: of the largest and of the median relative error.
    """
    names = [str(name) for name in names]
    unknown = sorted(set(gradients) ^ set(names))
    yield Measurement("keys", f"{label} trainable keys", len(unknown), 0, ", ".join(unknown[:3]))
    if unknown:
        return
    got = np.array([_length(gradients[name]) for name in names])
    apart(got, want)  # the shapes
    size = np.abs(want)
    with np.errstate(all="ignore"):  # zeros, inf and nan of the file are no match
        error = np.abs(got - want) / np.maximum(size, GRADIENT_FLOOR * size.max())
    worst = names[int(error.argmax())]
    largest, median = tolerances
    yield Measurement("gradients", f"{label} norms, largest", float(error.max()), largest, worst)
    yield Measurement("gradients", f"{label} norms, median", float(np.median(error)), median)


def compare_running(
    label: str,
    state: dict[str, paddle.Tensor],
    values: dict[str, np.ndarray],
    names: dict[str, str],
    tolerance: float,
) -> Iterator[Measurement]:
    """Running statistics of one norm after one training forward.

    Args:
        state: state dict by original key.
        names: what the file calls a statistic -> the end of its original key.
    """
    layer = str(values["bn_after_forward_key"])
    for theirs, end in names.items():
        if f"{layer}.{end}" not in state:
            raise DataError(
                f"the model has no {layer}.{end}",
                code="reference_invalid",
                where="bn_after_forward_key",
            )
        got, want = state[f"{layer}.{end}"].numpy(), values[f"bn_after_forward_{theirs}"]
        apart(got, want)  # the shapes
        with np.errstate(all="ignore"):
            error = float(np.abs(got / want - 1).max())
        yield Measurement("BN statistics", f"{label} {layer} {end}", error, tolerance)


def compare_suppressed(
    label: str, rows: np.ndarray, want_K6: np.ndarray, stored: int, tolerances: tuple[float, float]
) -> Iterator[Measurement]:
    """The best of the kept boxes.

    Args:
        rows: ours, [class, score, box] each; want_K6 theirs.
        stored: how many rows the file should have.
        tolerances: of scores and of boxes, pixels.
    """
    yield differ("NMS", f"{label}rows in the file", len(want_K6), stored)
    missed = rows_missed(rows, want_K6, *tolerances)
    yield Measurement("NMS", f"{label}rows of the best {len(want_K6)} missed", missed, 0)


def rows_missed(
    got_R6: np.ndarray, want_K6: np.ndarray, score_tolerance: float, box_tolerance: float
) -> int:
    """How many wanted rows [class, score, box] have no partner of their own among ours.

    Partners have the same class, the same score, and the same box: within the tolerance in pixels
    or with an IoU above 0.999.
    """
    free = np.ones(len(got_R6), bool)
    missed = 0
    for row in want_K6:
        near = free & (got_R6[:, 0] == row[0]) & (np.abs(got_R6[:, 1] - row[1]) <= score_tolerance)
        same = np.abs(got_R6[:, 2:] - row[2:]).max(axis=1) <= box_tolerance
        near &= same | (_iou(got_R6[:, 2:], row[2:]) > SAME_IOU)
        if near.any():
            free[int(near.argmax())] = False
        else:
            missed += 1
    return missed


def _iou(boxes_N4: np.ndarray, box_4: np.ndarray) -> np.ndarray:
    sides = np.minimum(boxes_N4[:, 2:], box_4[2:]) - np.maximum(boxes_N4[:, :2], box_4[:2])
    common = sides.clip(0).prod(axis=1)
    areas = (boxes_N4[:, 2:] - boxes_N4[:, :2]).prod(axis=1) + (box_4[2:] - box_4[:2]).prod()
    return common / np.maximum(areas - common, 1e-9)


def _length(gradient: paddle.Tensor | None) -> float:
    return 0.0 if gradient is None else float(np.linalg.norm(gradient.numpy().astype("float64")))
