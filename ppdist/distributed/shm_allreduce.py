"""Sums between the ranks of one host through shared memory.

The memory is a file that has no name (memfd_create), so it does not count against /dev/shm and is
freed when the last process that has it open ends, in whatever way:

    head         a random number of its creator, to recognise it
    counters     one cache line for each rank, int64: the number of its arrivals, and its present
                 exchange: step, kind, values
    slots        one for each rank: its values
    sums         the sums, read by all ranks

A message is summed in three moves.  Every rank copies to its slot the values that other ranks add
up.  Every rank adds up its share of the elements over all ranks, in the order of ranks.  Every rank
copies the sums of the other shares.  Between two moves there is a barrier.  Since each element is
added up by one rank alone, in one order, every rank ends with the same bits, in every run and for
messages of any size.

The counters are read and written without locks.  That is correct where other processors see stores
in the order in which they were made, as on x86; elsewhere ranks use sockets.
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
MESSAGE_MB = 8  # a larger message leaves the caches between the write and the read
_LINE = 64  # bytes of a cache line
_CELL = _LINE // 8  # from one counter to the next
_SPIN_SECONDS = 0.001  # longer than the usual time between the arrivals of ranks
_SLEEP_SECONDS = (0.00005, 0.001)  # the first and the longest sleep after that
_LOOK_SECONDS = 0.1  # between two checks that the awaited rank still lives
_ELEMENT = 4  # bytes of a float32
# Values added up at once: three chunks fit in the second-level cache of a core (1 MiB).
_CHUNK_VALUES = 1 << 16
# Ranks of other hosts wait for this host in gloo, which ends them after 30 s without naming the
# late rank.  The other ranks of this host name it before that.
_BETWEEN_HOSTS_SECONDS = 25.0

_KINDS = ("sum", "gather")
# Float32 values of a tensor in memory: address, count.
Place = tuple[int, int]
# Values of a message: offset of the first value in the message, address, count.
Piece = tuple[int, int, int]


def join(
    all_gather_object: Callable[[Any], list[Any]],
    *,
    rank: int,
    firsts_W: Sequence[int],
    message_bytes: int,
    timeout_seconds: float,
) -> "SharedMemoryAllReduce | None":
    """Opens memory shared with the other ranks of this host.  Collective.

    Args:
        all_gather_object: gathers an object from every rank of the run, in rank order.
        firsts_W: the lowest rank on each rank's host.  That rank creates the memory; the others
            open it through that rank's entry in /proc, which needs no name and only the permissions
            of the same user.
        message_bytes: size of the longest message, a multiple of 4; longer ones are split.
        timeout_seconds: how long a rank waits for another rank; with several hosts, at most 25 s.
    Returns: None on every rank if every host has one rank, or if some host cannot share memory;
        then a warning gives the reason.
    """
    first = firsts_W[rank]
    if len(set(firsts_W)) == len(firsts_W):
        # One rank on each host: there is nobody to share memory with.
        return None
    ranks = [peer for peer, peer_first in enumerate(firsts_W) if peer_first == first]
    size = (1 + len(ranks)) * _LINE + (len(ranks) + 1) * message_bytes
    token, descriptor, memory, problem = secrets.randbits(62), -1, None, ""
    try:
        if rank == first:
            descriptor = _create_memory(size, token)
    except OSError as error:
        problem = f"rank {rank}: {error.strerror or error}"
    offers_W = all_gather_object([os.getpid(), descriptor, token, problem])
    problem = next((offer[3] for offer in offers_W if offer[3]), "")
    try:
        if not problem:
            creator_pid, creator_descriptor, token, _ = offers_W[first]
            if rank != first:
                descriptor = os.open(f"/proc/{creator_pid}/fd/{creator_descriptor}", os.O_RDWR)
            memory = _map_memory(descriptor, size, token)
    except OSError as error:
        problem = f"rank {rank}: memory of rank {first}: {error.strerror or error}"
    # The first rank may close its descriptor only now that the others have opened theirs.
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
        processes={peer: offers_W[peer][0] for peer in ranks},
        message_bytes=message_bytes,
        timeout_seconds=timeout_seconds,
    )


def _create_memory(size: int, token: int) -> int:
    """Creates the memory.  Raises: OSError: this is not possible, or there is too little memory."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"the processor is {platform.machine()}, which may reorder stores")
    descriptor = os.memfd_create("ppdist-sums")
    try:
        # Allocate all of it now: running out of memory later would kill a rank, not raise an error.
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, token.to_bytes(8, "little"), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map_memory(descriptor: int, size: int, token: int) -> mmap.mmap:
    """Maps the memory.  Raises: OSError: this failed, or it is another process's memory."""
    try:
        memory = mmap.mmap(descriptor, size)
    except ValueError as error:  # a shorter file
        raise OSError(f"{error}") from error
    # In a container /proc may show another process under this number.
    if int.from_bytes(memory[:8], "little") != token:
        raise OSError("its process is another one here")
    return memory


