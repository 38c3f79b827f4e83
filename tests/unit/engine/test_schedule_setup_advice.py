"""Warnings at start: where publications lost accuracy on many cards, and nowhere else."""

import re
from pathlib import Path

import pytest

from ppdist.config.experiment import load_config
from ppdist.engine.advice import advice
from ppdist.engine.schedule_setup import set_up_schedule

CONFIGS = Path(__file__).parents[3] / "configs"
SIZES = {
    "coco": 118_287,
    "bccd": 205,
    "demo": 320,
    "my_data": 4000,
    "imagenet": 1_281_167,
    "objects365": 1_742_289,
    "voc": 16_551,
    "fine_tune": 160,
}
PPYOLOE = "ppyoloe/ppyoloe_crn_s_300e_coco"
YOLOV5 = "yolov5/yolov5s_300e_coco"
BCCD = "examples/bccd_ppyoloe"


def said(name, world, *overrides):
    """What is said of a run of one of our configurations on so many ranks."""
    config = load_config(CONFIGS / f"{name}.yml", list(overrides))
    schedule = set_up_schedule(
        world=world,
        dataset_size=next(size for key, size in SIZES.items() if key in name),
        batches=config.train.micro_batches(world),
        epochs=config.train.epochs,
        epochs_compensation=config.train.epochs_compensation,
        max_steps=config.train.max_steps,
        optimizer=config.optimizer,
        schedule=config.schedule,
        ema=config.train.ema,
        augment=config.data.augment,
    )
    return [*advice(config, schedule)]


OURS = [
    f"{path.parent.name}/{path.stem}"
    for path in sorted(CONFIGS.glob("*/*.yml"))
    if path.parent.name not in ("_base_", "studies")
]


@pytest.mark.parametrize("name", OURS)
def test_shipped_configs_run_without_warning(name):
    most = 2 if name.startswith("examples/") else 8  # as the head of the file says
    for world in (1, 2, 4, 8):
        if world <= most:
            assert said(name, world) == []


CASES = {
    "a rate left alone": (
        PPYOLOE, 32, ["optimizer.lr_scaling=none"], "optimizer.lr_scaling: none with 4 times",
    ),
    "more cards, the same epochs": (
        PPYOLOE, 32, [], "4 times the reference batch in 300 epochs: large batches need more",
    ),
    "a warm-up left alone": (
        PPYOLOE, 32, ["schedule.warmup_compensation=none", "schedule.warmup_epochs=1"],
        "set schedule.warmup_compensation=auto for 926 steps instead of 463",
    ),
    "no limit to the rate": (
        PPYOLOE, 32, [], "total batch 256: the learning rate becomes 0.04",
    ),
    "past half the noise scale": (
        PPYOLOE, 32, ["optimizer.noise_scale=500"],
        "more than half of optimizer.noise_scale 500: the same accuracy needs 1.51 times",
    ),
    "few images for batch norm": (
        PPYOLOE, 16, ["train.sync_bn=false"], "train.sync_bn: false with 8 images per card",
    ),
    "few images for batch norm, at the reference": (
        PPYOLOE, 32, ["train.sync_bn=false", "train.batch_size_per_card=4",
                      "optimizer.reference_batch_size=128"],
        "train.sync_bn: false with 4 images per card and a total batch of 128",
    ),
    "no reference": (
        PPYOLOE, 32, ["train.batch_size_per_card=4", "optimizer.reference_batch_size=null"],
        "optimizer.reference_batch_size: null on 32 ranks: the learning rate stays 0.01",
    ),
    "one micro-batch a rank": (
        PPYOLOE, 8, ["distributed.shares=[2,2,2,2,1,1,1,1]", "train.sync_bn=false"],
        "distributed.shares has no effect, as 8 ranks share 8 micro-batches of 8 images",
    ),
    "a run of few steps": (BCCD, 8, [], "420 optimizer steps are too few"),
    "a run of one": (BCCD, 8, ["train.epochs=0.1"], "1 optimizer step is too few"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_known_accuracy_loss_is_warned_with_remedy(case):
    name, world, overrides, expected = CASES[case]
    found = [line for line in said(name, world, *overrides) if expected in line]
    assert len(found) == 1
    assert not re.search("MLPerf|AGVM|arXiv|MMYOLO", found[0])  # docs/distributed.md says why


def test_one_rank_or_reference_batch_gives_no_advice():
    assert said(PPYOLOE, 1, "optimizer.reference_batch_size=null") == []
    assert said(PPYOLOE, 8, "optimizer.reference_batch_size=64") == []


def test_unaffected_warm_up_gives_no_warning():
    written = "schedule.warmup_epochs=0", "schedule.warmup_compensation=none"
    assert not [line for line in said(PPYOLOE, 32, *written) if "warmup" in line]


def test_few_steps_are_enough_to_fine_tune():
    found = said(BCCD, 8, "model.pretrained=ppyoloe_plus_s_coco")
    assert not [line for line in found if "steps are too few" in line]


def test_a_classifier_is_not_held_to_what_detectors_lost():
    assert said("yolov5/yolov5s_cls_imagenet", 64) == []


def test_following_the_advice_ends_it():
    assert said(
        PPYOLOE, 32, "optimizer.noise_scale=1800", "train.epochs_compensation=auto"
    ) == []  # fmt: skip
    assert said(YOLOV5, 16, "optimizer.noise_scale=1800", "train.sync_bn=true") == []
