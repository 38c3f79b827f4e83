"""Bytes that this process has sent over TCP, counted by the kernel."""

import os
import socket
import struct
from pathlib import Path

# Places of tcpi_notsent_bytes and tcpi_bytes_sent in struct tcp_info (linux/tcp.h, since 4.19).
_WAITING, _WAITING_AT = struct.Struct("@I"), 144
_SENT, _SENT_AT = struct.Struct("@Q"), 200


def sent_bytes() -> int | None:
    """Payload bytes handed to the TCP connections that this process holds open, loopback too.

    gloo and NCCL's socket transport keep theirs open, so the difference between two calls is what
    was sent in between: gradients and statistics, and what the store and heartbeats add, but no
    files.  Not counted: shared memory, NVLink, InfiniBand, TCP's own headers, and connections that
    have been closed.  Sent again after a loss counts twice, as it does on the wire.

    Returns: None where the kernel does not say (another system than Linux, or before 4.19).
    """
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return None
    total = 0
    for name in os.listdir(folder):
        try:
            if not os.readlink(folder / name).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed since it was listed, or not a TCP socket
            continue
        if len(facts) < _SENT_AT + _SENT.size:
            return None
        # A collective ends when its last bytes are in the kernel, not when they are on the way.
        total += _WAITING.unpack_from(facts, _WAITING_AT)[0] + _SENT.unpack_from(facts, _SENT_AT)[0]
    return total
