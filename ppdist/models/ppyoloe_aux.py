"""The auxiliary head of PP-YOLOE+ t: convolutions shared by all levels, in training only.

It reads the neck's features beside those of a second neck, so it sees more than the detector and
learns faster; the assignment made from its predictions is what the detector learns from.
Source: the assign guidance module of NanoDet-Plus; PP-YOLOE+ t has one such convolution.
"""

import math

import paddle.nn.functional as F
from paddle import ParamAttr, Tensor, nn
from paddle.nn.initializer import Constant, Normal

MAX_GROUPS = 32


class ConvGroupNorm(nn.Layer):
    """3x3 convolution without bias, group norm, leaky ReLU (slope 0.1)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2D(channels, channels, 3, padding=1, bias_attr=False)
        # 32 groups as published; fewer where a custom width is not a multiple of 32
        self.norm = nn.GroupNorm(math.gcd(MAX_GROUPS, channels), channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.conv(x)), 0.1)


class LevelScale(nn.Layer):
    """A learned factor, 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class AuxiliaryHead(nn.Layer):
    """Class and side logits of every level from the same weights, but for one factor per level.

    At first every class has probability 0.01 and every side a nearly uniform distribution.
    Attribute names are the official state-dict keys.
    """

    def __init__(self, channels: int, levels: int, num_classes: int, side_logits: int) -> None:
        """
        Args:
            channels: of every level's feature.
            side_logits: outputs per cell for the four sides.
        """
        super().__init__()
        self.cls_convs = nn.LayerList([ConvGroupNorm(channels)])
        self.reg_convs = nn.LayerList([ConvGroupNorm(channels)])
        self.gfl_cls = _predictor(channels, num_classes, -math.log((1 - 0.01) / 0.01))
        self.gfl_reg = _predictor(channels, side_logits, 0.0)
        self.scales = nn.LayerList([LevelScale() for _ in range(levels)])

    def forward(self, features: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Features [B, channels, H, W] to class and side logits, one map per level each."""
        class_logits, side_logits = [], []
        for feature, scale in zip(features, self.scales):
            class_logits.append(self.gfl_cls(self.cls_convs[0](feature)))
            side_logits.append(scale(self.gfl_reg(self.reg_convs[0](feature))))
        return tuple(class_logits), tuple(side_logits)


def _predictor(channels: int, outputs: int, bias: float) -> nn.Conv2D:
    weight, constant = (
        ParamAttr(initializer=Normal(0.0, 0.01)),
        ParamAttr(initializer=Constant(bias)),
    )
    return nn.Conv2D(channels, outputs, 3, padding=1, weight_attr=weight, bias_attr=constant)
