"""Signals that ask a training to stop, held from the first moment.

Imports next to nothing: what starts a training, or a launcher, holds them before all else.
"""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def hold_signals() -> None:
    """Holds these signals until `release_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release_signals() -> None:
    """Delivers the held signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
