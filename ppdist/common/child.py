"""Child processes, which this one starts, watches and outlives.

python           the command line of a Python with this process's modules; python_module: of one
start            starts a program; start_here: in the session of this process
run_command      runs a program until it ends or its time is up
output_of        runs a program and returns what it prints
ForkedChild      runs a function in a forked child
begin_in_child   the same, beside what this process does next, until its time is up
"""

import ctypes
import json
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL as DISCARD
from subprocess import PIPE as PIPE
from subprocess import Popen as Process
from subprocess import TimeoutExpired as TimeoutExpired
from typing import Any

from ppdist.common.job import (
    EXIT_DIR_VARIABLE,
    JOB_DIR_VARIABLE,
    MIN_HOSTS_VARIABLE,
    RESTART_VARIABLE,
    SKIP_STEP_VARIABLE,
)
from ppdist.common.signals import release_signals
from ppdist.runtime.writer_thread import TERMINAL, Screen

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_SECONDS = 0.2  # between two checks of a program
_REAP_SECONDS = 1.0  # a killed process that waits for a dead disk may never end
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


# Other launchers set these to the number of copies of a command that they started.
COPIES_VARIABLES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def python(code: str, *arguments: str) -> list[str]:
    """Returns the command line of a Python that runs `code` with this process's modules.

    With -c or -m, Python first looks for modules in the current folder, where a stranger's data set
    may hold a typing.py.  This one looks where this process does, and in the current folder last,
    if this process looks there at all.  Python 3.10 knows neither -P nor PYTHONSAFEPATH, so the
    code begins by setting the path: `sys` is part of the interpreter, no file hides it.

    Args: code: Python source. arguments: the program's `sys.argv[1:]`.
    """
    paths = [path for path in sys.path if path]
    paths += [os.getcwd()] if "" in sys.path else []
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{code}", *arguments]


