"""From one configuration to the numbers of a run on any number of cards."""

import math

import pytest

from ppdist.config.augment import AugmentConfig
from ppdist.config.optimizer import OptimizerConfig, ScheduleConfig
from ppdist.config.train import EMAConfig, MicroBatches
from ppdist.engine import build
from ppdist.engine.schedule_setup import set_up_schedule
from ppdist.optim.ema import Decay
from tests.unit.engine.tiny import tiny_config


def run(world=1, optimizer=None, schedule=None, batch=8, accumulate=2, **values):
    """1000 images in batches of 8 x 2, which is the reference."""
    given = {
        "dataset_size": 1000,
        "batches": MicroBatches(world * batch * accumulate, batch, spread=False),
        "epochs": 10,
        "epochs_compensation": "none",
        "max_steps": None,
        "ema": EMAConfig(decay=0.99),
        "augment": AugmentConfig(),
    }
    return set_up_schedule(
        world=world,
        optimizer=OptimizerConfig(**({"lr": 0.01, "reference_batch_size": 16} | (optimizer or {}))),
        schedule=ScheduleConfig(**({"warmup_epochs": 1} | (schedule or {}))),
        **(given | values),
    )


def why(schedule, name):
    return next(reason for shown, _, reason in schedule.rows() if shown == name)


def test_four_cards_scale_run_from_same_config():
    plain = {"warmup_compensation": "none"}
    one, four = run(1, schedule=plain), run(4, schedule=plain)
    assert (one.total_batch, four.total_batch) == (16, 64)
    assert (one.steps_per_epoch, four.steps_per_epoch) == (63, 16)
    assert four.lr_scheduler.peak_lr == pytest.approx(0.04)
    assert four.scaled.weight_decay == one.scaled.weight_decay == 5e-4
    assert (one.lr_scheduler.warmup_steps, four.lr_scheduler.warmup_steps) == (63, 16)
    assert four.ema_decay.limit == pytest.approx(0.99**4)
    assert ("total batch", "64") in [row[:2] for row in four.rows()]


def test_a_warm_up_is_not_shorter_than_asked_for():
    def warmup_steps(least):
        return run(
            dataset_size=205, accumulate=1, batch=16, epochs=60,
            schedule={"warmup_epochs": 3, "warmup_least_steps": least},
        ).lr_scheduler.warmup_steps  # fmt: skip

    assert (warmup_steps(0), warmup_steps(100), warmup_steps(10_000)) == (39, 100, 390)


def test_the_average_restarts_where_strong_augmentation_ends():
    ema = EMAConfig(decay=0.99, ramp_steps=100, restart_decay=0.9)
    plain = AugmentConfig(plain_epochs=2, close_mosaic_epochs=4)
    one = run(ema=ema, augment=plain)
    assert one.ema_restart == (8 * 63, Decay(0.9, 1.0, 100))
    assert ("EMA restart", "before step 505") in [row[:2] for row in one.rows()]
    four = run(4, ema=ema, augment=AugmentConfig(close_mosaic_epochs=4), phases_factor=0.5)
    assert four.ema_restart == (8 * 16, Decay(0.9, 4.0, 100))
    longer = run(ema=ema, augment=AugmentConfig(plain_epochs=20))
    assert longer.ema_restart is not None and longer.ema_restart.step == 0
    assert run(augment=plain).ema_restart is None


def test_sqrt_rule_scales_decay():
    adam = {"name": "adamw", "lr_scaling": "sqrt", "weight_decay": 0.05}
    scaled = run(8, adam).scaled
    assert scaled.lr == pytest.approx(0.01 * math.sqrt(8))
    assert scaled.weight_decay == pytest.approx(0.05 * math.sqrt(8))
    assert (scaled.betas, scaled.epsilon) == ((0.9, 0.999), 1e-8)
    # Whoever sets the rate for a batch by hand sets the decay too.
    by_hand = run(8, adam | {"lr_scaling": "none"})
    assert by_hand.scaled == by_hand.optimizer


