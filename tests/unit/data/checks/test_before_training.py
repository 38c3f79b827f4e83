"""Both splits checked before training."""

import logging
import os
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from ppdist.common.job import RESTART_VARIABLE
from ppdist.config.data import DataConfig
from ppdist.data.checks import before_training
from ppdist.data.checks.before_training import check_before_training, map_in_threads
from ppdist.data.checks.images import ImageCheck
from ppdist.data.datasets.build import read_split
from ppdist.distributed import progress, store
from ppdist.runtime.decoder import Damage
from tests.errors import raises
from tests.unit.data.corpus import write_clean_coco

pytestmark = pytest.mark.usefixtures("checked_here")


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def broken(tmp_path) -> DataConfig:
    """One of two training images is cut short; the other is also in the validation split."""
    root = tmp_path / "set"
    root.mkdir()
    config = write_clean_coco(root)
    file = root / "images" / "1.jpg"
    file.write_bytes(file.read_bytes()[:-200])
    (root / "images" / "2.jpg").write_bytes((root / "images" / "0.jpg").read_bytes())
    return config


def _check(config: DataConfig):
    return check_before_training(
        config, read_split(config, "train"), read_split(config, "val"), workers=2
    )


def test_training_learns_of_bad_images_before_it_starts(home, broken, caplog):
    train, val, warned, pixels = _check(broken)
    why = "the JPEG data end early (incomplete file)"
    text = f"{broken.root}/images/1.jpg: {why}"
    assert train.unreadable == {1: why} and val.unreadable == {}
    assert pixels.startswith("header ")
    assert len(warned) == 2  # who called warns, once its log is open
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    assert "image_truncated: 1 of 2" in warned[0] and text in warned[0]
    assert warned[1].startswith("leakage: 1 of 2 ")


def test_training_is_told_what_the_check_of_data_knows(home, tmp_path):
    """Of doubles, and where no image is good."""
    config = write_clean_coco(tmp_path)
    grey = np.random.default_rng(0).integers(0, 256, (48, 64), np.uint8)
    assert cv2.imwrite(str(tmp_path / "images" / "0.png"), grey)
    (tmp_path / "images" / "1.png").write_bytes((tmp_path / "images" / "0.png").read_bytes())
    (tmp_path / "images" / "2.jpg").write_bytes(b"no image")
    train = tmp_path / "train.json"
    train.write_text(train.read_text().replace(".jpg", ".png"))
    good = read_split(config, "train")
    (line,) = check_before_training(config, good, None, workers=2).lines
    assert "image_duplicate: 1 of 2" in line and "both are used" in line
    with raises("no_good_image"):
        _check(config)


def test_a_check_is_made_again_only_when_a_file_changed(home, broken, monkeypatch, caplog):
    first = _check(broken)
    checks = []
    original = before_training.check_files
    monkeypatch.setattr(
        before_training, "check_files", lambda *a, **k: checks.append(1) or original(*a, **k)
    )
    caplog.set_level(logging.INFO, "ppdist.data")
    again = _check(broken)
    assert again.train.unreadable == first.train.unreadable and again.lines == first.lines
    assert not checks and "unchanged since" in caplog.text
    assert "image_truncated" in again.lines[0]  # it is said every time
    file = os.path.join(broken.root, "images", "1.jpg")
    with open(file, "ab") as end:
        end.write(b"\xff\xd9")
    other = _check(broken)
    assert other.train.unreadable == {} and len(checks) == 2
    assert first.pixels == again.pixels != other.pixels


def test_unwritable_home_does_not_matter(tmp_path, broken, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert len(_check(broken)[0].unreadable) == 1


def test_checking_can_be_left_out(home, broken):
    train, _, lines, _ = _check(broken.model_copy(update={"check_images": "none"}))
    assert train.unreadable == {} and lines == () and not home.exists()


def test_bad_images_stop_training_where_they_are_errors(home, broken):
    with raises("image_truncated", "1.jpg: "):
        _check(broken.model_copy(update={"bad_images": "error"}))


def test_a_split_without_any_good_image_stops_training(home, broken):
    for name in ("0.jpg", "1.jpg"):
        open(os.path.join(broken.root, "images", name), "wb").close()
    with raises("no_good_image", "train.json", "0.jpg"):
        _check(broken)


def test_what_may_pass_is_not_remembered(home, broken, monkeypatch):
    (Path(broken.root) / "images" / "1.jpg").write_bytes(
        (Path(broken.root) / "images" / "0.jpg").read_bytes()
    )

    def denied(files, **options):
        good = [ImageCheck(digest=file.path) for file in files[:-1]]
        bad = Damage("image_unreadable", "Permission denied")
        return [*good, ImageCheck(bad, passing=True)]

    monkeypatch.setattr(before_training, "check_files", denied)
    with raises("no_good_image"):  # the one image of validation
        _check(broken)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert not home.exists() and _check(broken).train.unreadable == {}
    assert home.exists()


def test_check_of_a_restart_waits_for_its_images(home, broken, tmp_path, monkeypatch):
    """Read while they are away, all would be bad, and the job would end as a user's mistake."""
    train, val = read_split(broken, "train"), read_split(broken, "val")
    pictures, away = Path(broken.root) / "images", tmp_path / "away"
    pictures.rename(away)
    with raises("no_good_image"):  # at a first start
        check_before_training(broken, train, val, workers=1)
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    monkeypatch.setattr(store, "_timeout", 0.02)
    with raises("storage_unreachable"):
        check_before_training(broken, train, val, workers=1)
    monkeypatch.setattr(store, "_timeout", 1800.0)
    sleep = time.sleep
    monkeypatch.setattr(
        time, "sleep", lambda seconds: away.rename(pictures) if away.exists() else sleep(seconds)
    )
    checked = check_before_training(broken, train, val, workers=1)
    assert list(checked.train.unreadable) == [1] and checked.val.unreadable == {}
    (pictures / "2.jpg").unlink()  # one file alone is not waited for
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("nothing is away"))
    with raises("no_good_image"):  # the only one of its split
        check_before_training(broken, train, val, workers=1)


def test_a_check_says_how_far_it_is(home, broken, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_REPORT_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "ppdist.data")
    _check(broken)
    assert "2 of 2" in caplog.text and "ETA 0s" in caplog.text


def test_files_are_looked_at_by_many_threads():
    threads, together = set(), threading.Barrier(16, timeout=60)

    def look(at):
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            together.wait()  # broken where one waits for another
        return -at

    found_N = map_in_threads(look, 1000, progress.Progress(logging.getLogger(), "", 1000))
    assert found_N.tolist() == [-at for at in range(1000)]
