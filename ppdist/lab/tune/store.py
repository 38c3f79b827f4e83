"""The store of a study: a folder that any number of processes share.

    journal.log    Optuna's storage: every trial, its values as they are reported, its outcome
    study.json     the settings that the study started with
    trials/NNN/    the output_dir of trial NNN; tune.lock there belongs to the process that runs it
    *.lock         locks for exclusive work; released however the process that holds them ends

A trial that the journal lists as running but whose lock is free was left by a dead process;
the next process that asks for work continues it.
"""

import hashlib
import json
import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ppdist.common import files
from ppdist.common.errors import ConfigError
from ppdist.common.files import (
    FileLock,
    make_folder,
    open_own,
    read_json,
    sync_path,
    write_json,
)
from ppdist.config.experiment import load_config
from ppdist.config.study import PrunerConfig, StudyConfig
from ppdist.lab.tune.trial import Cell, TrialProcess, grid

# Keys that may differ when a study is started again, such as its size and speed; variants are
# compared one by one.
_CHANGEABLE_KEYS = {
    "name", "trials", "variants", "seeds", "workers",
    "config", "overrides",  # `experiment` covers both
    # Keys of earlier versions; minutes_per_trial replaces the last two.
    "baselines", "costs_like", "calibration_epochs",
}  # fmt: skip
_SEEDS_APART = 1_000_003  # offset of the sampler's seed from one trial to the next
_NAME = "ppdist"  # name of the only study in the journal
_ENTRY = {"op_code", "worker_id"}  # keys that every line of the journal has


class StudyLock(FileLock):
    """A required `FileLock`: without it the processes of a study cannot coordinate."""

    def try_acquire(self) -> bool:
        """Takes the lock if it is free.

        Raises: ConfigError: the file system does not support locks.
        """
        self.open()
        try:
            return super().try_acquire()
        except OSError as error:
            raise ConfigError(
                f"{self.path.parent} is on a file system without locks ({error.strerror}), "
                "which the processes of a study need",
                code="file_system_without_locks",
                where="--out",
                fix="choose a folder on another file system",
            ) from error


class JournalLock(StudyLock):
    """The lock that Optuna acquires before it appends to its journal.

    Optuna's own lock files outlive a killed process.  The holder of this lock first removes an
    incomplete last line, left by a crash or a full disk: Optuna would append the next entry to that
    line, and could read neither.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(journal.with_suffix(".lock"))
        self._journal = journal

    def acquire(self) -> bool:
        super().acquire()
        with suppress(FileNotFoundError), open_own(self._journal, "rb+") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        return True


@dataclass(frozen=True)
class Claim:
    """A trial that this process has to run.

    Attributes:
        number: number of the trial, which names its folder.
        again: True if the trial was started before, by this or another process, and is continued.
    """

    number: int
    cell: Cell
    again: bool


class Waiting:
    """The answer that a claim has to wait: the training run of a dead process has not ended yet."""


def _is_entry(line: bytes) -> bool:
    """Returns True if a line of the journal is a complete entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and entry.keys() >= _ENTRY


