"""Whether processes live, and what a crash says."""

import logging
import os
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ppdist.common import process
from ppdist.common.machine import is_alive, process_stat
from ppdist.common.process import unknown_paddle
from tests.unit.launch.hosts import wait_for

WAIT = 60.0  # seconds: a bound against hanging
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize(("is_read", "code"), [(False, 128 + signal.SIGPIPE), (True, 1)])
def test_a_reader_that_has_enough_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, is_read: bool, code: int
) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w", encoding="utf-8") as stdout:
        if not is_read:
            reader.close()
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(process, "STOP_SIGNALS", ())

        def main() -> None:
            raise BrokenPipeError

        with pytest.raises(SystemExit) as ended:
            process.run(main)
    assert ended.value.code == code and ("BrokenPipe" in capfd.readouterr().err) == is_read


def test_a_notebook_shows_no_message_in_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    logger = logging.getLogger("ppdist")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.WARNING)
    process.log_in_notebook()
    assert not logger.handlers
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    process.log_in_notebook()
    logger.info("tracing the model")
    shown = capsys.readouterr()
    assert shown.out.endswith("tracing the model\n") and not shown.err and not logger.propagate


def test_a_zombie_is_there_and_does_not_live() -> None:
    child = subprocess.Popen(SLEEPS)
    stat = process_stat(child.pid)
    assert stat is not None and stat.is_alive and stat.parent == os.getpid()
    child.kill()
    wait_for(lambda: not is_alive(child.pid))
    zombie = process_stat(child.pid)
    assert zombie is not None and (zombie.state, zombie.began) == ("Z", stat.began)
    child.wait()
    assert process_stat(child.pid) is None and not is_alive(child.pid)


def test_a_name_with_brackets_and_blanks_is_no_field() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z 7 (', 0, 0, 0); print(1, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        stat = process_stat(child.pid)
        assert stat is not None and stat.is_alive and stat.parent == os.getpid()
        child.kill()


@pytest.mark.parametrize(
    ("version", "known"),
    [
        *(("3.2.2", True), ("3.3.1", True), ("3.3.9", True), ("3.3.1.post2", True), ("", True)),
        *(("3.2.1", False), ("2.6.2", False), ("3.4.0", False), ("10.0", False)),
        *(("3.4.0.dev20261101+cu129", False), ("0.0.0", False), ("of my own", False)),
    ],
)
def test_a_paddle_that_was_not_run_is_known_by_its_version(version: str, known: bool) -> None:
    assert (unknown_paddle(version) == "") is known


def test_a_crash_names_a_paddle_that_was_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "STOP_SIGNALS", ())
    notice = (
        "\nppdist: ppdist was run with Paddle 3.2.2 and 3.3.1, not with 3.4.0: README.md, Versions "
        "of Paddle, says what that means\n"
    )
    for version, told in (("3.4.0", True), ("3.3.1", False)):
        monkeypatch.setitem(sys.modules, "paddle", SimpleNamespace(__version__=version))
        with pytest.raises(SystemExit) as ended:
            process.run(lambda: 1 // 0)
        said = capsys.readouterr().err
        assert ended.value.code == 1 and "ZeroDivisionError" in said
        assert (notice in said) is told
