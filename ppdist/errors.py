"""The errors a user can act on, and the exit codes of every tool.

Exit codes: 0 done; 2 the user's input is wrong (one message, no traceback); 1 anything else
(traceback); 75 stopped by a signal after a clean checkpoint.
"""

import io
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

EXIT_DIR_VARIABLE = "PPDIST_EXIT_DIR"  # set by our fleetrun: where each rank leaves why it ended
# Set by our fleetrun: a folder of this host that stays from one attempt of a job to the next.
JOB_DIR_VARIABLE = "PPDIST_JOB_DIR"
JOB_VARIABLE = "PPDIST_JOB"  # set by our fleetrun: the name of this attempt, for its ranks alone
# Set by our fleetrun where it starts a job anew: how many times it has; and the number, from 1, of
# a step at which the job ended twice and which is to be left out.
RESTART_VARIABLE, SKIP_STEP_VARIABLE = "PPDIST_RESTART", "PPDIST_SKIP_STEP"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # of a training
# Warnings of Paddle's about itself that no user of a tool can act on.
_PADDLE_NOISE = (
    "No ccache found",
    "When training, we now always track global mean",
    r"\s*Non compatible API",  # 3.2: paddle.split is not torch.split
)


# What moves a terminal's cursor, changes its title or turns the direction of what follows; and the
# bytes of a file name that is not UTF-8, as Python has them, which a stream would refuse.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Names come out of files of strangers: their control characters become what JSON calls them.

    Line ends and tabs stay: messages have them.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class UserError(ValueError):
    """An error that the user can put right.

    Its text is `where: what; fix`.  Programs, tests and the launcher compare `code`, never the
    text; `kind` is that of the class.

    Args:
        what: what happened, with the values that were found and expected.
        code: snake_case, one for each remedy; docs/errors.md lists all.
        where: file, line, key, rank or host; "" where there is no such place.
        fix: what to do; "" where `what` says it.
    """

    kind = "user"

    def __init__(self, what: str, *, code: str = "", where: str = "", fix: str = "") -> None:
        self.what, self.code, self.where, self.fix = what, code, where, fix
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}; {fix}" if fix else text)

    def __reduce__(self) -> tuple[Any, ...]:  # keyword-only arguments are lost by default
        return _restore_error, (type(self), self.what, self.code, self.where, self.fix)


def _restore_error(kind: type[UserError], what: str, code: str, where: str, fix: str) -> UserError:
    return kind(what, code=code, where=where, fix=fix)


class ConfigError(UserError):
    """The configuration or the command line is wrong."""

    kind = "config"


class DataError(UserError):
    """The images or annotations are wrong."""

    kind = "data"


class WeightsError(UserError):
    """A weight file is missing, unreadable, unsafe, or does not fit the model."""

    kind = "weights"


class CheckpointError(UserError):
    """A checkpoint is missing, torn, or belongs to another run."""

    kind = "checkpoint"


class ExportError(UserError):
    """A model cannot be exported, or its export does not compute what the model computes."""

    kind = "export"


class LaunchError(UserError):
    """The processes of a run cannot be started as asked."""

    kind = "launch"


def hold_signals() -> None:
    """Signals that ask to stop wait from here on, until engine/stopping.py is ready for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a tool's main and turns how it ended into the documented exit code.

    Under our launcher every rank ends here; each leaves `rank-N.json` in $PPDIST_EXIT_DIR and the
    launcher prints one message for the whole job instead of one per rank.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold bytes of any encoding
            stream.reconfigure(errors="backslashreplace")
    for noise in _PADDLE_NOISE:
        warnings.filterwarnings("ignore", message=noise)
    code, message = 0, ""
    try:
        code = main() or 0
    except UserError as error:
        code, message = 2, str(error)
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            code, message = 1, traceback.format_exc()
        else:
            code, message = (
                2,
                (
                    "PaddlePaddle is not installed: pip install 'ppdist[cpu]', or on a GPU machine "
                    "the paddlepaddle-gpu build for your CUDA (see README.md)"
                ),
            )
    except SystemExit as error:  # argparse and clean stops
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code, message = 1, traceback.format_exc()
    launched = _report_to_launcher(code, message)
    if message and code == 2 and not launched:
        say(f"ppdist: error: {message}")
    if message and code == 1:
        say(message)
    for stream in (sys.stdout, sys.stderr):
        _finish(stream)
    if launched:
        # The code is said.  While Python ends, its handlers are gone, and the SIGTERM with which
        # the launcher ends the other ranks would put itself in the place of this code.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def say(text: str) -> None:
    """A line to stderr, if anybody can still read it."""
    with suppress(OSError, ValueError, AttributeError):  # closed, full, or never there
        print(printable(text), file=sys.stderr, flush=True)


def _finish(stream: TextIO | None) -> None:
    """Writes what is left; where nobody reads it (`| head`), Python would change the exit code."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report_to_launcher(code: int, message: str) -> bool:
    folder = os.environ.get(EXIT_DIR_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return False
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    report = Path(folder) / f"rank-{rank}.json"
    draft = report.with_suffix(".tmp")
    try:
        said = json.dumps({"rank": rank, "code": code, "message": message})
        draft.write_text(said, encoding="utf-8")
        draft.replace(report)
    except OSError:  # a full disk: it must not hide why the run ended
        return False
    return True
