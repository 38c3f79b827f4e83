"""Faults on purpose, to see what a run survives: PPDIST_FAULT=kill@rank1:step7

    PPDIST_FAULT = KIND[=VALUE]@rankR:stepN[,KIND[=VALUE]@rankR:stepN...]

A fault strikes rank R when it begins step N (counted from 1), once in the life of a run, also when
the run is restarted: before it strikes, it is written down in output_dir/faults-rankR.jsonl.  A run
that begins anew may be struck again.  Without the variable nothing happens.

tests/faults/train.py reads the variable; injector.py does what the kinds below say.
"""

import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdist.common.errors import ConfigError

VARIABLE = "PPDIST_FAULT"
_CLOCK_REALTIME_COARSE = 5  # linux/time.h
_FORM = re.compile(r"(?P<kind>[a-z0-9-]+)(=(?P<value>[^@]*))?@rank(?P<rank>\d+):step(?P<step>\d+)")


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        value: its VALUE where none is written; None: it takes none.
        allowed: what VALUE may be: "any" number, "positive", or a "count" from 1.
        ends: it ends an attempt of the job.
    """

    does: str
    value: float | None = None
    allowed: str = "any"
    ends: bool = False


KINDS = {
    "kill": Kind("SIGKILL, as by the kernel when memory runs out", ends=True),
    "stop": Kind("SIGSTOP: the process is stopped and still exists", ends=True),
    "segv": Kind("reads address 0, as a broken native operator may", ends=True),
    "abort": Kind("abort(), as a failed check in C++", ends=True),
    "term": Kind("SIGTERM, as sent before a machine is taken away", ends=True),
    "exception": Kind("raises RuntimeError", ends=True),
    "exit0": Kind("ends with exit code 0 while the others go on", ends=True),
    "hang": Kind("sleeps for ever, in Python", ends=True),
    "hang-gil": Kind("sleeps for ever in C and keeps the interpreter's lock", ends=True),
    "slow": Kind("sleeps VALUE seconds before this step and each later one", 0.5, "positive"),
    "clock": Kind("its wall clock is VALUE seconds ahead from then on, in native code too", 600),
    "nan": Kind("its loss is NaN for VALUE steps", 1, "count"),
    "oom": Kind("runs out of memory (MemoryError) in the next forward pass"),
    "flip": Kind("one bit of one weight flips"),
    "skip-collective": Kind("does not take part in the next sum over the ranks", ends=True),
    "poison": Kind("SIGKILL each time it computes this step, in every attempt", ends=True),
    "loader-kill": Kind("SIGKILL to one of its data workers (data.workers >= 1)"),
    "loader-hang": Kind("SIGSTOP to one of its data workers (data.workers >= 1)"),
    "disk-full": Kind(
        "its next VALUE files of checkpoints do not fit on the disk (rank 0)", 1, "count"
    ),
    "disk-blocks": Kind(
        "writes and syncs of files in output_dir are blocked for VALUE seconds", 2, "positive"
    ),
    "log-full": Kind("its next VALUE writes to logs and metrics find a full disk", 3, "count"),
    "terminal-error": Kind("its stdout and stderr answer EIO from then on"),
    "terminal-blocks": Kind("its stdout and stderr are blocked for VALUE seconds", 2, "positive"),
    "storage-error": Kind(
        "images answer ESTALE for VALUE seconds, to its data workers too", 2, "positive"
    ),
    "storage-blocks": Kind(
        "reads of images are blocked for VALUE seconds, in its data workers too", 2, "positive"
    ),
    "slow-stat": Kind(
        "each look at an image's size and times takes VALUE seconds, from the start of its process",
        1,
        "positive",
    ),
    "eval-error": Kind("raises RuntimeError in the next evaluation"),
}


@dataclass(frozen=True)
class Fault:
    """One of PPDIST_FAULT; `number` is its place there, from 0, which tells equal ones apart."""

    kind: str
    rank: int
    step: int
    value: float

    @property
    def ends(self) -> bool:
        """Whether it ends an attempt of the job."""
        return KINDS[self.kind].ends

    def __str__(self) -> str:
        value = "" if KINDS[self.kind].value is None else f"={self.value:g}"
        return f"{self.kind}{value}@rank{self.rank}:step{self.step}"


def parse_faults(text: str) -> list[Fault]:
    """The faults of PPDIST_FAULT, "" for none.

    Raises: ConfigError: it is not of the form above, or names a kind that does not exist.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    return [_parsed(word) for word in words]


def _parsed(word: str) -> Fault:
    found = _FORM.fullmatch(word)
    if found is None:
        raise ConfigError(
            "expected KIND[=VALUE]@rankR:stepN, such as kill@rank1:step7",
            code="fault_invalid",
            where=f"{VARIABLE}: {word!r}",
            fix=f"kinds: {', '.join(KINDS)}",
        )
    name, kind = found["kind"], KINDS.get(found["kind"])
    if kind is None:
        raise ConfigError(
            f"there is no fault {name!r}",
            code="fault_invalid",
            where=f"{VARIABLE}: {word!r}",
            fix=f"kinds: {', '.join(KINDS)}",
        )
    value = math.nan if kind.value is None else kind.value
    if found["value"] is not None:
        if kind.value is None:
            raise ConfigError(
                f"{name} takes no value",
                code="fault_invalid",
                where=f"{VARIABLE}: {word!r}",
            )
        value = _number(word, found["value"], kind.allowed)
    if found["step"] == "0":
        raise ConfigError(
            "the first step is step1",
            code="fault_invalid",
            where=f"{VARIABLE}: {word!r}",
        )
    return Fault(name, int(found["rank"]), int(found["step"]), value)


def _number(word: str, text: str, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    expected = {"any": "a number", "positive": "a number above 0", "count": "1, 2, 3, ..."}
    fits = {"any": True, "positive": value > 0, "count": value >= 1 and value % 1 == 0}
    if not (math.isfinite(value) and fits[allowed]):
        raise ConfigError(
            f"expected {expected[allowed]} after `=`, found {text!r}",
            code="fault_invalid",
            where=f"{VARIABLE}: {word!r}",
        )
    return value


def struck_file(output_dir: Path, rank: int) -> Path:
    return output_dir / f"faults-rank{rank}.jsonl"


def write_down(output_dir: Path, fault: Fault) -> None:
    """On disk when it returns: the next thing may be the end of this process."""
    # By a clock that the fault `clock` does not move.
    line = {"fault": str(fault), "time": time.clock_gettime(_CLOCK_REALTIME_COARSE)}
    with struck_file(output_dir, fault.rank).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def struck(output_dir: Path, rank: int) -> list[dict[str, Any]]:
    """What has struck a rank: `fault` as it was written, `time` (seconds since 1970)."""
    file = struck_file(output_dir, rank)
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
