"""Sums between the ranks of one host through shared memory.

The memory is a file that has no name (memfd_create), so it does not count against /dev/shm and is
gone with the last process that has it open, however that one ends:

    head         a random number of its creator, to recognise it
    counters     of every rank in a cache line of its own, int64: how many times it has arrived,
                 and the exchange it is in: step, kind, values
    slots        of every rank, what it brings
    sums         what all of them take away

A message is summed in three moves.  Every rank copies into its slot what others add up.  Every rank
adds up its own share of the elements, its own values and those in the slots of the others, in the
order of ranks.  Every rank takes the sums of the others' shares.  Between two moves they wait for
one another.  Since each element is added up by one rank alone, in one order, every rank ends with
the same bits, in every run and for messages of any size.

The counters are read and written without locks, which is right where a processor shows others its
stores in the order in which they were made: on x86.  Elsewhere ranks talk through sockets.
"""

import ctypes
import logging
import mmap
import os
import platform
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ppdist.common.errors import RankError
from ppdist.common.machine import is_alive
from ppdist.distributed import heartbeat

_LOGGER = logging.getLogger("ppdist.distributed.comm")
MESSAGE_MB = 8  # what one rank writes of a larger one has left the caches before others read it
_LINE = 64  # bytes of a cache line
_CELL = _LINE // 8  # from one counter to the next
_SPIN_SECONDS = 0.001  # longer than ranks that are on time differ
_SLEEP_SECONDS = (0.00005, 0.001)  # the first and the longest sleep after that
_LOOK_SECONDS = 0.1  # between two looks whether those waited for still live
_ELEMENT = 4  # bytes of a float32
# Values added up at a time: three times so many fit in the second cache of a core (1 MiB).
_CHUNK_VALUES = 1 << 16
# Ranks of other hosts wait for this one in gloo, which ends them after 30 s without a word about
# who was late.  Whoever waits for that one on its own host says it before.
_BETWEEN_HOSTS_SECONDS = 25.0

_KINDS = ("sum", "gather")
# Where the float32 values of one tensor lie: address, how many.
Place = tuple[int, int]
# Values of a message: the first one's number in it, address, how many.
Piece = tuple[int, int, int]


def join(
    all_gather_object: Callable[[Any], list[Any]],
    *,
    rank: int,
    firsts_W: Sequence[int],
    message_bytes: int,
    timeout_seconds: float,
) -> "SharedMemoryAllReduce | None":
    """Memory shared with the other ranks of this host.

    Every rank of the run calls it.

    Args:
        all_gather_object: gives what every rank of the run gave to it, in rank order.
        firsts_W: the lowest rank of each rank's host.  It makes the memory; the others reach it
            through its entry in /proc, which needs no name and no permission but that of the same
            user.
        message_bytes: the longest message, a multiple of 4; longer ones are cut.
        timeout_seconds: how long a rank waits for another one; with several hosts 25 s at most.
    Returns: None on every rank where every host has one, or where it cannot be had on every host;
        then a warning says why.
    """
    first = firsts_W[rank]
    if len(set(firsts_W)) == len(firsts_W):
        return None  # one rank a host
    ranks = [other for other, theirs in enumerate(firsts_W) if theirs == first]
    size = (1 + len(ranks)) * _LINE + (len(ranks) + 1) * message_bytes
    token, descriptor, memory, problem = secrets.randbits(62), -1, None, ""
    try:
        if rank == first:
            descriptor = _make(size, token)
    except OSError as error:
        problem = f"rank {rank}: {error.strerror or error}"
    offers_W = all_gather_object([os.getpid(), descriptor, token, problem])
    problem = next((offer[3] for offer in offers_W if offer[3]), "")
    try:
        if not problem:
            process, number, token, _ = offers_W[first]
            if rank != first:
                descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            memory = _map(descriptor, size, token)
    except OSError as error:
        problem = f"rank {rank}: memory of rank {first}: {error.strerror or error}"
    # Only now the first may close its own: the others have theirs open.
    problem = next(filter(None, all_gather_object(problem)), "")
    if descriptor >= 0:
        os.close(descriptor)
    if problem or memory is None:
        if rank == 0:
            _LOGGER.warning("ranks of this host use sockets instead of shared memory: %s", problem)
        return None
    return SharedMemoryAllReduce(
        memory,
        rank=rank,
        processes={other: offers_W[other][0] for other in ranks},
        message_bytes=message_bytes,
        timeout_seconds=timeout_seconds,
    )


