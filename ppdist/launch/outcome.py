"""Outcome of a run on this host: the culprit, the message, the exit code.

It is derived from what every rank left behind.
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
    """The folders used by this host's ranks in one attempt."""

    folder: Path  # private: exit-N.json (worker.py), rank-N.json (common/process.py), heartbeats
    log_dir: Path  # with workerlog.N
    # Local rank -> byte offset at which this attempt begins in its workerlog.
    offsets: Mapping[int, int] = field(default_factory=dict)

    @property
    def launcher_log(self) -> Path:
        """Returns the path of the log of Paddle's launcher, or of fleetrun's workers."""
        return self.folder / "launcher.log"

    def log(self, local: int) -> Path:
        return self.log_dir / f"workerlog.{local}"


@dataclass(frozen=True)
class Hang:
    """A hang: the ranks that made no progress; read by `judge`."""

    message: str
    time: float  # when the hang began, according to `boot_seconds`
    ranks: list[int]  # these ranks' ends, whatever they are, are a consequence of the hang
    step: int | None  # the optimizer step, from 1, that all of them had begun; None: none had
    certain: bool  # False: the first failure may have another cause


def read_hang(folder: Path) -> Hang | None:
    """Reads the hang that the Watch of this folder found; None if it found none."""
    with contextlib.suppress(FileNotFoundError):
        return Hang(**json.loads((folder / WATCH_FILE).read_text(encoding="utf-8")))
    return None


@dataclass(frozen=True)
class RankEnd:
    """A record of how one rank of this host ended."""

    rank: int
    local: int  # its number on this host; 0 has the terminal
    exit_code: int | None  # negative: killed by that signal; None: unknown
    failure: errors.Failure  # as process.run reported it; `_NO_REPORT`: no report
    time: float  # of the failure, by `boot_seconds`
    pid: int = 0  # process id of its watcher, worker.py
    reading: heartbeat.Reading | None = None  # its last heartbeat
    process_code: int | None = None  # exit code of the process; None: still running
    began: bool = True  # whether the script began, not only its watcher
    seconds: float | None = None  # how long the script ran; None: unknown
    printed: bool = True  # the rank wrote its failure to its output

    @property
    def message(self) -> str:
        return self.failure.message

    @property
    def failed(self) -> bool:
        """Returns True if the rank failed, or exited with 0 before training was complete."""
        # A script that exits in the middle of training leaves the other ranks waiting, whatever its
        # code.
        early = self.reading is not None and self.reading.phase in ("step", "save")
        return self.exit_code not in (0, STOPPED) or (self.exit_code == 0 and early)

    @property
    def is_consequence(self) -> bool:
        """Returns True if the rank ended because another rank had ended."""
        is_killed = self.exit_code in (None, -signal.SIGTERM, 128 + signal.SIGTERM)
        lost_peer = self.failure.code == errors.LOST_RANK or self.failure.from_rank is not None
        return lost_peer or (is_killed and not self.message)

    @property
    def waited_for_peer(self) -> bool:
        """Returns True if the rank ended because another rank had ended or never arrived."""
        return self.is_consequence or self.failure.code in _PEER_TIMEOUTS

    @property
    def how(self) -> str:
        """Describes how the rank ended; the text follows the word `it`."""
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
        """Returns the optimizer step that failed, from 1, or None."""
        if self.reading is None or self.failure.kind == errors.StorageError.kind:
            return None
        return self.reading.step_in_progress

    @property
    def reached(self) -> int:
        """Returns the number, from 1, of the last step that the rank began."""
        if self.reading is None:
            return 0
        return self.reading.step + (self.reading.phase == "step")

    @property
    def made_no_step(self) -> bool:
        """Returns True if the rank certainly finished no step in this attempt."""
        if self.reading is None:
            return not self.began or (self.seconds or math.inf) < _LOADING_SECONDS
        if self.reading.phase == "start":
            return True
        no_steps = self.reading.steps_since == self.reading.steps_measured == 0
        return self.reading.phase == "step" and no_steps

    @property
    def where(self) -> str:
        """Describes what the rank was doing, and on which host."""
        host = f"(host {socket.gethostname()})"
        return host if self.reading is None else f"{describe_phase(self.reading)} {host}"


def describe_phase(reading: heartbeat.Reading) -> str:
    """Describes what a rank was doing, as text for a message."""
    done = reading.step
    return {
        "start": "before its first step",
        "step": f"in step {done + 1}",
        "evaluate": f"in the evaluation after step {done}",
        "save": f"at the checkpoint after step {done}",
        "end": f"after its last step, {done}",
    }[reading.phase]


