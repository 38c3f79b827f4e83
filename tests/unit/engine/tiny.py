"""A tiny detector and fixed batches for tests of the training step."""

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import paddle
from paddle import nn

from ppdist.config.distributed import DistributedConfig
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import parse_config
from ppdist.cpu.precision import BFLOAT16, Kernels
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.types import Batch
from ppdist.distributed import comm
from ppdist.distributed.paddle_api import normalise_by_running
from ppdist.engine.build import build_model, build_schedule_setup, build_train_step, speed_up_cpu
from ppdist.engine.clock import Clock
from ppdist.engine.policies.average import AveragedWeights
from ppdist.engine.step_policy import StepResult, Verdict
from ppdist.engine.train_step import TrainStep
from ppdist.models.base import ImageModel
from ppdist.optim.ema import EMA
from ppdist.optim.lr_scheduler import LearningRates
from tests.forked import THIRD_PARTY

ARRAYS = (
    "images_B3HW", "boxes_BM4", "labels_BM", "mask_BM", "image_index_B", "scale_B2", "offset_B2",
)  # fmt: skip
SIZE = 64
IMAGES = 8
CONVOLUTIONS = "plain"  # on so few pixels oneDNN's take a third longer, and prove equal first
OBJECTS = (11, 0, 0, 0, 1, 0, 0, 0)  # as uneven as it gets when split in the middle


# data.format, model, learning rate, seed.  A deep net with batch norm over few cells amplifies
# rounding: YOLOv5 at a rate of 0.003 and with seed 0 turned noise of 1e-7 into 1e-3 within 20
# steps, where no comparison means anything.  These rates and seeds leave it below 1e-6.
MODELS = {
    "ppyoloe": (
        "coco",
        "name: ppyoloe, variant: plus, depth_multiple: 0.33, width_multiple: 0.125",
        0.003,
        0,
    ),
    "yolov5": ("coco", "name: yolov5, size: n, width_multiple: 0.0625", 0.0002, 1),
    "dfine": (
        "coco",
        "name: rtdetr, variant: dfine, size: n, queries: 20, denoising: 12",
        0.0001,
        0,
    ),
    "rtdetr": (
        "coco",
        "name: rtdetr, variant: rtdetr, size: r18, queries: 20, denoising: 12",
        0.0001,
        0,
    ),
    "blobs": ("coco", "name: blobs.keys:BlobsConfig", 0.0002, 1),
    "queries": ("coco", "name: queries:QueriesConfig", 0.003, 0),
    "yolov5_cls": ("folder", "name: yolov5_cls, size: n, width_multiple: 0.0625", 0.003, 0),
}
OTHERS = {"blobs": "blobs.keys", "queries": "queries"}  # of packages of others: their modules
FASTEST = "blobs"  # with eleven convolutions; where a test asks for no model


def tiny_config(tmp_path, overrides=(), model="ppyoloe") -> ExperimentConfig:
    """Config of a tiny model on 64 x 64 pixels; folder is scratch."""
    if model in OTHERS:
        with mock.patch.object(sys, "path", [*sys.path, str(THIRD_PARTY)]):
            importlib.import_module(OTHERS[model])
    data_format, described, lr, seed = MODELS[model]
    file = tmp_path / f"tiny-{os.getpid()}.yml"  # ranks share the folder
    file.write_text(
        f"""
seed: {seed}
data:
  format: {data_format}
  root: {tmp_path}
  train: {{images: images, annotations: annotations/instances_train.json}}
  val: {{images: images, annotations: annotations/instances_val.json}}
  workers: 0
model: {{{described}, num_classes: 3, image_size: [{SIZE}, {SIZE}]}}
train:
  {{epochs: 10, batch_size_per_card: {IMAGES}, clip_norm: 5.0, cpu_kernels: {CONVOLUTIONS}}}
optimizer: {{lr: {lr}, reference_batch_size: {IMAGES}}}
schedule: {{warmup_epochs: 0}}
log: {{visualdl: false}}
"""
    )
    return parse_config(file, list(overrides), ExperimentConfig)


