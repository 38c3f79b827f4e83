"""The YOLOv5 loss: CIoU, objectness and class, over anchors matched by shape.

The matching uses position and shape only.  Every object gets three slots on each level, one for
each cell to which it may belong, whether it does or not; so no shape depends on values, and there
is no host synchronisation.

All levels are matched and scored together: most of the time of these operators is their dispatch.

Letters: L levels, B images, M padded boxes, A anchors per level, S = 3 * M slots.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppdist.config.loss import YOLOv5LossConfig
from ppdist.losses.base import NOMINAL_BATCH, Loss, LossOutput, Teaching, Term, with_terms
from ppdist.losses.boxes import aligned_ciou, aligned_giou, cxcywh_to_xyxy
from ppdist.losses.distillation import binary_distillation, confident_scores, features_distillation
from ppdist.models.outputs import YOLOv5Outputs

CELLS = 3  # an object may belong to its own cell, to one neighbour in x and to one in y
_KEPT_PLACES = 16  # micro-batches of a step
LEVEL_WEIGHTS = {3: (4.0, 1.0, 0.4), 4: (4.0, 1.0, 0.25, 0.06)}  # of objectness, strides rising


class Matches(NamedTuple):
    """The slots of all levels.

    Slot k * M + m is box m in its own cell, or its neighbour k.

    cell_LBS: int64, row * width + column.
    is_positive_LBAS: float32, 1 where the anchor of that cell learns the object, else 0.
    wins_LBAS: float32, 1 where the slot is positive and no later slot has the same anchor and cell.
    target_LBS4: the object as (centre x, centre y, width, height) in cells; the centre counts from
        the corner of the slot's cell.
    label_BS: int64.
    """

    cell_LBS: Tensor
    is_positive_LBAS: Tensor
    wins_LBAS: Tensor
    target_LBS4: Tensor
    label_BS: Tensor


class _Grid(NamedTuple):
    """Sizes of the levels: pixels per cell, cells in a row, in a column, and in all."""

    stride_L111: Tensor
    width_L11: Tensor
    height_L11: Tensor
    cells: list[int]

    @classmethod
    def of(cls, strides: tuple[int, ...], size: tuple[int, int]) -> "_Grid":
        """Returns the levels of an input.  Args: size: (height, width) in pixels."""
        heights, widths = ([side // stride for stride in strides] for side in size)
        stride_L, width_L, height_L = (
            paddle.to_tensor(values, "float32") for values in (strides, widths, heights)
        )
        cells = [height * width for height, width in zip(heights, widths)]
        shape = [-1, 1, 1]
        return cls(
            stride_L.reshape([*shape, 1]), width_L.reshape(shape), height_L.reshape(shape), cells
        )


class _Slots(NamedTuple):
    """Cells of all slots, in cells, and which of them learn an object.

    x_LBM, y_LBM, wh_LBM2: centres and sizes of the boxes.
    step_x_LBM, step_y_LBM: direction of the neighbours: -1, 1, or 0 for none.
    column_LBS, row_LBS: float32; is_positive_LBAS: as in `Matches`.
    """

    x_LBM: Tensor
    y_LBM: Tensor
    wh_LBM2: Tensor
    step_x_LBM: Tensor
    step_y_LBM: Tensor
    column_LBS: Tensor
    row_LBS: Tensor
    is_positive_LBAS: Tensor


@paddle.no_grad()
def _match(slots: _Slots, labels_BM: Tensor, mask_BM: Tensor, grid: _Grid) -> Matches:
    """Matches the objects with the anchors, whose slots `_place_slots` has found.

    Args: labels_BM, mask_BM: int64 classes; 1 for a real box, 0 for padding.
    """
    cell_LBS = (slots.row_LBS * grid.width_L11 + slots.column_LBS).astype("int64")
    rank_LBS = _slot_rank(slots.step_x_LBM, slots.step_y_LBM)
    from_cell_LBS2 = paddle.stack(
        [
            slots.x_LBM.tile([1, 1, CELLS]) - slots.column_LBS,
            slots.y_LBM.tile([1, 1, CELLS]) - slots.row_LBS,
        ],
        axis=-1,
    )
    levels = (x.unbind(0) for x in (cell_LBS, slots.is_positive_LBAS, rank_LBS))
    wins = [_find_winners(*level) for level in zip(*levels, grid.cells)]
    # Padding gets class 0, because it needs a valid index, too.
    labels_BM = labels_BM.astype("int64") * mask_BM.astype("int64")
    return Matches(
        cell_LBS,
        slots.is_positive_LBAS,
        paddle.stack(wins),
        paddle.concat([from_cell_LBS2, slots.wh_LBM2.tile([1, 1, CELLS, 1])], axis=-1),
        labels_BM.tile([1, CELLS]),
    )


@paddle.no_grad()
def _place_slots(
    boxes_BM4: Tensor, mask_BM: Tensor, anchors_LA2: Tensor, grid: _Grid, threshold: float
) -> _Slots:
    """Finds the cells of all slots, and the positive ones.

    An anchor fits a box if neither width nor height differ by a factor of `threshold` or more.  A
    box belongs to the cell of its centre, and to the neighbours in x and in y that are nearer than
    half a cell to the centre and lie in the grid; a centre exactly in the middle of a cell has no
    such neighbour.

    Args:
        boxes_BM4: xyxy input pixels, zero padded.
        mask_BM: 1 for a real box, 0 for padding.
        anchors_LA2: width, height in cells.
    """
    boxes_LBM4 = boxes_BM4.astype("float32") / grid.stride_L111
    wh_LBM2 = boxes_LBM4[..., 2:] - boxes_LBM4[..., :2]
    x_LBM, y_LBM = ((boxes_LBM4[..., 2:] + boxes_LBM4[..., :2]) * 0.5).unbind(-1)
    column_LBM, row_LBM = x_LBM.floor(), y_LBM.floor()
    last_column_L11, last_row_L11 = grid.width_L11 - 1, grid.height_L11 - 1
    step_x_LBM = _neighbour_step(x_LBM - column_LBM, x_LBM, last_column_L11)
    step_y_LBM = _neighbour_step(y_LBM - row_LBM, y_LBM, last_row_L11)
    column_LBS = paddle.concat([column_LBM, column_LBM + step_x_LBM, column_LBM], axis=2)
    row_LBS = paddle.concat([row_LBM, row_LBM, row_LBM + step_y_LBM], axis=2)
    # Only a centre on the far border is outside the grid; it belongs to the last cell.
    column_LBS = paddle.minimum(column_LBS.clip(min=0), last_column_L11)
    row_LBS = paddle.minimum(row_LBS.clip(min=0), last_row_L11)
    exists_LBS = paddle.concat(
        [paddle.ones_like(x_LBM), step_x_LBM.abs(), step_y_LBM.abs()], axis=2
    )

    levels, anchors, _ = anchors_LA2.shape
    ratio_LBAM2 = wh_LBM2.unsqueeze(2) / anchors_LA2.reshape([levels, 1, anchors, 1, 2])
    max_ratio_LBAM = paddle.maximum(ratio_LBAM2, 1.0 / ratio_LBAM2).max(-1)
    mask_B1M = mask_BM.unsqueeze(1).astype("float32")
    fits_LBAM = (max_ratio_LBAM < threshold).astype("float32") * mask_B1M
    is_positive_LBAS = fits_LBAM.tile([1, 1, 1, CELLS]) * exists_LBS.unsqueeze(2)
    return _Slots(
        x_LBM, y_LBM, wh_LBM2, step_x_LBM, step_y_LBM, column_LBS, row_LBS, is_positive_LBAS
    )


def _neighbour_step(fraction_LBM: Tensor, place_LBM: Tensor, last_L11: Tensor) -> Tensor:
    """Returns the direction to the nearer neighbour along one axis: -1, 1, or 0 for none."""
    before_LBM = (fraction_LBM < 0.5) & (place_LBM > 1)
    after_LBM = (fraction_LBM > 0.5) & (place_LBM < last_L11)
    return after_LBM.astype("float32") - before_LBM.astype("float32")


def _slot_rank(step_x_LBM: Tensor, step_y_LBM: Tensor) -> Tensor:
    """Returns the order [L, B, S] of an image's slots, int64.

    The original lists own cells, then left, upper, right and lower neighbours, in each group box by
    box, and each target overwrites the previous one, so that the last one stays.
    """
    boxes = step_x_LBM.shape[2]
    kind_LBS = paddle.concat(
        [paddle.zeros_like(step_x_LBM), 2 + step_x_LBM, 3 + step_y_LBM], axis=2
    ).astype("int64")
    box_M = paddle.arange(boxes, dtype="int64")
    return kind_LBS * boxes + box_M.tile([CELLS])


def _find_winners(cell_BS: Tensor, is_positive_BAS: Tensor, rank_BS: Tensor, cells: int) -> Tensor:
    """Returns 1 for the highest-ranked positive slot of each anchor and cell, else 0."""
    shape = is_positive_BAS.shape
    cell_BAS = cell_BS.unsqueeze(1).expand(shape)
    rank_BAS = paddle.where(
        is_positive_BAS > 0, rank_BS.unsqueeze(1).expand(shape), paddle.full(shape, -1, "int64")
    )
    last_BAN = paddle.put_along_axis(
        paddle.full([shape[0], shape[1], cells], -1, "int64"),
        cell_BAS,
        rank_BAS,
        axis=2,
        reduce="amax",
    )
    last_BAS = paddle.take_along_axis(last_BAN, cell_BAS, axis=2)
    return is_positive_BAS * (last_BAS == rank_BAS).astype("float32")


class Gains(NamedTuple):
    """Weights of the three terms, scaled to image size, classes and levels."""

    box: float
    object: float
    classes: float


class YOLOv5Model(Protocol):
    """Attributes of the model that the loss needs; see `ppdist.models.yolov5.YOLOv5`."""

    num_classes: int
    strides: tuple[int, ...]
    image_size: tuple[int, int]
    anchor_threshold: ClassVar[float]
    head: Any  # its `anchors` [L, A, 2]: width, height in cells of their level


class YOLOv5Loss(Loss):
    """Loss of YOLOv5's raw outputs against padded ground truth.

    Every term is a mean over the batch of the step: `local_normalizers` gives the divisors, and the
    step divides by 1.  It is computed in float32 for outputs of any precision, without collectives
    and host synchronisation.  Every output gets a gradient even where no image has an object.
    """

    def __init__(
        self,
        gains: Gains,
        *,
        num_classes: int,
        strides: tuple[int, ...],
        anchors_LA2: Tensor,
        threshold: float,
        label_smoothing: float = 0.0,
        reference_batch: int = NOMINAL_BATCH,
    ) -> None:
        """Sets the gains and the model's levels.

        Args:
            num_classes: C; labels are in [0, C).
            strides: pixels per cell of each level, rising, in the order of the outputs.
            anchors_LA2: width, height in cells of their level; the model's own buffer, so that
                anchors set or loaded later count here, too.
            threshold: `anchor_threshold` of the model.
            label_smoothing: see YOLOv5LossConfig.
            reference_batch: images of a step for which the learning rate was tuned.
        """
        super().__init__()
        self.gains = gains
        self.num_classes = num_classes
        self.strides = strides
        self.anchors_LA2 = anchors_LA2
        self.threshold = threshold
        self.label_smoothing = label_smoothing
        self.reference_batch = reference_batch
        # Slots from `local_normalizers` for `forward`, with the boxes and mask.
        self._places = deque[tuple[Tensor, Tensor, tuple[int, int], _Slots]](maxlen=_KEPT_PLACES)
        self._grids: dict[tuple[int, int], _Grid] = {}

    @classmethod
    def build(
        cls,
        config: YOLOv5LossConfig,
        model: YOLOv5Model,
        steps_per_epoch: float,
        reference_batch: int = NOMINAL_BATCH,
    ) -> "YOLOv5Loss":
        """Builds the loss with the original's gains."""
        # The gains are those of three levels and 80 classes at 640 pixels.
        share = 3 / len(model.strides)
        gains = Gains(
            box=config.box_gain * share,
            object=config.object_gain * (max(model.image_size) / 640) ** 2 * share,
            classes=config.class_gain * model.num_classes / 80 * share,
        )
        return cls(
            gains,
            num_classes=model.num_classes,
            strides=model.strides,
            anchors_LA2=model.head.anchors,
            threshold=model.anchor_threshold,
            label_smoothing=config.label_smoothing,
            reference_batch=reference_batch,
        )

    @paddle.no_grad()
    def local_normalizers(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """Counts images, and matches of each level: float32 [1 + L]; see `Loss`."""
        slots = self._place(boxes_BM4, mask_BM, size)
        self._places.append((boxes_BM4, mask_BM, size, slots))
        return _local_normalizers(boxes_BM4.shape[0], slots.is_positive_LBAS)

    def _place(self, boxes_BM4: Tensor, mask_BM: Tensor, size: tuple[int, int]) -> _Slots:
        """Finds the slots.  Args: size: (height, width) of the input in pixels."""
        anchors_LA2 = self.anchors_LA2.astype("float32")
        return _place_slots(boxes_BM4, mask_BM, anchors_LA2, self._grid(size), self.threshold)

    def _grid(self, size: tuple[int, int]) -> _Grid:
        if size not in self._grids:
            self._grids[size] = _Grid.of(self.strides, size)
        return self._grids[size]

    def matches(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Matches:
        """Matches the objects with the anchors of all levels.

        Args: size: (height, width) of the input in pixels.
        """
        slots = self._take_slots(boxes_BM4, mask_BM, size)
        return _match(slots, labels_BM, mask_BM, self._grid(size))

    def _take_slots(self, boxes_BM4: Tensor, mask_BM: Tensor, size: tuple[int, int]) -> _Slots:
        """Takes the slots that `local_normalizers` found for these very tensors, or finds them."""
        for at, (placed_BM4, placed_BM, placed_size, slots) in enumerate(self._places):
            if placed_BM4 is boxes_BM4 and placed_BM is mask_BM and placed_size == size:
                del self._places[at]
                return slots
        return self._place(boxes_BM4, mask_BM, size)

    def forward(
        self,
        outputs: YOLOv5Outputs,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        """Computes the loss of one micro-batch; see `Loss.forward`.

            total = reference_batch * sum over levels of
                gain_box * mean over matches of (1 - CIoU)
                + gain_object * level weight * mean over all predictions of BCE(objectness, t)
                + gain_class * mean over matches and classes of BCE(class, label)

        t is the CIoU of a matched prediction, at least 0, and 0 elsewhere.  The original multiplies
        by the images of its batch and keeps the learning rate; here the factor is the batch for
        which the rate was tuned, and the rate scales with the batch, which gives the same update.

        Args:
            global_normalizers: the step's sum of `local_normalizers`; None: this micro-batch is the
                whole step.

        Returns: parts `loss_box`, `loss_obj`, `loss_cls`, gains included, which add up to the
            mean loss of the step; the normalizer is 0.
        """
        with paddle.amp.auto_cast(enable=False):
            maps = outputs.logits
            size = maps[0].shape[2] * self.strides[0], maps[0].shape[3] * self.strides[0]
            matches = self.matches(boxes_BM4, labels_BM, mask_BM, size)
            if global_normalizers is None:
                is_positive_LBAS = matches.is_positive_LBAS
                global_normalizers = _local_normalizers(boxes_BM4.shape[0], is_positive_LBAS)
            divisor = global_normalizers.clip(min=1.0).detach()
            sums_3L = self._score(maps, matches)
            per_match_L = 1.0 / divisor[1:]
            per_cell_L = paddle.stack(
                [
                    weight / (divisor[0] * (self.anchors_LA2.shape[1] * cells))
                    for weight, cells in zip(
                        LEVEL_WEIGHTS[len(self.strides)], self._grid(size).cells
                    )
                ]
            )
            factors = [per_match_L, per_cell_L, per_match_L / self.num_classes]
            terms = (sums_3L * paddle.stack(factors)).unbind(1)
            box, objectness, classes = paddle.add_n(terms).unbind(0)
            parts = {
                "loss_box": box * self.gains.box,
                "loss_obj": objectness * self.gains.object,
                "loss_cls": classes * self.gains.classes,
            }
            return LossOutput(
                total=self.reference_batch * paddle.add_n(list(parts.values())),
                normalizer=paddle.zeros([]),
                parts={name: part.detach() for name, part in parts.items()},
            )

    def teacher_mismatch(self, teacher: YOLOv5Model) -> str:
        """Explains why a teacher does not fit; "" if it does.

        Its anchors have to be the student's, because they determine the size that a logit means.
        """
        student_LA2, teacher_LA2 = (
            anchors.astype("float32") for anchors in (self.anchors_LA2, teacher.head.anchors)
        )
        if bool(paddle.allclose(student_LA2, teacher_LA2, rtol=1e-3)):
            return ""
        pixels = [(x * stride).numpy().tolist() for x, stride in zip(teacher_LA2, self.strides)]
        shown = [[[round(side, 2) for side in anchor] for anchor in level] for level in pixels]
        return (
            f"its anchors are others than the student's, so its outputs mean other boxes; give "
            f"both the same: model.anchors={shown}"
        )

    def distil(
        self,
        output: LossOutput,
        outputs: YOLOv5Outputs,
        taught: YOLOv5Outputs,
        teaching: Teaching,
        global_normalizers: Tensor | None,
    ) -> LossOutput:
        """Adds a teacher's part to the loss, with the divisors of `forward`; see `Loss.distil`.

            logits   = gain_object * level weight * mean over all predictions of KL(objectness)
                       + gain_class * sum(o * KL(classes)) / (matches of a level * C)
            boxes    = gain_box * sum(o * (1 - GIoU)) / matches of a level
            features = gain_box * mean over images

        o is the teacher's objectness where it is confident, else 0; matches is the number of
        matches of the ground truth, averaged over levels.
        Source: Mehta and Ozturk 2018, arXiv:1805.06361, section 3.3 (scaled by objectness).
        """
        assert global_normalizers is not None, "the step counts"
        terms: dict[str, Tensor] = {}
        with paddle.amp.auto_cast(enable=False):
            images = global_normalizers[0].clip(min=1.0)
            matches = global_normalizers[1:].mean().clip(min=1.0)
            logits, boxes = [], []
            for level in range(len(self.strides)):
                student_BAKN = self._predictions(outputs.logits[level])
                teacher_BAKN = self._predictions(taught.logits[level])
                weight_BAN = confident_scores(F.sigmoid(teacher_BAKN[:, :, 4]))
                if term := teaching.logits:
                    logits.append(
                        self._logit_terms(student_BAKN, teacher_BAKN, weight_BAN, term, level)
                        / paddle.stack([images, matches])
                    )
                if teaching.boxes:
                    anchors_A12 = self.anchors_LA2[level].astype("float32").unsqueeze(1)
                    pred_BAN4 = _decode(student_BAKN[:, :, :4], anchors_A12)
                    target_BAN4 = _decode(teacher_BAKN[:, :, :4], anchors_A12)
                    giou_BAN = aligned_giou(pred_BAN4, target_BAN4.detach())
                    boxes.append(((1.0 - giou_BAN) * weight_BAN).sum())
            if term := teaching.logits:
                terms["logits"] = term.weight * paddle.add_n(logits).sum()
            if term := teaching.features:
                loss = features_distillation(outputs.features, taught.features, term.temperature)
                terms["features"] = term.weight * self.gains.box * loss.sum() / images
            if term := teaching.boxes:
                terms["boxes"] = term.weight * self.gains.box * paddle.add_n(boxes) / matches
            return with_terms(output, terms, self.reference_batch)

    def _predictions(self, logits: Tensor) -> Tensor:
        """Reshapes the logits of one level to [B, A, 5 + C, cells] float32."""
        shape = [logits.shape[0], self.anchors_LA2.shape[1], 5 + self.num_classes, -1]
        return logits.astype("float32").reshape(shape)

    def _logit_terms(
        self, student_BAKN: Tensor, teacher_BAKN: Tensor, weight_BAN: Tensor, term: Term, level: int
    ) -> Tensor:
        """Sums the distillation of objectness and classes on a level, gains included; [2].

        The caller divides by the images and by the matches.
        """
        kl_BAKN = binary_distillation(
            student_BAKN[:, :, 4:], teacher_BAKN[:, :, 4:], term.temperature
        )
        objectness_BAN = kl_BAKN[:, :, 0]
        balance = LEVEL_WEIGHTS[len(self.strides)][level]
        cells = objectness_BAN.shape[1] * objectness_BAN.shape[2]
        objectness = objectness_BAN.sum() * (self.gains.object * balance / cells)
        classes = (kl_BAKN[:, :, 1:].sum(2) * weight_BAN).sum()
        return paddle.stack([objectness, classes * (self.gains.classes / self.num_classes)])

    def _score(self, maps: Sequence[Tensor], matches: Matches) -> Tensor:
        """Sums 1 - CIoU, objectness and class losses of each level, [3, L]."""
        slot_logits, negatives = [], []
        for logits, cell_BS in zip(maps, matches.cell_LBS.unbind(0)):
            logits_BAKN = self._predictions(logits)
            index_B11S = cell_BS.reshape([cell_BS.shape[0], 1, 1, -1])
            slot_logits.append(paddle.take_along_axis(logits_BAKN, index_B11S, axis=3))
            negatives.append(F.softplus(logits_BAKN[:, :, 4]).sum())
        slot_logits_LBAKS = paddle.stack(slot_logits)

        levels, anchors, _ = self.anchors_LA2.shape
        anchors_L1A12 = self.anchors_LA2.astype("float32").reshape([levels, 1, anchors, 1, 2])
        boxes_LBAS4 = _decode(slot_logits_LBAKS[:, :, :, :4], anchors_L1A12)
        target_LB1S4 = cxcywh_to_xyxy(matches.target_LBS4).unsqueeze(2)
        ciou_LBAS = aligned_ciou(boxes_LBAS4, target_LB1S4)
        boxes = _sum_levels((1.0 - ciou_LBAS) * matches.is_positive_LBAS)

        # BCE(x, t) = softplus(x) - t x, and t is 0 except at the winning slots.
        target_LBAS = ciou_LBAS.detach().clip(min=0.0) * matches.wins_LBAS
        positives = _sum_levels(target_LBAS * slot_logits_LBAKS[:, :, :, 4])
        objects = [negative - positive for negative, positive in zip(negatives, positives)]

        class_LBACS = slot_logits_LBAKS[:, :, :, 5:]
        label_LB11S = matches.label_BS.unsqueeze([1, 2]).expand([levels, -1, 1, 1, -1])
        label_logit_LBAS = paddle.take_along_axis(class_LBACS, label_LB11S, axis=3).squeeze(3)
        # Targets of the object's class and of the other classes.
        yes, no = 1.0 - 0.5 * self.label_smoothing, 0.5 * self.label_smoothing
        bce_LBAS = (F.softplus(class_LBACS) - no * class_LBACS).sum(3)
        bce_LBAS = bce_LBAS - (yes - no) * label_logit_LBAS
        classes = _sum_levels(bce_LBAS * matches.is_positive_LBAS)
        return paddle.stack([*boxes, *objects, *classes]).reshape([3, levels])


def _sum_levels(values_LBAS: Tensor) -> list[Tensor]:
    """Sums each level by itself: in one operator, sums would round in another order."""
    return [values_BAS.sum() for values_BAS in values_LBAS.unbind(0)]


def _local_normalizers(images: int, is_positive_LBAS: Tensor) -> Tensor:
    """Returns the number of images and of matches on each level, [1 + L]."""
    matches_L = is_positive_LBAS.sum([1, 2, 3])
    return paddle.concat([paddle.full([1], float(images)), matches_L])


def _decode(logits_XA4S: Tensor, anchors_XA12: Tensor) -> Tensor:
    """Decodes boxes [X, A, S, 4], xyxy in cells; X are any number of axes."""
    doubled = F.sigmoid(logits_XA4S).swapaxes(-1, -2) * 2.0
    wh = doubled[..., 2:].square() * anchors_XA12
    return cxcywh_to_xyxy(paddle.concat([doubled[..., :2] - 0.5, wh], axis=-1))
