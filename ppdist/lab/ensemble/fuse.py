"""Fuses the boxes of several models and views into one set.

read_common_set -> members_of_model -> fuse_members -> write_fused
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.class_names import require_same_classes
from ppdist.common.errors import ConfigError, DataError
from ppdist.common.files import write_json
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.distributed import comm, heartbeat
from ppdist.distributed.comm import evaluate_on_all_ranks
from ppdist.lab.ensemble.tta import predict_views
from ppdist.lab.ensemble.wbf import weighted_fusion
from ppdist.metrics.coco import evaluate_boxes, write_detections
from ppdist.models.base import Detector, ImageModel
from ppdist.predict.model import suppress_rows

# The validation set that all members share.


def read_common_set(files: Sequence[str], configs: Sequence[ExperimentConfig]) -> DetectionSet:
    """Reads the common validation set of all configurations.

    Args: files: the files of the configurations.
    Raises: ConfigError: one describes a classifier.  DataError: a file is damaged, or the
        validation sets differ.
    """
    sets: list[DetectionSet] = []
    for file, config in zip(files, configs):
        if config.model.task == "classify":
            raise ConfigError(
                "a classifier has no boxes",
                code="needs_detector",
                where=str(file),
                fix="give detectors",
            )
        if config.data != configs[0].data or not sets:  # the same data is read once
            sets.append(read_split(config.data, "val", config.model.num_classes))
            require_same_images(files[0], sets[0], file, sets[-1])
    return sets[0]


def require_same_images(
    first: str, first_set: DetectionSet, second: str, second_set: DetectionSet
) -> None:
    """Checks that two configurations have the same validation images and classes.

    Args: first, second: the configuration files.
    Raises: DataError: the images or their order differ.  ConfigError: the classes differ.
    """
    fix = "give models of the same classes; their order does not matter"
    require_same_classes(
        first_set.class_names, second_set.class_names, where=second, owner=first, fix=fix
    )
    names = [
        [_image_key(record) for record in dataset.records] for dataset in (first_set, second_set)
    ]
    if names[0] != names[1]:
        counts = " and ".join(f"{len(records)} images" for records in names)
        raise DataError(
            f"the validation sets differ ({first_set.source} and {second_set.source}, {counts})",
            code="validation_sets_differ",
            where=f"{first} and {second}",
            fix="give both the same with -o data.root=... data.val.annotations=...",
        )


def _image_key(record: ImageRecord) -> tuple[str, int, int]:
    return Path(record.path).name, record.width, record.height


# Members and their fusion.


@dataclass(frozen=True)
class Member:
    """A view of a model, with its detections; see `make_member`.

    rows_R7: float32 (index of the image, class, score, x1, y1, x2, y2) for this rank's images, in
    pixels of the original image.  boxes: number of boxes in all images.  scores: its metrics.
    """

    name: str
    rows_R7: np.ndarray
    boxes: int
    scores: dict[str, float]


def make_member(
    name: str, rows_R7: np.ndarray, dataset: DetectionSet, max_detections: int
) -> Member:
    """Scores a member and keeps the rows of this rank's images.  Collective.

    Args:
        rows_R7: as `Member.rows_R7`, but for all images, the same on every rank.
        max_detections: see `evaluate_boxes`.
    """

    def score() -> dict[str, float]:
        metrics = evaluate_boxes(dataset, rows_R7, max_detections)
        return {key: metrics[key] for key in ("mAP", "mAP50")}

    scores = comm.run_on_main(score)
    is_local_R = rows_R7[:, 0].astype(np.int64) % comm.world_size() == comm.rank()
    is_local_R &= np.isfinite(rows_R7).all(1)  # a diverged model has non-finite boxes
    return Member(name, rows_R7[is_local_R], len(rows_R7), scores)


def members_of_model(
    config: ExperimentConfig,
    model: ImageModel,
    name: str,
    dataset: DetectionSet,
    *,
    scales: Sequence[float],
    flip: bool,
    suppression_iou: float,
) -> Iterator[Member]:
    """Yields a member for each view of a model.

    Collective: every rank must iterate to the end.

    Args:
        dataset: has ground-truth boxes.
        scales, flip: see `ppdist.lab.ensemble.tta.predict_views`; suppression_iou: its `view_iou`.
    """
    assert isinstance(model, Detector)  # `read_common_set` refuses classifiers
    max_detections = config.evaluate.max_detections
    for view, rows_R7 in predict_views(config, model, dataset, scales, flip, suppression_iou):
        yield make_member(f"{name} {view}", rows_R7, dataset, max_detections)


def fuse_members(
    members: Sequence[Member], iou: float, keep: int, agnostic: bool = False
) -> np.ndarray:
    """Fuses the members' detections; the result is equal on every rank.

    Collective: every rank passes the same members, with the rows of its own images.  Images are
    fused one by one, so the result does not depend on the number of ranks.

    Args:
        iou: see `weighted_fusion`.
        keep: maximum number of boxes per image, highest scores first.
        agnostic: see `fuse_image`.
    Returns: as `Member.rows_R7`, but for all images, ordered by image, best first.
    Raises: EvaluationFailed, on every rank: a rank could not fuse its images.
    """
    share_R7 = evaluate_on_all_ranks(lambda: _fuse_share(members, iou, keep, agnostic)).value
    all_R7 = comm.all_gather_rows(share_R7)
    return all_R7[np.argsort(all_R7[:, 0], kind="stable")]


def _fuse_share(members: Sequence[Member], iou: float, keep: int, agnostic: bool) -> np.ndarray:
    """Fuses this rank's images."""
    rows_R7 = np.concatenate([member.rows_R7 for member in members])
    rows_R7 = rows_R7[np.argsort(rows_R7[:, 0], kind="stable")]
    # The rows of an image are contiguous now, so its slice begins where the index changes.
    first_R = np.flatnonzero(np.diff(rows_R7[:, 0], prepend=-1))
    fused = [np.zeros((0, 7), np.float32)]
    for begin, end in zip(first_R, [*first_R[1:], len(rows_R7)]):
        heartbeat.alive()
        fused.append(fuse_image(rows_R7[begin:end], len(members), iou, agnostic)[:keep])
    return np.concatenate(fused)