def fixed_batch(step: int, start: int, stop: int) -> Batch:
    """Images [start, stop) of the 8 of a step, with the objects above."""
    rng = np.random.RandomState(step % 4)
    images = rng.randint(0, 256, (IMAGES, 3, SIZE, SIZE)).astype("uint8")
    most = max(OBJECTS)
    corner = rng.uniform(0, SIZE - 24, (IMAGES, most, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(8, 24, (IMAGES, most, 2))], 2)
    labels = rng.randint(0, 3, (IMAGES, most))
    mask = np.arange(most)[None] < np.array(OBJECTS)[:, None]
    part = slice(start, stop)
    return Batch(
        images_B3HW=paddle.to_tensor(images[part]),
        boxes_BM4=paddle.to_tensor((boxes * mask[..., None])[part].astype("float32")),
        labels_BM=paddle.to_tensor((labels * mask)[part].astype("int64")),
        mask_BM=paddle.to_tensor(mask[part].astype("float32")),
        image_index_B=paddle.arange(start, stop, dtype="int64"),
        scale_B2=paddle.ones([stop - start, 2]),
        offset_B2=paddle.zeros([stop - start, 2]),
        seeds_B=rng.randint(0, 2**31, IMAGES)[part],
    )


def sampled_batches(sampler: TrainSampler, step: int) -> list[Batch]:
    """This rank's micro-batches of a step, of the 32 images of four `fixed_batch`es."""
    pool = [fixed_batch(group, 0, IMAGES) for group in range(4)]
    result = []
    for number, keys in zip(sampler.numbers(step), sampler.micro_batches(step), strict=True):
        index_B = [key.index for key in keys]
        if index_B[0] < 0:
            result.append(replace(blank_batch(), number=number))
            continue
        at = [(pool[index // IMAGES], index % IMAGES) for index in index_B]
        fields = {
            name: paddle.stack([getattr(batch, name)[row] for batch, row in at]) for name in ARRAYS
        }
        seeds_B = np.array([batch.seeds_B[row] for batch, row in at])
        result.append(Batch(**fields, seeds_B=seeds_B, number=number))
    return result


def numbered(batches: Iterable[Batch]) -> list[Batch]:
    """Micro-batches of a step, numbered as they come."""
    return [replace(batch, number=number) for number, batch in enumerate(batches)]


def ema_of(step: TrainStep) -> EMA:
    """The average that a step moves."""
    return next(policy.ema for policy in step.policies if isinstance(policy, AveragedWeights))


def blank_batch() -> Batch:
    """What a rank gets that is left without an image, while others have some."""
    return replace(fixed_batch(0, 0, 1), real=False)


def freeze_statistics(model: ImageModel) -> None:
    """Normalises by fixed statistics from now on, those of a little training: fresh ones (0 and 1)
    would leave nothing of the images after a few layers."""
    model.train()
    with paddle.no_grad():
        for _ in range(15):
            model(model.normalize(fixed_batch(0, 0, IMAGES).images_B3HW))
    for layer in norms_of(model):
        normalise_by_running(layer)


def norms_of(model: ImageModel) -> list[nn.BatchNorm2D]:
    return [layer for layer in model.sublayers() if isinstance(layer, nn.BatchNorm2D)]


def build_step(
    config: ExperimentConfig, frozen: bool, images: int = 2 * IMAGES, kernels: Kernels = BFLOAT16
) -> tuple[TrainStep, LearningRates]:
    """The step of a data set of so many images, and rates at their peak."""
    model = build_model(config)
    if frozen:
        freeze_statistics(model)
    schedule = build_schedule_setup(config, images)
    peak = schedule.lr_scheduler.peak_lr
    speed_up_cpu(config, [model])
    return build_train_step(config, schedule, model, kernels), LearningRates(
        peak, peak, config.optimizer.momentum
    )


def take_step(
    step: TrainStep,
    batches: Sequence[Batch],
    number: int,
    rates: LearningRates,
    numbers: Sequence[int] | None = None,
) -> StepResult:
    """Makes one optimizer step of micro-batches.

    Args: numbers: of the micro-batches in the step; None: they are all.
    """
    if numbers is None:
        taken = numbered(batches)
    else:
        pairs = zip(batches, numbers, strict=True)
        taken = [replace(batch, number=number) for batch, number in pairs]
    return step(taken, number, rates, Clock())


def step_result(**changes: object) -> StepResult:
    """What a step says that went well."""
    result = StepResult(
        losses={"loss": 2.5}, images=8, gradient_norm=1.0, verdict=Verdict.APPLY, finite=True,
        totals={}, searching=False, synchronised=True, own_loss=9.0, own_images=[],
        own_micro_batches=1, own_not_finite=[],
    )  # fmt: skip
    return replace(result, **changes)


def init_cpu() -> None:
    comm.init("cpu", DistributedConfig())
