"""Search: the loop of a study.

Variants that are compared in equal time are calibrated first.  Each setting runs
`calibration_epochs`, as many copies at once as trials will run, so that it is measured under the
conditions of the trials:

    seconds(E) = overhead + E * steps an epoch * seconds a step + evaluations * seconds of one

The seconds of a step are means after the first epoch, in which kernels are prepared and caches
filled, those of an evaluation are the last one's; overhead is all of a run's wall time that is
neither: imports, reading the set, what the first epoch took longer, saving, plots.  A set so small
that there would be few steps runs longer.  `train.phases_for_epochs` scales what a configuration
counts in epochs with the length, in the calibration as in the trial: a calibration is the run in
miniature, and a trial has about as many evaluations and saves as the experiment that it comes from
(with ten images an epoch is two steps: an evaluation every five epochs would be all that it does).
"""

import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from optuna.trial import TrialState

from ppdist.common.errors import ConfigError, LaunchError
from ppdist.common.files import write_json
from ppdist.common.records import MetricRecords, read_metrics
from ppdist.config import load_config
from ppdist.config.study import StudyConfig, item_of
from ppdist.tune.results import export
from ppdist.tune.store import Claim, Store, StudyLock, Waiting
from ppdist.tune.trial import Cell, Curve, Job, Launcher, Past, grid, timed_by, write_past

CLEAN_STOP = 75
_WRONG_INPUT = 2
_READ_EVERY = 6  # looks: metrics.jsonl is read less often than processes are looked at
_NOTE_SECONDS = 10.0  # between two notes of how long a trial took so far
_MOST_CRASHES = 3  # of a training; it continues from its newest checkpoint
_MOST_FAILURES = 3  # in a row, before anything went well: the next would fail, too
_LEAST_STEPS = 25  # of a calibration, after its first epoch
_TENTHS_BELOW = 20  # shorter runs are given to a tenth of an epoch, longer ones to whole ones


# Calibration: how many epochs of each variant take equal time.


class Timed(NamedTuple):
    """A finished calibration run: its folder and wall time."""

    folder: Path
    wall_seconds: float


@dataclass(frozen=True)
class Calibration:
    """What a setting costs on this machine, and its training length.

    Attributes: epochs: of a trial; evaluations: of a trial; the rest in seconds, of this machine
    with so many trials at once.
    """

    epochs: float
    evaluations: int
    steps_per_epoch: int
    step_seconds: float
    evaluation_seconds: float
    overhead_seconds: float

    @property
    def minutes(self) -> float:
        """What a trial is expected to take."""
        steps = self.epochs * self.steps_per_epoch * self.step_seconds
        return (self.overhead_seconds + steps + self.evaluations * self.evaluation_seconds) / 60

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"minutes": self.minutes}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Calibration":
        """The one of such a record."""
        return cls(**{key: value for key, value in record.items() if key != "minutes"})


def calibrated(runs: Sequence[Timed], minutes: float, wanted: int) -> Calibration:
    """The longest training that fits into `minutes`, from calibration runs.

    The runs were copies of the setting.

    Args: wanted: how many evaluations a trial should have.
    Raises: ConfigError: not even its overhead fits into the minutes.
    """
    measured = [_measured(*run) for run in runs]
    step, evaluation, overhead = (sum(column) / len(measured) for column in zip(*measured))
    per_epoch = _steps_per_epoch(runs[0].folder)
    # Evaluations come in jumps, so lengths are tried from where there would be none.
    tenths = max(0, math.floor((minutes * 60 - overhead) / (per_epoch * step) * 10))
    while tenths > 0:
        if tenths > _TENTHS_BELOW * 10:
            tenths -= tenths % 10
        count = evaluations_in(tenths / 10, per_epoch, every_epochs(tenths / 10, wanted))
        found = Calibration(tenths / 10, count, per_epoch, step, evaluation, overhead)
        if found.minutes <= minutes and round(tenths / 10 * per_epoch) >= 1:
            return found
        tenths -= 1
    raise ConfigError(
        f"{minutes:g}: start and end of a run take {overhead:.0f} s and an evaluation "
        f"{evaluation:.1f} s, which leaves less than a tenth of an epoch",
        code="minutes_too_few",
        where="minutes_per_trial",
        fix="give it more",
    )


def _measured(folder: Path, wall_seconds: float) -> tuple[float, float, float]:
    """Seconds per step, per evaluation, and of everything else in a run."""
    found = MetricRecords.of(read_metrics(folder / "metrics.jsonl"))
    first = _steps_per_epoch(folder)
    steady = [each["step_seconds"] for each in found.steps if each["step"] > first]
    evaluations = [each["eval_seconds"] for each in found.evaluations]
    step, evaluation = sum(steady) / len(steady), evaluations[-1]
    return step, evaluation, max(0.0, wall_seconds - len(found.steps) * step - sum(evaluations))


def _steps_per_epoch(folder: Path) -> int:
    found = MetricRecords.of(read_metrics(folder / "metrics.jsonl"))
    return int(found.starts[-1]["derived"]["steps_per_epoch"]["value"])


