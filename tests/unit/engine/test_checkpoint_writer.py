"""Checkpoints are written beside training: what waits, what is dropped, what is tried again."""

import errno
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppdist.common.errors import CheckpointError
from ppdist.engine import checkpoint as checkpoint_writer
from ppdist.engine.checkpoint import (
    CheckpointWriter,
    Snapshot,
    check_room,
    newest_valid,
    point_at_step,
    prune,
    read_checkpoint,
    save_checkpoint,
    set_aside,
)
from ppdist.models.model_card import ModelCard, read_card
from tests.errors import raises

SECONDS = 30.0  # against hanging


def snapshot(step, best_step=0, floats=6):
    arrays = {"conv.weight": np.full(floats, step, "float32")}
    return Snapshot(step, {"model": arrays}, {"step": step, "best_step": best_step})


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def wait_for(writer):
    """Until nothing is being written; no step is that far."""
    writer.drop_beyond(10**9)


@pytest.fixture
def storage(monkeypatch):
    """Storage of which a test says when it is done, and with what."""

    class Storage:
        def __init__(self):
            self.tried = []
            self.refuses = False
            self.began, self.goes_on = threading.Semaphore(0), threading.Semaphore(0)

        def save(self, folder, step, *rest):
            self.tried.append(step)
            self.began.release()
            assert self.goes_on.acquire(timeout=SECONDS)
            if self.refuses:
                raise CheckpointError("the disk is full", code="disk_full")
            return save_checkpoint(folder, step, *rest)

    storage = Storage()
    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", storage.save)
    monkeypatch.setattr(checkpoint_writer, "_RETRY_SECONDS", (0.01,))
    return storage


def test_slow_storage_saves_newest_without_blocking(tmp_path, storage, record_property):
    writer = CheckpointWriter(tmp_path, "", keep=9)
    longest = 0.0
    for step in range(1, 6):
        began = time.perf_counter()
        writer.make_room()
        writer.hand_over(snapshot(step))
        longest = max(longest, time.perf_counter() - began)
        assert step > 1 or storage.began.acquire(timeout=SECONDS)
    record_property("longest_hand_over_seconds", longest)
    storage.goes_on.release(9)
    assert writer.finish() is None and storage.tried == [1, 5] and writer.troubles() == []
    assert steps_in(tmp_path) == [1, 5]


def test_the_best_is_written_although_newer_ones_wait(tmp_path, storage):
    writer = CheckpointWriter(tmp_path, "", keep=9)
    writer.hand_over(snapshot(1))
    assert storage.began.acquire(timeout=SECONDS)
    for step, best in ((2, 2), (3, 3), (4, 3), (5, 3)):  # 3 is better than 2
        writer.make_room()
        writer.hand_over(snapshot(step, best))
    storage.goes_on.release(9)
    assert writer.finish() is None and storage.tried == [1, 3, 5]
    assert (tmp_path / "best").resolve().name == "step-00000003"
    assert (tmp_path / "last").resolve().name == "step-00000005"


def test_refused_best_is_retried_before_next(tmp_path, storage):
    writer = CheckpointWriter(tmp_path, "", keep=9)
    storage.refuses = True
    storage.goes_on.release(99)
    writer.hand_over(snapshot(1, 1))
    wait_for(writer)
    (told,) = writer.troubles()
    assert "step 1 was not" in told
    writer.make_room()
    writer.hand_over(snapshot(2, 1))  # refused, too, and of no worth when the next is there
    wait_for(writer)
    storage.refuses = False
    writer.make_room()
    writer.hand_over(snapshot(3, 1))
    assert writer.finish() is None
    assert storage.tried == [1, 1, 2, 1, 3] and steps_in(tmp_path) == [1, 3]
    assert (tmp_path / "best").resolve().name == "step-00000001"


def test_end_retries_newest_then_reports_loss(tmp_path, storage):
    writer = CheckpointWriter(tmp_path, "", keep=9)
    storage.refuses = True
    storage.goes_on.release(99)
    writer.hand_over(snapshot(1))
    assert "step 1 was not" in str(writer.finish())
    assert storage.tried == [1, 1] and len(writer.troubles()) == 2
    storage.refuses = False
    assert writer.finish() is None and steps_in(tmp_path) == [1]


