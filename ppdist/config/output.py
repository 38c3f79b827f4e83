"""The `checkpoint` and `log` sections: what a run writes, and how often."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from ppdist.config.base import Section


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
    project: str = Field(default="ppdist", description="the project in which the run is shown")
    run: str | None = Field(
        default=None, description="how the run is called there; null: the name of output_dir"
    )


class WandbConfig(TrackerConfig):
    """Weights & Biases; `pip install 'ppdist[wandb]'`."""

    name: Literal["wandb"] = Field(default="wandb", description="the tracker")
    offline: bool = Field(
        default=False,
        description="only write to output_dir/trackers/wandb, for `wandb sync`; false: as "
        "WANDB_MODE says, else send",
    )


class MLflowConfig(TrackerConfig):
    """MLflow; `pip install 'ppdist[mlflow]'`; `project` is its experiment."""

    name: Literal["mlflow"] = Field(default="mlflow", description="the tracker")
    tracking_uri: str | None = Field(
        default=None,
        description="server or folder, without a login, which MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD say; null: MLFLOW_TRACKING_URI, else the folder "
        "output_dir/trackers/mlflow/mlruns",
    )

    @field_validator("tracking_uri")
    @classmethod
    def _without_login(cls, address: str | None) -> str | None:
        """The configuration is written to files, and into each checkpoint."""
        if address and "@" in address.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "it holds a login, and would be written to config.yml and each checkpoint: give "
                "it in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
            )
        return address


class SwanLabConfig(TrackerConfig):
    """SwanLab; `pip install 'ppdist[swanlab]'`."""

    name: Literal["swanlab"] = Field(default="swanlab", description="the tracker")
    offline: bool = Field(
        default=False,
        description="only write to output_dir/trackers/swanlab, for `swanlab sync`; false: as "
        "SWANLAB_MODE says, else send",
    )


ShippedTracker = WandbConfig | MLflowConfig | SwanLabConfig


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
    trackers: tuple[Annotated[ShippedTracker, Field(discriminator="name")], ...] = Field(
        default=(),
        description="Experiment trackers that get the same numbers and images: names, or sections "
        "of a `name` and its keys, such as [wandb] or [{name: mlflow, tracking_uri: ...}].",
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
        "adds to VisualDL, TensorBoard and trackers.",
    )
