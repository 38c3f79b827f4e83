"""YOLOv5 (release 6): detector and classifier.

    images -> CSPDarknet -> strides 8, 16, 32 (, 64) -> YOLOv5Neck -> the same -> YOLOv5Head
    images -> CSPDarknet -> stride 32 -> ClassifierHead -> logits_BC

A level is named by the power of two of its stride: level 3 has stride 8.  Module names are ours;
`original_keys`, at the end, maps the state dict to that of the original.
Sources: CSPNet arXiv:1911.11929, PANet arXiv:1803.01534; pooling: SPP arXiv:1406.4729, chained.
"""

import math

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.config.model import YOLOv5ClsConfig, YOLOv5Config
from ppdist.models import functional
from ppdist.models.backbones import build_backbone, scaled_repeats
from ppdist.models.base import Detector, ImageModel
from ppdist.models.layers import (
    C3,
    ConvBNLayer,
    set_activation,
    start_uniform,
    yolov5_conv,
)
from ppdist.models.outputs import YOLOv5Outputs, anchor_points

DEPTH_WIDTH = {
    "n": (0.33, 0.25),
    "s": (0.33, 0.50),
    "m": (0.67, 0.75),
    "l": (1.0, 1.0),
    "x": (1.33, 1.25),
}
NECK_REPEATS = 3
ANCHORS_PER_CELL = 3  # A
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


