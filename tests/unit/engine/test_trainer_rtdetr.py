"""Trainings of D-FINE and RT-DETR with all that a recipe can ask for."""

import math
from pathlib import Path

import pytest

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
    keys = ["train.cpu_kernels=auto", amp]
    run(shapes, tmp_path, 2, *keys, kernels=EMULATED, evaluate=True)
    losses = [each["loss"] for each in records(tmp_path) if "loss" in each]
    assert all(map(math.isfinite, losses))
    assert math.isfinite(last_scores(tmp_path)["val_loss"])
