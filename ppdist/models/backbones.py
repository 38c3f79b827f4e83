"""Backbones, which compute features of several levels from normalised images.

A level is named by the power of two of its stride: level 3 (P3) has stride 8.

A new backbone is one class and one row of `BACKBONES`.  Attribute names of layers are state-dict
keys, so published weights load unchanged.
Sources: CSPRepResNet arXiv:2203.16250, CSPDarknet (YOLOv5, release 6) arXiv:1911.11929.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

from paddle import Tensor, nn

from ppdist.common import plugin
from ppdist.common.errors import ConfigError
from ppdist.models import functional
from ppdist.models.base import Backbone
from ppdist.models.layers import C3, SPPF, ConvBNLayer, EffectiveSELayer, RepBlock, yolov5_conv


class Stem(nn.Layer):
    """Three 3x3 ConvBNLayers, the first with stride 2."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.conv1 = ConvBNLayer(3, out_channels // 2, 3, stride=2)
        self.conv2 = ConvBNLayer(out_channels // 2, out_channels // 2, 3)
        self.conv3 = ConvBNLayer(out_channels // 2, out_channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv3(self.conv2(self.conv1(images)))


class CSPResStage(nn.Layer):
    """Stage that halves the resolution: RepBlocks on half the channels, then channel attention."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, scaled: bool) -> None:
        super().__init__()
        middle = (in_channels + out_channels) // 2
        half = middle // 2
        self.conv_down = ConvBNLayer(in_channels, middle, 3, stride=2)
        self.conv1 = ConvBNLayer(middle, half, 1)
        self.conv2 = ConvBNLayer(middle, half, 1)
        self.blocks = nn.Sequential(*[RepBlock(half, True, scaled) for _ in range(blocks)])
        self.attn = EffectiveSELayer(2 * half)
        self.conv3 = ConvBNLayer(2 * half, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, bypass = functional.share(self.conv_down(x), 2)
        mixed = functional.concat([self.conv1(bypass), self.blocks(self.conv2(x))], axis=1)
        return self.conv3(self.attn(mixed))


class CSPRepResNet(Backbone):
    """The backbone of PP-YOLOE.

    Args:
        depth, width: blocks per stage and channels as multiples of size l.
        first, last: levels of the finest and the coarsest feature.
        scaled: whether the 1x1 branches have a learned scale (PP-YOLOE+).
    """

    finest, coarsest = 2, (5, 6)
    # Channels of the stem and of P2 and up at width 1, by the last level. The original has no level
    # 6: here the widest stage moves up, as in other detectors for large images, and the neck keeps
    # 3/4 of its channels.
    STAGE_CHANNELS: ClassVar = {5: (64, 128, 256, 512, 1024), 6: (64, 128, 256, 512, 768, 1024)}
    STAGE_BLOCKS = (3, 6, 6, 3, 3)  # P2 ... P6, at depth 1

    def __init__(
        self, depth: float, width: float, first: int, last: int, scaled: bool = False
    ) -> None:
        super().__init__()
        channels = [scaled_width(c, width) for c in self.STAGE_CHANNELS[last]]
        counts = [scaled_repeats(n, depth) for n in self.STAGE_BLOCKS]
        sizes = zip(channels, channels[1:], counts)
        self.stem = Stem(channels[0])
        self.stages = nn.LayerList([CSPResStage(*size, scaled) for size in sizes])
        self.first = first
        self.strides = tuple(2**level for level in range(first, last + 1))
        self.channels = tuple(channels[first - 1 :])
        self.stage_keys = (("stem",), *((f"stages.{i}",) for i in range(len(self.stages))))

    @classmethod
    def options_of(cls, variant: str) -> dict[str, Any]:
        return {"scaled": variant == "plus"}

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        features = [self.stem(images_B3HW)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        return features[self.first - 1 :]  # the stem gives level 1


class CSPDarknet(Backbone):
    """The backbone of YOLOv5.

    Args:
        depth, width: blocks per stage and channels as multiples of size l.
        first, last: levels of the finest and the coarsest feature.
        pooling: whether SPPF is applied to the last feature (detectors).
    """

    finest, coarsest = 3, (5, 6)
    # At width 1 and depth 1, by the last level: channels of levels 1 (the stem) and up, and
    # bottlenecks in the stages of levels 2 and up.
    STAGE_CHANNELS: ClassVar = {5: (64, 128, 256, 512, 1024), 6: (64, 128, 256, 512, 768, 1024)}
    STAGE_BLOCKS: ClassVar = {5: (3, 6, 9, 3), 6: (3, 6, 9, 3, 3)}

    def __init__(
        self, depth: float, width: float, first: int, last: int, pooling: bool = True
    ) -> None:
        super().__init__()
        channels = [math.ceil(c * width / 8) * 8 for c in self.STAGE_CHANNELS[last]]
        blocks = [scaled_repeats(n, depth) for n in self.STAGE_BLOCKS[last]]
        # Layers are registered in the order in which they run: data-parallel training sends
        # gradients in buckets of neighbouring layers, and only in this order do the gradients of a
        # bucket become ready together.
        width_in = channels[0]
        self.stem = yolov5_conv(3, width_in, 6, stride=2, padding=2)
        self.levels = tuple(range(2, last + 1))
        for level, out, count in zip(self.levels, channels[1:], blocks, strict=True):
            self.add_sublayer(f"down{level}", yolov5_conv(width_in, out, 3, stride=2))
            self.add_sublayer(f"stage{level}", C3(out, out, count, residual=True))
            width_in = out
        self.sppf = SPPF(width_in) if pooling else None
        self.first = first
        self.strides = tuple(2**level for level in range(first, last + 1))
        self.channels = tuple(channels[first - 1 :])
        rows = [(f"down{level}", f"stage{level}") for level in self.levels[:-1]]
        coarsest = (f"down{last}", f"stage{last}", *(("sppf",) if pooling else ()))
        self.stage_keys = (("stem",), *rows, coarsest)

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        features = [self.stem(images_B3HW)]
        for level in self.levels:
            down, stage = getattr(self, f"down{level}"), getattr(self, f"stage{level}")
            x = features[-1]
            if level > self.first:  # the neck reads it, too
                features[-1], x = functional.share(x, 2)
            features.append(stage(down(x)))
        if self.sppf is not None:
            features[-1] = self.sppf(features[-1])
        return features[self.first - 1 :]


# Our backbones, by their name in `model.body`. A backbone of another package is given there as
# `package.module:Class` (config/plugins.py).
BACKBONES: dict[str, type[Backbone]] = {"csprepresnet": CSPRepResNet, "yolov5": CSPDarknet}


def build_backbone(
    name: str,
    *,
    depth: float,
    width: float,
    first: int,
    last: int,
    variant: str = "",
    **options: Any,
) -> Backbone:
    """Builds a backbone with new weights.

    Args:
        name: a row of `BACKBONES`, or `package.module:Class` of another package.
        depth, width: blocks per stage and channels as multiples of size l.
        first, last: levels of the finest and the coarsest feature.
        variant: `model.variant`; see `Backbone.options_of`.
        options: further arguments of the class.
    Raises: ConfigError: the backbone lacks these levels, or it belongs to a plugin that cannot be
        imported.
    """
    row: type[Backbone] = plugin.load(name) if plugin.is_plugin(name) else BACKBONES[name]
    if first < row.finest or last not in row.coarsest:
        ends = " or ".join(f"P{level}" for level in row.coarsest)
        raise ConfigError(
            f"P{first}-P{last}: the backbone {name} begins at P{row.finest} and ends at {ends}",
            code="backbone_without_level",
            where="model.levels",
            fix="choose levels that it has, or another backbone",
        )
    build: Callable[..., Backbone] = row
    return build(depth, width, first, last, **row.options_of(variant), **options)


def scaled_width(channels: int, width: float) -> int:
    """Returns the number of channels at a width multiple.

    It is at least 2, because stages work on halves.
    """
    return max(round(channels * width), 2)


def scaled_repeats(repeats: int, depth: float) -> int:
    """Returns the number of blocks of a stage at a depth multiple: rounded, at least 1."""
    return max(round(repeats * depth), 1)
