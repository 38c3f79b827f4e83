"""Policies of a step, which may change its course but not its mathematics.

A policy decides only by the step, by settings and by totals over all ranks.  So all ranks decide
alike and reach the same collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from paddle import Tensor, nn

from ppdist.data.types import Batch
from ppdist.losses.base import LossOutput

Groups = dict[str, dict[str, np.ndarray]]  # of a checkpoint: one file each
Pass = Callable[[Batch], LossOutput]  # forward and backward of a micro-batch


class Verdict(IntEnum):
    """Verdicts of policies on a step, for all ranks; of several verdicts the strictest counts."""

    APPLY = 0
    SKIP = 1  # the step counts, but changes no weights
    REPEAT = 2  # as if there had been no step: it is made again, or the run ends


@dataclass(frozen=True)
class StepResult:
    """Results of a step: sums over all ranks and micro-batches.

    Every rank has them, but for `own_...`, which are of this rank.

    Attributes:
        losses: `loss` and its parts, normalised like the gradient.
        gradient_norm: before clipping; nan: not finite, or not applied for another reason.
        finite: loss, gradient and running statistics were, on all ranks.
        totals: the votes of policies, summed over ranks.
        searching: skipped only because the loss scale of float16 was still too high.
        synchronised: all ranks hold the same weights now.
        own_loss: sum over this rank's images, not normalised.
        own_images: positions of the images, where the step was not applied.
        own_micro_batches: of images; of one that is spread, an even share is 1.
        own_not_finite: names of terms that were not finite and stopped the step.
    """

    losses: dict[str, float]
    images: int
    gradient_norm: float
    verdict: Verdict
    finite: bool
    totals: Mapping[str, float]
    searching: bool
    synchronised: bool
    own_loss: float
    own_images: list[int]
    own_micro_batches: float
    own_not_finite: list[str]

    @property
    def applied(self) -> bool:
        """Returns True if the weights were updated, on all ranks."""
        return self.verdict is Verdict.APPLY


class StepPolicy:
    """Base of policies of a step; override what you need.

    Only hooks marked so may communicate, and then on every rank alike.  Steps count from 0.

    Attributes:
        votes: names of the numbers that `vote` returns; they are summed over ranks once a step,
            after backward.
    """

    votes: tuple[str, ...] = ()

    def before_step(self, step: int, synchronised: bool) -> None:
        """Called before the images of a step are fetched.  May communicate.

        Args: synchronised: all ranks hold the same weights.
        """

    def around(self, run: Pass, batch: Batch, communicated: Callable[[], bool]) -> LossOutput:
        """Runs the passes of a micro-batch.  Never communicates except by `run`.

        Args:
            run: runs them; it may be called once more, with another batch, if it raised.
            communicated: returns True if `run` has reached a collective, or should have: then it
                cannot be run again, because this rank may have missed one.
        """
        return run(batch)

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        """Returns this rank's number for each of `votes`."""
        return {}

    def verdict(self, totals: Mapping[str, float]) -> Verdict:
        """Decides by the votes of all ranks."""
        return Verdict.APPLY

    def after_update(self, step: int, verdict: Verdict, synchronised: bool) -> None:
        """Called at the end of a step, also of a skipped one.  May communicate.

        Args: synchronised: all ranks hold the same weights now.
        """

    def averaged(self) -> Mapping[str, Tensor]:
        """Returns the weights to evaluate instead of the model's, by key; {}: none.

        They are the same on all ranks.
        """
        return {}

    def state(self) -> tuple[Groups, dict[str, Any]]:
        """Returns the state that a resumed run needs: arrays, and facts as JSON."""
        return {}, {}

    def load(self, groups: Mapping[str, Mapping[str, np.ndarray] | None], facts: Any) -> None:
        """Restores what `state` returned, from a checkpoint or in a rollback.

        Args:
            groups: all arrays of the checkpoint, `model` included; None or absent: it has none.
            facts: state.json of the checkpoint.
        """


def weights_to_evaluate(model: nn.Layer, policies: Sequence[StepPolicy]) -> Mapping[str, Tensor]:
    """Returns the average of the weights, or else the weights, by state-dict key."""
    averages = (policy.averaged() for policy in policies)
    return next(filter(None, averages), dict(model.state_dict()))
