"""ExperimentConfig, the tree of all Sections, and load_config."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from pydantic import Field, model_validator

from ppdist.common.plugin import is_plugin
from ppdist.config.data import DataConfig
from ppdist.config.distill import DistillConfig
from ppdist.config.distributed import DistributedConfig
from ppdist.config.errors import CrossKeyErrors
from ppdist.config.evaluate import COCO_DETECTIONS, EvaluateConfig, NMSConfig
from ppdist.config.loss import LossConfig, PPYOLOELossConfig
from ppdist.config.model import ModelConfig
from ppdist.config.optimizer import OptimizerConfig, ScheduleConfig
from ppdist.config.output import CheckpointConfig, LogConfig
from ppdist.config.parse import Document, Overrides, override_items, parse_config, parse_plain
from ppdist.config.plugins import open_section
from ppdist.config.removed import without_removed
from ppdist.config.section import OnResume, Section
from ppdist.config.shipped import find_config
from ppdist.config.train import EarlyStoppingConfig, TrainConfig
from ppdist.config.validate import cross_key_errors
from ppdist.config.yaml import Node, Place, Problem, merge, problems_error, tree_of


class ExperimentConfig(Document):
    """One experiment: what a YAML file of configs/ describes."""

    output_dir: Annotated[str | None, OnResume.FREE] = Field(
        default=None, description="Where the run writes; null: output/<name of the config file>."
    )
    seed: int = Field(
        default=0,
        ge=0,
        description="Fixes initial weights, sample order and augmentation. Change it to see how "
        "far a result moves by chance.",
    )
    device: Annotated[str, OnResume.FREE] = Field(
        default="auto",
        pattern=r"^[a-z][a-z0-9_]*$",
        description="auto: an accelerator where the installed Paddle can use one, else the CPU; or "
        "Paddle's word for a kind: cpu, gpu, xpu, npu, ... Set it where auto takes the wrong one.",
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
    distributed: DistributedConfig = Field(default=DistributedConfig(), description="Ranks.")
    checkpoint: Annotated[CheckpointConfig, OnResume.FREE] = Field(
        default=CheckpointConfig(), description="Checkpoints."
    )
    evaluate: EvaluateConfig = Field(default=EvaluateConfig(), description="Evaluation.")
    early_stopping: Annotated[EarlyStoppingConfig | None, OnResume.FREE] = Field(
        default=None, description="Ends training that gets no better; null: it runs to its end."
    )
    nms: Annotated[NMSConfig, OnResume.SCORES] = Field(
        default=NMSConfig(), description="Non-maximum suppression."
    )
    log: Annotated[LogConfig, OnResume.FREE] = Field(
        default=LogConfig(), description="Progress, curves, images."
    )

    @property
    def training_sizes(self) -> tuple[tuple[int, int], ...]:
        """Every (height, width) that an image may have in training."""
        sizes, own = self.train.multi_scale, self.model.image_size
        return sizes if sizes and not self.data.augment.plain_epochs else (*sizes, own)

    @property
    def suppression(self) -> NMSConfig:
        """`nms` as it is used.

        Without suppression where the model needs none, and with all the boxes that count where
        evaluation counts more than COCO's.
        """
        changes: dict[str, Any] = {} if self.model.needs_nms else {"iou_threshold": None}
        most = self.evaluate.max_detections
        if most > COCO_DETECTIONS:
            changes |= {key: max(most, getattr(self.nms, key)) for key in ("keep", "candidates")}
        return self.nms.model_copy(update=changes) if changes else self.nms

    @classmethod
    def opened(cls, tree: Node, problems: list[Problem], *, stored: bool = False) -> type[Section]:
        """With the detectors, formats, backbones and trackers of plugins."""
        return open_section(cls, tree, problems, stored=stored)

    @classmethod
    def completed(cls, tree: Node) -> Node:
        """What follows and need not be written.

        `loss.name` is the model's, a tracker may be its name alone, and `data.val_fraction` says
        what `data.val` is.
        """
        tree = _named_trackers(tree)
        model, data = tree.child("model"), tree.child("data")
        name = model.child("name") if model is not None else None
        if name is not None and (name.value in _DETECTORS or is_plugin(name.value)):
            implied = Node({"name": name}, name.place, name.key_place)
            tree = merge(Node({"loss": implied}, tree.place, tree.key_place), tree)
        train = data.child("train") if data is not None else None
        fraction = data.child("val_fraction") if data is not None else None
        if train is not None and fraction is not None and fraction.value is not None:
            of_train = {key: train.child(key) for key in ("images", "annotations")}
            places = {key: node for key, node in of_train.items() if node is not None}
            val = Node({**places}, train.place, train.key_place)
            divided = Node({"val": val}, train.place, train.key_place)
            tree = merge(tree, Node({"data": divided}, tree.place, tree.key_place))
        return tree

    @model_validator(mode="after")
    def _parts_fit(self) -> "ExperimentConfig":
        messages = [*cross_key_errors(self)]
        if messages:
            raise CrossKeyErrors(messages)
        return self


_DETECTORS = [section.model_fields["name"].default for section in get_args(ModelConfig)]


def _named_trackers(tree: Node) -> Node:
    """`log.trackers: [wandb]` as `[{name: wandb}]`."""
    log = tree.child("log")
    trackers = log.child("trackers") if log is not None else None
    if log is None or trackers is None or not isinstance(trackers.value, list):
        return tree
    items = [
        Node({"name": item}, item.place, item.key_place) if isinstance(item.value, str) else item
        for item in trackers.value
    ]
    listed = replace(trackers, value=items)
    assert isinstance(tree.value, dict) and isinstance(log.value, dict)
    return replace(
        tree, value={**tree.value, "log": replace(log, value={**log.value, "trackers": listed})}
    )


def experiment_of(tree: Mapping[str, Any], *, trusted: bool = False) -> ExperimentConfig:
    """The configuration that plain data describe, as `model_dump` gives them.

    Those of an earlier version have keys that are gone: see `without_removed`.
    Args: trusted: plugins that they name are imported; see config/plugins.py.
    Raises: pydantic.ValidationError: they do not; ConfigError: a plugin that they need fails.
    """
    problems: list[Problem] = []
    nodes = tree_of(dict(tree), Place("the configuration"))
    schema = ExperimentConfig.opened(nodes, problems, stored=not trusted)
    opened = cast(type[ExperimentConfig], schema)
    nodes = without_removed(nodes, opened, problems, stored=True)
    if problems:
        raise problems_error(problems)
    return opened.model_validate_json(json.dumps(nodes.plain()), strict=True)


def load_config(path: str | Path, overrides: Overrides = ()) -> ExperimentConfig:
    """Reads the configuration of an experiment; `output_dir` defaults to output/<file name>.

    Args:
        path: the YAML file, or the name of a shipped config.
        overrides: `key.path=value` items of -o; the value is YAML (`model.image_size=[320,320]`).
            They apply in order, so the last one wins.  Or a mapping: {"train.epochs": 3}, or
            {"train": {"epochs": 3}}.

    Raises:
        ConfigError: everything that is wrong, one line for each problem:
            `file:line:column: key.path: what was found, what was expected; did you mean ...`.
    """
    defaults = {"output_dir": f"output/{Path(find_config(str(path))).stem}"}
    return parse_config(path, override_items(overrides), ExperimentConfig, defaults)


def changed(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """The configuration with other values, checked again."""
    if not overrides:
        return config
    return parse_plain(config.model_dump(mode="json"), "config", overrides, ExperimentConfig)
