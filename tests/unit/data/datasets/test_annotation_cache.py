"""Annotations kept for the next start: the same set, or read again where anything has changed."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.data import DataConfig
from ppdist.config.distributed import DistributedConfig
from ppdist.data.datasets import annotation_cache
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import read_raw, read_split
from ppdist.data.datasets.convert import convert
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.data.sets import (
    coco_config,
    coco_content,
    write_coco,
    write_images,
    write_json,
    write_voc,
)


def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is read in no time, and has just changed."""
    monkeypatch.setattr(annotation_cache, "_SHORT_SECONDS", 0.0)
    monkeypatch.setattr(annotation_cache, "_SETTLED_SECONDS", -60.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which keeps also what is read in no time and has just changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_all(monkeypatch)
    return tmp_path / "cache" / "ppdist"


def is_kept(dataset: DetectionSet, again: DetectionSet) -> bool:
    """Whether the second is the kept first, which it must equal bit for bit."""
    first, second = Records.of(dataset.records), Records.of(again.records)
    assert {*first.arrays} == {*second.arrays}
    for name, array in first.arrays.items():
        assert array.dtype == second.arrays[name].dtype
        np.testing.assert_array_equal(array, second.arrays[name])
    assert not any(array.flags.writeable for array in second.arrays.values())
    rest = [replace(each, records=()) for each in (dataset, again)]
    assert rest[0] == rest[1]
    return bool(second.file)


def in_format(root: Path, form: str) -> DataConfig:
    """A set of that format below root, whose splits are the same."""
    raw = read_raw(write_coco(root / "coco", 4), "train", ignore_issue)
    for split in ("train", "val"):
        if form == "yolo":
            convert(raw, "yolo", root / "yolo", images="copy", split=split)
        else:
            write_voc(raw, root / "voc", split)
    parts: dict[str, dict[str, str]] = {
        split: {"images": f"images/{split}"}
        if form == "yolo"
        else {"images": "images", "annotations": f"ImageSets/Main/{split}.txt"}
        for split in ("train", "val")
    }
    return DataConfig.model_validate({"format": form, "root": str(root / form), **parts})


def read_twice(config: DataConfig) -> tuple[DetectionSet, DetectionSet]:
    return read_split(config, "train"), read_split(config, "train")


def test_second_start_maps_what_the_first_has_read(cache: Path, tmp_path: Path) -> None:
    config = write_coco(tmp_path / "set")
    first, again = read_twice(config)
    assert is_kept(first, again)
    assert Path(Records.of(again.records).file) in [*cache.glob("annotations/??/*")]


def test_what_is_read_in_no_time_is_not_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotation_cache, "_SHORT_SECONDS", 60.0)
    first, again = read_twice(write_coco(tmp_path / "set"))
    assert not is_kept(first, again) and not [*cache.glob("*")]


