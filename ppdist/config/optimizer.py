"""The `optimizer` and `schedule` sections."""

from typing import Literal

from pydantic import Field

from ppdist.config.section import Section


class ParameterGroupConfig(Section):
    """Weights that are trained otherwise than the rest."""

    match: str = Field(
        description="State-dict keys: beginnings, whole names between dots, such as backbone; * "
        "stands for any text, as in *.sampling_offsets.",
    )
    lr_factor: float = Field(
        default=1.0,
        gt=0,
        description="Their learning rate / that of the step; below 1 where what was "
        "pretrained is forgotten.",
    )
    weight_decay_factor: float = Field(
        default=1.0,
        ge=0,
        description="Their decay / weight_decay; what is exempt from decay stays so. 0 for "
        "layers that a recipe keeps from decay, such as biases.",
    )


class OptimizerConfig(Section):
    """The optimizer and its hyper-parameters."""

    name: Literal["momentum", "adamw"] = Field(
        default="momentum", description="momentum: SGD with momentum; adamw: decoupled decay."
    )
    lr: float = Field(default=0.01, gt=0, description="Peak learning rate at reference_batch_size.")
    reference_batch_size: int | None = Field(
        default=None,
        gt=0,
        description="Total batch (cards x batch per card x accumulation) that lr was tuned for; "
        "null: whatever the run has, so nothing is scaled.",
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        default="linear", description="How lr follows total batch / reference batch."
    )
    noise_scale: float | None = Field(
        default=None,
        gt=0,
        description="Batch, in images, from which on larger ones help little (arXiv:1812.06162); "
        "lr_scaling levels off towards it. By MLPerf's epochs about 450 for Mask R-CNN, 1800 for "
        "RetinaNet. null: no limit.",
    )
    weight_decay: float = Field(
        default=5e-4,
        ge=0,
        description="L2 coefficient (momentum) or decoupled decay (adamw); normalisation layers "
        "are exempt. It follows the total batch so that lr x weight_decay stays the same per "
        "image, unless lr_scaling is none.",
    )
    decay_biases: bool = Field(
        default=True, description="Whether biases decay (PP-YOLOE: yes, YOLOv5: no)."
    )
    layer_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Learning rates that fall towards the image, for fine-tuning: x 1 in the head, "
        "x layer_decay in the neck, x layer_decay^2 in the last stage of the backbone, and so on "
        "(arXiv:1801.06146, arXiv:2106.08254); null: the same in all layers.",
    )
    groups: tuple[ParameterGroupConfig, ...] = Field(
        default=(),
        description="Weights with a rate or decay of their own, such as [{match: backbone, "
        "lr_factor: 0.1}]; of several groups the first that matches. Rates also fall by "
        "layer_decay.",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum: its coefficient.")
    nesterov: bool = Field(default=False, description="momentum: look ahead (Nesterov).")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="adamw: decay of the first and second moments."
    )
    epsilon: float = Field(
        default=1e-8,
        gt=0,
        description="adamw: added to the root of the second moment; raise it where the "
        "loss jumps after steps of tiny gradients.",
    )


class ScheduleConfig(Section):
    """Course of the learning rate over a run."""

    name: Literal["cosine", "flat_cosine", "linear", "step"] = Field(
        default="cosine",
        description="Shape of the decay after warm-up; flat_cosine: the peak for the first half.",
    )
    warmup_epochs: float = Field(
        default=5.0, ge=0, description="Linear warm-up at the reference batch size, in epochs."
    )
    warmup_compensation: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: a total batch above the reference warms up over more images (at most a "
        "fifth of the run beyond warmup_epochs); none: warmup_epochs as written, for one that was "
        "tuned at this batch.",
    )
    warmup_least_steps: int = Field(
        default=0, ge=0, description="Shortest warm-up in optimizer steps, however few the images."
    )
    warmup_bias_lr: float | None = Field(
        default=None,
        ge=0,
        description="Learning rate of biases at the start of warm-up, at the reference batch size, "
        "from where it moves to that of the other weights; null: like all others, from 0.",
    )
    warmup_momentum: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Momentum at the start of warm-up, from where it moves to optimizer.momentum; "
        "null: constant.",
    )
    final_factor: float = Field(
        default=0.01, ge=0, le=1, description="Last learning rate / scaled learning rate."
    )
    step_epochs: tuple[float, ...] = Field(
        default=(),
        description="step: epochs at which the rate is multiplied by step_factor; they move with "
        "train.epochs_compensation. For recipes of earlier papers, which drop the rate.",
    )
    step_factor: float = Field(
        default=0.1, gt=0, lt=1, description="step: the multiplier, as the recipe has it."
    )
