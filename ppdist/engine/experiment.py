"""The config tree and the build: the one place where data, models, losses and optim meet."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import paddle
from pydantic import Field

from ppdist import __version__, dist
from ppdist.checkpoint import (
    Checkpoint,
    CheckpointConfig,
    newest_valid,
    read_checkpoint,
    set_aside,
)
from ppdist.config import Section, dump_yaml
from ppdist.data.check import check_same_classes
from ppdist.data.dataset import DataConfig, read_split
from ppdist.data.loader import EvalLoader, TrainLoader
from ppdist.data.sample import Batch, DetectionSet
from ppdist.data.sampler import TrainSampler
from ppdist.engine.derived import Derived, derive
from ppdist.engine.evaluator import EvaluateConfig, Evaluator
from ppdist.engine.step import TrainStep
from ppdist.engine.trainer import TrainConfig, Trainer
from ppdist.errors import CheckpointError, ConfigError
from ppdist.log import LogConfig, RunLog
from ppdist.losses.ppyoloe import PPYOLOELoss, PPYOLOELossConfig
from ppdist.models.cpu_conv import self_check, use_onednn_convolutions
from ppdist.models.detector import Detector
from ppdist.models.ppyoloe import PPYOLOE, PPYOLOEConfig
from ppdist.models.pretrained import load_weights
from ppdist.models.sync_bn import synchronize_batch_norm
from ppdist.optim.ema import EMA
from ppdist.optim.optimizer import OptimizerConfig, build_optimizer
from ppdist.optim.schedule import ScheduleConfig
from ppdist.postprocess import NMSConfig

# Every detector there is: `model.name` -> what computes outputs, what scores them.
DETECTORS = {"ppyoloe": (PPYOLOE, PPYOLOELoss)}


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
    model: PPYOLOEConfig
    loss: PPYOLOELossConfig = Field(default=PPYOLOELossConfig(), description="Training loss.")
    train: TrainConfig = Field(default=TrainConfig(), description="Length, batch, numerics.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="The optimizer.")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Learning rate.")
    distributed: dist.DistributedConfig = Field(
        default=dist.DistributedConfig(), description="Ranks."
    )
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Checkpoints.")
    evaluate: EvaluateConfig = Field(default=EvaluateConfig(), description="Evaluation.")
    nms: NMSConfig = Field(default=NMSConfig(), description="Non-maximum suppression.")
    log: LogConfig = Field(default=LogConfig(), description="Progress, curves, images.")


@dataclass
class Experiment:
    """A training run, built and ready: `experiment.trainer.fit()`."""

    trainer: Trainer
    log: RunLog
    output_dir: Path


def build_model(config: ExperimentConfig) -> Detector:
    """The detector with fresh weights, the same on every rank (drawn from the seed)."""
    paddle.seed(config.seed)
    return DETECTORS[config.model.name][0](config.model)


def build_evaluator(
    config: ExperimentConfig, dataset: DetectionSet, max_pictures: int = 0
) -> Evaluator:
    """Evaluation of this rank's share of a split; every rank builds one."""
    loader = EvalLoader(
        dataset,
        config.data,
        image_size=config.model.image_size,
        batch_size=config.evaluate.batch_size_per_card,
        rank=dist.rank(),
        world=dist.world_size(),
    )
    return Evaluator(dataset, loader, config.nms, max_pictures=max_pictures)


