"""Batches from disk: decode, augment, resize, pad; in worker processes or in this one.

    sampler -> keys of a micro-batch -> Samples (in a worker) -> arrays in shared memory -> Batch

Keys travel through the sampler, so workers need no signal when an epoch begins, and a batch is the
same whatever the number of workers, and after a restart.  Images cross processes as uint8.
"""

import logging
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

import cv2
import paddle

from ppdist.config.data import DataConfig
from ppdist.data.cache import open_cache
from ppdist.data.classify import ClassifyEvalSamples, ClassifyTrainSamples
from ppdist.data.cores import worker_count
from ppdist.data.records import Records
from ppdist.data.sample import EMPTY, Batch, DetectionSet, SampleKey
from ppdist.data.sampler import EvalSampler, TrainSampler, rectangular_shapes
from ppdist.data.samples import Arrays, EvalSamples, Made, Samples, padded
from ppdist.data.train_samples import TrainSamples, reductions
from ppdist.data.workers import Pool

_LOGGER = logging.getLogger("ppdist.data")


class _Plan(Protocol):
    """A sampler: the keys of each micro-batch, as often as it is asked."""

    def __iter__(self) -> Iterator[list[SampleKey]]: ...
    def __len__(self) -> int: ...


class _Loader:
    """The batches of a plan, as often as it is iterated.

    Workers start with the first iteration and live as long as the loader: close it, or let go of
    it.  A new iteration ends the one before it.

    Attributes:
        plan: of the next iteration; another one may be put in its place.
        workers: how many processes prepare batches.
    """

    def __init__(
        self, samples: Samples, plan: _Plan, config: DataConfig, workers: int, largest_batch: int
    ) -> None:
        """Args: largest_batch: bytes of the images of the largest batch of the plan."""
        self._samples = samples
        self.plan = plan
        self._largest_batch = largest_batch
        self._timeout = config.worker_timeout_seconds
        self._warned: set[str] = set()
        self._pool: Pool | None = None
        self.workers = workers

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Generator[Batch, None, None]:
        """Raises, while iterating: DataError: an image cannot be read and data.bad_images is
        `error`, or too many in a row cannot; RuntimeError: preparing one failed in another way.
        """
        try:
            for keys, (tensors, made) in self._made():
                self._report(made)
                yield Batch(
                    **dict(zip(Arrays._fields, tensors)),
                    real=keys[0].index >= 0,
                    real_somewhere=keys[0].index != EMPTY,
                    bad_images=made.bad_images,
                )
        except Exception:
            self.close()  # an exception holds on to this frame, and with it the workers
            raise

    def close(self) -> None:
        """Ends the workers; a further iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the workers that live."""
        return self._pool.process_ids if self._pool else []

    def _made(self) -> Iterator[tuple[list[SampleKey], tuple[list[paddle.Tensor], Made]]]:
        if not self.workers:
            cv2.setNumThreads(0)  # as in workers: the cores belong to training
            return ((keys, _taken(self._samples.batch(keys))) for keys in self.plan)
        if self._pool is None:
            self._pool = Pool(self._samples, self.workers, self._largest_batch, self._timeout)
        return self._pool.run(self.plan, _taken)

    def _report(self, made: Made) -> None:
        if made.user_error:
            raise made.user_error
        if made.our_error:
            raise RuntimeError(made.our_error)
        for problem in made.problems:
            if problem not in self._warned:
                self._warned.add(problem)
                _LOGGER.warning(problem)


def _taken(made: Made) -> tuple[list[paddle.Tensor], Made]:
    """Copies a batch to where the model runs."""
    return [paddle.to_tensor(array) for array in made.arrays or ()], made


class TrainLoader(_Loader):
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
        ranks_on_host: int = 1,
    ) -> None:
        """With data.cache every rank builds one at the same time.

        Args:
            sampler: of this rank; its `dataset_size` is that of `dataset`.
            seed: of augmentation, together with (epoch, index).
            epochs: of the whole run; epochs of data.augment count back from them.
            ranks_on_host: ranks that share this machine, this one included.
        """
        largest = max(size[0] for size in sampler.sizes), max(size[1] for size in sampler.sizes)
        kind = ClassifyTrainSamples if config.classifies else TrainSamples
        reductions_N = reductions(dataset, config.augment, largest, config.resize)
        samples = kind(
            dataset,
            config.bad_images,
            config.augment,
            seed,
            resize=config.resize,
            epochs=epochs,
            largest=largest,
            cache=open_cache(config.cache, dataset, reductions_N, config.cache_dir),
        )
        pixels = max(height * width for height, width in sampler.sizes)
        super().__init__(
            samples,
            sampler,
            config,
            worker_count(config.workers, ranks_on_host),
            sampler.batch_size_per_card * 3 * pixels,
        )


class EvalLoader(_Loader):
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
        ranks_on_host: int = 1,
        shape_multiple: int | None = None,
    ) -> None:
        """
        Args:
            image_size: (height, width) of the input in pixels.
            batch_size: images per batch; the last may be smaller.
            ranks_on_host: ranks that share this machine, this one included.
            shape_multiple: letterbox each image in the smallest input within `image_size` whose
                sides are multiples of so many pixels; None: all in `image_size`.
        """
        shapes_N2 = None
        if shape_multiple is not None:
            sizes_N2 = Records.of(dataset.records).sizes_N2
            shapes_N2 = rectangular_shapes(sizes_N2, image_size, shape_multiple)
        kind = ClassifyEvalSamples if config.classifies else EvalSamples
        samples = kind(dataset, config.bad_images, resize=config.resize)
        self._learnable = samples.learnable
        super().__init__(
            samples,
            EvalSampler(len(dataset.records), batch_size, rank, world, image_size, shapes_N2),
            config,
            worker_count(config.workers, ranks_on_host),
            batch_size * 3 * image_size[0] * image_size[1],
        )

    def learnable(
        self, keys: Sequence[SampleKey]
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """boxes_BM4, labels_BM and mask_BM, as in Batch, of what training would learn of these
        inputs; no image is read."""
        boxes_BM4, labels_BM, mask_BM = padded([self._learnable(key) for key in keys])
        return paddle.to_tensor(boxes_BM4), paddle.to_tensor(labels_BM), paddle.to_tensor(mask_BM)
