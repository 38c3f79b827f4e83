"""Rendezvous of a run's hosts: they find each other and compare.

    hub          the first host of --ips, always: it listens, compares and decides who trains
    caller       every other host, which calls the hub

Hosts that train together are a world.  The first world needs all hosts of --ips.  Where a world
ends because a host was lost, left or came back, the hosts that are present form the next one; with
--min_hosts, fewer hosts may do so.  As there is one hub, two worlds never train at once.

Without this step ranks could wait for ever or train different things; instead every host prints one
message.  Before the first steps every host listens and calls another host (the hub calls the second
one): where --ips begins with different hosts, the host that is called reports it.

Each host sends its own address: names in --ips may resolve late, or to another address elsewhere.
The hub sends everybody's address to all.

An optional token from the user tells the hosts of a job from strangers (connection.py).  Without a
token there is no protection against strangers (docs/security.md).
"""

import contextlib
import errno
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ppdist.common import child
from ppdist.common.errors import Failure, LaunchError
from ppdist.common.files import read_json
from ppdist.common.limits import allow_files
from ppdist.launch.connection import (
    OTHER_PROGRAM,
    OTHER_TOKEN,
    Connection,
    Message,
    Poller,
    open_listener,
    read_integer,
    read_text,
    send_to_all,
    wait_for_any,
)
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.handshake import Handshake, differences, read_handshake, read_steps, read_words
from ppdist.launch.network import list_hosts, make_port_error
from ppdist.launch.options import MOST_RESTARTS
from ppdist.launch.signals import Stopped, is_notice

_POLL_SECONDS = 0.1
_REPORT_SECONDS = 10.0  # between two lines that say who is missing
_LOOK_UP_SECONDS = 5.0  # between two lookups of a name's address
_CALL_SECONDS = 1.0  # between two calls of the hub
_BEAT_SECONDS = 5.0  # between two signs of life of a host that waits
_HANDSHAKE_SECONDS = 10.0  # for the first message of the other end, after the call is taken
_TIMEOUT_SECONDS = 60.0
_RETURN_SECONDS = 10.0  # in which hosts of the last world call again
_CALLERS = 64  # connections from unknown addresses without a handshake
_OTHER_FILES = 64  # files that fleetrun holds open, apart from connections
_MOST_REFUSED = 20  # most lines about refused callers
_COMINGS = 3  # times that a host may join and leave without a step before it is held off
_HOLD_SECONDS, _LONGEST_HOLD = 30.0, 3600.0  # first wait, doubled each time; longest wait
_NOT_CALLED = "not called yet: is fleetrun started there, with the same --ips in the same order?"
_TAKEN = (
    "another fleetrun is this host already; where it was started twice, or --host is wrong on one "
    "of the two, end this one"
)
_LATER = "the others train; this host is taken in at their next checkpoint"


def rendezvous(
    local: Handshake,
    port: int,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int] = (),
    token: str = "",
    resolve: Callable[[str], str | None] = lambda name: None,
    hub: "Hub | None" = None,
    compare: Sequence[str] = (),
) -> ControlChannel:
    """Waits for the hosts of the next world and connects them.

    Before a restart the hosts meet again.  A host that was lost and is started again joins them,
    and adopts the number of restarts and the steps to skip from the others.

    Args:
        port: port of the hub.
        seconds: the timeout.
        say: prints a line for the user.
        received: signals so far; any of them ends the wait.
        token: token of the job; hosts that do not know it are refused.
        resolve: returns the current address of a name in --ips, or None.
        hub: hub of the job, on its first host.
        compare: the command that writes this host's digests into the file named by its last
            argument; it runs if the hub asks for them, because the job has trained without this
            fleetrun; (): there is none.
    Raises: LaunchError: a host does not come in time, or was started with another command.
        Stopped: a signal.
    """
    if hub is not None:
        return hub.gather(local, seconds, received)
    caller = _Caller(local, port, say, token, resolve, compare)
    try:
        return caller.wait(seconds, received)
    except BaseException:
        caller.leave()
        raise
    finally:
        caller.end_answering()