def build_training(
    config: ExperimentConfig,
    *,
    output_dir: Path,
    evaluate: bool,
    resume: Path | None,
    command: list[str],
) -> Experiment:
    """Builds everything a training run needs, on every rank; `dist.init` comes before.

    Args:
        output_dir: where everything the run leaves goes.
        evaluate: evaluate during training and keep the best (`--eval`).
        resume: a checkpoint, or the run's output_dir for its newest valid one; None starts anew.
        command: what the user typed, for environment.json.
    Raises: UserError: whatever of data, weights, checkpoint or config is wrong, before step 1.
    """
    _check_numerics(config)
    checkpoint, passed_over = dist.together(lambda: _find_checkpoint(resume))
    train_set, val_set = dist.together(lambda: _read_sets(config, evaluate))
    model, evaluated_model = build_model(config), build_model(config)
    loaded = None
    if config.model.pretrained and checkpoint is None:
        weights = Path(config.model.pretrained)
        loaded = dist.together(lambda: load_weights(model, weights))
    derived = derive_run(config, len(train_set.records))
    config_yaml = dump_yaml(config)
    dist.on_main(lambda: _describe_run(output_dir, config_yaml, command))
    start = None if checkpoint is None else checkpoint.state["step"]
    total, per_epoch = derived.total_steps, derived.steps_per_epoch
    log = RunLog(output_dir, dist.is_main(), total, per_epoch, config.log, start)
    with ExitStack() as undo:
        undo.callback(log.close)
        for reason in passed_over:
            log.warning(f"passed over: {reason}")
        if loaded:
            log.info(f"{loaded}")
        _speed_up_cpu(config, [model, evaluated_model], log)
        trainer = Trainer(
            train_step=build_train_step(config, derived, model),
            batches=lambda step: _batches(config, train_set, derived, step),
            derived=derived,
            evaluator=val_set and build_evaluator(config, val_set, config.log.images),
            evaluated_model=evaluated_model,
            log=log,
            output_dir=output_dir,
            config_yaml=config_yaml,
            checkpoint=config.checkpoint,
            evaluate=config.evaluate,
            log_every=config.log.every_steps,
        )
        if checkpoint is not None:
            trainer.restore(checkpoint)
            log.info(f"resumed from {checkpoint.path} after step {checkpoint.state['step']}")
        _set_aside(output_dir, start or 0, log)
        log.table("derived", derived.rows())
        undo.pop_all()
    return Experiment(trainer=trainer, log=log, output_dir=output_dir)


def _set_aside(output_dir: Path, start: int, log: RunLog) -> None:
    """Moves checkpoints that are not this run's out of the way; every rank calls it."""
    aside = dist.on_main(lambda: f"{set_aside(output_dir / 'checkpoints', start) or ''}")
    if aside:
        log.warning(f"checkpoints of another run, or beyond the step resumed from, are in {aside}")


def _read_sets(
    config: ExperimentConfig, evaluate: bool
) -> tuple[DetectionSet, DetectionSet | None]:
    train_set = read_split(config.data, "train", config.model.num_classes)
    if not evaluate:
        return train_set, None
    val_set = read_split(config.data, "val", config.model.num_classes)
    check_same_classes(train_set, val_set)
    return train_set, val_set


def build_train_step(config: ExperimentConfig, derived: Derived, model: Detector) -> TrainStep:
    """Model, loss, optimizer and average as one optimizer step; every rank builds one."""
    train = config.train
    if train.sync_bn:
        model = synchronize_batch_norm(model)
    low_precision = train.amp.enabled and train.amp.level == "O2"
    if low_precision:
        model = paddle.amp.decorate(models=model, level="O2", dtype=train.amp.dtype)
    loss = DETECTORS[config.model.name][1](
        config.loss,
        num_classes=config.model.num_classes,
        static_steps=round(config.loss.static_assigner_epochs * derived.steps_per_epoch),
    )
    optimizer = build_optimizer(
        model, config.optimizer, derived.schedule.peak_lr, master_weights=low_precision
    )
    return TrainStep(
        model=model,
        loss=loss,
        optimizer=optimizer,
        ema=EMA(model, derived.ema_decay) if train.ema.enabled else None,
        amp=train.amp,
        clip_norm=train.clip_norm,
        loss_divisor=float(train.batch_size_per_card),
        average_statistics=not train.sync_bn or dist.world_size() == 1,
    )


def derive_run(config: ExperimentConfig, dataset_size: int) -> Derived:
    return derive(
        world=dist.world_size(),
        dataset_size=dataset_size,
        batch_size_per_card=config.train.batch_size_per_card,
        accumulate_steps=config.train.accumulate_steps,
        epochs=config.train.epochs,
        max_steps=config.train.max_steps,
        optimizer=config.optimizer,
        schedule=config.schedule,
        ema=config.train.ema,
    )


