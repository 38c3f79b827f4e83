"""Lines of fleetrun for the user.

No rank waits for a blocked terminal (Ctrl-S, tmux's copy mode, a laptop that sleeps at the
other end of ssh): a thread of runtime/writer_thread.py writes them.
"""

import sys
import time

from ppdist.common import json_lines
from ppdist.common.process import STOPPED, USER_ERROR, printable
from ppdist.launch.outcome import Outcome
from ppdist.runtime.writer_thread import TERMINAL, Screen


def say(text: str, name: str = "fleetrun", fails: bool = False) -> None:
    """Prints one line on stderr, as JSON where the ranks print JSON; never blocks.

    Args: fails: True if the line says why the job failed.
    """
    line = f"{name}: {text}"
    if json_lines.is_json():
        line = json_lines.format_text(
            text, time=time.time(), source="fleetrun", code=json_lines.code_of(text), fails=fails
        )
    Screen(sys.stderr).write(printable(f"{line}\n"))


def say_end(outcome: Outcome) -> None:
    """Prints an outcome's message, if it has one."""
    if outcome.message:
        name = "ppdist" if outcome.code == USER_ERROR else "fleetrun"
        say(outcome.message, name, fails=outcome.code not in (0, STOPPED))


def finish() -> None:
    """Waits briefly, at the end of the process, until all lines are written."""
    TERMINAL.flush()
