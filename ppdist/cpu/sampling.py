"""Sampling of feature maps as products of sparse matrices, by scipy.

`sample` of models/attention.py gathers the four cells around every point: 49 MB for 500 queries of
4 images, written, multiplied, and scattered again by the gradient.  Here the shares of the cells
are the entries of a sparse matrix for each image and corner, and no gathered cell leaves the
processor's cache:

    y = sum_c(S_c cells),  dcells = sum_c(S_c^T dy),  dS_c = dy cells^T, at the entries of S_c

Letters: Q queries, H heads, P points, Z = H P points of a query, L cells, D channels of a head.
"""

import ctypes
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from paddle import Tensor

_GATHERED_ROWS = 512  # queries and heads at a time: their cells stay in the cache


class Points(NamedTuple):
    """Places of the points of a query; arrays over points repeat for each head.

    size_Z2: width and height of a point's map in cells.
    start_Z: int32, first cell of its map.
    reach_Z: offset of a point that moves it by the size of the box.
    heads: H.
    """

    size_Z2: ndarray
    start_Z: ndarray
    reach_Z: ndarray
    heads: int


class _Neighbours:
    """The cells on both sides of positions along one axis.

    Attributes:
        cell_QZ: int32, of the cell before and of the cell after; a cell of the map for any number.
        inside_QZ: float32, 0 where that cell is outside the map, else 1.
        share_QZ: share of that cell in the sample; 0 outside.
    """

    def __init__(self, place_QZ: ndarray, size_Z: ndarray) -> None:
        place_QZ = place_QZ * size_Z
        before_QZ = np.floor(place_QZ - np.float32(0.5))
        fraction_QZ = place_QZ - (before_QZ + np.float32(0.5))
        cells = before_QZ, before_QZ + 1
        last_Z = size_Z - 1
        inside = [(cell_QZ >= 0) & (cell_QZ <= last_Z) for cell_QZ in cells]
        self.inside_QZ = [is_inside.astype(np.float32) for is_inside in inside]
        # Unlike clip, these return a cell for NaN; its share is NaN.
        self.cell_QZ = [np.fmin(np.fmax(c, 0), last_Z).astype(np.int32) for c in cells]
        shares = 1 - fraction_QZ, fraction_QZ
        self.share_QZ = [s * is_in for s, is_in in zip(shares, self.inside_QZ, strict=True)]

    def gradient(self, weight_QZ: ndarray, dshares: list[ndarray]) -> ndarray:
        """Returns the gradient of the positions in cells, given those of both weighted shares."""
        (before, after), (dbefore, dafter) = self.inside_QZ, dshares
        return weight_QZ * (after * dafter - before * dbefore)


class SampledImage:
    """The weighted samples of one image's queries.

    Boxes of a diverged model are not finite, and neither are its samples then.
    """

    @np.errstate(invalid="ignore", over="ignore")
    def __init__(
        self, cells_LX: ndarray, offsets_QZ2: ndarray, weight_QZ: ndarray, boxes_Q4: ndarray,
        points: Points,
    ) -> None:  # fmt: skip
        from scipy.sparse import csr_array  # slow to import; only a DETR's decoder needs it

        queries, heads = len(boxes_Q4), points.heads
        self.weight_QZ, self.points = weight_QZ, points
        self.cells_ND = cells_LX.reshape(len(cells_LX) * heads, -1)  # N = L H
        self.step_QZ2 = [boxes_Q4[:, axis + 2, None] * points.reach_Z for axis in (0, 1)]
        self.x, self.y = (
            _Neighbours(
                boxes_Q4[:, axis, None] + offsets_QZ2[..., axis] * self.step_QZ2[axis],
                points.size_Z2[:, axis],
            )
            for axis in (0, 1)
        )
        width_Z = points.size_Z2[:, 0].astype(np.int32)
        per_head = offsets_QZ2.shape[1] // heads
        head_Z = np.repeat(np.arange(heads, dtype=np.int32), per_head)
        rows = queries * heads
        pointers = np.arange(0, rows * per_head + 1, per_head, dtype=np.int32)
        self.matrices = []  # of the corners [before, after] of y times those of x
        weighted = [share_QZ * weight_QZ for share_QZ in self.y.share_QZ]
        starts = [
            (points.start_Z + cell_QZ * width_Z) * heads + head_Z for cell_QZ in self.y.cell_QZ
        ]
        columns = [cell_QZ * heads for cell_QZ in self.x.cell_QZ]
        for i, j in product((0, 1), (0, 1)):
            share_QZ, cell_QZ = weighted[i] * self.x.share_QZ[j], starts[i] + columns[j]
            self.matrices.append(
                csr_array((share_QZ.ravel(), cell_QZ.ravel(), pointers), (rows, len(self.cells_ND)))
            )

    def sums(self) -> ndarray:
        """Returns the weighted sum of each query's and head's samples, [Q * H, D]."""
        return sum(matrix @ self.cells_ND for matrix in self.matrices)

    @np.errstate(invalid="ignore", over="ignore")
    def gradient(self, dy_XD: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """Returns the gradients of cells [N, D], offsets [Q, Z, 2] and weights [Q, Z]."""
        dcells_ND = sum(matrix.T @ dy_XD for matrix in self.matrices)
        shape = self.weight_QZ.shape
        # By corner: [before, after] in y, then in x.
        before, after = (
            [
                self._entries(matrix.indices, dy_XD).reshape(shape)
                for matrix in self.matrices[at:][:2]
            ]
            for at in (0, 2)
        )
        by_row = [_dot(self.x.share_QZ, row) for row in (before, after)]
        by_column = [_dot(self.y.share_QZ, column) for column in zip(before, after, strict=True)]
        doffsets_QZ2 = np.empty((*shape, 2), np.float32)
        for axis, (neighbours, dshares) in enumerate(((self.x, by_column), (self.y, by_row))):
            dplace_QZ = neighbours.gradient(self.weight_QZ, dshares)
            dplace_QZ *= self.points.size_Z2[:, axis]
            np.multiply(dplace_QZ, self.step_QZ2[axis], out=doffsets_QZ2[..., axis])
        return dcells_ND, doffsets_QZ2, _dot(self.y.share_QZ, by_row)

    def _entries(self, cell_E: ndarray, dy_XD: ndarray) -> ndarray:
        """Returns the entries of dy cells^T at the cells of one corner, [X, P]."""
        cell_XP = cell_E.reshape(len(dy_XD), -1)
        entry_XP = np.empty(cell_XP.shape, np.float32)
        for first in range(0, len(dy_XD), _GATHERED_ROWS):
            part = slice(first, first + _GATHERED_ROWS)
            gathered_XPD = np.take(self.cells_ND, cell_XP[part], axis=0, mode="clip")
            np.matmul(gathered_XPD, dy_XD[part, :, None], out=entry_XP[part, :, None])
        return entry_XP


def _dot(first: Iterable[ndarray], second: Iterable[ndarray]) -> ndarray:
    """Returns the sum of the products of pairs of arrays."""
    (a, b), (c, d) = first, second
    return a * c + b * d


def array_of(x: Tensor) -> ndarray:
    """Returns the memory of a contiguous float32 tensor, which has to outlive the array."""
    values = (ctypes.c_float * x.size).from_address(x.data_ptr())
    return np.ctypeslib.as_array(values).reshape(x.shape)
