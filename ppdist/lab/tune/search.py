"""The loop that runs the trials of a study side by side."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import TrialState

from ppdist.common.errors import LaunchError
from ppdist.lab.tune.results import export
from ppdist.lab.tune.store import Claim, Store, Waiting
from ppdist.lab.tune.trial import Curve, Job, Launcher, TrialProcess, write_process

CLEAN_STOP = 75
_READ_EVERY = 6  # polls: metrics.jsonl is read less often than processes are polled
_NOTE_SECONDS = 10.0  # between two records of a trial's elapsed time
_MOST_FAILURES = 3  # in a row without any success: the next would fail, too


@dataclass
class _Running:
    """A running trial of this process, with its job."""

    claim: Claim
    job: Job
    minutes_before: float
    hopeless: bool = False
    reported_epochs: set[int] = field(default_factory=set)
    saved_minutes: float = 0.0  # the time recorded in tune.json
    polls: int = 0

    @property
    def minutes(self) -> float:
        return self.minutes_before + self.job.minutes()


@dataclass
class Search:
    """The search that runs the remaining trials of a study in parallel.

    Attributes:
        placements: the fleetrun options of each worker: its cards, or its number of processes.
        asked_to_stop: returns True once a signal has arrived or the time is up.
        say: called with each line for the user.
        retry_failed: rerun cells whose trials failed.
        poll_seconds: seconds between two polls of the running trials.
    """

    store: Store
    launcher: Launcher
    placements: Sequence[Sequence[str]]
    asked_to_stop: Callable[[], bool]
    say: Callable[[str], None]
    retry_failed: bool = False
    poll_seconds: float = 0.5
    _running: dict[int, _Running] = field(default_factory=dict)  # index of a worker -> trial
    _failures: int = 0

    def run(self, max_trials: int | None = None) -> int:
        """Runs trials until none remain, `max_trials` have been run, or the search is interrupted.

        Args: max_trials: maximum number of trials to start; None sets no limit.
        Returns: 0: no trials remain, or `max_trials` have been run; 75: interrupted, the same
            command continues the search.
        Raises: UserError: the experiment cannot be started or measured as the study requires.
        """
        with ExitStack() as undo:
            undo.callback(self._abandon)
            begun = 0
            while True:
                is_stopping = self.asked_to_stop()
                is_waiting = False
                for worker in range(len(self.placements)):
                    if worker in self._running or is_stopping:
                        continue
                    claim = self.store.claim(
                        begin=max_trials is None or begun < max_trials,
                        retry_failed=self.retry_failed,
                    )
                    if isinstance(claim, Claim):
                        # A continued trial was counted when it first started.
                        begun += not claim.again
                        self._start(worker, claim)
                    else:
                        is_waiting = is_waiting or isinstance(claim, Waiting)
                # Wait for an orphaned training run to end, because this process may have to
                # continue it.
                if not self._running and (is_stopping or not is_waiting):
                    return CLEAN_STOP if is_stopping else 0
                time.sleep(self.poll_seconds)
                for worker in [*self._running]:
                    self._poll(worker, is_stopping)

    def _start(self, worker: int, claim: Claim) -> None:
        study, cell = self.store.config, claim.cell
        folder = self.store.trial_folder(claim.number)
        past = TrialProcess.of(folder)
        job = self.launcher.start(
            folder, self.placements[worker], study.config, cell.overrides(study)
        )
        self._running[worker] = _Running(claim, job, past.minutes)
        self._save_minutes(self._running[worker])
        verb = "continues" if claim.again else "starts"
        self.say(f"trial {claim.number:03d} ({cell.label}) {verb} in {folder}")

    def _poll(self, worker: int, is_stopping: bool) -> None:
        """Records what a trial has measured so far; prunes or finishes it."""
        running = self._running[worker]
        number = running.claim.number
        code = running.job.poll()
        if is_stopping and code is None:
            running.job.stop()
        running.polls += 1
        if code is None and running.polls % _READ_EVERY:
            return
        curve = Curve.of(running.job.folder, self.store.config.metric)
        values = curve.values()
        if self.store.report(number, values) and code is None and not running.hopeless:
            running.hopeless = True
            self.say(f"trial {number:03d} is pruned at epoch {max(values)}: stopping")
        for epoch in sorted(values.keys() - running.reported_epochs):
            running.reported_epochs.add(epoch)
            self.say(f"trial {number:03d} epoch {epoch}: {curve.metric} {values[epoch]:.4f}")
        if (running.minutes - running.saved_minutes) * 60 > _NOTE_SECONDS:
            self._save_minutes(running)
        if code is None:
            if running.hopeless:
                running.job.stop()
            return
        del self._running[worker]
        self._finish_ended(running, code, curve, is_stopping)

    def _finish_ended(self, running: _Running, code: int, curve: Curve, is_stopping: bool) -> None:
        claim, number = running.claim, running.claim.number
        self._save_minutes(running)
        if code == 0 and not curve.evaluations:
            reason = "it ended without an evaluation"
            self._finish(claim, TrialState.FAIL, curve, running.minutes, reason)
        elif code == 0:
            self._finish(claim, TrialState.COMPLETE, curve, running.minutes)
        elif running.hopeless:  # pruned, whatever its exit code
            self._finish(claim, TrialState.PRUNED, curve, running.minutes)
        elif is_stopping:
            # A stopped trial stays open in the journal; its checkpoint lets any process continue
            # it.
            self.store.leave(number)
            self.say(f"trial {number:03d} was stopped; run the same command to continue it")
        else:
            reason = f"exit code {code}: {running.job.last_message()}"
            self._finish(claim, TrialState.FAIL, curve, running.minutes, reason)

    def _finish(
        self, claim: Claim, state: TrialState, curve: Curve, minutes: float, reason: str = ""
    ) -> None:
        value = curve.evaluations[-1][curve.metric] if curve.evaluations else None
        result: dict[str, Any] = {
            "minutes": round(minutes, 2),
            "epochs": curve.points()[-1][0] if curve.evaluations else 0,
            "final": curve.final(),
            "best": curve.best(self.store.config.lower_is_better),
            "curve": curve.points(),
            "why": reason,
        }
        self.store.finish(claim.number, state, value, result)
        export(self.store)
        score_text = "" if value is None else f", {curve.metric} {value:.4f}"
        self.say(
            f"trial {claim.number:03d} ({claim.cell.label}) {state.name.lower()}{score_text}, "
            f"{minutes:.1f} min" + (f": {reason}" if reason else "")
        )
        # A setting may fail; consecutive failures without any success mean the study is wrong.
        self._failures = self._failures + 1 if state == TrialState.FAIL else 0
        states = {trial.state for trial in self.store.trials()}
        has_success = states & {TrialState.COMPLETE, TrialState.PRUNED}
        if self._failures >= _MOST_FAILURES and not has_success:
            raise LaunchError(
                f"{self._failures} trials failed and none succeeded, the last with {reason}",
                code="trials_failed",
                fix=(
                    f"see console.log in {self.store.trial_folder(claim.number)}, then start "
                    "with --retry_failed"
                ),
            )

    def _save_minutes(self, running: _Running) -> None:
        running.saved_minutes = running.minutes
        write_process(running.job, running.saved_minutes)

    def _abandon(self) -> None:
        """Stops our training runs on any exit; they save a checkpoint and can be continued."""
        for running in self._running.values():
            running.job.stop()
        for running in self._running.values():
            running.job.process.wait()
        self._running.clear()
