"""Flat annotations are used like a list of records."""

import os
import pickle

import numpy as np
import pytest

from ppdist.data.types import DetectionSet, ImageRecord, Records

NAMES = "caf\u00e9", os.fsdecode(b"\xb0\xa1")  # UTF-8, and GBK that is no UTF-8


def some_records(count: int = 20, *, masks: bool = False) -> list[ImageRecord]:
    """Image i has i % 4 objects; with masks, object m has m outlines of 3, 4, ... points."""
    rng = np.random.default_rng(0)
    records = []
    for index in range(count):
        objects = index % 4
        outlines = tuple(
            tuple(rng.random((3 + ring, 2), np.float32) for ring in range(number))
            for number in range(objects)
        )
        records.append(
            ImageRecord(
                path=f"/images/{NAMES[index % 2]}/{index}.jpg",
                image_id=2**40 + index,
                width=640 + index,
                height=480,
                boxes_M4=rng.random((objects, 4), np.float32),
                labels_M=rng.integers(0, 80, objects),
                crowd_M=rng.random(objects) < 0.5,
                area_M=rng.random(objects, np.float32),
                polygons_M=outlines if masks else (),
            )
        )
    return records


def assert_same(found: ImageRecord, expected: ImageRecord) -> None:
    for name in ("path", "image_id", "width", "height"):
        assert getattr(found, name) == getattr(expected, name)
        assert type(getattr(found, name)) is type(getattr(expected, name))
    for name in ("boxes_M4", "labels_M", "crowd_M", "area_M"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert len(found.polygons_M) == len(expected.polygons_M)
    for ours, theirs in zip(found.polygons_M, expected.polygons_M):
        assert len(ours) == len(theirs)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("masks", [False, True])
def test_every_record_comes_back_as_it_was(masks):
    expected = some_records(masks=masks)
    found = Records.of(expected)
    assert len(found) == 20
    for one, other in zip(found, expected):
        assert_same(one, other)
    assert_same(found[-1], expected[-1])
    assert [record.image_id for record in found[2:9:3]] == [2**40 + 2, 2**40 + 5, 2**40 + 8]
    with pytest.raises(IndexError):
        found[20]
    assert_same(pickle.loads(pickle.dumps(found))[7], expected[7])


def test_set_without_images_or_objects_is_valid():
    assert len(Records.of([])) == 0 and list(Records.of([])) == []
    (empty,) = Records.of(some_records(1))
    assert empty.boxes_M4.shape == (0, 4) and empty.labels_M.dtype == np.int64


def test_objects_with_and_without_outline_coexist():
    records = some_records(4) + some_records(4, masks=True)
    found = Records.of(records)
    assert found[3].polygons_M == ((), (), ())
    assert_same(found[7], records[7])


def test_all_at_once_is_what_the_records_say_one_by_one():
    records = some_records()
    found = Records.of(iter(records))
    assert Records.of(found) is found
    assert found.sizes_N2.tolist() == [[r.height, r.width] for r in records]
    assert found.image_ids_N.tolist() == [r.image_id for r in records]
    assert found.counts_N.tolist() == [len(r.labels_M) for r in records]
    np.testing.assert_array_equal(found.boxes_O4, np.concatenate([r.boxes_M4 for r in records]))
    np.testing.assert_array_equal(found.labels_O, np.concatenate([r.labels_M for r in records]))
    assert [found.path(index) for index in range(20)] == [r.path for r in records]


def test_million_records_take_hundred_bytes_each():
    few, many = (
        Records.of(record for _ in range(count) for record in some_records(4))
        for count in (50, 500)
    )
    sizes = [len(pickle.dumps(one)) for one in (few, many)]
    assert (sizes[1] - sizes[0]) / 1800 < 150  # bytes an image, of 1.5 objects


def test_image_that_a_command_names_is_one_that_can_be_read():
    records = some_records(3)
    damaged = DetectionSet(records, ("a",), (0,), "set", unreadable={0: "ends early"})
    assert damaged.first_readable == records[1].path
    assert DetectionSet(records, ("a",), (0,), "set").first_readable == records[0].path
    assert DetectionSet([], ("a",), (0,), "set").first_readable == ""
