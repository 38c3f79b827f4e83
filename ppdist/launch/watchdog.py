"""Watchdog: ends a run that makes no progress, names who failed first.

What a rank does it says in its heartbeat (distributed/heartbeat.py); whether it is stopped or waits
for a disk says Linux.  A rank makes no progress when it is stopped, or has given no sign of life
for longer than a step may take and waits for nobody, or when all of them wait.  It is named, all
ranks of the host write the stacks of their threads, and are killed: a checkpoint needs all of them,
so none is lost.

When ranks fail first, here or on another host, because they waited in vain (gloo gives up after
30 s), who made no progress here by then is named as the cause.  What every rank left behind becomes
one exit code and one message.

SIGTERM and SIGUSR1 come from schedulers, SIGINT from Ctrl-C, SIGHUP from a terminal that goes away:
the first lets the ranks finish their step, a second does not.
"""

import contextlib
import json
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ppdist.common import errors, process
from ppdist.common.files import replace_file
from ppdist.common.process import STOPPED, USER_ERROR, boot_seconds
from ppdist.distributed import heartbeat
from ppdist.distributed.heartbeat import Reading
from ppdist.launch import worker

_LOOK_SECONDS = 0.5
# If fleetrun itself was stopped or got no processor, so did the ranks: no more than this of a gap
# between two looks counts.
_GAP_SECONDS = 5.0
_STEPS_KNOWN = 2
_TIMES_P99 = 10.0
# The first step after a start or an evaluation: GPUs choose their algorithms and compile there.
_TIMES_FIRST, _FIRST_SECONDS = 10.0, 60.0
_BLAMED_SECONDS = 10.0  # without a sign of life, when others failed because they waited
_STACKS_SECONDS = 2.0
_FOUND = "watch.json"

_TAIL_LINES = 40
_NO_WORD = errors.Failure("", "", "")
# Codes of a rank that waited for one that may make no progress (see `Watch`).
_WAITED_IN_VAIN = (errors.RANK_TIMEOUT, errors.STORE_UNREACHABLE)

_LOADING_SECONDS = 2.0  # Python, Paddle and a model take longer to be loaded
_SAME_REQUEST_SECONDS = 1.0  # systemd sends SIGTERM and SIGHUP, a closed terminal SIGHUP twice


@dataclass(frozen=True)
class Attempt:
    """Where the ranks of this host leave what they say, in one attempt of the job."""

    folder: Path  # private: exit-N.json (worker.py), rank-N.json (common/process.py), heartbeats
    log_dir: Path  # with workerlog.N
    # Local rank -> where this attempt begins in its workerlog, bytes.
    offsets: Mapping[int, int] = field(default_factory=dict)

    @property
    def launcher_log(self) -> Path:
        """What Paddle's launcher says, or workers that fleetrun starts."""
        return self.folder / "launcher.log"

    def log(self, local: int) -> Path:
        return self.log_dir / f"workerlog.{local}"


@dataclass(frozen=True)
class Stall:
    """Who made no progress, for `judge`."""

    message: str
    time: float  # since when, by `boot_seconds`
    ranks: list[int]  # however these end now, it is the consequence
    step: int | None  # the optimizer step, from 1, that they all had begun; None: none
    certain: bool  # False: whoever failed first may have had another reason


def found_stall(folder: Path) -> Stall | None:
    """What a Watch of this folder has found."""
    with contextlib.suppress(FileNotFoundError):
        return Stall(**json.loads((folder / _FOUND).read_text(encoding="utf-8")))
    return None


@dataclass
class Seen:
    """A rank as it was last seen; times are those of the watch's own clock."""

    rank: int
    reading: Reading
    born: int  # of the process, so that its number is not taken for that of a later one
    changed: float  # when it last gave a sign of life
    state: str = "R"  # of the process, as in /proc/PID/stat
    traced: bool = False  # by a debugger
    stopped_at: float | None = None

    @property
    def progress(self) -> tuple[int, int]:
        return self.reading.step, self.reading.collectives


