"""Measures the speed of training steps, by part.

The steps are those of the trainer, on its own batches, built as `ppdist train` builds them.
"""

import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any

import paddle

from ppdist.common.errors import ConfigError
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.types import Batch
from ppdist.distributed import comm, device, store
from ppdist.engine.build import build_training
from ppdist.engine.clock import Clock
from ppdist.engine.parts import TrainData
from ppdist.engine.trainer import Trainer

Report = dict[str, Any]
PARTS = ("data", "teacher", "forward", "loss", "backward", "optimizer", "communication")


def describe_machine() -> Report:
    """Describes the machine and software that the numbers were measured on."""
    return {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "paddle": paddle.__version__,
        "device": paddle.device.get_device(),
        "ranks": comm.world_size(),
    }


def _processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measure_training(config: ExperimentConfig, *, steps: int, warmup: int, scratch: Path) -> Report:
    """Measures the speed of training steps.  Collective.

    Args:
        warmup: steps before the measured ones.
        scratch: folder for the files that a run writes.
    Returns: means over the measured steps (for all ranks: `images_per_second`, `images_per_step`;
        for this rank: `cpu_seconds_per_step` of all threads, and `sent_bytes_per_step` over TCP,
        None if unknown), `losses` and
        `first_step_seconds` of all steps; the peak RSS of this rank in MB, and the peaks of its
        card (0 on the CPU).  In `seconds`, `communication` is the wait for the last small
        all-reduce; gradients are averaged in `backward` on GPUs, in `optimizer` on the CPU.
    """
    # Stdout is reserved for the JSON.
    with redirect_stdout(sys.stderr):
        experiment = build_training(
            config, output_dir=scratch, evaluate=False, command=["benchmark"]
        )
        experiment.log.close()
    trainer = experiment.trainer
    batches = _endless(trainer.batch_source)
    all_rows = [measure_step(trainer, next(batches), number) for number in range(warmup + steps)]
    rows = all_rows[warmup:]
    images, wall = fmean(row["images"] for row in rows), fmean(row["wall"] for row in rows)
    sent = [row["sent"] for row in rows if row["sent"] is not None]
    return {
        "images_per_second": images / wall,
        "step_seconds": wall,
        "cpu_seconds_per_step": fmean(row["cpu"] for row in rows),
        "seconds": {part: fmean(row["parts"].get(part, 0.0) for row in rows) for part in PARTS},
        "first_step_seconds": all_rows[0]["wall"],
        "images_per_step": images,
        "sent_bytes_per_step": round(fmean(sent)) if sent else None,
        "steps": steps,
        "losses": [row["loss"] for row in all_rows],
        "skipped_steps": sum(not row["applied"] for row in all_rows),
        "peak_allocated_bytes": device.peak_allocated_bytes(),
        "peak_reserved_bytes": device.peak_reserved_bytes(),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": sum(p.size for p in trainer.train_step.model.parameters()),
    }


def measure_step(trainer: Trainer, batches: Iterator[Batch], number: int) -> Report:
    """Times one optimizer step, with a GPU synchronised after every part.

    Args:
        batches: the batches of this step.
        number: number of the step; numbers beyond the end of the run start over from its first.
    """
    schedule = trainer.schedule
    # Learning rates are defined only for the steps of the run.
    number %= schedule.total_steps
    rates = schedule.lr_scheduler.rates(number)
    clock, sent = Clock(synchronize=True), store.sent_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    result = trainer.train_step(batches, number, rates, clock)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    sent_after = store.sent_bytes()
    return {
        "wall": wall,
        "cpu": cpu,
        "parts": dict(clock.seconds),
        "loss": result.losses["loss"],
        "applied": result.applied,
        "images": result.images,
        "sent": None if sent is None or sent_after is None else sent_after - sent,
    }


def _endless(batch_source: TrainData) -> Iterator[Iterator[Batch]]:
    """Yields the batches of each step of the run, repeating the run endlessly."""
    while True:
        yield from batch_source.steps(0, None)


def require_detector(config: ExperimentConfig, purpose: str) -> None:
    """Checks that the model is a detector.

    Raises: ConfigError: the model is a classifier.
    """
    if config.model.task == "classify":
        raise ConfigError(
            f"{config.model.name} is a classifier, but {purpose} measures detectors only; "
            "classifiers support train and loader",
            code="needs_detector",
            where="model.name",
        )
