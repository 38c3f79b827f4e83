"""The neck of RT-DETR: attention within the coarsest level, fusion across levels.

    features fine to coarse -> 1x1 to one width -> AIFI on the coarsest -> top down -> bottom up

AIFI is attention-based intra-scale feature interaction, CCFF the convolutional cross-scale fusion
of arXiv:2304.08069, section 4.2.  D-FINE (arXiv:2410.13842) fuses with RepNCSPELAN4 from YOLOv9
(arXiv:2402.13616) and halves the resolution with SCDown from YOLOv10 (arXiv:2405.14458).

Keys are those of the originals' torch implementations, except that their `norm` is our `bn`.
"""

from functools import lru_cache

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.models import functional
from ppdist.models.attention import MultiHeadAttention
from ppdist.models.layers import ConvBNLayer, RepConv

TEMPERATURE = 10000.0  # of the position embedding


class TransformerEncoderLayer(nn.Layer):
    """Self-attention, then two linear layers with GELU; layer norm after each sum."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention(width)
        self.linear1 = nn.Linear(width, inside)
        self.linear2 = nn.Linear(inside, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x_BND: Tensor, position_ND: Tensor) -> Tensor:
        x_BND = self.norm1(x_BND + self.self_attn(x_BND, position_ND))
        return self.norm2(x_BND + self.linear2(F.gelu(self.linear1(x_BND))))


class TransformerEncoder(nn.Layer):
    """AIFI: transformer layers over the cells of one feature map."""

    def __init__(self, width: int, inside: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.LayerList([TransformerEncoderLayer(width, inside) for _ in range(layers)])

    def forward(self, feature_BDHW: Tensor) -> Tensor:
        position_ND = _positions(feature_BDHW)
        x_BND = feature_BDHW.flatten(2).transpose([0, 2, 1])
        for layer in self.layers:
            x_BND = layer(x_BND, position_ND)
        shape = feature_BDHW.shape if paddle.in_dynamic_mode() else paddle.shape(feature_BDHW)
        return x_BND.transpose([0, 2, 1]).reshape(shape)


def _positions(feature_BDHW: Tensor) -> Tensor:
    """Computes the position embedding [H * W, D]: sine and cosine of row and column.

    A quarter of the channels each: sin(y w), cos(y w), sin(x w), cos(x w), w = T ** (-4 i / D).
    (The originals number cells along columns first. For square maps the result is the same; for
    other shapes, cells get the positions of other cells.)
    """
    width = feature_BDHW.shape[1]
    if paddle.in_dynamic_mode():
        height, columns = feature_BDHW.shape[2:]
        return _fixed_positions(height, columns, width, str(feature_BDHW.place))
    shape = paddle.shape(feature_BDHW)
    y, x = (paddle.arange(0, shape[axis], dtype="float32") for axis in (2, 3))
    cell_N2 = paddle.stack([grid.flatten() for grid in paddle.meshgrid(y, x)], axis=1)
    rate_2D = np.kron(np.eye(2), np.tile(_rates(width), 2))  # y: w w 0 0, x: 0 0 w w
    # cos x = sin(x + pi / 2): given sin and cos of the same tensor, Paddle 3.3's oneDNN predictor
    # overwrites the first with the second.
    phase_D = np.tile(np.repeat([0.0, np.pi / 2], width // 4), 2)
    rate_2D, phase_D = (paddle.to_tensor(x.astype("float32")) for x in (rate_2D, phase_D))
    return paddle.sin(paddle.matmul(cell_N2, rate_2D) + phase_D)


def _rates(width: int) -> np.ndarray:
    """Returns the angular rates w of the position embedding, [D / 4]."""
    return TEMPERATURE ** (-np.arange(width // 4) / (width // 4))


@lru_cache(maxsize=64)
def _fixed_positions(height: int, columns: int, width: int, place: str) -> Tensor:
    """Computes the position embedding of a map of known size, [H * W, D]."""
    y, x = (np.arange(count)[:, None] * _rates(width) for count in (height, columns))
    row_HWX = np.concatenate([np.sin(y), np.cos(y)], axis=1)[:, None].repeat(columns, 1)
    column_HWX = np.concatenate([np.sin(x), np.cos(x)], axis=1)[None].repeat(height, 0)
    embedding = np.concatenate([row_HWX, column_HWX], axis=2).reshape(-1, width)
    return paddle.to_tensor(embedding.astype("float32"))


class CSPRepLayer(nn.Layer):
    """Cross-stage partial block of RepConvs.

    Two parallel 1x1 ConvBNLayers, the first followed by RepConvs; their sum, widened by a 1x1.
    """

    def __init__(self, in_channels: int, out_channels: int, inside: int, blocks: int) -> None:
        super().__init__()
        self.conv1 = ConvBNLayer(in_channels, inside, 1)
        self.conv2 = ConvBNLayer(in_channels, inside, 1)
        self.bottlenecks = nn.Sequential(*[RepConv(inside) for _ in range(blocks)])
        self.conv3 = None if inside == out_channels else ConvBNLayer(inside, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, beside = functional.share(x, 2)
        x = functional.add(self.bottlenecks(self.conv1(x)), self.conv2(beside))
        return x if self.conv3 is None else self.conv3(x)


class RepNCSPELAN4(nn.Layer):
    """Efficient layer aggregation of two CSPRepLayers.

    A 1x1; half of its output passes two CSPRepLayers, each followed by a 3x3; a 1x1 mixes all
    parts.
    """

    def __init__(self, in_channels: int, out_channels: int, inside: int, blocks: int) -> None:
        super().__init__()
        half = out_channels
        self.cv1 = ConvBNLayer(in_channels, 2 * half, 1)
        self.cv2 = nn.Sequential(
            CSPRepLayer(half, inside, inside, blocks), ConvBNLayer(inside, inside, 3)
        )
        self.cv3 = nn.Sequential(
            CSPRepLayer(inside, inside, inside, blocks), ConvBNLayer(inside, inside, 3)
        )
        self.cv4 = ConvBNLayer(2 * half + 2 * inside, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        projected, x = functional.share(self.cv1(x), 2)
        deeper, x = functional.share(self.cv2(functional.chunk(x, 2, axis=1)[1]), 2)
        return self.cv4(functional.concat([projected, deeper, self.cv3(x)], axis=1))


class SCDown(nn.Layer):
    """1x1 convolution, then depthwise 3x3 convolution with stride 2, without activations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = ConvBNLayer(channels, channels, 1, activation=None)
        self.cv2 = ConvBNLayer(channels, channels, 3, 2, None, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv2(self.cv1(x))


class HybridEncoder(nn.Layer):
    """The neck: returns as many features as it takes, all of one width; both fine to coarse.

    Args:
        in_channels: channels of the features.
        width: D, channels of all outputs.
        inside: width of AIFI's inner linear layers.
        expansion: channels inside a fusion as a multiple of D (D-FINE: of D / 2).
        blocks: RepConvs of a CSPRepLayer.
        elan: whether to fuse and downsample as D-FINE does.
    """

    def __init__(
        self,
        in_channels: tuple[int, ...],
        width: int,
        inside: int,
        expansion: float,
        blocks: int,
        elan: bool,
    ) -> None:
        super().__init__()
        steps = range(len(in_channels) - 1)

        def fusion() -> nn.Layer:
            if elan:
                return RepNCSPELAN4(2 * width, width, round(expansion * width // 2), blocks)
            return CSPRepLayer(2 * width, width, int(expansion * width), blocks)

        def lateral() -> ConvBNLayer:
            return ConvBNLayer(width, width, 1, activation=None if elan else "silu")

        def halving() -> nn.Layer:
            return nn.Sequential(SCDown(width)) if elan else ConvBNLayer(width, width, 3, 2)

        self.input_proj = nn.LayerList(
            [ConvBNLayer(channels, width, 1, activation=None) for channels in in_channels]
        )
        self.encoder = nn.LayerList([TransformerEncoder(width, inside, 1)])
        self.lateral_convs = nn.LayerList([lateral() for _ in steps])
        self.fpn_blocks = nn.LayerList([fusion() for _ in steps])
        self.downsample_convs = nn.LayerList([halving() for _ in steps])
        self.pan_blocks = nn.LayerList([fusion() for _ in steps])

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        projected = [conv(x) for conv, x in zip(self.input_proj, features)]
        coarse = self.encoder[0](functional.plain(projected.pop()))
        inner = []  # coarse to fine
        for lateral, fuse, fine in zip(self.lateral_convs, self.fpn_blocks, projected[::-1]):
            lateral_output, coarse = functional.share(lateral(coarse), 2)
            inner.append(lateral_output)
            coarse = fuse(functional.concat([functional.upsample2x(coarse), fine], axis=1))
        outputs = [coarse]
        for halve, fuse, coarse in zip(self.downsample_convs, self.pan_blocks, inner[::-1]):
            output, fine = functional.share(outputs.pop(), 2)
            outputs += [output, fuse(functional.concat([halve(fine), coarse], axis=1))]
        return outputs
