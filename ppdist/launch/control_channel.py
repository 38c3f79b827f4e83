"""Control channel between the hosts of a run.

Each host has one connection to the first, the hub.  Over it, every host reports that it is alive,
when it is stopped and how its ranks ended.  If ranks fail on one host, the other hosts stop their
ranks at once; in the end all exit with the same code and name the same culprit.
"""

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ppdist.common.process import STOPPED, USER_ERROR, boot_seconds
from ppdist.common.signals import INTERRUPTED
from ppdist.launch.connection import (
    Connection,
    Message,
    Poller,
    read_integer,
    read_text,
    send_to_all,
)
from ppdist.launch.network import list_hosts
from ppdist.launch.outcome import Outcome
from ppdist.launch.signals import is_notice, must_kill

_POLL_SECONDS = 0.1
_BEAT_SECONDS = 5.0
_SILENCE_SECONDS = 60.0  # after which a host counts as lost; gloo's own limit, 30 s, comes first
_NOTE_SECONDS = 10.0
_CLOSE_SECONDS = 3.0
_NO_CAUSE = (
    "Root cause unknown, every host lost a peer: a rank made no progress, or the network between "
    "the hosts broke (firewall, interface, cable); see the logs of all hosts, and ppdist doctor "
    "--ips"
)
_SENT_AWAY = "No step was made since this host came: it ends alone, and the others go on."
_MESSAGE_LIMIT = 12_000  # characters sent to other hosts


@dataclass(frozen=True)
class HostEnd:
    """A report of how one host's ranks ended, exchanged between hosts."""

    host: str
    code: int
    message: str  # as the other hosts read it
    is_consequence: bool  # the failure is a consequence of one on another host
    time: float  # when it failed, according to time.monotonic() on the first host
    step: int | None = None  # the step that failed, from 1
    stopped: bool = False  # a signal asked the run to stop
    is_guess: bool = False  # only a probable cause; a host that knows the cause takes precedence
    leaves: bool = False  # this host alone stops; in a verdict: the host that receives it does
    goes_on: bool = False  # in a verdict: other hosts form the next world
    made_step: bool = True

    @classmethod
    def read(cls, message: Message, host: str) -> "HostEnd":
        """Reads a report that another host has sent."""
        code = read_integer(message, "code", 0, 255)
        age = read_integer(message, "age_ms", 0, 3_600_000) or 0
        return cls(
            host=host,
            code=1 if code is None else code,
            message=read_text(message, "message"),
            is_consequence=bool(message.get("consequence")),
            time=time.monotonic() - age / 1000,
            step=read_integer(message, "step", 1, 10**12),
            stopped=bool(message.get("stopped")),
            is_guess=bool(message.get("guess")),
            leaves=bool(message.get("leaves")),
            goes_on=bool(message.get("goes_on")),
            made_step=bool(message.get("made_step", 1)),
        )

    def as_message(self, kind: str, age: float = 0.0) -> Message:
        """Builds the message to send.

        Args: age: seconds since the ranks ended; sent instead of a time because clocks differ.
        """
        return {
            "type": kind,
            "host": self.host,
            "code": self.code,
            "message": self.message,
            "consequence": int(self.is_consequence),
            "age_ms": int(min(age, 3600.0) * 1000),
            "step": self.step,
            "stopped": int(self.stopped),
            "guess": int(self.is_guess),
            "leaves": int(self.leaves),
            "goes_on": int(self.goes_on),
            "made_step": int(self.made_step),
        }

    @property
    def failed(self) -> bool:
        return self.code not in (0, STOPPED)

    @property
    def knows_cause(self) -> bool:
        return not (self.is_consequence or self.is_guess)


