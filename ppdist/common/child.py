"""Child processes, which this one starts, watches and outlives.

ends_with_this   makes a child end with this process
run_command      runs a program until it ends or its time is up
run_in_child     runs a function in a forked child
"""

import ctypes
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ppdist.common.process import (
    EXIT_DIR_VARIABLE,
    JOB_DIR_VARIABLE,
    RESTART_VARIABLE,
    SKIP_STEP_VARIABLE,
)
from ppdist.common.writer_thread import TERMINAL, Screen

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_SECONDS = 0.2  # between two checks of a program


def own_environment() -> dict[str, str]:
    """Environment for a program that is not a rank, hidden from fleetrun."""
    ours = (EXIT_DIR_VARIABLE, JOB_DIR_VARIABLE, RESTART_VARIABLE, SKIP_STEP_VARIABLE)
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PADDLE_") and name not in ours
    }


def run_command(
    command: Sequence[str],
    log: Path,
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    stop: Callable[[], object] = lambda: None,
) -> int | None:
    """Runs a program; kills it and its children at the timeout or with this process.

    Args:
        log: receives its output.
        seconds: the timeout.
        stop: called while it runs; a true result kills it.
    Returns: its exit code, negative for a signal; None: it was killed here.
    Raises: OSError: it cannot be started.
    """
    deadline = time.monotonic() + seconds
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True, preexec_fn=ends_with_this(signal.SIGKILL),
        )  # fmt: skip
    try:
        while child.poll() is None and time.monotonic() < deadline and not stop():
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_SECONDS)
        return child.poll()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def end_with_parent(number: int, parent: int) -> None:
    """Makes the kernel signal this process when its parent ends.

    A parent that has already ended counts, too.

    Args: parent: its process id, taken before it could end.
    """
    _ending_with(number, parent)()


def ends_with_this(number: int) -> Callable[[], None]:
    """The same for a child, as a `preexec_fn` or its first call after a fork.

    Created before the fork, because another thread may hold the linker's lock during it.  It does
    nothing outside the main thread: the kernel takes the end of the forking thread for the end of
    its process.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    return _ending_with(number, os.getpid())


def _ending_with(number: int, parent: int) -> Callable[[], None]:
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux: children must check for their parent
        return lambda: None
    words = [ctypes.c_ulong(word) for word in (number, 0, 0, 0)]

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, *words)
        if os.getppid() != parent:  # it ended before we asked
            os.kill(os.getpid(), number)

    return ask


_DEADLY = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def run_in_child(work: Callable[[], object], seconds: float) -> str:
    """Runs work in a forked child, so that a crash cannot kill this process.

    The child's log messages are logged here.  It has only the forking thread, so the work must not
    rely on other threads or on a device.

    Args: seconds: the timeout.
    Returns: how it failed; "": it did not.
    """
    ends_with_us = ends_with_this(signal.SIGKILL)
    ours, theirs = os.pipe()
    for stream in (sys.stdout, sys.stderr):  # else the child would write the buffer again
        if not isinstance(stream, Screen):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    TERMINAL.flush()
    try:
        child = os.fork()
    except OSError as error:  # too little memory, or too many processes
        os.close(ours)
        os.close(theirs)
        return f"no process for it: {error.strerror}"
    if child == 0:
        code = 1
        try:
            ends_with_us()
            os.close(ours)
            code = _work_in_child(work, theirs)
        finally:  # none of this process's own code may run in the child
            os._exit(code)
    os.close(theirs)
    in_time = _pass_on(ours, time.monotonic() + seconds)
    os.close(ours)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not in_time:
        return f"not done after {seconds:g} s"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else "an error" if code else ""


def _work_in_child(work: Callable[[], object], pipe: int) -> int:
    for number in _DEADLY:  # no page-long report of Paddle's, and no core file
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logger = logging.getLogger("ppdist")
    logger.handlers = [_PipeHandler(pipe)]
    try:
        work()
    except BaseException as error:
        logger.warning(f"{type(error).__name__}: {error}")
        return 1
    return 0


class _PipeHandler(logging.Handler):
    """Sends records to another process: level and text, one line each."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        line = json.dumps([record.levelno, record.getMessage()]) + "\n"
        with suppress(OSError):
            os.write(self._pipe, line.encode())


def _pass_on(pipe: int, deadline: float) -> bool:
    """Logs what arrives until the writer ends.  Returns: whether it ended in time."""
    data = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        block = os.read(pipe, 1 << 16)
        if not block:
            return True
        *lines, data = (data + block).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # it died in the middle of one
                level, text = json.loads(line)
                logging.getLogger("ppdist").log(level, "%s", text)
    return False
