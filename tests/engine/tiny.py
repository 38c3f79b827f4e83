"""A tiny detector and fixed batches for tests of the training step."""

import os

import numpy as np
import paddle
from paddle import nn

from ppdist import dist
from ppdist.config import parse_config
from ppdist.data.sample import Batch
from ppdist.engine.experiment import (
    ExperimentConfig,
    build_model,
    build_train_step,
    derive_run,
)
from ppdist.engine.step import Clock, TrainStep

SIZE = 64
IMAGES = 8
OBJECTS = (11, 0, 0, 0, 1, 0, 0, 0)  # as uneven as it gets when split in the middle


def tiny_config(tmp_path, overrides=()) -> ExperimentConfig:
    """Config of a detector of 50 thousand weights on 64 x 64 pixels."""
    file = tmp_path / f"tiny-{os.getpid()}.yml"  # ranks share the folder
    file.write_text(
        f"""
data:
  format: coco
  root: {tmp_path}
  train: {{images: images, annotations: annotations/instances_train.json}}
  val: {{images: images, annotations: annotations/instances_val.json}}
  workers: 0
model: {{name: ppyoloe, variant: plus, depth_multiple: 0.33, width_multiple: 0.125,
        num_classes: 3, image_size: [{SIZE}, {SIZE}]}}
train: {{epochs: 10, batch_size_per_card: {IMAGES}, clip_norm: 5.0}}
optimizer: {{lr: 0.003, reference_batch_size: {IMAGES}}}
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
    )


def freeze_statistics(model: nn.Layer) -> None:
    for layer in model.sublayers():
        if isinstance(layer, nn.BatchNorm2D):
            layer._use_global_stats = True


def build_step(config: ExperimentConfig, frozen: bool) -> tuple[TrainStep, float]:
    model = build_model(config)
    if frozen:
        freeze_statistics(model)
    derived = derive_run(config, 16)
    return build_train_step(config, derived, model), derived.schedule.peak_lr


def run_steps(train_step: TrainStep, lr: float, steps: int, parts: list[list[int]]) -> list[float]:
    """Losses of some steps whose micro-batches are the image ranges `parts` of this rank."""
    losses = []
    for step in range(steps):
        batches = iter([fixed_batch(step, *part) for part in parts])
        result = train_step(batches, len(parts), step, lr, False, Clock())
        assert result.applied
        losses.append(result.losses["loss"])
    return losses


def init_cpu() -> None:
    dist.init("cpu", dist.DistributedConfig())
