"""A set in an object store: the batches of the same set on disk, whatever the store does."""

import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.common import addresses, retry
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.checks.before_training import check_before_training
from ppdist.data.checks.validate import validate
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import read_raw, read_split
from ppdist.data.datasets.convert import convert
from ppdist.data.datasets.layout import find_layout
from ppdist.data.image import read_image
from ppdist.data.transforms import pipeline
from ppdist.data.types import ImagesUnavailable
from ppdist.distributed import store as timeouts
from ppdist.storage import stores
from ppdist.storage.files import STORAGE
from tests.errors import raises
from tests.unit.data.loaders import assert_equal, loader, loader_of, warnings_in
from tests.unit.data.sets import coco_config, sharded, write_coco
from tests.unit.storage.sick import AWAY, Sick

fsspec = pytest.importorskip("fsspec")
COUNT = 13


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("set")
    write_coco(root / "files", COUNT)
    sharded(root / "files", root / "shards")
    return root


@pytest.fixture
def memory(root, tmp_path, monkeypatch, as_at_start) -> Iterator[str]:
    """The address of both sets in fsspec's store in memory, which forked workers see, too."""
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.2)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'home'}")
    filesystem = fsspec.filesystem("memory")
    for file in root.rglob("*"):
        if file.is_file():
            filesystem.pipe_file(f"/set/{file.relative_to(root)}", file.read_bytes())
    yield "memory://set"
    filesystem.rm("/set", recursive=True)


def of_store(address: str, **changes) -> DataConfig:
    return coco_config(address, **{"store_cache_gib": 0.0, **changes})


