"""Distillation losses: class scores, features, boxes of a teacher.

Pure functions of two tensors of the same shape, student first; the gradient flows to the student
alone.  All sums are left undivided: `Loss.distil` of a detector knows by what.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor


def quality_distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Class scores as soft labels of a quality focal loss.

        loss = T^2 * sum |t - s|^2 * BCE(s, t),   s = sigmoid(logits / T), t = sigmoid(teacher / T)

    The factor |t - s|^2 leaves the thousands of cells out of it where both see background; it has
    a gradient too.  T^2 keeps the gradients' scale (arXiv:1503.02531, section 2).
    Source: Li et al. 2020, arXiv:2006.04388, equation 5 with beta 2; the label is the teacher's.
    """
    softened = logits / temperature
    label = F.sigmoid(teacher / temperature).detach()
    gap = (label - F.sigmoid(softened)).square()
    return temperature**2 * (gap * (F.softplus(softened) - label * softened)).sum()


def yes_or_no_distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(teacher, student) of yes/no probabilities, elementwise.

    Args: logits, teacher: of independent sigmoids.
    """
    softened, theirs = logits / temperature, (teacher / temperature).detach()
    yes = F.sigmoid(theirs)
    of_yes = yes * (F.log_sigmoid(theirs) - F.log_sigmoid(softened))
    of_no = (1.0 - yes) * (F.log_sigmoid(-theirs) - F.log_sigmoid(-softened))
    return temperature**2 * (of_yes + of_no)


def channel_wise_distillation(
    feature_BXHW: Tensor, teacher_BXHW: Tensor, temperature: float
) -> Tensor:
    """How far channels look elsewhere than the teacher's: [B].

        loss_b = T^2 / X * sum_x KL(softmax over cells of teacher_x / T, the same of feature_x)

    Source: Shu et al. 2021, arXiv:2011.13256, equations 3 and 4 (CWD).
    """
    ours = F.log_softmax(feature_BXHW.astype("float32").flatten(2) / temperature, axis=-1)
    theirs = F.log_softmax(teacher_BXHW.astype("float32").flatten(2) / temperature, axis=-1)
    theirs = theirs.detach()
    return temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1).mean(-1)


def features_distillation(
    features: tuple[Tensor, ...], teacher: tuple[Tensor, ...], temperature: float
) -> Tensor:
    """Channel-wise, mean over levels: [B] float32."""
    pairs = list(zip(features, teacher, strict=True))
    levels = [channel_wise_distillation(*pair, temperature) for pair in pairs]
    return paddle.add_n(levels) / len(levels)


def localisation_distillation(
    reg_dist_N4R: Tensor, teacher_N4R: Tensor, weight_N: Tensor, temperature: float
) -> Tensor:
    """How far side distributions are from the teacher's: 0-D.

        loss = T^2 * sum_n w_n * mean over sides of KL(softmax(teacher / T), softmax(reg_dist / T))

    Args:
        reg_dist_N4R, teacher_N4R: logits over R bins; any axes before the last two.
        weight_N: what each box counts, no gradient; the axes before the last two.
    Source: Zheng et al. 2022, arXiv:2102.12252, equation 3 (LD).
    """
    ours = F.log_softmax(reg_dist_N4R / temperature, axis=-1)
    theirs = F.log_softmax(teacher_N4R / temperature, axis=-1).detach()
    of_boxes = (theirs.exp() * (theirs - ours)).sum(-1).mean(-1)
    return temperature**2 * (of_boxes * weight_N.detach()).sum()


# Where a teacher's score is lower it says nothing of a box.  Over the thousands of cells of an
# image the scores of an untouched background (0.01 each) would outweigh those of its objects.
SURE = 0.1


def where_sure(score: Tensor) -> Tensor:
    """The teacher's scores where they reach SURE, elsewhere 0; no gradient."""
    return (score * (score >= SURE).astype(score.dtype)).detach()
