"""RT-DETR (arXiv:2304.08069), RT-DETRv2 (arXiv:2407.17140) and D-FINE (arXiv:2410.13842).

    images -> backbone -> hybrid encoder -> the best cells of all levels, one query each
           -> decoder layers, each refines the boxes of the queries -> RTDETROutputs

The last layer's queries are the predictions, one for each object, without suppression.  RT-DETR and
RT-DETRv2 are one network (v2 changed recipes, and made sampling a choice); D-FINE refines boxes as
distributions over the moves of their sides.  In training noisy copies of the ground truth are
queries as well (denoising.py).

Keys are those of the originals' torch implementations, but for what `official_keys` says.
"""

from collections.abc import Callable
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant, Normal

from ppdist.config.model import RTDETRConfig
from ppdist.models import functional
from ppdist.models.attention import (
    Memory,
    MSDeformableAttention,
    MultiHeadAttention,
    length_of,
    start_xavier,
)
from ppdist.models.base import Backbone, Detector, KeyTable, Targets
from ppdist.models.denoising import DenoisingQueries, NoisyQueries, attention_bias
from ppdist.models.hgnet import HGNetv2
from ppdist.models.hybrid_encoder import HybridEncoder
from ppdist.models.layers import ConvBNLayer, start_uniform
from ppdist.models.outputs import BINS, Denoised, Refined, RTDETROutputs, anchor_points, weighting
from ppdist.models.resnet import ResNetVd
from ppdist.models.rtdetr_keys import numbered_name, paddle_name, torch_name, transformers_names

SIZE_MULTIPLE = 32  # the coarsest stride
UP = 0.5  # the farthest move but one, in sizes of the box; the last bins move twice as far
_QUALITY_PEAKS, _QUALITY_WIDTH = 4, 64  # of the location quality estimator
_ANCHOR = 0.05  # width and height of a query's first box at the finest level, of the input
_MARGIN = 0.01  # a cell nearer to the border than this selects nothing
_PRIOR = 0.01  # probability of every class at the start
_EPSILON = 1e-5  # of the inverse sigmoid
_FAR = 1e4  # a logit of 1 for all practical purposes
_FARTHEST = 10.0  # value of a query's position, in D-FINE
# By how much cx, cy, w, h change (columns) if the left, top, right, bottom side moves outwards.
_MOVED_BY_SIDE = np.array(
    [[-0.5, 0, 1, 0], [0, -0.5, 0, 1], [0.5, 0, 1, 0], [0, 0.5, 0, 1]], "float32"
)


class RTDETRSize(NamedTuple):
    """Parts and widths of a size of the family.

    backbone: builds it, from the level of its first feature.
    neck: width of the encoder; neck_inside: width of its linear layers.
    expansion, blocks: see `HybridEncoder`.
    layers: number of decoder layers.
    width, inside: width of the decoder, and of its linear layers.
    points: number of points that a query samples in each level, fine to coarse.
    first: level of the finest feature.
    reg_scale: D-FINE: resolution of the bins around no move.
    """

    backbone: Callable[[int], Backbone]
    neck: int = 256
    neck_inside: int = 1024
    expansion: float = 1.0
    blocks: int = 3
    layers: int = 6
    width: int = 256
    inside: int = 1024
    points: tuple[int, ...] = (4, 4, 4)
    first: int = 3
    reg_scale: float = 4.0


def _resnet(depth: int) -> Callable[[int], Backbone]:
    """Returns a function that builds a ResNet-vd from the level of its first feature."""
    return lambda first: ResNetVd(depth, first)


def _hgnet(size: str, affine: bool = False) -> Callable[[int], Backbone]:
    """Returns a function that builds an HGNetv2 from the level of its first feature."""
    return lambda first: HGNetv2(size, first, affine)


