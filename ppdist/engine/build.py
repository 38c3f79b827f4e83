"""Builds experiments: the one place where data, models, losses and optim meet."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle

from ppdist.common import files, plugin
from ppdist.common.console import EarlyLog
from ppdist.common.errors import ConfigError, UserError
from ppdist.common.job import MIN_HOSTS_VARIABLE, launcher_folder, note_saved
from ppdist.common.machine import available_cores, given_threads
from ppdist.common.run_log import RunLog
from ppdist.common.trackers import TRACKERS
from ppdist.config.evaluate import NMSConfig
from ppdist.config.experiment import ExperimentConfig, config_warnings
from ppdist.config.model import DetectorConfig, ModelConfig
from ppdist.config.parse import dump_yaml
from ppdist.config.train import AmpConfig, MicroBatches
from ppdist.cpu.precision import BFLOAT16, Kernels, compute_in
from ppdist.cpu.switch import check_once, measure_cost, self_check, use_onednn
from ppdist.data.checks.statistics import refit_if_needed, sizes_in_input
from ppdist.data.datasets.build import limit_notes
from ppdist.data.loading.loader import EvalLoader
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm, device, paddle_api
from ppdist.distributed.sync_batch_norm import synchronize_batch_norm
from ppdist.engine.advice import advice
from ppdist.engine.auto_batch import resolve_batch_size
from ppdist.engine.bad_steps import BadSteps
from ppdist.engine.callbacks import Callback
from ppdist.engine.checkpoint import CheckpointWriter
from ppdist.engine.continuation import ANEW, Continuation
from ppdist.engine.data import BatchSource, Blocklist, images_of_epoch, read_sets
from ppdist.engine.digests import note_digests
from ppdist.engine.distillation import DistilledLoss, build_distillation
from ppdist.engine.evaluation import Evaluations
from ppdist.engine.evaluator import ClassificationEvaluator, Evaluator, Observer, ValidationLoss
from ppdist.engine.messages import (
    About,
    Messages,
    data_line,
    device_line,
    evaluate_line,
    longer_line,
    model_line,
    train_line,
)
from ppdist.engine.monitor import (
    EpochLogger,
    EvaluationLogger,
    HeartbeatCallback,
    MetricsLogger,
    StragglerMonitor,
)
from ppdist.engine.output_dirs import OutputDirs, find_output_dirs
from ppdist.engine.policies.average import AveragedWeights
from ppdist.engine.policies.bad_images import BadImages
from ppdist.engine.policies.memory import SmallerMicroBatches, StandIn
from ppdist.engine.policies.outage import Outage
from ppdist.engine.policies.replicas import ReplicaCheck
from ppdist.engine.policies.rollback import Rollback
from ppdist.engine.policies.skipped_steps import SkippedSteps
from ppdist.engine.policies.stop import Stop
from ppdist.engine.policies.time_limit import TimeLimit
from ppdist.engine.precision import Precision
from ppdist.engine.preflight import (
    digests_of_code,
    fetch_on_all_ranks,
    keep_sources,
    preflight,
    wait_for_inputs,
)
from ppdist.engine.resume import Start, find_start, log_start, prepare_output_dir, validate_resume
from ppdist.engine.run_description import describe_run, hyper_parameters, settings
from ppdist.engine.run_policy import RunPolicy
from ppdist.engine.saving import Saving
from ppdist.engine.schedule_setup import ScheduleSetup, set_up_schedule
from ppdist.engine.state import Run
from ppdist.engine.step_policy import StepPolicy
from ppdist.engine.step_sums import EpochMeans
from ppdist.engine.stopping import StopRequest
from ppdist.engine.suitability import findings_of
from ppdist.engine.time_budget import TimeBudget
from ppdist.engine.train_step import StepSettings, TrainStep
from ppdist.engine.trainer import Trainer, TrainingParts
from ppdist.losses.base import Loss
from ppdist.metrics.analysis import analyse
from ppdist.metrics.findings import DETR_FROM_SCRATCH, Finding
from ppdist.models import build as models
from ppdist.models.base import ImageModel, freeze, freezing
from ppdist.models.complexity import Complexity, complexity
from ppdist.models.model_card import ModelCard, card_of, names_for, origin, read_card
from ppdist.models.weights import LoadReport, load_weights
from ppdist.optim.compression import build_exchange, last_step
from ppdist.optim.ema import EMA
from ppdist.optim.exchange import Exchange
from ppdist.optim.optimizer import build_optimizer, layerwise_lr_decay, parameter_group_lines
from ppdist.optim.sharded_updater import ShardedUpdater
from ppdist.optim.updater import Updater
from ppdist.viz.run_pictures import BatchPictures, EvaluationPictures, Put

_LOST_HOST_SECONDS = 120.0  # NFS releases a lost client's locks after 90 s
_SLOWER = 1.1  # times the CPU time: less may be noise of the measurement
# The losses of our models, by `model.name`; the models are in ppdist/models/build.py.
_LOSSES = {
    "ppyoloe": "ppdist.losses.ppyoloe:PPYOLOELoss",
    "rtdetr": "ppdist.losses.rtdetr:RTDETRLoss",
    "yolov5": "ppdist.losses.yolov5:YOLOv5Loss",
    "yolov5_cls": "ppdist.losses.classification:ClassificationLoss",
}


def loss_of(model: ModelConfig | DetectorConfig) -> type[Loss]:
    """Returns the loss class of a model, ours or a plugin's, by its `model` section.

    Raises: ConfigError: it belongs to a plugin and cannot be imported.
    """
    target = model.loss if isinstance(model, DetectorConfig) else _LOSSES[model.name]
    loss: type[Loss] = plugin.load(target)
    return loss


@dataclass
class Experiment:
    """A training run, built and ready: `experiment.trainer.fit()`."""

    trainer: Trainer
    log: RunLog
    output_dir: Path
    sets: dict[str, DetectionSet]  # by split; only sets that the run reads


@dataclass(frozen=True)
class TrainingData:
    """The images of a run.

    Attributes:
        bad_images: training images that cannot be used.
        images: samples per epoch over all ranks.
        pixels: see `Run`.
    """

    train_set: DetectionSet
    val_set: DetectionSet | None
    bad_images: Blocklist
    images: int
    pixels: str


@dataclass
class Decisions:
    """The decisions about a training run, all checked before it writes anything.

    Attributes:
        size: parameters and GFLOPs of the model.
        findings: see `ppdist.engine.suitability`; their texts are among the messages.
        messages: warnings and details of all parts.
    """

    config: ExperimentConfig
    data: TrainingData
    model: ImageModel
    size: Complexity
    schedule: ScheduleSetup
    dirs: OutputDirs
    budget: TimeBudget | None
    start: Start
    run: Run
    findings: list[Finding]
    messages: Messages

    @property
    def warnings(self) -> list[str]:
        """Warnings at the start of the run, except those about images."""
        return self.messages.warnings(About.MACHINE)


def decide_training(
    config: ExperimentConfig,
    *,
    output_dir: Path,
    evaluate: bool,
    resume: Continuation = ANEW,
    kernels: Kernels = BFLOAT16,
    hold: bool = True,
) -> Decisions:
    """Decides and checks everything that a run does before it writes.  Collective.

    Args:
        hold: keep other processes from training in output_dir, if it exists.
        config, output_dir, evaluate, resume, kernels: see `build_training`.
    Raises: UserError: invalid data, weights, checkpoint or configuration.
    """
    # First, because without fleetrun the clock of the time budget starts here.
    budget = None if config.train.hours is None else TimeBudget(config.train.hours)
    messages = Messages()
    # Before any other collective: ranks with different settings might reach different collectives.
    messages.warn(
        About.MACHINE, preflight(config, evaluate=evaluate, resume=resume, kernels=kernels)
    )
    dirs = find_output_dirs(output_dir)  # a missing one is created once the run is sure to start
    if hold:
        messages.warn(About.MACHINE, comm.run_on_main(lambda: _hold(output_dir)))
    start = find_start(resume, dirs, config)
    anew = start.snapshot is None
    if start.job is not None:  # an earlier attempt of this job had read the inputs
        wait_for_inputs(config, evaluate=evaluate, anew=anew)

    data = _read_data(config, evaluate, messages)

    records = data.train_set.records
    config, batches, lines = resolve_batch_size(config, records, data.images, start)
    messages.detail(lines)
    model = build_model(config)
    messages.detail(limit_notes(data.train_set, data.val_set))
    findings = findings_of(config, data.train_set, data.val_set)
    if not anew:  # its checkpoint has weights
        findings = [finding for finding in findings if finding.code != DETR_FROM_SCRATCH]
    messages.warn(About.RUN, [finding.text for finding in findings])
    _prepare_model(config, model, data.train_set, output_dir, anew, messages)

    schedule = build_schedule_setup(config, data.images, batches)
    run = validate_resume(start, schedule, data.train_set, config, data.pixels)
    data.bad_images.reasons |= run.bad_images
    run.bad_images = data.bad_images.reasons  # shared: checkpoints get later images, too
    size = comm.run_on_all_ranks(lambda: complexity(model))
    messages.warn(About.START, start.warnings)
    messages.warn(About.RUN, config_warnings(with_epochs(config, data.images, batches), anew))
    return Decisions(
        config=config,
        data=data,
        model=model,
        size=size,
        schedule=schedule,
        dirs=dirs,
        budget=budget,
        start=start,
        run=run,
        findings=findings,
        messages=messages,
    )


def _hold(output_dir: Path) -> list[str]:
    """Keeps other processes from training in a folder, if it exists; returns warnings.

    The lock of a lost host is released once the file server notices that the host is gone.
    """
    seconds = {"seconds": _LOST_HOST_SECONDS} if comm.was_restarted() else {}
    return files.hold(output_dir, **seconds) if output_dir.exists() else []


def _read_data(config: ExperimentConfig, evaluate: bool, messages: Messages) -> TrainingData:
    train_set, val_set, warnings, pixels = read_sets(
        config.data, config.model.num_classes, evaluate
    )
    messages.warn(About.IMAGES, warnings)
    images = images_of_epoch(train_set, config.data.sampling)
    return TrainingData(train_set, val_set, Blocklist(train_set), images, pixels)


def build_training(
    config: ExperimentConfig,
    *,
    output_dir: Path,
    evaluate: bool,
    command: list[str],
    resume: Continuation = ANEW,
    callbacks: Sequence[Callback] = (),
    kernels: Kernels = BFLOAT16,
) -> Experiment:
    """Builds everything a training run needs, after `comm.init`.  Collective.

    Args:
        output_dir: where the run writes.
        evaluate: evaluate during training and keep the best checkpoint (`--eval`).
        command: the command line as the user typed it, for environment.json.
        callbacks: this rank's callbacks, called in this order.
        kernels: the CPU kernels of `train.amp`.
    Raises: UserError: invalid data, weights, checkpoint or configuration.
    """
    early_log = EarlyLog(comm.is_main())
    with early_log:
        decisions = decide_training(
            config, output_dir=output_dir, evaluate=evaluate, resume=resume, kernels=kernels
        )
        _take_folder(decisions, output_dir, command, typed_config=config)
    log = comm.run_on_all_ranks(lambda: _open_log(decisions, output_dir, early_log))
    with ExitStack() as undo:  # an error closes the log; else it stays open in the result
        undo.callback(log.close)
        _announce(decisions, output_dir, log)
        start, data, model = decisions.start, decisions.data, decisions.model
        if start.snapshot is None:
            _fit_anchors(decisions.config, model, data.train_set, log)
        card = _describe_model(decisions.config, model, data.train_set, start)
        trainer = _build_trainer(decisions, log, callbacks, card, kernels)
        if start.snapshot is not None:
            trainer.restore(start.snapshot, start.in_place, bool(start.rescored))
        trainer.train_step.loss.begin()  # now that anchors are known
        # After `restore`, which replaces the state with the checkpoint's.
        trainer.state.run = decisions.run
        _record_start(decisions, log)
        undo.pop_all()
    sets = {"train": data.train_set} | ({} if data.val_set is None else {"val": data.val_set})
    return Experiment(trainer=trainer, log=log, output_dir=output_dir, sets=sets)


def _take_folder(
    decisions: Decisions, output_dir: Path, command: list[str], typed_config: ExperimentConfig
) -> None:
    """Takes a folder for this run and writes its configuration there.  Collective.

    Args: typed_config: the configuration as the user wrote it, before anything was resolved.
    """
    data, messages = decisions.data, decisions.messages
    messages.warn(About.MACHINE, comm.run_on_main(lambda: files.hold(output_dir)))
    moved = prepare_output_dir(decisions.start, decisions.run, decisions.schedule)
    messages.warn(About.START, moved)
    text = dump_yaml(decisions.config)

    def record() -> None:
        describe_run(output_dir, text, command)
        if MIN_HOSTS_VARIABLE in os.environ:  # lost hosts may come back
            note_digests(typed_config, data.train_set, data.val_set)

    comm.run_on_main(record)


def _open_log(decisions: Decisions, output_dir: Path, early: EarlyLog) -> RunLog:
    config, schedule = decisions.config.log, decisions.schedule
    return RunLog(
        output_dir,
        comm.is_main(),
        schedule.total_steps,
        schedule.steps_per_epoch,
        decisions.start.step,
        every_steps=config.every_steps,
        visualdl=config.visualdl,
        trackers=[(row.writer or TRACKERS[row.name], row) for row in config.trackers],
        early=early,
    )


def _announce(decisions: Decisions, output_dir: Path, log: RunLog) -> None:
    """Logs what the run is about to do."""
    config, data, schedule = decisions.config, decisions.data, decisions.schedule
    codes = {finding.text: finding.code for finding in decisions.findings}
    decisions.messages.write(log, codes)
    log.headline("data", data_line(config, data.train_set, data.val_set))
    anew = decisions.start.snapshot is None
    log.headline("model", model_line(config, decisions.size, anew))
    log.headline("device", device_line())
    log.headline("train", train_line(schedule))
    if line := longer_line(schedule):
        log.headline("longer", line)
    log.headline("evaluate", evaluate_line(config, data.val_set))
    log.headline("output", f"{output_dir} (train.log says why each number)")


def _record_start(decisions: Decisions, log: RunLog) -> None:
    """Records where the run begins, and with which numbers."""
    config, schedule, start = decisions.config, decisions.schedule, decisions.start
    log_start(start, schedule, log, config.log.every_steps, config.train.steps is not None)
    log.table("derived", schedule.rows())
    codes = {"findings": dict(decisions.findings)} if decisions.findings else {}
    log.metrics({"step": start.step or 0, "derived": schedule.record(), **codes})
    scores = ClassificationEvaluator if config.model.task == "classify" else Evaluator
    parameters = hyper_parameters(config.model, config.seed, schedule)
    log.writers.describe(parameters, list(scores.headline[:2]), settings(config))
    for warning in advice(config, schedule):
        log.warning(warning)


def _prepare_model(
    config: ExperimentConfig,
    model: ImageModel,
    train_set: DetectionSet,
    output_dir: Path,
    anew: bool,
    messages: Messages,
) -> None:
    """Loads pretrained weights if the run starts anew.  Collective.

    Adds the loading report, the frozen layers and the per-layer learning rates to the messages.
    """
    if anew:
        comm.run_on_all_ranks(lambda: keep_sources(config, output_dir))
    tuned: list[str] = []
    if config.train.freeze is not None:
        tuned += freezing(model, config.train.freeze)
    if config.optimizer.layer_decay is not None:
        tuned += layerwise_lr_decay(model, config.optimizer.layer_decay)
    if config.optimizer.groups:
        tuned += parameter_group_lines(model, config.optimizer.groups)
    if anew and config.model.pretrained:
        weights = Path(config.model.pretrained)
        report, warnings = _load_pretrained(weights, model, train_set.class_names)
        messages.detail([f"{report}"])
        messages.warn(About.RUN, warnings)
    messages.detail(tuned)


def _load_pretrained(
    weights: Path, model: ImageModel, class_names: tuple[str, ...]
) -> tuple[LoadReport, list[str]]:
    """Loads `model.pretrained`, matching classes by name.  Collective.

    Returns: a report; warnings.
    """

    def load() -> tuple[LoadReport, list[str]]:
        warnings: list[str] = []
        names = names_for(weights, class_names, warnings.append)
        return load_weights(model, weights, names), warnings

    fetch_on_all_ranks(weights)
    report, warnings = comm.run_on_all_ranks(load)
    if model.needs_anchors and model.given_anchors_LA2 is not None:
        model.set_anchors(model.given_anchors_LA2)  # override the anchors from the file
    return report, warnings


def _describe_model(
    config: ExperimentConfig, model: ImageModel, train_set: DetectionSet, start: Start
) -> ModelCard:
    """Builds the model card for the checkpoints of this run.  Collective.

    A resumed run keeps the licence and source of its weights.
    """
    data = f"{Path(config.data.root).resolve().name}, {len(train_set.records)} images"
    if selection := config.data.describe_selection():
        data += f" ({selection})"
    pretrained = Path(config.model.pretrained) if config.model.pretrained else None

    def find() -> list[str]:
        try:
            resumed = read_card(start.path) if start.path is not None else None
            if resumed is not None and resumed.source:
                return [resumed.licence, resumed.source]
            source_card = read_card(pretrained) if pretrained is not None else None
        except UserError:  # already reported, or no longer available
            source_card = None
        return [*origin(data, pretrained, source_card)]

    licence, source = comm.run_on_main(find)
    return card_of(
        config, model, train_set.class_names, train_set.category_ids,
        licence=licence, source=source,
    )  # fmt: skip


def _fit_anchors(
    config: ExperimentConfig, model: ImageModel, train_set: DetectionSet, log: RunLog
) -> None:
    """Refits anchors that do not suit the training set.  Collective.

    Rank 0 decides for all ranks: the last digit of a logarithm may depend on the processor.
    """
    if not (model.needs_anchors and model.fits_anchors):
        return
    before_LA2, threshold = model.anchors_LA2, model.anchor_threshold

    def fit() -> dict[str, Any]:
        wh_N2 = sizes_in_input(train_set, config.model.image_size, config.data.resize)
        result = refit_if_needed(wh_N2, before_LA2, threshold=threshold, seed=config.seed)
        anchors = None if result.anchors_LA2 is None else result.anchors_LA2.tolist()
        return {"anchors": anchors, "message": result.message}

    report = comm.run_on_main(fit)
    log.detail(f"anchors: {report['message']}")
    if report["anchors"] is not None:
        model.set_anchors(np.array(report["anchors"], np.float32))


def _build_trainer(
    decisions: Decisions,
    log: RunLog,
    callbacks: Sequence[Callback],
    model_card: ModelCard,
    kernels: Kernels,
) -> Trainer:
    """Builds the trainer for a model with its weights loaded.

    Every rank builds one.
    """
    config, schedule, model = decisions.config, decisions.schedule, decisions.model
    train_set, val_set, dirs = decisions.data.train_set, decisions.data.val_set, decisions.dirs
    # A second model takes the averaged weights, so a failed evaluation cannot affect training.
    evaluated_model = model if val_set is None else build_model(config)
    slow = speed_up_cpu(config, [model, evaluated_model])
    if slow:
        log.warning(slow)
    if config.train.amp.enabled and not device.on_accelerator():
        cost = check_low_precision(config, model, slow, kernels)
        text = f"layers take {cost:.2g} times as much CPU time in bfloat16 as in float32"
        if cost > _SLOWER:
            log.warning(
                f"train.amp: on this processor {text}; for speed set train.amp.enabled: false",
                "amp_slower",
            )
        else:
            log.detail(text)

    source = build_batch_source(config, train_set, schedule, dirs.folder / "plots", log.put)
    policies = build_policies(decisions, source, log)
    names = train_set.class_names
    train_step = build_train_step(config, schedule, model, kernels, names, policies.step_policies)
    if isinstance(train_step.loss, DistilledLoss):
        log.detail(train_step.loss.distillation.about)

    # Other ranks show no pictures.
    pictures = EvaluationPictures(names, config.log.images if comm.is_main() else 0)
    evaluator = None
    if val_set is not None:
        measured = train_step.loss.without_teacher
        evaluator = build_evaluator(config, val_set, model, pictures, measured)
    save_every, evaluate_every = intervals(config, schedule, train_step.exchange)
    log.eta.expect(
        evaluate_every if evaluator else 0,
        save_every or schedule.total_steps,
        evaluator.images if evaluator else 0,
        schedule.total_batch,
    )
    writer = CheckpointWriter(
        dirs.folder / "checkpoints", dump_yaml(config), config.checkpoint.keep, note_saved,
        model_card.for_checkpoint, log.sync,
    )  # fmt: skip
    means = EpochMeans(schedule.steps_per_epoch)
    metrics_logger = MetricsLogger(log, config.log.every_steps, schedule.steps_per_epoch)
    is_distributed = comm.world_size() > 1
    parts = TrainingParts(
        train_step=train_step,
        batch_source=source,
        policies=policies.make_run_policies(train_step),
        stop=policies.stop,
        schedule=schedule,
        evaluations=Evaluations(
            evaluator, evaluated_model, config.evaluate.metric, evaluate_every,
            config.early_stopping, log,
        ),
        saving=Saving(writer, save_every, schedule.total_steps, dirs, log),
        log=log,
        epoch_means=means,
        record_sums=metrics_logger,
        # Users' callbacks come last, so that an error in one of them loses no record of the step.
        callbacks=[
            *([HeartbeatCallback()] if launcher_folder() or is_distributed else []),
            *([StragglerMonitor(log)] if is_distributed else []),
            metrics_logger,
            means,
            *_build_loggers(decisions, log, means, evaluator, pictures),
            *callbacks,
        ],
    )  # fmt: skip
    return Trainer(parts)


def _build_loggers(
    decisions: Decisions,
    log: RunLog,
    means: EpochMeans,
    evaluator: Evaluator | ClassificationEvaluator | None,
    pictures: EvaluationPictures,
) -> list[Callback]:
    """Builds the callbacks that report epochs and evaluations.

    Args: evaluator: None if nothing is evaluated.
    """
    steps = decisions.schedule.steps_per_epoch
    if evaluator is None:
        return [EpochLogger(log, means, steps)]
    max_detections = decisions.config.evaluate.max_detections
    return [
        EpochLogger(log, means, steps, evaluator.headline[:2]),
        EvaluationLogger(
            log,
            steps,
            show=partial(pictures.show, log),
            analyse=lambda step: analyse(evaluator.scored, evaluator.results, step, max_detections),
        ),
    ]


class Policies(NamedTuple):
    """The policies of a training run, which change its course but not its mathematics.

    step_policies: the step policies, except the averaging of weights, which `build_train_step`
        adds.
    make_run_policies: builds the run policies from the train step.
    stop: the stop request of this process.
    """

    step_policies: list[StepPolicy]
    make_run_policies: Callable[[TrainStep], list[RunPolicy]]
    stop: StopRequest


def build_policies(decisions: Decisions, source: BatchSource, log: RunLog) -> Policies:
    """Builds the policies of a training run, in the order in which they are consulted."""
    config, schedule = decisions.config, decisions.schedule
    stop, stand_in = StopRequest(), StandIn()
    ends: list[Stop | TimeLimit] = [Stop(stop)]
    if decisions.budget is not None:
        ends.append(TimeLimit(decisions.budget, schedule, log))

    def make_run_policies(train_step: TrainStep) -> list[RunPolicy]:
        bad_steps = BadSteps(decisions.dirs.folder, source, log)
        rollback = Rollback(train_step, config.train.bad_steps_limit, bad_steps, log)
        policies: list[RunPolicy] = [
            SkippedSteps(train_step, source, bad_steps, log),
            SmallerMicroBatches(stand_in, source, schedule.batch_size_per_card, log),
            rollback,
        ]
        if comm.world_size() > 1:
            check_every = config.distributed.check_weights_every
            policies.append(ReplicaCheck(train_step, check_every, rollback.roll_back_once, log))
        return [*policies, *ends]

    blocklist = BadImages(decisions.data.bad_images, log)
    return Policies([*ends, blocklist, stand_in, Outage()], make_run_policies, stop)


def intervals(
    config: ExperimentConfig, schedule: ScheduleSetup, exchange: Exchange
) -> tuple[int, int]:
    """Returns the optimizer steps between checkpoints (0: only best and last) and evaluations.

    Both are rounded up to the next step after which all ranks hold the same weights.
    """
    save_every = config.checkpoint.every_steps or 0
    if config.checkpoint.every_steps is None and config.checkpoint.every_epochs > 0:
        save_every = schedule.interval(config.checkpoint.every_epochs)
    evaluate_every = config.evaluate.every_steps or schedule.interval(config.evaluate.every_epochs)
    return exchange.next_synchronised(save_every), exchange.next_synchronised(evaluate_every)


def build_model(config: ExperimentConfig) -> ImageModel:
    """Builds a model with fresh weights, the same on every rank.

    The seed determines the weights.

    Raises: ConfigError: the model does not support the configured image sizes.
    """
    paddle.seed(config.seed)
    model = models.build_model(config.model)
    step = model.size_multiple
    sizes = [("model.image_size", config.model.image_size)]
    sizes += [("train.multi_scale", size) for size in config.train.multi_scale]
    for key, (height, width) in sizes:
        if height % step or width % step or min(height, width) < step:
            raise ConfigError(
                f"expected multiples of {step} pixels",
                code="image_size_not_multiple",
                where=f"{key}: [{height}, {width}]",
                fix=f"use a height of {_list_multiples(height, step)} and a width of "
                f"{_list_multiples(width, step)}",
            )
    return model


def _list_multiples(side: int, step: int) -> str:
    """Names the multiples of `step` next to a number of pixels: `320 or 352`."""
    below = side // step * step
    return " or ".join(
        f"{multiple}" for multiple in sorted({below, -(-side // step) * step}) if multiple
    )


def build_schedule_setup(
    config: ExperimentConfig, dataset_size: int, batches: MicroBatches | None = None
) -> ScheduleSetup:
    """Builds the schedule of a run.

    Args:
        dataset_size: samples of an epoch over all ranks.
        batches: micro-batches per step; None: as configured, for the current number of ranks.
    """
    world, ranks = comm.world_size(), config.distributed
    batches = batches or config.train.micro_batches(world)
    config = with_epochs(config, dataset_size, batches)
    if ranks.shares is not None:
        batches = replace(batches, speeds=ranks.speeds(world))
    return set_up_schedule(
        world=world,
        dataset_size=dataset_size,
        batches=batches,
        epochs=config.train.epochs,
        phases_factor=config.train.phases_factor,
        epochs_compensation=config.train.epochs_compensation,
        max_steps=last_step(config.train.max_steps, ranks),
        optimizer=config.optimizer,
        schedule=config.schedule,
        ema=config.train.ema,
        augment=config.data.augment,
    )


def with_epochs(
    config: ExperimentConfig, dataset_size: int, batches: MicroBatches
) -> ExperimentConfig:
    """Returns the configuration with `train.steps`, if set, converted to epochs on this data.

    Args: dataset_size, batches: as in `build_schedule_setup`.
    """
    steps = config.train.steps
    if steps is None:
        return config
    epochs = steps / math.ceil(dataset_size / min(batches.total_batch, dataset_size))
    train = config.train.model_copy(update={"epochs": epochs})
    return config.model_copy(update={"train": train})


def build_train_step(
    config: ExperimentConfig,
    schedule: ScheduleSetup,
    model: ImageModel,
    kernels: Kernels = BFLOAT16,
    class_names: Sequence[str] = (),
    policies: Sequence[StepPolicy] = (),
) -> TrainStep:
    """Combines model, loss, optimizer and EMA into one optimizer step.

    Every rank builds one.  On a CPU with `train.amp` the model's parameters stay float32, as
    master weights.

    Args:
        kernels: the CPU kernels of `train.amp`.
        class_names: names of classes 0, 1, ...; a teacher's classes are matched to them.
        policies: all step policies except the averaging of weights, which is put first.
    """
    train = config.train
    frozen = frozenset[str]() if train.freeze is None else freeze(model, train.freeze)
    distillation = None
    # Adds adapters to the model, so it must precede everything that lists the parameters.
    if config.distill is not None:
        distillation = build_distillation(
            config.distill, config.model, model, config.seed, class_names
        )
    if train.sync_bn:
        synchronize_batch_norm(model)
    low_precision = train.amp.enabled and train.amp.level == "O2" and device.on_accelerator()
    if low_precision:
        model = paddle.amp.decorate(models=model, level="O2", dtype=train.amp.dtype)
    loss = loss_of(config.model).build(
        config.loss, model, schedule.steps_per_written_epoch, schedule.reference_batch
    )
    if distillation is not None:
        loss = DistilledLoss(loss, distillation)
    optimizer = build_optimizer(
        model, schedule.scaled, schedule.lr_scheduler.peak_lr, master_weights=low_precision
    )
    trained = {key: p for key, p in model.named_parameters() if not p.stop_gradient}
    sharded = config.distributed.shard_optimizer and comm.world_size() > 1
    updater = ShardedUpdater(optimizer, model, trained) if sharded else Updater(optimizer, model)
    if train.ema.enabled:
        ema = EMA(model, schedule.ema_decay, frozen, schedule.ema_restart)
        policies = [AveragedWeights(ema, updater), *policies]
    return TrainStep(
        model,
        loss,
        updater,
        build_exchange(config.distributed, trained, optimizer, schedule.total_steps),
        build_precision(train.amp, kernels),
        policies,
        StepSettings(
            seed=config.seed,
            clip_norm=train.clip_norm,
            loss_divisor=float(schedule.batch_size_per_card),
            spread=schedule.batches.spread,
        ),
    )


def build_precision(amp: AmpConfig, kernels: Kernels) -> Precision:
    """Builds the precision in which a step computes.

    Args: kernels: the CPU kernels, because Paddle's autocast does nothing on a CPU.
    """
    if not amp.enabled:
        return Precision()
    if not device.on_accelerator():
        return Precision(partial(compute_in, kernels.at(amp.level)))
    autocast = partial(paddle.amp.auto_cast, dtype=amp.dtype, level=amp.level)
    return Precision(autocast, scales=amp.dtype == "float16")


def trial_policies() -> list[StepPolicy]:
    """Builds the policies of trial steps: no rank waits for one that lacks memory or images."""
    return [StandIn(), Outage()]


def build_batch_source(
    config: ExperimentConfig,
    train_set: DetectionSet,
    schedule: ScheduleSetup,
    plots: Path | None = None,
    put: Put = lambda name, write, size: write(),
) -> BatchSource:
    """Builds the source of this rank's training micro-batches.  Collective.

    Args:
        plots: folder for pictures of some of rank 0's batches; None: no pictures.
        put: writes the pictures, see `RunLog.put`.
    """
    augment = config.data.augment.with_epoch_scale(schedule.phase_scale)
    data, watch = config.data.model_copy(update={"augment": augment}), None
    if plots is not None and comm.is_main() and config.log.images:
        steps = schedule.steps_per_epoch
        epochs = -(-schedule.schedule_steps // steps)
        watch = BatchPictures(plots, train_set.class_names, data, steps, epochs, put).watching
    size = config.model.image_size
    return BatchSource(
        train_set,
        data,
        schedule,
        sizes=config.train.multi_scale or (size,),
        plain_size=size,
        seed=config.seed,
        watch=watch,
    )


def build_evaluator(
    config: ExperimentConfig,
    dataset: DetectionSet,
    model: ImageModel,
    observer: Observer | None = None,
    loss: Loss | None = None,
    nms: NMSConfig | None = None,
) -> Evaluator | ClassificationEvaluator:
    """Builds the evaluator for this rank's share of a split.

    Every rank builds one.

    Args:
        observer: called with each batch; None: no observer.
        loss: the training loss, to be measured as well; None: it is not measured.
        nms: the NMS settings of a detector; None: those of the configuration.
    """
    loader = EvalLoader(
        dataset,
        config.data,
        image_size=config.model.image_size,
        batch_size=config.evaluate.batch_size_per_card,
        rank=comm.rank(),
        world=comm.world_size(),
        ranks_on_host=comm.local_size(),
        shape_multiple=model.size_multiple if config.evaluate.rectangular else None,
        shape_pad=config.evaluate.rectangular_pad,
    )
    measured = None if loss is None else ValidationLoss(loss, loader, dataset.unreadable)
    if model.task == "classify":
        return ClassificationEvaluator(dataset, loader, observer=observer, loss=measured)
    return Evaluator(
        dataset,
        loader,
        nms or config.suppression,
        max_detections=config.evaluate.max_detections,
        observer=observer,
        loss=measured,
    )


def speed_up_cpu(config: ExperimentConfig, models: list[ImageModel]) -> str:
    """Divides the host's cores among its ranks and enables oneDNN.  Collective.

    OMP_NUM_THREADS, if set, overrides the cores per rank.  Convolutions on a CPU use oneDNN if the
    results match Paddle's own on every rank.

    Call it after reading the data: once it has run, freed memory is kept for the next step.

    Returns: a warning if the convolutions differ; else "".
    """
    comm.keep_freed_memory()
    if device.on_accelerator():
        return ""
    if given_threads() is None:
        paddle_api.set_num_threads(max(1, int(available_cores() / comm.local_size())))
    if config.train.cpu_kernels == "plain":
        return ""
    model, size = models[0], 2 * models[0].size_multiple
    facts = [config.model.model_dump(mode="json"), size, digests_of_code()]
    reason = check_once(lambda: self_check(model, size), facts)
    comm.barrier()  # a slow machine may need longer than the timeout of a collective
    failures = comm.all_reduce_sum(paddle.to_tensor([float(reason is not None)]))
    if failures.item() > 0:
        return (
            f"oneDNN's layers failed their self-check ({reason or 'on another rank'}); using "
            f"Paddle's plain ones, which are slower"
        )
    for model in models:
        use_onednn(model)
    return ""


def check_low_precision(
    config: ExperimentConfig, model: ImageModel, slow: str, kernels: Kernels
) -> float:
    """Checks bfloat16 on a CPU with the model to be trained.  Collective.

    Compares every kind of layer and the whole model, forward and backward, with Paddle in float32.

    Args: slow: what `speed_up_cpu` returned.
    Returns: CPU time of layers in bfloat16 as a multiple of float32's, measured by rank 0.
    Raises: ConfigError, on every rank: results differ on some rank.
    """
    amp = config.train.amp
    kernels = kernels.at(amp.level)
    problem = slow or self_check(model, 2 * model.size_multiple, kernels)
    cost = measure_cost(kernels) if comm.is_main() and not problem else 0.0
    comm.barrier()  # as in `speed_up_cpu`
    checks_W = comm.all_gather_object((problem and f"{comm.host()}: {problem}", cost))
    failures = [failure for failure, _ in checks_W if failure]
    if failures:
        raise ConfigError(
            f"true, but {amp.dtype} failed its self-check against float32 on host {failures[0]}",
            code="amp_self_check",
            where="train.amp.enabled",
            fix="set train.amp.enabled: false, or train.amp.level: O1 where O2 fails",
        )
    return checks_W[0][1]
