"""PP-YOLOE (arXiv:2203.16250) and PP-YOLOE+: CSPRepResNet, CSP-PAN, ET-head.

    images -> backbone -> strides 8, 16, 32 -> neck -> strides 32, 16, 8 -> head -> PPYOLOEOutputs

`levels` adds stride 4 (P2) or 64 (P6); `auxiliary` a second neck and head for training; `body`
YOLOv5's backbone and neck; `one_to_one` a head that needs no suppression (arXiv:2405.14458).

Attribute names are the official state-dict keys, so published weights load unchanged.
"""

import math

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import ParamAttr, Tensor, nn
from paddle.nn.initializer import Constant, Normal

from ppdist.config.model import PPYOLOEConfig
from ppdist.models import functional
from ppdist.models.backbones import build_backbone, scaled_repeats, scaled_width
from ppdist.models.base import Detector
from ppdist.models.layers import (
    SPP,
    ConvBNLayer,
    RepBlock,
    RepConv,
    set_activation,
    start_uniform,
)
from ppdist.models.outputs import PPYOLOEOutputs, anchor_points, decode_boxes
from ppdist.models.yolov5 import NECK_REPEATS as YOLOV5_NECK_REPEATS
from ppdist.models.yolov5 import YOLOv5Neck

DEPTH_WIDTH = {
    "t": (0.33, 0.375),
    "s": (0.33, 0.50),
    "m": (0.67, 0.75),
    "l": (1.0, 1.0),
    "x": (1.33, 1.25),
}
MAX_GROUPS = 32  # of the auxiliary head's group norms
# Coarse to fine, to P2, at width 1, by the last level (stride 2^level).
NECK_CHANNELS = {5: (768, 384, 192, 64), 6: (768, 576, 384, 192, 64)}
NECK_BLOCKS = 3  # of each stage, at depth 1
EVEN_NECK_CHANNELS = 384  # of every level where one auxiliary head reads them all
BINS = 17  # R: a side is 0..16 strides long, a distribution over 17 integers (DFL)


