"""Policies of a step: what may change it and is not its mathematics.

Whatever a policy decides, it decides by the step, by settings and by totals over all ranks alone.
So all ranks decide alike and reach the same collectives.
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
    """What becomes of a step on all ranks; of several verdicts the strictest counts."""

    APPLY = 0
    SKIP = 1  # it counts, and leaves no trace in what is learned
    REPEAT = 2  # as if there had been no step: it is made again, or the run ends


@dataclass(frozen=True)
class StepResult:
    """Results of a step: sums over all ranks and micro-batches.

    Every rank has them, but for `own_...`, which are of this rank.

    Attributes:
        losses: `loss` and its parts, normalised like the gradient.
        gradient_norm: before clipping; nan: not finite, or not applied for another reason.
        finite: loss, gradient and running statistics were, on all ranks.
        totals: what policies voted, summed over ranks.
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
        """Whether the weights were updated, on all ranks."""
        return self.verdict is Verdict.APPLY


class StepPolicy:
    """Base of all; override what you need.

    Only hooks marked so may communicate, and then on every rank alike.  Steps count from 0.

    Attributes:
        votes: names of what `vote` gives; they are summed over ranks once a step, after backward.
    """

    votes: tuple[str, ...] = ()

    def before_step(self, step: int, synchronised: bool) -> None:
        """Called before the images of a step are fetched.  May communicate.

        Args: synchronised: all ranks hold the same weights.
        """

    def around(self, run: Pass, batch: Batch, communicated: Callable[[], bool]) -> LossOutput:
        """Makes the passes of a micro-batch.  Never communicates but by `run`.

        Args:
            run: makes them; it may be called once more, with another batch, if it raised.
            communicated: whether this rank has met others within `run`, or should have: then what
                it has missed cannot be made good.
        """
        return run(batch)

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        """Gives this rank's number for each of `votes`."""
        return {}

    def verdict(self, totals: Mapping[str, float]) -> Verdict:
        """Decides by the votes of all ranks."""
        return Verdict.APPLY

    def after_update(self, step: int, verdict: Verdict, synchronised: bool) -> None:
        """Called at the end of a step, also of one that was left out.  May communicate.

        Args: synchronised: all ranks hold the same weights now.
        """

    def averaged(self) -> Mapping[str, Tensor]:
        """Weights to evaluate instead of the model's, by key, the same on all ranks; {}: none."""
        return {}

    def state(self) -> tuple[Groups, dict[str, Any]]:
        """What a resumed run needs: arrays, and facts as JSON."""
        return {}, {}

    def load(self, groups: Mapping[str, Mapping[str, np.ndarray] | None], facts: Any) -> None:
        """Restores what `state` gave, from a checkpoint or in a rollback.

        Args:
            groups: all of the checkpoint, with `model`; None or absent: it has none of these.
            facts: state.json of the checkpoint.
        """


def weights_to_evaluate(model: nn.Layer, policies: Sequence[StepPolicy]) -> Mapping[str, Tensor]:
    """The average of the weights, or where there is none the weights, by state-dict key."""
    averages = (policy.averaged() for policy in policies)
    return next(filter(None, averages), dict(model.state_dict()))
