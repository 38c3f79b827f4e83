"""The storage of images goes away and comes back: it is waited for, and the stream is the same."""

import errno
import logging
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppdist.common import retry
from ppdist.common.errors import StorageError
from ppdist.common.opener import DISK, Opener
from ppdist.config.augment import AugmentConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.transforms.pipeline import TrainSamples
from ppdist.data.types import ImagesUnavailable, SampleKey
from ppdist.distributed import heartbeat, store
from tests.unit.data.loaders import assert_equal, eval_loader, loader, warnings_in
from tests.unit.data.sets import coco_config, write_coco

COUNT = 24


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("set")
    write_coco(root, COUNT)
    return root


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "set"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch) -> None:
    """Shorter than in use, and longer than a rank takes to look after its workers."""
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.6)


def outages_in(caplog) -> list[str]:
    return [line for line in warnings_in(caplog) if "their storage is unavailable" in line]


def back_later(away: Path, place: Path, seconds: float = 0.5) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: away.rename(place))
    timer.start()
    return timer


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_away_for_a_while_changes_no_batch(folder, workers, caplog):
    whole = list(loader(folder))
    images, away, batches = folder / "images", folder / "away", []
    with caplog.at_level(logging.INFO, "ppdist"):
        for number, batch in enumerate(loader(folder, workers=workers, worker_timeout_seconds=2.0)):
            batches.append(batch)
            if number == 1:
                images.rename(away)
                timer = back_later(away, images)
    timer.join()
    assert_equal(batches, whole)
    assert not any(batch.bad_images for batch in batches)
    (warning,) = outages_in(caplog)
    assert "No such file" in warning and "900 s" in warning
    assert len([line for line in warnings_in(caplog) if "can be read again" in line]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_errors_of_a_network_disk_are_waited_out(folder, number, monkeypatch, caplog):
    whole = list(loader(folder))
    opened, sick, refused = os.open, folder / "sick", folder / "refused"

    def refusing(path, *how, **more):
        if str(path).endswith(".jpg") and sick.exists():
            refused.touch()
            raise OSError(number, "of a network disk", path)
        return opened(path, *how, **more)

    def mend():
        while not refused.exists():  # a worker may take long to start
            time.sleep(0.01)
        time.sleep(0.5)
        sick.unlink()

    monkeypatch.setattr(os, "open", refusing)
    one = loader(folder, workers=1)
    sick.touch()
    mending = threading.Thread(target=mend, daemon=True)
    mending.start()
    with caplog.at_level(logging.WARNING, "ppdist"):
        batches = list(one)
    mending.join(10)
    assert_equal(batches, whole)
    assert len(outages_in(caplog)) == 1


def test_empty_mount_point_is_an_outage_too(folder, caplog):
    whole = list(loader(folder))
    one = loader(folder)
    images, away = folder / "images", folder / "away"
    images.rename(away)
    images.mkdir()

    def mount() -> None:
        images.rmdir()
        away.rename(images)

    timer = threading.Timer(0.3, mount)
    timer.start()
    with caplog.at_level(logging.WARNING, "ppdist"):
        assert_equal(one, whole)
    timer.join()
    assert len(outages_in(caplog)) == 1


def test_deleted_file_is_bad_and_not_waited_for(folder, monkeypatch, caplog):
    one = loader(folder)
    (folder / "images" / "005.jpg").unlink()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("nothing is waited for"))
    with caplog.at_level(logging.WARNING, "ppdist"):
        bad = {index for batch in one for index in batch.bad_images}
    assert bad == {5} and outages_in(caplog) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_what_stays_away_gives_a_blank_batch(folder, workers, monkeypatch, caplog):
    monkeypatch.setattr(store, "_timeout", 1.6)
    beats: list[None] = []
    monkeypatch.setattr(heartbeat, "alive", lambda: beats.append(None))
    one = loader(folder, workers=workers)
    batches = iter(one)
    next(batches)
    (folder / "images").rename(folder / "away")
    with caplog.at_level(logging.WARNING, "ppdist"), pytest.raises(ImagesUnavailable) as caught:
        list(batches)
    assert caught.value.code == "storage_unreachable" and "waited for 0.8 s" in str(caught.value)
    blank = caught.value.blank
    assert not blank.real and blank.image_index_B.numpy().tolist() == [-1]
    assert np.all(blank.images_B3HW.numpy() == 0) and blank.images_B3HW.shape[2:] != [0, 0]
    assert len(outages_in(caplog)) == 1 and beats and one.worker_ids == []
    (folder / "away").rename(folder / "images")
    assert len(list(one)) == 12  # a new iteration finds them


