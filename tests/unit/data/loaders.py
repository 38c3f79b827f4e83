"""Loaders of a tiny set, whether their batches are equal, and whether their workers are gone."""

import time
from pathlib import Path

import numpy as np

from ppdist.data.datasets.build import read_split
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.types import Batch
from tests.unit.data.sets import coco_config


def loader(root: Path, workers=0, start=0, end=6, seed=3, rank=0, world=1, sizes=None, **changes):
    config = coco_config(root, workers=workers, **changes)
    dataset = read_split(config, "train", 3)
    sampler = TrainSampler(
        dataset_size=len(dataset.records),
        batch_size_per_card=2,
        accumulate=2,
        rank=rank,
        world=world,
        seed=seed,
        start_step=start,
        end_step=end,
        sizes=sizes or [(64, 96), (96, 64)],
    )
    return TrainLoader(dataset, config, sampler, seed=seed)


def arrays(batch: Batch) -> list[np.ndarray]:
    return [
        tensor.numpy()
        for tensor in (
            batch.images_B3HW,
            batch.boxes_BM4,
            batch.labels_BM,
            batch.mask_BM,
            batch.image_index_B,
            batch.scale_B2,
            batch.offset_B2,
        )
    ]


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
