"""Ranks that die, are stopped, or lose who looks after them: the real fleetrun, small scripts.

A rank of these tests is a script of a few lines whose heartbeat says what a training would say.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppdist.launch import paddle_launcher, worker
from ppdist.launch.worker import find_processes
from tests.ports import free_port
from tests.unit.launch.hosts import FLEETRUN, ROOT, Host, hosts_of_a_test, wait_for, write

MARK = "PPDIST_TEST_MARK"
# Every rank has a process in a session of its own, like one that a script has left behind.
AT_STEP_7 = """
import subprocess
from ppdist.distributed import heartbeat
heartbeat.begin(60.0, None)
heartbeat.beat("step", 6)
subprocess.Popen(["sleep", "300"], start_new_session=True)
Path(f"pid{rank}").write_text(f"{os.getpid()} {os.getppid()}")
os.rename(f"pid{rank}", f"up{rank}")
while not (Path("up0").exists() and Path("up1").exists()): time.sleep(0.02)
"""
STOPS = """
def stop(number, frame):
    heartbeat.tell_stop(number)
    heartbeat.beat("end")
    time.sleep(0.5)
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, stop)
Path(f"ready{rank}").touch()
time.sleep(300)
"""
IGNORES = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"ready{rank}").touch()
time.sleep(300)
"""


class Job:
    """One fleetrun with two ranks, and how to find all that belongs to it."""

    def __init__(self, start: Callable[..., Host], code: str, *words: str, **more: str) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        script = write(AT_STEP_7 + code)
        variables = {MARK: self.mark, **more}
        self.host = start("a", "--nproc_per_node", "2", *words, script, variables=variables)

    @property
    def pid(self) -> int:
        return self.host.process.pid

    def ready(self) -> None:
        wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())

    def rank(self, number: int) -> tuple[int, int]:
        """Process ids of a rank and of its watcher."""
        own, watcher = Path(f"up{number}").read_text().split()
        return int(own), int(watcher)

    def launcher(self) -> int:
        status = Path(f"/proc/{self.rank(0)[1]}/status").read_text()
        return int(status.partition("PPid:")[2].split()[0])

    def living(self) -> list[str]:
        """Everything that has the mark in its environment."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (place / "environ").read_bytes():
                    found.append((place / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    def gone_within(self, seconds: float) -> float:
        begin = time.monotonic()
        while left := self.living():
            assert time.monotonic() - begin < seconds, left
            time.sleep(0.02)
        return time.monotonic() - begin


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.chdir(tmp_path)
    with hosts_of_a_test() as start:
        yield lambda *words, **variables: Job(start, *words, **variables)


@pytest.mark.slow
def test_the_first_failure_is_said_at_once(job, record_property) -> None:
    code = IGNORES.replace(
        "time.sleep(300)",
        """
def main():
    while not Path("now").exists(): time.sleep(0.01)
    raise RuntimeError("boom")
if rank == 1: run(main)
time.sleep(300)
""",
    )
    running = job(code)
    running.ready()
    Path("now").touch()
    begin = time.monotonic()
    wait_for(lambda: "RuntimeError: boom" in running.host.said)
    said = time.monotonic() - begin
    ended = running.host.ended()
    running.gone_within(0.5)
    gone = time.monotonic() - begin
    record_property("seconds_until_said", round(said, 2))
    record_property("seconds_until_all_are_gone", round(gone, 2))
    print(f"said after {said:.2f} s, all gone after {gone:.2f} s")
    place = f"in step 7 (host {os.uname().nodename}); log: "
    assert "rank 1 failed first" in ended.errors and place in ended.errors
    assert ended.code == 1 and ended.errors.count("RuntimeError: boom") == 1
    assert said < 6 and gone < 15  # wanted: 2 and 5; the margin is for a busy machine


slow = pytest.mark.slow


def paddles() -> tuple[str, ...]:
    """With which Paddle's launcher starts the ranks."""
    return "--master", f"127.0.0.1:{free_port()}", "--nnodes", "1"


