"""From what every rank left behind to one exit code and one message."""

import json
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ppdist import errors, pulse
from ppdist.launch import worker
from ppdist.launch.watch import found_stall

USER_ERROR, STOPPED = 2, 75
_TAIL_LINES = 40
# Codes of a rank that waited for one that may stand still (watch.py).
_WAITED_IN_VAIN = (errors.RANK_TIMEOUT, errors.STORE_UNREACHABLE)


@dataclass(frozen=True)
class RankEnd:
    """How one rank of this host ended."""

    rank: int
    local: int  # its number on this host; 0 has the terminal
    exit_code: int | None  # negative: killed by that signal; None: nobody saw its end
    failure: errors.Failure  # what errors.run left, with an empty message if nothing
    time: float  # of the failure, seconds since the epoch
    pid: int = 0  # of its watcher, worker.py
    reading: pulse.Reading | None = None  # its last sign of life
    process_code: int | None = None  # the exit code of the process; None: it is still at it
    began: bool = True  # the script, and not only its watcher

    @property
    def message(self) -> str:
        return self.failure.message

    @property
    def failed(self) -> bool:
        """True unless it ended as it should; one that ends well amid training leaves the others."""
        early = self.reading is not None and self.reading.phase in ("step", "save")
        return self.exit_code not in (0, STOPPED) or (self.exit_code == 0 and early)

    @property
    def is_consequence(self) -> bool:
        """True when it ended because another rank had."""
        killed = self.exit_code in (None, -signal.SIGTERM, 128 + signal.SIGTERM)
        lost = self.failure.code == errors.LOST_RANK or self.failure.from_rank is not None
        return lost or (killed and not self.message)

    @property
    def waited_in_vain(self) -> bool:
        """True when it ended because another rank had, or did not come."""
        return self.is_consequence or self.failure.code in _WAITED_IN_VAIN

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
        """The optimizer step that it was making, from 1; None outside of steps."""
        return None if self.reading is None else self.reading.making

    @property
    def reached(self) -> int:
        """The number, from 1, of the last step that it began."""
        if self.reading is None:
            return 0
        return self.reading.step + (self.reading.phase == "step")

    @property
    def made_no_step(self) -> bool:
        """True when this attempt of it is known not to have got beyond its start."""
        if self.reading is None:
            return not self.began
        if self.reading.phase == "start":
            return True
        none = self.reading.steps_since == self.reading.steps_measured == 0
        return self.reading.phase == "step" and none

    @property
    def where(self) -> str:
        """What it was doing and on which host."""
        host = f"(host {socket.gethostname()})"
        if self.reading is None:
            return host
        done = self.reading.step
        places = {
            "start": "before its first step",
            "step": f"in step {done + 1}",
            "evaluate": f"in the evaluation after step {done}",
            "save": f"at the checkpoint after step {done}",
            "end": f"after its last step, {done}",
        }
        return f"{places[self.reading.phase]} {host}"


@dataclass(frozen=True)
class Outcome:
    """How the run ended on this host."""

    code: int  # 0, 1, 2 or 75
    message: str  # for stderr; "" when everything is said
    stopped: int | None = None  # the signal that stopped it, if one did
    # For the other hosts of the run:
    told: str = field(default="", compare=False)  # `message` without what only this terminal has
    is_consequence: bool = field(default=False, compare=False)  # of what happened on another host
    time: float = field(default=0.0, compare=False)  # of the failure, seconds since the epoch
    step: int | None = field(default=None, compare=False)  # that failed, from 1; None: no step did
    reached: int = field(default=0, compare=False)  # the last step that began here
    # Somebody stood still when others had waited in vain, who may have had another reason.
    is_guess: bool = field(default=False, compare=False)

    @property
    def is_final(self) -> bool:
        """True when starting again would be wrong or in vain."""
        return self.code in (0, USER_ERROR, STOPPED) or self.stopped is not None


def say(text: str, name: str = "fleetrun") -> None:
    """One line for the user; a terminal that is gone stops nothing."""
    errors.say(f"{name}: {text}")


def say_end(outcome: Outcome) -> None:
    """The message of an outcome, if there is something to say."""
    if outcome.message:
        say(outcome.message, name="ppdist" if outcome.code == USER_ERROR else "fleetrun")


def judge(
    folder: Path,
    log_dir: Path,
    offsets: Mapping[int, int],
    launcher_code: int,
    stopped: int | None,
    launcher_log: Path,
) -> Outcome:
    """Reads the reports of all ranks of this host.

    Args:
        folder: of the run, with exit-N.json (worker.py) and rank-N.json (errors.run).
        offsets: local rank -> where this run begins in its workerlog, bytes.
        launcher_code: of Paddle's launcher; it counts only where no rank started.
        stopped: the signal that fleetrun received, or None.
    """
    # Nobody is left: who has not left its exit code was killed.
    ends = [
        replace(end, process_code=-signal.SIGKILL) if end.process_code is None else end
        for end in read_ends(folder)
    ]
    codes = {end.exit_code for end in ends}
    if not ends and stopped is None:
        said = "Paddle's launcher failed before any rank began:\n" + _tail(launcher_log)
        return Outcome(1, said, told=said, time=time.time())
    if not ends and stopped is not None:
        return stopped_before(stopped, "any rank began")
    failed = [end for end in ends if end.failed]
    if not failed and codes == {0}:
        late = f"Paddle's launcher failed:\n{_tail(launcher_log)}" if launcher_code == 1 else ""
        return Outcome(1 if late else 0, late, stopped, told=late, time=time.time())
    if not failed:
        return Outcome(STOPPED, "", stopped)
    outcome = _of_failed(folder, ends, failed, log_dir, offsets, stopped)
    return replace(outcome, reached=max(end.reached for end in ends))


