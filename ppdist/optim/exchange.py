"""Gradient exchange: how the gradients of all ranks become one.

A step calls it between backward and update.  It hands over gradients of sums and the factor that
makes them the gradient of the mean loss (see engine/train_step.py).  Whatever happens to them here,
every rank ends with the same ones, or says by `finish` that it does not.

Here are the exact means; those that send fewer bytes or less often are in compression.py.
"""

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import paddle

from ppdist.distributed import collectives


class Exchange:
    """Mean over ranks after backward, in float32 and exact.

    Attributes:
        during_backward: the wrapped model's own backward communicates, so `average` need not.
        every: steps after which, at the latest, all ranks hold the same weights.
    """

    during_backward = False
    every = 1

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """Replaces this rank's gradients by their mean over ranks, in place.  Collective.

        Args:
            gradients: float32, in the same order on every rank.
            factor: gives what they will be multiplied by afterwards, for which the host has to
                wait: gradient * factor is that of the mean loss, whatever the number of objects or
                the loss scale of this step.  nan: no rank will apply this step.
        """
        collectives.mean_tensors(gradients)

    def norm_square(self, local: paddle.Tensor) -> paddle.Tensor:
        """Square of the gradient norm that all ranks agree on, [1].  Collective.

        Averaged gradients have the same norm everywhere.

        Args: local: the square of this rank's norm.
        """
        return local

    def finish(self, step: int) -> bool:
        """Ends a step (0-based) that was updated, or left out.  Collective.

        Returns: whether all ranks hold the same weights now.
        """
        return self.synchronised(step)

    def state(self) -> dict[str, np.ndarray]:
        """What a resumed run needs, of all ranks. Collective.

        The same on every rank.
        """
        return {}

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Restores what `state` gave.

        It may be of any way to average and of any number of ranks.

        Collective.
        Returns: a warning if not all of it has a place here (on one rank nothing has: it sends
            nothing, so it keeps nothing back); else nothing.
        Raises: CheckpointError: it belongs to other parameters.
        """
        return lost(arrays)

    def synchronised(self, step: int) -> bool:
        """Whether all ranks hold the same weights after `finish(step)`."""
        return True

    def next_synchronised(self, steps: int) -> int:
        """`steps`, or the next number at which all ranks are equal."""
        return multiple_from(steps, self.every)


def lost(entries: Collection[str]) -> str:
    """Warns of error-feedback residuals that a resumed run drops."""
    if not entries:
        return ""
    return (
        f"what ranks had kept of gradients to send it later (in the checkpoint: {min(entries)}"
        f"{f' and {len(entries) - 1} more' if len(entries) > 1 else ''}) is left out, because this "
        f"run does not compress them so; resume on several ranks and with the same "
        f"distributed.gradient_rank or topk_fraction to use it"
    )


class DuringBackward(Exchange):
    """Mean by Paddle's DataParallel, bucket by bucket, overlapped with backward (NCCL)."""

    during_backward = True

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """Nothing is left to do."""


def multiple_from(steps: int, every: int) -> int:
    """Returns the first multiple of `every` that is at least `steps`."""
    return math.ceil(steps / every) * every
