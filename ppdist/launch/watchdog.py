"""Watchdog: ends a run that makes no progress.

What a rank does it says in its heartbeat (distributed/heartbeat.py); whether it is stopped or waits
for a disk says Linux.  A rank makes no progress when it is stopped, or has given no sign of life
for longer than a step may take and waits for nobody, or when all of them wait.  It is named, all
ranks of the host write the stacks of their threads, and are killed: a checkpoint needs all of them,
so none is lost.

When ranks fail first, here or on another host, because they waited in vain (gloo gives up after
30 s), who made no progress here by then is named as the cause.
"""

import contextlib
import json
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ppdist.common.files import open_own, replace_file
from ppdist.common.machine import process_stat
from ppdist.common.process import STOPPED, boot_seconds
from ppdist.distributed import heartbeat
from ppdist.distributed.heartbeat import Reading
from ppdist.launch import worker
from ppdist.launch.outcome import WATCH_FILE, Attempt, Hang, phase_of

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


@dataclass
class RankStatus:
    """A rank as it was last seen, by the watch's own clock."""

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
        self._ranks: dict[int, RankStatus] = {}
        self._step_seconds: deque[float] = deque(maxlen=1000)
        self._ended: set[int] = set()  # ranks whose end was looked into
        self._ended_hung = False

    def look(self, others_wait: bool = False) -> None:
        """Looks at all ranks; blocks only while stacks are written.

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
            self._say(f"a signal asked for the stacks of a rank: {log}")
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        if self._ended_hung or not ranks:
            return
        limits = {seen.rank: self.limit(seen) for seen in ranks}
        culprits, how = _hung(ranks, limits, self._now, self._several_hosts)
        certain = True
        codes = {each.rank: each.code for each in worker.reports(self._folder)}
        ended = {rank for rank, code in codes.items() if code is not None} - self._ended
        self._ended |= ended
        failed = any(codes[rank] not in (0, STOPPED) for rank in ended)
        if not culprits and (failed or others_wait):
            culprits, how = _suspects(ranks, self._usual_seconds(), self._now)
            certain = False
        if culprits:
            self._end_hung(culprits, how, certain)

    def limit(self, seen: RankStatus) -> float:
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
        """99th percentile of step times; None: too few steps."""
        if len(self._step_seconds) < _STEPS_KNOWN:
            return None
        ordered = sorted(self._step_seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _readings(self) -> dict[int, Reading]:
        """Heartbeats of all ranks that have begun.

        Those have the limits that the other ranks reported, or none so far.
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
            stat = process_stat(reading.pid)
            seen = self._ranks.get(rank)
            if stat is None or not stat.is_alive or (seen and seen.born != stat.began):
                self._ranks.pop(rank, None)  # it has ended; how is for others to say
                continue
            if seen is None:
                seen = self._ranks[rank] = RankStatus(rank, reading, stat.began, self._now)
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

    def _end_hung(self, culprits: Sequence[RankStatus], how: str, certain: bool) -> None:
        """Records who makes no progress, and kills the ranks.

        Args: certain: nothing has failed yet, so all are to be ended; else supervisor.py does it.
        """
        self._ended_hung = True
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
        hang = Hang(f"{how}{where}", since, ranks, step, certain)
        replace_file(self._folder / WATCH_FILE, json.dumps(asdict(hang)).encode())
        for seen in self._ranks.values() if certain else culprits:
            _send(seen, signal.SIGKILL)

    def _awaited_stacks(self, why: str) -> str:
        """Waits for the stacks of all ranks; returns their files."""
        deadline = time.monotonic() + _STACKS_SECONDS
        missing = set(self._ranks)
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            missing -= set(_grown(self._folder))
        time.sleep(0.2)  # the last may still be at it
        return ", ".join(self._collect_stacks(why))

    def _collect_stacks(self, why: str) -> list[str]:
        """Moves stacks that ranks wrote to the logs; returns those files."""
        files: list[str] = []
        for rank, path in _grown(self._folder).items():
            text = path.read_text(encoding="utf-8", errors="replace")
            os.truncate(path, 0)  # it is open for appending
            log = self._log_dir / f"stacks.{rank}"
            with contextlib.suppress(OSError), open_own(log, "a", encoding="utf-8") as file:
                file.write(f"--- {time.strftime('%F %T')}: rank {rank}: {why}\n{text}\n")
                files.append(str(log))
        return files


def _hung(
    ranks: Sequence[RankStatus], limits: dict[int, float], now: float, several_hosts: bool
) -> tuple[Sequence[RankStatus], str]:
    """Ranks that make no progress, and how to say it.

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
            f"the ranks of this host wait in different collectives, for {still:.0f} "
            f"s: {'; '.join(f'{_named(seen)} {_where(seen)}' for seen in ranks)}; one of them left "
            f"out a collective or took another way"
        )
    # The host where a rank makes no progress knows more, and is first.
    timeout = 2 if several_hosts else 1
    if apart or any(now - seen.changed <= timeout * limits[seen.rank] for seen in ranks):
        return [], ""
    whom = "those of other hosts, or for the network" if several_hosts else "none that is missing"
    return ranks, f"all ranks of this host wait for {whom}, since {still:.0f} s: {_where(ranks[0])}"


def _suspects(
    ranks: Sequence[RankStatus], usual: float | None, now: float
) -> tuple[Sequence[RankStatus], str]:
    """Ranks without progress, once others say they waited in vain.

    Args: usual: what steps take here, s; None while unknown; then no rank is blamed for one.
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


def _told(culprits: Sequence[RankStatus], ranks: Sequence[RankStatus], now: float) -> str:
    """`rank 5 has made no progress for 61 s: stopped (SIGSTOP), ...`"""
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


def _named(seen: RankStatus) -> str:
    return f"rank {seen.rank} (host {socket.gethostname()}, pid {seen.reading.pid})"


def _where(seen: RankStatus) -> str:
    reading, phase = seen.reading, phase_of(seen.reading)
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


def _send(seen: RankStatus, number: int) -> None:
    stat = process_stat(seen.reading.pid)
    if stat is not None and stat.began == seen.born:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(seen.reading.pid, number)
