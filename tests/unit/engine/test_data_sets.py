"""Sets of several ranks: what is compared, and what need not be."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from ppdist.data.types import DetectionSet, ImageRecord, Records
from ppdist.distributed import comm
from ppdist.engine import data
from tests.unit.data.sets import coco_config

NAMES = ("a.jpg", "b/ü.jpg", "c\udcff.jpg")


def dataset(root: Path, count: int) -> DetectionSet:
    """Images that are nowhere, the n-th with n % 3 objects."""
    records = (
        ImageRecord(
            path=f"{root}/{number}{NAMES[number % 3]}",
            image_id=number,
            width=4,
            height=3,
            boxes_M4=np.full((number % 3, 4), number, np.float32),
            labels_M=np.zeros(number % 3, np.int64),
            crowd_M=np.zeros(number % 3, bool),
            area_M=np.ones(number % 3, np.float32),
        )
        for number in range(count)
    )
    return DetectionSet(Records(records), ("one",), (1,), f"{root}/set.json")


@pytest.mark.parametrize("count", [0, 1, 7])
def test_fingerprint_is_of_names_below_the_root_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """It stands in checkpoints, so it must not change."""
    monkeypatch.setattr(data, "_PATHS_AT_ONCE", 3)
    found = dataset(tmp_path, count)
    records = Records.of(found.records)
    expected = hashlib.blake2b(digest_size=16)
    for number in range(count):
        expected.update(os.fsencode(f"{number}{NAMES[number % 3]}\n"))
    columns = records.sizes_N2, records.counts_N, records.boxes_O4, records.labels_O
    for column in (*columns, records.crowd_O):
        expected.update(column.tobytes())
    assert data.fingerprint(found, str(tmp_path)) == expected.hexdigest()


def test_paths_are_the_same_one_by_one_and_at_once(tmp_path: Path) -> None:
    records = Records.of(dataset(tmp_path, 7).records)
    paths = [records.path(number) for number in range(7)]
    assert records.paths() == paths
    for begin, end in ((0, 1), (2, 5), (3, 3), (5, 99)):  # ASCII alone, and not
        assert records.paths(begin, end) == paths[begin:end]


def test_a_host_alone_opens_no_image_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    monkeypatch.setattr(comm, "local_size", lambda: 2)
    monkeypatch.setattr(comm, "all_gather_object", lambda value: [value, value])
    monkeypatch.setattr(data, "_count_bytes", None)
    data.require_same_data(dataset(tmp_path, 3), coco_config(tmp_path))
