"""The PP-YOLOE loss: varifocal, GIoU and distribution focal loss.

Targets are assigned by ATSS in the first epochs, later by TAL.
"""

from typing import Any, NamedTuple, Protocol

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppdist.config.loss import PPYOLOELossConfig
from ppdist.losses.assigners import (
    Assignment,
    atss_assigner,
    flat_index,
    score_by_iou,
    take_boxes,
    task_aligned_assigner,
)
from ppdist.losses.base import NOMINAL_BATCH, Loss, LossOutput, Teaching, with_terms
from ppdist.losses.boxes import aligned_giou
from ppdist.losses.distillation import (
    confident_scores,
    features_distillation,
    localisation_distillation,
    quality_distillation,
)
from ppdist.models.outputs import PPYOLOEOutputs, anchor_points, decode_boxes

VARIFOCAL_ALPHA = 0.75  # weight of negative entries
# The values of the published recipes of all sizes (PaddleDetection, ppyoloe_crn.yml and
# ppyoloe_plus_crn.yml).
ATSS_TOPK = 9  # candidate cells per object and level
TAL_ALPHA, TAL_BETA = 1.0, 6.0  # exponents of the class score and of the IoU


def distribution_focal_loss(logits_BS4R: Tensor, target_BS4: Tensor) -> Tensor:
    """Computes the distribution focal loss, averaged over the four sides: [B, S].

        loss = -(r + 1 - y) * log p_r - (y - r) * log p_{r+1},   r = floor(y)

    Source: Li et al. 2020, arXiv:2006.04388, equation 6.

    Args:
        logits_BS4R: logits over the integer lengths 0..R-1; they get the gradient.
        target_BS4: true lengths y in the same unit (strides); clipped to [0, R - 1.01], so that
            a side too long for the bins learns the longest one.  No gradient.
    """
    bins = logits_BS4R.shape[-1]
    target_BS4 = target_BS4.detach().clip(0, bins - 1 - 0.01)
    low_BS4 = target_BS4.floor()
    high_share_BS4 = target_BS4 - low_BS4
    low_BS4 = low_BS4.astype("int64")
    low_one_hot = F.one_hot(low_BS4, bins)
    high_one_hot = F.one_hot(low_BS4 + 1, bins)
    target_BS4R = low_one_hot * (1 - high_share_BS4).unsqueeze(-1)
    target_BS4R += high_one_hot * high_share_BS4.unsqueeze(-1)
    return -(F.log_softmax(logits_BS4R, axis=-1) * target_BS4R).sum(-1).mean(-1)


def varifocal_loss(
    logits_BCN: Tensor,
    place_BS: Tensor,
    score_BS: Tensor,
    is_positive_BS: Tensor,
) -> Tensor:
    """Computes the varifocal loss, summed over all predictions and classes.

        negative: VARIFOCAL_ALPHA * p^2 * BCE(p, 0)   (weight not detached: it has a gradient)
        positive: q * BCE(p, q),                      q the soft label, only at the object's class

    One pass treats all entries as negative; the S positive entries are then replaced, so that
    neither one-hot labels nor soft labels of all predictions are needed.

    Args:
        logits_BCN: class logits; they get the gradient.
        place_BS: position of each slot's (image, class, prediction) in the flattened logits.
        score_BS: soft label q of each slot.
        is_positive_BS: 1 where the slot is positive, else 0.

    Returns: 0-D float32 sum.
    Source: Zhang et al. 2020, arXiv:2008.13367, equation 2.
    """
    chosen = paddle.gather(logits_BCN.flatten(), place_BS.flatten())
    score, is_positive = score_BS.flatten(), is_positive_BS.flatten()
    positive = score * (F.softplus(chosen) - score * chosen)  # BCE(p, q) = softplus(x) - q x
    exchange = is_positive * (positive - VARIFOCAL_ALPHA * _negative_loss(chosen))
    return VARIFOCAL_ALPHA * _negative_loss(logits_BCN).sum() + exchange.sum()


def _negative_loss(logits: Tensor) -> Tensor:
    """Computes p^2 * BCE(p, 0) of logits."""
    return F.sigmoid(logits).square() * F.softplus(logits)


class Truth(NamedTuple):
    """Padded ground truth of a micro-batch.

    boxes_BM4: xyxy input pixels; labels_BM: int64; mask_BM: 1 for a real box.
    """

    boxes_BM4: Tensor
    labels_BM: Tensor
    mask_BM: Tensor


