"""Outcome of a run on this host: culprit, message, exit code.

It combines what every rank left behind.
"""

import contextlib
import json
import math
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ppdist.common import errors
from ppdist.common.process import STOPPED, USER_ERROR, boot_seconds
from ppdist.distributed import heartbeat
from ppdist.launch import worker

WATCH_FILE = "watch.json"  # where a Watch writes what it found

_TAIL_LINES = 40
_NO_REPORT = errors.Failure("", "", "")
# Codes of a rank that waited for another, which may have made no progress (see `Watch`).
_PEER_TIMEOUTS = (errors.RANK_TIMEOUT, errors.STORE_UNREACHABLE)

_LOADING_SECONDS = 2.0  # loading Python, Paddle and a model takes longer


@dataclass(frozen=True)
class Attempt:
    """Folders of this host's ranks in one attempt."""

    folder: Path  # private: exit-N.json (worker.py), rank-N.json (common/process.py), heartbeats
    log_dir: Path  # with workerlog.N
    # Local rank -> byte offset at which this attempt begins in its workerlog.
    offsets: Mapping[int, int] = field(default_factory=dict)

    @property
    def launcher_log(self) -> Path:
        """Output of Paddle's launcher, or of workers that fleetrun starts."""
        return self.folder / "launcher.log"

    def log(self, local: int) -> Path:
        return self.log_dir / f"workerlog.{local}"


@dataclass(frozen=True)
class Hang:
    """Ranks that made no progress, for `judge`."""

    message: str
    time: float  # since when, by `boot_seconds`
    ranks: list[int]  # however these end now, it is a consequence
    step: int | None  # the optimizer step, from 1, that they all had begun; None: none
    certain: bool  # False: the first failure may have another cause


def found_hang(folder: Path) -> Hang | None:
    """The hang that a Watch of this folder found; None: none."""
    with contextlib.suppress(FileNotFoundError):
        return Hang(**json.loads((folder / WATCH_FILE).read_text(encoding="utf-8")))
    return None


@dataclass(frozen=True)
class RankEnd:
    """How one rank of this host ended."""

    rank: int
    local: int  # its number on this host; 0 has the terminal
    exit_code: int | None  # negative: killed by that signal; None: unknown
    failure: errors.Failure  # as process.run reported it; `_NO_REPORT`: no report
    time: float  # of the failure, by `boot_seconds`
    pid: int = 0  # of its watcher, worker.py
    reading: heartbeat.Reading | None = None  # its last heartbeat
    process_code: int | None = None  # exit code of the process; None: still running
    began: bool = True  # whether the script began, not only its watcher
    seconds: float | None = None  # that the script ran; None: unknown
    printed: bool = True  # its failure, where it writes

    @property
    def message(self) -> str:
        return self.failure.message

    @property
    def failed(self) -> bool:
        """Whether it failed, or exited with 0 before training was over."""
        early = self.reading is not None and self.reading.phase in ("step", "save")
        return self.exit_code not in (0, STOPPED) or (self.exit_code == 0 and early)

    @property
    def is_consequence(self) -> bool:
        """Whether it ended because another rank had ended."""
        killed = self.exit_code in (None, -signal.SIGTERM, 128 + signal.SIGTERM)
        lost = self.failure.code == errors.LOST_RANK or self.failure.from_rank is not None
        return lost or (killed and not self.message)

    @property
    def waited_for_peer(self) -> bool:
        """Whether it ended because another rank had ended, or never arrived."""
        return self.is_consequence or self.failure.code in _PEER_TIMEOUTS

    @property
    def how(self) -> str:
        if self.exit_code is None:
            return "was killed"
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            hint = " (out of memory? see dmesg)" if self.exit_code == -signal.SIGKILL else ""
            return f"was killed by {name}{hint}"
        amid = ", though training was not over," if self.exit_code == 0 else ""
        return f"ended with exit code {self.exit_code}{amid}"

    @property
    def step(self) -> int | None:
        """Optimizer step that failed, from 1, or None."""
        if self.reading is None or self.failure.kind == errors.StorageError.kind:
            return None
        return self.reading.making

    @property
    def reached(self) -> int:
        """Number, from 1, of the last step that it began."""
        if self.reading is None:
            return 0
        return self.reading.step + (self.reading.phase == "step")

    @property
    def made_no_step(self) -> bool:
        """Whether this attempt certainly finished no step."""
        if self.reading is None:
            return not self.began or (self.seconds or math.inf) < _LOADING_SECONDS
        if self.reading.phase == "start":
            return True
        none = self.reading.steps_since == self.reading.steps_measured == 0
        return self.reading.phase == "step" and none

    @property
    def where(self) -> str:
        """What it was doing and on which host."""
        host = f"(host {socket.gethostname()})"
        return host if self.reading is None else f"{phase_of(self.reading)} {host}"


