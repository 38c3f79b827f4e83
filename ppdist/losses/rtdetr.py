"""The loss of RT-DETR and D-FINE, for queries matched with boxes.

Every output of the model that has queries is scored: each decoder layer, the encoder's selection,
D-FINE's boxes before refinement, and the same of the denoising queries.

Nothing depends on which images share a micro-batch.  Where the originals divide by a number of the
whole batch that predictions decide, or give all images as many denoising groups as the fullest one
has room for, an image has its own; with one image in the batch both are the same.

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
    features_distillation,
    localisation_distillation,
    quality_distillation,
    where_sure,
)
from ppdist.losses.matcher import Costs, Matching, Truth, hungarian_matcher, matching_cost
from ppdist.models.outputs import Refined, RTDETROutputs, weighting

DDF_TEMPERATURE = 5.0  # of the distributions that layers compare
# Of the published recipes of RT-DETR, RT-DETRv2, D-FINE and DEIM, all sizes.
NEGATIVE_ALPHA = 0.75  # varifocal: weight of all that is negative
GAMMA = {"varifocal": 2.0, "mal": 1.5}  # exponent of the score (mal: of the IoU, too)
L1_GAIN, GIOU_GAIN = 5.0, 2.0  # weights of the distance of centre and size, in 0..1, and of GIoU
FGL_GAIN, DDF_GAIN = 0.15, 1.5  # D-FINE: of the localization loss, and of the last layer's lesson


class Learned(NamedTuple):
    """What the queries of L outputs learn.

    classes, boxes: which object, for the class loss and for all others; L may be 1 for all outputs.
    used_BQ: float32, 0 where a denoising query is padding, else 1.
    class_share_B, box_share_B: what an image's sums of these losses are multiplied by.
    positive_share_B: of the positive queries, in what layers learn from the last one.
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
    """Cross entropy of side distributions, sum over the four sides: [B, Q].

        loss = sum over sides of -(1 - s) log p_r - s log p_{r+1},  d = W(r) + s (W(r+1) - W(r))

    d is how far the side has to move, in units of the reference's width (height) / scale.  One
    that has to move further than the last bins learns these.

    Args:
        corners_BQ4R: logits over the bins, sides left, top, right, bottom; the gradient flows here.
        reference_BQ4: the boxes to be moved, cxcywh.
        target_BQ4: where to, cxcywh in the same unit; no gradient.
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
    reached = paddle.searchsorted(bins_R, distance_BQ4, right=True)
    low_BQ4 = (reached - 1).clip(0, bins_R.shape[0] - 2)
    low_W = paddle.gather(bins_R, low_BQ4.flatten()).reshape(low_BQ4.shape)
    high_W = paddle.gather(bins_R, low_BQ4.flatten() + 1).reshape(low_BQ4.shape)
    high_share_BQ4 = ((distance_BQ4 - low_W) / (high_W - low_W)).clip(0, 1)
    log_p_BQ4R = F.log_softmax(corners_BQ4R, axis=-1)
    low, high = (
        log_p_BQ4R.take_along_axis(bin_BQ4.unsqueeze(-1), -1).squeeze(-1)
        for bin_BQ4 in (low_BQ4, low_BQ4 + 1)
    )
    return -((1 - high_share_BQ4) * low + high_share_BQ4 * high).sum(-1)


class RTDETRModel(Protocol):
    """What the loss asks of its model; see `ppdist.models.rtdetr.RTDETR`."""

    decoder: Any  # `dfine`, and if so `up` and `reg_scale`, [1] each


class RTDETRLoss(Loss):
    """Scores the queries of all layers against padded ground truth.

    All terms are divided here, by numbers that follow from the targets of the whole step, so that
    nothing is left for the step to divide.  Computed in float32 whatever the outputs are.  No
    collective, and a gradient for every output even where no image has an object.

    The host reads once in `forward`, and once more in `distil`: see `hungarian_matcher`.
    """

    def __init__(
        self,
        config: RTDETRLossConfig,
        *,
        up_1: Tensor | None = None,
        reg_scale_1: Tensor | None = None,
    ) -> None:
        """
        Args:
            up_1, reg_scale_1: D-FINE: of the model's `weighting`; its own tensors, so that values
                loaded later count here, too.
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
        """The loss with the model's bins."""
        if not model.decoder.dfine:
            return cls(config)
        return cls(config, up_1=model.decoder.up, reg_scale_1=model.decoder.reg_scale)

    @paddle.no_grad()
    def local_normalizers(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """Boxes and images: float32 [2]; see `Loss.local_normalizers`."""
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
        """The loss of one micro-batch; see `Loss.forward`.

        The sum of all `terms`.

        Args:
            global_normalizers: the step's sum of `local_normalizers`; None: this micro-batch is the
                whole step.

        Returns: parts `loss_cls`, `loss_l1`, `loss_giou` and with D-FINE `loss_fgl`, `loss_ddf`,
            sums over all matched outputs, and `loss_denoising`, all that is asked of denoising
            queries; gains included, they add up to the mean loss of the step; the normalizer is 0.
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
        """The terms of each output, gains included; arguments as of `forward`.

            cls  = class_gain / N * sum of the varifocal or matchability-aware loss
            l1   = L1_GAIN / N * sum over positives of |b - b*|_1
            giou = GIOU_GAIN / N * sum over positives of 1 - GIoU
            fgl  = FGL_GAIN / N * sum over positives of IoU * FGL
            ddf  = DDF_GAIN / I * sum over images of DDF

        N and I are boxes and images of the step.  Positives are what an output's own matching says,
        with D-FINE's distributions those of the union of all outputs, except in cls; an image of n
        boxes then has its mean over the union n times.  What a denoising query learns is known, and
        its image counts 1 / (its denoising groups).

        Returns: of layers, encoder and preliminary, in this order, [L] each (fgl: of the layers,
            ddf: one for all of them); the same of the denoising queries, if any.
        Sources: Zhao et al. 2023, arXiv:2304.08069, section 4.3; Peng et al. 2024,
            arXiv:2410.13842, section 4.
        """
        with paddle.amp.auto_cast(enable=False):
            truth = _prepared(boxes_BM4, labels_BM, mask_BM, outputs.size_4)
            if global_normalizers is None:
                global_normalizers = self.local_normalizers(boxes_BM4, labels_BM, mask_BM, (0, 0))
            divisors = global_normalizers.clip(min=1.0).detach()
            scored = [*outputs.layers, outputs.encoder]
            if outputs.preliminary is not None:
                scored.append(outputs.preliminary)
            learned = self._matched(scored, truth, outputs.size_4)
            matched = self._score(scored, learned, truth, outputs.size_4, divisors)
            if (denoised := outputs.denoised) is None:
                return matched, {}
            known = Matching(denoised.target_BD.unsqueeze(0), denoised.positive_BD.unsqueeze(0))
            share_B = 1.0 / denoised.groups_B
            used_BD = denoised.positive_BD + denoised.negative_BD
            given = Learned(known, known, used_BD, share_B, share_B, learned.positive_share_B)
            scored = [*denoised.layers]
            if denoised.preliminary is not None:
                scored.append(denoised.preliminary)
            return matched, self._score(scored, given, truth, outputs.size_4, divisors)

    @paddle.no_grad()
    def _matched(self, scored: list[Refined], truth: Truth, size_4: Tensor) -> Learned:
        cost_LBQM = matching_cost(*_stacked(scored), size_4, truth, self.costs)
        own, union = hungarian_matcher(cost_LBQM, truth.mask_BM)
        union_B, count_B = union.is_positive_LBQ.sum([0, 2]), truth.mask_BM.sum(1)
        used_BQ = paddle.ones_like(union.is_positive_LBQ[0])
        positive_B, negative_B = union_B.sqrt(), (used_BQ.sum(1) - union_B).sqrt()
        in_bins = scored[0].corners_BQ4R is not None
        one_B = paddle.ones_like(count_B)
        return Learned(
            classes=own,
            boxes=union if in_bins else own,
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
        """Terms of outputs with equally many queries; see `terms`.

        Args: divisors_2: boxes and images of the step.
        """
        boxes, images = divisors_2.unbind(0)
        logits_LBQC, pred_LBQ4 = _stacked(scored)
        pixels_LBQ4 = cxcywh_to_xyxy(pred_LBQ4 * size_4)

        target = _taken(truth.boxes_BM4, learned.classes.box_LBQ)
        iou_LBQ = aligned_iou(pixels_LBQ4.detach(), cxcywh_to_xyxy(target * size_4))
        cls_LB = self._class_loss(logits_LBQC, iou_LBQ, learned, truth.labels_BM)

        target = _taken(truth.boxes_BM4, learned.boxes.box_LBQ)
        l1_LBQ, giou_LBQ = _apart(pred_LBQ4, target, learned.boxes, size_4)
        share_B = learned.box_share_B
        terms = {
            "cls": self.config.class_gain / boxes * (cls_LB * learned.class_share_B).sum(-1),
            "l1": L1_GAIN / boxes * (l1_LBQ.sum(-1) * share_B).sum(-1),
            "giou": GIOU_GAIN / boxes * (giou_LBQ.sum(-1) * share_B).sum(-1),
        }
        layers = [each for each in scored if each.corners_BQ4R is not None]
        if not layers:
            return terms
        iou_LBQ = aligned_iou(pixels_LBQ4[: len(layers)].detach(), cxcywh_to_xyxy(target * size_4))
        iou_LBQ = iou_LBQ * learned.boxes.is_positive_LBQ
        corners = paddle.stack([each.corners_BQ4R for each in layers]).astype("float32")
        reference = paddle.stack([each.reference_BQ4 for each in layers]).astype("float32")
        bins_R = weighting(self.up_1, self.reg_scale_1)
        fgl_LBQ = fine_grained_localization_loss(
            corners, reference, target, bins_R, self.reg_scale_1
        )
        fgl_LB = (fgl_LBQ * iou_LBQ).sum(-1) * share_B
        terms["fgl"] = FGL_GAIN / boxes * fgl_LB.sum(-1)
        if len(layers) > 1:
            weight_LBQ = _distillation_weights(iou_LBQ[:-1], logits_LBQC[len(layers) - 1], learned)
            ddf = localisation_distillation(corners[:-1], corners[-1:], weight_LBQ, DDF_TEMPERATURE)
            terms["ddf"] = DDF_GAIN / images * ddf.unsqueeze(0)
        return terms

    def _class_loss(
        self, logits_LBQC: Tensor, iou_LBQ: Tensor, learned: Learned, labels_BM: Tensor
    ) -> Tensor:
        """Sums [L, B] of the class loss over queries and classes.

            varifocal, negative: alpha * p^gamma * BCE(p, 0)    positive: q * BCE(p, q)
            mal,       negative:         p^gamma * BCE(p, 0)    positive: BCE(p, q^gamma)

        p is the score, in weights without gradient; q is the IoU of a positive with its object.
        Everything is taken for negative first; what is positive is then exchanged.
        Sources: Zhang et al. 2020, arXiv:2008.13367, equation 2; Huang et al. 2024,
        arXiv:2412.04234, section 3.3.
        """
        mal = self.config.classification == "mal"
        alpha = 1.0 if mal else NEGATIVE_ALPHA

        def negative(logits: Tensor) -> Tensor:
            bce = F.softplus(logits)
            # log p = logits - bce; by a power this takes twice as long on a CPU
            return alpha * paddle.exp(self.gamma * (logits - bce)).detach() * bce

        label_LBQ = _taken(labels_BM, learned.classes.box_LBQ)
        named_LBQ = logits_LBQC.take_along_axis(label_LBQ.unsqueeze(-1), 3).squeeze(-1)
        quality_LBQ, weight_LBQ = (iou_LBQ**self.gamma, 1.0) if mal else (iou_LBQ, iou_LBQ)
        positive_LBQ = weight_LBQ * (F.softplus(named_LBQ) - quality_LBQ * named_LBQ)
        exchanged_LBQ = (positive_LBQ - negative(named_LBQ)) * learned.classes.is_positive_LBQ
        return (negative(logits_LBQC).sum(-1) * learned.used_BQ + exchanged_LBQ).sum(-1)

    def distil(
        self,
        output: LossOutput,
        outputs: RTDETROutputs,
        taught: RTDETROutputs,
        teaching: Teaching,
        global_normalizers: Tensor | None,
    ) -> LossOutput:
        """See `Loss.distil`; the last layer learns from the teacher's last.

        What the teacher is sure of are boxes to be matched, as those of the ground truth are, and a
        student's query learns from the teacher's query that it is matched with:

            logits   = class_gain / N * sum over pairs of the quality focal loss
            boxes    = 1 / N * sum over pairs of score * (L1_GAIN * |b - b*|_1
                                                         + GIOU_GAIN * (1 - GIoU))
            features = GIOU_GAIN * mean over images

        N are the boxes of the ground truth in the step.  So the teacher may have other queries,
        layers and bins.
        Source: Chang et al. 2022, arXiv:2211.10156 (Hungarian-matching logits distillation, its
        positives).
        """
        assert global_normalizers is not None, "the step counts"
        class_gain, terms = self.config.class_gain, {}
        with paddle.amp.auto_cast(enable=False):
            boxes, images = global_normalizers.clip(min=1.0).unbind(0)
            ours, theirs = outputs.layers[-1:], taught.layers[-1:]
            logits_1BQC, pred_1BQ4 = _stacked(ours)
            score_BM, truth = _sure_of(*_stacked(theirs))
            cost = matching_cost(logits_1BQC, pred_1BQ4, outputs.size_4, truth, self.costs)
            matching, _ = hungarian_matcher(cost, truth.mask_BM)
            there_BQ1 = matching.is_positive_LBQ[0].unsqueeze(-1)
            if term := teaching.logits:
                known_BQC = _taken(theirs[0].logits_BQC.astype("float32"), matching.box_LBQ)[0]
                pair = logits_1BQC[0] * there_BQ1, known_BQC * there_BQ1  # equal: no loss
                loss = quality_distillation(*pair, term.temperature)
                terms["logits"] = term.weight * class_gain / boxes * loss
            if term := teaching.boxes:
                target_1BQ4 = _taken(truth.boxes_BM4, matching.box_LBQ)
                l1, giou = _apart(pred_1BQ4, target_1BQ4, matching, outputs.size_4)
                loss = L1_GAIN * l1 + GIOU_GAIN * giou
                score_1BQ = _taken(score_BM.unsqueeze(-1), matching.box_LBQ).squeeze(-1)
                terms["boxes"] = term.weight / boxes * (loss * score_1BQ).sum()
            if term := teaching.features:
                loss = features_distillation(outputs.features, taught.features, term.temperature)
                terms["features"] = term.weight * GIOU_GAIN / images * loss.sum()
            return with_terms(output, terms)


def _prepared(boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size_4: Tensor) -> Truth:
    labels_BM = labels_BM.astype("int64") * mask_BM.astype("int64")  # padding: a valid class too
    boxes_BM4 = xyxy_to_cxcywh(boxes_BM4.astype("float32")) / size_4
    return Truth(boxes_BM4, labels_BM, mask_BM.astype("float32"))


def _stacked(scored: Sequence[Refined]) -> tuple[Tensor, Tensor]:
    """Logits [L, B, Q, C] and boxes [L, B, Q, 4], float32."""
    logits = paddle.stack([each.logits_BQC for each in scored]).astype("float32")
    return logits, paddle.stack([each.boxes_BQ4 for each in scored]).astype("float32")


def _taken(values: Tensor, index_LBQ: Tensor) -> Tensor:
    """Values [B, M, ...] of each query's box: [L, B, Q, ...]."""
    batch, count = values.shape[:2]
    first_B1 = paddle.arange(batch, dtype="int64").unsqueeze(1) * count
    taken = paddle.gather(values.flatten(0, 1), (index_LBQ + first_B1).flatten())
    return taken.reshape([*index_LBQ.shape, *values.shape[2:]])


def _apart(
    pred_LBQ4: Tensor, target: Tensor, matching: Matching, size_4: Tensor
) -> tuple[Tensor, Tensor]:
    """L1 distance and 1 - GIoU of positives: [L, B, Q] each.

    Distances are of boxes in 0..1; where no box is matched both are 0.
    """
    l1_LBQ = (pred_LBQ4 - target).abs().sum(-1)
    giou_LBQ = aligned_giou(*(cxcywh_to_xyxy(each * size_4) for each in (pred_LBQ4, target)))
    return l1_LBQ * matching.is_positive_LBQ, (1.0 - giou_LBQ) * matching.is_positive_LBQ


def _distillation_weights(iou_LBQ: Tensor, teacher_BQC: Tensor, learned: Learned) -> Tensor:
    """Weights of queries in the distillation of each layer: [L, B, Q].

        DDF = sum over queries of w * T^2 * mean over sides of KL(last layer, this layer)
        w   = s * IoU / positives    or    (1 - s) * score / negatives
        s   = sqrt(P) / (sqrt(P) + sqrt(N))

    P and N are the positives and negatives of the image in the union, where denoising queries are
    concerned, too; the score is the last layer's highest.
    Source: Peng et al. 2024, arXiv:2410.13842, section 4.2.
    """
    positive_LBQ = learned.boxes.is_positive_LBQ
    negative_LBQ = learned.used_BQ - positive_LBQ
    share_B1 = learned.positive_share_B.unsqueeze(-1)
    score_BQ = F.sigmoid(teacher_BQC.detach()).max(-1)
    of_positive = share_B1 * iou_LBQ / positive_LBQ.sum(-1, keepdim=True).clip(min=1.0)
    of_negative = (1.0 - share_B1) * score_BQ / negative_LBQ.sum(-1, keepdim=True).clip(min=1.0)
    return of_positive * positive_LBQ + of_negative * negative_LBQ


def _sure_of(logits_1BQC: Tensor, boxes_1BQ4: Tensor) -> tuple[Tensor, Truth]:
    """A teacher's scores [B, Q], 0 if unsure, and its sure objects."""
    score_BQ, labels_BQ = F.sigmoid(logits_1BQC[0]).topk(1, axis=-1)
    score_BQ = where_sure(score_BQ.squeeze(-1))
    sure_BQ = (score_BQ > 0).astype("float32")
    return score_BQ, Truth(boxes_1BQ4[0].detach(), labels_BQ.squeeze(-1), sure_BQ)
