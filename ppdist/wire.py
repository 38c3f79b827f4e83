"""The TCP connections of this process: what was sent, by the kernel, and small messages at once."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

# Places of tcpi_notsent_bytes and tcpi_bytes_sent in struct tcp_info (linux/tcp.h, since 4.19).
_WAITING, _WAITING_AT = struct.Struct("@I"), 144
_SENT, _SENT_AT = struct.Struct("@Q"), 200
_OPEN = Path("/proc/self/fd")


def sent_bytes() -> int | None:
    """Payload bytes handed to the TCP connections that this process holds open, loopback too.

    gloo and NCCL's socket transport keep theirs open, so the difference between two calls is what
    was sent in between: gradients and statistics, and what the store and heartbeats add, but no
    files.  Not counted: shared memory, NVLink, InfiniBand, TCP's own headers, and connections that
    have been closed.  Sent again after a loss counts twice, as it does on the wire.

    Returns: None where the kernel does not say (another system than Linux, or before 4.19).
    """
    if not _OPEN.is_dir():
        return None
    total = 0
    for connection in _connections():
        try:
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # not a TCP socket
            continue
        if len(facts) < _SENT_AT + _SENT.size:
            return None
        # A collective ends when its last bytes are in the kernel, not when they are on the way.
        total += _WAITING.unpack_from(facts, _WAITING_AT)[0] + _SENT.unpack_from(facts, _SENT_AT)[0]
    return total


def send_at_once() -> None:
    """Lets no connection that this process holds open wait with small messages for larger ones.

    Paddle's store sends what belongs together in several small pieces, and the kernel holds back
    each second one until the first was acknowledged, which takes the other side 40 ms: an `add` at
    the store took 44 ms, and takes 0.05 ms so.
    """
    if not _OPEN.is_dir():
        return
    for connection in _connections():
        with contextlib.suppress(OSError):  # not a TCP socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _connections() -> Iterator[socket.socket]:
    """Duplicates of the stream sockets that this process holds open, each closed after its turn."""
    for name in os.listdir(_OPEN):
        try:
            if not os.readlink(_OPEN / name).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    yield connection
        except OSError:  # closed since it was listed
            continue
