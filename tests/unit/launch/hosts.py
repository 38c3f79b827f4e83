"""Starts fleetrun on the hosts of a run, each with its own folder of logs, and waits for all."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppdist.launch.options import STALE_VARIABLES

ROOT = Path(__file__).resolve().parents[3]
FLEETRUN = Path(sys.executable).parent / "fleetrun"
TIMEOUT = 100.0  # seconds; a hang is a failed test

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from ppdist.common.errors import DataError
from ppdist.common.process import run
rank = int(os.environ["PADDLE_TRAINER_ID"])
"""
ALL_REDUCE = """
import paddle, paddle.distributed as dist
from paddle.distributed import fleet
fleet.init(is_collective=True)
tensor = paddle.to_tensor([float(dist.get_rank() + 1)])
dist.all_reduce(tensor)
print("sum", tensor.item(), "on rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
"""
WAITS_FOR_ALL = """
world = int(os.environ["PADDLE_TRAINERS_NUM"])
Path(f"up{rank}").touch()
while not all(Path(f"up{other}").exists() for other in range(world)):
    time.sleep(0.05)
"""
WAITS_FOR_A_RESTART = """
attempt = int(os.environ.get("PPDIST_RESTART", "0"))
with open(f"attempts{rank}", "a") as file:
    print(attempt, file=file)
if attempt == 0:
    Path(f"ready{rank}").touch()
    time.sleep(120)
"""
SAVES_AT_SIGTERM = """
def stop(number, frame):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
Path(f"ready{rank}").touch()
time.sleep(120)
"""


@dataclass
class Ended:
    """How fleetrun ended on one host."""

    code: int
    output: str
    errors: str


class Host:
    """fleetrun on one host; what it prints goes to files, so that it never waits for a reader."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.output_file, self.errors_file = Path(f"{name}.out"), Path(f"{name}.err")
        with self.output_file.open("w") as output, self.errors_file.open("w") as errors:
            self.process = subprocess.Popen(
                list(command), stdout=output, stderr=errors, env=dict(environment)
            )

    @property
    def said(self) -> str:
        return self.errors_file.read_text()

    def ended(self, seconds: float = TIMEOUT) -> Ended:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"fleetrun hangs on host {self.name}:\n{self.said}")
        return Ended(code, self.output_file.read_text(), self.said)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def hosts_of_a_test() -> Iterator[Callable[..., Host]]:
    """A function that starts fleetrun on a host; none outlives the test.

    Its arguments: the host's name, the words after `fleetrun`, a prefix of the command (that enters
    a network namespace) and variables.
    """
    if not FLEETRUN.is_file():
        pytest.skip("ppdist is not installed in this Python (pip install -e .)")
    dropped = {*STALE_VARIABLES, "PPDIST_EXIT_DIR", "PPDIST_LAUNCHER", "CUDA_VISIBLE_DEVICES"}
    dropped.add("PADDLE_PG_TIMEOUT")  # left by a test that was a rank itself
    clean = {name: value for name, value in os.environ.items() if name not in dropped}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started: list[Host] = []

    def start(
        name: str, *words: str, prefix: Sequence[str] = (), variables: Mapping[str, str] = {}
    ) -> Host:
        command = [*prefix, str(FLEETRUN), "--log_dir", f"log_{name}", *words]
        started.append(Host(name, command, clean | dict(variables)))
        return started[-1]

    try:
        yield start
    finally:
        for host in started:
            host.stop()


def write(code: str, name: str = "t.py") -> str:
    Path(name).write_text(PREAMBLE + code)
    return name


def wait_for(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
