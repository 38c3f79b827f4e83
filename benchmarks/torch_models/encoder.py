"""The hybrid encoder of RT-DETR and D-FINE."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.torch_models.layers import ConvBN, RepConv, double

HEADS = 8
_TEMPERATURE = 10000.0


class SelfAttention(nn.Module):
    """Attention between all tokens; the position is added to queries and keys only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BND: Tensor, position_BND: Tensor, bias: Tensor | None = None) -> Tensor:
        width = x_BND.shape[-1]
        weight, offset = self.in_proj.weight, self.in_proj.bias
        queries, keys = F.linear(
            x_BND + position_BND, weight[: 2 * width], offset[: 2 * width]
        ).chunk(2, -1)
        values = F.linear(x_BND, weight[2 * width :], offset[2 * width :])
        heads = [x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (queries, keys, values)]
        if bias is not None:
            bias = bias.to(heads[0].dtype)
        mixed_BHND = F.scaled_dot_product_attention(*heads, attn_mask=bias)
        return self.out_proj(mixed_BHND.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Self-attention, then two linear layers with GELU."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width)
        self.linear1, self.linear2 = nn.Linear(width, inside), nn.Linear(inside, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x_BND: Tensor, position_ND: Tensor) -> Tensor:
        x_BND = self.norm1(x_BND + self.self_attn(x_BND, position_ND))
        return self.norm2(x_BND + self.linear2(F.gelu(self.linear1(x_BND))))


class AIFI(nn.Module):
    """Transformer over the cells of the coarsest feature."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TransformerLayer(width, inside)])

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        position_ND = _positions(height, width, x.shape[1])
        x_BND = self.layers[0](x.flatten(2).transpose(1, 2), position_ND)
        return x_BND.transpose(1, 2).unflatten(2, (height, width))


@lru_cache
def _positions(height: int, width: int, channels: int) -> Tensor:
    """Computes sine and cosine of row, then of column, [H * W, D]."""
    rates = _TEMPERATURE ** (-np.arange(channels // 4) / (channels // 4))
    y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    parts = [f(axis.reshape(-1, 1) * rates) for axis in (y, x) for f in (np.sin, np.cos)]
    return torch.from_numpy(np.concatenate(parts, 1).astype("float32"))


class CSPRep(nn.Module):
    """Two 1x1 convolutions, one followed by RepConvs; their sum."""

    def __init__(self, c_in: int, c_out: int, inside: int, blocks: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = ConvBN(c_in, inside, 1), ConvBN(c_in, inside, 1)
        self.bottlenecks = nn.Sequential(*(RepConv(inside) for _ in range(blocks)))
        self.conv3 = nn.Identity() if inside == c_out else ConvBN(inside, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.bottlenecks(self.conv1(x)) + self.conv2(x))


class ELAN(nn.Module):
    """D-FINE's fusion of two levels."""

    def __init__(self, c_in: int, c_out: int, inside: int, blocks: int) -> None:
        super().__init__()
        self.cv1 = ConvBN(c_in, 2 * c_out, 1)
        self.cv2, self.cv3 = (
            nn.Sequential(CSPRep(width, inside, inside, blocks), ConvBN(inside, inside, 3))
            for width in (c_out, inside)
        )
        self.cv4 = ConvBN(2 * c_out + 2 * inside, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        deeper = self.cv2(x.chunk(2, 1)[1])
        return self.cv4(torch.cat([x, deeper, self.cv3(deeper)], 1))


class SCDown(nn.Module):
    """1x1 convolution, then a depthwise 3x3 at stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = ConvBN(channels, channels, 1, activation=None)
        self.cv2 = ConvBN(channels, channels, 3, 2, None, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv2(self.cv1(x))


class HybridEncoder(nn.Module):
    """Attention on the coarsest level, then fusion top down and bottom up."""

    def __init__(
        self, channels: tuple[int, ...], width: int, inside: int, expansion: float, blocks: int,
        dfine: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        steps = range(len(channels) - 1)

        def fusion() -> nn.Module:
            if dfine:
                return ELAN(2 * width, width, round(expansion * width // 2), blocks)
            return CSPRep(2 * width, width, int(expansion * width), blocks)

        def halving() -> nn.Module:
            return nn.Sequential(SCDown(width)) if dfine else ConvBN(width, width, 3, 2)

        self.input_proj = nn.ModuleList([ConvBN(c, width, 1, activation=None) for c in channels])
        self.encoder = nn.ModuleList([AIFI(width, inside)])
        activation = None if dfine else F.silu
        self.lateral_convs = nn.ModuleList(
            [ConvBN(width, width, 1, activation=activation) for _ in steps]
        )
        self.fpn_blocks = nn.ModuleList([fusion() for _ in steps])
        self.downsample_convs = nn.ModuleList([halving() for _ in steps])
        self.pan_blocks = nn.ModuleList([fusion() for _ in steps])

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        *finer, coarse = [conv(x) for conv, x in zip(self.input_proj, features, strict=True)]
        coarse, inner = self.encoder[0](coarse), []
        for lateral, fuse, fine in zip(
            self.lateral_convs, self.fpn_blocks, finer[::-1], strict=True
        ):
            inner.append(lateral(coarse))
            coarse = fuse(torch.cat([double(inner[-1]), fine], 1))
        outputs = [coarse]
        for halve, fuse, coarse in zip(
            self.downsample_convs, self.pan_blocks, inner[::-1], strict=True
        ):
            outputs.append(fuse(torch.cat([halve(outputs[-1]), coarse], 1)))
        return outputs
