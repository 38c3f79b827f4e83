"""Batches from disk: decode, augment, resize, pad; in worker processes or in this one.

    sampler -> keys of a micro-batch -> Samples (in a worker) -> arrays -> shared memory -> Batch

Keys travel through the sampler, so workers need no signal when an epoch begins, and a batch is the
same whatever the number of workers, and after a restart.  Images cross processes as uint8.
"""

import logging
import os
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Protocol

import cv2
import paddle
from paddle.io import DataLoader

from ppdist.data.classify import ClassifyEvalSamples, ClassifyTrainSamples
from ppdist.data.dataset import DataConfig
from ppdist.data.sample import EMPTY, Batch, DetectionSet, SampleKey
from ppdist.data.sampler import EvalSampler, TrainSampler
from ppdist.data.samples import Arrays, EvalSamples, Samples
from ppdist.data.train_samples import TrainSamples
from ppdist.errors import DataError

_LOGGER = logging.getLogger("ppdist.data")
_CLOSE_SECONDS = 5.0


class TrainLoader:
    """This rank's training micro-batches, from the sampler's first step to its last.

    Crowd boxes are left out: they are no single object to learn.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        config: DataConfig,
        sampler: TrainSampler,
        *,
        seed: int,
        epochs: int | None = None,
    ) -> None:
        """
        Args:
            sampler: of this rank; its `dataset_size` is that of `dataset`.
            seed: of augmentation, together with (epoch, index).
            epochs: of the whole run; data.augment.close_mosaic_epochs counts back from them.
        """
        kind = ClassifyTrainSamples if config.classifies else TrainSamples
        self._samples = kind(
            dataset, config.bad_images, config.augment, seed, resize=config.resize, epochs=epochs
        )
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

    The whole image, stretched or letterboxed (data.resize), with all boxes, crowds too; for a
    classifier the centre of it.
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
        kind = ClassifyEvalSamples if config.classifies else EvalSamples
        self._samples = kind(dataset, config.bad_images, resize=config.resize)
        self._sampler = EvalSampler(len(dataset.records), batch_size, rank, world, image_size)
        self._workers = config.workers

    def __iter__(self) -> Generator[Batch, None, None]:
        """Raises, while iterating: as TrainLoader."""
        return _batches(self._samples, self._sampler, self._workers)


class _Plan(Protocol):
    """A sampler: the keys of each micro-batch, as often as it is asked."""

    def __iter__(self) -> Iterator[list[SampleKey]]: ...
    def __len__(self) -> int: ...


def _batches(samples: Samples, plan: _Plan, workers: int) -> Generator[Batch, None, None]:
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
            named = dict(zip(Arrays._fields, tensors))
            index = keys[0].index
            yield Batch(**named, real=index >= 0, real_somewhere=index != EMPTY)


def _in_process(samples: Samples, plan: _Plan) -> Generator[list[Any], None, None]:
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


def _in_workers(samples: Samples, plan: _Plan, workers: int) -> Generator[list[Any], None, None]:
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
    loader = TrainLoader(dataset, config, sampler, seed=0, epochs=2**31)
    with closing(iter(loader)) as batches:
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
