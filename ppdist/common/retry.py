"""Storage that is away: one exception, and one place that waits.

Code that finds storage not answering raises `unavailable`, a StorageError.  A request of an
object store waits by itself.  Of files on a disk, only the files beside them tell an outage from a
deleted one: who knows these puts `with_retries` outside, which then waits alone.
"""

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from ppdist.common.errors import StorageError

_LOGGER = logging.getLogger("ppdist.data")
# What the files of a network disk answer while its server, its mount or the network is away.
_OUTAGES = frozenset((
    errno.ENOENT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV,
    errno.ENXIO, errno.EREMOTEIO, errno.ENOLINK, errno.ESHUTDOWN, errno.ECONNREFUSED,
    errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH,
))  # fmt: skip
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 30.0
TOLD_SECONDS = 0.5  # busy stores often cause shorter pauses; longer ones are reported
_START_SECONDS = 30.0  # that a start waits for a store not reached yet
_T = TypeVar("_T")
_inside: ContextVar[bool] = ContextVar("inside", default=False)


def unavailable(what: str, where: str = "", fix: str = "mount it again") -> StorageError:
    """The error of storage that is away, for `with_retries`."""
    return StorageError(what, code="storage_unreachable", where=where, fix=fix)


def is_outage(error: BaseException | None) -> bool:
    """Whether an error may mean unreachable storage.

    A deleted file raises the same error.
    """
    return isinstance(error, OSError) and error.errno in _OUTAGES


def _sleep(seconds: float, _: StorageError) -> None:
    time.sleep(seconds)


def with_retries(
    call: Callable[[], _T],
    seconds: float | None = None,
    *,
    pause: Callable[[float, StorageError], object] = _sleep,
    quiet: bool = False,
) -> _T:
    """Retries a call while storage is away, up to a time limit.

    Inside another one it calls once: the outermost alone waits.

    Args:
        seconds: None: half a minute.
        pause: waits these seconds because of this error; may raise it to give up.
        quiet: somebody else tells the user.
    Raises: StorageError: it stays away.
    """
    if _inside.get():
        return call()
    seconds = _START_SECONDS if seconds is None else seconds
    began, told = 0.0, quiet
    left: Iterator[float] | None = None
    outside = _inside.set(True)
    try:
        while True:
            try:
                found = call()
                break
            except StorageError as error:
                away = error
            if left is None:
                began, left = time.monotonic(), _pauses(seconds)
            if (length := next(left, None)) is None:
                raise StorageError(
                    f"{away.what}; waited for {max(0.0, seconds):g} s",
                    code="storage_unreachable",
                    where=away.where,
                    fix=away.fix,
                ) from away
            if not told and length >= TOLD_SECONDS:
                told = True
                place = f"{away.where}: " if away.where else ""
                _LOGGER.warning("%s%s; waiting for up to %.0f s", place, away.what, seconds)
            pause(length, away)
    finally:
        _inside.reset(outside)
    if told and not quiet:
        _LOGGER.info("storage can be read again, after %.0f s", time.monotonic() - began)
    return found


def _pauses(seconds: float) -> Iterator[float]:
    """Seconds before each new attempt, doubling, `seconds` in total."""
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
