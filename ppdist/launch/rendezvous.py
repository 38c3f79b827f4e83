"""Rendezvous of a run's hosts: they find each other and compare.

    hub          the first host of --ips, always: it listens, compares, says who trains
    caller       every other host, which calls the hub

Hosts that train together are a world.  The first world needs all hosts of --ips.  Where one ends
because a host was lost, left or came back, those that are there form the next; with --min_hosts
fewer may.  As there is one hub, two worlds never train at once.

So ranks that would wait for ever or that would train different things are one message on every host
instead.  Before the first steps every host listens and calls another, the hub the second one: where
--ips begin with different hosts, who is called says so.

Each host says its own address: names of --ips may be known late, or mean another address elsewhere,
and the hub tells all where everybody is.

Who belongs to a job says a token that its user may give (connection.py).  Without one nothing is
promised against strangers (docs/security.md).
"""

import contextlib
import errno
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
    integer_of,
    open_listener,
    text_of,
    wait_for_any,
)
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.handshake import Handshake, differences, read_handshake, steps_of, words_of
from ppdist.launch.network import listed, port_in_use
from ppdist.launch.options import MOST_RESTARTS
from ppdist.launch.signals import Stopped, is_notice

_POLL_SECONDS = 0.1
_REPORT_SECONDS = 10.0  # between two lines that say who is missing
_LOOK_UP_SECONDS = 5.0  # between two questions for the address behind a name
_CALL_SECONDS = 1.0  # between two calls of the hub
_BEAT_SECONDS = 5.0  # between two signs of life of a host that waits
_HANDSHAKE_SECONDS = 10.0  # for an answer of who has taken the call, or who has called
_TIMEOUT_SECONDS = 60.0
_RETURN_SECONDS = 10.0  # in which hosts of the last world call again
_CALLERS = 64  # of unknown addresses, that have not said who they are
_OTHER_FILES = 64  # of fleetrun, but connections
_MOST_REFUSED = 20  # lines about callers that were refused
_COMINGS = 3  # and goings without a step, after which a host is held off
_HOLD_SECONDS, _LONGEST_HOLD = 30.0, 3600.0  # at first, then twice as long each time
_NOT_CALLED = "not called yet: is fleetrun started there, with the same --ips in the same order?"
_TAKEN = (
    "another fleetrun is this host already; where it was started twice, or --host is wrong on one "
    "of the two, end this one"
)
_LATER = "the others train; this host is taken in at their next checkpoint"


