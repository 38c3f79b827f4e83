"""Sampler: which images each rank sees in each step, and how often.

    data.sampling -> copies_N, expected times -> per epoch, whole times of each image -> their order

A function of (seed, epoch, copies_N) and of the step, so it is the same on any number of ranks and
after a restart.  An image that is expected 2.3 times comes two or three times in every epoch, 2.3
times on average.  The length of an epoch is constant.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ppdist.config.data import SamplingConfig
from ppdist.config.train import MicroBatches
from ppdist.data.types import DetectionSet, Records, SampleKey, keyed_generator

_ORDER, _SIZE = 0, 1  # streams of random numbers


@dataclass(frozen=True, eq=False)
class TrainSampler:
    """A re-iterable sampler of the keys of this rank's micro-batches, from start_step to end_step.

    An epoch has ceil(epoch_size / total_batch) optimizer steps.  A step takes the next
    `total_batch` positions of the epoch's order and splits them into its micro-batches; the last
    step splits the remaining positions as evenly as possible into the same number.  So an image
    comes exactly once per epoch, or as often as `copies_N` says, and neither the images of a step
    nor those of a micro-batch depend on the number of ranks.

    Rank r of W takes micro-batches r, r + W, ..., so ranks may differ by one, or as many as its
    speed allows (`MicroBatches.takers`); of a spread micro-batch every rank takes a share.  A rank
    without an image gets one padding key, index -1, so that it takes part in the collectives.  With
    `parts` each micro-batch is split into that many, for ranks that lack the memory for all of it.

    All ranks build a sampler with equal arguments, except for `rank`.  `sizes`: (height, width)
    choices in pixels of multi-scale training; one is drawn per step, the same on all ranks; from
    step `last_from` on it is `last_size`.  `copies_N`: how often each image is expected in an
    epoch, see `expected_copies`; None: once.
    """

    dataset_size: int
    batches: MicroBatches
    rank: int
    world: int
    seed: int
    start_step: int
    end_step: int
    sizes: Sequence[tuple[int, int]]
    copies_N: np.ndarray | None = None
    parts: int = 1
    last_from: int | None = None
    last_size: tuple[int, int] = (0, 0)
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False)

    @property
    def every_size(self) -> tuple[tuple[int, int], ...]:
        """Returns all sizes that `size_of` may return."""
        return (*self.sizes, *([] if self.last_from is None else [self.last_size]))

    @cached_property
    def epoch_size(self) -> int:
        """Returns the number of samples per epoch over all ranks."""
        return self.dataset_size if self.copies_N is None else epoch_size(self.copies_N)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.epoch_size / self.batches.total_batch)

    def __len__(self) -> int:
        return sum(map(self.count, range(self.start_step, self.end_step)))

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for step in range(self.start_step, self.end_step):
            yield from self.micro_batches(step)

    def size_of(self, step: int) -> tuple[int, int]:
        """Returns height and width of all images of a step, on every rank."""
        if self.last_from is not None and step >= self.last_from:
            return self.last_size
        # Keyed by the step, so that a resumed run draws the same sizes on any number of ranks.
        choice = keyed_generator(self.seed, _SIZE, step).integers(len(self.sizes))
        height, width = self.sizes[int(choice)]
        return height, width

    def count(self, step: int) -> int:
        """Counts the micro-batches of this rank in one optimizer step, padding included."""
        return len(self.numbers(step))

    def numbers(self, step: int) -> Sequence[int]:
        """Returns the numbers of the micro-batches of one optimizer step that this rank takes.

        A rank with only padding gets a number beyond that of the last micro-batch.
        """
        images = self._step_images(step)
        count = min(self.batches.count * self.parts, images)
        if self.batches.spread:
            return range(count)
        takers = self.batches.takers(count, self.world)
        return [number for number, rank in enumerate(takers) if rank == self.rank] or [
            count + self.rank
        ]

    def shares(self, step: int) -> list[float]:
        """Returns this rank's share of each of its micro-batches; see `Batch.share`."""
        numbers = self.numbers(step)
        if not self.batches.spread:
            return [1.0] * len(numbers)
        base, remainder = divmod(self._step_images(step), len(numbers))
        sizes = [base + (number < remainder) for number in numbers]
        takers = [self.batches.takers(size, self.world) for size in sizes]
        return [ranks.count(self.rank) * self.world / len(ranks) for ranks in takers]

    def _step_images(self, step: int) -> int:
        """Returns the number of images of one optimizer step over all ranks."""
        total = self.batches.total_batch
        return min(total, self.epoch_size - step % self.steps_per_epoch * total)

    def micro_batches(self, step: int) -> list[list[SampleKey]]:
        """Returns this rank's keys of one optimizer step, one list per micro-batch."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.batches.total_batch
        order = self._order(epoch)[first : first + self.batches.total_batch]
        # Split before ranks are known: what is in a micro-batch must not depend on them.
        all_keys = np.array_split(order, min(self.batches.count * self.parts, len(order)))
        if self.batches.spread:
            own_keys = [self._share(keys_B2) for keys_B2 in all_keys]
        else:
            own_keys = [
                all_keys[number] for number in self.numbers(step) if number < len(all_keys)
            ] or [order[:0]]
        height, width = self.size_of(step)
        return [
            [SampleKey(epoch, index, height, width, copy) for index, copy in keys_B2.tolist()]
            or [SampleKey(epoch, -1, height, width)]
            for keys_B2 in own_keys
        ]

    def _share(self, keys_B2: np.ndarray) -> np.ndarray:
        """Returns this rank's share of a spread micro-batch."""
        takers = self.batches.takers(len(keys_B2), self.world)
        first = sum(rank < self.rank for rank in takers)
        return keys_B2[first : first + takers.count(self.rank)]

    def _order(self, epoch: int) -> np.ndarray:
        """Returns image and copy at each position of an epoch, int64 [epoch_size, 2].

        Caches the order of the last epoch.
        """
        if epoch not in self._orders:
            self._orders.clear()
            if self.copies_N is None:
                index_E = draw_epoch_order(self.dataset_size, self.seed, epoch)
                self._orders[epoch] = np.stack([index_E, np.zeros_like(index_E)], axis=1)
            else:
                self._orders[epoch] = draw_repeated_order(self.copies_N, self.seed, epoch)
        return self._orders[epoch]


