"""What keeps the hosts of a run together while it runs: one connection from each to the first.

Every host says that it is there, when it is stopped and how its ranks ended.  When they failed on
one, the others stop theirs at once; in the end all exit with one code and name one culprit.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppdist.launch.connection import Connection, Message, integer_of, text_of
from ppdist.launch.outcome import STOPPED, USER_ERROR, Outcome
from ppdist.launch.signals import at_once

BEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0  # after which a host counts as lost; gloo's own limit, 30 s, comes before
_NOTE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_CALLERS = 32  # answered at one look
_CLOSE_SECONDS = 3.0
_NO_CAUSE = (
    "No host knows a cause, each lost another one: a rank stood still, or the network between the "
    "hosts broke (firewall, interface, cable); see the logs of all hosts, and tools/doctor.py --ips"
)
_MESSAGE_LIMIT = 12_000  # characters that other hosts get to read


@dataclass(frozen=True)
class Report:
    """How the ranks of one host ended."""

    host: str
    code: int
    message: str  # as the other hosts read it
    is_consequence: bool  # of what happened on another host
    time: float  # of the failure, by time.monotonic() of the first host
    step: int | None = None  # that failed, from 1
    stopped: bool = False  # a signal asked the run to stop
    is_guess: bool = False  # the cause of one host that others do not contradict

    @property
    def failed(self) -> bool:
        return self.code not in (0, STOPPED)


def verdict(reports: Sequence[Report]) -> Report:
    """The report of the host that decides for all: of the cause, if any failed.

    Wrong input goes before everything else, as among the ranks of one host (outcome.py).
    """
    failed = [report for report in reports if report.failed]
    if failed:
        wrong = [each for each in failed if each.code == USER_ERROR and not each.is_consequence]
        decisive = min(
            wrong or failed, key=lambda each: (each.is_consequence, each.is_guess, each.time)
        )
    else:
        decisive = max(reports, key=lambda report: report.code == STOPPED)
    # All have to know, or some would restart a run that others have left.
    return replace(decisive, stopped=any(report.stopped for report in reports))


class Line:
    """The connections of one host to the others; on the first host one to each, else one to it.

    Attributes:
        stopped_by: SIGTERM when another host was stopped by a signal, else None.
        cause_known: a host has said why its ranks failed, and not only that they lost others.
        attempt: how often the run was restarted, by what its hosts agreed on when they met.
        skip: steps whose images this attempt leaves out, likewise.
        drawn: by the first host at random, for the name of the job.
        restarts: whether the run restarts after a failure, so that who calls may wait for that.
    """

    attempt = 0
    skip: tuple[int, ...] = ()
    drawn = ""
    restarts = False

    def __init__(
        self,
        own: str,
        hosts: Sequence[str],
        peers: Mapping[str, Connection],
        listener: socket.socket | None,
        say: Callable[[str], None],
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._own, self._hosts, self._peers = own, tuple(hosts), dict(peers)
        self._is_first = own == hosts[0]
        self._listener, self._say, self._silence = listener, say, silence
        self.stopped_by: int | None = None
        self.cause_known = False
        self._stopping = self._must_stop = self._told_signal = False
        self._reports: dict[str, Report] = {}  # on the first host: of all that have ended
        self._verdict: Report | None = None
        self._beat = 0.0
        for peer in self._peers.values():
            peer.heard = time.monotonic()

    def watch(self, received: Sequence[int]) -> bool:
        """Keeps the line alive, never blocks; True once other hosts want this one's ranks stopped.

        Args:
            received: the signals that stopped this fleetrun.
        """
        if received and not self._told_signal:
            self._told_signal = True
            name = signal.Signals(received[0]).name
            self._tell(_stop_message(self._own, f"got {name}", True, False))
        for host, peer in self._peers.items():
            for message in peer.receive():
                self._hear(host, message)
            silent = time.monotonic() - peer.heard
            if peer.closed is not None:
                self._lose(
                    host, "its fleetrun is gone: it was killed, or the host was switched off"
                )
            elif silent > self._silence:
                self._lose(
                    host,
                    f"no word from it for {self._silence:.0f} s: it is switched off or suspended, "
                    f"or the network between the hosts is down",
                )
        if time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            self._tell({"type": "beat"})
        self._refuse_callers()
        return self._must_stop

    def tell_failure(self, failure: Outcome) -> None:
        """Other hosts are to stop now, before all ranks of this one have ended."""
        if not self._stopping:
            why = failure.told.partition("\n")[0]
            known = not (failure.is_consequence or failure.is_guess)
            self._stop(self._own, why, False, known, self._own)
            if not self._is_first:
                self._tell(_stop_message(self._own, why, False, known))

    def finish(self, outcome: Outcome, received: Sequence[int]) -> Outcome:
        """Says how this host ended, waits for all others, and returns how the run ended.

        Args:
            received: the signals that stopped this fleetrun; one that comes now stops the others,
                a second one ends the waiting.
        """
        self._report(outcome, bool(received))
        begin, noted = time.monotonic(), False
        while self._verdict is None:
            self.watch(received)
            if at_once(received):
                self._close()
                return outcome
            if self._is_first and len(self._reports) == len(self._hosts):
                self._verdict = verdict(list(self._reports.values()))
                break
            if not noted and time.monotonic() - begin > _NOTE_SECONDS:
                noted = True
                self._say("the ranks of this host have ended; waiting for the other hosts")
            open_ones = [peer for peer in self._peers.values() if peer.closed is None]
            select.select(open_ones, [], [], _POLL_SECONDS)
        if self._is_first:
            self._tell(_as_message("verdict", self._verdict, 0.0))
        self._close()
        ended = _as_seen_by(self._own, outcome, self._verdict)
        if self._verdict.stopped and ended.stopped is None:
            ended = replace(ended, stopped=signal.SIGTERM)
        stopped = self._verdict.stopped or bool(received)
        if stopped or not (self._verdict.failed and self._verdict.is_consequence):
            return ended
        return replace(ended, message=f"{ended.message}\n{_NO_CAUSE}")

    def _report(self, outcome: Outcome, stopped: bool) -> None:
        age = max(0.0, time.time() - outcome.time) if outcome.time else 0.0
        told = outcome.told or outcome.message
        mine = Report(
            host=self._own,
            code=outcome.code,
            message=_shortened(told),
            is_consequence=outcome.is_consequence,
            time=time.monotonic(),
            step=outcome.step,
            stopped=stopped,
            is_guess=outcome.is_guess,
        )
        if self._is_first:
            self._end(replace(mine, time=mine.time - age))
        else:
            self._tell(_as_message("ended", mine, age))

    def _hear(self, host: str, message: Message) -> None:
        if message["type"] == "stop":
            origin = text_of(message, "host", 300)
            why, known = text_of(message, "why", 300), bool(message.get("known"))
            self._stop(origin, why, bool(message.get("signal")), known, host)
        elif message["type"] == "ended" and self._is_first and host not in self._reports:
            self._end(_from_message(message, host))
        elif message["type"] == "verdict" and not self._is_first:
            self._verdict = _from_message(message, text_of(message, "host", 300))

    def _end(self, report: Report) -> None:
        """The first host has learned how one host ended."""
        self._reports[report.host] = report
        if report.failed:
            why = report.message.partition("\n")[0] or f"ended with exit code {report.code}"
            known = not (report.is_consequence or report.is_guess)
            self._stop(report.host, why, False, known, report.host)

    def _lose(self, host: str, why: str) -> None:
        if host in self._reports or self._verdict is not None:
            return  # it has said all
        lost = Report(host, 1, why, False, self._peers[host].heard)
        self._peers[host].close()
        if self._is_first:
            self._end(lost)
            return
        self._verdict = lost
        self._stop(host, why, False, True, host)

    def _stop(self, origin: str, why: str, by_signal: bool, known: bool, sender: str) -> None:
        """The ranks of all hosts are to stop; said once, and passed on by the first host.

        Args: known: this is the cause, not what it has led to on another host.
        """
        if self._stopping:
            return
        self._stopping, self._must_stop, self.cause_known = True, origin != self._own, known
        if by_signal:
            self.stopped_by = signal.SIGTERM
        if origin != self._own:
            self._say(f"host {origin}: {why}; stopping the ranks here too")
        if self._is_first:
            self._tell(_stop_message(origin, why, by_signal, known), but=sender)

    def _tell(self, message: Message, but: str = "") -> None:
        for host, peer in self._peers.items():
            if host != but and peer.closed is None:
                peer.send(message)

    def _refuse_callers(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):  # BlockingIOError: nobody calls
            for _ in range(_CALLERS):
                caller = Connection(self._listener.accept()[0])
                text = f"a run is in progress there (process {os.getpid()} on host {self._own})"
                caller.send({"type": "busy" if self.restarts else "refused", "text": text})
                caller.close()

    def _close(self) -> None:
        """The first host leaves last, so that its words arrive before the end of the line."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._is_first and time.monotonic() < deadline:
            for peer in self._peers.values():
                peer.receive()
            open_ones = [peer for peer in self._peers.values() if peer.closed is None]
            if not open_ones:
                break
            select.select(open_ones, [], [], _POLL_SECONDS)
        for peer in self._peers.values():
            peer.close()
        if self._listener is not None:
            self._listener.close()