class Store:
    """A process's view of a study; must be closed after use.

    Attributes: lock: for operations that only one process may do at a time.
    """

    def __init__(self, folder: Path, study: StudyConfig) -> None:
        """Opens the folder, or creates it.

        Raises: ConfigError: the folder holds another study, or a damaged one.
        """
        make_folder(folder)
        self.folder, self.config = folder, study
        self.lock = StudyLock(folder / "study.lock")
        self._mine: dict[int, StudyLock] = {}  # number of a trial -> its lock
        with _experimental(), self.lock:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            self._check_settings()
            journal = folder / "journal.log"
            journal_lock: Any = JournalLock(journal)  # Optuna names no public type
            with journal_lock:
                self._require_complete(journal)
            backend = JournalFileBackend(str(journal), journal_lock)
            try:
                self.study = optuna.create_study(
                    storage=JournalStorage(backend),
                    study_name=_NAME,
                    load_if_exists=True,
                    direction="minimize" if study.lower_is_better else "maximize",
                    sampler=optuna.samplers.RandomSampler(0),
                    pruner=_pruner(study.pruner),
                )
            except (LookupError, ValueError, TypeError, AssertionError, RuntimeError) as error:
                # Optuna has no specific error for inconsistent entries.
                raise self._damage_error(
                    journal, f"its lines contradict each other ({type(error).__name__}: {error})"
                ) from error
        failed = [trial.number for trial in self.trials() if trial.state == TrialState.FAIL]
        self._failed_before = frozenset(failed)

    def _check_settings(self) -> None:
        """Checks that the folder holds this study, possibly with fewer trials, and writes the
        settings.
        """
        file, now = self.folder / "study.json", self.config.model_dump(mode="json", by_alias=True)
        # The file names of the configuration may change, but not its content.
        now["experiment"] = _digest(self.config)
        if file.exists():
            before = read_json(file)
            if not (isinstance(before, dict) and isinstance(before.get("variants"), dict)):
                raise ConfigError(
                    "holds no settings of a study: it was cut off or overwritten, as in a power "
                    "failure; the trials are kept, in journal.log and trials/",
                    code="study_damaged",
                    where=f"{file}",
                    fix="if the study is the same as before, delete this file and start it again, "
                    "which goes on; else give it its own folder with --out",
                )
            keys = {*now, *before} - _CHANGEABLE_KEYS
            changed = {key for key in keys if now.get(key) != before.get(key)}
            if "experiment" in changed and now["overrides"] != before["overrides"]:
                changed = changed - {"experiment"} | {"overrides"}
            # Include removed variants: their trials are still in the journal.
            variants = before["variants"] | now["variants"]
            changed |= {
                f"variants.{name}" for name in before["variants"]
                if variants[name] != before["variants"][name]
            }  # fmt: skip
            now |= {"variants": variants}
            if changed:
                raise ConfigError(
                    f"{self.folder} holds a study with other values of "
                    f"{', '.join(sorted(changed))}; its trials could not be compared with new ones",
                    code="study_settings_differ",
                    fix="give this study its own folder with --out",
                )
        write_json(file, now, indent=1, sync=True)
        sync_path(self.folder)  # make the file name durable, too, before there are trials

    def _require_complete(self, journal: Path) -> None:
        """Checks that every line of the journal is an entry, and that it has any if trials exist.

        Raises: ConfigError `study_damaged`: the journal is damaged or empty.
        """
        number = 0
        try:
            with files.open_file(journal) as file:
                for number, line in enumerate(file, start=1):
                    if not _is_entry(line):
                        raise self._damage_error(
                            journal, f"line {number} was cut off or overwritten"
                        )
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._damage_error(journal, f"it cannot be read ({error.strerror})") from error
        # An empty journal is valid only for a new study.
        if not number and any((self.folder / "trials").glob("*")):
            raise self._damage_error(journal, "it is missing or empty")

    def _damage_error(self, journal: Path, description: str) -> ConfigError:
        return ConfigError(
            f"{description}, as in a power failure, and later lines depend on it; kept are the "
            f"runs in {self.folder / 'trials'} and, of trials that ended, trials.jsonl",
            code="study_damaged",
            where=f"{journal}",
            fix=f"`ppdist tune show {shlex.quote(str(self.folder))}` ranks those that ended; begin "
            "a new study with another --out",
        )

    def trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:03d}"

    def trials(self) -> list[FrozenTrial]:
        """Returns all trials, ordered by number."""
        return self.study.get_trials(deepcopy=False)

    def cell_of(self, trial: FrozenTrial) -> Cell | None:
        """Returns the cell of a trial; None if its process died before recording the cell."""
        record = trial.user_attrs.get("cell")
        return Cell.of(record) if record else None

    def claim(self, *, begin: bool, retry_failed: bool) -> Claim | Waiting | None:
        """Claims the next trial; returns None if there is none left for this process.

        Args:
            begin: also claim trials that have not been started yet.
            retry_failed: also claim grid cells whose trials failed before this process started.
        """
        with self.lock:
            trials = self.trials()
            waiting = False
            for trial in trials:
                # Trials abandoned by other processes come before new trials.
                if trial.state != TrialState.RUNNING or trial.number in self._mine:
                    continue
                adopted = self._adopt(trial)
                waiting = waiting or isinstance(adopted, Waiting)
                if isinstance(adopted, Claim):
                    return adopted
            claim = self._begin(trials, retry_failed) if begin else None
            return claim or (Waiting() if waiting else None)

    def _adopt(self, trial: FrozenTrial) -> Claim | Waiting | None:
        lock = StudyLock(self.trial_folder(trial.number) / "tune.lock")
        cell = self.cell_of(trial)
        if not lock.try_acquire():
            lock.close()
            return None
        if cell is None:
            lock.close()
            # Its settings were never recorded, so no process can continue it.
            self.study.tell(trial.number, state=TrialState.FAIL)
            return None
        folder = self.trial_folder(trial.number)
        if TrialProcess.of(folder).end() or files.is_held(folder):  # an orphan about to end
            lock.close()
            return Waiting()
        self._mine[trial.number] = lock
        return Claim(trial.number, cell, True)

    def _begin(self, trials: Sequence[FrozenTrial], retry_failed: bool) -> Claim | None:
        """Starts a new trial; the caller must hold the study's lock."""
        # The cell of a trial that failed in this process is not free: it would be retried forever.
        freed = self._failed_before if retry_failed else frozenset()
        counted_trials = [trial for trial in trials if trial.number not in freed]
        if self.config.trials is not None and len(counted_trials) >= self.config.trials:
            return None
        number = len(trials)
        if self.config.sampler == "grid":
            cells = (self.cell_of(trial) for trial in counted_trials)
            used_keys = {cell.key() for cell in cells if cell is not None}
            cell = next(
                (trial for trial in grid(self.config) if trial.key() not in used_keys), None
            )
            if cell is None:
                return None
            coded = {
                key: value if self.config.space[key].choices is None else json.dumps(value)
                for key, value in cell.params.items()
            }
            with _experimental():
                self.study.sampler = optuna.samplers.PartialFixedSampler(
                    coded, optuna.samplers.RandomSampler(0)
                )
            trial = self.study.ask(_distributions(self.config))
        else:
            # A new sampler for each trial: a single one would draw the same first numbers again
            # after a restart.
            self.study.sampler = _sampler(self.config, number)
            trial = self.study.ask(_distributions(self.config))
            params = {
                key: json.loads(trial.params[key]) if dimension.choices else trial.params[key]
                for key, dimension in self.config.space.items()
            }
            cell = Cell(params=params)
        assert trial.number == number, "somebody asked without the lock"
        trial.set_user_attr("cell", cell.record())
        lock = StudyLock(self.trial_folder(number) / "tune.lock")
        lock.acquire()
        self._mine[number] = lock
        return Claim(number, cell, again=False)

    def report(self, number: int, values: dict[int, float]) -> bool:
        """Records a trial's values by epoch; returns True if the trial should be pruned."""
        new = sorted(values.keys() - self.trials()[number].intermediate_values.keys())
        trial, hopeless = self._trial(number) if new else None, False
        for epoch in new:
            assert trial is not None
            trial.report(values[epoch], epoch)
            hopeless = trial.should_prune() or hopeless
        return hopeless

    def finish(
        self, number: int, state: TrialState, value: float | None, result: dict[str, Any]
    ) -> None:
        """Records how a trial of this process ended.

        Args: value: result of a complete trial.
        """
        self._trial(number).set_user_attr("result", result)
        self.study.tell(number, value if state == TrialState.COMPLETE else None, state=state)
        self.leave(number)

    def _trial(self, number: int) -> optuna.Trial:
        """Returns a trial started by any process, in a form that accepts reports."""
        # Any other sampler would compute a suggestion when the trial object is created.
        self.study.sampler = optuna.samplers.RandomSampler(0)
        return optuna.Trial(self.study, self.trials()[number]._trial_id)

    def leave(self, number: int) -> None:
        """Releases a trial; the next process that asks for work may continue it."""
        self._mine.pop(number).close()

    def close(self) -> None:
        for lock in self._mine.values():
            lock.close()
        self._mine = {}


