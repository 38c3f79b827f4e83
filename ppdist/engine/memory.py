"""Memory a rank may still take, memory it has taken, and the batch that fits between the two.

Three kinds run out separately, and each is counted by itself, in bytes: the memory of the host,
which its ranks share; the address space of a process (`ulimit -v`), where that is limited; and the
memory of a card.
"""

import resource
from collections.abc import Mapping
from pathlib import Path

import paddle

from ppdist import dist
from ppdist.data.cores import available_memory

HOST, ADDRESSES, CARD = "memory of the host", "address space (ulimit -v)", "memory of the card"
Bytes = Mapping[str, int]  # by kind


def room(ranks_on_host: int) -> dict[str, int]:
    """What this rank may still take: of the host its share of what is free.

    A host has free what the machine and the control groups of this process (containers) leave.
    A card that does not say how much it has free is left out.
    """
    found = {HOST: available_memory() // max(1, ranks_on_host)}
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        found[ADDRESSES] = max(0, limit - _status()["VmSize"])
    if dist.on_gpu():
        free = _free_on_card()
        found |= {} if free is None else {CARD: free}
    return found


class Meter:
    """What this process has taken since the meter was made, at the most."""

    def __init__(self) -> None:
        before = _status()
        self._before = {HOST: before["VmRSS"], ADDRESSES: before["VmSize"]}

    def peak(self) -> dict[str, int]:
        """By kind; it never falls."""
        now = _status()
        found = {
            HOST: max(0, now["VmHWM"] - self._before[HOST]),
            ADDRESSES: max(0, now["VmPeak"] - self._before[ADDRESSES]),
        }
        if dist.on_gpu():
            found[CARD] = int(paddle.device.cuda.max_memory_reserved())
        return found


def fits(used: Bytes, room: Bytes) -> bool:
    """Whether there is room for it, of every kind that is limited."""
    return all(used.get(kind, 0) <= limit for kind, limit in room.items())


def largest(measured: Mapping[int, Bytes], room: Bytes, most: int) -> int:
    """The largest batch, at most `most`, that has room by what smaller or larger ones took.

    Memory is a constant and an amount for each image, so a line through the two largest batches
    tells, of each kind by itself; through one alone, the line through zero, which promises less.

    Args:
        measured: batch -> what it took; at least one.
    Returns: 0: not even one image.
    """
    (*_, before, last) = [0, *sorted(measured)]
    result = most
    for kind, limit in room.items():
        used = measured[last].get(kind, 0)
        lower = measured[before].get(kind, 0) if before else 0
        each = (used - lower) / (last - before)
        if each > 0:
            result = min(result, last + int((limit - used) // each))
        elif used > limit:
            result = 0
    return max(0, result)


def shown(amount: float) -> str:
    """`1.25 GiB`, `640 MiB`"""
    return f"{amount / 2**30:.3g} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"


def tightest(used: Bytes, room: Bytes) -> str:
    """Of the kind that is nearest its limit, what is used of how much, in words."""
    kind = max(room, key=lambda each: used.get(each, 0) / max(1, room[each]))
    return f"{shown(used.get(kind, 0))} of {shown(room[kind])} {kind}"


def _status() -> dict[str, int]:
    """What Linux says of the memory of this process, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(":") for line in lines if line.startswith("Vm")]
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs}


def _free_on_card() -> int | None:
    """Bytes; None: nobody says.  Not run on a GPU."""
    try:
        return int(paddle.cuda.mem_get_info()[0])
    except Exception:  # Paddle 3.2 has no such function; a driver may refuse in its own way
        return None