_RTDETR_SIZES = {
    "r18": RTDETRSize(_resnet(18), expansion=0.5, layers=3),
    "r34": RTDETRSize(_resnet(34), expansion=0.5, layers=4),
    "r50": RTDETRSize(_resnet(50)),
    "r101": RTDETRSize(_resnet(101), neck=384, neck_inside=2048),
    "l": RTDETRSize(_hgnet("b4")),
    "x": RTDETRSize(_hgnet("b5"), neck=384, neck_inside=2048),
}
_DFINE_POINTS = (3, 6, 3)
# By variant and size; RTDETR_SIZES of config/model.py has the same names.
SIZES = {
    "rtdetr": _RTDETR_SIZES,
    "rtdetrv2": {size: _RTDETR_SIZES[size] for size in ("r18", "r34", "r50", "r101")},
    "dfine": {
        "n": RTDETRSize(
            _hgnet("b0", affine=True), neck=128, neck_inside=512, expansion=0.34, blocks=2,
            layers=3, width=128, inside=512, points=(6, 6), first=4,
        ),
        "s": RTDETRSize(
            _hgnet("b0", affine=True), expansion=0.5, blocks=1, layers=3, points=_DFINE_POINTS
        ),
        "m": RTDETRSize(_hgnet("b2", affine=True), blocks=2, layers=4, points=_DFINE_POINTS),
        "l": RTDETRSize(_hgnet("b4"), points=_DFINE_POINTS),
        "x": RTDETRSize(
            _hgnet("b5"), neck=384, neck_inside=2048, points=_DFINE_POINTS, reg_scale=8.0
        ),
    },
}  # fmt: skip


_Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, _Activation] = {"relu": functional.relu, "silu": functional.silu}


class MLP(nn.Layer):
    """Linear layers with an activation between them."""

    def __init__(self, activation: _Activation, *widths: int) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = self.activation(layer(x))
        return last(x)


class Gate(nn.Layer):
    """Gated sum of two inputs, then layer norm: D-FINE's residual.

        norm(g1 * x + g2 * y),  g = sigmoid(gate([x, y])), one for each channel

    Source: arXiv:2410.13842, "target gating layer".
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * width, 2 * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gate_x, gate_y = F.sigmoid(self.gate(paddle.concat([x, y], axis=-1))).chunk(2, axis=-1)
        return self.norm(gate_x * x + gate_y * y)

    @paddle.no_grad()
    def start(self) -> None:
        """Initialises both gates to one half."""
        self.gate.weight.set_value(paddle.zeros_like(self.gate.weight))


class DecoderLayer(nn.Layer):
    """Self-attention, attention to the features, two linear layers."""

    def __init__(self, size: RTDETRSize, dfine: bool, activation: _Activation) -> None:
        super().__init__()
        self.activation = activation
        self.self_attn = MultiHeadAttention(size.width)
        self.norm1 = nn.LayerNorm(size.width)
        self.cross_attn = MSDeformableAttention(size.width, size.points, projected=not dfine)
        self.gateway = Gate(size.width) if dfine else None
        self.norm2 = None if dfine else nn.LayerNorm(size.width)
        self.linear1 = nn.Linear(size.width, size.inside)
        self.linear2 = nn.Linear(size.inside, size.width)
        self.norm3 = nn.LayerNorm(size.width)

    def forward(
        self,
        x_BQD: Tensor,
        position_BQD: Tensor,
        boxes_BQ4: Tensor,
        memory: Memory,
        bias_B1DQ: Tensor | None,
    ) -> Tensor:
        x_BQD = self.norm1(x_BQD + self.self_attn(x_BQD, position_BQD, bias_B1DQ))
        seen_BQD = self.cross_attn(x_BQD + position_BQD, boxes_BQ4, memory)
        if self.norm2 is not None:
            x_BQD = self.norm2(x_BQD + seen_BQD)
        if self.gateway is not None:
            x_BQD = self.gateway(x_BQD, seen_BQD)
        return self.norm3(x_BQD + self.linear2(self.activation(self.linear1(x_BQD))))


class LQE(nn.Layer):
    """Location quality estimator: adds to the logits a value learned from the distributions' peaks.

    Source: arXiv:2410.13842; arXiv:2011.12885, section 3.3.
    """

    def __init__(self, activation: _Activation) -> None:
        super().__init__()
        self.reg_conf = MLP(activation, 4 * (_QUALITY_PEAKS + 1), _QUALITY_WIDTH, 1)

    def forward(self, logits_BQC: Tensor, probability_BQ4R: Tensor) -> Tensor:
        peaks = functional.largest(probability_BQ4R, _QUALITY_PEAKS)
        features = paddle.concat([peaks, peaks.mean(axis=-1, keepdim=True)], axis=-1)
        return logits_BQC + self.reg_conf(features.flatten(2))

    @paddle.no_grad()
    def start(self) -> None:
        """Initialises the estimator to add nothing."""
        last = self.reg_conf.layers[-1]
        last.weight.set_value(paddle.zeros_like(last.weight))


class DecoderLayers(nn.Layer):
    """Decoder layers, and D-FINE's quality estimators, one for each."""

    def __init__(self, size: RTDETRSize, dfine: bool, activation: _Activation) -> None:
        super().__init__()
        layers = range(size.layers)
        self.layers = nn.LayerList([DecoderLayer(size, dfine, activation) for _ in layers])
        self.lqe_layers = nn.LayerList([LQE(activation) for _ in layers] if dfine else [])


