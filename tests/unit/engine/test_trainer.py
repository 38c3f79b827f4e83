"""A whole run on real files: what it leaves, resuming, stopping, numbers that are not finite."""

import json

import numpy as np
import pytest

from ppdist.models.model_card import read_card
from ppdist.models.yolov5 import P5_ANCHORS, YOLOv5
from tests.errors import raises
from tests.unit.engine.runs import records, said, train, weights
from tests.unit.engine.tiny import FASTEST

OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=4", "log.every_steps=1",
    "checkpoint.every_steps=3", "optimizer.reference_batch_size=8", "data.bad_images=error",
)  # fmt: skip
# ten images in batches of four: three steps an epoch, the last one smaller


def run(data, output_dir, *overrides, model=FASTEST, **options):
    """What `fit` returns."""
    return train(data, output_dir, *OVERRIDES, *overrides, model=model, **options)[0]


def test_a_run_leaves_what_the_contract_says(shapes, tmp_path):
    assert run(shapes, tmp_path, "train.epochs=2", evaluate=True) == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"config.yml", "environment.json", "train.log", "metrics.jsonl", "checkpoints"}
    links = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert links >= {"last", "best", "step-00000006"}
    steps = [record["step"] for record in records(tmp_path) if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]
    first = records(tmp_path)[0]
    assert first["step"] == 0 and first["derived"]["total_batch"]["value"] > 0
    needed = {"step", "epoch", "loss", "lr", "images_per_second", "data_seconds", "step_seconds"}
    assert all(needed <= set(record) for record in records(tmp_path) if "loss" in record)
    assert [record["step"] for record in records(tmp_path) if "mAP" in record] == [3, 6]
    found = {record["step"]: record for record in records(tmp_path) if "f1" in record}
    for link in ("best", "last"):
        card = read_card(tmp_path / "checkpoints" / link)
        step = int((tmp_path / "checkpoints" / link).resolve().name.removeprefix("step-"))
        known = found[step]["best_f1_threshold"] if found[step]["f1"] > 0 else None
        assert card is not None and card.best_f1_threshold == known
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["ranks"] == 1
    assert set(weights(tmp_path)) == set(weights(tmp_path, group="ema"))


@pytest.mark.slow
def test_one_set_for_both_splits_is_a_warning(shapes, tmp_path):
    one = "data.val={images: images, annotations: annotations/instances_train.json}"
    for folder, overrides, evaluate in (("a", [one], True), ("b", [one], False), ("c", [], True)):
        run(shapes, tmp_path / folder, "train.max_steps=1", *overrides, evaluate=evaluate)
        assert ("both data.train and data.val" in said(tmp_path / folder)) == (folder == "a")


def test_fitted_anchors_are_part_of_checkpoint(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(YOLOv5, "anchor_threshold", 1.2)
    before = {"anchors": None}

    def note(trainer):
        before["anchors"] = trainer.train_step.model.anchors_LA2

    run(shapes, tmp_path, "train.max_steps=1", model="yolov5", before=note)
    saved = weights(tmp_path)["head.anchors"] * np.float32([8, 16, 32])[:, None, None]
    np.testing.assert_array_equal(saved, before["anchors"])
    assert np.abs(saved - np.array(P5_ANCHORS)).max() > 1
    assert "anchors fitted to them" in said(tmp_path)
    given = "model.anchors=[[[4,4],[5,5],[6,6]],[[8,8],[9,9],[10,10]],[[12,12],[14,14],[16,16]]]"
    run(shapes, tmp_path / "given", "train.max_steps=1", given, model="yolov5", before=note)
    assert before["anchors"][0, 0].tolist() == [4, 4]  # what the user gave stays


def test_resuming_other_model_names_first_difference(shapes, tmp_path):
    run(shapes, tmp_path, "train.max_steps=1")
    wider = "model.channels=32"
    with raises("config_changed", "model.channels: 16"):
        run(shapes, tmp_path, wider, resume=True)
    with raises("checkpoint_of_other_config"):
        run(shapes, tmp_path, wider, resume=True, changed=True)


def test_unwritable_output_dir_is_user_error(shapes, tmp_path):
    (tmp_path / "file").write_text("")
    with raises("folder_unwritable"):
        run(shapes, tmp_path / "file")


def test_a_size_that_strides_do_not_divide_is_refused(shapes, tmp_path):
    with raises("image_size_not_multiple", "[60, 64]"):
        run(shapes, tmp_path, "model.image_size=[60,64]")
