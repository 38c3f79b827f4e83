"""Lines of fleetrun for the user.

No rank waits for a blocked terminal (Ctrl-S, tmux's copy mode, a laptop that sleeps at the
other end of ssh): a thread of runtime/writer_thread.py writes them.
"""

import sys

from ppdist.common.process import USER_ERROR, printable
from ppdist.launch.outcome import Outcome
from ppdist.runtime.writer_thread import TERMINAL, Screen


def say(text: str, name: str = "fleetrun") -> None:
    """Prints one line on stderr; never blocks."""
    Screen(sys.stderr).write(printable(f"{name}: {text}\n"))


def say_end(outcome: Outcome) -> None:
    """Prints the message of an outcome, if it has one."""
    if outcome.message:
        say(outcome.message, name="ppdist" if outcome.code == USER_ERROR else "fleetrun")


def finish() -> None:
    """Waits briefly for unwritten lines, at the end of the process."""
    TERMINAL.flush()
