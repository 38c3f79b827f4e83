"""Measures the table of models: parameters, operations, CPU time and memory of every recipe."""

import time
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks.inference import at_threshold, versions
from ppdist.common import process
from ppdist.common.files import write_text
from ppdist.common.machine import available_memory
from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.runtime import Backend
from ppdist.config.shipped import short_names
from ppdist.distributed import device
from ppdist.engine.auto_batch import HOST, job_of, trial_of
from ppdist.engine.build import build_model
from ppdist.export.export import export_model
from ppdist.export.spec import describe
from ppdist.lab.benchmark.latency import make_predictors, prepare, sample_images
from ppdist.lab.benchmark.step import describe_machine
from ppdist.models.complexity import complexity

FIGURES = Path(__file__).resolve().parents[1] / "ppdist/models/figures.yml"
IMAGES, OBJECTS = 2, 20  # of the step whose memory is measured: images, objects in an image
_SECONDS = 1800  # of that step
_FRESH = {"pretrained": None}
_RUNTIMES: tuple[Backend, ...] = ("onnx",)
_HEAD = """\
# Figures of the shipped recipes: `python -m benchmarks models [--names NAME ...]` writes them here.
#
# Each model is measured as its recipe has it: input size, 80 classes, float32, fresh weights.
# parameters_M: millions, as trained; gflops: of one image, a multiplication and an addition are 2;
# ms: CPU milliseconds of one image in ONNX Runtime on one thread, the lowest of many calls, without
# what suppression takes of a trained model; step_MB: memory of a training step of {images} images
# on a CPU, with everything that a run holds between steps (MB: 1e6 bytes).
"""


def measure_models(names: list[str], scratch: Path, *, rounds: int) -> dict[str, Any]:
    """Measures recipes and writes their rows to FIGURES; others that this machine measured stay.

    Args: names: short names of recipes; []: all.  rounds: calls of each exported model.
    Returns: the contents of FIGURES.
    """
    chosen = {name: load_config(short_names()[name]) for name in names or short_names()}
    for name, config in chosen.items():
        _write_row(name, _count(config))  # of all at once: the rest may take hours
    for name, config in chosen.items():
        if config.model.task != "detect":
            continue  # a classifier has neither boxes to suppress nor a peer in the table
        fresh = config.model_copy(update={"model": config.model.model_copy(update=_FRESH)})
        row = _measure(fresh, scratch / name, rounds)
        _write_row(name, row)
        process.say(f"{name}: {row}")
    return read_figures()


def _write_row(name: str, row: dict[str, Any]) -> None:
    """Adds figures to the row of a recipe; drops all rows that another machine measured."""
    figures = {"machine": describe_machine()["processor"], "versions": versions()}
    before = read_figures()
    same = all(before.get(key) == value for key, value in figures.items())
    rows = before["models"] if same else {}
    rows = rows | {name: rows.get(name, {}) | row}
    figures["models"] = {recipe: rows[recipe] for recipe in short_names() if recipe in rows}
    text = yaml.safe_dump(figures, sort_keys=False, width=200, default_flow_style=None)
    write_text(FIGURES, _HEAD.format(images=IMAGES) + text)


def read_figures() -> dict[str, Any]:
    """Reads FIGURES; {}: there is no such file yet."""
    return yaml.safe_load(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}


def _count(config: ExperimentConfig) -> dict[str, float]:
    with device.on_cpu():
        size = complexity(build_model(config))
    return {
        "parameters_M": round(size.parameters / 1e6, 2),
        "gflops": round(1e-9 * size.operations.of(config.model.image_size), 1),
    }


def _measure(config: ExperimentConfig, folder: Path, rounds: int) -> dict[str, Any]:
    with device.on_cpu():
        model: Any = build_model(config)
        milliseconds = _time_prediction(config, model, folder, rounds)
        job = job_of(config, OBJECTS, images=1000)
    limits = {HOST: available_memory()}
    used, reason = trial_of(job, limits, time.monotonic() + _SECONDS)([IMAGES])
    if reason:
        process.say(f"memory was not measured: {reason}")
    return {
        "ms": round(milliseconds),
        "step_MB": round(used[IMAGES][HOST] / 1e6) if IMAGES in used else None,
        "date": str(date.today()),
    }


def _time_prediction(config: ExperimentConfig, model: Any, folder: Path, rounds: int) -> float:
    """Returns the lowest CPU time of a call, from resized pixels to boxes, in milliseconds."""
    spec = export_model(model, folder, at_threshold(describe(config, None)), ("onnx",)).spec
    predictors = make_predictors(None, folder, spec, 1, _RUNTIMES)
    predict = next(iter(predictors.values()))  # float32
    assert spec.resize.mode != "centre_crop"
    pictures = [prepare(image, spec.input.size, spec.resize.mode) for image in sample_images(None)]
    seconds = []
    for number in range(rounds + 2):  # the first two warm up
        start = time.process_time()
        predict(pictures[number % len(pictures)][None])
        seconds.append(time.process_time() - start)
    return 1000 * min(seconds[2:])
