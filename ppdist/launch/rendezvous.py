"""Rendezvous of a run's hosts: they find each other and compare.

    handshake    what each host was started with, and what must agree
    rendezvous   all hosts listen on the start port; the first calls the others, they call it
    door         where the first of a running world hears of hosts that come back

Which of them train together is decided in membership.py.

So two runs of rank 0, ranks that would wait for ever or that would train different things are one
message on every host instead.  Each host says its own address: names of --ips may be known late, or
mean another address elsewhere, and the first host tells all where everybody is.

Who belongs to a job says a token that its user may give (connection.py).  Without one nothing is
promised against strangers (docs/security.md).
"""

import contextlib
import errno
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import PurePath
from typing import Any, NoReturn

from ppdist.common.errors import Failure, LaunchError
from ppdist.common.limits import allow_files
from ppdist.launch.connection import (
    OTHER_PROGRAM,
    OTHER_TOKEN,
    RUNNING,
    Connection,
    Message,
    integer_of,
    open_listener,
    text_of,
    wait_for_any,
)
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.lease import Lease
from ppdist.launch.membership import Gathering, Knocks, Memory
from ppdist.launch.network import MOST_HOSTS, listed, port_in_use, typed_hosts
from ppdist.launch.options import MOST_RESTARTS, MOST_SECONDS, Options
from ppdist.launch.signals import Stopped, is_notice
from ppdist.launch.topology import LaunchPlan, installed_version

_LIST_LIMIT, _WORD_LIMIT = MOST_HOSTS, 4096


