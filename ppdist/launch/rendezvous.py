"""Rendezvous of a run's hosts: they find each other and compare.

    handshake    what each host was started with, and what must agree
    rendezvous   all hosts listen on the start port; the first calls the others, they call it

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
from collections.abc import Callable, Sequence
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
from ppdist.launch.network import MOST_HOSTS, listed, port_in_use, typed_hosts
from ppdist.launch.options import MOST_RESTARTS, Options
from ppdist.launch.signals import Stopped
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
    attempt: int = 0  # how often this host has restarted the run
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
    def has_names(self) -> bool:
        """Whether hosts were named: names may get other addresses."""
        return self.names not in ((), self.hosts)

    def same_names(self, theirs: "Handshake") -> bool:
        """Whether the same hosts were typed; names may mean other addresses there."""
        return theirs.names == self.names != ()


def own_handshake(
    options: Options, plan: LaunchPlan, attempt: int, skip: tuple[int, ...]
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
        attempt=attempt,
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
        "attempt": integer_of(message, "attempt", 0, MOST_RESTARTS),
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
_MOST_REFUSED = 20  # lines about callers that were refused


def rendezvous(
    mine: Handshake,
    port: int,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int] = (),
    token: str = "",
    resolve: Callable[[str], str | None] = lambda name: None,
) -> ControlChannel:
    """Waits for all hosts of the run and connects them.

    For a restart they meet again.  A host that was lost and is started again joins them: it takes
    over from the others how often the run was restarted, and which steps are left out.

    Args:
        port: of every host.
        seconds: how long to wait.
        say: prints a line for the user.
        received: signals so far; with one the waiting ends.
        token: of the job; hosts that do not know it are refused.
        resolve: the address behind a name of --ips by now, or None.
    Raises: LaunchError: a host does not come in time, or was started with something else.  Stopped.
    """
    hosts = _Rendezvous(mine, port, say, token, resolve)
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
    ) -> None:
        self.mine, self.port, self.say, self.token = mine, port, say, token
        self.resolve, self.looked_up = resolve, dict.fromkeys(range(len(mine.hosts)), 0.0)
        self.hosts = list(mine.hosts)  # addresses, as far as known
        self.joined: dict[Connection, int] = {}  # the first host has all the others', they have its
        self.identities: dict[int, str] = {}  # of those that have joined
        self.callers: list[Connection] = []  # that have not yet joined
        self.calls: dict[int, Connection] = {}  # begun here, of hosts that have not yet joined
        self.firsts: dict[Connection, Handshake] = {}  # what the first host has said of itself
        self.tried: dict[int, str] = {}  # what came of the last call
        self.called: dict[int, float] = {}
        self.busy: Counter[int] = Counter()  # calls in a row that met a run in progress
        self.refused: set[str] = set()  # what was said of callers
        self.complete = False
        self.attempt, self.skip = mine.attempt, set(mine.skip)  # the most that any host has seen
        if mine.is_first:  # who calls while it is called has two connections
            allow_files(2 * len(mine.hosts) + _CALLERS + _OTHER_FILES)
        self.listener = _listen(mine, port)

    @property
    def missing(self) -> list[int]:
        expected = range(1, len(self.hosts)) if self.mine.is_first else (0,)
        return [place for place in expected if place not in self.identities]

    def wait(self, seconds: float, received: Sequence[int]) -> None:
        begin = reported = time.monotonic()
        while not self.complete:
            if received:
                self._stop()
            self._call_missing()
            self._pause()
            self._take_calls()
            for caller in list(self.callers):
                self._hear(caller)
            for place, call in list(self.calls.items()):
                self._hear(call, place)
            self._hear_joined()
            if self.mine.is_first and not self.missing:
                go = {"type": "go", "attempt": self.attempt, "skip": sorted(self.skip)}
                self._tell_joined(go | {"hosts": self.hosts})
                self.complete = True
            now = time.monotonic()
            # Who has joined leaves it to the first host, which knows who is missing.
            timeout = seconds + _TIMEOUT_SECONDS * (not self.mine.is_first and not self.missing)
            if not self.complete and now - begin > timeout:
                what = f"gave up after {seconds:g} s (--start_timeout): {self._missing_hosts()}"
                self._fail(LaunchError(what, code="hosts_missing"))
            if not self.complete and now - reported >= _REPORT_SECONDS:
                reported = now
                text = f"{self._missing_hosts()} ({now - begin:.0f} s)"
                if self.missing:
                    self.say(text)
                if self.mine.is_first:
                    waiting = f"host {self.mine.host}: {text}"
                    self._tell_joined({"type": "waiting", "text": waiting})

    def channel(self) -> ControlChannel:
        self._close_pending()
        if not self.mine.is_first and self.listener is not None:
            self.listener.close()
            self.listener = None
        self.say(f"all {len(self.hosts)} hosts are connected")
        return ControlChannel(
            self.mine.host,
            self.hosts,
            {self.hosts[place]: connection for connection, place in self.joined.items()},
            self.listener,
            self.say,
            attempt=self.attempt,
            skip=tuple(sorted(self.skip)),
            nonce=self.identities.get(0, self.mine.identity),
        )

    def leave(self) -> None:
        self._close_pending()
        for connection in self.joined:
            connection.close()
        if self.listener is not None:
            self.listener.close()

    def _close_pending(self) -> None:
        for connection in (*self.callers, *self.calls.values()):
            connection.close()

    def _stop(self) -> NoReturn:
        """Raises Stopped; before a restart, stops the other hosts, too.

        At the very start they keep waiting: the command is being typed again.
        """
        if self.attempt:
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
        others = (*self.callers, *self.joined, *self.calls.values())
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
            if connection in self.joined:
                self._obey(message)
            elif not over:
                over = self._answer(connection, place, message)
        joined = connection in self.joined
        if not over and not joined:
            since = connection.opened if place is None else connection.heard
            late = time.monotonic() - since > _HANDSHAKE_SECONDS and not connection.connecting
            over = connection.closed or (connection.silence if late else "")
            if not over:
                return
        self.firsts.pop(connection, None)
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
        if message["type"] == "joined" and connection in self.firsts:
            self._join(self.firsts[connection], connection)
            return ""
        if message["type"] == "refused" and place is not None:
            text = text_of(message, "text")
            if not self.mine.has_names:  # else another run may have the address that a name had
                what = f"host {self.hosts[place]} refused this one, {self.mine.host}: {text}"
                self._fail(LaunchError(what, code="host_refused"))
            return f"it refuses this one: {text}"
        return OTHER_PROGRAM

    def _compare(self, connection: Connection, place: int | None, theirs: Handshake) -> str:
        """Compares, and lets a host join that may; returns as `_answer`.

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
        if not self.mine.is_first:
            self.firsts[connection] = theirs
        elif theirs.place in self.identities:
            return "it has joined by another connection"
        else:
            connection.send({"type": "joined"})
            self._join(theirs, connection)
        return ""

    def _refusal(self, theirs: Handshake, agrees: bool) -> str:
        """Why a host is not part of this run, or ""."""
        if theirs.host not in self.mine.hosts and not self.mine.same_names(theirs):
            self._report_refused(f"rejected {theirs.host[:60]}: it is not among --ips of this host")
            return f"it is not among --ips {listed(self.mine.hosts)} there"
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

    def _join(self, theirs: Handshake, connection: Connection) -> None:
        self.joined[connection] = theirs.place
        self.identities[theirs.place] = theirs.identity
        self.hosts[theirs.place] = theirs.host
        self.attempt = max(self.attempt, theirs.attempt)
        self.skip |= set(theirs.skip)

    def _hear_joined(self) -> None:
        for connection, place in list(self.joined.items()):
            for message in connection.receive():
                self._obey(message)
            if connection.closed is not None and not self.complete:
                del self.joined[connection], self.identities[place]
                self.tried[place] = "it disconnected"
                self.say(f"host {self.hosts[place]} disconnected before the run began")

    def _obey(self, message: Message) -> None:
        """Obeys the first host, or a host that stops."""
        if message["type"] == "stopped":
            if self.mine.is_first:
                self._stop()
            raise Stopped
        if self.mine.is_first:
            return
        if message["type"] == "go":
            self.complete = True
            self.attempt = integer_of(message, "attempt", 0, MOST_RESTARTS) or 0
            self.skip = set(_steps(message) or ())
            self.hosts = list(_words(message, "hosts") or self.hosts)
        elif message["type"] == "waiting":
            self.say(text_of(message, "text"))
        elif message["type"] == "refused":
            text, code = text_of(message, "text"), text_of(message, "code", 100)
            raise Failure(LaunchError.kind, code, f"host {self.hosts[0]}: {text}").error()

    def _missing_hosts(self) -> str:
        if not self.missing:
            return f"waiting for host {self.hosts[0]} to say that all are there"
        whose: dict[str, list[str]] = {}  # by what came of the calls
        for place in self.missing:
            why = self.tried.get(place, "no answer yet")
            whose.setdefault(why, []).append(self.hosts[place])
        each = [f"{listed(hosts)} ({why})" for why, hosts in whose.items()]
        of_all = f"{len(self.missing)} of {len(self.hosts)} hosts on port {self.port}"
        return f"still waiting for {of_all}: {'; '.join(each)}"

    def _fail(self, error: LaunchError) -> NoReturn:
        """Raises: this error, which the hosts that have joined get as well."""
        if self.mine.is_first:
            self._tell_joined({"type": "refused", "text": str(error), "code": error.code})
        raise error

    def _tell_joined(self, message: Message) -> None:
        for connection in self.joined:
            connection.send(message)


def _listen(mine: Handshake, port: int) -> socket.socket | None:
    """Where the others call; None where they need not and cannot."""
    for address in (mine.host, ""):  # an address of --host may be one that only others see
        try:
            return open_listener(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                break
    if mine.is_first:
        raise port_in_use(port, len(mine.hosts))
    return None