def test_evaluation_waits_for_its_images(folder, caplog):
    one = eval_loader(folder, workers=1, batch_size=5)
    whole = list(one)
    (folder / "images").rename(folder / "away")
    timer = back_later(folder / "away", folder / "images", 0.3)
    with caplog.at_level(logging.WARNING, "ppdist"):
        assert_equal(one, whole)
    timer.join()
    assert len(outages_in(caplog)) == 1


def test_cache_whose_disk_is_away_changes_nothing(folder, tmp_path, monkeypatch):
    whole, place = list(loader(folder)), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", f"{place}")
    options = {"workers": 1, "cache": "disk"}
    assert_equal(loader(folder, **options), whole)
    batches = []
    for number, batch in enumerate(loader(folder, **options)):
        batches.append(batch)
        if number == 2:
            place.rename(tmp_path / "away")
            place.touch()
    assert_equal(batches, whole)
    assert not any(batch.bad_images for batch in batches)


def plain_samples(folder: Path, opener: Opener = DISK) -> TrainSamples:
    """Each reads one image."""
    dataset = replace(read_split(coco_config(folder), "train"), opener=opener)
    still = AugmentConfig(distort=0, expand=0, crop=0, flip=0)
    return TrainSamples(dataset, "skip", still, 0)


def flapping(folder: Path, monkeypatch, storage_seconds: float):
    """Samples whose storage is away for 4 s before each image that is read; the clock is ours."""
    samples, clock, away = plain_samples(folder), [1000.0], [True]
    samples.storage_seconds = storage_seconds
    opened = os.open

    def refusing(path, *how, **more):
        if str(path).endswith(".jpg") and away[0]:
            raise OSError(errno.ESTALE, "of a network disk", path)
        return opened(path, *how, **more)

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] >= 1004:
            away[0] = False

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    samples.pause = sleep
    return samples, clock, away


def test_storage_that_comes_and_goes_is_one_outage(folder, monkeypatch):
    """Else each image of a step had its own 15 s, and gloo gives up after 30."""
    samples, clock, away = flapping(folder, monkeypatch, 10.0)
    samples.make(SampleKey(0, 0, 48, 64))
    waited = clock[0] - 1000
    assert 4 <= waited < 10
    away[0] = True
    samples.pause = lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    with pytest.raises(StorageError):
        samples.make(SampleKey(0, 1, 48, 64))
    assert clock[0] - 1000 == 10
    clock[0] += 3  # without a wait: so much may be waited again
    with pytest.raises(StorageError):
        samples.make(SampleKey(0, 1, 48, 64))
    assert 2.9 < clock[0] - 1013 <= 10


def test_images_that_kill_a_worker_are_not_opened_to_look(folder):
    opened = []

    class Noting(Opener):
        def can_be_read(self, path):
            opened.append(Path(path).name)

    samples = plain_samples(folder, Noting())
    samples.storage_seconds = 60.0
    samples.blocklist_N[1:] = 9
    samples.blocklist_N[3] = 0
    (folder / "images").rename(folder / "away")
    samples.pause = lambda seconds: (folder / "away").rename(folder / "images")
    samples.make(SampleKey(0, 0, 48, 64))
    assert {*opened} == {Path(samples.path(3)).name}
