"""The begin and the end of a process of ppdist: messages, exit codes.

Exit codes: 0 done; 2 the user's input is wrong (one message, no traceback); 1 anything else
(traceback); 75 stopped by a signal after a clean checkpoint; 130 Ctrl-C in any other command, one
line.
"""

import gc
import importlib.util
import io
import json
import logging
import os
import re
import select
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import NoReturn, TextIO

from ppdist.common import json_lines
from ppdist.common.errors import (
    LOST_RANK,
    DataError,
    Failure,
    StorageError,
    UserError,
    failure_of,
    with_code,
)
from ppdist.common.files import replace_file
from ppdist.common.job import MIN_HOSTS_VARIABLE, launched_rank, launcher_folder
from ppdist.common.limits import convert_limit_error
from ppdist.common.signals import (
    INTERRUPTED,
    STOP_SIGNALS,
    end_interrupted,
    hear_interrupt,
    was_interrupted,
)
from ppdist.runtime.writer_thread import TERMINAL, Screen

USER_ERROR, STOPPED = 2, 75  # exit codes

PADDLE_REMEDY = (
    "`pip install 'ppdist[cpu]'`; for a GPU install the paddlepaddle-gpu of Paddle's own index "
    "(README.md, On a GPU)"
)
PADDLE_OLDEST, PADDLE_NEWEST = (3, 2, 2), (3, 3)  # tested versions: README.md
# Warnings of Paddle's about itself that no user of a tool can act on.
_PADDLE_NOISE = (
    "No ccache found",
    "When training, we now always track global mean",
    r"\s*Non compatible API",  # 3.2: paddle.split is not torch.split
)
# Characters that move a terminal's cursor, change its title or the direction of text; and the
# surrogates with which Python keeps bytes that are not UTF-8, which a stream would refuse.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def boot_seconds() -> float:
    """Returns the seconds since this machine booted, including time asleep.

    All its processes share this clock, which is never adjusted; use it for durations and budgets.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def quiet_paddle() -> None:
    """Silences Paddle's messages about itself; called before Paddle is imported."""
    for noise in _PADDLE_NOISE:
        warnings.filterwarnings("ignore", message=noise)
    # Keep Paddle's full log if the user set GLOG_v, else only errors: its warnings help no user.
    if "GLOG_v" not in os.environ:
        os.environ.setdefault("GLOG_minloglevel", "2")


def log_in_notebook() -> None:
    """Shows messages of the log in a notebook, where those of Paddle's handler would be red."""
    logger = logging.getLogger("ppdist")
    if "ipykernel" in sys.modules and not logger.handlers:
        logger.addHandler(_PlainHandler())
        logger.propagate = False
        logger.setLevel(logging.INFO)


def require_paddle() -> None:
    """Checks that Paddle is installed, and silences its messages; call it before importing Paddle.

    Raises: UserError `paddle_missing`.
    """
    quiet_paddle()
    if "paddle" not in sys.modules and importlib.util.find_spec("paddle") is None:
        raise _paddle_missing()


@contextmanager
def importing() -> Iterator[None]:
    """Imports without garbage collections: what is imported lives as long as the process.

    Afterwards no collection looks at it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _paddle_missing() -> UserError:
    return UserError(
        "PaddlePaddle is not installed",
        code="paddle_missing",
        fix=PADDLE_REMEDY,
    )


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a tool's main and exits with the documented exit code.

    Under our launcher every rank ends here; each leaves `rank-N.json` in $PPDIST_EXIT_DIR and the
    launcher prints one message for the whole job instead of one per rank.
    """
    for stream in (sys.stdout, sys.stderr):
        # File names may hold bytes of any encoding.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    quiet_paddle()
    code, failure = 0, Failure("", "", "")
    try:
        hear_interrupt()
        with _plain_log():
            code = main() or 0
    except SystemExit as error:  # argparse and clean stops
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        if was_interrupted() or isinstance(error, KeyboardInterrupt):
            # A library may have raised another error in place of the KeyboardInterrupt.
            code = INTERRUPTED
        else:
            code, failure = describe_end(error)
    message = failure.message
    printed = not _is_left_to_fleetrun(failure)
    launched = _report_to_launcher(code, failure, printed)
    if message and code == 1 and (printed or not launched):
        prefix = "ppdist: error: " if failure.kind == StorageError.kind else ""
        say(f"{prefix}{with_code(message, failure.code)}", code=failure.code)
    if message and code == USER_ERROR and not launched:
        say(f"ppdist: error: {with_code(message, failure.code)}", code=failure.code)
    flushed = [_finish(stream) for stream in (sys.stdout, sys.stderr)]
    # This exits without waiting for threads that still work.
    if code == INTERRUPTED:
        end_interrupted()
    if launched:
        # The exit code is set.  While Python shuts down, its handlers are gone, and the SIGTERM
        # with which the launcher ends the other ranks would replace this code.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    # A normal exit of Python would wait for the blocked terminal.
    if not all(flushed):
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        os._exit(code)
    sys.exit(code)


