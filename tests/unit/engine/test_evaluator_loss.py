"""The validation loss: that of one step whose batch is the whole set, on any number of ranks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import paddle
import pytest

from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.data.loading.loader import EvalLoader
from ppdist.engine.build import build_evaluator, build_model, build_schedule_setup, build_train_step
from ppdist.engine.evaluator import in_eval_mode
from tests.distributed import run_on_ranks
from tests.unit.data.classified import write_patterns
from tests.unit.engine.tiny import init_cpu, tiny_config

IMAGES = 9  # of which the first has no object; two ranks have 5 and 4, in batches of 2
STEP = 31


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, train=2, val=IMAGES, size=64, seed=3)
    file = folder / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    first = content["images"][0]["id"]
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] != first]
    file.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def patterns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patterns")
    for seed, split in enumerate(("train", "val")):
        write_patterns(folder / split, 3, seed)
    return folder


def built(folder, model, *overrides, left_out=()):
    """Model, loss, evaluator of the validation split; the same weights wherever it is called."""
    init_cpu()
    config = tiny_config(folder, ["evaluate.batch_size_per_card=2", *overrides], model)
    network = build_model(config)
    step = build_train_step(config, build_schedule_setup(config, 64), network)
    dataset = replace(read_split(config.data, "val"), unreadable=dict.fromkeys(left_out, ""))
    return network, step.loss, build_evaluator(config, dataset, network, loss=step.loss)


def losses_of(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("val_loss")}


def at_once(folder, model, *overrides):
    """The same by the loss itself: all images in one batch."""
    config = tiny_config(folder, overrides, model)
    network, loss, _ = built(folder, model, *overrides)
    dataset = read_split(config.data, "val")
    size = config.model.image_size
    (batch,) = EvalLoader(dataset, config.data, image_size=size, batch_size=64, rank=0, world=1)
    with paddle.no_grad(), in_eval_mode(network):
        outputs = network(network.normalize(batch.images_B3HW))
        found = loss(outputs, batch.boxes_BM4, batch.labels_BM, batch.mask_BM, STEP - 1)
    divisor = max(1.0, float(found.normalizer))
    parts = {f"val_{name}": float(value) / divisor for name, value in found.parts.items()}
    return {"val_loss": float(found.total) / divisor, **parts}


MODELS = {
    "ppyoloe, atss": ("ppyoloe", "loss.static_assigner_epochs=30"),
    "ppyoloe, tal": ("ppyoloe", "loss.static_assigner_epochs=0"),
    "yolov5": ("yolov5", "data.resize=letterbox"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_it_is_the_loss_of_one_step_with_all_images(shapes, case):
    network, _, evaluator = built(shapes, *MODELS[case])
    expected = at_once(shapes, *MODELS[case])
    for _ in range(2):  # the second evaluation knows the counts already
        found = losses_of(evaluator.evaluate(network, step=STEP))
        assert found == pytest.approx(expected, rel=1e-5)
    assert set(found) == set(expected) and len(found) == 4


def test_of_a_classifier_it_is_the_mean_cross_entropy(patterns):
    folders = ("data.train={images: train}", "data.val={images: val}")
    network, _, evaluator = built(patterns, "yolov5_cls", *folders)
    found = losses_of(evaluator.evaluate(network, step=STEP))
    expected = at_once(patterns, "yolov5_cls", *folders)
    assert found == pytest.approx({"val_loss": expected["val_loss"]}, rel=1e-5)


def test_crowds_have_no_part_in_it_as_in_training(shapes, tmp_path):
    losses = []
    for crowd in (False, True):
        folder = tmp_path / str(crowd)
        shutil.copytree(shapes, folder)
        file = folder / "annotations" / "instances_val.json"
        content = json.loads(file.read_text())
        if crowd:
            objects = content["annotations"]
            objects.append({**objects[0], "id": 9999, "iscrowd": 1, "bbox": [2, 2, 60, 60]})
            file.write_text(json.dumps(content))
        network, _, evaluator = built(folder, "yolov5")
        losses.append(losses_of(evaluator.evaluate(network, step=STEP)))
    assert losses[0] == losses[1]


def test_a_set_without_objects_has_one_too(shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "data")
    file = tmp_path / "data" / "annotations" / "instances_val.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "annotations": []}))
    for model in ("ppyoloe", "yolov5"):
        network, _, evaluator = built(tmp_path / "data", model)
        found = losses_of(evaluator.evaluate(network, step=STEP))
        assert found["val_loss"] > 0 and found == pytest.approx(found)


def on_ranks(folder):
    found = []
    for case in MODELS:
        network, _, evaluator = built(Path(folder), *MODELS[case])
        metrics = evaluator.evaluate(network, step=STEP)
        found.append({name: value for name, value in metrics.items() if name != "eval_seconds"})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_and_equal_single_rank_losses(shapes, ranks):
    alone = run_on_ranks(1, "tests.unit.engine.test_evaluator_loss:on_ranks", str(shapes))[0]
    several = run_on_ranks(ranks, "tests.unit.engine.test_evaluator_loss:on_ranks", str(shapes))
    assert all(found == several[0] for found in several)
    for one, other in zip(alone, several[0]):
        assert losses_of(other) == pytest.approx(losses_of(one), rel=1e-6)
        metrics = [name for name in one if not name.startswith("val_loss")]
        assert {name: one[name] for name in metrics} == {name: other[name] for name in metrics}


def test_an_image_that_cannot_be_read_has_no_part_in_it(shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "data")
    file = tmp_path / "data" / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    lost = content["images"][4]
    image = next((tmp_path / "data").rglob(lost["file_name"]))
    image.write_bytes(image.read_bytes()[:-100])
    network, _, evaluator = built(tmp_path / "data", "yolov5")
    twice = [losses_of(evaluator.evaluate(network, step=STEP)) for _ in range(2)]
    assert twice[0] == twice[1]  # as in a run that resumes between the two
    network, _, evaluator = built(tmp_path / "data", "yolov5", left_out=[4])  # by the check
    found = losses_of(evaluator.evaluate(network, step=STEP))
    content["images"].remove(lost)
    content["annotations"] = [o for o in content["annotations"] if o["image_id"] != lost["id"]]
    file.write_text(json.dumps(content))
    network, _, evaluator = built(tmp_path / "data", "yolov5")
    assert found == pytest.approx(losses_of(evaluator.evaluate(network, step=STEP)), rel=1e-5)
