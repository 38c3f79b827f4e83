"""Seconds of an all-reduce on N cards: the latency-bandwidth model."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Between two cards, or two hosts."""

    latency_seconds: float  # of one hop, however small the message
    bytes_per_second: float  # each way


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equally many cards."""

    hosts: int
    cards: int  # of each host
    inside: Link  # between the cards of one host
    across: Link  # between hosts; all cards of a host share it

    @property
    def size(self) -> int:
        """Cards in all."""
        return self.hosts * self.cards

    def __str__(self) -> str:
        return f"{self.hosts} x {self.cards}" if self.hosts > 1 else f"{self.cards}"


def ring_seconds(ranks: int, size: float, link: Link) -> float:
    """All-reduce of `size` bytes around a ring: every rank sends its share 2 (n - 1) times.

    2 (n - 1) latency + 2 (n - 1) / n size / bandwidth.  The second term is the least that any
    algorithm of messages between pairs can take (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    """
    return 2 * (ranks - 1) * (link.latency_seconds + size / ranks / link.bytes_per_second)


def tree_seconds(ranks: int, size: float, link: Link) -> float:
    """Up a tree and down again: 2 log2(n) latency + 2 size / bandwidth."""
    if ranks == 1:
        return 0.0
    return 2 * math.log2(ranks) * link.latency_seconds + 2 * size / link.bytes_per_second


def all_reduces(size: float, cluster: Cluster) -> dict[str, float]:
    """Seconds of an all-reduce of `size` bytes, by algorithm.

    On several hosts a flat ring goes at the pace of the slower link.  In two levels (summed over
    the cards of a host, then over hosts, then handed back to the cards) only 2 (M - 1) / M of the
    size crosses between M hosts, whether one card of each sends all of it or each of them its part.
    """
    inside, across = cluster.inside, cluster.across
    if cluster.hosts == 1:
        return {
            "ring": ring_seconds(cluster.cards, size, inside),
            "tree": tree_seconds(cluster.cards, size, inside),
        }
    slower = Link(
        max(inside.latency_seconds, across.latency_seconds),
        min(inside.bytes_per_second, across.bytes_per_second),
    )
    if cluster.cards == 1:
        slower = across
    within = min(f(cluster.cards, size, inside) for f in (ring_seconds, tree_seconds))
    between = min(f(cluster.hosts, size, across) for f in (ring_seconds, tree_seconds))
    return {
        "ring": ring_seconds(cluster.size, size, slower),
        "two levels": within + between,
    }


def all_reduce_seconds(size: float, cluster: Cluster) -> float:
    """By the fastest algorithm, as NCCL chooses; 0 on one card."""
    return min(all_reduces(size, cluster).values())
