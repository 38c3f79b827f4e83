"""Signals that ask a training to stop; Ctrl-C in other commands.

Imports next to nothing: a training or a launcher holds its signals before it imports the rest.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT  # the exit code after Ctrl-C, as of a shell
_interrupted = False
_held = False


def hold_signals() -> None:
    """Blocks these signals until `release_signals`."""
    global _held
    _held = True
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release_signals() -> None:
    """Delivers the held signals."""
    global _held
    _held = False
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def hear_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt; a second one ends the process.

    A Ctrl-C that `child.start_here` holds is delivered now, but not one that this process holds.
    Does nothing where SIGINT is handled otherwise, or ignored as in a shell's background.  A forked
    child ends without a message: its parent gets the signal, too.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    pid = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _interrupted
        if os.getpid() != pid:
            os._exit(INTERRUPTED)
        if _interrupted:
            end_interrupted()
        _interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    if not _held:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def forget_interrupt() -> None:
    """Forgets a Ctrl-C that was handled: a later error or Ctrl-C is a new one."""
    global _interrupted
    _interrupted = False


def was_interrupted() -> bool:
    """Returns True after Ctrl-C, whatever error a library has raised for it."""
    return _interrupted


def end_interrupted() -> NoReturn:
    """Ends this process at once, with one line, after Ctrl-C."""
    os.write(2, b"\nppdist: stopped by Ctrl-C\n")
    os._exit(INTERRUPTED)
