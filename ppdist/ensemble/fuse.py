"""Fuses boxes of several models, views and files."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.common.files import write_json
from ppdist.config import ExperimentConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from ppdist.ensemble import fusion
from ppdist.ensemble.defaults import IOU, SIGMA, VIEW_MARGIN
from ppdist.ensemble.members import FuseClass, Member, member_of
from ppdist.ensemble.saved import Saved, read_saved, rows_of, set_of
from ppdist.ensemble.views import look, require_same_images
from ppdist.metrics.coco import evaluate_boxes, write_detections
from ppdist.models.base import Detector, ImageModel


def fuse_class(method: str, iou: float | None, sigma: float | None) -> FuseClass:
    """What fuses the boxes of a class.

    Args: method: of METHODS.  iou, sigma: its setting; None: the default.
    Raises: ConfigError: a setting of another method, or one that makes no sense.
    """
    if method == "soft-nms-gaussian":
        if iou is not None:
            raise ConfigError(
                "soft-nms-gaussian has none",
                code="options_conflict",
                where="--iou",
                fix="give --sigma",
            )
        sigma = SIGMA if sigma is None else sigma
        if not 0 < sigma < float("inf"):
            raise ConfigError(
                "expected a number above 0", code="option_invalid", where=f"--sigma {sigma:g}"
            )
        keeps = functools.partial(fusion.gaussian, sigma=sigma)
        return functools.partial(fusion.soft_suppression, keeps=keeps)
    if sigma is not None:
        raise ConfigError(
            "--sigma is for soft-nms-gaussian", code="options_conflict", fix=f"{method} takes --iou"
        )
    iou = IOU[method] if iou is None else iou
    if method == "soft-nms-linear":
        keeps = functools.partial(fusion.linear, iou=iou)
        return functools.partial(fusion.soft_suppression, keeps=keeps)
    kind = fusion.weighted_fusion if method == "wbf" else fusion.hard_suppression
    return functools.partial(kind, iou=iou)


def view_iou(
    method: str, iou: float | None, asked: float | None, written: float | None
) -> float | None:
    """IoU of the suppression within a view; None: as the configuration says.

    Args:
        iou: of the fusion; None: the default.
        asked: for by the user, who is obeyed.
        written: in the configuration of the model; None: it has no suppression.
    """
    if asked is not None or method != "wbf" or written is None:
        return asked
    return min(written, max(0.0, round((IOU[method] if iou is None else iou) - VIEW_MARGIN, 6)))


def read_all(
    files: Sequence[str], configs: Sequence[ExperimentConfig], detections: Sequence[Path]
) -> tuple[DetectionSet, list[Saved]]:
    """The validation set of all configurations (or, without any, the images that occur in saved
    detections), and the saved detections.

    Args: files: the names of the configurations.
    Raises: ConfigError: one is of a classifier.  DataError: a file is damaged, or the sets differ.
    """
    saved = [read_saved(path) for path in detections]
    sets: list[DetectionSet] = []
    for file, config in zip(files, configs):
        if config.model.task == "classify":
            raise ConfigError(
                "a classifier has no boxes",
                code="needs_detector",
                where=str(file),
                fix="give detectors",
            )
        if config.data != configs[0].data or not sets:  # of the same data: read once
            sets.append(read_split(config.data, "val", config.model.num_classes))
            require_same_images(files[0], sets[0], file, sets[-1])
    return (sets[0] if sets else set_of(saved)), saved


def members_of_model(
    config: ExperimentConfig,
    model: ImageModel,
    name: str,
    weight: float,
    dataset: DetectionSet,
    *,
    scales: Sequence[float],
    flip: bool,
    suppression_iou: float | None,
) -> Iterator[Member]:
    """A member for each view of a model; every rank iterates it to its end.

    Args:
        dataset: has true boxes.
        weight: of each view.
        scales, flip: see `ppdist.ensemble.views.look`; suppression_iou: its `view_iou`.
    """
    assert isinstance(model, Detector)  # `read_all` refuses classifiers
    for view, rows_R7 in look(config, model, dataset, scales, flip, suppression_iou):
        yield member_of(f"{name} {view}", rows_R7, weight, dataset)


def member_of_file(saved: Saved, weight: float, dataset: DetectionSet, truth: bool) -> Member:
    """Saved detections as a member; every rank calls it.  truth: the set has true boxes."""
    rows_R7 = comm.run_on_all_ranks(lambda: rows_of(saved, dataset))
    return member_of(str(saved.path), rows_R7, weight, dataset if truth else None)


def write_fused(
    out: Path, dataset: DetectionSet, members: Sequence[Member], fused_R7: np.ndarray
) -> dict[str, Any] | None:
    """Writes detections.json and, where the members have scores, scores.json; on rank 0 alone.

    Returns: what is in scores.json.
    """
    write_detections(out / "detections.json", dataset, fused_R7)
    if any(member.scores is None for member in members):
        return None
    of_members = [{"name": member.name, **(member.scores or {})} for member in members]
    scores = {"fused": evaluate_boxes(dataset, fused_R7), "members": of_members}
    write_json(out / "scores.json", scores, indent=1)
    return scores
