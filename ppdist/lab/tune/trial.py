"""One trial of a study: its cell, its training, its curve."""

import itertools
import json
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
_RESTARTS = "2"  # of a training that crashes; it continues from its newest checkpoint


# Cells of a study: a setting and a seed each.


@dataclass(frozen=True)
class Cell:
    """One training of a study.

    Attributes:
        variant: "" in a study without variants.
        variant_overrides: what it changes; its name alone does not say.
        params: key -> value, as the configuration takes it.
        seed: of training; None: that of the configuration.
    """

    variant: str = ""
    variant_overrides: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def setting(self) -> str:
        """The setting in words without the seed."""
        values = ", ".join(f"{key}={_short(value)}" for key, value in self.params.items())
        return ": ".join(part for part in (self.variant, values) if part) or "base"

    @property
    def label(self) -> str:
        return self.setting + ("" if self.seed is None else f", seed {self.seed}")

    def key(self) -> str:
        """Tells it from every other trial of a grid."""
        return json.dumps(self.record(), sort_keys=True)

    def overrides(self, study: StudyConfig) -> list[str]:
        """All of `-o` but its length and its folder."""
        items = [*study.overrides, *self.variant_overrides]
        items += [item_of(key, value) for key, value in self.params.items()]
        return items + ([] if self.seed is None else [f"seed={self.seed}"])

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Cell":
        """The cell of such a record."""
        changes = tuple(record["variant_overrides"])
        return cls(record["variant"], changes, record["params"], record["seed"])


def grid(study: StudyConfig) -> list[Cell]:
    """Every cell of a grid, ordered by seed first.

    So a study that ends early has compared every setting.
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


# A training of a cell, by its own fleetrun.


@dataclass(frozen=True)
class Launcher:
    """How trainings are started.

    Attributes:
        command: of fleetrun.
        script: words that start a training on a rank.
        threads: of each process on a CPU, where OMP_NUM_THREADS does not say.
    """

    command: Sequence[str]
    script: Sequence[str]
    threads: int

    def start(
        self, folder: Path, placing: Sequence[str], config: str, overrides: Sequence[str]
    ) -> "Job":
        """Starts, or continues from its newest checkpoint, the training of a folder.

        Args: placing: options of fleetrun: which cards, or how many processes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        line = [*self.command, *placing, "--max_restart", _RESTARTS]
        line += ["--log_dir", str(folder / "log"), *self.script]
        line += ["-c", config, "--eval", "--resume", "auto"]
        line += ["-o", *overrides, item_of("output_dir", str(folder))]
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ}
        with open_own(folder / "console.log", "ab") as console:
            # When this process is gone, the trial is told to save and end.
            process = start(
                line,
                stdout=console,
                stderr=console,
                env=environment,
                ends_by=signal.SIGTERM,
                default=(signal.SIGTERM,),
            )
        return Job(process, folder)


@dataclass
class Job:
    """A training that was started."""

    process: Process
    folder: Path
    began: float = field(default_factory=time.monotonic)
    asked_to_stop: bool = False

    def poll(self) -> int | None:
        """Exit code of the training; None while it runs.

        0: done; 75: stopped after a checkpoint; 2: wrong input.
        """
        return self.process.poll()

    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def stop(self) -> None:
        """Asks it to save and end; the second time does nothing."""
        if not self.asked_to_stop:
            self.asked_to_stop = True
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def said(self) -> str:
        """The end of what it wrote to the terminal."""
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
class Past:
    """What tune.json of a trial says of the processes that ran it."""

    minutes: float = 0.0
    host: str = ""
    pid: int = 0
    started: str = ""

    @classmethod
    def of(cls, folder: Path) -> "Past":
        try:
            content = json.loads(text_of(folder / "tune.json"))
            return cls(**{each.name: content[each.name] for each in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def end(self) -> bool:
        """Asks a running fleetrun on this host to save and end.

        On other hosts only the lock of the run is known.

        Returns: whether it still runs.
        """
        alive = self.pid > 0 and self.host == socket.gethostname()
        if not alive or not self.started or self.started != _started(self.pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        return True


def write_past(job: Job, minutes: float) -> None:
    """Writes tune.json."""
    pid = job.process.pid
    past = Past(round(minutes, 3), socket.gethostname(), pid, _started(pid))
    write_json(job.folder / "tune.json", asdict(past))


def _started(pid: int) -> str:
    """Start time of a process, in ticks since boot; ids are reused.

    "": it is gone, or there is no /proc.
    """
    stat = process_stat(pid)
    return str(stat.began) if stat is not None and stat.is_alive else ""


# What a training has measured so far, from its metrics.jsonl.


@dataclass(frozen=True)
class Curve:
    """Its evaluations in their order.  Args: metric: what the study goes by."""

    metric: str
    evaluations: Sequence[Record]

    @classmethod
    def of(cls, folder: Path, metric: str) -> "Curve":
        """The metric curve of a run; empty before it writes anything.

        Raises: ConfigError: its evaluations have no such number.
        """
        try:
            found = MetricRecords.of(read_metrics(folder / "metrics.jsonl")).evaluations
        except FileNotFoundError:
            found = []
        for each in found:
            if metric not in each:
                have = sorted(key for key in _numbers(each) if not key.endswith("_seconds"))
                raise ConfigError(
                    f"{metric}: evaluations of {folder} have no such number, but {', '.join(have)}",
                    code="unknown_metric",
                    where="metric",
                )
        # One that could not be measured (null) is ignored.
        return cls(metric, [each for each in found if isinstance(each[metric], int | float)])

    def values(self) -> dict[int, float]:
        """By whole epochs, from 1; of two in one epoch the first."""
        found: dict[int, float] = {}
        for each in self.evaluations:
            found.setdefault(max(1, round(each["epoch"])), float(each[self.metric]))
        return found

    def points(self) -> list[list[float]]:
        """[epoch, value] of each."""
        return [[round(each["epoch"], 3), each[self.metric]] for each in self.evaluations]

    def final(self) -> dict[str, float]:
        """The numbers of the last evaluation; empty without one."""
        return _numbers(self.evaluations[-1]) if self.evaluations else {}

    def best(self, lower_is_better: bool) -> dict[str, float]:
        """The numbers of the evaluation with the best value of the metric."""
        if not self.evaluations:
            return {}
        sign = -1 if lower_is_better else 1
        return _numbers(max(self.evaluations, key=lambda each: sign * each[self.metric]))


def _numbers(record: Record) -> dict[str, Any]:
    """Without classes (`AP/name`) and fields common to all records."""
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in record.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and "/" not in key
        and key != "time"
    }