def stopped_before(number: int, what: str) -> Outcome:
    """A signal came before a step was made: nothing is lost, and who starts again goes on."""
    return Outcome(STOPPED, f"stopped by {signal.Signals(number).name} before {what}", number)


def first_cause(
    folder: Path, ends: Sequence[RankEnd], log_dir: Path, offsets: Mapping[int, int]
) -> Outcome | None:
    """The outcome as it looks while ranks still run; None until one has failed by itself."""
    causes = [end for end in ends if end.failed and not end.waited_in_vain]
    return _of_failed(folder, ends, causes, log_dir, offsets, None) if causes else None


def _of_failed(
    folder: Path,
    ends: Sequence[RankEnd],
    failed: Sequence[RankEnd],
    log_dir: Path,
    offsets: Mapping[int, int],
    stopped: int | None,
) -> Outcome:
    """Args: failed: those of `ends` that did, at least one."""
    user_errors = [end for end in failed if end.exit_code == USER_ERROR and not end.waited_in_vain]
    first = min(
        user_errors or failed,
        key=lambda end: (end.is_consequence, end.waited_in_vain, end.time),
    )
    stall = found_stall(folder)
    named = stall is not None and first.rank in stall.ranks
    if stall is not None and (stall.certain or named or first.waited_in_vain):
        guess = not stall.certain
        said = stall.message
        return Outcome(1, said, stopped, said, False, stall.time, stall.step, is_guess=guess)
    if first.exit_code == USER_ERROR and first.message:
        said = f"error: {first.message}"
        return _failure(first, USER_ERROR, said, said, stopped)
    if first.exit_code == USER_ERROR:
        said, told = (_said(first, log_dir, offsets, here) for here in (True, False))
        return _failure(first, USER_ERROR, said, told, stopped)
    if stopped is not None and all(end.is_consequence or end.exit_code == STOPPED for end in ends):
        if all(end.made_no_step or end.exit_code == STOPPED for end in ends):
            return stopped_before(stopped, "the first step of this attempt")
        ranks = ", ".join(str(end.rank) for end in failed)
        name = signal.Signals(stopped).name
        said = f"stopped by {name}; rank {ranks} left no checkpoint"
        return _failure(first, 1, said, said, stopped)
    said, told = (_describe(first, log_dir, offsets, here) for here in (True, False))
    return _failure(first, 1, said, told, stopped)


def _failure(first: RankEnd, code: int, message: str, told: str, stopped: int | None) -> Outcome:
    return Outcome(code, message, stopped, told, first.is_consequence, first.time, first.step)


def _describe(first: RankEnd, log_dir: Path, offsets: Mapping[int, int], here: bool) -> str:
    said = _said(first, log_dir, offsets, here)
    place = ("below" if said else "above") if here else "on the terminal there"
    log = f"its output is {place}" if first.local == 0 else f"log: {_log(first, log_dir)}"
    text = f"rank {first.rank} failed first: it {first.how} {first.where}; {log}"
    if first.is_consequence:
        text += "\nIt lost another rank, and no rank of this host says why."
    return f"{text}\n{said}".rstrip()


def _said(end: RankEnd, log_dir: Path, offsets: Mapping[int, int], here: bool) -> str:
    """What the rank left to read, unless it is on the terminal already (where `here` is read)."""
    code = end.process_code
    cut = code is not None and code < 0  # killed, perhaps amid its last words
    if end.local == 0 and not (cut and end.message):
        return "" if here else end.message.rstrip()
    return end.message.rstrip() or _tail(_log(end, log_dir), offsets.get(end.local, 0))


def _log(end: RankEnd, log_dir: Path) -> Path:
    return log_dir / f"workerlog.{end.local}"


def read_ends(folder: Path) -> Sequence[RankEnd]:
    """Of all ranks of this host that have begun; the code of those that run is None."""
    ends = []
    for seen in worker.reports(folder):
        code, failure, when = seen["code"], errors.Failure("", "", ""), seen["time"]
        report = folder / f"rank-{seen['rank']}.json"
        if report.is_file():
            said = json.loads(report.read_text(encoding="utf-8"))
            if said["exit_code"] != 0:  # a rank may still crash after it has reported 0
                # The report comes when the rank fails, the exit only when it has been torn down.
                code, when = said["exit_code"], report.stat().st_mtime
                failure = errors.Failure(
                    said["kind"], said["code"], said["message"], said["from_rank"]
                )
        reading = pulse.read(pulse.file_of(folder, seen["rank"]))
        own, began = seen["code"], seen["code"] is not None or seen["child"] != 0
        rank, local, pid = seen["rank"], seen["local"], seen["pid"]
        ends.append(RankEnd(rank, local, code, failure, when, pid, reading, own, began))
    return ends


def _tail(path: Path, offset: int = 0) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").rstrip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most")]
    start = min(begins[0] if begins else len(lines), max(0, len(lines) - _TAIL_LINES))
    return "\n".join(lines[begins[0] if begins else start :][-4 * _TAIL_LINES :])