class NeckStage(nn.Layer):
    """CSP stage of the neck: RepBlocks without residual."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, pyramid: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = ConvBNLayer(in_channels, half, 1)
        self.conv2 = ConvBNLayer(in_channels, half, 1)
        self.convs = nn.Sequential()
        for i in range(blocks):
            self.convs.add_sublayer(str(i), RepBlock(half, False, False))
            if pyramid and i == (blocks - 1) // 2:
                self.convs.add_sublayer("spp", SPP(half))
        self.conv3 = ConvBNLayer(2 * half, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, bypass = functional.share(x, 2)
        mixed = functional.concat([self.conv1(bypass), self.convs(self.conv2(x))], axis=1)
        return self.conv3(mixed)


class CustomCSPPAN(nn.Layer):
    """CSP-PAN: features fine to coarse in, coarse to fine out.

    Strides 8, 16, 32 become 32, 16, 8; any number of levels.  All its lists run from coarse to
    fine, also the pan lists, which are applied from fine to coarse.
    """

    def __init__(self, in_channels: tuple[int, ...], out: list[int], blocks: int) -> None:
        """Builds stages and routes.

        Args:
            in_channels: channels of the features, fine to coarse.
            out: channels of the outputs, coarse to fine.
            blocks: RepBlocks per stage.
        """
        super().__init__()

        def stage(channels: int, out_channels: int, pyramid: bool = False) -> nn.Sequential:
            return nn.Sequential(NeckStage(channels, out_channels, blocks, pyramid))

        in_coarse_first = in_channels[::-1]
        finer = range(1, len(out))
        self.fpn_stages = nn.LayerList(
            [
                stage(in_coarse_first[0], out[0], pyramid=True),
                *[stage(in_coarse_first[i] + out[i - 1] // 2, out[i]) for i in finer],
            ]
        )
        self.fpn_routes = nn.LayerList([ConvBNLayer(c, c // 2, 1) for c in out[:-1]])
        self.pan_stages = nn.LayerList([stage(out[i - 1] + out[i], out[i - 1]) for i in finer])
        self.pan_routes = nn.LayerList([ConvBNLayer(c, c, 3, stride=2) for c in out[1:]])
        self.out_channels = out

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        # From coarse to fine first, then back.
        features = features[::-1]
        outputs = [self.fpn_stages[0](features[0])]
        for i, feature in enumerate(features[1:]):
            coarse = functional.upsample2x(self.fpn_routes[i](outputs[i]))
            outputs.append(self.fpn_stages[i + 1](functional.concat([coarse, feature], axis=1)))
        for i in reversed(range(len(outputs) - 1)):
            fine = self.pan_routes[i](outputs[i + 1])
            outputs[i] = self.pan_stages[i](functional.concat([fine, outputs[i]], axis=1))
        return outputs


class CoarseFirstNeck(YOLOv5Neck):
    """YOLOv5's neck with outputs from coarse to fine.

    Its CSP stages have no branches to re-parameterise for deployment.

    Attributes:
        out_channels: channels of the outputs, coarse to fine.
    """

    def __init__(self, channels: tuple[int, ...], blocks: int) -> None:
        super().__init__(channels, blocks)
        self.out_channels = list(channels[::-1])

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return super().forward(features)[::-1]


class ESEAttn(nn.Layer):
    """A task branch of the ET-head: activation(bn(conv1x1(x * sigmoid(fc(mean of x))))).

    With `branches` a RepConv takes the place of the 1x1 ConvBNLayer.
    """

    def __init__(self, channels: int, branches: bool = False) -> None:
        super().__init__()
        self.fc = nn.Conv2D(channels, channels, 1, weight_attr=_normal(0.001))
        self.conv = RepConv(channels) if branches else ConvBNLayer(channels, channels, 1)

    def forward(self, feature: Tensor, mean: Tensor) -> Tensor:
        return self.conv(functional.scale_channels(feature, F.sigmoid(self.fc(mean))))


class PPYOLOEHead(nn.Layer):
    """ET-head: class logits and a distribution over each side's length, per cell.

    The weights of the predictors are 0 at first: every class has probability 0.01 (focal prior) and
    every side a uniform distribution, i.e. 8 strides of length.
    """

    def __init__(self, in_channels: list[int], num_classes: int, branches: bool = False) -> None:
        super().__init__()
        prior = -float(np.log((1 - 0.01) / 0.01))
        self.stem_cls = nn.LayerList([ESEAttn(c, branches) for c in in_channels])
        self.stem_reg = nn.LayerList([ESEAttn(c, branches) for c in in_channels])
        self.pred_cls = nn.LayerList([_predictor(c, num_classes, prior) for c in in_channels])
        self.pred_reg = nn.LayerList([_predictor(c, 4 * BINS, 1.0) for c in in_channels])
        # Constant 0..16, the values of the bins in strides.  A frozen weight only because published
        # weight files have the key.
        self.proj_conv = nn.Conv2D(BINS, 1, 1, bias_attr=False)
        self.proj_conv.weight.set_value(np.arange(BINS, dtype="float32").reshape(1, BINS, 1, 1))
        self.proj_conv.weight.stop_gradient = True

    def forward(self, features: list[Tensor]) -> PPYOLOEOutputs:
        class_logits, reg_dist = [], []
        for level, feature in enumerate(features):
            for_mean, for_class, residual, for_sides = functional.share(feature, 4)
            mean = functional.spatial_mean(for_mean)
            class_feature = functional.add(self.stem_cls[level](for_class, mean), residual)
            class_logits.append(self.pred_cls[level](class_feature))
            reg_dist.append(self.pred_reg[level](self.stem_reg[level](for_sides, mean)))
        return PPYOLOEOutputs(tuple(class_logits), tuple(reg_dist))


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


class AuxHead(nn.Layer):
    """Auxiliary head: class and side logits, with one set of weights for all levels.

    Only a factor for the sides differs between levels.  The head reads the neck's features together
    with those of a second neck, so it sees more than the detector and learns faster; the detector
    learns the assignment that results from its predictions.  At first every class has probability
    0.01 and every side a nearly uniform distribution.
    Source: the assign guidance module of NanoDet-Plus; PP-YOLOE+ t has one such convolution.
    """

    def __init__(self, channels: int, levels: int, num_classes: int) -> None:
        """Builds the convolutions and predictors.

        Args: channels: of every level's feature.
        """
        super().__init__()
        self.cls_convs = nn.LayerList([ConvGroupNorm(channels)])
        self.reg_convs = nn.LayerList([ConvGroupNorm(channels)])
        prior = -math.log((1 - 0.01) / 0.01)
        self.gfl_cls = _predictor(channels, num_classes, prior, weight=_normal(0.01))
        self.gfl_reg = _predictor(channels, 4 * BINS, 0.0, weight=_normal(0.01))
        self.scales = nn.LayerList([LevelScale() for _ in range(levels)])

    def forward(self, features: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Computes class and side logits, each one map per level.

        Args: features: [B, channels, H, W].
        """
        class_logits, reg_dist = [], []
        for feature, scale in zip(features, self.scales):
            class_logits.append(self.gfl_cls(self.cls_convs[0](feature)))
            reg_dist.append(scale(self.gfl_reg(self.reg_convs[0](feature))))
        return tuple(class_logits), tuple(reg_dist)


