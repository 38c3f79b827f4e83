"""Runs with frozen parts, rates by layer and few images: what stays, resumes, and ranks do."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.config.validate import config_warnings
from ppdist.data.loading.sampler import TrainSampler
from ppdist.distributed import comm
from ppdist.engine.train_step import Clock
from ppdist.models.model_card import AGPL, CARD_NOTE, read_card
from ppdist.models.weights import read_arrays, write_arrays
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.engine.runs import run_to_end
from tests.unit.engine.tiny import IMAGES, build_step, init_cpu, sampled_batches, tiny_config

OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=2", "log.every_steps=1", "checkpoint.keep=9",
    "checkpoint.every_steps=2", "optimizer.reference_batch_size=8", "data.check_images=none",
)  # fmt: skip
GROUPS = "optimizer.groups=[{match: neck, lr_factor: 0.5, weight_decay_factor: 2}]"
TUNED = ("train.freeze=3", "optimizer.layer_decay=0.7", GROUPS)
# ten images in batches of four: three steps an epoch, six in all


def run(data, output_dir, *overrides, **options):
    return run_to_end(data, output_dir, *OVERRIDES, *overrides, **options)


def arrays(output_dir, group="model", link="last"):
    return load_file(output_dir / "checkpoints" / link / f"{group}.safetensors")


def said(output_dir):
    return (output_dir / "train.log").read_text()


def losses(output_dir):
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


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
    assert "backbone.stages.2 x 0.343" in text and "neck x 0.7, head x 1" in text
    assert "parameter group neck: 215544 weights, learning rate x 0.5, weight decay x 2" in text


@pytest.mark.slow
def test_a_fine_tuned_run_resumes_bit_for_bit(shapes, pretrained, tuned, tmp_path):
    start = [*TUNED, f"model.pretrained={pretrained}"]
    run(shapes, tmp_path, *start, "train.max_steps=3")
    run(shapes, tmp_path, *start, resume=tmp_path)
    for group in ("model", "ema", "optimizer"):
        first, second = arrays(tuned, group), arrays(tmp_path, group)
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert np.array_equal(value, second[key]), (group, key)
    assert losses(tuned) == losses(tmp_path)
    assert "not trained before" not in said(tmp_path)


def test_a_card_says_whence_the_weights_come(pretrained, tuned):
    first, second = read_card(pretrained), read_card(tuned)
    assert first.class_names == ("circle", "square", "triangle")
    assert first.category_ids == (1, 2, 3) and first.licence == ""
    assert first.source.startswith("trained from scratch on shapes") and "10 images" in first.source
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
    assert "3 of 3 classes kept by name, in another order" in text
    assert text.count("these weights come under AGPL-3.0") == 1
    (tmp_path / "w.npz").unlink()
    run(shapes, tmp_path / "run", start, "train.max_steps=2", resume=tmp_path / "run")
    found = read_card(tmp_path / "run")
    assert found.licence == AGPL and "from w.npz (AGPL-3.0), trained from scratch" in found.source


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
    assert "tensors were not trained before (backbone.stem.conv1" in said(tmp_path)
    key = "backbone.stem.conv1.conv.weight"
    assert not np.array_equal(first[key], second[key])
    entries = arrays(tmp_path, "optimizer")
    assert any(entry.startswith(f"{key}/") for entry in entries)

    run(shapes, tmp_path, name, "train.freeze=1", resume=tmp_path, changed=True)
    assert "tensors are frozen from here on (backbone.stem.conv1" in said(tmp_path)
    for group in ("model", "ema"):  # the average of what no longer moves is what it is
        assert np.array_equal(arrays(tmp_path, group)[key], second[key])
    assert len(losses(tmp_path)) == 6


def test_unknown_part_to_freeze_keeps_checkpoints(shapes, tuned):
    there = sorted(path.name for path in (tuned / "checkpoints").iterdir())
    with raises("freeze_unknown_key"):
        run(shapes, tuned, "train.freeze=[backbon]")
    assert sorted(path.name for path in (tuned / "checkpoints").iterdir()) == there


def test_an_unknown_parameter_group_ends_the_run_before_a_step(shapes, tmp_path):
    with raises("parameter_group_empty"):
        run(shapes, tmp_path / "out", "optimizer.groups=[{match: nek, lr_factor: 0.5}]")
    assert not (tmp_path / "out").exists()


def test_a_run_never_sets_aside_the_one_it_begins_with(shapes, tuned):
    there = sorted(path.name for path in (tuned / "checkpoints").iterdir())
    with raises("out_holds_source"):
        run(shapes, tuned, f"model.pretrained={tuned}")
    assert sorted(path.name for path in (tuned / "checkpoints").iterdir()) == there


def test_meaningless_values_are_config_errors(tmp_path):
    for override, said in {
        "train.freeze=0": r"train\.freeze: 0 freezes nothing; for that write null",
        "train.freeze=[]": r"train\.freeze: \[\] freezes nothing; for that write null",
        "train.freeze=true": r"train\.freeze: true does not say which part; write a number of",
        "train.freeze=backbone": r"train\.freeze: 'backbone' is not a list; write \[backbone\]",
        "train.freeze=-1": r"train\.freeze: found -1, expected",
        "optimizer.layer_decay=1.5": r"optimizer\.layer_decay",
        "data.train.limit=0": r"data\.train\.limit",
    }.items():
        with pytest.raises(ConfigError, match=said):
            tiny_config(tmp_path, [override])


def test_freezing_random_weights_is_a_surprise(tmp_path):
    config = tiny_config(tmp_path, TUNED)
    frozen, slow = config_warnings(config, begins=True)
    assert frozen.startswith("train.freeze freezes randomly initialised layers; set model.")
    assert slow.startswith("optimizer.layer_decay: 0.7 slows down the layers near the image, which")
    assert not [*config_warnings(config, begins=False)]
    pretrained = tiny_config(tmp_path, [*TUNED, "model.pretrained=weights.npz"])
    assert not [*config_warnings(pretrained, begins=True)]


@pytest.mark.slow
def test_subset_run_cannot_resume_with_other_images(shapes, tmp_path):
    run(shapes, tmp_path, "data.train.limit=5", "train.max_steps=2", "data.val.limit=2",
        evaluate=True)  # fmt: skip
    assert "data.train.limit: 5 of 10 images" in said(tmp_path)
    assert "data.val.limit: 2 of 5 images" in said(tmp_path)
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert record["derived"]["steps_per_epoch"]["value"] == 2  # five images, four a step
    with pytest.raises(CheckpointError, match=r"data\.train\.limit: 5 then, 6 now"):
        run(shapes, tmp_path, "data.train.limit=6", resume=tmp_path)
    run(shapes, tmp_path, "data.train.limit=5", "data.val.limit=3", evaluate=True, resume=tmp_path)
    assert "best is reset" in said(tmp_path)


STEPS, SAMPLES = 4, 29  # eight images a step, the last has five: four on one rank, one on the other
FEW = "train.freeze=3"
OF_YOLO = "train.freeze=[backbone,neck.reduce5]"
NORMS = "train.freeze=[backbone,neck]"  # all that YOLOv5 has: its head is plain convolutions
# model, overrides, whether ranks come to what one comes to (apart norms see other images)
DEALT = {
    "quick": [
        ("ppyoloe", (FEW, "train.sync_bn=true"), True),
        ("ppyoloe", (FEW,), False),
        ("yolov5", (NORMS,), True),
    ],
    "more": [
        ("ppyoloe", (FEW, "train.sync_bn=true", "distributed.shard_optimizer=true", GROUPS), True),
        ("yolov5", (OF_YOLO, "train.sync_bn=true"), True),
    ],
}
FROZEN_OF = {FEW: FROZEN, OF_YOLO: ("backbone.", "neck.reduce5."), NORMS: ("backbone.", "neck.")}


def trained_by(model: str, world: int, overrides: tuple[str, ...]) -> dict:
    """Trains this rank's part of the steps from weights drawn from the seed."""
    batch = IMAGES // world
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(
            Path(folder),
            [*overrides, "optimizer.layer_decay=0.7", "train.clip_norm=0.5",
             f"train.batch_size_per_card={batch}"],
            model,
        )  # fmt: skip
    step, rates = build_step(config, False, SAMPLES)
    before = {key: value.numpy() for key, value in step.model.state_dict().items()}
    sampler = TrainSampler(
        SAMPLES, config.train.micro_batches(world), comm.rank(), world,
        seed=0, start_step=0, end_step=STEPS, sizes=[config.model.image_size],
    )  # fmt: skip
    found = []
    for number in range(STEPS):
        batches = iter(sampled_batches(sampler, number))
        result = step(batches, range(1), number, rates, False, Clock())
        assert result.applied
        found.append(result.losses["loss"])
    after = {key: value.numpy() for key, value in step.model.state_dict().items()}
    still = {key for key in before if np.array_equal(before[key], after[key])}
    return {"losses": found, "after": after, "still": still}


