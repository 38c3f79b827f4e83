"""Steps that are not finite: skipped, and after several in a row undone at half the rate."""

import math
from typing import Any

from ppdist.common.errors import UserError
from ppdist.common.run_log import RunLog
from ppdist.distributed import comm
from ppdist.engine.bad_steps import BadSteps
from ppdist.engine.checkpoint import Snapshot
from ppdist.engine.run_policy import Next, RunPolicy
from ppdist.engine.state import TrainState, restore_state
from ppdist.engine.step_policy import StepResult, Verdict
from ppdist.engine.train_step import TrainStep

MAX_ROLLBACKS = 3  # of a whole run; the last continues at an eighth of the learning rate


class Rollback(RunPolicy):
    """The policy that rolls back to the last snapshot taken while steps were finite."""

    def __init__(self, train_step: TrainStep, limit: int, bad_steps: BadSteps, log: RunLog) -> None:
        """Args: limit: `train.bad_steps_limit`."""
        self._train_step = train_step
        self._limit = limit
        self._bad_steps = bad_steps
        self._log = log
        self._good_snapshot: Snapshot | None = None
        self._repeated_step = -1  # of the snapshot to which `roll_back_once` has gone back

    def keep(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot for rollbacks unless it was taken during bad steps.  Local.

        A run that resumes from such a snapshot (the best, or the end) rolls back no further.
        """
        if self._good_snapshot is None or not snapshot.state["bad_steps"]:
            self._good_snapshot = snapshot

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        """Handles a step that was skipped because of non-finite values.

        Raises: UserError, on every rank: rolling back did not help.
        """
        if result is not None and result.applied:
            state.bad_steps = 0
        if result is None or result.finite or result.verdict is Verdict.REPEAT:
            return Next.CONTINUE
        step = state.step + 1
        norms = f"loss {result.losses['loss']:g}, gradient norm {result.gradient_norm:g}"
        scale = self._train_step.precision.loss_scale
        if result.searching:  # the scale starts high and finds its level, which is no fault
            self._log.warning(
                f"step {step}: {norms}: float16 overflow, step skipped on all ranks; the "
                f"loss scale is now {scale:g}"
            )
            return Next.CONTINUE
        state.bad_steps += 1
        hint = ""
        if 0 < scale < 1:
            hint = (
                "; float16 does not reach that far: set train.amp.dtype: bfloat16, which needs no "
                "loss scale"
            )
        _, terms = self._bad_steps.add(
            step, "not finite", result.own_images, result.own_loss, result.own_not_finite
        )
        self._log.warning(
            f"step {step}: {norms}: not finite: {terms}; step skipped on all ranks{hint}"
        )
        if state.bad_steps < self._limit:
            return Next.CONTINUE
        self._go_back(state, step, terms, math.isfinite(result.losses["loss"]), hint)
        return Next.ROLLED_BACK

    def _go_back(
        self, state: TrainState, step: int, terms: str, finite_loss: bool, hint: str
    ) -> None:
        path = comm.run_on_main(lambda: self._bad_steps.path)
        if state.rollbacks >= MAX_ROLLBACKS:
            remedy = "lower optimizer.lr, set train.clip_norm, or"
            if finite_loss:  # then a high learning rate is not the cause
                remedy = "look at these images and their boxes, or"
            raise UserError(
                f"loss or gradient was not finite for {self._limit} steps in a row, up to step "
                f"{step} ({terms}), and {MAX_ROLLBACKS} rollbacks, each with half the learning "
                f"rate, did not help; their images are listed in {path}",
                code="training_diverged",
                fix=f"{remedy} turn train.amp off; earlier checkpoints are intact{hint}",
            )
        self._restore(state)
        state.rollbacks += 1
        factor = state.lr_factor
        self._log.warning(
            f"not finite for {self._limit} steps in a row, up to step {step}: rolled back to the "
            f"weights after step {state.step}, with {factor:g} of the learning rate from now "
            f"on (rollback {state.rollbacks} of at most {MAX_ROLLBACKS}); the images of these "
            f"steps are listed in {path}"
        )
        record = _make_rollback_record(state, step, "loss or gradient not finite")
        self._log.metrics({**record, "lr_factor": factor})

    def roll_back_once(self, state: TrainState, step: int) -> bool:
        """Rolls back after a step at which replicas differ and none is known to be right.

        Returns: True if it rolled back.  It does so only once for each snapshot, because steps that
            make replicas differ again would be repeated forever.
        """
        assert self._good_snapshot is not None, "nothing was kept"
        if self._repeated_step == self._good_snapshot.step:
            return False
        self._repeated_step = self._good_snapshot.step
        self._restore(state)
        self._log.warning(
            f"after step {step}: rolled back to each rank's copy of the weights after step "
            f"{state.step}; repeating the steps since"
        )
        record = _make_rollback_record(state, step, "ranks held different weights")
        self._log.metrics(record)
        return True

    def _restore(self, state: TrainState) -> None:
        assert self._good_snapshot is not None, "nothing was kept"
        restored, _ = restore_state(self._good_snapshot, self._train_step)
        state.roll_back_to(restored)
        self._log.rollback(state.step)


def _make_rollback_record(state: TrainState, step: int, reason: str) -> dict[str, Any]:
    """Returns the record of a rollback from a step to the current step, for metrics.jsonl."""
    return {"step": state.step, "returned_from_step": step, "reason": reason}