@dataclass
class _Guest:
    """A host that has called the hub and was started with the same command.

    Attributes:
        host: its address, as it says itself.
        attempt: how many worlds of the run it has seen end.
        proven: it holds the code and data that the others train with, as far as these are compared.
    """

    connection: Connection
    host: str
    attempt: int
    proven: bool = True


class Hub:
    """The first host of --ips: it listens, compares and decides who trains.

    It listens for as long as the job lives.  A host that calls while others train stays connected,
    and joins the next world.  Hosts are numbered by their position in --ips.
    """

    def __init__(
        self,
        local: Handshake,
        port: int,
        say: Callable[[str], None],
        token: str = "",
        digests: Callable[[], Any] = lambda: None,
    ) -> None:
        """Opens the port of the hub.

        Args: digests: returns the digests of the code and data the job trains with, by part; None
            if unknown.
        Raises: LaunchError: the port is in use, or too few files may be open.
        """
        allow_files(len(local.hosts) + _CALLERS + _OTHER_FILES)
        self._local, self._port, self._say, self._token = local, port, say, token
        self._listener = _listen(local, port)
        self._poller, self._checked = Poller(), 0.0
        self._poller.add_listener(self._listener, self._accept_calls)
        self._callers: list[Connection] = []  # without a handshake so far
        self._guests: dict[int, _Guest] = {}
        self._world: dict[int, _Guest] = {}  # the other hosts that train now
        self._returning: frozenset[int] = frozenset()  # hosts of the last world that call again
        self._lost: frozenset[int] = frozenset()  # lost in the last world, or before this hub
        self._turned_away: frozenset[int] = frozenset()  # by the last world
        self._attempt, self._changes, self._skip = 0, 0, set[int]()
        self._tried: dict[int, str] = {}  # the result of a host's last call
        self._refused: set[str] = set()  # lines printed about refused callers
        self._told_at = 0.0  # when guests were last sent the reason why they wait
        self._begun = False  # whether the first world has begun
        self._second: Connection | None = None  # connection to the second host, see `_ask_second`
        self._digests = digests
        self._invited: frozenset[int] = frozenset()  # the last world ended to let these hosts in
        self._comings: Counter[int] = Counter()  # times that a host joined without a step
        self._held: dict[int, float] = {}  # the time until which a host may not join

    def gather(
        self, local: Handshake, seconds: float, received: Sequence[int] = ()
    ) -> ControlChannel:
        """Waits until a world may begin, and begins it.  Takes the arguments of `rendezvous`."""
        self._local = local
        self._attempt, self._changes = local.attempt, local.changes
        self._skip |= {*local.skip}
        begin = reported = time.monotonic()
        enough_since: float | None = None  # since when enough hosts have been connected
        while True:
            if received:
                # At the very start the user will type the command again, so the other hosts go on
                # waiting.
                if self._attempt:
                    self._tell_guests({"type": "stopped"})
                raise Stopped
            self._handle_calls(_POLL_SECONDS)
            self._ask_second()
            now = time.monotonic()
            lacking = self._explain_quorum()
            enough_since = None if lacking else enough_since or now
            if enough_since is not None:
                lacking = self._explain_wait(now - enough_since)
                if not lacking:
                    return self._begin_world()
            if now - begin > seconds:
                missing = self._describe_missing(lacking)
                message = f"gave up after {seconds:g} s (--start_timeout): {missing}"
                self._fail(LaunchError(message, code="hosts_missing"))
            if now - reported >= _REPORT_SECONDS:
                reported = now
                text = f"{self._describe_missing(lacking)} ({now - begin:.0f} s)"
                self._say(text)
                self._tell_guests({"type": "waiting", "text": f"host {local.host}: {text}"})

    def watch(self) -> None:
        """Answers hosts that call while others train; never blocks."""
        self._handle_calls()
        if time.monotonic() - self._told_at > _REPORT_SECONDS:
            self._told_at = time.monotonic()
            # The other guests have been sent the reason why they cannot join.
            ready = [guest.connection for guest in self._ready_guests().values()]
            send_to_all(ready, {"type": "waiting", "text": _LATER})

    def waiting(self) -> list[str]:
        """Lists the hosts that wait to join, as typed or by address."""
        names = self._local.names or self._local.hosts
        return [names[place] for place in sorted(self._ready_guests())]

    def newcomers(self) -> list[str]:
        """Lists the addresses of training hosts whose fleetrun has not trained in this job before.

        This host is among them if it has come back to hosts that waited for it.
        """
        trained = self._attempt > 0
        hosts: list[Handshake | _Guest] = [self._local, *self._world.values()]
        return [remote.host for remote in hosts if trained and not remote.attempt]

    def end_world(
        self, lost: Collection[str], left: Collection[str], turned_away: Collection[str] = ()
    ) -> None:
        """Ends the world: its hosts stop, and those that stay call again.

        Args: lost, left, turned_away: addresses of hosts that vanished, that left by themselves,
            and that are sent away.
        """
        of_place = {place: guest.host for place, guest in self._world.items()}
        absent = {*lost, *left, *turned_away}
        self._lost = frozenset(place for place, host in of_place.items() if host in lost)
        gone = {place for place, host in of_place.items() if host in absent}
        self._turned_away = frozenset(
            place for place, host in of_place.items() if host in turned_away
        )
        self._returning = frozenset(of_place.keys() - gone)
        self._invited = frozenset(self._ready_guests())
        self._world = {}

    def count_comings(self, stepped: bool) -> None:
        """Counts how often hosts join and leave without a step, and holds such hosts off.

        Args: stepped: the world that has just ended completed a step.
        """
        if stepped:
            for place in self._returning | self._lost:
                self._comings.pop(place, None)
        elif self._local.is_elastic:
            for place in self._lost | self._turned_away:
                self._hold_off(place)

    def close(self, stopped: bool = False, is_sent_away: bool = False) -> None:
        """Closes all connections, at the end of the job.

        Hosts that wait are notified, except at the very start, when the user will type the command
        again.

        Args:
            stopped: a signal stopped the job; hosts that wait to join stop as well.
            is_sent_away: only this host ends, and the others wait for its return.
        """
        if self._begun and not is_sent_away:
            self._tell_guests({"type": "stopped" if stopped else "over"})
        self._close_second_call()
        for connection in (*self._callers, *(guest.connection for guest in self._guests.values())):
            connection.close()
        self._listener.close()
        self._poller.close()

    # Which hosts train

    def _explain_quorum(self) -> str:
        """Explains why too few hosts are connected; "" if there are enough."""
        count, min_hosts = 1 + len(self._ready_guests()), self._local.min_hosts
        if count == len(self._local.hosts):
            return ""
        if not (self._local.is_elastic and self._attempt):
            return "the first steps need all hosts of --ips"
        return f"at least {min_hosts} are needed (--min_hosts)" if count < min_hosts else ""

    def _explain_wait(self, waited: float) -> str:
        """Explains which further hosts may come; "" if none is waited for.

        Args: waited: seconds for which enough hosts have been connected.
        """
        places = self._ready_guests().keys()
        if waited < _RETURN_SECONDS and (self._returning | self._invited) - places:
            return "hosts of the last steps are on their way"
        seconds, held = self._local.rejoin_seconds, filter(self._is_held, self._lost)
        if waited < seconds and self._lost - places - {*held}:
            return f"waiting up to {seconds:g} s (--rejoin_seconds) for lost hosts"
        return ""

    def _ready_guests(self) -> dict[int, _Guest]:
        """Returns the guests that may train, by position in --ips."""
        proven = {place: guest for place, guest in self._guests.items() if guest.proven}
        held = set(filter(self._is_held, self._held))
        free = {place: guest for place, guest in proven.items() if place not in held}
        # With too few free hosts nobody trains, so a host that comes and goes disturbs nobody.
        return free if self._world or 1 + len(free) >= self._local.min_hosts else proven

    def _is_held(self, place: int) -> bool:
        return self._held.get(place, 0.0) > time.monotonic()

    def _hold_off(self, place: int) -> None:
        """Counts that a host joined and left without a step; after several times it has to wait."""
        self._comings[place] += 1
        excess = self._comings[place] - _COMINGS
        if excess >= 0:
            seconds = min(_LONGEST_HOLD, _HOLD_SECONDS * 2.0 ** min(excess, 10))
            self._held[place] = time.monotonic() + seconds
            history = f"came and went {self._comings[place]} times without a step"
            self._say(
                f"host {self._local.hosts[place]} {history}: it is held off for {seconds:g} s, "
                "then for twice as long"
            )

    def _begin_world(self) -> ControlChannel:
        """Begins a world with the guests that are ready; returns its channel."""
        local, self._world = self._local, dict(sorted(self._ready_guests().items()))
        for place in self._world:
            del self._guests[place]
        for place in self._invited - self._world.keys():
            self._hold_off(place)
        self._invited, self._begun = frozenset(), True
        peers = {guest.host: guest.connection for guest in self._world.values()}
        hosts = [local.host, *(guest.host for guest in self._world.values())]
        begin = {
            "type": "begin",
            "hosts": hosts,
            "attempt": self._attempt,
            "changes": self._changes,
            "skip": sorted(self._skip),
            "nonce": secrets.token_hex(16),
        }
        send_to_all(peers.values(), begin)
        self._say(_describe_world(hosts, local))
        return _make_channel(local, begin, peers, self._say, self)

    def _describe_missing(self, quorum: str) -> str:
        """Describes which hosts are missing, and how their calls ended."""
        connected, names = {self._local.place, *self._ready_guests()}, self._local.hosts
        hosts_by_reason: dict[str, list[str]] = {}
        for place in range(len(names)):
            if place not in connected:
                hosts_by_reason.setdefault(self._tried.get(place, _NOT_CALLED), []).append(
                    names[place]
                )
        calls = "; ".join(
            f"{list_hosts(hosts)} ({reason})" for reason, hosts in hosts_by_reason.items()
        )
        missing = sum(map(len, hosts_by_reason.values()))
        text = f"still waiting for {missing} of {len(names)} hosts on port {self._port}: {calls}"
        return f"{text}; {quorum}" if self._local.is_elastic else text

    # Another host may regard itself, or a third host, as the hub.

    def _ask_second(self) -> None:
        """Calls the second host before the first steps, to check that its hub is also this host.

        Raises: LaunchError: the second host has another hub.
        """
        if self._begun or self._attempt or 1 in self._guests:
            return self._close_second_call()
        second, now = self._second, time.monotonic()
        if second is None or now - second.opened > _HANDSHAKE_SECONDS:
            self._close_second_call()
            local = self._local
            self._second = Connection.call(local.hosts[1], self._port, local.host, self._token)
            self._second.send(local.message())
            return
        for message in second.receive():
            if message.get("code") == "hosts_differ":
                self._fail(LaunchError(read_text(message, "text"), code="hosts_differ"))
        if second.closed is not None and now - second.opened > _CALL_SECONDS:
            self._second = None

    def _close_second_call(self) -> None:
        if self._second is not None:
            self._second.close()
            self._second = None

    # Which hosts call

    def _handle_calls(self, seconds: float = 0.0) -> None:
        """Accepts new callers, handles all messages, forgets guests that are gone.

        Args: seconds: the longest wait for the first of these.
        """
        self._poller.run(seconds)
        now = time.monotonic()
        if now - self._checked < _POLL_SECONDS:
            return
        self._checked = now
        for caller in list(self._callers):
            caller.flush()
            if caller.closed is not None or now - caller.opened > _HANDSHAKE_SECONDS:
                self._handle_caller(caller)
        for place, guest in list(self._guests.items()):
            guest.connection.flush()
            if now - guest.connection.heard > _TIMEOUT_SECONDS:
                guest.connection.close("no answer")
            self._forget_closed(place)

    def _handle_guest(self, place: int) -> None:
        for message in self._guests[place].connection.receive():
            self._handle_message(place, message)
        self._forget_closed(place)

    def _forget_closed(self, place: int) -> None:
        """Forgets a guest whose connection is closed."""
        guest = self._guests[place]
        if guest.connection.closed is not None:
            del self._guests[place]
            self._tried[place] = "it disconnected"
            if not self._local.is_elastic:
                self._say(f"host {guest.host} disconnected before the run began")

    def _accept_calls(self) -> None:
        """Accepts callers; drops all but the newest from unknown addresses."""
        with contextlib.suppress(OSError):  # BlockingIOError: no connection
            for _ in range(_CALLERS):
                caller = Connection(self._listener.accept()[0], self._token)
                self._callers.append(caller)
                self._poller.add(caller, partial(self._handle_caller, caller))
        hosts = set(self._local.hosts)
        # A host calls again every second, so only its newest connections are alive.
        expected = [caller for caller in self._callers if caller.peer in hosts]
        strangers = [caller for caller in self._callers if caller.peer not in hosts]
        for caller in (*expected[: -_CALLERS - len(hosts)], *strangers[:-_CALLERS]):
            caller.close()

    def _handle_caller(self, caller: Connection) -> None:
        messages = caller.receive()
        problem = caller.closed or ""
        if not messages and time.monotonic() - caller.opened > _HANDSHAKE_SECONDS:
            problem = caller.silence
        if messages:
            self._callers.remove(caller)
            place = self._admit(caller, messages[0])
            if place is not None:
                self._poller.add(caller, partial(self._handle_guest, place))
                for message in messages[1:]:
                    self._handle_message(place, message)
                self._forget_closed(place)
        elif problem:
            self._callers.remove(caller)
            caller.close()
            if problem == OTHER_TOKEN:
                self._report_refused(f"rejected a call from {caller.peer}: {OTHER_TOKEN}")
            if caller.peer in self._local.hosts:
                self._tried[self._local.hosts.index(caller.peer)] = problem

    def _admit(self, caller: Connection, message: Message) -> int | None:
        """Admits a caller as a guest; returns its position in --ips, or None if it is sent away.

        Raises: LaunchError: it belongs to this run, and was started with another command.
        """
        remote = read_handshake(message)
        if remote is None:
            caller.close(OTHER_PROGRAM)
            return None
        place, local, mismatches = remote.place, self._local, differences(self._local, remote)
        if remote.host not in local.hosts and not local.has_same_names(remote):
            self._report_refused(f"rejected {remote.host[:60]}: it is not among --ips of this host")
            text = f"it is not among --ips {list_hosts(local.hosts)} there"
            _send_refusal(caller, f"host {local.host} refused this one, {remote.host}: {text}")
            return None
        if mismatches:
            self._refuse_different(caller, remote, mismatches)
            return None
        present = self._world.get(place, self._guests.get(place))
        if place == 0 or (present is not None and present.connection.closed is None):
            self._report_refused(
                f"a second fleetrun says that it is host {remote.host}; it has to wait until the "
                "first is gone"
            )
            caller.send({"type": "taken"})
            caller.close()
            return None
        # A host that has trained in this job holds what the others train with.
        begun = bool(self._world or self._attempt) and not remote.attempt
        proven = not (begun and local.is_elastic and self._digests())
        self._guests[place] = _Guest(caller, remote.host, remote.attempt, proven)
        # If others are training, this host's counts are out of date: it has missed worlds.
        if not self._world:
            self._attempt = max(self._attempt, remote.attempt)
            self._changes = max(self._changes, remote.changes)
            self._skip |= set(remote.skip)
            # This hub has been restarted, and regards all hosts of the job as lost until they call.
            if not self._local.attempt and remote.attempt:
                self._lost = frozenset(range(1, len(local.hosts)))
        caller.send({"type": "joined"})
        if not proven:
            caller.send({"type": "prove"})
        if self._is_held(place):
            remaining = f"{self._held[place] - time.monotonic():.0f} s"
            text = f"this host came and went without a step, and is held off for {remaining}"
            caller.send({"type": "waiting", "text": f"host {local.host}: {text}"})
        return place

    def _refuse_different(
        self, caller: Connection, remote: Handshake, mismatches: Sequence[str]
    ) -> None:
        """Refuses a host that was started with another command.

        Raises: LaunchError: no step was completed yet, so one of the commands is wrong; or this hub
            has come back with a different command from that of the hosts that wait for it.
        """
        lines = "\n".join(mismatches)
        # Without a token a stranger may send this, and must not end the run.
        is_trusted = self._token or caller.peer == remote.host
        if is_trusted and remote.attempt and not self._attempt:
            # The guest goes on waiting, and trains once this host runs the right command.
            caller.close()
            message = (
                f"host {remote.host} waits for this one, which was started differently.\n{lines}"
            )
            raise LaunchError(message, code="hosts_differ")
        _send_refusal(caller, f"this host was started differently.\n{lines}", "hosts_differ")
        if is_trusted and not self._world and not self._attempt:
            message = f"host {remote.host} was started differently.\n{lines}"
            self._fail(LaunchError(message, code="hosts_differ"))
        self._report_refused(f"rejected a call from {caller.peer}: {mismatches[0]}")

    def _handle_message(self, place: int, message: Message) -> None:
        if message["type"] == "left":
            self._returning -= {place}
            self._lost -= {place}
        elif message["type"] == "stopped" and not self._world:
            self._tell_guests({"type": "stopped"})
            raise Stopped
        elif message["type"] == "digests":
            self._compare_digests(self._guests[place], message.get("digests"))

    def _compare_digests(self, guest: _Guest, remote: Any) -> None:
        """Refuses a host whose code or data differ from the others'; only that host ends.

        Args: remote: digests of that host, by part; a script without digests sends {}.
        """
        local = self._digests() or {}
        if not isinstance(remote, dict):
            return guest.connection.close(OTHER_PROGRAM)
        # Kinds of parts that the host has not sent are not compared.
        kinds = {name.partition(" ")[0] for name in remote}
        differing = sorted(
            name
            for name in local.keys() | remote.keys()
            if name.partition(" ")[0] in kinds and local.get(name) != remote.get(name)
        )
        guest.proven = not differing
        if differing:
            text = f"it differs from the hosts that train in {list_hosts(differing)}"
            host = guest.host
            self._report_refused(f"refused host {host}, and goes on without it: {text}")
            message = f"host {self._local.host} refused this one, {host}: {text}"
            _send_refusal(guest.connection, message, "hosts_differ")

    def _report_refused(self, text: str) -> None:
        """Prints a line once: a caller calls every second, and may be a stranger."""
        if text not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused.add(text)
            self._say(text)

    def _fail(self, error: LaunchError) -> NoReturn:
        """Raises `error`, after sending it to the guests."""
        self._tell_guests({"type": "refused", "text": str(error), "code": error.code})
        raise error

    def _tell_guests(self, message: Message) -> None:
        send_to_all([guest.connection for guest in self._guests.values()], message)