def test_rate_is_for_the_images_that_a_step_has():
    whole, beyond = (run(dataset_size=48, batch=batch) for batch in (24, 2500))
    assert beyond.lr_scheduler.peak_lr == whole.lr_scheduler.peak_lr == pytest.approx(0.03)
    assert beyond.ema_decay == whole.ema_decay and beyond.batch_ratio == 3
    assert beyond.steps_per_epoch == whole.steps_per_epoch == 1
    assert why(beyond, "batch / reference").startswith("all 48 images / ")


def test_noise_scale_caps_rate_of_weights_and_biases():
    # r = 1: 4 times the batch counts as 4 * 2 / 5 = 1.6 times.
    capped = run(4, {"noise_scale": 16}, {"warmup_bias_lr": 0.1})
    assert capped.lr_scheduler.peak_lr == pytest.approx(0.016)
    assert capped.lr_scheduler.bias_start_lr == pytest.approx(0.16)
    assert capped.scaled.weight_decay == pytest.approx(5e-4 * 4 / 1.6)
    assert "counts as 1.6 at" in why(capped, "learning rate")


def test_a_longer_run_lengthens_all_its_phases():
    # E = 10 * (1 + 64 / 64) / (1 + 16 / 64) = 16
    drops = {"name": "step", "step_epochs": (5, 8), "warmup_epochs": 0}
    longer = run(4, {"noise_scale": 64}, drops, epochs_compensation="auto")
    assert longer.epoch_scale == pytest.approx(1.6)
    assert longer.schedule_steps == 16 * 16
    assert longer.steps_per_written_epoch * 5 == pytest.approx(8 * 16)  # 5 of 10 are 8 of 16
    rate = longer.lr_scheduler
    before, after = rate(8 * 16 - 1), rate(8 * 16)
    assert after == pytest.approx(before * 0.1)
    assert "1.6 x the 10" in why(longer, "steps")

    as_written = run(4, {"noise_scale": 64}, drops)
    assert (as_written.epoch_scale, as_written.schedule_steps) == (1.0, 160)
    fewer = run(1, {"noise_scale": 64, "reference_batch_size": 64}, epochs_compensation="auto")
    assert fewer.epoch_scale == 1.0  # a smaller batch does not cut them


def test_a_longer_run_has_whole_epochs():
    # 10 * (1 + 32 / 64) / (1 + 16 / 64) = 12
    assert run(2, {"noise_scale": 64}, epochs_compensation="auto").schedule_steps == 12 * 32
    # 10 * (1 + 48 / 100) / (1 + 16 / 100) = 12.76
    assert run(3, {"noise_scale": 100}, epochs_compensation="auto").epoch_scale == pytest.approx(
        1.3
    )


def test_a_run_below_one_epoch_is_not_rounded_up_to_one():
    # 0.4 * (1 + 64 / 64) / (1 + 16 / 64) = 0.64, of epochs of 16 steps
    short = run(4, {"noise_scale": 64}, epochs=0.4, epochs_compensation="auto")
    assert short.epoch_scale == pytest.approx(1.6) and short.schedule_steps == 10


def test_phases_keep_their_share_of_other_run_length():
    drops = {"name": "step", "step_epochs": (5, 8), "warmup_epochs": 2, "warmup_least_steps": 0}
    written, short = run(schedule=drops), run(schedule=drops, epochs=4, phases_factor=0.4)
    assert written.lr_scheduler.warmup_steps == 2 * 63
    assert short.lr_scheduler.warmup_steps == round(0.8 * 63)
    assert short.schedule_steps == 4 * 63 and short.epoch_scale == 1.0
    assert short.steps_per_written_epoch == pytest.approx(0.4 * 63)
    for share in (0.25, 0.45, 0.55, 0.75, 0.85, 0.95):
        at = written.lr_scheduler(round(share * 630)), short.lr_scheduler(round(share * 252))
        assert at[0] == pytest.approx(at[1], rel=0.01)
    assert "train.phases_for_epochs" in why(short, "steps")
    assert why(short, "warm-up").startswith("0.8 epochs")
    # A longer run on more cards lengthens them once more.
    both = run(4, {"noise_scale": 64}, drops, epochs_compensation="auto", phases_factor=0.5)
    assert both.epoch_scale == pytest.approx(1.6) and both.phase_scale == pytest.approx(0.8)


