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
from dataclasses import asdict, dataclass
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


class CodedError(Exception):
    """An error with a code; its text is `where: what; fix`.

    Programs, tests and the launcher compare `code`, never the text; `kind` is that of the class.

    Args:
        what: what happened, with the values that were found and expected.
        code: snake_case, one for each remedy; docs/errors.md lists all.
        where: file, line, key, rank or host; "" where there is no such place.
        fix: what to do; "" where `what` says it.

    Attributes:
        from_rank: the rank that failed, where this error only says so on another one.
    """

    kind = ""
    from_rank: int | None = None

    def __init__(self, what: str, *, code: str, where: str = "", fix: str = "") -> None:
        self.what, self.code, self.where, self.fix = what, code, where, fix
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}; {fix}" if fix else text)

    def __reduce__(self) -> tuple[Any, ...]:  # keyword-only arguments are lost by default
        arguments = (type(self), self.what, self.code, self.where, self.fix, self.from_rank)
        return _restore_error, arguments


def _restore_error(
    kind: type[CodedError], what: str, code: str, where: str, fix: str, from_rank: int | None
) -> CodedError:
    error = kind(what, code=code, where=where, fix=fix)
    error.from_rank = from_rank
    return error


class RankError(CodedError, RuntimeError):
    """Another rank ended, failed or did not come; the user finds the cause there."""

    kind = "rank"


class UserError(CodedError, ValueError):
    """An error that the user can put right."""

    kind = "user"


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


_KINDS: dict[str, type[CodedError]] = {
    each.kind: each
    for each in (
        *(RankError, UserError, ConfigError, DataError, WeightsError, CheckpointError),
        *(ExportError, LaunchError),
    )
}

CRASH, OUT_OF_MEMORY = "crash", "out_of_memory"
LOST_RANK, RANK_FAILED, RANK_TIMEOUT = "lost_rank", "rank_failed", "rank_timeout"
STORE_UNREACHABLE = "store_unreachable"
# The only place where texts decide: what gloo, NCCL, cuDNN, cuBLAS and CUDA say has no codes.
_FOREIGN_SIGNS = {
    LOST_RANK: (
        *("gloo/transport", "pair.cc", "unbound_buffer.cc", "byte_sent"),
        *("Connection reset by peer", "Connection closed by peer", "Connection refused"),
        *("ncclRemoteError", "ncclSystemError"),
    ),
    # Paddle raises OSError for all errors of CUDA.  Not seen on a GPU.
    OUT_OF_MEMORY: ("ALLOC_FAILED", "cudaErrorMemoryAllocation", "out of memory"),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at a time would have helped."""
    if isinstance(error, MemoryError):  # Paddle's own ResourceExhausted, too
        return True
    return isinstance(error, OSError) and _has_sign(error, OUT_OF_MEMORY)


def _has_sign(error: BaseException, code: str) -> bool:
    return any(sign in str(error) for sign in _FOREIGN_SIGNS[code])


@dataclass(frozen=True)
class Failure:
    """Why a process failed, as other processes and hosts get to know it."""

    kind: str  # of a CodedError's class, or "crash"
    code: str
    message: str
    from_rank: int | None = None  # see CodedError

    def of_rank(self, rank: int, host: str) -> "Failure":
        """What the other ranks hear when it happened on this one."""
        of_crash = self.kind == CRASH
        return Failure(
            kind=RankError.kind if of_crash else self.kind,
            code=RANK_FAILED if of_crash else self.code,
            message=f"rank {rank} (host {host}) failed: {self.message}",
            from_rank=rank if self.from_rank is None else self.from_rank,
        )

    def error(self) -> CodedError:
        """To be raised in the process that hears of it."""
        error = _KINDS[self.kind](self.message, code=self.code)
        error.from_rank = self.from_rank
        return error


def failure_of(error: BaseException, message: str = "") -> Failure:
    """What kind of failure an exception is; a crash unless it, or what led to it, says otherwise.

    Args: message: for the user, if it is more than the exception's text.
    """
    message = message or str(error)
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, CodedError) and (each is error or isinstance(each, RankError)):
            return Failure(each.kind, each.code, message, each.from_rank)
        if _has_sign(each, LOST_RANK):
            return Failure(RankError.kind, LOST_RANK, message)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return Failure(CRASH, OUT_OF_MEMORY if is_out_of_memory(error) else CRASH, message)


def hold_signals() -> None:
    """Signals that ask to stop wait from here on, until engine/trainer.py is ready for them."""
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
    code, failure = 0, Failure("", "", "")
    try:
        code = main() or 0
    except SystemExit as error:  # argparse and clean stops
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        found = _paddle_missing() if _is_paddle_missing(error) else error
        code = 2 if isinstance(found, UserError) else 1
        failure = failure_of(found, traceback.format_exc() if code == 1 else "")
    message = failure.message
    launched = _report_to_launcher(code, failure)
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


def _is_paddle_missing(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "paddle"


def _paddle_missing() -> UserError:
    return UserError(
        "PaddlePaddle is not installed: pip install 'ppdist[cpu]', or on a GPU machine the "
        "paddlepaddle-gpu build for your CUDA (see README.md)",
        code="paddle_missing",
    )


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


def _report_to_launcher(exit_code: int, failure: Failure) -> bool:
    folder = os.environ.get(EXIT_DIR_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return False
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    report = Path(folder) / f"rank-{rank}.json"
    draft = report.with_suffix(".tmp")
    try:
        said = {"rank": rank, "exit_code": exit_code, **asdict(failure)}
        draft.write_text(json.dumps(said), encoding="utf-8")
        draft.replace(report)
    except OSError:  # a full disk: it must not hide why the run ended
        return False
    return True
