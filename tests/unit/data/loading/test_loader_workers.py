"""Workers that die, hang, or lose their rank: nothing of the stream is lost, doubled or changed."""

import errno
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ppdist.data.loading.loader import TrainLoader
from ppdist.data.transforms import pipeline as samples_module
from ppdist.data.transforms.pipeline import TrainSamples
from ppdist.data.types import Batch, Sample
from tests.errors import raises
from tests.unit.data import loaders
from tests.unit.data.loaders import arrays, assert_equal, lives, wait_until_gone, warnings_in
from tests.unit.data.sets import write_coco

ROOT = Path(__file__).resolve().parents[4]
COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("set")
    write_coco(root, COUNT)
    return root


def loader(root: Path, workers=2, end=24, timeout=20.0, **options) -> TrainLoader:
    own = {"batch": 4, "accumulate": 1, "seed": 5, "worker_timeout_seconds": timeout}
    return loaders.loader(root, workers, end=end, **own, **options)


def slow_down(monkeypatch, seconds: float) -> None:
    """So that a batch takes long enough to be interrupted."""
    make = TrainSamples.make

    def slowly(self, key):
        time.sleep(seconds)
        return make(self, key)

    monkeypatch.setattr(TrainSamples, "make", slowly)


def refused() -> int:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def act_on(monkeypatch, name: str, act) -> None:
    """Something happens to whoever reads an image whose name ends so."""
    read_image = samples_module.read_image

    def read(path, *rest):
        if str(path).endswith(name):
            act()
        return read_image(path, *rest)

    monkeypatch.setattr(samples_module, "read_image", read)


def disturbed(one: TrainLoader, kinds: list[signal.Signals]) -> list[Batch]:
    """The stream, during which one worker at a time gets these signals, at random moments.

    One in eight batches: no batch is in the making for long enough to be hit three times.
    """
    rng, batches, left = random.Random(1), [], list(kinds)
    hits = {8 * number + rng.randrange(8) for number in range(len(kinds))}
    for number, batch in enumerate(one):
        batches.append(batch)
        if number in hits:
            time.sleep(rng.uniform(0, 0.03))
            os.kill(rng.choice(one.worker_ids), left.pop(0))
    assert not left
    return batches


# --- death and hang ------------------------------------------------------------------------------


def test_killed_workers_restart_with_same_stream(folder, monkeypatch, caplog):
    undisturbed = list(loader(folder, workers=0, end=60))
    slow_down(monkeypatch, 0.005)
    found = disturbed(loader(folder, workers=3, end=60), [signal.SIGKILL] * 6)
    assert_equal(found, undisturbed)
    lines = warnings_in(caplog)
    assert 4 <= len(lines) <= 6  # what has only sent all of its batches is not missed
    assert all(
        "ended with SIGKILL" in line and "unfinished batches are rebuilt" in line for line in lines
    )
    assert all(not batch.bad_images for batch in found)


@pytest.mark.slow
def test_stopped_workers_restart_with_same_stream(folder, monkeypatch, caplog):
    undisturbed = list(loader(folder, workers=0, end=20))
    slow_down(monkeypatch, 0.005)
    kinds = [signal.SIGKILL, signal.SIGSTOP]
    assert_equal(disturbed(loader(folder, end=20, timeout=0.5), kinds), undisturbed)
    assert "more than 0.5 s" in caplog.text


@pytest.mark.slow
def test_long_absent_rank_finds_healthy_workers(folder, monkeypatch, caplog):
    many = 40_000  # boxes: more than a socket holds, so that the worker waits for the rank
    boxes_M4, labels_M = np.zeros((many, 4), np.float32), np.arange(many)

    def crowded(self, key):
        return Sample(np.zeros((key.height, key.width, 3), np.uint8), boxes_M4, labels_M, key.index)

    monkeypatch.setattr(TrainSamples, "make", crowded)
    with caplog.at_level(logging.WARNING, "ppdist"):
        for number, batch in enumerate(loader(folder, end=6, timeout=0.5)):
            np.testing.assert_array_equal(batch.labels_BM.numpy()[0], labels_M)
            if number == 1:
                time.sleep(1.1)
    assert not warnings_in(caplog)


