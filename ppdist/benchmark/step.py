"""Measured speed of training steps and evaluations, by part.

Steps are those of the trainer, on its own batches, built as `ppdist train` builds them.  Two
variants are compared in one process with their steps interleaved (A B, B A, ...), because on a
shared machine two separate runs differ by more than most changes do; the ratio of neighbours does
not.
"""

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import paddle

from ppdist.benchmark.interleaved import wait_for_slice
from ppdist.common.errors import ConfigError
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.types import Batch, DetectionSet
from ppdist.distributed import comm, device, store
from ppdist.engine.build import (
    build_evaluator,
    build_schedule_setup,
    build_training,
    loss_of,
    speed_up_cpu,
)
from ppdist.engine.data import BatchSource
from ppdist.engine.evaluator import Evaluator
from ppdist.engine.train_step import Clock, TrainStep
from ppdist.engine.trainer import Trainer
from ppdist.models.base import Detector
from ppdist.optim.grad_sync import AllReduceSync

Report = dict[str, Any]
# Where ranks join.
_SETTLED_ONCE = ("device", "distributed.bucket_mb", "distributed.timeout_seconds")
PARTS = ("data", "teacher", "forward", "loss", "backward", "optimizer", "communication")


def machine() -> Report:
    """What the numbers were measured on."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "paddle": paddle.__version__,
        "device": paddle.device.get_device(),
        "ranks": comm.world_size(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass
class _Variant:
    """One configuration under test, with what its steps took."""

    name: str
    trainer: Trainer
    batches: Iterator[Batch]
    every: int = 1  # steps from one with all communication to the next
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0  # steps that no rank applied
    images: list[int] = field(default_factory=list)
    sent: list[int | None] = field(default_factory=list)

    def step(self) -> None:
        """Times one optimizer step; synchronises a GPU after every part."""
        schedule = self.trainer.schedule
        number = len(self.wall) % schedule.total_steps  # see _endless
        wall, cpu = time.perf_counter(), time.process_time()
        paused = wait_for_slice()
        sent = store.sent_bytes()
        clock = Clock(synchronize=True)
        rates = schedule.lr_scheduler.rates(number)
        numbers = self.trainer.batch_source.numbers(number)
        result = self.trainer.train_step(self.batches, numbers, number, rates, False, clock)
        self.wall.append(time.perf_counter() - wall - paused)
        self.cpu.append(time.process_time() - cpu)
        self.parts.append(dict(clock.seconds))
        self.losses.append(result.losses["loss"])
        self.skipped += not result.applied
        self.images.append(result.images)
        after = store.sent_bytes()
        self.sent.append(None if sent is None or after is None else after - sent)

    def report(self, warmup: int) -> Report:
        """Statistics of the steps after `warmup`, see `_typical`.

        Bytes are averaged.
        """
        sent = [each for each in self.sent[warmup:] if each is not None]
        wall, images = self._typical(self.wall[warmup:]), self._typical(self.images[warmup:])
        return {
            "images_per_second": images / wall,  # of all ranks
            "step_seconds": wall,
            "cpu_seconds_per_step": self._typical(self.cpu[warmup:]),  # of this rank, all threads
            "seconds": {
                part: self._typical([parts.get(part, 0.0) for parts in self.parts[warmup:]])
                for part in PARTS
            },
            "first_step_seconds": self.wall[0],
            "images_per_step": images,
            "sent_bytes_per_step": round(fmean(sent)) if sent else None,  # of this rank, over TCP
            "steps": len(self.wall) - warmup,
            "losses": self.losses,
            "skipped_steps": self.skipped,
        }

    def _typical(self, steps: Sequence[float]) -> float:
        """Median over periods of the mean step.

        If ranks synchronise in one step of many, as with `distributed.sync_every`, the median over
        steps would hide what that one takes.
        """
        return median(_means(steps, self.every))


def measure_training(
    variants: Mapping[str, ExperimentConfig], *, steps: int, warmup: int, scratch: Path
) -> Report:
    """Speed of training steps; steps of several variants are interleaved.  Collective.

    Args:
        variants: name -> configuration.  With equal seed and data they see equal batches.
        steps: measured steps of each, rounded up to whole periods of `distributed.sync_every`;
            warmup: steps before them that are not counted.
        scratch: folder for what a run writes.

    Returns: `variants` (name -> rates and seconds), peak RSS of this rank in MB, the
        peaks of its card (0 on the CPU), and of every
        variant after the first its comparison with the first under `against <name of the first>`:
        `wall_ratio` and `cpu_ratio` are medians over pairs of neighbouring steps of
        other / first (2 means the first is twice as fast), and the largest relative difference of
        their losses.  `communication` is the wait for the last small all-reduce; gradients are
        averaged inside `backward` on GPUs, `optimizer` on CPU, and `gradient_all_reduce_seconds`
        is what that takes alone, in the first variant.
    Raises: ConfigError: the variants differ in what is settled once for a process.
    """
    _require_same_process(variants)
    running = [
        _start(name, config, scratch / str(index))
        for index, (name, config) in enumerate(variants.items())
    ]
    period = math.lcm(*(variant.every for variant in running))
    for number in range(warmup + math.ceil(steps / period) * period):
        for variant in running if number % 2 == 0 else reversed(running):
            variant.step()
    first, *others = running
    report: Report = {
        "variants": {variant.name: variant.report(warmup) for variant in running},
        "peak_allocated_bytes": device.peak_allocated_bytes(),
        "peak_reserved_bytes": device.peak_reserved_bytes(),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": sum(p.size for p in first.trainer.train_step.model.parameters()),
    }
    if comm.world_size() > 1:
        report["gradient_all_reduce_seconds"] = _averaging_seconds(first.trainer.train_step)
    for other in others:
        report["variants"][other.name][f"against {first.name}"] = _compare(first, other, warmup)
    return report


def _require_same_process(variants: Mapping[str, ExperimentConfig]) -> None:
    (base, first), *others = variants.items()
    for name, config in others:
        for key in _SETTLED_ONCE:
            of_both = [attrgetter(key)(each) for each in (first, config)]
            if of_both[0] != of_both[1]:
                raise ConfigError(
                    f"{of_both[1]} in the variant {name!r}, {of_both[0]} in {base!r}: "
                    "a process can only set it once",
                    code="variants_not_comparable",
                    where=key,
                    fix="measure the two in separate runs",
                )


def _start(name: str, config: ExperimentConfig, folder: Path) -> _Variant:
    with redirect_stdout(sys.stderr):
        experiment = build_training(
            config, output_dir=folder, evaluate=False, command=["benchmark"]
        )
        experiment.log.close()
    trainer = experiment.trainer
    every = trainer.train_step.grad_sync.every
    return _Variant(name, trainer, _endless(trainer.batch_source), every)


def _endless(batch_source: BatchSource) -> Iterator[Batch]:
    """The batches of the run, repeated if more steps are measured."""
    while True:
        yield from batch_source.batches(0, None)


def _compare(first: _Variant, other: _Variant, warmup: int) -> Report:
    period = math.lcm(first.every, other.every)

    def ratio(ours: list[float], theirs: list[float]) -> float:
        pairs = zip(_means(ours[warmup:], period), _means(theirs[warmup:], period))
        return median(b / a for a, b in pairs)

    differences = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(first.losses, other.losses)]
    return {
        "wall_ratio": ratio(first.wall, other.wall),
        "cpu_ratio": ratio(first.cpu, other.cpu),
        "largest_relative_loss_difference": max(differences),
    }


def _means(steps: Sequence[float], period: int) -> list[float]:
    """The mean step of every period."""
    return [fmean(steps[at : at + period]) for at in range(0, len(steps), period)]


@paddle.no_grad()
def _averaging_seconds(train_step: TrainStep, repeats: int = 5) -> float:
    """Median time per step of averaging all ranks' gradients, after backward.

    With sync_every it averages their weights instead.  It averages as the run does, except for
    the time, and spoils what these have learned.
    """
    own = train_step.grad_sync
    grad_sync = AllReduceSync() if own.during_backward else own
    weights = [each for each in train_step.model.parameters() if not each.stop_gradient]
    gradients, seconds = [paddle.zeros(each.shape) for each in weights], []
    for _ in range(repeats + 1):
        comm.barrier()
        began = time.perf_counter()
        for number in range(grad_sync.every):
            grad_sync.gradients(gradients, 1.0)
            grad_sync.updated(number)
        float(gradients[-1].sum())  # waits for a GPU
        seconds.append((time.perf_counter() - began) / grad_sync.every)
    return median(seconds[1:])


def measure_evaluation(
    config: ExperimentConfig, dataset: DetectionSet, model: Detector, repeats: int
) -> Report:
    """An evaluation as training makes it, validation loss included.  Collective.

    Workers are started and kernels chosen in one before the first that counts.

    Returns: medians; `parts` are the seconds of each rank, see `Evaluator.clock`; `boxes` of all
        images; `metrics` of the last evaluation.
    Raises: ConfigError: the model is a classifier.
    """
    require_detector(config, "evaluation")
    schedule = build_schedule_setup(config, len(dataset.records))
    loss = loss_of(config.model).build(
        config.loss, model, schedule.steps_per_written_epoch, schedule.reference_batch
    )
    speed_up_cpu(config, [model])
    evaluator = build_evaluator(config, dataset, model, loss=loss)
    assert isinstance(evaluator, Evaluator)
    boxes = len(evaluator.predict(model))
    whole, parts = [], []
    for _ in range(repeats):
        comm.barrier()
        began = time.perf_counter()
        metrics = evaluator.evaluate(model)
        whole.append(time.perf_counter() - began)
        parts.append(comm.all_gather_large_object(evaluator.clock.seconds))
    seconds = median(whole)
    return {
        "images": len(dataset.records),
        "images_per_second": len(dataset.records) / seconds,
        "seconds": seconds,
        "parts": [
            {name: median(each[rank][name] for each in parts) for name in parts[0][rank]}
            for rank in range(comm.world_size())
        ],
        "boxes": boxes,
        "metrics": {name: value for name, value in metrics.items() if name != "eval_seconds"},
    }


def require_detector(config: ExperimentConfig, what: str) -> None:
    """Raises: ConfigError: the model is a classifier."""
    if config.model.task == "classify":
        raise ConfigError(
            f"{config.model.name} is a classifier, but {what} measures detectors only; "
            "classifiers support train and loader",
            code="needs_detector",
            where="model.name",
        )
