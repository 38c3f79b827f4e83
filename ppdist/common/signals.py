"""Signals that ask a training to stop, held from the first moment.

Imports next to nothing: what starts a training, or a launcher, holds them before all else.
"""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def hold_signals() -> None:
    """They wait from here on, until who is ready for them calls `release_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release_signals() -> None:
    """Those that waited come now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
