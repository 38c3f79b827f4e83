"""Authenticated JSON lines between two fleetrun processes, over TCP.

Before anything else is read, both ends prove that they know the same token, by HMAC-SHA256 over a
random number from each, as multiprocessing.connection does.  Each later line has a MAC over its
number and direction, so none can be changed, repeated, omitted or reflected.

    called -> caller   ppdist NONCE
    caller -> called   NONCE PROOF
    called -> caller   PROOF            or: refused
    both ways          MAC {"type": ..., ...}

The token itself is never sent.  Anyone who sees a proof can test guesses, so the token must be
random.  Without a token everybody knows the key: lines are then only checked for their form.

Anyone who can reach a port can write to it.  Until the token is proven, a connection costs one read
of 256 bytes and one HMAC.
"""

import contextlib
import errno
import hmac
import json
import os
import re
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from ppdist.launch.options import TOKEN_VARIABLE

_LINE_BYTES = 1024 * 1024  # longer than any handshake or report that fleetrun sends
_GREETING_BYTES = 256  # longest line before the token is proven
_RECEIVE_BYTES = 64 * 1024
_MOST_PIECES = 2 * _LINE_BYTES // _RECEIVE_BYTES
_CONNECT_SECONDS = 5.0
_BACKLOG = 4096  # connections waiting for accept; Linux has its own limit, often this one

_REFUSED = b"refused"
OTHER_TOKEN = f"wrong job token: set the same {TOKEN_VARIABLE} on every host"
SILENT = (
    "it takes the call and says nothing: fleetrun there is stopped (Ctrl-Z), a firewall or a proxy "
    "drops what is sent, or another program has the port"
)
CUT_OFF = (
    "fleetrun there began to answer, then nothing came: long packets are lost on the way (an MTU "
    "that is too large for it, or a firewall: `ping -M do -s 1472 ADDRESS` must pass both ways), "
    "or it is stopped"
)
OTHER_PROGRAM = (
    "peer is not fleetrun, or not of this version: another program has the port (give another with "
    "--start_port P on every host), or install the same ppdist on every host"
)

Message = dict[str, Any]


