"""Varifocal loss (arXiv:2008.13367, equation 2)."""

import paddle
import paddle.nn.functional as F
from paddle import Tensor


def varifocal_loss(
    logits_BCN: Tensor,
    positive_BS: Tensor,
    score_BS: Tensor,
    taken_BS: Tensor,
    alpha: float = 0.75,
) -> Tensor:
    """Varifocal loss, summed over all predictions and classes.

        negative: alpha * p^2 * BCE(p, 0)        (weight not detached: it has a gradient)
        positive: q * BCE(p, q),                 q the soft label, only at the object's class

    One pass treats everything as negative; the S positive entries are then exchanged, so neither
    one-hot labels nor a plane of soft labels is made.

    Args:
        logits_BCN: class logits; the gradient flows here.
        positive_BS: where each slot's (image, class, prediction) lies in the flattened logits.
        score_BS: soft label q of each slot.
        taken_BS: 1 where the slot is positive, else 0.

    Returns: 0-D float32 sum.
    """
    chosen = paddle.gather(logits_BCN.flatten(), positive_BS.flatten())
    score, taken = score_BS.flatten(), taken_BS.flatten()
    positive = score * (F.softplus(chosen) - score * chosen)  # BCE(p, q) = softplus(x) - q x
    exchange = taken * (positive - alpha * _negative(chosen))
    return alpha * _negative(logits_BCN).sum() + exchange.sum()


def _negative(logits: Tensor) -> Tensor:
    return F.sigmoid(logits).square() * F.softplus(logits)
