"""Latency of one prediction: eager and exported, in every runtime here.

All run interleaved in one process on the same images, because a machine that others use, too,
changes its speed within minutes; the ratios within a round do not.
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
IMAGES = 20  # at most: they are kept in memory
_CALLS = 3  # of a predictor in a round, after one that does not count
_PAUSE_SECONDS = 0.3  # before them: threads of the predictor before wait awake for a while


def formats_here() -> tuple[Format, ...]:
    """What can be exported with the packages that are installed."""
    onnx = all(find_spec(name) for name in ("paddle2onnx", "onnxruntime"))
    if not onnx:
        return ("paddle",)
    return FORMATS if find_spec("openvino") else ("paddle", "onnx")


def pictures_of(dataset: DetectionSet | None) -> list[np.ndarray]:
    """The first readable images, uint8 RGB [H, W, 3].

    Without a set, drawn ones.
    """
    if dataset is None:
        return [scene(512, 0, 0, index)[0] for index in range(IMAGES)]
    images = []
    for record in dataset.records:
        try:
            images.append(read_image(record.path, opener=dataset.opener))
        except DataError:  # others are as good
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


def predictors_of(
    model: Detector | None,
    directory: Path,
    spec: InferenceSpec,
    threads: int,
    backends: Collection[Backend] = (),
) -> dict[str, Predictor]:
    """Available predictors by name: the eager model and all exported files.

    Args: backends: of these only; (): of all.
    """
    predictors: dict[str, Predictor] = {}
    if model is not None:
        assert spec.nms is not None
        predictors["eager"] = EagerPredictor(model, spec.nms)
    for name, options in _ways(spec, threads):
        if not backends or options.backend in backends:
            predictors[name] = ExportedPredictor(directory, options)
    return predictors


def _ways(spec: InferenceSpec, threads: int) -> list[tuple[str, RuntimeOptions]]:
    """Of running what an export holds, with the packages that are installed."""
    ways = []
    if spec.paddle is not None:
        ways.append(("Paddle Inference", RuntimeOptions(onednn=False, threads=threads)))
        ways.append(("Paddle Inference, oneDNN", RuntimeOptions(threads=threads)))
        if paddle_api.has_fast_bfloat16():
            half = RuntimeOptions(precision="bfloat16", threads=threads)
            ways.append(("Paddle Inference, oneDNN, bfloat16", half))
    runtimes: list[tuple[str, Backend, bool]] = [
        ("ONNX Runtime", "onnx", bool(find_spec("onnxruntime"))),
        ("OpenVINO", "openvino", bool(find_spec("openvino"))),
    ]
    for name, backend, is_there in runtimes:
        if spec.onnx is not None and is_there:
            ways.append((name, RuntimeOptions(backend=backend, threads=threads)))
            if backend == "openvino" and has_bfloat16():
                half = RuntimeOptions(backend=backend, precision="bfloat16", threads=threads)
                ways.append((f"{name}, bfloat16", half))
        if spec.onnx_int8 is not None and is_there:
            eighths = RuntimeOptions(backend=backend, precision="int8", threads=threads)
            ways.append((f"{name}, int8", eighths))
    return ways


def measure_predictors(
    predictors: dict[str, Predictor],
    spec: InferenceSpec,
    pictures: Sequence[np.ndarray],
    *,
    batch: int,
    threads: int,
    rounds: int,
) -> Report:
    """Times one call per predictor, from resized pixels to suppressed boxes.

    Args:
        predictors: the first one is the baseline.
        batch: images in one call.
        threads: of the eager model, too.
        rounds: of calls; every round has other images.
    Returns: for each predictor `median_ms` and `p95_ms` of all calls that count, `first_ms` (it
        compiles), `images_per_second`, and `ratio`: the median over rounds of its time as a part of
        the first's.
    """
    paddle_api.set_num_threads(threads)
    size, mode = spec.input.size, spec.resize.mode
    assert mode != "centre_crop"
    prepared = [prepare(picture, size, mode) for picture in pictures]
    measured = [_Calls(predict) for predict in predictors.values()]
    for number in range(rounds):
        chosen = [(number * batch + i) % len(prepared) for i in range(batch)]
        images = np.stack([prepared[index] for index in chosen])
        for each in measured if number % 2 == 0 else reversed(measured):
            each.take(images)
    report: Report = {}
    for name, each in zip(predictors, measured):
        ratios = [ours / base for ours, base in zip(each.rounds, measured[0].rounds)]
        report[name] = {
            "median_ms": median(each.calls),
            "p95_ms": float(np.quantile(each.calls, 0.95)),
            "first_ms": each.first,
            "images_per_second": 1000 * batch / median(each.calls),
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
    """One predictor, and what its calls took in milliseconds."""

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
