"""Trains something tiny under fleetrun while faults strike it, and looks at what is left of it.

A scenario is a folder with a small data set and a configuration; each training on it is a job
of its own.  The same job without faults gives the weights that all others are compared with.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ppdist.data.datasets.synthetic import make_shapes
from tests.faults import fault as faults

SCRIPT = Path(__file__).resolve().with_name("train.py")
RANKS, STEPS, STEPS_PER_EPOCH = 2, 24, 4
TIMEOUT_SECONDS = 600.0  # a hang is a failed test
_MARK = "PPDIST_FAULT_JOB"  # by which the processes of a job are known
_RANK = b"PADDLE_TRAINER_ID"
_GROUPS = ("model", "ema", "optimizer")
_ATTEMPT = (
    "train.log says why each number"  # rank 0 says it once in each attempt, before its first step
)
_STEP = re.compile(r"epoch \d+/\d+  step (\d+)/\d+  ")
_END_SECONDS = 60.0  # for processes that are to end
_CONFIG = """
seed: 0
device: cpu
data:
  format: coco
  root: {root}
  train: {{images: images, annotations: annotations/instances_train.json}}
  val: {{images: images, annotations: annotations/instances_val.json}}
  workers: 0
model:
  {{name: ppyoloe, variant: plus, depth_multiple: 0.33, width_multiple: 0.125, num_classes: 3,
   image_size: [64, 64]}}
