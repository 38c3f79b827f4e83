"""What kind of mistake each detection is, what each kind costs, and which class is taken for which.

F detections, G objects, C classes.
"""

from enum import IntEnum

import numpy as np

from ppdist.metrics.curves import (
    coco_average_precision,
    mean_of_measured,
    objects_of,
    right_by_class,
)
from ppdist.metrics.matching import CROWD, NOBODY, Found, Pairs, Truth, most_overlapped

IOU = 0.5  # from which on a detection is in the right place


class Kind(IntEnum):
    """What a detection is.

    LOCALISATION: on an object of its class, but overlapping it by less than 0.5 (at least 0.1).
    CLASS: on an object of another class, by 0.5 or more.  DUPLICATE: on an object of its class
    that a surer one found.  BACKGROUND: none of these; off its place and of the wrong class at
    once (`Both` in the paper) is here, too, because only leaving it out mends it.  IGNORED: on a
    crowd.
    """

    CORRECT = 0
    LOCALISATION = 1
    CLASS = 2
    DUPLICATE = 3
    BACKGROUND = 4
    IGNORED = 5


def kinds_of(
    truth: Truth, found: Found, pairs: Pairs, match_F: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Kind of each detection, and the object it is about, NOBODY for the background; int64 [F].

    Args:
        match_F: what `match_as_coco` gave at IOU.

    Source: Bolya et al. 2020 (TIDE), arXiv:2008.08115, section 2.2, tried in the order of its
        reference implementation: localisation, class, duplicate.
    """
    pairs = pairs.of(~truth.crowd_G[pairs.object_P])
    same_P = found.label_F[pairs.found_P] == truth.label_G[pairs.object_P]
    kind_F = np.full(len(match_F), int(Kind.BACKGROUND))
    about_F = np.full(len(match_F), NOBODY)
    own_F, own_object_F, own_iou_F = most_overlapped(pairs.of(same_P), pairs.iou_P[same_P])
    other_F, other_object_F, other_iou_F = most_overlapped(pairs.of(~same_P), pairs.iou_P[~same_P])
    for kind, chosen_F, some_F, object_F in (  # the last that fits stays
        (Kind.DUPLICATE, own_iou_F >= IOU, own_F, own_object_F),
        (Kind.CLASS, other_iou_F >= IOU, other_F, other_object_F),
        (Kind.LOCALISATION, own_iou_F < IOU, own_F, own_object_F),
    ):
        kind_F[some_F[chosen_F]] = kind
        about_F[some_F[chosen_F]] = object_F[chosen_F]
    right_F = match_F >= 0
    kind_F[right_F], about_F[right_F] = Kind.CORRECT, match_F[right_F]
    kind_F[match_F == CROWD], about_F[match_F == CROWD] = Kind.IGNORED, NOBODY
    return kind_F, about_F


def missed(truth: Truth, kind_F: np.ndarray, about_F: np.ndarray) -> np.ndarray:
    """Objects that no detection found, nor was about with a wrong place or class; bool [G]."""
    seen_G = truth.crowd_G.copy()
    seen_G[about_F[about_F >= 0]] = True
    return ~seen_G


def count_kinds(
    truth: Truth, kind_F: np.ndarray, about_F: np.ndarray, sure_F: np.ndarray
) -> dict[str, int]:
    """Detections of each kind, and missed objects, where only those of `sure_F` (bool) count."""
    count = np.bincount(kind_F[sure_F], minlength=len(Kind))
    counts = {kind.name.lower(): int(count[kind]) for kind in Kind if kind != Kind.IGNORED}
    return {**counts, "missed": int(missed(truth, kind_F[sure_F], about_F[sure_F]).sum())}


def gains(
    truth: Truth, found: Found, kind_F: np.ndarray, about_F: np.ndarray, classes: int
) -> dict[str, float | None]:
    """How much mAP50 would rise with one kind of mistake mended, all others left; of all
    detections, however unsure.

    A wrong place or class is put right where no detection found the object, of several about one
    object that of the surest; the others of the kind are left out.  Duplicates and background are
    left out; missed objects are not asked for.
    Returns: None for each where the set has no object.
    Source: as `kinds_of`, section 2.3, and its reference implementation (tidecv 1.0.1), with
        COCO's recalls, which it takes a last digit differently.
    """
    objects_C = objects_of(truth, classes)
    match_F = np.where(kind_F == Kind.CORRECT, about_F, NOBODY)
    match_F[kind_F == Kind.IGNORED] = CROWD

    def mean_precision(
        label_F: np.ndarray, match_F: np.ndarray, objects_C: np.ndarray = objects_C
    ) -> float:
        rights = right_by_class(label_F, match_F, classes)
        values = [coco_average_precision(right, n) for right, n in zip(rights, objects_C.tolist())]
        return float(mean_of_measured(np.array([values]).T)[0])

    mendable_F = _mendable(truth, kind_F, about_F)

    def mended(kind: Kind) -> float:
        """CROWD stands for left out: both do not count."""
        new_match_F, label_F = np.where(kind_F == kind, CROWD, match_F), found.label_F.copy()
        put_right_F = mendable_F[kind_F[mendable_F] == kind]
        new_match_F[put_right_F] = about_F[put_right_F]
        label_F[put_right_F] = truth.label_G[about_F[put_right_F]]
        return mean_precision(label_F, new_match_F)

    wrong = (Kind.LOCALISATION, Kind.CLASS, Kind.DUPLICATE, Kind.BACKGROUND)
    if not objects_C.any():
        return dict.fromkeys((*(kind.name.lower() for kind in wrong), "missed"))
    before = mean_precision(found.label_F, match_F)
    gained: dict[str, float | None] = {kind.name.lower(): mended(kind) - before for kind in wrong}
    asked_for = ~missed(truth, kind_F, about_F) & ~truth.crowd_G
    fewer_C = np.bincount(truth.label_G[asked_for], minlength=classes)
    gained["missed"] = mean_precision(found.label_F, match_F, fewer_C) - before
    return gained


def _mendable(truth: Truth, kind_F: np.ndarray, about_F: np.ndarray) -> np.ndarray:
    """Of each object that no detection found, the surest that is about it with a wrong place or
    class; int64 [K] positions in Found."""
    found_G = np.zeros(len(truth.label_G), bool)
    found_G[about_F[kind_F == Kind.CORRECT]] = True
    wrong_F = np.flatnonzero((kind_F == Kind.LOCALISATION) | (kind_F == Kind.CLASS))
    wrong_F = wrong_F[~found_G[about_F[wrong_F]]]
    _, first = np.unique(about_F[wrong_F], return_index=True)
    return wrong_F[first]


def confused(
    truth: Truth, found: Found, pairs: Pairs, match_F: np.ndarray, sure_F: np.ndarray, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each object and each detection of nothing: its true class, and as what it was detected.

    Class C is true of detections of nothing, and is what objects that were not found were detected
    as.  First each detection has what COCO's rules give it, so those of equal classes are what
    precision and recall count; what is left is paired across classes, the largest overlap first,
    from IOU on.

    Args:
        match_F: what `match_as_coco` gave at IOU.
        sure_F: bool, which detections count.
    Returns: int64 [K], [K].
    """
    about_F = np.where(sure_F, match_F, CROWD)
    taken_G = truth.crowd_G.copy()
    taken_G[about_F[about_F >= 0]] = True
    free_P = (about_F[pairs.found_P] == NOBODY) & ~taken_G[pairs.object_P]
    pairs = pairs.of(free_P & (pairs.iou_P >= IOU))
    order_P = np.argsort(-pairs.iou_P, kind="stable")
    for detection, thing in zip(pairs.found_P[order_P], pairs.object_P[order_P]):
        if about_F[detection] == NOBODY and not taken_G[thing]:
            about_F[detection] = thing
            taken_G[thing] = True
    true_F = np.full(len(about_F), classes)
    true_F[about_F >= 0] = truth.label_G[about_F[about_F >= 0]]
    counted_F = about_F != CROWD
    missed_G = truth.label_G[~taken_G]
    called_F, nothing_G = found.label_F[counted_F], np.full(len(missed_G), classes)
    return np.append(true_F[counted_F], missed_G), np.append(called_F, nothing_G)
