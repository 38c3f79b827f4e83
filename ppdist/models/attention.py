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

HEADS = 8  # of every attention in this family
OFFSET_SCALE = 0.5  # a point one unit away lies half a box from the centre
HIDDEN = -1e9  # added to the logits of what a query may not see


class MultiHeadAttention(nn.Layer):
    """Self-attention; a position is added to queries and keys, not to values.

        softmax((x + p) Wq ((x + p) Wk)^T / sqrt(d) + bias) x Wv, for each head, then Wo

    The three projections are one matrix [D, 3 D], as torch keeps them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.width = width

    def start(self) -> None:
        """As torch does: the three projections as one matrix."""
        start_xavier(self.in_proj)

    def forward(
        self, x_BND: Tensor, position_BND: Tensor, bias_BHNN: Tensor | None = None
    ) -> Tensor:
        """Returns: [B, N, D].  Args: bias_BHNN: added to the logits, 0 or `HIDDEN`."""
        weight, bias, both = self.in_proj.weight, self.in_proj.bias, 2 * self.width
        placed_BND = x_BND + position_BND
        placed = self.project(placed_BND, weight[:, :both], bias[:both])
        queries, keys = placed.chunk(2, axis=-1)
        values = self.project(x_BND, weight[:, both:], bias[both:])
        scale = (self.width // HEADS) ** -0.5
        return self.out_proj(self.attend(queries * scale, keys, values, bias_BHNN))

    def project(self, x_BND: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A part of the three projections."""
        return F.linear(x_BND, weight, bias)

    def attend(
        self, queries_BND: Tensor, keys_BND: Tensor, values_BND: Tensor, bias_BHNN: Tensor | None
    ) -> Tensor:
        """softmax(q k^T + bias) v for each head; [B, N, D]."""
        queries, keys, values = (_heads(each) for each in (queries_BND, keys_BND, values_BND))
        logits_BHNN = paddle.matmul(queries, keys, transpose_y=True)
        if bias_BHNN is not None:
            logits_BHNN = logits_BHNN + bias_BHNN
        mixed_BHND = paddle.matmul(F.softmax(logits_BHNN, axis=-1), values)
        return mixed_BHND.transpose([0, 2, 1, 3]).flatten(2)


@paddle.no_grad()
def start_xavier(*layers: nn.Layer) -> None:
    """Draws weights as Glorot and Bengio 2010.

    From U(-b, b), b = sqrt(6 / (fan in + fan out)).
    """
    for layer in layers:
        shape = layer.weight.shape
        bound = math.sqrt(6 / (shape[0] + shape[1]))  # of linear layers and 1x1 convolutions
        layer.weight.set_value(paddle.uniform(shape, "float32", -bound, bound))


def _heads(x_BND: Tensor) -> Tensor:
    """[B, H, N, D / H]."""
    return x_BND.reshape([0, 0, HEADS, -1]).transpose([0, 2, 1, 3])


def length_of(x: Tensor, axis: int) -> int | Tensor:
    """Size of an axis; where a graph leaves it free, 0-D int64."""
    known = x.shape[axis]
    return known if known >= 0 else paddle.shape(x)[axis].astype("int64")


class Memory(NamedTuple):
    """Feature maps of several levels as one row of cells.

    cells_BLD: L runs over the levels, fine to coarse, each row by row.
    size_P2: width and height of the map in which each of the P points lies.
    start_P: first cell of that map.
    """

    cells_BLD: Tensor
    size_P2: Tensor
    start_P: Tensor

    @classmethod
    def of(cls, features: list[Tensor], points: tuple[int, ...]) -> "Memory":
        """Args: features: [B, D, H, W], fine to coarse.  points: sampled in each."""
        cells_BLD = paddle.concat([x.flatten(2) for x in features], axis=2).transpose([0, 2, 1])
        if paddle.in_dynamic_mode():
            sizes = tuple((int(x.shape[3]), int(x.shape[2])) for x in features)
            return cls(cells_BLD, *_fixed_grid(sizes, points, str(features[0].place)))
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
    starts = np.cumsum([0, *(w * h for w, h in sizes)])[:-1]
    return (
        paddle.to_tensor(np.repeat(np.array(sizes, "float32"), points, axis=0)),
        paddle.to_tensor(np.repeat(starts.astype("float32"), points)),
    )


