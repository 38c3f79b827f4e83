"""Children: they end with who started them, in time, and may die."""

import ctypes
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ppdist.common.child import (
    begin_in_child,
    end_with_parent,
    ends_with_this,
    output_of,
    own_environment,
    run_command,
)
from ppdist.common.job import EXIT_DIR_VARIABLE
from ppdist.common.machine import is_alive
from tests.unit.launch.hosts import wait_for

WAIT = 60.0  # seconds: a bound against hanging
# Starts a child that is to end with it, says which, and waits.
PARENT = """
import subprocess, sys, time
from ppdist.common.child import ends_with_this
command = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(command, preexec_fn=ends_with_this(15)).pid, flush=True)
time.sleep(60)
"""


def test_work_apart_logs_here_and_may_die(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ppdist")

    def fail() -> None:
        logger.warning("before")
        raise ValueError("no picture")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    assert begin_in_child(lambda: logger.warning("fine: 100 %s 图"), WAIT)() == ""
    assert begin_in_child(fail, WAIT)() == "an error"
    assert begin_in_child(lambda: sys.exit(3), WAIT)() == "an error"
    assert begin_in_child(die, WAIT)() == "killed by SIGSEGV"
    assert begin_in_child(lambda: time.sleep(60), 0.2)().startswith("not done")
    expected = ["fine: 100 %s 图", "before", "ValueError: no picture", "SystemExit: 3"]
    assert [record.getMessage() for record in caplog.records] == expected


def test_no_room_for_a_process_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    assert begin_in_child(lambda: None, WAIT)().startswith("no process")


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    wait_for(lambda: not is_alive(child))


def test_a_parent_that_ended_before_is_noticed() -> None:
    child = os.fork()
    if not child:
        end_with_parent(signal.SIGKILL, os.getppid() + 1)  # as if it had another by now
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_in_a_thread_nothing_is_asked_for() -> None:
    """Else the end of the thread would be that of the child."""
    made: list[Callable[[], None]] = []
    thread = threading.Thread(target=lambda: made.append(ends_with_this(signal.SIGKILL)))
    thread.start()
    thread.join()
    before = death_signal()
    made[0]()
    assert death_signal() == before


def death_signal() -> int:
    """What this process gets when its parent ends, 0: nothing."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
    return number.value


def test_a_command_is_ended_with_its_children_when_its_time_is_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_command(["sh", "-c", "echo said; exit 3"], log, WAIT) == 3
    assert log.read_text() == "said\n"
    command = ["sh", "-c", "sleep 60 & echo $!; wait"]
    for seconds, stop in ((0.5, lambda: False), (WAIT, lambda: log.read_text().endswith("\n"))):
        assert run_command(command, log, seconds, stop=stop) is None
        # On a busy machine the time may be over before there is a child.
        children = [int(number) for number in log.read_text().split()]
        wait_for(lambda ids=children: not any(map(is_alive, ids)), 20)  # less than it sleeps


def test_output_of_a_program_has_a_timeout() -> None:
    command = ["sh", "-c", "echo said; echo wrong >&2; exit 3"]
    assert output_of(command, WAIT) == (3, "said\n", "wrong\n")
    began = time.monotonic()
    assert output_of(["sh", "-c", "sleep 60 & wait"], 0.3) is None
    assert time.monotonic() - began < 20
    with pytest.raises(OSError):
        output_of(["/nowhere"], WAIT)


def test_a_program_of_its_own_hears_of_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    monkeypatch.setenv(EXIT_DIR_VARIABLE, "/tmp")
    assert not {"PADDLE_TRAINER_ID", EXIT_DIR_VARIABLE} & own_environment().keys()