def test_a_bug_in_the_thread_is_told_and_does_not_end_it(tmp_path):
    writer = CheckpointWriter(tmp_path, "", keep=9)
    odd = Snapshot(1, {"model": {"w": np.array(["text"])}}, {"step": 1, "best_step": 0})
    writer.hand_over(odd)
    wait_for(writer)
    assert "KeyError" in writer.troubles()[0]
    writer.hand_over(snapshot(2))
    assert writer.finish() is None and steps_in(tmp_path) == [2]


def test_late_best_does_not_move_last_back(tmp_path, storage):
    writer = CheckpointWriter(tmp_path, "", keep=1)
    storage.refuses = True
    for step in (8, 12):
        writer.hand_over(snapshot(step, 8))
        assert storage.began.acquire(timeout=SECONDS)
        storage.goes_on.release()  # 8 is refused, and again before 12
        if step == 8:
            wait_for(writer)
    assert storage.began.acquire(timeout=SECONDS)
    storage.refuses = False
    storage.goes_on.release(9)
    assert writer.finish() is None and storage.tried == [8, 8, 12, 8]
    assert steps_in(tmp_path) == [8, 12]
    assert (tmp_path / "last").resolve().name == "step-00000012"
    assert (tmp_path / "best").resolve().name == "step-00000008"


def test_self_link_does_not_end_writer_thread(tmp_path):
    (tmp_path / "best").symlink_to("best")
    writer = CheckpointWriter(tmp_path, "", keep=9)
    writer.hand_over(snapshot(1))
    assert writer.finish() is None and steps_in(tmp_path) == [1]
    assert len(writer.troubles()) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", f"{folder}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"a disk of its own takes root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", f"{folder}"], check=True)


def test_full_disk_keeps_checkpoints_until_room(small_disk, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_RETRY_SECONDS", ())
    folder = small_disk / "checkpoints"
    writer = CheckpointWriter(folder, "seed: 1\n", keep=2)
    writer.hand_over(snapshot(1, floats=100_000))
    assert writer.finish() is None
    filler = small_disk / "filler"
    filler.write_bytes(bytes(400_000))
    writer.hand_over(snapshot(2, floats=100_000))
    lost = writer.finish()
    assert "needs 0.4 MB" in str(lost)
    checkpoint, passed_over = newest_valid(folder)
    assert checkpoint.state["step"] == 1 and passed_over == []
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "last"}  # no drafts
    filler.unlink()
    writer.hand_over(snapshot(3, floats=100_000))
    assert writer.finish() is None and newest_valid(folder)[0].state["step"] == 3


def test_a_disk_for_two_checkpoints_takes_any_number(small_disk, monkeypatch):
    """`keep` would need room for one more: before, the third and all later ones were lost."""
    monkeypatch.setattr(checkpoint_writer, "_RETRY_SECONDS", ())
    folder = small_disk / "checkpoints"
    writer = CheckpointWriter(folder, "seed: 1\n", keep=3)
    for step in (1, 2, 3, 4, 5):
        writer.hand_over(snapshot(step, floats=100_000))  # 0.4 of 1 MiB
        assert writer.finish() is None
        assert newest_valid(folder)[0].state["step"] == step
    told = writer.troubles()
    assert len(told) == 3
    damaged = folder / "step-00000005" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    writer.hand_over(snapshot(6, floats=100_000))
    assert writer.finish() is not None  # the room of the older, whole one is not taken
    assert newest_valid(folder)[0].state["step"] == 4


def test_too_small_a_disk_is_said_beforehand(small_disk):
    folder = small_disk / "checkpoints"
    assert "1 MB" in check_room(folder, snapshot(1, floats=100_000), count=5)
    with raises("disk_full"):  # with what the first step adds, not even one fits
        check_room(folder, snapshot(1, floats=100_000), count=5, moments=2)
    assert check_room(Path("/tmp/checkpoints"), snapshot(1), count=5) == ""


