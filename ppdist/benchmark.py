"""Measured speed of the product's own parts: training step, loader, evaluation, inference, scaling.

Every function returns plain data for JSON.  Training is measured on the trainer's own step and
batches, built as `tools/train.py` builds them.  Two variants are compared in one process with their
steps taken in turns (A B, B A, ...), because on a shared machine two separate runs differ by more
than most changes do; the ratio of neighbours does not.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ppdist import dist
from ppdist.data import loading_speed
from ppdist.data.sample import Batch, DetectionSet
from ppdist.engine.experiment import build_evaluator, build_training
from ppdist.engine.step import Clock
from ppdist.engine.trainer import Trainer
from ppdist.errors import ConfigError, LaunchError
from ppdist.export import export_detector
from ppdist.infer_spec import describe
from ppdist.inference import EagerPredictor, measure_predictor
from ppdist.models.detector import Detector

if TYPE_CHECKING:
    from ppdist.engine.experiment import ExperimentConfig

Report = dict[str, Any]
PARTS = ("data", "forward", "loss", "backward", "optimizer", "communication")


def machine() -> Report:
    """What the numbers were measured on."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "paddle": paddle.__version__,
        "device": paddle.device.get_device(),
        "ranks": dist.world_size(),
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
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)

    def step(self) -> None:
        """One optimizer step of the run, timed; a GPU is waited for at the end of every part."""
        derived, number = self.trainer.derived, len(self.wall)
        clock = Clock(synchronize=True)
        wall, cpu = time.perf_counter(), time.process_time()
        rates = derived.schedule.rates(number)
        result = self.trainer.train_step(
            self.batches, derived.accumulate_steps, number, rates, False, clock
        )
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        self.parts.append(dict(clock.seconds))
        self.losses.append(result.losses["loss"])
        self.images.append(result.images)

    def report(self, warmup: int) -> Report:
        """Medians over the steps after the first `warmup`."""
        wall, images = median(self.wall[warmup:]), median(self.images[warmup:])
        return {
            "images_per_second": images / wall,  # of all ranks
            "step_seconds": wall,
            "cpu_seconds_per_step": median(self.cpu[warmup:]),  # of this rank, all threads
            "seconds": {
                part: median(parts.get(part, 0.0) for parts in self.parts[warmup:])
                for part in PARTS
            },
            "first_step_seconds": self.wall[0],
            "images_per_step": images,
            "steps": len(self.wall) - warmup,
            "losses": self.losses,
        }


def measure_training(
    variants: Mapping[str, "ExperimentConfig"], *, steps: int, warmup: int, scratch: Path
) -> Report:
    """Speed of training steps; several variants take their steps in turns.  Every rank calls it.

    Args:
        variants: name -> configuration.  With equal seed and data they see equal batches.
        steps: measured steps of each; warmup: steps before them that are not counted.
        scratch: folder for what a run writes.

    Returns: `variants` (name -> rates and seconds), peak RSS of this rank in MB, and of every
        variant after the first its comparison with the first under `against <name of the first>`:
        `wall_ratio` and `cpu_ratio` are medians over pairs of neighbouring steps of
        other / first (2 means the first is twice as fast), and the largest relative difference of
        their losses.  `communication` is the wait for the last small all-reduce; the one of the
        gradients is inside `backward`, and `gradient_all_reduce_seconds` is what it takes alone.
    """
    running = [
        _start(name, config, scratch / str(index))
        for index, (name, config) in enumerate(variants.items())
    ]
    for number in range(warmup + steps):
        for variant in running if number % 2 == 0 else reversed(running):
            variant.step()
    first, *others = running
    report: Report = {
        "variants": {variant.name: variant.report(warmup) for variant in running},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if dist.world_size() > 1:
        size = sum(p.size for p in first.trainer.train_step.model.parameters())
        report["gradient_all_reduce_seconds"] = _all_reduce_seconds(size)
    for other in others:
        report["variants"][other.name][f"against {first.name}"] = _compare(first, other, warmup)
    return report


def _start(name: str, config: "ExperimentConfig", folder: Path) -> _Variant:
    with redirect_stdout(sys.stderr):
        experiment = build_training(
            config, output_dir=folder, evaluate=False, resume=None, command=["benchmark"]
        )
        experiment.log.close()
    return _Variant(name, experiment.trainer, experiment.trainer.feed.batches(0, None))


def _compare(first: _Variant, other: _Variant, warmup: int) -> Report:
    def ratio(ours: list[float], theirs: list[float]) -> float:
        return median(b / a for a, b in list(zip(ours, theirs))[warmup:])

    differences = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(first.losses, other.losses)]
    return {
        "wall_ratio": ratio(first.wall, other.wall),
        "cpu_ratio": ratio(first.cpu, other.cpu),
        "largest_relative_loss_difference": max(differences),
    }


