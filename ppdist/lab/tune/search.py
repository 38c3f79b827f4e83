"""The loop of a study, which makes its trials side by side."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import TrialState

from ppdist.common.errors import LaunchError
from ppdist.lab.tune.results import export
from ppdist.lab.tune.store import Claim, Store, Waiting
from ppdist.lab.tune.trial import Curve, Job, Launcher, Past, write_past

CLEAN_STOP = 75
_READ_EVERY = 6  # looks: metrics.jsonl is read less often than processes are looked at
_NOTE_SECONDS = 10.0  # between two notes of how long a trial took so far
_MOST_FAILURES = 3  # in a row, before anything went well: the next would fail, too


@dataclass
class _Running:
    """A trial that this process makes, and the place where."""

    claim: Claim
    job: Job
    minutes_before: float
    hopeless: bool = False
    said: set[int] = field(default_factory=set)  # epochs
    noted: float = 0.0  # minutes
    looks: int = 0

    @property
    def minutes(self) -> float:
        return self.minutes_before + self.job.minutes()


@dataclass
class Search:
    """Makes the trials of a study that are left, side by side.

    Attributes:
        places: options of fleetrun of each worker: its cards, or its processes.
        asked_to_stop: true from when a signal came or the time is over.
        say: told each line for the user.
        retry_failed: also cells whose trials failed.
        look_seconds: between two looks at what runs.
    """

    store: Store
    launcher: Launcher
    places: Sequence[Sequence[str]]
    asked_to_stop: Callable[[], bool]
    say: Callable[[str], None]
    retry_failed: bool = False
    look_seconds: float = 0.5
    _running: dict[int, _Running] = field(default_factory=dict)  # index of a place -> trial
    _failures: int = 0

    def run(self, most: int | None = None) -> int:
        """Runs trials until none is left, `most` are made, or interrupted.

        Args: most: maximum number of trials to begin.
        Returns: 0: nothing is left to do, or `most` trials are made; 75: interrupted, the same
            command continues.
        Raises: UserError: the experiment cannot be started or measured as the study says.
        """
        with ExitStack() as undo:
            undo.callback(self._abandon)
            begun = 0
            while True:
                stop = self.asked_to_stop()
                waiting = False
                for place in range(len(self.places)):
                    if place in self._running or stop:
                        continue
                    claim = self.store.claim(
                        begin=most is None or begun < most, retry_failed=self.retry_failed
                    )
                    if isinstance(claim, Claim):
                        begun += not claim.again
                        self._start(place, claim)
                    else:
                        waiting = waiting or isinstance(claim, Waiting)
                if not self._running and (stop or not waiting):
                    return CLEAN_STOP if stop else 0
                time.sleep(self.look_seconds)
                for place in [*self._running]:
                    self._look(place, stop)

    def _start(self, place: int, claim: Claim) -> None:
        study, cell = self.store.config, claim.cell
        folder = self.store.trial_folder(claim.number)
        past = Past.of(folder)
        job = self.launcher.start(folder, self.places[place], study.config, cell.overrides(study))
        self._running[place] = _Running(claim, job, past.minutes)
        self._note(self._running[place])
        how = "continues" if claim.again else "starts"
        self.say(f"trial {claim.number:03d} ({cell.label}) {how} in {folder}")

    def _look(self, place: int, stop: bool) -> None:
        """Records what a trial has measured; prunes or finishes it."""
        running = self._running[place]
        number = running.claim.number
        code = running.job.poll()
        if stop and code is None:
            running.job.stop()
        running.looks += 1
        if code is None and running.looks % _READ_EVERY:
            return
        curve = Curve.of(running.job.folder, self.store.config.metric)
        values = curve.values()
        if self.store.report(number, values) and code is None and not running.hopeless:
            running.hopeless = True
            self.say(f"trial {number:03d} is pruned at epoch {max(values)}: stopping")
        for epoch in sorted(values.keys() - running.said):
            running.said.add(epoch)
            self.say(f"trial {number:03d} epoch {epoch}: {curve.metric} {values[epoch]:.4f}")
        if (running.minutes - running.noted) * 60 > _NOTE_SECONDS:
            self._note(running)
        if code is None:
            if running.hopeless:
                running.job.stop()
            return
        del self._running[place]
        self._ended(running, code, curve, stop)

    def _ended(self, running: _Running, code: int, curve: Curve, stop: bool) -> None:
        claim, number = running.claim, running.claim.number
        self._note(running)
        if code == 0 and not curve.evaluations:
            why = "it ended without an evaluation"
            self._finish(claim, TrialState.FAIL, curve, running.minutes, why)
        elif code == 0:
            self._finish(claim, TrialState.COMPLETE, curve, running.minutes)
        elif running.hopeless:  # however it ended, once it was asked to
            self._finish(claim, TrialState.PRUNED, curve, running.minutes)
        elif stop:
            self.store.leave(number)
            self.say(f"trial {number:03d} was stopped; run the same command to continue it")
        else:
            why = f"exit code {code}: {running.job.said()}"
            self._finish(claim, TrialState.FAIL, curve, running.minutes, why)

    def _finish(
        self, claim: Claim, state: TrialState, curve: Curve, minutes: float, why: str = ""
    ) -> None:
        value = curve.evaluations[-1][curve.metric] if curve.evaluations else None
        result: dict[str, Any] = {
            "minutes": round(minutes, 2),
            "epochs": curve.points()[-1][0] if curve.evaluations else 0,
            "final": curve.final(),
            "best": curve.best(self.store.config.lower_is_better),
            "curve": curve.points(),
            "why": why,
        }
        self.store.finish(claim.number, state, value, result)
        export(self.store)
        shown = "" if value is None else f", {curve.metric} {value:.4f}"
        self.say(
            f"trial {claim.number:03d} ({claim.cell.label}) {state.name.lower()}{shown}, "
            f"{minutes:.1f} min" + (f": {why}" if why else "")
        )
        self._failures = self._failures + 1 if state == TrialState.FAIL else 0
        states = {each.state for each in self.store.trials()}
        good = states & {TrialState.COMPLETE, TrialState.PRUNED}
        if self._failures >= _MOST_FAILURES and not good:
            raise LaunchError(
                f"{self._failures} trials failed and none succeeded, the last with {why}",
                code="trials_failed",
                fix=(
                    f"see console.log in {self.store.trial_folder(claim.number)}, then start "
                    "with --retry_failed"
                ),
            )

    def _note(self, running: _Running) -> None:
        running.noted = running.minutes
        write_past(running.job, running.noted)

    def _abandon(self) -> None:
        """Ends our trainings on any exit; they save and can be continued."""
        for running in self._running.values():
            running.job.stop()
        for running in self._running.values():
            running.job.process.wait()
        self._running.clear()
