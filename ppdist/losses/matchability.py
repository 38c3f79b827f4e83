"""Matchability-aware loss, MAL (DEIM, arXiv:2412.04234, equation 4)."""

import paddle
import paddle.nn.functional as F
from paddle import Tensor


def matchability_loss(
    logits_BCN: Tensor,
    positive_BS: Tensor,
    score_BS: Tensor,
    taken_BS: Tensor,
    gamma: float,
) -> Tensor:
    """Matchability-aware loss, summed over all predictions and classes.

        negative: p^gamma * BCE(p, 0)          (weight detached, as in the published code)
        positive: BCE(p, q^gamma),             q the soft label, only at the object's class

    Varifocal loss weighs a positive by its q, so it hardly minds a confident prediction whose box
    is poor; here every positive weighs 1, and a poor one is told to be less sure.  As in
    `varifocal_loss` one pass treats everything as negative, and the S positives are exchanged.

    Args:
        logits_BCN: class logits; the gradient flows here.
        positive_BS: where each slot's (image, class, prediction) lies in the flattened logits.
        score_BS: soft label q of each slot.
        taken_BS: 1 where the slot is positive, else 0.
        gamma: of the paper; 1.5 there.

    Returns: 0-D float32 sum.
    """
    chosen = paddle.gather(logits_BCN.flatten(), positive_BS.flatten())
    target, taken = score_BS.flatten().pow(gamma), taken_BS.flatten()
    positive = F.softplus(chosen) - target * chosen  # BCE(p, t) = softplus(x) - t x
    exchange = taken * (positive - _negative(chosen, gamma))
    return _negative(logits_BCN, gamma).sum() + exchange.sum()


@paddle.no_grad()
def stretched(score_BS: Tensor, taken_BS: Tensor) -> Tensor:
    """What the boxes of positives count beside this loss: their soft labels, image by image times
    what makes their sum the number of positives.

    Every positive weighs 1 here, so the divisor is the number of positives (DEIM's is that of
    objects, each with one).  Divided by the sum of soft labels the class loss would be many times
    as large while boxes are poor; boxes with the soft labels as they are would be as much smaller.
    By the image, not the batch, so that it does not matter to which rank an image comes.

    Args: score_BS, taken_BS: as above.
    """
    soft_BS = score_BS + 1e-9 * taken_BS  # where no predicted box touches its object: all alike
    share_BS = soft_BS / soft_BS.sum(1, keepdim=True).clip(min=1e-9)
    return share_BS * taken_BS.sum(1, keepdim=True)


def _negative(logits: Tensor, gamma: float) -> Tensor:
    return F.sigmoid(logits).detach().pow(gamma) * F.softplus(logits)
