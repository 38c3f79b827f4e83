"""The watch over the ranks of a host: who makes no progress is named, and nobody else.

Most ranks here are heartbeats written by hand over processes that sleep, and time is a number; the
last tests run the installed fleetrun with ranks that load no Paddle.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ppdist.common.errors import Failure
from ppdist.common.process import boot_seconds
from ppdist.distributed import heartbeat
from ppdist.launch import worker
from ppdist.launch.outcome import Attempt, judge, read_hang
from ppdist.launch.watchdog import Watch
from tests.unit.launch.beats import write_beat
from tests.unit.launch.hosts import hosts_of_a_test, wait_for, write

LIMIT, TIMEOUT = 60.0, 1800.0


class Ranks:
    """Ranks of a host whose heartbeats a test writes, and a watch whose time the test moves."""

    def __init__(self, folder: Path, several_hosts: bool = False) -> None:
        self.folder, self.time = folder, 100.0
        self.processes: dict[int, subprocess.Popen] = {}
        self.said: list[str] = []
        (folder / "log").mkdir()
        attempt = Attempt(folder, folder / "log")
        self.watch = Watch(attempt, several_hosts, self.said.append, lambda: self.time)

    def start(self, *ranks: int) -> None:
        """Processes that answer the signal for stacks with one line, as faulthandler would."""
        code = (
            "import os, signal, sys\n"
            "signal.signal(signal.SIGUSR2, lambda *a: os.write(3, b'File sleeping.py'))\n"
            "print(1, flush=True)\nwhile True: signal.pause()"
        )
        for rank in ranks:
            stacks = os.open(heartbeat.stacks_path(self.folder, rank), os.O_CREAT | os.O_APPEND | 1)
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-c", f"import os; os.dup2({stacks}, 3)\n{code}"],
                stdout=subprocess.PIPE,
                pass_fds=[stacks],
            )
            os.close(stacks)
            worker.begin_report(self.folder, rank, rank, self.processes[rank].pid)
        for process in self.processes.values():
            assert process.stdout is not None and process.stdout.readline()

    def beat(
        self,
        rank: int,
        phase: str = "step",
        step: int = 0,
        collectives: int = 0,
        place: str = "",
        steps: int = 9,
        measured: int | None = None,
        seconds: float = 1.0,
    ) -> None:
        """Args: place: of the collective it is in, else it works alone; steps: since the start or
        an evaluation; measured: in all, else as many as were made; seconds: of the last."""
        measured = step if measured is None else measured
        write_beat(
            self.folder, rank, self.processes[rank].pid, phase, step, collectives=collectives,
            place=place, timeout=TIMEOUT, limit=LIMIT, steps=steps, measured=measured,
            seconds=seconds,
        )  # fmt: skip

    def train(self, steps: int, seconds: float, first: int = 0) -> None:
        """All ranks make steps of so many seconds."""
        for step in range(first, first + steps + 1):
            for rank in self.processes:
                self.beat(rank, step=step, collectives=2 * step, seconds=seconds)
            for _ in range(10):
                self.watch.look()
                self.time += seconds / 10

    def stop(self, rank: int) -> None:
        """SIGSTOP; a busy machine takes a moment for it."""
        process = self.processes[rank]
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text())

    def wait(self, seconds: float) -> str:
        """Looks for so long, every two seconds; what was found, "" if nothing."""
        end = self.time + seconds
        while self.time < end and not self.found:
            self.time += 2
            self.watch.look()
        return self.found

    @property
    def found(self) -> str:
        stall = read_hang(self.folder)
        return stall.message if stall else ""

    def alive(self) -> list[int]:
        time.sleep(0.1)
        return [rank for rank, process in self.processes.items() if process.poll() is None]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def ranks(count: int, several_hosts: bool = False) -> Ranks:
        made.append(Ranks(tmp_path, several_hosts))
        made[-1].start(*range(count))
        return made[-1]

    yield ranks
    for each in made:
        for process in each.processes.values():
            process.send_signal(signal.SIGKILL)
            process.communicate()  # closes its pipe as well


def test_a_stopped_rank_is_named_and_stacks_are_kept(host) -> None:
    ranks = host(3)
    ranks.train(5, 1.0)
    for rank in range(3):
        ranks.beat(rank, step=5, collectives=11, place="sum of 10 values")
    ranks.stop(1)
    assert ranks.wait(57) == "" and ranks.alive() == [0, 1, 2]
    found = ranks.wait(14)
    stall = read_hang(ranks.folder)
    assert stall is not None and stall.step == 6  # whatever a rank that was woken up does next
    pid = ranks.processes[1].pid
    assert re.search(rf"^rank 1 \(host \S+, pid {pid}\).* 6\d s: stopped ", found)
    for fact in ("(SIGSTOP)", "sum of 10 values", "collective 11", "step 6", "ranks 0, 2 wait"):
        assert fact in found
    for rank in range(3):
        stacks = (ranks.folder / f"log/stacks.{rank}").read_text()
        assert "File sleeping.py" in stacks and "rank 1 (host" in stacks
    assert ranks.alive() == []


def test_endlessly_computing_rank_named_by_heartbeat(host) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    ranks.beat(0, step=5, collectives=11, place="sum of 10 values")
    found = ranks.wait(70)
    assert found.startswith("rank 1 (host ")
    assert "in its own work" in found and "in step 6; rank 0 waits" in found


def test_watchdog_waits_ten_times_slow_steps(host) -> None:
    ranks = host(2)
    ranks.train(6, 20.0)
    assert ranks.wait(170) == ""
    assert ranks.wait(30) != ""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "evaluate", "save", "end"])
def test_outside_of_steps_the_barrier_timeout_holds(host, phase: str) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    for rank in range(2):
        ranks.beat(rank, phase, step=5, collectives=12)
    assert ranks.wait(TIMEOUT - 10) == ""
    assert ranks.wait(20) != ""


@pytest.mark.slow
def test_the_first_step_may_be_slow(host) -> None:
    ranks = host(1)
    ranks.beat(0, steps=0)
    assert ranks.wait(10 * LIMIT - 10) == ""  # the very first
    ranks.train(5, 1.0)
    ranks.beat(0, "evaluate", step=5)
    assert ranks.wait(TIMEOUT - 10) == ""
    ranks.beat(0, step=5, steps=0)
    assert ranks.wait(10 * LIMIT - 10) == ""
    ranks.beat(0, step=6, steps=1)
    assert ranks.wait(70).startswith("rank 0 ")


@pytest.mark.parametrize("step", [0, 1])
def test_a_hang_in_the_first_steps_is_found(host, step) -> None:
    ranks = host(2)
    for rank in range(2):
        ranks.beat(rank, step=step, steps=step, measured=0)
    ranks.beat(1, step=step, steps=step, measured=0, collectives=3, place="sum of 10 values")
    assert ranks.wait(10 * LIMIT - 10) == ""
    assert ranks.wait(20).startswith("rank 0 (host ")


def test_a_rank_stopped_before_its_first_beat_is_named(host) -> None:
    ranks = host(2)
    ranks.beat(1, "start", collectives=1, place="barrier ppdist/store")
    ranks.stop(0)
    assert ranks.wait(LIMIT - 5) == ""
    found = ranks.wait(10)
    assert found.startswith("rank 0 (host ") and "stopped (SIGSTOP)" in found
    assert found.partition("; the stacks")[0].endswith("rank 1 waits for it")


@pytest.mark.slow
def test_ranks_that_never_say_anything_are_left_alone(host) -> None:
    ranks = host(2)  # a script without ppdist
    ranks.stop(0)
    assert ranks.wait(10 * TIMEOUT) == "" and ranks.alive() == [0, 1]


@pytest.mark.slow
def test_signs_of_life_let_an_evaluation_go_on(host) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    ranks.beat(0, step=5, collectives=11, place="sum of 10 values")
    for _ in range(100):  # rank 1 waits for its workers, which have a guard of their own
        ranks.beat(1, step=5, collectives=10)
        assert ranks.wait(40) == ""


def test_job_stopped_with_fleetrun_goes_on(host) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    for rank in ranks.processes:
        ranks.stop(rank)
    ranks.watch.look()
    ranks.time += 3600.0  # nobody looked
    ranks.watch.look()
    for process in ranks.processes.values():
        process.send_signal(signal.SIGCONT)
    assert ranks.wait(40) == "" and ranks.alive() == [0, 1]
    ranks.train(5, 1.0, first=6)
    assert ranks.found == ""


def test_a_rank_that_was_stopped_for_a_while_goes_on(host) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    ranks.stop(0)
    assert ranks.wait(50) == ""
    ranks.processes[0].send_signal(signal.SIGCONT)
    ranks.train(5, 1.0, first=6)
    assert ranks.wait(50) == "" and ranks.alive() == [0, 1]


def test_ranks_in_different_collectives_told_apart(host) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    ranks.beat(0, step=5, collectives=11, place="all_reduce of 10 values")
    ranks.beat(1, "evaluate", step=6, collectives=11, place="barrier ppdist/barrier/3")
    found = ranks.wait(70)
    assert "in different collectives" in found
    for fact in ("all_reduce of 10 values", "barrier ppdist/barrier/3", "evaluation after step 6"):
        assert fact in found


def test_a_host_whose_ranks_all_wait_lets_others_speak(host) -> None:
    ranks = host(2, several_hosts=True)
    ranks.train(5, 1.0)
    for rank in range(2):
        ranks.beat(rank, step=5, collectives=11, place="all_reduce of 10 values")
    assert ranks.wait(110) == ""
    found = ranks.wait(20)
    assert found.startswith("all ranks of this")


def fail(ranks: Ranks, rank: int, code: str) -> None:
    """As process.run and worker.py leave it."""
    ranks.processes.pop(rank).kill()
    worker.end_report(ranks.folder, rank, rank, 1)
    failure = Failure("crash" if code == "crash" else "rank", code, "Traceback: boom")
    said = {"rank": rank, "exit_code": 1, "time": boot_seconds(), **asdict(failure)}
    said["printed"] = True
    (ranks.folder / f"rank-{rank}.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    "code", ["lost_rank", pytest.param("rank_timeout", marks=pytest.mark.slow)]
)
def test_rank_that_gave_up_leaves_stopped_rank_named(host, code: str) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    ranks.stop(1)
    assert ranks.wait(30) == ""
    fail(ranks, 0, code)
    assert ranks.wait(4).startswith("rank 1 (host ") and ranks.alive() == []
    outcome = judge(Attempt(ranks.folder, ranks.folder), 1, None)
    assert outcome.code == 1 and outcome.message.startswith("rank 1 (host ")
    assert not outcome.is_consequence


@pytest.mark.slow
def test_a_hung_rank_excuses_no_failure_of_another(host) -> None:
    ranks = host(2)
    ranks.train(5, 1.0)
    ranks.stop(1)
    ranks.wait(30)
    fail(ranks, 0, "crash")
    ranks.wait(4)
    outcome = judge(Attempt(ranks.folder, ranks.folder), 1, None)
    assert "rank 0 failed first" in outcome.message


def test_who_let_another_host_wait_is_named_at_once(host) -> None:
    ranks = host(1, several_hosts=True)
    ranks.train(5, 1.0)
    assert ranks.wait(20) == ""
    ranks.watch.look(others_wait=True)
    assert ranks.found.startswith("rank 0 (host ") and "in its own work" in ranks.found


@pytest.mark.parametrize("at", ["first step", "after an evaluation", "slow steps", "waits"])
def test_ranks_not_blamed_when_other_host_failed(host, at: str) -> None:
    ranks = host(1, several_hosts=True)
    if at != "first step":
        ranks.train(5, 25.0 if at == "slow steps" else 1.0)
    if at == "slow steps":
        ranks.beat(0, step=6)
    elif at == "waits":
        ranks.beat(0, step=6, collectives=13, place="all_reduce of 10 values")
    else:
        ranks.beat(0, step=6, steps=0)
    assert ranks.wait(20) == ""
    ranks.watch.look(others_wait=True)
    assert ranks.found == "" and ranks.alive() == [0]


def test_requested_stacks_are_put_beside_logs(host) -> None:
    ranks = host(2)
    ranks.train(1, 1.0)
    ranks.processes[1].send_signal(heartbeat.STACKS_SIGNAL)
    wait_for(lambda: heartbeat.stacks_path(ranks.folder, 1).stat().st_size > 0, 20)
    ranks.wait(2)
    assert "File sleeping.py" in (ranks.folder / "log/stacks.1").read_text()
    assert ranks.found == "" and len(ranks.said) == 1 and "stacks.1" in ranks.said[0]


TRAINING = """
import ctypes
from ppdist.distributed import heartbeat
heartbeat.begin(100.0, 3.0)
me, other = Path(f"at{rank}"), Path(f"at{1 - rank}")
step = 0
def sum(step):
    with heartbeat.Waiting("sum of 8 values"):
        me.write_text(str(step))
        while not other.exists() or int(other.read_text() or 0) < step: time.sleep(0.005)
