"""Messages at the start of a run: warnings and details of its parts, and its headlines."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import paddle

from ppdist.common.machine import available_cores
from ppdist.common.run_log import RunLog
from ppdist.config.evaluate import METRIC_TEXTS
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm, device
from ppdist.engine.schedule_setup import ScheduleSetup, counted
from ppdist.models.complexity import Complexity

_NAMES = 3  # number of classes listed


class About(IntEnum):
    """Subjects of messages, in the order in which warnings are shown."""

    IMAGES = 0  # from the check of the images
    MACHINE = 1  # preflight, and the lock of the output folder
    START = 2  # the checkpoint that the run continues
    RUN = 3  # model, data and configuration


@dataclass(frozen=True)
class Message:
    """A line for the log; if `warns`, for the console as well."""

    text: str
    about: About
    warns: bool


@dataclass
class Messages:
    """Messages from all parts that make up a run."""

    _all: list[Message] = field(default_factory=list)

    def warn(self, about: About, texts: Iterable[str]) -> None:
        """Adds warnings."""
        self._all += [Message(text, about, True) for text in texts]

    def detail(self, texts: Iterable[str]) -> None:
        """Adds details for train.log."""
        self._all += [Message(text, About.RUN, False) for text in texts]

    def warnings(self, first: About = About.IMAGES) -> list[str]:
        """Returns the texts of the warnings in order, starting with those about `first`."""
        ordered = sorted(self._all, key=lambda message: message.about)
        return [message.text for message in ordered if message.warns and message.about >= first]

    def write(self, log: RunLog, codes: Mapping[str, str]) -> None:
        """Writes all messages to the log of the run: warnings first.

        Args: codes: text -> code, for the warnings that have a code.
        """
        for text in self.warnings():
            log.warning(text, codes.get(text, ""))
        for message in self._all:
            if not message.warns:
                log.detail(message.text)


def data_line(config: ExperimentConfig, train: DetectionSet, val: DetectionSet | None) -> str:
    """Describes the data, for the start line of a run.

    For example `bccd: train 205 images, val 87; 3 classes: RBC, WBC, Platelets`.
    """
    names = train.class_names
    more = ", ..." if len(names) > _NAMES else ""
    validate = "no validation" if val is None else f"val {len(val.records)}"
    name = str(config.data.root).rstrip("/").rpartition("/")[2]
    # The line names the classes.
    selection = config.data.model_copy(update={"classes": ()}).describe_selection()
    return (
        f"{name}: train {counted(len(train.records), 'image')}, {validate}; "
        f"{counted(len(names), 'class', 'es')}: {', '.join(names[:_NAMES])}{more}"
        + (f"; {selection}" if selection else "")
    )


def model_line(config: ExperimentConfig, size: Complexity, anew: bool) -> str:
    """Describes the model, for the start line of a run.

    For example `yolov5 n, 1.77 M parameters, 0.28 GFLOPs at 160 x 160, from yolov5n_coco`.
    """
    model = config.model
    words = (model.name, *(str(getattr(model, key, "")) for key in ("variant", "size")))
    name = " ".join(dict.fromkeys(filter(None, words)))  # RT-DETR's first variant has its name
    start = f"from {Path(model.pretrained).name}" if model.pretrained else "from scratch"
    return f"{name}, {size.describe(model.image_size)}, {start if anew else 'resumed'}"


def device_line() -> str:
    """Describes the devices: `CPU, 1 process on 4 cores`, `8 x NVIDIA H100 80GB on 2 hosts`."""
    world = comm.world_size()
    hosts = math.ceil(world / max(1, comm.local_size()))
    where = f" on {hosts} hosts" if hosts > 1 else ""
    if device.on_accelerator():
        return f"{world} x {_read_card_name()}{where}"
    return f"CPU, {counted(world, 'process', 'es')} on {available_cores():g} cores{where}"


def train_line(schedule: ScheduleSetup) -> str:
    """Describes the training, for the start line of a run.

    For example `30 epochs of 13 steps, 16 images a step; adamw, learning rate 0.001`; with several
    micro-batches, each of which is a batch-norm group, the line says how the ranks share them.  If
    the run does not consist of whole epochs, the line begins with its steps.
    """
    world, steps = schedule.world, schedule.total_steps
    shared = "" if schedule.batches.count == 1 else f", {schedule.batches.describe(world)}"
    in_all = " in all" if world > 1 else ""
    epochs = counted(round(steps / schedule.steps_per_epoch, 2), "epoch")
    length = f"{epochs} of {counted(schedule.steps_per_epoch, 'step')}"
    if steps % schedule.steps_per_epoch:
        length = f"{counted(steps, 'step')}, {length}"
    return (
        f"{length}, {counted(schedule.step_images, 'image')} a step{in_all}{shared}; "
        f"{schedule.optimizer.name}, learning rate {schedule.scaled.lr:.3g}"
    )


def longer_line(schedule: ScheduleSetup) -> str:
    """Describes how the total batch lengthens warm-up or epochs; "" if it does not.

    For example `warm-up 4590 steps (10 epochs) instead of 2295, 89 epochs instead of 80: a step has
    4 times the reference batch`; if a rule cuts the warm-up, the line names it.
    """
    warm, written = schedule.lr_scheduler.warmup_steps, schedule.written_warmup
    changes = []
    if warm > written:
        epochs = counted(round(warm / schedule.steps_per_epoch, 2), "epoch")
        bound = f", {schedule.warmup_bound}," if schedule.warmup_bound else ""
        changes.append(f"warm-up {counted(warm, 'step')} ({epochs}){bound} instead of {written}")
    if schedule.epoch_scale > 1:
        epochs = counted(round(schedule.epochs * schedule.epoch_scale, 2), "epoch")
        changes.append(f"{epochs} instead of {schedule.epochs:g}")
    if not changes:
        return ""
    return f"{', '.join(changes)}: a step has {schedule.batch_ratio:.4g} times the reference batch"


def evaluate_line(config: ExperimentConfig, val: DetectionSet | None) -> str:
    """Describes the evaluations, for the start line of a run.

    For example `every 8 epochs, on 87 images; the best mAP is kept`.
    """
    if val is None:
        return "not during training"
    metric = config.evaluate.metric or ("mAP" if config.model.task == "detect" else "top1")
    best = METRIC_TEXTS.get(metric, metric)
    images = counted(len(val.records), "image")
    return f"{evaluation_interval(config)}, on {images}; the best {best} is kept"


def evaluation_interval(config: ExperimentConfig) -> str:
    """Describes how often a run evaluates: `every 8 epochs`, `every 500 steps`."""
    steps, epochs = config.evaluate.every_steps, config.evaluate.every_epochs
    every, unit = (epochs, "epoch") if steps is None else (steps, "step")
    return f"each {unit}" if every == 1 else f"every {every} {unit}s"


def _read_card_name() -> str:
    try:
        return str(paddle.device.cuda.get_device_name())
    except Exception:  # a card of another vendor; drivers raise errors of their own
        return device.kind()
