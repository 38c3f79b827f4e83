"""Findings about a training that are computed before or while it runs, and for its verdict."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

# Findings before training starts (engine/suitability.py).
DETR_FROM_SCRATCH, TINY_OBJECTS, BEYOND_QUERIES = (
    "detr_from_scratch", "objects_tiny", "objects_beyond_queries",
)  # fmt: skip
FEWEST = 5  # evaluations that make a trend, and the smallest window of a median
_SHARE = 5  # the window is at least this fraction (1 / 5) of the evaluations
_RISE_OF_LOSS = 0.2  # rise of the validation loss above its lowest that means over-fitting


class Finding(NamedTuple):
    """A finding in one sentence, with the code that programs and tests compare."""

    code: str
    text: str


class OverFitting(NamedTuple):
    """The smoothed losses at the lowest validation loss, and now.

    lowest: position of the last evaluation in the window with the lowest validation loss; ago:
    number of evaluations since; window: evaluations of a median.
    """

    lowest: int
    ago: int
    window: int
    train_then: float
    val_then: float
    train_now: float
    val_now: float


def over_fitting(pairs: Sequence[tuple[float, float]]) -> OverFitting | None:
    """Detects a validation loss that rose while the training loss fell; None if it did not.

    Both losses are smoothed.  The validation loss must be 20 % above its lowest value, and the
    training loss below its value at that time.

    Args: pairs: for each evaluation the mean training loss since the one before, and the validation
        loss.
    """
    size = max(FEWEST, len(pairs) // _SHARE)
    if len(pairs) <= size:
        return None
    windows = [pairs[start : start + size] for start in range(len(pairs) - size + 1)]
    train_S = [median(train for train, _ in window) for window in windows]
    val_S = [median(val for _, val in window) for window in windows]
    lowest = val_S.index(min(val_S))
    if val_S[-1] <= (1 + _RISE_OF_LOSS) * val_S[lowest] or train_S[-1] >= train_S[lowest]:
        return None
    return OverFitting(
        lowest + size - 1, len(windows) - 1 - lowest, size,
        train_S[lowest], val_S[lowest], train_S[-1], val_S[-1],
    )  # fmt: skip
