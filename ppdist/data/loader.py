"""Batches from disk: decode, augment, resize, pad; in worker processes or in this one.

    sampler -> keys of a micro-batch -> _Samples (in a worker) -> arrays -> shared memory -> Batch

Keys travel through the sampler, so workers need no signal when an epoch begins, and a batch is the
same whatever the number of workers, and after a restart.  Images cross processes as uint8.
"""

import logging
import os
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
import paddle
from paddle.io import DataLoader, Dataset

from ppdist.data.dataset import DataConfig
from ppdist.data.sample import Batch, DetectionSet, SampleKey, keyed_generator
from ppdist.data.sampler import EvalSampler, TrainSampler
from ppdist.data.transforms import (
    AugmentConfig,
    map_boxes,
    random_colours,
    random_interpolation,
    random_placement,
    read_image,
    render,
    resize_for_evaluation,
    whole,
)
from ppdist.errors import DataError

_LOGGER = logging.getLogger("ppdist.data")
_AUGMENT = 2  # stream of random numbers, beside the sampler's
_BOX_ROUNDING = 8  # boxes per image are padded to a multiple, so that shapes repeat
_MOST_REPLACEMENTS = 100
_CLOSE_SECONDS = 5.0


class TrainLoader:
    """This rank's training micro-batches, from the sampler's first step to its last.

    Crowd boxes are left out: they are no single object to learn.
    """

    def __init__(
        self, dataset: DetectionSet, config: DataConfig, sampler: TrainSampler, *, seed: int
    ) -> None:
        """
        Args:
            sampler: of this rank; its `dataset_size` is that of `dataset`.
            seed: of augmentation, together with (epoch, index).
        """
        self._samples = _TrainSamples(dataset, config.bad_images, config.augment, seed)
        self._sampler = sampler
        self._workers = config.workers

    def __iter__(self) -> Generator[Batch, None, None]:
        """Workers live as long as the iterator: exhaust it, close it, or let go of it.

        Raises, while iterating: DataError: an image cannot be read and data.bad_images is `error`,
            or too many in a row cannot; RuntimeError: a worker failed in another way.
        """
        return _batches(self._samples, self._sampler, self._workers)


