"""Ports for the programs under test, held for one test process."""

import fcntl
import itertools
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from functools import cache

# Below the ports that Linux hands out by itself, and apart from those that fleetrun chooses.
_FIRST, _LAST = 10_000, 19_999
_BLOCK = 16  # programs take the ports behind the one they are given as well
_BLOCKS = (_LAST - _FIRST + 1) // _BLOCK


def free_ports(count: int) -> list[int]:
    """Consecutive ports that no other test gets while this process lives.

    They are free when they are given, and stay so: the kernel chooses none of them, and every other
    test process asks here.  So a program may bind them late, which a port that is picked by binding
    and closing does not allow.  Ports behind the last, up to a multiple of 16 from the first, are
    held as well.
    """
    blocks = -(-count // _BLOCK)
    taken: list[int] = []
    for block in _blocks():
        if taken and block != taken[-1] + 1:
            taken = []  # those stay held; there are enough
        if _take(block):
            taken.append(block)
        else:
            taken = []
        if len(taken) == blocks:
            first = _FIRST + taken[0] * _BLOCK
            return list(range(first, first + count))
    raise AssertionError(f"no {count} ports are left from {_FIRST} to {_LAST}")


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]


@cache
def _blocks() -> Iterator[int]:
    """Each block once, from one at random: what a test left behind may linger in the next."""
    first = random.SystemRandom().randrange(_BLOCKS)
    return (each % _BLOCKS for each in itertools.islice(itertools.count(first), _BLOCKS))


@cache
def _lock_file() -> int:
    """Byte N of it is the lock of block N; such locks end with this process, however it ends."""
    path = os.path.join(tempfile.gettempdir(), f"ppdist-test-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _take(block: int) -> bool:
    try:
        fcntl.lockf(_lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, block)
    except OSError:  # another test process has it
        return False
    return all(_is_free(_FIRST + block * _BLOCK + each) for each in range(_BLOCK))


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