def phase_of(reading: heartbeat.Reading) -> str:
    """What a rank was doing, as text for a message."""
    done = reading.step
    return {
        "start": "before its first step",
        "step": f"in step {done + 1}",
        "evaluate": f"in the evaluation after step {done}",
        "save": f"at the checkpoint after step {done}",
        "end": f"after its last step, {done}",
    }[reading.phase]


def read_ends(folder: Path) -> list[RankEnd]:
    """Ends of the ranks that have begun; no exit code: still running."""
    ends = []
    for report in worker.reports(folder):
        end = RankEnd(
            rank=report.rank,
            local=report.local,
            exit_code=report.code,
            failure=_NO_REPORT,
            time=report.time,
            pid=report.pid,
            reading=heartbeat.read(heartbeat.file_of(folder, report.rank)),
            process_code=report.code,
            began=report.code is not None or report.child != 0,
            seconds=report.seconds,
        )
        word = folder / f"rank-{report.rank}.json"
        if word.is_file():
            said = json.loads(word.read_text(encoding="utf-8"))
            if said["exit_code"] != 0:  # a rank may still crash after it has reported 0
                failure = (said["kind"], said["code"], said["message"], said["from_rank"])
                end = replace(
                    end,
                    exit_code=said["exit_code"],
                    failure=errors.Failure(*failure),
                    printed=said["printed"],
                    # The rank reports when it fails, and exits only after its teardown.
                    time=said["time"],
                )
        ends.append(end)
    return ends


@dataclass(frozen=True)
class Outcome:
    """How the run ended on this host."""

    code: int  # 0, 1, 2 or 75
    message: str  # for stderr; "": nothing is left to say
    stopped: int | None = None  # the signal that stopped it, if one did
    # For the other hosts of the run:
    told: str = field(default="", compare=False)  # `message` for readers without this terminal
    is_consequence: bool = field(default=False, compare=False)  # of what happened on another host
    time: float = field(default=0.0, compare=False)  # of the failure, by `boot_seconds`
    step: int | None = field(default=None, compare=False)  # that failed, from 1; None: no step did
    reached: int = field(default=0, compare=False)  # the last step that began here
    # Ranks waited in vain and one made no progress, but the cause may be another.
    is_guess: bool = field(default=False, compare=False)
    # Its hosts went or came, and those that are there make the next world.
    goes_on: bool = field(default=False, compare=False)
    is_sent_away: bool = field(default=False, compare=False)  # this host alone: the others go on
    made_step: bool = field(default=True, compare=False)  # in this attempt, as far as known

    @property
    def knows_cause(self) -> bool:
        return not (self.is_consequence or self.is_guess)

    @property
    def is_final(self) -> bool:
        """Whether a restart would be wrong or useless."""
        if self.goes_on:
            return False
        over = self.is_sent_away or self.stopped is not None
        return over or self.code in (0, USER_ERROR, STOPPED)


def judge(attempt: Attempt, launcher_code: int, stopped: int | None) -> Outcome:
    """How the run ended, from what this host's ranks left.

    Args:
        launcher_code: exit code of Paddle's launcher, 0 without it; used only if no rank failed.
        stopped: the signal that fleetrun received, or None.
    """
    # No rank is left: one without an exit code was killed.
    ends = [
        replace(end, process_code=-signal.SIGKILL) if end.process_code is None else end
        for end in read_ends(attempt.folder)
    ]
    codes = {end.exit_code for end in ends}
    if not ends and stopped is not None:
        return stopped_before(stopped, "any rank began")
    if not ends:
        return not_started(attempt, "Paddle's launcher failed before any rank began")
    failed = [end for end in ends if end.failed]
    if not failed and codes == {0}:
        if launcher_code == 1:
            return replace(not_started(attempt, "Paddle's launcher failed"), stopped=stopped)
        return Outcome(0, "", stopped, time=boot_seconds())
    if not failed:
        return Outcome(STOPPED, "", stopped)
    outcome = _of_failed(attempt, ends, failed, stopped)
    return replace(outcome, reached=max(end.reached for end in ends))


