"""Distribution focal loss (arXiv:2006.04388, equation 6)."""

import paddle.nn.functional as F
from paddle import Tensor


def distribution_focal_loss(logits_BS4R: Tensor, target_BS4: Tensor) -> Tensor:
    """How far the side distributions are from their targets, mean over the four sides: [B, S].

        loss = -(r + 1 - y) * log p_r - (y - r) * log p_{r+1},   r = floor(y)

    Args:
        logits_BS4R: logits over the integer lengths 0..R-1; the gradient flows here.
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
    share_BS4R = low_one_hot * (1 - high_share_BS4).unsqueeze(-1)
    share_BS4R += high_one_hot * high_share_BS4.unsqueeze(-1)
    return -(F.log_softmax(logits_BS4R, axis=-1) * share_BS4R).sum(-1).mean(-1)
