"""A training on a part of a set, or of a length in steps, is the one that says it otherwise."""

import json
import shutil
from pathlib import Path

import pytest

from ppdist.data.datasets.build import read_split
from ppdist.engine.build import build_schedule_setup
from ppdist.engine.changes import require_same_settings
from ppdist.engine.continuation import ANEW, config_of_run
from ppdist.models.model_card import read_card
from tests.errors import raises
from tests.unit.engine.runs import build_run, records, run_to_end
from tests.unit.engine.tiny import FASTEST, tiny_config

SHORT = ("train.batch_size_per_card=4", "train.epochs=2", "evaluate.every_epochs=1")


def numbers(folder: Path) -> list[dict[str, object]]:
    """The losses, rates and scores of a run, to the last bit."""
    names = (
        "step",
        "epoch",
        "loss",
        "lr",
        "grad_norm",
        "gradient_norm",
        "mAP",
        "mAP50",
        "val_loss",
    )
    found = [{name: row[name] for name in names if name in row} for row in records(folder)]
    found = [row for row in found if "loss" in row or "mAP" in row]
    assert any("mAP" in row for row in found) and any("loss" in row for row in found)
    return found


def cut_by_hand(source: Path, out: Path, keep: list[str], name: str = "") -> Path:
    """A copy of a COCO set with some classes, or with these as one of this name."""
    shutil.copytree(source, out)
    for file in (out / "annotations").glob("*.json"):
        content = json.loads(file.read_text())
        kept = [each for each in content["categories"] if each["name"] in keep]
        ids = {each["id"] for each in kept}
        boxes = [each for each in content["annotations"] if each["category_id"] in ids]
        if name:
            boxes = [each | {"category_id": kept[0]["id"]} for each in boxes]
            kept = [kept[0] | {"name": name}]
        file.write_text(json.dumps(content | {"categories": kept, "annotations": boxes}))
    return out


@pytest.mark.parametrize(
    ("keys", "keep", "name"),
    [
        (["data.classes=[2, {}]"], (0, 2), ""),
        (["data.single_class=true"], (0, 1, 2), "object"),
    ],
)
def test_training_on_classes_is_that_on_a_set_cut_by_hand(shapes, tmp_path, keys, keep, name):
    classes = read_split(tiny_config(shapes).data, "train").class_names
    kept = [classes[number] for number in keep]
    count = f"model.num_classes={1 if name else len(kept)}"
    keys = [key.format(kept[0]) for key in keys]
    hand = cut_by_hand(shapes, tmp_path / "hand", kept, name)
    for data, out, more in ((hand, "a", []), (shapes, "b", keys)):
        run_to_end(data, tmp_path / out, *SHORT, count, *more, model=FASTEST, evaluate=True)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    cards = [read_card(tmp_path / out) for out in "ab"]
    assert cards[0].class_names == cards[1].class_names
    assert cards[0].category_ids == cards[1].category_ids
    assert ("(" in cards[1].source) and ("(" not in cards[0].source)


@pytest.mark.slow
def test_training_on_a_fraction_is_that_on_these_images(shapes, tmp_path):
    config = tiny_config(shapes, ["data.fraction=0.5"])
    chosen = {record.image_id for record in read_split(config.data, "train").records}
    assert len(chosen) == 5
    hand = tmp_path / "hand"
    shutil.copytree(shapes, hand)
    file = hand / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["images"] = [each for each in content["images"] if each["id"] in chosen]
    content["annotations"] = [x for x in content["annotations"] if x["image_id"] in chosen]
    file.write_text(json.dumps(content))
    for data, out, more in ((hand, "a", []), (shapes, "b", ["data.fraction=0.5"])):
        run_to_end(data, tmp_path / out, *SHORT, *more, model=FASTEST, evaluate=True)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    with raises("config_changed"):  # and a run goes on with its part alone
        build_run(shapes, tmp_path / "b", *SHORT, "data.fraction=0.6", model=FASTEST, resume=True)


def test_steps_are_the_epochs_that_they_make(shapes, tmp_path):
    phases = ("train.phases_for_epochs=20", "schedule.warmup_epochs=4")
    in_steps = ("train.steps=6", "evaluate.every_epochs=9", "evaluate.every_steps=3")
    for out, length in (("a", ("train.epochs=2",)), ("b", in_steps)):
        keys = (*SHORT, *phases, *length)
        run_to_end(shapes, tmp_path / out, *keys, model=FASTEST, evaluate=True)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


@pytest.mark.parametrize("steps", [1, 7, 50_000])
def test_the_schedule_spans_the_steps(tmp_path, steps):
    config = tiny_config(tmp_path, [f"train.steps={steps}", "schedule.warmup_epochs=3000"])
    schedule = build_schedule_setup(config, 100)  # 13 steps an epoch
    assert schedule.schedule_steps == schedule.total_steps == steps
    assert schedule.epochs == steps / 13
    assert schedule.lr_scheduler.warmup_steps <= steps // 2


@pytest.mark.slow
def test_a_run_in_steps_is_extended_in_steps(shapes, tmp_path):
    keys = (*SHORT, "train.steps=4")
    run_to_end(shapes, tmp_path, *keys, model=FASTEST, evaluate=True)
    with raises("options_conflict"):
        config_of_run(tmp_path, "+1", [])
    with raises("bad_value"):
        config_of_run(tmp_path, None, [], "4")
    longer, extends = config_of_run(tmp_path, None, [], "+3")
    assert (longer.train.steps, extends) == (7, True)
    with raises("config_changed"):
        require_same_settings(tmp_path / "checkpoints" / "last", longer, ANEW)
    longer_keys = (*SHORT, "train.steps=7")
    run = run_to_end(
        shapes, tmp_path, *longer_keys, model=FASTEST, resume=True, extends=True, evaluate=True
    )
    assert run.trainer.schedule.total_steps == 7
    assert [row["step"] for row in records(tmp_path) if "mAP" in row][-1] == 7