def _make(size: int, token: int) -> int:
    """Makes the memory.  Raises: OSError: impossible or too little."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"the processor is {platform.machine()}, which may reorder stores")
    descriptor = os.memfd_create("ppdist-sums")
    try:
        # All of it now: running out of memory later would kill a rank, not raise an error.
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, token.to_bytes(8, "little"), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map(descriptor: int, size: int, token: int) -> mmap.mmap:
    """Maps the memory.  Raises: OSError: impossible, or not ours."""
    try:
        memory = mmap.mmap(descriptor, size)
    except ValueError as error:  # a shorter file
        raise OSError(f"{error}") from error
    if int.from_bytes(memory[:8], "little") != token:  # a container sees other processes in /proc
        raise OSError("its process is another one here")
    return memory


class SharedMemoryAllReduce:
    """One rank's hold on the memory.

    All ranks of the host make the same calls in the same order.

    Attributes:
        longest: of a message, bytes.
        message_bytes: in messages of so many bytes tensors are summed, at most `longest`, the same
            on all ranks.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        rank: int,
        processes: Mapping[int, int],
        message_bytes: int,
        timeout_seconds: float,
    ) -> None:
        """
        Args:
            memory: see above, zeros but for its head.
            rank: this one.
            processes: the ranks of this host in order, and their process ids.
        """
        self._ranks, self._processes = list(processes), list(processes.values())
        self._rank, self._me = rank, self._ranks.index(rank)
        self._timeout = timeout_seconds
        count = len(self._ranks)
        slots = np.frombuffer(memory, np.float32, offset=(1 + count) * _LINE)
        slots = slots.reshape(count + 1, -1)
        self._slots, self._sums = slots[:-1], slots[-1]
        self._counters = memoryview(memory)[_LINE : (1 + count) * _LINE].cast("q")
        self._arrivals = self._exchanges = 0
        self.longest = self.message_bytes = message_bytes

    def sum(
        self,
        places: Sequence[Place],
        across: Callable[[np.ndarray], None] | None = None,
        factor: float = 1.0,
    ) -> None:
        """Replaces values by their sums over ranks, times a factor.

        Args:
            places: of as many values on every rank, in the same order.
            across: called by the first rank alone with the sums of every message, [F] float32, to
                add to them, in place, what is on other hosts.  None: there are none.
        Raises: RankError: another rank has ended, did not come in time, or is in another exchange
            (on every rank).
        """
        self._announce("sum", sum(count for _, count in places))
        slot, sums = self._slots[self._me].ctypes.data, self._sums.ctypes.data
        timeout = self._timeout if across is None else min(self._timeout, _BETWEEN_HOSTS_SECONDS)
        for message in _messages(places, self.message_bytes // _ELEMENT):
            count = sum(values for _, values in message)
            mine = _share(count, self._me, len(self._ranks))
            others = [*_pieces(message, 0, mine.start), *_pieces(message, mine.stop, count)]
            for at, address, values in others:
                ctypes.memmove(slot + _ELEMENT * at, address, _ELEMENT * values)
            self._barrier(timeout)
            self._require_same_exchange()
            self._add_up(_pieces(message, mine.start, mine.stop), factor if across is None else 1.0)
            self._barrier(timeout)
            if across is not None:
                if self._me == 0:
                    across(self._sums[:count])
                    self._sums[:count] *= np.float32(factor)
                self._barrier(self._timeout)  # the first may wait for another host meanwhile
                others = list(_pieces(message, 0, count))
            for at, address, values in others:
                ctypes.memmove(address, sums + _ELEMENT * at, _ELEMENT * values)
            # No third barrier: a rank that returns writes to its slot, which all have read, and
            # no rank writes to the sums before all have returned.

    def _add_up(self, pieces: Iterable[Piece], factor: float) -> None:
        """Sums over the ranks of the host, times a factor."""
        for at, address, values in pieces:
            here = slice(at, at + values)
            own = (ctypes.c_float * values).from_address(address)
            own_F, sums_F = np.frombuffer(memoryview(own), np.float32), self._sums[here]
            parts = [slot[here] for slot in self._slots]
            parts[self._me] = own_F
            _add(parts, sums_F)
            if factor != 1.0:
                np.multiply(sums_F, np.float32(factor), out=sums_F)
            own_F[:] = sums_F

    def gather(self, place: Place, into: int) -> None:
        """Copies the values of every rank to an address.

        Args: place: of as many values on every rank, at most `message_bytes` bytes.
        Raises: as `sum`.
        """
        address, count = place
        self._announce("gather", count)
        ctypes.memmove(self._slots[self._me].ctypes.data, address, _ELEMENT * count)
        self._barrier(self._timeout)
        self._require_same_exchange()
        for number, slot in enumerate(self._slots):
            ctypes.memmove(into + number * _ELEMENT * count, slot.ctypes.data, _ELEMENT * count)
        self._barrier(self._timeout)  # before anybody writes to a slot again

    def _announce(self, kind: str, values: int) -> None:
        """Says which exchange this rank begins."""
        self._exchanges += 1
        cell = self._me * _CELL
        facts = (heartbeat.step(), _KINDS.index(kind), values)
        self._counters[cell + 1 : cell + 4] = memoryview(array("q", facts))

    def _require_same_exchange(self) -> None:
        """Raises: RuntimeError, on every rank: they came to different ones."""
        cells, me = self._counters, self._me * _CELL
        own = cells[me + 1 : me + 4]
        for other in range(len(self._ranks)):
            if cells[other * _CELL + 1 : other * _CELL + 4] != own:
                raise RankError(
                    f"the ranks are not in the same collective, number {self._exchanges} of this "
                    f"run: {self._exchange(self._me)}, {self._exchange(other)}: one of them "
                    f"skipped one or took another branch",
                    code="collectives_differ",
                    fix="conditions around a collective must have the same value on all ranks",
                )

    def _exchange(self, number: int) -> str:
        """`rank 3 in a sum of 8000 values of step 7`"""
        step, kind, values = self._counters[number * _CELL + 1 : number * _CELL + 4]
        return (
            f"rank {self._ranks[number]} in a {_KINDS[kind]} of {values} values of step {step + 1}"
        )

    def _barrier(self, timeout: float) -> None:
        """Waits until every rank has called it as often."""
        self._arrivals += 1
        self._counters[self._me * _CELL] = self._arrivals
        began = time.perf_counter()
        looked, nap = began, _SLEEP_SECONDS[0]
        for other, process in enumerate(self._processes):
            while self._counters[other * _CELL] < self._arrivals:
                now = time.perf_counter()
                if now - began < _SPIN_SECONDS:
                    os.sched_yield()  # it may wait for this core
                    continue
                if now - looked > _LOOK_SECONDS:
                    looked = now
                    self._require(other, process, now - began, timeout)
                time.sleep(nap)
                nap = min(2 * nap, _SLEEP_SECONDS[1])

    def _require(self, other: int, process: int, waited: float, timeout: float) -> None:
        """Raises unless waiting for that rank still makes sense."""
        late = f"rank {self._ranks[other]} (process {process} of this host)"
        # It may have come and ended since the counter was read.
        if not is_alive(process) and self._counters[other * _CELL] < self._arrivals:
            raise RankError(f"{late} ended while rank {self._rank} waited for it", code="lost_rank")
        if waited > timeout:
            limit = "distributed.timeout_seconds"
            if timeout < self._timeout:
                limit = "other hosts wait 30 s for this one, which cannot be configured"
            raise RankError(
                f"rank {self._rank} waited {timeout:g} s ({limit}) for {late}, which is alive "
                f"but did not reach the same collective",
                code="rank_timeout",
            )


def _add(parts_LF: Sequence[np.ndarray], sums_F: np.ndarray) -> None:
    """Sums over the ranks of a host, in rank order."""
    if len(parts_LF) == 1:
        sums_F[:] = parts_LF[0]
        return
    np.add(parts_LF[0], parts_LF[1], out=sums_F)
    for part_F in parts_LF[2:]:
        np.add(sums_F, part_F, out=sums_F)


def _messages(places: Sequence[Place], most: int) -> Iterator[list[Place]]:
    """The same places in messages of `most` values."""
    message: list[Place] = []
    room = most
    for address, count in places:
        while count:
            part = min(count, room)
            message.append((address, part))
            address, count, room = address + _ELEMENT * part, count - part, room - part
            if not room:
                yield message
                message, room = [], most
    if message:
        yield message


def _pieces(message: Sequence[Place], first: int, last: int) -> Iterator[Piece]:
    """A message between two elements, in pieces of _CHUNK_VALUES."""
    begin = 0
    for address, count in message:
        at, end = max(begin, first), min(begin + count, last)
        while at < end:
            values = min(end - at, _CHUNK_VALUES)
            yield at, address + _ELEMENT * (at - begin), values
            at += values
        begin += count


def _share(count: int, me: int, ranks: int) -> slice:
    """This rank's of `count` elements, in whole cache lines."""
    line = _LINE // _ELEMENT
    lines = -(-count // line)
    first, last = (min(count, line * (lines * each // ranks)) for each in (me, me + 1))
    return slice(first, last)
