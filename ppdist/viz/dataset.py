"""Draws samples as the model gets them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice

import cv2
import numpy as np

from ppdist.config.data import DataConfig
from ppdist.config.section import Task
from ppdist.config.train import MicroBatches
from ppdist.data.loading.loader import EvalLoader, TrainLoader
from ppdist.data.loading.sampler import TrainSampler, expected_copies
from ppdist.data.transforms.pipeline import require_outlines
from ppdist.data.types import Batch, DetectionSet
from ppdist.viz.draw import draw_boxes, draw_classes


def training_pictures(
    dataset: DetectionSet,
    config: DataConfig,
    *,
    sizes: Sequence[tuple[int, int]],
    batch_size: int,
    seed: int,
    epochs: int,
    epoch: int,
    count: int,
) -> list[np.ndarray]:
    """Draws the first `count` training samples of an epoch with their boxes.

    They are the samples that one process with this batch size would train on; with
    `data.sampling: difficulty`, those before the first evaluation.

    Args:
        sizes: (height, width) of the inputs, one chosen at random at each step.
        epochs: number of epochs of the whole run.
        epoch: counted from 0.
    Returns: images, uint8 RGB [H, W, 3].
    Raises: DataError: under the same conditions as in training.
    """
    require_outlines(dataset, config.augment)
    sampler = TrainSampler(
        dataset_size=len(dataset.records),
        batches=MicroBatches(batch_size, batch_size, spread=False),
        rank=0,
        world=1,
        seed=seed,
        start_step=0,
        end_step=0,
        sizes=sizes,
        copies_N=expected_copies(dataset, config.sampling, None),
    )
    # The length of an epoch depends on data.sampling, so the first sampler only computes it.
    first = epoch * sampler.steps_per_epoch
    sampler = replace(sampler, start_step=first, end_step=first + sampler.steps_per_epoch)
    loader = TrainLoader(dataset, _without_workers(config), sampler, seed=seed, epochs=epochs)
    with closing(iter(loader)) as batches:
        return list(islice(_draw_batches(batches, dataset, config.task), count))


def evaluation_pictures(
    dataset: DetectionSet,
    config: DataConfig,
    *,
    image_size: tuple[int, int],
    shape_multiple: int | None,
    shape_pad: float,
    count: int,
) -> list[np.ndarray]:
    """Draws the first `count` evaluation inputs of a split with their boxes.

    Args:
        image_size: (height, width) of the input, or of the largest input.
        shape_multiple, shape_pad: for rectangular inputs; None if all inputs have `image_size`.
    Returns: images, uint8 RGB [H, W, 3].
    """
    loader = EvalLoader(
        dataset,
        _without_workers(config),
        image_size=image_size,
        batch_size=1,
        rank=0,
        world=1,
        shape_multiple=shape_multiple,
        shape_pad=shape_pad,
    )
    with closing(iter(loader)) as batches:
        return list(islice(_draw_batches(batches, dataset, config.task), count))


def _without_workers(config: DataConfig) -> DataConfig:
    return config.model_copy(update={"workers": 0, "cache": "none"})


def _draw_batches(
    batches: Iterable[Batch], dataset: DetectionSet, task: Task
) -> Iterator[np.ndarray]:
    for batch in batches:
        yield from drawn_samples(batch, dataset.class_names, task)


def drawn_samples(batch: Batch, class_names: tuple[str, ...], task: Task) -> Iterator[np.ndarray]:
    """Draws each image of a batch with its boxes or class.

    Yields: uint8 RGB, with the boxes that the loss gets.
    """
    images_BHW3 = batch.images_B3HW.numpy().transpose(0, 2, 3, 1)
    boxes_BM4, labels_BM = batch.boxes_BM4.numpy(), batch.labels_BM.numpy()
    real_BM = batch.mask_BM.numpy() > 0
    for position, index in enumerate(batch.image_index_B.numpy().tolist()):
        if index < 0:
            continue
        image_HW3, real_M = images_BHW3[position], real_BM[position]
        labels_M = labels_BM[position, real_M]
        if task == "classify":
            yield draw_classes(image_HW3, labels_M, class_names)
        else:
            yield draw_boxes(image_HW3, boxes_BM4[position, real_M], labels_M, class_names)


def png(image_HW3: np.ndarray) -> bytes:
    """Encodes a uint8 RGB image as a PNG file."""
    return cv2.imencode(".png", cv2.cvtColor(image_HW3, cv2.COLOR_RGB2BGR))[1].tobytes()
