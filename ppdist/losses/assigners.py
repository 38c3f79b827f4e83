"""Assignment of objects to predictions: ATSS and task-aligned (TAL).

ATSS is used before the head has learned anything, TAL after.  The two return an `Assignment`: no
tensor over all predictions but a list of S slots per image, the candidates that objects propose,
S = min(M * candidates per object, N).  The losses of boxes, distributions and soft labels are
computed on slots only, and no shape here depends on values, so there is no host synchronisation.
No tensor has the size boxes x predictions x classes; TAL computes its tensors of boxes x
predictions for a few boxes at a time.

Letters: B images, M padded boxes, N predictions, K candidates per box, S slots, C classes.
"""

from typing import NamedTuple

import paddle
from paddle import Tensor

from ppdist.losses.boxes import aligned_iou, pairwise_iou

INSIDE = 1e-9  # pixels: a point this far inside all four sides is inside
ANCHOR_STRIDES = 5.0  # side of the square around a cell that ATSS compares with an object
ALIGNMENT_EPS = 1e-9  # keeps soft labels finite where a box's best alignment is 0
CHUNK = 1 << 24  # elements of the largest temporary tensor (64 MiB of float32)


class Assignment(NamedTuple):
    """S slots per image; a prediction is positive in at most one of them.

    anchor_BS: int64, the prediction (0..N-1) of each slot.
    box_BS: int64, the ground-truth box (0..M-1) that it learns; meaningless where not positive.
    is_positive_BS: float32, 1 where the slot counts, else 0.
    score_BS: float32 soft label in [0, 1]; 0 where not positive.
    """

    anchor_BS: Tensor
    box_BS: Tensor
    is_positive_BS: Tensor
    score_BS: Tensor


@paddle.no_grad()
def atss_assigner(
    boxes_BM4: Tensor,
    mask_BM: Tensor,
    sizes: list[tuple[int, int]],
    strides: tuple[int, ...],
    points_N2: Tensor,
    stride_N1: Tensor,
    topk: int,
) -> Assignment:
    """Assigns objects by adaptive training sample selection.

    It uses positions and box shapes only, no scores.  Every object proposes the `topk` cells of
    each level nearest to its centre.  Of these cells, those learn it whose centre lies inside it
    and whose anchor (a square of ANCHOR_STRIDES) overlaps it by more than mean + standard deviation
    of all its candidates.  A cell that several objects propose learns the object that its anchor
    overlaps most, among all objects of the image.

    Args:
        boxes_BM4: ground truth, xyxy input pixels, zero padded.
        mask_BM: 1 for a real box, 0 for padding.
        sizes: (height, width) of each level in cells, in the order of the predictions.
        strides: pixels per cell of each level.
        points_N2, stride_N1: cell centres in pixels and their strides.

    Returns: the slots, `score_BS` equal to `is_positive_BS`: see `score_by_iou`.
    Source: Zhang et al. 2020, arXiv:1912.02424, Algorithm 1.
    """
    anchor_BMK = nearest_cells(boxes_BM4, sizes, strides, topk)
    batch, _, candidates_per_box = anchor_BMK.shape
    half_N1 = stride_N1 * (0.5 * ANCHOR_STRIDES)
    anchors_N4 = paddle.concat([points_N2 - half_N1, points_N2 + half_N1], axis=1)
    iou_BMK = aligned_iou(boxes_BM4.unsqueeze(2), _gather_rows(anchors_N4, anchor_BMK))
    mean_BM1 = iou_BMK.mean(-1, keepdim=True)
    # Divided by K - 1, as in the reference's standard deviation.
    variance_BM1 = (iou_BMK - mean_BM1).square().sum(-1, keepdim=True) / max(
        1, candidates_per_box - 1
    )
    threshold_BM1 = mean_BM1 + variance_BM1.sqrt()
    inside_BMK = _is_inside(_gather_rows(points_N2, anchor_BMK), boxes_BM4.unsqueeze(2))
    valid_BMK = (iou_BMK > threshold_BM1) & inside_BMK & (mask_BM.unsqueeze(2) > 0)
    anchors_BN4 = anchors_N4.unsqueeze(0).expand([batch, *anchors_N4.shape])
    return _resolve_conflicts(anchor_BMK, valid_BMK, boxes_BM4, anchors_BN4)


