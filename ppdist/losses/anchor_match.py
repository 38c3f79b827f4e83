"""Which anchors of which cells learn which object: YOLOv5's matching, by position and shape alone.

Every object of every image gets three slots a level, one for each cell it may fall to, whether it
falls there or not; so nothing has a shape that depends on values, and nothing waits for the host.

Letters: B images, M padded boxes, A anchors per level, S = 3 * M slots.
"""

from typing import NamedTuple

import paddle
from paddle import Tensor

CELLS = 3  # an object falls to its own cell and to one neighbour in x and one in y


class Matches(NamedTuple):
    """The slots of one level: slot k * M + m is box m in its own cell, or its neighbour k.

    cell_BS: int64, row * width + column.
    taken_BAS: float32, 1 where the anchor of that cell learns the object, else 0.
    wins_BAS: float32, 1 where the slot is taken and no later one has the same anchor and cell.
    target_BS4: the object as (centre x, centre y, width, height) in cells; the centre counts from
        the corner of the slot's cell.
    label_BS: int64.
    """

    cell_BS: Tensor
    taken_BAS: Tensor
    wins_BAS: Tensor
    target_BS4: Tensor
    label_BS: Tensor


@paddle.no_grad()
def match_anchors(
    boxes_BM4: Tensor,
    labels_BM: Tensor,
    mask_BM: Tensor,
    anchors_A2: Tensor,
    size: tuple[int, int],
    stride: int,
    threshold: float,
) -> Matches:
    """Matches of one level.

    An anchor fits a box when neither side is `threshold` times the other's, or more.  A box goes
    to the cell of its centre, and to the neighbour in x and in y that is nearer than half a cell
    to the centre and lies in the grid: exactly in the middle of a cell there is none.

    Args:
        boxes_BM4: xyxy input pixels, zero padded.
        labels_BM, mask_BM: int64 classes; 1 for a real box, 0 for padding.
        anchors_A2: width, height in cells.
        size: (height, width) of the level in cells.
        stride: pixels per cell.
    """
    height, width = size
    boxes_BM4 = boxes_BM4.astype("float32") / stride
    wh_BM2 = boxes_BM4[..., 2:] - boxes_BM4[..., :2]
    x_BM, y_BM = ((boxes_BM4[..., 2:] + boxes_BM4[..., :2]) * 0.5).unbind(-1)
    column_BM, row_BM = x_BM.floor(), y_BM.floor()
    step_x_BM, step_y_BM = _step(x_BM - column_BM, x_BM, width), _step(y_BM - row_BM, y_BM, height)
    column_BS = paddle.concat([column_BM, column_BM + step_x_BM, column_BM], axis=1)
    row_BS = paddle.concat([row_BM, row_BM, row_BM + step_y_BM], axis=1)
    # A centre on the far border, the only one outside the grid, belongs to the last cell.
    column_BS, row_BS = column_BS.clip(0, width - 1), row_BS.clip(0, height - 1)
    exists_BS = paddle.concat([paddle.ones_like(x_BM), step_x_BM.abs(), step_y_BM.abs()], axis=1)

    ratio_BAM2 = wh_BM2.unsqueeze(1) / anchors_A2.reshape([1, -1, 1, 2])
    worst_BAM = paddle.maximum(ratio_BAM2, 1.0 / ratio_BAM2).max(-1)
    fits_BAM = (worst_BAM < threshold).astype("float32") * mask_BM.unsqueeze(1).astype("float32")
    taken_BAS = fits_BAM.tile([1, 1, CELLS]) * exists_BS.unsqueeze(1)

    cell_BS = (row_BS * width + column_BS).astype("int64")
    rank_BS = _rank(step_x_BM, step_y_BM)
    from_cell_BS2 = paddle.stack(
        [x_BM.tile([1, CELLS]) - column_BS, y_BM.tile([1, CELLS]) - row_BS], axis=-1
    )
    labels_BM = labels_BM.astype("int64") * mask_BM.astype("int64")  # padding: a valid index too
    return Matches(
        cell_BS,
        taken_BAS,
        _last_of_cell(cell_BS, taken_BAS, rank_BS, height * width),
        paddle.concat([from_cell_BS2, wh_BM2.tile([1, CELLS, 1])], axis=-1),
        labels_BM.tile([1, CELLS]),
    )


def _step(fraction_BM: Tensor, place_BM: Tensor, cells: int) -> Tensor:
    """-1, 1 or 0: where the nearer neighbour lies along one axis, and whether it is there."""
    before_BM = (fraction_BM < 0.5) & (place_BM > 1)
    after_BM = (fraction_BM > 0.5) & (place_BM < cells - 1)
    return after_BM.astype("float32") - before_BM.astype("float32")


def _rank(step_x_BM: Tensor, step_y_BM: Tensor) -> Tensor:
    """Order [B, S] of the slots of an image, int64, for two that have one anchor and cell.

    The original lists own cells, left, upper, right, lower neighbours, each box by box, and
    writes their overlaps one over the other: the last one stays.
    """
    boxes = step_x_BM.shape[1]
    kind_BS = paddle.concat(
        [paddle.zeros_like(step_x_BM), 2 + step_x_BM, 3 + step_y_BM], axis=1
    ).astype("int64")
    box_M = paddle.arange(boxes, dtype="int64")
    return kind_BS * boxes + box_M.tile([CELLS]).unsqueeze(0)


def _last_of_cell(cell_BS: Tensor, taken_BAS: Tensor, rank_BS: Tensor, cells: int) -> Tensor:
    """1 for the taken slot of the highest rank of each anchor and cell, else 0."""
    shape = taken_BAS.shape
    cell_BAS = cell_BS.unsqueeze(1).expand(shape)
    rank_BAS = paddle.where(
        taken_BAS > 0, rank_BS.unsqueeze(1).expand(shape), paddle.full(shape, -1, "int64")
    )
    last_BAN = paddle.put_along_axis(
        paddle.full([shape[0], shape[1], cells], -1, "int64"),
        cell_BAS,
        rank_BAS,
        axis=2,
        reduce="amax",
    )
    last_BAS = paddle.take_along_axis(last_BAN, cell_BAS, axis=2)
    return taken_BAS * (last_BAS == rank_BAS).astype("float32")