def _batches(
    config: ExperimentConfig, dataset: DetectionSet, derived: Derived, first_step: int
) -> Iterator[Batch]:
    sampler = TrainSampler(
        dataset_size=len(dataset.records),
        batch_size_per_card=config.train.batch_size_per_card,
        accumulate=config.train.accumulate_steps,
        rank=dist.rank(),
        world=dist.world_size(),
        seed=config.seed,
        start_step=first_step,
        end_step=derived.total_steps,
        sizes=config.train.multi_scale or (config.model.image_size,),
    )
    return iter(TrainLoader(dataset, config.data, sampler, seed=config.seed))


def _check_numerics(config: ExperimentConfig) -> None:
    if config.train.amp.enabled and not dist.on_gpu():
        raise ConfigError(
            "train.amp.enabled: true, but this run is on CPU, where Paddle has no float16 or "
            "bfloat16 kernels and ignores AMP silently; set train.amp.enabled: false or use a GPU"
        )
    supported = {
        "float16": paddle.amp.is_float16_supported,
        "bfloat16": paddle.amp.is_bfloat16_supported,
    }
    if config.train.amp.enabled and not supported[config.train.amp.dtype]():
        raise ConfigError(
            f"train.amp.dtype: {config.train.amp.dtype} is not supported by this card, and Paddle "
            f"would silently compute in float32; take the other, or set train.amp.enabled: false"
        )
    sizes = [("model.image_size", config.model.image_size)]
    sizes += [("train.multi_scale", size) for size in config.train.multi_scale]
    for key, (height, width) in sizes:
        if height % 32 or width % 32 or min(height, width) < 32:
            raise ConfigError(f"{key}: [{height}, {width}]: expected multiples of 32 pixels")


def _speed_up_cpu(config: ExperimentConfig, models: list[Detector], log: RunLog) -> None:
    """Switches CPU convolutions to oneDNN when they prove equal to eager here, on every rank."""
    if dist.on_gpu() or config.train.cpu_convolutions == "plain":
        return
    reason = self_check(models[0])
    dist.barrier()  # a slow machine may need longer for it than a collective waits
    failures = dist.all_reduce_sum(paddle.to_tensor([float(reason is not None)]))
    if failures.item() > 0:
        log.warning(
            f"oneDNN convolutions did not pass their self-check ({reason or 'on another rank'}); "
            f"training with Paddle's plain ones, which are slower"
        )
        return
    for model in models:
        use_onednn_convolutions(model)


def _find_checkpoint(resume: Path | None) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint `--resume` means, and why newer ones were passed over."""
    if resume is None:
        return None, []
    if (resume / "manifest.json").exists():
        return read_checkpoint(resume.resolve()), []
    checkpoint, reasons = newest_valid(resume / "checkpoints")
    if checkpoint is None:
        found = f"; passed over: {'; '.join(reasons)}" if reasons else ""
        raise CheckpointError(
            f"--resume: no checkpoint in {resume / 'checkpoints'}{found}; "
            f"give --resume a checkpoint directory, or leave it out to start anew"
        )
    return checkpoint, reasons


def _describe_run(output_dir: Path, config_yaml: str, command: list[str]) -> None:
    """Writes config.yml and environment.json; rank 0 only.

    Raises: ConfigError: nothing can be written there.
    """
    cards = paddle.device.cuda.device_count() if dist.on_gpu() else 0
    environment = {
        "command": command,
        "ppdist": __version__,
        "paddle": paddle.__version__,
        "cuda": paddle.version.cuda(),
        "numpy": np.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "ranks": dist.world_size(),
        "cards_on_this_host": cards,
        "git_commit": _git_commit(),
    }
    text = json.dumps(environment, indent=1)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.yml").write_text(config_yaml, encoding="utf-8")
        (output_dir / "environment.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write to {output_dir}: {error}") from error


def _git_commit() -> str | None:
    """Commit of the checkout this package runs from; None outside git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