@dataclass(frozen=True, eq=False)
class EvalSampler:
    """A sampler of the keys of this rank's share of a set, without padding.

    Over all ranks every image comes once.

    Without `shapes_N2` all inputs have `size` (height, width), and rank r takes images r,
    r + world, ... in order.  With it (from `rectangular_shapes`) image i gets the input
    shapes_N2[i]: images of one shape share batches, the largest shapes first, and rank r takes
    batches r, r + world, ...; the content of a batch does not depend on the number of ranks.
    Either way ranks may differ by one in the number of their batches.
    """

    dataset_size: int
    batch_size: int
    rank: int
    world: int
    size: tuple[int, int]
    shapes_N2: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for indices, (height, width) in self._batches():
            yield [SampleKey(0, index, height, width) for index in indices]

    def _batches(self) -> list[tuple[Sequence[int], tuple[int, int]]]:
        """Returns image positions and input (height, width) of each batch."""
        if self.shapes_N2 is None:
            share = range(self.rank, self.dataset_size, self.world)
            return [(part, self.size) for part in _chunks(share, self.batch_size)]
        members: dict[tuple[int, int], list[int]] = {}
        for index, (height, width) in enumerate(self.shapes_N2.tolist()):
            members.setdefault((height, width), []).append(index)
        largest_first = sorted(members, key=lambda shape: (-shape[0] * shape[1], shape))
        batches = [
            (part, shape)
            for shape in largest_first
            for part in _chunks(members[shape], self.batch_size)
        ]
        return batches[self.rank :: self.world]


def _chunks(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[first : first + size] for first in range(0, len(indices), size)]