def read_ends(folder: Path) -> list[RankEnd]:
    """Reads how all ranks that have begun ended; a rank without an exit code is still running."""
    ends = []
    for report in worker.read_reports(folder):
        end = RankEnd(
            rank=report.rank,
            local=report.local,
            exit_code=report.code,
            failure=_NO_REPORT,
            time=report.time,
            pid=report.pid,
            reading=heartbeat.read(heartbeat.heartbeat_path(folder, report.rank)),
            process_code=report.code,
            began=report.code is not None or report.child != 0,
            seconds=report.seconds,
        )
        report_file = folder / f"rank-{report.rank}.json"
        if report_file.is_file():
            report_of_rank = json.loads(report_file.read_text(encoding="utf-8"))
            # A rank may still crash after it has reported 0, so then the worker's exit code counts.
            if report_of_rank["exit_code"] != 0:
                failure = (
                    report_of_rank["kind"],
                    report_of_rank["code"],
                    report_of_rank["message"],
                    report_of_rank["from_rank"],
                )
                end = replace(
                    end,
                    exit_code=report_of_rank["exit_code"],
                    failure=errors.Failure(*failure),
                    printed=report_of_rank["printed"],
                    # The rank reports when it fails, and exits only after its teardown.
                    time=report_of_rank["time"],
                )
        ends.append(end)
    return ends


@dataclass(frozen=True)
class Outcome:
    """The outcome of the run on this host."""

    code: int  # 0, 1, 2 or 75
    message: str  # for stderr; "": already printed, or there is nothing to report
    stopped: int | None = None  # the signal that stopped it, if one did
    # The fields below are for the other hosts of the run; their users do not see this terminal.
    remote_message: str = field(default="", compare=False)
    is_consequence: bool = field(default=False, compare=False)  # of what happened on another host
    time: float = field(default=0.0, compare=False)  # when it failed, by `boot_seconds`
    step: int | None = field(default=None, compare=False)  # failed step, from 1, or None
    reached: int = field(default=0, compare=False)  # the last step that began here
    # Ranks waited in vain and one made no progress, but something else may be the cause.
    is_guess: bool = field(default=False, compare=False)
    # Hosts left or joined, and those that are present form the next world.
    goes_on: bool = field(default=False, compare=False)
    is_sent_away: bool = field(default=False, compare=False)  # only this host ends
    made_step: bool = field(default=True, compare=False)  # a step was completed in this attempt

    @property
    def knows_cause(self) -> bool:
        return not (self.is_consequence or self.is_guess)

    @property
    def is_final(self) -> bool:
        """Returns True if a restart would be wrong or useless."""
        if self.goes_on:
            return False
        is_over = self.is_sent_away or self.stopped is not None
        return is_over or self.code in (0, USER_ERROR, STOPPED)


def judge(attempt: Attempt, launcher_code: int, stopped: int | None) -> Outcome:
    """Decides how the run ended, from the files that this host's ranks left behind.

    Args:
        launcher_code: exit code of Paddle's launcher, 0 without the launcher; used only if no rank
            failed.
        stopped: the signal that fleetrun received, or None.
    """
    # No rank is running any more: a rank without an exit code was killed.
    ends = [
        replace(end, process_code=-signal.SIGKILL) if end.process_code is None else end
        for end in read_ends(attempt.folder)
    ]
    codes = {end.exit_code for end in ends}
    if not ends and stopped is not None:
        return make_early_stop(stopped, "any rank began")
    if not ends:
        return make_start_failure(attempt, "Paddle's launcher failed before any rank began")
    failed = [end for end in ends if end.failed]
    if not failed and codes == {0}:
        # All ranks have ended well, so it was the launcher itself that failed.
        if launcher_code == 1:
            return replace(make_start_failure(attempt, "Paddle's launcher failed"), stopped=stopped)
        return Outcome(0, "", stopped, time=boot_seconds())
    if not failed:
        return Outcome(STOPPED, "", stopped)
    outcome = _judge_failures(attempt, ends, failed, stopped)
    return replace(outcome, reached=max(end.reached for end in ends))


def made_step(ends: Sequence[RankEnd], trains: bool) -> bool:
    """Returns True if a rank completed a step in this attempt, or may have done so.

    Only `ppdist train` writes heartbeats, so with another script this is never certain.

    Args: trains: the script is `ppdist train`, which writes heartbeats before its first step and
        may take long to load.
    """
    return any(not end.made_no_step and (end.reading is not None or not trains) for end in ends)


def make_failure(message: str) -> Outcome:
    """Builds the outcome for a failure that no rank of this host reported."""
    return Outcome(1, message, remote_message=message, time=boot_seconds())