def on_two_ranks(argument: tuple[str, str]) -> list[list[float]]:
    folder, which = argument
    init_cpu()
    every = []
    for number, (model, overrides, _) in enumerate(DEALT[which]):
        result = trained_by(model, 2, overrides)
        file = Path(folder) / f"{number}-{comm.rank()}.npz"
        np.savez(file, still=sorted(result["still"]), **result["after"])
        every.append(result["losses"])
    return every


@pytest.mark.slow
@pytest.mark.parametrize("which", ["quick", "more"])
def test_two_ranks_fine_tune_like_one(tmp_path, which):
    """Objects fall unevenly: eleven on one image, one on another, none on six of eight."""
    target = "tests.unit.engine.test_build_fine_tuning:on_two_ranks"
    losses_W = run_on_ranks(2, target, (str(tmp_path), which), seconds=300)
    init_cpu()
    alone = {}
    for number, (model, (part, *_), equal) in enumerate(DEALT[which]):
        files = [np.load(tmp_path / f"{number}-{rank}.npz") for rank in (0, 1)]
        keys = [key for key in files[0].files if key != "still"]
        for key in keys:
            assert np.array_equal(files[0][key], files[1][key]), key
        stays = {key for key in keys if key.startswith(FROZEN_OF[part])}
        moved = set(keys) - set(files[0]["still"].tolist())
        assert stays and moved and not stays & moved
        # What is not frozen moves, running statistics too: of ranks apart their mean.
        assert {key for key in keys if key.endswith("._mean")} - stays <= moved
        if not equal:
            continue
        if part not in alone:
            alone[part] = trained_by(model, 1, (part,))
        expected = alone[part]
        for losses_of_rank in losses_W:
            np.testing.assert_allclose(losses_of_rank[number], expected["losses"], rtol=1e-5)
        for key in keys:
            np.testing.assert_allclose(files[0][key], expected["after"][key], rtol=1e-4, atol=1e-5)
