"""The `checkpoint` and `log` sections: what a run writes, and how often."""

from typing import ClassVar, Literal

from pydantic import Field

from ppdist.config.section import Section


class CheckpointConfig(Section):
    """Intervals of checkpoints, and how many stay."""

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
    """Key of every experiment tracker; that of another package adds its own (docs/extend.md).

    Attributes:
        writer: of another package's, `package.module:Class` of a `MetricWriter`.
    """

    writer: ClassVar[str] = ""
    name: str = Field(default="", description="the tracker")


class ShippedTracker(TrackerConfig):
    """TensorBoard, Weights & Biases, MLflow or SwanLab; `pip install 'ppdist[NAME]'`.

    Their own variables say the rest: WANDB_PROJECT, WANDB_MODE=offline; MLFLOW_EXPERIMENT_NAME,
    MLFLOW_TRACKING_URI (without it: the folder output_dir/trackers/mlflow/mlruns);
    SWANLAB_PROJ_NAME, SWANLAB_MODE=offline.
    """

    name: Literal["tensorboard", "wandb", "mlflow", "swanlab"] = Field(
        default="tensorboard", description="the tracker"
    )


class LogConfig(Section):
    """Content and intervals of logs."""

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
    trackers: tuple[ShippedTracker, ...] = Field(
        default=(),
        description="Experiment trackers that get the same numbers and images, where you compare "
        "runs there: names, such as [tensorboard, wandb]; one of another package is a section of "
        "its `name` and its keys.",
    )
    format: Literal["text", "json"] = Field(
        default="text",
        description="Lines of the console. json: one object a line with time, source, level, rank, "
        "step, code and message, for a log collector (docs/environment.md). The environment "
        "variable PPDIST_LOG_FORMAT=json does it from the first line on, fleetrun's included.",
    )
    on_end: str | None = Field(
        default=None,
        description="What is called when a training ends: a command of the shell, which gets the "
        "summary as JSON on its standard input, or a URL (https://...) to which it is posted. "
        "Write a secret as an environment variable ($HOOK): config.yml keeps the name alone "
        "(docs/environment.md).",
    )
    images: int = Field(
        default=4,
        ge=0,
        description="How many validation images with true and predicted boxes each evaluation "
        "adds to VisualDL and trackers. Lower it where a tracker's uploads are slow.",
    )
