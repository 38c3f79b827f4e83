"""What signals do to a training before its first step and after."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from ppdist.common.process import STOPPED, say
from ppdist.common.signals import STOP_SIGNALS, release_signals
from ppdist.distributed import comm, heartbeat

# Paddle's launcher sends SIGTERM three times within 0.6 s, or longer where the machine is busy.
_SAME_REQUEST_SECONDS = 2.0


def until_first_step() -> None:
    """Until `listen` a signal ends this process: it has trained nothing yet, so nothing is lost.

    Called once Paddle was imported, with the signals held back by `signals.hold_signals` before:
    Paddle puts a handler of its own below Python's that prints a page about a "FatalError".  From
    `comm.init` on a rank that has others just dies by SIGTERM, and fleetrun says what that means.
    """
    own = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != own:  # a copy of this process that looks at images
            os._exit(128 + number)
        said = f"stopped by {signal.Signals(number).name} before the first step: nothing is lost"
        say(f"\nppdist: {said}")
        os._exit(STOPPED)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    release_signals()


def listen(ask: Callable[[], None]) -> None:
    """From now on SIGTERM, SIGINT, SIGUSR1 and SIGHUP call `ask`, in the main thread; every rank
    calls it.  SIGHUP that is ignored (nohup, ranks of fleetrun) stays so.

    Under fleetrun a signal for one rank reaches all of them: it passes it on.  Another signal more
    than two seconds later ends this process, with the code that a shell has for Ctrl-C, else 1.
    """
    rank = os.getpid()
    first: float | None = None

    def hear(number: int, frame: Any) -> None:
        nonlocal first
        if os.getpid() != rank:
            return  # in a copy of this process that prepares images
        if first is None:
            first = time.monotonic()
            ask()
            if not heartbeat.tell_stop(number) and comm.is_main():
                say("\nstopping after this step; a second signal stops at once")
        elif time.monotonic() - first > _SAME_REQUEST_SECONDS:
            os._exit(128 + number if number == signal.SIGINT else 1)

    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, hear)
        if comm.world_size() > 1:
            # A signal amid a barrier would break the connection to Paddle's store, which takes an
            # interrupted system call for an error: the call begins anew, and `hear` runs after it.
            signal.siginterrupt(number, False)
