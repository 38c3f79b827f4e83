"""The loss of RT-DETR and D-FINE, for queries matched with boxes.

All outputs with queries have a loss: each decoder layer, the encoder's selection, D-FINE's boxes
before refinement, and the same outputs of the denoising queries.

Nothing depends on which images share a micro-batch.  The originals divide by a number of the whole
batch that depends on predictions, and give all images the number of denoising groups for which the
fullest has room; here each image has its own number.  For one image in the batch the two agree.

Letters: B images, Q queries (denoising ones, too), M padded boxes, C classes, R bins.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppdist.config.loss import RTDETRLossConfig
from ppdist.losses.base import NOMINAL_BATCH, Loss, LossOutput, Teaching, with_terms
from ppdist.losses.boxes import aligned_giou, aligned_iou, cxcywh_to_xyxy, xyxy_to_cxcywh
from ppdist.losses.distillation import (
    confident_scores,
    features_distillation,
    localisation_distillation,
    quality_distillation,
)
from ppdist.losses.matcher import Costs, Matching, Truth, hungarian_matcher, matching_cost
from ppdist.models import functional
from ppdist.models.outputs import Refined, RTDETROutputs, weighting

DDF_TEMPERATURE = 5.0  # of the distributions that layers compare
# The values of the published recipes of RT-DETR, RT-DETRv2, D-FINE and DEIM, all sizes.
NEGATIVE_ALPHA = 0.75  # varifocal: weight of negative entries
GAMMA = {"varifocal": 2.0, "mal": 1.5}  # exponent of the score (mal: of the IoU, too)
L1_GAIN, GIOU_GAIN = 5.0, 2.0  # weights of the distance of centre and size, in 0..1, and of GIoU
# D-FINE: weights of the fine-grained localization loss, and of learning from the last layer.
FGL_GAIN, DDF_GAIN = 0.15, 1.5


class Learned(NamedTuple):
    """Matching and weights of the queries of L outputs.

    classes, boxes: object of each query, for the class loss and for all other losses; L may be 1
        for all outputs.
    used_BQ: float32, 0 where a denoising query is padding, else 1.
    class_share_B, box_share_B: factors of an image's sums of these losses.
    positive_share_B: weight of the positive queries in what layers learn from the last one.
    """

    classes: Matching
    boxes: Matching
    used_BQ: Tensor
    class_share_B: Tensor
    box_share_B: Tensor
    positive_share_B: Tensor


def fine_grained_localization_loss(
    corners_BQ4R: Tensor, reference_BQ4: Tensor, target_BQ4: Tensor, bins_R: Tensor, scale_1: Tensor
) -> Tensor:
    """Computes the cross entropy of side distributions, summed over the four sides: [B, Q].

        loss = sum over sides of -(1 - s) log p_r - s log p_{r+1},  d = W(r) + s (W(r+1) - W(r))

    d is the distance that the side has to move, in units of the reference's width (height) / scale.
    A side that has to move further than the last bins learns these.

    Args:
        corners_BQ4R: logits over the bins, sides left, top, right, bottom; they get the gradient.
        reference_BQ4: the boxes to be moved, cxcywh.
        target_BQ4: their targets, cxcywh in the same unit; no gradient.
        bins_R: W, rising.
    Source: Peng et al. 2024, arXiv:2410.13842, section 4.1 (FGL without its weight).
    """
    target_BQ4 = cxcywh_to_xyxy(target_BQ4)
    centre_BQ2, unit_BQ2 = reference_BQ4[..., :2], reference_BQ4[..., 2:] / scale_1 + 1e-16
    outward_BQ4 = paddle.concat(
        [
            (centre_BQ2 - target_BQ4[..., :2]) / unit_BQ2,
            (target_BQ4[..., 2:] - centre_BQ2) / unit_BQ2,
        ],
        axis=-1,
    )
    distance_BQ4 = (outward_BQ4 - 0.5 * scale_1).detach()
    # Index of the last bin that moves a side no further than this distance, plus 1.
    reached = paddle.searchsorted(bins_R, distance_BQ4, right=True)
    low_BQ4 = (reached - 1).clip(0, bins_R.shape[0] - 2)
    low_W = paddle.gather(bins_R, low_BQ4.flatten()).reshape(low_BQ4.shape)
    high_W = paddle.gather(bins_R, low_BQ4.flatten() + 1).reshape(low_BQ4.shape)
    high_share_BQ4 = ((distance_BQ4 - low_W) / (high_W - low_W)).clip(0, 1)
    log_p_BQ4R = functional.log_softmax(corners_BQ4R)
    low, high = (
        log_p_BQ4R.take_along_axis(bin_BQ4.unsqueeze(-1), -1).squeeze(-1)
        for bin_BQ4 in (low_BQ4, low_BQ4 + 1)
    )
    return -((1 - high_share_BQ4) * low + high_share_BQ4 * high).sum(-1)


class RTDETRModel(Protocol):
    """Attributes of the model that the loss needs; see `ppdist.models.rtdetr.RTDETR`."""

    decoder: Any  # `dfine`, and if so `up` and `reg_scale`, [1] each


class RTDETRLoss(Loss):
    """Loss of the queries of all layers against padded ground truth.

    All terms are divided here, by numbers that follow from the targets of the whole step; the step
    divides by 1.  It is computed in float32 for outputs of any precision, without collectives.
    Every output gets a gradient even where no image has an object.

    It waits for the device once in `forward`, and once more in `distil`: see `hungarian_matcher`.
    """

    def __init__(
        self,
        config: RTDETRLossConfig,
        *,
        up_1: Tensor | None = None,
        reg_scale_1: Tensor | None = None,
    ) -> None:
        """Sets the gains and the model's bins.

        Args:
            up_1, reg_scale_1: D-FINE: arguments of the model's `weighting`; its own tensors, so
                that values loaded later count here, too.
        """
        super().__init__()
        self.config = config
        self.costs = Costs(classes=2.0, l1=5.0, giou=2.0)  # of the same recipes
        self.gamma = GAMMA[config.classification]
        self.up_1, self.reg_scale_1 = up_1, reg_scale_1

    @classmethod
    def build(
        cls,
        config: RTDETRLossConfig,
        model: RTDETRModel,
        steps_per_epoch: float,
        reference_batch: int = NOMINAL_BATCH,
    ) -> "RTDETRLoss":
        """Builds the loss with the model's bins."""
        if not model.decoder.dfine:
            return cls(config)
        return cls(config, up_1=model.decoder.up, reg_scale_1=model.decoder.reg_scale)

    @paddle.no_grad()
    def local_normalizers(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """Counts boxes and images: float32 [2]; see `Loss.local_normalizers`."""
        images = paddle.full([], float(mask_BM.shape[0]))
        return paddle.stack([mask_BM.astype("float32").sum(), images])

    def forward(
        self,
        outputs: RTDETROutputs,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        """Computes the loss of one micro-batch, the sum of all `terms`; see `Loss.forward`.

        Args:
            global_normalizers: the step's sum of `local_normalizers`; None: this micro-batch is the
                whole step.

        Returns: parts `loss_cls`, `loss_l1`, `loss_giou` and with D-FINE `loss_fgl`, `loss_ddf`,
            sums over all matched outputs, and `loss_denoising`, the sum of the terms of denoising
            queries.  Gains included, they add up to the mean loss of the step; the normalizer is 0.
        """
        truth = boxes_BM4, labels_BM, mask_BM
        matched, denoised = self.terms(outputs, *truth, global_normalizers)
        parts = {f"loss_{name}": term.sum() for name, term in matched.items()}
        if denoised:
            parts["loss_denoising"] = paddle.concat(list(denoised.values())).sum()
        return LossOutput(
            total=paddle.add_n(list(parts.values())),
            normalizer=paddle.zeros([]),
            parts={name: part.detach() for name, part in parts.items()},
        )

    def terms(
        self,
        outputs: RTDETROutputs,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        global_normalizers: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Computes the terms of each output, gains included; arguments as in `forward`.

            cls  = class_gain / N * sum of the varifocal or matchability-aware loss
            l1   = L1_GAIN / N * sum over positives of |b - b*|_1
            giou = GIOU_GAIN / N * sum over positives of 1 - GIoU
            fgl  = FGL_GAIN / N * sum over positives of IoU * FGL
            ddf  = DDF_GAIN / I * sum over images of DDF

        N and I are boxes and images of the step.  Positives are those of an output's own matching;
        with D-FINE's distributions they are those of the union of all outputs, except in cls, and
        an image of n boxes then counts its mean over the union n times.  A denoising query learns
        the box it was made from, and its image counts 1 / (number of its denoising groups).

        Returns: terms of layers, encoder and preliminary, in this order, [L] each (fgl: of the
            layers, ddf: one for all of them); the same terms of the denoising queries, if any.
        Sources: Zhao et al. 2023, arXiv:2304.08069, section 4.3; Peng et al. 2024,
            arXiv:2410.13842, section 4.
        """
        with paddle.amp.auto_cast(enable=False):
            truth = _prepare_truth(boxes_BM4, labels_BM, mask_BM, outputs.size_4)
            if global_normalizers is None:
                global_normalizers = self.local_normalizers(boxes_BM4, labels_BM, mask_BM, (0, 0))
            divisors = global_normalizers.clip(min=1.0).detach()
            scored = [*outputs.layers, outputs.encoder]
            if outputs.preliminary is not None:
                scored.append(outputs.preliminary)
            learned = self._match(scored, truth, outputs.size_4)
            matched = self._score(scored, learned, truth, outputs.size_4, divisors)
            if (denoised := outputs.denoised) is None:
                return matched, {}
            matching = Matching(denoised.target_BD.unsqueeze(0), denoised.positive_BD.unsqueeze(0))
            share_B = 1.0 / denoised.groups_B
            used_BD = denoised.positive_BD + denoised.negative_BD
            denoising_learned = Learned(
                matching, matching, used_BD, share_B, share_B, learned.positive_share_B
            )
            scored = [*denoised.layers]
            if denoised.preliminary is not None:
                scored.append(denoised.preliminary)
            return matched, self._score(scored, denoising_learned, truth, outputs.size_4, divisors)

    @paddle.no_grad()
    def _match(self, scored: list[Refined], truth: Truth, size_4: Tensor) -> Learned:
        """Matches the queries of all outputs with the boxes."""
        cost_LBQM = matching_cost(*_stack_outputs(scored), size_4, truth, self.costs)
        own_matching, union = hungarian_matcher(cost_LBQM, truth.mask_BM)
        union_B, count_B = union.is_positive_LBQ.sum([0, 2]), truth.mask_BM.sum(1)
        used_BQ = paddle.ones_like(union.is_positive_LBQ[0])
        positive_B, negative_B = union_B.sqrt(), (used_BQ.sum(1) - union_B).sqrt()
        in_bins = scored[0].corners_BQ4R is not None
        one_B = paddle.ones_like(count_B)
        return Learned(
            classes=own_matching,
            boxes=union if in_bins else own_matching,
            used_BQ=used_BQ,
            class_share_B=one_B,
            box_share_B=count_B / union_B.clip(min=1.0) if in_bins else one_B,
            positive_share_B=positive_B / (positive_B + negative_B),
        )

    def _score(
        self,
        scored: list[Refined],
        learned: Learned,
        truth: Truth,
        size_4: Tensor,
        divisors_2: Tensor,
    ) -> dict[str, Tensor]:
        """Computes the terms of outputs with the same number of queries; see `terms`.

        Args: divisors_2: boxes and images of the step.
        """
        boxes, images = divisors_2.unbind(0)
        logits_LBQC, pred_LBQ4 = _stack_outputs(scored)
        pixels_LBQ4 = cxcywh_to_xyxy(pred_LBQ4 * size_4)

        target = _gather_per_query(truth.boxes_BM4, learned.classes.box_LBQ)
        iou_LBQ = aligned_iou(pixels_LBQ4.detach(), cxcywh_to_xyxy(target * size_4))
        cls_LB = self._class_loss(logits_LBQC, iou_LBQ, learned, truth.labels_BM)

        # With D-FINE, boxes learn the union of all matchings, classes the matching of their own
        # output.
        target = _gather_per_query(truth.boxes_BM4, learned.boxes.box_LBQ)
        l1_LBQ, giou_LBQ = _box_losses(pred_LBQ4, target, learned.boxes, size_4)
        share_B = learned.box_share_B
        terms = {
            "cls": self.config.class_gain / boxes * (cls_LB * learned.class_share_B).sum(-1),
            "l1": L1_GAIN / boxes * (l1_LBQ.sum(-1) * share_B).sum(-1),
            "giou": GIOU_GAIN / boxes * (giou_LBQ.sum(-1) * share_B).sum(-1),
        }
        # The encoder and the preliminary boxes have no distributions, and come after the layers.
        layers = [output for output in scored if output.corners_BQ4R is not None]
        if not layers:
            return terms
        iou_LBQ = aligned_iou(pixels_LBQ4[: len(layers)].detach(), cxcywh_to_xyxy(target * size_4))
        iou_LBQ = iou_LBQ * learned.boxes.is_positive_LBQ
        corners = [
            output.corners_BQ4R.astype("float32")
            for output in layers
            if output.corners_BQ4R is not None
        ]
        reference = paddle.stack([output.reference_BQ4 for output in layers]).astype("float32")
        bins_R = weighting(self.up_1, self.reg_scale_1)
        fgl_LBQ = fine_grained_localization_loss(
            paddle.stack(corners), reference, target, bins_R, self.reg_scale_1
        )
        fgl_LB = (fgl_LBQ * iou_LBQ).sum(-1) * share_B
        terms["fgl"] = FGL_GAIN / boxes * fgl_LB.sum(-1)
        if len(layers) > 1:
            weight_LBQ = _distillation_weights(iou_LBQ[:-1], logits_LBQC[len(layers) - 1], learned)
            *students, teacher = corners
            # One by one: on a CPU, Paddle broadcasts one teacher for all in ten times as long.
            ddf = [
                localisation_distillation(student, teacher.detach(), weight_BQ, DDF_TEMPERATURE)
                for student, weight_BQ in zip(students, weight_LBQ.unbind(0), strict=True)
            ]
            terms["ddf"] = DDF_GAIN / images * paddle.add_n(ddf).unsqueeze(0)
        return terms

    def _class_loss(
        self, logits_LBQC: Tensor, iou_LBQ: Tensor, learned: Learned, labels_BM: Tensor
    ) -> Tensor:
        """Sums the class loss over queries and classes: [L, B].

            varifocal, negative: alpha * p^gamma * BCE(p, 0)    positive: q * BCE(p, q)
            mal,       negative:         p^gamma * BCE(p, 0)    positive: BCE(p, q^gamma)

        p is the score, in weights without gradient; q is the IoU of a positive with its
        object.  All entries count as negative first; the positive entries are then corrected.
        Sources: Zhang et al. 2020, arXiv:2008.13367, equation 2; Huang et al. 2024,
        arXiv:2412.04234, section 3.3.
        """
        mal = self.config.classification == "mal"
        alpha = 1.0 if mal else NEGATIVE_ALPHA

        def negative(logits: Tensor) -> Tensor:
            bce = F.softplus(logits)
            # log p = logits - bce; using a power here would take twice as long on a CPU
            return alpha * paddle.exp(self.gamma * (logits - bce)).detach() * bce

        label_LBQ = _gather_per_query(labels_BM, learned.classes.box_LBQ)
        label_logit_LBQ = logits_LBQC.take_along_axis(label_LBQ.unsqueeze(-1), 3).squeeze(-1)
        quality_LBQ, weight_LBQ = (iou_LBQ**self.gamma, 1.0) if mal else (iou_LBQ, iou_LBQ)
        positive_LBQ = weight_LBQ * (F.softplus(label_logit_LBQ) - quality_LBQ * label_logit_LBQ)
        correction_LBQ = (
            positive_LBQ - negative(label_logit_LBQ)
        ) * learned.classes.is_positive_LBQ
        return (negative(logits_LBQC).sum(-1) * learned.used_BQ + correction_LBQ).sum(-1)

    def distil(
        self,
        output: LossOutput,
        outputs: RTDETROutputs,
        taught: RTDETROutputs,
        teaching: Teaching,
        global_normalizers: Tensor | None,
    ) -> LossOutput:
        """Adds a teacher's part to the loss; see `Loss.distil`.

        The last layer of the student learns from the teacher's last.  The teacher's confident boxes
        are matched like ground-truth boxes, and a query of the student learns from the teacher's
        query with which it is matched:

            logits   = class_gain / N * sum over pairs of the quality focal loss
            boxes    = 1 / N * sum over pairs of score * (L1_GAIN * |b - b*|_1
                                                         + GIOU_GAIN * (1 - GIoU))
            features = GIOU_GAIN * mean over images

        N is the number of true boxes in the step.  The teacher may have another number of queries,
        layers and bins.
        Source: Chang et al. 2022, arXiv:2211.10156 (Hungarian-matching logits distillation, its
        positives).
        """
        assert global_normalizers is not None, "the step counts"
        class_gain, terms = self.config.class_gain, {}
        with paddle.amp.auto_cast(enable=False):
            boxes, images = global_normalizers.clip(min=1.0).unbind(0)
            student_layers, teacher_layers = outputs.layers[-1:], taught.layers[-1:]
            logits_1BQC, pred_1BQ4 = _stack_outputs(student_layers)
            score_BM, truth = _confident_objects(*_stack_outputs(teacher_layers))
            cost = matching_cost(logits_1BQC, pred_1BQ4, outputs.size_4, truth, self.costs)
            matching, _ = hungarian_matcher(cost, truth.mask_BM)
            is_matched_BQ1 = matching.is_positive_LBQ[0].unsqueeze(-1)
            if term := teaching.logits:
                teacher_logits_BQC = _gather_per_query(
                    teacher_layers[0].logits_BQC.astype("float32"), matching.box_LBQ
                )[0]
                # Queries without a match are 0 on both sides, so they add nothing to the loss.
                pair = logits_1BQC[0] * is_matched_BQ1, teacher_logits_BQC * is_matched_BQ1
                loss = quality_distillation(*pair, term.temperature)
                terms["logits"] = term.weight * class_gain / boxes * loss
            if term := teaching.boxes:
                target_1BQ4 = _gather_per_query(truth.boxes_BM4, matching.box_LBQ)
                l1, giou = _box_losses(pred_1BQ4, target_1BQ4, matching, outputs.size_4)
                loss = L1_GAIN * l1 + GIOU_GAIN * giou
                score_1BQ = _gather_per_query(score_BM.unsqueeze(-1), matching.box_LBQ).squeeze(-1)
                terms["boxes"] = term.weight / boxes * (loss * score_1BQ).sum()
            if term := teaching.features:
                loss = features_distillation(outputs.features, taught.features, term.temperature)
                terms["features"] = term.weight * GIOU_GAIN / images * loss.sum()
            return with_terms(output, terms)


def _prepare_truth(boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size_4: Tensor) -> Truth:
    """Converts ground truth to float32 and int64, boxes to cxcywh in 0..1 of the input."""
    # Padding gets class 0, because it needs a valid index, too.
    labels_BM = labels_BM.astype("int64") * mask_BM.astype("int64")
    boxes_BM4 = xyxy_to_cxcywh(boxes_BM4.astype("float32")) / size_4
    return Truth(boxes_BM4, labels_BM, mask_BM.astype("float32"))


def _stack_outputs(scored: Sequence[Refined]) -> tuple[Tensor, Tensor]:
    """Stacks logits [L, B, Q, C] and boxes [L, B, Q, 4], float32."""
    logits = paddle.stack([output.logits_BQC for output in scored]).astype("float32")
    return logits, paddle.stack([output.boxes_BQ4 for output in scored]).astype("float32")


def _gather_per_query(values: Tensor, index_LBQ: Tensor) -> Tensor:
    """Gathers values [B, M, ...] of each query's box: [L, B, Q, ...]."""
    batch, count = values.shape[:2]
    first_B1 = paddle.arange(batch, dtype="int64").unsqueeze(1) * count
    rows = paddle.gather(values.flatten(0, 1), (index_LBQ + first_B1).flatten())
    return rows.reshape([*index_LBQ.shape, *values.shape[2:]])


def _box_losses(
    pred_LBQ4: Tensor, target: Tensor, matching: Matching, size_4: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the L1 distance and 1 - GIoU of positives, 0 elsewhere: [L, B, Q] each.

    Distances are those of boxes in 0..1.
    """
    l1_LBQ = (pred_LBQ4 - target).abs().sum(-1)
    giou_LBQ = aligned_giou(*(cxcywh_to_xyxy(boxes * size_4) for boxes in (pred_LBQ4, target)))
    return l1_LBQ * matching.is_positive_LBQ, (1.0 - giou_LBQ) * matching.is_positive_LBQ


def _distillation_weights(iou_LBQ: Tensor, teacher_BQC: Tensor, learned: Learned) -> Tensor:
    """Computes the weights of queries in the distillation of each layer: [L, B, Q].

        DDF = sum over queries of w * T^2 * mean over sides of KL(last layer, this layer)
        w   = s * IoU / positives    or    (1 - s) * score / negatives
        s   = sqrt(P) / (sqrt(P) + sqrt(N))

    P and N are the numbers of positives and negatives of the image in the union, also for denoising
    queries; the score is the last layer's highest.
    Source: Peng et al. 2024, arXiv:2410.13842, section 4.2.
    """
    positive_LBQ = learned.boxes.is_positive_LBQ
    negative_LBQ = learned.used_BQ - positive_LBQ
    share_B1 = learned.positive_share_B.unsqueeze(-1)
    score_BQ = F.sigmoid(teacher_BQC.detach()).max(-1)
    positive_weight = share_B1 * iou_LBQ / positive_LBQ.sum(-1, keepdim=True).clip(min=1.0)
    negative_weight = (1.0 - share_B1) * score_BQ / negative_LBQ.sum(-1, keepdim=True).clip(min=1.0)
    return positive_weight * positive_LBQ + negative_weight * negative_LBQ


def _confident_objects(logits_1BQC: Tensor, boxes_1BQ4: Tensor) -> tuple[Tensor, Truth]:
    """Returns a teacher's scores [B, Q], 0 where unsure, and its confident objects."""
    score_BQ, labels_BQ = F.sigmoid(logits_1BQC[0]).topk(1, axis=-1)
    score_BQ = confident_scores(score_BQ.squeeze(-1))
    mask_BQ = (score_BQ > 0).astype("float32")
    return score_BQ, Truth(boxes_1BQ4[0].detach(), labels_BQ.squeeze(-1), mask_BQ)
