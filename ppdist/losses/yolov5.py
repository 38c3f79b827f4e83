"""The YOLOv5 loss: CIoU, objectness and class, over anchors matched by shape.

The matching uses position and shape only.  Every object gets three slots on each level, one for
each cell to which it may belong, whether it does or not; so no shape depends on values, and there
is no host synchronisation.

Letters: B images, M padded boxes, A anchors per level, S = 3 * M slots.
"""

from collections.abc import Iterator
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
LEVEL_WEIGHTS = {3: (4.0, 1.0, 0.4), 4: (4.0, 1.0, 0.25, 0.06)}  # of objectness, strides rising


class Matches(NamedTuple):
    """The slots of one level.

    Slot k * M + m is box m in its own cell, or its neighbour k.

    cell_BS: int64, row * width + column.
    is_positive_BAS: float32, 1 where the anchor of that cell learns the object, else 0.
    wins_BAS: float32, 1 where the slot is positive and no later slot has the same anchor and cell.
    target_BS4: the object as (centre x, centre y, width, height) in cells; the centre counts from
        the corner of the slot's cell.
    label_BS: int64.
    """

    cell_BS: Tensor
    is_positive_BAS: Tensor
    wins_BAS: Tensor
    target_BS4: Tensor
    label_BS: Tensor


class _Slots(NamedTuple):
    """Cells of the slots of one level, in cells, and which of them learn an object.

    x_BM, y_BM, wh_BM2: centres and sizes of the boxes.
    step_x_BM, step_y_BM: direction of the neighbours: -1, 1, or 0 for none.
    column_BS, row_BS: float32; is_positive_BAS: as in `Matches`.
    """

    x_BM: Tensor
    y_BM: Tensor
    wh_BM2: Tensor
    step_x_BM: Tensor
    step_y_BM: Tensor
    column_BS: Tensor
    row_BS: Tensor
    is_positive_BAS: Tensor


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
    """Matches the objects with the anchors of one level.

    An anchor fits a box if neither width nor height differ by a factor of `threshold` or more.  A
    box belongs to the cell of its centre, and to the neighbours in x and in y that are nearer than
    half a cell to the centre and lie in the grid; a centre exactly in the middle of a cell has no
    such neighbour.

    Args:
        boxes_BM4: xyxy input pixels, zero padded.
        labels_BM, mask_BM: int64 classes; 1 for a real box, 0 for padding.
        anchors_A2: width, height in cells.
        size: (height, width) of the level in cells.
        stride: pixels per cell.
    """
    slots = _place_slots(boxes_BM4, mask_BM, anchors_A2, size, stride, threshold)
    height, width = size
    cell_BS = (slots.row_BS * width + slots.column_BS).astype("int64")
    rank_BS = _slot_rank(slots.step_x_BM, slots.step_y_BM)
    from_cell_BS2 = paddle.stack(
        [
            slots.x_BM.tile([1, CELLS]) - slots.column_BS,
            slots.y_BM.tile([1, CELLS]) - slots.row_BS,
        ],
        axis=-1,
    )
    # Padding gets class 0, because it needs a valid index, too.
    labels_BM = labels_BM.astype("int64") * mask_BM.astype("int64")
    return Matches(
        cell_BS,
        slots.is_positive_BAS,
        _find_winners(cell_BS, slots.is_positive_BAS, rank_BS, height * width),
        paddle.concat([from_cell_BS2, slots.wh_BM2.tile([1, CELLS, 1])], axis=-1),
        labels_BM.tile([1, CELLS]),
    )


def _place_slots(
    boxes_BM4: Tensor,
    mask_BM: Tensor,
    anchors_A2: Tensor,
    size: tuple[int, int],
    stride: int,
    threshold: float,
) -> _Slots:
    """Finds the cells of all slots, and the positive ones.  Takes arguments of `match_anchors`."""
    height, width = size
    boxes_BM4 = boxes_BM4.astype("float32") / stride
    wh_BM2 = boxes_BM4[..., 2:] - boxes_BM4[..., :2]
    x_BM, y_BM = ((boxes_BM4[..., 2:] + boxes_BM4[..., :2]) * 0.5).unbind(-1)
    column_BM, row_BM = x_BM.floor(), y_BM.floor()
    step_x_BM = _neighbour_step(x_BM - column_BM, x_BM, width)
    step_y_BM = _neighbour_step(y_BM - row_BM, y_BM, height)
    column_BS = paddle.concat([column_BM, column_BM + step_x_BM, column_BM], axis=1)
    row_BS = paddle.concat([row_BM, row_BM, row_BM + step_y_BM], axis=1)
    # Only a centre on the far border is outside the grid; it belongs to the last cell.
    column_BS, row_BS = column_BS.clip(0, width - 1), row_BS.clip(0, height - 1)
    exists_BS = paddle.concat([paddle.ones_like(x_BM), step_x_BM.abs(), step_y_BM.abs()], axis=1)

    ratio_BAM2 = wh_BM2.unsqueeze(1) / anchors_A2.reshape([1, -1, 1, 2])
    max_ratio_BAM = paddle.maximum(ratio_BAM2, 1.0 / ratio_BAM2).max(-1)
    mask_B1M = mask_BM.unsqueeze(1).astype("float32")
    fits_BAM = (max_ratio_BAM < threshold).astype("float32") * mask_B1M
    is_positive_BAS = fits_BAM.tile([1, 1, CELLS]) * exists_BS.unsqueeze(1)
    return _Slots(x_BM, y_BM, wh_BM2, step_x_BM, step_y_BM, column_BS, row_BS, is_positive_BAS)


