"""Signals that ask fleetrun to stop.

SIGTERM and SIGUSR1 come from schedulers, SIGINT from Ctrl-C, SIGHUP from a terminal that goes away:
the first lets the ranks finish their step, a second does not.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ppdist.common.signals import INTERRUPTED

# Signals by which schedulers announce that this host will be taken away.
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_SAME_REQUEST_SECONDS = 1.0  # systemd sends SIGTERM and SIGHUP, a closed terminal SIGHUP twice


class Stopped(Exception):
    """The exception raised when a signal ends the wait for other hosts."""


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Yields the list of stop requests so far.

    A signal within a second of a request counts as the same request.  If SIGHUP was already ignored
    (nohup), it stays ignored.
    """
    received: list[int] = []
    last_request = -_SAME_REQUEST_SECONDS

    def note(number: int, frame: object) -> None:
        nonlocal last_request
        now = time.monotonic()
        if now - last_request >= _SAME_REQUEST_SECONDS:
            received.append(number)
            last_request = now

    handled = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, note) for number in handled}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def is_notice(received: Sequence[int]) -> bool:
    """Returns True if the signal announces only the loss of this host, not the end of the run."""
    return bool(received) and received[0] in NOTICES


def must_kill(received: Sequence[int]) -> bool:
    """Returns True if a second request came, after which the ranks are killed."""
    return len(received) > 1


def exit_code_of_kill(received: Sequence[int]) -> int:
    """Returns the exit code of a run that was killed by a second signal."""
    return INTERRUPTED if received[-1] == signal.SIGINT else 1
