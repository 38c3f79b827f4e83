"""Trains a model to the end: step, log, evaluate, save, stop.

`Trainer` has all that changes a run's numbers; a `Callback` only observes.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ppdist.common.errors import CheckpointError, StorageError
from ppdist.common.eta import EVALUATION
from ppdist.common.job import hosts_change
from ppdist.common.process import STOPPED
from ppdist.data.types import Batch
from ppdist.distributed import comm, heartbeat
from ppdist.engine.callbacks import Callback, TrainingRun
from ppdist.engine.clock import Clock, Stopwatch
from ppdist.engine.early_stopping import LossCurves
from ppdist.engine.evaluation import Evaluations
from ppdist.engine.parts import EvaluationStopped, Sums, TrainData, TrainLog
from ppdist.engine.run_policy import Next, RunPolicy
from ppdist.engine.saving import Saving
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.state import (
    Snapshot,
    TrainState,
    capture_state,
    restore_state,
)
from ppdist.engine.step_policy import StepResult, Verdict
from ppdist.engine.step_sums import EpochMeans
from ppdist.engine.stopping import StopRequest, listen
from ppdist.engine.train_step import TrainStep

_LOGGER = logging.getLogger("ppdist.engine")


@dataclass(frozen=True)
class TrainingParts:
    """The components of a training run, which `build.py` creates from the configuration.

    Attributes:
        batch_source: this rank's micro-batches.
        policies: asked after each step in this order, until one repeats the step or rolls back.
        stop: the stop request of this process.
        epoch_means, record_sums: the callbacks whose sums a checkpoint holds.
        callbacks: called in this order at each hook.
    """

    train_step: TrainStep
    batch_source: TrainData
    policies: Sequence[RunPolicy]
    stop: StopRequest
    schedule: ScheduleSetup
    evaluations: Evaluations
    saving: Saving
    log: TrainLog
    epoch_means: EpochMeans
    record_sums: Sums
    callbacks: Sequence[Callback]


class Trainer:
    """The training loop; every rank builds one and calls `fit`."""

    def __init__(self, parts: TrainingParts) -> None:
        self.train_step, self.batch_source = parts.train_step, parts.batch_source
        self.policies, self.stop = parts.policies, parts.stop
        self.schedule = parts.schedule
        self.evaluations, self.saving = parts.evaluations, parts.saving
        self.log, self.callbacks = parts.log, [*parts.callbacks]
        self.epoch_means, self.record_sums = parts.epoch_means, parts.record_sums
        self.state = TrainState()
        self._steps: Iterator[Iterator[Batch]] = iter(())

    def fit(self) -> int:
        """Trains until the end of the run or a stop signal.  Collective.

        Returns: the exit code: 0; 75 after a signal and a clean checkpoint.
        Raises: UserError: loss or gradient kept being non-finite, see `train.bad_steps_limit`, or
            another training run has taken the folder.
            StorageError: images stay unavailable; the progress is saved, and a restart resumes.
        """
        try:
            following = self._begin()
            while following <= Next.EVALUATE and self.has_steps_left:
                following = self._make_step()
                if following in (Next.EVALUATE, Next.OUT_OF_TIME) and not self._evaluate():
                    following = Next.SAVE_AND_STOP
                self._end_epoch()
                if following <= Next.EVALUATE and self.saving.is_due(self.state):
                    self._save()
            return self._end(following)
        except StorageError:  # on all ranks
            saved = self._save_before_end()
            stopping = any(comm.all_gather_object(self.stop.made))
            if not (saved and stopping):
                self.log.limit_close()  # a restart waits for the end of this attempt
                raise
        return self._end(Next.SAVE_AND_STOP)

    @property
    def has_steps_left(self) -> bool:
        """Returns True if steps are left, as after a signal or `train.hours`."""
        return self.state.step < self.schedule.total_steps and not self.evaluations.reason_to_end(
            self.state
        )

    def restore(self, saved: Snapshot, in_place: bool, rescored: bool) -> None:
        """Continues from a checkpoint; called before `fit`.  Collective.

        Args:
            in_place: whether the checkpoint is in the folder to which this run saves.
            rescored: whether the best score so far was measured with other settings, so that it no
                longer counts.
        Raises: CheckpointError: it belongs to a model with other shapes.
        """
        self.state, warning = restore_state(saved, self.train_step)
        if warning:
            self.log.warning(warning)
        if rescored:
            self.state.best, self.state.best_step = -math.inf, 0
            self.state.losses = LossCurves()
        # Early stopping that was switched off for a while starts over.
        if rescored or self.evaluations.early_stopping is None:
            self.state.early_stopping = None
        if in_place:
            self.saving.resume(self.state)

    # Begin and end

    def _begin(self) -> Next:
        """Prepares the first step of this process.  Collective.

        Returns: CONTINUE, or the reason why the run ends without a step.
        """
        listen(self._ask_to_stop)
        state = self.state
        run = TrainingRun(
            train_step=self.train_step,
            evaluated_model=self.evaluations.model,
            output_dir=self.saving.output_dir,
            done_steps=state.step,
            total_steps=self.schedule.total_steps,
        )
        self._restore_sums()
        self._notify(lambda callback: callback.on_train_begin(run))
        following = max([Next.CONTINUE, *(policy.begin(state) for policy in self.policies)])
        if following is not Next.CONTINUE:
            return following
        was_missed = 0 < state.step != state.evaluated_step  # a stop skips an evaluation
        is_due = self.evaluations.is_due(state.step) or state.step == self.schedule.total_steps
        if was_missed and is_due and not self._evaluate():
            return Next.SAVE_AND_STOP
        self._end_epoch()  # an attempt that lost its images may have saved it without a report
        snapshot = self._capture()
        self._keep(snapshot)
        if self.has_steps_left:
            moments = 2 if self.schedule.optimizer.name == "adamw" else 1
            self.saving.require_room(snapshot, 0 if snapshot.groups["optimizer"] else moments)
        self._seek()
        self.log.eta.begin_steps()
        return Next.CONTINUE

    def _restore_sums(self) -> None:
        self.epoch_means.restore(self.state.epoch_sums, self.state.step)
        self.record_sums.restore(self.state.record_sums, self.state.step)

    def _ask_to_stop(self) -> None:
        self.stop.made = True
        self.batch_source.abort_waits()
        self.evaluations.abort_waits()

    def _end(self, following: Next) -> int:
        """Ends with a checkpoint of this step on disk.  Collective.

        Returns: the exit code of `fit`.
        """
        state = self.state
        reason = {Next.SAVE_AND_STOP: "signal", Next.OUT_OF_TIME: "hours"}.get(following, "total")
        if reason == "total" and state.step < self.schedule.total_steps:
            reason = "early_stopping"
            cause = self.evaluations.reason_to_end(state)
            self.log.info(f"training ends early, after step {state.step}: {cause}")
        self._save()
        self.saving.finish(state.step)
        for policy in self.policies:
            policy.end(state, reason)
        heartbeat.beat("end", state.step)
        self.log.metrics({"step": state.step, "finished": reason})
        self._notify(lambda callback: callback.on_train_end(state.step, reason))
        self.evaluations.log_best(state, self.saving.folder / "best")
        if reason != "signal":
            return 0
        self.log.limit_close()
        if hosts_change():
            self.log.info(f"hosts go or come after step {state.step}; the job goes on from there")
        else:
            self.log.warning(
                f"stopped by a signal after step {state.step}; --resume continues from there"
            )
        return STOPPED

    def _save_before_end(self) -> bool:
        """Saves the progress, if a run can resume from it.  Collective.

        Returns: True if it was saved.
        """
        step = self.state.step
        can_resume = step > 0 and self.train_step.exchange.synchronised(step - 1)
        if not can_resume or self.state.bad_steps:
            return False
        try:
            self._save()
            self.saving.finish(step)
        except CheckpointError as error:  # they may lie on the same storage
            self.log.warning(f"{error}")
            return False
        self.log.info(f"the checkpoint of step {step} is on disk")
        return True

    def _end_epoch(self) -> None:
        """Reports an epoch that ended with this step, after its evaluation."""
        step = self.state.step
        if self.epoch_means.ends(step):
            epoch, numbers = self.epoch_means.take(step)
            self._notify(lambda callback: callback.on_epoch_end(epoch, step, numbers))

    def _notify(self, call: Callable[[Callback], None]) -> None:
        """Calls a hook of all callbacks."""
        for callback in self.callbacks:
            call(callback)

    # Step

    def _seek(self) -> None:
        """Makes the next batches that are fetched those of the next step."""
        self._steps = self.batch_source.steps(self.state.step, self.state.class_scores)

    def _make_step(self) -> Next:
        """Runs the next step until it need not be repeated; returns what follows.  Collective."""
        state, following = self.state, Next.REPEAT
        while following >= Next.REPEAT:
            following = self._try_step()
        is_last = state.step == self.schedule.total_steps
        if is_last or state.bad_steps:  # amid bad steps no run stops and nothing is saved
            following = Next.CONTINUE
        if is_last or self.evaluations.is_due(state.step):
            following = max(following, Next.EVALUATE)
        return following

    def _try_step(self) -> Next:
        """Runs or skips the next step; returns the answer of the policies.  Collective."""
        state = self.state
        if self.saving.is_lost() and not self.stop.made:
            self._ask_to_stop()  # other ranks cannot see it; `Saving.finish` raises on all
        self.saving.warn_of_troubles()
        watch = Stopwatch()  # from here: delays before the step count as this rank's own time
        self._notify(lambda callback: callback.on_step_begin(state.step + 1))
        left_out = any(policy.skips(state) for policy in self.policies)
        result = None if left_out else self._train_step(watch)
        following = self._ask_policies(result)
        if following is Next.ROLLED_BACK:
            self._follow_rollback()
        if following >= Next.REPEAT:
            self._seek()
            return following
        state.step += 1
        if left_out:
            self._seek()
        return following

    def _train_step(self, watch: Stopwatch) -> StepResult:
        """Runs one optimizer step and reports it.  Args: watch: started when the step began."""
        state, clock = self.state, Clock()
        rates = self.schedule.lr_scheduler.rates(state.step).scaled(state.lr_factor)
        with ExitStack() as around:
            for policy in self.policies:
                around.enter_context(policy.around_step(state.step + 1))
            result = self.train_step(next(self._steps), state.step, rates, clock)
        seconds = watch.stop(clock.seconds["data"])
        step = state.step + 1
        if result.verdict is not Verdict.REPEAT:
            self._notify(lambda callback: callback.on_step_end(step, result, rates.lr, seconds))
        if result.applied:
            state.losses.trained(result.losses["loss"])
        return result

    def _ask_policies(self, result: StepResult | None) -> Next:
        """Returns the strictest answer of the policies after a step.

        Args: result: the results of the step; None if it was skipped.
        """
        following = Next.CONTINUE
        for policy in self.policies:
            following = max(following, policy.after_step(self.state, result))
            if following >= Next.REPEAT:
                return following
        repeats = result is not None and result.verdict is Verdict.REPEAT
        return Next.REPEAT if repeats else following

    def _follow_rollback(self) -> None:
        """Resets checkpoints, sums and callbacks to the step of a rollback."""
        self.saving.go_back(self.state)
        self._restore_sums()
        self._notify(lambda callback: callback.on_rollback(self.state.step))
        for policy in self.policies:
            if policy.after_rollback(self.state) is Next.ROLLED_BACK:
                self._follow_rollback()

    # Evaluate

    def _evaluate(self) -> bool:
        """Evaluates the averaged weights, if the run evaluates at all.  Collective.

        Returns: False, on all ranks, if a rank was asked to stop, so that a resumed run has to
            evaluate.
        """
        state, evaluations = self.state, self.evaluations
        if evaluations.evaluator is None:
            return True
        with self.log.spending(EVALUATION, state.step):
            try:
                metrics = evaluations.measure(self.train_step, state.step, self.stop)
            except EvaluationStopped:
                return False
            is_best = metrics is not None and evaluations.learn(state, metrics)
            if metrics is not None:
                self._notify(
                    lambda callback: callback.on_evaluate_end(state.step, metrics, is_best)
                )
        if is_best:
            self._keep_best()
        if self.batch_source.follows_scores and state.step < self.schedule.total_steps:
            self._seek()
        return True

    def _keep_best(self) -> None:
        """Saves a new best checkpoint, and makes `best` point to it.  Collective.

        Its evaluation and its epoch are recorded before it is saved, because a run that resumes
        there repeats neither.
        """
        step = self.state.step
        if self.saving.saved_step != step:
            self._end_epoch()
            self._save()
        else:  # Resumed here: the checkpoint lacks the score, so another resume evaluates again.
            self.saving.mend_best(step)

    # Save

    def _save(self) -> None:
        """Saves this step, unless it is saved already.  Collective; no rank waits for the disk."""
        snapshot = self.saving.save(self.state.step, self._capture)
        if snapshot is not None:
            self._keep(snapshot)
            self._notify(lambda callback: callback.on_save(snapshot.step))

    def _keep(self, snapshot: Snapshot) -> None:
        """Passes the policies a snapshot to which the run may roll back."""
        for policy in self.policies:
            policy.keep(snapshot)

    def _capture(self) -> Snapshot:
        """Copies everything that a run needs to resume.  Collective."""
        self.state.epoch_sums = self.epoch_means.sums()
        self.state.record_sums = self.record_sums.sums()
        return capture_state(self.train_step, self.state, self.schedule)