def epochs_for_calibration(folder: Path) -> int:
    """Minimum calibration length in epochs, from one that may be too short."""
    return 1 + math.ceil(_LEAST_STEPS / _steps_per_epoch(folder))


def evaluations_of(study: StudyConfig, overrides: Sequence[str]) -> int:
    """How many evaluations the experiment has as it is written."""
    config = load_config(study.config, overrides)
    return math.ceil(config.train.epochs / config.evaluate.every_epochs)


def every_epochs(epochs: float, wanted: int) -> int:
    """Whole epochs between evaluations that give about `wanted` evaluations."""
    return max(1, round(epochs / wanted))


def evaluations_in(epochs: float, steps_per_epoch: int, every: int) -> int:
    """Number of evaluations: every `every` epochs, and one at the end."""
    return math.ceil(round(epochs * steps_per_epoch) / (every * steps_per_epoch))


def lengthened(study: StudyConfig, overrides: Sequence[str], epochs: float) -> list[str]:
    """Overrides that set training length and scale intervals and schedule with it."""
    config = load_config(study.config, overrides)
    written = config.train.phases_for_epochs or config.train.epochs
    every = every_epochs(epochs, evaluations_of(study, overrides))
    saved = config.checkpoint.every_epochs * epochs / config.train.epochs
    return [
        item_of("train.epochs", epochs),
        item_of("train.phases_for_epochs", written),
        item_of("evaluate.every_epochs", every),
        item_of("checkpoint.every_epochs", float(f"{saved:.4g}")),
    ]


