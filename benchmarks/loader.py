"""Compares the training loader with a plain cv2 pipeline, alone and in torch's DataLoader.

    python -m benchmarks.loader -c CONFIG [-o KEY=VALUE ...] [--seconds 30] [--rounds 6]

All are measured in one run, in turns.  The plain pipeline is `Straightforward`: read, decode,
resize, mosaic, affine, HSV, flip, float32 planes, and no boxes.  torch is measured where it is
installed, with as many workers as ours.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import cv2
import numpy as np

from ppdist.config.data import DataConfig
from ppdist.config.experiment import load_config
from ppdist.data.datasets.build import read_split
from ppdist.data.types import DetectionSet, Records
from ppdist.lab.benchmark.loader import Loading, Timed, child_ids, cpu_seconds_of

GREY = 114


class Straightforward(Timed):
    """A naive baseline: mosaic, affine, HSV and flip in this process.

    Whole images are decoded and put into a canvas of twice the size, which is then transformed to
    float32.  It has no boxes, which our loader transforms as well.  It has one thread, as our
    workers.
    """

    def __init__(
        self, dataset: DetectionSet, size: tuple[int, int], batch_size: int, seed: int = 0
    ) -> None:
        super().__init__()
        records = Records.of(dataset.records)
        self._paths = [records.path(index) for index in range(len(records))]
        self._height, self._width = size
        self._batch_size = batch_size
        self._rng = np.random.default_rng(seed)

    def measure(self, seconds: float) -> None:
        cv2.setNumThreads(0)
        self.run(self._next, time.process_time, seconds)

    def _next(self) -> int:
        return len(np.stack([self.sample() for _ in range(self._batch_size)]))

    def sample(self) -> np.ndarray:
        """Returns an image, float32 RGB [3, H, W] in [0, 1]."""
        rng, height, width = self._rng, self._height, self._width
        centre_y, centre_x = (int(side * rng.uniform(0.5, 1.5)) for side in (height, width))
        canvas_HW3 = np.full((2 * height, 2 * width, 3), GREY, np.uint8)
        for corner in range(4):
            image_HW3 = cv2.imread(self._paths[int(rng.integers(len(self._paths)))])
            assert image_HW3 is not None, "measured on images that can be read"
            scale = min(height / image_HW3.shape[0], width / image_HW3.shape[1])
            image_HW3 = cv2.resize(image_HW3, None, fx=scale, fy=scale)
            h, w = image_HW3.shape[:2]
            top = centre_y - h if corner < 2 else centre_y
            left = centre_x - w if corner % 2 == 0 else centre_x
            y1, x1 = max(top, 0), max(left, 0)
            y2, x2 = min(top + h, 2 * height), min(left + w, 2 * width)
            canvas_HW3[y1:y2, x1:x2] = image_HW3[y1 - top : y2 - top, x1 - left : x2 - left]
        scale = rng.uniform(0.5, 1.5)
        matrix_23 = np.array(
            [
                [scale, 0, width * rng.uniform(0.4, 0.6) - scale * width],
                [0, scale, height * rng.uniform(0.4, 0.6) - scale * height],
            ]
        )
        border = (GREY,) * 3
        view_HW3 = cv2.warpAffine(canvas_HW3, matrix_23, (width, height), borderValue=border)
        hue, saturation, value = cv2.split(cv2.cvtColor(view_HW3, cv2.COLOR_BGR2HSV))
        gains = rng.uniform(-1, 1, 3) * (0.015, 0.7, 0.4) + 1
        levels = np.arange(256)
        turned = (levels * gains[0] % 180).astype(np.uint8)
        stronger, lighter = (np.clip(levels * g, 0, 255).astype(np.uint8) for g in gains[1:])
        changed = cv2.LUT(hue, turned), cv2.LUT(saturation, stronger), cv2.LUT(value, lighter)
        view_HW3 = cv2.cvtColor(cv2.merge(changed), cv2.COLOR_HSV2BGR)
        if rng.random() < 0.5:
            view_HW3 = np.fliplr(view_HW3)
        rgb_3HW = view_HW3[:, :, ::-1].transpose(2, 0, 1)
        return np.ascontiguousarray(rgb_3HW, np.float32) / 255

    def report(self) -> dict[str, float]:
        return {"images_per_second": self.rate, "images_per_cpu_second": self.cpu_rate}


def compare_loaders(
    dataset: DetectionSet,
    config: DataConfig,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    seconds: float,
    rounds: int,
) -> dict[str, Any]:
    """Times each loader on one set, interleaved.

    Args:
        seconds: of measuring for each.
        rounds: number of turns.
    Returns: for `ours`, `ours_cached` if data.cache is set, `plain` and `torch`: medians over
        rounds of images per second of CPU (of all its processes) and by the clock, and
        `times_plain`, `times_torch`: the median ratio of the former, with the smallest and largest.
    """
    variants = {"ours": config.model_copy(update={"cache": "none"})}
    if config.cache != "none":
        variants["ours_cached"] = config
    with ExitStack() as stack:
        running: dict[str, Timed] = {"plain": Straightforward(dataset, image_size, batch_size)}
        for name, variant in variants.items():
            loading = stack.enter_context(
                closing(Loading(dataset, variant, image_size, batch_size))
            )
            loading.read_epoch()  # fills the cache, and runs all code once
            running[name] = loading
        if config.workers and importlib.util.find_spec("torch"):
            running["torch"] = stack.enter_context(
                closing(_Torch(dataset, image_size, batch_size, running["ours"].processes))
            )
        # Loaders take turns, because the load of the machine changes within minutes.
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
        for _ in range(rounds):
            for name, loader in running.items():
                loader.images, loader.seconds, loader.cpu_seconds = 0, 0.0, 0.0
                loader.measure(seconds / rounds)
                rates[name].append((loader.cpu_rate, loader.images / loader.seconds))
    report = {}
    for name, pairs in rates.items():
        report[name] = {
            "images_per_cpu_second": median(cpu for cpu, _ in pairs),
            "images_per_second": median(clock for _, clock in pairs),
            "workers": 0 if name == "plain" else running[name].processes,
        }
        for baseline in {"plain", "torch"} & rates.keys() - {name}:
            ratios = sorted(pair[0] / base[0] for pair, base in zip(pairs, rates[baseline]))
            report[name][f"times_{baseline}"] = [median(ratios), ratios[0], ratios[-1]]
    return report


class _Torch(Timed):
    """The plain pipeline in the workers of torch.utils.data.DataLoader."""

    def __init__(
        self, dataset: DetectionSet, size: tuple[int, int], batch_size: int, workers: int
    ) -> None:
        super().__init__()
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        class Endless(IterableDataset):  # type: ignore[misc]  # torch is optional
            def __iter__(self) -> Iterator[Any]:
                cv2.setNumThreads(0)
                plain = Straightforward(dataset, size, batch_size, get_worker_info().id)
                while True:
                    yield plain.sample()

        self.processes = workers
        before = child_ids()
        self._loader = DataLoader(Endless(), batch_size=batch_size, num_workers=workers)
        self._batches = iter(self._loader)
        next(self._batches)
        self._workers = sorted(child_ids() - before)

    def close(self) -> None:
        del self._batches, self._loader

    def measure(self, seconds: float) -> None:
        for _ in range(2 * len(self._workers)):  # prepared while others were measured
            next(self._batches)
        self.run(lambda: len(next(self._batches)), lambda: cpu_seconds_of(self._workers), seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("-o", "--override", nargs="*", action="extend", default=[])
    parser.add_argument("--seconds", type=float, default=30, help="of measuring for each (30)")
    parser.add_argument("--rounds", type=int, default=6, help="turns (6)")
    arguments = parser.parse_args(argv)
    config = load_config(arguments.config, arguments.override)
    report = compare_loaders(
        read_split(config.data, "train", config.model.num_classes),
        config.data,
        image_size=config.model.image_size,
        batch_size=config.train.images_per_card,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
    )
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