class SharedMemoryAllReduce:
    """One rank's access to the memory shared by the ranks of its host.

    All ranks of the host make the same calls in the same order.

    Attributes:
        longest: size of the longest possible message, in bytes.
        message_bytes: size of the messages in which tensors are summed; at most `longest`, the same
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
        """Locates the parts of the memory that this rank uses.

        Args:
            memory: laid out as above, all zeros except for its head.
            rank: this rank.
            processes: process id of each rank of this host, in the order of ranks.
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
        blocks: Sequence[Place],
        sum_hosts: Callable[[np.ndarray], None] | None = None,
        factor: float = 1.0,
    ) -> None:
        """Replaces values by their sums over ranks, times a factor.

        Args:
            blocks: tensors with the same number of values on every rank, in the same order.
            sum_hosts: called on the first rank only, with the sums of each message, [F] float32;
                adds the sums of the other hosts in place.  None: there are no other hosts.
        Raises: RankError: another rank has ended, did not come in time, or is in another exchange
            (then on every rank).
        """
        self._announce("sum", sum(count for _, count in blocks))
        slot, sums = self._slots[self._me].ctypes.data, self._sums.ctypes.data
        timeout = self._timeout if sum_hosts is None else min(self._timeout, _BETWEEN_HOSTS_SECONDS)
        for message in _split_messages(blocks, self.message_bytes // _ELEMENT):
            count = sum(values for _, values in message)
            share = _share_slice(count, self._me, len(self._ranks))
            pieces = [
                *_cut_pieces(message, 0, share.start),
                *_cut_pieces(message, share.stop, count),
            ]
            for offset, address, values in pieces:
                ctypes.memmove(slot + _ELEMENT * offset, address, _ELEMENT * values)
            self._barrier(timeout)
            self._require_same_exchange()
            self._add_up(
                _cut_pieces(message, share.start, share.stop),
                factor if sum_hosts is None else 1.0,
            )
            self._barrier(timeout)
            if sum_hosts is not None:
                if self._me == 0:
                    sum_hosts(self._sums[:count])
                    self._sums[:count] *= np.float32(factor)
                # The first rank may wait for another host meanwhile, hence the longer timeout.
                self._barrier(self._timeout)
                pieces = list(_cut_pieces(message, 0, count))
            for offset, address, values in pieces:
                ctypes.memmove(address, sums + _ELEMENT * offset, _ELEMENT * values)
            # A third barrier is not needed: a rank that returns writes to its slot, which all have
            # read, and no rank writes to the sums before all have returned.

    def _add_up(self, pieces: Iterable[Piece], factor: float) -> None:
        """Sums the pieces over the ranks of the host, times a factor."""
        for offset, address, values in pieces:
            span = slice(offset, offset + values)
            values_in_place = (ctypes.c_float * values).from_address(address)
            local_F = np.frombuffer(memoryview(values_in_place), np.float32)
            sums_F = self._sums[span]
            parts = [slot[span] for slot in self._slots]
            parts[self._me] = local_F
            _add_parts(parts, sums_F)
            if factor != 1.0:
                np.multiply(sums_F, np.float32(factor), out=sums_F)
            local_F[:] = sums_F

    def gather(self, block: Place, target: int) -> None:
        """Copies the values of every rank to an address.

        Args: block: a tensor with the same number of values on every rank, at most `message_bytes`
            bytes.
        Raises: as in `sum`.
        """
        address, count = block
        self._announce("gather", count)
        ctypes.memmove(self._slots[self._me].ctypes.data, address, _ELEMENT * count)
        self._barrier(self._timeout)
        self._require_same_exchange()
        for number, slot in enumerate(self._slots):
            ctypes.memmove(target + number * _ELEMENT * count, slot.ctypes.data, _ELEMENT * count)
        # Nobody may write to a slot again before all ranks have read it.
        self._barrier(self._timeout)

    def _announce(self, kind: str, values: int) -> None:
        """Announces to the other ranks which exchange this rank begins."""
        self._exchanges += 1
        cell = self._me * _CELL
        exchange = (heartbeat.step(), _KINDS.index(kind), values)
        self._counters[cell + 1 : cell + 4] = memoryview(array("q", exchange))

    def _require_same_exchange(self) -> None:
        """Checks that all ranks are in the same exchange.

        Raises: RankError, on every rank: the ranks are in different exchanges.
        """
        counters, local_cell = self._counters, self._me * _CELL
        local_exchange = counters[local_cell + 1 : local_cell + 4]
        for peer in range(len(self._ranks)):
            if counters[peer * _CELL + 1 : peer * _CELL + 4] != local_exchange:
                raise RankError(
                    f"the ranks are not in the same collective, number {self._exchanges} of this "
                    f"run: {self._describe_exchange(self._me)}, {self._describe_exchange(peer)}: "
                    f"one of them skipped one or took another branch",
                    code="collectives_differ",
                    fix="conditions around a collective must have the same value on all ranks",
                )

    def _describe_exchange(self, number: int) -> str:
        """Describes the exchange a rank is in: `rank 3 in a sum of 8000 values of step 7`."""
        step, kind, values = self._counters[number * _CELL + 1 : number * _CELL + 4]
        return (
            f"rank {self._ranks[number]} in a {_KINDS[kind]} of {values} values of step {step + 1}"
        )

    def _barrier(self, timeout: float) -> None:
        """Waits until every rank has called this as often as this rank has."""
        self._arrivals += 1
        self._counters[self._me * _CELL] = self._arrivals
        began = time.perf_counter()
        checked, sleep_seconds = began, _SLEEP_SECONDS[0]
        for peer, pid in enumerate(self._processes):
            while self._counters[peer * _CELL] < self._arrivals:
                now = time.perf_counter()
                if now - began < _SPIN_SECONDS:
                    # The awaited rank may need the core that this rank occupies.
                    os.sched_yield()
                    continue
                if now - checked > _LOOK_SECONDS:
                    checked = now
                    self._require_alive(peer, pid, now - began, timeout)
                time.sleep(sleep_seconds)
                sleep_seconds = min(2 * sleep_seconds, _SLEEP_SECONDS[1])

    def _require_alive(self, peer: int, pid: int, waited: float, timeout: float) -> None:
        """Raises RankError if the awaited rank has ended or the timeout has passed."""
        description = f"rank {self._ranks[peer]} (process {pid} of this host)"
        # The rank may have arrived and ended since the counter was read.
        if not is_alive(pid) and self._counters[peer * _CELL] < self._arrivals:
            raise RankError(
                f"{description} ended while rank {self._rank} waited for it", code="lost_rank"
            )
        if waited > timeout:
            limit = "distributed.timeout_seconds"
            if timeout < self._timeout:
                limit = "other hosts wait 30 s for this one, which cannot be configured"
            raise RankError(
                f"rank {self._rank} waited {timeout:g} s ({limit}) for {description}, which is "
                f"alive but did not reach the same collective",
                code="rank_timeout",
            )


def _add_parts(parts_LF: Sequence[np.ndarray], sums_F: np.ndarray) -> None:
    """Sums arrays of the ranks of a host, in rank order, into `sums_F`."""
    if len(parts_LF) == 1:
        sums_F[:] = parts_LF[0]
        return
    np.add(parts_LF[0], parts_LF[1], out=sums_F)
    for part_F in parts_LF[2:]:
        np.add(sums_F, part_F, out=sums_F)


def _split_messages(places: Sequence[Place], message_values: int) -> Iterator[list[Place]]:
    """Splits the values into messages of at most `message_values` values."""
    message: list[Place] = []
    room = message_values
    for address, count in places:
        while count:
            part = min(count, room)
            message.append((address, part))
            address, count, room = address + _ELEMENT * part, count - part, room - part
            if not room:
                yield message
                message, room = [], message_values
    if message:
        yield message


def _cut_pieces(message: Sequence[Place], first: int, last: int) -> Iterator[Piece]:
    """Cuts the part of a message from `first` to `last` into pieces of _CHUNK_VALUES."""
    begin = 0
    for address, count in message:
        offset, end = max(begin, first), min(begin + count, last)
        while offset < end:
            values = min(end - offset, _CHUNK_VALUES)
            yield offset, address + _ELEMENT * (offset - begin), values
            offset += values
        begin += count


def _share_slice(count: int, me: int, ranks: int) -> slice:
    """Returns this rank's share of `count` elements, in whole cache lines."""
    line = _LINE // _ELEMENT
    lines = -(-count // line)
    # Two ranks must not write to the same cache line: it would move between their cores.
    first, last = (min(count, line * (lines * place // ranks)) for place in (me, me + 1))
    return slice(first, last)
