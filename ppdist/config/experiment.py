"""ExperimentConfig, the tree of all Sections: its keys, the rules between them, load_config."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from pydantic import Field, model_validator

from ppdist.common.plugin import is_plugin
from ppdist.config.augment import COMBINES
from ppdist.config.data import DataConfig
from ppdist.config.distill import DistillConfig
from ppdist.config.distributed import DistributedConfig
from ppdist.config.errors import CrossKeyErrors
from ppdist.config.evaluate import (
    CLASSIFICATION_METRICS,
    COCO_DETECTIONS,
    DETECTION_METRICS,
    EvaluateConfig,
    NMSConfig,
)
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
from ppdist.config.yaml import Node, Place, Problem, merge, problems_error, tree_of


class ExperimentConfig(Document):
    """An experiment: the content of a YAML file of configs/."""

    output_dir: Annotated[str | None, OnResume.FREE] = Field(
        default=None,
        description="Where the run writes; null: output/<name of the config file>. A folder, or "
        "s3://BUCKET/FOLDER or gs://BUCKET/FOLDER: then it writes to output/s3/BUCKET/FOLDER "
        "first, and uploads that beside the steps (docs/cloud.md).",
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
        """Returns every (height, width) that an image may have in training."""
        sizes, image_size = self.train.multi_scale, self.model.image_size
        return sizes if sizes and not self.data.augment.plain_epochs else (*sizes, image_size)

    @property
    def suppression(self) -> NMSConfig:
        """Returns the settings of `nms` that are actually used.

        It suppresses nothing where the model needs no suppression, and keeps all boxes that count
        where evaluation counts more of them than COCO does.
        """
        changes: dict[str, Any] = {} if self.model.needs_nms else {"iou_threshold": None}
        max_detections = self.evaluate.max_detections
        if max_detections > COCO_DETECTIONS:
            changes |= {
                key: max(max_detections, getattr(self.nms, key)) for key in ("keep", "candidates")
            }
        return self.nms.model_copy(update=changes) if changes else self.nms

    @classmethod
    def open_plugins(
        cls, tree: Node, problems: list[Problem], *, stored: bool = False
    ) -> type[Section]:
        """Returns this Section, extended by detectors, formats, ... of plugins."""
        return open_section(cls, tree, problems, stored=stored)

    @classmethod
    def complete(cls, tree: Node) -> Node:
        """Adds the keys that follow from others and need not be written.

        `loss.name` is the model's, a tracker may be its name alone, and `data.val_fraction` says
        what `data.val` is.
        """
        model, data, log = (tree.child(key) for key in ("model", "data", "log"))
        trackers = log.child("trackers") if log is not None else None
        # `trackers: [wandb]` is short for `trackers: [{name: wandb}]`.
        if log is not None and trackers is not None and isinstance(trackers.value, list):
            items = [
                Node({"name": item}, item.place, item.key_place)
                if isinstance(item.value, str)
                else item
                for item in trackers.value
            ]
            named = Node({"trackers": replace(trackers, value=items)}, log.place, log.key_place)
            tree = merge(tree, Node({"log": named}, tree.place, tree.key_place))
        # A loss belongs to its model.  Merged underneath, so that a wrong name is still reported.
        name = model.child("name") if model is not None else None
        if name is not None and (name.value in _DETECTORS or is_plugin(name.value)):
            implied = Node({"name": name}, name.place, name.key_place)
            tree = merge(Node({"loss": implied}, tree.place, tree.key_place), tree)
        # With val_fraction the two splits read the same files; the images are divided later.
        train = data.child("train") if data is not None else None
        fraction = data.child("val_fraction") if data is not None else None
        if train is not None and fraction is not None and fraction.value is not None:
            train_paths = {key: train.child(key) for key in ("images", "annotations")}
            val_paths = {key: node for key, node in train_paths.items() if node is not None}
            val = Node({**val_paths}, train.place, train.key_place)
            divided = Node({"val": val}, train.place, train.key_place)
            tree = merge(tree, Node({"data": divided}, tree.place, tree.key_place))
        return tree

    @model_validator(mode="after")
    def _check_keys(self) -> "ExperimentConfig":
        """Refuses keys that contradict each other; see `cross_key_errors`."""
        messages = [*cross_key_errors(self)]
        if messages:
            raise CrossKeyErrors(messages)
        return self


_DETECTORS = [section.model_fields["name"].default for section in get_args(ModelConfig)]


def cross_key_errors(config: ExperimentConfig) -> Iterator[str]:
    """Yields messages for `CrossKeyErrors`, each beginning with its key.

    Each section has already been checked separately; a key that would silently be ignored is an
    error, too.
    """
    name, task = config.model.name, config.model.task
    if config.data.task != task:
        has, learns = ("boxes", "classes") if task == "classify" else ("classes", "boxes")
        yield (
            f"data.format: {config.data.format} has {has} of images, model.name: {name} learns "
            f"{learns}; choose the other model or the other format"
        )
    if config.loss.name != name:
        yield (
            f"loss.name: {config.loss.name} is the loss of another model than model.name: {name}; "
            f"leave loss.name out"
        )
    task_metrics = CLASSIFICATION_METRICS if task == "classify" else DETECTION_METRICS
    metrics: dict[str, tuple[str | None, tuple[str, ...]]] = {
        "evaluate.metric": (config.evaluate.metric, task_metrics)
    }
    if config.early_stopping is not None:
        only_for_stopping = ("val_loss",) if task == "classify" else ("f1", "val_loss")
        metrics["early_stopping.metric"] = (
            config.early_stopping.metric,
            (*task_metrics, *only_for_stopping),
        )
    for key, (metric, available) in metrics.items():
        if metric not in (None, *available):
            yield (
                f"{key}: {metric} is not measured for model.name: {name}; expected one of "
                f"{', '.join(available)}"
            )
    if config.distill is not None and task == "classify":
        yield "distill: teaches detectors, not classifiers; leave it out"
    yield from _distributed_errors(config)
    yield from _ineffective_key_errors(config)


def _distributed_errors(config: ExperimentConfig) -> Iterator[str]:
    """Yields conflicts between ways to share work and gradients among ranks."""
    ranks, train = config.distributed, config.train
    low_precision = train.amp.enabled and train.amp.level == "O2"
    compressions = {
        "distributed.gradient_dtype": (ranks.gradient_dtype, "float32"),
        "distributed.gradient_rank": (ranks.gradient_rank, None),
        "distributed.topk_fraction": (ranks.topk_fraction, None),
        "distributed.local_sgd_steps": (ranks.local_sgd_steps, None),
    }
    chosen = [
        f"{key}: {value}" for key, (value, default) in compressions.items() if value != default
    ]
    if len(chosen) > 1:
        yield f"{chosen[0]} and {chosen[1]} both reduce communication; choose one"
    if ranks.local_sgd_steps is not None:
        conflict = (
            f"distributed.local_sgd_steps: {ranks.local_sgd_steps} lets the ranks' weights differ"
        )
        if ranks.shard_optimizer:
            yield f"{conflict}, distributed.shard_optimizer: true needs them equal; choose one"
        if ranks.shares is not None:
            yield f"{conflict} by what each took, distributed.shares: changes that; choose one"
        if train.sync_bn:
            yield (
                f"{conflict} to communicate less, train.sync_bn: true communicates in every layer; "
                f"set train.sync_bn: false"
            )
    for key, is_set in {
        "distributed.local_sgd_steps": ranks.local_sgd_steps is not None,
        "distributed.shard_optimizer": ranks.shard_optimizer,
    }.items():
        if is_set and low_precision:
            yield (
                f"{key}: needs float32 weights, which train.amp.level: O2 keeps in the optimizer; "
                f"set train.amp.level: O1"
            )


def _ineffective_key_errors(config: ExperimentConfig) -> Iterator[str]:
    """Yields keys that would have no effect with the other values."""
    augment, train = config.data.augment, config.train
    if train.ema.restart_decay is not None and not augment.last_stage_epochs:
        yield (
            f"train.ema.restart_decay: {train.ema.restart_decay:g} takes effect where strong "
            f"augmentation ends; set data.augment.plain_epochs or close_mosaic_epochs, or leave it "
            f"out"
        )
    if train.total_batch is not None and train.accumulate_steps > 1:
        yield (
            f"train.accumulate_steps: {train.accumulate_steps} follows from train.total_batch: "
            f"{train.total_batch}; leave one of them out"
        )
    if config.model.task == "classify":
        detection_only = {
            "data.augment.mosaic": augment.mosaic,
            "data.augment.mosaic_whole": augment.mosaic_whole,
            "data.augment.mixup": augment.mixup,
            "data.augment.cutmix": augment.cutmix,
            "data.augment.copy_paste": augment.copy_paste,
            "data.augment.combine_epochs": augment.combine_epochs is not None,
            "data.augment.affine": augment.affine.moves,
            "data.augment.close_mosaic_epochs": augment.close_mosaic_epochs,
            "data.sampling.name: difficulty": config.data.sampling.name == "difficulty",
            "evaluate.max_detections": config.evaluate.max_detections != COCO_DETECTIONS,
            "evaluate.rectangular": config.evaluate.rectangular,
            "data.resize": config.data.resize != "stretch",
            "nms": config.nms != type(config.nms)(),
        }
        for key, is_set in detection_only.items():
            if is_set:
                yield f"{key}: has no effect for a classifier; leave it out"
    if config.evaluate.rectangular and config.data.resize != "letterbox":
        yield "evaluate.rectangular: true: needs data.resize: letterbox, which keeps the shape"
    if config.evaluate.rectangular_pad and not config.evaluate.rectangular:
        yield "evaluate.rectangular_pad: has no effect without evaluate.rectangular: true"
    yield from _scaling_errors(config)
    # null is always allowed: it states that nothing is suppressed.
    for key in ("iou_threshold", "candidates", "class_agnostic"):
        is_set = getattr(config.nms, key) not in (type(config.nms).model_fields[key].default, None)
        if is_set and config.model.task == "detect" and not config.model.needs_nms:
            yield (
                f"nms.{key}: has no effect: this {config.model.name} needs no suppression; leave "
                "it out"
            )
    if config.optimizer.name == "adamw":
        momentum_only: dict[str, bool | float | None] = {
            "optimizer.nesterov": config.optimizer.nesterov,
            "schedule.warmup_momentum": config.schedule.warmup_momentum,
        }
        for key, value in momentum_only.items():
            if value not in (None, False):
                off = "false" if value is True else "null"
                yield f"{key}: has no effect with optimizer.name: adamw; set it to {off}"


def _scaling_errors(config: ExperimentConfig) -> Iterator[str]:
    """Yields conflicts between keys that scale the recipe to the batch size."""
    optimizer, lengthens = config.optimizer, config.train.epochs_compensation == "auto"
    if lengthens and optimizer.noise_scale is None:
        yield (
            "train.epochs_compensation: auto needs optimizer.noise_scale, which determines the "
            "number of extra epochs; if you do not know yours, set it to 450"
        )
    if lengthens and config.train.steps is not None:
        yield (
            "train.epochs_compensation: auto has no effect with train.steps, which are the length "
            "of the run; set one of them to none or null"
        )
    if optimizer.noise_scale is not None and optimizer.lr_scaling == "none" and not lengthens:
        yield (
            "optimizer.noise_scale: has no effect with optimizer.lr_scaling: none without "
            "train.epochs_compensation: auto; set one of the three differently"
        )
    if optimizer.noise_scale is not None and optimizer.reference_batch_size is None:
        yield (
            "optimizer.noise_scale: needs optimizer.reference_batch_size, the total batch that "
            "the values were tuned for"
        )


def config_warnings(config: ExperimentConfig, begins: bool) -> Iterator[str]:
    """Yields warnings about effects of a configuration that its author may not expect.

    Args: begins: training starts from new weights or model.pretrained, not from a checkpoint.
    """
    if begins and not config.model.pretrained:
        remedy = "set model.pretrained to a weight file or the output_dir of a run"
        if config.train.freeze is not None:
            yield f"train.freeze freezes randomly initialised layers; {remedy}"
        if config.optimizer.layer_decay is not None:
            yield (
                f"optimizer.layer_decay: {config.optimizer.layer_decay:g} slows down the layers "
                f"near the image, which are randomly initialised; {remedy}"
            )
    sizes, image_size = config.train.multi_scale, config.model.image_size
    areas = [height * width for height, width in sizes]
    if areas and not min(areas) <= image_size[0] * image_size[1] <= max(areas):
        smallest, largest = (
            "{}x{}".format(*choose(sizes, key=lambda size: size[0] * size[1]))
            for choose in (min, max)
        )
        yield (
            f"train.multi_scale trains on images of {smallest} to {largest} pixels, "
            f"model.image_size: {image_size[0]}x{image_size[1]} evaluates on others; set "
            "train.multi_scale to sizes around it, or to []"
        )
    epochs, configured = math.ceil(config.train.epochs), config.data.augment
    if configured.mosaic_whole and not configured.mosaic:
        yield (
            "data.augment.mosaic_whole: true has no effect without data.augment.mosaic, the chance "
            "of a mosaic"
        )
    window = configured.combine_epochs
    if window == (0, 1) and isinstance(window[1], int) and epochs > 1:
        yield (
            "data.augment.combine_epochs: [0, 1] means the first epoch only; for the whole run "
            "write [0.0, 1.0] or null"
        )
    augment = configured.with_epoch_scale(config.train.phases_factor)
    by_epoch = [augment.in_epoch(epoch, epochs) for epoch in range(epochs)]
    # The phases may leave no epoch to an augmentation although each key is valid by itself.
    for name in COMBINES:
        chance = getattr(augment, name)
        if chance and not any(getattr(stage, name) for stage in by_epoch):
            yield (
                f"data.augment.{name}: {chance:g} never acts: combine_epochs, close_mosaic_epochs "
                f"and plain_epochs leave none of the {epochs} epochs to it"
            )


def experiment_of(tree: Mapping[str, Any], *, trusted: bool = False) -> ExperimentConfig:
    """Builds a configuration from plain data, such as the result of `model_dump`.

    Removed keys of earlier versions are handled as in `without_removed`.

    Args: trusted: whether plugins that the data name are imported; see config/plugins.py.
    Raises: pydantic.ValidationError: the data are invalid; ConfigError: a plugin that they name
        cannot be used.
    """
    problems: list[Problem] = []
    nodes = tree_of(dict(tree), Place("the configuration"))
    schema = ExperimentConfig.open_plugins(nodes, problems, stored=not trusted)
    opened = cast(type[ExperimentConfig], schema)
    nodes = without_removed(nodes, opened, problems, stored=True)
    if problems:
        raise problems_error(problems)
    return opened.model_validate_json(json.dumps(nodes.plain()), strict=True)


def default_output_dir(source: str | Path) -> str:
    """Returns the folder of a run that names none, after what it is made of.

    Args: source: its configuration, data or weights.
    """
    return f"output/{Path(source).stem}"


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
    defaults = {"output_dir": default_output_dir(find_config(str(path)))}
    return parse_config(path, override_items(overrides), ExperimentConfig, defaults)


def apply_overrides(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """Returns the configuration with the overrides applied, checked again."""
    if not overrides:
        return config
    return parse_plain(config.model_dump(mode="json"), "config", overrides, ExperimentConfig)
