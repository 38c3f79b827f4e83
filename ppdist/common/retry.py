"""Unreachable storage: one exception for it, and one place that waits.

Code that finds storage not answering raises `unavailable`, a StorageError.  A request to an object
store waits by itself.  On a disk, an outage looks like a deleted file unless the files beside it
are examined; the caller that can do so puts `with_retries` around its call, and only that one
waits.
"""

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from ppdist.common.errors import StorageError

_LOGGER = logging.getLogger("ppdist.data")
# Errors of files on a network disk while its server, its mount or the network is unreachable.
_OUTAGES = frozenset((
    errno.ENOENT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV,
    errno.ENXIO, errno.EREMOTEIO, errno.ENOLINK, errno.ESHUTDOWN, errno.ECONNREFUSED,
    errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH,
))  # fmt: skip
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 30.0
TOLD_SECONDS = 0.5  # busy stores often cause shorter pauses; longer ones are reported
_START_SECONDS = 30.0  # that the start of a run waits for a store not reached yet
_T = TypeVar("_T")
_inside: ContextVar[bool] = ContextVar("inside", default=False)


def unavailable(what: str, where: str = "", fix: str = "mount it again") -> StorageError:
    """Builds the error for unreachable storage, for `with_retries`."""
    return StorageError(what, code="storage_unreachable", where=where, fix=fix)


def is_outage(error: BaseException | None) -> bool:
    """Returns True if an error may mean unreachable storage; a deleted file raises it, too."""
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
    """Retries a call while storage is unreachable, up to a time limit.

    Within another `with_retries` it calls only once: only the outermost one waits.

    Args:
        seconds: the limit; None: half a minute.
        pause: waits the given seconds because of the given error; may raise it to give up.
        quiet: leaves it to the caller to report the outage.
    Raises: StorageError: storage stays unreachable.
    """
    if _inside.get():
        return call()
    seconds = _START_SECONDS if seconds is None else seconds
    began, reported = 0.0, quiet
    pauses: Iterator[float] | None = None
    token = _inside.set(True)
    try:
        while True:
            try:
                result = call()
                break
            except StorageError as error:
                outage = error
            if pauses is None:
                began, pauses = time.monotonic(), _pauses(seconds)
            if (pause_seconds := next(pauses, None)) is None:
                raise StorageError(
                    f"{outage.what}; waited for {max(0.0, seconds):g} s",
                    code="storage_unreachable",
                    where=outage.where,
                    fix=outage.fix,
                ) from outage
            if not reported and pause_seconds >= TOLD_SECONDS:
                reported = True
                place = f"{outage.where}: " if outage.where else ""
                _LOGGER.warning("%s%s; waiting for up to %.0f s", place, outage.what, seconds)
            pause(pause_seconds, outage)
    finally:
        _inside.reset(token)
    if reported and not quiet:
        _LOGGER.info("storage can be read again, after %.0f s", time.monotonic() - began)
    return result


def _pauses(seconds: float) -> Iterator[float]:
    """Yields the seconds before each new attempt, doubling, `seconds` in total."""
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