@dataclass(frozen=True)
class Handshake:
    """One host's view of the run."""

    host: str  # which of `hosts` it is
    hosts: tuple[str, ...]  # addresses
    processes: int  # on this host
    device: str  # cpu, gpu or another kind of card
    script: str
    arguments: tuple[str, ...]
    ppdist: str  # versions
    paddle: str
    names: tuple[str, ...] = ()  # of the hosts, as they were typed
    max_restart: int = 0
    min_hosts: int = 0  # 0: all of them
    rejoin_seconds: int = 0
    attempt: int = 0  # how many worlds of the run this host has seen end
    changes: int = 0  # how many of them because a host went or came
    skip: tuple[int, ...] = ()  # steps that failed twice and are left out
    identity: str = ""  # of this fleetrun, drawn at random

    def message(self) -> Message:
        """As it is sent."""
        return {"type": "handshake"} | {
            each.name: getattr(self, each.name) for each in fields(self)
        }

    @property
    def place(self) -> int:
        """Of the host in --ips, from 0."""
        return self.hosts.index(self.host)

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on without hosts that are lost."""
        return 0 < self.min_hosts < len(self.hosts)

    @property
    def has_names(self) -> bool:
        """Whether hosts were named: names may get other addresses."""
        return self.names not in ((), self.hosts)

    def same_names(self, theirs: "Handshake") -> bool:
        """Whether the same hosts were typed; names may mean other addresses there."""
        return theirs.names == self.names != ()


def own_handshake(
    options: Options, plan: LaunchPlan, attempt: int, changes: int, skip: tuple[int, ...]
) -> Handshake:
    """What this host says."""
    return Handshake(
        host=plan.host,
        hosts=plan.hosts,
        processes=plan.processes,
        device=plan.device,
        script=options.script,
        arguments=options.script_arguments,
        ppdist=installed_version("ppdist"),
        paddle=installed_version("paddlepaddle-gpu") or installed_version("paddlepaddle"),
        names=tuple(typed_hosts(options.ips or "")),
        max_restart=options.max_restart,
        min_hosts=options.min_hosts or 0,
        rejoin_seconds=options.rejoin_seconds,
        attempt=attempt,
        changes=changes,
        skip=skip,
        identity=secrets.token_hex(16),
    )


def read_handshake(message: Message) -> Handshake | None:
    """None: the message holds no handshake."""
    if message["type"] != "handshake":
        return None
    values: dict[str, Any] = {
        "processes": integer_of(message, "processes", 1, 4096),
        "max_restart": integer_of(message, "max_restart", 0, MOST_RESTARTS),
        "min_hosts": integer_of(message, "min_hosts", 0, _LIST_LIMIT),
        "rejoin_seconds": integer_of(message, "rejoin_seconds", 0, MOST_SECONDS),
        "attempt": integer_of(message, "attempt", 0, MOST_RESTARTS),
        "changes": integer_of(message, "changes", 0, MOST_RESTARTS),
        "skip": _steps(message),
        **{key: _words(message, key) for key in ("hosts", "arguments", "names")},
    }
    if None in values.values() or len(values["names"]) not in (0, len(values["hosts"])):
        return None
    for each in fields(Handshake):
        if each.name not in values:
            values[each.name] = text_of(message, each.name, _WORD_LIMIT)
    return Handshake(**values) if values["host"] in values["hosts"] else None


def _words(message: Message, key: str) -> tuple[str, ...] | None:
    """A list of texts in a message, or None."""
    words = message.get(key)
    if not isinstance(words, list) or len(words) > _LIST_LIMIT:
        return None
    if not all(isinstance(word, str) and len(word) <= _WORD_LIMIT for word in words):
        return None
    return tuple(words)


def _steps(message: Message) -> tuple[int, ...] | None:
    """The steps to leave out in a message, or None."""
    steps = message.get("skip")
    if not isinstance(steps, list) or len(steps) > _LIST_LIMIT:
        return None
    if not all(type(step) is int and 0 < step < 10**12 for step in steps):
        return None
    return tuple(steps)


def differences(mine: Handshake, theirs: Handshake) -> list[str]:
    """What keeps two hosts from training together, with both sides."""
    found = []

    def differ(what: str, own: str, other: str, remedy: str) -> None:
        if own != other:
            found.append(f"{what}: {mine.host} has {own}, {theirs.host} has {other}; {remedy}")

    if not mine.same_names(theirs):
        remedy = "type the same hosts in the same order everywhere (rank 0's host stands first)"
        differ("--ips", ",".join(mine.hosts), ",".join(theirs.hosts), remedy)
    remedy = "ranks are numbered by it: give the same --nproc_per_node or number of cards"
    differ("processes on a host", str(mine.processes), str(theirs.processes), remedy)
    remedy = "gloo and NCCL cannot talk to each other: use cards on all hosts, or on none"
    differ("device", mine.device, theirs.device, remedy)
    remedy = "start the same script on every host"
    differ("script", PurePath(mine.script).name, PurePath(theirs.script).name, remedy)
    for own, other in _different_words(mine.arguments, theirs.arguments):
        has_path = ("/" in own or "/" in other) and "=" not in own + other
        same_file = has_path and PurePath(own).name == PurePath(other).name != ""
        if not same_file:
            remedy = "start every host with the same command"
            differ("arguments of the script", own or "none", other or "none", remedy)
    remedy = "hosts restart together: give the same --max_restart on every host"
    differ("restarts", str(mine.max_restart), str(theirs.max_restart), remedy)
    remedy = "hosts must agree on when to go on without one: give the same options on every host"
    differ("--min_hosts", str(mine.min_hosts), str(theirs.min_hosts), remedy)
    differ("--rejoin_seconds", str(mine.rejoin_seconds), str(theirs.rejoin_seconds), remedy)
    remedy = "install the same version on every host"
    differ("ppdist", mine.ppdist or "none", theirs.ppdist or "none", remedy)
    differ("paddle", mine.paddle or "none", theirs.paddle or "none", remedy)
    return found


def _different_words(mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    own, other = _of_the_run(mine), _of_the_run(theirs)
    if len(own) == len(other):
        return [pair for pair in zip(own, other) if pair[0] != pair[1]]
    # One has more: what both have in the same order at the beginning and the end says nothing.
    start = _same(own, other)
    end = _same(own[start:][::-1], other[start:][::-1])
    return [(" ".join(own[start : len(own) - end]), " ".join(other[start : len(other) - end]))]


def _same(own: Sequence[str], other: Sequence[str]) -> int:
    """How many words are the same from the beginning on."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(own, other))))


