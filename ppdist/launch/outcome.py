"""From what every rank left behind to one exit code and one message."""

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

USER_ERROR, STOPPED = 2, 75
_TAIL_LINES = 40
# What a rank says when another one is gone: the consequence, not the cause.
_LOST_PEER = re.compile(
    r"gloo/transport|pair\.cc|unbound_buffer\.cc|Connection reset by peer|Connection closed by peer"
    r"|Connection refused|byte_sent|ncclRemoteError|ncclSystemError"
    r"|rank \d+ \(host [^)]*\) failed:"
    r"|ended while rank \d+ waited for it"
)


@dataclass(frozen=True)
class RankEnd:
    """How one rank of this host ended."""

    rank: int
    local: int  # its number on this host; 0 has the terminal
    code: int | None  # negative: killed by that signal; None: nobody saw its end
    message: str  # what errors.run left, "" if nothing
    time: float  # of the failure, seconds since the epoch

    @property
    def is_consequence(self) -> bool:
        """True when it ended because another rank had."""
        killed = self.code in (None, -signal.SIGTERM, 128 + signal.SIGTERM)
        return bool(_LOST_PEER.search(self.message)) or (killed and not self.message)

    @property
    def how(self) -> str:
        if self.code is None:
            return "was killed"
        if self.code < 0:
            name = signal.Signals(-self.code).name
            hint = " (out of memory? see dmesg)" if self.code == -signal.SIGKILL else ""
            return f"was killed by {name}{hint}"
        return f"ended with exit code {self.code}"


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
    ends = _read_ends(folder)
    codes = {end.code for end in ends}
    if not ends and stopped is None:
        said = "Paddle's launcher failed before any rank began:\n" + _tail(launcher_log)
        return Outcome(1, said, told=said, time=time.time())
    if not ends:
        said = f"stopped by {signal.Signals(stopped or 0).name} before any rank began"
        return Outcome(1, said, told=said, is_consequence=True, time=time.time())
    if codes == {0}:
        late = f"Paddle's launcher failed:\n{_tail(launcher_log)}" if launcher_code == 1 else ""
        return Outcome(1 if late else 0, late, stopped, told=late, time=time.time())
    if codes <= {0, STOPPED}:
        return Outcome(STOPPED, "", stopped)
    failed = [end for end in ends if end.code not in (0, STOPPED)]
    user_errors = [end for end in failed if end.code == USER_ERROR and not end.is_consequence]
    first = min(user_errors or failed, key=lambda end: (end.is_consequence, end.time))
    if first.code == USER_ERROR and first.message:
        said = f"error: {first.message}"
        return _failure(first, USER_ERROR, said, said, stopped)
    if first.code == USER_ERROR:
        said, told = (_said(first, log_dir, offsets, here) for here in (True, False))
        return _failure(first, USER_ERROR, said, told, stopped)
    if stopped is not None and all(end.is_consequence or end.code == STOPPED for end in ends):
        ranks = ", ".join(str(end.rank) for end in failed)
        name = signal.Signals(stopped).name
        said = f"stopped by {name}; rank {ranks} left no checkpoint"
        return _failure(first, 1, said, said, stopped)
    said, told = (_describe(first, log_dir, offsets, here) for here in (True, False))
    return _failure(first, 1, said, told, stopped)


def _failure(first: RankEnd, code: int, message: str, told: str, stopped: int | None) -> Outcome:
    return Outcome(code, message, stopped, told, first.is_consequence, first.time)


def _describe(first: RankEnd, log_dir: Path, offsets: Mapping[int, int], here: bool) -> str:
    place = "above" if here else "on the terminal there"
    log = f"its output is {place}" if first.local == 0 else f"log: {_log(first, log_dir)}"
    text = f"rank {first.rank} failed first: it {first.how}; {log}"
    if first.is_consequence:
        text += "\nIt lost another rank, and no rank of this host says why."
    return f"{text}\n{_said(first, log_dir, offsets, here)}".rstrip()


def _said(end: RankEnd, log_dir: Path, offsets: Mapping[int, int], here: bool) -> str:
    """What the rank left to read, unless it is on the terminal already (where `here` is read)."""
    if end.local == 0:
        return "" if here else end.message.rstrip()
    return end.message.rstrip() or _tail(_log(end, log_dir), offsets.get(end.local, 0))


def _log(end: RankEnd, log_dir: Path) -> Path:
    return log_dir / f"workerlog.{end.local}"


def _read_ends(folder: Path) -> Sequence[RankEnd]:
    ends = []
    for path in sorted(folder.glob("exit-*.json")):
        seen = json.loads(path.read_text(encoding="utf-8"))
        code, message, when = seen["code"], "", seen["time"]
        report = folder / f"rank-{seen['rank']}.json"
        if report.is_file():
            said = json.loads(report.read_text(encoding="utf-8"))
            if said["code"] != 0:  # a rank may still crash after it has reported 0
                # The report comes when the rank fails, the exit only when it has been torn down.
                code, message, when = said["code"], said["message"], report.stat().st_mtime
        ends.append(RankEnd(seen["rank"], seen["local"], code, message, when))
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
