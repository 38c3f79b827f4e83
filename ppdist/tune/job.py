"""Job: one training of a study, by its own fleetrun."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ppdist.common.files import write_json
from ppdist.common.process import ends_with_this, process_stat
from ppdist.config.study import item_of

_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Launcher:
    """How trainings are started.

    Attributes:
        command: of fleetrun.
        script: of training.
        cores: that there are for all trials at a time.
        threads: of each process on a CPU, where OMP_NUM_THREADS does not say.
    """

    command: Sequence[str]
    script: str
    cores: int
    threads: int

    def start(
        self, folder: Path, placing: Sequence[str], config: str, overrides: Sequence[str]
    ) -> "Job":
        """Starts, or continues from its newest checkpoint, the training of a folder.

        Args: placing: options of fleetrun: which cards, or how many processes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        line = [*self.command, *placing, "--log_dir", str(folder / "log"), self.script]
        line += ["-c", config, "--eval", "--resume", "auto"]
        line += ["-o", *overrides, item_of("output_dir", str(folder))]
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ}
        with (folder / "console.log").open("ab") as console:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us, who pass on what is meant
                preexec_fn=_end_with_study(),
            )
        return Job(process, folder)


def _end_with_study() -> Callable[[], None]:
    """What the child calls first: it is asked to save and end when this process is gone."""
    end = ends_with_this(signal.SIGTERM)

    def prepare() -> None:
        # Until it is another program, our own handlers would swallow the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    return prepare


@dataclass
class Job:
    """A training that was started."""

    process: subprocess.Popen
    folder: Path
    began: float = field(default_factory=time.monotonic)
    asked_to_stop: bool = False

    def poll(self) -> int | None:
        """Its exit code: 0 done, 75 stopped after a checkpoint, 2 wrong input; None: it runs."""
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
            with (self.folder / "console.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "error:" in line]
        return (errors or lines)[-1] if lines else ""


@dataclass
class Past:
    """What tune.json in the folder of a trial says of the processes that made it."""

    crashes: int = 0
    minutes: float = 0.0
    host: str = ""
    pid: int = 0
    started: str = ""

    @classmethod
    def of(cls, folder: Path) -> "Past":
        try:
            return cls(**json.loads((folder / "tune.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls()

    def end(self) -> bool:
        """Asks its fleetrun, if it still runs on this host, to save and end; whether it does run.
        Of other hosts nothing is known but the lock of the run."""
        alive = self.pid > 0 and self.host == socket.gethostname()
        if not alive or not self.started or self.started != _started(self.pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        return True


def write_past(job: Job, crashes: int, minutes: float) -> None:
    """Writes tune.json."""
    pid = job.process.pid
    past = Past(crashes, round(minutes, 3), socket.gethostname(), pid, _started(pid))
    write_json(job.folder / "tune.json", asdict(past))


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine did: ids are used again.  "": it is gone,
    or there is no /proc."""
    stat = process_stat(pid)
    return str(stat.began) if stat is not None and stat.is_alive else ""
