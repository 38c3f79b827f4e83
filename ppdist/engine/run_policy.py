"""Policies of a run, which decide what `Trainer.fit` does after a step.

Like policies of a step (`step_policy.py`), they decide by values that are equal on all ranks.  All
hooks may communicate, except those marked Local.
"""

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum

from ppdist.engine.checkpoint import Snapshot
from ppdist.engine.state import TrainState
from ppdist.engine.step_policy import StepResult


class Next(IntEnum):
    """Answer of a policy after a step; if policies differ, the strictest answer counts."""

    CONTINUE = 0
    EVALUATE = 1
    OUT_OF_TIME = 2  # evaluate, save, end
    SAVE_AND_STOP = 3  # take seconds for the checkpoint, not minutes for a metric
    REPEAT = 4  # the step is made again
    ROLLED_BACK = 5  # the run is back at an earlier step


class RunPolicy:
    """Base of policies of a run; override what you need.  `state.step` counts finished steps."""

    def begin(self, state: TrainState) -> Next:
        """Called before the first step of this process."""
        return Next.CONTINUE

    def skips(self, state: TrainState) -> bool:
        """Returns True if this policy has skipped the next step."""
        return False

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Returns a context in which step `step` (from 1) runs.  Local."""
        return nullcontext()

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        """Called after a step, which `state` does not count yet.

        Args: result: the results of the step; None if it was skipped.
        """
        return Next.CONTINUE

    def after_rollback(self, state: TrainState) -> Next:
        """Called after a rollback, when the run is back at the step in `state`."""
        return Next.CONTINUE

    def keep(self, snapshot: Snapshot) -> None:
        """Called with a snapshot when the run begins, and whenever it saves.  Local."""

    def end(self, state: TrainState, reason: str) -> None:
        """Called before the last checkpoint; `reason` as in `Callback.on_train_end`."""
