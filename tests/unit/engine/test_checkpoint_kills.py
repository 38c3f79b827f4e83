"""A kill at every call that changes the disk, while a checkpoint is saved and old ones are deleted.

A process without Paddle makes a folder of checkpoints for each such call and forks a copy of itself
that saves one more, until it is killed there.  `calls` is what such a copy does, `sweep` all of it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppdist.engine.checkpoint import (
    CheckpointWriter,
    Snapshot,
    newest_valid,
    point_at_step,
    read_checkpoint,
    save_checkpoint,
)

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW, KEEP = (10, 20, 30, 40), 50, 2
CHANGES = {"open", "os.rename", "os.remove", "os.symlink", "os.mkdir", "os.rmdir"}  # as audited


def snapshot_of(step: int, best_step: int) -> Snapshot:
    arrays = {"conv.weight": np.full((40, 50), step, "float32"), "bn._mean": np.arange(3.0)}
    groups = {"model": arrays, "optimizer": arrays, "ema": arrays}
    return Snapshot(step, groups, {"step": step, "best_step": best_step})


def make(folder: Path) -> None:
    """Checkpoints 10 to 40, of which 10 is the best: 20 is due to be deleted by the next save."""
    for step in OLD:
        old = snapshot_of(step, OLD[0])
        save_checkpoint(folder, step, old.groups, old.state, "seed: 1\n")
    point_at_step(folder / "best", OLD[0])


def save_one_more(folder: Path, step: int = NEW) -> None:
    """Saves a best one and deletes 10 and 20, 30."""
    writer = CheckpointWriter(folder, "seed: 1\n", KEEP)
    writer.hand_over(snapshot_of(step, step))
    assert writer.finish() is None


def watch(before: Callable[[str, Any], None]) -> None:
    """From now on this process calls `before(call, what)` before each call that changes the disk;
    of a write, after half of it."""
    sync, open_path = os.fsync, Path.open

    class HalfWritten:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "HalfWritten":
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def fileno(self) -> int:
            return self.file.fileno()

        def write(self, data: memoryview) -> int:
            written = self.file.write(data[: len(data) // 2])
            before("write", self.file.name)
            return written + self.file.write(data[written:])

    def open_watched(path: Path, mode: str = "r", **options: Any) -> Any:
        file = open_path(path, mode, **options)
        return HalfWritten(file) if "w" in mode else file

    def sync_watched(handle: int) -> None:
        before("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def audited(event: str, arguments: tuple) -> None:
        if event in CHANGES:
            before(event, arguments)

    os.fsync, Path.open = sync_watched, open_watched  # type: ignore[assignment]
    sys.addaudithook(audited)


def killed_at(folder: Path, number: int) -> bool:
    """Whether a copy of this process was killed at its so many-th call; False: it made fewer."""
    child = os.fork()
    if child == 0:
        calls = count()

        def strike(call: str, what: Any) -> None:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        watch(strike)
        try:
            save_one_more(folder)
        finally:
            sys.exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def complaints(folder: Path) -> list[str]:
    """What is wrong with a folder after a kill."""
    wrong = []
    for path in folder.glob("step-*"):
        read_checkpoint(path)  # no half one bears the name of a whole one
    checkpoint, passed_over = newest_valid(folder)
    if checkpoint is None or checkpoint.state["step"] not in (OLD[-1], NEW) or passed_over:
        wrong.append(f"resumes from {checkpoint}, passed over {passed_over}")
    for link, allowed in (("best", (OLD[0], NEW)), ("last", (OLD[-1], NEW))):
        path = folder / link
        if not path.exists() or read_checkpoint(path).state["step"] not in allowed:
            wrong.append(f"{link} -> {os.readlink(path)}")
    save_one_more(folder, NEW + 10)
    left = {path.name for path in folder.iterdir()}
    newest = {path.name for path in folder.glob("step-*")}
    if left - newest != {"best", "last"} or len(newest) != KEEP:
        wrong.append(f"the next save leaves {sorted(left)}")
    return wrong


def sweep(root: Path) -> None:
    """Prints how many kills there were, and after which of them something was wrong."""
    make(root / "template")
    wrong = {}
    for number in count():
        folder = root / str(number)
        shutil.copytree(root / "template", folder, symlinks=True)
        if not killed_at(folder, number):
            break
        found = complaints(folder)
        if found:
            wrong[number] = found
        shutil.rmtree(folder)
    print(json.dumps({"kills": number, "wrong": wrong}))


def calls(root: Path) -> None:
    """Prints the calls of one undisturbed save, as [call, what]."""
    make(root)
    seen: list = []
    watch(lambda call, what: seen.append([call, repr(what)]))
    save_one_more(root)
    print(json.dumps(seen))


def in_a_process(function: str, root: Path) -> Any:
    code = (
        "from pathlib import Path\n"
        "from tests.unit.engine import test_checkpoint_kills as here\n"
        f"here.{function}(Path({str(root)!r}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_kill_at_any_call_leaves_whole_checkpoints(tmp_path, record_property):
    report = in_a_process("sweep", tmp_path)
    record_property("kills", report["kills"])
    assert report["wrong"] == {}
    assert report["kills"] > 50


def test_naming_and_deleting_wait_for_fsync(tmp_path):
    """What a power loss may leave is what was synced: files before their directory is renamed, the
    rename and the links before an older checkpoint goes."""
    seen = in_a_process("calls", tmp_path)
    draft, folder = f".step-{NEW:08d}.", repr(str(tmp_path))
    renamed = next(at for at, (call, what) in enumerate(seen) if call == "os.rename")
    written = {what for call, what in seen[:renamed] if call == "write"}
    synced = [what for call, what in seen[:renamed] if call == "fsync"]
    assert len(written) == 6 and all(draft in what for what in written)
    assert written < set(synced)
    assert draft in synced[-1] and synced[-1] not in written  # the draft itself, at the end
    best = max(at for at, (call, what) in enumerate(seen) if call == "os.rename" and "best" in what)
    first_gone = next(at for at, (call, what) in enumerate(seen) if call == "os.rmdir")
    after_rename = [what for call, what in seen[renamed:best] if call == "fsync"]
    after_links = [what for call, what in seen[best:first_gone] if call == "fsync"]
    assert after_rename[:1] == [folder] and after_links == [folder]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_damage_in_newest_falls_back_to_previous(harm, tmp_path):
    for name in ("model.safetensors", "state.json", "config.yml", "manifest.json"):
        folder = tmp_path / name
        make(folder)
        path = folder / f"step-{OLD[-1]:08d}" / name
        data = bytearray(path.read_bytes())
        if harm == "flip":
            data[len(data) // 2] ^= 0x10
        path.write_bytes(
            data[: len(data) // 2] if harm == "cut" else b"" if harm == "empty" else data
        )
        if harm == "gone":
            path.unlink()
        checkpoint, passed_over = newest_valid(folder)
        assert checkpoint is not None and checkpoint.state["step"] == OLD[-2]
        assert len(passed_over) == 1 and f"step-{OLD[-1]:08d}" in passed_over[0]