class _Selected(NamedTuple):
    """Queries of the encoder's best cells; see `Refined`."""

    content_BQD: Tensor
    refined: Refined


class RTDETRDecoder(nn.Layer):
    """Query selection, decoder layers and their heads.

    Attributes:
        up, reg_scale: D-FINE: arguments of `weighting`; not trained.
        deployed_moves_R1: result of `weighting` once deployed, because ONNX Runtime computes NaN
            from the converted formula.
    """

    def __init__(self, config: RTDETRConfig, size: RTDETRSize, neck: int) -> None:
        super().__init__()
        dfine = config.variant == "dfine"
        width, classes = size.width, config.num_classes
        self.queries, self.points, self.dfine = config.queries, size.points, dfine
        self.strides = tuple(2 ** (size.first + i) for i in range(len(size.points)))
        # D-FINE projects the features only where the widths differ; RT-DETR always does.
        is_same_width = dfine and neck == width
        self.input_proj = nn.LayerList(
            []
            if is_same_width
            else [ConvBNLayer(neck, width, 1, activation=None) for _ in size.points]
        )
        self.denoising: DenoisingQueries | None = None
        if config.denoising:
            self.denoising = DenoisingQueries(classes, config.denoising)
            self.denoising_class_embed = nn.Embedding(classes, width, weight_attr=Normal())
        self.enc_output = nn.Sequential(
            ("proj", nn.Linear(width, width)), ("norm", nn.LayerNorm(width))
        )
        self.enc_score_head = nn.Linear(width, classes)
        act = ACTIVATIONS[config.activation]
        self.enc_bbox_head = MLP(act, width, width, width, 4)
        self.query_pos_head = MLP(act, 4, 2 * width, width)
        self.decoder = DecoderLayers(size, dfine, act)
        self.pre_bbox_head = MLP(act, width, width, width, 4) if dfine else None
        sides = 4 * BINS if dfine else 4
        layers = range(size.layers)
        self.dec_score_head = nn.LayerList([nn.Linear(width, classes) for _ in layers])
        self.dec_bbox_head = nn.LayerList([MLP(act, width, width, width, sides) for _ in layers])
        self.deployed_moves_R1: np.ndarray | None = None
        if dfine:
            self.up = self._number(UP)
            self.reg_scale = self._number(size.reg_scale)

    def _number(self, value: float) -> Tensor:
        """Adds a constant that is part of the state dict."""
        constant = self.create_parameter([1], default_initializer=Constant(value))
        constant.stop_gradient = True
        return constant

    def forward(
        self, features: list[Tensor], size_4: Tensor, targets: Targets | None
    ) -> RTDETROutputs:
        """Selects queries from the features and refines their boxes.

        Args: features: fine to coarse.  size_4: width, height, width, height of the input, pixels.
        targets: None: without denoising queries.
        """
        if len(self.input_proj):
            features = [conv(x) for conv, x in zip(self.input_proj, features)]
        features = [functional.plain(x) for x in features]
        memory = Memory.of(features, self.points)
        selected = self._select(memory.cells_BLD, features, size_4)
        content_BQD, boxes_BQ4 = selected.content_BQD, _constant(selected.refined.boxes_BQ4)
        bias_B1DQ, noisy = None, None
        if targets is not None and self.denoising is not None:
            noisy = self.denoising(targets, size_4)
            embedded_BDD = self.denoising_class_embed(noisy.labels_BD) * noisy.used_BD.unsqueeze(-1)
            content_BQD = paddle.concat([embedded_BDD.astype(content_BQD.dtype), content_BQD], 1)
            boxes_BQ4 = paddle.concat([noisy.boxes_BD4, boxes_BQ4], 1)
            bias_B1DQ = attention_bias(noisy.group_BD, selected.content_BQD.shape[1])
        all_layers = self.training or targets is not None
        refine = self._refine_distributions if self.dfine else self._refine
        layers, preliminary = refine(content_BQD, boxes_BQ4, memory, bias_B1DQ, all_layers)
        outputs = RTDETROutputs(layers, selected.refined, size_4, preliminary)
        return outputs if noisy is None else _split(outputs, noisy)

    def _select(self, cells_BLD: Tensor, features: list[Tensor], size_4: Tensor) -> _Selected:
        """Selects the cells with the highest class logits, with their boxes.

        A cell's first box is an anchor around it; the box head's output is added to its logit.
        """
        points_L2, stride_L1 = anchor_points(tuple(features), self.strides)
        side_L1 = stride_L1 * (_ANCHOR / self.strides[0])
        anchors_L4 = paddle.concat([points_L2 / size_4[:2], side_L1, side_L1], axis=1)
        low_L1, high_L1 = anchors_L4.min(axis=1, keepdim=True), anchors_L4.max(1, keepdim=True)
        valid_L1 = (low_L1 > _MARGIN) & (high_L1 < 1 - _MARGIN)
        # Anchors of cells near the border are set so far outside that no box head brings them back.
        anchors_L4 = paddle.where(
            valid_L1, paddle.log(anchors_L4 / (1 - anchors_L4)), paddle.full_like(anchors_L4, _FAR)
        )
        cells_BLD = self.enc_output(cells_BLD * valid_L1.astype(cells_BLD.dtype))
        logits_BLC = self.enc_score_head(cells_BLD)
        cells = length_of(cells_BLD, 1)
        count = min(self.queries, cells) if isinstance(cells, int) else cells.clip(max=self.queries)
        _, index_BQ = logits_BLC.max(axis=-1).topk(count, axis=1)
        content_BQD = _rows(cells_BLD, index_BQ)
        anchors_BQ4 = paddle.gather(anchors_L4, index_BQ.flatten()).reshape([-1, count, 4])
        boxes_BQ4 = F.sigmoid(self.enc_bbox_head(content_BQD).astype("float32") + anchors_BQ4)
        return _Selected(_constant(content_BQD), Refined(_rows(logits_BLC, index_BQ), boxes_BQ4))

    def _refine(
        self,
        x_BQD: Tensor,
        boxes_BQ4: Tensor,
        memory: Memory,
        bias_B1DQ: Tensor | None,
        all_layers: bool,
    ) -> tuple[tuple[Refined, ...], None]:
        """Refines boxes as RT-DETR does: each layer moves the boxes of the layer before.

            box_i = sigmoid(move_i + logit(box_i-1))

        The boxes that a layer gets carry no gradient; the gradient of a layer's own boxes also
        reaches the layer before (look forward twice, arXiv:2203.03605, section 3.5).

        Args: every: all layers, not the last alone, have outputs.
        """
        outputs, before_BQ4 = [], boxes_BQ4
        for i, layer in enumerate(self.decoder.layers):
            x_BQD = layer(x_BQD, self.query_pos_head(boxes_BQ4), boxes_BQ4, memory, bias_B1DQ)
            move_BQ4 = self.dec_bbox_head[i](x_BQD).astype("float32")
            moved_BQ4 = F.sigmoid(move_BQ4 + _inverse_sigmoid(boxes_BQ4))
            if all_layers or i == len(self.decoder.layers) - 1:
                out_BQ4 = moved_BQ4
                # In training the gradient of this layer's boxes also reaches the layer before.
                if all_layers and i:
                    out_BQ4 = F.sigmoid(move_BQ4 + _inverse_sigmoid(before_BQ4))
                outputs.append(Refined(self.dec_score_head[i](x_BQD), out_BQ4))
            before_BQ4, boxes_BQ4 = moved_BQ4, _constant(moved_BQ4)
        return tuple(outputs), None

    def _refine_distributions(
        self,
        x_BQD: Tensor,
        boxes_BQ4: Tensor,
        memory: Memory,
        bias_B1DQ: Tensor | None,
        all_layers: bool,
    ) -> tuple[tuple[Refined, ...], Refined | None]:
        """Refines distributions over the moves of sides, as D-FINE does.

        The first layer's boxes, computed as in RT-DETR, stay the reference of all layers; each
        layer adds to the logits of the distributions over the moves of their sides.

            d = sum_n(W(n) * softmax(logits)_n)   for each side, see `weighting` and `move_sides`

        Args: every: all layers, not the last alone, have outputs.
        Source: arXiv:2410.13842, eq. 1 to 4.
        """
        outputs, preliminary, last = [], None, len(self.decoder.layers) - 1
        fixed_R1 = self.deployed_moves_R1
        if fixed_R1 is None:
            moves_R1 = weighting(self.up, self.reg_scale).unsqueeze(1)
        else:
            moves_R1 = paddle.to_tensor(fixed_R1)
        reference_BQ4, corners_BQX, before_BQD = boxes_BQ4, None, None
        for i, layer in enumerate(self.decoder.layers):
            position_BQD = self.query_pos_head(boxes_BQ4).clip(-_FARTHEST, _FARTHEST)
            x_BQD = layer(x_BQD, position_BQD, boxes_BQ4, memory, bias_B1DQ)
            logits_BQC = self.dec_score_head[i](x_BQD) if all_layers or i == last else None
            if i == 0 and self.pre_bbox_head is not None:
                move_BQ4 = self.pre_bbox_head(x_BQD).astype("float32")
                first_BQ4 = F.sigmoid(move_BQ4 + _inverse_sigmoid(boxes_BQ4))
                if logits_BQC is not None:
                    preliminary = Refined(logits_BQC, first_BQ4)
                reference_BQ4 = _constant(first_BQ4)
            added_BQX = self.dec_bbox_head[i](x_BQD if before_BQD is None else x_BQD + before_BQD)
            corners_BQX = added_BQX if corners_BQX is None else corners_BQX + added_BQX
            corners_BQ4R = corners_BQX.astype("float32").reshape([0, 0, 4, BINS])
            probability_BQ4R = functional.softmax(corners_BQ4R)
            sides_BQ4 = probability_BQ4R.matmul(moves_R1).squeeze(-1)
            moved_BQ4 = move_sides(reference_BQ4, sides_BQ4, self.reg_scale)
            if logits_BQC is not None:
                logits_BQC = self.decoder.lqe_layers[i](logits_BQC, probability_BQ4R)
                outputs.append(Refined(logits_BQC, moved_BQ4, corners_BQ4R, reference_BQ4))
            boxes_BQ4, before_BQD = _constant(moved_BQ4), _constant(x_BQD)
        return tuple(outputs), preliminary

    @paddle.no_grad()
    def start(self) -> None:
        """Initialises as the originals do, after `start_uniform`."""
        prior = -float(np.log((1 - _PRIOR) / _PRIOR))
        for head in (self.enc_score_head, *self.dec_score_head):
            head.bias.set_value(paddle.full_like(head.bias, prior))
        boxes = [self.enc_bbox_head, *self.dec_bbox_head]
        for head in boxes if self.pre_bbox_head is None else [*boxes, self.pre_bbox_head]:
            last = head.layers[-1]
            last.weight.set_value(paddle.zeros_like(last.weight))
        start_xavier(self.enc_output.proj, *self.query_pos_head.layers)
        start_xavier(*(conv.conv for conv in self.input_proj))

    def keep_predicting(self) -> None:
        """Drops parts that only training uses, in place."""
        if self.denoising is not None:
            self.denoising = None
            del self.denoising_class_embed
        if self.dfine:
            self.deployed_moves_R1 = weighting(self.up, self.reg_scale).unsqueeze(1).numpy()
        # Only the last layer predicts; the box heads stay, because every layer moves boxes.
        last = len(self.dec_score_head) - 1
        for i in range(last):
            self.dec_score_head[i] = nn.Identity()
            if self.dfine:
                self.decoder.lqe_layers[i] = nn.Identity()