def _of_the_run(words: Sequence[str]) -> list[str]:
    """The arguments without those that set where something lies on this host."""
    # Here, because reading Sections would take half of the time and memory of fleetrun's start.
    from ppdist.config.distributed import PER_HOST_KEYS

    kept = [word for word in words if word.partition("=")[0] not in PER_HOST_KEYS]
    alone = len(kept) < len(words)  # an -o may have lost all its values
    return [
        word
        for word, following in zip(kept, [*kept[1:], "-"])
        if not (alone and word == "-o" and following.startswith("-"))
    ]


_POLL_SECONDS = 0.1
_REPORT_SECONDS = 10.0  # between two lines that say who is missing
_LOOK_UP_SECONDS = 5.0  # between two questions for the address behind a name
_CALL_SECONDS = 1.0  # between two calls of one host
_HANDSHAKE_SECONDS = 10.0  # for an answer of who has taken the call, or who has called
_TIMEOUT_SECONDS = 60.0
_CALLERS = 64  # of unknown addresses, that have not said who they are
# Calls in a row that meet a run in progress, until this host gives up: a call a second, for longer
# than the others need to miss the host that this one may have come back as, and for as long as a
# name may be cached that was another run's host.
_BUSY_CALLS = 30
_OTHER_FILES = 64  # of fleetrun, but connections
LATER = "the others train; this host is taken in at their next checkpoint"
_MOST_REFUSED = 20  # lines about callers that were refused


def rendezvous(
    mine: Handshake,
    port: int,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int] = (),
    token: str = "",
    resolve: Callable[[str], str | None] = lambda name: None,
    memory: Memory | None = None,
    lease: Lease | None = None,
) -> ControlChannel:
    """Waits for the hosts of the next world and connects them.

    For a restart they meet again.  A host that was lost and is started again joins them: it takes
    over from the others how often the run was restarted, and which steps are left out.

    Args:
        port: of every host.
        seconds: how long to wait.
        say: prints a line for the user.
        received: signals so far; with one the waiting ends.
        token: of the job; hosts that do not know it are refused.
        resolve: the address behind a name of --ips by now, or None.
        memory: of earlier worlds; gets the next.
        lease: of the job, for hosts that share output_dir.
    Raises: LaunchError: a host does not come in time, or was started with something else.  Stopped.
    """
    memory, lease = memory or Memory(), lease or Lease()
    hosts = _Rendezvous(mine, port, say, token, resolve, memory, lease)
    try:
        hosts.wait(seconds, received)
        return hosts.channel()
    except BaseException:
        hosts.leave()
        raise


