"""The `data.sampling:` section: how often each image comes in an epoch.

    sampling -> copies_N, expected times -> per epoch, whole times of each image -> their order

An image that is expected 2.3 times comes two or three times in every epoch, 2.3 times on average.
The length of an epoch is constant, and everything is a function of (seed, epoch, copies_N), so it
is the same on any number of ranks and after a restart.
"""

import math
from collections.abc import Sequence

import numpy as np

from ppdist.config.data import SamplingConfig
from ppdist.data.records import Records
from ppdist.data.sample import DetectionSet

_UNIT = 2**32  # parts of one, for exact sums


def copies(
    dataset: DetectionSet, config: SamplingConfig, difficulty_C: Sequence[float] | None
) -> np.ndarray | None:
    """How often each image is expected in an epoch, float64 [N]; None: exactly once (shuffle).

    Crowds count for nothing, since training leaves them out.

    Args:
        difficulty_C: what `difficulty` gave for the last evaluation; None before the first, when
            all classes are equally difficult.  Only used by `difficulty`.
    Raises: ValueError: difficulty_C has not one number per class.
    """
    if config.name == "shuffle":
        return None
    image_O, label_O = _objects(dataset)
    count, classes = len(dataset.records), len(dataset.class_names)
    if config.name == "balanced":
        return repeat_factors(image_O, label_O, count, classes, config.balance_threshold)
    weight_C = np.ones(classes) if difficulty_C is None else np.asarray(difficulty_C, np.float64)
    if weight_C.shape != (classes,):
        raise ValueError(f"{weight_C.size} difficulties for {classes} classes")
    return difficulty_copies(image_O, label_O, count, weight_C)


def repeat_factors(
    image_O: np.ndarray, label_O: np.ndarray, count: int, classes: int, threshold: float
) -> np.ndarray:
    """Images of rare classes more often, float64 [count], each 1 at least.

        r_i = max(1, max over its classes c of sqrt(threshold / f_c)),  f_c = images with c / images

    Args:
        image_O, label_O: image and class of each object.
    Source: Gupta et al. 2019, arXiv:1908.03195, section 4 (repeat factor sampling).
    """
    shown_CN = np.unique(label_O * count + image_O)  # each class once an image
    share_C = np.bincount(shown_CN // count, minlength=classes) / count
    with np.errstate(divide="ignore"):
        factor_C = np.sqrt(threshold / share_C)
    factor_N = np.ones(count)
    np.maximum.at(factor_N, shown_CN % count, factor_C[shown_CN // count])
    return factor_N


def difficulty_copies(
    image_O: np.ndarray, label_O: np.ndarray, count: int, difficulty_C: np.ndarray
) -> np.ndarray:
    """Images with many objects of difficult or rare classes more often, float64 [count], mean 1.

        w_i = sum over its objects of d_c / (objects of class c),  r_i = count w_i / sum(w)

    An image without objects has the mean weight of the others.

    Args:
        image_O, label_O: image and class of each object.
        difficulty_C: d_c >= 0 of each class.
    """
    objects_C = np.bincount(label_O, minlength=len(difficulty_C))
    weight_O = (difficulty_C / np.maximum(1, objects_C))[label_O]
    weight_N = np.bincount(image_O, weight_O, minlength=count)
    with_N = np.bincount(image_O, minlength=count) > 0
    total = math.fsum(weight_N)
    if not total > 0:  # no objects, or nothing difficult about any
        return np.ones(count)
    weight_N[~with_N] = total / with_N.sum()
    return weight_N * (count / math.fsum(weight_N))


def difficulty(ap_C: Sequence[float | None]) -> np.ndarray:
    """d_c = (1 - AP_c)^2, float64 [C].

    A class that the evaluated set has no object of (None, NaN, or -1 as in COCO) is as difficult as
    the mean AP of the others.
    """
    ap = np.asarray(ap_C, np.float64)
    known_C = ap >= 0
    mean = math.fsum(ap[known_C]) / known_C.sum() if known_C.any() else 0.0
    return (1 - np.where(known_C, ap, mean)) ** 2


def epoch_size(copies_N: np.ndarray) -> int:
    """Samples of every epoch: the expected number, rounded."""
    return math.floor(math.fsum(copies_N) + 0.5)


def whole_copies(copies_N: np.ndarray, offset: float) -> np.ndarray:
    """Times of each image in one epoch, int64 [N]: floor or ceil of copies_N, as expected.

    The fractions lie end to end on a line, and an image comes once more when one of offset,
    offset + 1, offset + 2, ... falls on its own.  The sum is `epoch_size(copies_N)`.

    Args:
        offset: uniform in [0, 1).
    Source: Madow 1949, Ann. Math. Statist. 20(3): systematic sampling.
    """
    floor_N = np.floor(copies_N)
    fraction_N = _settled(copies_N - floor_N, epoch_size(copies_N) - int(floor_N.sum()))
    # In whole numbers: what is lost in adding must not give a turn to an image without a fraction.
    end_N = np.rint(np.cumsum(fraction_N) * _UNIT).astype(np.int64)
    turns_N = -((int(offset * _UNIT) - end_N) // _UNIT)
    return floor_N.astype(np.int64) + np.diff(turns_N, prepend=0)


def _settled(fraction_N: np.ndarray, wanted: int) -> np.ndarray:
    """Fractions with the sum `wanted`, which is the one they have, rounded up or down.

    What is 0 stays 0, so that an image that is to come exactly once does; none gets beyond 1.
    """
    total, open_N = math.fsum(fraction_N), fraction_N > 0
    if total in (0, wanted):
        return fraction_N
    if wanted < total:
        return fraction_N * (wanted / total)
    shrink = (open_N.sum() - wanted) / (open_N.sum() - total)
    return np.where(open_N, 1 - (1 - fraction_N) * shrink, 0.0)


def _objects(dataset: DetectionSet) -> tuple[np.ndarray, np.ndarray]:
    """Position of its image and class of every object that is no crowd, both int64 [O]."""
    records = Records.of(dataset.records)
    image_O = np.repeat(np.arange(len(records)), records.counts_N)
    return image_O[~records.crowd_O], records.labels_O[~records.crowd_O]