def rendezvous(
    mine: Handshake,
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

    For a restart they meet again.  A host that was lost and is started again joins them: it takes
    over from the others how often the run was restarted, and which steps are left out.

    Args:
        port: of the hub.
        seconds: how long to wait.
        say: prints a line for the user.
        received: signals so far; with one the waiting ends.
        token: of the job; hosts that do not know it are refused.
        resolve: the address behind a name of --ips by now, or None.
        hub: of the job, on its first host.
        compare: the command that writes this host's digests into the file that is its last word,
            asked for by a hub whose job has trained without this fleetrun; (): there is none.
    Raises: LaunchError: a host does not come in time, or was started with something else.  Stopped.
    """
    if hub is not None:
        return hub.gather(mine, seconds, received)
    caller = _Caller(mine, port, say, token, resolve, compare)
    try:
        return caller.wait(seconds, received)
    except BaseException:
        caller.leave()
        raise
    finally:
        caller.end_answering()


@dataclass
class _Guest:
    """A host that has called the hub and was started alike.

    Attributes:
        proven: it holds what the others train with, as far as that is compared.
    """

    connection: Connection
    handshake: Handshake
    proven: bool = True


class Hub:
    """The first host of --ips: it listens, compares and says who trains.

    It listens for as long as the job lives.  Who calls while others train stays connected, and is
    taken into the next world.  Hosts are counted by their place in --ips.
    """

    def __init__(
        self,
        mine: Handshake,
        port: int,
        say: Callable[[str], None],
        token: str = "",
        digests: Callable[[], Any] = lambda: None,
    ) -> None:
        """
        Args: digests: of what the job trains with, by part; None: not known.
        Raises: LaunchError: the port is in use, or too few files may be open.
        """
        allow_files(len(mine.hosts) + _CALLERS + _OTHER_FILES)
        self._mine, self._port, self._say, self._token = mine, port, say, token
        self._listener = _listen(mine, port)
        self._callers: list[Connection] = []  # that have not said who they are
        self._guests: dict[int, _Guest] = {}
        self._world: dict[int, _Guest] = {}  # the other hosts that train now
        self._returning: frozenset[int] = frozenset()  # of the last world, that call again
        self._lost: frozenset[int] = frozenset()  # of the last world, or of one before this hub
        self._turned_away: frozenset[int] = frozenset()  # of the last world
        self._attempt, self._changes, self._skip = 0, 0, set[int]()
        self._tried: dict[int, str] = {}  # what came of a host's last call
        self._refused: set[str] = set()  # what was said of callers
        self._told = 0.0  # when guests last heard why they wait
        self._begun = False  # a world
        self._second: Connection | None = None  # to the second host, which may take itself for this
        self._digests = digests
        self._invited: frozenset[int] = frozenset()  # the last world ended to take them in
        self._comings: Counter[int] = Counter()  # of a host, that led to no step
        self._held: dict[int, float] = {}  # until when a host is not taken in

    def gather(
        self, mine: Handshake, seconds: float, received: Sequence[int] = ()
    ) -> ControlChannel:
        """Waits until a world may begin, and begins it; as `rendezvous`."""
        self._mine = mine
        self._attempt, self._changes = mine.attempt, mine.changes
        self._skip |= {*mine.skip}
        begin = reported = time.monotonic()
        enough: float | None = None  # since when enough hosts are here
        while True:
            if received:
                if self._attempt:  # at the very start it is being typed again
                    self._tell_guests({"type": "stopped"})
                raise Stopped
            waiting = [*self._callers, *(guest.connection for guest in self._guests.values())]
            open_ones = [each for each in waiting if each.closed is None]
            wait_for_any([*open_ones, self._listener], _POLL_SECONDS)
            self._look()
            self._ask_second()
            now = time.monotonic()
            lacking = self._lacking()
            enough = None if lacking else enough or now
            if enough is not None:
                lacking = self._awaits(now - enough)
                if not lacking:
                    return self._begin()
            if now - begin > seconds:
                what = f"gave up after {seconds:g} s (--start_timeout): {self._missing(lacking)}"
                self._fail(LaunchError(what, code="hosts_missing"))
            if now - reported >= _REPORT_SECONDS:
                reported = now
                text = f"{self._missing(lacking)} ({now - begin:.0f} s)"
                self._say(text)
                self._tell_guests({"type": "waiting", "text": f"host {mine.host}: {text}"})

    def watch(self) -> None:
        """Hears hosts that call while others train; never blocks."""
        self._look()
        if time.monotonic() - self._told > _REPORT_SECONDS:
            self._told = time.monotonic()
            for guest in self._ready().values():  # others have heard what keeps them out
                guest.connection.send({"type": "waiting", "text": _LATER})

    def waiting(self) -> list[str]:
        """Hosts that wait to be taken in, as typed or by address."""
        names = self._mine.names or self._mine.hosts
        return [names[place] for place in sorted(self._ready())]

    def newcomers(self) -> list[str]:
        """Addresses of hosts that train now, whose fleetrun has not trained in this job before.

        This one is among them where it has come back to hosts that waited for it.
        """
        trained = self._attempt > 0
        hosts = [self._mine, *(guest.handshake for guest in self._world.values())]
        return [each.host for each in hosts if trained and not each.attempt]

    def end_world(
        self, lost: Collection[str], left: Collection[str], turned_away: Collection[str] = ()
    ) -> None:
        """The hosts that train stop; those that stay call again.

        Args: addresses of hosts that are gone: without a word, after one, and sent away.
        """
        of_place = {place: guest.handshake.host for place, guest in self._world.items()}
        self._lost = frozenset(place for place, host in of_place.items() if host in lost)
        gone = {place for place, host in of_place.items() if host in {*lost, *left, *turned_away}}
        self._turned_away = frozenset(
            place for place, host in of_place.items() if host in turned_away
        )
        self._returning = frozenset(of_place.keys() - gone)
        self._invited = frozenset(self._ready())
        self._world = {}

    def count_comings(self, stepped: bool) -> None:
        """Holds off hosts that come and go, after a world has ended.

        Args: stepped: that world made a step.
        """
        if stepped:
            for place in self._returning | self._lost:
                self._comings.pop(place, None)
        elif self._mine.is_elastic:
            for place in self._lost | self._turned_away:
                self._hold_off(place)

    def close(self, stopped: bool = False, is_sent_away: bool = False) -> None:
        """The job is over; at the very start it is being typed again, and the others wait.

        Args:
            stopped: by a signal, which then holds for hosts that wait to be taken in, too.
            is_sent_away: this host ends alone, and the others wait for its return.
        """
        if self._begun and not is_sent_away:
            self._tell_guests({"type": "stopped" if stopped else "over"})
        self._end_asking()
        for connection in (*self._callers, *(each.connection for each in self._guests.values())):
            connection.close()
        self._listener.close()

    # Who trains

    def _lacking(self) -> str:
        """Why too few hosts are here, or ""."""
        count, least = 1 + len(self._ready()), self._mine.min_hosts
        if count == len(self._mine.hosts):
            return ""
        if not (self._mine.is_elastic and self._attempt):
            return "the first steps need all hosts of --ips"
        return f"at least {least} are needed (--min_hosts)" if count < least else ""

    def _awaits(self, waited: float) -> str:
        """Why more hosts may come, or "".

        Args: waited: seconds since enough are here.
        """
        here = self._ready().keys()
        if waited < _RETURN_SECONDS and (self._returning | self._invited) - here:
            return "hosts of the last steps are on their way"
        seconds, held = self._mine.rejoin_seconds, filter(self._is_held, self._lost)
        if waited < seconds and self._lost - here - {*held}:
            return f"waiting up to {seconds:g} s (--rejoin_seconds) for lost hosts"
        return ""

    def _ready(self) -> dict[int, _Guest]:
        """Guests that may train, in order."""
        proven = {place: guest for place, guest in sorted(self._guests.items()) if guest.proven}
        free = {place: guest for place, guest in proven.items() if not self._is_held(place)}
        # Where too few are free nobody trains, whom one that comes and goes could disturb.
        return free if self._world or 1 + len(free) >= self._mine.min_hosts else proven

    def _is_held(self, place: int) -> bool:
        return self._held.get(place, 0.0) > time.monotonic()

    def _hold_off(self, place: int) -> None:
        """Counts that a host came and went without a step; after several it has to wait."""
        self._comings[place] += 1
        more = self._comings[place] - _COMINGS
        if more >= 0:
            seconds = min(_LONGEST_HOLD, _HOLD_SECONDS * 2.0 ** min(more, 10))
            self._held[place] = time.monotonic() + seconds
            times = f"came and went {self._comings[place]} times without a step"
            self._say(
                f"host {self._mine.hosts[place]} {times}: it is held off for {seconds:g} s, then "
                "for twice as long"
            )

    def _begin(self) -> ControlChannel:
        mine, self._world = self._mine, self._ready()
        for place in self._world:
            del self._guests[place]
        for place in self._invited - self._world.keys():
            self._hold_off(place)
        self._invited, self._begun = frozenset(), True
        hosts = [mine.host, *(guest.handshake.host for guest in self._world.values())]
        begin = {
            "type": "begin",
            "hosts": hosts,
            "attempt": self._attempt,
            "changes": self._changes,
            "skip": sorted(self._skip),
            "nonce": secrets.token_hex(16),
        }
        for guest in self._world.values():
            guest.connection.send(begin)
        self._say(_connected(hosts, mine))
        return _channel(
            mine, begin, {each.handshake.host: each.connection for each in self._world.values()},
            self._say, self,
        )  # fmt: skip

    def _missing(self, lacking: str) -> str:
        here, names = {self._mine.place, *self._ready()}, self._mine.hosts
        whose: dict[str, list[str]] = {}  # by what came of the calls
        for place in range(len(names)):
            if place not in here:
                whose.setdefault(self._tried.get(place, _NOT_CALLED), []).append(names[place])
        each = "; ".join(f"{listed(hosts)} ({why})" for why, hosts in whose.items())
        count = sum(map(len, whose.values()))
        text = f"still waiting for {count} of {len(names)} hosts on port {self._port}: {each}"
        return f"{text}; {lacking}" if self._mine.is_elastic else text

    # Who takes another for the hub

    def _ask_second(self) -> None:
        """Calls the second host before the first steps: it knows whether this is its hub, too.

        Raises: LaunchError: it is not.
        """
        if self._begun or self._attempt or 1 in self._guests:
            return self._end_asking()
        second, now = self._second, time.monotonic()
        if second is None or now - second.opened > _HANDSHAKE_SECONDS:
            self._end_asking()
            mine = self._mine
            self._second = Connection.call(mine.hosts[1], self._port, mine.host, self._token)
            self._second.send(mine.message())
            return
        for message in second.receive():
            if message.get("code") == "hosts_differ":
                self._fail(LaunchError(text_of(message, "text"), code="hosts_differ"))
        if second.closed is not None and now - second.opened > _CALL_SECONDS:
            self._second = None

    def _end_asking(self) -> None:
        if self._second is not None:
            self._second.close()
            self._second = None

    # Who calls

    def _look(self) -> None:
        self._take_calls()
        for caller in list(self._callers):
            self._hear_caller(caller)
        for place, guest in list(self._guests.items()):
            for message in guest.connection.receive():
                self._hear_guest(place, message)
            if time.monotonic() - guest.connection.heard > _TIMEOUT_SECONDS:
                guest.connection.close("no answer")
            if guest.connection.closed is not None:
                del self._guests[place]
                self._tried[place] = "it disconnected"
                if not self._mine.is_elastic:
                    self._say(f"host {guest.handshake.host} disconnected before the run began")

    def _take_calls(self) -> None:
        """Accepts callers; of unknown ones only the newest stay."""
        with contextlib.suppress(OSError):  # BlockingIOError: no connection
            for _ in range(_CALLERS):
                self._callers.append(Connection(self._listener.accept()[0], self._token))
        hosts = set(self._mine.hosts)
        known = [each for each in self._callers if each.peer in hosts]
        strangers = [each for each in self._callers if each.peer not in hosts]
        for each in (*known[: -_CALLERS - len(hosts)], *strangers[:-_CALLERS]):
            each.close()

    def _hear_caller(self, caller: Connection) -> None:
        messages = caller.receive()
        over = caller.closed or ""
        if not messages and time.monotonic() - caller.opened > _HANDSHAKE_SECONDS:
            over = caller.silence
        if messages:
            self._callers.remove(caller)
            place = self._answer(caller, messages[0])
            if place is not None:
                for message in messages[1:]:
                    self._hear_guest(place, message)
        elif over:
            self._callers.remove(caller)
            caller.close()
            if over == OTHER_TOKEN:
                self._report_refused(f"rejected a call from {caller.peer}: {OTHER_TOKEN}")
            if caller.peer in self._mine.hosts:
                self._tried[self._mine.hosts.index(caller.peer)] = over

    def _answer(self, caller: Connection, message: Message) -> int | None:
        """The place of a caller that is a guest from now on; None: it is sent away.

        Raises: LaunchError: it belongs to this run, and was started with something else.
        """
        theirs = read_handshake(message)
        if theirs is None:
            caller.close(OTHER_PROGRAM)
            return None
        mine, found = self._mine, differences(self._mine, theirs)
        if theirs.host not in mine.hosts and not mine.same_names(theirs):
            self._report_refused(f"rejected {theirs.host[:60]}: it is not among --ips of this host")
            text = f"it is not among --ips {listed(mine.hosts)} there"
            _refuse(caller, f"host {mine.host} refused this one, {theirs.host}: {text}")
            return None
        if found:
            self._refuse_different(caller, theirs, found)
            return None
        there = self._world.get(theirs.place, self._guests.get(theirs.place))
        if theirs.is_first or (there is not None and there.connection.closed is None):
            self._report_refused(
                f"a second fleetrun says that it is host {theirs.host}; it has to wait until the "
                "first is gone"
            )
            caller.send({"type": "taken"})
            caller.close()
            return None
        # One that has trained in this job holds what the others do.
        begun = bool(self._world or self._attempt) and not theirs.attempt
        proven = not (begun and mine.is_elastic and self._digests())
        self._guests[theirs.place] = _Guest(caller, theirs, proven)
        if not self._world:  # else it is of the job before, or has missed worlds
            self._attempt = max(self._attempt, theirs.attempt)
            self._changes = max(self._changes, theirs.changes)
            self._skip |= set(theirs.skip)
            if not self._mine.attempt and theirs.attempt:  # this hub knows of no world yet
                self._lost = frozenset(range(1, len(mine.hosts)))
        caller.send({"type": "joined"})
        if not proven:
            caller.send({"type": "prove"})
        if self._is_held(theirs.place):
            left = f"{self._held[theirs.place] - time.monotonic():.0f} s"
            text = f"this host came and went without a step, and is held off for {left}"
            caller.send({"type": "waiting", "text": f"host {mine.host}: {text}"})
        return theirs.place

    def _refuse_different(
        self, caller: Connection, theirs: Handshake, found: Sequence[str]
    ) -> None:
        """Refuses a host that was started with something else.

        Raises: LaunchError: no step was made yet, so the command is wrong somewhere; or this hub
            has come back with another command than that of hosts that wait for it.
        """
        lines = "\n".join(found)
        # Without a token anybody may say so, and must not end the run.
        known = self._token or caller.peer == theirs.host
        if known and theirs.attempt and not self._attempt:
            caller.close()  # it goes on waiting for the right command
            what = f"host {theirs.host} waits for this one, which was started differently.\n{lines}"
            raise LaunchError(what, code="hosts_differ")
        _refuse(caller, f"this host was started differently.\n{lines}", "hosts_differ")
        if known and not self._world and not self._attempt:
            what = f"host {theirs.host} was started differently.\n{lines}"
            self._fail(LaunchError(what, code="hosts_differ"))
        self._report_refused(f"rejected a call from {caller.peer}: {found[0]}")

    def _hear_guest(self, place: int, message: Message) -> None:
        if message["type"] == "left":
            self._returning -= {place}
            self._lost -= {place}
        elif message["type"] == "stopped" and not self._world:
            self._tell_guests({"type": "stopped"})
            raise Stopped
        elif message["type"] == "digests":
            self._compare(self._guests[place], message.get("digests"))

    def _compare(self, guest: _Guest, theirs: Any) -> None:
        """Refuses a host alone that does not hold what the others train with.

        Args: theirs: its digests, of the kinds of parts that it knows.
        """
        ours = self._digests() or {}
        if not isinstance(theirs, dict):
            return guest.connection.close(OTHER_PROGRAM)
        kinds = {name.partition(" ")[0] for name in theirs}
        differing = sorted(
            name
            for name in ours.keys() | theirs.keys()
            if name.partition(" ")[0] in kinds and ours.get(name) != theirs.get(name)
        )
        guest.proven = not differing
        if differing:
            text = f"it differs from the hosts that train in {listed(differing)}"
            host = guest.handshake.host
            self._report_refused(f"refused host {host}, and goes on without it: {text}")
            what = f"host {self._mine.host} refused this one, {host}: {text}"
            _refuse(guest.connection, what, "hosts_differ")

    def _report_refused(self, text: str) -> None:
        """Says it once; it calls every second and may be a stranger."""
        if text not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused.add(text)
            self._say(text)

    def _fail(self, error: LaunchError) -> NoReturn:
        """Raises: this error, which the guests get as well."""
        self._tell_guests({"type": "refused", "text": str(error), "code": error.code})
        raise error

    def _tell_guests(self, message: Message) -> None:
        for guest in self._guests.values():
            guest.connection.send(message)


class _Caller:
    """Any other host, until the hub begins a world with it."""

    def __init__(
        self,
        mine: Handshake,
        port: int,
        say: Callable[[str], None],
        token: str,
        resolve: Callable[[str], str | None],
        compare: Sequence[str],
    ) -> None:
        self._compare = compare
        self._child: child.Process | None = None  # runs `compare`
        self._mine, self._port, self._say, self._token = mine, port, say, token
        self._resolve, self._looked_up = resolve, 0.0
        self._hub = mine.hosts[0]  # its address, as far as known
        self._connection: Connection | None = None
        self._called = self._beat = 0.0
        self._joined = False
        self._tried, self._said = "no answer yet", ""
        self._listener: socket.socket | None = None
        self._callers: list[Connection] = []  # that may take this host for the hub
        self._answered: set[str] = set()  # what was said of them
        if not mine.attempt:
            with contextlib.suppress(OSError):  # the port is in use here, or the address not local
                self._listener = open_listener(mine.host, port)

    def wait(self, seconds: float, received: Sequence[int]) -> ControlChannel:
        """Calls the hub until it begins a world; as `rendezvous`."""
        begin = since = reported = time.monotonic()
        while True:
            if received:
                self._stop(received)
            connection = self._connection or self._call()
            if connection is None or connection.closed is not None:  # there is no way to the hub
                time.sleep(_POLL_SECONDS)
            else:
                calling = [connection] if connection.connecting else []
                wait_for_any([] if calling else [connection], _POLL_SECONDS, calling)
            if connection is not None:
                for message in connection.receive():
                    channel = self._obey(connection, message)
                    if channel is not None:
                        return channel
                self._look_after(connection)
            self._hear_child()
            self._answer_calls()
            now = time.monotonic()
            if self._joined:  # the hub knows who is missing, and for how long
                since = now
                continue
            text = f"still waiting for 1 of {len(self._mine.hosts)} hosts on port {self._port}: "
            text += f"{self._hub}, the first of --ips here ({self._tried})"
            if now - since > seconds:
                raise LaunchError(
                    f"gave up after {seconds:g} s (--start_timeout): {text}", code="hosts_missing"
                )
            if now - reported >= _REPORT_SECONDS:
                reported = now
                self._say(f"{text} ({now - begin:.0f} s)")

    def _answer_calls(self) -> None:
        """Refuses hosts whose --ips begin with another one; of others the hub is the judge."""
        if self._listener is None:
            return
        mine = self._mine
        with contextlib.suppress(OSError):  # BlockingIOError: no connection
            self._callers.append(Connection(self._listener.accept()[0], self._token))
        for caller in list(self._callers):
            messages = caller.receive()
            theirs = read_handshake(messages[0]) if messages else None
            # One of another run may have an address that a name had here before.
            if theirs is not None and theirs.host in mine.hosts and not mine.same_hub(theirs):
                found = "\n".join(differences(mine, theirs))
                _refuse(caller, f"this host was started differently.\n{found}", "hosts_differ")
                if found not in self._answered and len(self._answered) < _MOST_REFUSED:
                    self._answered.add(found)
                    self._say(f"rejected a call from {caller.peer}: {found}")
            old = time.monotonic() - caller.opened > _HANDSHAKE_SECONDS
            if messages or old or caller.closed is not None or len(self._callers) > _CALLERS:
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

    def _stop(self, received: Sequence[int]) -> NoReturn:
        """Raises Stopped; before a restart, stops the other hosts, too.

        At the very start they keep waiting: the command is being typed again.
        """
        if self._connection is not None and self._joined:
            if self._mine.is_elastic and is_notice(received):
                self._connection.send({"type": "left"})
            elif self._mine.attempt:
                self._connection.send({"type": "stopped"})
        raise Stopped

    def _call(self) -> Connection | None:
        """A new connection to the hub; None: it was called just now."""
        now = time.monotonic()
        if now - self._called < _CALL_SECONDS:
            return None
        self._called = now
        if self._mine.has_names and now - self._looked_up >= _LOOK_UP_SECONDS:
            self._looked_up = now
            self._hub = self._resolve(self._mine.names[0]) or self._hub
        self._connection = Connection.call(self._hub, self._port, self._mine.host, self._token)
        self._connection.send(self._mine.message())
        return self._connection

    def _look_after(self, connection: Connection) -> None:
        """Notices its end, and says that this host still waits."""
        now, over = time.monotonic(), connection.closed
        silent = 0.0 if connection.connecting else now - connection.heard
        if silent > (_TIMEOUT_SECONDS if self._joined else _HANDSHAKE_SECONDS):
            over = over or ("no answer" if self._joined else connection.silence)
        elif self._joined and now - self._beat > _BEAT_SECONDS:
            self._beat = now
            connection.send({"type": "beat"})
        if over:
            connection.close()
            self._connection, self._joined, self._tried = None, False, over

    def _obey(self, connection: Connection, message: Message) -> ControlChannel | None:
        """What the hub says; the channel once a world begins with this host.

        Raises: LaunchError.  Stopped.
        """
        kind, text = message["type"], text_of(message, "text")
        if kind == "joined":
            self._joined = True
        elif kind == "prove":
            self._prove(connection)
        elif kind == "taken":
            connection.close(_TAKEN)  # it may be this host before its power was lost
        elif kind == "waiting" and text != self._said:
            self._said = text
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
            code = text_of(message, "code", 100)
            if code != "host_refused":
                raise Failure(LaunchError.kind, code, text).error()
            if not self._mine.has_names:
                raise LaunchError(text, code="host_refused")
            connection.close(text)  # a name may have the address that is another run's hub by now
        elif kind == "begin" and self._joined:
            hosts = words_of(message, "hosts") or ()
            if hosts[1:] and self._mine.host in hosts:
                self._say(_connected(hosts, self._mine))
                return _channel(self._mine, message, {hosts[0]: connection}, self._say)
            connection.close(OTHER_PROGRAM)
        return None

    def _prove(self, connection: Connection) -> None:
        """Begins to find what this host would train with."""
        if not self._compare:  # a script of others: ranks compare themselves as they start
            connection.send({"type": "digests", "digests": {}})
        elif self._child is None:
            self._say("comparing configuration, code and data with those of the hosts that train")
            self._child = child.start(self._compare, env=child.own_environment())

    def _hear_child(self) -> None:
        """Sends the digests once they are there.

        Raises: LaunchError: this host cannot read what it would train with.
        """
        if self._child is None or self._child.poll() is None:
            return
        code, self._child = self._child.returncode, None
        if code:
            raise LaunchError(
                "what this host would train with cannot be read here (see above)",
                code="host_not_ready",
                where=f"host {self._mine.host}",
                fix="mend that and start it again; the others go on without it",
            )
        if self._connection is not None and self._joined:
            found = read_json(Path(self._compare[-1]))
            self._connection.send({"type": "digests", "digests": found})


def _connected(hosts: Sequence[str], mine: Handshake) -> str:
    """`2 of 3 hosts are connected, without 10.0.0.3`"""
    count, of_all = len(hosts), len(mine.hosts)
    if count == of_all:
        return f"all {count} hosts are connected"
    absent = [host for host in mine.hosts if host not in hosts]
    return f"{count} of {of_all} hosts are connected, without {listed(absent)}"


def _channel(
    mine: Handshake,
    begin: Message,
    peers: Mapping[str, Connection],
    say: Callable[[str], None],
    hub: Hub | None = None,
) -> ControlChannel:
    """The channel of a world, from the message with which the hub begins it."""
    return ControlChannel(
        mine.host,
        words_of(begin, "hosts") or (),
        peers,
        say,
        attempt=integer_of(begin, "attempt", 0, MOST_RESTARTS) or 0,
        changes=integer_of(begin, "changes", 0, MOST_RESTARTS) or 0,
        skip=steps_of(begin) or (),
        nonce=text_of(begin, "nonce", 100),
        is_elastic=mine.is_elastic,
        hub=hub,
    )


def _refuse(caller: Connection, text: str, code: str = "host_refused") -> None:
    caller.send({"type": "refused", "text": text, "code": code})
    caller.close()


def _listen(mine: Handshake, port: int) -> socket.socket:
    """Where the others call.  Raises: LaunchError: the port is in use."""
    for address in (mine.host, ""):  # an address of --host may be one that only others see
        try:
            return open_listener(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                break
    raise port_in_use(port, len(mine.hosts))
