"""PP-YOLOE (arXiv:2203.16250) and PP-YOLOE+: CSPRepResNet, CSP-PAN, ET-head.

    images -> Backbone -> strides 8, 16, 32 -> Neck -> strides 32, 16, 8 -> Head -> PPYOLOEOutputs

Attribute names are the official state-dict keys, so published weights load unchanged.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from pydantic import Field

from ppdist.config import Section
from ppdist.models.blocks import ChannelAttention, ConvNorm, RepBlock, SpatialPyramid, upsample2x
from ppdist.models.detector import Detector

DEPTH_WIDTH = {
    "t": (0.33, 0.375),
    "s": (0.33, 0.50),
    "m": (0.67, 0.75),
    "l": (1.0, 1.0),
    "x": (1.33, 1.25),
}
STRIDES = (32, 16, 8)  # of the outputs, in their order
BINS = 17  # R: a side is 0..16 strides long, a distribution over 17 integers (DFL)


class PPYOLOEConfig(Section):
    """Which PP-YOLOE."""

    name: Literal["ppyoloe"] = Field(default="ppyoloe", description="detector family")
    variant: Literal["crn", "plus"] = Field(
        default="plus",
        description="plus: PP-YOLOE+, learned scale on the backbone's 1x1 branches, pixels / 255; "
        "crn: the first PP-YOLOE, ImageNet mean and deviation",
    )
    size: Literal["t", "s", "m", "l", "x"] = Field(
        default="s", description="depth and width multiples"
    )
    depth_multiple: float | None = Field(
        default=None, gt=0, description="blocks per stage as a multiple of size l; null: from size"
    )
    width_multiple: float | None = Field(
        default=None, gt=0, description="channels as a multiple of size l; null: from size"
    )
    num_classes: int = Field(default=80, ge=1, description="object classes C")
    pretrained: str | None = Field(
        default=None, description="weight file (.pdparams, .safetensors, .npz) or checkpoint folder"
    )
    image_size: tuple[int, int] = Field(
        default=(640, 640), description="input [height, width] in pixels, multiples of 32"
    )


class PPYOLOEOutputs(NamedTuple):
    """Raw outputs per level (strides 32, 16, 8), the same in training and evaluation.

    class_logits: [B, C, H, W] each; side_logits: [B, 4 * BINS, H, W] each, channel
    side * BINS + bin, sides left, top, right, bottom.
    """

    class_logits: tuple[Tensor, ...]
    side_logits: tuple[Tensor, ...]


class Stem(nn.Layer):
    """Three 3x3 ConvNorms, the first with stride 2."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(3, out_channels // 2, 3, stride=2)
        self.conv2 = ConvNorm(out_channels // 2, out_channels // 2, 3)
        self.conv3 = ConvNorm(out_channels // 2, out_channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv3(self.conv2(self.conv1(images)))


class BackboneStage(nn.Layer):
    """Halves the resolution; half the channels pass through RepBlocks; channel attention."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, scaled: bool) -> None:
        super().__init__()
        middle = (in_channels + out_channels) // 2
        half = middle // 2
        self.conv_down = ConvNorm(in_channels, middle, 3, stride=2)
        self.conv1 = ConvNorm(middle, half, 1)
        self.conv2 = ConvNorm(middle, half, 1)
        self.blocks = nn.Sequential(*[RepBlock(half, True, scaled) for _ in range(blocks)])
        self.attn = ChannelAttention(2 * half)
        self.conv3 = ConvNorm(2 * half, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_down(x)
        mixed = paddle.concat([self.conv1(x), self.blocks(self.conv2(x))], axis=1)
        return self.conv3(self.attn(mixed))


class Backbone(nn.Layer):
    """CSPRepResNet: images to features of strides 8, 16, 32."""

    def __init__(self, depth: float, width: float, scaled: bool) -> None:
        super().__init__()
        channels = [max(round(c * width), 1) for c in (64, 128, 256, 512, 1024)]
        counts = [max(round(n * depth), 1) for n in (3, 6, 6, 3)]
        self.stem = Stem(channels[0])
        self.stages = nn.LayerList(
            [BackboneStage(channels[i], channels[i + 1], counts[i], scaled) for i in range(4)]
        )
        self.out_channels = channels[2:]

    def forward(self, images: Tensor) -> list[Tensor]:
        features = [self.stem(images)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        return features[2:]


class NeckStage(nn.Layer):
    """CSP stage of the neck: RepBlocks without residual, optionally a pooling pyramid inside."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, pyramid: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = ConvNorm(in_channels, half, 1)
        self.conv2 = ConvNorm(in_channels, half, 1)
        self.convs = nn.Sequential()
        for i in range(blocks):
            self.convs.add_sublayer(str(i), RepBlock(half, False, False))
            if pyramid and i == (blocks - 1) // 2:
                self.convs.add_sublayer("spp", SpatialPyramid(half))
        self.conv3 = ConvNorm(2 * half, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(paddle.concat([self.conv1(x), self.convs(self.conv2(x))], axis=1))


class Neck(nn.Layer):
    """CSP-PAN: features of strides 8, 16, 32 in, fused features of strides 32, 16, 8 out."""

    def __init__(self, in_channels: list[int], depth: float, width: float) -> None:
        super().__init__()
        c8, c16, c32 = in_channels
        out = [round(c * width) for c in (768, 384, 192)]  # strides 32, 16, 8
        blocks = max(round(3 * depth), 1)

        def stage(channels: int, out_channels: int, pyramid: bool = False) -> nn.Sequential:
            return nn.Sequential(NeckStage(channels, out_channels, blocks, pyramid))

        self.fpn_stages = nn.LayerList(
            [
                stage(c32, out[0], pyramid=True),
                stage(c16 + out[0] // 2, out[1]),
                stage(c8 + out[1] // 2, out[2]),
            ]
        )
        self.fpn_routes = nn.LayerList(
            [ConvNorm(out[0], out[0] // 2, 1), ConvNorm(out[1], out[1] // 2, 1)]
        )
        # Both pan lists run from coarse to fine although they are applied from fine to coarse.
        self.pan_stages = nn.LayerList(
            [stage(out[0] + out[1], out[0]), stage(out[1] + out[2], out[1])]
        )
        self.pan_routes = nn.LayerList(
            [ConvNorm(out[1], out[1], 3, stride=2), ConvNorm(out[2], out[2], 3, stride=2)]
        )
        self.out_channels = out

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        f8, f16, f32 = features
        f32 = self.fpn_stages[0](f32)
        f16 = self.fpn_stages[1](paddle.concat([upsample2x(self.fpn_routes[0](f32)), f16], axis=1))
        f8 = self.fpn_stages[2](paddle.concat([upsample2x(self.fpn_routes[1](f16)), f8], axis=1))
        f16 = self.pan_stages[1](paddle.concat([self.pan_routes[1](f8), f16], axis=1))
        f32 = self.pan_stages[0](paddle.concat([self.pan_routes[0](f16), f32], axis=1))
        return [f32, f16, f8]


class TaskAttention(nn.Layer):
    """swish(bn(conv1x1(x * sigmoid(fc(mean of x))))): one of the ET-head's two task branches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2D(channels, channels, 1, weight_attr=_normal(0.001))
        self.conv = ConvNorm(channels, channels, 1)

    def forward(self, feature: Tensor, mean: Tensor) -> Tensor:
        return self.conv(feature * F.sigmoid(self.fc(mean)))


class Head(nn.Layer):
    """ET-head: class logits and a distribution over each side's length, per cell.

    Predictors start at zero weight: every class at probability 0.01 (focal prior), every side's
    distribution uniform, i.e. 8 strides long.
    """

    def __init__(self, in_channels: list[int], num_classes: int) -> None:
        super().__init__()
        prior = -float(np.log((1 - 0.01) / 0.01))
        self.stem_cls = nn.LayerList([TaskAttention(c) for c in in_channels])
        self.stem_reg = nn.LayerList([TaskAttention(c) for c in in_channels])
        self.pred_cls = nn.LayerList([_predictor(c, num_classes, prior) for c in in_channels])
        self.pred_reg = nn.LayerList([_predictor(c, 4 * BINS, 1.0) for c in in_channels])
        # Constant 0..16: the bins' values in strides.  A frozen weight, for the official key.
        self.proj_conv = nn.Conv2D(BINS, 1, 1, bias_attr=False)
        self.proj_conv.weight.set_value(np.arange(BINS, dtype="float32").reshape(1, BINS, 1, 1))
        self.proj_conv.weight.stop_gradient = True

    def forward(self, features: list[Tensor]) -> PPYOLOEOutputs:
        class_logits, side_logits = [], []
        for level, feature in enumerate(features):
            mean = F.adaptive_avg_pool2d(feature, 1)
            class_feature = self.stem_cls[level](feature, mean) + feature
            class_logits.append(self.pred_cls[level](class_feature))
            side_logits.append(self.pred_reg[level](self.stem_reg[level](feature, mean)))
        return PPYOLOEOutputs(tuple(class_logits), tuple(side_logits))


class PPYOLOE(Detector):
    """The detector; see the module text and `Detector`."""

    class_layers = ("yolo_head.pred_cls.",)

    def __init__(self, config: PPYOLOEConfig) -> None:
        if config.variant == "plus":
            super().__init__(config.num_classes, STRIDES, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
        else:
            super().__init__(
                config.num_classes, STRIDES, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
            )
        depth, width = DEPTH_WIDTH[config.size]
        depth, width = config.depth_multiple or depth, config.width_multiple or width
        self.backbone = Backbone(depth, width, scaled=config.variant == "plus")
        self.neck = Neck(self.backbone.out_channels, depth, width)
        self.yolo_head = Head(self.neck.out_channels, config.num_classes)

    def forward(self, images_B3HW: Tensor) -> PPYOLOEOutputs:
        return self.yolo_head(self.neck(self.backbone(images_B3HW)))

    def decode(self, outputs: PPYOLOEOutputs) -> tuple[Tensor, Tensor]:
        """scores_BNC = sigmoid of the logits, boxes_BN4 xyxy in input pixels; N runs over the
        levels 32, 16, 8, each row by row.  float32, not clipped to the image."""
        logits_BCN = paddle.concat([x.flatten(2) for x in outputs.class_logits], axis=2)
        scores_BNC = F.sigmoid(logits_BCN.astype("float32")).transpose([0, 2, 1])
        sides_BXN = paddle.concat([x.flatten(2) for x in outputs.side_logits], axis=2)
        sides_BN4R = sides_BXN.astype("float32").transpose([0, 2, 1]).reshape([0, 0, 4, BINS])
        points_N2, stride_N1 = anchor_points(outputs.class_logits, self.strides)
        return scores_BNC, decode_boxes(sides_BN4R, points_N2, stride_N1)


def decode_boxes(sides_BN4R: Tensor, points_N2: Tensor, stride_N1: Tensor) -> Tensor:
    """Side distributions (logits over BINS) to boxes [B, N, 4], xyxy in the points' pixels.

    side = stride * sum_r(r * softmax(logits)_r), measured outwards from the point.
    """
    bins_R = paddle.arange(BINS, dtype=sides_BN4R.dtype)
    sides_BN4 = F.softmax(sides_BN4R, axis=-1).matmul(bins_R) * stride_N1
    return paddle.concat([points_N2 - sides_BN4[:, :, :2], points_N2 + sides_BN4[:, :, 2:]], -1)


def anchor_points(features: tuple[Tensor, ...], strides: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Cell centres points_N2 (x, y) and stride_N1 of all levels, float32 pixels.

    Made once per set of level sizes; in a static graph computed from the run-time sizes.
    """
    if paddle.in_dynamic_mode():
        sizes = tuple((int(f.shape[2]), int(f.shape[3])) for f in features)
        return _fixed_points(sizes, strides, str(features[0].place))
    points, stride = [], []
    for feature, step in zip(features, strides):
        shape = paddle.shape(feature)
        y = (paddle.arange(0, shape[2], dtype="float32") + 0.5) * step
        x = (paddle.arange(0, shape[3], dtype="float32") + 0.5) * step
        grid_y, grid_x = paddle.meshgrid(y, x)
        level = paddle.stack([grid_x.flatten(), grid_y.flatten()], axis=1)
        points.append(level)
        stride.append(paddle.full_like(level[:, :1], float(step)))
    return paddle.concat(points), paddle.concat(stride)


@lru_cache(maxsize=64)
def _fixed_points(
    sizes: tuple[tuple[int, int], ...], strides: tuple[int, ...], place: str
) -> tuple[Tensor, Tensor]:
    points, stride = [], []
    for (height, width), step in zip(sizes, strides):
        y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        points.append((np.stack([x.ravel(), y.ravel()], axis=1) + 0.5) * step)
        stride.append(np.full((height * width, 1), step))
    return (
        paddle.to_tensor(np.concatenate(points).astype("float32")),
        paddle.to_tensor(np.concatenate(stride).astype("float32")),
    )


def _normal(deviation: float) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, deviation))


def _constant(value: float) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=nn.initializer.Constant(value))


def _predictor(channels: int, outputs: int, bias: float) -> nn.Conv2D:
    return nn.Conv2D(
        channels, outputs, 3, padding=1, weight_attr=_constant(0.0), bias_attr=_constant(bias)
    )