def _all_reduce_seconds(size: int, repeats: int = 5) -> float:
    """Median time of summing `size` float32 values over all ranks, in one message."""
    values, seconds = paddle.zeros([size]), []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        float(dist.all_reduce_sum(values)[0])  # waits for a GPU
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def measure_loading(
    config: "ExperimentConfig", dataset: DetectionSet, seconds: float, epochs: int
) -> Report:
    """Images per second of the training loader, and its memory; see loading_speed."""
    return loading_speed.measure_loading(
        dataset,
        config.data,
        image_size=config.model.image_size,
        batch_size=config.train.batch_size_per_card,
        seconds=seconds,
        epochs=epochs,
    )


def measure_evaluation(
    config: "ExperimentConfig", dataset: DetectionSet, model: Detector, repeats: int
) -> Report:
    """Seconds of evaluating a split: finding boxes on all ranks, then scoring them.

    Raises: ConfigError: the model is a classifier.
    """
    _require_detector(config, "evaluation")
    evaluator = build_evaluator(config, dataset, model)
    finding, whole = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        evaluator.predict(model)
        finding.append(time.perf_counter() - began)
        began = time.perf_counter()
        metrics = evaluator.evaluate(model)
        whole.append(time.perf_counter() - began)
    return {
        "images": len(dataset.records),
        "images_per_second": len(dataset.records) / median(whole),
        "seconds": median(whole),
        "seconds_of_detection": median(finding),
        "mAP": metrics["mAP"],
    }


def _require_detector(config: "ExperimentConfig", what: str) -> None:
    if config.data.classifies:
        raise ConfigError(
            f"model.name: {config.model.name} is a classifier, but {what} is measured of detectors "
            "alone; of classifiers train and loader are"
        )


def measure_inference(
    config: "ExperimentConfig", model: Detector, *, batch: int, threads: int, repeats: int
) -> Report:
    """Milliseconds of one call, pixels in and boxes out: eager, and exported on CPU with and
    without oneDNN.  One process.

    Raises: ConfigError: the model is a classifier.
    """
    _require_detector(config, "inference")
    height, width = config.model.image_size
    images = np.random.default_rng(0).integers(0, 256, (batch, 3, height, width))
    predict, milliseconds = EagerPredictor(model, config.nms), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        predict(images.astype(np.float32))
        milliseconds.append(1000 * (time.perf_counter() - began))
    middle = median(milliseconds[1:])
    report: Report = {
        "batch": batch,
        "image_size": [height, width],
        "threads_of_exported": threads,
        "eager": {"median_ms": middle, "images_per_second": 1000 * batch / middle},
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "exported"
        export_detector(model, directory, describe(config, None))
        for name, onednn in (("exported", False), ("exported, oneDNN", True)):
            report[name] = measure_predictor(
                directory, config.model.image_size, batch, threads, onednn, repeats
            )
    return report


def measure_scaling(
    launcher: Sequence[str], script: Sequence[str], *, counts: Sequence[int], rounds: int
) -> Report:
    """Training speed on several numbers of processes, the numbers taken in turns `rounds` times.

    Args:
        launcher: command of fleetrun without its options.
        script: `tools/benchmark.py train ...` without --json.
    Returns: for each count images_per_second of all ranks (median of rounds), and speed_up and
        efficiency against the first count.  On CPU one process already uses several cores for its
        convolutions, so its share of the machine is not 1 / count.
    Raises: LaunchError: a run failed; its stderr went to ours.
    """
    rates: dict[int, list[float]] = {count: [] for count in counts}
    reports: dict[int, Report] = {}
    for _ in range(rounds):
        for count in counts:
            reports[count] = _launch(launcher, script, count)
            result = next(iter(reports[count]["result"]["variants"].values()))
            rates[count].append(result["images_per_second"])
    base = median(rates[counts[0]])
    return {
        str(count): {
            "images_per_second": median(rates[count]),
            "of_rounds": rates[count],
            "speed_up": median(rates[count]) / base,
            "efficiency": median(rates[count]) / base * counts[0] / count,
            "last_round": reports[count]["result"],
        }
        for count in counts
    }


def _launch(launcher: Sequence[str], script: Sequence[str], count: int) -> Report:
    gpu = paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    cards = f"0-{count - 1}" if count > 1 else "0"
    choice = ["--selected_gpus", cards] if gpu else ["--nproc_per_node", str(count)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [*launcher, *choice, "--log_dir", f"{folder}/log", *script, "--json", str(file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode or not file.exists():
            raise LaunchError(
                f"the run on {count} processes ended with exit code {done.returncode}: "
                f"{' '.join(command)}"
            )
        return json.loads(file.read_text(encoding="utf-8"))
