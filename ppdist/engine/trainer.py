"""Trains a model to the end: step, log, evaluate, save, stop.

`Trainer` holds what changes a run's numbers; what only observes is a `Callback`.
"""

import logging
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ppdist.common.errors import CheckpointError, StorageError
from ppdist.common.eta import EVALUATION, SAVING, duration
from ppdist.common.files import is_lost, require_held
from ppdist.common.process import STOPPED
from ppdist.common.run_log import RunLog
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import dump_yaml
from ppdist.data.types import Batch
from ppdist.distributed import comm, heartbeat
from ppdist.engine.callbacks import Callback, TrainingRun
from ppdist.engine.checkpoint import (
    CheckpointWriter,
    newest_step,
    room_warning,
    set_aside,
)
from ppdist.engine.continuation import hosts_change
from ppdist.engine.data import BatchSource, Blocklist
from ppdist.engine.early_stopping import EarlyStopping, LossCurves
from ppdist.engine.evaluator import ClassificationEvaluator, EvaluationStopped, Evaluator
from ppdist.engine.monitor import (
    EpochLogger,
    EpochMeans,
    EvaluationLogger,
    HeartbeatCallback,
    MetricsLogger,
    Stopwatch,
    StragglerMonitor,
)
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.recovery import Recovery, check_replica_consistency, lr_factor
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.state import (
    Snapshot,
    TrainState,
    capture_state,
    copy_into,
    note_saved,
    restore_state,
)
from ppdist.engine.stopping import listen
from ppdist.engine.time_budget import TimeBudget
from ppdist.engine.train_step import Clock, StepResult, TrainStep
from ppdist.models.base import ImageModel
from ppdist.models.model_card import ModelCard

_LOGGER = logging.getLogger("ppdist.engine")


@dataclass(frozen=True)
class TrainingParts:
    """Components of a training run, each built from its configuration section.

    Attributes:
        batch_source: this rank's micro-batches.
        evaluator: None: no evaluation during training.
        evaluated_model: a second model that takes the averaged weights for evaluation; any model
            where there is no evaluator.
        budget: of wall time; only rank 0 asks its clock.  None: there is no limit.
        callbacks: called at each moment in this order, after those of the trainer.
    """

    train_step: TrainStep
    batch_source: BatchSource
    bad_images: Blocklist
    schedule: ScheduleSetup
    evaluator: Evaluator | ClassificationEvaluator | None
    evaluated_model: ImageModel
    model_card: ModelCard
    log: RunLog
    dirs: OutputDirs
    budget: TimeBudget | None = None
    callbacks: Sequence[Callback] = ()


