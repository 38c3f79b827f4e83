"""What each rank is doing, where fleetrun can see it: one small shared file per rank.

A rank that hangs cannot say so: it may be stopped, hold the interpreter's lock, or wait inside a
collective for another one.  So every rank writes what it begins into memory that it shares with
the fleetrun of its host (launch/watch.py), which looks from outside.  Without fleetrun nothing is
written.  A beat costs about a microsecond.
"""

import contextlib
import faulthandler
import math
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from ppdist.errors import EXIT_DIR_VARIABLE

PHASES = ("start", "step", "evaluate", "save", "end")
# Every rank under fleetrun answers it with the stacks of its threads, written in C, so that also
# one that holds the interpreter's lock answers.
STACKS_SIGNAL = signal.SIGUSR2
_LAYOUT = struct.Struct("=IHHQQQdd40sQQd")
_PLACE_BYTES = 40
_pulse: mmap.mmap | None = None
# As in `Reading`, but for times in ns.
_NOTHING_YET = (0, 0, 0, 0, 0, 0, 0.0, 0.0, b"", 0, 0, 0.0)
_state: list = list(_NOTHING_YET)
_PID, _PHASE, _INSIDE, _STEP, _COLLECTIVES, _TIME, _PATIENCE, _LIMIT, _PLACE = range(9)
_SINCE, _MEASURED, _SECONDS = range(9, 12)
_waited_ns = _entered_ns = _step_began_ns = 0


@dataclass(frozen=True)
class Reading:
    """What a rank last said."""

    pid: int
    phase: str  # of PHASES
    inside: bool  # it waits for the others now, in the last collective or meeting
    step: int  # optimizer steps done
    collectives: int  # entered so far, the last one included
    seconds: float  # of the last beat, by time.monotonic(), which all processes of a host share
    patience: float  # how long ranks wait for one another at meetings, s
    limit: float  # how long a step may last without a sign of life at least, s; inf: for ever
    place: str  # the collective or meeting, or what it does by itself
    steps_since: int  # made since the start or the last evaluation
    steps_measured: int  # in all, without those first ones, which may be slow
    step_seconds: float  # of the last of them


def begin(patience_seconds: float, limit_seconds: float | None) -> None:
    """Opens this rank's file, if a fleetrun of ours started it; called once, at the start.

    Args: see distributed.timeout_seconds and distributed.hang_seconds.
    """
    global _pulse
    folder = os.environ.get(EXIT_DIR_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    # It stays open: faulthandler writes to it.
    stacks = stacks_of(Path(folder), rank).open("ab")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    path = file_of(Path(folder), rank)
    path.write_bytes(bytes(_LAYOUT.size))
    with path.open("r+b") as file:
        _pulse = mmap.mmap(file.fileno(), _LAYOUT.size)
    _state[_PID], _state[_PATIENCE] = os.getpid(), patience_seconds
    _state[_LIMIT] = math.inf if limit_seconds is None else limit_seconds
    beat("start", 0)


def beat(phase: str, step: int | None = None) -> None:
    """Says that this rank is alive, in a phase, after so many optimizer steps (None: as before)."""
    global _step_began_ns
    now = time.monotonic_ns()
    if PHASES[_state[_PHASE]] == "step" and step == _state[_STEP] + 1:  # it has made one
        if _state[_SINCE]:
            _state[_MEASURED] += 1
            _state[_SECONDS] = (now - _step_began_ns) / 1e9
        _state[_SINCE] += 1
    if phase in ("start", "evaluate"):
        _state[_SINCE] = 0
    _state[_PHASE], _step_began_ns = PHASES.index(phase), now
    if step is not None:
        _state[_STEP] = step
    _write()


def alive() -> None:
    """Says that this rank gets on with something long, such as an evaluation."""
    _write()


def at(place: str) -> None:
    """Says what this rank does by itself and may hang in; "" when it has done it."""
    _state[_PLACE] = place.encode()[:_PLACE_BYTES]
    _write()


def entering(collective: str) -> None:
    """Says that this rank enters a collective or a meeting: there it waits for the others.

    Every rank enters the same ones in the same order, so their numbers agree.
    """
    global _entered_ns
    _state[_COLLECTIVES] += 1
    _state[_INSIDE] = 1
    _state[_PLACE] = collective.encode()[:_PLACE_BYTES]
    _write()
    _entered_ns = time.monotonic_ns()


def left() -> None:
    """Says that the collective is over for this rank."""
    global _waited_ns
    _waited_ns += time.monotonic_ns() - _entered_ns
    _state[_INSIDE], _state[_PLACE] = 0, b""
    _write()


class Waiting:
    """`entering` and `left`, also when the collective fails."""

    def __init__(self, collective: str) -> None:
        self._collective = collective

    def __enter__(self) -> None:
        entering(self._collective)

    def __exit__(self, *error: object) -> None:
        left()


def waited_seconds() -> float:
    """How long this rank has been in collectives and meetings so far."""
    return _waited_ns / 1e9


def tell_stop(number: int) -> bool:
    """Says to fleetrun that a signal asked this rank to stop, so that it asks all of them.

    Returns: False where no fleetrun listens.
    """
    folder = os.environ.get(EXIT_DIR_VARIABLE, "")
    if _pulse is None or not Path(folder).is_dir():
        return False
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    with contextlib.suppress(OSError):
        (Path(folder) / f"stop-{rank}").write_text(str(int(number)), encoding="utf-8")
    return True


def step() -> int:
    """Optimizer steps done, as the last beat said."""
    return _state[_STEP]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"pulse-{rank}"


def stacks_of(folder: Path, rank: int) -> Path:
    """Where a rank answers STACKS_SIGNAL."""
    return folder / f"stacks-{rank}"


def silent(pid: int, patience: float, limit: float) -> Reading:
    """What is known of a process that has begun and not yet said anything."""
    return Reading(pid, "start", False, 0, 0, 0.0, patience, limit, "", 0, 0, 0.0)


def read(path: Path) -> Reading | None:
    """None: this rank has not begun."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _LAYOUT.size:
        return None
    pid, phase, inside, step, collectives, beat_ns, patience, limit, name, *steps = _LAYOUT.unpack(
        data
    )
    if pid == 0:
        return None
    return Reading(
        pid=pid,
        phase=PHASES[phase],
        inside=bool(inside),
        step=step,
        collectives=collectives,
        seconds=beat_ns / 1e9,
        patience=patience,
        limit=limit,
        place=name.rstrip(b"\0").decode(errors="replace"),
        steps_since=steps[0],
        steps_measured=steps[1],
        step_seconds=steps[2],
    )


def _write() -> None:
    if _pulse is not None:
        _state[_TIME] = time.monotonic_ns()
        _LAYOUT.pack_into(_pulse, 0, *_state)
