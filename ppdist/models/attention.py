"""Attention between all tokens, and to sampled points of feature maps.

Sources: Attention Is All You Need, arXiv:1706.03762; Deformable DETR, arXiv:2010.04159.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.models import functional

HEADS = 8  # number of heads of every attention layer in this family
OFFSET_SCALE = 0.5  # a point one unit away lies half a box from the centre
HIDDEN = -1e9  # added to the logits of keys that a query may not attend to


class MultiHeadAttention(nn.Layer):
    """Self-attention; position embeddings are added to queries and keys, not to values.

        softmax((x + p) Wq ((x + p) Wk)^T / sqrt(d) + bias) x Wv, for each head, then Wo

    The three projections are stored as one matrix [D, 3 D], as in torch.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.width = width

    def start(self) -> None:
        """Initialises the three projections as one matrix, as torch does."""
        start_xavier(self.in_proj)

    def forward(
        self, x_BND: Tensor, position_BND: Tensor, bias_B1MN: Tensor | None = None
    ) -> Tensor:
        """Returns the attended tokens [B, N, D].

        Args: bias_B1MN: bias added to the logits of the first M tokens; its entries are 0 or
            `HIDDEN`. The tokens after these do not attend to these. None: all attend to all.
        """
        weight, bias, split = self.in_proj.weight, self.in_proj.bias, 2 * self.width
        positioned_BND = x_BND + position_BND
        pairs_BNX = self.project(positioned_BND, weight[:, :split], bias[:split])
        values_BND = self.project(x_BND, weight[:, split:], bias[split:])
        return self.out_proj(self.attend(pairs_BNX, values_BND, bias_B1MN))

    def project(self, x_BND: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Computes one or two of the three projections."""
        return F.linear(x_BND, weight, bias)

    def attend(self, pairs_BNX: Tensor, values_BND: Tensor, bias_B1MN: Tensor | None) -> Tensor:
        """Computes softmax(q k^T / sqrt(d) + bias) v for each head; returns [B, N, D].

        Args: pairs_BNX: queries and keys side by side, X = 2 D.  bias_B1MN: see `forward`.
        """
        queries_BND, keys_BND = pairs_BNX.chunk(2, axis=-1)
        queries_BND = queries_BND * (self.width // HEADS) ** -0.5
        queries, keys, values = (_heads(x_BND) for x_BND in (queries_BND, keys_BND, values_BND))
        if bias_B1MN is None:
            mixed_BHND = _mix(queries, keys, values)
        else:
            first = bias_B1MN.shape[2]
            # Repeated for every head: one for all takes six times as long on a CPU.
            biased = _mix(queries[:, :, :first], keys, values, bias_B1MN.tile([1, HEADS, 1, 1]))
            rest = _mix(*(x[:, :, first:] for x in (queries, keys, values)))
            mixed_BHND = paddle.concat([biased, rest], axis=2)
        return mixed_BHND.transpose([0, 2, 1, 3]).flatten(2)


@paddle.no_grad()
def start_xavier(*layers: nn.Layer) -> None:
    """Draws weights as in Glorot and Bengio 2010.

    They are uniform in (-b, b), b = sqrt(6 / (fan in + fan out)).
    """
    for layer in layers:
        shape = layer.weight.shape
        bound = math.sqrt(6 / (shape[0] + shape[1]))  # of linear layers and 1x1 convolutions
        layer.weight.set_value(paddle.uniform(shape, "float32", -bound, bound))


def _mix(
    queries_BHND: Tensor, keys_BHMD: Tensor, values_BHMD: Tensor, bias_BHNM: Tensor | None = None
) -> Tensor:
    """Computes softmax(q k^T + bias) v, [B, H, N, D]."""
    logits_BHNM = paddle.matmul(queries_BHND, keys_BHMD, transpose_y=True)
    if bias_BHNM is not None:
        logits_BHNM = logits_BHNM + bias_BHNM
    return paddle.matmul(F.softmax(logits_BHNM, axis=-1), values_BHMD)


def _heads(x_BND: Tensor) -> Tensor:
    """Splits the channels into heads, [B, H, N, D / H]."""
    return x_BND.reshape([0, 0, HEADS, -1]).transpose([0, 2, 1, 3])


def length_of(x: Tensor, axis: int) -> int | Tensor:
    """Returns the size of an axis; for an axis that is dynamic in a graph, a 0-D int64 tensor."""
    size = x.shape[axis]
    return size if size >= 0 else paddle.shape(x)[axis].astype("int64")


class Memory(NamedTuple):
    """Feature maps of several levels as one sequence of cells.

    cells_BLD: L runs over the levels, fine to coarse, and row by row within a level.
    size_P2: width and height of the map in which each of the P points lies.
    start_P: index of the first cell of that map.
    """

    cells_BLD: Tensor
    size_P2: Tensor
    start_P: Tensor

    @classmethod
    def of(cls, features: list[Tensor], points: tuple[int, ...]) -> "Memory":
        """Builds the sequence of cells of feature maps.

        Args: features: [B, D, H, W], fine to coarse.  points: number of points sampled in each map.
        """
        cells_BLD = paddle.concat([x.flatten(2) for x in features], axis=2).transpose([0, 2, 1])
        if paddle.in_dynamic_mode():
            sizes = tuple((int(x.shape[3]), int(x.shape[2])) for x in features)
            return cls(cells_BLD, *_fixed_grid(sizes, points, str(features[0].place)))
        # In a static graph, the sizes are known only at run time.
        start, rows = paddle.zeros([1], dtype="float32"), []
        for x, count in zip(features, points):
            shape = paddle.shape(x).astype("float32")
            row_3 = paddle.concat([shape[3:4], shape[2:3], start])
            rows.append(row_3.unsqueeze(0).expand([count, 3]))
            start = start + shape[2:3] * shape[3:4]
        grid_P3 = paddle.concat(rows)
        return cls(cells_BLD, grid_P3[:, :2], grid_P3[:, 2])


@lru_cache(maxsize=64)
def _fixed_grid(
    sizes: tuple[tuple[int, int], ...], points: tuple[int, ...], place: str
) -> tuple[Tensor, Tensor]:
    """Returns size_P2 and start_P of `Memory` for feature maps of known sizes (width, height)."""
    starts = np.cumsum([0, *(w * h for w, h in sizes)])[:-1]
    return (
        paddle.to_tensor(np.repeat(np.array(sizes, "float32"), points, axis=0)),
        paddle.to_tensor(np.repeat(starts.astype("float32"), points)),
    )


def sample(memory: Memory, places_BQHP2: Tensor, weights_BQHP: Tensor) -> Tensor:
    """Samples feature maps bilinearly and sums the weighted samples of each query.

    Outside a map the value is 0.  The four cells around every point are gathered at once: on a CPU
    this takes half the time of grid_sample, forward and backward, and in ONNX it needs only Gather
    and MatMul, for any number of points per level.

    Args:
        places_BQHP2: x, y of the points, as fractions (0..1) of the input size; differentiable.
        weights_BQHP: weight of each point.
    Returns: [B, Q, D]; the channels of head h begin at h * D / H.
    """
    queries, (heads, points) = length_of(places_BQHP2, 1), places_BQHP2.shape[2:4]
    place_XP2 = places_BQHP2.reshape([-1, points, 2]) * memory.size_P2  # X = B * Q * H
    # x and y are separate tensors: on a CPU, Paddle broadcasts an inner axis of size 2 twenty times
    # as slowly.
    (left, right), (above, below) = (
        _neighbours(place_XP, size_P)
        for place_XP, size_P in zip(place_XP2.unbind(-1), memory.size_P2.unbind(-1))
    )
    cells, shares, weight_XP = [], [], weights_BQHP.reshape([-1, points])
    for y_XP, y_share_XP in (above, below):
        row_start_XP = memory.start_P + y_XP * memory.size_P2[:, 0]
        y_share_XP = y_share_XP * weight_XP
        for x_XP, x_share_XP in (left, right):
            cells.append(row_start_XP + x_XP)
            shares.append(x_share_XP * y_share_XP)
    # Indices of rows of the table [B * L * H, D / H], K = 4 P of them for each query and head.
    cell_XK, share_XK = paddle.concat(cells, axis=1), paddle.concat(shares, axis=1)
    batch, length = (length_of(memory.cells_BLD, axis) for axis in (0, 1))
    width = memory.cells_BLD.shape[2]
    image_B11 = paddle.arange(0, batch, dtype="int64").reshape([-1, 1, 1])
    zero_Q1 = paddle.zeros([queries, 1], dtype="int64")
    image_start_BQH = image_B11 * heads * length + (
        zero_Q1 + paddle.arange(0, heads, dtype="int64")
    )
    # Not (a + b) * heads: Paddle 3.3's oneDNN predictor drops a factor after a sum of integers.
    rows_XK = cell_XK.astype("int64") * heads + image_start_BQH.reshape([-1, 1])
    values = memory.cells_BLD.reshape([-1, width // heads])
    if paddle.in_dynamic_mode():  # here `embedding` takes half the time of `gather` backward
        gathered_XKD = F.embedding(rows_XK, values)
    else:  # `embedding` needs a table of known length, which a static graph does not have
        gathered_XKD = paddle.gather(values, rows_XK.flatten())
        gathered_XKD = gathered_XKD.reshape([-1, 4 * points, width // heads])
    summed_X1D = paddle.matmul(share_XK.unsqueeze(1), gathered_XKD)
    return summed_X1D.reshape([-1, queries, width])


def _neighbours(place_XP: Tensor, size_P: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the cells on both sides of a position along one axis, with their weights."""
    # The floor of a temporary: Paddle 3.3's oneDNN predictor writes the result over its argument.
    before_XP = paddle.floor(place_XP - 0.5)  # its gradient is 0
    fraction_XP = place_XP - (before_XP + 0.5)
    pairs = []
    for cell_XP, share_XP in ((before_XP, 1 - fraction_XP), (before_XP + 1, fraction_XP)):
        inside_XP = (cell_XP >= 0) & (cell_XP < size_P)
        # Outside the map, the result is cell 0 with weight 0; if a diverged model yields NaN,
        # weight NaN.
        cell_XP = paddle.where(inside_XP, cell_XP, paddle.zeros_like(cell_XP))
        pairs.append((cell_XP, share_XP * inside_XP.astype("float32")))
    return pairs


class MSDeformableAttention(nn.Layer):
    """Attention of queries to points of the feature maps around their boxes.

        point = centre + offset / (points of its level) * size * OFFSET_SCALE
        output = sum_p(softmax(weights)_p * value(point_p)), for each head

    Source: arXiv:2010.04159, eq. 3; points by level arXiv:2407.17140 and 2410.13842.
    """

    def __init__(self, width: int, points: tuple[int, ...], projected: bool) -> None:
        """Builds the layers.

        Args:
            points: number of points in each level, fine to coarse.
            projected: whether linear layers precede and follow the sampling; D-FINE has neither.
        """
        super().__init__()
        total = sum(points)
        self.sampling_offsets = nn.Linear(width, HEADS * total * 2)
        self.attention_weights = nn.Linear(width, HEADS * total)
        self.value_proj = self.output_proj = None
        if projected:
            self.value_proj = nn.Linear(width, width)
            self.output_proj = nn.Linear(width, width)
        self.points, self.level_points = total, points
        reach = np.repeat([OFFSET_SCALE / count for count in points], points)
        self.reach = np.tile(reach.repeat(2), HEADS).tolist()

    @paddle.no_grad()
    def start(self) -> None:
        """Initialises each head to look in its own direction, with equal weights for all points."""
        for layer in (self.sampling_offsets, self.attention_weights):
            layer.weight.set_value(paddle.zeros_like(layer.weight))
        self.sampling_offsets.bias.set_value(_initial_offsets(self.level_points))
        start_xavier(
            *(linear for linear in (self.value_proj, self.output_proj) if linear is not None)
        )

    def forward(self, query_BQD: Tensor, boxes_BQ4: Tensor, memory: Memory) -> Tensor:
        """Returns the attended features of each query, [B, Q, D].

        Args: boxes_BQ4: cx, cy, w, h as fractions (0..1) of the input size.
        """
        shape = [0, 0, HEADS, self.points]
        offsets_BQX = self.sampling_offsets(query_BQD).astype("float32")
        weights_BQHP = functional.softmax(self.attention_weights(query_BQD).reshape(shape))
        if self.value_proj is None or self.output_proj is None:
            return self.sample_offsets(memory, offsets_BQX, weights_BQHP, boxes_BQ4)
        memory = memory._replace(cells_BLD=self.value_proj(memory.cells_BLD))
        return self.output_proj(self.sample_offsets(memory, offsets_BQX, weights_BQHP, boxes_BQ4))

    def sample_offsets(
        self, memory: Memory, offsets_BQX: Tensor, weights_BQHP: Tensor, boxes_BQ4: Tensor
    ) -> Tensor:
        """Samples at offsets from the centres of boxes, as `sample` does, X = 2 H P."""
        # Repeated for every point: broadcasting instead takes three times as long on a CPU.
        centre_BQX, size_BQX = (
            part_BQ2.tile([1, 1, HEADS * self.points]) for part_BQ2 in boxes_BQ4.chunk(2, axis=-1)
        )
        reach_X = paddle.to_tensor(self.reach, dtype="float32")
        places_BQX = centre_BQX + offsets_BQX * (size_BQX * reach_X)
        return sample(memory, places_BQX.reshape([0, 0, HEADS, self.points, 2]), weights_BQHP)


def _initial_offsets(points: tuple[int, ...]) -> np.ndarray:
    """Returns the initial offsets: one direction for each head.

    Head h looks in direction 2 pi h / H, and point p of a level lies at distance p.
    """
    angle_H = np.arange(HEADS) * (2 * math.pi / HEADS)
    direction_H2 = np.stack([np.cos(angle_H), np.sin(angle_H)], axis=-1)
    direction_H2 /= np.abs(direction_H2).max(axis=-1, keepdims=True)
    distance_P = np.concatenate([np.arange(1, count + 1) for count in points])
    offsets_HP2 = direction_H2[:, None] * distance_P[:, None]
    return offsets_HP2.astype("float32").ravel()
