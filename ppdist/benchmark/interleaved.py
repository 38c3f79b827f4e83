"""Interleaved benchmark: groups of processes run in alternating time slices.

The speed of a machine that others use, too, changes within minutes; of groups that run one after
another each meets another machine.  Interleaved, all meet the same.

A group has a folder.  While a file `pause` is in it, its processes wait between two steps, each
leaving a file that says so.  (Stopping them by a signal wherever they are would cost a step at each
end of a slice.)
"""

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import paddle

from ppdist.common.child import DISCARD, Process, TimeoutExpired, start_here
from ppdist.common.errors import LaunchError
from ppdist.distributed import comm, heartbeat

_FOLDER = "PPDIST_INTERLEAVED"
_PAUSE = "pause"
_LOOK_SECONDS = 0.1  # rarely: it takes time from those that run
_END_SECONDS = 60.0  # fleetrun gives its ranks some to end


def wait_for_slice() -> float:
    """Blocks between two steps until this group's time slice begins.

    Returns at once if nothing is interleaved.  Collective.

    Returns: seconds of the pause.  Waiting here for a rank that is later than this one does not
        count: this one would wait for it within the next step.
    """
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return 0.0
    pause, waits = Path(folder) / _PAUSE, Path(folder) / f"waits-{os.getpid()}"
    began = None
    # Agreed, for a rank may look just before the file comes and another one just after.
    while comm.all_reduce_sum(paddle.to_tensor([float(pause.exists())])).item() > 0:
        began = began or time.perf_counter()
        waits.touch()
        while pause.exists():
            heartbeat.alive()
            time.sleep(_LOOK_SECONDS)
        waits.unlink()
    return time.perf_counter() - began if began else 0.0


class Group:
    """Programs that run at the same time.

    Attributes:
        commands: of the programs.
        codes: with which they ended, in their order; of those that run None.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        folder: Path,
        processes: int = 1,
    ) -> None:
        """Starts nothing yet.

        Args:
            environments: of each command.
            folder: of this group alone; made here.
            processes: of each command, that call `wait_for_slice`.
        """
        folder.mkdir()
        self.commands = commands
        self._environments = [{**each, _FOLDER: str(folder)} for each in environments]
        self._pause, self._processes = folder / _PAUSE, processes
        self._running: list[Process] = []

    @property
    def codes(self) -> list[int | None]:
        return [each.poll() for each in self._running]

    def start(self) -> None:
        """Returns when all wait for their first slice."""
        self._pause.touch()
        for command, environment in zip(self.commands, self._environments):
            self._running.append(start_here(command, stdout=DISCARD, env=environment))
        self.pause()

    def go_on(self) -> None:
        """Resumes the group; returns when no process waits any more.

        One that slept through a whole slice would wait for the next, and the other ranks for it.
        Also returns when a program has ended, see `has_ended`.
        """
        self._pause.unlink(missing_ok=True)
        while self._waiting() and None in self.codes and not any(self.codes):
            time.sleep(_LOOK_SECONDS)

    def pause(self) -> None:
        """Returns when all wait, or have ended."""
        self._pause.touch()
        while self._waiting() < self._processes * self.codes.count(None):
            time.sleep(_LOOK_SECONDS)

    def _waiting(self) -> int:
        return sum(1 for _ in self._pause.parent.glob("waits-*"))

    def has_ended(self, seconds: float) -> bool:
        """Waits until all have, up to a number of seconds.

        Raises: LaunchError: one ended with another code than 0.
        """
        deadline = time.monotonic() + seconds
        while None in self.codes and not any(self.codes) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for command, code in zip(self.commands, self.codes):
            if code:
                raise LaunchError(
                    f"a run ended with exit code {code}: {' '.join(command)}", code="run_failed"
                )
        return None not in self.codes

    def end(self) -> None:
        """Terminates running processes, waits, and kills those that remain."""
        for each in self._running:
            if each.poll() is None:
                each.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for each in self._running:
            try:
                each.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                each.kill()
                each.wait()


def interleave(groups: Sequence[Group], slice_seconds: float) -> None:
    """Runs groups in time slices until all have ended.

    None runs when it returns or raises.

    Args: slice_seconds: at least; a slice lasts until the end of a step.
    Raises: LaunchError: a program ended with another code than 0.
    """
    try:
        for group in groups:  # one after another: a start would disturb those that are at it
            group.start()
        waiting = deque(groups)
        while waiting:
            group = waiting.popleft()
            group.go_on()
            if not group.has_ended(slice_seconds if waiting else math.inf):
                group.pause()
                waiting.append(group)
    finally:
        for group in groups:
            group.end()