def _as_seen_by(own: str, outcome: Outcome, decisive: Report) -> Outcome:
    """The outcome of the run on one host: everyone's code, and the culprit's message."""
    if decisive.host == own or not decisive.failed:
        return replace(outcome, code=decisive.code)
    outcome = replace(outcome, step=decisive.step)
    same = decisive.code == USER_ERROR == outcome.code and not outcome.is_consequence
    if same:  # most often the same wrong input, in this host's own words
        return outcome
    return replace(
        outcome, code=decisive.code, message=f"host {decisive.host}: {decisive.message}".rstrip()
    )


def _stop_message(origin: str, why: str, by_signal: bool, known: bool) -> Message:
    signals, knows = int(by_signal), int(known)
    return {"type": "stop", "host": origin, "why": why, "signal": signals, "known": knows}


def _as_message(kind: str, report: Report, age: float) -> Message:
    """A report as it is sent; clocks differ between hosts, so it says how long ago it was."""
    return {
        "type": kind,
        "host": report.host,
        "code": report.code,
        "message": report.message,
        "consequence": int(report.is_consequence),
        "age_ms": int(min(age, 3600.0) * 1000),
        "step": report.step,
        "stopped": int(report.stopped),
        "guess": int(report.is_guess),
    }


def _from_message(message: Message, host: str) -> Report:
    code = integer_of(message, "code", 0, 255)
    age = integer_of(message, "age_ms", 0, 3_600_000) or 0
    return Report(
        host=host,
        code=1 if code is None else code,
        message=text_of(message, "message"),
        is_consequence=bool(message.get("consequence")),
        time=time.monotonic() - age / 1000,
        step=integer_of(message, "step", 1, 10**12),
        stopped=bool(message.get("stopped")),
        is_guess=bool(message.get("guess")),
    )


def _shortened(text: str) -> str:
    if len(text) <= _MESSAGE_LIMIT:
        return text
    return text[:2000] + "\n...\n" + text[2000 - _MESSAGE_LIMIT :]