class EvalLoader:
    """This rank's share of a split, each image once over all ranks; iterate it again and again.

    The whole image stretched to the input, cubic; all boxes, crowds too.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        config: DataConfig,
        *,
        image_size: tuple[int, int],
        batch_size: int,
        rank: int,
        world: int,
    ) -> None:
        """
        Args:
            image_size: (height, width) of the input in pixels.
            batch_size: images per batch; the last may be smaller.
        """
        self._samples = _EvalSamples(dataset, config.bad_images)
        self._sampler = EvalSampler(len(dataset.records), batch_size, rank, world, image_size)
        self._workers = config.workers

    def __iter__(self) -> Generator[Batch, None, None]:
        """Raises, while iterating: as TrainLoader."""
        return _batches(self._samples, self._sampler, self._workers)


class _Arrays(NamedTuple):
    """A batch in numpy; see Batch."""

    images_B3HW: np.ndarray
    boxes_BM4: np.ndarray
    labels_BM: np.ndarray
    mask_BM: np.ndarray
    image_index_B: np.ndarray
    scale_B2: np.ndarray


@dataclass(frozen=True)
class _Sample:
    """One image at input size and its objects."""

    image_HW3: np.ndarray
    boxes_M4: np.ndarray
    labels_M: np.ndarray
    index: int
    scale: tuple[float, float] = (1.0, 1.0)


class _Samples(Dataset):
    """Makes whole micro-batches of keys; problems travel back as text beside the arrays."""

    def __init__(self, dataset: DetectionSet, bad_images: str) -> None:
        self._dataset = dataset
        self._bad_images = bad_images
        self._problems: list[str] = []

    def __len__(self) -> int:
        return len(self._dataset.records)

    def __getitem__(self, keys: list[SampleKey]) -> list[Any]:
        """[arrays, problems to warn of, a user's error, our error]; the errors are "" or text.

        Paddle reports an exception of a worker as a SystemError without its text, so none leaves.
        """
        nothing = np.zeros(1, np.uint8)
        self._problems = []
        key = keys[0]
        try:
            samples = []
            for key in keys:
                samples.append(self.make(key) if key.index >= 0 else _padding(key))
            return [[*_collate(samples)], self._problems, "", ""]
        except DataError as error:
            return [[nothing], [], str(error), ""]
        except (OSError, cv2.error, MemoryError) as error:
            path = self._dataset.records[key.index].path
            return [[nothing], [], f"{path}: {type(error).__name__}: {error}", ""]
        except Exception:
            path = self._dataset.records[key.index].path
            return [[nothing], [], "", f"{path}: loading failed\n{traceback.format_exc()}"]

    def make(self, key: SampleKey) -> _Sample:
        raise NotImplementedError

    def _read(self, index: int, consequence: str) -> np.ndarray | None:
        """The image, or None with a note of what that entails.

        Raises: DataError: it cannot be read and data.bad_images is `error`.
        """
        record = self._dataset.records[index]
        try:
            return read_image(record.path, (record.height, record.width))
        except DataError as error:
            if self._bad_images == "error":
                raise DataError(f"{error}; remove it, or set data.bad_images: skip") from error
            self._problems.append(f"{error}; {consequence}")
            return None


class _TrainSamples(_Samples):
    def __init__(
        self, dataset: DetectionSet, bad_images: str, augment: AugmentConfig, seed: int
    ) -> None:
        super().__init__(dataset, bad_images)
        self._augment = augment
        self._seed = seed

    def make(self, key: SampleKey) -> _Sample:
        index, image_HW3 = self._next_good(key.index)
        record = self._dataset.records[index]
        rng = keyed_generator(self._seed, _AUGMENT, key.epoch, key.index)
        alone_M = ~record.crowd_M
        boxes_M4, labels_M = record.boxes_M4[alone_M], record.labels_M[alone_M]
        size = key.height, key.width
        placement = random_placement(
            boxes_M4, record.width, record.height, size, self._augment, rng
        )
        colours_34 = random_colours(self._augment.distort, rng)
        interpolation = cv2.INTER_LINEAR
        if self._augment.random_interpolation:
            interpolation = random_interpolation(rng)
        mapped_M4, keep_M = map_boxes(boxes_M4, placement)
        return _Sample(
            render(image_HW3, placement, interpolation, colours_34),
            mapped_M4[keep_M],
            labels_M[keep_M],
            index,
        )

    def _next_good(self, index: int) -> tuple[int, np.ndarray]:
        """The image at `index`, or the next that can be read: a function of `index` alone."""
        count = len(self._dataset.records)
        for step in range(min(count, _MOST_REPLACEMENTS)):
            candidate = (index + step) % count
            image_HW3 = self._read(candidate, "training takes the next good image in its place")
            if image_HW3 is not None:
                return candidate, image_HW3
        raise DataError(
            f"{self._dataset.source}: {min(count, _MOST_REPLACEMENTS)} images in a row cannot be "
            f"read; the first: {self._problems[0].partition(';')[0]}"
        )


class _EvalSamples(_Samples):
    def make(self, key: SampleKey) -> _Sample:
        record = self._dataset.records[key.index]
        size = key.height, key.width
        image_HW3 = self._read(key.index, "evaluation sees a blank image in its place")
        input_HW3 = (
            np.zeros((*size, 3), np.uint8)
            if image_HW3 is None
            else resize_for_evaluation(image_HW3, size)
        )
        scale = key.height / record.height, key.width / record.width
        boxes_M4, _ = map_boxes(record.boxes_M4, whole(record.width, record.height, size))
        return _Sample(input_HW3, boxes_M4, record.labels_M, key.index, scale)


def _padding(key: SampleKey) -> _Sample:
    image_HW3 = np.zeros((key.height, key.width, 3), np.uint8)
    return _Sample(image_HW3, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), -1)


def _collate(samples: Sequence[_Sample]) -> _Arrays:
    """Stacks samples; boxes are padded with zeros to a common multiple of 8, at least 8."""
    most = max(1, *(len(sample.labels_M) for sample in samples))
    padded = -(-most // _BOX_ROUNDING) * _BOX_ROUNDING
    height, width = samples[0].image_HW3.shape[:2]
    images_B3HW = np.empty((len(samples), 3, height, width), np.uint8)
    boxes_BM4 = np.zeros((len(samples), padded, 4), np.float32)
    labels_BM = np.zeros((len(samples), padded), np.int64)
    mask_BM = np.zeros((len(samples), padded), np.float32)
    for position, sample in enumerate(samples):
        count = len(sample.labels_M)
        images_B3HW[position] = sample.image_HW3.transpose(2, 0, 1)
        boxes_BM4[position, :count] = sample.boxes_M4
        labels_BM[position, :count] = sample.labels_M
        mask_BM[position, :count] = 1.0
    return _Arrays(
        images_B3HW,
        boxes_BM4,
        labels_BM,
        mask_BM,
        np.array([sample.index for sample in samples], np.int64),
        np.array([sample.scale for sample in samples], np.float32),
    )


class _Plan(Protocol):
    """A sampler: the keys of each micro-batch, as often as it is asked."""

    def __iter__(self) -> Iterator[list[SampleKey]]: ...
    def __len__(self) -> int: ...


def _batches(samples: _Samples, plan: _Plan, workers: int) -> Generator[Batch, None, None]:
    source = _in_workers(samples, plan, workers) if workers else _in_process(samples, plan)
    warned: set[str] = set()
    with closing(source):
        for keys, (tensors, problems, user_error, our_error) in zip(plan, source):
            if user_error:
                raise DataError(user_error)
            if our_error:
                raise RuntimeError(our_error)
            for problem in problems:
                if problem not in warned:
                    warned.add(problem)
                    _LOGGER.warning(problem)
            named = dict(zip(_Arrays._fields, tensors))
            yield Batch(**named, real=keys[0].index >= 0)


def _in_process(samples: _Samples, plan: _Plan) -> Generator[list[Any], None, None]:
    cv2.setNumThreads(0)  # as in workers: the cores belong to training
    for keys in plan:
        arrays, *rest = samples[keys]
        yield [[paddle.to_tensor(array) for array in arrays], *rest]


class _OneItem:
    """A plan in the shape DataLoader expects: every batch has one item, the keys of all images."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[list[SampleKey]]]:
        return ([keys] for keys in self._plan)


def _only(items: list[Any]) -> Any:
    return items[0]


def _start_worker(worker: int) -> None:
    os.setpgid(0, 0)  # a signal to the rank's group is for the rank: it still needs its workers
    cv2.setNumThreads(0)  # one thread a worker


def _in_workers(samples: _Samples, plan: _Plan, workers: int) -> Generator[list[Any], None, None]:
    loader = DataLoader(
        samples,
        batch_sampler=_OneItem(plan),
        collate_fn=_only,
        num_workers=workers,
        use_shared_memory=True,
        use_buffer_reader=True,
        worker_init_fn=_start_worker,
    )
    iterator = iter(loader)
    try:
        yield from iterator
    except SystemError as error:  # exceptions inside a worker come as text: this one is dead
        raise RuntimeError(
            "a worker that prepares images died; the usual reason is memory: lower "
            "data.workers, or give /dev/shm more room"
        ) from error
    finally:
        # Its reader thread keeps it alive, so letting go of it would leave the workers running.
        iterator._try_shutdown_all(_CLOSE_SECONDS)


def measure_loader(
    dataset: DetectionSet,
    config: DataConfig,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    seconds: float,
) -> dict[str, float]:
    """Speed of the training loader alone, nothing else being computed, over about `seconds`.

    Returns: images_per_second over all workers and per worker (`workers: 0`: this process).
    """
    sampler = TrainSampler(
        dataset_size=len(dataset.records),
        batch_size_per_card=batch_size,
        accumulate=1,
        rank=0,
        world=1,
        seed=0,
        start_step=0,
        end_step=2**31,
        sizes=[image_size],
    )
    with closing(iter(TrainLoader(dataset, config, sampler, seed=0))) as batches:
        for _ in range(max(2, 2 * config.workers)):  # start-up, and what was prepared meanwhile
            next(batches)
        images, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            images += next(batches).images_B3HW.shape[0]
        rate = images / (time.perf_counter() - began)
    return {
        "images_per_second": rate,
        "images_per_second_per_worker": rate / max(1, config.workers),
        "workers": float(config.workers),
        "images": float(images),
    }