def verdict(reports: Sequence[HostEnd]) -> HostEnd:
    """Chooses the report of the root cause, which decides the outcome on all hosts.

    A second Ctrl-C takes precedence, then wrong input, as among the ranks of one host
    (watchdog.py).
    """
    failed = [report for report in reports if report.failed]
    interrupted = [report for report in failed if report.code == INTERRUPTED and report.stopped]
    # A user's second Ctrl-C: every other failure is a consequence of it.
    if interrupted:
        decisive = interrupted[0]
    elif failed:
        wrong = [
            report for report in failed if report.code == USER_ERROR and not report.is_consequence
        ]
        decisive = min(
            wrong or failed,
            key=lambda report: (report.is_consequence, report.is_guess, report.time),
        )
    else:
        decisive = max(reports, key=lambda report: report.code == STOPPED)
    # Every host must learn of the stop, or some would restart a run that others have left.
    stopped = any(report.stopped for report in reports)
    return replace(decisive, stopped=stopped, leaves=False)


class Hub(Protocol):
    """The interface of the hub to a control channel: hosts wait there to join (rendezvous.py)."""

    def watch(self) -> None: ...
    def waiting(self) -> list[str]: ...
    def newcomers(self) -> list[str]: ...
    def end_world(
        self, lost: Collection[str], left: Collection[str], turned_away: Collection[str] = ()
    ) -> None: ...


