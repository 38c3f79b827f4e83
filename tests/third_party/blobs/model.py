"""The detector: images to raw outputs, raw outputs to boxes."""

from itertools import pairwise
from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from blobs.keys import BlobsConfig
from ppdist.models.base import Backbone, Detector
from ppdist.models.layers import ConvBNLayer
from ppdist.models.outputs import anchor_points


class BlobsOutputs(NamedTuple):
    """class_logits [B, C, H, W] and sides [B, 4, H, W] (left, top, right, bottom) of each level.

    Sides are in strides, 0 to 8.
    """

    class_logits: tuple[Tensor, ...]
    sides: tuple[Tensor, ...]


class BlobsBackbone(Backbone):
    """One convolution a level; `width` 1 gives 64 channels at P3."""

    finest, coarsest = 3, (5,)

    def __init__(self, depth: float, width: float, first: int, last: int) -> None:
        super().__init__()
        self.strides = tuple(2**level for level in range(first, last + 1))
        channels = [max(4, round(8 * 2**level * width)) for level in range(1, last + 1)]
        self.stem = ConvBNLayer(3, channels[0], 3, stride=2)
        self.blocks = nn.LayerList([ConvBNLayer(*pair, 3, stride=2) for pair in pairwise(channels)])
        self.first, self.channels = first, tuple(channels[first - 1 :])
        self.stage_keys = (("stem",), *((f"blocks.{i}",) for i in range(len(self.blocks))))

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        features = [self.stem(images_B3HW)]
        for block in self.blocks:
            features.append(block(features[-1]))
        return features[self.first - 1 :]


class Blobs(Detector):
    """Classes and sides from each cell of levels P3 to P5."""

    class_layers = ("classes.",)

    def __init__(self, config: BlobsConfig) -> None:
        super().__init__(
            config.num_classes,
            strides=(8, 16, 32),
            pixel_mean=(0.0, 0.0, 0.0),
            pixel_std=(255.0, 255.0, 255.0),
        )
        self.backbone = BlobsBackbone(1.0, config.channels / 64, 3, 5)
        rare = nn.initializer.Constant(-4.6)  # log(0.01 / 0.99): nearly all cells are background
        self.classes = nn.LayerList(
            [nn.Conv2D(c, config.num_classes, 1, bias_attr=rare) for c in self.backbone.channels]
        )
        self.sides = nn.LayerList([nn.Conv2D(c, 4, 1) for c in self.backbone.channels])

    def forward(self, images_B3HW: Tensor) -> BlobsOutputs:
        features = self.backbone(images_B3HW)
        return BlobsOutputs(
            tuple(layer(x) for layer, x in zip(self.classes, features)),
            tuple(8 * F.sigmoid(layer(x)) for layer, x in zip(self.sides, features)),
        )

    def decode(self, outputs: BlobsOutputs) -> tuple[Tensor, Tensor]:
        points_N2, stride_N1 = anchor_points(outputs.sides, self.strides)
        scores_BNC = F.sigmoid(by_cell(outputs.class_logits))
        return scores_BNC, boxes_of(by_cell(outputs.sides), points_N2, stride_N1)


def by_cell(levels: tuple[Tensor, ...]) -> Tensor:
    """[B, N, K] of all levels [B, K, H, W]."""
    return paddle.concat([level.flatten(2).transpose([0, 2, 1]) for level in levels], axis=1)


def boxes_of(sides_BN4: Tensor, points_N2: Tensor, stride_N1: Tensor) -> Tensor:
    """xyxy in input pixels of sides in strides."""
    low, high = (sides_BN4 * stride_N1).split([2, 2], axis=-1)
    return paddle.concat([points_N2 - low, points_N2 + high], axis=-1)
