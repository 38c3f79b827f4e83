"""Per-rank heartbeat file, read by the launcher of the host.

A rank that hangs cannot report it: it may be stopped, hold the interpreter's lock, or wait for
another rank inside a collective.  So every rank writes what it is about to do into memory that it
shares with the fleetrun of its host, which monitors it from outside (launch/watchdog.py).  Without
fleetrun nothing is written.  A beat costs about a microsecond.  The totals of the steps follow it
in the file, for launch/metrics.py; they are written once per step.
"""

import contextlib
import faulthandler
import json
import math
import mmap
import os
import signal
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from ppdist.common.files import replace_file
from ppdist.common.job import launched_rank, launched_ranks, launcher_folder

PHASES = ("start", "step", "evaluate", "save", "end")
# Every rank under fleetrun responds to this signal by writing the stacks of its threads, in C,
# which works even while a thread holds the interpreter's lock.
STACKS_SIGNAL = signal.SIGUSR2
BEAT = struct.Struct("=IHHQQQdd40sQQd")  # as in `Reading`
_PLACE_BYTES = 40
WORK = struct.Struct("=QQQQddddd")  # totals of the steps; follows the beat
_SEAL = struct.Struct("=I")  # the checksum behind each block, which is written at once
_BEAT_BYTES, _WORK_BYTES = BEAT.size + _SEAL.size, WORK.size + _SEAL.size
_READS, _PAUSE_SECONDS = 5, 0.002  # most reads until the checksum matches, and the pause between
_file: mmap.mmap | None = None
# The fields of `Reading`, with times in ns.
_NOTHING_YET = (0, 0, 0, 0, 0, 0, 0.0, 0.0, b"", 0, 0, 0.0)
_state: list = list(_NOTHING_YET)
_PID, _PHASE, _INSIDE, _STEP, _COLLECTIVES, _TIME, _TIMEOUT, _LIMIT, _PLACE = range(9)
_SINCE, _MEASURED, _SECONDS = range(9, 12)
_waited_ns = _entered_ns = _step_began_ns = 0
_planned_steps = _steps = _bad_steps = _images = 0
_step_seconds = _own_seconds = _data_seconds = _micro_batches = 0.0


@dataclass(frozen=True)
class Reading:
    """The last heartbeat of a rank."""

    pid: int
    phase: str  # one of PHASES
    inside: bool  # True while the rank waits for others in the last collective or barrier
    step: int  # number of optimizer steps done
    collectives: int  # number of collectives entered so far, including the last one
    seconds: float  # time.monotonic() of the last beat; all processes of a host share this clock
    timeout: float  # how long ranks wait for one another at barriers, s
    limit: float  # shortest time without a sign of life that ends a step, s; inf: never
    place: str  # the collective or barrier, or the work that the rank does alone
    steps_since: int  # steps since the start or the last evaluation
    steps_measured: int  # steps in all, without the first ones, which may be slow
    step_seconds: float  # duration of the last measured step

    @property
    def step_in_progress(self) -> int | None:
        """Returns the optimizer step in progress, from 1; None outside steps."""
        return self.step + 1 if self.phase == "step" else None


@dataclass(frozen=True)
class Work:
    """The totals of a rank's steps since its process began."""

    planned_steps: int  # steps planned for the whole run; 0: not yet known
    steps: int  # steps done by this process; all numbers below refer to these steps
    bad_steps: int  # steps that no rank applied because a value was not finite
    images: int  # images of all ranks
    step_seconds: float
    own_seconds: float  # part of step_seconds without waiting for other ranks
    data_seconds: float  # part of own_seconds spent waiting for images
    micro_batches: float  # of this rank; where a step is spread over the ranks, an equal share is 1
    loss: float  # loss of the last step over all ranks; nan before the first step


def begin(timeout_seconds: float, limit_seconds: float | None) -> None:
    """Opens this rank's file, if fleetrun started it.

    Args: timeout_seconds, limit_seconds: distributed.timeout_seconds and .hang_seconds.
    """
    global _file
    folder, rank = launcher_folder(), launched_rank()
    if folder is None:
        return
    # The file stays open: faulthandler writes to it.
    stacks = stacks_path(folder, rank).open("ab")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    path = heartbeat_path(folder, rank)
    path.write_bytes(bytes(_BEAT_BYTES + _WORK_BYTES))
    with path.open("r+b") as file:
        _file = mmap.mmap(file.fileno(), _BEAT_BYTES + _WORK_BYTES)
    _state[_PID], _state[_TIMEOUT] = os.getpid(), timeout_seconds
    _state[_LIMIT] = math.inf if limit_seconds is None else limit_seconds
    beat("start", 0)


def beat(phase: str, step: int | None = None) -> None:
    """Writes a sign of life, with phase and step.

    Args: step: number of optimizer steps done; None: unchanged.
    """
    global _step_began_ns
    now = time.monotonic_ns()
    # A step was finished; after a rollback the number does not grow by one.
    if PHASES[_state[_PHASE]] == "step" and step == _state[_STEP] + 1:
        if _state[_SINCE]:
            _state[_MEASURED] += 1
            _state[_SECONDS] = (now - _step_began_ns) / 1e9
        _state[_SINCE] += 1
    if phase in ("start", "evaluate"):
        _state[_SINCE] = 0
    _state[_PHASE], _step_began_ns = PHASES.index(phase), now
    if step is not None:
        _state[_STEP] = step
    alive()


def plan(steps: int) -> None:
    """Writes the planned number of optimizer steps of the whole run."""
    global _planned_steps
    _planned_steps = steps
    _write_work(math.nan)


