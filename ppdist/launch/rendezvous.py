"""Rendezvous of a run's hosts, and the control channel between them.

    connection   one JSON object a line over TCP
    keys         both ends prove that they know the token, and the command
    handshake    what each host was started with, and what must agree
    rendezvous   the first host listens on the start port, the others call it until it answers
    channel      while the run lasts, one connection from each host to the first

Hosts compare before anything is started, so two runs of rank 0, ranks that would wait for ever or
that would train different things are one message on every host instead.  Hosts that do not come are
called by the first: who was given another order of hosts is found that way.

Over the channel every host says that it is there, when it is stopped and how its ranks ended.  When
they failed on one, the others stop theirs at once; in the end all exit with one code and name one
culprit.

Whoever can reach the port can write to it, so nothing that arrives is trusted: lines and what waits
to be read have a limit, and what is not a JSON object with a `type` ends the connection.  Who
belongs to a job says a token that a user may give, and a name that every start draws anew:

    PPDIST_JOB_TOKEN   given by the user, the same on every host: a fleetrun without it is refused.
                       It is never sent, nor anything by which guesses could be tried, and the ranks
                       never get it.
    PPDIST_JOB         made here for the ranks: those of an earlier job, or of an earlier attempt of
                       this one, have another and end when they find out (distributed/store.py).

The token keeps out who does not know it.  Without one, a host shows the words of its command to who
knows them.  It does not hide what is sent, nor keep out who can change what others send after the
handshake (docs/security.md).
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import platform
import secrets
import select
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import PurePath
from typing import Any, NoReturn

from ppdist.common.errors import Failure, LaunchError
from ppdist.common.process import STOPPED, USER_ERROR, boot_seconds
from ppdist.launch.options import MOST_RESTARTS, TOKEN_VARIABLE, Options
from ppdist.launch.topology import (
    LaunchPlan,
    Network,
    installed_version,
    port_in_use,
    typed_hosts,
)
from ppdist.launch.watchdog import Outcome, Stopped, at_once

_POLL_SECONDS = 0.1

_LINE_BYTES = 256 * 1024  # longer than any handshake or report that this side makes
_RECEIVE_BYTES = 64 * 1024
_MOST_PIECES = 2 * _LINE_BYTES // _RECEIVE_BYTES
_CONNECT_SECONDS = 5.0

Message = dict[str, Any]


class Connection:
    """One end of a connection; it never blocks.

    Attributes:
        closed: why nothing comes any more, in words; None while it is open.
        is_foreign: it was closed because no fleetrun speaks there.
        hung_up: the other end has closed it.
        peer: the address on the other end, where that had called.
        heard: when something came last (or it was opened), by time.monotonic().
        connecting: a call that was not answered yet.
        keys: what both ends prove to each other over it; None while nothing was said.
    """

    def __init__(self, sock: socket.socket, connecting: bool = False) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._incoming, self._outgoing = bytearray(), bytearray()
        self.connecting = connecting
        self.closed: str | None = None
        self.is_foreign = self.hung_up = False
        self.keys: KeyExchange | None = None
        try:
            self.peer = str(sock.getpeername()[0])
        except (OSError, IndexError):  # not connected yet, or no address at all
            self.peer = "an unknown address"
        self.opened = self.heard = time.monotonic()

    @classmethod
    def call(cls, address: str, port: int, own: str = "") -> "Connection":
        """Starts to connect; `receive` finds out how that went.

        Args: own: the address to call from, where this machine has it: by it others know a host.
        """
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            sock.bind((own, 0))
        connection = cls(sock, connecting=True)
        code = sock.connect_ex((address, port))
        if code not in (0, errno.EINPROGRESS):
            connection._close(_reason(code))
        return connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends now what fits and the rest with later calls of `receive`."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self._flush()

    def receive(self) -> list[Message]:
        """What has arrived since the last call; also finishes what was begun to send."""
        if self.closed is None and self.connecting:
            self._finish_connecting()
        while self.closed is None and not self.connecting:
            try:
                piece = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._close(_reason(error.errno))
                break
            if not piece:
                self.hung_up = True
                self._close("it closed the connection")
                break
            self.heard = time.monotonic()
            self._incoming += piece
            if len(self._incoming) > _LINE_BYTES:
                break  # complete lines of it are read below, the rest with the next call
        self._flush()
        return self._messages()

    def close(self) -> None:
        """Ends it; what was sent before still arrives."""
        if self.closed is None:
            self._flush()
            # Closing with unread bytes would make the system drop what was sent, too.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                for _ in range(_MOST_PIECES):  # who sends without end is not listened to
                    if not self._socket.recv(_RECEIVE_BYTES):
                        break
            self._close("closed")

    def _finish_connecting(self) -> None:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._close(_reason(code))
            return
        try:
            self._socket.getpeername()
        except OSError:  # still on its way
            if time.monotonic() - self.opened > _CONNECT_SECONDS:
                self._close(_reason(errno.ETIMEDOUT))
            return
        self.connecting, self.heard = False, time.monotonic()

    def _flush(self) -> None:
        if self.closed is not None or self.connecting or not self._outgoing:
            return
        try:
            del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # `receive` finds out, once it has read what came before the end
            self._outgoing.clear()

    def _messages(self) -> list[Message]:
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict) or not isinstance(message.get("type"), str):
                self._close_foreign()
                return []
            messages.append(message)
        if len(rest) > _LINE_BYTES:
            self._close_foreign()
        return messages

    def _close_foreign(self) -> None:
        self.is_foreign = True
        self._close("it does not speak as fleetrun does")

    def _close(self, why: str) -> None:
        if self.closed is None:
            self.closed = why
        self._socket.close()


def text_of(message: Message, key: str, limit: int = 16_000) -> str:
    """A text of a message without control characters, "" where there is none."""
    value = message.get(key)
    if not isinstance(value, str):
        return ""
    return "".join(letter for letter in value[:limit] if letter.isprintable() or letter in "\n\t")


def integer_of(message: Message, key: str, least: int, most: int) -> int | None:
    """A whole number of a message, None where there is none from least to most."""
    value = message.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        return None
    return value


def _reason(code: int | None) -> str:
    """Why a connection could not be made or broke, and what to check."""
    if code == errno.ECONNREFUSED:
        return "connection refused: nothing listens there (is fleetrun started on that host?)"
    if code in (errno.ETIMEDOUT, errno.EAGAIN):
        return "no answer: a firewall, a wrong address, or the host is down"
    if code in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL, errno.EACCES, errno.EPERM):
        return "no way to it from here: check the address, `ip route` and the firewall"
    if code in (errno.ECONNRESET, errno.EPIPE):
        return "it broke the connection off"
    return errno.errorcode.get(code or 0, f"error {code}")


_PROTOCOL = 2  # of the lines below; 1 sent the handshake and its proof in the first
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_SECRET_BITS = 256
_NUMBER_LETTERS = 512  # of a number below _PRIME, in hexadecimal


class KeyExchange:
    """What both ends of a connection prove: that they know one token, and one command.

    Each is a Diffie-Hellman exchange whose generator comes out of what is to be known.  Sent are
    random numbers, and what only a key made of them can say.  So whoever connects, or is called,
    can try one guess with each connection, learns nothing with which more could be tried later,
    and has no use for what was said to others.  A token that nobody gave is known to all.

        caller -> host   hello: two numbers, and one that is used once
        host -> caller   hello: the same, and its proofs
        caller -> host   its proofs, then its handshake; from here on with a signature

    The powers are drawn once in a process: a first host calls many that are not there yet.

    Sources: SPEKE (Jablon 1996, ACM CCR 26(5)), in group 14 of RFC 3526.  What Hao and Shahandashti
    (2014, "The SPEKE Protocol Revisited") ask for: roles and all numbers are part of each key.

    Attributes:
        met: the other end has sent its numbers.
        checked: and its proofs.
        same_token, same_command: it knows them as well.
    """

    def __init__(self, token: str, command: str, calls: bool) -> None:
        """
        Args:
            command: what must agree of it, see `Handshake.command`.
            calls: this end has called the other.
        """
        self._calls = calls
        self._powers, self._numbers = _drawn(token, command)
        self._once = secrets.token_hex(16)
        self._keys: list[bytes] = []
        self.met = self.checked = self.same_token = self.same_command = False

    def hello(self) -> Message:
        """The first line of this end; what has been called adds its proofs."""
        hello = {"type": "hello", "protocol": _PROTOCOL, "numbers": self._numbers}
        proofs = self.proofs() if self.met else {}
        return {**proofs, **hello, "once": self._once}

    def meet(self, hello: Message) -> bool:
        """Reads the other's first line; False: it is not one of this protocol."""
        words, once = hello.get("numbers"), text_of(hello, "once", _NUMBER_LETTERS)
        if hello["type"] != "hello" or hello.get("protocol") != _PROTOCOL:
            return False
        if not isinstance(words, list) or len(words) != len(self._numbers):
            return False
        numbers = []
        for word in words:
            is_number = isinstance(word, str) and len(word) <= _NUMBER_LETTERS and word.isalnum()
            try:
                numbers.append(int(word, 16) if is_number else 0)
            except ValueError:
                return False
        if not all(1 < number < _PRIME - 1 for number in numbers):
            return False
        own, other = [*self._numbers, self._once], [*(f"{each:x}" for each in numbers), once]
        said = json.dumps([own, other] if self._calls else [other, own])
        for kind, number, power in zip(("token", "command"), numbers, self._powers):
            shared = pow(number, power, _PRIME)
            self._keys.append(hashlib.sha256(f"{kind} {said} {shared:x}".encode()).digest())
        self.met = True
        return True

    def proofs(self) -> Message:
        """What only who knows token and command can say."""
        proofs = [self._proof(each, self._calls, "known") for each in range(2)]
        return {"type": "proofs", "proofs": proofs}

    def check(self, message: Message) -> None:
        """Reads the other's proofs."""
        given = message.get("proofs")
        given = given if isinstance(given, list) and len(given) == 2 else ["", ""]
        self.same_token, self.same_command = (
            hmac.compare_digest(self._proof(each, not self._calls, "known"), _ascii(word))
            for each, word in enumerate(given)
        )
        self.checked = True

    def sign(self, message: Message) -> Message:
        """The same with a signature, for this connection alone."""
        return message | {"signature": self._proof(0, self._calls, _canonical(message))}

    def is_signed(self, message: Message) -> bool:
        """Whether the other end has said it, and knows the token."""
        content = {key: value for key, value in message.items() if key != "signature"}
        expected = self._proof(0, not self._calls, _canonical(content))
        return hmac.compare_digest(expected, _ascii(message.get("signature")))

    def _proof(self, key: int, by_caller: bool, text: str) -> str:
        who = "caller" if by_caller else "called"
        return hmac.new(self._keys[key], f"{who} {text}".encode(), hashlib.sha256).hexdigest()


