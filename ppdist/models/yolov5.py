"""Which of our YOLOv5 modules is which row of the original, and so where its state-dict keys are.

The original numbers its layers `model.0`, `model.1`, ...; a row without parameters (up-sampling,
concatenation) is None here.

YOLOv5 (release 6): CSP backbone, PAN neck, three anchors per cell.

    images -> Backbone -> strides 8, 16, 32 (, 64) -> Neck -> the same strides -> Head -> logits

A level is named by the power of two of its stride: level 3 has stride 8.  Module names are ours;
`yolov5_keys` maps the state dict to that of the original.
Sources: CSPNet arXiv:1911.11929, PANet arXiv:1803.01534; pooling: SPP arXiv:1406.4729, chained.

YOLOv5's image classifier: the backbone up to stride 32, a 1x1 convolution, mean, linear.

images -> Backbone -> stride 32 -> ClassifierHead -> logits_BC
"""

import math
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.config.model import YOLOv5ClsConfig, YOLOv5Config
from ppdist.models.base import Detector, ImageModel, anchor_points
from ppdist.models.layers import ConvBNLayer, upsample2x

P5_ROWS = (
    "backbone.stem",
    "backbone.down2", "backbone.stage2",
    "backbone.down3", "backbone.stage3",
    "backbone.down4", "backbone.stage4",
    "backbone.down5", "backbone.stage5",
    "backbone.sppf",
    "neck.reduce5", None, None, "neck.topdown4",
    "neck.reduce4", None, None, "neck.topdown3",
    "neck.down4", None, "neck.bottomup4",
    "neck.down5", None, "neck.bottomup5",
    "head",
)  # fmt: skip
P6_ROWS = (
    *P5_ROWS[:9],
    "backbone.down6", "backbone.stage6",
    "backbone.sppf",
    "neck.reduce6", None, None, "neck.topdown5",
    *P5_ROWS[10:-1],
    "neck.down6", None, "neck.bottomup6",
    "head",
)  # fmt: skip
CLASSIFIER_ROWS = (*P5_ROWS[:9], "head")

_PARTS = {
    "conv1": "cv1",
    "conv2": "cv2",
    "conv3": "cv3",
    "blocks": "m",
    "_mean": "running_mean",
    "_variance": "running_var",
    **{f"predict{level}": f"m.{level - 3}" for level in (3, 4, 5, 6)},
}


def original_keys(keys: list[str], rows: tuple[str | None, ...]) -> dict[str, str]:
    """Our state-dict keys -> those of the original, given the module of each of its rows."""
    row_of = {module: row for row, module in enumerate(rows) if module is not None}
    result = {}
    for key in keys:
        module = key.split(".")[0] if key.startswith("head.") else ".".join(key.split(".")[:2])
        inside = key[len(module) + 1 :].split(".")
        names = [_PARTS.get(part, part) for part in inside]
        result[key] = ".".join(["model", str(row_of[module]), *names])
    return result


DEPTH_WIDTH = {
    "n": (0.33, 0.25),
    "s": (0.33, 0.50),
    "m": (0.67, 0.75),
    "l": (1.0, 1.0),
    "x": (1.33, 1.25),
}
# Channels of levels 1 (the stem) and up at width 1; repeats of the stages of levels 2 and up.
P5_CHANNELS, P5_REPEATS = (64, 128, 256, 512, 1024), (3, 6, 9, 3)
P6_CHANNELS, P6_REPEATS = (64, 128, 256, 512, 768, 1024), (3, 6, 9, 3, 3)
NECK_REPEATS = 3
ANCHORS_PER_CELL = 3  # A
NORM_EPSILON, NORM_MOMENTUM = 1e-3, 0.97
# [w, h] in pixels, per level; they fit the boxes of COCO at 640 (P5) and 1280 (P6) pixels.
P5_ANCHORS = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
P6_ANCHORS = (
    ((19, 27), (44, 40), (38, 94)),
    ((96, 68), (86, 152), (180, 137)),
    ((140, 301), (303, 264), (238, 542)),
    ((436, 615), (739, 380), (925, 792)),
)


class YOLOv5Outputs(NamedTuple):
    """Raw outputs, the same in training and evaluation.

    logits: [B, A * (5 + C), H, W] per level, strides rising; channel a * (5 + C) + k, with k:
        x, y, w, h, objectness, classes.
    features: of the neck, see `Detector.distillation`; empty without.
    """

    logits: tuple[Tensor, ...]
    features: tuple[Tensor, ...] = ()