def test_no_inodes_left_is_said(small_disk, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_RETRY_SECONDS", ())
    subprocess.run(["mount", "-o", "remount,nr_inodes=6", f"{small_disk}"], check=True)
    writer = CheckpointWriter(small_disk / "checkpoints", "seed: 1\n", keep=3)
    writer.hand_over(snapshot(1))
    refused = writer.finish()
    assert "4 inodes free" in str(refused)


def test_file_system_without_links_takes_checkpoints(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    writer = CheckpointWriter(tmp_path, "", keep=9)
    writer.hand_over(snapshot(1, 1))
    assert writer.finish() is None and newest_valid(tmp_path)[0].state["step"] == 1
    assert len(writer.troubles()) == 1


def test_files_of_live_writer_stay_and_others_go(tmp_path):
    host = os.uname().nodename
    sleeper = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".step-00000001.{host}.{sleeper.pid}").mkdir()  # a process of this host
    (tmp_path / f".step-00000002.{host}.{dead.pid}").mkdir()
    (tmp_path / f".last.{host}.{dead.pid}").symlink_to("step-00000002")
    (tmp_path / f".step-00000003.{host}.{os.getpid()}").mkdir()  # of an earlier one of this number
    (tmp_path / ".step-00000004.another.host.7").mkdir()
    stale = tmp_path / ".step-00000005.another.host.7"
    stale.mkdir()
    os.utime(stale, (time.time() - 1e6,) * 2)
    (tmp_path / ".gitignore").write_text("")
    prune(tmp_path, keep=1)
    left = {path.name for path in tmp_path.iterdir()}
    sleeper.kill()
    sleeper.wait()
    assert left == {
        f".step-00000001.{host}.{sleeper.pid}", ".step-00000004.another.host.7", ".gitignore",
    }  # fmt: skip


def test_missing_or_copied_link_misleads_nobody(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, snapshot(step).groups, {"step": step}, "")
    (tmp_path / "last").unlink()
    subprocess.run(["cp", "-r", "step-00000001", "step-00000009"], cwd=tmp_path, check=True)
    checkpoint, passed_over = newest_valid(tmp_path)
    assert checkpoint.path.name == "step-00000002"
    assert len(passed_over) == 1 and "step-00000009" in passed_over[0]
    point_at_step(tmp_path / "last", 2)
    assert (tmp_path / "last").resolve() == checkpoint.path
    point_at_step(tmp_path / "best", 7)  # there is none
    assert not (tmp_path / "best").is_symlink()


def test_files_are_those_of_the_safetensors_library(tmp_path):
    arrays = {
        "scalar": np.float64(3.5).reshape(()),
        "none": np.zeros((0, 4), "float32"),
        "turned": np.arange(6, dtype="int64").reshape(2, 3).T,
        "flags": np.array([True, False, True]),
        "half é": np.arange(3, dtype="float16"),
        "bytes": np.arange(5, dtype="uint8"),
        "large": np.random.default_rng(0).random((700, 1001), "float32"),
    }
    path = save_checkpoint(tmp_path, 1, {"model": arrays}, {"step": 1}, "")
    loaded = load_file(path / "model.safetensors")
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        assert loaded[key].dtype == array.dtype and loaded[key].shape == array.shape
        np.testing.assert_array_equal(loaded[key], array)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    for name, about in listed.items():
        assert about["bytes"] == (path / name).stat().st_size
    assert read_checkpoint(path).state == {"step": 1}


@pytest.mark.parametrize("content", ["[]", '{"step": "7"}', "[" * 100_000, "{}", "nul"])
def test_a_state_that_is_none_is_a_damaged_checkpoint(content, tmp_path):
    path = save_checkpoint(tmp_path, 1, {}, {"step": 1}, "")
    (path / "state.json").write_text(content)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with raises("checkpoint_damaged"):
        read_checkpoint(path)
    assert set_aside(tmp_path, 0) is not None


def test_writer_drops_steps_beyond_rollback(tmp_path, storage):
    writer = CheckpointWriter(tmp_path, "", keep=9)
    storage.refuses = True
    storage.goes_on.release(99)
    writer.hand_over(snapshot(1))
    writer.hand_over(snapshot(7, 7))
    wait_for(writer)
    writer.drop_beyond(4)
    storage.refuses = False
    writer.hand_over(snapshot(5))
    assert writer.finish() is None and steps_in(tmp_path) == [5]


def test_each_card_has_the_threshold_of_its_own_evaluation(tmp_path):
    card = ModelCard(source="here")
    writer = CheckpointWriter(tmp_path, "", keep=9, card_of=card.for_checkpoint)
    for step, threshold in ((1, None), (2, 0.41)):
        taken = snapshot(step)
        taken.state["best_f1_threshold"] = threshold
        writer.hand_over(taken)
        assert writer.finish() is None
    cards = [read_card(tmp_path / f"step-{step:08d}") for step in (1, 2)]
    assert [card.best_f1_threshold for card in cards] == [None, 0.41]
    assert {card.source for card in cards} == {"here"}