def _constant(x: Tensor) -> Tensor:
    """Returns the tensor without its gradient.

    In a saved graph it returns the tensor itself: there are no gradients, and a detached tensor of
    Paddle 3.3 shares memory there that is reused.
    """
    return x.detach() if paddle.in_dynamic_mode() else x


def _rows(x_BLD: Tensor, index_BQ: Tensor) -> Tensor:
    """Gathers rows of each image, [B, Q, D].

    One `gather` from a list of all rows takes a third of the time of `take_along_axis`.
    """
    batch, length, width = length_of(x_BLD, 0), length_of(x_BLD, 1), x_BLD.shape[2]
    image_B1 = paddle.arange(0, batch, dtype="int64").unsqueeze(1)
    rows = paddle.gather(x_BLD.reshape([-1, width]), (image_B1 * length + index_BQ).flatten())
    return rows.reshape([-1, length_of(index_BQ, 1), width])


def _inverse_sigmoid(x: Tensor) -> Tensor:
    """Computes the logit; near 0 and 1, that of _EPSILON and 1 - _EPSILON."""
    x = x.clip(0.0, 1.0)
    return paddle.log(x.clip(min=_EPSILON) / (1 - x).clip(min=_EPSILON))


def move_sides(boxes_BQ4: Tensor, moves_BQ4: Tensor, reg_scale_1: Tensor) -> Tensor:
    """Moves each side of boxes outwards; returns cx, cy, w, h.

        x1 = cx - (s / 2 + d) * w / s,  s = reg_scale

    so a side that moves by d moves the centre by d / 2, and the size grows by d, in units of w / s.

    Args: moves_BQ4: d of left, top, right, bottom.
    Source: arXiv:2410.13842, eq. 1.
    """
    size_BQ2 = boxes_BQ4[:, :, 2:]
    unit_BQ4 = paddle.concat([size_BQ2, size_BQ2], axis=-1) / reg_scale_1.abs()
    # A product, because slices of four numbers take longer than everything else here on a CPU.
    with paddle.amp.auto_cast(enable=False):  # which would round the products of boxes
        moved_BQ4 = moves_BQ4.astype("float32").matmul(paddle.to_tensor(_MOVED_BY_SIDE))
    return boxes_BQ4 + moved_BQ4 * unit_BQ4


