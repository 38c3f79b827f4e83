"""The time limit of a run (`train.hours`): rank 0 reads its clock, and all ranks end together."""

import math
from collections.abc import Mapping, Sequence

from ppdist.common.eta import duration
from ppdist.common.run_log import RunLog
from ppdist.data.types import Batch
from ppdist.distributed import comm
from ppdist.engine.run_policy import Next, RunPolicy
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.state import TrainState
from ppdist.engine.step_policy import StepPolicy, StepResult
from ppdist.engine.time_budget import TimeBudget

_VOTE = "time_is_up"


class TimeLimit(StepPolicy, RunPolicy):
    """The policy that ends the run in time for an evaluation and a checkpoint."""

    votes = (_VOTE,)

    def __init__(self, budget: TimeBudget, schedule: ScheduleSetup, log: RunLog) -> None:
        self._budget = budget
        self._schedule = schedule
        self._log = log

    def begin(self, state: TrainState) -> Next:
        """Ends a resumed run at once if there is no time for another step."""
        self._log.info(f"{self._budget}")
        if not state.step or state.step == self._schedule.total_steps:
            return Next.CONTINUE
        return Next.OUT_OF_TIME if comm.run_on_main(self._is_over) else Next.CONTINUE

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        # Only rank 0 votes, because the hosts' clocks differ.
        return {_VOTE: comm.is_main() and self._is_over()}

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        if result is not None and result.synchronised and result.totals[_VOTE]:
            return Next.OUT_OF_TIME
        return Next.CONTINUE

    def end(self, state: TrainState, reason: str) -> None:
        if reason == "hours":
            step, total = state.step, self._schedule.total_steps
            epoch, epochs = (math.ceil(n / self._schedule.steps_per_epoch) for n in (step, total))
            self._log.info(
                f"training ends after {duration(self._budget.elapsed())} of train.hours: "
                f"{self._budget.hours:g}, in epoch {epoch} of {epochs} (step {step} of {total}); "
                "--resume continues from there"
            )
        self._log.limit_close(self._budget.left())

    def _is_over(self) -> bool:
        return self._budget.is_over(self._log.closing_seconds())