class Predictions(NamedTuple):
    """Raw outputs of all levels, float32, with their cells."""

    logits_BCN: Tensor
    reg_dist_BN4R: Tensor  # logits over R lengths of each side
    points_N2: Tensor
    stride_N1: Tensor
    sizes: list[tuple[int, int]]  # of the levels, (height, width) in cells


class PPYOLOEModel(Protocol):
    """Attributes of the model that the loss needs; see `ppdist.models.ppyoloe.PPYOLOE`."""

    num_classes: int
    strides: tuple[int, ...]
    one_to_one_head: Any
    detach_auxiliary: bool


class PPYOLOELoss(Loss):
    """Loss of PP-YOLOE's raw outputs against padded ground truth.

    It is computed in float32 for outputs of any precision, without collectives and host
    synchronisation.  Every output gets a gradient even where no image has an object.
    """

    def __init__(
        self,
        config: PPYOLOELossConfig,
        *,
        num_classes: int,
        static_steps: int,
        attached_steps: int = 0,
        strides: tuple[int, ...] = (32, 16, 8),
        one_to_one: bool = False,
    ) -> None:
        """Sets the schedule of assigners and the model's levels.

        Args:
            num_classes: C; labels are in [0, C).
            static_steps: number of first optimizer steps in which ATSS assigns; then TAL does.
            attached_steps: optimizer steps before the auxiliary head is detached; see `prepare`.
            strides: pixels per cell of each output level, in the order of the outputs.
            one_to_one: True if the model has a one-to-one head.
        """
        super().__init__()
        self.config = config
        self.num_classes = num_classes
        self.static_steps = static_steps
        self.attached_steps = attached_steps
        self.strides = strides
        self.separate_keys = ("one_to_one_head.",) if one_to_one else ()

    @classmethod
    def build(
        cls,
        config: PPYOLOELossConfig,
        model: PPYOLOEModel,
        steps_per_epoch: float,
        reference_batch: int = NOMINAL_BATCH,
    ) -> "PPYOLOELoss":
        """Builds the loss of a `loss:` section for its model."""
        return cls(
            config,
            num_classes=model.num_classes,
            static_steps=round(config.static_assigner_epochs * steps_per_epoch),
            attached_steps=round(config.auxiliary_attached_epochs * steps_per_epoch),
            strides=model.strides,
            one_to_one=model.one_to_one_head is not None,
        )

    def prepare(self, model: PPYOLOEModel, step: int) -> None:
        """Detaches the auxiliary head after the epochs in which it helps.

        The trainer calls it before the forward passes of an optimizer step, on every rank.  Once
        detached, the head's gradient no longer reaches backbone and neck.
        """
        model.detach_auxiliary = step >= self.attached_steps

    def forward(
        self,
        outputs: PPYOLOEOutputs,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        """Computes the loss of one micro-batch; see `Loss.forward`.

            total = class_gain * VFL + sum of q * (box_gain * (1 - GIoU) + dfl_gain * DFL)

        q is the soft label of a prediction that learns an object, GIoU that of boxes, DFL the mean
        over four sides.  The loss of an auxiliary head is computed with the same assignment, so
        with the same q and normalizer, and added.  The loss of a one-to-one head has the same form;
        TAL assigns from the first step on, one prediction for each object, so its q and its
        normalizer differ.

        Returns: parts `loss_cls`, `loss_iou`, `loss_dfl` of the detector, and with an auxiliary
            head its total `loss_aux`; the normalizer is the sum of q.  With a one-to-one head,
            `separate_loss` is its loss with the total as its part `loss_one_to_one`.  For outputs
            without gradient, which only that head computes, its loss is the result.
        """
        with paddle.amp.auto_cast(enable=False):
            truth = _prepare_truth(boxes_BM4, labels_BM, mask_BM)
            # A validation: without a gradient, the model's outputs are those of the head that
            # predicts.
            if self.separate_keys and not outputs.one_class_logits:
                return self._one_to_one(outputs.class_logits, outputs.reg_dist, truth)
            result = self._one_to_many(outputs, truth, step)
            if not self.separate_keys:
                return result
            separate = self._one_to_one(outputs.one_class_logits, outputs.one_reg_dist, truth)
            parts = {"loss_one_to_one": separate.total.detach()}
            return result._replace(separate_loss=separate._replace(parts=parts))

    def _one_to_many(self, outputs: PPYOLOEOutputs, truth: Truth, step: int) -> LossOutput:
        """Computes the loss of the detector, plus that of the auxiliary head."""
        predictions, guide = _collect_predictions(outputs, self.strides)
        slots = self._assign(predictions, guide, truth, step)
        result = self._score(predictions, truth, slots)
        if guide is predictions:
            return result
        # The detector learns what the auxiliary head, which sees more, has chosen.
        auxiliary = self._score(guide, truth, slots).total
        return result._replace(
            total=result.total + auxiliary,
            parts={**result.parts, "loss_aux": auxiliary.detach()},
        )

    def _one_to_one(
        self, class_logits: tuple[Tensor, ...], reg_dist: tuple[Tensor, ...], truth: Truth
    ) -> LossOutput:
        """Computes the loss of the one-to-one head.

        Predictions are ranked by the alignment that TAL uses for the other head without an
        auxiliary head.  So the chosen prediction is also the best of the other head, as far as the
        heads agree: the consistent metric of YOLOv10 (arXiv:2405.14458, section 3.1).
        """
        outputs = PPYOLOEOutputs(class_logits, reg_dist)
        predictions, _ = _collect_predictions(outputs, self.strides)
        slots = self._assign_by_alignment(predictions, truth, topk=1)
        return self._score(predictions, truth, slots)

    def distil(
        self,
        output: LossOutput,
        outputs: PPYOLOEOutputs,
        taught: PPYOLOEOutputs,
        teaching: Teaching,
        global_normalizers: Tensor | None,
    ) -> LossOutput:
        """Adds a teacher's part to the loss; see `Loss.distil`.  Auxiliary heads are not taught.

        Class scores and distributions of all cells are learned; those of boxes are weighted by the
        teacher's best score of the cell.

        The features of an image are weighted by its part of the normalizer, by which the step
        divides: a weighted mean over all images of the step, unknown before the backward passes.
        """
        assert output.normalizer_B is not None, "as `forward` gives it"
        gains, terms = self.config, {}
        with paddle.amp.auto_cast(enable=False):
            student = _collect_predictions(outputs, self.strides)[0]
            teacher = _collect_predictions(taught, self.strides)[0]
            if term := teaching.logits:
                loss = quality_distillation(
                    student.logits_BCN, teacher.logits_BCN, term.temperature
                )
                terms["logits"] = term.weight * gains.class_gain * loss
            if term := teaching.features:
                loss = features_distillation(outputs.features, taught.features, term.temperature)
                loss = (loss * output.normalizer_B).sum()
                terms["features"] = term.weight * gains.box_gain * loss
            if term := teaching.boxes:
                score_BN = confident_scores(F.sigmoid(teacher.logits_BCN).max(1))
                loss = localisation_distillation(
                    student.reg_dist_BN4R, teacher.reg_dist_BN4R, score_BN, term.temperature
                )
                terms["boxes"] = term.weight * gains.dfl_gain * loss
            return with_terms(output, terms)

    @paddle.no_grad()
    def assign(
        self,
        outputs: PPYOLOEOutputs,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
    ) -> Assignment:
        """Returns the assignment that `forward` uses, for inspection; same arguments."""
        truth = _prepare_truth(boxes_BM4, labels_BM, mask_BM)
        return self._assign(*_collect_predictions(outputs, self.strides), truth, step)

    @paddle.no_grad()
    def _assign(
        self, predictions: Predictions, guide: Predictions, truth: Truth, step: int
    ) -> Assignment:
        """Assigns ground truth to cells, by ATSS or TAL.

        ATSS uses no predictions, and its soft labels come from the detector's boxes; TAL uses the
        predictions of the guide (so does the reference in either case).
        """
        if step < self.static_steps:
            slots = atss_assigner(
                truth.boxes_BM4,
                truth.mask_BM,
                guide.sizes,
                self.strides,
                guide.points_N2,
                guide.stride_N1,
                topk=ATSS_TOPK,
            )
            _, _, _, pred_BS4 = _decode_slots(predictions, slots.anchor_BS)
            return score_by_iou(slots, take_boxes(truth.boxes_BM4, slots.box_BS), pred_BS4)
        return self._assign_by_alignment(guide, truth, self.config.tal_topk)

    @paddle.no_grad()
    def _assign_by_alignment(self, guide: Predictions, truth: Truth, topk: int) -> Assignment:
        """Assigns ground truth to cells by TAL."""
        radius = self.config.tal_radius
        return task_aligned_assigner(
            F.sigmoid(guide.logits_BCN),
            decode_boxes(guide.reg_dist_BN4R, guide.points_N2, guide.stride_N1),
            guide.points_N2,
            *truth,
            topk=topk,
            alpha=TAL_ALPHA,
            beta=TAL_BETA,
            reach_N1=None if radius is None else guide.stride_N1 * radius,
        )

    def _score(self, predictions: Predictions, truth: Truth, slots: Assignment) -> LossOutput:
        """Computes the loss of predictions under an assignment."""
        label_BS = paddle.take_along_axis(truth.labels_BM, slots.box_BS, axis=1)
        place_BS = flat_index(label_BS, slots.anchor_BS, predictions.logits_BCN.shape)
        loss_cls = varifocal_loss(
            predictions.logits_BCN, place_BS, slots.score_BS, slots.is_positive_BS
        )
        points_BS2, stride_BS1, reg_dist_BS4R, pred_BS4 = _decode_slots(
            predictions, slots.anchor_BS
        )
        target_BS4 = take_boxes(truth.boxes_BM4, slots.box_BS)
        # In units of the stride, as in the reference.
        giou_BS = aligned_giou(pred_BS4 / stride_BS1, target_BS4 / stride_BS1)
        loss_iou = ((1.0 - giou_BS) * slots.score_BS).sum()
        outward_BS4 = paddle.concat(
            [points_BS2 - target_BS4[..., :2], target_BS4[..., 2:] - points_BS2], axis=-1
        )
        dfl_BS = distribution_focal_loss(reg_dist_BS4R, outward_BS4 / stride_BS1)
        loss_dfl = (dfl_BS * slots.score_BS).sum()
        gains = self.config
        parts = {"loss_cls": loss_cls, "loss_iou": loss_iou, "loss_dfl": loss_dfl}
        return LossOutput(
            total=gains.class_gain * loss_cls
            + gains.box_gain * loss_iou
            + gains.dfl_gain * loss_dfl,
            normalizer=slots.score_BS.sum(),
            parts={name: part.detach() for name, part in parts.items()},
            normalizer_B=slots.score_BS.sum(1),
        )


def _collect_predictions(
    outputs: PPYOLOEOutputs, strides: tuple[int, ...]
) -> tuple[Predictions, Predictions]:
    """Returns the detector's predictions, and the predictions that TAL uses to assign."""
    points_N2, stride_N1 = anchor_points(outputs.class_logits, strides)
    sizes = [(x.shape[2], x.shape[3]) for x in outputs.class_logits]

    def concatenate(class_logits: tuple[Tensor, ...], reg_dist: tuple[Tensor, ...]) -> Predictions:
        logits_BCN, reg_dist_BXN = (
            paddle.concat([x.flatten(2) for x in maps], axis=2).astype("float32")
            for maps in (class_logits, reg_dist)
        )
        reg_dist_BN4R = reg_dist_BXN.transpose([0, 2, 1]).reshape(
            [0, 0, 4, reg_dist_BXN.shape[1] // 4]
        )
        return Predictions(logits_BCN, reg_dist_BN4R, points_N2, stride_N1, sizes)

    predictions = concatenate(outputs.class_logits, outputs.reg_dist)
    if not outputs.aux_class_logits:
        return predictions, predictions
    return predictions, concatenate(outputs.aux_class_logits, outputs.aux_reg_dist)


def _prepare_truth(boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor) -> Truth:
    """Converts ground truth to float32 and int64."""
    # Padding gets class 0, because it needs a valid index, too.
    labels_BM = labels_BM.astype("int64") * mask_BM.astype("int64")
    return Truth(boxes_BM4.astype("float32"), labels_BM, mask_BM.astype("float32"))


def _decode_slots(
    predictions: Predictions, anchor_BS: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gathers points_BS2, stride_BS1, reg_dist_BS4R and boxes_BS4 of slots, with gradient."""
    batch, count, _, _ = predictions.reg_dist_BN4R.shape
    first_B1 = paddle.arange(batch, dtype="int64").unsqueeze(1) * count
    rows = (first_B1 + anchor_BS).flatten()
    chosen = paddle.gather(predictions.reg_dist_BN4R.flatten(0, 1), rows)
    reg_dist_BS4R = chosen.reshape([batch, -1, *chosen.shape[1:]])
    cells = anchor_BS.flatten()
    points_BS2 = paddle.gather(predictions.points_N2, cells).reshape([batch, -1, 2])
    stride_BS1 = paddle.gather(predictions.stride_N1, cells).reshape([batch, -1, 1])
    boxes_BS4 = decode_boxes(reg_dist_BS4R, points_BS2, stride_BS1)
    return points_BS2, stride_BS1, reg_dist_BS4R, boxes_BS4
