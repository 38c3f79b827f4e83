"""Measures the latency of one prediction: eager and exported, in every runtime installed here.

All predictors run interleaved in one process on the same images, because the speed of a shared
machine changes within minutes; the ratios within a round do not.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ppdist.common.errors import DataError
from ppdist.config.runtime import Backend, RuntimeOptions
from ppdist.data.datasets.synthetic import scene
from ppdist.data.image import read_image
from ppdist.data.types import DetectionSet
from ppdist.distributed import paddle_api
from ppdist.export.export import FORMATS, Format
from ppdist.export.predictor import (
    EagerPredictor,
    ExportedPredictor,
    Predictor,
    prepare,
)
from ppdist.export.spec import InferenceSpec
from ppdist.models.base import Detector
from ppdist.runtime.predictor import has_bfloat16

Report = dict[str, Any]
IMAGES = 20  # upper limit, because they stay in memory
_CALLS = 3  # measured calls of a predictor in a round, after one that warms up
_PAUSE_SECONDS = 0.3  # before each predictor: the previous one's threads spin for a while


def exportable_formats() -> tuple[Format, ...]:
    """Lists the formats that can be exported with the installed packages."""
    onnx = all(find_spec(name) for name in ("paddle2onnx", "onnxruntime"))
    if not onnx:
        return ("paddle",)
    return FORMATS if find_spec("openvino") else ("paddle", "onnx")


def sample_images(dataset: DetectionSet | None) -> list[np.ndarray]:
    """Reads the first readable images of a data set, uint8 RGB [H, W, 3]; generates images if
    there is none.
    """
    if dataset is None:
        return [scene(512, 0, 0, index)[0] for index in range(IMAGES)]
    images = []
    for record in dataset.records:
        try:
            images.append(read_image(record.path, opener=dataset.opener))
        except DataError:  # use other images instead
            continue
        if len(images) == IMAGES:
            break
    if not images:
        raise DataError(
            "neither this nor another image can be read",
            code="no_good_image",
            where=str(dataset.records[0].path),
        )
    return images


def make_predictors(
    model: Detector | None,
    directory: Path,
    spec: InferenceSpec,
    threads: int,
    backends: Collection[Backend] = (),
) -> dict[str, Predictor]:
    """Builds the predictors available here, by name: the eager model and every exported file.

    Args: backends: runtimes to include; () includes all.
    """
    predictors: dict[str, Predictor] = {}
    if model is not None:
        assert spec.nms is not None
        predictors["eager"] = EagerPredictor(model, spec.nms)
    for name, options in runtimes_of(spec, threads):
        if not backends or options.backend in backends:
            predictors[name] = ExportedPredictor(directory, options)
    return predictors


def runtimes_of(spec: InferenceSpec, threads: int) -> list[tuple[str, RuntimeOptions]]:
    """Lists the ways to run an export with the installed packages: name and options."""
    runtimes = []
    if spec.paddle is not None:
        runtimes.append(("Paddle Inference", RuntimeOptions(onednn=False, threads=threads)))
        runtimes.append(("Paddle Inference, oneDNN", RuntimeOptions(threads=threads)))
        if paddle_api.has_fast_bfloat16():
            bfloat16 = RuntimeOptions(precision="bfloat16", threads=threads)
            runtimes.append(("Paddle Inference, oneDNN, bfloat16", bfloat16))
    packages: list[tuple[str, Backend, bool]] = [
        ("ONNX Runtime", "onnx", bool(find_spec("onnxruntime"))),
        ("OpenVINO", "openvino", bool(find_spec("openvino"))),
    ]
    for name, backend, is_installed in packages:
        if spec.onnx is not None and is_installed:
            runtimes.append((name, RuntimeOptions(backend=backend, threads=threads)))
            if backend == "openvino" and has_bfloat16():
                bfloat16 = RuntimeOptions(backend=backend, precision="bfloat16", threads=threads)
                runtimes.append((f"{name}, bfloat16", bfloat16))
        if spec.onnx_int8 is not None and is_installed:
            int8 = RuntimeOptions(backend=backend, precision="int8", threads=threads)
            runtimes.append((f"{name}, int8", int8))
    return runtimes


def measure_predictors(
    predictors: dict[str, Predictor],
    spec: InferenceSpec,
    pictures: Sequence[np.ndarray],
    *,
    batch: int,
    threads: int,
    rounds: int,
) -> Report:
    """Times each predictor's call, from resized pixels to suppressed boxes.

    Args:
        predictors: the first one is the baseline.
        batch: images in one call.
        threads: CPU threads, of the eager model, too.
        rounds: number of rounds of calls; every round uses different images.
    Returns: for each predictor `median_ms` and `p95_ms` over all measured calls, `first_ms` (the
        first call, which compiles), `images_per_second`, and `ratio`: the median over rounds of its
        time divided by that of the first predictor.
    """
    paddle_api.set_num_threads(threads)
    size, mode = spec.input.size, spec.resize.mode
    assert mode != "centre_crop"
    prepared = [prepare(picture, size, mode) for picture in pictures]
    timings = [_Calls(predict) for predict in predictors.values()]
    for number in range(rounds):
        # Every round uses different images, so that no single image dominates the result.
        image_indices = [(number * batch + i) % len(prepared) for i in range(batch)]
        images = np.stack([prepared[index] for index in image_indices])
        # The order alternates, so that no predictor profits from its position in the round.
        for timed in timings if number % 2 == 0 else reversed(timings):
            timed.take(images)
    report: Report = {}
    for name, timed in zip(predictors, timings):
        ratios = [seconds / base for seconds, base in zip(timed.rounds, timings[0].rounds)]
        report[name] = {
            "median_ms": median(timed.calls),
            "p95_ms": float(np.quantile(timed.calls, 0.95)),
            "first_ms": timed.first,
            "images_per_second": 1000 * batch / median(timed.calls),
            "ratio": median(ratios),
        }
    return {
        "batch": batch,
        "image_size": list(size),
        "threads": threads,
        "pictures": len(pictures),
        "predictors": report,
    }


@dataclass
class _Calls:
    """A predictor and the durations of its calls, in milliseconds."""

    predict: Predictor
    first: float = math.nan
    calls: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def take(self, images_B3HW: np.ndarray) -> None:
        time.sleep(_PAUSE_SECONDS)
        milliseconds: list[float] = []
        for _ in range(1 + _CALLS):
            started = time.perf_counter()
            self.predict(images_B3HW)
            milliseconds.append(1000 * (time.perf_counter() - started))
        if not self.calls:
            self.first = milliseconds[0]
        self.calls += milliseconds[1:]
        self.rounds.append(median(milliseconds[1:]))
