"""The largest micro-batch that one rank has memory for, found by training with it elsewhere.

A process of its own (`batch_process`) makes real steps, so whatever ends it ends no run: the
kernel's out-of-memory killer, a limit, oneDNN without memory for its buffers.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdist import pulse
from ppdist.engine.memory import Bytes, fits, largest, tightest
from ppdist.errors import EXIT_DIR_VARIABLE, ConfigError, Failure

_LADDER = (1, 2, 4)  # a line through two of them is long enough
_TRIALS = 4  # of larger ones, at most
_WORTH_A_TRIAL = 8  # not for less than an eighth more
_POLL_SECONDS = 0.2
_TAIL = 600  # characters of what a process said last

MISTAKE, NO_MEMORY = 2, 3  # exit codes of `batch_process`
_SMALLER = "lower model.image_size (or train.multi_scale), take a smaller model, or give a number"
_LATE = (
    "training with it did not come to its end in half the time that ranks wait for one another; "
    "give a number, or raise distributed.timeout_seconds"
)

# What batches took, by kind, and why one of those asked for is missing, with a remedy ("": none).
Outcome = tuple[dict[int, dict[str, int]], str]


@dataclass(frozen=True)
class Found:
    """What one rank has memory for."""

    images: int
    why: str


def search(trial: Callable[[Sequence[int]], Outcome], room: Bytes, most: int) -> Found:
    """The largest batch up to `most` that was trained with and left the limits alone.

    Small batches give a line, the line a promise, and the promise is kept or not in a process that
    begins with it, as the run will.  Kept or not, it bends the line, and a process that died halves
    the distance.

    Args:
        trial: trains with batches, in ascending order, in one process.
        room: what may be taken, by kind.
    Raises: ConfigError: not even one image fits, or training fails altogether; and what `trial`
        raises.
    """
    measured, why = trial([batch for batch in _LADDER if batch <= most])
    good = {batch: used for batch, used in measured.items() if fits(used, room)}
    if not good:
        took = f"it takes {tightest(measured[1], room)}; {_SMALLER}" if measured else why
        raise ConfigError(
            f"auto: not even one image can be trained with: {took}",
            code="no_image_fits",
            where="train.batch_size_per_card",
        )
    bad = most + 1
    if why:  # it died, though the line had let it go on
        bad = min((batch for batch in _LADDER if batch > max(measured)), default=bad)
    for _ in range(_TRIALS):
        batch = min(largest(measured, room, most), bad - 1)
        if batch < max(good) + max(1, max(good) // _WORTH_A_TRIAL):
            break
        found, why = trial([batch])
        measured |= found
        if batch in found and fits(found[batch], room):
            good |= found
            continue
        bad = batch
        if batch not in found:
            bad = min(bad, (max(good) + batch) // 2 + 1)
    images = max(good)
    limit = "" if images < most else f", and {most} are the most that are of use"
    return Found(images, f"{images} take {tightest(good[images], room)}{limit}")


def trial_of(
    job: Mapping[str, Any], room: Bytes, deadline: float
) -> Callable[[Sequence[int]], Outcome]:
    """Trains in a process of its own.

    Args:
        job: `batch_process.Job` without what changes from trial to trial.
        deadline: by time.monotonic(); a process that has not come to its end by then is ended.
    Raises (when called): UserError: the run could not be built either; as it would have said.
    """

    def trial(batches: Sequence[int]) -> Outcome:
        asked = {**job, "batches": list(batches), "room": dict(room), "parent": os.getpid()}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.json").write_text(json.dumps(asked), encoding="utf-8")
            why = _run(folder, deadline)
            took = folder / "took.jsonl"
            lines = took.read_text(encoding="utf-8").splitlines() if took.exists() else []
        told = [json.loads(line) for line in lines]
        return {each["batch"]: each["used"] for each in told}, why

    return trial


def _run(folder: Path, deadline: float) -> str:
    """Runs the process; returns why it ended early, with a remedy, "" where all was well.

    Raises: UserError: a mistake of the user's.
    """
    if time.monotonic() > deadline:
        return _LATE
    # It is a run of one rank, and nothing that it does is for fleetrun to see.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("PADDLE_") and key != EXIT_DIR_VARIABLE
    }
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [package, environment.get("PYTHONPATH", "")])
    )
    command = [sys.executable, "-m", "ppdist.engine.batch_process", str(folder)]
    said = folder / "said"
    pulse.at("looking for its batch")
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        late = False
        while process.poll() is None:
            pulse.alive()
            late = time.monotonic() > deadline
            if late:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        pulse.at("")
    if late:
        return _LATE
    return _why(process.returncode, folder, said)


def _why(code: int, folder: Path, said: Path) -> str:
    """As `_run`, of a process that has ended."""
    if code == 0:
        return ""
    if code == MISTAKE and (folder / "mistake").exists():
        raise Failure(**json.loads((folder / "mistake").read_text(encoding="utf-8"))).error()
    tail = said.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL:]
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    words = f"it ended with {ended}{': ' * bool(tail)}{tail}"
    if code < 0 or code == NO_MEMORY:  # limits end a process by signals, too
        return f"{words}; {_SMALLER}"
    return f"{words}; if that is no lack of memory, give a number: training itself then says more"