class Watch:
    """Over the ranks of one run on this host."""

    def __init__(
        self,
        attempt: Attempt,
        several_hosts: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            several_hosts: ranks may wait for those of other hosts.
            clock: seconds; setting the time of the host does not move it.
        """
        self._folder, self._log_dir = attempt.folder, attempt.log_dir
        self._several_hosts, self._say = several_hosts, say
        self._clock = clock
        self._looked: float | None = None
        self._now = 0.0  # of our own clock, which stands while this process does
        self._ranks: dict[int, Seen] = {}
        self._step_seconds: deque[float] = deque(maxlen=1000)
        self._ended: set[int] = set()  # ranks whose end was looked into
        self._struck = False

    def look(self, others_wait: bool = False) -> None:
        """Called often; blocks only while stacks are written, once a rank makes no progress.

        Args: others_wait: the ranks of another host failed, and it does not know why.
        """
        clock = self._clock()
        gap = 0.0 if self._looked is None else clock - self._looked
        if self._looked is not None and gap < _LOOK_SECONDS and not others_wait:
            return
        self._looked = clock
        self._now += min(gap, _GAP_SECONDS)
        self._see()
        for log in self._collect_stacks("asked for by a signal"):
            self._say(f"stacks of a rank were asked for by a signal: {log}")
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        if self._struck or not ranks:
            return
        limits = {seen.rank: self.limit(seen) for seen in ranks}
        culprits, how = _stalled(ranks, limits, self._now, self._several_hosts)
        certain = True
        if not culprits and (self._somebody_failed() or others_wait):
            culprits, how = _suspects(ranks, self._usual_seconds(), self._now)
            certain = False
        if culprits:
            self._strike(culprits, how, certain)

    def limit(self, seen: Seen) -> float:
        """How long this rank may give no sign of life, s."""
        reading, usual = seen.reading, self._usual_seconds()
        timeout = max(reading.timeout, reading.limit)
        if math.isinf(reading.limit):
            return math.inf
        if reading.phase != "step":
            return timeout
        if usual is None or reading.steps_since == 0:
            first = max(_FIRST_SECONDS, _TIMES_FIRST * reading.limit)
            return min(timeout, max(first, _TIMES_P99 * (usual or 0.0)))
        return max(reading.limit, _TIMES_P99 * usual)

    def _usual_seconds(self) -> float | None:
        """The 99th percentile of the steps of this host, s; None before some were timed."""
        if len(self._step_seconds) < _STEPS_KNOWN:
            return None
        ordered = sorted(self._step_seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _readings(self) -> dict[int, Reading]:
        """Of all ranks that have begun, some perhaps before they could say anything.

        Those have the limits that the others have told, and none while nobody has.
        """
        found: dict[int, Reading] = {}
        for path in self._folder.glob("heartbeat-*"):
            reading = heartbeat.read(path)
            if reading is not None:
                found[int(path.name.partition("-")[2])] = reading
        timeout = min((each.timeout for each in found.values()), default=math.inf)
        limit = min((each.limit for each in found.values()), default=math.inf)
        for report in worker.reports(self._folder):
            if report.rank not in found and report.child:
                found[report.rank] = heartbeat.silent(report.child, timeout, limit)
        return found

    def _see(self) -> None:
        for rank, reading in self._readings().items():
            stat = process.process_stat(reading.pid)
            seen = self._ranks.get(rank)
            if stat is None or not stat.is_alive or (seen and seen.born != stat.began):
                self._ranks.pop(rank, None)  # it has ended; how is for others to say
                continue
            if seen is None:
                seen = self._ranks[rank] = Seen(rank, reading, stat.began, self._now)
            elif reading.seconds != seen.reading.seconds:  # a sign of life
                if reading.steps_measured > seen.reading.steps_measured:
                    self._step_seconds.append(reading.step_seconds)
                seen.changed = self._now
            seen.reading = reading
            seen.state, seen.traced = stat.state, _is_traced(reading.pid)
            if stat.state != "T":
                seen.stopped_at = None
            elif seen.stopped_at is None:
                seen.stopped_at = self._now

    def _somebody_failed(self) -> bool:
        """Whether a rank of this host has ended with a failure since the last time."""
        now = {each.rank: each.code for each in worker.reports(self._folder)}
        new = {rank for rank, code in now.items() if code is not None} - self._ended
        self._ended |= new
        return any(now[rank] not in (0, STOPPED) for rank in new)

    def _strike(self, culprits: Sequence[Seen], how: str, certain: bool) -> None:
        """Leaves word of who makes no progress and of where everybody is, and ends them.

        Args: certain: nothing has failed yet, so all are to be ended; else supervisor.py does it.
        """
        self._struck = True
        since = boot_seconds() - max(self._now - seen.changed for seen in culprits)
        # Now: one that is woken up to write its stacks may get into the next step.
        makings = [seen.reading.making for seen in self._ranks.values()]
        step = min((each for each in makings if each is not None), default=None)
        for seen in self._ranks.values():
            _send(seen, heartbeat.STACKS_SIGNAL)
        for seen in culprits:
            if seen.state == "T":
                _send(seen, signal.SIGCONT)  # the first that it does is to write its stacks
        files = self._awaited_stacks(how)
        where = f"; the stacks of all ranks of this host: {files}" if files else ""
        ranks = [seen.rank for seen in culprits]
        stall = Stall(f"{how}{where}", since, ranks, step, certain)
        replace_file(self._folder / _FOUND, json.dumps(asdict(stall)).encode())
        for seen in self._ranks.values() if certain else culprits:
            _send(seen, signal.SIGKILL)

    def _awaited_stacks(self, why: str) -> str:
        """Waits for the stacks of all ranks; returns in which files they are now."""
        deadline = time.monotonic() + _STACKS_SECONDS
        missing = set(self._ranks)
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            missing -= set(_grown(self._folder))
        time.sleep(0.2)  # the last may still be at it
        return ", ".join(self._collect_stacks(why))

    def _collect_stacks(self, why: str) -> list[str]:
        """Moves what ranks have written of their stacks to the logs; names of those files."""
        files: list[str] = []
        for rank, path in _grown(self._folder).items():
            text = path.read_text(encoding="utf-8", errors="replace")
            os.truncate(path, 0)  # it is open for appending
            log = self._log_dir / f"stacks.{rank}"
            with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
                file.write(f"--- {time.strftime('%F %T')}: rank {rank}: {why}\n{text}\n")
                files.append(str(log))
        return files


def _stalled(
    ranks: Sequence[Seen], limits: dict[int, float], now: float, several_hosts: bool
) -> tuple[Sequence[Seen], str]:
    """Who of the ranks of a host makes no progress, and how to say it; nobody and "" if none does.

    Args: limits: of each rank, s without a sign of life.
    """
    if any(seen.traced for seen in ranks):
        return [], ""  # somebody looks into one with a debugger
    stopped = [
        seen
        for seen in ranks
        if seen.stopped_at is not None and now - seen.stopped_at >= seen.reading.limit
    ]
    if stopped:
        return stopped, _told(stopped, ranks, now)
    if any(seen.stopped_at is not None for seen in ranks):
        return [], ""  # not yet for long enough
    over = [seen for seen in ranks if now - seen.changed > limits[seen.rank]]
    lowest = min(seen.progress for seen in ranks)
    alone = [seen for seen in over if not seen.reading.inside and seen.progress == lowest]
    if alone:
        return alone, _told(alone, ranks, now)
    still = min(now - seen.changed for seen in ranks)
    all_wait = all(seen.reading.inside for seen in ranks)
    apart = len({(seen.progress, seen.reading.place) for seen in ranks}) > 1
    # Ranks that wait in different places wait for ever, whatever the phase.
    if apart and (len(over) == len(ranks) or (all_wait and still > ranks[0].reading.limit)):
        return ranks, (
            f"the ranks of this host wait for one another in different places, since {still:.0f} "
            f"s: {'; '.join(f'{_named(seen)} {_where(seen)}' for seen in ranks)}; one of them left "
            f"out a collective or took another way"
        )
    # The host where a rank makes no progress knows more, and is first.
    timeout = 2 if several_hosts else 1
    if apart or any(now - seen.changed <= timeout * limits[seen.rank] for seen in ranks):
        return [], ""
    whom = "those of other hosts, or for the network" if several_hosts else "none that is missing"
    return ranks, f"all ranks of this host wait for {whom}, since {still:.0f} s: {_where(ranks[0])}"


def _suspects(ranks: Sequence[Seen], usual: float | None, now: float) -> tuple[Sequence[Seen], str]:
    """Who makes no progress, if others say that they waited in vain: sooner than by itself.

    Args: usual: what steps take here, s; None while nobody knows, and nobody is blamed for one.
    """
    stopped = [seen for seen in ranks if seen.state == "T"]
    alone = [
        seen
        for seen in ranks
        if usual is not None
        and seen.reading.phase == "step"
        and seen.reading.steps_since > 0
        and not seen.reading.inside
        and now - seen.changed > max(_BLAMED_SECONDS, usual)
    ]
    found = stopped or alone
    return found, _told(found, ranks, now) if found else ""


def _told(culprits: Sequence[Seen], ranks: Sequence[Seen], now: float) -> str:
    """`rank 5 (host a, pid 123) has made no progress for 61 s: stopped (SIGSTOP), in ...`"""
    texts = []
    for seen in culprits:
        since = now - seen.changed
        why = _where(seen)
        if seen.state == "T":
            why = f"stopped (SIGSTOP), {why}"
        elif seen.state == "D":
            why = f"waiting for a disk or a network file system, {why}"
        texts.append(f"{_named(seen)} has made no progress for {since:.0f} s: {why}")
    names = {seen.rank for seen in culprits}
    waiting = [str(seen.rank) for seen in ranks if seen.rank not in names and seen.reading.inside]
    if waiting:
        s, wait = ("s", "wait") if len(waiting) > 1 else ("", "waits")
        texts.append(f"rank{s} {', '.join(waiting)} {wait} for it")
    return "; ".join(texts)


def _named(seen: Seen) -> str:
    return f"rank {seen.rank} (host {socket.gethostname()}, pid {seen.reading.pid})"


def _where(seen: Seen) -> str:
    reading = seen.reading
    phase = {
        "start": "at the start",
        "step": f"in step {reading.step + 1}",
        "evaluate": f"in the evaluation after step {reading.step}",
        "save": f"at the checkpoint of step {reading.step}",
        "end": f"at the end, after step {reading.step}",
    }[reading.phase]
    if reading.inside:
        return f"in {reading.place}, its collective {reading.collectives}, {phase}"
    place = reading.place or "in its own work"
    return f"{place}, after {reading.collectives} collectives, {phase}"


def _grown(folder: Path) -> dict[int, Path]:
    """Files of stacks that hold something, by rank."""
    paths = sorted(folder.glob("stacks-*"))
    return {int(path.name.partition("-")[2]): path for path in paths if path.stat().st_size}


def _is_traced(pid: int) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        return "\nTracerPid:\t0\n" not in status
    return False


def _send(seen: Seen, number: int) -> None:
    stat = process.process_stat(seen.reading.pid)
    if stat is not None and stat.began == seen.born:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(seen.reading.pid, number)


@dataclass(frozen=True)
class RankEnd:
    """How one rank of this host ended."""

    rank: int
    local: int  # its number on this host; 0 has the terminal
    exit_code: int | None  # negative: killed by that signal; None: nobody saw its end
    failure: errors.Failure  # as process.run has left it; `_NO_WORD`: it has not
    time: float  # of the failure, by `boot_seconds`
    pid: int = 0  # of its watcher, worker.py
    reading: heartbeat.Reading | None = None  # its last sign of life
    process_code: int | None = None  # the exit code of the process; None: it is still at it
    began: bool = True  # the script, and not only its watcher
    seconds: float | None = None  # that the script ran; None: nobody knows

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
        """The optimizer step that it failed in, from 1; None: in none, or for no fault of it."""
        if self.reading is None or self.failure.kind == errors.StorageError.kind:
            return None
        return self.reading.making

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
            return not self.began or (self.seconds or math.inf) < _LOADING_SECONDS
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


def read_ends(folder: Path) -> list[RankEnd]:
    """Of all ranks of this host that have begun; the code of those that run is None."""
    ends = []
    for report in worker.reports(folder):
        end = RankEnd(
            rank=report.rank,
            local=report.local,
            exit_code=report.code,
            failure=_NO_WORD,
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
                    # The report comes when the rank fails, the exit when it has been torn down.
                    time=said["time"],
                )
        ends.append(end)
    return ends


@dataclass(frozen=True)
class Outcome:
    """How the run ended on this host."""

    code: int  # 0, 1, 2 or 75
    message: str  # for stderr; "" when everything is said
    stopped: int | None = None  # the signal that stopped it, if one did
    # For the other hosts of the run:
    told: str = field(default="", compare=False)  # `message` without what only this terminal has
    is_consequence: bool = field(default=False, compare=False)  # of what happened on another host
    time: float = field(default=0.0, compare=False)  # of the failure, by `boot_seconds`
    step: int | None = field(default=None, compare=False)  # that failed, from 1; None: no step did
    reached: int = field(default=0, compare=False)  # the last step that began here
    # Somebody made no progress when others had waited in vain, who may have had another reason.
    is_guess: bool = field(default=False, compare=False)

    @property
    def knows_cause(self) -> bool:
        return not (self.is_consequence or self.is_guess)

    @property
    def is_final(self) -> bool:
        """True when starting again would be wrong or in vain."""
        return self.code in (0, USER_ERROR, STOPPED) or self.stopped is not None


def judge(attempt: Attempt, launcher_code: int, stopped: int | None) -> Outcome:
    """How the run ended, from what all ranks of this host have left.

    Args:
        launcher_code: of Paddle's launcher, 0 without it; it counts only where no rank failed.
        stopped: the signal that fleetrun received, or None.
    """
    # Nobody is left: who has not left its exit code was killed.
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


def failed_now(said: str) -> Outcome:
    """A failure that no rank of this host has told."""
    return Outcome(1, said, told=said, time=boot_seconds())


def not_started(attempt: Attempt, what: str) -> Outcome:
    """The reason stands in the launcher's log."""
    return failed_now(f"{what}:\n{_tail(attempt.launcher_log)}")


def stopped_before(number: int, what: str) -> Outcome:
    """A signal came before a step was made: nothing is lost, and who starts again goes on."""
    return Outcome(STOPPED, f"stopped by {signal.Signals(number).name} before {what}", number)


def first_cause(attempt: Attempt, ends: Sequence[RankEnd]) -> Outcome | None:
    """The outcome as it looks while ranks still run; None until one has failed by itself."""
    causes = [end for end in ends if end.failed and not end.waited_in_vain]
    return _of_failed(attempt, ends, causes, None) if causes else None


def _of_failed(
    attempt: Attempt, ends: Sequence[RankEnd], failed: Sequence[RankEnd], stopped: int | None
) -> Outcome:
    """Args: failed: those of `ends` that did, at least one."""
    user_errors = [end for end in failed if end.exit_code == USER_ERROR and not end.waited_in_vain]
    first = min(
        user_errors or failed, key=lambda end: (end.is_consequence, end.waited_in_vain, end.time)
    )
    stall = found_stall(attempt.folder)
    named = stall is not None and first.rank in stall.ranks
    if stall is not None and (stall.certain or named or first.waited_in_vain):
        guess = not stall.certain
        said = stall.message
        return Outcome(1, said, stopped, said, False, stall.time, stall.step, is_guess=guess)
    if first.exit_code == USER_ERROR and first.message:
        said = f"error: {first.message}"
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
    """What the rank left to read, unless it is on the terminal already (where `here` is read)."""
    code = end.process_code
    cut = code is not None and code < 0  # killed, perhaps amid its last words
    if end.local == 0 and not (cut and end.message):
        return "" if here else end.message.rstrip()
    return end.message.rstrip() or _tail(attempt.log(end.local), attempt.offsets.get(end.local, 0))


def _tail(path: Path, offset: int = 0) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").rstrip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most")]
    start = min(begins[0] if begins else len(lines), max(0, len(lines) - _TAIL_LINES))
    return "\n".join(lines[begins[0] if begins else start :][-4 * _TAIL_LINES :])


def say(text: str, name: str = "fleetrun") -> None:
    """One line for the user; a terminal that is gone stops nothing."""
    process.say(f"{name}: {text}")


def say_end(outcome: Outcome) -> None:
    """The message of an outcome, if there is something to say."""
    if outcome.message:
        say(outcome.message, name="ppdist" if outcome.code == USER_ERROR else "fleetrun")


class Stopped(Exception):
    """A signal, here or before a restart on another host, ended the waiting for other hosts."""


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Yields the list to which requests to stop are added; nothing else happens.

    Signals within a second of a request are the same one.  SIGHUP that was ignored before
    (nohup) stays ignored.
    """
    received: list[int] = []
    last = -_SAME_REQUEST_SECONDS

    def note(number: int, frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME_REQUEST_SECONDS:
            received.append(number)
            last = now

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def at_once(received: Sequence[int]) -> bool:
    """True when a second request came."""
    return len(received) > 1


def code_of(received: Sequence[int]) -> int:
    """Exit code of what was ended at once: as a shell has it for Ctrl-C, else 1."""
    return 128 + signal.SIGINT if received[-1] == signal.SIGINT else 1