def record_step(
    *,
    loss: float,
    images: int,
    bad: bool,
    step_seconds: float,
    own_seconds: float,
    data_seconds: float,
    micro_batches: float,
) -> None:
    """Adds a finished step to the totals; for the arguments see `Work`."""
    global _steps, _bad_steps, _images
    global _step_seconds, _own_seconds, _data_seconds, _micro_batches
    _steps += 1
    _bad_steps += bad
    _images += images
    _step_seconds += step_seconds
    _own_seconds += own_seconds
    _data_seconds += data_seconds
    _micro_batches += micro_batches
    _write_work(loss)


def tell_run(output_dir: Path) -> None:
    """Reports to fleetrun where the run keeps its files.

    A full or unreachable disk is ignored: only monitoring needs this.
    """
    folder = launcher_folder()
    if _file is None or folder is None:
        return
    text = json.dumps({"output_dir": str(output_dir.absolute()), "world": launched_ranks()})
    with contextlib.suppress(OSError):
        replace_file(run_path(folder, launched_rank()), text.encode())


def alive() -> None:
    """Writes a sign of life during long work."""
    if _file is not None:
        _state[_TIME] = time.monotonic_ns()
        _file[:_BEAT_BYTES] = seal_block(BEAT, *_state)


def name_place(place: str) -> None:
    """Records the name of work that this rank does alone and in which it may hang."""
    _state[_PLACE] = place.encode()[:_PLACE_BYTES]
    alive()


class Waiting:
    """A context in which this rank waits for other ranks.

    Every rank enters the same contexts in the same order, so their numbers agree.
    """

    def __init__(self, collective: str) -> None:
        self._collective = collective

    def __enter__(self) -> None:
        global _entered_ns
        _state[_COLLECTIVES] += 1
        _state[_INSIDE] = 1
        _state[_PLACE] = self._collective.encode()[:_PLACE_BYTES]
        alive()
        _entered_ns = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        global _waited_ns
        _waited_ns += time.monotonic_ns() - _entered_ns
        _state[_INSIDE], _state[_PLACE] = 0, b""
        alive()


def waited_seconds() -> float:
    """Returns the time this rank has spent in collectives and barriers so far, in seconds."""
    return _waited_ns / 1e9


def tell_stop(number: int) -> bool:
    """Reports to fleetrun that a signal asks the run to stop.

    Returns: False if no fleetrun listens.
    """
    folder = launcher_folder()
    if _file is None or folder is None:
        return False
    with contextlib.suppress(OSError):
        (folder / f"stop-{launched_rank()}").write_text(str(int(number)), encoding="utf-8")
    return True


def step() -> int:
    """Returns the number of optimizer steps done as of the last beat."""
    return _state[_STEP]


def heartbeat_path(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's heartbeat file."""
    return folder / f"heartbeat-{rank}"


def stacks_path(folder: Path, rank: int) -> Path:
    """Returns the path of the file to which a rank writes its stacks on STACKS_SIGNAL."""
    return folder / f"stacks-{rank}"


def run_path(folder: Path, rank: int) -> Path:
    """Returns the path of the file that `tell_run` writes."""
    return folder / f"run-{rank}.json"


def make_silent_reading(pid: int, timeout: float, limit: float) -> Reading:
    """Creates the reading for a process that has not written a heartbeat yet."""
    return Reading(pid, "start", False, 0, 0, 0.0, timeout, limit, "", 0, 0, 0.0)


def read(path: Path) -> Reading | None:
    """Reads a heartbeat; None if the rank has not begun."""
    fields = _read_block(path, BEAT, 0)
    if fields is None or fields[0] == 0:
        return None
    pid, phase, inside, step, collectives, beat_ns, timeout, limit, name, *steps = fields
    return Reading(
        pid=pid,
        phase=PHASES[phase],
        inside=bool(inside),
        step=step,
        collectives=collectives,
        seconds=beat_ns / 1e9,
        timeout=timeout,
        limit=limit,
        place=name.rstrip(b"\0").decode(errors="replace"),
        steps_since=steps[0],
        steps_measured=steps[1],
        step_seconds=steps[2],
    )


def read_work(path: Path) -> Work | None:
    """Reads the totals of a rank's steps; None if there are none yet."""
    fields = _read_block(path, WORK, _BEAT_BYTES)
    if fields is None:
        return None
    steps, planned, *totals = fields
    return Work(planned, steps, *totals) if planned > 0 or steps > 0 else None


def _read_block(path: Path, layout: struct.Struct, offset: int) -> tuple | None:
    """Reads a block of the file; None if it has not been written.

    The rank may be writing the block now, or have been preempted meanwhile, so data that does not
    match its checksum is read again.  Data that never matches is used nevertheless.
    """
    data = b""
    try:
        with path.open("rb", buffering=0) as file:
            for attempt in range(_READS):
                if attempt:
                    time.sleep(_PAUSE_SECONDS)
                block = os.pread(file.fileno(), layout.size + _SEAL.size, offset)
                data, seal = block[: layout.size], block[layout.size :]
                if not any(block) or seal == _SEAL.pack(zlib.crc32(data)):
                    break
    except OSError:
        return None
    return layout.unpack(data) if len(data) == layout.size else None


def seal_block(layout: struct.Struct, *values: object) -> bytes:
    """Packs a block of a rank's file, with its checksum."""
    data = layout.pack(*values)
    return data + _SEAL.pack(zlib.crc32(data))


# Each block is written at once: with pack_into, readers would see it empty, then half written.
def _write_work(loss: float) -> None:
    if _file is not None:
        _file[_BEAT_BYTES:] = seal_block(
            WORK, _steps, _planned_steps, _bad_steps, _images,
            _step_seconds, _own_seconds, _data_seconds, _micro_batches, loss,
        )  # fmt: skip
