"""RT-DETR, RT-DETRv2 and D-FINE: their small sizes, with denoising queries."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.torch_models.backbones import HGNetv2, ResNetVd
from benchmarks.torch_models.encoder import HEADS, HybridEncoder, SelfAttention
from benchmarks.torch_models.layers import MLP, ConvBN

_BINS = 33  # of a distribution over the moves of a side
_PEAKS, _QUALITY_WIDTH = 4, 64  # of the location quality estimator
_QUERIES = 300
_ANCHOR, _MARGIN, _FAR, _EPSILON, _FARTHEST = 0.05, 0.01, 1e4, 1e-5, 10.0  # as ours


class Size(NamedTuple):
    """Widths and counts of a size; fields as in `ppdist.models.rtdetr.RTDETRSize`."""

    backbone: Callable[[], nn.Module]
    neck: int
    neck_inside: int
    expansion: float
    blocks: int
    layers: int
    inside: int
    points: tuple[int, ...]
    first: int


_SIZES = {
    "r18": Size(lambda: ResNetVd(18), 256, 1024, 0.5, 3, 3, 1024, (4, 4, 4), 3),
    "r34": Size(lambda: ResNetVd(34), 256, 1024, 0.5, 3, 4, 1024, (4, 4, 4), 3),
    "n": Size(lambda: HGNetv2(4), 128, 512, 0.34, 2, 3, 512, (6, 6), 4),
    "s": Size(lambda: HGNetv2(3), 256, 1024, 0.5, 1, 3, 1024, (3, 6, 3), 3),
}


class DeformableAttention(nn.Module):
    """Attention to points of the feature maps around boxes; D-FINE's has no projections."""

    def __init__(self, width: int, points: tuple[int, ...], projected: bool) -> None:
        super().__init__()
        self.points = points
        self.sampling_offsets = nn.Linear(width, HEADS * sum(points) * 2)
        self.attention_weights = nn.Linear(width, HEADS * sum(points))
        self.value_proj = nn.Linear(width, width) if projected else nn.Identity()
        self.output_proj = nn.Linear(width, width) if projected else nn.Identity()
        reach_P = np.repeat([0.5 / count for count in points], points).astype("float32")
        self.register_buffer("reach_P1", torch.from_numpy(reach_P)[:, None], persistent=False)

    def forward(
        self,
        x_BQD: Tensor,
        boxes_BQ4: Tensor,
        cells_BLD: Tensor,
        maps: list[torch.Size],
    ) -> Tensor:
        total = sum(self.points)
        offsets_BQHP2 = self.sampling_offsets(x_BQD).float().unflatten(-1, (HEADS, total, 2))
        weights_BQHP = self.attention_weights(x_BQD).unflatten(-1, (HEADS, total)).softmax(-1)
        centre, size = (x[:, :, None, None] for x in boxes_BQ4.chunk(2, -1))
        places_BQHP2 = centre + offsets_BQHP2 * size * self.reach_P1
        # [B * H, ...], because grid_sample has no axis of heads.
        grid_XQP2 = (2 * places_BQHP2 - 1).transpose(1, 2).flatten(0, 1)
        values_XDL = self.value_proj(cells_BLD).transpose(1, 2)
        values_XDL = values_XDL.unflatten(1, (HEADS, -1)).flatten(0, 1)
        lengths = [height * width for height, width in maps]
        sampled_XDQP = torch.cat(
            [
                F.grid_sample(values.unflatten(2, shape), grid, align_corners=False)
                for values, grid, shape in zip(
                    values_XDL.split(lengths, 2), grid_XQP2.split(self.points, 2), maps,
                    strict=True,
                )
            ],
            -1,
        )  # fmt: skip
        weights_X1QP = weights_BQHP.transpose(1, 2).flatten(0, 1)[:, None]
        summed_XDQ = (sampled_XDQP * weights_X1QP).sum(-1)
        summed_BQD = summed_XDQ.unflatten(0, (-1, HEADS)).flatten(1, 2).transpose(1, 2)
        return self.output_proj(summed_BQD)


class Gate(nn.Module):
    """Gated sum of two inputs, then layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(2 * width, 2 * width), nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gate_x, gate_y = self.gate(torch.cat([x, y], -1)).sigmoid().chunk(2, -1)
        return self.norm(gate_x * x + gate_y * y)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the features, two linear layers."""

    def __init__(self, size: Size, dfine: bool) -> None:
        super().__init__()
        width = size.neck
        self.self_attn, self.norm1 = SelfAttention(width), nn.LayerNorm(width)
        self.cross_attn = DeformableAttention(width, size.points, projected=not dfine)
        self.gateway = Gate(width) if dfine else None
        self.norm2 = None if dfine else nn.LayerNorm(width)
        self.linear1, self.linear2 = nn.Linear(width, size.inside), nn.Linear(size.inside, width)
        self.norm3 = nn.LayerNorm(width)

    def forward(
        self,
        x_BQD: Tensor,
        position_BQD: Tensor,
        boxes_BQ4: Tensor,
        cells_BLD: Tensor,
        maps: list[torch.Size],
        bias: Tensor,
    ) -> Tensor:
        x_BQD = self.norm1(x_BQD + self.self_attn(x_BQD, position_BQD, bias))
        seen_BQD = self.cross_attn(x_BQD + position_BQD, boxes_BQ4, cells_BLD, maps)
        if self.gateway is not None:
            x_BQD = self.gateway(x_BQD, seen_BQD)
        if self.norm2 is not None:
            x_BQD = self.norm2(x_BQD + seen_BQD)
        return self.norm3(x_BQD + self.linear2(F.relu(self.linear1(x_BQD))))