def describe_end(error: BaseException) -> tuple[int, Failure]:
    """Returns the exit code and the failure of an error, while it is handled."""
    if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
        # The reader of stdout, such as `| head`, is gone: no error for the user.
        return 128 + signal.SIGPIPE, Failure("", "", "")
    shown_error = convert_limit_error(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "paddle":
        shown_error = _paddle_missing()
    code = USER_ERROR if isinstance(shown_error, UserError) else 1
    is_message_enough = isinstance(shown_error, UserError | StorageError)  # no traceback
    return code, failure_of(
        shown_error, _name_data(shown_error) if is_message_enough else _traceback()
    )


def _name_data(error: BaseException) -> str:
    """Returns an error's text, in which the commands to type name the data of this command."""
    text, command = str(error), "`ppdist data check"
    if not isinstance(error, DataError) or not error.data_words:
        return text
    return text.replace(f"{command} DATA", f"{command} {shlex.join(error.data_words)}")


def _is_unread(stream: TextIO) -> bool:
    """Returns True if a stream goes to a pipe whose reader is gone."""
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


@contextmanager
def _plain_log() -> Iterator[None]:
    """Logs to stderr in the format of a run's log, past Paddle's handler."""
    logger, handler = logging.getLogger("ppdist"), _PlainHandler()
    original = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate, level = original
        logger.setLevel(level)


class _PlainHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _write(log_line(record))


# `extra=` of a log record: for train.log alone; shown on the console without its time; shortened
# there as warnings are before the first step; never shortened.
DETAIL, BARE, NOTE, WHOLE = {"detail": True}, {"bare": True}, {"note": True}, {"whole": True}


def log_line(record: logging.LogRecord) -> str:
    """Formats a record as users see every message: `18:57:59 warning: text`, or as JSON."""
    if json_lines.is_json():
        return printable(json_lines.format_record(record))
    if getattr(record, "bare", False):
        return printable(record.getMessage())
    clock = time.strftime("%H:%M:%S", time.localtime(record.created))
    mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
    return f"{clock} {mark}{printable(record.getMessage())}"


def _traceback() -> str:
    """Formats the traceback, with a notice if ppdist is untested with this Paddle."""
    notice = unknown_paddle(getattr(sys.modules.get("paddle"), "__version__", ""))
    return traceback.format_exc() + (f"\nppdist: {notice}\n" if notice else "")


def unknown_paddle(version: str) -> str:
    """Writes a notice if ppdist is untested with this Paddle; else "".

    It is a warning, not an error: new cards need a newer Paddle than the tested ones.
    """
    numbers = paddle_numbers(version)
    if not version or (numbers >= PADDLE_OLDEST and numbers[:2] <= PADDLE_NEWEST):
        return ""
    return (
        f"ppdist was run with Paddle 3.2.2 and 3.3.1, not with {version}: README.md, Versions of "
        "Paddle, says what that means"
    )


def paddle_numbers(version: str) -> tuple[int, ...]:
    """Parses the version numbers: (3, 4, 0) of `3.4.0.dev20261101+cu129`.

    A Paddle built by the user is often (0, 0, 0).
    """
    match = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def printable(text: str) -> str:
    """Escapes control characters as JSON does.

    Names may come from untrusted files.  Line ends and tabs stay, because messages have them.
    """
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(text: str, code: str = "") -> None:
    """Prints a line on stderr, in a notebook on stdout; signal handlers may call it.

    It is on the terminal at return, unless the terminal is blocked: then the wait is short.

    Args: code: code of the error that the line is about.
    """
    if json_lines.is_json():
        text = json_lines.format_text(text, time=time.time(), code=code)
    _write(printable(text))


def _write(line: str) -> None:
    stream = sys.stdout if "ipykernel" in sys.modules else sys.stderr
    screen = stream if isinstance(stream, Screen) else Screen(stream)
    screen.write(f"{line}\n")
    TERMINAL.flush()


def warn(text: str) -> None:
    """Prints a command's warning on stderr."""
    say(f"ppdist: warning: {text}")


def _finish(stream: TextIO | None) -> bool:
    """Flushes a stream; returns False if it is blocked.

    If its reader is gone (`| head`), it goes to /dev/null: Python would change the exit code.
    """

    def flush() -> None:
        if stream is None:
            return
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    TERMINAL.put("terminal", flush)
    return TERMINAL.flush()


def _is_left_to_fleetrun(failure: Failure) -> bool:
    """Returns True if fleetrun reports this failure: rank 0 lost another rank with --min_hosts.

    The job goes on without lost hosts, and fleetrun says which one was lost; if none was, it prints
    the failure.
    """
    on_terminal = os.environ.get("PADDLE_LOCAL_RANK", "0") == "0"
    return on_terminal and MIN_HOSTS_VARIABLE in os.environ and failure.code == LOST_RANK


def _report_to_launcher(exit_code: int, failure: Failure, printed: bool) -> bool:
    """Writes the report of this rank for fleetrun; False: there is no fleetrun, or no space."""
    folder, rank = launcher_folder(), launched_rank()
    if folder is None:
        return False
    report = {"rank": rank, "exit_code": exit_code, "time": boot_seconds(), **asdict(failure)}
    report["printed"] = printed
    try:
        replace_file(folder / f"rank-{rank}.json", json.dumps(report).encode())
    except OSError:
        # A full disk must not hide why the run ended.
        return False
    return True
