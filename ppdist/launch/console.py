"""Lines of fleetrun for the user, written by a thread.

A terminal may be stopped (Ctrl-S, tmux's copy mode, a laptop that sleeps at the other end of ssh).
So a thread writes, and who says something only puts it into a queue.
"""

import os
import queue
import sys
import threading
import time
from contextlib import suppress

from ppdist.common.process import USER_ERROR, printable
from ppdist.launch.outcome import Outcome

_MOST_LINES = 1000  # that wait; later ones are left out
_POLL_SECONDS = 0.01

_lines: queue.Queue[str] = queue.Queue(_MOST_LINES)
_starting = threading.Lock()
_writer: threading.Thread | None = None
_left_out = 0


def say(text: str, name: str = "fleetrun") -> None:
    """One line for the user, on stderr; never blocks."""
    global _writer, _left_out
    with _starting:
        if _writer is None:
            _writer = threading.Thread(target=_write_lines, daemon=True)
            _writer.start()
    try:
        _lines.put_nowait(printable(f"{name}: {text}\n"))
    except queue.Full:
        _left_out += 1


def say_end(outcome: Outcome) -> None:
    """The message of an outcome, if there is something to say."""
    if outcome.message:
        say(outcome.message, name="ppdist" if outcome.code == USER_ERROR else "fleetrun")


def finish(seconds: float = 3.0) -> None:
    """Waits until all is written, or for so long where the terminal takes nothing."""
    deadline = time.monotonic() + seconds
    while _lines.unfinished_tasks and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _write_lines() -> None:
    global _left_out
    while True:
        text = _lines.get()
        with suppress(OSError, ValueError, AttributeError):  # closed, or never there
            _write(text)
            if _left_out and _lines.empty():
                left_out, _left_out = _left_out, 0
                _write(f"fleetrun: the terminal took no output; {left_out} lines are left out\n")
        _lines.task_done()


def _write(text: str) -> None:
    """Without Python's buffer of stderr: its lock would keep a blocked process from ending."""
    try:
        number = sys.stderr.fileno()
    except (OSError, ValueError):  # a test's stream
        sys.stderr.write(text)
        return
    content = text.encode(errors="backslashreplace")
    while content:
        content = content[os.write(number, content) :]
