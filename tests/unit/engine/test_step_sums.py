"""Means of an epoch that was interrupted, against those of one that was not."""

import hashlib
import json
import math

from ppdist.common.records import MetricRecords
from ppdist.engine.clock import StepSeconds
from ppdist.engine.step_sums import StepSums
from ppdist.lab.tune.trial import Curve
from ppdist.metrics.run import history
from tests.unit.engine.runs import records, said, spoil, train
from tests.unit.engine.tiny import FASTEST, step_result

# ten images in batches of four: three steps an epoch
OVERRIDES = ("train.batch_size_per_card=4", "train.epochs=3", "checkpoint.every_steps=1")
TIMES = {"seconds", "images_per_second", "data_share", "memory_gib"}
SPEEDS = TIMES | {"time", "data_seconds", "step_seconds", "eval_seconds"}


def exit_code(data, folder, *overrides, **options):
    return train(data, folder, *OVERRIDES, *overrides, model=FASTEST, **options)[0]


def epochs_of(folder):
    """Rows of the history without times."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in history(folder)]


def numbers_of(folder, kind):
    found = getattr(MetricRecords.of(records(folder)), kind)
    return [{k: v for k, v in record.items() if k not in SPEEDS} for record in found]


def test_a_rollback_amid_an_epoch_leaves_nothing_of_what_it_undid(shapes, tmp_path):
    rules = ("train.bad_steps_limit=2", "checkpoint.every_steps=5", "log.every_steps=1")
    # Steps 7 and 8 (from 1) are not finite once; the run goes back to step 5, in epoch 2.
    assert exit_code(shapes, tmp_path, *rules, before=lambda trainer: spoil(trainer, (6, 7))) == 0
    (rollback,) = MetricRecords.of(records(tmp_path)).rollbacks
    assert (rollback["returned_from_step"], rollback["step"]) == (8, 5)
    losses = [record["loss"] for record in numbers_of(tmp_path, "steps")]
    assert len(losses) == 9
    means = [(losses[at] + losses[at + 1] + losses[at + 2]) / 3 for at in (0, 3, 6)]
    assert [row["loss"] for row in epochs_of(tmp_path)] == means
    assert [record["step"] for record in numbers_of(tmp_path, "epochs")] == [3, 6, 9]


def without_sums(folder):
    """Makes the newest checkpoint one of an earlier version."""
    (step,) = folder.glob("checkpoints/step-*5")
    state = json.loads((step / "state.json").read_text())
    del state["epoch_sums"], state["record_sums"]
    content = json.dumps(state).encode()
    (step / "state.json").write_bytes(content)
    manifest = json.loads((step / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"]["state.json"] = {"sha256": digest, "bytes": len(content)}
    (step / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_without_sums_marks_its_epoch_as_partial(shapes, tmp_path):
    assert exit_code(shapes, tmp_path, "train.max_steps=5") == 0
    without_sums(tmp_path)
    assert exit_code(shapes, tmp_path, resume=True) == 0
    assert [row.get("partial") for row in history(tmp_path)] == [None, True, None]
    assert "epoch 2: its means" in said(tmp_path)


def test_an_evaluation_amid_an_epoch_has_a_row_of_its_own(tmp_path):
    lines = [
        {"step": 2, "epoch": 2 / 3, "mAP": 0.1, "val_loss": 3.0, "eval_seconds": 1.0},
        {"step": 3, "epoch_end": {"epoch": 1, "loss": 2.0}},
        {"step": 4, "epoch": 4 / 3, "mAP": 0.2, "val_loss": 2.0, "eval_seconds": 1.0},
        {"step": 6, "epoch": 2.0, "mAP": 0.3, "val_loss": 1.0, "eval_seconds": 1.0},
        {"step": 6, "epoch_end": {"epoch": 2, "loss": 1.0}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [[row.get(key) for key in ("epoch", "step", "loss", "mAP")] for row in history(tmp_path)]
    middle = [[0.666667, 2, None, 0.1], [1, 3, 2.0, None], [1.333333, 4, None, 0.2]]
    assert rows == [*middle, [2, 6, 1.0, 0.3]]
    curve = Curve.of(tmp_path, "mAP")
    assert curve.values() == {1: 0.1, 2: 0.3}, "trials are compared at the ends of epochs"


def test_sums_of_other_groups_are_left_out():
    saved = StepSums(after=4, steps=2, applied=2, losses={"loss": 3.0})
    assert StepSums.resumed(saved, 6, 4) == saved
    assert StepSums.resumed(saved, 6, 3) == StepSums(after=6)  # at the end of one
    assert StepSums.resumed(saved, 7, 5) == StepSums(after=7, partial=True)
    assert StepSums.resumed(None, 7, 5).partial and not StepSums.resumed(None, 10, 5).partial


def test_a_value_that_is_not_finite_is_json():
    sums = StepSums()
    for loss in (1.0, math.nan, 2.0):
        sums.add(step_result(losses={"loss": loss}), StepSeconds(1.0, 1.0, 0.5), 0.1)
    assert StepSums.model_validate_json(sums.model_dump_json(), strict=True) == sums
    assert math.isnan(sums.mean_losses()["loss"]) and sums.images_per_second == 8.0