def scaled_channels(channels: tuple[int, ...], width: float) -> list[int]:
    """Each times `width`, rounded up to a multiple of 8."""
    return [math.ceil(c * width / 8) * 8 for c in channels]


def scaled_repeats(repeats: int, depth: float) -> int:
    """Blocks of a stage at a depth multiple: rounded, at least 1."""
    return max(round(repeats * depth), 1)


def _conv(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int | None = None
) -> ConvBNLayer:
    return ConvBNLayer(
        in_channels, out_channels, kernel, stride,
        padding=padding, epsilon=NORM_EPSILON, momentum=NORM_MOMENTUM,
    )  # fmt: skip


class Bottleneck(nn.Layer):
    """1x1, then 3x3; plus the input when `residual`."""

    def __init__(self, channels: int, residual: bool) -> None:
        super().__init__()
        self.conv1 = _conv(channels, channels, 1)
        self.conv2 = _conv(channels, channels, 3)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return x + y if self.residual else y


class C3(nn.Layer):
    """Half the channels pass through bottlenecks, half beside them; a 1x1 mixes both."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, residual: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = _conv(in_channels, half, 1)
        self.conv2 = _conv(in_channels, half, 1)
        self.conv3 = _conv(2 * half, out_channels, 1)
        self.blocks = nn.Sequential(*[Bottleneck(half, residual) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(paddle.concat([self.blocks(self.conv1(x)), self.conv2(x)], axis=1))


class SPPF(nn.Layer):
    """1x1, three 5x5 max-poolings one after the other (fields 5, 9, 13), all four mixed by 1x1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, channels // 2, 1)
        self.conv2 = _conv(channels // 2 * 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.conv1(x)]
        for _ in range(3):
            maps.append(F.max_pool2d(maps[-1], 5, stride=1, padding=2))
        return self.conv2(paddle.concat(maps, axis=1))


class CSPDarknet(nn.Layer):
    """Images to features of levels 3 and up, the last after SPPF if `pooling`.

    Args:
        channels: of levels 1 and up, scaled.
        blocks: bottlenecks in the stage of each level from 2, scaled.
    """

    def __init__(self, channels: list[int], blocks: list[int], pooling: bool) -> None:
        super().__init__()
        # Layers are registered in the order they run: data parallel training sends gradients in
        # buckets of neighbours, which are ready together only then.
        before = channels[0]
        self.stem = _conv(3, before, 6, stride=2, padding=2)
        self.levels = tuple(range(2, 1 + len(channels)))
        for level, width, count in zip(self.levels, channels[1:], blocks, strict=True):
            self.add_sublayer(f"down{level}", _conv(before, width, 3, stride=2))
            self.add_sublayer(f"stage{level}", C3(width, width, count, residual=True))
            before = width
        self.sppf = SPPF(before) if pooling else None

    def forward(self, images: Tensor) -> list[Tensor]:
        features = [self.stem(images)]
        for level in self.levels:
            down, stage = getattr(self, f"down{level}"), getattr(self, f"stage{level}")
            features.append(stage(down(features[-1])))
        if self.sppf is not None:
            features[-1] = self.sppf(features[-1])
        return features[2:]


class YOLOv5Neck(nn.Layer):
    """PAN: what coarse levels know goes down to the fine ones, then back up.

    Features of levels 3 and up, with the channels they came with, in the same order.
    """

    def __init__(self, channels: list[int], blocks: int) -> None:
        super().__init__()
        self.levels = tuple(range(3, 3 + len(channels)))
        width = dict(zip(self.levels, channels, strict=True))

        def stage(in_channels: int, out_channels: int) -> C3:
            return C3(in_channels, out_channels, blocks, residual=False)

        for level in reversed(self.levels[1:]):
            self.add_sublayer(f"reduce{level}", _conv(width[level], width[level - 1], 1))
            fused = stage(2 * width[level - 1], width[level - 1])
            self.add_sublayer(f"topdown{level - 1}", fused)
        for level in self.levels[1:]:
            below = width[level - 1]
            self.add_sublayer(f"down{level}", _conv(below, below, 3, stride=2))
            self.add_sublayer(f"bottomup{level}", stage(2 * below, width[level]))

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        x = features[-1]
        reduced = []
        for level in reversed(self.levels[1:]):
            x = getattr(self, f"reduce{level}")(x)
            reduced.append(x)
            x = paddle.concat([upsample2x(x), features[level - 4]], axis=1)
            x = getattr(self, f"topdown{level - 1}")(x)
        results = [x]
        for level, beside in zip(self.levels[1:], reversed(reduced)):
            x = paddle.concat([getattr(self, f"down{level}")(x), beside], axis=1)
            x = getattr(self, f"bottomup{level}")(x)
            results.append(x)
        return results


class YOLOv5Head(nn.Layer):
    """A 1x1 convolution per level, and the anchors.

    anchors: [L, A, 2] width and height in cells of their level, float32, part of the state dict.
    """

    def __init__(self, channels: list[int], num_classes: int) -> None:
        super().__init__()
        self.levels = tuple(range(3, 3 + len(channels)))
        self.register_buffer("anchors", paddle.ones([len(channels), ANCHORS_PER_CELL, 2]))
        self._cast_to_low_precision = False  # Paddle's AMP O2 would round the anchors as well
        for level, width in zip(self.levels, channels, strict=True):
            predictor = nn.Conv2D(width, ANCHORS_PER_CELL * (5 + num_classes), 1)
            self.add_sublayer(f"predict{level}", predictor)

    def forward(self, features: list[Tensor]) -> YOLOv5Outputs:
        maps = [getattr(self, f"predict{i}")(x) for i, x in zip(self.levels, features)]
        return YOLOv5Outputs(tuple(maps))


class YOLOv5(Detector):
    """The detector; see the module text and `Detector`.

    Attributes:
        image_size: (height, width) in pixels the anchors are meant for.
    """

    class_layers = ("head.predict",)

    def __init__(self, config: YOLOv5Config) -> None:
        four_levels = config.size.endswith("6")
        channels = P6_CHANNELS if four_levels else P5_CHANNELS
        repeats = P6_REPEATS if four_levels else P5_REPEATS
        strides = tuple(2**level for level in range(3, 1 + len(channels)))
        super().__init__(config.num_classes, strides, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
        depth, width = DEPTH_WIDTH[config.size[0]]
        depth, width = config.depth_multiple or depth, config.width_multiple or width
        self.image_size = config.image_size
        self._rows = P6_ROWS if four_levels else P5_ROWS
        scaled = scaled_channels(channels, width)
        blocks = [scaled_repeats(n, depth) for n in repeats]
        self.backbone = CSPDarknet(scaled, blocks, pooling=True)
        self.neck = YOLOv5Neck(scaled[2:], scaled_repeats(NECK_REPEATS, depth))
        self.head = YOLOv5Head(scaled[2:], config.num_classes)
        start_uniform(self)
        self._start_predictors()
        published = P6_ANCHORS if four_levels else P5_ANCHORS
        self.set_anchors(np.array(config.anchors or published))

    @paddle.no_grad()
    def _start_predictors(self) -> None:
        """Biases that say: 8 objects per 640 x 640 image, each class at 0.6 / C."""
        for level, stride in zip(self.head.levels, self.strides):
            bias_AK = np.zeros((ANCHORS_PER_CELL, 5 + self.num_classes), "float32")
            bias_AK[:, 4] = math.log(8 / (640 / stride) ** 2)
            bias_AK[:, 5:] = math.log(0.6 / (self.num_classes - 0.99999))
            getattr(self.head, f"predict{level}").bias.set_value(bias_AK.ravel())

    @property
    def anchors_LA2(self) -> np.ndarray:
        """Width and height of every anchor in input pixels, float32."""
        stride_L11 = np.array(self.strides, "float32").reshape(-1, 1, 1)
        return self.head.anchors.astype("float32").numpy() * stride_L11

    def set_anchors(self, pixels_LA2: np.ndarray) -> None:
        """Replaces the anchors (width and height in input pixels, levels fine to coarse), in place.

        Every rank must do so alike; before an average of the weights or a graph is made.
        """
        assert pixels_LA2.shape == (len(self.strides), ANCHORS_PER_CELL, 2), pixels_LA2.shape
        stride_L11 = np.array(self.strides, "float32").reshape(-1, 1, 1)
        self.head.anchors.set_value((pixels_LA2 / stride_L11).astype("float32"))

    def official_keys(self) -> dict[str, str]:
        return original_keys(list(self.state_dict()), self._rows)

    def forward(self, images_B3HW: Tensor) -> YOLOv5Outputs:
        fused = self.neck(self.backbone(images_B3HW))
        outputs = self.head(fused)
        if self.distillation is not None:
            outputs = outputs._replace(features=self.distillation(fused))
        return outputs

    def decode(self, outputs: YOLOv5Outputs) -> tuple[Tensor, Tensor]:
        """scores_BNC = objectness * class, boxes_BN4 xyxy in input pixels; N runs level by level
        (strides rising), anchor by anchor, row by row.  float32, not clipped to the image.

            s = sigmoid(logit),  centre = (2 s - 0.5 + cell) * stride,  size = (2 s)**2 * anchor
        """
        scores, boxes = [], []
        for level, (logits, stride) in enumerate(zip(outputs.logits, self.strides)):
            points_S2, _ = anchor_points((logits,), (stride,))  # (cell + 0.5) * stride
            anchors_A12 = self.head.anchors[level].astype("float32").unsqueeze(1) * stride
            s_BXS = F.sigmoid(logits.astype("float32")).flatten(2)
            s_BAKS = s_BXS.reshape([0, ANCHORS_PER_CELL, 5 + self.num_classes, -1])
            s_BAS4 = s_BAKS[:, :, 0:4].transpose([0, 1, 3, 2])
            centre = (2 * s_BAS4[:, :, :, 0:2] - 1) * stride + points_S2
            half = (2 * s_BAS4[:, :, :, 2:4]).square() * anchors_A12 * 0.5
            boxes.append(paddle.concat([centre - half, centre + half], axis=-1).flatten(1, 2))
            for s_BKS in s_BAKS.unbind(1):  # of three axes: oneDNN has no fast product of four
                scores.append(s_BKS[:, 4:5] * s_BKS[:, 5:])
        scores_BCN = paddle.concat(scores, axis=2)
        return scores_BCN.transpose([0, 2, 1]), paddle.concat(boxes, axis=1)


@paddle.no_grad()
def start_uniform(model: nn.Layer) -> None:
    """Draws convolution and linear weights from U(-b, b), b = fan_in ** -0.5, torch's default.

    Paddle's default is sqrt(6) times as large.  Behind a batch norm the length of a weight does not
    matter to the output but divides its learning rate (arXiv:1706.05350), so the published recipe
    needs this start.
    """
    for layer in model.sublayers():
        if isinstance(layer, nn.Conv2D | nn.Linear):
            shape = layer.weight.shape
            fan_in = shape[0] if isinstance(layer, nn.Linear) else math.prod(shape[1:])
            bound = fan_in**-0.5
            layer.weight.set_value(paddle.uniform(shape, "float32", -bound, bound))


HEAD_CHANNELS = 1280  # of every size
STRIDE = 32


class ClassifierHead(nn.Layer):
    """1x1 ConvBNLayer, mean over H and W, dropout, linear."""

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        # Of all norms only this one keeps epsilon 1e-5 and momentum 0.9.
        self.conv = ConvBNLayer(in_channels, HEAD_CHANNELS, 1)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(HEAD_CHANNELS, num_classes)

    def forward(self, feature: Tensor) -> Tensor:
        mean_BX = F.adaptive_avg_pool2d(self.conv(feature), 1).flatten(1)
        return self.linear(self.dropout(mean_BX))


class YOLOv5Classifier(ImageModel):
    """The classifier; see the module text and `ImageModel`.  Pixels: ImageNet mean, deviation."""

    class_layers = ("head.linear.",)

    def __init__(self, config: YOLOv5ClsConfig) -> None:
        super().__init__(
            config.num_classes, STRIDE, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
        )
        depth, width = DEPTH_WIDTH[config.size]
        depth, width = config.depth_multiple or depth, config.width_multiple or width
        channels = scaled_channels(P5_CHANNELS, width)
        blocks = [scaled_repeats(n, depth) for n in P5_REPEATS]
        self.backbone = CSPDarknet(channels, blocks, pooling=False)
        self.head = ClassifierHead(channels[-1], config.num_classes, config.dropout)
        start_uniform(self)

    def official_keys(self) -> dict[str, str]:
        return original_keys(list(self.state_dict()), CLASSIFIER_ROWS)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """logits_BC of normalised images; H and W are multiples of `size_multiple`."""
        return self.head(self.backbone(images_B3HW)[-1])

    def decode(self, outputs: Tensor) -> Tensor:
        """probabilities_BC: softmax of the logits, float32."""
        return F.softmax(outputs.astype("float32"), axis=-1)
