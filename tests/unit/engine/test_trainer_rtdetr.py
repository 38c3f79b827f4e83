"""Trainings of D-FINE and RT-DETR with all that a recipe can ask for."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from ppdist.cli import train
from ppdist.config.experiment import load_config
from ppdist.engine import run as engine_run
from ppdist.models.weights import read_arrays
from tests.emulated_bfloat16 import EMULATED
from tests.unit.engine.runs import assert_same_checkpoint, records, run_to_end

pytestmark = pytest.mark.slow

OWN = (
    "train.batch_size_per_card=4", "train.epochs=3", "log.every_steps=1",
    "checkpoint.every_steps=1", "optimizer.reference_batch_size=8", "optimizer.name=adamw",
)  # fmt: skip
# As the recipes have it: groups, sizes, last epochs without strong augmentation, a new average.
RECIPE = (
    "optimizer.groups=[{match: backbone.*.bn}, {match: backbone, lr_factor: 0.5}]",
    "train.multi_scale=[[64, 64], [96, 96]]",
    "data.augment.plain_epochs=1",
    "train.ema={decay: 0.9999, ramp_steps: 1000, restart_decay: 0.999}",
    "loss.classification=mal",
    "model.activation=silu",
)


def run(data: Path, output_dir: Path, steps: int, *overrides: str, **options) -> None:
    keys = (*OWN, f"train.max_steps={steps}", *overrides)
    run_to_end(data, output_dir, *keys, **{"model": "dfine", **options})


@pytest.fixture(scope="module")
def trained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps in the way of DEIM, with an evaluation."""
    folder = tmp_path_factory.mktemp("dfine")
    run(shapes, folder, 8, *RECIPE, evaluate=True)
    return folder


def test_a_run_of_a_recipe_resumes_to_the_same_weights(shapes, trained, tmp_path) -> None:
    run(shapes, tmp_path, 5, *RECIPE)
    run(shapes, tmp_path, 8, *RECIPE, resume=True, evaluate=True)
    assert_same_checkpoint(trained, tmp_path)
    steps = [each for each in records(trained) if "loss_denoising" in each]
    terms = ("loss", "loss_cls", "loss_l1", "loss_giou", "loss_fgl", "loss_ddf", "loss_denoising")
    assert len(steps) == 8
    assert all(math.isfinite(each[name]) for each in steps for name in terms)
    scores = [each for each in records(trained) if "val_loss" in each]
    assert scores and all(math.isfinite(each["val_loss"]) for each in scores)


def test_what_is_frozen_stays_and_the_rest_moves(shapes, trained, tmp_path) -> None:
    start = f"model.pretrained={trained}"
    run(shapes, tmp_path, 1, *RECIPE[4:], start, "train.freeze=2", "optimizer.layer_decay=0.5")
    before, after = (read_arrays(folder) for folder in (trained, tmp_path))
    moved = {key: np.abs(after[key] - before[key]).max() for key in before if "weight" in key}
    frozen = ("backbone.stem.", "backbone.stages.0.")
    assert all((value == 0) == key.startswith(frozen) for key, value in moved.items())


def last_scores(output_dir: Path) -> dict[str, float]:
    return [each for each in records(output_dir) if "val_loss" in each][-1]


@pytest.mark.parametrize("model", ["dfine", "rtdetr"])
def test_the_batch_is_tried_out(shapes, tmp_path, model) -> None:
    keys = ["train.batch_size_per_card=auto", "train.auto_batch_most=2"]
    run(shapes, tmp_path, 2, *keys, model=model, evaluate=True)
    assert math.isfinite(last_scores(tmp_path)["val_loss"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bfloat16_on_onednn(shapes, tmp_path, level) -> None:
    amp = f"train.amp={{enabled: true, dtype: bfloat16, level: {level}}}"
    keys = ["train.cpu_convolutions=auto", amp]
    run(shapes, tmp_path, 2, *keys, kernels=EMULATED, evaluate=True)
    losses = [each["loss"] for each in records(tmp_path) if "loss" in each]
    assert all(map(math.isfinite, losses))
    assert math.isfinite(last_scores(tmp_path)["val_loss"])


def test_a_teacher_of_the_family_teaches(shapes, trained, tmp_path) -> None:
    run(shapes, tmp_path, 2, f"distill={{teacher: {trained}}}", model="dfine")
    (first, *_) = [each for each in records(tmp_path) if "loss" in each]
    assert [name for name in first if name.startswith("loss_distill")]


def test_data_and_the_name_of_a_recipe_are_enough(shapes, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(engine_run, "_draw", lambda *_: None)
    words = ["--model", "dfine_n", "--epochs", "1", "--image-size", "64", "--batch", "2"]
    own = [f"output_dir={tmp_path / 'out'}", "data.workers=0", "log.visualdl=false"]
    monkeypatch.setattr(sys, "argv", ["ppdist train", str(shapes), *words, "-o", *own])
    assert train.main() == 0
    config = load_config(tmp_path / "out" / "recipe.yml")
    assert (config.model.variant, config.model.size) == ("dfine", "n")
    assert "rtdetr dfine n, 3.75 M parameters" in capsys.readouterr().out
    assert math.isfinite(last_scores(tmp_path / "out")["val_loss"])
