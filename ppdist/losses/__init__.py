"""Training losses.  Each takes raw outputs and padded ground truth; none talks to other ranks."""

from typing import NamedTuple

from paddle import Tensor


class LossOutput(NamedTuple):
    """One micro-batch's loss, not yet normalised.

        loss of a step = sum of totals / max(1, sum of normalizers)

    over all micro-batches and ranks of the step.  The trainer divides: only it sees them all.

    total: 0-D float32, weighted SUM over this micro-batch; the gradient flows here, and reaches
        every output of the model even where no image has an object.
    normalizer: 0-D float32 without gradient: sum of the assigned soft labels.
    parts: the unweighted sums by name, 0-D float32, detached, for the log.
    """

    total: Tensor
    normalizer: Tensor
    parts: dict[str, Tensor]