@contextmanager
def _experimental() -> Iterator[None]:
    """Silences Optuna's warnings about experimental features.

    These are the journal, fixed values and multivariate TPE.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _digest(study: StudyConfig) -> str:
    """Computes a digest of the configuration that all trials share, independent of file names.

    Defaults are left out, so that a new key in a later version does not change the digest.
    """
    config = load_config(study.config, study.overrides)
    values = config.model_dump(mode="json", exclude_defaults=True, exclude={"output_dir"})
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sampler(study: StudyConfig, number: int) -> optuna.samplers.BaseSampler:
    seed = (study.seed * _SEEDS_APART + number) % 2**32
    if study.sampler == "random":
        return optuna.samplers.RandomSampler(seed)
    with _experimental():
        # constant_liar: running trials count as bad, so that workers do not sample the same region.
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


def _pruner(config: PrunerConfig) -> optuna.pruners.BasePruner:
    if config.name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=config.first_epochs, reduction_factor=config.factor
        )
    if config.name == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=config.startup_trials, n_warmup_steps=config.first_epochs
        )
    return optuna.pruners.NopPruner()


def _distributions(study: StudyConfig) -> dict[str, BaseDistribution]:
    """Builds Optuna's distributions; choices are JSON, as Optuna accepts no lists or mappings."""
    distributions: dict[str, BaseDistribution] = {}
    for key, dimension in study.space.items():
        low, high, step, log = dimension.low, dimension.high, dimension.step, dimension.log
        if dimension.choices is not None:
            distributions[key] = CategoricalDistribution(
                [json.dumps(choice) for choice in dimension.choices]
            )
            continue
        assert low is not None and high is not None
        if dimension.is_integer:
            distributions[key] = IntDistribution(int(low), int(high), log=log, step=int(step or 1))
        else:
            distributions[key] = FloatDistribution(low, high, log=log, step=step)
    return distributions
