"""Trainings of D-FINE and RT-DETR with all that a recipe can ask for."""

import math
import sys
from pathlib import Path

import pytest

from ppdist.cli import train
from ppdist.config.experiment import load_config
from ppdist.engine import run as engine_run
from tests.emulated_bfloat16 import EMULATED
from tests.unit.engine.runs import records, run_to_end

pytestmark = pytest.mark.slow

OWN = (
    "train.batch_size_per_card=4", "train.epochs=3", "log.every_steps=1",
    "checkpoint.every_steps=1", "optimizer.reference_batch_size=8", "optimizer.name=adamw",
)  # fmt: skip


def run(data: Path, output_dir: Path, steps: int, *overrides: str, **options) -> None:
    keys = (*OWN, f"train.max_steps={steps}", *overrides)
    run_to_end(data, output_dir, *keys, **{"model": "dfine", **options})


def last_scores(output_dir: Path) -> dict[str, float]:
    return [each for each in records(output_dir) if "val_loss" in each][-1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bfloat16_on_onednn(shapes, tmp_path, level) -> None:
    amp = f"train.amp={{enabled: true, dtype: bfloat16, level: {level}}}"
    keys = ["train.cpu_convolutions=auto", amp]
    run(shapes, tmp_path, 2, *keys, kernels=EMULATED, evaluate=True)
    losses = [each["loss"] for each in records(tmp_path) if "loss" in each]
    assert all(map(math.isfinite, losses))
    assert math.isfinite(last_scores(tmp_path)["val_loss"])


def test_data_and_the_name_of_a_recipe_are_enough(shapes, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(engine_run, "_draw", lambda *_: None)
    words = ["--model", "dfine_n", "--epochs", "1", "--image-size", "64", "--batch", "2"]
    own = [f"output_dir={tmp_path / 'out'}", "data.workers=0", "log.visualdl=false"]
    monkeypatch.setattr(sys, "argv", ["ppdist train", str(shapes), *words, "-o", *own])
    assert train.main() == 0
    config = load_config(tmp_path / "out" / "recipe.yml")
    assert (config.model.variant, config.model.size) == ("dfine", "n")
    assert "3.75 M parameters" in capsys.readouterr().out
    assert math.isfinite(last_scores(tmp_path / "out")["val_loss"])