class Quality(nn.Module):
    """Adds to the logits what it learns from the peaks of the distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.reg_conf = MLP(F.relu, 4 * (_PEAKS + 1), _QUALITY_WIDTH, 1)

    def forward(self, logits_BQC: Tensor, corners_BQ4R: Tensor) -> Tensor:
        peaks, _ = corners_BQ4R.softmax(-1).topk(_PEAKS, -1)
        features = torch.cat([peaks, peaks.mean(-1, keepdim=True)], -1)
        return logits_BQC + self.reg_conf(features.flatten(2))


class Decoder(nn.Module):
    """Query selection, decoder layers and their heads."""

    def __init__(self, size: Size, dfine: bool, classes: int) -> None:
        super().__init__()
        width, layers = size.neck, range(size.layers)
        self.strides = [2 ** (size.first + i) for i in range(len(size.points))]
        self.input_proj = nn.ModuleList(
            [] if dfine else [ConvBN(width, width, 1, activation=None) for _ in size.points]
        )
        self.denoising_class_embed = nn.Embedding(classes, width)
        self.enc_output = nn.Sequential()
        self.enc_output.add_module("proj", nn.Linear(width, width))
        self.enc_output.add_module("norm", nn.LayerNorm(width))
        self.enc_score_head = nn.Linear(width, classes)
        self.enc_bbox_head = MLP(F.relu, width, width, width, 4)
        self.query_pos_head = MLP(F.relu, 4, 2 * width, width)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([DecoderLayer(size, dfine) for _ in layers])
        self.dec_score_head = nn.ModuleList([nn.Linear(width, classes) for _ in layers])
        sides = 4 * _BINS if dfine else 4
        self.dec_bbox_head = nn.ModuleList(
            [MLP(F.relu, width, width, width, sides) for _ in layers]
        )
        self.dfine = dfine
        if dfine:
            self.decoder.lqe_layers = nn.ModuleList([Quality() for _ in layers])
            self.pre_bbox_head = MLP(F.relu, width, width, width, 4)
            self.register_buffer("up", torch.ones(1))
            self.register_buffer("reg_scale", torch.ones(1))

    def forward(
        self,
        features: list[Tensor],
        noisy_labels_BD: Tensor,
        noisy_boxes_BD4: Tensor,
        noisy_used_BD: Tensor,
        bias: Tensor,
    ) -> list[Tensor]:
        if len(self.input_proj):
            features = [conv(x) for conv, x in zip(self.input_proj, features, strict=True)]
        maps = [x.shape[2:] for x in features]
        cells_BLD = torch.cat([x.flatten(2) for x in features], 2).transpose(1, 2)
        content_BQD, logits_BQC, boxes_BQ4 = self._select(cells_BLD, maps)
        embedded_BDD = self.denoising_class_embed(noisy_labels_BD) * noisy_used_BD[..., None]
        x_BQD = torch.cat([embedded_BDD.to(content_BQD.dtype), content_BQD.detach()], 1)
        first_BQ4 = torch.cat([noisy_boxes_BD4, boxes_BQ4.detach()], 1)
        refine = self._refine_distributions if self.dfine else self._refine
        memory = (cells_BLD, maps, bias)
        return [logits_BQC, boxes_BQ4, *refine(x_BQD, first_BQ4, memory)]

    def _select(self, cells_BLD: Tensor, maps: list[torch.Size]) -> tuple[Tensor, Tensor, Tensor]:
        anchors_L4, valid_L1 = self._anchors(maps)
        cells_BLD = self.enc_output(valid_L1 * cells_BLD)
        logits_BLC = self.enc_score_head(cells_BLD)
        count = min(_QUERIES, cells_BLD.shape[1])
        index_BQ1 = logits_BLC.max(-1).values.topk(count, 1).indices[..., None]

        def rows(x_BLX: Tensor) -> Tensor:
            return x_BLX.gather(1, index_BQ1.expand(-1, -1, x_BLX.shape[-1]))

        content_BQD = rows(cells_BLD)
        anchors_BQ4 = anchors_L4[index_BQ1[..., 0]]
        boxes_BQ4 = (self.enc_bbox_head(content_BQD).float() + anchors_BQ4).sigmoid()
        return content_BQD, rows(logits_BLC), boxes_BQ4

    def _anchors(self, maps: list[torch.Size]) -> tuple[Tensor, Tensor]:
        anchors = []
        for (height, width), stride in zip(maps, self.strides, strict=True):
            y, x = torch.meshgrid(
                (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width,
                indexing="ij",
            )  # fmt: skip
            side = torch.full_like(x, _ANCHOR * stride / self.strides[0])
            anchors.append(torch.stack([x, y, side, side], -1).flatten(0, 1))
        anchors_L4 = torch.cat(anchors)
        valid_L1 = ((anchors_L4 > _MARGIN) & (anchors_L4 < 1 - _MARGIN)).all(-1, keepdim=True)
        return torch.where(valid_L1, anchors_L4.logit(), _FAR), valid_L1

    def _refine(
        self, x_BQD: Tensor, boxes_BQ4: Tensor, memory: tuple[Tensor, list[torch.Size], Tensor]
    ) -> list[Tensor]:
        outputs, before_BQ4 = [], boxes_BQ4
        for i, layer in enumerate(self.decoder.layers):
            x_BQD = layer(x_BQD, self.query_pos_head(boxes_BQ4), boxes_BQ4, *memory)
            move_BQ4 = self.dec_bbox_head[i](x_BQD).float()
            moved_BQ4 = (move_BQ4 + _inverse_sigmoid(boxes_BQ4)).sigmoid()
            out_BQ4 = moved_BQ4 if i == 0 else (move_BQ4 + _inverse_sigmoid(before_BQ4)).sigmoid()
            outputs += [self.dec_score_head[i](x_BQD), out_BQ4]
            before_BQ4, boxes_BQ4 = moved_BQ4, moved_BQ4.detach()
        return outputs

    def _refine_distributions(
        self, x_BQD: Tensor, boxes_BQ4: Tensor, memory: tuple[Tensor, list[torch.Size], Tensor]
    ) -> list[Tensor]:
        outputs, moves_R = [], self._weighting()
        corners_BQX: Tensor | float = 0.0
        before_BQD: Tensor | float = 0.0
        for i, layer in enumerate(self.decoder.layers):
            position_BQD = self.query_pos_head(boxes_BQ4).clamp(-_FARTHEST, _FARTHEST)
            x_BQD = layer(x_BQD, position_BQD, boxes_BQ4, *memory)
            logits_BQC = self.dec_score_head[i](x_BQD)
            if i == 0:
                move_BQ4 = self.pre_bbox_head(x_BQD).float()
                first_BQ4 = (move_BQ4 + _inverse_sigmoid(boxes_BQ4)).sigmoid()
                outputs += [logits_BQC, first_BQ4]
                reference_BQ4 = first_BQ4.detach()
            corners_BQX = self.dec_bbox_head[i](x_BQD + before_BQD) + corners_BQX
            corners_BQ4R = corners_BQX.float().unflatten(-1, (4, _BINS))
            boxes_BQ4 = self._move_sides(reference_BQ4, corners_BQ4R.softmax(-1) @ moves_R)
            logits_BQC = self.decoder.lqe_layers[i](logits_BQC, corners_BQ4R)
            outputs += [logits_BQC, boxes_BQ4, corners_BQX]
            boxes_BQ4, before_BQD = boxes_BQ4.detach(), x_BQD.detach()
        return outputs

    def _weighting(self) -> Tensor:
        """Computes the distance by which each bin moves a side."""
        limit, half = (self.up * self.reg_scale).abs(), _BINS // 2
        step_R = torch.arange(_BINS) - half
        size_R = (limit + 1) ** (step_R.abs() / (half - 1)) - 1
        return step_R.sign() * torch.where(step_R.abs() == half, 2 * limit, size_R)

    def _move_sides(self, boxes_BQ4: Tensor, moves_BQ4: Tensor) -> Tensor:
        centre, size = boxes_BQ4.chunk(2, -1)
        low_move, high_move = (
            (0.5 + moves / self.reg_scale) * size for moves in moves_BQ4.chunk(2, -1)
        )
        low, high = centre - low_move, centre + high_move
        return torch.cat([(low + high) / 2, high - low], -1)


def _inverse_sigmoid(x: Tensor) -> Tensor:
    x = x.clamp(0, 1)
    return (x.clamp(min=_EPSILON) / (1 - x).clamp(min=_EPSILON)).log()


class RTDETR(nn.Module):
    """Outputs of the encoder's queries, then of each decoder layer: logits, boxes, distributions.

    Denoising queries come before the others.
    """

    def __init__(self, variant: str, size: str, classes: int) -> None:
        super().__init__()
        row, dfine = _SIZES[size], variant == "dfine"
        self.backbone = row.backbone()
        self.encoder = HybridEncoder(
            self.backbone.channels, row.neck, row.neck_inside, row.expansion, row.blocks, dfine
        )
        self.decoder = Decoder(row, dfine, classes)

    def forward(self, images_B3HW: Tensor, **noisy: Tensor) -> list[Tensor]:
        return self.decoder(self.encoder(self.backbone(images_B3HW)), **noisy)