def fuse_image(rows_R7: np.ndarray, members: int, iou: float, agnostic: bool = False) -> np.ndarray:
    """Fuses the rows of one image class by class, best first.

    On ties the class with the lower index is first.

    Args: agnostic: if fused boxes overlap by more than `iou`, keep only the one with the higher
        score, whatever their classes (`nms.class_agnostic`).
    """
    fused_rows = []
    for label in np.unique(rows_R7[:, 1]):
        rows_S7 = rows_R7[rows_R7[:, 1] == label].astype(np.float64)
        boxes_K4, scores_K = weighted_fusion(rows_S7[:, 3:], rows_S7[:, 2], members, iou)
        same_K2 = np.broadcast_to([rows_R7[0, 0], label], (len(scores_K), 2))
        fused_rows.append(np.concatenate([same_K2, scores_K[:, None], boxes_K4], axis=1))
    rows_K7 = np.concatenate(fused_rows).astype(np.float32)
    rows_K7 = rows_K7[np.argsort(-rows_K7[:, 2], kind="stable")]
    if not agnostic:
        return rows_K7
    return np.pad(
        suppress_rows(rows_K7[:, 1:], iou, agnostic),
        ((0, 0), (1, 0)),
        constant_values=rows_R7[0, 0],
    )


def write_fused(
    out: Path,
    dataset: DetectionSet,
    members: Sequence[Member],
    fused_R7: np.ndarray,
    max_detections: int,
) -> dict[str, Any]:
    """Writes detections.json and scores.json; rank 0 only.

    Args: max_detections: see `evaluate_boxes`.
    Returns: the content of scores.json.
    """
    write_detections(out / "detections.json", dataset, fused_R7)
    member_scores = [{"name": member.name, **member.scores} for member in members]
    scores = {"fused": evaluate_boxes(dataset, fused_R7, max_detections), "members": member_scores}
    write_json(out / "scores.json", scores, indent=1)
    return scores
