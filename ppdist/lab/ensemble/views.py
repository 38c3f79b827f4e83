"""Test-time augmentation of single images: predicts views of each image and fuses their boxes.

The boxes of a view are those of a member of `ppdist ensemble fuse --flip --scales`: suppressed
below the IoU of the fusion, then fused by wbf.
"""

from collections.abc import Sequence

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.lab.ensemble.fuse import fuse_image
from ppdist.lab.ensemble.tta import scaled_sizes
from ppdist.lab.ensemble.wbf import IOU, view_iou
from ppdist.predict.model import LoadedModel, Predict, with_suppression

SCALES = (1.0,)


def with_views(
    model: LoadedModel,
    scales: Sequence[float] = SCALES,
    *,
    iou: float | None = None,
    agnostic: bool = False,
) -> Predict:
    """Returns a detector that looks at each image and at its mirror image, at several sizes.

    Args:
        scales: input sizes, relative to that of the model.
        iou: IoU of the suppression within a view, at most `wbf.view_iou`; None: the model's IoU.
        agnostic: see `with_suppression`; also applies to the fused boxes.
    Raises: ConfigError: two scales result in the same size, or an export has a fixed size; see also
        `with_suppression`.
    """
    spec = model.spec
    assert spec.nms is not None  # the spec of a detector
    agnostic = agnostic or spec.nms.class_agnostic
    sizes = scaled_sizes(spec.input.size, scales, model.size_multiple)
    if not spec.input.dynamic_size and sizes != [spec.input.size]:
        height, width = spec.input.size
        raise ConfigError(
            f"this export takes inputs of {height}x{width} pixels only",
            code="options_conflict",
            where="scales",
            fix="leave them out, use the weights, or export without --fixed-size",
        )
    limit = view_iou(IOU, spec.nms.iou_threshold if iou is None else iou)
    views: list[Predict] = []
    for size in sizes:
        plain = with_suppression(model.resized(size), limit, agnostic)
        views += [plain, mirrored(plain)]
    keep = spec.nms.keep

    def see(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        rows_of_images = zip(*(view(images) for view in views))
        return [_fuse(rows_R6, agnostic)[:keep] for rows_R6 in rows_of_images]

    return see


def mirrored(predict: Predict) -> Predict:
    """Returns a detector that sees images mirrored left to right and mirrors its boxes back."""

    def see(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        mirror_images = [np.ascontiguousarray(image_HW3[:, ::-1]) for image_HW3 in images]
        result = []
        for image_HW3, rows_R6 in zip(images, predict(mirror_images)):
            sides_R2 = image_HW3.shape[1] - rows_R6[:, [4, 2]]
            rows_R6 = rows_R6.copy()
            rows_R6[:, [2, 4]] = sides_R2
            result.append(rows_R6)
        return result

    return see


def _fuse(rows_of_views: Sequence[np.ndarray], agnostic: bool) -> np.ndarray:
    """Fuses the rows_R6 of the views of one image, best first."""
    rows_R6 = np.concatenate(rows_of_views)
    if not len(rows_R6):
        return rows_R6
    rows_R7 = np.pad(rows_R6, ((0, 0), (1, 0)))  # with image index 0
    return fuse_image(rows_R7, len(rows_of_views), IOU, agnostic)[:, 1:]
