"""Test-time augmentation: predictions at other input sizes and of mirrored images."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from ppdist.common.errors import ConfigError
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.types import DetectionSet
from ppdist.engine.build import build_evaluator
from ppdist.engine.evaluator import Evaluator
from ppdist.models.base import Detector


class Mirrored(Detector):
    """A detector that sees images mirrored left to right and mirrors its boxes back."""

    def __init__(self, model: Detector) -> None:
        zero_mean, unit_std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)  # the wrapped model normalises
        super().__init__(model.num_classes, (), zero_mean, unit_std, model.size_multiple)
        self.model = model

    def normalize(self, images_B3HW: Tensor) -> Tensor:
        return self.model.normalize(images_B3HW)

    def forward(self, images_B3HW: Tensor) -> tuple[Any, int]:
        """Returns the raw outputs for the mirrored images, and their width in pixels."""
        return self.model(images_B3HW.flip([3])), int(images_B3HW.shape[3])

    def decode(self, outputs: tuple[Any, int]) -> tuple[Tensor, Tensor]:
        raw, width = outputs
        scores_BNC, boxes_BN4 = self.model.decode(raw)
        x1_BN, y1_BN, x2_BN, y2_BN = boxes_BN4.unbind(-1)
        sides = [width - x2_BN, y1_BN, width - x1_BN, y2_BN]
        return scores_BNC, paddle.stack(sides, axis=-1)


def scaled_sizes(
    image_size: tuple[int, int], scales: Sequence[float], multiple: int
) -> list[tuple[int, int]]:
    """Computes the input size (height, width) at each scale, rounded to multiples of `multiple`.

    Sizes are in pixels, scales relative to `image_size`.

    Raises: ConfigError: two scales result in the same size, which would count twice.
    """
    sizes: dict[tuple[int, int], float] = {}
    for scale in scales:
        height, width = (max(1, round(side * scale / multiple)) * multiple for side in image_size)
        if (height, width) in sizes:
            raise ConfigError(
                f"{sizes[height, width]:g} and {scale:g} of {image_size[0]}x{image_size[1]} are "
                f"both {height}x{width} pixels (sides are multiples of {multiple}) and would "
                "count twice",
                code="scales_repeated",
                where="--scales",
                fix="leave one out",
            )
        sizes[height, width] = scale
    return list(sizes)


def predict_views(
    config: ExperimentConfig,
    model: Detector,
    dataset: DetectionSet,
    scales: Sequence[float],
    flip: bool,
    view_iou: float,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the detections of each view of the data set.

    Collective: every rank must iterate to the end.

    Args:
        scales: input sizes, relative to `model.image_size`.
        flip: add mirrored views.
        view_iou: IoU of the suppression within a view, also for a model that needs no suppression.
    Yields: the name of the view, and rows_R7 as `Evaluator.predict` returns them, on every rank.
    """
    views = [(model, "")] + ([(Mirrored(model), " mirrored")] if flip else [])
    sizes = scaled_sizes(config.model.image_size, scales, model.size_multiple)
    nms = config.suppression.model_copy(update={"iou_threshold": view_iou})
    for size in sizes:
        resized = config.model.model_copy(update={"image_size": size})
        view_config = config.model_copy(update={"model": resized})
        evaluator = build_evaluator(view_config, dataset, model, nms=nms)
        assert isinstance(evaluator, Evaluator)  # the evaluator of a detector
        for view_model, name in views:
            yield f"{size[0]}x{size[1]}{name}", evaluator.predict(view_model)
