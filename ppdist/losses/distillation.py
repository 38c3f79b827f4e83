"""Distillation losses: class scores, features, boxes of a teacher.

Pure functions of two tensors of the same shape, student first; only the student gets a gradient.
The sums are not divided: `Loss.distil` of a detector divides them.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppdist.models import functional


def quality_distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Computes a quality focal loss of class scores with the teacher's as soft labels.

        loss = T^2 * sum |t - s|^2 * BCE(s, t),   s = sigmoid(logits / T), t = sigmoid(teacher / T)

    The factor |t - s|^2, which has a gradient, too, suppresses the thousands of cells where student
    and teacher see background.  T^2 keeps the scale of the gradients (arXiv:1503.02531, section 2).
    Source: Li et al. 2020, arXiv:2006.04388, equation 5 with beta 2; the label is the teacher's.
    """
    softened = logits / temperature
    label = F.sigmoid(teacher / temperature).detach()
    gap = (label - F.sigmoid(softened)).square()
    return temperature**2 * (gap * (F.softplus(softened) - label * softened)).sum()


def binary_distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Computes T^2 * KL(teacher, student) of yes/no probabilities, elementwise.

    Args: logits, teacher: logits of independent sigmoids.
    """
    softened, teacher_logits = logits / temperature, (teacher / temperature).detach()
    yes = F.sigmoid(teacher_logits)
    kl_yes = yes * (F.log_sigmoid(teacher_logits) - F.log_sigmoid(softened))
    kl_no = (1.0 - yes) * (F.log_sigmoid(-teacher_logits) - F.log_sigmoid(-softened))
    return temperature**2 * (kl_yes + kl_no)


def channel_wise_distillation(
    feature_BXHW: Tensor, teacher_BXHW: Tensor, temperature: float
) -> Tensor:
    """Compares where channels are active with the teacher's channels: [B].

        loss_b = T^2 / X * sum_x KL(softmax over cells of teacher_x / T, the same of feature_x)

    Source: Shu et al. 2021, arXiv:2011.13256, equations 3 and 4 (CWD).
    """
    log_p_student = F.log_softmax(feature_BXHW.astype("float32").flatten(2) / temperature, axis=-1)
    log_p_teacher = F.log_softmax(teacher_BXHW.astype("float32").flatten(2) / temperature, axis=-1)
    log_p_teacher = log_p_teacher.detach()
    return temperature**2 * (log_p_teacher.exp() * (log_p_teacher - log_p_student)).sum(-1).mean(-1)


def features_distillation(
    features: tuple[Tensor, ...], teacher: tuple[Tensor, ...], temperature: float
) -> Tensor:
    """Averages the channel-wise distillation over levels: [B] float32."""
    pairs = list(zip(features, teacher, strict=True))
    levels = [channel_wise_distillation(*pair, temperature) for pair in pairs]
    return paddle.add_n(levels) / len(levels)


def localisation_distillation(
    reg_dist_N4R: Tensor, teacher_N4R: Tensor, weight_N: Tensor, temperature: float
) -> Tensor:
    """Compares distributions over sides with the teacher's: 0-D.

        loss = T^2 * sum_n w_n * mean over sides of KL(softmax(teacher / T), softmax(reg_dist / T))

    Args:
        reg_dist_N4R, teacher_N4R: logits over R bins; any axes before the last two.
        weight_N: weight of each box, no gradient; it has the axes before the last two.
    Source: Zheng et al. 2022, arXiv:2102.12252, equation 3 (LD).
    """
    log_p_student = functional.log_softmax(reg_dist_N4R / temperature)
    log_p_teacher = functional.log_softmax(teacher_N4R / temperature).detach()
    kl_N = (log_p_teacher.exp() * (log_p_teacher - log_p_student)).sum(-1).mean(-1)
    return temperature**2 * (kl_N * weight_N.detach()).sum()


# Boxes with a lower score of the teacher are not learned.  Over the thousands of cells of an image,
# the scores of plain background (0.01 each) would outweigh those of its objects.
MIN_TEACHER_SCORE = 0.1


def confident_scores(score: Tensor) -> Tensor:
    """Returns the teacher's scores where they reach MIN_TEACHER_SCORE, elsewhere 0; no gradient."""
    return (score * (score >= MIN_TEACHER_SCORE).astype(score.dtype)).detach()
