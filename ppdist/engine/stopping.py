"""Signal handling of a training, before its first step and after."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from ppdist.common.process import STOPPED, say
from ppdist.common.signals import STOP_SIGNALS, release_signals
from ppdist.distributed import comm, heartbeat

# Paddle's launcher sends SIGTERM three times within 0.6 s, or longer if the machine is busy.
_SAME_REQUEST_SECONDS = 2.0


class StopRequest:
    """A request that this process stop, made by a signal.

    Attributes:
        made: True once a stop was requested; every rank learns of it from the next step's sum.
    """

    made = False


def until_first_step() -> None:
    """Lets a signal end this process until `listen` is called.

    Nothing is trained yet, so nothing is lost.  Call it after importing Paddle, with signals held
    back by `signals.hold_signals` before that: Paddle installs a native handler that prints a page
    about a "FatalError".  From `comm.init` on, SIGTERM simply kills a rank that has peers, and
    fleetrun explains it.
    """
    process_id = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != process_id:  # a forked child that checks images
            os._exit(128 + number)
        name = signal.Signals(number).name
        say(
            f"\nppdist: stopped by {name} before the first step: nothing is lost, and no "
            "checkpoint was written; to train, type the same command again"
        )
        os._exit(STOPPED)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    release_signals()


def listen(ask: Callable[[], None]) -> None:
    """Makes stop signals call `ask` in the main thread.  Collective.

    They are SIGTERM, SIGINT, SIGUSR1 and SIGHUP; an ignored SIGHUP (nohup, ranks of fleetrun)
    stays ignored.

    Under fleetrun, a signal to one rank reaches all of them: fleetrun forwards it.  Another signal
    more than two seconds later ends this process, with the shell's code for Ctrl-C, else 1.
    """
    process_id = os.getpid()
    first: float | None = None

    def hear(number: int, frame: Any) -> None:
        nonlocal first
        if os.getpid() != process_id:
            return  # in a forked child that prepares images
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
            # A signal during a barrier would break the connection to Paddle's store, which takes an
            # interrupted system call for an error.  So the call is restarted; `hear` runs after it.
            signal.siginterrupt(number, False)
