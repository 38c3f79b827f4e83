"""How the gradients of all ranks become one: what a step calls between backward and update.

The step hands over gradients of sums and the factor that makes them the gradient of the mean loss
(see engine/step.py).  Whatever happens to them here, every rank ends with the same ones, or says
by `synchronised` that it does not.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import paddle

from ppdist import dist


class Averaging:
    """Mean over ranks after backward, in float32 and exact.

    Attributes:
        during_backward: the wrapped model's own backward communicates, so `gradients` need not.
        every: after so many steps, at the latest, all ranks hold the same weights.
    """

    during_backward = False
    every = 1

    def gradients(self, gradients: Sequence[paddle.Tensor], factor: float) -> None:
        """Replaces this rank's gradients by their mean over ranks, in place.  Every rank calls it.

        Args:
            gradients: float32, in the same order on every rank.
            factor: what they will be multiplied by afterwards: gradient * factor is that of the
                mean loss, whatever the number of objects or the loss scale of this step.  nan:
                the loss is not finite somewhere, and no rank will apply this step.
        """
        dist.mean_tensors(gradients)

    def norm(self, own: float) -> float:
        """The gradient norm by which all ranks decide alike, from that of this rank's gradients.

        Every rank calls it.  Averaged gradients have the same norm everywhere.
        """
        return own

    def updated(self, step: int) -> None:
        """Called after the weights of a step (0-based) were updated, or left as they are."""

    def state(self) -> dict[str, np.ndarray]:
        """What a resumed run needs, of all ranks, the same on every rank.  Every rank calls it."""
        return {}

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Continues from what `state` gave, of any way to average and on any number of ranks.

        Every rank calls it.
        Returns: a warning if not all of it has a place here (on one rank nothing has: it sends
            nothing, so it keeps nothing back); else nothing.
        Raises: CheckpointError: it belongs to other parameters.
        """
        return lost(arrays)

    def synchronised(self, step: int) -> bool:
        """Whether all ranks hold the same weights once `updated` has seen a step (0-based)."""
        return True


def next_synchronised(steps: int, every: int) -> int:
    """`steps`, or the next number of steps after which all ranks hold the same weights: only there
    can a run stop, be saved, and go on as if it had not.

    Args: every: `Averaging.every`.
    """
    return math.ceil(steps / every) * every


def lost(entries: Collection[str]) -> str:
    """A warning about what a checkpoint holds of gradients, and a resumed run does not take."""
    if not entries:
        return ""
    return (
        f"what ranks had kept of gradients to send it later (in the checkpoint: {min(entries)}"
        f"{f' and {len(entries) - 1} more' if len(entries) > 1 else ''}) is left out, because this "
        f"run does not compress them so; resume on several ranks and with the same "
        f"distributed.gradient_rank or topk_fraction to use it"
    )


class DuringBackward(Averaging):
    """Paddle's DataParallel does it, bucket by bucket, overlapped with backward (NCCL)."""

    during_backward = True

    def gradients(self, gradients: Sequence[paddle.Tensor], factor: float) -> None:
        """Nothing is left to do."""
