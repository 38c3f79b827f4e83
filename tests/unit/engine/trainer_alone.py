"""Trains a net of one convolution for three steps, and prints the modules that this took.

No configuration, no data set, no detector: what the trainer needs, it is handed here.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ppdist.common.eta import ETA
from ppdist.config.augment import AugmentConfig
from ppdist.config.optimizer import OptimizerConfig, ScheduleConfig
from ppdist.config.train import EMAConfig, MicroBatches
from ppdist.data.types import Batch
from ppdist.engine.checkpoint import CheckpointWriter
from ppdist.engine.evaluation import Evaluations
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.precision import Precision
from ppdist.engine.saving import Saving
from ppdist.engine.schedule_setup import set_up_schedule
from ppdist.engine.step_sums import EpochMeans, StepSums
from ppdist.engine.stopping import StopRequest
from ppdist.engine.train_step import StepSettings, TrainStep
from ppdist.engine.trainer import Trainer, TrainingParts
from ppdist.losses.base import Loss, LossOutput
from ppdist.models.base import ImageModel
from ppdist.optim.exchange import Exchange
from ppdist.optim.optimizer import build_optimizer
from ppdist.optim.updater import Updater


class Net(ImageModel):
    """A detector of nothing: one number for each pixel."""

    task = "detect"

    def __init__(self) -> None:
        super().__init__(1, 8, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
        self.layer = nn.Conv2D(3, 1, 1)

    def forward(self, images_B3HW: paddle.Tensor) -> paddle.Tensor:
        return self.layer(images_B3HW)


class Square(Loss):
    """The sum of squares, one normalizer for each image."""

    def forward(self, outputs: paddle.Tensor, *_: Any, **__: Any) -> LossOutput:
        total = outputs.square().sum()
        return LossOutput(total, paddle.to_tensor(float(len(outputs))), {"square": total.detach()})


class Images:
    """Noise: one micro-batch of two images a step."""

    follows_scores = False

    def steps(self, first_step: int, scores: object) -> Iterator[Iterator[Batch]]:
        for step in range(first_step, 3):
            yield iter([self._batch(step)])

    def _batch(self, step: int) -> Batch:
        pixels = np.random.RandomState(step).randint(0, 256, (2, 3, 8, 8)).astype("uint8")
        return Batch(
            images_B3HW=paddle.to_tensor(pixels),
            boxes_BM4=paddle.zeros([2, 1, 4]),
            labels_BM=paddle.zeros([2, 1], "int64"),
            mask_BM=paddle.zeros([2, 1]),
            image_index_B=paddle.arange(2),
            scale_B2=paddle.ones([2, 2]),
            offset_B2=paddle.zeros([2, 2]),
            seeds_B=np.zeros(2, np.int64),
        )

    def abort_waits(self) -> None: ...


class Lines:
    """Writes lines to standard error."""

    def __init__(self) -> None:
        self.eta = ETA(3)

    def info(self, message: str) -> None:
        print(message, file=sys.stderr)

    warning = info

    def metrics(self, record: dict[str, Any]) -> None: ...

    def spending(self, part: str, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def limit_close(self, seconds: float = 0.0) -> None: ...


class NoSums:
    """Sums of nothing."""

    def restore(self, saved: StepSums | None, step: int) -> None: ...

    def sums(self) -> None: ...


def build_trainer(folder: Path) -> Trainer:
    """Puts the parts together."""
    optimizer = OptimizerConfig(name="momentum", lr=0.001, reference_batch_size=2)
    schedule = set_up_schedule(
        world=1,
        dataset_size=2,
        batches=MicroBatches(2, 2, False),
        epochs=3,
        epochs_compensation="none",
        max_steps=None,
        optimizer=optimizer,
        schedule=ScheduleConfig(warmup_epochs=0, warmup_least_steps=0),
        ema=EMAConfig(enabled=False),
        augment=AugmentConfig(),
    )
    net, log = Net(), Lines()
    updater = Updater(build_optimizer(net, optimizer, optimizer.lr, False), net)
    settings = StepSettings(seed=0)
    writer = CheckpointWriter(folder / "checkpoints", "", keep=1)
    means = EpochMeans(schedule.steps_per_epoch)
    return Trainer(
        TrainingParts(
            train_step=TrainStep(net, Square(), updater, Exchange(), Precision(), [], settings),
            batch_source=Images(),
            policies=[],
            stop=StopRequest(),
            schedule=schedule,
            evaluations=Evaluations(None, net, None, 1, None, log),
            saving=Saving(writer, 0, schedule.total_steps, OutputDirs(folder), log),
            log=log,
            epoch_means=means,
            record_sums=NoSums(),
            callbacks=[means],
        )
    )


if __name__ == "__main__":
    trainer = build_trainer(Path(sys.argv[1]))
    assert trainer.fit() == 0 and trainer.state.step == 3
    print(*(name for name in sorted(sys.modules) if name.split(".")[0] == "ppdist"), sep="\n")