class _Rendezvous:
    """Hosts are counted by their place in --ips."""

    def __init__(
        self,
        mine: Handshake,
        port: int,
        say: Callable[[str], None],
        token: str,
        resolve: Callable[[str], str | None],
        memory: Memory,
        lease: Lease,
    ) -> None:
        self.mine, self.port, self.say, self.token = mine, port, say, token
        self.resolve, self.looked_up = resolve, dict.fromkeys(range(len(mine.hosts)), 0.0)
        self.hosts = list(mine.hosts)  # addresses, as far as known
        self.memory, self.lease = memory, lease
        self.links: dict[int, Connection] = {}  # to the hub, or of the hub to those that follow it
        self.identities: dict[int, str] = {}
        self.callers: list[Connection] = []  # that have not yet joined
        self.calls: dict[int, Connection] = {}  # begun here, of hosts that have not yet joined
        self.met: dict[Connection, Handshake] = {}  # started alike, and not yet joined
        self.meeting: Connection | None = None  # one of them, while it is met
        self.tried: dict[int, str] = {}  # what came of the last call
        self.called: dict[int, float] = {}
        self.busy: Counter[int] = Counter()  # calls in a row that met a run in progress
        self.refused: set[str] = set()  # what was said of callers
        # The most that any host has seen.
        self.attempt, self.changes, self.skip = mine.attempt, mine.changes, set(mine.skip)
        if mine.is_first or mine.is_elastic:  # who calls while it is called has two connections
            allow_files(2 * len(mine.hosts) + _CALLERS + _OTHER_FILES)
        self.listener = _listen(mine, port)
        self.since = time.monotonic()  # the latest news that the waiting is worth it
        self.gathering = Gathering(
            memory, mine.place, len(mine.hosts), mine.min_hosts or len(mine.hosts),
            mine.rejoin_seconds, self.since, self._send, self._drop, lease.take,
        )  # fmt: skip

    @property
    def is_hub(self) -> bool:
        return self.gathering.hub == self.mine.place

    @property
    def missing(self) -> list[int]:
        """Hosts that this one would like to reach."""
        return self.gathering.wanted(time.monotonic())

    def wait(self, seconds: float, received: Sequence[int]) -> None:
        begin = reported = time.monotonic()
        while self.gathering.world is None:
            if received:
                self._stop(received)
            self._call_missing()
            self._pause()
            self._take_calls()
            for caller in list(self.callers):
                self._hear(caller)
            for place, call in list(self.calls.items()):
                self._hear(call, place)
            self._hear_joined()
            now = time.monotonic()
            self.gathering.tick(now)
            if not self.is_hub:
                self.lease.release()
            if self.gathering.world is not None:
                return
            # Who has joined leaves it to the hub, which knows who is missing.
            timeout = seconds + _TIMEOUT_SECONDS * (not self.is_hub)
            if now - self.since > timeout:
                what = f"gave up after {seconds:g} s (--start_timeout): {self._missing_hosts()}"
                self._fail(LaunchError(what, code="hosts_missing"))
            if now - reported >= _REPORT_SECONDS:
                reported = now
                text = f"{self._missing_hosts()} ({now - begin:.0f} s)"
                if self.is_hub or self.missing:
                    self.say(text)
                if self.is_hub:
                    waiting = f"host {self.mine.host}: {text}"
                    self._tell_joined({"type": "waiting", "text": waiting})

    def channel(self) -> ControlChannel:
        world, own = self.gathering.world, self.mine.place
        assert world is not None
        self._close_pending()
        places, door = sorted(world.places), None
        if not self.is_hub and self.listener is not None:
            self.listener.close()
            self.listener = None
        if self.mine.is_elastic and self.listener is not None:
            there = {place: self.hosts[place] for place in places}
            door = Door(self.listener, self.mine, self.token, there)
        known = self.identities | {own: self.mine.identity}
        absent = [self.hosts[each] for each in range(len(self.hosts)) if each not in places]
        all_of = f"all {len(places)}" if not absent else f"{len(places)} of {len(self.hosts)}"
        without = f", without {', '.join(absent)}" if absent else ""
        self.say(f"{all_of} hosts are connected{without}")
        return ControlChannel(
            self.mine.host,
            [self.hosts[place] for place in places],
            {self.hosts[place]: link for place, link in self.links.items() if place in places},
            None if door else self.listener,
            self.say,
            attempt=self.attempt,
            changes=self.changes,
            skip=tuple(sorted(self.skip)),
            nonce=known[self.gathering.hub],
            is_elastic=self.mine.is_elastic,
            door=door,
        )

    def leave(self) -> None:
        self._close_pending()
        for connection in self.links.values():
            connection.close()
        if self.listener is not None:
            self.listener.close()

    def _close_pending(self) -> None:
        for connection in (*self.callers, *self.calls.values()):
            connection.close()

    def _stop(self, received: Sequence[int]) -> NoReturn:
        """Raises Stopped; before a restart, stops the other hosts, too.

        At the very start they keep waiting: the command is being typed again.
        """
        if self.mine.is_elastic and is_notice(received):
            self._tell_joined({"type": "left"})
        elif self.attempt:
            self._tell_joined({"type": "stopped"})
        raise Stopped

    def _call_missing(self) -> None:
        now = time.monotonic()
        for place in self.missing:
            if place in self.calls or now - self.called.get(place, -_CALL_SECONDS) < _CALL_SECONDS:
                continue
            self.called[place] = now
            if self.mine.has_names and now - self.looked_up[place] >= _LOOK_UP_SECONDS:
                self.looked_up[place] = now
                self.hosts[place] = self.resolve(self.mine.names[place]) or self.hosts[place]
            address, own = self.hosts[place], self.mine.host
            call = self.calls[place] = Connection.call(address, self.port, own, self.token)
            call.send(self.mine.message())

    def _pause(self) -> None:
        others = (*self.callers, *self.links.values(), *self.calls.values())
        open_ones = [each for each in others if each.closed is None]
        calling = [each for each in open_ones if each.connecting]
        reading = [each for each in open_ones if not each.connecting]
        listening = [] if self.listener is None else [self.listener]
        wait_for_any([*reading, *listening], _POLL_SECONDS, calling)

    def _take_calls(self) -> None:
        """Accepts callers; of unknown ones only the newest stay."""
        if self.listener is None:
            return
        with contextlib.suppress(OSError):  # BlockingIOError: no connection
            for _ in range(_CALLERS):
                self.callers.append(Connection(self.listener.accept()[0], self.token))
        hosts = set(self.hosts)
        known = [each for each in self.callers if each.peer in hosts]
        strangers = [each for each in self.callers if each.peer not in hosts]
        for each in (*known[: -_CALLERS - len(hosts)], *strangers[:-_CALLERS]):
            each.close()

    def _hear(self, connection: Connection, place: int | None = None) -> None:
        """Reads lines of a host that has not joined.

        Args: place: that was called.
        """
        over = ""
        for message in connection.receive():
            if self._has_joined(connection):
                self._obey(self.met[connection].place, message)
            elif not over:
                over = self._answer(connection, place, message)
        joined = self._has_joined(connection)
        if not over and not joined:
            since = connection.opened if place is None else connection.heard
            late = time.monotonic() - since > _HANDSHAKE_SECONDS and not connection.connecting
            over = connection.closed or (connection.silence if late else "")
            if not over:
                return
        self.met.pop(connection, None)
        if not joined:
            connection.close()
        if place is not None:
            del self.calls[place]
            self.tried[place] = over
            self.busy[place] = self.busy[place] + 1 if over == RUNNING and not joined else 0
            if self.busy[place] >= _BUSY_CALLS:
                error = LaunchError(
                    "a run is in progress there, and all of its hosts are connected",
                    code="run_in_progress",
                    where=f"{self.hosts[place]}:{self.port}",
                    fix="wait for its end, or give another --start_port P on every host",
                )
                self._fail(error)
            return
        self.callers.remove(connection)
        if over == OTHER_TOKEN:
            self._report_refused(f"rejected a call from {connection.peer}: {OTHER_TOKEN}")

    def _answer(self, connection: Connection, place: int | None, message: Message) -> str:
        """Handles a message of the handshake; returns why it failed, or ""."""
        theirs = read_handshake(message)
        if theirs is not None:
            return self._compare(connection, place, theirs)
        if message["type"] == "later" and place is not None and self.mine.is_elastic:
            self.since = time.monotonic()
            return LATER
        if message["type"] == "refused" and place is not None:
            text = text_of(message, "text")
            if not self.mine.has_names:  # else another run may have the address that a name had
                what = f"host {self.hosts[place]} refused this one, {self.mine.host}: {text}"
                self._fail(LaunchError(what, code="host_refused"))
            return f"it refuses this one: {text}"
        if connection in self.met:
            return self._join(self.met[connection], connection, message)
        return OTHER_PROGRAM

    def _compare(self, connection: Connection, place: int | None, theirs: Handshake) -> str:
        """Compares, and meets a host that may join; returns as `_answer`.

        Raises: LaunchError: it belongs to this run, and was started with something else.
        """
        if theirs.identity == self.mine.identity:
            return "it is this host itself"
        found = differences(self.mine, theirs)
        refusal = self._refusal(theirs, agrees=not found)
        known = self.token or place is not None or connection.peer == theirs.host
        if found and not refusal and not known:  # anybody may say so, and must not end the run
            self._report_refused(f"rejected a call from {connection.peer}: {found[0]}")
            refusal = f"it was started differently from host {self.mine.host}"
        if refusal:
            connection.send({"type": "refused", "text": refusal})
            return "it is not part of this run"
        if place is None:
            connection.send(self.mine.message())
        if found:
            connection.close()
            lines = "\n".join(found)
            what = f"host {theirs.host} was started differently.\n{lines}"
            self._fail(LaunchError(what, code="hosts_differ"))
        if theirs.place in self.links:
            return "it has joined by another connection"
        self.met[connection] = theirs
        self.meeting = connection
        self.gathering.meet(theirs.place)
        self.meeting = None
        return ""

    def _refusal(self, theirs: Handshake, agrees: bool) -> str:
        """Why a host is not part of this run, or ""."""
        if theirs.host not in self.mine.hosts and not self.mine.same_names(theirs):
            self._report_refused(f"rejected {theirs.host[:60]}: it is not among --ips of this host")
            return f"it is not among --ips {listed(self.mine.hosts)} there"
        before = self.identities.get(theirs.place)
        if self.mine.is_elastic and agrees and before not in (None, theirs.identity):
            self._drop(theirs.place)  # it was started again, and its power was gone before
            self.gathering.lose(theirs.place)
        known = self.identities | {self.mine.place: self.mine.identity}
        taken = [self.hosts[place] for place in known if known[place] != theirs.identity]
        same_place = agrees and known.get(theirs.place, theirs.identity) != theirs.identity
        if same_place or theirs.host in taken:
            self._report_refused(f"rejected a second fleetrun that says it is host {theirs.host}")
            return (
                f"another fleetrun is host {theirs.host} of this run already: it was started "
                f"twice, or --host is wrong on one of the two"
            )
        return ""

    def _report_refused(self, text: str) -> None:
        """Says it once; it calls every second and may be a stranger."""
        if text not in self.refused and len(self.refused) < _MOST_REFUSED:
            self.refused.add(text)
            self.say(text)

    def _join(self, theirs: Handshake, connection: Connection, message: Message) -> str:
        """Handles what a host says that was met; returns as `_answer`."""
        place = theirs.place
        if message["type"] == "join":
            if place in self.links:
                return "it has joined by another connection"
        elif message["type"] not in ("joined", "moved"):
            return OTHER_PROGRAM
        self.links[place], self.identities[place] = connection, theirs.identity
        self.hosts[place] = theirs.host
        self.attempt = max(self.attempt, theirs.attempt)
        self.changes = max(self.changes, theirs.changes)
        self.skip |= set(theirs.skip)
        return "" if self.gathering.hear(place, message) else OTHER_PROGRAM

    def _has_joined(self, connection: Connection) -> bool:
        theirs = self.met.get(connection)
        return theirs is not None and self.links.get(theirs.place) is connection

    def _send(self, place: int, message: Message) -> None:
        """Sends a message of the gathering."""
        if message["type"] == "begin":
            message = message | {
                "attempt": self.attempt,
                "changes": self.changes,
                "skip": sorted(self.skip),
                "hosts": self.hosts,
            }
        connection = self.links.get(place, self.meeting)
        if connection is not None:
            connection.send(message)

    def _drop(self, place: int) -> None:
        """Ends the connection to a host that follows another hub."""
        connection = self.links.pop(place, self.meeting)
        self.identities.pop(place, None)
        if connection is not None:
            connection.close("it follows another host")

    def _hear_joined(self) -> None:
        now = time.monotonic()
        for place, connection in list(self.links.items()):
            for message in connection.receive():
                if self.links.get(place) is connection:
                    self._obey(place, message)
            silent = place == self.gathering.hub and now - connection.heard > _TIMEOUT_SECONDS
            if self.mine.is_elastic and silent and connection.closed is None:
                connection.close("no answer")
            if connection.closed is not None and self.links.get(place) is connection:
                if self.gathering.world is None:
                    del self.links[place], self.identities[place]
                    self.tried[place] = "it disconnected"
                    if not self.mine.is_elastic:  # else it may follow another host now
                        self.say(f"host {self.hosts[place]} disconnected before the run began")
                self.gathering.lose(place)

    def _obey(self, place: int, message: Message) -> None:
        """Obeys the hub, or a host that stops."""
        of_hub = place == self.gathering.hub
        if message["type"] == "stopped":
            if self.is_hub:
                self._tell_joined({"type": "stopped"})
            raise Stopped
        if message["type"] == "left":
            self.memory.left |= {place}
        elif message["type"] == "waiting" and of_hub:
            self.say(text_of(message, "text"))
        elif message["type"] == "refused" and of_hub:
            text, code = text_of(message, "text"), text_of(message, "code", 100)
            raise Failure(LaunchError.kind, code, f"host {self.hosts[place]}: {text}").error()
        else:
            if message["type"] == "begin" and of_hub:
                self.attempt = integer_of(message, "attempt", 0, MOST_RESTARTS) or 0
                self.changes = integer_of(message, "changes", 0, MOST_RESTARTS) or 0
                self.skip = set(_steps(message) or ())
                hosts = _words(message, "hosts") or ()
                self.hosts = list(hosts) if len(hosts) == len(self.hosts) else self.hosts
            self.gathering.hear(place, message)

    def _missing_hosts(self) -> str:
        hub = self.gathering.hub
        if not self.is_hub:
            return f"waiting for host {self.hosts[hub]} to say that all are there"
        here, places = {self.mine.place, *self.gathering.followers}, range(len(self.hosts))
        if not (self.mine.is_first or self.mine.is_elastic):  # it can only join the first
            places = range(1)
        missing = [place for place in places if place not in here]
        whose: dict[str, list[str]] = {}  # by what came of the calls
        for place in missing:
            why = self.tried.get(place, "no answer yet")
            whose.setdefault(why, []).append(self.hosts[place])
        each = [f"{listed(hosts)} ({why})" for why, hosts in whose.items()]
        of_all = f"{len(missing)} of {len(self.hosts)} hosts on port {self.port}"
        text = f"still waiting for {of_all}: {'; '.join(each)}"
        return f"{text}; {self.gathering.waits_for}" if self.mine.is_elastic else text

    def _fail(self, error: LaunchError) -> NoReturn:
        """Raises: this error, which the hosts that have joined get as well."""
        if self.is_hub:
            self._tell_joined({"type": "refused", "text": str(error), "code": error.code})
        raise error

    def _tell_joined(self, message: Message) -> None:
        for connection in self.links.values():
            connection.send(message)


