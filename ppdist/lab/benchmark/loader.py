"""Speed of the data loader.

CPU time is reported beside wall-clock time: what a worker does in a second of CPU time does not
depend on other users of the machine.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ppdist.common.machine import process_stat
from ppdist.config.data import DataConfig
from ppdist.config.train import MicroBatches
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.types import Batch, DetectionSet

Report = dict[str, Any]
_ENDLESS = 2**31
_TICKS = os.sysconf("SC_CLK_TCK")


def measure_loading(
    dataset: DetectionSet,
    config: DataConfig,
    *,
    image_size: tuple[int, int],
    batch_size: int,
    seconds: float,
) -> Report:
    """Measures the speed of the training loader alone, without any other computation.

    Args:
        image_size: (height, width) of the input in pixels.
        seconds: duration of the measurement, after an epoch that fills the cache and warms up all
            code.
    Returns: images per second over all workers, per worker, and per second of CPU time of the
        workers and this process; `workers` (0: images are loaded in this process).
    """
    with closing(Loading(dataset, config, image_size, batch_size)) as loading:
        loading.read_epoch()
        loading.measure(seconds)
        return loading.report()


class Timed:
    """A counter of images, seconds and CPU seconds.

    Rates are divided by the number of processes.
    """

    processes = 1

    def __init__(self) -> None:
        self.images, self.seconds, self.cpu_seconds = 0, 0.0, 0.0

    def measure(self, seconds: float) -> None:
        raise NotImplementedError

    def run(self, next_batch: Callable[[], int], cpu: Callable[[], float], seconds: float) -> None:
        """Produces batches for `seconds` and counts their images.

        Args: next_batch: produces a batch and returns its number of images.  cpu: returns the CPU
            seconds used so far.
        """
        cpu_began, began = cpu(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.images += next_batch()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += cpu() - cpu_began

    @property
    def rate(self) -> float:
        """Returns the images per second per process."""
        return self.images / self.seconds / self.processes

    @property
    def cpu_rate(self) -> float:
        """Returns the images per second of CPU time, measured in clock ticks."""
        return self.images / max(self.cpu_seconds, 1 / _TICKS)


class Loading(Timed):
    """A running training loader."""

    def __init__(
        self, dataset: DetectionSet, config: DataConfig, size: tuple[int, int], batch_size: int
    ) -> None:
        super().__init__()
        self._size = len(dataset.records)
        sampler = TrainSampler(
            dataset_size=self._size,
            batches=MicroBatches(batch_size, batch_size, spread=False),
            rank=0,
            world=1,
            seed=0,
            start_step=0,
            end_step=_ENDLESS,
            sizes=[size],
        )
        # Workers are the child processes that exist only after the loader has started.
        before = child_ids()
        self._loader = TrainLoader(dataset, config, sampler, seed=0, epochs=_ENDLESS)
        self._batches: Iterator[Batch] = iter(self._loader)
        next(self._batches)
        self._workers = sorted(child_ids() - before)
        self.processes = max(1, len(self._workers))

    def close(self) -> None:
        self._loader.close()

    def measure(self, seconds: float) -> None:
        for _ in range(2 * len(self._workers)):  # batches prepared during other measurements
            next(self._batches)
        self.run(self._next, lambda: cpu_seconds_of(self._workers), seconds)

    def _next(self) -> int:
        return int(next(self._batches).images_B3HW.shape[0])

    def read_epoch(self) -> None:
        """Reads at least as many images as the data set has."""
        images = 0
        while images < self._size:
            images += self._next()

    def report(self) -> Report:
        return {
            "images_per_second": self.images / self.seconds,
            "images_per_second_per_worker": self.rate,
            "images_per_cpu_second": self.cpu_rate,
            "workers": len(self._workers),
            "images": self.images,
        }


def child_ids() -> set[int]:
    """Returns the ids of the child processes of this process."""
    ids = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            stat = process_stat(int(folder.name))
            if stat is not None and stat.parent == os.getpid():
                ids.add(int(folder.name))
    return ids


def cpu_seconds_of(workers: Sequence[int]) -> float:
    """Returns the CPU seconds used so far by this process and its live workers."""
    stats = [process_stat(worker) for worker in workers]
    return time.process_time() + sum(stat.cpu_seconds for stat in stats if stat is not None)
