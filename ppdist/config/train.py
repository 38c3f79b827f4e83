"""The `train` and `early_stopping` sections: length, batch and numerics of a run."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ppdist.common.errors import ConfigError
from ppdist.config.base import OnResume, Section

_BatchSize = Annotated[int, Field(gt=0)] | Literal["auto"]


def max_micro_batch(images: int, micro_batches: int) -> int:
    """Micro-batch size at which one step takes the whole set."""
    return max(1, -(-images // micro_batches))


class AmpConfig(Section):
    """Automatic mixed precision: Paddle's on GPUs, oneDNN's bfloat16 on CPUs."""

    enabled: bool = Field(
        default=False,
        description="Compute in a lower precision. A CPU needs avx512_bf16 or amx_bf16 among the "
        "flags of /proc/cpuinfo; without, the run ends with a message.",
    )
    dtype: Literal["float16", "bfloat16"] = Field(
        default="float16",
        description="float16 needs a GPU and loss scaling (done); bfloat16 has the range of "
        "float32, and is what a CPU computes.",
    )
    level: Literal["O1", "O2"] = Field(
        default="O1",
        description="O1: chosen operators, on a CPU convolutions with their batch norm and "
        "activation; O2: the whole model, on a CPU also what is between those layers. Weights are "
        "updated in float32 in both.",
    )


class GPUConfig(Section):
    """How NVIDIA cards compute; refused on CPU, never run on GPUs."""

    cudnn_search: bool = Field(
        default=False,
        description="cuDNN measures all its algorithms for every new shape of a convolution and "
        "takes the fastest (FLAGS_cudnn_exhaustive_search). The first step of each shape takes "
        "longer, and train.multi_scale brings many. Not run on a GPU.",
    )
    layout_autotune: bool = Field(
        default=False,
        description="Paddle keeps feature maps channels-last (NHWC) where it finds that faster "
        "(paddle.incubate.autotune). It turns views off, so that slices are copies. Not run on a "
        "GPU.",
    )
    tf32: bool | None = Field(
        default=None,
        description="Whether float32 products and convolutions may round their inputs to TF32 (10 "
        "bits), from Ampere on. false: nowhere; true: both; null: as Paddle has it, which in 3.3 "
        "is convolutions only. Not run on a GPU.",
    )


class EMAConfig(Section):
    """Averaging of weights over steps."""

    enabled: bool = Field(default=True, description="Evaluate and keep averaged weights.")
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


class TrainConfig(Section):
    """Length, batch and numerics of training."""

    epochs: float = Field(default=300, gt=0, description="Passes over the training set.")
    max_steps: Annotated[int | None, OnResume.FREE] = Field(
        default=None,
        gt=0,
        description="Stop after this many optimizer steps; the schedule still spans epochs.",
    )
    hours: Annotated[float | None, OnResume.FREE] = Field(
        default=None,
        gt=0,
        description="Wall clock of one start of the command, restarts by fleetrun included: the "
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
    # Instead of each of the next three, ranks x batch x micro-steps is compared.
    batch_size_per_card: Annotated[_BatchSize, OnResume.FREE] = Field(
        default=8,
        description="Images per rank and micro-step. auto: as many as every rank has memory for, "
        "tried out where a run begins; one that goes on takes those of its checkpoint.",
    )
    accumulate_steps: Annotated[int, OnResume.FREE] = Field(
        default=1, gt=0, description="Micro-steps whose gradients make one optimizer step."
    )
    total_batch: Annotated[int | None, OnResume.FREE] = Field(
        default=None,
        gt=0,
        description="Images of an optimizer step over all ranks; accumulate_steps follows from it "
        "and is left out. null: ranks x batch_size_per_card x accumulate_steps.",
    )
    auto_batch_memory: Annotated[float, OnResume.FREE] = Field(
        default=0.8,
        gt=0,
        le=1,
        description="With batch_size_per_card: auto, the share of the free memory that training "
        "may take; loaders and evaluation take of the rest.",
    )
    auto_batch_most: Annotated[int, OnResume.FREE] = Field(
        default=64,
        gt=0,
        description="The most that batch_size_per_card: auto takes, however much would fit.",
    )
    multi_scale: tuple[tuple[int, int], ...] = Field(
        default=(),
        description="Training sizes [[H, W], ...] in pixels, multiples of the largest stride; one "
        "is drawn per step for all ranks. Empty: model.image_size.",
    )
    freeze: Annotated[int, Field(gt=0)] | tuple[str, ...] | None = Field(
        default=None,
        description="What of the model stays as it is, for fine-tuning: so many stages of the "
        "backbone, counted from the image (the stem is the first), or the beginnings of state-dict "
        "keys, such as [backbone, neck]. Frozen weights get no gradient and no decay, frozen batch "
        "norms use their running statistics and leave them alone. null: all is trained.",
    )
    amp: AmpConfig = Field(default=AmpConfig(), description="Automatic mixed precision.")
    # The last digits may change, no more than on another machine: the next two, cpu_convolutions.
    deterministic: Annotated[bool, OnResume.FREE] = Field(
        default=False,
        description="On GPUs, of several algorithms one that always adds in the same order "
        "(FLAGS_cudnn_deterministic, FLAGS_embedding_deterministic); slower. Without it two runs, "
        "or an interrupted and an uninterrupted one, may differ in the last bits there. On CPU "
        "they are equal anyway. Not run on a GPU: operators that these flags do not reach, and "
        "NCCL's choice of algorithm, may still differ.",
    )
    gpu: Annotated[GPUConfig, OnResume.FREE] = Field(
        default=GPUConfig(), description="How NVIDIA's cards compute."
    )
    sync_bn: bool = Field(
        default=False, description="Batch-norm statistics over all ranks instead of each its own."
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="Largest L2 norm of the whole gradient; null: no clipping."
    )
    bad_steps_limit: Annotated[int, OnResume.FREE] = Field(
        default=3,
        gt=0,
        description="After so many steps in a row whose loss or gradient was not finite, the run "
        "goes back to the weights it had when it was last saved, with half the learning rate; "
        "three times at most.",
    )
    ema: EMAConfig = Field(default=EMAConfig(), description="Averaged weights.")
    cpu_convolutions: Annotated[Literal["auto", "plain"], OnResume.FREE] = Field(
        default="auto",
        description="On CPU only. auto: oneDNN convolutions when they pass a self-check against "
        "eager at start-up; plain: Paddle's eager ones.",
    )

    @field_validator("freeze", mode="before")
    @classmethod
    def _some_part(cls, what: object) -> object:
        if what in (0, [], ()) and what is not False:
            raise ValueError(f"{what} freezes nothing; for that write null, or leave it out")
        if isinstance(what, bool):
            raise ValueError(
                f"{str(what).lower()} does not say which part; write a number of stages of the "
                f"backbone, such as 2, or a list such as [backbone]; null freezes nothing"
            )
        if isinstance(what, str):
            raise ValueError(f"{what!r} is not a list; write [{what}]")
        return tuple(what) if isinstance(what, list) else what  # strict: no list

    @property
    def phases_factor(self) -> float:
        """Epochs of the run / epochs that its phases were written for."""
        return self.epochs / (self.phases_for_epochs or self.epochs)

    @property
    def images_per_card(self) -> int:
        """Images per rank and micro-step.

        Raises: ConfigError: not resolved yet, which only a training run does.
        """
        if self.batch_size_per_card == "auto":
            raise ConfigError(
                "auto only works in a training run",
                code="auto_outside_training",
                where="train.batch_size_per_card",
                fix="give a number: -o train.batch_size_per_card=8",
            )
        return self.batch_size_per_card

    def micro_steps(self, world: int) -> int:
        """Micro-steps of an optimizer step of so many ranks.

        Raises: ConfigError: `total_batch` is not to be had.
        """
        if self.total_batch is None:
            return self.accumulate_steps
        batch = self.images_per_card
        if self.total_batch % (world * batch):
            raise ConfigError(
                f"{self.total_batch} is not a multiple of {world} rank{'s' * (world > 1)} x "
                f"{batch} images (train.batch_size_per_card)",
                code="batch_indivisible",
                where="train.total_batch",
                fix="choose such a multiple, another batch_size_per_card, or auto",
            )
        return self.total_batch // (world * batch)


class EarlyStoppingConfig(Section):
    """Ends training before its last epoch."""

    metric: Literal["mAP", "mAP50", "fitness", "f1", "top1", "top5", "val_loss"] | None = Field(
        default=None,
        description="What has to get better; val_loss: lower is better. null: evaluate.metric.",
    )
    patience: int = Field(
        default=20,
        ge=1,
        description="Training ends after so many evaluations in a row (one in "
        "evaluate.every_epochs) that were not better than the best before them.",
    )
    min_delta: float = Field(
        default=0.0,
        ge=0,
        description="A value is better when it is better by more than this, in units of the "
        "metric (mAP and its kin lie in 0..1).",
    )
