"""tools/ensemble.py as a user runs it, on models that nobody trained."""

import json
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.cli import ensemble
from ppdist.config.experiment import load_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.engine.build import build_model
from ppdist.models.model_card import read_card
from ppdist.models.weights import load_all_weights, read_arrays
from tests.errors import raises
from tests.project import TINY_PPYOLOE, TINY_YOLOV5, write_config

CONFIG = """
train: {epochs: 2, batch_size_per_card: 2}
evaluate: {batch_size_per_card: 3}
nms: {score_threshold: 0.0, keep: 50}
"""
DFINE = {"name": "rtdetr", "variant": "dfine", "size": "n", "queries": 20}
MODELS = {"ppyoloe": TINY_PPYOLOE, "yolov5": TINY_YOLOV5, "dfine": DFINE}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ of 5 + 5 images, and of each model NAME.yml and three files of fresh weights."""
    folder = tmp_path_factory.mktemp("ensemble")
    make_shapes(folder / "data", train=5, val=5, size=64, seed=0)
    for name in ("ppyoloe", "yolov5"):
        write_models(folder, name, 3)
    return folder


def write_models(folder: Path, name: str, count: int) -> None:
    """NAME.yml and so many files of fresh weights."""
    file = write_config(folder, CONFIG, MODELS[name], name=f"{name}.yml")
    for seed in range(count):
        model = build_model(load_config(str(file), [f"seed={seed}"]))
        paddle.save(model.state_dict(), str(folder / f"{name}{seed}.pdparams"))


def run(*arguments: object) -> None:
    """The tool in this process, which need not load Paddle anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ensemble.py", *map(str, arguments)])
        ensemble.main()


def pair(project: Path, name: str) -> str:
    return f"{project / name}.yml:{project / name}0.pdparams"


@pytest.mark.slow
def test_models_sizes_and_flips_give_one_coco_result(project: Path) -> None:
    fused, names = project / "fused", ("ppyoloe", "yolov5", "dfine")  # cells and queries
    write_models(project, "dfine", 1)
    models = [pair(project, name) for name in names]
    run("fuse", "--model", *models, "--scales", "1,1.5", "--flip", "--out", fused)
    scores = json.loads((fused / "scores.json").read_text())
    views = ["64x64", "64x64 mirrored", "96x96", "96x96 mirrored"]
    assert [member["name"] for member in scores["members"]] == [
        f"{project / name}0.pdparams {view}" for name in names for view in views
    ]
    assert 0 <= scores["fused"]["mAP"] <= 1
    found = json.loads((fused / "detections.json").read_text())
    assert {entry["image_id"] for entry in found} == {1, 2, 3, 4, 5}
    for image in range(1, 6):
        of_image = [entry["score"] for entry in found if entry["image_id"] == image]
        assert 0 < len(of_image) <= 300 and of_image == sorted(of_image, reverse=True)


def average(project: Path, *more: object) -> list[object]:
    weights = [project / f"ppyoloe{seed}.pdparams" for seed in range(3)]
    return ["average", "-c", project / "ppyoloe.yml", "--weights", *weights, *more]


@pytest.mark.slow
def test_model_soup_has_own_statistics_and_loads(project: Path) -> None:
    one = project / "one.safetensors"
    run(*average(project, "--out", one))
    files = [read_arrays(project / f"ppyoloe{seed}.pdparams") for seed in range(3)]
    made, norms = read_arrays(one), 0
    for key, value in made.items():
        mean = np.mean([file[key].astype(np.float64) for file in files], axis=0)
        if key.endswith(("._mean", "._variance")):
            norms += bool((value != mean.astype(np.float32)).any())
        else:
            np.testing.assert_array_equal(value, mean.astype(np.float32))
    assert norms > 100, "made anew from images"
    card = read_card(one)
    assert len(card.class_names) == 3 and card.source == "average of 3 weights"
    load_all_weights(build_model(load_config(str(project / "ppyoloe.yml"), [])), one)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--model", "a.yml:b", "--method", "nms"], "foreign_option"),
        (["--detections", "a.json"], "foreign_option"),
        (["--model", "cfg.yml"], "option_invalid"),
    ],
)
def test_what_does_not_go_together_is_one_message(arguments, code, tmp_path: Path) -> None:
    with raises(code):
        run("fuse", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unwritable_suffix_is_refused_before_work(project: Path) -> None:
    with raises("weights_format", "soup.bin"):
        run(*average(project, "--out", project / "soup.bin"))
