"""The config tree: what a YAML file of configs/ describes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ppdist import dist
from ppdist.checkpoint import CheckpointConfig
from ppdist.config import Section
from ppdist.config_yaml import Node, merge
from ppdist.data.dataset import DataConfig
from ppdist.engine.compatible import misfits
from ppdist.engine.distillation import DistillConfig
from ppdist.engine.early_stopping import EarlyStoppingConfig
from ppdist.engine.evaluator import EvaluateConfig
from ppdist.engine.train_config import TrainConfig
from ppdist.log import LogConfig
from ppdist.losses import Loss
from ppdist.losses.classification import ClassificationLoss, ClassificationLossConfig
from ppdist.losses.ppyoloe import PPYOLOELoss, PPYOLOELossConfig
from ppdist.losses.yolov5 import YOLOv5Loss, YOLOv5LossConfig
from ppdist.models import ModelConfig
from ppdist.models.ppyoloe import PPYOLOEConfig
from ppdist.optim.optimizer import OptimizerConfig
from ppdist.optim.schedule import ScheduleConfig
from ppdist.postprocess import NMSConfig

# What scores the outputs of each model, by `model.name`; the models: ppdist/models/__init__.py.
LOSSES: dict[str, type[Loss]] = {
    "ppyoloe": PPYOLOELoss,
    "yolov5": YOLOv5Loss,
    "yolov5_cls": ClassificationLoss,
}
LossConfig = PPYOLOELossConfig | YOLOv5LossConfig | ClassificationLossConfig


class ExperimentConfig(Section):
    """One experiment: what a YAML file of configs/ describes."""

    output_dir: str | None = Field(
        default=None, description="Where the run writes; null: output/<name of the config file>."
    )
    seed: int = Field(
        default=0, ge=0, description="Fixes initial weights, sample order and augmentation."
    )
    device: Literal["auto", "gpu", "cpu"] = Field(
        default="auto", description="auto: a GPU when the installed Paddle can use one."
    )
    data: DataConfig
    model: Annotated[ModelConfig, Field(discriminator="name")] = Field(
        description="The model; its `name` says which of the tables below holds."
    )
    loss: Annotated[LossConfig, Field(discriminator="name")] = Field(
        default=PPYOLOELossConfig(), description="Training loss, that of the model."
    )
    distill: DistillConfig | None = Field(
        default=None, description="A teacher to learn from besides the ground truth; null: none."
    )
    train: TrainConfig = Field(default=TrainConfig(), description="Length, batch, numerics.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="The optimizer.")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Learning rate.")
    distributed: dist.DistributedConfig = Field(
        default=dist.DistributedConfig(), description="Ranks."
    )
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Checkpoints.")
    evaluate: EvaluateConfig = Field(default=EvaluateConfig(), description="Evaluation.")
    early_stopping: EarlyStoppingConfig | None = Field(
        default=None, description="Ends training that gets no better; null: it runs to its end."
    )
    nms: NMSConfig = Field(default=NMSConfig(), description="Non-maximum suppression.")
    log: LogConfig = Field(default=LogConfig(), description="Progress, curves, images.")

    @property
    def suppression(self) -> NMSConfig:
        """What leaves the predictions of this model that count, wherever it predicts: `nms`, for a
        one-to-one head without any suppression."""
        if isinstance(self.model, PPYOLOEConfig) and self.model.one_to_one:
            return self.nms.model_copy(update={"iou_threshold": None})
        return self.nms

    @classmethod
    def completed(cls, tree: Node) -> Node:
        """`loss.name` need not be written: it is the model's."""
        model = tree.child("model")
        name = model.child("name") if model is not None else None
        if name is None or name.value not in LOSSES:
            return tree
        implied = Node({"name": name}, name.place, name.key_place)
        return merge(Node({"loss": implied}, tree.place, tree.key_place), tree)

    @model_validator(mode="after")
    def _parts_fit(self) -> "ExperimentConfig":
        problems = "; ".join(misfits(self))
        if problems:
            raise ValueError(problems)
        return self
