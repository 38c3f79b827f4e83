"""The `checkpoint` and `log` sections: what a run writes, and how often."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ppdist.config.section import Section


class CheckpointConfig(Section):
    """When checkpoints are written and how many stay."""

    every_epochs: float = Field(
        default=1.0, ge=0, description="Write one every N epochs; 0: only at the end."
    )
    every_steps: int | None = Field(
        default=None,
        gt=0,
        description="Write one every N optimizer steps instead; for epochs of hours.",
    )
    keep: int = Field(
        default=3,
        gt=0,
        description="How many of the newest stay; best and last always do. Lower it where "
        "the disk is small, raise it to average checkpoints (`ppdist ensemble average`).",
    )


class TrackerConfig(Section):
    """Keys of every experiment tracker; that of another package adds its own (docs/extend.md).

    Attributes:
        writer: of another package's, `package.module:Class` of a `MetricWriter`.
    """

    writer: ClassVar[str] = ""
    name: str = Field(default="", description="the tracker")
    project: str = Field(
        default="ppdist",
        description="the project in which the run is shown, of a team that has several",
    )


class WandbConfig(TrackerConfig):
    """Weights & Biases; `pip install 'ppdist[wandb]'`; WANDB_MODE=offline sends nothing."""

    name: Literal["wandb"] = Field(default="wandb", description="the tracker")


class MLflowConfig(TrackerConfig):
    """MLflow; `pip install 'ppdist[mlflow]'`; `project` is its experiment.

    MLFLOW_TRACKING_URI says where to; without it: the folder output_dir/trackers/mlflow/mlruns.
    """

    name: Literal["mlflow"] = Field(default="mlflow", description="the tracker")


class SwanLabConfig(TrackerConfig):
    """SwanLab; `pip install 'ppdist[swanlab]'`; SWANLAB_MODE=offline sends nothing."""

    name: Literal["swanlab"] = Field(default="swanlab", description="the tracker")


ShippedTracker = WandbConfig | MLflowConfig | SwanLabConfig


class LogConfig(Section):
    """What a run says and how often."""

    every_steps: int = Field(
        default=20,
        ge=1,
        description="Optimizer steps between two lines of the log and of metrics.jsonl. 1 to see "
        "where a loss jumps; raise it where metrics.jsonl of a long run grows too large.",
    )
    visualdl: bool = Field(
        default=True,
        description="Write curves, images and hyper-parameters for VisualDL to output_dir/vdl. "
        "false where nobody looks at them.",
    )
    tensorboard: bool = Field(
        default=False,
        description="Write the same for TensorBoard, where you compare runs there, to "
        "output_dir/tensorboard; needs "
        "`pip install 'ppdist[tensorboard]'`.",
    )
    trackers: tuple[Annotated[ShippedTracker, Field(discriminator="name")], ...] = Field(
        default=(),
        description="Experiment trackers that get the same numbers and images: names, or sections "
        "of a `name` and its keys, such as [wandb] or [{name: mlflow, project: bccd}].",
    )
    images: int = Field(
        default=4,
        ge=0,
        description="How many validation images with true and predicted boxes each evaluation "
        "adds to VisualDL, TensorBoard and trackers. Lower it where a tracker's uploads are slow.",
    )