class ControlChannel:
    """A world's connections: from the first host to all others, from each other host to the first.

    Attributes:
        hosts: addresses of all hosts, each as the host itself reports it.
        stopped_by: SIGTERM if another host was stopped by a signal, else None.
        hosts_change: True if the world ends because a host leaves or joins; the job goes on.
        cause_known: True if a host reported why its ranks failed, not only that they lost others.
    """

    def __init__(
        self,
        local_host: str,
        hosts: Sequence[str],
        peers: Mapping[str, Connection],
        say: Callable[[str], None],
        silence: float = _SILENCE_SECONDS,
        *,
        attempt: int = 0,
        changes: int = 0,
        skip: tuple[int, ...] = (),
        nonce: str = "",
        is_elastic: bool = False,
        hub: Hub | None = None,
    ) -> None:
        """Takes over the connections of the rendezvous.

        Args:
            local_host: address of this host, one of `hosts`.
            peers: connections by address.
            silence: seconds after which a silent host counts as lost.
            attempt, changes, skip: number of previous worlds, how many of them ended because hosts
                left or joined, and the skipped steps, as agreed in the handshake.
            nonce: random text from the first host, used in the name of the job.
            is_elastic: the run goes on without hosts that are lost.
            hub: hub of the job, on the first host.
        """
        self.attempt, self.changes, self.skip, self.nonce = attempt, changes, skip, nonce
        self._is_elastic, self._hub = is_elastic, hub
        self._left: list[str] = []  # hosts that reported that they leave for good
        self._turned_away: list[str] = []  # hosts that joined last, with no step completed since
        self._saved: int | None = None  # the last saved step when a host first asked to join
        self._makes_room = False  # the world ends so that other hosts can join
        self._lost: set[str] = set()
        self._local_host, self.hosts, self._peers = local_host, tuple(hosts), dict(peers)
        self._is_first = local_host == hosts[0]
        self._say, self._silence = say, silence
        self.stopped_by: int | None = None
        self.cause_known = self.hosts_change = False
        self._stopping = self._must_stop = self._signal_sent = False
        self._reports: dict[str, HostEnd] = {}  # on the first host: reports of all hosts that ended
        self._verdict: HostEnd | None = None
        self._beat = self._checked = 0.0
        self._poller = Poller()
        for host, peer in self._peers.items():
            peer.heard = time.monotonic()
            self._poller.add(peer, partial(self._receive, host))

    def watch(self, received: Sequence[int]) -> bool:
        """Sends and receives without blocking; True once this host must stop.

        Args:
            received: the signals that stopped this fleetrun.
        """
        if received and not self._signal_sent:
            self._signal_sent = True
            name = signal.Signals(received[0]).name
            self._tell(
                _make_stop_message(
                    self._local_host, f"got {name}", True, leaves=self._is_leaving(received)
                )
            )
        if self._hub is not None:
            self._hub.watch()
        self._poller.run(0.0)
        now = time.monotonic()
        if now - self._checked >= _POLL_SECONDS:
            self._checked = now
            self._check_peers(now)
        if now - self._beat > _BEAT_SECONDS:
            self._beat = now
            self._tell({"type": "beat"})
        return self._must_stop

    def _receive(self, host: str) -> None:
        for message in self._peers[host].receive():
            self._handle_message(host, message)

    def _check_peers(self, now: float) -> None:
        """Sends what is queued, and notices the hosts that are silent or closed."""
        for host, peer in self._peers.items():
            peer.flush()
            if peer.closed is not None:
                self._mark_lost(
                    host, "connection lost: its fleetrun was killed, or the host was switched off"
                )
            elif now - peer.heard > self._silence:
                self._mark_lost(
                    host,
                    f"no heartbeat for {self._silence:.0f} s: it is switched off or suspended, "
                    "or the network between the hosts is down or loses long packets (MTU: "
                    f"`ping -M do -s 1472 {host}` must pass both ways)",
                )

    def take_in(self, saved_step: Callable[[], int]) -> None:
        """Ends the world after a checkpoint if hosts ask to join.

        Args: saved_step: returns the step of the newest checkpoint.
        """
        waiting = self._hub.waiting() if self._hub is not None and self._is_elastic else []
        if not waiting or self._stopping:
            self._saved = None
        elif self._saved is None:
            self._saved = saved_step()
            self._say(f"host {', '.join(waiting)} is back; taken in at the next checkpoint")
        elif saved_step() > self._saved:
            reason = f"takes in host {', '.join(waiting)}"
            self._say(f"{reason}: stopping all ranks after their step")
            self._makes_room = self.hosts_change = True
            self._stop_ranks(
                _make_stop_message(self._local_host, reason, by_signal=True), self._local_host
            )
            self._must_stop = True

    def tell_failure(self, failure: Outcome) -> None:
        """Stops the other hosts before all ranks of this one have ended."""
        if not self._stopping:
            reason = failure.remote_message.partition("\n")[0]
            stop = _make_stop_message(self._local_host, reason, cause_known=failure.knows_cause)
            self._stop_ranks(stop, self._local_host)
            if not self._is_first:
                self._tell(stop)

    def finish(self, outcome: Outcome, received: Sequence[int]) -> Outcome:
        """Reports how this host ended, waits for all hosts, and returns the common outcome.

        Args:
            received: the signals that stopped this fleetrun; a new one stops the other hosts, a
                second one ends the wait.
        """
        self._report(outcome, received)
        begin, is_noted = time.monotonic(), False
        while self._verdict is None:
            self.watch(received)
            if must_kill(received):
                # No other host would report this to the others.
                if self._is_first:
                    local_report = replace(self._reports[self._local_host], stopped=True)
                    self._tell(local_report.as_message("verdict"))
                self.close()
                return outcome
            # Lost hosts have reports as well, see `_mark_lost`.
            if self._is_first and len(self._reports) == len(self.hosts):
                self._verdict = self._decide()
                break
            if not is_noted and time.monotonic() - begin > _NOTE_SECONDS:
                is_noted = True
                self._say("the ranks of this host have ended; waiting for other hosts")
            self._poller.run(_POLL_SECONDS)
        decisive = self._verdict
        if self._is_first:
            self._tell_verdict(decisive)
            decisive = self._verdict_for(self._local_host, decisive)
        self.close()
        common_outcome = _adapt_outcome(self._local_host, outcome, decisive)
        if decisive.goes_on and not received:
            return replace(common_outcome, goes_on=True)
        if decisive.leaves and decisive.failed:
            message = f"{common_outcome.message}\n{_SENT_AWAY}".lstrip()
            return replace(common_outcome, message=message, is_sent_away=True)
        if decisive.stopped and common_outcome.stopped is None:
            common_outcome = replace(common_outcome, stopped=signal.SIGTERM)
        is_stopped = decisive.stopped or bool(received)
        if is_stopped or not (decisive.failed and decisive.is_consequence):
            return common_outcome
        return replace(common_outcome, message=f"{common_outcome.message}\n{_NO_CAUSE}")

    def _decide(self) -> HostEnd:
        """Chooses the verdict, and decides whether the run goes on with other hosts."""
        reports = list(self._reports.values())
        decisive = verdict(reports)
        self._left = [report.host for report in reports if report.leaves]
        if not self._is_elastic or decisive.code == 0:
            return decisive
        if any(report.stopped and not report.leaves for report in reports):
            # A user has stopped the whole run.
            return decisive
        newcomers = self._hub.newcomers() if self._hub is not None else []
        self._turned_away = _hosts_to_blame(decisive, newcomers)
        if self._turned_away:
            hosts = ", ".join(self._turned_away)
            self._say(f"goes on without host {hosts}, which came last: no step was made with it")
            return replace(decisive, stopped=False, goes_on=True)
        hosts_changed = self._makes_room or self._left or decisive.host in self._lost
        if not hosts_changed or decisive.code == USER_ERROR:
            return decisive
        if decisive.host in self._lost:
            decisive = replace(decisive, host=list_hosts(sorted(self._lost)))
        return replace(decisive, stopped=False, goes_on=True)

    def _tell_verdict(self, decisive: HostEnd) -> None:
        for host, peer in self._peers.items():
            if peer.closed is None:
                peer.send(self._verdict_for(host, decisive).as_message("verdict"))

    def _verdict_for(self, host: str, decisive: HostEnd) -> HostEnd:
        """Adapts the verdict to a host: a host that is turned away leaves, and the others go on."""
        if host in self._turned_away:
            return replace(decisive, goes_on=False, leaves=True)
        # The code is 1, because a host that goes on and finds no hub has no error of its own.
        return replace(decisive, code=1) if self._turned_away else decisive

    def _report(self, outcome: Outcome, received: Sequence[int]) -> None:
        """Sends how this host ended to the first host, or records it there."""
        stopped = bool(received)
        # Clocks of hosts differ, so the report carries the age of the failure instead of its time.
        age = max(0.0, boot_seconds() - outcome.time) if outcome.time else 0.0
        message = outcome.remote_message or outcome.message
        if len(message) > _MESSAGE_LIMIT:
            message = f"{message[:2000]}\n...\n{message[2000 - _MESSAGE_LIMIT :]}"
        report = HostEnd(
            host=self._local_host,
            code=outcome.code,
            message=message,
            is_consequence=outcome.is_consequence,
            time=time.monotonic(),
            step=outcome.step,
            stopped=stopped,
            is_guess=outcome.is_guess,
            leaves=self._is_leaving(received),
            made_step=outcome.made_step,
        )
        if self._is_first:
            self._record_end(replace(report, time=report.time - age))
        else:
            self._tell(report.as_message("ended", age))

    def _is_leaving(self, received: Sequence[int]) -> bool:
        """Returns True if only this host stops."""
        return self._is_elastic and not self._is_first and is_notice(received)

    def _handle_message(self, host: str, message: Message) -> None:
        if message["type"] == "stop":
            reason = read_text(message, "why", 300)
            by_signal, cause_known, leaves = (
                bool(message.get(key)) for key in ("signal", "known", "leaves")
            )
            self._stop_ranks(
                _make_stop_message(
                    read_text(message, "host", 300), reason, by_signal, cause_known, leaves
                ),
                host,
            )
        elif message["type"] == "ended" and self._is_first and host not in self._reports:
            self._record_end(HostEnd.read(message, host))
        elif message["type"] == "verdict" and not self._is_first:
            self._verdict = HostEnd.read(message, read_text(message, "host", 300))

    def _record_end(self, report: HostEnd) -> None:
        """Records, on the first host, the end of one host."""
        self._reports[report.host] = report
        if report.failed:
            reason = report.message.partition("\n")[0] or f"ended with exit code {report.code}"
            self._stop_ranks(
                _make_stop_message(report.host, reason, cause_known=report.knows_cause), report.host
            )

    def _mark_lost(self, host: str, reason: str) -> None:
        """Marks a host as lost: the first host records that as its end, others as the verdict."""
        if host in self._reports or self._verdict is not None:
            return  # the host has reported its end
        lost_end = HostEnd(
            host, 1, reason, False, self._peers[host].heard, goes_on=self._is_elastic
        )
        self._lost.add(host)
        self._peers[host].close()
        if self._is_first:
            self._record_end(lost_end)
            return
        self._verdict = lost_end
        self._stop_ranks(_make_stop_message(host, reason, cause_known=True), host)

    def _stop_ranks(self, stop: Message, sender: str) -> None:
        """Stops the ranks of all hosts, once; the first host forwards the request."""
        if self._stopping:
            return
        is_remote = stop["host"] != self._local_host
        self._stopping, self._must_stop, self.cause_known = True, is_remote, bool(stop["known"])
        if stop["signal"]:
            self.stopped_by = signal.SIGTERM
        if stop["leaves"]:
            self.hosts_change = True
        if is_remote:
            self._say(f"host {stop['host']}: {stop['why']}; stopping the ranks here too")
        if self._is_first:
            self._tell(stop, but=sender)

    def _tell(self, message: Message, but: str = "") -> None:
        peers = [peer for host, peer in self._peers.items() if host != but and peer.closed is None]
        send_to_all(peers, message)

    def close(self) -> None:
        """Closes all connections; the first host does so last, so that its messages arrive."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        for peer in self._peers.values():
            self._poller.add(peer, peer.receive)
        while self._is_first and time.monotonic() < deadline:
            if all(peer.closed for peer in self._peers.values()):
                break
            for peer in self._peers.values():
                peer.flush()
            self._poller.run(_POLL_SECONDS)
        for peer in self._peers.values():
            peer.close()
        self._poller.close()
        if self._hub is not None:
            self._hub.end_world(self._lost, self._left, self._turned_away)


def _hosts_to_blame(decisive: HostEnd, newcomers: Sequence[str]) -> list[str]:
    """Lists the hosts that joined last and with which no step was completed.

    The others have trained without them, so they go on without them again.

    Args:
        decisive: the report that decides for all hosts.
        newcomers: hosts that had not trained in this job before; the hub may be one.
    """
    if decisive.made_step or decisive.code in (0, STOPPED):
        return []
    # If the data differ, for example, any of the hosts may be the first to report this.
    if decisive.code == USER_ERROR:
        return list(newcomers)
    return [host for host in newcomers if host == decisive.host and decisive.knows_cause]


def _adapt_outcome(local_host: str, outcome: Outcome, decisive: HostEnd) -> Outcome:
    """Adapts this host's outcome to the verdict: the common code and the culprit's message."""
    if decisive.host == local_host or not decisive.failed:
        return replace(outcome, code=decisive.code)
    outcome = replace(outcome, step=decisive.step)
    is_same_error = decisive.code == USER_ERROR == outcome.code and not outcome.is_consequence
    # Usually the same wrong input, which this host describes with its own paths.
    if is_same_error:
        return outcome
    return replace(
        outcome, code=decisive.code, message=f"host {decisive.host}: {decisive.message}".rstrip()
    )


def _make_stop_message(
    origin: str,
    reason: str,
    by_signal: bool = False,
    cause_known: bool = False,
    leaves: bool = False,
) -> Message:
    """Builds the message that stops the ranks of all hosts.

    Args:
        cause_known: whether `reason` is the cause, not its consequence on another host.
        leaves: only this host leaves, and the others go on.
    """
    flags = {"signal": int(by_signal), "known": int(cause_known), "leaves": int(leaves)}
    return {"type": "stop", "host": origin, "why": reason, **flags}