def rectangular_shapes(
    sizes_N2: Sequence[tuple[int, int]] | np.ndarray,
    size: tuple[int, int],
    multiple: int,
    pad: float = 0.0,
) -> np.ndarray:
    """Computes the smallest inputs that letterbox each image as in `size`, int64 [N, 2].

    In such an input an image has exactly the same pixels as in `size`, with less grey padding: its
    shape depends only on the image, not on the rank or batch.

        scale = min(size / image),  side = ceil(image * scale / multiple + pad) * multiple

    Without a pad no side exceeds that of `size`; with one, sides of `size` grow, too.

    Args:
        sizes_N2: height and width of each image in pixels; one of size 0 (not known) gets `size`.
        size: (height, width) of the largest input.
        multiple: the sides are multiples of this many pixels: the model's largest stride.
        pad: grey that is added to each side before it is rounded up, in multiples.
    """
    image_N2 = np.asarray(sizes_N2, np.int64).reshape(-1, 2)
    height_N, width_N = np.maximum(1, image_N2).T
    known_N1 = (image_N2 > 0).all(axis=1, keepdims=True)
    wide_N1 = (height_N * size[1] <= width_N * size[0])[:, None]  # the width limits
    # Quotients of integers are exact if they are integers; a factor 1 / 3 would not be, and an
    # input a hair too small would scale its image down.
    one_N = np.ones_like(height_N)
    over_N2 = np.where(
        wide_N1,
        np.stack([height_N * size[1], one_N * size[1]], axis=1),
        np.stack([one_N * size[0], width_N * size[0]], axis=1),
    )
    under_N2 = np.where(wide_N1, np.stack([width_N, one_N], 1), np.stack([one_N, height_N], 1))
    sides_N2 = np.where(known_N1, over_N2 / under_N2, size)
    sides_N2 = np.ceil(sides_N2 / multiple + pad).astype(np.int64) * multiple
    return sides_N2 if pad else np.where(known_N1, np.minimum(sides_N2, size), size)


# --- the order of an epoch -----------------------------------------------------------------------

_UNIT = 2**32  # parts of one, for exact sums


def draw_epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Draws the order of the images in an epoch, int64 [size].

    A function of seed and epoch alone.
    """
    return keyed_generator(seed, _ORDER, epoch).permutation(size)


def draw_repeated_order(copies_N: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Draws shuffled image positions and copy numbers, int64 [epoch_size(copies_N), 2].

    A function of the three arguments alone.

    Args:
        copies_N: the expected copies of each image, see `expected_copies`.
    """
    rng = keyed_generator(seed, _ORDER, epoch)
    times_N = draw_copies(copies_N, rng.random())
    index_E = np.repeat(np.arange(len(times_N)), times_N)
    first_E = np.repeat(np.cumsum(times_N) - times_N, times_N)
    # Copies of an image are numbered, so that each has random numbers of its own.
    copy_E = np.arange(len(index_E)) - first_E
    return np.stack([index_E, copy_E], axis=1)[rng.permutation(len(index_E))]


def epoch_size(copies_N: np.ndarray) -> int:
    """Returns the number of samples per epoch: the expected number, rounded."""
    return math.floor(math.fsum(copies_N) + 0.5)