class Trainer:
    """Trains until `schedule.total_steps`; every rank builds one and calls `fit`."""

    def __init__(self, config: ExperimentConfig, parts: TrainingParts) -> None:
        self.train_step, self.batch_source = parts.train_step, parts.batch_source
        self.bad_images, self.schedule = parts.bad_images, parts.schedule
        self.evaluator, self.evaluated_model = parts.evaluator, parts.evaluated_model
        self.log, self.budget = parts.log, parts.budget
        self.dirs = parts.dirs
        self.folder = self.dirs.folder / "checkpoints"
        self.writer = CheckpointWriter(
            self.folder, dump_yaml(config), config.checkpoint.keep, note_saved,
            parts.model_card, self.log.sync,
        )  # fmt: skip
        self.state = TrainState()
        self.early_stopping: EarlyStopping | None = None
        self.recovery = Recovery(
            train_step=self.train_step,
            batch_source=self.batch_source,
            schedule=self.schedule,
            log=self.log,
            output_dir=self.dirs.folder,
            bad_steps_limit=config.train.bad_steps_limit,
        )
        per_epoch, log = self.schedule.steps_per_epoch, self.log
        self.epoch_means = EpochMeans(per_epoch)
        self.metrics_logger = MetricsLogger(log, config.log.every_steps, per_epoch)
        shown = self.evaluator.headline[:2] if self.evaluator else ()
        self.callbacks = [
            HeartbeatCallback(),
            StragglerMonitor(log),
            self.metrics_logger,
            self.epoch_means,
            EpochLogger(log, self.epoch_means, per_epoch, shown),
        ]
        if self.evaluator is not None:
            self.best_metric = config.evaluate.metric or self.evaluator.headline[0]
            if config.early_stopping:
                self.early_stopping = EarlyStopping(config.early_stopping, self.best_metric)
            self.callbacks.append(EvaluationLogger(log, self.evaluator, per_epoch))
        self.callbacks += parts.callbacks
        self._set_intervals(config)
        self._saved_step, self._owes_save = -1, False  # the second: one was due
        self._batches: Iterator[Batch] = iter(())

    def fit(self) -> int:
        """Trains to the end or a signal.  Collective.

        Returns: 0; 75 after a signal and a clean checkpoint.
        Raises: UserError: loss or gradient stayed not finite, see `train.bad_steps_limit`, or
            another training has the folder by now.
            StorageError: images stay unavailable; what was learned is saved, and a restart resumes.
        """
        try:
            return self._fit()
        except StorageError:  # on all ranks
            saved = self._saves_before_end()
            stopping = any(comm.all_gather_object(self.state.stop))
            if not (saved and stopping):
                self.log.limit_close()  # a restart waits for the end of this attempt
                raise
        return self._stopped()

    @property
    def has_steps_left(self) -> bool:
        """Whether a resumed run would go on: a signal or `train.hours` ended this one."""
        return self.state.step < self.schedule.total_steps and not self._reason_to_end()

    def _fit(self) -> int:
        state, total = self.state, self.schedule.total_steps
        self._begin()
        if state.step and self._time_is_up_already():
            return self._out_of_time()
        if self._missed_an_evaluation() and not self._evaluate():
            return self._stopped()
        self._end_epoch()  # which an attempt that lost its images could save, but not report
        snapshot = self._capture()
        self.recovery.begin(state, snapshot)
        if comm.is_main() and (warning := room_warning(self.folder, snapshot, self.writer.keep)):
            self.log.warning(warning)
        self._seek()
        self.log.begin_steps()
        while state.step < total and not self._reason_to_end():
            self._warn_of_saving()
            watch = Stopwatch()  # what holds this rank up before its step is its own time, too
            self._each(lambda callback: callback.on_step_begin(state.step + 1))
            stopping = late = False
            if state.step + 1 in self.recovery.skipped_steps:
                self._skip_step()
            else:
                result = self._step(watch)
                if result is None:  # the step, or those before it too, are made again
                    continue
                stopping, late = result.stop_requested, result.time_is_up
            if self._due(self.check_every) and self._weights_differ():
                continue
            ended = state.step == total
            # During bad steps no run stops and nothing is saved: see Recovery.keep.
            settled = ended or not state.bad_steps
            stopping = stopping and settled and not ended
            late = late and settled and not ended
            # After a stop signal, take seconds for the checkpoint, not minutes for a metric.
            if (ended or late or self._due(self.evaluate_every)) and not stopping:
                stopping = not self._evaluate()
            self._end_epoch()
            if stopping:
                return self._stopped()
            if late:
                return self._out_of_time()
            self._owes_save |= ended or self._due(self.save_every)
            if self._owes_save and settled:
                self._save()
        if state.step < total:
            self.log.info(f"training ends early, after step {state.step}: {self._reason_to_end()}")
        self._end("total" if state.step == total else "early_stopping")
        return 0

    def restore(self, saved: Snapshot, own: bool, rescored: bool) -> None:
        """Continues from a checkpoint; called before `fit`.  Collective.

        Args:
            own: the checkpoint lies where this run writes its own.
            rescored: the best so far was measured otherwise, so whatever scores next is better.
        Raises: CheckpointError: it belongs to a model of another shape.
        """
        self.state, lost = restore_state(saved, self.train_step)
        if lost:
            self.log.warning(lost)
        if rescored:
            self.state.best, self.state.best_step = -math.inf, 0
            self.state.losses = LossCurves()
        if rescored or not self.early_stopping:  # switched off in between, it starts over
            self.state.early_stopping = None
        if own:
            self._saved_step = self.state.step
            comm.run_on_main(self._mend_links)

    # Begin and end

    def _set_intervals(self, config: ExperimentConfig) -> None:
        """Sets save, evaluation and check intervals in optimizer steps."""
        grad_sync = self.train_step.grad_sync
        save_every = config.checkpoint.every_steps or 0
        if config.checkpoint.every_steps is None and config.checkpoint.every_epochs > 0:
            save_every = self.schedule.interval(config.checkpoint.every_epochs)
        evaluate_every = self.schedule.interval(config.evaluate.every_epochs)
        self.save_every = grad_sync.next_synchronised(save_every)
        self.evaluate_every = grad_sync.next_synchronised(evaluate_every)
        self.check_every = grad_sync.next_synchronised(config.distributed.check_weights_every)
        self.log.expect(
            self.evaluate_every if self.evaluator else 0,
            self.save_every or self.schedule.total_steps,
            self.evaluator.images if self.evaluator else 0,
            self.schedule.total_batch,
        )

    def _begin(self) -> None:
        """Installs signal handlers and starts callbacks."""
        listen(self._ask_to_stop)
        state = self.state
        if self.budget is not None:
            self.log.info(f"{self.budget}")
        run = TrainingRun(
            train_step=self.train_step,
            evaluated_model=self.evaluated_model,
            output_dir=self.dirs.folder,
            done_steps=state.step,
            total_steps=self.schedule.total_steps,
        )
        self._restore_sums()
        self._each(lambda callback: callback.on_train_begin(run))

    def _restore_sums(self) -> None:
        self.epoch_means.restore(self.state.epoch_sums, self.state.step)
        self.metrics_logger.restore(self.state.record_sums, self.state.step)

    def _time_is_up_already(self) -> bool:
        """Whether `train.hours` leaves no time for another step.  Collective.

        Asked where a run resumes.
        """
        budget = self.budget
        if budget is None or self.state.step == self.schedule.total_steps:
            return False
        return bool(comm.run_on_main(lambda: budget.is_over(self.log.closing_seconds())))

    def _ask_to_stop(self) -> None:
        self.state.stop = True  # every rank hears of it in the next step's tally
        self.batch_source.abort_waits()
        if self.evaluator is not None:
            self.evaluator.abort_waits()

    def _reason_to_end(self) -> str:
        """Reason to end before the last step; "": there is none.

        The same on every rank.
        """
        if self.early_stopping is None:
            return ""
        return self.early_stopping.reason(self.state.early_stopping)

    def _stopped(self) -> int:
        self._end("signal")
        self.log.limit_close()
        step = self.state.step
        if hosts_change():
            self.log.info(f"hosts go or come after step {step}; the job goes on from there")
        else:
            self.log.warning(
                f"stopped by a signal after step {step}; --resume continues from there"
            )
        return STOPPED

    def _out_of_time(self) -> int:
        assert self.budget is not None
        step, total = self.state.step, self.schedule.total_steps
        epoch, epochs = (math.ceil(each / self.schedule.steps_per_epoch) for each in (step, total))
        self.log.info(
            f"training ends after {duration(self.budget.elapsed())} of train.hours: "
            f"{self.budget.hours:g}, in epoch {epoch} of {epochs} (step {step} of {total}); "
            "--resume continues from there"
        )
        self._end("hours")
        return 0

    def _end(self, reason: str) -> None:
        """Ends with a checkpoint of this step on disk.  Collective."""
        state = self.state
        self._save()
        self._finish_saving()
        if self.budget is not None:
            self.log.limit_close(self.budget.left())
        heartbeat.beat("end", state.step)
        self.log.metrics({"step": state.step, "finished": reason})
        self._each(lambda callback: callback.on_train_end(state.step, reason))
        if self.evaluator and (self.folder / "best").exists():
            self.log.info(
                f"best: {self.folder / 'best'}, step {state.best_step}, "
                f"{self.best_metric} {state.best:.4f}"
                + " (0.1 mAP50 + 0.9 mAP)"
                * (self.best_metric == "fitness")
            )

    def _saves_before_end(self) -> bool:
        """Saves what was learned, if a run can resume from it.  Collective.

        Returns: whether it saved.
        """
        step = self.state.step
        whole = step > 0 and self.train_step.grad_sync.synchronised(step - 1)
        if not whole or self.state.bad_steps:
            return False
        try:
            self._save()
            self._finish_saving()
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
            self._each(lambda callback: callback.on_epoch_end(epoch, step, numbers))

    def _each(self, call: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            call(callback)

    # Step

    def _seek(self) -> None:
        """Fetches the batches of the next step from here on."""
        self._batches = self.batch_source.batches(self.state.step, self.state.class_scores)

    def _step(self, watch: Stopwatch) -> StepResult | None:
        """Runs the next step; None: retry, perhaps from an earlier step.

        Args: watch: runs since this rank began the step.
        """
        state = self.state
        clock = Clock()
        rates = self.schedule.lr_scheduler.rates(state.step).scaled(lr_factor(state.rollbacks))
        numbers, stop = self.batch_source.numbers(state.step), state.stop
        known_bad = self.bad_images.known
        time_is_up = (
            self.budget is not None
            and comm.is_main()
            and self.budget.is_over(self.log.closing_seconds())
        )
        with self.recovery.watching_memory(state.step + 1):
            result = self.train_step(
                self._batches, numbers, state.step, rates, stop, clock, known_bad, time_is_up
            )
        seconds = watch.stop(clock.seconds["data"])
        if result.bad_somewhere:
            self._meet_bad_images(result.bad_images)
        if result.given_up:
            self.recovery.require_images(result)
            self.recovery.shrink_micro_batches(result, state)
            self._seek()
            return None
        step = state.step + 1
        self._each(lambda callback: callback.on_step_end(step, result, rates.lr, seconds))
        if result.applied:
            state.bad_steps = 0
            state.losses.trained(result.losses["loss"])
        elif self.recovery.handle_bad_step(result, state):
            self._rolled_back()
            return None
        state.step = step
        return result

    def _skip_step(self) -> None:
        """Skips a step and its batches."""
        self.recovery.skip_step(self.state)
        self.state.step += 1
        self._seek()

    def _weights_differ(self) -> bool:
        """Compares the weights of all ranks, which should be the same.  Collective.

        Returns: whether they were not, and the run is back at an earlier step.
        """
        warning, sure = check_replica_consistency(self.train_step)
        if warning:
            self.log.warning(f"after step {self.state.step}: {warning}")
        if sure or not self.recovery.roll_back_once(self.state):
            return False
        self._rolled_back()
        return True

    def _rolled_back(self) -> None:
        """Moves aside checkpoints beyond the step of a rollback.

        The run makes them again.
        """

        def move_aside() -> str:
            require_held(self.dirs.folder)
            self.writer.drop_beyond(self.state.step)
            try:
                aside = set_aside(self.folder, self.state.step)
                self._mend_links()
                note_saved(newest_step(self.folder))  # a restart would wait for one that was moved
            except (CheckpointError, OSError, ValueError) as error:
                return f"{error}; they hold steps that this run makes again"
            moved = f"checkpoints beyond step {self.state.step} are now in {aside}"
            return moved if aside else ""

        told = comm.run_on_main(move_aside)
        if told:
            self.log.warning(told)
        self._saved_step, self._owes_save = -1, False
        self._restore_sums()
        self._each(lambda callback: callback.on_rollback(self.state.step))
        self._weights_differ()  # each rank went back to what it had kept itself
        self._seek()

    def _meet_bad_images(self, found: dict[int, str]) -> None:
        """Counts and names unusable images.  Collective.

        This rank's loader has already warned of its own; only rank 0 writes the log.

        Raises: DataError, on every rank: too many.
        """
        for line in self.bad_images.add(found):
            self.log.warning(f"unusable image, substituted by another: {line}")
        if self.state.run is not None:
            self.state.run.bad_images = self.bad_images.known
        self.log.metrics({"step": self.state.step + 1, "bad_images": len(self.bad_images.known)})

    # Evaluate

    def _missed_an_evaluation(self) -> bool:
        """Whether a due evaluation was skipped on stop.

        A stop signal skips it.
        """
        step = self.state.step
        due = self._due(self.evaluate_every) or step == self.schedule.total_steps
        return 0 < step != self.state.evaluated_step and due

    def _evaluate(self) -> bool:
        """Evaluates the averaged weights, if the run evaluates at all.  Collective.

        Returns: False, on all ranks: one was asked to stop, and a resumed run has to do it.
        """
        if self.evaluator is None:
            return True
        with self.log.spending(EVALUATION, self.state.step):
            try:
                metrics = self._measure(self.evaluator)
            except EvaluationStopped:
                return False
            is_best = metrics is not None and self._learn_from(self.evaluator, metrics)
        if is_best:
            self._keep_best()
        if self.batch_source.follows_scores and self.state.step < self.schedule.total_steps:
            self._seek()
        return True

    def _measure(self, evaluator: Evaluator | ClassificationEvaluator) -> dict[str, float] | None:
        """Evaluates, once more if that fails; None: both failed.

        Training continues whatever fails here: evaluation has its own model.
        Raises: EvaluationStopped, on every rank: one was asked to stop.
        """
        step = self.state.step
        heartbeat.beat("evaluate", step)
        ema = self.train_step.ema
        for consequence in ("retrying", "skipping this evaluation"):
            weights = dict(self.train_step.model.state_dict()) if ema is None else ema.average
            copy_into(self.evaluated_model.state_dict(), weights)
            try:
                return evaluator.evaluate(self.evaluated_model, lambda: self.state.stop, step)
            except comm.EvaluationFailed as error:
                if error.__cause__ is not None:  # on this rank; others than rank 0 have their log
                    trace = "".join(traceback.format_exception(error.__cause__))
                    _LOGGER.warning(f"the evaluation failed on this rank:\n{trace}")
                self.log.warning(f"the evaluation after step {step} failed, {consequence}: {error}")
        return None

    def _learn_from(
        self, evaluator: Evaluator | ClassificationEvaluator, metrics: dict[str, float]
    ) -> bool:
        """Acts on an evaluation's metrics; returns whether they are the best.  Collective.

        Args: metrics: the same on every rank.
        """
        state = self.state
        state.evaluated_step = state.step
        found = metrics.get("f1", 0.0) > 0  # else any threshold is as good; a classifier has none
        state.best_f1_threshold = metrics["best_f1_threshold"] if found else None
        if self._due(self.evaluate_every):
            # Not at an end in mid-epoch: a resumed or longer run has no evaluation there.
            state.class_scores = evaluator.class_scores(metrics)
            if self.early_stopping:
                state.early_stopping = self.early_stopping.updated(
                    state.early_stopping, state.step, metrics
                )
            if warning := state.losses.evaluated(metrics.get("val_loss", math.nan)):
                self.log.warning(warning)
        score = metrics[self.best_metric]
        is_best = score > state.best
        if is_best:
            state.best, state.best_step = score, state.step
        self._each(lambda callback: callback.on_evaluate_end(state.step, metrics, is_best))
        return is_best

    def _keep_best(self) -> None:
        """Saves and names a new best.  Collective.

        Its evaluation and its epoch are recorded before it is saved, because a run that resumes
        there repeats neither.
        """
        step = self.state.step
        if self._saved_step != step:
            self._end_epoch()
            self._save()
        else:  # Resumed here.  It lacks the score, but who resumes here again evaluates again.
            comm.run_on_main(lambda: self.writer.mend_links(best_step=step))

    # Save

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _save(self) -> None:
        """Takes a snapshot, which rank 0 writes while training continues.

        No rank waits for it.
        """
        state = self.state
        self._owes_save = False
        if self._saved_step == state.step:
            return
        heartbeat.beat("save", state.step)
        with self.log.spending(SAVING, state.step):
            self.writer.make_room()
            snapshot = self._capture()
            self.recovery.keep(snapshot)
            if comm.is_main():
                self.writer.hand_over(snapshot)
            self.dirs.note_newest(snapshot.step)
        self._saved_step = state.step
        self._each(lambda callback: callback.on_save(state.step))

    def _capture(self) -> Snapshot:
        """Copies everything a run resumes from.  Collective."""
        self.state.epoch_sums = self.epoch_means.sums()
        self.state.record_sums = self.metrics_logger.sums()
        return capture_state(self.train_step, self.state, self.schedule)

    def _warn_of_saving(self) -> None:
        if is_lost(self.dirs.folder) and not self.state.stop:
            self._ask_to_stop()  # other ranks cannot see it; `_write_the_last` raises on all
        for trouble in self.writer.troubles():
            warn = self.log.warning if comm.is_main() else _LOGGER.warning
            warn(f"{trouble}; training continues and will retry; free disk space")

    def _finish_saving(self) -> None:
        """Waits until the last checkpoint is on disk.  Collective.

        Raises: on every rank, CheckpointError: the disk did not take the newest or the best one;
            ConfigError: another training has the folder by now.
        """
        heartbeat.beat("save", self.state.step)
        with self.log.spending(SAVING, self.state.step):
            comm.run_on_main(self._write_the_last)

    def _write_the_last(self) -> None:
        require_held(self.dirs.folder)
        trouble = self.writer.finish()
        for each in dict.fromkeys(self.writer.troubles()):
            if each != f"{trouble}":
                self.log.warning(f"at the end of the run: {each}")
        if isinstance(trouble, CheckpointError):
            raise CheckpointError(
                f"{trouble}; the steps since the newest one in {self.folder} are lost",
                code="checkpoint_lost",
                fix="free disk space (or make it writable) and rerun with --resume to repeat them",
            )
        if trouble is not None:
            raise trouble

    def _mend_links(self) -> None:
        self.writer.mend_links(last_step=self.state.step, best_step=self.state.best_step)
