"""The processes of this host's ranks, seen from outside, and the end of all of them.

Whatever an attempt starts has the attempt's own folder in its environment.  By that a process is
found though its parent and its process group are gone, and none outlives the attempt.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from ppdist.launch import worker
from ppdist.launch.outcome import RankEnd, read_ends

_GONE_SECONDS = 10.0  # a killed process that waits for a dead disk may take for ever to end
_POLL_SECONDS = 0.02


def ended(folder: Path, by_themselves: bool) -> list[RankEnd]:
    """The ranks of this host that have ended.

    Args:
        by_themselves: nobody has begun to end ranks.  One whose watcher (worker.py) is gone without
            a word was killed then, and that is written down here.
    """
    ends = read_ends(folder)
    lost = [
        end for end in ends if by_themselves and end.exit_code is None and not is_alive(end.pid)
    ]
    if lost:
        ends = read_ends(folder)  # one of them may have left its word meanwhile
        now = {end.rank: end for end in ends}
        for end in lost:
            if now[end.rank].exit_code is None:
                worker.end_report(folder, end.rank, end.local, -signal.SIGKILL)
        ends = read_ends(folder)
    return [end for end in ends if end.exit_code is not None]


def asked_to_stop(folder: Path) -> tuple[int, int] | None:
    """(rank, signal) of a rank that was asked to stop by a signal of its own, None if none was."""
    for path in sorted(folder.glob("stop-*")):
        with contextlib.suppress(ValueError, OSError):
            return int(path.name.removeprefix("stop-")), signal.Signals(int(path.read_text()))
    return None


def end_all(folder: Path) -> list[int]:
    """Kills whatever the attempt has started and is left; waits until it is gone.

    Returns: process ids of those that do not end.
    """
    deadline = time.monotonic() + _GONE_SECONDS
    while left := worker.started_by(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(_POLL_SECONDS)
    return []


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and waits to be asked how does not."""
    try:
        os.kill(pid, 0)
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False
