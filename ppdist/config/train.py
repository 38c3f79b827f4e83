"""The `train` and `early_stopping` sections: length, batch and numerics of a run."""

import heapq
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ppdist.common.errors import ConfigError
from ppdist.config.section import OnResume, Section

_BatchSize = Annotated[int, Field(gt=0)] | Literal["auto"]


def max_micro_batch(images: int, micro_batches: int) -> int:
    """Returns the micro-batch size at which one step takes the whole data set."""
    return max(1, -(-images // micro_batches))


@dataclass(frozen=True)
class MicroBatches:
    """Division of an optimizer step into micro-batches, whatever the number of ranks.

    A micro-batch is one forward and backward pass and one batch-norm group.

    Attributes:
        total_batch: images per step, a multiple of `images`.
        images: number of images per micro-batch.
        spread: every rank takes a share of each micro-batch (`train.sync_bn`); False: one rank
            takes all of it.
        speeds: relative speeds of the ranks, by which they share micro-batches; None: equal.  What
            is learned does not depend on them.
    """

    total_batch: int
    images: int
    spread: bool
    speeds: tuple[float, ...] | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """Returns the number of micro-batches per step."""
        return self.total_batch // self.images

    def per_rank(self, world: int) -> int:
        """Returns the largest number of images in a pass on one of `world` ranks."""
        return -(-self.images // world) if self.spread else self.images

    def takers(self, pieces: int, world: int) -> tuple[int, ...]:
        """Returns the rank of each micro-batch, or each image of a spread one; see `takers`."""
        return takers(pieces, self.speeds or (1.0,) * world)

    def shares(self, world: int) -> list[int]:
        """Counts each rank's micro-batches per full step, or its images of a spread micro-batch."""
        owners = self.takers(self.images if self.spread else self.count, world)
        return [owners.count(rank) for rank in range(world)]

    def describe(self, world: int) -> str:
        """Describes the step, as in `3 micro-batches of 2 images, at most 2 a rank`."""
        plural = "es" * (self.count > 1)
        text = f"{self.count} micro-batch{plural} of {self.images} image{'s' * (self.images > 1)}"
        if world == 1:
            return text
        if self.speeds is not None and len(set(shares := self.shares(world))) > 1:
            what = "images of each" if self.spread else "of them"
            return f"{text}, {min(shares)} to {max(shares)} {what} a rank (distributed.shares)"
        if self.spread:
            return f"{text} over all ranks, at most {self.per_rank(world)} a rank"
        even = self.count % world == 0
        return f"{text}, {'' if even else 'at most '}{-(-self.count // world)} a rank"


@lru_cache(maxsize=64)
def takers(pieces: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Assigns equal pieces of work to ranks so that all finish soonest; returns the rank of each.

    If there are enough pieces, each rank gets one.  The rest are assigned one by one to the rank
    that would finish first with the piece, ties to the lowest rank:

        argmin over r of (n_r + 1) / speed_r

    No other assignment finishes sooner.  With equal speeds, ranks take turns.

    Args: speeds: relative speed of each rank.
    """
    world = len(speeds)
    reserved = world if pieces >= world else 0
    # Heap of (end of the rank's work with one more piece, rank): ties go to the lowest rank.
    ends = [(((reserved > 0) + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ends)
    loads, owners = [int(reserved > 0)] * world, [*range(reserved)]
    for _ in range(reserved, pieces):
        _, rank = ends[0]
        owners.append(rank)
        loads[rank] += 1
        heapq.heapreplace(ends, ((loads[rank] + 1) / speeds[rank], rank))
    return tuple(owners)


class AmpConfig(Section):
    """Automatic mixed precision: Paddle's on GPUs, oneDNN's bfloat16 on CPUs."""

    enabled: bool = Field(
        default=False,
        description="Compute in a lower precision, where steps are slow or memory is short. A CPU "
        "needs avx512_bf16 or amx_bf16 among the "
        "flags of /proc/cpuinfo; without, the run ends with a message; where bfloat16 is slower "
        "than float32 there, a warning says how much.",
    )
    dtype: Literal["float16", "bfloat16"] = Field(
        default="float16",
        description="float16 needs a GPU and loss scaling (done); bfloat16 has the range of "
        "float32, and is what a CPU computes.",
    )
    level: Literal["O1", "O2"] = Field(
        default="O1",
        description="O1: chosen operators, on a CPU convolutions with their batch norm and "
        "activation; O2: the whole model, on a CPU also what is between those layers, for more "
        "speed where O1 learns as "
        "well. Weights are "
        "updated in float32 in both.",
    )


class EMAConfig(Section):
    """Averaging of weights over steps."""

    enabled: bool = Field(
        default=True,
        description="Evaluate and keep averaged weights. false for runs of few "
        "steps, whose average lags.",
    )
    decay: float = Field(
        default=0.9998,
        gt=0,
        lt=1,
        description="Decay per step at the reference batch size (optimizer.reference_batch_size); "
        "raised to the power total batch / reference batch.",
    )
    ramp_steps: float | None = Field(
        default=None,
        gt=0,
        description="How decay begins. null: min(decay, (1 + t) / (10 + t)) after t updates "
        "(PP-YOLOE). T: decay * (1 - exp(-t / T)), T in steps at the reference batch size "
        "(YOLOv5: 2000).",
    )
    restart_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Where strong augmentation ends (data.augment.plain_epochs, without them "
        "close_mosaic_epochs), the average starts again from the weights, with this decay and "
        "ramp_steps. null: one average over the whole run.",
    )


class TrainConfig(Section):
    """Length, batch and numerics of training."""

    epochs: float = Field(default=300, gt=0, description="Passes over the training set.")
    steps: int | None = Field(
        default=None,
        gt=0,
        description="Length of the run in optimizer steps, in place of epochs: schedule, warm-up, "
        "phases and averages span them, as those of as many epochs. null: epochs.",
    )
    max_steps: Annotated[int | None, OnResume.FREE] = Field(
        default=None,
        gt=0,
        description="Stop after this many optimizer steps; the schedule still spans the "
        "whole run (epochs, or steps). For a trial, or a run in parts.",
    )
    hours: Annotated[float | None, OnResume.FREE] = Field(
        default=None,
        gt=0,
        description="For a queue or a session of fixed hours: wall clock of one start of the "
        "command, restarts by fleetrun included: the "
        "run ends cleanly before it is over, with an evaluation and a checkpoint, wherever it is; "
        "--resume continues, for as many hours again. A restart that finds no time left makes no "
        "step. Trackers are waited for within it. The schedule still spans epochs: choose "
        "epochs that fit, or the rate has not fallen when the time is over. null: no limit.",
    )
    phases_for_epochs: float | None = Field(
        default=None,
        gt=0,
        description="Length of the run that everything counted in epochs was written for: warm-up, "
        "phases of loss and augmentation, drops of the rate. In a run of other train.epochs each "
        "keeps its share of the run. null: epochs as written.",
    )
    epochs_compensation: Literal["auto", "none"] = Field(
        default="none",
        description="auto: a total batch above the reference trains for more epochs, by "
        "optimizer.noise_scale, and all phases counted in epochs grow alike; none: epochs as "
        "written.",
    )
    batch_size_per_card: Annotated[_BatchSize, OnResume.STEP] = Field(
        default=8,
        description="Images of a micro-batch on one rank: of one forward and backward pass, which "
        "is one batch-norm group (with sync_bn those of all ranks together are). auto: as many as "
        "every rank has memory for, tried out where a run begins; one that goes on keeps the "
        "micro-batches of its checkpoint.",
    )
    accumulate_steps: Annotated[int, OnResume.STEP] = Field(
        default=1,
        gt=0,
        description="Micro-batches of each rank whose gradients make one optimizer step, where "
        "total_batch is null.",
    )
    total_batch: Annotated[int | None, OnResume.STEP] = Field(
        default=None,
        gt=0,
        description="Images of an optimizer step over all ranks, a multiple of the micro-batch; "
        "ranks share its micro-batches, not all of them equally many if that does not work out. "
        "null: ranks x batch_size_per_card x accumulate_steps where the run begins.",
    )
    auto_batch_most: Annotated[int, OnResume.FREE] = Field(
        default=64,
        gt=0,
        description="The most that batch_size_per_card: auto takes, however much would fit. "
        "Lower it where large batches learn worse on your set.",
    )
    multi_scale: tuple[tuple[int, int], ...] = Field(
        default=(),
        description="Training sizes [[H, W], ...] in pixels, multiples of the largest stride; one "
        "is drawn per step for all ranks. In data.augment.plain_epochs, and empty: "
        "model.image_size.",
    )
    freeze: Annotated[int, Field(gt=0)] | tuple[str, ...] | None = Field(
        default=None,
        description="What of the model stays as it is, for fine-tuning: so many stages of the "
        "backbone, counted from the image (the stem is the first), or the beginnings of state-dict "
        "keys, such as [backbone, neck], with * for any text. Frozen weights get no gradient and "
        "no decay, frozen batch norms use their running statistics and leave them alone. null: all "
        "is trained.",
    )
    amp: AmpConfig = Field(default=AmpConfig(), description="Automatic mixed precision.")
    sync_bn: bool = Field(
        default=False,
        description="Batch-norm statistics over all ranks instead of each its own: a micro-batch "
        "is ranks x batch_size_per_card images, of which each rank takes a share.",
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="Largest L2 norm of the whole gradient; null: no clipping."
    )
    bad_steps_limit: Annotated[int, OnResume.FREE] = Field(
        default=3,
        gt=0,
        description="After so many steps in a row whose loss or gradient was not finite, the run "
        "goes back to the weights it had when it was last saved, with half the learning rate; "
        "three times at most. Raise it where single bad steps are known and harmless.",
    )
    ema: EMAConfig = Field(default=EMAConfig(), description="Averaged weights.")
    # FREE: the last digits of losses may change, but no more than between machines.
    cpu_kernels: Annotated[Literal["auto", "plain"], OnResume.FREE] = Field(
        default="auto",
        description="On CPU only. auto: oneDNN computes convolutions, linear layers, layer norm "
        "and attention when it passes a self-check against eager at start-up; plain: Paddle does, "
        "to find out whether oneDNN is what is wrong.",
    )

    @field_validator("freeze", mode="before")
    @classmethod
    def _check_freeze(cls, freeze: object) -> object:
        """Refuses values that freeze nothing or do not say which part."""
        if freeze in (0, [], ()) and freeze is not False:
            raise ValueError(f"{freeze} freezes nothing; for that write null, or leave it out")
        if isinstance(freeze, bool):
            raise ValueError(
                f"{str(freeze).lower()} does not say which part; write a number of stages of the "
                f"backbone, such as 2, or a list such as [backbone]; null freezes nothing"
            )
        if isinstance(freeze, str):
            raise ValueError(f"{freeze!r} is not a list; write [{freeze}]")
        return tuple(freeze) if isinstance(freeze, list) else freeze  # strict: no list

    @property
    def phases_factor(self) -> float:
        """Returns the run's epochs divided by the epochs that its phases were written for."""
        return self.epochs / (self.phases_for_epochs or self.epochs)

    @property
    def images_per_card(self) -> int:
        """Returns the number of images per micro-batch on one rank.

        Raises: ConfigError: it is still `auto`, which only a training run resolves.
        """
        if self.batch_size_per_card == "auto":
            raise ConfigError(
                "auto only works in a training run",
                code="auto_outside_training",
                where="train.batch_size_per_card",
                fix="give a number: -o train.batch_size_per_card=8",
            )
        return self.batch_size_per_card

    def micro_batches(self, world: int) -> MicroBatches:
        """Divides a step of `world` ranks into micro-batches.

        Raises: ConfigError: `total_batch` cannot be divided so.
        """
        batch = self.images_per_card
        total = self.total_batch or world * batch * self.accumulate_steps
        # With sync_bn as few micro-batches as possible; some ranks may take one image less.
        if self.sync_bn:
            count = math.ceil(total / (world * batch))
            words = f"{count}, its micro-batches of {world} x {batch} images at most"
        else:
            count = max(1, total // batch)
            words = f"{batch} images, a micro-batch"
        if total % count or not (self.sync_bn or total == count * batch):
            raise ConfigError(
                f"{total} is not a multiple of {words} (train.batch_size_per_card)",
                code="batch_indivisible",
                where="train.total_batch",
                fix="choose such a multiple, another batch_size_per_card, or auto",
            )
        return MicroBatches(total, total // count, self.sync_bn)


class EarlyStoppingConfig(Section):
    """Rule that ends training before its last epoch."""

    metric: Literal["mAP", "mAP50", "fitness", "f1", "top1", "top5", "val_loss"] | None = Field(
        default=None,
        description="What has to get better; val_loss: lower is better, for sets so small that mAP "
        "jumps. null: evaluate.metric.",
    )
    patience: int = Field(
        default=20,
        ge=1,
        description="Training ends after so many evaluations in a row (evaluate.every_epochs or "
        "every_steps apart) that were not better than the best before them. Lower it where a run "
        "goes on for long in vain.",
    )