def test_timeout_is_per_image_not_per_batch(folder, monkeypatch, caplog):
    act_on(monkeypatch, ".jpg", lambda: time.sleep(0.3))
    with caplog.at_level(logging.WARNING, "ppdist"):
        assert len(list(loader(folder, end=2, timeout=1.0))) == 2  # batches of four images
    assert not warnings_in(caplog)


def test_unrestartable_worker_ends_only_its_own_run(folder, monkeypatch):
    one = loader(folder, workers=2)
    batches = iter(one)
    next(batches)
    first, second = one.worker_ids
    monkeypatch.setattr(os, "fork", refused)
    os.kill(first, signal.SIGKILL)
    wait_until_gone([first])
    kill, killed = os.kill, []

    def noted_kill(process: int, number: int) -> None:
        killed.append(process)
        kill(process, number)

    monkeypatch.setattr(os, "kill", noted_kill)
    with pytest.raises(RuntimeError) as caught:
        list(batches)
    assert "Resource temporarily unavailable" in str(caught.value)
    assert killed.count(first) == 1  # before it was waited for: then the id is free for others
    assert set(killed) == {first, second}
    wait_until_gone([second])


def test_a_worker_that_dies_while_idle_is_replaced(folder, caplog):
    one = loaders.eval_loader(folder, workers=2, batch_size=5)
    before, workers = list(one), one.worker_ids
    os.kill(workers[0], signal.SIGKILL)
    wait_until_gone(workers[:1])
    with caplog.at_level(logging.WARNING, "ppdist"):
        assert_equal(one, before)
    assert one.worker_ids[1] == workers[1] and one.worker_ids[0] != workers[0]
    assert len(warnings_in(caplog)) == 1


# --- images that end workers ---------------------------------------------------------------------


def crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


CRASH_REASON = "reading it ended a worker with SIGSEGV, twice"
HANG_REASON = "reading it took a worker longer than data.worker_timeout_seconds, twice"


@pytest.mark.parametrize(
    ("act", "timeout", "reason"),
    [
        (crash, 20.0, CRASH_REASON),
        pytest.param(lambda: time.sleep(3600), 0.5, HANG_REASON, marks=pytest.mark.slow),
    ],
)
def test_image_killing_workers_twice_joins_blocklist(
    folder, monkeypatch, caplog, act, timeout, reason
):
    expected = list(loader(folder, workers=0, end=12, unreadable={7: reason}))
    act_on(monkeypatch, "007.jpg", act)
    path = str(folder / "images" / "007.jpg")
    caplog.clear()
    found = list(loader(folder, workers=2, end=12, timeout=timeout))  # two epochs
    assert_equal(found, expected)
    assert [batch.bad_images for batch in found] == [batch.bad_images for batch in expected]
    assert [batch.bad_images for batch in found if batch.bad_images] == 2 * [{7: reason}]
    lines = warnings_in(caplog)
    of_image = f"{path}: {reason}; training takes the next good image in its place"
    assert lines.count(of_image) == 1
    assert 2 <= len([line for line in lines if f"while reading {path}" in line]) <= 4


def test_image_killing_workers_stops_run_on_request(folder, monkeypatch):
    act_on(monkeypatch, "007.jpg", crash)
    with raises("image_crashes_decoder", str(folder / "images" / "007.jpg")):
        list(loader(folder, bad_images="error"))


def test_what_a_check_found_unreadable_is_never_opened(folder, monkeypatch):
    act_on(monkeypatch, "007.jpg", lambda: os.kill(os.getpid(), signal.SIGKILL))
    bad = [batch.bad_images for batch in loader(folder, end=6, unreadable={7: "why"})]
    assert [of_batch for of_batch in bad if of_batch] == [{7: "why"}]