@pytest.mark.parametrize(
    "victim", [pytest.param("rank", marks=slow), pytest.param("watcher", marks=slow), "launcher"]
)
def test_whichever_process_is_killed_nothing_is_left(job, victim: str) -> None:
    running = job(IGNORES, *(paddles() if victim == "launcher" else ()))
    running.ready()
    pids = {"launcher": running.launcher()}
    pids["rank"], pids["watcher"] = running.rank(1)
    os.kill(pids[victim], signal.SIGKILL)
    ended = running.host.ended()
    assert running.living() == [] and ended.code == 1
    if victim == "launcher":
        assert f"launcher (process {pids[victim]})" in ended.errors
    else:
        assert "rank 1 failed first" in ended.errors and "SIGKILL" in ended.errors


@slow
def test_ranks_that_ignore_signals_die_with_fleetrun(job) -> None:
    running = job(IGNORES)
    running.ready()
    os.kill(running.pid, signal.SIGKILL)
    print(f"gone after {running.gone_within(60):.1f} s")


@slow  # in the default run: tests/faults/test_jobs.py
@pytest.mark.parametrize(
    ("name", "whom"),
    [("SIGUSR1", "fleetrun"), ("SIGINT", "fleetrun"), ("SIGTERM", "rank"), ("SIGTERM", "watcher")],
)
def test_signal_to_one_process_stops_ranks_cleanly(job, name: str, whom: str) -> None:
    running = job(STOPS)
    running.ready()
    rank, watcher = running.rank(1)
    pid = {"fleetrun": running.pid, "rank": rank, "watcher": watcher}[whom]
    os.kill(pid, getattr(signal, name))
    begin = time.monotonic()
    ended = running.host.ended()
    print(f"ended after {time.monotonic() - begin:.2f} s")
    assert ended.code == 75, ended.errors
    text = f"got {name}: stopping all ranks"
    assert (f"rank 1 {text}" if whom != "fleetrun" else f"fleetrun: {text}") in ended.errors
    assert running.living() == []


def test_paddles_launcher_hears_the_first_signal_alone(monkeypatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(paddle_launcher, "_heard", [])
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [paddle_launcher.install_once(each, lambda *a: heard.append(a[0])) for each in numbers]
    try:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
    assert heard == [signal.SIGTERM]


@slow
@pytest.mark.parametrize("words", [tuple, paddles])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_for_all_processes_leaves_ranks_grace(job, name: str, words) -> None:
    running = job(STOPS.replace("time.sleep(0.5)", "time.sleep(14)"), *words())  # Paddle's: 10 s
    running.ready()
    (rank_0, watcher_0), (rank_1, watcher_1) = running.rank(0), running.rank(1)
    for pid in (running.pid, running.launcher(), watcher_0, watcher_1, rank_0, rank_1):
        os.kill(pid, getattr(signal, name))
    ended = running.host.ended()
    assert ended.code == 75, ended.errors
    assert running.living() == []


@pytest.mark.slow
def test_other_signals_do_not_end_a_starting_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = "(signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)"
    script = write(f"for number in {names}: os.kill(os.getpid(), number)\nprint('lives')\n")
    with hosts_of_a_test() as start:
        ended = start("a", "--nproc_per_node", "1", script).ended()
    assert (ended.code, ended.output) == (0, "lives\n")


@slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_fleetrun_works_without_streams_that_were_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write("print('x')\nPath('done').touch()\n")
    command = f"exec {FLEETRUN} --nproc_per_node 1 {script} {closed}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["sh", "-c", command], timeout=100, check=False, env=environment)
    assert ended.returncode == 0 and Path("done").exists()


@pytest.mark.slow
def test_the_report_of_a_rank_killed_later_is_read(job) -> None:
    code = """
class Slow:  # a terminal that takes its time
    def write(self, text): time.sleep(20)
    def __getattr__(self, name): return getattr(sys.__stderr__, name)
if rank == 0: sys.stderr = Slow()
def main(): raise RuntimeError("the reason")
if rank == 0: run(main)
time.sleep(300)
"""
    ended = job(code).host.ended()
    assert ended.code == 1 and ended.errors.count("RuntimeError: the reason") == 1


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), pytest.param("SIGTERM", 1, marks=slow)]
)
def test_a_second_signal_ends_everything_at_once(job, name: str, code: int) -> None:
    running = job(IGNORES, "--max_restart", "3")
    running.ready()
    os.kill(running.pid, getattr(signal, name))
    time.sleep(1.2)
    os.kill(running.pid, getattr(signal, name))
    ended = running.host.ended(worker.GRACE_SECONDS - 5)  # not only when their grace is over
    assert ended.code == code and f"{name} again" in ended.errors
    assert running.living() == []


