"""Members of an ensemble, and their detections of a whole set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ppdist.data.types import DetectionSet
from ppdist.distributed import comm, heartbeat
from ppdist.distributed.comm import evaluate_on_all_ranks
from ppdist.ensemble.fusion import Boxes
from ppdist.metrics.coco import evaluate_boxes

# (boxes_R4, scores_R, weight_R, total) -> (boxes_K4, scores_K): see ppdist.ensemble.fusion.
FuseClass = Callable[[np.ndarray, np.ndarray, np.ndarray, float], Boxes]


@dataclass(frozen=True)
class Member:
    """One view of one model, or one file of detections; `member_of` makes one.

    rows_R7: float32 (position of the image, class, score, x1, y1, x2, y2), pixels of the original
    image, of this rank's images.  weight: of this member beside the others, above 0.  boxes: that
    it found in all images.  scores: its own, where truth is known.
    """

    name: str
    rows_R7: np.ndarray
    weight: float
    boxes: int
    scores: dict[str, float] | None


def member_of(
    name: str, rows_R7: np.ndarray, weight: float, truth: DetectionSet | None = None
) -> Member:
    """Scores a member and keeps the rows of this rank's images; every rank calls it.

    Args:
        rows_R7: as `Member.rows_R7`, of all images, the same on every rank.
        truth: the set, if it has true boxes to score the member by.
    """

    def score() -> dict[str, float]:
        assert truth is not None
        found = evaluate_boxes(truth, rows_R7)
        return {name: found[name] for name in ("mAP", "mAP50")}

    scores = None if truth is None else comm.run_on_main(score)
    mine_R = rows_R7[:, 0].astype(np.int64) % comm.world_size() == comm.rank()
    mine_R &= np.isfinite(rows_R7).all(1)  # a model that diverged
    return Member(name, rows_R7[mine_R], weight, len(rows_R7), scores)


def fuse_members(members: Sequence[Member], fuse: FuseClass, keep: int) -> np.ndarray:
    """One set of detections; every rank calls it with its rows of the same members, and all get
    the same: images are fused one by one, so it does not depend on the number of ranks.

    Args: keep: how many boxes of an image stay at most, the surest.
    Returns: as `Member.rows_R7`, of all images, ordered by image, best first.
    Raises: EvaluationFailed, on every rank: some rank could not fuse its images.
    """
    share_R7 = evaluate_on_all_ranks(lambda: _fuse_share(members, fuse, keep)).value
    all_R7 = comm.all_gather_rows(share_R7)
    return all_R7[np.argsort(all_R7[:, 0], kind="stable")]


def _fuse_share(members: Sequence[Member], fuse: FuseClass, keep: int) -> np.ndarray:
    """Of this rank's images."""
    largest = max(member.weight for member in members)
    weights_M = np.array([member.weight / largest for member in members])
    rows_R7 = np.concatenate([member.rows_R7 for member in members])
    weight_R = np.repeat(weights_M, [len(member.rows_R7) for member in members])
    order_R = np.argsort(rows_R7[:, 0], kind="stable")
    rows_R7, weight_R = rows_R7[order_R], weight_R[order_R]
    first_R = np.flatnonzero(np.diff(rows_R7[:, 0], prepend=-1))
    fused = [np.zeros((0, 7), np.float32)]
    for begin, end in zip(first_R, [*first_R[1:], len(rows_R7)]):
        heartbeat.alive()
        part = slice(begin, end)
        fused.append(fuse_image(rows_R7[part], weight_R[part], float(weights_M.sum()), fuse)[:keep])
    return np.concatenate(fused)


def fuse_image(
    rows_R7: np.ndarray, weight_R: np.ndarray, total: float, fuse: FuseClass
) -> np.ndarray:
    """Fuses class by class the rows of one image; best first, of equals the lower class first.

    Args: weight_R: of the member of each row, at most 1; total: sum of those of all members.
    """
    found = []
    for label in np.unique(rows_R7[:, 1]):
        of_class = rows_R7[:, 1] == label
        rows_S7 = rows_R7[of_class].astype(np.float64)
        boxes_K4, scores_K = fuse(rows_S7[:, 3:], rows_S7[:, 2], weight_R[of_class], total)
        same_K2 = np.broadcast_to([rows_R7[0, 0], label], (len(scores_K), 2))
        found.append(np.concatenate([same_K2, scores_K[:, None], boxes_K4], axis=1))
    rows_K7 = np.concatenate(found).astype(np.float32)
    return rows_K7[np.argsort(-rows_K7[:, 2], kind="stable")]