def draw_copies(copies_N: np.ndarray, offset: float) -> np.ndarray:
    """Draws how often each image comes in one epoch, int64 [N]: the floor or ceil of copies_N.

    The fractions lie end to end on a line, and an image comes once more if one of offset, offset +
    1, offset + 2, ... falls on its own.  The sum is `epoch_size(copies_N)`.

    Args:
        offset: uniform in [0, 1).
    Source: Madow 1949, Ann. Math. Statist. 20(3): systematic sampling.
    """
    floor_N = np.floor(copies_N)
    fraction_N = _scale_to_sum(copies_N - floor_N, epoch_size(copies_N) - int(floor_N.sum()))
    # In integers: a rounding error of the sum must not add a copy of an image without a fraction.
    end_N = np.rint(np.cumsum(fraction_N) * _UNIT).astype(np.int64)
    turns_N = -((int(offset * _UNIT) - end_N) // _UNIT)
    return floor_N.astype(np.int64) + np.diff(turns_N, prepend=0)


def _scale_to_sum(fraction_N: np.ndarray, wanted: int) -> np.ndarray:
    """Scales fractions in [0, 1) so that their sum is exactly `wanted`.

    `wanted` is their present sum, rounded up or down.  A 0 stays 0, so that an image that is to
    come exactly once does; none gets beyond 1.
    """
    total, open_N = math.fsum(fraction_N), fraction_N > 0
    if total in (0, wanted):
        return fraction_N
    if wanted < total:
        return fraction_N * (wanted / total)
    shrink = (open_N.sum() - wanted) / (open_N.sum() - total)
    return np.where(open_N, 1 - (1 - fraction_N) * shrink, 0.0)


# --- how often each image comes ------------------------------------------------------------------


def expected_copies(
    dataset: DetectionSet, config: SamplingConfig, difficulty_C: Sequence[float] | None
) -> np.ndarray | None:
    """Computes the expected number of copies of each image per epoch, float64 [N].

    Crowd boxes are not counted, since training leaves them out.

    Args:
        difficulty_C: what `difficulty` returned for the last evaluation; None before the first,
            when all classes are equally difficult.  Only used by `difficulty`.
    Returns: None if each image comes exactly once (shuffle).
    Raises: ValueError: difficulty_C does not have one number per class.
    """
    if config.name == "shuffle":
        return None
    records = Records.of(dataset.records)
    alone_O = ~records.crowd_O
    image_O, label_O = records.image_O[alone_O], records.labels_O[alone_O]
    count, classes = len(dataset.records), len(dataset.class_names)
    if config.name == "balanced":
        return repeat_factors(image_O, label_O, count, classes, config.balance_threshold)
    weight_C = np.ones(classes) if difficulty_C is None else np.asarray(difficulty_C, np.float64)
    if weight_C.shape != (classes,):
        raise ValueError(f"{weight_C.size} difficulties for {classes} classes")
    return difficulty_copies(image_O, label_O, count, weight_C)


def repeat_factors(
    image_O: np.ndarray, label_O: np.ndarray, count: int, classes: int, threshold: float
) -> np.ndarray:
    """Computes how often each image is repeated for its rare classes, float64 [count], >= 1.

        r_i = max(1, max over its classes c of sqrt(threshold / f_c)),  f_c = images with c / images

    Args:
        image_O, label_O: image and class of each object.
    Source: Gupta et al. 2019, arXiv:1908.03195, section 4 (repeat factor sampling).
    """
    # Pairs as single numbers, as np.unique of rows is many times slower.
    shown_CN = np.unique(label_O * count + image_O)  # each class once an image
    share_C = np.bincount(shown_CN // count, minlength=classes) / count
    with np.errstate(divide="ignore"):
        factor_C = np.sqrt(threshold / share_C)
    factor_N = np.ones(count)
    np.maximum.at(factor_N, shown_CN % count, factor_C[shown_CN // count])
    return factor_N


def difficulty_copies(
    image_O: np.ndarray, label_O: np.ndarray, count: int, difficulty_C: np.ndarray
) -> np.ndarray:
    """Computes copies by difficulty and rarity of the classes, float64 [count], mean 1.

    Images with many objects of difficult or rare classes come more often:

        w_i = sum over its objects of d_c / (objects of class c),  r_i = count w_i / sum(w)

    An image without objects has the mean weight of the others.

    Args:
        image_O, label_O: image and class of each object.
        difficulty_C: d_c >= 0 of each class.
    """
    objects_C = np.bincount(label_O, minlength=len(difficulty_C))
    weight_O = (difficulty_C / np.maximum(1, objects_C))[label_O]
    weight_N = np.bincount(image_O, weight_O, minlength=count)
    with_N = np.bincount(image_O, minlength=count) > 0
    total = math.fsum(weight_N)
    if not total > 0:  # no objects, or nothing difficult about any
        return np.ones(count)
    weight_N[~with_N] = total / with_N.sum()
    return weight_N * (count / math.fsum(weight_N))


def difficulty(ap_C: Sequence[float | None]) -> np.ndarray:
    """Computes the difficulty of each class, d_c = (1 - AP_c)^2, float64 [C].

    A class without an object in the evaluated set (None, NaN, or -1 as in COCO) is as difficult as
    the mean AP of the others.
    """
    ap = np.asarray(ap_C, np.float64)
    known_C = ap >= 0
    mean = math.fsum(ap[known_C]) / known_C.sum() if known_C.any() else 0.0
    return (1 - np.where(known_C, ap, mean)) ** 2
