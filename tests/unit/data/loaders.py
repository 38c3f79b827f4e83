"""Loaders of a tiny set, whether their batches are equal, and whether their workers are gone."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ppdist.config.data import DataConfig
from ppdist.config.train import MicroBatches
from ppdist.data.datasets.build import read_split
from ppdist.data.loading.loader import EvalLoader, TrainLoader
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.types import Arrays, Batch
from tests.unit.data.sets import coco_config

_OPTIONS = {
    "start": 0, "end": 6, "seed": 3, "rank": 0, "world": 1, "batch": 2, "accumulate": 2,
    "sizes": ((64, 96), (96, 64)), "unreadable": {},
}  # fmt: skip


def loader(root: Path, workers=0, **options) -> TrainLoader:
    """A loader of a COCO set; options: of `loader_of`, the others of `data`."""
    own = {name: options.pop(name) for name in _OPTIONS if name in options}
    return loader_of(coco_config(root, workers=workers, **options), **own)


def loader_of(config: DataConfig, **options) -> TrainLoader:
    """A loader of a configured set."""
    of = SimpleNamespace(**_OPTIONS | options)
    dataset = replace(read_split(config, "train", 3), unreadable=of.unreadable)
    sampler = TrainSampler(
        dataset_size=len(dataset.records),
        batches=MicroBatches(of.world * of.batch * of.accumulate, of.batch, spread=False),
        rank=of.rank, world=of.world, seed=of.seed, start_step=of.start, end_step=of.end,
        sizes=of.sizes,
    )  # fmt: skip
    return TrainLoader(dataset, config, sampler, seed=of.seed)


def eval_loader(
    root: Path, workers=0, rank=0, world=1, batch_size=3, size=(32, 80), **changes
) -> EvalLoader:
    config = coco_config(root, workers=workers, **changes)
    dataset = replace(read_split(config, "val", 3), unreadable={})
    return EvalLoader(
        dataset, config, image_size=size, batch_size=batch_size, rank=rank, world=world
    )


def arrays(batch: Batch) -> list[np.ndarray]:
    return [np.asarray(getattr(batch, name)) for name in Arrays.__annotations__]


def assert_equal(ours, theirs) -> None:
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert one.real == other.real
        for a, b in zip(arrays(one), arrays(other)):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def warnings_in(caplog) -> list[str]:
    """What was said, but for the number of workers, which is another on each machine."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if not line.startswith("data.workers: ")]


def lives(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(processes: list[int], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [process for process in processes if lives(process)]
