"""Nobody waits for a blocked terminal, pipe or disk."""

import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ppdist.common import run_log
from ppdist.common.records import read_metrics
from ppdist.common.run_log import RunLog
from ppdist.runtime.writer_thread import Screen, WriterThread


def test_writes_come_in_order_and_failures_are_kept() -> None:
    thread, written = WriterThread(), list[int]()
    thread.put("a", lambda: written.append(1))
    thread.put("b", lambda: 1 // 0)
    thread.put("a", lambda: written.append(2))
    assert thread.flush(10) and written == [1, 2] and thread.waiting == 0
    assert [(name, type(error)) for name, error in thread.failures] == [("b", ZeroDivisionError)]


def test_what_waits_is_bounded_but_for_records() -> None:
    thread, gate, written = WriterThread(most_bytes=100), threading.Event(), list[str]()
    thread.put("gate", gate.wait)
    for _ in range(5):
        thread.put("picture", lambda: written.append("picture"), 40, may_drop=True)
        thread.put("record", lambda: written.append("record"), 40)
    assert not thread.flush(0.05) and thread.dropped == {"picture": 4}
    gate.set()
    assert thread.flush(10) and written.count("record") == 5 and written.count("picture") == 1


def test_a_forked_copy_writes_at_once() -> None:
    thread, gate = WriterThread(), threading.Event()
    thread.put("gate", gate.wait)
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        try:
            thread.put("x", lambda: os.write(theirs, b"written"))
            if thread.flush(0):
                os.write(theirs, b", nothing is left")
        finally:  # a copy of the test runner must not go on
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.read(ours, 99) == b"written, nothing is left"
    gate.set()


def test_a_screen_that_somebody_closed_is_silent() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    assert screen.write("a") == 1 and screen.problem is None
    stream.close()
    assert screen.write("b") == 1 and screen.isatty() is False
    screen.flush()
    assert isinstance(screen.problem, ValueError)


def test_a_frozen_disk_holds_up_no_step(tmp_path: Path, capsys) -> None:
    gate = threading.Event()
    with RunLog(tmp_path, True, 9, 3, None, every_steps=1) as log:
        log.put("frozen", gate.wait)
        began = time.monotonic()
        for step in range(1, 10):
            log.metrics({"step": step, "loss": 1.0})
            log.progress(step, {"loss": "1.0"})
            log.info("x" * 1000)
        assert not log.sync(0.05), "a checkpoint is not written over records that are missing"
        assert time.monotonic() - began < 5
        gate.set()
    assert [each["step"] for each in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 10)]
    assert (tmp_path / "train.log").read_text().count("step 9/9") == 1


def test_a_disk_that_stays_frozen_is_told_at_the_end(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run_log, "_STOPPED_SECONDS", 0.05)
    monkeypatch.setattr(run_log, "_CLOSE_SECONDS", 20.0)
    gate, began = threading.Event(), time.monotonic()
    with RunLog(tmp_path, True, 9, 3, None, visualdl=False) as log:
        log.put("frozen", gate.wait)
        log.metrics({"step": 1})
        log.limit_close()
        capsys.readouterr()
    assert "are lost" in capsys.readouterr().err and time.monotonic() - began < 15
    gate.set()


A_RUN = """
import pathlib, signal, sys, time
from ppdist.common import process
from ppdist.common.run_log import RunLog
stop = []
def hear(number, frame):
    stop.append(number)
    process.say("stopping after this step")
def main():
    folder = pathlib.Path(sys.argv[1])
    signal.signal(signal.SIGTERM, hear)
    with RunLog(folder, True, 10**6, 3, None, every_steps=1, visualdl=False) as log:
        step = 0
        while not stop:
            step += 1
            log.info("x" * 5000)
            print("y" * 5000, file=sys.stderr)
            log.progress(step, {"loss": "1"})
            log.metrics({"step": step})
            time.sleep(0.001)
        log.limit_close()
        log.warning("stopped by a signal")
    return 75
process.run(main)
"""


@pytest.mark.parametrize("kind", ["terminal", pytest.param("pipe", marks=pytest.mark.slow)])
def test_a_terminal_that_takes_nothing_stops_neither_steps_nor_the_end(
    kind: str, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty() if kind == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", A_RUN, str(tmp_path)],
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    file, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 60
    try:
        while not file.exists() or len(read_metrics(file)) < 150:  # more than a megabyte of output
            assert time.monotonic() < deadline and process.poll() is None, "it waits"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 75
    finally:  # else a failure leaves a process that fills the disk
        process.kill()
    os.close(ours)
    text = (tmp_path / "train.log").read_text()
    assert text.count("stdout; lines only go") == 1
    assert "stopped by a signal" in text and "was blocked" in text


def test_what_waits_is_written_where_no_thread_can_be_started(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer, written = WriterThread(), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        writer.put("a line", lambda: written.append(1))
        assert written == [1] and writer.waiting == 0 and writer.flush(1.0)
    writer.put("another", lambda: written.append(2))  # once there is room for a thread
    assert writer.flush(5.0) and written == [1, 2]
