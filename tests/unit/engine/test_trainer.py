"""A whole run on real files: what it leaves, resuming, stopping, numbers that are not finite."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.engine import train_step
from ppdist.engine.state import _array, copy_into
from ppdist.models.model_card import read_card
from ppdist.models.yolov5 import P5_ANCHORS, YOLOv5
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.data.classified import write_patterns
from tests.unit.engine.runs import assert_same_checkpoint, build_run, records, weights
from tests.unit.engine.tiny import FASTEST

OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=4", "log.every_steps=1",
    "checkpoint.every_steps=3", "optimizer.reference_batch_size=8", "data.bad_images=error",
)  # fmt: skip
# ten images in batches of four: three steps an epoch, the last one smaller


def run(data, output_dir, *overrides, before=lambda trainer: None, model=FASTEST, **options):
    """What `fit` returns; `before` gets the trainer."""
    experiment = build_run(data, output_dir, *OVERRIDES, *overrides, model=model, **options)
    with experiment.log:
        before(experiment.trainer)
        return experiment.trainer.fit()


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
        text = (tmp_path / folder / "train.log").read_text()
        assert ("both data.train and data.val" in text) == (folder == "a")


def test_each_micro_batch_draws_by_a_seed_of_its_own(shapes, tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(train_step.paddle, "seed", lambda number: seeds.append(number))
    small = ["train.batch_size_per_card=2", "train.total_batch=4"]
    assert run(shapes, tmp_path, "train.max_steps=3", *small) == 0
    assert len(seeds) > 6 and len({*seeds[-6:]}) == 6


def assert_same_run(first, second):
    assert_same_checkpoint(first, second)
    losses = [[r["loss"] for r in records(folder) if "loss" in r] for folder in (first, second)]
    assert losses[0] == losses[1]


# What a step depends on besides weights, by what has most of it: model, epochs, overrides.
RESUMED = {
    "the fastest": (FASTEST, 2, ["schedule.warmup_epochs=1", "train.ema.ramp_steps=10"]),
    "ppyoloe": ("ppyoloe", 2, ["train.cpu_convolutions=auto"]),
    "an auxiliary head": (
        "ppyoloe", 4, ["model.size=t", "model.auxiliary=true", "loss.auxiliary_attached_epochs=3"],
    ),
    "yolov5": (
        "yolov5", 4,
        ["data.resize=letterbox", "data.augment.mosaic=1", "data.augment.close_mosaic_epochs=1",
         "data.augment.mixup=0.5", "data.augment.affine={scale: 0.5, translate: 0.1}",
         "schedule={warmup_epochs: 3, warmup_bias_lr: 0.1, warmup_momentum: 0.8}",
         "optimizer={nesterov: true, decay_biases: false}", "train.ema.ramp_steps=100"],
    ),
    "a classifier with dropout": ("yolov5_cls", 2, ["model.dropout=0.3"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        each if each == "the fastest" else pytest.param(each, marks=pytest.mark.slow)
        for each in RESUMED
    ],
)
def test_resumed_run_ends_bit_for_bit_equal(case, shapes, tmp_path, monkeypatch):
    # The first run fits anchors of its own, which a resumed one must not.
    monkeypatch.setattr(YOLOv5, "anchor_threshold", 1.2)
    model, epochs, overrides = RESUMED[case]
    data, overrides = shapes, [*overrides, f"train.epochs={epochs}"]
    if model == "yolov5_cls":
        data = tmp_path / "data"
        write_patterns(data / "train", 4, seed=0)
        overrides = [*overrides, "data.train={images: train}", "data.val={images: train}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(data, whole, *overrides, model=model)
    amid_epoch = f"train.max_steps={3 * epochs // 2 + 1}"
    run(data, parts, *overrides, amid_epoch, model=model)
    run(data, parts, *overrides, model=model, resume=True)
    assert_same_run(whole, parts)
    losses = [record["loss"] for record in records(whole) if "loss" in record]
    assert len(set(losses)) == len(losses) > 0


@pytest.mark.slow
def test_resume_uses_metrics_of_last_whole_epoch(shapes, tmp_path):
    seen = {}

    def note(trainer):
        batches, state = trainer.batch_source.batches, trainer.state

        def noting(step, scores):
            seen[step] = scores
            return batches(step, scores)

        trainer.batch_source.batches = noting
        # What so short a run learns is 0 for every class.
        trainer.evaluator.class_scores = lambda metrics: [state.step / 20, 0.9, None]

    def train(folder, *overrides, resume=False):
        sampled = ["data.sampling.name=difficulty", "data.workers=1", "data.cache=ram"]
        run(shapes, folder, *sampled, *overrides, evaluate=True, resume=resume, before=note)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole)
    expected = {0: None, 3: [0.15, 0.9, None], 6: [0.3, 0.9, None], 9: [0.45, 0.9, None]}
    assert seen == expected
    train(parts, "train.max_steps=7")  # evaluated at its end, too
    train(parts, resume=True)
    assert seen == {**expected, 7: expected[6]}
    assert_same_run(whole, parts)


def test_fitted_anchors_are_part_of_checkpoint(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(YOLOv5, "anchor_threshold", 1.2)
    before = {"anchors": None}

    def note(trainer):
        before["anchors"] = trainer.train_step.model.anchors_LA2

    run(shapes, tmp_path, "train.max_steps=1", model="yolov5", before=note)
    saved = weights(tmp_path)["head.anchors"] * np.float32([8, 16, 32])[:, None, None]
    np.testing.assert_array_equal(saved, before["anchors"])
    assert np.abs(saved - np.array(P5_ANCHORS)).max() > 1
    assert "anchors fitted to them" in (tmp_path / "train.log").read_text()
    given = "model.anchors=[[[4,4],[5,5],[6,6]],[[8,8],[9,9],[10,10]],[[12,12],[14,14],[16,16]]]"
    run(shapes, tmp_path / "given", "train.max_steps=1", given, model="yolov5", before=note)
    assert before["anchors"][0, 0].tolist() == [4, 4]  # what the user gave stays


def two_ranks(argument):
    folder = Path(argument["output"])
    shapes = Path(argument["shapes"])
    run(shapes, folder, *argument["overrides"], resume=argument["resume"], evaluate=True)
    return None


@pytest.mark.slow
def test_two_resumed_ranks_end_bit_for_bit_equal(shapes, tmp_path):
    def launch(name, overrides, resume):
        argument = {"output": str(tmp_path / name), "shapes": str(shapes), "resume": resume}
        argument["overrides"] = ["train.batch_size_per_card=3", *overrides]
        run_on_ranks(2, "tests.unit.engine.test_trainer:two_ranks", argument)

    launch("whole", [], False)
    launch("parts", ["train.max_steps=5"], False)
    launch("parts", [], True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_signal_saves_checkpoint_and_exits_75(shapes, tmp_path):
    def interrupt(trainer):
        original = trainer.train_step.__call__

        def step(batches, numbers, step, rates, stop, *rest):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(batches, numbers, step, rates, stop, *rest)

        trainer.train_step = SimpleStep(trainer.train_step, step)

    code = run(shapes, tmp_path, "train.epochs=3", before=interrupt)
    assert code == 75
    last = (tmp_path / "checkpoints" / "last").resolve().name
    assert last == "step-00000006"  # step 5 heard the signal, step 6 carried it to all ranks
    assert run(shapes, tmp_path, "train.epochs=3", resume=True) == 0
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step-00000009"


def test_stop_waits_until_ranks_hold_equal_weights(shapes, tmp_path):
    def unequal_until_step_5(trainer):
        trainer.train_step.grad_sync.synchronised = lambda step: step >= 4
        trainer.state.stop = True

    assert run(shapes, tmp_path, before=unequal_until_step_5) == 75
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step-00000005"


class SimpleStep:
    """A TrainStep with another __call__."""

    def __init__(self, inner, call):
        self.inner, self.call = inner, call

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *arguments):
        return self.call(*arguments)


@pytest.mark.slow
def test_new_run_leaves_no_old_checkpoint_to_resume(shapes, tmp_path):
    run(shapes, tmp_path, "train.max_steps=3")
    run(shapes, tmp_path, "train.max_steps=1", "train.batch_size_per_card=2")
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-00000001", "last"}
    assert (tmp_path / "old-1" / "checkpoints" / "last").resolve().name == "step-00000003"


def test_resuming_with_another_total_batch_is_refused(shapes, tmp_path):
    run(shapes, tmp_path, "train.max_steps=1")
    with raises("resume_batch_differs"):
        run(shapes, tmp_path, "train.batch_size_per_card=2", resume=True)


def test_stopped_run_saves_and_resume_evaluates(shapes, tmp_path):
    def stop_now(trainer):
        def call(batches, numbers, step, rates, stop, *rest):
            return original(batches, numbers, step, rates, True, *rest)

        original = trainer.train_step
        trainer.train_step = SimpleStep(original, call)
        trainer.evaluate_every = 1

    assert run(shapes, tmp_path, evaluate=True, before=stop_now) == 75
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step-00000001"
    assert not [record for record in records(tmp_path) if "mAP" in record]
    assert run(shapes, tmp_path, "train.max_steps=2", evaluate=True, resume=True,
               before=lambda trainer: setattr(trainer, "evaluate_every", 1)) == 0  # fmt: skip
    assert [record["step"] for record in records(tmp_path) if "mAP" in record] == [1, 2]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000001"
    assert "cannot write" not in (tmp_path / "train.log").read_text()
    ended = json.loads((tmp_path / "checkpoints" / "last" / "state.json").read_text())
    assert (ended["step"], ended["best_step"]) == (2, 1)


def test_low_precision_arrays_round_trip_as_float32():
    weight = paddle.to_tensor([1.5, -2.25, 3e-8]).astype("bfloat16")
    array = _array(weight)
    assert array.dtype == np.float32
    target = {"w": paddle.zeros([3], "bfloat16")}
    copy_into(target, {"w": array})
    assert bool((target["w"] == weight).all())


def test_resuming_without_a_checkpoint_says_what_to_do(shapes, tmp_path):
    with raises("checkpoint_missing"):
        run(shapes, tmp_path, resume=True)


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
