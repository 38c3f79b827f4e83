"""Do anchors fit the boxes of a set, and which would fit better: best possible recall, k-means,
genetic refinement.

Everything here is numpy on box sizes in input pixels, [width, height]; how far two sizes are apart
is the ratio of their sides.  Letters: N boxes, L levels, A anchors per level, K = L * A.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ppdist.config.data import Resize
from ppdist.data.augment.transforms import fitted
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError

ENOUGH_RECALL = 0.98  # of the boxes; below, new anchors are worth it
SMALLEST = 2.0  # pixels; a box with a shorter side teaches nothing
_MOST_BOXES = 20_000  # that a fit looks at; the recalls are of all
_ROUNDS = 30  # of k-means
_CHANCE, _SPREAD = 0.2, 0.05  # of a side to change in a generation; at most by about this part


@dataclass(frozen=True)
class AnchorFit:
    """New anchors beside the present ones.

    anchors_LA2: float32 input pixels, rounded to a tenth; sorted by area, the smallest in the
        first level.
    boxes: N.
    recall_before, recall_after: best possible recall, see `best_possible_recall`.
    fitness_before, fitness_after: see `fitness`.
    """

    anchors_LA2: np.ndarray
    boxes: int
    recall_before: float
    recall_after: float
    fitness_before: float
    fitness_after: float


def sizes_in_input(
    dataset: DetectionSet, image_size: tuple[int, int], resize: Resize
) -> np.ndarray:
    """Box sizes [N, 2] of a set, float32 input pixels, as evaluation sees them.

    Crowds are left out, and boxes with a side under SMALLEST.

    Args:
        image_size: (height, width) of the input.
        resize: `data.resize`.
    """
    sizes = [np.zeros((0, 2), np.float32)]
    for record in dataset.records:
        boxes_M4 = record.boxes_M4[~record.crowd_M]
        scale = fitted(record.width, record.height, image_size, resize).scale
        sizes.append((boxes_M4[:, 2:] - boxes_M4[:, :2]) * np.array(scale[::-1], np.float32))
    wh_N2 = np.concatenate(sizes)
    return wh_N2[(wh_N2 >= SMALLEST).all(axis=1)]


def best_possible_recall(wh_N2: np.ndarray, anchors_LA2: np.ndarray, threshold: float) -> float:
    """The part of the boxes that some anchor fits, hence that can be learned at all; of none: 1.

    An anchor fits when neither width nor height is `threshold` times the other's, or more.
    """
    if not len(wh_N2):
        return 1.0
    return float((_misfit(np.log(wh_N2), _logs(anchors_LA2)) < np.log(threshold)).mean())


def fitness(wh_N2: np.ndarray, anchors_LA2: np.ndarray, threshold: float) -> float:
    """Mean over boxes of how well the best anchor fits: the smaller of the ratios of width and
    height, each at most 1; 0 for a box that none fits."""
    return _fitness(np.log(wh_N2), _logs(anchors_LA2), threshold)


def fit_anchors(
    wh_N2: np.ndarray,
    before_LA2: np.ndarray,
    *,
    threshold: float = 4.0,
    generations: int = 1000,
    seed: int = 0,
) -> AnchorFit:
    """Fits as many anchors as there are; the same arguments give the same anchors.

    k-means of the logarithms of the sizes gives a start, unless the present anchors are fitter;
    then every generation changes some sides of the fittest so far at random, and stays if that is
    fitter.  Ranks must not each fit their own: the last digit of a logarithm, and with it what
    survives, may depend on the processor.

    Args:
        wh_N2: box sizes, input pixels; see `sizes_in_input`.
        before_LA2: the present anchors, input pixels.
        threshold: `loss.anchor_threshold`.
    Raises: DataError: fewer boxes than anchors.
    """
    levels, per_level, _ = before_LA2.shape
    wanted = levels * per_level
    if len(wh_N2) < wanted:
        raise DataError(
            f"{len(wh_N2)} boxes of at least {SMALLEST:g} pixels in the input are too few to fit "
            f"{wanted} anchors to",
            code="too_few_boxes",
            fix="set model.auto_anchor: false, or give model.anchors",
        )
    rng = np.random.Generator(np.random.Philox(seed))
    sample = rng.permutation(len(wh_N2))[:_MOST_BOXES]
    logs_N2 = np.log(wh_N2[np.sort(sample)].astype(np.float32))
    start_K2, before_K2 = _k_means(logs_N2, wanted, rng), _logs(before_LA2)
    if _fitness(logs_N2, before_K2, threshold) > _fitness(logs_N2, start_K2, threshold):
        start_K2 = before_K2
    sides_K2 = np.exp(_evolve(logs_N2, start_K2, threshold, generations, rng))
    sides_K2 = sides_K2[np.argsort(sides_K2.prod(axis=1), kind="stable")]
    anchors_LA2 = sides_K2.round(1).clip(min=0.1).astype(np.float32).reshape(before_LA2.shape)
    return AnchorFit(
        anchors_LA2=anchors_LA2,
        boxes=len(wh_N2),
        recall_before=best_possible_recall(wh_N2, before_LA2, threshold),
        recall_after=best_possible_recall(wh_N2, anchors_LA2, threshold),
        fitness_before=fitness(wh_N2, before_LA2, threshold),
        fitness_after=fitness(wh_N2, anchors_LA2, threshold),
    )


class Refit(NamedTuple):
    """Whether other anchors are worth it: them or None, and why, in a sentence for a log."""

    anchors_LA2: np.ndarray | None
    told: str


def refit(wh_N2: np.ndarray, before_LA2: np.ndarray, *, threshold: float, seed: int) -> Refit:
    """Fits anchors where the present ones reach fewer than ENOUGH_RECALL of the boxes.

    Args: as `fit_anchors`.
    """
    recall = best_possible_recall(wh_N2, before_LA2, threshold)
    told = f"{recall:.1%} of the {len(wh_N2)} training boxes are within reach of one"
    if recall >= ENOUGH_RECALL:
        return Refit(None, f"{told}; they stay as they are")
    if len(wh_N2) < before_LA2.size // 2:
        return Refit(None, f"{told}, but there are too few boxes to fit others")
    found = fit_anchors(wh_N2, before_LA2, threshold=threshold, seed=seed)
    if found.recall_after <= recall:
        return Refit(None, f"{told}, and fitting finds none better; they stay as they are")
    levels = [" ".join(f"{w:g},{h:g}" for w, h in level) for level in found.anchors_LA2]
    after = f"{found.recall_after:.1%} of others fitted to them"
    return Refit(found.anchors_LA2, f"{told}, {after}: {'; '.join(levels)} (pixels)")


def _logs(anchors_LA2: np.ndarray) -> np.ndarray:
    return np.log(anchors_LA2.reshape(-1, 2).astype(np.float32))


def _misfit(logs_N2: np.ndarray, anchors_K2: np.ndarray) -> np.ndarray:
    """[N] logarithm of the worse of the two ratios to the best anchor; both in logarithms."""
    best_N = np.full(len(logs_N2), np.inf, np.float32)
    for anchor_2 in anchors_K2:
        wide_N, high_N = np.abs(logs_N2 - anchor_2).T
        np.minimum(best_N, np.maximum(wide_N, high_N), out=best_N)
    return best_N


def _fitness(logs_N2: np.ndarray, anchors_K2: np.ndarray, threshold: float) -> float:
    misfit_N = _misfit(logs_N2, anchors_K2)
    return float((np.exp(-misfit_N) * (misfit_N < np.log(threshold))).mean(dtype=np.float64))


def _k_means(logs_N2: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Centres [K, 2], started as k-means++ does: far ones are likelier (Arthur 2007)."""
    centres = [logs_N2[rng.integers(len(logs_N2))]]
    far_N = np.full(len(logs_N2), np.inf)
    for _ in range(count - 1):
        far_N = np.minimum(far_N, ((logs_N2 - centres[-1]) ** 2).sum(axis=1, dtype=np.float64))
        total = far_N.sum()
        chance_N = far_N / total if total > 0 else None  # None: all boxes are alike
        centres.append(logs_N2[rng.choice(len(logs_N2), p=chance_N)])
    centres_K2 = np.stack(centres)
    for _ in range(_ROUNDS):
        apart_NK = ((logs_N2[:, None] - centres_K2) ** 2).sum(axis=2)
        nearest_N = apart_NK.argmin(axis=1)
        size_K = np.bincount(nearest_N, minlength=count)
        sums = [np.bincount(nearest_N, logs_N2[:, side], minlength=count) for side in (0, 1)]
        means_K2 = np.stack(sums, axis=1) / np.maximum(size_K, 1)[:, None]
        centres_K2 = np.where(size_K[:, None] > 0, means_K2, centres_K2).astype(np.float32)
    return centres_K2


def _evolve(
    logs_N2: np.ndarray,
    start_K2: np.ndarray,
    threshold: float,
    generations: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """The fittest anchors, in logarithms, of so many random changes of the fittest so far."""
    best_K2, best = start_K2, _fitness(logs_N2, start_K2, threshold)
    for _ in range(generations):
        changed_K2 = rng.random(best_K2.shape) < _CHANCE
        # Mostly small steps, now and then a large one.
        step_K2 = rng.standard_normal(best_K2.shape) * (_SPREAD * rng.random())
        mutant_K2 = (best_K2 + changed_K2 * step_K2).astype(np.float32)
        found = _fitness(logs_N2, mutant_K2, threshold)
        if found > best:
            best_K2, best = mutant_K2, found
    return best_K2