class Door:
    """Where the hub of a running world hears of returning hosts.

    Args: world: addresses of its hosts, by place.
    """

    def __init__(
        self, listener: socket.socket, mine: Handshake, token: str, world: Mapping[int, str]
    ) -> None:
        self._listener, self._mine, self._token, self._world = listener, mine, token, world
        self._callers: list[Connection] = []
        self._knocks = Knocks()

    def look(self) -> None:
        """Answers whoever calls."""
        with contextlib.suppress(OSError):  # BlockingIOError: no connection
            for _ in range(_CALLERS):
                self._callers.append(Connection(self._listener.accept()[0], self._token))
        now = time.monotonic()
        for caller in list(self._callers):
            for message in caller.receive()[:1]:
                self._answer(caller, message, now)
            if caller.closed is None and now - caller.opened > _HANDSHAKE_SECONDS:
                caller.close()
            if caller.closed is not None:
                self._callers.remove(caller)

    def waiting(self) -> list[str]:
        """Hosts that ask to be taken in, as typed or by address."""
        names = self._mine.names or self._mine.hosts
        return [names[place] for place in sorted(self.places())]

    def replaced(self) -> list[str]:
        """Addresses of hosts of this world whose fleetrun was started anew."""
        return [self._world[place] for place in self.places() & self._world.keys()]

    def places(self) -> frozenset[int]:
        """Of hosts that asked just now."""
        return self._knocks.waiting(time.monotonic())

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        self._listener.close()

    def _answer(self, caller: Connection, message: Message, now: float) -> None:
        theirs = read_handshake(message)
        if theirs is None:
            caller.close()
            return
        found = differences(self._mine, theirs)
        if found:
            caller.send({"type": "refused", "text": found[0]})
        else:
            caller.send({"type": "later"})
            self._knocks.hear(theirs.place, now)
        caller.close()


def _listen(mine: Handshake, port: int) -> socket.socket | None:
    """Where the others call; None where they need not and cannot."""
    for address in (mine.host, ""):  # an address of --host may be one that only others see
        try:
            return open_listener(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                break
    if mine.is_first or mine.is_elastic:
        raise port_in_use(port, len(mine.hosts))
    return None
