"""Policies of a run: what may change what `Trainer.fit` does after a step.

As within a step (`step_policy.py`), they decide by what all ranks hold alike.  All hooks may
communicate, but for those marked Local.
"""

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum

from ppdist.engine.checkpoint import Snapshot
from ppdist.engine.state import TrainState
from ppdist.engine.step_policy import StepResult


class Next(IntEnum):
    """What a run does after a step; of several answers the strictest counts."""

    CONTINUE = 0
    EVALUATE = 1
    OUT_OF_TIME = 2  # evaluate, save, end
    SAVE_AND_STOP = 3  # take seconds for the checkpoint, not minutes for a metric
    REPEAT = 4  # the step is made again
    ROLLED_BACK = 5  # the run is back at an earlier step


class RunPolicy:
    """Base of all; override what you need.  `state.step` counts the steps that are made."""

    def begin(self, state: TrainState) -> Next:
        """Called before the first step of this process."""
        return Next.CONTINUE

    def skips(self, state: TrainState) -> bool:
        """Whether the next step is left out; if so, this policy has left it out."""
        return False

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Surrounds a step (from 1).  Local."""
        return nullcontext()

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        """Called after a step, which `state` does not count yet; None: it was left out."""
        return Next.CONTINUE

    def after_rollback(self, state: TrainState) -> Next:
        """Called once the run is back at the step that `state` counts."""
        return Next.CONTINUE

    def keep(self, snapshot: Snapshot) -> None:
        """Called where the run begins, and where it saves.  Local."""

    def end(self, state: TrainState, reason: str) -> None:
        """Called before the last checkpoint; `reason` as in `Callback.on_train_end`."""
