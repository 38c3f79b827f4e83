"""Parts of a configuration that do not fit each other are told apart, in the user's words."""

import pytest

from ppdist.config.experiment import config_warnings, load_config
from tests.errors import raises
from tests.unit.engine.tiny import tiny_config

MISFITS = [  # the model, what is set, and where the message begins
    ("yolov5_cls", "data.format=coco", "data.format: "),
    ("yolov5", "data.format=folder", "data.format: "),
    ("yolov5", "loss={name: ppyoloe}", "loss.name: "),
    ("ppyoloe", "evaluate.metric=top1", "evaluate.metric: "),
    ("yolov5_cls", "evaluate.metric=fitness", "evaluate.metric: "),
    ("yolov5_cls", "data.augment.mosaic=1", "data.augment.mosaic: "),
    ("yolov5_cls", "data.resize=letterbox", "data.resize: "),
    ("yolov5_cls", "data.sampling.name=difficulty", "data.sampling.name: "),
    ("ppyoloe", "evaluate.rectangular=true", "evaluate.rectangular: "),
    ("ppyoloe", "evaluate.rectangular_pad=0.5", "evaluate.rectangular_pad: "),
    ("yolov5_cls", "nms.keep=5", "nms: "),
    ("ppyoloe", "train.epochs_compensation=auto", "train.epochs_compensation: "),
    (
        "ppyoloe",
        "optimizer={reference_batch_size: 8, noise_scale: 500, lr_scaling: none}",
        "optimizer.noise_scale: ",
    ),
    (
        "ppyoloe",
        "optimizer={reference_batch_size: null, noise_scale: 500}",
        "optimizer.noise_scale: ",
    ),
    (
        "ppyoloe",
        "distributed={local_sgd_steps: 4, shard_optimizer: true}",
        "distributed.local_sgd_steps: ",
    ),
    (
        "ppyoloe",
        "distributed={local_sgd_steps: 4, shares: [1, 2]}",
        "distributed.local_sgd_steps: ",
    ),
    ("ppyoloe", "optimizer={name: adamw, nesterov: true}", "optimizer.nesterov: "),
    ("ppyoloe", "train.ema.restart_decay=0.99", "train.ema.restart_decay: "),
]


@pytest.mark.parametrize(("model", "override", "key"), MISFITS)
def test_parts_that_do_not_fit_are_refused(model, override, key, tmp_path):
    with raises("bad_value", f"-o {override}: {key}") as caught:
        tiny_config(tmp_path, [override], model)
    (problem,) = caught.value.problems
    assert problem.code == "bad_value" and str(problem.place) == f"-o {override}"


def test_keys_that_do_not_fit_are_reported_where_they_stand(tmp_path):
    file = tmp_path / "cfg.yml"
    own = "optimizer:\n  name: adamw\n  nesterov: true\nevaluate: {rectangular_pad: 0.5}\n"
    file.write_text("_BASE_: [ppyoloe_plus_s]\n" + own)
    with raises("invalid_config") as caught:
        load_config(file, ["distributed.gradient_rank=4", "distributed.topk_fraction=0.1"])
    places = [str(problem.place) for problem in caught.value.problems]
    assert places == [f"{file}:4:13", f"{file}:5:29", "-o distributed.gradient_rank=4"]


def test_the_tiny_configurations_fit(tmp_path):
    for model in ("ppyoloe", "yolov5", "yolov5_cls"):
        assert tiny_config(tmp_path, (), model).loss.name == model


def said_of(folder, *overrides):
    return [*config_warnings(tiny_config(folder, overrides), begins=True)]


def test_what_the_last_epochs_leave_no_room_for_is_said(tmp_path):
    short = ["data.augment.mosaic=1", "data.augment.mixup=0.5", "train.epochs=10"]
    said = said_of(tmp_path, *short, "data.augment.close_mosaic_epochs=10")
    keys = [line.partition(" never acts")[0] for line in said]
    assert keys == ["data.augment.mosaic: 1", "data.augment.mixup: 0.5"]
    assert not said_of(tmp_path, *short, "data.augment.close_mosaic_epochs=9")
    # Written for a run of 60, the last 10 epochs are 2 of 10.
    last = "data.augment.close_mosaic_epochs=10"
    assert not said_of(tmp_path, *short, last, "train.phases_for_epochs=60")
    few = ["train.epochs=1", "data.augment.mosaic=1", "data.augment.combine_epochs=[0.05, 0.3]"]
    assert len(said_of(tmp_path, *few)) == 1


def test_training_sizes_far_from_the_evaluated_one_are_said(tmp_path):
    sizes = "train.multi_scale=[[64,64],[128,128]]"
    assert not said_of(tmp_path, sizes, "model.image_size=[64,96]")
    (said,) = said_of(tmp_path, sizes, "model.image_size=[256,256]")
    assert said.startswith("train.multi_scale") and "64x64 to 128x128" in said


def test_mosaic_whole_without_mosaic_is_warned_about(tmp_path):
    whole = "data.augment.mosaic_whole=true"
    (line,) = said_of(tmp_path, whole)
    assert line.startswith("data.augment.mosaic_whole: true")
    assert not said_of(tmp_path, whole, "data.augment.mosaic=0.5")


def test_ambiguous_epoch_window_is_warned_about(tmp_path):
    window = "data.augment.combine_epochs={}"
    (line,) = said_of(tmp_path, window.format("[0, 1]"))
    assert "[0.0, 1.0]" in line
    for other in ("[0.0, 1.0]", "[0, 2]", "[0, 0.5]", "null"):
        assert not said_of(tmp_path, window.format(other)), other
    assert not said_of(tmp_path, window.format("[0, 1]"), "train.epochs=1")


def test_image_size_may_be_one_number(tmp_path):
    assert tiny_config(tmp_path, ["model.image_size=96"]).model.image_size == (96, 96)
    with raises("bad_value"):
        tiny_config(tmp_path, ["model.image_size=true"])


def test_val_fraction_needs_no_val_and_wins(tmp_path):
    divided = tiny_config(tmp_path, ["data.val_fraction=0.2", "data.train.annotations=all.json"])
    assert divided.data.val.annotations == "all.json" == divided.data.train.annotations
    assert divided.data.val_fraction == 0.2


@pytest.mark.parametrize(
    ("overrides", "keep", "candidates"),
    [
        (["nms.keep=50"], 50, 1000),
        (["nms.keep=50", "evaluate.max_detections=400"], 400, 1000),
        (["nms.keep=500", "nms.candidates=200", "evaluate.max_detections=400"], 500, 400),
    ],
)
def test_suppression_keeps_what_evaluation_counts(tmp_path, overrides, keep, candidates):
    found = tiny_config(tmp_path, overrides, "yolov5").suppression
    assert (found.keep, found.candidates) == (keep, candidates)
