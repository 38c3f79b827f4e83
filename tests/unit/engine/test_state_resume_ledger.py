"""No image missed or doubled where a run goes on with other ranks, workers or micro-batches.

A ledger lists what each step learned from: image, pixels and boxes, over all ranks.
"""

import zlib
from collections import Counter

import pytest

from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine.build import build_batch_source, build_schedule_setup
from ppdist.engine.data import read_sets
from tests.unit.engine.tiny import tiny_config

IMAGES, STEPS = 50, 9  # of 24 images each: three steps an epoch, the last of which has two
# (steps, ranks, images per rank, micro-batches, workers): changes amid the first two epochs
PARTS = (
    (range(0, 2), 8, 3, 1, 0),
    (range(2, 4), 4, 3, 2, 1),
    (range(4, 5), 6, 4, 1, 0),
    (range(5, 9), 1, 8, 3, 2),
)
CASES = {
    "plain": [],
    "mosaic and mixup": [
        "data.resize=letterbox", "data.augment.mosaic=0.7", "data.augment.mixup=0.5",
        "data.augment.close_mosaic_epochs=1",
    ],
    "several sizes": ["train.multi_scale=[[64, 64], [96, 96], [64, 96]]"],
    "difficulty": ["data.sampling.name=difficulty"],
}  # fmt: skip
SCORES = [0.2, 0.9, None]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, train=IMAGES, val=2, size=64, seed=0)
    return folder


def ledger(monkeypatch, shapes, overrides, steps, world, batch, accumulate, workers):
    """Of each step, how often it has (image, checksum of pixels and boxes), over all ranks."""
    found = {step: Counter() for step in steps}
    config = tiny_config(
        shapes,
        [f"train.batch_size_per_card={batch}", f"train.accumulate_steps={accumulate}",
         "train.epochs=3", f"data.workers={workers}", *overrides],
    )  # fmt: skip
    train_set = read_sets(config.data, 3, True)[0]
    for rank in range(world):
        monkeypatch.setattr(comm, "world_size", lambda: world)
        monkeypatch.setattr(comm, "rank", lambda rank=rank: rank)
        batch_source = build_batch_source(config, train_set, build_schedule_setup(config, IMAGES))
        monkeypatch.undo()
        batches = batch_source.batches(steps[0], SCORES if batch_source.follows_scores else None)
        for step in steps:
            for _ in batch_source.numbers(step):
                found[step].update(entries(next(batches)))
        batches.close()
        batch_source._loader.close()
    return found


def entries(batch):
    if not batch.real:
        return
    for row, index in enumerate(batch.image_index_B.tolist()):
        content = batch.images_B3HW[row].numpy().tobytes()
        objects = batch.boxes_BM4[row].numpy()[batch.mask_BM[row].numpy() > 0]
        yield index, zlib.crc32(objects.tobytes(), zlib.crc32(content))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rank_change_mid_epoch_uses_each_sample_once(case, monkeypatch, shapes):
    overrides = CASES[case]
    whole = ledger(monkeypatch, shapes, overrides, range(STEPS), 2, 12, 1, 0)
    parts = {}
    for part in PARTS:
        parts |= ledger(monkeypatch, shapes, overrides, *part)
    assert parts == whole
    if case == "difficulty":  # images come as often as their classes ask for
        return
    for epoch in range(3):
        seen = sum((parts[step] for step in range(3 * epoch, 3 * epoch + 3)), Counter())
        assert sorted(index for index, _ in seen.elements()) == list(range(IMAGES))
