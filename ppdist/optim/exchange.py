"""Gradient exchange: the gradients of all ranks become one.

A step calls it between backward and update, with the gradients of sums and the factor that makes
them the gradient of the mean loss (see engine/train_step.py).  Afterwards all ranks have the same
gradients, or `finish` returns False.

This module has the exact means; compression.py has those that send fewer bytes, or less often.
"""

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import paddle

from ppdist.distributed import collectives


class Exchange:
    """Exact mean of gradients over ranks after backward, in float32.

    Attributes:
        during_backward: the backward pass of the wrapped model communicates, so `average` does not.
        every: largest number of steps after which all ranks hold the same weights.
    """

    during_backward = False
    every = 1

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """Replaces this rank's gradients by their mean over ranks, in place.  Collective.

        Args:
            gradients: float32, in the same order on every rank.
            factor: returns the factor of the gradients that is applied afterwards, for which the
                host has to wait: gradient * factor is the gradient of the mean loss, for any number
                of objects and any loss scale of this step.  nan: no rank will apply this step.
        """
        collectives.mean_tensors(gradients)

    def norm_square(self, local: paddle.Tensor) -> paddle.Tensor:
        """Returns the square of the gradient norm that all ranks use, [1].  Collective.

        Averaged gradients have the same norm on every rank.

        Args: local: the square of this rank's norm.
        """
        return local

    def finish(self, step: int) -> bool:
        """Ends a step (0-based) that was updated, or skipped.  Collective.

        Returns: True if all ranks hold the same weights now.
        """
        return self.synchronised(step)

    def state(self) -> dict[str, np.ndarray]:
        """Returns what a resumed run needs from all ranks, the same on every rank.  Collective."""
        return {}

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Restores the result of `state`.  Collective.

        The state may come from any kind of exchange and any number of ranks.

        Returns: a warning if a part of it is not used here (on one rank no part is, because nothing
            is sent); else "".
        Raises: CheckpointError: the state belongs to other parameters.
        """
        return warn_dropped(arrays)

    def synchronised(self, step: int) -> bool:
        """Returns True if all ranks hold the same weights after `finish(step)`."""
        return True

    def next_synchronised(self, steps: int) -> int:
        """Returns `steps`, or the next number of steps after which all ranks are equal."""
        return multiple_from(steps, self.every)


def warn_dropped(entries: Collection[str]) -> str:
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
        """Does nothing: the backward pass has averaged."""


def multiple_from(steps: int, every: int) -> int:
    """Returns the first multiple of `every` that is at least `steps`."""
    return math.ceil(steps / every) * every