def _split(outputs: RTDETROutputs, noisy: NoisyQueries) -> RTDETROutputs:
    """Separates the denoising queries, which come first, from the other queries."""
    slots = noisy.labels_BD.shape[1]

    def split(refined: Refined) -> tuple[Refined, Refined]:
        # One operator for both parts: the gradient of a slice is as large as the whole.
        sizes = [slots, refined.logits_BQC.shape[1] - slots]
        pairs = [
            (None, None) if x is None else tuple(paddle.split(x, sizes, axis=1)) for x in refined
        ]
        denoising_part, query_part = zip(*pairs)
        return Refined(*denoising_part), Refined(*query_part)

    layers = [split(layer) for layer in outputs.layers]
    preliminary = (None, None) if outputs.preliminary is None else split(outputs.preliminary)
    denoised = Denoised(
        tuple(denoising_part for denoising_part, _ in layers),
        preliminary[0],
        noisy.target_BD,
        noisy.positive_BD,
        noisy.negative_BD,
        noisy.groups_B,
    )
    return outputs._replace(
        layers=tuple(query_part for _, query_part in layers),
        preliminary=preliminary[1],
        denoised=denoised,
    )


class RTDETR(Detector):
    """The RT-DETR, RT-DETRv2 or D-FINE detector; see the module text and `Detector`.

    Pixels are divided by 255.
    """

    takes_targets = True
    needs_nms = False
    neck_keys = ("encoder.",)
    class_layers = (
        "decoder.enc_score_head.", "decoder.dec_score_head.", "decoder.denoising_class_embed.",
    )  # fmt: skip
    padded_keys = ("decoder.denoising_class_embed.weight",)
    training_only = ("decoder.denoising_class_embed.",)

    def __init__(self, config: RTDETRConfig) -> None:
        size = SIZES[config.variant][config.size]
        super().__init__(
            config.num_classes, (), (0.0, 0.0, 0.0), (255.0, 255.0, 255.0), SIZE_MULTIPLE
        )
        dfine = config.variant == "dfine"
        self.variant = config.variant
        self.backbone = size.backbone(size.first)
        self.encoder = HybridEncoder(
            self.backbone.channels, size.neck, size.neck_inside, size.expansion, size.blocks, dfine
        )
        self.decoder = RTDETRDecoder(config, size, size.neck)
        start_uniform(self)
        # After `start_uniform`, which sets all linear layers and convolutions.
        for layer in self.sublayers():
            if isinstance(layer, _WITH_START):
                layer.start()

    def official_keys(self) -> dict[str, str]:
        """Maps our keys to those of the torch implementations of the variant."""
        names = self._torch_names()
        if self.variant == "rtdetr":
            return {key: numbered_name(name) for key, name in names.items()}
        return names

    def _torch_names(self) -> dict[str, str]:
        """Maps our keys to names of RT-DETR's second version in torch."""
        hgnet = isinstance(self.backbone, HGNetv2)
        return {key: torch_name(key, hgnet) for key in self.state_dict()}

    def key_tables(self) -> tuple[KeyTable, ...]:
        """Returns the names of all versions in torch, PaddleDetection and transformers."""
        names, dfine = self._torch_names(), self.variant == "dfine"
        tables = [
            KeyTable(names),
            KeyTable({key: numbered_name(name) for key, name in names.items()}),
        ]
        hgnet = isinstance(self.backbone, HGNetv2)
        blocks = self.backbone.blocks if isinstance(self.backbone, ResNetVd) else ()
        tables.append(KeyTable({key: paddle_name(key, hgnet, blocks) for key in names}, False))
        for version_4, heads_outside in product((False, True), repeat=2):
            names_by_key = {
                key: transformers_names(name, dfine, version_4, heads_outside)
                for key, name in names.items()
            }
            tables.append(KeyTable(names_by_key))
        return tuple(tables)

    def forward(self, images_B3HW: Tensor, targets: Targets | None = None) -> RTDETROutputs:
        """Computes raw outputs of normalised images.

        With targets or in train mode, all decoder layers have outputs.  With targets, the denoising
        queries have, too, and the outputs depend on every weight also where no image has an object.
        Otherwise only the last layer has outputs.
        """
        features = self.encoder(self.backbone(images_B3HW))
        if paddle.in_dynamic_mode():
            height, width = images_B3HW.shape[2:]
            size_4 = paddle.to_tensor([width, height, width, height], dtype="float32")
        else:
            shape = paddle.shape(images_B3HW).astype("float32")
            size_4 = paddle.concat([shape[3:4], shape[2:3], shape[3:4], shape[2:3]])
        outputs = self.decoder(features, size_4, targets)
        if self.distillation is not None:
            features = tuple(self.distillation([functional.plain(x) for x in features]))
            outputs = outputs._replace(features=features)
        return outputs

    def fuse(self) -> None:
        """Re-parameterises as `ImageModel.fuse` does; drops what only training needs."""
        self.decoder.keep_predicting()
        super().fuse()

    def decode(self, outputs: RTDETROutputs) -> tuple[Tensor, Tensor]:
        """Turns raw outputs into scores_BQC and boxes_BQ4, xyxy.

        scores = sigmoid of the last layer's logits, boxes in input pixels; float32, not clipped to
        the image.  A query may score for several classes.
        """
        logits_BQC, boxes_BQ4, *_ = outputs.layers[-1]
        boxes_BQ4 = boxes_BQ4 * outputs.size_4
        half_BQ2 = boxes_BQ4[:, :, 2:] / 2
        corners = [boxes_BQ4[:, :, :2] - half_BQ2, boxes_BQ4[:, :, :2] + half_BQ2]
        return F.sigmoid(logits_BQC.astype("float32")), paddle.concat(corners, axis=-1)


_WITH_START = (MultiHeadAttention, MSDeformableAttention, Gate, LQE, RTDETRDecoder)
