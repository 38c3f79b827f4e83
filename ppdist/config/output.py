"""The `checkpoint` and `log` sections: what a run writes, and how often."""

from pydantic import Field

from ppdist.config.base import Section


class CheckpointConfig(Section):
    """When checkpoints are written and how many stay."""

    every_epochs: float = Field(
        default=1.0, ge=0, description="Write one every so many epochs; 0: only at the end."
    )
    every_steps: int | None = Field(
        default=None, gt=0, description="Write one every so many optimizer steps instead."
    )
    keep: int = Field(
        default=3, gt=0, description="How many of the newest stay; best and last always do."
    )
    fallback_dir: str | None = Field(
        default=None,
        description="Where a checkpoint goes that the disk of output_dir has no room for, even "
        "once older ones are deleted: a folder on another disk, in which each output_dir gets one "
        "of its own. --resume and restarts look in both. null: nowhere.",
    )


class LogConfig(Section):
    """What a run says and how often."""

    every_steps: int = Field(
        default=20,
        ge=1,
        description="Optimizer steps between two lines of the log and of metrics.jsonl.",
    )
    visualdl: bool = Field(
        default=True,
        description="Write curves, images and hyper-parameters for VisualDL to output_dir/vdl.",
    )
    tensorboard: bool = Field(
        default=False,
        description="Write the same for TensorBoard to output_dir/tensorboard; needs "
        "`pip install 'ppdist[tensorboard]'`.",
    )
    histograms: bool = Field(
        default=False,
        description="With each evaluation also how the values of all weights and of their last "
        "gradients are spread.",
    )
    images: int = Field(
        default=4,
        ge=0,
        description="How many validation images with true and predicted boxes each evaluation "
        "adds to VisualDL and TensorBoard.",
    )
