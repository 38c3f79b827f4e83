"""Watchdog: ends a run that makes no progress.

A rank writes what it does into its heartbeat (distributed/heartbeat.py); Linux shows whether it is
stopped or waits for a disk.  A rank makes no progress when it is stopped, or has given no sign of
life for longer than a step may take and waits for nobody, or when all ranks wait.  The message
names it, and all ranks of the host write the stacks of their threads and are killed.  No checkpoint
is lost, because saving one needs all ranks.

When ranks fail first, here or on another host, because they waited in vain (gloo gives up after
30 s), the rank that made no progress here by then is named as the cause.
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
from ppdist.launch.outcome import WATCH_FILE, Attempt, Hang, describe_phase

_LOOK_SECONDS = 0.5
# If fleetrun itself was stopped or got no CPU time, so were the ranks: at most this much of a gap
# between two checks counts.
_GAP_SECONDS = 5.0
_STEPS_KNOWN = 2
_TIMES_P99 = 10.0
# The first step after a start or an evaluation: GPUs choose their algorithms and compile there.
_TIMES_FIRST, _FIRST_SECONDS = 10.0, 60.0
_BLAMED_SECONDS = 10.0  # without a sign of life, when others failed because they waited
_STACKS_SECONDS = 2.0


@dataclass
class RankStatus:
    """The status of a rank at the last check, with times of the watch's own clock."""

    rank: int
    reading: Reading
    born: int  # start time of the process: its pid may be reused by a later one
    changed: float  # when it last gave a sign of life
    state: str = "R"  # state of the process, as in /proc/PID/stat
    traced: bool = False  # a debugger is attached
    stopped_at: float | None = None

    @property
    def progress(self) -> tuple[int, int]:
        return self.reading.step, self.reading.collectives