def python_module(name: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module, like `python -m`; see `python`."""
    code = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return python(code, *arguments)


def own_environment() -> dict[str, str]:
    """Returns the environment for a program that must not take itself for a rank of a launcher."""
    launcher_variables = (
        *COPIES_VARIABLES,
        EXIT_DIR_VARIABLE, JOB_DIR_VARIABLE, MIN_HOSTS_VARIABLE, RESTART_VARIABLE,
        SKIP_STEP_VARIABLE,
    )  # fmt: skip
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PADDLE_") and name not in launcher_variables
    }


def start(
    command: Sequence[str],
    *,
    ends_by: int = signal.SIGKILL,
    ignored: Collection[int] = (),
    default: Collection[int] = (),
    held: Collection[int] = (),
    **settings: Any,
) -> Process:
    """Starts a program that ends with this process.

    It has no input and a session of its own, so that Ctrl-C reaches this process alone.

    Args:
        ends_by: the signal sent to it when this process ends; 0: none.
        ignored: signals that it ignores.
        default: signals that end it although this process handles or holds them.
        held: signals that are blocked in it until it releases them.
        settings: other arguments of subprocess.Popen.
    Raises: OSError: it cannot be started.
    """
    end_with_this = ends_with_this(ends_by) if ends_by else lambda: None

    def prepare() -> None:
        for handler, numbers in ((signal.SIG_IGN, ignored), (signal.SIG_DFL, default)):
            for number in numbers:
                signal.signal(number, handler)
        end_with_this()
        if default:
            release_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, held)

    # Without a call in the child, Python neither copies this process's page tables for it nor runs
    # any of its code beside the locks of its threads.
    call = prepare if ends_by or ignored or default or held else None
    settings = {"stdin": DISCARD, "start_new_session": True, **settings}
    return Process(command, preexec_fn=call, **settings)


def start_here(command: Sequence[str], **settings: Any) -> Process:
    """Starts a program that gets SIGTERM when this process ends.

    Ctrl-C reaches it as well, and is held until the program listens (`hear_interrupt`, or
    `release_signals` of a launcher): a Python that still starts would print a traceback.
    """
    here_settings = {"stdin": None, "start_new_session": False, **settings}
    return start(command, ends_by=signal.SIGTERM, held=(signal.SIGINT,), **here_settings)


def output_of(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    content: str = "",
) -> tuple[int, str, str] | None:
    """Runs a program; returns its exit code, stdout and stderr, or None at the timeout.

    At the timeout it is killed with its children; one in a session of its own is not waited for.

    Args: content: its standard input.
    Raises: OSError: it cannot be started.
    """
    source = PIPE if content else DISCARD
    with start(
        command, stdin=source, stdout=PIPE, stderr=PIPE, env=environment, text=True,
        errors="replace",
    ) as child:  # fmt: skip
        try:
            output, errors = child.communicate(content or None, timeout=seconds)
        except TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            return None
    return child.returncode, output, errors


def run_command(
    command: Sequence[str],
    log: Path,
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    stop: Callable[[], object] = lambda: None,
) -> int | None:
    """Runs a program; kills it and its children at the timeout.

    Args:
        log: receives its output.
        seconds: the timeout.
        stop: called repeatedly while the program runs; a true result kills the program.
    Returns: the exit code, negative for a signal; None if the program was killed here.
    Raises: OSError: it cannot be started.
    """
    deadline = time.monotonic() + seconds
    with log.open("wb") as output:
        child = start(command, stdout=output, stderr=output, env=environment)
    try:
        while child.poll() is None and time.monotonic() < deadline and not stop():
            with suppress(TimeoutExpired):
                child.wait(_LOOK_SECONDS)
        return child.poll()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def end_with_parent(number: int, parent: int) -> None:
    """Makes the kernel signal this process when its parent ends.

    If the parent has already ended, the signal comes at once.

    Args: parent: process id of the parent, read before it could end.
    """
    _make_death_signal(number, parent)()


def ends_with_this(number: int) -> Callable[[], None]:
    """Returns a function that a forked child calls first, so that it ends with this process.

    Call it before the fork, because another thread may hold the linker's lock during it.  The
    result does nothing outside the main thread: the kernel takes the end of the forking thread for
    the end of its process.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    return _make_death_signal(number, os.getpid())


def _make_death_signal(number: int, parent: int) -> Callable[[], None]:
    """Returns a function that makes the kernel send signal `number` when `parent` ends."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        # Not Linux: children have to check for their parent themselves.
        return lambda: None
    words = [ctypes.c_ulong(word) for word in (number, 0, 0, 0)]

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, *words)
        if os.getppid() != parent:  # the parent ended before the call
            os.kill(os.getpid(), number)

    return set_death_signal


class ForkedChild:
    """A forked process that runs a function, and ends with this process.

    It has only the forking thread, so the function must not rely on other threads or on a device.

    Attributes:
        pid: its process id; 0 after it has ended, because the id may then be reused.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        """Forks, and runs `work` in the child.

        Raises: OSError: too little memory, or too many processes.
        """
        set_death_signal = ends_with_this(signal.SIGKILL)
        # Python 3.12 warns of forking beside Paddle's threads, which the child never touches.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            set_death_signal()
            # Paddle's handlers would print a page-long report, and a core file may be huge.
            for number in _CRASH_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            # None of this process's exit handlers may run in the child.
            os._exit(code)

    def kill(self) -> None:
        """Kills it in any state; harmless if it is already ending."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Kills the child and waits up to a second for it to end.

        Returns: its exit code, negative for a signal; None if unknown, or if it has not ended.
        """
        self.kill()
        deadline = time.monotonic() + _REAP_SECONDS
        while self.pid and time.monotonic() < deadline:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # already reaped elsewhere
                self.pid = 0
                return None
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return None


def begin_in_child(work: Callable[[], object], seconds: float) -> Callable[[], str]:
    """Starts `work` in a forked child, so that a crash does not affect this process.

    The child's log messages are logged here, while this process waits.

    Args: work: see ForkedChild; seconds: the timeout.
    Returns: a function to call once, which waits for the end and returns the failure as text;
        "": there is none.
    """
    read_end, write_end = os.pipe()
    # Otherwise the child would write the buffered text again.
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, Screen):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    TERMINAL.flush()

    def work_with_log() -> None:
        os.close(read_end)
        logger = logging.getLogger("ppdist")
        logger.handlers = [_PipeHandler(write_end)]
        try:
            work()
        except BaseException as error:
            logger.warning(f"{type(error).__name__}: {error}")
            os._exit(1)

    try:
        child = ForkedChild(work_with_log)
    except OSError as error:
        os.close(read_end)
        os.close(write_end)
        failure = f"no process for it: {error.strerror}"
        return lambda: failure
    os.close(write_end)
    deadline = time.monotonic() + seconds

    def wait() -> str:
        in_time = _forward_log(read_end, deadline)
        os.close(read_end)
        code = child.end()
        if not in_time:
            return f"not done after {seconds:g} s"
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return "an error" if code else ""

    return wait


class _PipeHandler(logging.Handler):
    """A log handler that sends records to another process: level and text, one line each."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        line = json.dumps([record.levelno, record.getMessage()]) + "\n"
        with suppress(OSError):
            os.write(self._pipe, line.encode())


def _forward_log(pipe: int, deadline: float) -> bool:
    """Logs the lines that arrive; returns True if the writer ended in time."""
    # Not select(), which takes no descriptor above 1023.
    data, poll = b"", select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        block = os.read(pipe, 1 << 16)
        if not block:
            return True
        *lines, data = (data + block).split(b"\n")
        for line in lines:
            # The child may have died in the middle of a line.
            with suppress(ValueError):
                level, text = json.loads(line)
                logging.getLogger("ppdist").log(level, "%s", text)
    return False
