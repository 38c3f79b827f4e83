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

Groups = dict[str, dict[str, np.ndarray]]  # the arrays of a checkpoint, one file per group
Pass = Callable[[Batch], LossOutput]  # forward and backward of a micro-batch


class Verdict(IntEnum):
    """A policy's verdict on a step, for all ranks; if policies differ, the strictest counts."""

    APPLY = 0
    SKIP = 1  # the step counts, but changes no weights
    REPEAT = 2  # the step is undone: it is repeated, or the run ends


@dataclass(frozen=True)
class StepResult:
    """Results of a step: sums over all ranks and micro-batches.

    They are the same on every rank, except for `own_...`, which describe this rank alone.

    Attributes:
        losses: `loss` and its parts, normalised like the gradient.
        gradient_norm: before clipping; nan if not finite, or if the step was not applied for
            another reason.
        finite: whether loss, gradient and running statistics were finite on all ranks.
        totals: the votes of policies, summed over ranks.
        searching: the step was skipped only because the loss scale of float16 was still too high.
        synchronised: whether all ranks now hold the same weights.
        own_loss: sum over this rank's images, not normalised.
        own_images: positions of the images, if the step was not applied.
        own_micro_batches: number of micro-batches with images; for a micro-batch that is spread
            over ranks, an even share is 1.
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
    """Base class for policies of a step; override the methods you need.

    Only hooks marked "May communicate" may do so, and then on all ranks alike.  Steps count from 0.

    Attributes:
        votes: names of the numbers that `vote` returns; they are summed over ranks once per step,
            after the backward pass.
    """

    votes: tuple[str, ...] = ()

    def before_step(self, step: int, synchronised: bool) -> None:
        """Called before the images of a step are fetched.  May communicate.

        Args: synchronised: whether all ranks hold the same weights.
        """

    def around(self, run: Pass, batch: Batch, communicated: Callable[[], bool]) -> LossOutput:
        """Runs the passes of a micro-batch.  Never communicates except by `run`.

        Args:
            run: runs the passes; if it raised, it may be called once more, with another batch.
            communicated: returns True if `run` has reached a collective, or should have: then it
                cannot be run again, because this rank may have missed one.
        """
        return run(batch)

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        """Returns this rank's number for each of `votes`."""
        return {}

    def verdict(self, totals: Mapping[str, float]) -> Verdict:
        """Decides on the step according to the votes of all ranks."""
        return Verdict.APPLY

    def after_update(self, step: int, verdict: Verdict, synchronised: bool) -> None:
        """Called at the end of each step, even if it was skipped.  May communicate.

        Args: synchronised: whether all ranks now hold the same weights.
        """

    def averaged(self) -> Mapping[str, Tensor]:
        """Returns the weights to evaluate instead of the model's, by key; {} if there are none.

        They are the same on all ranks.
        """
        return {}

    def state(self) -> tuple[Groups, dict[str, Any]]:
        """Returns the state that a resumed run needs: arrays, and facts as JSON."""
        return {}, {}

    def load(self, groups: Mapping[str, Mapping[str, np.ndarray] | None], facts: Any) -> None:
        """Restores what `state` returned, from a checkpoint or in a rollback.

        Args:
            groups: all arrays of the checkpoint, including `model`, by group; a group is None or
                absent if the checkpoint lacks it.
            facts: the content of the checkpoint's state.json.
        """


def weights_to_evaluate(model: nn.Layer, policies: Sequence[StepPolicy]) -> Mapping[str, Tensor]:
    """Returns the averaged weights, or the weights if there is no average, by state-dict key."""
    averages = (policy.averaged() for policy in policies)
    return next(filter(None, averages), dict(model.state_dict()))