class Watch:
    """A watch over the ranks of one run on this host."""

    def __init__(
        self,
        attempt: Attempt,
        several_hosts: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the watch; `look` performs the checks.

        Args:
            several_hosts: ranks may wait for ranks of other hosts.
            clock: returns seconds; must not jump when the host's time is set.
        """
        self._folder, self._log_dir = attempt.folder, attempt.log_dir
        self._several_hosts, self._say = several_hosts, say
        self._clock = clock
        self._looked: float | None = None
        self._now = 0.0  # time of the watch's own clock, which stops while this process is stopped
        self._ranks: dict[int, RankStatus] = {}
        self._step_seconds: deque[float] = deque(maxlen=1000)
        self._ended: set[int] = set()  # ranks whose exit code was examined
        self._ended_hung = False

    def look(self, others_wait: bool = False) -> None:
        """Checks all ranks; blocks only while ranks write their stacks.

        Args: others_wait: ranks of another host failed because they waited in vain.
        """
        clock = self._clock()
        gap = 0.0 if self._looked is None else clock - self._looked
        if self._looked is not None and gap < _LOOK_SECONDS and not others_wait:
            return
        self._looked = clock
        # If fleetrun itself was stopped, so were the ranks: a long gap must not count as a hang.
        self._now += min(gap, _GAP_SECONDS)
        self._update_ranks()
        for log in self._collect_stacks("asked for by a signal"):
            self._say(f"a signal asked for the stacks of a rank: {log}")
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        if self._ended_hung or not ranks:
            return
        limits = {status.rank: self.limit(status) for status in ranks}
        culprits, description = _find_hung(ranks, limits, self._now, self._several_hosts)
        certain = True
        codes = {report.rank: report.code for report in worker.read_reports(self._folder)}
        ended = {rank for rank, code in codes.items() if code is not None} - self._ended
        self._ended |= ended
        failed = any(codes[rank] not in (0, STOPPED) for rank in ended)
        if not culprits and (failed or others_wait):
            culprits, description = _find_suspects(ranks, self._usual_seconds(), self._now)
            certain = False
        if culprits:
            self._end_hung(culprits, description, certain)

    def limit(self, status: RankStatus) -> float:
        """Returns how long this rank may go without a sign of life, in seconds."""
        reading, usual = status.reading, self._usual_seconds()
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
        """Returns the 99th percentile of step times; None if there are too few steps."""
        if len(self._step_seconds) < _STEPS_KNOWN:
            return None
        ordered = sorted(self._step_seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _read_heartbeats(self) -> dict[int, Reading]:
        """Reads the heartbeats of all ranks that have begun.

        A rank without a heartbeat so far gets the limits that the other ranks reported.
        """
        readings: dict[int, Reading] = {}
        for path in self._folder.glob("heartbeat-*"):
            reading = heartbeat.read(path)
            if reading is not None:
                readings[int(path.name.partition("-")[2])] = reading
        timeout = min((reading.timeout for reading in readings.values()), default=math.inf)
        limit = min((reading.limit for reading in readings.values()), default=math.inf)
        for report in worker.read_reports(self._folder):
            if report.rank not in readings and report.child:
                readings[report.rank] = heartbeat.make_silent_reading(report.child, timeout, limit)
        return readings

    def _update_ranks(self) -> None:
        """Updates the status of all ranks from their heartbeats and from /proc."""
        for rank, reading in self._read_heartbeats().items():
            stat = process_stat(reading.pid)
            seen = self._ranks.get(rank)
            if stat is None or not stat.is_alive or (seen and seen.born != stat.began):
                # The rank has ended; outcome.py determines how.
                self._ranks.pop(rank, None)
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

    def _end_hung(self, culprits: Sequence[RankStatus], description: str, certain: bool) -> None:
        """Records the hang, and kills the ranks.

        Args: certain: nothing has failed yet, so all ranks are killed here; otherwise supervisor.py
            ends the ranks that still make progress.
        """
        self._ended_hung = True
        since = boot_seconds() - max(self._now - status.changed for status in culprits)
        # Read before the signals: a rank woken up to write its stacks may begin the next step.
        steps = [status.reading.step_in_progress for status in self._ranks.values()]
        step = min((begun for begun in steps if begun is not None), default=None)
        for status in self._ranks.values():
            _send_signal(status, heartbeat.STACKS_SIGNAL)
        for status in culprits:
            # A stopped rank that continues handles the pending signal first: it writes its stacks.
            if status.state == "T":
                _send_signal(status, signal.SIGCONT)
        files = self._await_stacks(description)
        where = f"; the stacks of all ranks of this host: {files}" if files else ""
        ranks = [status.rank for status in culprits]
        hang = Hang(f"{description}{where}", since, ranks, step, certain)
        replace_file(self._folder / WATCH_FILE, json.dumps(asdict(hang)).encode())
        for status in self._ranks.values() if certain else culprits:
            _send_signal(status, signal.SIGKILL)

    def _await_stacks(self, reason: str) -> str:
        """Waits for the stacks of all ranks; returns their files."""
        deadline = time.monotonic() + _STACKS_SECONDS
        missing = set(self._ranks)
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            missing -= set(_find_stacks(self._folder))
        # The file is written line by line, so the last rank may still be writing.
        time.sleep(0.2)
        return ", ".join(self._collect_stacks(reason))

    def _collect_stacks(self, reason: str) -> list[str]:
        """Moves the stacks that ranks have written to the log folder; returns those files."""
        files: list[str] = []
        for rank, path in _find_stacks(self._folder).items():
            text = path.read_text(encoding="utf-8", errors="replace")
            # The rank keeps the file open for appending, so it cannot be deleted.
            os.truncate(path, 0)
            log = self._log_dir / f"stacks.{rank}"
            with contextlib.suppress(OSError), open_own(log, "a", encoding="utf-8") as file:
                file.write(f"--- {time.strftime('%F %T')}: rank {rank}: {reason}\n{text}\n")
                files.append(str(log))
        return files


def _find_hung(
    ranks: Sequence[RankStatus], limits: dict[int, float], now: float, several_hosts: bool
) -> tuple[Sequence[RankStatus], str]:
    """Finds the ranks that make no progress, and writes the message about them.

    Args: limits: allowed seconds without a sign of life, by rank.
    """
    if any(status.traced for status in ranks):
        # A developer is inspecting a rank with a debugger.
        return [], ""
    stopped = [
        status
        for status in ranks
        if status.stopped_at is not None and now - status.stopped_at >= status.reading.limit
    ]
    if stopped:
        return stopped, _describe_hang(stopped, ranks, now)
    if any(status.stopped_at is not None for status in ranks):
        # A rank is stopped, but not yet for long enough to count; meanwhile the others wait for it.
        return [], ""
    overdue = [status for status in ranks if now - status.changed > limits[status.rank]]
    lowest = min(status.progress for status in ranks)
    # Only the ranks furthest behind are to blame: the others wait for them.
    stragglers = [
        status for status in overdue if not status.reading.inside and status.progress == lowest
    ]
    if stragglers:
        return stragglers, _describe_hang(stragglers, ranks, now)
    still_seconds = min(now - status.changed for status in ranks)
    all_wait = all(status.reading.inside for status in ranks)
    are_apart = len({(status.progress, status.reading.place) for status in ranks}) > 1
    # Ranks that wait in different places wait for ever, whatever the phase.
    if are_apart and (
        len(overdue) == len(ranks) or (all_wait and still_seconds > ranks[0].reading.limit)
    ):
        places = "; ".join(f"{_name_rank(status)} {_describe_place(status)}" for status in ranks)
        return ranks, (
            f"the ranks of this host wait in different collectives, for {still_seconds:.0f} s: "
            f"{places}; one of them left out a collective or took another way"
        )
    # The host where a rank makes no progress knows more, and should report first.
    timeout = 2 if several_hosts else 1
    if are_apart or any(now - status.changed <= timeout * limits[status.rank] for status in ranks):
        return [], ""
    whom = "those of other hosts, or for the network" if several_hosts else "none that is missing"
    place = _describe_place(ranks[0])
    return ranks, f"all ranks of this host wait for {whom}, since {still_seconds:.0f} s: {place}"


def _find_suspects(
    ranks: Sequence[RankStatus], usual: float | None, now: float
) -> tuple[Sequence[RankStatus], str]:
    """Finds ranks without progress, once other ranks have failed because they waited in vain.

    Args: usual: usual seconds per step here; None if unknown: then only stopped ranks count.
    """
    stopped = [status for status in ranks if status.state == "T"]
    stragglers = [
        status
        for status in ranks
        if usual is not None
        and status.reading.phase == "step"
        and status.reading.steps_since > 0
        and not status.reading.inside
        and now - status.changed > max(_BLAMED_SECONDS, usual)
    ]
    suspects = stopped or stragglers
    return suspects, _describe_hang(suspects, ranks, now) if suspects else ""


def _describe_hang(culprits: Sequence[RankStatus], ranks: Sequence[RankStatus], now: float) -> str:
    """Writes the message: `rank 5 has made no progress for 61 s: stopped (SIGSTOP), ...`."""
    texts = []
    for status in culprits:
        since = now - status.changed
        activity = _describe_place(status)
        if status.state == "T":
            activity = f"stopped (SIGSTOP), {activity}"
        elif status.state == "D":
            activity = f"waiting for a disk or a network file system, {activity}"
        texts.append(f"{_name_rank(status)} has made no progress for {since:.0f} s: {activity}")
    names = {status.rank for status in culprits}
    waiting = [
        str(status.rank) for status in ranks if status.rank not in names and status.reading.inside
    ]
    if waiting:
        plural, verb = ("s", "wait") if len(waiting) > 1 else ("", "waits")
        texts.append(f"rank{plural} {', '.join(waiting)} {verb} for it")
    return "; ".join(texts)


def _name_rank(status: RankStatus) -> str:
    return f"rank {status.rank} (host {socket.gethostname()}, pid {status.reading.pid})"


def _describe_place(status: RankStatus) -> str:
    reading, phase = status.reading, describe_phase(status.reading)
    if reading.inside:
        return f"in {reading.place}, its collective {reading.collectives}, {phase}"
    place = reading.place or "in its own work"
    return f"{place}, after {reading.collectives} collectives, {phase}"


def _find_stacks(folder: Path) -> dict[int, Path]:
    """Lists the stack files that are not empty, by rank."""
    paths = sorted(folder.glob("stacks-*"))
    return {int(path.name.partition("-")[2]): path for path in paths if path.stat().st_size}


def _is_traced(pid: int) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        return "\nTracerPid:\t0\n" not in status
    return False


def _send_signal(status: RankStatus, number: int) -> None:
    """Sends a signal to a rank, unless its pid now belongs to another process."""
    stat = process_stat(status.reading.pid)
    if stat is not None and stat.began == status.born:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(status.reading.pid, number)