def test_phases_for_epochs_reach_loss_and_augmentation(tmp_path, monkeypatch):
    overrides = [
        "train.epochs=20",
        "train.phases_for_epochs=10",
        "loss.static_assigner_epochs=3",
        "data.augment={mosaic: 1.0, combine_epochs: [1, 5], close_mosaic_epochs: 2}",
    ]
    config = tiny_config(tmp_path, overrides)
    schedule = build.build_schedule_setup(config, 64)
    step = build.build_train_step(config, schedule, build.build_model(config))
    assert step.loss.static_steps == 6 * 8
    monkeypatch.setattr(build, "BatchSource", lambda dataset, data, *_, **__: data)
    augment = build.build_batch_source(config, None, schedule).augment
    assert (augment.combine_epochs, augment.close_mosaic_epochs) == ((2, 10), 4)
    as_written = tiny_config(tmp_path, ["train.epochs=20"])
    assert build.build_schedule_setup(as_written, 64).phase_scale == 1.0


def test_epoch_based_augmentation_scales_with_run():
    augment = AugmentConfig(combine_epochs=(2, 50), close_mosaic_epochs=15, plain_epochs=5)
    longer = augment.with_epoch_scale(1.6)
    assert (longer.combine_epochs, longer.close_mosaic_epochs, longer.plain_epochs) == (
        (3, 80), 24, 8,
    )  # fmt: skip
    assert augment.with_epoch_scale(1.0) == augment
    short = augment.with_epoch_scale(0.01)  # no phase is lost without a word
    assert (short.combine_epochs, short.close_mosaic_epochs, short.plain_epochs) == ((0, 1), 1, 1)
    assert AugmentConfig().with_epoch_scale(2.0) == AugmentConfig()


def test_schedule_setup_reaches_optimizer_and_loss(tmp_path, monkeypatch):
    config = tiny_config(
        tmp_path,
        [
            "optimizer={name: adamw, lr: 0.01, lr_scaling: sqrt, weight_decay: 0.05, "
            "epsilon: 1.0e-9, reference_batch_size: 2, noise_scale: 8}",
            "train.epochs_compensation=auto",
            "loss.static_assigner_epochs=3",
            "data.augment={mosaic: 1.0, close_mosaic_epochs: 5}",
        ],
    )
    schedule = build.build_schedule_setup(
        config, 64
    )  # batch 8: E = 10 * (1 + 1) / (1 + 1 / 4) = 16
    step = build.build_train_step(config, schedule, build.build_model(config))
    rate = math.sqrt(4 * 1.25 / 2)  # kappa 4 counts as 2.5
    assert step.optimizer.optimizer.get_lr() == pytest.approx(0.01 * rate)
    assert schedule.scaled.weight_decay == pytest.approx(0.05 * 4 / rate)
    assert step.loss.static_steps == round(3 * 1.6 * 8)  # 3 of 10 epochs, of 8 steps each
    monkeypatch.setattr(build, "BatchSource", lambda dataset, data, *_, **__: data)
    assert build.build_batch_source(config, None, schedule).augment.close_mosaic_epochs == 8


def test_the_record_says_all_that_the_table_says():
    adam = {"name": "adamw", "lr_scaling": "sqrt", "noise_scale": 1000}
    for schedule in (run(4), run(4, adam), run(4, {"noise_scale": 64}, epochs_compensation="auto")):
        record = schedule.record()
        assert [entry["why"] for entry in record.values()] == [row[2] for row in schedule.rows()]
        assert record["total_batch"]["value"] == 64
        assert record["lr"]["value"] == schedule.lr_scheduler.peak_lr
    assert run(4, adam).record()["betas"]["value"] == [0.9, 0.999]
    assert why(run(4), "weight decay") == "0.0005, as written"
    assert why(run(4, {"reference_batch_size": None}), "batch / reference").endswith(
        "null: nothing is scaled"
    )