def _neighbour_step(fraction_BM: Tensor, place_BM: Tensor, cells: int) -> Tensor:
    """Returns the direction to the nearer neighbour along one axis: -1, 1, or 0 for none."""
    before_BM = (fraction_BM < 0.5) & (place_BM > 1)
    after_BM = (fraction_BM > 0.5) & (place_BM < cells - 1)
    return after_BM.astype("float32") - before_BM.astype("float32")


def _slot_rank(step_x_BM: Tensor, step_y_BM: Tensor) -> Tensor:
    """Returns the order [B, S] of an image's slots, int64.

    The original lists own cells, then left, upper, right and lower neighbours, in each group box by
    box, and each target overwrites the previous one, so that the last one stays.
    """
    boxes = step_x_BM.shape[1]
    kind_BS = paddle.concat(
        [paddle.zeros_like(step_x_BM), 2 + step_x_BM, 3 + step_y_BM], axis=1
    ).astype("int64")
    box_M = paddle.arange(boxes, dtype="int64")
    return kind_BS * boxes + box_M.tile([CELLS]).unsqueeze(0)


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
        positives = [
            _place_slots(boxes_BM4, mask_BM, *level, self.threshold).is_positive_BAS
            for level in self._levels(size)
        ]
        return _local_normalizers(boxes_BM4.shape[0], positives)

    def matches(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> list[Matches]:
        """Matches the objects with the anchors of every level.

        Args: size: (height, width) of the input in pixels.
        """
        return [
            match_anchors(boxes_BM4, labels_BM, mask_BM, *level, self.threshold)
            for level in self._levels(size)
        ]

    def _levels(self, size: tuple[int, int]) -> Iterator[tuple[Tensor, tuple[int, int], int]]:
        """Yields anchors_A2, size in cells and stride of each level for an input of this size."""
        for level, stride in enumerate(self.strides):
            cells = size[0] // stride, size[1] // stride
            yield self.anchors_LA2[level].astype("float32"), cells, stride

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
            levels = self.matches(boxes_BM4, labels_BM, mask_BM, size)
            if global_normalizers is None:
                positives = [level.is_positive_BAS for level in levels]
                global_normalizers = _local_normalizers(boxes_BM4.shape[0], positives)
            divisor = global_normalizers.clip(min=1.0).detach()
            weights = LEVEL_WEIGHTS[len(self.strides)]
            terms = []
            for level, (logits, matches) in enumerate(zip(maps, levels)):
                box, objectness, classes = self._score(
                    logits, matches, self.anchors_LA2[level].astype("float32")
                )
                per_match = 1.0 / divisor[1 + level]
                cells = self.anchors_LA2.shape[1] * logits.shape[2] * logits.shape[3]
                per_cell = weights[level] / (divisor[0] * cells)
                per_class = per_match / self.num_classes
                terms.append(
                    paddle.stack([box * per_match, objectness * per_cell, classes * per_class])
                )
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
                    anchors_A2 = self.anchors_LA2[level].astype("float32")
                    pred_BAN4 = _decode(student_BAKN[:, :, :4], anchors_A2)
                    target_BAN4 = _decode(teacher_BAKN[:, :, :4], anchors_A2)
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

    def _score(
        self, logits: Tensor, matches: Matches, anchors_A2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums 1 - CIoU, objectness and class losses of a level."""
        batch = logits.shape[0]
        logits_BAKN = self._predictions(logits)
        index_B11S = matches.cell_BS.reshape([batch, 1, 1, -1])
        slot_logits_BAKS = paddle.take_along_axis(logits_BAKN, index_B11S, axis=3)

        boxes_BAS4 = _decode(slot_logits_BAKS[:, :, :4], anchors_A2)
        target_B1S4 = cxcywh_to_xyxy(matches.target_BS4).unsqueeze(1)
        ciou_BAS = aligned_ciou(boxes_BAS4, target_B1S4)
        box = ((1.0 - ciou_BAS) * matches.is_positive_BAS).sum()

        # BCE(x, t) = softplus(x) - t x, and t is 0 except at the winning slots.
        target_BAS = ciou_BAS.detach().clip(min=0.0) * matches.wins_BAS
        negative = F.softplus(logits_BAKN[:, :, 4]).sum()
        objectness = negative - (target_BAS * slot_logits_BAKS[:, :, 4]).sum()

        class_BACS = slot_logits_BAKS[:, :, 5:]
        label_B11S = matches.label_BS.reshape([batch, 1, 1, -1])
        label_logit_BAS = paddle.take_along_axis(class_BACS, label_B11S, axis=2).squeeze(2)
        # Targets of the object's class and of the other classes.
        yes, no = 1.0 - 0.5 * self.label_smoothing, 0.5 * self.label_smoothing
        bce_BAS = (F.softplus(class_BACS) - no * class_BACS).sum(2) - (yes - no) * label_logit_BAS
        return box, objectness, (bce_BAS * matches.is_positive_BAS).sum()


def _local_normalizers(images: int, positives: list[Tensor]) -> Tensor:
    """Stacks the number of images and of matches on each level."""
    matches = [is_positive_BAS.sum() for is_positive_BAS in positives]
    return paddle.stack([paddle.full([], float(images)), *matches])


def _decode(logits_BA4S: Tensor, anchors_A2: Tensor) -> Tensor:
    """Decodes boxes [B, A, S, 4], xyxy in cells."""
    doubled = F.sigmoid(logits_BA4S).transpose([0, 1, 3, 2]) * 2.0
    wh = doubled[..., 2:].square() * anchors_A2.reshape([1, -1, 1, 2])
    return cxcywh_to_xyxy(paddle.concat([doubled[..., :2] - 0.5, wh], axis=-1))