class YOLOv5Neck(nn.Layer):
    """PAN: features pass from coarse to fine, then back to coarse.

    Its outputs have the levels, the channels and the order of its inputs, levels 3 and up.
    """

    def __init__(self, channels: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.levels = tuple(range(3, 3 + len(channels)))
        width = dict(zip(self.levels, channels, strict=True))

        def stage(in_channels: int, out_channels: int) -> C3:
            return C3(in_channels, out_channels, blocks, residual=False)

        for level in reversed(self.levels[1:]):
            self.add_sublayer(f"reduce{level}", yolov5_conv(width[level], width[level - 1], 1))
            fused = stage(2 * width[level - 1], width[level - 1])
            self.add_sublayer(f"topdown{level - 1}", fused)
        for level in self.levels[1:]:
            finer_width = width[level - 1]
            self.add_sublayer(f"down{level}", yolov5_conv(finer_width, finer_width, 3, stride=2))
            self.add_sublayer(f"bottomup{level}", stage(2 * finer_width, width[level]))

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        # From coarse to fine; the reduced maps are read again on the way back.
        x = features[-1]
        reduced = []
        for level in reversed(self.levels[1:]):
            x, lateral = functional.share(getattr(self, f"reduce{level}")(x), 2)
            reduced.append(lateral)
            x = functional.concat([functional.upsample2x(x), features[level - 4]], axis=1)
            x = getattr(self, f"topdown{level - 1}")(x)
        results = [x]
        for level, lateral in zip(self.levels[1:], reversed(reduced)):
            results[-1], x = functional.share(x, 2)
            x = functional.concat([getattr(self, f"down{level}")(x), lateral], axis=1)
            x = getattr(self, f"bottomup{level}")(x)
            results.append(x)
        return results


class YOLOv5Head(nn.Layer):
    """Head of a 1x1 convolution per level, with the anchors.

    anchors: [L, A, 2] width and height in cells of their level, float32, part of the state dict.
    """

    def __init__(self, channels: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.levels = tuple(range(3, 3 + len(channels)))
        self.register_buffer("anchors", paddle.ones([len(channels), ANCHORS_PER_CELL, 2]))
        self._cast_to_low_precision = False  # Paddle's AMP O2 would round the anchors, too
        for level, width in zip(self.levels, channels, strict=True):
            predictor = nn.Conv2D(width, ANCHORS_PER_CELL * (5 + num_classes), 1)
            self.add_sublayer(f"predict{level}", predictor)

    def forward(self, features: list[Tensor]) -> YOLOv5Outputs:
        logits = [getattr(self, f"predict{i}")(x) for i, x in zip(self.levels, features)]
        return YOLOv5Outputs(tuple(logits))


class YOLOv5(Detector):
    """The YOLOv5 detector; see the module text and `Detector`.

    Attributes:
        image_size: (height, width) in pixels for which the anchors are meant.
        given_anchors_LA2: `model.anchors`, which no weight file replaces; None: not given.
        fits_anchors: the trainer may fit other anchors to the training set.
    """

    needs_anchors = True
    class_layers = ("head.predict",)
    rows_before_classes = 5  # of each anchor: x, y, width, height, objectness

    def __init__(self, config: YOLOv5Config) -> None:
        four_levels = config.size.endswith("6")
        last = 6 if four_levels else 5
        strides = tuple(2**level for level in range(3, last + 1))
        super().__init__(config.num_classes, strides, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
        depth, width = DEPTH_WIDTH[config.size[0]]
        depth, width = config.depth_multiple or depth, config.width_multiple or width
        self.image_size = config.image_size
        self._rows = P6_ROWS if four_levels else P5_ROWS
        self.backbone = build_backbone("yolov5", depth=depth, width=width, first=3, last=last)
        channels = self.backbone.channels
        self.neck = YOLOv5Neck(channels, scaled_repeats(NECK_REPEATS, depth))
        self.head = YOLOv5Head(channels, config.num_classes)
        start_uniform(self)
        set_activation(self, config.activation)
        self._start_predictors()
        self.given_anchors_LA2 = np.array(config.anchors) if config.anchors else None
        self.fits_anchors = not config.anchors
        published = P6_ANCHORS if four_levels else P5_ANCHORS
        self.set_anchors(np.array(config.anchors or published))

    @paddle.no_grad()
    def _start_predictors(self) -> None:
        """Initialises biases for 8 objects in an image and equal classes."""
        for level, stride in zip(self.head.levels, self.strides):
            bias_AK = np.zeros((ANCHORS_PER_CELL, 5 + self.num_classes), "float32")
            # The logit of a small p is about log(p): 8 objects in the cells of a 640 x 640 input.
            bias_AK[:, 4] = math.log(8 / (640 / stride) ** 2)
            # 0.99999 as published, so that one class gives a finite number.
            bias_AK[:, 5:] = math.log(0.6 / (self.num_classes - 0.99999))
            getattr(self.head, f"predict{level}").bias.set_value(bias_AK.ravel())

    @property
    def anchors_LA2(self) -> np.ndarray:
        """Returns width and height of every anchor in input pixels, float32."""
        stride_L11 = np.array(self.strides, "float32").reshape(-1, 1, 1)
        return self.head.anchors.astype("float32").numpy() * stride_L11

    def set_anchors(self, pixels_LA2: np.ndarray) -> None:
        """Replaces the anchors, in place.

        All ranks must set the same anchors, before weights are averaged or a graph is built.

        Args: pixels_LA2: width and height in input pixels, levels fine to coarse.
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
            outputs = outputs._replace(
                features=self.distillation([functional.plain(x) for x in fused])
            )
        return outputs

    def decode(self, outputs: YOLOv5Outputs) -> tuple[Tensor, Tensor]:
        """Turns raw outputs into scores_BNC and boxes_BN4, xyxy.

        scores_BNC = objectness * class, boxes in input pixels; N runs level by level (strides
        rising), anchor by anchor, row by row. float32, not clipped to the image.

            s = sigmoid(logit),  centre = (2 s - 0.5 + cell) * stride,  size = (2 s)**2 * anchor
        """
        # In float32: in bfloat16, coordinates beyond 512 would be multiples of 4 pixels.
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
            for s_BKS in s_BAKS.unbind(1):  # three axes: oneDNN's product of four is slow
                scores.append(s_BKS[:, 4:5] * s_BKS[:, 5:])
        scores_BCN = paddle.concat(scores, axis=2)
        return scores_BCN.transpose([0, 2, 1]), paddle.concat(boxes, axis=1)


HEAD_CHANNELS = 1280  # of every size
STRIDE = 32


class ClassifierHead(nn.Layer):
    """Head of a 1x1 ConvBNLayer, mean over H and W, dropout and a linear layer."""

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        # The only batch norm of the model with epsilon 1e-5 and momentum 0.9.
        self.conv = ConvBNLayer(in_channels, HEAD_CHANNELS, 1)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(HEAD_CHANNELS, num_classes)

    def forward(self, feature: Tensor) -> Tensor:
        mean_BX = functional.spatial_mean(self.conv(feature)).flatten(1)
        return self.linear(self.dropout(mean_BX))


class YOLOv5Classifier(ImageModel):
    """The YOLOv5 classifier; see the module text and `ImageModel`.

    Pixels are normalised by ImageNet's mean and deviation.
    """

    task = "classify"
    class_layers = ("head.linear.",)

    def __init__(self, config: YOLOv5ClsConfig) -> None:
        super().__init__(
            config.num_classes, STRIDE, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
        )
        depth, width = DEPTH_WIDTH[config.size]
        depth, width = config.depth_multiple or depth, config.width_multiple or width
        self.backbone = build_backbone(
            "yolov5", depth=depth, width=width, first=3, last=5, pooling=False
        )
        self.head = ClassifierHead(self.backbone.channels[-1], config.num_classes, config.dropout)
        start_uniform(self)
        set_activation(self, config.activation)

    def official_keys(self) -> dict[str, str]:
        return original_keys(list(self.state_dict()), CLASSIFIER_ROWS)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Computes logits_BC of normalised images; H and W are multiples of `size_multiple`."""
        return self.head(self.backbone(images_B3HW)[-1])

    def decode(self, outputs: Tensor) -> Tensor:
        """Computes probabilities_BC: softmax of the logits, float32."""
        return F.softmax(outputs.astype("float32"), axis=-1)


# Our module for each row of the original, whose layers are `model.0`, `model.1`, ...; None for rows
# without parameters (up-sampling, concatenation).
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
    """Maps our state-dict keys to those of the original.

    Args: rows: our module for each row of the original.
    """
    row_numbers = {module: row for row, module in enumerate(rows) if module is not None}
    result = {}
    for key in keys:
        module = key.split(".")[0] if key.startswith("head.") else ".".join(key.split(".")[:2])
        parts = key[len(module) + 1 :].split(".")
        names = [_PARTS.get(part, part) for part in parts]
        result[key] = ".".join(["model", str(row_numbers[module]), *names])
    return result