class Connection:
    """One end of a connection; its methods never block.

    Attributes:
        calls: True if this end opened the connection.
        closed: reason why it is closed, as text for a message; None while it is open.
        peer: address of the other end, if that end opened the connection.
        heard: time.monotonic() when data last arrived (at first, when the connection was opened).
        connecting: True while the connection is being opened.
        poller: what waits for it, if anything; the connection leaves it when it ends.
    """

    def __init__(
        self, sock: socket.socket, token: str = "", calls: bool = False, connecting: bool = False
    ) -> None:
        sock.setblocking(False)
        self._socket, self.calls, self.connecting = sock, calls, connecting
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._waiting: list[bytes] = []  # sent once the other end is authenticated
        self._token, self._nonce = os.fsencode(token), secrets.token_hex(16).encode()
        self._nonces: tuple[bytes, bytes] | None = None  # of caller and called
        self._key = b""  # key of the MACs, once both ends have proven the token
        self._sent = self._received = 0  # number of lines
        self.closed: str | None = None
        self.poller: Poller | None = None
        try:
            self.peer = str(sock.getpeername()[0])
        except (OSError, IndexError):
            # The socket is not connected yet, or has no address at all.
            self.peer = "an unknown address"
        self.opened = self.heard = time.monotonic()
        if not calls:
            self._write(b"ppdist " + self._nonce)

    @classmethod
    def call(
        cls, address: str, port: int, local_address: str = "", token: str = ""
    ) -> "Connection":
        """Starts to connect; `receive` notices when the other end has answered.

        Args: local_address: source address, if this machine has it: other hosts identify this one
            by it.
        """
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            sock.bind((local_address, 0))
        connection = cls(sock, token, calls=True, connecting=True)
        code = sock.connect_ex((address, port))
        if code not in (0, errno.EINPROGRESS):
            connection._end(_explain_errno(code))
        return connection

    @property
    def silence(self) -> str:
        """Explains why nothing more arrives from the other end, as text for a message."""
        return SILENT if self._nonces is None else CUT_OFF

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends what fits into the socket now, and queues the rest for `receive`.

        Until the other end has proven the token, messages are queued.
        """
        self.send_encoded(json.dumps(message).encode())

    def send_encoded(self, content: bytes) -> None:
        """Sends a message that is encoded already, see `send`."""
        if not self._key:
            self._waiting.append(content)
            return
        self._write(self._mac(self.calls, self._sent, content) + b" " + content)
        self._sent += 1

    def receive(self) -> list[Message]:
        """Returns the messages since the last call; also sends what is still queued."""
        if self.closed is None and self.connecting:
            self._finish_connecting()
        while self.closed is None and not self.connecting:
            try:
                piece = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._end(_explain_errno(error.errno))
                break
            if not piece:
                self._end("connection closed by peer")
                break
            self.heard = time.monotonic()
            self._incoming += piece
            if len(self._incoming) > (_LINE_BYTES if self._key else _GREETING_BYTES):
                # An endless stream must not keep this loop busy: complete lines are parsed below,
                # the rest at the next call.
                break
        self.flush()
        return self._parse_lines() if self._incoming else []

    def close(self, reason: str = "") -> None:
        """Closes the connection; data sent before still arrives.

        Args: reason: reason to report instead of a less precise one ("the other end closed it").
        """
        if self.closed is None:
            self.flush()
            # If unread bytes are left at closing, the system also drops what was sent.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                # The number of reads is limited, because the peer may never stop sending.
                for _ in range(_MOST_PIECES):
                    if not self._socket.recv(_RECEIVE_BYTES):
                        break
            self._end("closed")
        self.closed = reason or self.closed

    def _finish_connecting(self) -> None:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(_explain_errno(code))
            return
        try:
            self._socket.getpeername()
        except OSError:  # still connecting
            if time.monotonic() - self.opened > _CONNECT_SECONDS:
                self._end(_explain_errno(errno.ETIMEDOUT))
            return
        self.connecting, self.heard = False, time.monotonic()

    def _write(self, line: bytes) -> None:
        self._outgoing += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what is queued, as far as it fits into the socket now."""
        if self.closed is not None or self.connecting or not self._outgoing:
            return
        try:
            del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            # `receive` notices the error as well, after it has read what came before.
            self._outgoing.clear()

    def _parse_lines(self) -> list[Message]:
        """Takes the complete lines out of the buffer; the first ones authenticate the other end."""
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        messages = []
        for line in lines:
            if not self._key:
                problem = self._authenticate(line)
            else:
                message = self._verify_line(line)
                problem = "" if message else OTHER_PROGRAM
                messages.append(message or {})
            if problem:
                self._incoming.clear()
                self._end(problem)
                self.closed = problem  # more precise than "the other end closed it"
                return []
        if len(rest) > (_LINE_BYTES if self._key else _GREETING_BYTES):
            self._end(OTHER_PROGRAM)
        return messages

    def _authenticate(self, line: bytes) -> str:
        """Handles a line of the handshake; returns the reason why it fails, or ""."""
        if not self.calls:
            greeting = re.fullmatch(rb"([0-9a-f]{32}) ([0-9a-f]{64})", line)
            self._nonces = (greeting[1], self._nonce) if greeting else None
            if not greeting or not hmac.compare_digest(greeting[2], self._proof(b"caller")):
                self._write(_REFUSED)
                return OTHER_TOKEN
            self._write(self._proof(b"called"))
        elif self._nonces is None:
            greeting = re.fullmatch(rb"ppdist ([0-9a-f]{32})", line)
            if not greeting:
                return OTHER_PROGRAM
            self._nonces = (self._nonce, greeting[1])
            self._write(self._nonce + b" " + self._proof(b"caller"))
            return ""
        elif not hmac.compare_digest(line, self._proof(b"called")):
            return OTHER_TOKEN
        self._key = self._proof(b"lines")
        for content in self._waiting:
            self.send_encoded(content)
        self._waiting.clear()
        return ""

    def _proof(self, purpose: bytes) -> bytes:
        """Computes the HMAC that proves knowledge of the token, for this connection only."""
        text = b" ".join((b"ppdist", purpose, *(self._nonces or ())))
        return hmac.digest(self._token, text, "sha256").hex().encode()

    def _mac(self, by_caller: bool, number: int, content: bytes) -> bytes:
        text = b"%d %d " % (by_caller, number) + content
        return hmac.digest(self._key, text, "sha256").hex().encode()

    def _verify_line(self, line: bytes) -> Message | None:
        """Returns the message in a line; None if its MAC or form is wrong."""
        mac, _, content = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(not self.calls, self._received, content)):
            return None
        self._received += 1
        try:
            message = json.loads(content)
        except (ValueError, RecursionError):
            return None
        is_message = isinstance(message, dict) and isinstance(message.get("type"), str)
        return message if is_message else None

    def _end(self, reason: str) -> None:
        if self.closed is None:
            self.closed = reason
        if self.poller is not None:
            self.poller.remove(self)
        self._socket.close()


