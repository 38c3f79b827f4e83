"""The files of configs/: each loads, says what it is, and comes to the numbers it promises."""

import math
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.shipped import find_config
from ppdist.config.study import load_study
from ppdist.data.datasets.build import read_split
from ppdist.engine.build import build_schedule_setup
from ppdist.models.base import weight_sizes
from ppdist.models.build import build_model
from ppdist.optim.optimizer import parameter_groups
from tools import docs

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
SHIPPED = sorted(
    path for path in CONFIGS.rglob("*.yml") if path.parent.name not in ("_base_", "studies")
)
STUDIES = sorted((CONFIGS / "studies").glob("*.yml"))
COMMAND = re.compile(r"^#.*?((?:fleetrun|python) .*?tools/(?:train|tune)\.py .*)$", re.MULTILINE)
IMAGES = docs.TRAINING_IMAGES
TEMPLATES = {
    "my_data.yml",
    "fine_tune_yolov5s.yml",
    "fine_tune_ppyoloe_plus_s.yml",
}  # files to copy: their commands name the copy


def named(path: Path) -> str:
    return f"{path.relative_to(CONFIGS)}"


@cache
def shipped(path: Path) -> ExperimentConfig:
    return load_config(path)


def header_of(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


@pytest.mark.parametrize("path", [*SHIPPED, *STUDIES], ids=named)
def test_a_header_says_what_it_is_and_how_to_run_it(path):
    header = header_of(path)
    command = COMMAND.search(header)
    assert command, "the header has no command"
    named_files = [file for line in COMMAND.findall(header) for file in line.split()]
    named_files = [file for file in named_files if file.endswith(".yml")]
    if path.name in TEMPLATES:
        assert set(named_files) == {path.name}
    else:
        assert str(path.relative_to(REPOSITORY)) in named_files
        assert all((REPOSITORY / file).is_file() for file in named_files)
    assert re.search(r"arXiv:\d{4}\.\d{5}", header + path.read_text(encoding="utf-8")) or (
        path in STUDIES or "imagenet" in path.name
    )


@pytest.mark.parametrize("world", [1, 8, 32])
def test_every_recipe_builds_for_any_number_of_cards(monkeypatch, world):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", f"{world}")
    for path in SHIPPED:
        config = shipped(path)
        if (config.train.total_batch or math.inf) < world * config.train.images_per_card:
            continue  # a recipe for fewer cards
        size = IMAGES[Path(config.data.root).name]
        schedule = build_schedule_setup(config, size)
        assert schedule.total_steps > 0, path
        assert 0 < schedule.lr_scheduler.peak_lr < 0.2, path
        assert schedule.lr_scheduler.warmup_steps <= schedule.schedule_steps // 2, path
        for step in (0, schedule.total_steps // 2, schedule.total_steps - 1):
            assert 0 < schedule.lr_scheduler(step) <= schedule.lr_scheduler.peak_lr, path


DETRS = [path for path in SHIPPED if path.parent.name in ("rtdetr", "dfine")]
QUICK = ("dfine_n", "rtdetr_r18", "deim_dfine_s")  # to build


@pytest.mark.parametrize(
    "path",
    [path if path.name.startswith(QUICK) else pytest.param(path, marks=pytest.mark.slow)
     for path in DETRS],
    ids=named,
)  # fmt: skip
def test_groups_of_a_recipe_are_of_its_model(path):
    config = shipped(path)
    model = build_model(config.model)
    grouped = parameter_groups(model, config.optimizer.groups)
    assert all(key.startswith("backbone.") for key in grouped)
    if config.optimizer.groups:
        own = {key for key in grouped if key.endswith(".bn.weight")}
        assert {*grouped} == {key for key in weight_sizes(model) if key.startswith("backbone.")}
        dense = "deim" in path.name and config.model.size in "sm"
        assert {grouped[key].lr_factor == 1 for key in own} == {dense}


@pytest.mark.parametrize(
    ("name", "epochs", "last", "rate", "batch", "backbone"),
    [
        ("rtdetr_r18", 72, 0, 1e-4, 16, 0.1),
        ("rtdetrv2_r34", 120, 3, 1e-4, 16, 0.5),
        ("dfine_n", 160, 12, 8e-4, 128, 0.5),
        ("dfine_s", 132, 12, 2e-4, 32, 0.5),
        ("dfine_l", 80, 8, 2.5e-4, 32, 0.05),
        ("deim_dfine_m", 102, 12, 4e-4, 32, 0.1),
        ("deim_dfine_x", 58, 8, 5e-4, 32, 0.01),
    ],
)
def test_recipes_are_the_published(name, epochs, last, rate, batch, backbone):
    config = load_config(find_config(name))
    optimizer, augment = config.optimizer, config.data.augment
    assert (config.train.epochs, augment.plain_epochs) == (epochs, last)
    assert (optimizer.lr, optimizer.reference_batch_size) == (rate, batch)
    assert optimizer.groups[-1].lr_factor == backbone and config.train.clip_norm == 0.1
    assert (config.loss.classification == "mal") == (config.model.activation == "silu")
    windows = {"deim_dfine_m": (4, 49), "deim_dfine_x": (4, 29)}
    assert augment.mosaic_whole == (name in windows)
    assert augment.combine_epochs == windows.get(name)


@pytest.mark.parametrize(
    ("recipe", "world", "expected"),
    [
        # total batch, images of a pass on a rank, rate, epochs
        ("one_card", 1, (64, 16, 0.001, 80)),
        ("eight_cards", 8, (64, 8, 0.001, 80)),
        ("eight_cards", 4, (64, 8, 0.001, 80)),
    ],
)
def test_one_and_eight_cards_make_the_same_steps(monkeypatch, recipe, world, expected):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", f"{world}")
    config = load_config(CONFIGS / "examples" / f"coco_{recipe}.yml")
    schedule = build_schedule_setup(config, IMAGES["coco"])
    epochs = schedule.total_steps / schedule.steps_per_epoch
    found = (
        schedule.total_batch,
        schedule.batch_size_per_card,
        schedule.lr_scheduler.peak_lr,
        epochs,
    )
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("path", STUDIES, ids=named)
def test_every_study_names_known_keys_and_values(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    study = load_study(path)
    changed = [items for items in study.variants.values() if items]
    assert len(set(changed)) == len(changed), "two variants are the same"


def test_the_switches_are_each_one_change_of_the_base(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    study = load_study(CONFIGS / "studies" / "bccd_switches.yml")
    assert study.variants["plain"] == () and len(study.seeds) == 3
    base = load_config(study.config, study.overrides)
    for name, items in study.variants.items():
        if name != "plain":
            assert load_config(study.config, (*study.overrides, *items)) != base, name


def test_the_lists_of_voc_are_made_as_its_file_says(tmp_path):
    for year, stems in {"2007": "abc", "2012": "de"}.items():
        folder = tmp_path / "VOCdevkit" / f"VOC{year}"
        for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (folder / name).mkdir(parents=True)
        for stem in stems:
            Image.new("RGB", (40, 30)).save(folder / "JPEGImages" / f"{stem}.jpg")
            (folder / "Annotations" / f"{stem}.xml").write_text(
                f"<annotation><filename>{stem}.jpg</filename>"
                f"<size><width>40</width><height>30</height><depth>3</depth></size>"
                f"<object><name>sheep</name><bndbox><xmin>3</xmin><ymin>4</ymin><xmax>20</xmax>"
                f"<ymax>25</ymax></bndbox></object></annotation>"
            )
        lists = folder / "ImageSets/Main"
        (lists / "trainval.txt").write_text("".join(f"{stem}\n" for stem in stems[:2]))
        if year == "2007":
            (lists / "test.txt").write_text("c\n")
    header = header_of(CONFIGS / "_base_" / "voc.yml")
    script = [line.removeprefix("#") for line in header.splitlines() if line.startswith("#   ")]
    subprocess.run(["bash", "-eu", "-c", "\n".join(script)], cwd=tmp_path, check=True, timeout=60)
    recipe = CONFIGS / "ppyoloe" / "ppyoloe_plus_s_30e_voc.yml"
    config = load_config(recipe, [f"data.root={tmp_path}"])
    train = read_split(config.data, "train", config.model.num_classes)
    val = read_split(config.data, "val", config.model.num_classes)
    assert [Path(record.path).stem for record in train.records] == ["a", "b", "d", "e"]
    assert [Path(record.path).stem for record in val.records] == ["c"]
    assert train.class_names[int(train.records[0].labels_M[0])] == "sheep"