def test_batch_killing_three_workers_ends_run(folder, monkeypatch):
    monkeypatch.setattr(TrainSamples, "make", lambda self, key: os.kill(os.getpid(), 9))
    one = loader(folder, workers=1)
    with pytest.raises(RuntimeError) as caught:
        list(one)
    text = str(caught.value)
    assert text.startswith("3 workers") and "SIGKILL" in text and "data.workers" in text
    assert not one.worker_ids


def test_workers_failing_to_start_are_user_error(folder, monkeypatch):
    monkeypatch.setattr(os, "fork", refused)
    with raises("workers_not_started", "Resource temporarily"):
        list(loader(folder))


# --- iterations ----------------------------------------------------------------------------------


def test_workers_live_from_one_iteration_to_the_next(folder):
    one = loader(folder, workers=2)
    assert not one.worker_ids
    first = list(one)
    workers = one.worker_ids
    assert len(workers) == 2
    assert_equal(one, first)
    assert one.worker_ids == workers
    one.close()
    wait_until_gone(workers)
    assert_equal(one, first)  # with new ones
    assert not set(one.worker_ids) & set(workers)


def test_new_iteration_drops_batches_in_flight(folder):
    one = loader(folder, workers=2)
    expected = list(one)
    old = iter(one)
    next(old), next(old)
    for new in (iter(one), iter(one)):
        assert_equal([next(new) for _ in range(3)], expected[:3])
    with pytest.raises(RuntimeError, match="this iteration is over: its loader was closed or"):
        next(old)


def test_a_closed_loader_ends_its_iteration(folder):
    one = loader(folder, workers=1)
    batches = iter(one)
    next(batches)
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


# --- what processes share ------------------------------------------------------------------------


def in_dev_shm(process: int) -> set[str]:
    lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm" in line}


def test_nothing_lies_in_dev_shm(folder, record_property):
    before = in_dev_shm(os.getpid())
    one = loader(folder, end=6)
    for _ in one:
        for process in (os.getpid(), *one.worker_ids):
            assert in_dev_shm(process) <= before
    record_property("figure", "0 files in it")


def test_batch_belongs_to_rank_never_overwritten(folder):
    one = loader(folder, workers=1)
    batches = iter(one)
    first = next(batches)
    kept = [array.copy() for array in arrays(first)]
    for _ in range(8):
        next(batches)
    for ours, theirs in zip(arrays(first), kept):
        np.testing.assert_array_equal(ours, theirs)


def test_signal_to_rank_group_does_not_reach_workers(folder):
    one = loader(folder, workers=2)
    stream = iter(one)
    next(stream), next(stream)  # of either worker: both are ready
    assert all(os.getpgid(worker) == worker for worker in one.worker_ids)


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from ppdist.common import child
from ppdist.data.transforms.pipeline import TrainSamples
from tests.unit.data.loading.test_loader_workers import loader

folder, looping, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
make, made = TrainSamples.make, []

def loop(self, key):
    if len(made) == 4:  # the next batch
        looping.touch()
        while True:
            pass
    made.append(key)
    return make(self, key)

if how == "loops":
    TrainSamples.make = loop
if how == "sees it alone":
    child._PR_SET_PDEATHSIG = -1  # unknown to the kernel
one = loader(folder, end=10**6, workers=1)
batches = iter(one)
next(batches)
print(*one.worker_ids, flush=True)
while how == "loops" and not looping.exists():
    time.sleep(0.01)
if how == "is stopped":
    os.kill(one.worker_ids[0], signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_rank_leaves_no_worker(folder, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "looping"), how],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for how in ("loops", "is stopped", "sees it alone")
    ]
    workers = [int(rank.stdout.readline()) for rank in ranks]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == 3 * [-signal.SIGKILL]
        wait_until_gone(workers)
    finally:
        for rank in ranks:
            rank.kill()
            rank.stdout.close()
        for worker in filter(lives, workers):
            os.kill(worker, signal.SIGKILL)