def sample(memory: Memory, places_BQHP2: Tensor, weights_BQHP: Tensor) -> Tensor:
    """Bilinear samples of feature maps, weighted and summed over the points.

    Outside a map is zero.  The four cells around each point are gathered in one go: on a CPU half
    the time of grid_sample, forward and backward, and in ONNX nothing but Gather and MatMul, with
    any number of points per level.

    Args:
        places_BQHP2: x, y in 0..1 of the input; the gradient flows here, too.
        weights_BQHP: of the points.
    Returns: [B, Q, D]; head h gives the channels from h * D / H.
    """
    queries, (heads, points) = length_of(places_BQHP2, 1), places_BQHP2.shape[2:4]
    place_XP2 = places_BQHP2.reshape([-1, points, 2]) * memory.size_P2  # X = B * Q * H
    # Planes, because on a CPU Paddle broadcasts inner axes of 2 twenty times as slowly.
    (left, right), (above, below) = (
        _neighbours(place_XP, size_P)
        for place_XP, size_P in zip(place_XP2.unbind(-1), memory.size_P2.unbind(-1))
    )
    cells, shares, weight_XP = [], [], weights_BQHP.reshape([-1, points])
    for y_XP, y_share_XP in (above, below):
        first_XP = memory.start_P + y_XP * memory.size_P2[:, 0]
        y_share_XP = y_share_XP * weight_XP
        for x_XP, x_share_XP in (left, right):
            cells.append(first_XP + x_XP)
            shares.append(x_share_XP * y_share_XP)
    # A row of [B * L * H, D / H] for each.
    cell_XK, share_XK = paddle.concat(cells, axis=1), paddle.concat(shares, axis=1)
    batch, length = (length_of(memory.cells_BLD, axis) for axis in (0, 1))
    width = memory.cells_BLD.shape[2]
    image_B11 = paddle.arange(0, batch, dtype="int64").reshape([-1, 1, 1])
    zero_Q1 = paddle.zeros([queries, 1], dtype="int64")
    first_BQH = image_B11 * heads * length + (zero_Q1 + paddle.arange(0, heads, dtype="int64"))
    # Not (a + b) * heads: of integers that predictor forgets the factor behind a sum.
    rows_XK = cell_XK.astype("int64") * heads + first_BQH.reshape([-1, 1])
    values = memory.cells_BLD.reshape([-1, width // heads])
    if paddle.in_dynamic_mode():  # the gradient of `gather` takes twice as long
        gathered_XKD = F.embedding(rows_XK, values)
    else:  # of a table of unknown length there is no `embedding`
        gathered_XKD = paddle.gather(values, rows_XK.flatten())
        gathered_XKD = gathered_XKD.reshape([-1, 4 * points, width // heads])
    summed_X1D = paddle.matmul(share_XK.unsqueeze(1), gathered_XKD)
    return summed_X1D.reshape([-1, queries, width])


def _neighbours(place_XP: Tensor, size_P: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The cells at or before and behind a place, and their shares."""
    # Paddle 3.3's oneDNN predictor writes the floor of a number over the number itself, which is
    # read no more.
    before_XP = paddle.floor(place_XP - 0.5)  # its gradient is 0
    beyond_XP = place_XP - (before_XP + 0.5)
    pairs = []
    for cell_XP, share_XP in ((before_XP, 1 - beyond_XP), (before_XP + 1, beyond_XP)):
        inside_XP = (cell_XP >= 0) & (cell_XP < size_P)
        # Outside, and where a diverged model has NaN, it is cell 0 with share 0, or NaN.
        cell_XP = paddle.where(inside_XP, cell_XP, paddle.zeros_like(cell_XP))
        pairs.append((cell_XP, share_XP * inside_XP.astype("float32")))
    return pairs


class MSDeformableAttention(nn.Layer):
    """Attention of each query to points of the feature maps.

    They lie around its box:

        point = centre + offset / (points of its level) * size * OFFSET_SCALE
        output = sum_p(softmax(weights)_p * value(point_p)), for each head

    Source: arXiv:2010.04159, eq. 3; points by level arXiv:2407.17140 and 2410.13842.
    """

    def __init__(self, width: int, points: tuple[int, ...], projected: bool) -> None:
        """
        Args:
            points: of each level, fine to coarse.
            projected: a linear layer before and one behind it; D-FINE has neither.
        """
        super().__init__()
        total = sum(points)
        self.sampling_offsets = nn.Linear(width, HEADS * total * 2)
        self.attention_weights = nn.Linear(width, HEADS * total)
        self.value_proj = self.output_proj = None
        if projected:
            self.value_proj = nn.Linear(width, width)
            self.output_proj = nn.Linear(width, width)
        self.points, self.points_of_levels = total, points
        reach = np.repeat([OFFSET_SCALE / count for count in points], points)
        self.reach = np.tile(reach.repeat(2), HEADS).tolist()

    @paddle.no_grad()
    def start(self) -> None:
        """Each head looks in its own direction, at all points alike."""
        for layer in (self.sampling_offsets, self.attention_weights):
            layer.weight.set_value(paddle.zeros_like(layer.weight))
        self.sampling_offsets.bias.set_value(_spokes(self.points_of_levels))
        start_xavier(*(each for each in (self.value_proj, self.output_proj) if each is not None))

    def forward(self, query_BQD: Tensor, boxes_BQ4: Tensor, memory: Memory) -> Tensor:
        """[B, Q, D].  Args: boxes_BQ4: cx, cy, w, h in 0..1 of the input."""
        shape = [0, 0, HEADS, self.points]
        offsets_BQX = self.sampling_offsets(query_BQD).astype("float32")
        weights_BQHP = F.softmax(self.attention_weights(query_BQD).reshape(shape), axis=-1)
        # Repeated, as sums and products with one for all points take three times as long on a CPU.
        centre_BQX, size_BQX = (
            part_BQ2.tile([1, 1, HEADS * self.points]) for part_BQ2 in boxes_BQ4.chunk(2, axis=-1)
        )
        reach_X = paddle.to_tensor(self.reach, dtype="float32")
        places_BQHP2 = (centre_BQX + offsets_BQX * (size_BQX * reach_X)).reshape([*shape, 2])
        if self.value_proj is None or self.output_proj is None:
            return sample(memory, places_BQHP2, weights_BQHP)
        memory = memory._replace(cells_BLD=self.value_proj(memory.cells_BLD))
        return self.output_proj(sample(memory, places_BQHP2, weights_BQHP))


def _spokes(points: tuple[int, ...]) -> np.ndarray:
    """Offsets at the start, one direction for each head.

    Head h looks in direction 2 pi h / H, point p of a level lies p far.
    """
    angle_H = np.arange(HEADS) * (2 * math.pi / HEADS)
    direction_H2 = np.stack([np.cos(angle_H), np.sin(angle_H)], axis=-1)
    direction_H2 /= np.abs(direction_H2).max(axis=-1, keepdims=True)
    distance_P = np.concatenate([np.arange(1, count + 1) for count in points])
    offsets_HP2 = direction_H2[:, None] * distance_P[:, None]
    return offsets_HP2.astype("float32").ravel()