@lru_cache(maxsize=16)
def _drawn(token: str, command: str) -> tuple[list[int], list[str]]:
    """Secret powers of this process, and what it sends: one draw does for many hosts."""
    powers = [secrets.randbits(_SECRET_BITS) for _ in range(2)]
    generators = _generator("token", token), _generator("command", token, command)
    return powers, [f"{pow(base, power, _PRIME):x}" for base, power in zip(generators, powers)]


def _generator(*secret_words: str) -> int:
    """A number that only who knows the words can make, of the subgroup of squares."""
    text = json.dumps(["ppdist", *secret_words]).encode()
    number = int.from_bytes(hashlib.shake_256(text).digest(_NUMBER_LETTERS // 2 + 16), "big")
    return pow(number % _PRIME, 2, _PRIME)


def _canonical(content: Mapping[str, object]) -> str:
    return json.dumps(dict(content), sort_keys=True)


def _ascii(word: object) -> str:
    """ "" for what cannot be a proof: comparing would raise."""
    return word if isinstance(word, str) and word.isascii() else ""


_LIST_LIMIT, _WORD_LIMIT = 4096, 4096


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
    python: str
    names: tuple[str, ...] = ()  # of the hosts, as they were typed
    max_restart: int = 0
    attempt: int = 0  # how often this host has restarted the run
    skip: tuple[int, ...] = ()  # steps that failed twice and are left out
    identity: str = ""  # of this fleetrun, drawn at random

    def message(self, with_command: bool = True) -> Message:
        """As it is sent.

        Args: with_command: else without the script and its arguments.
        """
        told = self if with_command else replace(self, script="", arguments=())
        return {"type": "handshake", **asdict(told)}

    @property
    def command(self) -> str:
        """What must agree of the script and its arguments: equal on two hosts that may train."""
        words = [PurePath(self.script).name]
        words += [
            word if "=" in word else PurePath(word).name for word in _of_the_run(self.arguments)
        ]
        return json.dumps(words)

    @property
    def is_first(self) -> bool:
        return self.host == self.hosts[0]

    @property
    def has_names(self) -> bool:
        """Whether hosts were named, so that they may come back with other addresses."""
        return self.names not in ((), self.hosts)

    def means_others(self, theirs: "Handshake") -> bool:
        """Whether the same names have other addresses there."""
        return theirs.names == self.names != () and theirs.hosts != self.hosts


def own_handshake(
    options: Options, plan: LaunchPlan, attempt: int, skip: tuple[int, ...], identity: str
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
        python=platform.python_version(),
        names=tuple(typed_hosts(options.ips or "")),
        max_restart=options.max_restart,
        attempt=attempt,
        skip=skip,
        identity=identity,
    )


def read_handshake(message: Message) -> Handshake | None:
    """None: the message holds no handshake."""
    if message["type"] != "handshake":
        return None
    values: dict[str, Any] = {
        "processes": integer_of(message, "processes", 1, 4096),
        "max_restart": integer_of(message, "max_restart", 0, MOST_RESTARTS),
        "attempt": integer_of(message, "attempt", 0, MOST_RESTARTS),
        "skip": steps_of(message),
    }
    if None in values.values():
        return None
    for each in fields(Handshake):
        if each.name in ("hosts", "arguments", "names"):
            words = message.get(each.name)
            if not isinstance(words, list) or len(words) > _LIST_LIMIT:
                return None
            if not all(isinstance(word, str) and len(word) <= _WORD_LIMIT for word in words):
                return None
            values[each.name] = tuple(words)
        elif each.name not in values:
            values[each.name] = text_of(message, each.name, _WORD_LIMIT)
    if values["host"] not in values["hosts"]:
        return None
    return Handshake(**values)


def steps_of(message: Message) -> tuple[int, ...] | None:
    """The steps to leave out that a message holds, None where it holds something else."""
    steps = message.get("skip")
    if not isinstance(steps, list) or len(steps) > _LIST_LIMIT:
        return None
    if not all(type(step) is int and 0 < step < 10**12 for step in steps):
        return None
    return tuple(steps)


def differences(mine: Handshake, theirs: Handshake) -> list[str]:
    """What keeps two hosts from training together, each with both sides; [] if nothing does."""
    found = []

    def differ(what: str, own: str, other: str, remedy: str) -> None:
        if own != other:
            found.append(f"{what}: {mine.host} has {own}, {theirs.host} has {other}; {remedy}")

    remedy = "type the same hosts in the same order everywhere (rank 0's host stands first)"
    if mine.means_others(theirs):
        remedy = f"{','.join(mine.names)} must mean the same everywhere: correct DNS or /etc/hosts"
    differ("--ips", ",".join(mine.hosts), ",".join(theirs.hosts), remedy)
    remedy = "ranks are numbered by it: give the same --nproc_per_node or number of cards"
    differ("processes on a host", str(mine.processes), str(theirs.processes), remedy)
    remedy = "gloo and NCCL cannot talk to each other: use cards on all hosts, or on none"
    differ("device", mine.device, theirs.device, remedy)
    remedy = "start the same script on every host"
    if theirs.script:
        differ("script", PurePath(mine.script).name, PurePath(theirs.script).name, remedy)
    else:
        own = shlex.join([mine.script, *mine.arguments])
        remedy = (
            "start every host with the same command (hosts show what differs to one another where "
            f"all have a {TOKEN_VARIABLE})"
        )
        differ("command", own, "another, which it shows itself", remedy)
    for own, other in _different_words(mine.arguments, theirs.arguments) if theirs.script else ():
        if not _may_differ(own, other):
            remedy = "start every host with the same command"
            differ("arguments of the script", own or "none", other or "none", remedy)
    remedy = "hosts restart together: give the same --max_restart on every host"
    differ("restarts", str(mine.max_restart), str(theirs.max_restart), remedy)
    remedy = "install the same version on every host"
    differ("ppdist", mine.ppdist or "none", theirs.ppdist or "none", remedy)
    differ("paddle", mine.paddle or "none", theirs.paddle or "none", remedy)
    return found


def remarks(mine: Handshake, theirs: Handshake) -> list[str]:
    """What differs and may: worth a line."""
    pairs = [("script", mine.script, theirs.script), ("python", mine.python, theirs.python)]
    pairs += [
        ("argument", own, other)
        for own, other in _different_words(mine.arguments, theirs.arguments)
    ]
    return [
        f"note: {what} {own} here, {other} on host {theirs.host}"
        for what, own, other in pairs
        if own != other
    ]


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
    from ppdist.config.distributed import HOSTS_OWN_KEYS

    kept = [word for word in words if word.partition("=")[0] not in HOSTS_OWN_KEYS]
    alone = len(kept) < len(words)  # an -o may have lost all its values
    return [
        word
        for word, following in zip(kept, [*kept[1:], "-"])
        if not (alone and word == "-o" and following.startswith("-"))
    ]


def _may_differ(own: str, other: str) -> bool:
    """True for two paths to a file of one name."""
    has_path = ("/" in own or "/" in other) and "=" not in own + other
    return has_path and PurePath(own).name == PurePath(other).name != ""


def proof(token: str, content: Mapping[str, object]) -> str:
    """What only who knows the token can say of this content; "" without a token.

    Args: content: what JSON can hold; order does not matter.  Whoever sees content and proof can
        try guesses, so strangers must know neither.
    """
    if not token:
        return ""
    return hmac.new(os.fsencode(token), _canonical(content).encode(), hashlib.sha256).hexdigest()


def name_of_job(token: str, drawn: str | None = None) -> str:
    """A name for this attempt, the same on all of its hosts.

    Args: drawn: what the first host has drawn at random; None: this host is alone and draws.
    """
    drawn = secrets.token_hex(16) if drawn is None else drawn
    return hashlib.sha256(f"{drawn} {proof(token, {'drawn': drawn})}".encode()).hexdigest()


_REPORT_SECONDS = 10.0  # between two lines that say who is missing
_LOOK_SECONDS = 5.0  # between two looks whether names of --ips have other addresses
_CALL_SECONDS = 1.0  # between two calls of one host
_HANDSHAKE_SECONDS = 10.0  # for an answer of who has taken the call
_TIMEOUT_SECONDS = 60.0
_CALLERS = 256  # that have not said who they are
_MOST_REFUSED = 20  # lines about callers that were refused
_OTHER_TOKEN = f"has another {TOKEN_VARIABLE}, or none: set the same on every host"
_OTHER_PROGRAM = (
    "what answers there is not a fleetrun: another program has the port; take another with "
    "--start_port P on every host"
)
_OTHER_VERSION = (
    "has another version of ppdist, whose hosts greet otherwise: install the same on every host"
)
_ANSWER_SECONDS = 0.5  # a resolver in order takes less
_DISPUTE_SECONDS = 60.0  # in which hosts learn better: DNS servers keep an answer for 5 to 30
_SETTLED_SECONDS = 10.0  # hosts call one another more often

Look = Callable[[], tuple[str | None, ...] | None]  # see Lookout.look


class Moved(Exception):
    """While hosts are waited for, a name of --ips got another address: meet anew, with that."""


def rendezvous(
    mine: Handshake,
    port: int,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int] = (),
    token: str = "",
    look: Look = lambda: None,
) -> "ControlChannel":
    """Waits until all hosts of the run are there, and keeps them connected.

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
    hosts = _Rendezvous(mine, port, say, token)
    try:
        hosts.wait(seconds, received, look)
        return hosts.channel()
    except BaseException:
        hosts.leave()
        raise


class _Rendezvous:
    def __init__(self, mine: Handshake, port: int, say: Callable[[str], None], token: str) -> None:
        self.mine, self.port, self.say, self.token = mine, port, say, token
        self.first, self.command = mine.hosts[0], mine.command
        self.joined: dict[str, Connection] = {}  # the first host has all the others', they have its
        self.identities: dict[str, str] = {}
        self.callers: list[Connection] = []  # that have not yet said who they are
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
            for caller in list(self.callers):
                self._hear_caller(caller)
            for host, call in list(self.calls.items()):
                self._hear_call(host, call)
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
            timeout = seconds + _TIMEOUT_SECONDS * (not self.mine.is_first and not self.missing)
            if not self.complete and now - begin > timeout:
                self._fail(
                    LaunchError(
                        f"gave up after {seconds:g} s (--start_timeout): {self._who()}",
                        code="hosts_missing",
                    )
                )
            if not self.complete and now - reported >= _REPORT_SECONDS:
                reported = now
                self._report(now - begin)

    def channel(self) -> "ControlChannel":
        self._hang_up()
        if not self.mine.is_first and self.listener is not None:
            self.listener.close()
            self.listener = None
        self.say(f"all {len(self.mine.hosts)} hosts are here")
        return ControlChannel(
            self.mine.host,
            self.mine.hosts,
            self.joined,
            self.listener,
            self.say,
            attempt=self.attempt,
            skip=tuple(sorted(self.skip)),
            drawn=self.identities.get(self.first, self.mine.identity),
            restarts=self.mine.max_restart > 0,
            token=self.token,
            command=self.command,
        )

    def leave(self) -> None:
        self._hang_up()
        for connection in self.joined.values():
            connection.close()
        if self.listener is not None:
            self.listener.close()

    def _hang_up(self) -> None:
        for connection in (*self.callers, *self.calls.values()):
            connection.close()

    def _stop(self) -> NoReturn:
        """Before a restart the others must not wait for a host that ends the job.  Raises: Stopped.

        At the very start they may: the command is being typed again.
        """
        if self.attempt:
            self._tell_joined({"type": "stopped"})
        raise Stopped

    def _learn(self, found: tuple[str | None, ...] | None) -> None:
        """Raises: Moved.  LaunchError: hosts keep disagreeing about names."""
        if found is None:
            return
        if None not in found and found != self.mine.hosts:
            raise Moved
        lasting = self.dispute.lasts(found)
        if lasting:
            self._fail(LaunchError(lasting, code="hosts_disagree"))

    def _call_missing(self) -> None:
        now = time.monotonic()
        for host in self.missing:
            pause = _CALL_SECONDS * (3 if self.mine.is_first else 1)  # they call as well
            if host not in self.calls and now - self.called.get(host, -pause) >= pause:
                self.called[host] = now
                call = self.calls[host] = Connection.call(host, self.port, self.mine.host)
                call.keys = KeyExchange(self.token, self.command, calls=True)
                call.send(call.keys.hello())

    def _pause(self) -> None:
        open_ones = [*self.callers, *self.joined.values(), *self.calls.values()]
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
            for _ in range(_CALLERS):
                self.callers.append(Connection(self.listener.accept()[0]))
        # A host says at once who it is, so those who say nothing for longest make room for others.
        for caller in self.callers[:-_CALLERS]:
            self._hear_caller(caller)
        for caller in self.callers[:-_CALLERS]:
            caller.close()
        self.callers = self.callers[-_CALLERS:]

    def _hear_caller(self, caller: Connection) -> None:
        over = False
        for message in caller.receive():
            over = over or self._answer(caller, message)
        late = time.monotonic() - caller.opened > _HANDSHAKE_SECONDS
        if over or late or caller.closed is not None:
            self.callers.remove(caller)
            if caller not in self.joined.values():
                caller.close()

    def _answer(self, caller: Connection, message: Message) -> bool:
        """Answers a line of who has called; True when it has joined, or its call is over."""
        if caller.keys is None:
            caller.keys = KeyExchange(self.token, self.command, calls=False)
            if not caller.keys.meet(message):
                if message["type"] == "hello":
                    caller.send(_other_version())
                    self._say_refused(f"refused who calls from {caller.peer}: it {_OTHER_VERSION}")
                return True
            caller.send(caller.keys.hello())
            return False
        keys = caller.keys
        if not keys.checked:
            keys.check(message)
            if not keys.same_token:
                self._say_refused(f"refused who calls from {caller.peer}: it {_OTHER_TOKEN}")
            return not keys.same_token
        theirs = read_handshake(message) if keys.is_signed(message) else None
        # Its own comes back where somebody passes on what it says.
        if theirs is not None and theirs.identity != self.mine.identity:
            self._receive(caller, keys, theirs)
        return True

    def _receive(self, caller: Connection, keys: KeyExchange, theirs: Handshake) -> None:
        """Answers who has said what it was started with, and lets it join if it may."""
        if self.mine.means_others(theirs):
            kind, refusal = "later", differences(self.mine, theirs)[0]
            self.dispute.hear(refusal)
        else:
            kind, refusal = "refused", self._refusal(theirs)
        found = differences(self.mine, theirs)
        if found and not refusal and not self.token and caller.peer != theirs.host:
            # Anybody may say so, and must not end the run by it.
            self._say_refused(f"refused who calls from {caller.peer}: {found[0]}")
            refusal = f"it was started otherwise than host {self.mine.host}"
        if refusal:
            caller.send(keys.sign({"type": kind, "text": refusal}))
            return
        caller.send(keys.sign(self._told(keys)))
        try:
            self._compare(theirs)
        except LaunchError:
            caller.close()
            raise
        if self.mine.is_first:  # else it asks where we are; our own call is on its way
            self._join(theirs, caller)

    def _told(self, keys: KeyExchange) -> Message:
        """The handshake of this host, as who has proven so much may read it."""
        return self.mine.message(with_command=keys.same_command or bool(self.token))

    def _refusal(self, theirs: Handshake) -> str:
        """Why a caller has no place in this run, "" when it has one."""
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

    def _hear_call(self, host: str, call: Connection) -> None:
        messages = call.receive()
        came: str | None = None
        while messages and came is None:
            came = self._hear_answer(host, call, messages.pop(0))
        if came is None:
            silent = time.monotonic() - call.heard > _HANDSHAKE_SECONDS and not call.connecting
            came = _OTHER_PROGRAM if call.is_foreign or silent else call.closed
            if came is None:  # no answer yet
                return
            if call.hung_up and not (call.keys and call.keys.met):
                came += ": another program, or another version of ppdist, has the port"
        del self.calls[host]
        if came:
            self.tried[host] = came
            call.close()
        else:
            self._follow(messages)

    def _hear_answer(self, host: str, call: Connection, message: Message) -> str | None:
        """What came of a call that was answered; "": its host has joined; None: not known yet."""
        keys = call.keys
        assert keys is not None
        if not keys.met:
            if not keys.meet(message):
                return _OTHER_PROGRAM if message["type"] not in _OLD_ANSWERS else _OTHER_VERSION
            keys.check(message)
            answer = message.get("answer")
            if not keys.same_token or not isinstance(answer, dict):
                call.send(keys.proofs())
                if not keys.same_token:
                    return f"who answers there {_OTHER_TOKEN}"
                call.send(keys.sign(self._told(keys)))
                return None
            message = answer
        if not keys.is_signed(message):
            return _OTHER_PROGRAM
        if message["type"] in ("refused", "later"):
            return self._hear_refusal(host, message)
        if message["type"] == "busy":
            return f"{text_of(message, 'text')}; this one joins its restart"
        theirs = read_handshake(message)
        if theirs is None:
            return _OTHER_PROGRAM
        self._compare(theirs)
        if self.mine.is_first:
            return f"it is there, but has not reached {self.mine.host}:{self.port}"
        self._join(theirs, call)
        return ""

    def _hear_refusal(self, host: str, message: Message) -> str:
        """What is to be thought of it.

        Raises: LaunchError: a host of this job has no place for this one, and never will.
        """
        text = text_of(message, "text")
        if message["type"] == "later":
            self.dispute.hear(text)
            return f"{text}; both look again"
        refused = f"host {host} refused this one, {self.mine.host}: {text}"
        if self.token or not self.mine.has_names:
            self._fail(LaunchError(refused, code="host_refused"))
        self.dispute.hear(refused)  # a host of another run may have the address by now
        return f"it refuses this one: {text}"

    def _compare(self, theirs: Handshake) -> None:
        found = differences(self.mine, theirs)
        if found:
            lines = "\n".join(found)
            self._fail(
                LaunchError(
                    f"host {theirs.host} was started otherwise.\n{lines}", code="hosts_differ"
                )
            )

    def _join(self, theirs: Handshake, connection: Connection) -> None:
        for line in remarks(self.mine, theirs):
            self.say(line)
        self.joined[theirs.host] = connection
        self.attempt = max(self.attempt, theirs.attempt)
        self.skip |= set(theirs.skip)
        self.identities[theirs.host] = theirs.identity

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

    def _follow(self, messages: Sequence[Message]) -> None:
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
        text = f"{self._who()} ({waited:.0f} s)"
        if self.missing:
            self.say(text)
        if self.mine.is_first:
            self._tell_joined({"type": "waiting", "text": f"host {self.first}: {text}"})

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


_OLD_ANSWERS = ("hello", "refused", "later", "busy")  # of a host with protocol 1, or a later one


def _other_version() -> Message:
    """What hosts with another protocol understand."""
    return {"type": "refused", "text": f"this one {_OTHER_VERSION}", "proof": ""}


def _listen(mine: Handshake, port: int) -> socket.socket | None:
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


class Lookout:
    """What names mean by now: asked for in a thread, as a resolver may take its time to answer."""

    def __init__(self, names: Sequence[str], network: Network) -> None:
        self._names, self._network = names, network
        self._thread: threading.Thread | None = None
        self._found: tuple[str | None, ...] = ()

    def look(self) -> tuple[str | None, ...] | None:
        """The addresses, None for a name that has none; None alone: there is no answer yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        self._thread.join(_ANSWER_SECONDS)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._found

    def _ask(self) -> None:
        self._found = tuple(self._network.resolve(name) for name in self._names)


class Dispute:
    """Another host has other addresses for the same names, or is not of this run: that passes once
    both have learnt the new address, or never."""

    def __init__(self) -> None:
        self._text, self._since, self._heard = "", 0.0, 0.0

    def hear(self, text: str) -> None:
        """Notes what another host has said, or is told."""
        now = time.monotonic()
        if now - self._heard >= _SETTLED_SECONDS:
            self._since = now
        self._text, self._heard = text, now

    def lasts(self, found: Sequence[str | None]) -> str:
        """What is in dispute, if names are as they were and it has long been so; else "".

        Args: found: what names mean by now.
        """
        now = time.monotonic()
        if None in found:  # about to change
            self._since = now
        long = now - self._since > _DISPUTE_SECONDS and now - self._heard < _SETTLED_SECONDS
        return f"{self._text} (for {now - self._since:.0f} s)" if long else ""


_BEAT_SECONDS = 5.0
_SILENCE_SECONDS = 60.0  # after which a host counts as lost; gloo's own limit, 30 s, comes before
_NOTE_SECONDS = 10.0
_ANSWERED = 32  # callers, at one look
_MOST_ANSWERS = 4  # at one look, of a few hundredths of a second each
_CLOSE_SECONDS = 3.0
_NO_CAUSE = (
    "No host knows a cause, each lost another one: a rank made no progress, or the network between "
    "the hosts broke (firewall, interface, cable); see the logs of all hosts, and ppdist doctor "
    "--ips"
)
_MESSAGE_LIMIT = 12_000  # characters that other hosts get to read


@dataclass(frozen=True)
class HostEnd:
    """How the ranks of one host ended."""

    host: str
    code: int
    message: str  # as the other hosts read it
    is_consequence: bool  # of what happened on another host
    time: float  # of the failure, by time.monotonic() of the first host
    step: int | None = None  # that failed, from 1
    stopped: bool = False  # a signal asked the run to stop
    is_guess: bool = False  # the cause of one host that others do not contradict

    @classmethod
    def read(cls, message: Message, host: str) -> "HostEnd":
        code = integer_of(message, "code", 0, 255)
        age = integer_of(message, "age_ms", 0, 3_600_000) or 0
        return cls(
            host=host,
            code=1 if code is None else code,
            message=text_of(message, "message"),
            is_consequence=bool(message.get("consequence")),
            time=time.monotonic() - age / 1000,
            step=integer_of(message, "step", 1, 10**12),
            stopped=bool(message.get("stopped")),
            is_guess=bool(message.get("guess")),
        )

    def as_message(self, kind: str, age: float = 0.0) -> Message:
        """As it is sent; clocks differ between hosts, so it says how long ago it was, s."""
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
        }

    @property
    def failed(self) -> bool:
        return self.code not in (0, STOPPED)

    @property
    def knows_cause(self) -> bool:
        return not (self.is_consequence or self.is_guess)