def send_to_all(connections: Iterable[Connection], message: Message) -> None:
    """Sends a message over many connections; it is encoded once."""
    content = json.dumps(message).encode()
    for connection in connections:
        connection.send_encoded(content)


class Poller:
    """Waits for many connections at a cost that depends only on those where something arrives."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, source: Connection, handle: Callable[[], object]) -> None:
        """Adds a connection, until it is closed, or added again, here or to another poller.

        Args: handle: called once data, an error or the end arrives; it receives.
        """
        if source.poller is not None:
            source.poller.remove(source)
        if source.closed is None:
            source.poller = self
            self._selector.register(source, selectors.EVENT_READ, handle)

    def add_listener(self, listener: socket.socket, handle: Callable[[], object]) -> None:
        self._selector.register(listener, selectors.EVENT_READ, handle)

    def remove(self, source: Connection) -> None:
        self._selector.unregister(source)
        source.poller = None

    def run(self, seconds: float) -> None:
        """Waits up to `seconds` until something arrives, and calls the functions of its sources."""
        for key, _ in self._selector.select(seconds):
            # A function called just before may have removed this source.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        """Ends the wait; all connections were closed before."""
        self._selector.close()


def open_listener(address: str, port: int) -> socket.socket:
    """Opens a listening socket.  Raises: OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def wait_for_any(
    reading: Iterable[Connection | socket.socket],
    seconds: float,
    calling: Iterable[Connection] = (),
) -> bool:
    """Waits up to `seconds`; returns True once data has arrived or a call was answered."""
    poll = select.poll()
    for source in reading:
        poll.register(source, select.POLLIN)
    for call in calling:
        poll.register(call, select.POLLOUT)
    return bool(poll.poll(1000 * seconds))


def read_text(message: Message, key: str, limit: int = 16_000) -> str:
    """Reads a text field of a message, without control characters; "" if there is none."""
    value = message.get(key)
    if not isinstance(value, str):
        return ""
    return "".join(letter for letter in value[:limit] if letter.isprintable() or letter in "\n\t")


def read_integer(message: Message, key: str, minimum: int, maximum: int) -> int | None:
    """Reads an integer field of a message; None if it is not from minimum to maximum."""
    value = message.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        return None
    return value


def _explain_errno(code: int | None) -> str:
    """Explains why a connection failed, and what to check."""
    if code == errno.ECONNREFUSED:
        return (
            "connection refused: nothing listens there (is fleetrun started on that host, with the "
            "same --start_port or FLAGS_START_PORT?)"
        )
    if code in (errno.ETIMEDOUT, errno.EAGAIN):
        return "no answer: a firewall, a wrong address, or the host is down"
    if code in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL, errno.EACCES, errno.EPERM):
        return "no route to host: check the address, `ip route` and the firewall"
    if code in (errno.ECONNRESET, errno.EPIPE):
        return "connection reset"
    return errno.errorcode.get(code or 0, f"error {code}")
