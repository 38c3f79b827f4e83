"""Runs with frozen parts, rates by layer and few images: what stays, resumes, and ranks do."""

import json
import shutil

import numpy as np
import pytest

from ppdist.common.errors import CheckpointError
from ppdist.common.manifest import CARD_NOTE
from ppdist.config.experiment import config_warnings
from ppdist.models.model_card import AGPL, read_card
from ppdist.models.weights import read_arrays, write_arrays
from tests.errors import raises
from tests.unit.engine.runs import losses, run_to_end, said
from tests.unit.engine.runs import weights as arrays
from tests.unit.engine.tiny import tiny_config

OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=2", "log.every_steps=1", "checkpoint.keep=9",
    "checkpoint.every_steps=2", "optimizer.reference_batch_size=8", "data.check_images=none",
)  # fmt: skip
GROUPS = "optimizer.groups=[{match: neck, lr_factor: 0.5, weight_decay_factor: 2}]"
TUNED = ("train.freeze=3", "optimizer.layer_decay=0.7", GROUPS)
# ten images in batches of four: three steps an epoch, six in all


def run(data, output_dir, *overrides, **options):
    return run_to_end(data, output_dir, *OVERRIDES, *overrides, **options)


@pytest.fixture(scope="module")
def pretrained(shapes, tmp_path_factory):
    """A run of three steps whose weights others begin with."""
    folder = tmp_path_factory.mktemp("pretrained")
    run(shapes, folder, "train.epochs=1")
    return folder


@pytest.fixture(scope="module")
def tuned(shapes, pretrained, tmp_path_factory):
    """Six steps from those weights, with three stages frozen and rates by layer."""
    folder = tmp_path_factory.mktemp("tuned")
    run(shapes, folder, *TUNED, f"model.pretrained={pretrained}")
    return folder


FROZEN = ("backbone.stem.", "backbone.stages.0.", "backbone.stages.1.")


def is_frozen(key):
    return key.startswith(FROZEN)


@pytest.mark.slow
def test_frozen_weights_statistics_ema_stay_equal(pretrained, tuned):
    before = arrays(pretrained, "ema")
    for group in ("model", "ema"):
        after = arrays(tuned, group)
        assert after.keys() == before.keys()
        for key, value in before.items():
            moved = not np.array_equal(value, after[key])
            if is_frozen(key):
                assert not moved, (group, key)
            elif key.endswith((".conv.weight", "._mean")) and "aux" not in key:
                assert moved, (group, key)
    assert not any(is_frozen(entry) for entry in arrays(tuned, "optimizer"))


def test_log_names_weights_source_frozen_keys_and_lr(pretrained, tuned):
    text = said(tuned)
    assert f"from {pretrained / 'checkpoints' / 'last'}" in text  # no evaluation, so no best
    assert "frozen: " in text and "(backbone.stem, backbone.stages.0, backbone.stages.1)" in text
    assert "backbone.stages.2 x 0.343" in text
    assert "parameter group neck: 215544" in text


def test_a_card_says_whence_the_weights_come(pretrained, tuned):
    first, second = read_card(pretrained), read_card(tuned)
    assert first.class_names == ("circle", "square", "triangle")
    assert first.category_ids == (1, 2, 3) and first.licence == ""
    assert "from scratch on shapes" in first.source and "10 images" in first.source
    assert second.source.startswith("fine-tuned on ") and second.source.endswith(first.source)
    folder = tuned / "checkpoints" / "last"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files["model_card.json"]["bytes"] == (folder / "model_card.json").stat().st_size
    shutil.copy(folder / "ema.safetensors", tuned / "alone.safetensors")
    assert read_card(tuned / "alone.safetensors") == second


def test_agpl_and_other_names_travel(shapes, pretrained, tmp_path):
    """Through a file of another order of classes, a run from it and its resumption."""
    names = ("triangle", "circle", "square")
    card = read_card(pretrained).model_copy(update={"class_names": names, "licence": AGPL})
    write_arrays(tmp_path / "w.npz", read_arrays(pretrained), {CARD_NOTE: card.text()})
    start = f"model.pretrained={tmp_path / 'w.npz'}"
    run(shapes, tmp_path / "run", start, "train.max_steps=1")
    text = said(tmp_path / "run")
    assert "3 of 3 classes" in text
    assert text.count("come under AGPL-3.0") == 1
    (tmp_path / "w.npz").unlink()
    run(shapes, tmp_path / "run", start, "train.max_steps=2", resume=tmp_path / "run")
    found = read_card(tmp_path / "run")
    assert found.licence == AGPL and "from w.npz (AGPL-3.0)" in found.source


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_resumed_run_can_freeze_another_part(optimizer, shapes, tmp_path):
    """First the head alone, then all of it: in one run, if that is meant."""
    name = f"optimizer.name={optimizer}"
    run(shapes, tmp_path, name, "train.freeze=[backbone,neck]", "train.max_steps=2")
    first = arrays(tmp_path)
    with pytest.raises(CheckpointError, match=r"train\.freeze"):
        run(shapes, tmp_path, name, resume=tmp_path)
    run(shapes, tmp_path, name, "train.max_steps=4", resume=tmp_path, changed=True)
    second = arrays(tmp_path)
    assert "not trained before" in said(tmp_path)
    key = "backbone.stem.conv1.conv.weight"
    assert not np.array_equal(first[key], second[key])
    entries = arrays(tmp_path, "optimizer")
    assert any(entry.startswith(f"{key}/") for entry in entries)

    run(shapes, tmp_path, name, "train.freeze=1", resume=tmp_path, changed=True)
    assert "frozen from here on" in said(tmp_path)
    for group in ("model", "ema"):  # the average of what no longer moves is what it is
        assert np.array_equal(arrays(tmp_path, group)[key], second[key])
    assert len(losses(tmp_path)) == 6


def test_an_unknown_parameter_group_ends_the_run_before_a_step(shapes, tmp_path):
    with raises("parameter_group_empty"):
        run(shapes, tmp_path / "out", "optimizer.groups=[{match: nek, lr_factor: 0.5}]")
    assert not (tmp_path / "out").exists()


def test_freezing_random_weights_is_a_surprise(tmp_path):
    config = tiny_config(tmp_path, TUNED)
    frozen, slow = config_warnings(config, begins=True)
    assert frozen.startswith("train.freeze ")
    assert slow.startswith("optimizer.layer_decay: 0.7")
    assert not [*config_warnings(config, begins=False)]
    pretrained = tiny_config(tmp_path, [*TUNED, "model.pretrained=weights.npz"])
    assert not [*config_warnings(pretrained, begins=True)]
