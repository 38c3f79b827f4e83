"""The hosts of a run meet before anything is started, and find out whether they can train together.

The first host's fleetrun listens on the start port, those of the others call it until it answers.
Each says what it was started with (greeting.py), so what would be two runs of rank 0, ranks that
wait for ever or ranks that train different things is one message on every host instead.  Hosts that
do not come are called by the first: who was given another order of hosts is found that way.
"""

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ppdist.errors import Failure, LaunchError
from ppdist.launch.connection import Connection, Message, integer_of, text_of
from ppdist.launch.greeting import Greeting, differences, read_greeting, remarks, steps_of
from ppdist.launch.line import Line
from ppdist.launch.membership import TOKEN_VARIABLE, proof, proves
from ppdist.launch.names import Dispute, Look
from ppdist.launch.network import port_in_use
from ppdist.launch.options import MOST_RESTARTS
from ppdist.launch.signals import Stopped

REPORT_SECONDS = 10.0  # between two lines that say who is missing
_LOOK_SECONDS = 5.0  # between two looks whether names of --ips have other addresses
_CALL_SECONDS = 1.0  # between two calls of one host
_GREETING_SECONDS = 10.0  # for an answer of who has taken the call
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_GUESTS = 256  # callers that have not said who they are
_MOST_REFUSED = 20  # lines about callers that were refused
_OTHER_TOKEN = f"has another {TOKEN_VARIABLE}, or none: set the same on every host"


class Moved(Exception):
    """While hosts are waited for, a name of --ips got another address: meet anew, with that."""


def meet(
    mine: Greeting,
    port: int,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int] = (),
    token: str = "",
    look: Look = lambda: None,
) -> Line:
    """Waits until all hosts of the run are there; the connections stay open as the line of the run.

    For a restart they meet again.  A host that was lost and is started again joins them: it takes
    over from the others how often the run was restarted, and which steps are left out.

    Args:
        port: of the first host.
        seconds: how long to wait.
        say: prints a line for the user.
        received: signals so far; with one the waiting ends.
        token: of the job; hosts that do not know it are refused.
        look: what names of --ips mean by now, as `Lookout.look` says it.
    Raises: LaunchError: a host does not come in time, or was started with something else.  Stopped.
        Moved.
    """
    meeting = _Meeting(mine, port, say, token)
    try:
        meeting.wait(seconds, received, look)
        return meeting.line()
    except BaseException:
        meeting.leave()
        raise


