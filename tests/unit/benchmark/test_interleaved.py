"""Groups of processes run in time slices, and none is left behind."""

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ppdist.benchmark import interleaved
from ppdist.benchmark.interleaved import Group, interleave, wait_for_slice
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm
from tests.distributed import run_on_ranks
from tests.errors import raises

# As wait_for_slice, but without Paddle, which takes seconds to load.
WAIT = """
import os, signal, sys, time
folder = os.environ["PPDIST_INTERLEAVED"]
def wait():
    if os.path.exists(f"{folder}/pause"):
        open(f"{folder}/waits-{os.getpid()}", "w").close()
        while os.path.exists(f"{folder}/pause"):
            time.sleep(0.01)
        os.unlink(f"{folder}/waits-{os.getpid()}")
"""
TICK = """
with open(sys.argv[1], "a", buffering=1) as file:
    for _ in range(30):
        wait()
        time.sleep(0.03)
        print(sys.argv[1], time.monotonic(), file=file)
"""
SLEEP = "wait(); open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(60)"


def group(folder, *programs, code):
    """Of programs that run the code, each with its own argument."""
    commands = [[sys.executable, "-c", WAIT + code, str(each)] for each in programs]
    return Group(commands, [dict(os.environ)] * len(commands), folder)


@pytest.mark.slow
def test_while_one_group_runs_the_others_wait(tmp_path):
    files = [tmp_path / name for name in ("one", "two a", "two b")]
    one = group(tmp_path / "1", files[0], code=TICK)
    two = group(tmp_path / "2", *files[1:], code=TICK)
    interleave([one, two], 0.3)
    assert one.codes == [0] and two.codes == [0, 0]
    lines = [line.rsplit(maxsplit=1) for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 90
    lines.sort(key=lambda line: float(line[1]))
    groups = [Path(name).name[:3] for name, _ in lines]
    changes = sum(first != second for first, second in itertools.pairwise(groups))
    assert 1 < changes < 8  # in 0.9 s each; without slices about 60


def alive(folder):
    """Of the processes that have left their numbers there, those that are not gone."""
    return [path.name for path in folder.iterdir() if Path(f"/proc/{path.name}").exists()]


def test_a_program_that_fails_ends_all_groups(tmp_path):
    place = tmp_path / "numbers"
    place.mkdir()
    sleeps = group(tmp_path / "1", place, code=SLEEP)
    fails = group(tmp_path / "2", place, code="wait(); raise SystemExit(3)")
    with raises("run_failed", "SystemExit"):
        interleave([fails, sleeps], 0.1)
    assert fails.codes == [3] and sleeps.codes == [-signal.SIGTERM]
    assert not alive(place)


def test_a_failure_before_a_slice_is_no_hang(tmp_path):
    with raises("run_failed"):
        interleave([group(tmp_path / "1", "", code="raise SystemExit(4)")], 0.1)


def test_ending_the_measurement_ends_its_groups(tmp_path, monkeypatch):
    place = tmp_path / "numbers"
    place.mkdir()
    monkeypatch.setattr(Group, "pause", lambda group: None)  # nobody waits for these

    def is_asked_to_end(*_: object) -> None:  # without a real signal, which may reach pytest itself
        raise KeyboardInterrupt

    monkeypatch.setattr(Group, "has_ended", is_asked_to_end)
    groups = [group(tmp_path / name, place, code=SLEEP) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        interleave(groups, 0.2)
    assert [each.codes for each in groups] == [[-signal.SIGTERM]] * 2
    assert not alive(place)


def test_who_does_not_end_when_asked_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(interleaved, "_END_SECONDS", 0.3)
    deaf = group(
        tmp_path / "1", tmp_path, code=f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    )
    deaf.start()
    deaf.end()
    assert deaf.codes == [-signal.SIGKILL]


@pytest.mark.slow
def test_a_slice_begins_when_all_have_seen_it(tmp_path):
    code = WAIT.replace("0.01", "1.0") + "wait(); time.sleep(60)"
    slow = group(tmp_path / "1", "", code=code)
    try:
        slow.start()
        assert list((tmp_path / "1").glob("waits-*"))
        slow.go_on()
        assert slow.codes == [None] and not list((tmp_path / "1").glob("waits-*"))
    finally:
        slow.end()


def test_a_program_that_dies_while_it_waits_is_no_hang(tmp_path):
    place = tmp_path / "1"
    killed = group(place, "", code="wait()")
    killed.start()
    (waits,) = place.glob("waits-*")
    os.kill(int(waits.name.removeprefix("waits-")), signal.SIGKILL)
    killed.go_on()
    with raises("run_failed", "exit code -9"):
        killed.has_ended(60.0)
    killed.end()


def test_step_waits_while_another_group_runs(monkeypatch, tmp_path):
    monkeypatch.delenv("PPDIST_INTERLEAVED", raising=False)
    assert wait_for_slice() == 0.0  # nothing is interleaved
    monkeypatch.setenv("PPDIST_INTERLEAVED", str(tmp_path))
    assert wait_for_slice() == 0.0
    waits = tmp_path / f"waits-{os.getpid()}"
    (tmp_path / "pause").touch()
    seen = []

    def give_slice():
        while not waits.exists():
            time.sleep(0.01)
        seen.append(True)
        (tmp_path / "pause").unlink()

    thread = threading.Thread(target=give_slice)
    began = time.perf_counter()
    thread.start()
    paused = wait_for_slice()
    whole = time.perf_counter() - began
    thread.join()
    assert seen and not waits.exists() and 0 < paused <= whole


def boundary(folder):
    """Rank 1 comes later; then rank 0 looks just before the pause begins, rank 1 just after."""
    comm.init("cpu", DistributedConfig())
    pause, own = Path(folder) / "pause", Path(folder) / str(comm.rank())
    own.mkdir()
    os.environ |= {"PPDIST_INTERLEAVED": str(own)}
    time.sleep(0.5 * comm.rank())
    began = time.perf_counter()
    of_the_later = wait_for_slice(), time.perf_counter() - began
    if comm.rank() == 1:
        (own / "pause").touch()
        threading.Timer(1.0, lambda: (pause.touch(), (own / "pause").unlink())).start()
    return *of_the_later, wait_for_slice(), pause.exists()


@pytest.mark.slow
def test_ranks_wait_for_their_slice_together(tmp_path):
    first, second = run_on_ranks(
        2, "tests.unit.benchmark.test_interleaved:boundary", str(tmp_path), hosts=1
    )
    assert first[0] == second[0] == 0.0 and first[1] > 0.3
    assert min(first[2], second[2]) > 0.5 and first[3] and second[3]