class PPYOLOE(Detector):
    """The PP-YOLOE detector; see the module text and `Detector`.

    Attributes:
        training_only: state-dict key prefixes of parts that only training needs; `fuse` drops them.
        detach_auxiliary: stop the auxiliary head's gradient at its input; set by the loss.
        one_to_one_head: makes the predictions, if the model has it.  Its features are detached, so
            its gradient stays in it, and the other layers get the gradients that they get without
            it, except through train.clip_norm, which counts all gradients.
    """

    class_layers = ("yolo_head.pred_cls.", "aux_head.gfl_cls.", "one_to_one_head.pred_cls.")
    neck_keys = ("neck.", "aux_neck.")
    training_only = ("aux_neck.", "aux_head.")
    init_from = (("one_to_one_head.", "yolo_head."),)

    def __init__(self, config: PPYOLOEConfig) -> None:
        first, last = int(config.levels[1]), int(config.levels[4])
        strides = tuple(2**level for level in range(last, first - 1, -1))
        if config.variant == "plus":
            super().__init__(config.num_classes, strides, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
        else:
            super().__init__(
                config.num_classes, strides, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
            )
        depth, width = DEPTH_WIDTH[config.size]
        depth, width = config.depth_multiple or depth, config.width_multiple or width
        self.backbone = build_backbone(
            config.body, depth=depth, width=width, first=first, last=last, variant=config.variant
        )
        in_channels = self.backbone.channels
        self.neck: CustomCSPPAN | CoarseFirstNeck
        if config.body == "yolov5":
            self.neck = CoarseFirstNeck(in_channels, scaled_repeats(YOLOV5_NECK_REPEATS, depth))
            start_uniform(self.backbone)
            start_uniform(self.neck)
            out = self.neck.out_channels
        else:
            neck_channels = NECK_CHANNELS[last][: len(strides)]
            if config.auxiliary:
                neck_channels = (EVEN_NECK_CHANNELS,) * len(strides)
            out = [scaled_width(c, width) for c in neck_channels]
            blocks = scaled_repeats(NECK_BLOCKS, depth)
            self.neck = CustomCSPPAN(in_channels, out, blocks)
        self.yolo_head = PPYOLOEHead(out, config.num_classes, branches=config.auxiliary)
        self.detach_auxiliary = False
        self.aux_neck: CustomCSPPAN | None = None
        self.aux_head: AuxHead | None = None
        if config.auxiliary:
            self.aux_neck = CustomCSPPAN(in_channels, out, blocks)
            self.aux_head = AuxHead(2 * out[0], len(out), config.num_classes)
        self.one_to_one_head: PPYOLOEHead | None = None
        self.needs_nms = not config.one_to_one
        if config.one_to_one:  # last, so that all other weights are drawn as they are without it
            self.one_to_one_head = PPYOLOEHead(out, config.num_classes, branches=config.auxiliary)
            first_state = self.yolo_head.state_dict()
            for key, value in self.one_to_one_head.state_dict().items():
                value.set_value(first_state[key])
        set_activation(self, config.activation)

    def forward(self, images_B3HW: Tensor) -> PPYOLOEOutputs:
        """Computes raw outputs of normalised images.

        All heads have outputs in training, and in evaluation mode while gradients are recorded: the
        pass of a blank image in the last batch is such a case, where the other ranks wait for the
        gradient of every weight.  Otherwise only the head that predicts has outputs.
        """
        backward = self.training or (paddle.in_dynamic_mode() and paddle.is_grad_enabled())
        features = self.backbone(images_B3HW)
        fused = self.neck(features)
        # The one-to-many head trains; without a gradient only the head that predicts is needed.
        one_to_one = self.one_to_one_head
        outputs = self.yolo_head(fused) if one_to_one is None or backward else one_to_one(fused)
        if self.distillation is not None:
            outputs = outputs._replace(
                features=self.distillation([functional.plain(x) for x in fused])
            )
        if one_to_one is not None and backward:
            # Detached, so that this head does not change what the others learn.
            logits, reg_dist, *_ = one_to_one([x.detach() for x in fused])
            outputs = outputs._replace(one_class_logits=logits, one_reg_dist=reg_dist)
        if self.aux_neck is None or self.aux_head is None or not backward:
            return outputs
        if self.detach_auxiliary:
            features, fused = [x.detach() for x in features], [x.detach() for x in fused]
        pairs = zip(fused, self.aux_neck(features))
        logits, reg_dist = self.aux_head([functional.concat(pair, axis=1) for pair in pairs])
        return outputs._replace(aux_class_logits=logits, aux_reg_dist=reg_dist)

    def become_teacher(self) -> None:
        """Drops the one-to-one head, whose scores are poor targets."""
        del self.one_to_one_head
        self.one_to_one_head = None
        self.needs_nms = True

    def fuse(self) -> None:
        """Re-parameterises as `ImageModel.fuse` does; drops what only training needs."""
        if self.aux_head is not None:
            del self.aux_neck, self.aux_head
            self.aux_neck = self.aux_head = None
        if self.one_to_one_head is not None:
            predicting_head = self.one_to_one_head
            del self.yolo_head, self.one_to_one_head
            self.yolo_head, self.one_to_one_head = predicting_head, None
        super().fuse()

    def decode(self, outputs: PPYOLOEOutputs) -> tuple[Tensor, Tensor]:
        """Turns raw outputs into scores_BNC and boxes_BN4, xyxy.

        scores_BNC = sigmoid of the logits, boxes in input pixels; N runs over the levels, coarse to
        fine, in a level row by row; float32, not clipped to the image.  A one-to-one
        head, if the model has one, predicts.
        """
        if outputs.one_class_logits:
            outputs = PPYOLOEOutputs(outputs.one_class_logits, outputs.one_reg_dist)
        logits_BCN = paddle.concat([x.flatten(2) for x in outputs.class_logits], axis=2)
        scores_BNC = F.sigmoid(logits_BCN.astype("float32")).transpose([0, 2, 1])
        reg_dist_BXN = paddle.concat([x.flatten(2) for x in outputs.reg_dist], axis=2)
        reg_dist_BN4R = reg_dist_BXN.astype("float32").transpose([0, 2, 1]).reshape([0, 0, 4, BINS])
        points_N2, stride_N1 = anchor_points(outputs.class_logits, self.strides)
        return scores_BNC, decode_boxes(reg_dist_BN4R, points_N2, stride_N1)


def _normal(deviation: float) -> ParamAttr:
    """Initialises a weight from a normal distribution around 0."""
    return ParamAttr(initializer=Normal(0.0, deviation))


def _predictor(
    channels: int, outputs: int, bias: float, weight: ParamAttr | None = None
) -> nn.Conv2D:
    """Builds a 3x3 convolution whose weights are 0 at first, unless given."""
    weight = weight or ParamAttr(initializer=Constant(0.0))
    constant = ParamAttr(initializer=Constant(bias))
    return nn.Conv2D(channels, outputs, 3, padding=1, weight_attr=weight, bias_attr=constant)
