"""The training loader beside a plain cv2 pipeline, alone and in torch's DataLoader.

    python -m benchmarks.loader -c CONFIG [-o KEY=VALUE ...] [--seconds 30] [--rounds 6]

All are measured in one run, in turns.  The plain pipeline is `Straightforward`: read, decode,
resize, mosaic, affine, HSV, flip, float32 planes, and no boxes.  torch is measured where it is
installed, with as many workers as ours.
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import cv2

from ppdist.benchmark.loader import Loading, Straightforward, Timed, children, cpu_of
from ppdist.config import load_config
from ppdist.config.data import DataConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.types import DetectionSet


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
        rounds: in so many turns.
    Returns: of `ours`, `ours_cached` where data.cache is set, `plain` and `torch`: medians over
        rounds of images per second of CPU (of all its processes) and by the clock, and
        `times_plain`, `times_torch`: the median ratio of the former, with the smallest and largest.
    """
    variants = {"ours": config.model_copy(update={"cache": "none"})}
    if config.cache != "none":
        variants["ours_cached"] = config
    with ExitStack() as stack:
        running: dict[str, Timed] = {"plain": Straightforward(dataset, image_size, batch_size)}
        for name, one in variants.items():
            loading = stack.enter_context(closing(Loading(dataset, one, image_size, batch_size)))
            loading.one_epoch()  # what is kept is there then, and all code has run once
            running[name] = loading
        if config.workers and importlib.util.find_spec("torch"):
            running["torch"] = stack.enter_context(
                closing(_Torch(dataset, image_size, batch_size, running["ours"].processes))
            )
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
        for other in {"plain", "torch"} & rates.keys() - {name}:
            ratios = sorted(mine[0] / its[0] for mine, its in zip(pairs, rates[other]))
            report[name][f"times_{other}"] = [median(ratios), ratios[0], ratios[-1]]
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
        before = children()
        self._loader = DataLoader(Endless(), batch_size=batch_size, num_workers=workers)
        self._batches = iter(self._loader)
        next(self._batches)
        self._workers = sorted(children() - before)

    def close(self) -> None:
        del self._batches, self._loader

    def measure(self, seconds: float) -> None:
        for _ in range(2 * len(self._workers)):  # prepared while others were measured
            next(self._batches)
        self.run(lambda: len(next(self._batches)), lambda: cpu_of(self._workers), seconds)


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