def for_calibration(study: StudyConfig, overrides: Sequence[str], epochs: int) -> list[str]:
    """Overrides of a calibration run.

    It has two evaluations, as the first is slow, and logs every step.
    """
    items = lengthened(study, overrides, epochs)
    every = item_of("evaluate.every_epochs", max(1, epochs // 2))
    return [*items, every, "log.every_steps=1"]


# The loop.


class _AskedToStop(Exception):
    """A signal came, or the time is over, before the first trial."""


@dataclass
class _Running:
    """A trial that this process makes, and the place where."""

    claim: Claim
    job: Job
    crashes: int
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
            for trial in self.store.unwanted():
                self.say(f"trial {trial.number:03d} is left alone: the study has no such one now")
            try:
                lengths = self._calibrate()
            except _AskedToStop:
                return CLEAN_STOP
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
                    if isinstance(claim, Claim) and claim.hopeless:
                        self._prune(claim)
                        waiting = True  # the place is free for another
                    elif isinstance(claim, Claim):
                        begun += not claim.again
                        self._start(place, claim, lengths)
                    else:
                        waiting = waiting or isinstance(claim, Waiting)
                if not self._running and (stop or not waiting):
                    return CLEAN_STOP if stop else 0
                time.sleep(self.look_seconds)
                for place in [*self._running]:
                    self._look(place, stop)

    def _start(self, place: int, claim: Claim, lengths: dict[str, Calibration]) -> None:
        study, cell = self.store.config, claim.cell
        folder = self.store.trial_folder(claim.number)
        overrides = cell.overrides(study)
        if study.minutes_per_trial:
            timed = timed_by(study, cell)
            length = lengths.get(timed)
            if length is None:
                raise ConfigError(
                    f"{self.store.folder}/calibration.json says nothing of {timed!r}, by which "
                    f"trial {claim.number:03d} is timed: give the study the variants it had",
                    code="study_variants_differ",
                )
            overrides += lengthened(study, overrides, length.epochs)
        past = Past.of(folder)
        job = self.launcher.start(folder, self.places[place], study.config, overrides)
        self._running[place] = _Running(claim, job, past.crashes, past.minutes)
        self._note(self._running[place])
        how = "goes on" if claim.again else "begins"
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
            self.store.give_up(number)
            self.say(f"trial {number:03d} is not worth going on at epoch {max(values)}: stopping")
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
        running.crashes += code != 0 and not (stop or running.hopeless)
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
            self.say(f"trial {number:03d} was stopped; the same command goes on with it")
        elif (code == _WRONG_INPUT and not claim.again) or running.crashes >= _MOST_CRASHES:
            # What was right at its beginning, and is wrong now, may be an orphan in the way.
            why = f"exit code {code}: {running.job.said()}"
            self._finish(claim, TrialState.FAIL, curve, running.minutes, why)
        else:
            self.say(f"trial {number:03d} ended with exit code {code}: it is continued")
            self.store.leave(number)  # and claimed again in the next round

    def _prune(self, claim: Claim) -> None:
        """Tells what was decided before the process that decided it was killed."""
        folder = self.store.trial_folder(claim.number)
        curve = Curve.of(folder, self.store.config.metric)
        self._finish(claim, TrialState.PRUNED, curve, Past.of(folder).minutes)

    def _finish(
        self, claim: Claim, state: TrialState, curve: Curve, minutes: float, why: str = ""
    ) -> None:
        study = self.store.config
        value = curve.evaluations[-1][curve.metric] if curve.evaluations else None
        result: dict[str, Any] = {
            "workers": study.workers,  # of now: another session may have others
            "processes": study.processes,
            "minutes": round(minutes, 2),
            "epochs": curve.points()[-1][0] if curve.evaluations else 0,
            "final": curve.final(),
            "best": curve.best(study.lower_is_better),
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
        if self._failures >= _MOST_FAILURES and not _any_good(self.store):
            raise LaunchError(
                f"{self._failures} trials failed and none went well, the last with {why}",
                code="trials_failed",
                fix=(
                    f"see console.log in {self.store.trial_folder(claim.number)}, then start "
                    "with --retry_failed"
                ),
            )

    def _note(self, running: _Running) -> None:
        running.noted = running.minutes
        write_past(running.job, running.crashes, running.noted)

    def _abandon(self) -> None:
        """Ends our trainings on any exit; they save and can be continued."""
        for running in self._running.values():
            running.job.stop()
        for running in self._running.values():
            running.job.process.wait()
        self._running.clear()

    def _calibrate(self) -> dict[str, Calibration]:
        """The length of each setting.

        The first process measures it while others wait.
        """
        study, file = self.store.config, self.store.folder / "calibration.json"
        if study.minutes_per_trial is None:
            return {}
        places = [list(each) for each in self.places]
        conditions = {"workers": len(places), "places": places, "cores": self.launcher.cores}
        lock = StudyLock(self.store.folder / "calibration.lock")
        try:
            while not lock.try_acquire():
                self._require_time()
                time.sleep(self.look_seconds)
            known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            if known.get("conditions", conditions) != conditions:
                raise ConfigError(
                    f"lengths were measured with {known['conditions']}, this command says "
                    f"{conditions}: equal time needs equal conditions",
                    code="study_conditions_differ",
                    where=str(file),
                )
            lengths = known.get("lengths", {})
            first: dict[str, Cell] = {}  # of each setting
            for cell in grid(study):
                if timed_by(study, cell) == cell.setting:
                    first.setdefault(cell.setting, cell)
            for cell in first.values():
                if cell.setting not in lengths:
                    lengths[cell.setting] = self._measure(cell).record()
                    known = {"conditions": conditions, "host": socket.gethostname()}
                    write_json(file, known | {"lengths": lengths}, indent=1)
            return {name: Calibration.of(found) for name, found in lengths.items()}
        finally:
            lock.close()

    def _require_time(self) -> None:
        if self.asked_to_stop():
            raise _AskedToStop

    def _measure(self, cell: Cell) -> Calibration:
        """Runs a setting in miniature, as many copies as there are places."""
        study, minutes = self.store.config, self.store.config.minutes_per_trial
        assert minutes is not None
        overrides = cell.overrides(study)
        epochs = study.calibration_epochs
        while True:
            self.say(f"calibrating {cell.setting}: {epochs} epochs")
            runs = self._run_copies(cell, for_calibration(study, overrides, epochs))
            longer = epochs_for_calibration(runs[0].folder)
            if longer <= epochs:
                break
            epochs = longer
        found = calibrated(runs, minutes, evaluations_of(study, overrides))
        self.say(
            f"calibrated {cell.setting}: {found.step_seconds:.3f} s a step, "
            f"{found.evaluation_seconds:.1f} s an evaluation, {found.overhead_seconds:.0f} s "
            f"besides: {found.epochs:g} epochs in {found.minutes:.1f} min"
        )
        return found

    def _run_copies(self, cell: Cell, items: Sequence[str]) -> list[Timed]:
        """Runs the same in every place at once, and takes the time."""
        study = self.store.config
        base = self.store.folder / "calibration" / _folder_name(cell.setting)
        jobs: list[Job] = []
        took: dict[int, float] = {}
        try:
            for index, place in enumerate(self.places):
                folder = _unused(base / str(index))
                overrides = [*cell.overrides(study), *items]
                jobs.append(self.launcher.start(folder, place, study.config, overrides))
            while len(took) < len(jobs):
                for index, job in enumerate(jobs):
                    if index not in took and job.poll() is not None:
                        took[index] = job.minutes() * 60
                if any(job.poll() for job in jobs):  # one has failed: the others need not go on
                    break
                self._require_time()
                time.sleep(0.05)
        finally:
            for job in jobs:
                if job.poll() is None:
                    job.stop()
            for job in jobs:
                job.process.wait()
        for job in jobs:
            if job.poll() and not job.asked_to_stop:
                raise LaunchError(
                    f"its calibration ended with exit code {job.poll()}: {job.said()} (see "
                    f"{job.folder}/console.log)",
                    code="calibration_failed",
                    where=f"variant {cell.setting}",
                )
        return [Timed(job.folder, took[index]) for index, job in enumerate(jobs)]


def _any_good(store: Store) -> bool:
    return any(each.state in (TrialState.COMPLETE, TrialState.PRUNED) for each in store.trials())


def _folder_name(setting: str) -> str:
    return "".join(each if each.isalnum() or each in "-_." else "_" for each in setting)[:80]


def _unused(folder: Path) -> Path:
    """An unused path for a calibration.

    An interrupted calibration must not be continued: it would count as a whole one.
    """
    tried, count = folder, 1
    while tried.exists():
        count += 1
        tried = folder.with_name(f"{folder.name}-{count}")
    return tried
