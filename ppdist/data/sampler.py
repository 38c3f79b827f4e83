"""Which images each rank sees in each step: a function of (seed, step), whoever asks and when."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ppdist.data.sample import EMPTY, SampleKey, keyed_generator

_ORDER, _SIZE = 0, 1  # streams of random numbers


@lru_cache(maxsize=2)
def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [size], the permutation of an epoch: a function of seed and epoch alone; read-only."""
    order_N = keyed_generator(seed, _ORDER, epoch).permutation(size)
    order_N.flags.writeable = False
    return order_N


@dataclass(frozen=True)
class TrainSampler:
    """Keys of every micro-batch of this rank from start_step to end_step; iterate it anew at will.

    An epoch has ceil(N / (world * accumulate * batch_size_per_card)) optimizer steps.  Each takes
    the next `world * accumulate * batch_size_per_card` positions of the epoch's order; the last
    takes what is left, dealt out over all micro-batches of all ranks as evenly as it goes.  So
    every image comes exactly once an epoch, and the images of a step do not depend on how world,
    accumulation and batch make up the total batch.  A micro-batch that gets nothing holds one
    padding key, so that every rank has as many micro-batches as the others: index -1, or EMPTY
    where no rank got anything.

    Every rank builds one, alike but for `rank`.  `sizes`: (height, width) choices in pixels of
    multi-scale training; one is drawn per step, the same on all ranks.
    """

    dataset_size: int
    batch_size_per_card: int
    accumulate: int
    rank: int
    world: int
    seed: int
    start_step: int
    end_step: int
    sizes: Sequence[tuple[int, int]]

    @property
    def total_batch(self) -> int:
        """Images of a full optimizer step over all ranks."""
        return self.world * self.accumulate * self.batch_size_per_card

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.dataset_size / self.total_batch)

    def __len__(self) -> int:
        return (self.end_step - self.start_step) * self.accumulate

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for step in range(self.start_step, self.end_step):
            yield from self.micro_batches(step)

    def size_of(self, step: int) -> tuple[int, int]:
        """Height and width of every image of a step, on every rank."""
        choice = keyed_generator(self.seed, _SIZE, step).integers(len(self.sizes))
        height, width = self.sizes[int(choice)]
        return height, width

    def micro_batches(self, step: int) -> list[list[SampleKey]]:
        """This rank's keys of one optimizer step, one list per micro-batch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order_N = epoch_order(self.dataset_size, self.seed, epoch)
        first = within * self.total_batch
        shares = np.array_split(
            order_N[first : first + self.total_batch], self.world * self.accumulate
        )
        height, width = self.size_of(step)
        # Micro-batch m of rank r is share m * world + r: what is one more in the last step of an
        # epoch goes to the ranks in turn, and rank 0 has nothing only where nobody has.
        return [
            [SampleKey(epoch, int(index), height, width) for index in share]
            or [SampleKey(epoch, -1 if len(of_rank_0) else EMPTY, height, width)]
            for share, of_rank_0 in zip(shares[self.rank :: self.world], shares[:: self.world])
        ]


@dataclass(frozen=True)
class EvalSampler:
    """Keys of this rank's share of a set: every image once over all ranks, in order, no padding.

    Rank r takes images r, r + world, ...; ranks may differ by one in the number of their batches.
    """

    dataset_size: int
    batch_size: int
    rank: int
    world: int
    size: tuple[int, int]

    def __len__(self) -> int:
        return math.ceil(len(range(self.rank, self.dataset_size, self.world)) / self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        share = range(self.rank, self.dataset_size, self.world)
        for first in range(0, len(share), self.batch_size):
            indices = share[first : first + self.batch_size]
            yield [SampleKey(0, index, *self.size) for index in indices]
