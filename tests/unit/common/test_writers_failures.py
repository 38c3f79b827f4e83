"""A run goes on when what it writes for eyes cannot be written: each way once, and said once."""

import errno
import io
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.records import read_metrics
from ppdist.common.run_log import RunLog
from ppdist.common.writers import VisualDLWriter

IMAGE_HW3 = np.zeros((8, 8, 3), np.uint8)


def a_run(folder: Path, steps: range = range(1, 5), between: Callable[[], None] = int) -> None:
    """Says all that a run says; `between` happens after the first half."""
    with RunLog(folder, True, 9, 3, None, every_steps=1) as log:
        log.table("derived", [("ranks", "1", "no launcher")])
        for step in steps:
            if step == steps[len(steps) // 2]:
                log.flush()
                between()
            log.metrics({"step": step, "loss": 0.5})
            log.images("val", step, [IMAGE_HW3])
            log.progress(step, {"loss": "0.5"})
            log.warning(f"after step {step}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_tears_no_line_warns_per_writer(small_disk, capsys, record_property) -> None:
    run = small_disk / "run"

    def fill() -> None:
        with pytest.raises(OSError, match="No space"), open(small_disk / "junk", "wb", 0) as junk:
            while True:
                junk.write(bytes(4096))

    def lines_until_full() -> None:
        log.flush()
        fill()
        for _ in range(200):  # more than what is left of the last page of each file
            log.metrics({"step": 1, "loss": 0.5, "note": "x" * 50})
            log.images("val", 1, [IMAGE_HW3])
            log.warning("y" * 100)
        log.flush()

    with RunLog(run, True, 9, 3, None) as log:
        log.metrics({"step": 0})
        lines_until_full()
        (small_disk / "junk").unlink()
        log.metrics({"step": 2})
    out, err = capsys.readouterr()
    assert out.count("metrics.jsonl cannot be written") == 1
    assert out.count("VisualDL cannot be written") == 1
    assert out.count("train.log cannot be written") == 1 and not err
    records = read_metrics(run / "metrics.jsonl")
    assert len(records) == len((run / "metrics.jsonl").read_text().splitlines()), "no half line"
    assert records[-1]["step"] == 2
    record_property("figure", "0 half lines, said once")


def test_a_writer_that_cannot_go_back_costs_a_line(tmp_path, capsys, monkeypatch) -> None:
    def refuse(self, keep_until_step):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunLog(tmp_path, True, 9, 3, None) as log:
        log.metrics({"step": 2})
        monkeypatch.setattr(VisualDLWriter, "_open", refuse)
        log.rollback(1)
        log.metrics({"step": 2, "loss": 0.5})
    out, err = capsys.readouterr()
    assert out.count("VisualDL cannot be written") == 1 and not err
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["loss"] == 0.5


def test_read_only_disk_fails_start_not_running_job(small_disk, tmp_path, capsys) -> None:
    run = small_disk / "run"
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    with RunLog(run, True, 9, 3, None, visualdl=False) as log:
        log.metrics({"step": 1})
        log.close()  # which a file system needs that is to become read-only
        subprocess.run(remount, check=True)
        log.metrics({"step": 2})
        log.metrics({"step": 3})
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [1]
    with pytest.raises(ValueError, match=r"output_dir: .*Read-only file system"):
        RunLog(run, True, 9, 3, 1)


def test_removed_output_dir_costs_line_and_is_remade(tmp_path, capsys) -> None:
    run = tmp_path / "run"
    a_run(run, between=lambda: shutil.rmtree(run))
    out, err = capsys.readouterr()
    assert out.count("metrics.jsonl cannot be written") == 1
    assert out.count("VisualDL cannot be written") == 1
    assert out.count("train.log cannot be written") == 1 and not err
    assert out.count("after step") == 4, "the console still says everything"

    def replace() -> None:  # as a checkpoint does, which makes the folders above it
        shutil.rmtree(run)
        run.mkdir()

    a_run(run, between=replace)
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [3, 4]
    assert (run / "train.log").read_text().count("after step") == 2


def fails(kind: type[Exception]) -> Callable:
    def fail(*values: object) -> None:
        raise kind("made to fail")

    return fail


@pytest.mark.parametrize("kind", [OSError, ValueError, RuntimeError, MemoryError, IndexError])
@pytest.mark.parametrize("method", ["__init__", "add_scalars", "add_images", "close"])
def test_visualdl_may_fail_in_any_call_and_in_any_way(
    method: str, kind: type[Exception], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(VisualDLWriter, method, fails(kind))
    a_run(tmp_path)
    said = capsys.readouterr().out
    assert said.count(f"continuing without it: {kind.__name__}: made to fail") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_loss_beyond_visualdl_range_stays_in_metrics(tmp_path, capsys) -> None:
    with RunLog(tmp_path, True, 9, 3, None) as log:
        log.metrics({"step": 1, "loss": 1e300})  # more than a float32: no point
        log.images("val", 1, [np.zeros((0, 8, 3), np.uint8)])
        log.metrics({"step": 2, "loss": 1.0})
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1e300, 1.0]
    assert capsys.readouterr().out.count("VisualDL cannot be written") == 1


def test_damaged_visualdl_file_does_not_block_resume(tmp_path, capsys) -> None:
    (tmp_path / "vdl").mkdir()
    (tmp_path / "vdl" / "vdlrecords.ppdist.log").write_bytes(b"\x02\0\0\0\0\0\0\0\xff\xff")
    with RunLog(tmp_path, True, 9, 3, 5) as log:
        log.metrics({"step": 6})
    assert "VisualDL cannot be written" in capsys.readouterr().out
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.slow
def test_training_needs_neither_visualdl_nor_matplotlib() -> None:
    code = (
        "import sys\n"
        "for name in ('visualdl', 'matplotlib', 'prometheus_client'): sys.modules[name] = None\n"
        "import ppdist.engine.build, ppdist.common.run_log, pathlib, tempfile\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    with ppdist.common.run_log.RunLog(\n"
        "        pathlib.Path(folder), True, 9, 3, None\n"
        "    ) as log:\n"
        "        log.metrics({'step': 1, 'loss': 1.0})\n"
        "    print(len(pathlib.Path(folder, 'metrics.jsonl').read_text().splitlines()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "VisualDL cannot be written" in done.stdout and done.stdout.endswith("\n1\n")


A_TOOL = """
import pathlib, sys
from ppdist.common import process
from ppdist.common.run_log import RunLog
from ppdist.common.records import read_metrics
def main():
    folder = pathlib.Path(sys.argv[1])
    with RunLog(folder, True, 9, 3, None, every_steps=1) as log:
        log.info("begun")
        sys.stdin.read(1)  # until nobody reads what is written
        log.table("derived", [("ranks", "1", "why")], on_console=True)
        for step in range(1, 10):
            log.info("x" * 9000)
            log.progress(step, {"loss": "1"})
            log.metrics({"step": step})
        print("left in the buffer of stdout", end="")
    return 0 if sys.argv[2] == "well" else 75
process.run(main)
"""


@pytest.mark.parametrize(("ends", "code"), [("well", 0), ("stopped", 75)])
def test_a_reader_that_goes_away_changes_no_exit_code(ends: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", A_TOOL, str(tmp_path), ends]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.stdout.close()  # as `head -1` does
    process.stdin.close()
    assert process.wait(60) == code
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 9
    log = (tmp_path / "train.log").read_text()
    assert log.count("stdout; lines only go") == 1
    assert "step 9/9" in log


def test_a_terminal_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", A_TOOL, str(tmp_path), "well"],
        stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    assert process.stdin is not None
    while b"begun" not in os.read(ours, 4096):
        pass
    os.close(ours)  # writing to it is an input/output error from now on
    process.stdin.close()
    assert process.wait(60) == 0
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 9


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_run_without_stdout_or_stderr_ends_normally(closed: tuple, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", A_TOOL, str(tmp_path), "well"],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert process.wait(60) == 0
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 9


def test_names_cannot_move_terminal_cursor(tmp_path: Path, capsys) -> None:
    with RunLog(tmp_path, True, 9, 3, None) as log:
        log.warning("images/\x1b]0;title\x07\x1b[2J\u202egpj.exe: 苹果 ÿ\u2028: cannot be used")
    shown = "images/\\u001b]0;title\\u0007\\u001b[2J\\u202egpj.exe: 苹果 ÿ\\u2028: cannot be used"
    assert shown in capsys.readouterr().out
    assert shown in (tmp_path / "train.log").read_text()


def test_disk_full_mid_line_removes_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:-10]) or 0

    with RunLog(tmp_path, True, 9, 3, None, visualdl=False) as log:
        log.metrics({"step": 1})
        log.flush()
        monkeypatch.setattr("ppdist.common.files.io.FileIO", Full)
        log.metrics({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
