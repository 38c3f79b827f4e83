"""Tensors in messages, and which size of message is worth it between these ranks, measured when
they have just met."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import paddle

SIZES_MB = (1, 2, 4, 8, 16)
LARGEST_MB = SIZES_MB[-1]
_REPEATS = 3
_NEARLY = 1.05  # within the differences between one measurement and the next
_SLOW_SECONDS = 0.08  # for the largest: below 200 MB/s the link limits, whatever the size


def fastest_mb(try_size: Callable[[int], None], exchange: Callable[[Any], list[Any]]) -> int:
    """The smallest size that is as fast as any, MiB; every rank calls it, in less than 2 s.

    Small messages leave early and take less memory, large ones have less to wait for.

    Args:
        try_size: sums the same LARGEST_MB MiB in messages of so many MiB; all ranks run it.
        exchange: gives what every rank gave, in rank order.
    Returns: what rank 0 found, on every rank.
    """
    try_size(LARGEST_MB)  # makes the connections
    if exchange(_seconds(try_size, LARGEST_MB))[0] > _SLOW_SECONDS:
        return LARGEST_MB
    seconds: dict[int, list[float]] = {mb: [] for mb in SIZES_MB}
    for _ in range(_REPEATS):
        for mb in SIZES_MB:
            seconds[mb].append(_seconds(try_size, mb))
    typical = {mb: median(found) for mb, found in seconds.items()}
    best = min(typical.values())
    return exchange(min(mb for mb in SIZES_MB if typical[mb] <= _NEARLY * best))[0]


def _seconds(try_size: Callable[[int], None], mb: int) -> float:
    began = time.perf_counter()
    try_size(mb)
    return time.perf_counter() - began


def messages(tensors: Sequence[paddle.Tensor], size: int) -> Iterator[list[paddle.Tensor]]:
    """Runs of tensors of at most `size` bytes each, or of one tensor that is larger."""
    message: list[paddle.Tensor] = []
    held = 0
    for tensor in tensors:
        needed = tensor.element_size() * tensor.size  # asked for once: it takes 20 microseconds
        if message and held + needed > size:
            yield message
            message, held = [], 0
        message.append(tensor)
        held += needed
    if message:
        yield message
