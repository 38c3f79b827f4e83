"""RT-DETR (arXiv:2304.08069), RT-DETRv2 (arXiv:2407.17140) and D-FINE (arXiv:2410.13842)."""

from typing import NamedTuple

from paddle import Tensor


class Refined(NamedTuple):
    """What one decoder layer, or the encoder, says of its queries.

    logits_BQC: class logits.
    boxes_BQ4: centre x, centre y, width, height in 0..1 of the input.
    corners_BQ4R: D-FINE: logits of the distributions over the moves of the four sides, order left,
        top, right, bottom; None elsewhere.
    reference_BQ4: D-FINE: the boxes that these distributions move (cx, cy, w, h in 0..1, detached);
        None elsewhere.
    """

    logits_BQC: Tensor
    boxes_BQ4: Tensor
    corners_BQ4R: Tensor | None = None
    reference_BQ4: Tensor | None = None


class Denoised(NamedTuple):
    """What becomes of the denoising queries, and what each stands for.

    layers, preliminary: as in `RTDETROutputs`, with D queries in the place of Q.
    target_BD: int64, row of the image's boxes; meaningless where unused.
    positive_BD: float32, 1 where the query is to find its target.
    negative_BD: float32, 1 where the query is to find nothing.  Both 0: not used.
    groups_B: float32, denoising groups of each image, at least 1.
    """

    layers: tuple[Refined, ...]
    preliminary: Refined | None
    target_BD: Tensor
    positive_BD: Tensor
    negative_BD: Tensor
    groups_B: Tensor


class RTDETROutputs(NamedTuple):
    """Raw outputs.

    layers: of the decoder; the last one predicts.
    encoder: of query selection.
    size_4: float32, width, height, width, height of the input in pixels.
    preliminary: D-FINE: the first layer's boxes before distributions refine them, and its logits.
    denoised: in training with targets and `model.denoising`.
    features: of the neck, see `Detector.distillation`; empty without.
    """

    layers: tuple[Refined, ...]
    encoder: Refined
    size_4: Tensor
    preliminary: Refined | None = None
    denoised: Denoised | None = None
    features: tuple[Tensor, ...] = ()