@pytest.mark.parametrize("form", ["files", "shards"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_the_same_set_on_disk(form, workers, memory, root):
    config = of_store(f"{memory}/{form}", workers=workers)
    assert_equal(loader_of(config), loader(root / "files"))
    record = read_split(config, "train").records[0]
    assert record.path.startswith(f"{memory}/{form}/images/")


@pytest.mark.parametrize("form", ["files", "shards"])
def test_second_run_takes_everything_from_the_cache(form, memory, root, monkeypatch):
    config = of_store(f"{memory}/{form}", store_cache_gib=1.0)
    first = list(loader_of(config))
    sick = Sick(monkeypatch, AWAY, times=10**9)
    assert_equal(loader_of(config), first)
    assert not sick.asked


def test_what_fails_for_a_moment_is_neither_lost_nor_doubled(memory, root, monkeypatch, caplog):
    """Others can be read at the same time, which for a file would mean that this one is bad."""
    whole = list(loader(root / "files"))
    Sick(monkeypatch, AWAY, times=2, only="005")
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(pipeline, "TOLD_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "ppdist"):
        ours = list(loader_of(of_store(f"{memory}/files", workers=0)))
    assert_equal(ours, whole)
    assert not any(batch.bad_images for batch in ours)
    (line,) = [line for line in warnings_in(caplog) if "their storage is unavailable" in line]
    assert "900 s" in line


def test_store_that_stays_away_gives_a_blank_batch(memory, monkeypatch):
    monkeypatch.setattr(timeouts, "_timeout", 0.4)
    Sick(monkeypatch, AWAY, times=10**9)
    with pytest.raises(ImagesUnavailable, match=r"SlowDown; waited for 0\.2 s") as caught:
        list(loader_of(of_store(f"{memory}/files")))
    assert (
        caught.value.code == "storage_unreachable" and "reach the store again" in caught.value.fix
    )


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_image_refused_for_good_is_a_bad_one(number, memory, monkeypatch):
    failure = OSError(number, "refused", f"{memory}/files/images/005.jpg")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("nothing is waited for"))
    Sick(monkeypatch, failure, times=10**9, only="005")
    config = of_store(f"{memory}/files", workers=0)
    bad = {index for batch in loader_of(config) for index in batch.bad_images}
    assert bad == {5}


def test_ended_credentials_are_storage_that_is_away(memory, monkeypatch):
    monkeypatch.setattr(timeouts, "_timeout", 0.4)
    config = of_store(f"{memory}/files", workers=0)
    batches = loader_of(config)

    def refuse(path, what, seconds=None, **arguments):
        raise PermissionError(errno.EACCES, "the store refuses access (HTTP 403)", str(path))

    monkeypatch.setattr(stores, "_call_filesystem", refuse)
    with pytest.raises(ImagesUnavailable) as caught:
        list(batches)
    assert caught.value.code == "storage_unreachable" and "HTTP 403" in str(caught.value)


def test_missing_images_are_named_at_the_start(memory):
    fsspec.filesystem("memory").rm_file("/set/files/images/005.jpg")
    with raises("image_missing", f"{memory}/files/images/005.jpg"):
        read_split(of_store(f"{memory}/files"), "train")


@pytest.mark.parametrize("form", ["files", "shards"])
def test_checks_look_at_a_store_by_its_listing(form, memory, monkeypatch, checked_here):
    config = of_store(f"{memory}/{form}")
    dataset = read_split(config, "train")
    sick = Sick(monkeypatch, AWAY, times=0)
    assert check_before_training(config, dataset, None, 1).train.unreadable == {}
    assert validate(config, decode=False, workers=1).errors == 0 and not sick.asked
    assert validate(config, decode=True, workers=1).errors == 0 and sick.asked


def test_check_of_a_store_that_stays_away_is_no_check(memory, monkeypatch):
    """Else all its images were left out as unreadable."""
    config = of_store(f"{memory}/files")
    monkeypatch.setattr("ppdist.common.retry._START_SECONDS", 1.0)  # its children are forks
    Sick(monkeypatch, AWAY, times=10**9, only="005")
    with raises("storage_unreachable", "SlowDown"):
        validate(config, decode=True, workers=1)


def test_empty_object_is_found_by_the_check(memory):
    fsspec.filesystem("memory").pipe_file("/set/files/images/005.jpg", b"")
    config = of_store(f"{memory}/files")
    checked = check_before_training(config, read_split(config, "train"), None, 1)
    assert list(checked.train.unreadable) == [5]


def test_local_annotations_may_be_of_images_in_a_store(memory, root):
    split = SplitConfig(images=f"{memory}/files/images", annotations="set.json")
    config = DataConfig(root=str(root / "files"), train=split, val=split, store_cache_gib=0)
    dataset = read_split(config, "train")
    assert dataset.records[3].path == f"{memory}/files/images/003.jpg"
    assert read_image(dataset.records[3].path, opener=dataset.opener).shape == (48, 64, 3)


def test_addresses_in_annotations_stay_in_their_folder(memory, root, tmp_path):
    images = [
        {"id": 1, "file_name": f"{memory}/files/images/001.jpg", "width": 64, "height": 48},
        {"id": 2, "file_name": "http://169.254.169.254/x.jpg", "width": 64, "height": 48},
        {"id": 3, "file_name": "../../x.jpg", "width": 64, "height": 48},
    ]
    content = write_coco(tmp_path / "own", 3, images=images, annotations=[])
    split = SplitConfig(images=f"{memory}/files/images", annotations="set.json")
    config = content.model_copy(update={"train": split, "val": split})
    issues = []
    raw = read_raw(config, "train", issues.append)
    assert [addresses.absolute(each.path) for each in raw.images] == [images[0]["file_name"]]
    assert [issue.code for issue in issues] == ["path_outside"] * 2


def test_set_in_a_store_converts_to_files(memory, root, tmp_path):
    config = of_store(f"{memory}/shards")
    raw = read_raw(config, "train", ignore_issue)
    lines = convert(raw, "yolo", tmp_path / "out", images="copy", split="train")
    assert not any("left out" in line or "cannot be read" in line for line in lines)
    copied = (tmp_path / "out/images/train/001.jpg").read_bytes()
    assert copied == (root / "files/images/001.jpg").read_bytes()
    with raises("images_unlinkable"):
        convert(raw, "coco", tmp_path / "linked", images="link", split="train")


@pytest.mark.parametrize("form", ["voc", "yolo", "folder"])
def test_formats_of_many_files_are_refused_in_a_store(form, memory):
    config = of_store(f"{memory}/files").model_copy(update={"format": form})
    with raises("store_format"):
        read_split(config, "train")


def test_layout_of_a_store_is_to_be_written_down():
    with raises("data_not_found", "set data.root to the"):
        find_layout("s3://bucket/data.yaml")


def test_file_addresses_are_paths(root):
    one = read_split(coco_config(f"file://{root}/files"), "train").records[1].path
    assert one == f"{root}/files/images/001.jpg"


def test_addresses_with_passwords_are_refused_unshown():
    with pytest.raises(ValueError, match="through the environment") as caught:
        coco_config("https://user:secretpw@host/set")
    assert "docs/data.md" in str(caught.value)


@pytest.mark.parametrize("form", ["files", "shards"])
def test_replaced_images_are_fetched_and_trained_on(form, memory, root, tmp_path, monkeypatch):
    """Other pixels of as many bytes in the same place: the next run reads them."""
    config = of_store(f"{memory}/{form}", store_cache_gib=1.0)
    list(loader_of(config))
    place = {"files": "files/images/005.jpg", "shards": "shards/images/train-000000.tar"}[form]
    store, place = fsspec.filesystem("memory"), f"/set/{place}"
    content = bytearray(store.cat_file(place))
    at = content.rindex(b"\xff\xd9") - 40 if form == "shards" else len(content) - 40
    content[at : at + 8] = bytes(8)
    store.pipe_file(place, bytes(content))
    dataset = read_split(config, "train")  # looks anew
    pixels = [read_image(record.path, opener=STORAGE) for record in dataset.records]
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'other'}")
    config = of_store(f"{memory}/{form}", store_cache_gib=1.0)
    records = read_split(config, "train").records
    fresh = [read_image(record.path, opener=STORAGE) for record in records]
    assert all((one == other).all() for one, other in zip(pixels, fresh))