def test_warnings_are_said_at_every_start(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_coco(tmp_path / "set")
    one = {"id": 1, "image_id": 2, "category_id": 1, "bbox": [60, 40, 30, 30]}
    config = write_coco(tmp_path / "set", annotations=[one, one | {"id": 2}])
    caplog.set_level(logging.WARNING, "ppdist.data")
    first = read_split(config, "train")
    said = [*caplog.messages]
    assert "1 clipped" in "".join(said) and first.duplicates == {1: 1}
    assert is_kept(first, read_split(config, "train"))
    assert caplog.messages == said * 2


def test_settings_that_decide_the_result_have_their_own(cache: Path, tmp_path: Path) -> None:
    config = write_coco(tmp_path / "set")
    read_split(config, "train")
    for other in ({"bad_boxes": "drop"}, {"val_fraction": 0.5}):
        read_split(config.model_copy(update=other), "train")
    assert len([*cache.glob("annotations/??/*")]) == 2 * 3  # each with the list of its sources


def test_hosts_with_one_home_and_data_of_their_own_keep_both(cache: Path, tmp_path: Path) -> None:
    """Whose disk is at the same path is another one on each host."""
    config, disk = write_coco(tmp_path / "set"), tmp_path / "set"
    write_coco(tmp_path / "b", annotations=[])
    sets = []
    for _ in range(4):  # of the hosts in turn
        sets.append(read_split(config, "train"))
        disk.rename(tmp_path / "a")
        (tmp_path / "b").rename(disk)
        (tmp_path / "a").rename(tmp_path / "b")
    files = [Records.of(each.records).file for each in sets]
    assert is_kept(sets[0], sets[2]) and is_kept(sets[1], sets[3])
    assert files[0] == files[2] != files[1] == files[3]


def test_changed_content_is_read_again_even_with_its_old_times(cache: Path, tmp_path: Path) -> None:
    config = write_coco(tmp_path / "set")
    first = read_split(config, "train")
    file, state = tmp_path / "set" / "set.json", (tmp_path / "set" / "set.json").stat()
    text = file.read_text()
    file.write_text(text.replace('"id": 1, "image_id": 2', '"id": 9, "image_id": 3'))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # its ctime tells, and its content
    again = read_split(config, "train")
    before, after = (Records.of(each.records).counts_N.tolist() for each in (first, again))
    assert before == [0, 1, 2, 0] and after == [0, 0, 3, 0]


@pytest.mark.parametrize("form", ["voc", "yolo"])
def test_one_changed_file_of_many_is_noticed(cache: Path, tmp_path: Path, form: str) -> None:
    config = in_format(tmp_path, form)
    first, again = read_twice(config)
    assert is_kept(first, again)
    labels = {"voc": "Annotations", "yolo": "labels/train"}[form]
    changed = sorted((tmp_path / form / labels).rglob("*.*"))[2]
    text = changed.read_text()
    if form == "yolo":
        changed.write_text("".join(text.splitlines(keepends=True)[:-1]))
    else:
        head, _, tail = text.partition("<object>")
        changed.write_text(head + tail[tail.index("</object>") + len("</object>") :])
    counts = [
        Records.of(each.records).counts_N.tolist() for each in (first, read_split(config, "train"))
    ]
    assert sum(counts[0]) == sum(counts[1]) + 1


def test_sizes_that_images_say_change_with_the_images(cache: Path, tmp_path: Path) -> None:
    content = coco_content(write_images(tmp_path / "images", 2))
    for entry in content["images"]:
        entry["width"] = 0
    write_json(tmp_path, content)
    first, again = read_twice(coco_config(tmp_path))
    assert is_kept(first, again)
    write_images(tmp_path / "images", 2, size=(80, 60))
    assert read_split(coco_config(tmp_path), "train").records[0].width == 80


def test_other_classes_of_training_are_noticed_in_validation(cache: Path, tmp_path: Path) -> None:
    config = write_coco(tmp_path)
    train = config.train.model_copy(update={"annotations": "train.json"})
    config = config.model_copy(update={"train": train})
    content = json.loads((tmp_path / "set.json").read_text())
    for names in (("RBC", "WBC", "Platelets"), ("WBC", "Platelets", "RBC")):
        content["categories"] = [{"id": n, "name": name} for n, name in enumerate(names)]
        (tmp_path / "train.json").write_text(json.dumps(content))
        for _ in range(2):
            assert read_split(config, "val").class_names == names


def test_damaged_cache_is_read_again(cache: Path, tmp_path: Path) -> None:
    config = write_coco(tmp_path / "set")
    first = read_split(config, "train")
    file = Path(Records.of(first.records).file)
    content = file.read_bytes()
    file.unlink()  # another file: the first is mapped
    file.write_bytes(content[:-70] + bytes([content[-70] ^ 1]) + content[-69:])
    assert is_kept(first, read_split(config, "train"))
    assert file.read_bytes() == content


def test_cache_that_cannot_be_written_is_done_without(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_coco(tmp_path / "set")
    cache.parent.write_text("a file where a folder should be")
    caplog.set_level(logging.WARNING, "ppdist.data")
    assert not is_kept(read_split(config, "train"), read_split(config, "val"))
    (line,) = caplog.messages  # both splits
    assert f"{cache}/annotations: " in line


def of_ranks(root: str) -> list[str]:
    """The files that a rank has its set from: with the root of the others, and with its own."""
    comm.init("cpu", DistributedConfig())
    keep_all(pytest.MonkeyPatch())
    os.environ["XDG_CACHE_HOME"] = f"{root}/cache"
    config, files = coco_config(Path(root)), []
    for place in (root, f"{root} of rank {comm.rank()}"):
        (dataset,) = annotation_cache.read_on_host(lambda: [read_split(config, "train")], place)
        assert dataset is not None
        files.append(Records.of(dataset.records).file)
    return files


def test_ranks_of_a_host_map_what_one_has_read(tmp_path: Path) -> None:
    write_coco(tmp_path)
    one, other = run_on_ranks(2, f"{__name__}:of_ranks", str(tmp_path))
    assert one == other and all(one)
    assert len([*tmp_path.glob("cache/ppdist/annotations/??/*")]) == 2  # it, and its sources


def test_check_that_fails_on_what_was_kept_looks_anew(cache: Path, tmp_path: Path) -> None:
    config = write_coco(tmp_path / "set")
    read_split(config, "train")
    (tmp_path / "set" / "images" / "001.jpg").unlink()
    with raises("image_missing"):
        read_split(config, "train")


def test_set_of_a_store_is_not_kept(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    import fsspec

    write_coco(tmp_path / "set")
    disk, memory = tmp_path / "set", fsspec.filesystem("memory")
    memory.put(str(disk), "/kept-set", recursive=True)
    config = coco_config(disk).model_copy(update={"root": "memory://kept-set"})
    first, again = read_twice(config)
    assert len(first.records) == 4 and not is_kept(first, again)