class _Caller:
    """Every other host, until the hub begins a world with it."""

    def __init__(
        self,
        local: Handshake,
        port: int,
        say: Callable[[str], None],
        token: str,
        resolve: Callable[[str], str | None],
        digest_command: Sequence[str],
    ) -> None:
        self._digest_command = digest_command
        self._child: child.Process | None = None  # runs the digest command
        self._local, self._port, self._say, self._token = local, port, say, token
        self._resolve, self._looked_up = resolve, 0.0
        self._hub = local.hosts[0]  # address of the hub, as far as known
        self._connection: Connection | None = None
        self._called = self._beat = 0.0
        self._joined = False
        self._tried, self._last_text = "no answer yet", ""
        self._listener: socket.socket | None = None
        self._callers: list[Connection] = []  # hosts that may regard this host as the hub
        self._answered: set[str] = set()  # lines printed about these callers
        if not local.attempt:
            # The port may be in use here, or the address not local: then no host is answered.
            with contextlib.suppress(OSError):
                self._listener = open_listener(local.host, port)

    def wait(self, seconds: float, received: Sequence[int]) -> ControlChannel:
        """Calls the hub until it begins a world.  Takes the arguments of `rendezvous`."""
        begin = since = reported = time.monotonic()
        while True:
            if received:
                self._leave_and_stop(received)
            connection = self._connection or self._call_hub()
            if connection is None or connection.closed is not None:  # not connected to the hub
                time.sleep(_POLL_SECONDS)
            else:
                calling = [connection] if connection.connecting else []
                wait_for_any([] if calling else [connection], _POLL_SECONDS, calling)
            if connection is not None:
                for message in connection.receive():
                    channel = self._handle_message(connection, message)
                    if channel is not None:
                        return channel
                self._keep_alive(connection)
            self._send_digests()
            self._answer_calls()
            now = time.monotonic()
            # From now on the hub enforces the timeout.
            if self._joined:
                since = now
                continue
            text = f"still waiting for 1 of {len(self._local.hosts)} hosts on port {self._port}: "
            text += f"{self._hub}, the first of --ips here ({self._tried})"
            if now - since > seconds:
                raise LaunchError(
                    f"gave up after {seconds:g} s (--start_timeout): {text}", code="hosts_missing"
                )
            if now - reported >= _REPORT_SECONDS:
                reported = now
                self._say(f"{text} ({now - begin:.0f} s)")

    def _answer_calls(self) -> None:
        """Refuses hosts whose --ips begins with another host; the hub decides about the others."""
        if self._listener is None:
            return
        local = self._local
        with contextlib.suppress(OSError):  # BlockingIOError: no connection
            self._callers.append(Connection(self._listener.accept()[0], self._token))
        for caller in list(self._callers):
            messages = caller.receive()
            remote = read_handshake(messages[0]) if messages else None
            # A host of another run may now have the address that a name in --ips had before.
            if remote is not None and remote.host in local.hosts and not local.has_same_hub(remote):
                mismatches = "\n".join(differences(local, remote))
                _send_refusal(
                    caller, f"this host was started differently.\n{mismatches}", "hosts_differ"
                )
                if mismatches not in self._answered and len(self._answered) < _MOST_REFUSED:
                    self._answered.add(mismatches)
                    self._say(f"rejected a call from {caller.peer}: {mismatches}")
            is_late = time.monotonic() - caller.opened > _HANDSHAKE_SECONDS
            if messages or is_late or caller.closed is not None or len(self._callers) > _CALLERS:
                self._callers.remove(caller)
                caller.close()

    def end_answering(self) -> None:
        for caller in self._callers:
            caller.close()
        if self._listener is not None:
            self._listener.close()

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _leave_and_stop(self, received: Sequence[int]) -> NoReturn:
        """Raises Stopped; before a restart it stops the other hosts as well.

        At the very start the other hosts keep waiting, because the user will type the command
        again.
        """
        if self._connection is not None and self._joined:
            if self._local.is_elastic and is_notice(received):
                self._connection.send({"type": "left"})
            elif self._local.attempt:
                self._connection.send({"type": "stopped"})
        raise Stopped

    def _call_hub(self) -> Connection | None:
        """Opens a new connection to the hub; returns None if the last call was only just made."""
        now = time.monotonic()
        if now - self._called < _CALL_SECONDS:
            return None
        self._called = now
        if self._local.has_names and now - self._looked_up >= _LOOK_UP_SECONDS:
            self._looked_up = now
            self._hub = self._resolve(self._local.names[0]) or self._hub
        self._connection = Connection.call(self._hub, self._port, self._local.host, self._token)
        self._connection.send(self._local.message())
        return self._connection

    def _keep_alive(self, connection: Connection) -> None:
        """Sends a sign of life to the hub, and drops a connection that has ended."""
        now, problem = time.monotonic(), connection.closed
        silent = 0.0 if connection.connecting else now - connection.heard
        if silent > (_TIMEOUT_SECONDS if self._joined else _HANDSHAKE_SECONDS):
            problem = problem or ("no answer" if self._joined else connection.silence)
        elif self._joined and now - self._beat > _BEAT_SECONDS:
            self._beat = now
            connection.send({"type": "beat"})
        if problem:
            connection.close()
            self._connection, self._joined, self._tried = None, False, problem

    def _handle_message(self, connection: Connection, message: Message) -> ControlChannel | None:
        """Handles a message from the hub; returns the channel once a world with this host begins.

        Raises: LaunchError.  Stopped.
        """
        kind, text = message["type"], read_text(message, "text")
        if kind == "joined":
            self._joined = True
        elif kind == "prove":
            self._start_digests(connection)
        elif kind == "taken":
            # The other fleetrun may be that of this host before a power failure, so it calls again.
            connection.close(_TAKEN)
        elif kind == "waiting" and text != self._last_text:
            self._last_text = text
            self._say(text)
        elif kind == "stopped":
            raise Stopped
        elif kind == "over":
            raise LaunchError(
                "the job ended while this host waited to be taken in",
                code="job_over",
                where=f"{self._hub}:{self._port}",
                fix="start the same command on all hosts to go on with it (--resume auto)",
            )
        elif kind == "refused":
            code = read_text(message, "code", 100)
            if code != "host_refused":
                raise Failure(LaunchError.kind, code, text).error()
            if not self._local.has_names:
                raise LaunchError(text, code="host_refused")
            # The name's address may by now belong to the hub of another run, so it calls again.
            connection.close(text)
        elif kind == "begin" and self._joined:
            hosts = read_words(message, "hosts") or ()
            if hosts[1:] and self._local.host in hosts:
                self._say(_describe_world(hosts, self._local))
                return _make_channel(self._local, message, {hosts[0]: connection}, self._say)
            connection.close(OTHER_PROGRAM)
        return None

    def _start_digests(self, connection: Connection) -> None:
        """Starts to compute the digests of the code and data this host would train with."""
        # A script other than `ppdist train` has no digests: its ranks compare themselves at the
        # start.
        if not self._digest_command:
            connection.send({"type": "digests", "digests": {}})
        elif self._child is None:
            self._say("comparing configuration, code and data with those of the hosts that train")
            self._child = child.start(self._digest_command, env=child.own_environment())

    def _send_digests(self) -> None:
        """Sends the digests of this host once they are computed.

        Raises: LaunchError: this host cannot read the code or data it would train with.
        """
        if self._child is None or self._child.poll() is None:
            return
        code, self._child = self._child.returncode, None
        if code:
            raise LaunchError(
                "what this host would train with cannot be read here (see above)",
                code="host_not_ready",
                where=f"host {self._local.host}",
                fix="mend that and start it again; the others go on without it",
            )
        if self._connection is not None and self._joined:
            digests = read_json(Path(self._digest_command[-1]))
            self._connection.send({"type": "digests", "digests": digests})


