"""One folder, one training: the second is refused while the first lives, however it ends."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.errors import ConfigError
from ppdist.common.files import FileLock, append, hold, is_held, is_lost, require_held
from ppdist.common.run_log import RunLog
from ppdist.engine.checkpoint import CheckpointWriter, Snapshot
from tests.errors import raises

ROOT = Path(__file__).resolve().parents[3]
# Holds the lock and has a child, as a rank has workers, that outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from ppdist.common.files import hold, is_held
hold(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path / "run"`, and the number of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"{tmp_path / 'run'}"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_second_training_is_refused_until_first_dies(holder, tmp_path):
    process, child = holder
    told = rf"another training writes there \(process {process.pid} on host .+ since \d{{4}}-"
    assert is_held(tmp_path / "run") and not is_held(tmp_path)
    with pytest.raises(ConfigError, match=told):
        hold(tmp_path / "run", seconds=0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Path(f"/proc/{child}").exists()  # the copy has not taken the lock over
    assert not is_held(tmp_path / "run")
    assert hold(tmp_path / "run") == []
    assert hold(tmp_path / "run" / ".." / "run") == []  # its own
    assert f'"pid": {os.getpid()}' in (tmp_path / "run" / "run.lock").read_text()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (warning,) = hold(tmp_path / "run")
    assert "No locks available" in warning and "second training" in warning


def test_unwritable_lock_folder_is_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("folder_unwritable"):
        hold(tmp_path / "file")


@pytest.fixture
def successor(tmp_path):
    """Starts a process that holds the lock of `tmp_path / "run"`."""
    started = []

    def start():
        command = [sys.executable, "-c", HOLDER, f"{tmp_path / 'run'}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        started.append((process, int(process.stdout.readline())))

    yield start
    for process, child in started:
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_who_lost_a_folder_to_another_training_stops(how, successor, tmp_path):
    folder = tmp_path / "run"
    hold(folder)
    require_held(folder)
    (folder / "run.lock").unlink()
    if how == "replaced":
        (folder / "run.lock").touch()
    successor()
    assert not is_lost(folder)  # which asks no disk
    for _ in range(2):
        with raises("output_dir_lost", "(process "):
            require_held(folder)
        assert is_lost(folder)
    with raises("output_dir_in_use"):
        hold(folder, seconds=0)


def test_a_deleted_lock_is_taken_again_before_another_comes(tmp_path):
    folder = tmp_path / "run"
    hold(folder)
    shutil.rmtree(folder)
    require_held(folder)
    assert is_held(folder)
    code = HOLDER.replace("hold(Path(sys.argv[1]))", "hold(Path(sys.argv[1]), 0)")
    ended = subprocess.run(
        [sys.executable, "-c", code, f"{folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert f"(process {os.getpid()} " in ended.stderr
    require_held(folder)


def test_a_full_disk_costs_no_lock(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "run"
    monkeypatch.setattr(os, "pwrite", refuse)
    hold(folder)
    for _ in range(2):
        assert is_held(folder) and is_refused(folder)
        (folder / "run.lock").unlink()
        require_held(folder)
    assert is_held(folder) and is_refused(folder)


def test_the_lock_is_the_file_that_is_there_now(tmp_path):
    old, new = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert old.try_acquire() and old.is_current()
    os.replace(tmp_path / "lock", tmp_path / "moved")
    assert not old.is_current()
    assert new.try_acquire() and new.is_current()


def test_records_of_a_lost_folder_are_not_written(successor, tmp_path):
    folder = tmp_path / "run"
    hold(folder)
    points = folder / "vdl" / "vdlrecords.ppdist.log"
    with RunLog(folder, True, 9, 9, None) as log:
        log.metrics({"step": 1, "loss": 1.0})
        assert log.flush()
        for path in [*folder.rglob("*.*")]:
            path.unlink()
        successor()
        for file in (folder / "metrics.jsonl", points):
            append(file, b"of the other\n")
        log.metrics({"step": 2, "loss": 1.0})
        log.info("a line")
        log.rollback(1)
        assert log.flush()
        assert is_lost(folder)
    for file in (folder / "metrics.jsonl", points):
        assert file.read_text() == "of the other\n"
    assert not (folder / "train.log").exists()


def test_checkpoints_of_another_training_are_left_alone(successor, tmp_path):
    folder = tmp_path / "run"
    hold(folder)
    writer = CheckpointWriter(folder / "checkpoints", "", keep=1)
    shutil.rmtree(folder)
    successor()
    state = {"best_step": 0, "best_f1_threshold": None}
    writer.hand_over(Snapshot(5, {"model": {"a": np.zeros(2, np.float32)}}, state))
    assert writer.finish().code == "output_dir_lost"
    assert not list((folder / "checkpoints").glob("step-*"))


def is_refused(folder: Path) -> bool:
    """Whether another process that would train in the folder is refused."""
    code = HOLDER.partition("child =")[0].replace(
        "hold(Path(sys.argv[1]))", "hold(Path(sys.argv[1]), 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code, f"{folder}"], cwd=ROOT, capture_output=True)
    assert (
        ended.returncode == 0
        or b"output_dir_in_use" in ended.stderr
        or b"another training" in ended.stderr
    )
    return ended.returncode != 0


def test_reading_or_copying_a_folder_keeps_its_lock(tmp_path):
    folder = tmp_path / "run"
    hold(folder)
    (folder / "run.lock").read_text()
    shutil.copytree(folder, tmp_path / "copy")
    assert is_held(folder) and is_refused(folder)


def test_a_lock_replaced_by_its_copy_is_taken_again(tmp_path):
    folder = tmp_path / "run"
    hold(folder)
    shutil.copy(folder / "run.lock", folder / "copy")
    os.replace(folder / "copy", folder / "run.lock")
    assert not is_held(folder)
    require_held(folder)
    assert is_held(folder) and is_refused(folder)


def test_the_lock_of_a_retargeted_folder_is_where_it_leads_now(successor, tmp_path):
    for name in ("a", "run"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("a")
    hold(link)
    link.unlink()
    link.symlink_to("run")
    successor()  # trains in run
    with raises("output_dir_lost"):
        require_held(link)


@pytest.mark.parametrize("target", ["disk", "other/checkpoints"])
def test_a_linked_folder_of_checkpoints_has_one_training(target, tmp_path):
    runs = [tmp_path / "run", tmp_path / "other"]
    (tmp_path / target).mkdir(parents=True)
    for run in runs:
        run.mkdir(exist_ok=True)
        (run / "run.lock").touch()
        if not (run / "checkpoints").exists():
            (run / "checkpoints").symlink_to(tmp_path / target)
    hold(runs[0])
    assert is_refused(runs[1])
    hold(runs[0])  # its own
    require_held(runs[0])


def test_a_second_name_of_a_lock_keeps_its_content(tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    copy.write_text("precious")
    os.link(copy, folder / "run.lock")
    hold(folder)
    assert copy.read_text() == "precious" and is_refused(folder)
    os.link(folder / "run.lock", tmp_path / "later")  # of a run that goes on
    require_held(folder)
    assert is_refused(folder)


def test_a_pipe_in_the_place_of_a_lock_blocks_nobody(tmp_path):
    os.mkfifo(tmp_path / "run.lock")
    assert not is_held(tmp_path)
    hold(tmp_path)
    assert is_refused(tmp_path)