def made_step(ends: Sequence[RankEnd], trains: bool) -> bool:
    """Whether a rank made a step in this attempt; of a script of others: whether it may have.

    Args: trains: the script is `ppdist train`, which writes heartbeats before its first step, and
        may load for long.
    """
    return any(not end.made_no_step and (end.reading is not None or not trains) for end in ends)


def failed_now(said: str) -> Outcome:
    """A failure that no rank of this host reported."""
    return Outcome(1, said, told=said, time=boot_seconds())


def not_started(attempt: Attempt, what: str) -> Outcome:
    """Outcome whose reason is at the end of the launcher's log."""
    return failed_now(f"{what}:\n{_tail(attempt.launcher_log)}")


def stopped_before(number: int, what: str) -> Outcome:
    """Outcome of a signal before the first step: nothing is lost."""
    said = f"stopped by {signal.Signals(number).name} before {what}: it wrote no checkpoint"
    return Outcome(STOPPED, said, number)


def first_cause(attempt: Attempt, ends: Sequence[RankEnd]) -> Outcome | None:
    """Outcome while ranks still run; None: no rank failed on its own."""
    causes = [end for end in ends if end.failed and not end.waited_for_peer]
    return _of_failed(attempt, ends, causes, None) if causes else None


def _of_failed(
    attempt: Attempt, ends: Sequence[RankEnd], failed: Sequence[RankEnd], stopped: int | None
) -> Outcome:
    """Args: failed: those of `ends` that failed, at least one."""
    user_errors = [end for end in failed if end.exit_code == USER_ERROR and not end.waited_for_peer]
    first = min(
        user_errors or failed, key=lambda end: (end.is_consequence, end.waited_for_peer, end.time)
    )
    hang = found_hang(attempt.folder)
    named = hang is not None and first.rank in hang.ranks
    if hang is not None and (hang.certain or named or first.waited_for_peer):
        guess = not hang.certain
        said = hang.message
        return Outcome(1, said, stopped, said, False, hang.time, hang.step, is_guess=guess)
    if first.exit_code == USER_ERROR and first.message:
        said = f"error: {errors.with_code(first.message, first.failure.code)}"
        return _failure(first, USER_ERROR, said, said, stopped)
    if first.exit_code == USER_ERROR:
        said, told = (_said(attempt, first, here) for here in (True, False))
        return _failure(first, USER_ERROR, said, told, stopped)
    if stopped is not None and all(end.is_consequence or end.exit_code == STOPPED for end in ends):
        if all(end.made_no_step or end.exit_code == STOPPED for end in ends):
            return stopped_before(stopped, "the first step of this attempt")
        ranks = ", ".join(str(end.rank) for end in failed)
        name = signal.Signals(stopped).name
        said = f"stopped by {name}; rank {ranks} left no checkpoint"
        return _failure(first, 1, said, said, stopped)
    said, told = (_describe(attempt, first, here) for here in (True, False))
    return _failure(first, 1, said, told, stopped)


def _failure(first: RankEnd, code: int, message: str, told: str, stopped: int | None) -> Outcome:
    return Outcome(code, message, stopped, told, first.is_consequence, first.time, first.step)


def _describe(attempt: Attempt, first: RankEnd, here: bool) -> str:
    said = _said(attempt, first, here)
    place = ("below" if said else "above") if here else "on the terminal there"
    log = f"its output is {place}" if first.local == 0 else f"log: {attempt.log(first.local)}"
    text = f"rank {first.rank} failed first: it {first.how} {first.where}; {log}"
    if first.is_consequence:
        text += "\nIt lost another rank, and no rank of this host says why."
    return f"{text}\n{said}".rstrip()


def _said(attempt: Attempt, end: RankEnd, here: bool) -> str:
    """The rank's last output, unless it is on this terminal."""
    code = end.process_code
    cut = code is not None and code < 0  # killed, perhaps in the middle of its message
    message = errors.with_code(end.message, end.failure.code).rstrip() if end.message else ""
    if end.local == 0 and end.printed and not (cut and message):
        return "" if here else message
    return message or _tail(attempt.log(end.local), attempt.offsets.get(end.local, 0))


def _tail(path: Path, offset: int = 0) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").rstrip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most")]
    start = min(begins[0] if begins else len(lines), max(0, len(lines) - _TAIL_LINES))
    return "\n".join(lines[begins[0] if begins else start :][-4 * _TAIL_LINES :])
