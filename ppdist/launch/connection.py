"""Messages between the fleetruns of a run's hosts: one JSON object a line over TCP.

Whoever can reach the port can write to it, so nothing that arrives is trusted: lines and what waits
to be read have a limit, and what is not a JSON object with a `type` ends the connection.
"""

import contextlib
import errno
import json
import socket
import time
from typing import Any

MAX_LINE_BYTES = 256 * 1024  # longer than any greeting or report that this side makes
_RECEIVE_BYTES = 64 * 1024
_MOST_PIECES = 2 * MAX_LINE_BYTES // _RECEIVE_BYTES
_CONNECT_SECONDS = 5.0

Message = dict[str, Any]


class Connection:
    """One end of a connection; it never blocks.

    Attributes:
        closed: why nothing comes any more, in words; None while it is open.
        is_foreign: it was closed because no fleetrun speaks there.
        heard: when something came last (or it was opened), by time.monotonic().
        connecting: a call that was not answered yet.
    """

    def __init__(self, sock: socket.socket, connecting: bool = False) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._incoming, self._outgoing = bytearray(), bytearray()
        self.connecting = connecting
        self.closed: str | None = None
        self.is_foreign = False
        self.opened = self.heard = time.monotonic()

    @classmethod
    def call(cls, address: str, port: int) -> "Connection":
        """Starts to connect; `receive` finds out how that went."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection = cls(sock, connecting=True)
        code = sock.connect_ex((address, port))
        if code not in (0, errno.EINPROGRESS):
            connection._close(_reason(code))
        return connection

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> str:
        """The address on the other end."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "an unknown address"

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
                self._close("it closed the connection")
                break
            self.heard = time.monotonic()
            self._incoming += piece
            if len(self._incoming) > MAX_LINE_BYTES:
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
        if len(rest) > MAX_LINE_BYTES:
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