def make_start_failure(attempt: Attempt, problem: str) -> Outcome:
    """Builds the outcome for a failure whose reason is at the end of the launcher's log."""
    return make_failure(f"{problem}:\n{_tail(attempt.launcher_log)}")


def make_early_stop(number: int, event: str) -> Outcome:
    """Builds the outcome for a signal that came before the first step: nothing is lost."""
    message = f"stopped by {signal.Signals(number).name} before {event}: it wrote no checkpoint"
    return Outcome(STOPPED, message, number)


def find_first_cause(attempt: Attempt, ends: Sequence[RankEnd]) -> Outcome | None:
    """Finds the failure that ends a run whose ranks still run; None if no rank failed by itself."""
    causes = [end for end in ends if end.failed and not end.waited_for_peer]
    return _judge_failures(attempt, ends, causes, None) if causes else None


def _judge_failures(
    attempt: Attempt, ends: Sequence[RankEnd], failed: Sequence[RankEnd], stopped: int | None
) -> Outcome:
    """Builds the outcome for ranks that failed: finds the first one, and writes the message.

    Args: failed: the failed ones among `ends`, at least one.
    """
    user_errors = [end for end in failed if end.exit_code == USER_ERROR and not end.waited_for_peer]
    first = min(
        user_errors or failed, key=lambda end: (end.is_consequence, end.waited_for_peer, end.time)
    )
    hang = read_hang(attempt.folder)
    is_in_hang = hang is not None and first.rank in hang.ranks
    if hang is not None and (hang.certain or is_in_hang or first.waited_for_peer):
        is_guess = not hang.certain
        message = hang.message
        return Outcome(1, message, stopped, message, False, hang.time, hang.step, is_guess=is_guess)
    if first.exit_code == USER_ERROR and first.message:
        message = f"error: {errors.with_code(first.message, first.failure.code)}"
        return _make_outcome(first, USER_ERROR, message, message, stopped)
    if first.exit_code == USER_ERROR:
        message, remote_message = (
            _last_output(attempt, first, on_terminal) for on_terminal in (True, False)
        )
        return _make_outcome(first, USER_ERROR, message, remote_message, stopped)
    if stopped is not None and all(end.is_consequence or end.exit_code == STOPPED for end in ends):
        if all(end.made_no_step or end.exit_code == STOPPED for end in ends):
            return make_early_stop(stopped, "the first step of this attempt")
        ranks = ", ".join(str(end.rank) for end in failed)
        name = signal.Signals(stopped).name
        message = f"stopped by {name}; rank {ranks} left no checkpoint"
        return _make_outcome(first, 1, message, message, stopped)
    message, remote_message = (
        _describe_failure(attempt, first, on_terminal) for on_terminal in (True, False)
    )
    return _make_outcome(first, 1, message, remote_message, stopped)


def _make_outcome(
    first: RankEnd, code: int, message: str, remote_message: str, stopped: int | None
) -> Outcome:
    return Outcome(
        code, message, stopped, remote_message, first.is_consequence, first.time, first.step
    )


def _describe_failure(attempt: Attempt, first: RankEnd, on_terminal: bool) -> str:
    """Writes the message about the rank that failed first.

    Args: on_terminal: the message is for this terminal, on which local rank 0 has already written.
    """
    output = _last_output(attempt, first, on_terminal)
    place = ("below" if output else "above") if on_terminal else "on the terminal there"
    log = f"its output is {place}" if first.local == 0 else f"log: {attempt.log(first.local)}"
    text = f"rank {first.rank} failed first: it {first.how} {first.where}; {log}"
    if first.is_consequence:
        text += "\nIt lost another rank, and no rank of this host says why."
    return f"{text}\n{output}".rstrip()


def _last_output(attempt: Attempt, end: RankEnd, on_terminal: bool) -> str:
    """Returns the message or the last output of a rank, unless it is on this terminal."""
    code = end.process_code
    # A killed rank may have died in the middle of its message.
    is_cut_off = code is not None and code < 0
    message = errors.with_code(end.message, end.failure.code).rstrip() if end.message else ""
    if end.local == 0 and end.printed and not (is_cut_off and message):
        return "" if on_terminal else message
    return message or _tail(attempt.log(end.local), attempt.offsets.get(end.local, 0))


def _tail(path: Path, offset: int = 0) -> str:
    """Reads a log's last lines after `offset`; from the first traceback on, if there is one."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").rstrip().splitlines()
    # The first traceback is the cause; later ones are often its consequences.
    tracebacks = [number for number, line in enumerate(lines) if line.startswith("Traceback (most")]
    start = min(tracebacks[0] if tracebacks else len(lines), max(0, len(lines) - _TAIL_LINES))
    return "\n".join(lines[tracebacks[0] if tracebacks else start :][-4 * _TAIL_LINES :])
