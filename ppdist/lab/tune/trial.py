"""One trial of a study: its cell, its training run, its curve of evaluations."""

import itertools
import json
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ppdist.common.child import Process, start
from ppdist.common.errors import ConfigError
from ppdist.common.files import open_file, open_own, text_of, write_json
from ppdist.common.machine import process_stat
from ppdist.common.records import MetricRecords, Record, read_metrics
from ppdist.config.study import StudyConfig, item_of

_TAIL_BYTES = 4000
_RESTARTS = "2"  # of a crashed training run, which continues from its newest checkpoint


# Cells of a study: a setting and a seed.


@dataclass(frozen=True)
class Cell:
    """A cell of a study: the setting and seed of one training run.

    Attributes:
        variant: name of the variant; "" in a study without variants.
        variant_overrides: the overrides of the variant.
        params: configuration key -> value, as the configuration accepts it.
        seed: seed of the training run; None: the seed in the configuration.
    """

    variant: str = ""
    variant_overrides: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def setting(self) -> str:
        """Describes the setting without the seed."""
        values = ", ".join(f"{key}={_short(value)}" for key, value in self.params.items())
        return ": ".join(part for part in (self.variant, values) if part) or "base"

    @property
    def label(self) -> str:
        return self.setting + ("" if self.seed is None else f", seed {self.seed}")

    def key(self) -> str:
        """Returns a string that is unique for every cell of a grid."""
        return json.dumps(self.record(), sort_keys=True)

    def overrides(self, study: StudyConfig) -> list[str]:
        """Returns the overrides for the training run, without its length and folder."""
        overrides = [*study.overrides, *self.variant_overrides]
        overrides += [item_of(key, value) for key, value in self.params.items()]
        return overrides + ([] if self.seed is None else [f"seed={self.seed}"])

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Cell":
        """Builds a cell from its record."""
        changes = tuple(record["variant_overrides"])
        return cls(record["variant"], changes, record["params"], record["seed"])


def grid(study: StudyConfig) -> list[Cell]:
    """Lists every cell of a grid, ordered by seed first.

    In this order, a study that ends early has compared all settings.
    """
    points = itertools.product(*(dimension.values() for dimension in study.space.values()))
    params = [dict(zip(study.space, point)) for point in points]
    return [
        Cell(variant, tuple(changes), point, seed)
        for seed in study.seeds or (None,)
        for variant, changes in (study.variants or {"": ()}).items()
        for point in params
    ]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).strip('"')


# The training run of a cell, under its own fleetrun.