train: {{epochs: {epochs}, batch_size_per_card: 2, clip_norm: 5.0}}
optimizer: {{lr: 0.003, reference_batch_size: 4}}
schedule: {{warmup_epochs: 0}}
checkpoint: {{every_steps: 4}}
log: {{visualdl: false, every_steps: 1}}
"""


@dataclass(frozen=True)
class Line:
    """What fleetrun printed, and when it arrived (seconds since 1970)."""

    time: float
    text: str


class Job:
    """A training that was started; what it prints is read as it comes."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output_dir: Path
    ) -> None:
        self.output_dir = output_dir
        self.mark = uuid.uuid4().hex
        self.lines: list[Line] = []
        self.process = subprocess.Popen(
            list(command),
            cwd=output_dir.parent,
            env={**environment, _MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in list(self.lines))

    @property
    def steps(self) -> list[int]:
        """The steps that rank 0 has reported, in the order in which it made them."""
        found = (_STEP.search(line.text) for line in list(self.lines))
        return [int(match[1]) for match in found if match]

    @property
    def attempts(self) -> int:
        """How often rank 0 has begun."""
        return self.text.count(_ATTEMPT)

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> int:
        """The exit code.  Raises: TimeoutError: it has not ended in time."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"not at its end after {seconds:g} s:\n{self.text}") from error
        self.reader.join(_END_SECONDS)
        return code

    def reaches(self, step: int, seconds: float = TIMEOUT_SECONDS) -> None:
        """Waits until a step is done.  Raises: TimeoutError; RuntimeError: the job has ended."""
        deadline = time.monotonic() + seconds
        while step not in self.steps:
            if self.process.poll() is not None:
                raise RuntimeError(f"ended before step {step}:\n{self.text}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not at step {step} after {seconds:g} s:\n{self.text}")
            time.sleep(0.02)

    def processes(self) -> dict[int, str]:
        """All that live of this job, whoever their parents are now: id -> command."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    if command:  # else it has ended, and its parent has not yet asked how
                        found[int(folder.name)] = command.decode(errors="replace")
        return found

    def ranks(self) -> dict[int, int]:
        """Process ids of the training processes, by rank; their data workers are not among them."""
        found = {}
        for process, command in self.processes().items():
            with suppress(OSError, ValueError):
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                group = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[2]
                rank = dict(each.partition(b"=")[::2] for each in variables).get(_RANK)
                if rank and str(SCRIPT) in command and int(group) != process:
                    found[int(rank)] = process
        return found

    def struck(self) -> list[dict[str, Any]]:
        """What has struck all ranks, in the order of time."""
        every = [line for rank in range(RANKS) for line in faults.struck(self.output_dir, rank)]
        return sorted(every, key=lambda line: line["time"])

    def recoveries(self) -> list[dict[str, Any]]:
        """Of each attempt but the first: the fault that ended the one before it, the seconds from
        then until the first step was done, and how many steps from before it had to be made
        again."""
        struck = [each for each in self.struck() if faults.parse_faults(each["fault"])[0].ends]
        found = []
        begun = [line.time for line in self.lines if _ATTEMPT in line.text]
        for moment in begun[1:]:
            before = [fault for fault in struck if fault["time"] < moment]
            first = self.step_after(moment)
            if before and first is not None:
                when, step = first
                at = int(str(before[-1]["fault"]).rpartition("step")[2])
                seconds = when - before[-1]["time"]
                # None, where a stopped rank went on to show its stack and saved a later step.
                lost = max(at - step, 0)
                found.append({"fault": before[-1]["fault"], "seconds": seconds, "steps_lost": lost})
        return found

    def kill_all(self) -> None:
        """SIGKILL to all of it, as when the power is lost."""
        killed: set[int] = set()
        while left := self.processes().keys() | set(filter(_holds_files, killed)):
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            killed |= left
            time.sleep(0.05)

    def end(self) -> None:
        """Ends what is left of it."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(Line(time.time(), line.rstrip("\n")))

    def step_after(self, moment: float) -> tuple[float, int] | None:
        for line in self.lines:
            match = _STEP.search(line.text)
            if match and line.time > moment:
                return line.time, int(match[1])
        return None


def _holds_files(process: int) -> bool:
    """Whether a killed process still has its ports: it has no command long before that ends."""
    states = []
    with suppress(OSError):
        for stat in Path(f"/proc/{process}/task").glob("*/stat"):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return any(state not in "ZX" for state in states)


def wait_for_all(jobs: Sequence[Job], seconds: float = TIMEOUT_SECONDS) -> None:
    """Waits until all have ended well.

    Raises: AssertionError: one has failed, or not ended in time, with what all of them printed.
    """
    deadline = time.monotonic() + seconds
    while None in (codes := [job.process.poll() for job in jobs]) and not any(codes):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert codes == [0] * len(jobs), f"{codes}\n" + "\n\n".join(job.text for job in jobs)
    for job in jobs:
        job.reader.join(_END_SECONDS)


class FaultScenario:
    """A tiny data set and a configuration of 24 steps, four an epoch, saved every fourth step."""

    def __init__(self, folder: Path, epochs: int = STEPS // STEPS_PER_EPOCH) -> None:
        """Args: folder: made, and filled, unless it is there already."""
        self.folder = folder.resolve()
        self.steps = epochs * STEPS_PER_EPOCH
        self.config = self.folder / "scenario.yml"
        if not self.config.is_file():
            data = self.folder / "data"
            make_shapes(data, train=4 * STEPS_PER_EPOCH, val=4, size=64, seed=0)
            self.config.write_text(_CONFIG.format(root=data, epochs=epochs), encoding="utf-8")

    @contextmanager
    def job(
        self,
        name: str,
        fault: str = "",
        *,
        ranks: int = RANKS,
        log: str = "",
        launch: Sequence[str] = (),
        train: Sequence[str] = (),
        overrides: Sequence[str] = (),
        variables: Mapping[str, str] = {},
    ) -> Iterator[Job]:
        """A job that does not outlive the block.

        Args:
            name: of its output_dir in the folder of the scenario.
            fault: PPDIST_FAULT.
            ranks: on this host.
            log: name of the folder of logs; "": made of `name`.
            launch, train: further words for fleetrun and for tests/faults/train.py.
        """
        output_dir = self.folder / name
        command = [sys.executable, "-m", "ppdist.launch.cli", "--nproc_per_node", str(ranks)]
        command += ["--log_dir", str(self.folder / (log or f"{name}-log")), *launch]
        command += [str(SCRIPT), "-c", str(self.config), *train]
        command += ["-o", f"output_dir={output_dir}", *overrides]
        stale = ("PPDIST_", "PADDLE_", "FLAGS_")
        clean = {key: word for key, word in os.environ.items() if not key.startswith(stale)}
        clean |= {"OMP_NUM_THREADS": "1", faults.VARIABLE: fault, **variables}
        job = Job(command, clean, output_dir)
        try:
            yield job
        finally:
            job.end()

    def run(
        self, name: str, fault: str = "", *, seconds: float = TIMEOUT_SECONDS, **words: Any
    ) -> Job:
        """A job that has ended (`process.returncode`); arguments as of `job`.

        Raises: TimeoutError: it has not, after so many seconds.
        """
        with self.job(name, fault, **words) as job:
            job.wait(seconds)
            return job

    def survive(self, name: str, fault: str, restarts: int, **words: Any) -> Job:
        """A job that has met every one of the faults and has come to its end all the same."""
        launch = ["--max_restart", str(restarts)] if restarts else []
        job = self.run(name, fault, launch=launch, **words)
        assert job.process.returncode == 0, job.text
        assert [line["fault"] for line in job.struck()] == fault.split(","), job.text
        return job


def first_difference(first: Path, second: Path, step: int | None = None) -> str:
    """Where the checkpoints of two output_dirs, the last or those of a step, differ in a bit."""
    name = "last" if step is None else f"step-{step:08d}"
    for group in _GROUPS:
        a, b = (
            load_file(folder / "checkpoints" / name / f"{group}.safetensors")
            for folder in (first, second)
        )
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b or not np.array_equal(a[key], b[key]):
                return f"{group}: {key}"
    return ""
