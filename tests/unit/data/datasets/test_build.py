"""What must hold before training: the files are there."""

import os
from pathlib import Path

import pytest

from ppdist.common.errors import DataError
from ppdist.data.datasets.build import read_split
from tests.unit.data.corpus import write_clean_coco


def test_dangling_link_is_missing_image(tmp_path):
    settings, file = write_clean_coco(tmp_path), tmp_path / "images" / "1.jpg"
    file.rename(tmp_path / "images" / "real.jpg")
    os.symlink("real.jpg", file)
    assert len(read_split(settings, "train").records) == 2
    file.unlink()
    os.symlink("nowhere.jpg", file)
    with pytest.raises(DataError) as caught:
        read_split(settings, "train")
    assert caught.value.code == "image_missing"


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    settings = write_clean_coco(tmp_path)
    original, images = os.scandir, Path(settings.root) / "images"

    def scandir(folder):
        if os.fspath(folder) == str(images):
            raise PermissionError(13, "Permission denied", folder)
        return original(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError) as caught:
        read_split(settings, "train")
    assert str(caught.value) == (
        f"{images}: the folder of images that {tmp_path}/train.json lists cannot be listed: "
        f"Permission denied; give this user the right to read it"
    )