def _describe_world(hosts: Sequence[str], local: Handshake) -> str:
    """Describes which hosts are connected: `2 of 3 hosts are connected, without 10.0.0.3`."""
    count, total = len(hosts), len(local.hosts)
    if count == total:
        return f"all {count} hosts are connected"
    present = set(hosts)
    absent = [host for host in local.hosts if host not in present]
    return f"{count} of {total} hosts are connected, without {list_hosts(absent)}"


def _make_channel(
    local: Handshake,
    begin: Message,
    peers: Mapping[str, Connection],
    say: Callable[[str], None],
    hub: Hub | None = None,
) -> ControlChannel:
    """Builds the channel of a world from the message with which the hub begins the world."""
    return ControlChannel(
        local.host,
        read_words(begin, "hosts") or (),
        peers,
        say,
        attempt=read_integer(begin, "attempt", 0, MOST_RESTARTS) or 0,
        changes=read_integer(begin, "changes", 0, MOST_RESTARTS) or 0,
        skip=read_steps(begin) or (),
        nonce=read_text(begin, "nonce", 100),
        is_elastic=local.is_elastic,
        hub=hub,
    )


def _send_refusal(caller: Connection, text: str, code: str = "host_refused") -> None:
    """Sends a caller the reason why it is refused, and closes the connection."""
    caller.send({"type": "refused", "text": text, "code": code})
    caller.close()


def _listen(local: Handshake, port: int) -> socket.socket:
    """Opens the port that the other hosts call.

    Raises: LaunchError: the port is in use.
    """
    # The address in --host may be one that only other hosts can reach.
    for address in (local.host, ""):
        try:
            return open_listener(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                break
    raise make_port_error(port, len(local.hosts))