@dataclass(frozen=True)
class Launcher:
    """A launcher of training runs.

    Attributes:
        command: the fleetrun command.
        script: command-line words that start training on a rank.
        threads: CPU threads per process, unless OMP_NUM_THREADS is set.
    """

    command: Sequence[str]
    script: Sequence[str]
    threads: int

    def start(
        self, folder: Path, placement: Sequence[str], config: str, overrides: Sequence[str]
    ) -> "Job":
        """Starts the training run in a folder, or continues it from its newest checkpoint.

        Args: placement: fleetrun options: which cards, or how many processes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = [*self.command, *placement, "--max_restart", _RESTARTS]
        command += ["--log_dir", str(folder / "log"), *self.script]
        # One command both starts a trial and continues it after a crash or a stop.
        command += ["-c", config, "--eval", "--resume", "auto"]
        command += ["-o", *overrides, item_of("output_dir", str(folder))]
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ}
        with open_own(folder / "console.log", "ab") as console:
            # When this process dies, fleetrun makes the trial save a checkpoint and end.
            process = start(
                command,
                stdout=console,
                stderr=console,
                env=environment,
                ends_by=signal.SIGTERM,
                default=(signal.SIGTERM,),
            )
        return Job(process, folder)


@dataclass
class Job:
    """A training run started by `Launcher`."""

    process: Process
    folder: Path
    began: float = field(default_factory=time.monotonic)
    asked_to_stop: bool = False

    def poll(self) -> int | None:
        """Returns the exit code of the training run; None while it is running.

        0: done; 75: stopped after a checkpoint; 2: wrong input.
        """
        return self.process.poll()

    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def stop(self) -> None:
        """Asks the training run to save a checkpoint and end; a second call does nothing."""
        if not self.asked_to_stop:
            self.asked_to_stop = True
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def last_message(self) -> str:
        """Returns the last error in the console log of the training run, else its last line."""
        try:
            with open_file(self.folder / "console.log") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "error:" in line]
        return (errors or lines)[-1] if lines else ""


@dataclass
class TrialProcess:
    """The process that runs a trial and the time so far, as recorded in tune.json."""

    minutes: float = 0.0
    host: str = ""
    pid: int = 0
    started: str = ""

    @classmethod
    def of(cls, folder: Path) -> "TrialProcess":
        try:
            content = json.loads(text_of(folder / "tune.json"))
            return cls(**{key.name: content[key.name] for key in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def end(self) -> bool:
        """Asks a running fleetrun on this host to save a checkpoint and end.

        For a process on another host, only the lock of the run can tell.

        Returns: True if it is still running.
        """
        alive = self.pid > 0 and self.host == socket.gethostname()
        if not alive or not self.started or self.started != start_ticks(self.pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        return True


def write_process(job: Job, minutes: float) -> None:
    """Writes tune.json: the elapsed time and the process that is running the trial."""
    pid = job.process.pid
    past = TrialProcess(round(minutes, 3), socket.gethostname(), pid, start_ticks(pid))
    write_json(job.folder / "tune.json", asdict(past))


def start_ticks(pid: int) -> str:
    """Returns the start time of a process, in ticks since boot; "" if it has ended or there
    is no /proc.

    It distinguishes a process from a later one with the same id.
    """
    stat = process_stat(pid)
    return str(stat.began) if stat is not None and stat.is_alive else ""


# The evaluations of a training run so far, from its metrics.jsonl.


@dataclass(frozen=True)
class Curve:
    """The evaluations of a training run, in order.

    Attributes: metric: the metric of the study.
    """

    metric: str
    evaluations: Sequence[Record]

    @classmethod
    def of(cls, folder: Path, metric: str) -> "Curve":
        """Reads the metric curve of a run; it is empty before the first evaluation is written.

        Raises: ConfigError: the evaluations lack this metric.
        """
        try:
            evaluations = MetricRecords.of(read_metrics(folder / "metrics.jsonl")).evaluations
        except FileNotFoundError:
            evaluations = []
        for record in evaluations:
            if metric not in record:
                have = sorted(key for key in _numbers(record) if not key.endswith("_seconds"))
                raise ConfigError(
                    f"{metric}: evaluations of {folder} have no such number, but {', '.join(have)}",
                    code="unknown_metric",
                    where="metric",
                )
        # A metric that could not be measured (null) is ignored.
        measured = [record for record in evaluations if isinstance(record[metric], int | float)]
        return cls(metric, measured)

    def values(self) -> dict[int, float]:
        """Returns the values by epoch, from 1: that of the first evaluation after its end.

        Until an epoch has ended, that of the first evaluation.
        """
        values_by_epoch: dict[int, float] = {}
        for record in self.evaluations:
            epoch = max(1, math.floor(record["epoch"] + 1e-6))
            values_by_epoch.setdefault(epoch, float(record[self.metric]))
        return values_by_epoch

    def points(self) -> list[list[float]]:
        """Returns [epoch, value] for every evaluation."""
        return [[round(record["epoch"], 3), record[self.metric]] for record in self.evaluations]

    def final(self) -> dict[str, float]:
        """Returns the numbers of the last evaluation; empty if there is none."""
        return _numbers(self.evaluations[-1]) if self.evaluations else {}

    def best(self, lower_is_better: bool) -> dict[str, float]:
        """Returns the numbers of the evaluation with the best value of the metric."""
        if not self.evaluations:
            return {}
        sign = -1 if lower_is_better else 1
        return _numbers(max(self.evaluations, key=lambda record: sign * record[self.metric]))


def _numbers(record: Record) -> dict[str, Any]:
    """Returns the numbers in a record, without per-class ones (`AP/name`) and `time`."""
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in record.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and "/" not in key
        and key != "time"
    }
