"""data.train.limit and data.val.limit: which images are left."""

from dataclasses import replace

import numpy as np
import pytest

from ppdist.config.data import DataConfig
from ppdist.data.datasets.build import draw_order, limit_images, limit_notes, read_split
from ppdist.data.types import DetectionSet, ImageRecord, Records
from ppdist.engine.data import fingerprint
from tests.distributed import run_on_ranks
from tests.unit.data.sets import write_coco


def a_set(labels_N: list[list[int]], classes: int, crowds: tuple[int, ...] = ()) -> DetectionSet:
    """Image n has objects of the classes labels_N[n]; all of those in `crowds` are crowds."""
    records = Records(
        ImageRecord(
            path=f"/images/{at}.jpg",
            image_id=at,
            width=64,
            height=64,
            boxes_M4=np.tile(np.float32([1, 1, 9, 9]), (len(labels), 1)),
            labels_M=np.array(labels, np.int64),
            crowd_M=np.full(len(labels), at in crowds),
            area_M=np.full(len(labels), 64, np.float32),
        )
        for at, labels in enumerate(labels_N)
    )
    names = tuple(f"class{number}" for number in range(classes))
    return DetectionSet(records, names, tuple(range(classes)), "made up")


def rare_set(images: int = 200, classes: int = 9) -> DetectionSet:
    """Class c is in about one of 2^c images; 30 images are empty."""
    rng = np.random.default_rng(3)
    chances = 0.5 ** np.arange(classes)
    labels = [np.flatnonzero(rng.random(classes) < chances).tolist() for _ in range(images)]
    labels[:30] = [[]] * 30
    return a_set(labels, classes)


def names_of(dataset: DetectionSet) -> list[str]:
    return [record.path for record in dataset.records]


def test_smaller_subset_is_in_larger_in_file_order():
    everything = rare_set()
    taken = [names_of(limit_images(everything, limit, "key")) for limit in (1, 10, 50, 199)]
    for few, more in zip(taken, [*taken[1:], names_of(everything)]):
        assert set(few) < set(more)
        assert few == [name for name in more if name in few]
    assert [len(few) for few in taken] == [1, 10, 50, 199]


def slow_order(labels_N: list[set[int]], order: list[int]) -> list[int]:
    """The greedy choice, written down as its definition."""
    left, chosen = set().union(*labels_N), []
    while left:
        best = max(order, key=lambda at: (len(labels_N[at] & left), -order.index(at)))
        chosen.append(best)
        left -= labels_N[best]
    return chosen + [at for at in order if at not in chosen]


def test_subset_order_is_greedy_cover_then_random():
    records = rare_set().records
    found = draw_order(Records.of(records), 9).tolist()
    assert sorted(found) == list(range(200))
    blank = a_set([[]] * 200, 9)  # no class to show: the order is as it was drawn
    drawn = draw_order(Records.of(blank.records), 9).tolist()
    assert drawn != sorted(drawn)
    assert found == slow_order([set(record.labels_M.tolist()) for record in records], drawn)


def test_as_few_images_as_can_show_every_class_do():
    labels = [[0]] * 40 + [[0, 1]] * 2 + [[2]] + [[]] * 20
    few = limit_images(a_set(labels, 3), 2, "key")
    assert {label for record in few.records for label in record.labels_M.tolist()} == {0, 1, 2}


def test_class_seen_only_as_crowd_counts_as_unseen():
    labels = [[0, 1], [1], *[[0]] * 20]
    few = limit_images(a_set(labels, 2, crowds=(0,)), 2, "key")
    assert "/images/1.jpg" in names_of(few)


def test_classes_without_an_object_stay_and_are_named():
    labels = [[number] for number in range(8)]
    few = limit_images(a_set(labels, 9), 2, "data.train.limit")
    assert len(few.class_names) == 9
    note = few.limited  # class8 has none in the whole set either, so it is not one of the lost
    assert note.startswith("data.train.limit: 2 of 8 ")
    assert note.endswith("and 1 more") and "class8" not in note
    assert limit_notes(few, None, a_set(labels, 9)) == [note] and not few.notes


def test_subset_beyond_image_count_changes_nothing():
    everything = rare_set()
    beyond = limit_images(everything, 200, "data.val.limit")
    assert beyond.records is everything.records
    assert limit_images(everything, None, "data.val.limit") is everything
    assert beyond.limited.startswith("data.val.limit: 200")


def with_limit(config: DataConfig, limit: int | None) -> DataConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"limit": limit})})


def test_split_subset_has_own_size_and_fingerprint(tmp_path):
    config = write_coco(tmp_path, 9)
    few = with_limit(config, 4)
    read = {limit: read_split(with_limit(config, limit), "train") for limit in (None, 4, 5)}
    assert [len(each.records) for each in read.values()] == [9, 4, 5]
    assert len(read_split(few, "val").records) == 9
    assert len(read_split(few, "train", all_images=True).records) == 9
    marks = {fingerprint(each, config.root) for each in read.values()}
    assert len(marks) == 3
    # Images that are not used need not be there.
    unused = set(names_of(read[None])) - set(names_of(read[4]))
    for path in unused:
        (tmp_path / "images" / path.rpartition("/")[2]).unlink()
    assert names_of(read_split(few, "train")) == names_of(read[4])


def test_outlines_stay_with_their_objects():
    labels = [[0], [0, 1], [1]]
    outlined = a_set(labels, 2)
    rings = [
        tuple((np.full((3, 2), 10 * at + number, np.float32),) for number in range(len(each)))
        for at, each in enumerate(labels)
    ]
    records = Records(
        replace(record, polygons_M=ring) for record, ring in zip(outlined.records, rings)
    )
    few = limit_images(replace(outlined, records=records), 2, "key")
    for record in few.records:
        at = record.image_id
        for number, (ring,) in enumerate(record.polygons_M):
            assert (ring == 10 * at + number).all()


def read_on_rank(folder: str) -> list[str]:
    from pathlib import Path

    from ppdist.engine.data import read_sets
    from tests.unit.data.sets import coco_config
    from tests.unit.engine.tiny import init_cpu

    init_cpu()
    checked = read_sets(with_limit(coco_config(Path(folder)), 3), 3, evaluate=False)
    return names_of(checked.train)


@pytest.mark.slow
def test_every_rank_takes_the_same_images(tmp_path):
    write_coco(tmp_path, 8)
    first, second = run_on_ranks(
        2, "tests.unit.data.datasets.test_build_subset:read_on_rank", str(tmp_path)
    )
    assert first == second == names_of(read_split(with_limit(write_coco(tmp_path, 8), 3), "train"))
