"""Errors with codes, and failures as they are sent to other processes."""

from dataclasses import dataclass
from typing import Any


class CodedError(Exception):
    """An error with a code; its text is `where: what; fix`.

    Programs, tests and the launcher compare `code`, never the text; `kind` names the class.

    Args:
        what: what happened, with the values that were found and expected.
        code: snake_case, one for each remedy; docs/errors.md lists all.
        where: file, line, key, rank or host; "" where there is no such place.
        fix: what to do; "" if `what` already says it.

    Attributes:
        from_rank: the rank that failed, if this error only reports its failure on another rank.
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
    """Another rank ended, failed or did not arrive; its own error is the cause."""

    kind = "rank"


class UserError(CodedError, ValueError):
    """An error that the user can fix."""

    kind = "user"


class ConfigError(UserError):
    """The configuration or the command line is wrong."""

    kind = "config"


class DataError(UserError):
    """The images or annotations are wrong."""

    kind = "data"
    data_words: tuple[str, ...] = ()  # that name the data in a command, for DATA in the text


class WeightsError(UserError):
    """A weight file is missing, unreadable, unsafe, or does not fit."""

    kind = "weights"


class CheckpointError(UserError):
    """A checkpoint is missing, torn, or belongs to another run."""

    kind = "checkpoint"


class StorageError(CodedError, RuntimeError):
    """Storage became unreachable.

    It is not a user error; a restart may succeed.
    """

    kind = "storage"


class ExportError(UserError):
    """A model cannot be exported, or its export computes different results."""

    kind = "export"


class LaunchError(UserError):
    """The processes of a run cannot be started as requested."""

    kind = "launch"


_KINDS: dict[str, type[CodedError]] = {
    error_class.kind: error_class
    for error_class in (
        *(RankError, UserError, ConfigError, DataError, WeightsError, CheckpointError),
        *(ExportError, LaunchError, StorageError),
    )
}

CRASH, OUT_OF_MEMORY = "crash", "out_of_memory"
LOST_RANK, RANK_FAILED, RANK_TIMEOUT = "lost_rank", "rank_failed", "rank_timeout"
STORE_UNREACHABLE = "store_unreachable"
FILES_LIMIT, MEMORY_LIMIT = "open_files_limit", "memory_limit"  # of a shell, see limits.py
# The only place where errors are recognised by their texts: errors of gloo, NCCL, cuDNN, cuBLAS and
# CUDA have no codes.
_FOREIGN_SIGNS = {
    LOST_RANK: (
        *("gloo/transport", "pair.cc", "unbound_buffer.cc", "byte_sent"),
        *("Connection reset by peer", "Connection closed by peer", "Connection refused"),
        *("ncclRemoteError", "ncclSystemError"),
    ),
    # Paddle raises OSError for all errors of CUDA.  Not seen on a GPU.
    OUT_OF_MEMORY: ("ALLOC_FAILED", "cudaErrorMemoryAllocation", "out of memory"),
    FILES_LIMIT: ("Too many open files",),
    MEMORY_LIMIT: (
        *("failed to map segment", "annot allocate memory", "can't start new thread"),
        *("bad_alloc", "but received error:12 "),
    ),
}


def with_code(message: str, code: str) -> str:
    """Appends the code to a message; a crash has none."""
    return message if code in ("", CRASH) else f"{message.rstrip()} [{code}]"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if a smaller batch would have avoided the error."""
    # Paddle's own ResourceExhausted is raised as a MemoryError.
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, OSError) and _has_sign(error, OUT_OF_MEMORY)


def limit_met(error: BaseException) -> str:
    """Returns the code of the limit that explains the error, or "".

    FILES_LIMIT or MEMORY_LIMIT.
    """
    if isinstance(error, CodedError):
        return ""
    if _has_sign(error, FILES_LIMIT):
        return FILES_LIMIT
    return MEMORY_LIMIT if isinstance(error, MemoryError) or _has_sign(error, MEMORY_LIMIT) else ""


def _has_sign(error: BaseException, code: str) -> bool:
    return any(sign in str(error) for sign in _FOREIGN_SIGNS[code])


@dataclass(frozen=True)
class Failure:
    """A failure of a process, as it is sent to other processes and hosts."""

    kind: str  # `kind` of a CodedError's class, or "crash"
    code: str
    message: str
    from_rank: int | None = None  # see CodedError

    def of_rank(self, rank: int, host: str) -> "Failure":
        """Converts a failure of this rank to the failure that the other ranks report."""
        is_crash = self.kind == CRASH
        return Failure(
            kind=RankError.kind if is_crash else self.kind,
            code=RANK_FAILED if is_crash else self.code,
            message=f"rank {rank} (host {host}) failed: {self.message}",
            from_rank=rank if self.from_rank is None else self.from_rank,
        )

    def error(self) -> CodedError:
        """Builds the error to raise in the process that receives the failure."""
        error = _KINDS[self.kind](self.message, code=self.code)
        error.from_rank = self.from_rank
        return error


def failure_of(error: BaseException, message: str = "") -> Failure:
    """Classifies an exception; it is a crash unless it or its cause has a code.

    Args: message: text for the user; the exception's text by default.
    """
    message = message or str(error)
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, CodedError) and (link is error or isinstance(link, RankError)):
            return Failure(link.kind, link.code, message, link.from_rank)
        if _has_sign(link, LOST_RANK):
            return Failure(RankError.kind, LOST_RANK, message)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return Failure(CRASH, OUT_OF_MEMORY if is_out_of_memory(error) else CRASH, message)