@pytest.mark.slow
def test_a_restarted_job_leaves_out_a_failing_step(job) -> None:
    code = """
attempt, skip = os.environ.get("PPDIST_RESTART", "0"), os.environ.get("PPDIST_SKIP_STEP")
with open(f"attempts{rank}", "a") as file:
    print(attempt, skip, os.environ["PPDIST_JOB_DIR"], file=file)
if skip is None and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
heartbeat.beat("end", 9)
print("done on rank", rank)
if skip is None: time.sleep(300)
"""
    running = job(code, "--max_restart", "5")
    ended = running.host.ended()
    assert ended.code == 0 and running.living() == []
    for rank in (0, 1):
        attempts = [line.split() for line in Path(f"attempts{rank}").read_text().splitlines()]
        assert [words[:2] for words in attempts] == [["0", "None"], ["1", "None"], ["2", "7"]]
        assert len({words[2] for words in attempts}) == 1
    assert ended.errors.count("rank 1 failed first") == 2
    assert "in step 7 (host" in ended.errors
    assert "restart 1 of 5" in ended.errors
    assert "restart 2 of 5" in ended.errors
    assert "step 7 failed twice" in ended.errors
    log = Path("log_a/workerlog.1").read_text().splitlines()
    assert [line.split(": ")[1] for line in log if line.startswith("---")][1:] == [
        "restart 1",
        "restart 2",
    ]


@pytest.mark.slow
def test_clean_exit_during_training_is_failure(job) -> None:
    running = job(IGNORES.replace("time.sleep(300)", "sys.exit(0) if rank else time.sleep(300)"))
    ended = running.host.ended()
    assert ended.code == 1 and running.living() == []
    said = "rank 1 failed first: it ended with exit code 0, though training was not over, in step 7"
    assert said in ended.errors


SAYS_THAT_IT_WAS_ASKED = """
def stop(number, frame):
    Path(f"asked{rank}").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
Path(f"ready{rank}").touch()
"""


@slow
@pytest.mark.parametrize("code", [75, 1])
def test_others_are_asked_to_end_as_one_does(job, code: int) -> None:
    waits = "while not Path('ready0').exists(): time.sleep(0.02)\n"
    last = f"{waits}if rank: sys.exit({code})\ntime.sleep(300)\n"
    running = job(f"heartbeat.beat('end')\n{SAYS_THAT_IT_WAS_ASKED}{last}")
    assert running.host.ended().code == code and running.living() == []
    assert Path("asked0").exists() and not Path("asked1").exists()


def test_a_worker_that_cannot_begin_is_named(job) -> None:
    Path("sitecustomize.py").write_text(
        "import os, sys\n"
        "of_rank_1 = os.environ.get('PADDLE_TRAINER_ID') == '1'\n"
        "if of_rank_1 and sys.orig_argv[-1].endswith('worker.py'): sys.exit('no room left')\n"
    )
    ended = job(IGNORES, PYTHONPATH=f"{ROOT}:{Path.cwd()}").host.ended()
    assert ended.code == 1 and ended.errors.count("fleetrun: rank") == 1
    assert "fleetrun: rank 1 did not begin:\n" in ended.errors
    assert ended.errors.endswith("SystemExit: no room left\n")


def test_rank_processes_found_by_their_environment(tmp_path: Path) -> None:
    tmp_path /= os.fsdecode(b"not UTF-8 \xff")
    variables = {"PPDIST_EXIT_DIR": str(tmp_path), "PADDLE_TRAINER_ID": "3"}
    command = [sys.executable, "-c", "print(1, flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | variables, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert find_processes(tmp_path) == find_processes(tmp_path, 3) == [process.pid]
        assert find_processes(tmp_path, 1) == find_processes(tmp_path / "x") == []
        process.communicate(b"\n")
    assert find_processes(tmp_path) == []