def hang():
    HANG
def main():
    for step in range(1, 1000000):
        heartbeat.beat("step", step - 1)
        if step == 8 and rank == 1: hang()
        time.sleep(0.3)
        sum(step)
run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped (SIGSTOP), in its own work"),
        ("while True: ctypes.PyDLL(None).sleep(100)", "in its own work"),
        (
            "heartbeat.name_place('waiting for its images'); time.sleep(1000)",
            "waiting for its images",
        ),
    ],
)
def test_a_rank_that_hangs_under_fleetrun_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: str, why: str, record_property
) -> None:
    monkeypatch.chdir(tmp_path)
    with hosts_of_a_test() as start:
        script = write(TRAINING.replace("HANG", hang))
        run = start("a", "--nproc_per_node", "2", script)
        wait_for(lambda: Path("at0").exists() and Path("at0").read_text() == "8")
        began = time.monotonic()
        end = run.ended(60)
    seconds = time.monotonic() - began
    record_property("seconds until all ranks had ended, limit 3 s", round(seconds, 1))
    assert end.code == 1 and seconds < 50
    assert re.search(r"fleetrun: rank 1 \(host \S+, pid \d+\)", end.errors)
    assert why in end.errors and "in step 8; rank 0" in end.errors
    assert "out of memory" not in end.errors and end.errors.count("has made no progress") == 1
    assert "in hang" in Path("log_a/stacks.1").read_text()
    assert "in sum" in Path("log_a/stacks.0").read_text()
    print(f"{why}: all ended {seconds:.1f} s after the hang, limit 3 s")
