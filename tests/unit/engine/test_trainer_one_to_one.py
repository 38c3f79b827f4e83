"""A run of a one-to-one model from start to end: evaluated, stopped, resumed, the same weights."""

import math
from pathlib import Path

import pytest

from ppdist.common.errors import CheckpointError
from tests.unit.engine.runs import assert_same_checkpoint, records, run_to_end

OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=3", "log.every_steps=1",
    "checkpoint.every_steps=2", "optimizer.reference_batch_size=8",
)  # fmt: skip
SWITCHES = (*OVERRIDES, "model.one_to_one=true", "loss.static_assigner_epochs=1")


@pytest.mark.slow
def test_resumed_one_to_one_run_has_same_weights(shapes: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_to_end(shapes, whole, *SWITCHES, "train.max_steps=4", evaluate=True)
    run_to_end(shapes, halves, *SWITCHES, "train.max_steps=2")
    run_to_end(shapes, halves, *SWITCHES, "train.max_steps=4", resume="auto")
    assert_same_checkpoint(whole, halves)

    steps = [record for record in records(whole) if "loss_one_to_one" in record]
    assert len(steps) == 4 and all(record["loss_one_to_one"] > 0 for record in steps)
    for record in steps:
        usual = record["loss_cls"] + 2.5 * record["loss_iou"] + 0.5 * record["loss_dfl"]
        assert math.isclose(record["loss"], usual + record["loss_one_to_one"], rel_tol=1e-4)
    scores = [record for record in records(whole) if "val_loss" in record]
    assert scores and all(math.isfinite(record["val_loss"]) for record in scores)

    with pytest.raises(CheckpointError, match=r"model\.one_to_one: true then, false now"):
        run_to_end(shapes, halves, *OVERRIDES, "train.max_steps=5", resume="auto")