class _Meeting:
    def __init__(self, mine: Greeting, port: int, say: Callable[[str], None], token: str) -> None:
        self.mine, self.port, self.say, self.token = mine, port, say, token
        self.first = mine.hosts[0]
        self.joined: dict[str, Connection] = {}  # the first host has all the others', they have its
        self.identities: dict[str, str] = {}
        self.guests: list[Connection] = []  # have called and not yet said who they are
        self.calls: dict[str, Connection] = {}  # begun here and not yet answered
        self.tried: dict[str, str] = {}  # host -> what came of the last call
        self.called: dict[str, float] = {}
        self.refused: set[str] = set()  # what was said of callers
        self.dispute = Dispute()
        self.complete = False
        self.attempt, self.skip = mine.attempt, set(mine.skip)  # the most that any host has seen
        self.listener = _listen(mine, port)

    @property
    def missing(self) -> list[str]:
        expected = self.mine.hosts[1:] if self.mine.is_first else [self.first]
        return [host for host in expected if host not in self.joined]

    def wait(self, seconds: float, received: Sequence[int], look: Look) -> None:
        begin = time.monotonic()
        reported = looked = begin
        while not self.complete:
            if received:
                self._stop()
            self._call_missing()
            self._pause()
            self._take_calls()
            self._hear_guests()
            self._hear_calls()
            self._hear_joined()
            if self.mine.is_first and not self.missing:
                go = {"type": "go", "attempt": self.attempt, "skip": sorted(self.skip)}
                self._tell_joined(go)
                self.complete = True
            now = time.monotonic()
            if self.missing and now - looked >= _LOOK_SECONDS:
                looked = now
                self._learn(look())
            # Who has joined leaves it to the first host, which knows who is missing.
            patience = seconds + _PATIENCE_SECONDS * (not self.mine.is_first and not self.missing)
            if not self.complete and now - begin > patience:
                self._fail(
                    LaunchError(
                        f"gave up after {seconds:g} s (--start_timeout): {self._who()}",
                        code="hosts_missing",
                    )
                )
            if not self.complete and now - reported >= REPORT_SECONDS:
                reported = now
                self._report(now - begin)

    def _learn(self, found: tuple[str | None, ...] | None) -> None:
        """Raises: Moved.  LaunchError: hosts keep disagreeing about names."""
        if found is None:
            return
        if None not in found and found != self.mine.hosts:
            raise Moved
        lasting = self.dispute.lasts(found)
        if lasting:
            self._fail(LaunchError(lasting, code="hosts_disagree"))

    def _stop(self) -> NoReturn:
        """Before a restart the others must not wait for a host that ends the job.  Raises: Stopped.

        At the very start they may: the command is being typed again.
        """
        if self.attempt:
            self._tell_joined({"type": "stopped"})
        raise Stopped

    def line(self) -> Line:
        self._hang_up()
        if not self.mine.is_first and self.listener is not None:
            self.listener.close()
            self.listener = None
        self.say(f"all {len(self.mine.hosts)} hosts are here")
        line = Line(self.mine.host, self.mine.hosts, self.joined, self.listener, self.say)
        line.drawn = self.identities.get(self.first, self.mine.identity)
        line.attempt, line.skip = self.attempt, tuple(sorted(self.skip))
        line.restarts = self.mine.max_restart > 0
        return line

    def leave(self) -> None:
        self._hang_up()
        for connection in self.joined.values():
            connection.close()
        if self.listener is not None:
            self.listener.close()

    def _hang_up(self) -> None:
        for connection in (*self.guests, *self.calls.values()):
            connection.close()

    def _call_missing(self) -> None:
        now = time.monotonic()
        for host in self.missing:
            pause = _CALL_SECONDS * (3 if self.mine.is_first else 1)  # they call as well
            if host not in self.calls and now - self.called.get(host, -pause) >= pause:
                self.called[host] = now
                self.calls[host] = Connection.call(host, self.port)
                self.calls[host].send(self.mine.message())

    def _pause(self) -> None:
        open_ones = [*self.guests, *self.joined.values(), *self.calls.values()]
        reading: list[Connection | socket.socket] = [
            each for each in open_ones if each.closed is None and not each.connecting
        ]
        if self.listener is not None:
            reading.append(self.listener)
        calling = [each for each in self.calls.values() if each.closed is None and each.connecting]
        select.select(reading, calling, [], _POLL_SECONDS)

    def _take_calls(self) -> None:
        if self.listener is None:
            return
        with contextlib.suppress(OSError):  # BlockingIOError: nobody calls
            for _ in range(_GUESTS):
                self.guests.append(Connection(self.listener.accept()[0]))
        # A host says at once who it is, so those who say nothing for longest make room for others.
        for guest in self.guests[:-_GUESTS]:
            self._hear_guest(guest)
        for guest in self.guests[:-_GUESTS]:
            guest.close()
        self.guests = self.guests[-_GUESTS:]

    def _hear_guests(self) -> None:
        for guest in list(self.guests):
            self._hear_guest(guest)

    def _hear_guest(self, guest: Connection) -> None:
        messages = guest.receive()
        late = time.monotonic() - guest.opened > _GREETING_SECONDS
        theirs = read_greeting(messages[0]) if messages else None
        if theirs is None and guest.closed is None and not late and not messages:
            return
        self.guests.remove(guest)
        if theirs is None or not self._receive_guest(guest, theirs):
            guest.close()

    def _receive_guest(self, guest: Connection, theirs: Greeting) -> bool:
        """Answers who has called; True when it has joined, False when the call is over."""
        if theirs.is_signed(self.token) and self.mine.means_others(theirs):
            kind, refusal = "later", differences(self.mine, theirs)[0]
            self.dispute.hear(refusal)
        else:
            kind, refusal = "refused", self._refusal(theirs)
        if refusal:
            signed = proof(self.token, {"text": refusal, "to": theirs.identity})
            guest.send({"type": kind, "text": refusal, "proof": signed})
            return False
        guest.send(self.mine.message())
        try:
            self._compare(theirs)
        except LaunchError:
            guest.close()
            raise
        if not self.mine.is_first:  # the first host asks where we are; our own call is on its way
            return False
        self._join(theirs, guest)
        return True

    def _refusal(self, theirs: Greeting) -> str:
        """Why a caller has no place in this run, "" when it has one."""
        if not theirs.is_signed(self.token):
            self._say_refused(f"refused who says it is host {theirs.host[:60]}: it {_OTHER_TOKEN}")
            return f"this one {_OTHER_TOKEN}"
        if theirs.host not in self.mine.hosts:
            self._say_refused(
                f"refused {theirs.host[:60]}, which has called and is not among --ips of this host"
            )
            return f"it is not among --ips {','.join(self.mine.hosts)} there"
        known = self.identities.get(theirs.host)
        if theirs.host == self.mine.host or (known is not None and known != theirs.identity):
            self._say_refused(f"refused a second fleetrun that says it is host {theirs.host}")
            return (
                f"another fleetrun is host {theirs.host} of this run already: it was started "
                f"twice, or --host is wrong on one of the two"
            )
        if self.joined and not self.mine.is_first and theirs.host != self.first:
            return f"host {self.mine.host} is in a run of host {self.first} already"
        return ""

    def _say_refused(self, text: str) -> None:
        """Once each, and not for ever: it calls again every second, and may be a stranger."""
        if text not in self.refused and len(self.refused) < _MOST_REFUSED:
            self.refused.add(text)
            self.say(text)

    def _compare(self, theirs: Greeting) -> None:
        found = differences(self.mine, theirs)
        if found:
            lines = "\n".join(found)
            self._fail(
                LaunchError(
                    f"host {theirs.host} was started otherwise.\n{lines}", code="hosts_differ"
                )
            )

    def _join(self, theirs: Greeting, connection: Connection) -> None:
        for line in remarks(self.mine, theirs):
            self.say(line)
        self.joined[theirs.host] = connection
        self.attempt = max(self.attempt, theirs.attempt)
        self.skip |= set(theirs.skip)
        self.identities[theirs.host] = theirs.identity

    def _hear_calls(self) -> None:
        for host, call in list(self.calls.items()):
            messages = call.receive()
            theirs = read_greeting(messages[0]) if messages else None
            doubtful = ""
            if messages and messages[0]["type"] in ("refused", "later"):
                doubtful = self._hear_refusal(host, messages[0])
            elif theirs is not None and not theirs.is_signed(self.token):
                doubtful = f"who answers there {_OTHER_TOKEN}"
            if doubtful:
                self.tried[host] = doubtful
                del self.calls[host]
                call.close()
                continue
            if theirs is not None:
                self._compare(theirs)
            if theirs is not None and not self.mine.is_first:
                del self.calls[host]
                self._join(theirs, call)
                self._follow(messages[1:])
                continue
            busy = bool(messages) and messages[0]["type"] == "busy"
            silent = time.monotonic() - call.heard > _GREETING_SECONDS and not call.connecting
            if theirs is not None:
                self.tried[host] = f"it is there, but has not reached {self.mine.host}:{self.port}"
            elif busy:
                self.tried[host] = f"{text_of(messages[0], 'text')}; this one joins its restart"
            elif messages or silent or call.is_foreign:
                self.tried[host] = (
                    "what answers there is not a fleetrun: another program has the port; take "
                    "another with --start_port P on every host"
                )
            elif call.closed is not None:
                self.tried[host] = call.closed
            else:
                continue
            del self.calls[host]
            call.close()

    def _hear_refusal(self, host: str, message: Message) -> str:
        """What is to be thought of it, where a stranger may have said it.

        Raises: LaunchError: a host of this job has no place for this one, and never will.
        """
        text, given = text_of(message, "text"), text_of(message, "proof")
        if self.token and not proves(self.token, {"text": text, "to": self.mine.identity}, given):
            return f"who answers there refuses this one: {text}"
        if message["type"] == "later":
            self.dispute.hear(text)
            return f"{text}; both look again"
        refused = f"host {host} refused this one, {self.mine.host}: {text}"
        if self.token or not self.mine.has_names:
            self._fail(LaunchError(refused, code="host_refused"))
        self.dispute.hear(refused)  # a host of another run may have the address by now
        return f"it refuses this one: {text}"

    def _hear_joined(self) -> None:
        for host, connection in list(self.joined.items()):
            messages = connection.receive()
            if not self.mine.is_first:
                self._follow(messages)
            elif any(message["type"] == "stopped" for message in messages):
                self._stop()
            if connection.closed is not None and not self.complete:
                del self.joined[host], self.identities[host]
                self.tried[host] = "it was here and went away"
                self.say(f"host {host} went away before the run began")

    def _follow(self, messages: list[Message]) -> None:
        """What the first host says to one that has joined."""
        for message in messages:
            if message["type"] == "go":
                self.complete = True
                self.attempt = integer_of(message, "attempt", 0, MOST_RESTARTS) or 0
                self.skip = set(steps_of(message) or ())
            elif message["type"] == "stopped":
                raise Stopped
            elif message["type"] == "waiting":
                self.say(text_of(message, "text"))
            elif message["type"] == "refused":
                text, code = text_of(message, "text"), text_of(message, "code", 100)
                raise Failure(LaunchError.kind, code, f"host {self.first}: {text}").error()

    def _report(self, waited: float) -> None:
        if self.missing:
            self.say(f"{self._who()} ({waited:.0f} s)")
        if self.mine.is_first:
            text = f"host {self.first}: {self._who()} ({waited:.0f} s)"
            self._tell_joined({"type": "waiting", "text": text})

    def _who(self) -> str:
        if not self.missing:
            return f"waiting for host {self.first} to say that all are there"
        each = [
            f"host {host} ({host}:{self.port}: {self.tried.get(host, 'no answer yet')})"
            for host in self.missing
        ]
        return f"still waiting for {', '.join(each)}"

    def _fail(self, error: LaunchError) -> NoReturn:
        """Raises: this error, which the hosts that have joined get as well."""
        if self.mine.is_first:
            self._tell_joined({"type": "refused", "text": str(error), "code": error.code})
        raise error

    def _tell_joined(self, message: Message) -> None:
        for connection in self.joined.values():
            connection.send(message)


def _listen(mine: Greeting, port: int) -> socket.socket | None:
    """Where the others call; None where they need not and cannot."""
    for address in (mine.host, ""):  # an address of --host may be one that only others see
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            listener.bind((address, port))
            listener.listen()
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            break
        return listener
    if mine.is_first:
        raise port_in_use(port, len(mine.hosts))
    return None
