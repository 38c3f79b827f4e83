"""What a rank says of itself, and what it costs."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.distributed import heartbeat
from tests.unit.launch.hosts import ROOT, wait_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As a fleetrun gives it to rank 3; afterwards nothing is written any more."""
    monkeypatch.setenv("PPDIST_EXIT_DIR", str(tmp_path))
    monkeypatch.setenv("PADDLE_TRAINER_ID", "3")
    monkeypatch.setattr(heartbeat.faulthandler, "register", lambda *args, **more: None)
    importlib.reload(heartbeat)
    yield tmp_path
    importlib.reload(heartbeat)


def test_a_rank_says_where_it_is(folder: Path) -> None:
    assert heartbeat.read(heartbeat.heartbeat_path(folder, 3)) is None
    heartbeat.begin(1800.0, None)
    heartbeat.beat("step", 7)
    before = heartbeat.waited_seconds()
    with heartbeat.Waiting("all_reduce of 8 values"):
        time.sleep(0.02)
        inside = heartbeat.read(heartbeat.heartbeat_path(folder, 3))
    assert inside is not None and inside.inside and inside.place == "all_reduce of 8 values"
    assert (inside.pid, inside.phase, inside.step) == (os.getpid(), "step", 7)
    assert (inside.timeout, inside.limit) == (1800.0, float("inf"))
    assert abs(time.monotonic() - inside.seconds) < 10
    assert 0.02 <= heartbeat.waited_seconds() - before < 10
    heartbeat.name_place("waiting for its images")
    after = heartbeat.read(heartbeat.heartbeat_path(folder, 3))
    assert after is not None and not after.inside and after.place == "waiting for its images"
    assert after.collectives == inside.collectives and after.seconds > inside.seconds


def test_step_timing_skips_first_after_start_or_eval(folder: Path) -> None:
    heartbeat.begin(1.0, 60.0)
    found = []
    for phase, step in (
        ("step", 0),
        ("step", 1),
        ("step", 2),
        ("save", 3),
        ("step", 3),
        ("step", 3),  # made again: it had failed
        ("evaluate", 4),
        ("save", 4),
        ("step", 4),
        ("save", 5),
        ("step", 5),
        ("step", 6),
    ):
        heartbeat.beat(phase, step)
        reading = heartbeat.read(heartbeat.heartbeat_path(folder, 3))
        assert reading is not None
        found.append((reading.steps_since, reading.steps_measured))
    first = [(0, 0), (1, 0), (2, 1), (3, 2), (3, 2), (3, 2)]
    assert found == [*first, (0, 3), (0, 3), (0, 3), (1, 3), (1, 3), (2, 4)]


def test_step_totals_accumulate_until_process_ends(folder: Path) -> None:
    place = heartbeat.heartbeat_path(folder, 3)
    heartbeat.begin(1.0, 60.0)
    assert heartbeat.read_work(place) is None
    heartbeat.plan(80)
    first = heartbeat.read_work(place)
    assert first is not None and math.isnan(first.loss) and first.planned_steps == 80
    own = {"step_seconds": 2.0, "own_seconds": 1.5, "data_seconds": 0.25, "micro_batches": 1.5}
    heartbeat.record_step(loss=math.nan, images=8, bad=True, **own)
    heartbeat.record_step(loss=2.5, images=8, bad=False, **own)
    assert heartbeat.read_work(place) == heartbeat.Work(80, 2, 1, 16, 4.0, 3.0, 0.5, 3.0, 2.5)
    heartbeat.beat("step", 2)  # does not touch it
    assert heartbeat.read_work(place) == heartbeat.Work(80, 2, 1, 16, 4.0, 3.0, 0.5, 3.0, 2.5)
    place.write_bytes(place.read_bytes()[:-8])
    assert heartbeat.read_work(place) is None


def test_what_changed_while_it_was_read_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat.begin(1800.0, 60.0)
    heartbeat.beat("step", 7)
    real, reads = os.pread, []

    def half_the_first_time(file: int, size: int, offset: int) -> bytes:
        data = real(file, size, offset)
        reads.append(data)
        return data if len(reads) > 1 else data[:12] + bytes(size - 12)

    monkeypatch.setattr(heartbeat.os, "pread", half_the_first_time)
    found = heartbeat.read(heartbeat.heartbeat_path(folder, 3))
    assert found is not None and found.step == 7 and len(reads) == 2


def test_a_rank_says_where_the_run_keeps_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat.tell_run(Path("output/demo"))
    assert not heartbeat.run_path(folder, 3).exists()  # without a file nobody listens
    heartbeat.begin(1.0, 60.0)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    heartbeat.tell_run(Path("output/demo"))
    told = json.loads(heartbeat.run_path(folder, 3).read_text())
    assert told == {"output_dir": str(Path("output/demo").absolute()), "world": 4}


def test_a_collective_that_fails_is_left_too(folder: Path) -> None:
    heartbeat.begin(1.0, 60.0)
    with pytest.raises(RuntimeError), heartbeat.Waiting("sum"):
        raise RuntimeError("gloo")
    found = heartbeat.read(heartbeat.heartbeat_path(folder, 3))
    assert found is not None and not found.inside and found.limit == 60.0


def test_names_of_any_length_and_alphabet_fit(folder: Path) -> None:
    heartbeat.begin(1.0, 60.0)
    with heartbeat.Waiting("ä" * 100):
        found = heartbeat.read(heartbeat.heartbeat_path(folder, 3))
    assert found is not None and found.place.startswith("ä" * 19)


def test_without_fleetrun_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPDIST_EXIT_DIR")
    monkeypatch.chdir(folder)
    heartbeat.begin(1.0, 1.0)
    heartbeat.beat("step", 1)
    assert [*folder.iterdir()] == []


def test_a_beat_costs_microseconds(folder: Path, record_property) -> None:
    heartbeat.begin(1.0, 1.0)
    rounds = 20_000
    began = time.process_time()
    for step in range(rounds):
        heartbeat.beat("step", step)
        with heartbeat.Waiting("sum"):
            pass
        heartbeat.record_step(
            loss=1.0, images=8, bad=False, step_seconds=0.1, own_seconds=0.1, data_seconds=0.1,
            micro_batches=1,
        )  # fmt: skip
    micros = (time.process_time() - began) / rounds / 4 * 1e6
    record_property("microseconds of CPU a beat", round(micros, 2))
    print(f"{micros:.2f} microseconds of CPU a beat")
    assert micros < 100


def test_rank_holding_gil_shows_its_stacks(tmp_path: Path) -> None:
    code = """
import ctypes
from ppdist.distributed import heartbeat
heartbeat.begin(1.0, 1.0)
heartbeat.beat("step", 1)
def holds_the_lock():
    while True:
        ctypes.PyDLL(None).sleep(100)
holds_the_lock()
"""
    environment = dict(os.environ, PPDIST_EXIT_DIR=str(tmp_path), PYTHONPATH=str(ROOT))
    environment["PADDLE_TRAINER_ID"] = "0"
    rank = subprocess.Popen([sys.executable, "-c", code], env=environment)
    stacks = heartbeat.stacks_path(tmp_path, 0)
    try:
        wait_for(
            lambda: getattr(heartbeat.read(heartbeat.heartbeat_path(tmp_path, 0)), "step", 0) == 1
        )
        time.sleep(0.5)
        rank.send_signal(heartbeat.STACKS_SIGNAL)
        wait_for(lambda: "holds_the_lock" in stacks.read_text(), 20)
        assert rank.poll() is None
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
