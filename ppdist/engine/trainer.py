"""Signals that ask a rank to stop: the first after its step and a checkpoint, a second at once.

The loop: step, log, evaluate, save, stop; each a visible `if`, in that order.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.common.errors import CheckpointError
from ppdist.common.logging import EVALUATION, SAVING, RunLog
from ppdist.common.process import STOP_SIGNALS
from ppdist.config.evaluate import EvaluateConfig
from ppdist.config.output import CheckpointConfig
from ppdist.config.train import EarlyStoppingConfig
from ppdist.data.types import Batch
from ppdist.distributed import comm, heartbeat
from ppdist.engine.callbacks import Callback, StepSeconds, TrainingRun
from ppdist.engine.checkpoint import CheckpointWriter, point_at_step, set_aside
from ppdist.engine.data import Blocklist, Feed
from ppdist.engine.early_stopping import EarlyStopping, LossCurves
from ppdist.engine.evaluator import ClassificationEvaluator, EvaluationStopped, Evaluator
from ppdist.engine.monitor import Epochs, Records, Stopwatch, StragglerMonitor
from ppdist.engine.recovery import Recovery, check_replica_consistency, lr_factor
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.state import Snapshot, TrainState, capture_state, restore_state
from ppdist.engine.train_step import Clock, StepResult, TrainStep
from ppdist.engine.validation import Validation
from ppdist.models.base import ImageModel
from ppdist.optim.grad_sync import next_synchronised
from ppdist.optim.lr_scheduler import LearningRates

# Paddle's launcher sends SIGTERM three times within 0.6 s, or longer where the machine is busy.
_SAME_REQUEST_SECONDS = 2.0
STOPPED = 75  # exit code after a signal, where nothing is lost


def until_first_step() -> None:
    """Until `listen` a signal ends this process: it has trained nothing yet, so nothing is lost.

    Called once Paddle was imported, with the signals held back by `process.hold_signals` before:
    Paddle puts a handler of its own below Python's that prints a page about a "FatalError".  From
    `dist.init` on a rank that has others just dies by SIGTERM, and fleetrun says what that means.
    """

    own = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != own:  # a copy of this process that looks at images
            os._exit(128 + number)
        said = f"stopped by {signal.Signals(number).name} before the first step: nothing is lost"
        with contextlib.suppress(OSError):
            os.write(2, f"\nppdist: {said}\n".encode())
        os._exit(STOPPED)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def listen(ask: Callable[[], None]) -> None:
    """From now on SIGTERM, SIGINT, SIGUSR1 and SIGHUP call `ask`, in the main thread; every rank
    calls it.  SIGHUP that is ignored (nohup, ranks of fleetrun) stays so.

    Under fleetrun a signal for one rank reaches all of them: it passes it on.  Another signal more
    than two seconds later ends this process, with the code that a shell has for Ctrl-C, else 1.
    """
    rank = os.getpid()
    first: float | None = None

    def hear(number: int, frame: Any) -> None:
        nonlocal first
        if os.getpid() != rank:
            return  # in a copy of this process that prepares images
        if first is None:
            first = time.monotonic()
            ask()
            if not heartbeat.tell_stop(number) and comm.is_main():
                # Not by print: the signal may have come amid one.
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping after this step; a second signal stops at once\n")
        elif time.monotonic() - first > _SAME_REQUEST_SECONDS:
            os._exit(128 + number if number == signal.SIGINT else 1)

    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, hear)
        if comm.world_size() > 1:
            # A signal amid a meeting would break the connection to Paddle's store, which takes an
            # interrupted system call for an error: the call begins anew, and `hear` runs after it.
            signal.siginterrupt(number, False)


class Trainer:
    """Trains until `derived.total_steps`; every rank builds one and calls `fit`."""

    def __init__(
        self,
        *,
        train_step: TrainStep,
        feed: Feed,
        bad_images: Blocklist,
        derived: ScheduleSetup,
        evaluator: Evaluator | ClassificationEvaluator | None,
        evaluated_model: ImageModel,
        log: RunLog,
        output_dir: Path,
        config_yaml: str,
        checkpoint: CheckpointConfig,
        evaluate: EvaluateConfig,
        early_stopping: EarlyStoppingConfig | None,
        log_every: int,
        seed: int,
        bad_steps_limit: int,
        check_weights_every: int,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """
        Args:
            feed: this rank's micro-batches.
            evaluator: None: no evaluation during training.
            evaluated_model: a second model that takes the averaged weights for evaluation.
            seed: of what the model draws at random (dropout), together with step and rank.
            bad_steps_limit, check_weights_every: of `train` and of `distributed`.
            callbacks: called in this order at each moment.
        """
        self.train_step = train_step
        self.feed = feed
        self.bad_images = bad_images
        self.derived = derived
        self.evaluator = evaluator
        self.evaluated_model = evaluated_model
        self.log = log
        self.folder = output_dir / "checkpoints"
        self.writer = CheckpointWriter(self.folder, config_yaml, checkpoint.keep)
        self.log_every = log_every
        self.seed = seed
        self.callbacks = callbacks
        self.progress, self.pace = TrainState(), StragglerMonitor()
        self.records = Records(log, derived.steps_per_epoch)
        self.epochs = Epochs(log, derived.steps_per_epoch, derived.total_steps)
        self._saved_step, self._owes_save = -1, False  # the second: one was due
        self.validation: Validation | None = None
        if evaluator is not None:
            self.validation = Validation(
                evaluator, evaluated_model, train_step, log, output_dir, evaluate.metric
            )
        self.early_stopping: EarlyStopping | None = None
        if self.validation and early_stopping:
            self.early_stopping = EarlyStopping(early_stopping, self.validation.best_metric)
        self._settle_cadence(checkpoint, evaluate, check_weights_every)
        self.recovery = Recovery(
            train_step=train_step,
            feed=feed,
            derived=derived,
            log=log,
            output_dir=output_dir,
            bad_steps_limit=bad_steps_limit,
        )

    def _settle_cadence(
        self, checkpoint: CheckpointConfig, evaluate: EvaluateConfig, check_weights_every: int
    ) -> None:
        """After how many optimizer steps each of them is due; where ranks' weights differ for some
        steps, when they are equal again."""
        per_epoch, every = self.derived.steps_per_epoch, self.train_step.averaging.every
        save_every = checkpoint.every_steps or 0
        if checkpoint.every_steps is None and checkpoint.every_epochs > 0:
            save_every = max(1, round(checkpoint.every_epochs * per_epoch))
        self.save_every = next_synchronised(save_every, every)
        evaluate_every = max(1, round(evaluate.every_epochs * per_epoch))
        self.evaluate_every = next_synchronised(evaluate_every, every)
        self.check_every = next_synchronised(check_weights_every, every)
        self.log.expect(
            self.evaluate_every if self.evaluator else 0,
            self.save_every or self.derived.total_steps,
            self.evaluator.images if self.evaluator else 0,
            self.derived.total_batch,
        )

    def fit(self) -> int:
        """Runs to the end; returns 0, or 75 after a signal and a clean checkpoint.

        Raises: FloatingPointError: loss or gradient stayed not finite, see `train.bad_steps_limit`.
        """
        listen(self._ask_to_stop)
        progress, total = self.progress, self.derived.total_steps
        heartbeat.plan(total)
        run = TrainingRun(
            self.train_step, self.evaluated_model, self.folder.parent, progress.step, total
        )
        for callback in self.callbacks:
            callback.on_train_begin(run)
        if self.validation and self._missed_an_evaluation() and not self._evaluate(self.validation):
            return self._stopped()
        self.epochs.tell(progress.step)
        self.recovery.begin(progress, capture_state(self.train_step, progress, self.derived))
        batches = self._batches()
        while progress.step < total and not self._no_use():
            self._tell_of_saving()
            heartbeat.beat("step", progress.step)
            watch = Stopwatch()  # whatever holds a rank up before its step is its own time, too
            for callback in self.callbacks:
                callback.on_step_begin(progress.step + 1)
            result = None
            if progress.step + 1 in self.recovery.skipped_steps:
                self.recovery.skip_step(progress)
                progress.step += 1
                batches = self._batches()
            else:
                result = self._step(batches, watch)
                if result is None:  # the step, or those before it too, are to be made again
                    batches = self._batches()
                    continue
                progress.step += 1
            ended = progress.step == total
            # Local SGD: the ranks ask again in each step until one ends with the same weights.
            asked = result is not None and result.stop_requested and result.synchronised
            # Amid bad steps none asks, and nothing is saved: see Recovery.keep.
            settled = ended or not progress.bad_steps
            stopping = asked and settled and not ended
            if self.check_every and progress.step % self.check_every == 0 and self._check_weights():
                batches = self._batches()
                continue
            if progress.step % self.log_every == 0 or ended:
                self.records.write(progress.step, self._rates(progress.step - 1).lr)
            # Whoever asked to stop waits seconds for the checkpoint, not minutes for a number.
            if self.validation and self._due(self.evaluate_every, ended) and not stopping:
                stopping = not self._evaluate(self.validation)
                if self.feed.follows_scores and not ended:
                    batches = self._batches()
            self.epochs.tell(progress.step)
            if stopping:
                return self._stopped()
            self._owes_save |= self._due(self.save_every, ended)
            if self._owes_save and settled:
                self._save()
        if progress.step < total:
            self.log.info(f"training ends early, after step {progress.step}: {self._no_use()}")
        self._end("total" if progress.step == total else "early_stopping")
        return 0

    def _no_use(self) -> str:
        """Why to end before the last step, the same on every rank; "": there is no reason."""
        return (
            self.early_stopping.reason(self.progress.early_stopping) if self.early_stopping else ""
        )

    def _stopped(self) -> int:
        self._end("signal")
        self.log.warning(
            f"stopped by a signal after step {self.progress.step}; --resume continues from there"
        )
        return STOPPED

    def _end(self, finished: str) -> None:
        """Ends with a checkpoint of this step on disk; every rank calls it."""
        progress = self.progress
        self._save()
        self._finish_saving()
        heartbeat.beat("end", progress.step)
        self.log.metrics({"step": progress.step, "finished": finished})
        if self.validation and (self.folder / "best").exists():
            self.log.info(
                f"best: {self.folder / 'best'}, step {progress.best_step}, "
                f"{self.validation.best_metric} {progress.best:.4f}"
            )
        for callback in self.callbacks:
            callback.on_train_end(progress.step, finished)

    def _batches(self) -> Iterator[Batch]:
        return self.feed.batches(self.progress.step, self.progress.class_scores)

    def _missed_an_evaluation(self) -> bool:
        """Whether one was due here, but whoever asked to stop did not wait for it."""
        step = self.progress.step
        due = step % self.evaluate_every == 0 or step == self.derived.total_steps
        return 0 < step != self.progress.evaluated_step and due

    def restore(self, saved: Snapshot, own: bool, rescored: bool) -> None:
        """Continues from a checkpoint; every rank calls it before `fit`.

        Args:
            own: the checkpoint lies where this run writes its own.
            rescored: the best so far was measured otherwise, so whatever scores next is better.
        Raises: CheckpointError: it belongs to a model of another shape.
        """
        self.progress, lost = restore_state(saved, self.train_step)
        if lost:
            self.log.warning(lost)
        if rescored:
            self.progress.best, self.progress.best_step = -math.inf, 0
            self.progress.losses = LossCurves()
        if rescored or not self.early_stopping:  # to go on without it is to begin it anew
            self.progress.early_stopping = None
        if own:
            self._saved_step = self.progress.step
            comm.run_on_main(self._mend_links)

    def _mend_links(self) -> None:
        point_at_step(self.folder / "last", self.progress.step)
        point_at_step(self.folder / "best", self.progress.best_step)

    def _step(self, batches: Iterator[Batch], watch: Stopwatch) -> StepResult | None:
        """Makes one; None: it was not made, and the run may be back at an earlier one.

        Args: watch: runs since this rank began it.
        """
        progress = self.progress
        clock = Clock()
        # Whatever the model draws is a function of the step, so that a resumed run draws the same.
        draws = np.random.SeedSequence([self.seed, progress.step, comm.rank()])
        paddle.seed(int(draws.generate_state(1)[0]))
        rates = self._rates(progress.step)
        count, stop = self.derived.accumulate_steps * self.feed.parts, progress.stop
        known_bad = self.bad_images.known
        with self.recovery.watching_memory(progress.step + 1):
            result = self.train_step(batches, count, progress.step, rates, stop, clock, known_bad)
        watch.stop()
        if result.bad_somewhere:
            self._meet_bad_images(result.bad_images)
        if result.too_large:
            self.recovery.shrink_micro_batches(result, progress)
            return None
        self.records.add(result, clock.seconds["data"], watch)
        self.epochs.add(result, clock.seconds["data"], watch, rates.lr)
        if slow := self.pace.add(result, clock.seconds["data"], watch):
            self.log.warning(slow)
        seconds = StepSeconds(watch.wall, watch.own, clock.seconds["data"])
        for callback in self.callbacks:
            callback.on_step_end(progress.step + 1, result, rates.lr, seconds)
        if result.applied:
            progress.bad_steps = 0
            progress.losses.trained(result.losses["loss"])
        elif self.recovery.handle_bad_step(result, progress):
            self._forget_what_was_saved_since()
            return None
        speed = self.records.images_per_second()
        loss = f"{result.losses['loss']:.3f}"
        fields = {"loss": loss, "lr": f"{rates.lr:.2e}", "img/s": f"{speed:.1f}"}
        self.log.progress(progress.step + 1, fields, clock.seconds["data"])
        return result

    def _rates(self, step: int) -> LearningRates:
        """What a step (0-based) uses."""
        return self.derived.schedule.rates(step).scaled(lr_factor(self.progress.rollbacks))

    def _forget_what_was_saved_since(self) -> None:
        """After a return to earlier weights: what was saved beyond them will be made again."""

        def move_aside() -> str:
            self.writer.drop_beyond(self.progress.step)
            try:
                aside = set_aside(self.folder, self.progress.step)
                self._mend_links()
            except (CheckpointError, OSError) as error:
                return f"{error}; they hold steps that this run makes again"
            step = self.progress.step
            return f"checkpoints beyond step {step} are now in {aside}" if aside else ""

        told = comm.run_on_main(move_aside)
        if told:
            self.log.warning(told)
        self._saved_step, self._owes_save = -1, False
        self.records.forget()
        self.epochs.forget()
        self._check_weights()  # each rank went back to what it had kept itself

    def _check_weights(self) -> bool:
        """Every rank calls it when all should hold the same weights.

        Returns: whether they did not, and the run is back at an earlier step.
        """
        warning, sure = check_replica_consistency(self.train_step)
        if warning:
            self.log.warning(f"after step {self.progress.step}: {warning}")
        if sure or not self.recovery.roll_back_once(self.progress):
            return False
        self._forget_what_was_saved_since()
        return True

    def _meet_bad_images(self, found: dict[int, str]) -> None:
        """Counts and names them; every rank calls it.  Raises: DataError, on every rank: too many.

        This rank's loader has warned of its own already; rank 0 alone writes the log.
        """
        for line in self.bad_images.add(found):
            self.log.warning(f"cannot be used, another image takes its place: {line}")
        if self.progress.run is not None:
            self.progress.run.bad_images = self.bad_images.known
        self.log.metrics({"step": self.progress.step + 1, "bad_images": len(self.bad_images.known)})

    def _due(self, every: int, ended: bool) -> bool:
        return ended or (every > 0 and self.progress.step % every == 0)

    def _evaluate(self, validation: Validation) -> bool:
        """Evaluates the averaged weights on all ranks; a new best is saved and named.

        Returns: False, on all ranks: one was asked to stop, and a resumed run has to do it.
        """
        with self.log.spending(EVALUATION, self.progress.step):
            try:
                metrics = validation.measure(self.progress.step, lambda: self.progress.stop)
            except EvaluationStopped:
                return False
            if metrics is not None:
                self._learn_from(validation, metrics)
        return True

    def _learn_from(self, validation: Validation, metrics: dict[str, float]) -> None:
        """What follows from an evaluation at this step; every rank calls it with the same."""
        progress = self.progress
        progress.evaluated_step = progress.step
        validation.show(progress.step, progress.step / self.derived.steps_per_epoch, metrics)
        self.epochs.evaluated(metrics, validation.evaluator.headline)
        for callback in self.callbacks:
            callback.on_evaluate_end(progress.step, metrics)
        if progress.step % self.evaluate_every == 0:
            # Not at an end amid an epoch: where this run resumed or a longer one has no evaluation.
            progress.class_scores = validation.evaluator.class_scores(metrics)
            if self.early_stopping:
                progress.early_stopping = self.early_stopping.updated(
                    progress.early_stopping, progress.step, metrics
                )
            if warning := progress.losses.evaluated(metrics.get("val_loss", math.nan)):
                self.log.warning(warning)
        score = metrics[validation.best_metric]
        if score > progress.best:
            progress.best, progress.best_step = score, progress.step
            if self._saved_step != progress.step:
                self._save()
            else:  # Resumed here.  It lacks the score, but who resumes here again evaluates again.
                comm.run_on_main(lambda: point_at_step(self.folder / "best", progress.step))
            validation.analyse(progress.step)

    def _ask_to_stop(self) -> None:
        self.progress.stop = True  # every rank hears of it in the next step's tally

    def _save(self) -> None:
        """Takes a snapshot, which rank 0 writes while training goes on; no rank waits for it."""
        progress = self.progress
        self._owes_save = False
        if self._saved_step == progress.step:
            return
        heartbeat.beat("save", progress.step)
        with self.log.spending(SAVING, progress.step):
            self.writer.make_room()
            snapshot = capture_state(self.train_step, progress, self.derived)
            self.recovery.keep(snapshot)
            if comm.is_main():
                self.writer.hand_over(snapshot)
        self._saved_step = progress.step
        for callback in self.callbacks:
            callback.on_save(progress.step)

    def _tell_of_saving(self) -> None:
        for trouble in self.writer.troubles():
            self.log.warning(f"{trouble}; training goes on and tries again: make room")

    def _finish_saving(self) -> None:
        """Waits until the last checkpoint is on disk; every rank calls it.

        Raises: RuntimeError, on every rank: the newest or the best never got there.
        """
        heartbeat.beat("save", self.progress.step)
        with self.log.spending(SAVING, self.progress.step):
            trouble = comm.run_on_main(self.writer.finish)
        for each in dict.fromkeys(self.writer.troubles()):
            if each != trouble:
                self.log.warning(f"at the end of the run: {each}")
        if trouble:
            raise RuntimeError(
                f"{trouble}. What was learned since the newest one in {self.folder} is lost: make "
                f"room (or make it writable) and start again with --resume, which repeats it"
            )
