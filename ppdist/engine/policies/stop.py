"""Requests to stop: a signal to one rank ends the run on all, with a checkpoint."""

from collections.abc import Mapping, Sequence

from ppdist.data.types import Batch
from ppdist.engine.run_policy import Next, RunPolicy
from ppdist.engine.state import TrainState
from ppdist.engine.step_policy import StepPolicy, StepResult
from ppdist.engine.stopping import StopRequest

_VOTE = "stop"


class Stop(StepPolicy, RunPolicy):
    """The policy that stops all ranks after one was asked to stop."""

    votes = (_VOTE,)

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        return {_VOTE: self._request.made}

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        """Stops after a request; with local SGD, not before all ranks hold the same weights."""
        if result is not None and result.synchronised and result.totals[_VOTE]:
            return Next.SAVE_AND_STOP
        return Next.CONTINUE