@paddle.no_grad()
def score_by_iou(slots: Assignment, target_BS4: Tensor, pred_BS4: Tensor) -> Assignment:
    """Sets the soft labels to the IoU of predicted box and object."""
    return slots._replace(score_BS=aligned_iou(target_BS4, pred_BS4) * slots.is_positive_BS)


@paddle.no_grad()
def task_aligned_assigner(
    scores_BCN: Tensor,
    pred_BN4: Tensor,
    points_N2: Tensor,
    boxes_BM4: Tensor,
    labels_BM: Tensor,
    mask_BM: Tensor,
    *,
    topk: int,
    alpha: float,
    beta: float,
    reach_N1: Tensor | None,
) -> Assignment:
    """Assigns to each object the predictions that already fit it best (task-aligned).

        alignment = score of the object's class ^ alpha * IoU ^ beta

    Every object proposes the `topk` best aligned predictions among those whose cell centre lies
    inside it, or with a reach near its centre.  A prediction that several objects propose learns
    the object that it overlaps most, among all objects of the image. The soft label is the
    alignment rescaled so that an object's best equals its best IoU.

    Args:
        scores_BCN: predicted probabilities.
        pred_BN4: predicted boxes, xyxy input pixels.
        points_N2: cell centres, pixels.
        boxes_BM4, labels_BM, mask_BM: ground truth, xyxy input pixels, zero padded; mask 1 real.
        reach_N1: pixels; predictions whose cell centre is nearer than this to the object's.  None:
            those whose cell centre lies inside the object.

    Source: Feng et al. 2021, arXiv:2108.07755, section 3.2.
    """
    count, boxes = pred_BN4.shape[1], boxes_BM4.shape[1]
    step = max(1, CHUNK // (pred_BN4.shape[0] * count))
    points_BN2 = points_N2.reshape([1, 1, count, 2])
    reach_BN1 = None if reach_N1 is None else reach_N1.reshape([1, 1, count, 1])
    candidates = []
    for start in range(0, boxes, step):
        part = slice(start, start + step)
        box_BMx4 = boxes_BM4[:, part]
        iou_BMN = pairwise_iou(box_BMx4, pred_BN4)
        score_BMN = _gather_class_scores(scores_BCN, labels_BM[:, part])
        align_BMN = _alignment(score_BMN, iou_BMN, alpha, beta)
        # topk always proposes K cells.  Non-candidates get alignment 0 here; `valid_BMK` drops them
        # if they are proposed nevertheless.
        near_BMN = _may_learn(points_BN2, box_BMx4.unsqueeze(2), reach_BN1)
        align_BMN *= near_BMN.astype(align_BMN.dtype)
        candidates.append(paddle.topk(align_BMN, min(topk, count), axis=-1)[1])
    anchor_BMK = paddle.concat(candidates, axis=1)
    reach_BMK1 = None if reach_N1 is None else _gather_rows(reach_N1, anchor_BMK)
    near_BMK = _may_learn(_gather_rows(points_N2, anchor_BMK), boxes_BM4.unsqueeze(2), reach_BMK1)
    valid_BMK = near_BMK & (mask_BM.unsqueeze(2) > 0)
    slots = _resolve_conflicts(anchor_BMK, valid_BMK, boxes_BM4, pred_BN4)

    is_positive_BS = slots.is_positive_BS
    iou_BS = aligned_iou(take_boxes(boxes_BM4, slots.box_BS), take_boxes(pred_BN4, slots.anchor_BS))
    iou_BS *= is_positive_BS
    label_BS = paddle.take_along_axis(labels_BM, slots.box_BS, axis=1)
    flat_BS = flat_index(label_BS, slots.anchor_BS, scores_BCN.shape)
    score_BS = paddle.gather(scores_BCN.flatten(), flat_BS.flatten()).reshape(flat_BS.shape)
    align_BS = _alignment(score_BS, iou_BS, alpha, beta)
    best_align_BS = _max_per_box(align_BS, slots.box_BS, boxes)
    best_iou_BS = _max_per_box(iou_BS, slots.box_BS, boxes)
    return slots._replace(score_BS=align_BS / (best_align_BS + ALIGNMENT_EPS) * best_iou_BS)


def take_boxes(boxes_BX4: Tensor, index_BS: Tensor) -> Tensor:
    """Gathers rows [B, S, 4] of boxes_BX4 at index_BS, image by image."""
    batch, count, _ = boxes_BX4.shape
    flat_BS = index_BS + paddle.arange(batch, dtype="int64").unsqueeze(1) * count
    return paddle.gather(boxes_BX4.reshape([-1, 4]), flat_BS.flatten()).reshape(
        [batch, index_BS.shape[1], 4]
    )


def flat_index(label_BS: Tensor, anchor_BS: Tensor, shape_BCN: list[int]) -> Tensor:
    """Computes the position of (image, label, prediction) in a flattened [B, C, N] tensor."""
    batch, classes, count = shape_BCN
    image_B1 = paddle.arange(batch, dtype="int64").unsqueeze(1)
    return (image_B1 * classes + label_BS) * count + anchor_BS


def _resolve_conflicts(
    anchor_BMK: Tensor, valid_BMK: Tensor, boxes_BM4: Tensor, rivals_BN4: Tensor
) -> Assignment:
    """Assigns every prediction that objects propose to exactly one of them.

    If several objects propose a prediction, it gets the object, of all in the image, that its rival
    box (anchor or prediction) overlaps most.  Its first slot stays positive, the others do not.
    """
    batch, boxes, candidates_per_box = anchor_BMK.shape
    slots, count = boxes * candidates_per_box, rivals_BN4.shape[1]
    anchor_BS = anchor_BMK.reshape([batch, slots])
    valid_BS = valid_BMK.reshape([batch, slots])
    slot_BS = paddle.arange(slots, dtype="int64").unsqueeze(0).expand([batch, slots])
    none_BS = paddle.full_like(slot_BS, slots)
    # First and last slot of each prediction tell one object from several, without a loop.
    first_BN = paddle.put_along_axis(
        paddle.full([batch, count], slots, "int64"),
        anchor_BS,
        paddle.where(valid_BS, slot_BS, none_BS),
        axis=1,
        reduce="amin",
    )
    last_BN = paddle.put_along_axis(
        paddle.full([batch, count], -1, "int64"),
        anchor_BS,
        paddle.where(valid_BS, slot_BS, paddle.full_like(slot_BS, -1)),
        axis=1,
        reduce="amax",
    )
    if slots < count:  # one slot per candidate; only the first slot of a prediction counts
        first_BS = paddle.take_along_axis(first_BN, anchor_BS, axis=1)
        last_BS = paddle.take_along_axis(last_BN, anchor_BS, axis=1)
        is_positive_BS = valid_BS & (first_BS == slot_BS)
    else:  # more candidates than predictions: one slot per prediction
        anchor_BS = paddle.arange(count, dtype="int64").unsqueeze(0).expand([batch, count])
        first_BS, last_BS = first_BN.clip(max=slots - 1), last_BN.clip(min=0)
        is_positive_BS = first_BN < slots
    first_box_BS, last_box_BS = first_BS // candidates_per_box, last_BS // candidates_per_box
    first_box_BS = first_box_BS.clip(max=boxes - 1)
    best_BS = _most_overlapped(take_boxes(rivals_BN4, anchor_BS), boxes_BM4)
    box_BS = paddle.where(first_box_BS == last_box_BS, first_box_BS, best_BS)
    is_positive_BS = is_positive_BS.astype("float32")
    return Assignment(anchor_BS, box_BS, is_positive_BS, is_positive_BS)


def _most_overlapped(rivals_BS4: Tensor, boxes_BM4: Tensor) -> Tensor:
    """Returns the index [B, S] of the ground-truth box with the largest IoU."""
    batch, slots, _ = rivals_BS4.shape
    step = max(1, CHUNK // (batch * boxes_BM4.shape[1]))
    return paddle.concat(
        [
            pairwise_iou(rivals_BS4[:, start : start + step], boxes_BM4).argmax(-1)
            for start in range(0, slots, step)
        ],
        axis=1,
    )


def nearest_cells(
    boxes_BM4: Tensor, sizes: list[tuple[int, int]], strides: tuple[int, ...], topk: int
) -> Tensor:
    """Returns the `topk` cells of each level nearest to each box, [B, M, K].

    The nearest cells lie in a small window around the centre, clamped to the grid, so only the
    cells of the window are compared: 5 x 5 for the nearest 9.  In narrower grids all cells are
    compared.
    """
    centre_BM2 = (boxes_BM4[..., :2] + boxes_BM4[..., 2:]) * 0.5
    # Side of the smallest odd square with at least `topk` cells.
    reach = 3
    while reach * reach < topk:
        reach += 2
    levels, offset = [], 0
    for (height, width), stride in zip(sizes, strides):
        is_narrow = min(height, width) < reach
        window = max(height, width) if is_narrow else 2 * reach - 1
        rows, columns = min(height, window), min(width, window)
        x_BM, y_BM = (centre_BM2 / stride - 0.5).unbind(-1)  # in cells; cell 0 is at 0
        left_BM = (x_BM.round() - columns // 2).clip(0, width - columns)
        top_BM = (y_BM.round() - rows // 2).clip(0, height - rows)
        x_BMc = left_BM.unsqueeze(-1) + paddle.arange(columns, dtype="float32")
        y_BMr = top_BM.unsqueeze(-1) + paddle.arange(rows, dtype="float32")
        square_x_BMc = (x_BMc - x_BM.unsqueeze(-1)).square()
        square_y_BMr = (y_BMr - y_BM.unsqueeze(-1)).square()
        square_BMW = (square_y_BMr.unsqueeze(-1) + square_x_BMc.unsqueeze(-2)).flatten(2)
        cell_BMW = (y_BMr.unsqueeze(-1) * width + x_BMc.unsqueeze(-2)).flatten(2).astype("int64")
        nearest_BMK = paddle.topk(square_BMW, min(topk, rows * columns), axis=-1, largest=False)[1]
        levels.append(paddle.take_along_axis(cell_BMW, nearest_BMK, axis=2) + offset)
        offset += height * width
    return paddle.concat(levels, axis=2)


def _gather_rows(table_NX: Tensor, index_BMK: Tensor) -> Tensor:
    """Gathers rows of a table, [B, M, K, X]."""
    return paddle.gather(table_NX, index_BMK.flatten()).reshape([*index_BMK.shape, -1])


def _gather_class_scores(scores_BCN: Tensor, labels_BM: Tensor) -> Tensor:
    """Gathers the scores [B, M, N] of each box's class."""
    batch, classes, count = scores_BCN.shape
    flat_BM = labels_BM + paddle.arange(batch, dtype="int64").unsqueeze(1) * classes
    rows = paddle.gather(scores_BCN.reshape([-1, count]), flat_BM.flatten())
    return rows.reshape([batch, labels_BM.shape[1], count])


def _is_inside(points: Tensor, boxes: Tensor) -> Tensor:
    """Tests whether points [..., 2] lie strictly inside boxes [..., 4]; broadcasts, bool."""
    x, y = points.unbind(-1)
    x1, y1, x2, y2 = boxes.unbind(-1)
    inside_x = (x - x1 > INSIDE) & (x2 - x > INSIDE)
    return inside_x & (y - y1 > INSIDE) & (y2 - y > INSIDE)


def _may_learn(points: Tensor, boxes: Tensor, reach: Tensor | None) -> Tensor:
    """Tests whether cells are candidates for boxes, bool; broadcasts.

    The cells at points [..., 2] have to lie inside boxes [..., 4], or with a reach [..., 1] nearer
    than this to their centres.
    """
    if reach is None:
        return _is_inside(points, boxes)
    x, y = points.unbind(-1)
    x1, y1, x2, y2 = boxes.unbind(-1)
    distance = (x - (x1 + x2) * 0.5).square() + (y - (y1 + y2) * 0.5).square()
    return distance < reach.squeeze(-1).square()


def _alignment(score: Tensor, iou: Tensor, alpha: float, beta: float) -> Tensor:
    """Computes the alignment: score ^ alpha * IoU ^ beta."""
    return _raise_power(score, alpha) * _raise_power(iou, beta)


def _raise_power(x: Tensor, exponent: float) -> Tensor:
    """Computes x ** exponent, small even powers by multiplication.

    Multiplication is several times faster on a CPU.
    """
    if exponent == 1:
        return x
    if exponent not in (2, 4, 6):
        return x.pow(exponent)
    square = power = x * x
    for _ in range(int(exponent) // 2 - 1):
        power = power * square
    return power


def _max_per_box(value_BS: Tensor, box_BS: Tensor, boxes: int) -> Tensor:
    """Returns the largest value of the slot's box, for each slot.

    Args: value_BS: >= 0.
    """
    best_BM = paddle.put_along_axis(
        paddle.zeros([value_BS.shape[0], boxes], dtype=value_BS.dtype),
        box_BS,
        value_BS,
        axis=1,
        reduce="amax",
    )
    return paddle.take_along_axis(best_BM, box_BS, axis=1)