def verdict(reports: Sequence[HostEnd]) -> HostEnd:
    """The report of the host that decides for all: of the cause, if any failed.

    Wrong input goes before everything else, as among the ranks of one host (watchdog.py).
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


class ControlChannel:
    """The connections of one host to the others; on the first host one to each, else one to it.

    Attributes:
        stopped_by: SIGTERM when another host was stopped by a signal, else None.
        cause_known: a host has said why its ranks failed, and not only that they lost others.
    """

    def __init__(
        self,
        own: str,
        hosts: Sequence[str],
        peers: Mapping[str, Connection],
        listener: socket.socket | None,
        say: Callable[[str], None],
        silence: float = _SILENCE_SECONDS,
        *,
        attempt: int = 0,
        skip: tuple[int, ...] = (),
        drawn: str = "",
        restarts: bool = False,
        token: str = "",
        command: str = "",
    ) -> None:
        """
        Args:
            own: address of this host, one of `hosts`.
            peers: connections by address.
            listener: of the first host, where late callers are refused.
            silence: after which a host counts as lost, s.
            attempt, skip: how often the run was restarted and which steps it leaves out, by what
                its hosts agreed on when they met.
            drawn: by the first host at random, for the name of the job.
            restarts: the run restarts after a failure, so that who calls may wait for that.
            token, command: that late callers know; see KeyExchange.
        """
        self.attempt, self.skip, self.drawn = attempt, skip, drawn
        self._restarts = restarts
        self._token, self._command = token, command
        self._callers: list[Connection] = []  # late ones, that have not said who they are
        self._own, self._hosts, self._peers = own, tuple(hosts), dict(peers)
        self._is_first = own == hosts[0]
        self._listener, self._say, self._silence = listener, say, silence
        self.stopped_by: int | None = None
        self.cause_known = False
        self._stopping = self._must_stop = self._told_signal = False
        self._reports: dict[str, HostEnd] = {}  # on the first host: of all that have ended
        self._verdict: HostEnd | None = None
        self._beat = 0.0
        for peer in self._peers.values():
            peer.heard = time.monotonic()

    def watch(self, received: Sequence[int]) -> bool:
        """Keeps it alive, never blocks; True once other hosts want the ranks of this one stopped.

        Args:
            received: the signals that stopped this fleetrun.
        """
        if received and not self._told_signal:
            self._told_signal = True
            name = signal.Signals(received[0]).name
            self._tell(_stop(self._own, f"got {name}", by_signal=True))
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
        if time.monotonic() - self._beat > _BEAT_SECONDS:
            self._beat = time.monotonic()
            self._tell({"type": "beat"})
        self._refuse_callers()
        return self._must_stop

    def tell_failure(self, failure: Outcome) -> None:
        """Other hosts are to stop now, before all ranks of this one have ended."""
        if not self._stopping:
            why = failure.told.partition("\n")[0]
            stop = _stop(self._own, why, known=failure.knows_cause)
            self._obey(stop, self._own)
            if not self._is_first:
                self._tell(stop)

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
                self.close()
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
            self._tell(self._verdict.as_message("verdict"))
        self.close()
        ended = _as_seen_by(self._own, outcome, self._verdict)
        if self._verdict.stopped and ended.stopped is None:
            ended = replace(ended, stopped=signal.SIGTERM)
        stopped = self._verdict.stopped or bool(received)
        if stopped or not (self._verdict.failed and self._verdict.is_consequence):
            return ended
        return replace(ended, message=f"{ended.message}\n{_NO_CAUSE}")

    def _report(self, outcome: Outcome, stopped: bool) -> None:
        age = max(0.0, boot_seconds() - outcome.time) if outcome.time else 0.0
        told = outcome.told or outcome.message
        mine = HostEnd(
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
            self._tell(mine.as_message("ended", age))

    def _hear(self, host: str, message: Message) -> None:
        if message["type"] == "stop":
            why = text_of(message, "why", 300)
            by_signal, known = bool(message.get("signal")), bool(message.get("known"))
            self._obey(_stop(text_of(message, "host", 300), why, by_signal, known), host)
        elif message["type"] == "ended" and self._is_first and host not in self._reports:
            self._end(HostEnd.read(message, host))
        elif message["type"] == "verdict" and not self._is_first:
            self._verdict = HostEnd.read(message, text_of(message, "host", 300))

    def _end(self, report: HostEnd) -> None:
        """The first host has learned how one host ended."""
        self._reports[report.host] = report
        if report.failed:
            why = report.message.partition("\n")[0] or f"ended with exit code {report.code}"
            self._obey(_stop(report.host, why, known=report.knows_cause), report.host)

    def _lose(self, host: str, why: str) -> None:
        if host in self._reports or self._verdict is not None:
            return  # it has said all
        lost = HostEnd(host, 1, why, False, self._peers[host].heard)
        self._peers[host].close()
        if self._is_first:
            self._end(lost)
            return
        self._verdict = lost
        self._obey(_stop(host, why, known=True), host)

    def _obey(self, stop: Message, sender: str) -> None:
        """The ranks of all hosts are to stop; said once, and passed on by the first host."""
        if self._stopping:
            return
        of_another = stop["host"] != self._own
        self._stopping, self._must_stop, self.cause_known = True, of_another, bool(stop["known"])
        if stop["signal"]:
            self.stopped_by = signal.SIGTERM
        if of_another:
            self._say(f"host {stop['host']}: {stop['why']}; stopping the ranks here too")
        if self._is_first:
            self._tell(stop, but=sender)

    def _tell(self, message: Message, but: str = "") -> None:
        for host, peer in self._peers.items():
            if host != but and peer.closed is None:
                peer.send(message)

    def _refuse_callers(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):  # BlockingIOError: nobody calls
            for _ in range(_ANSWERED):
                self._callers.append(Connection(self._listener.accept()[0]))
        answered = 0
        for caller in list(self._callers):
            if answered == _MOST_ANSWERS:
                break  # the others have their turn at the next looks
            messages = caller.receive()
            late = time.monotonic() - caller.opened > _HANDSHAKE_SECONDS
            if messages:
                answered += self._refuse(caller, messages[0])
            if messages or late or caller.closed is not None:
                self._callers.remove(caller)
                caller.close()
        for caller in self._callers[:-_CALLERS]:
            caller.close()
        self._callers = self._callers[-_CALLERS:]

    def _refuse(self, caller: Connection, message: Message) -> bool:
        """True where that took some time."""
        keys = KeyExchange(self._token, self._command, calls=False)
        if keys.meet(message):
            text = f"a run is in progress there (process {os.getpid()} on host {self._own})"
            kind = "busy" if self._restarts else "refused"
            answer = keys.sign({"type": kind, "text": text})
            caller.send(keys.hello() | {"answer": answer})  # one line: it has said nothing yet
        elif message["type"] == "hello":
            caller.send(_other_version())
        return True

    def close(self) -> None:
        """The first host leaves last, so that its words arrive before the end."""
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
        for caller in self._callers:
            caller.close()
        if self._listener is not None:
            self._listener.close()


def _as_seen_by(own: str, outcome: Outcome, decisive: HostEnd) -> Outcome:
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


def _stop(origin: str, why: str, by_signal: bool = False, known: bool = False) -> Message:
    """What makes the ranks of all hosts stop.

    Args: known: `why` is the cause, not what it has led to on another host.
    """
    signals, knows = int(by_signal), int(known)
    return {"type": "stop", "host": origin, "why": why, "signal": signals, "known": knows}


def _shortened(text: str) -> str:
    if len(text) <= _MESSAGE_LIMIT:
        return text
    return text[:2000] + "\n...\n" + text[2000 - _MESSAGE_LIMIT :]
