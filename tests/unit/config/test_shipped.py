"""Shipped configs by name, from any folder; a file of the user's comes first."""

from pathlib import Path

import pytest

from ppdist.config import shipped
from ppdist.config.experiment import load_config
from tests.errors import raises


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "yolov5n",
        "yolov5n_300e_coco",
        "yolov5n_300e_coco.yml",
        "configs/yolov5/yolov5n_300e_coco.yml",
        "yolov5/yolov5n_300e_coco",
    ],
)
def test_config_is_found_by_any_of_its_names(name):
    config = load_config(name)
    assert config.model.size == "n" and config.output_dir == "output/yolov5n_300e_coco"


def test_every_recipe_and_short_name_has_one_file():
    files = shipped.recipes()
    stems = [path.stem for path in shipped.folder().rglob("*.yml")]
    assert len(stems) == len(set(stems)) and len(files) > 30
    assert {"yolov5s", "ppyoloe_plus_s", "dfine_s", "rtdetr_r18"} <= {*shipped.short_names()}
    assert set(shipped.short_names().values()) <= set(files)
    assert not set(shipped.short_names()) & set(files)


def test_file_of_the_user_comes_before_a_shipped_one(elsewhere):
    (elsewhere / "yolov5n").write_text("_BASE_: yolov5s\nseed: 7\n", encoding="utf-8")
    config = load_config("yolov5n")
    assert config.seed == 7 and config.model.size == "s"


def test_base_of_a_users_file_may_be_shipped(elsewhere):
    (elsewhere / "mine.yml").write_text("_BASE_: [_base_/voc.yml, yolov5n]\n", encoding="utf-8")
    assert load_config("mine.yml").data.format == "coco"


@pytest.mark.parametrize("name", ["yolov5q", "yolo5n.yml", "../configs/yolov5/yolov5n"])
def test_unknown_name_is_told_the_near_ones(name):
    with raises("config_missing", "did you mean yolov5n"):
        load_config(name.replace("5q", "5nn"))


def test_installed_package_has_its_own_copy(elsewhere, monkeypatch):
    (elsewhere / "ppdist" / "configs").mkdir(parents=True)
    monkeypatch.setattr(shipped, "_PACKAGE", elsewhere / "ppdist")
    assert shipped.folder() == elsewhere / "ppdist" / "configs" and not shipped.recipes()
