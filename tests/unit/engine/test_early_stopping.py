"""Ending early: the rule, on two ranks and after a resume; and the warning of over-fitting."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import parse_config
from ppdist.config.train import EarlyStoppingConfig
from ppdist.engine.early_stopping import EarlyStopping, EarlyStoppingState, LossCurves
from tests.errors import raises
from tests.unit.engine.runs import build_run, records, train
from tests.unit.engine.tiny import FASTEST


def stops_after(values, *, default="mAP", **keys):
    """After which evaluation training ends, and the last standing."""
    rule, standing = EarlyStopping(EarlyStoppingConfig(**keys), default), None
    metric = keys.get("metric") or default
    for number, value in enumerate(values, start=1):
        standing = rule.updated(standing, 10 * number, {metric: value})
        if rule.reason(standing):
            return number, standing
    return None, standing


def test_training_ends_after_patience_evaluations():
    assert stops_after([0.1, 0.3, 0.2, 0.3, 0.31, 0.3, 0.2, 0.1], patience=3)[0] == 8
    assert stops_after([0.1, 0.3, 0.2, 0.3, 0.29], patience=3)[0] == 5
    assert stops_after([0.1, 0.2, 0.3, 0.4], patience=1)[0] is None
    assert stops_after([0.0, 0.0], patience=1)[0] == 2


def test_a_loss_gets_better_by_falling():
    assert stops_after([3.0, 2.0, 2.5, 2.1], metric="val_loss", patience=2)[0] == 4
    assert stops_after([3.0, 2.9, 2.8], metric="val_loss", patience=1)[0] is None


def test_what_is_not_a_number_is_not_better():
    number, standing = stops_after([math.nan, math.nan], metric="val_loss", patience=2)
    assert (number, standing.best) == (2, None)
    assert stops_after([math.nan, 1.0, math.nan], metric="val_loss", patience=2)[0] is None


def test_another_metric_after_a_resume_begins_anew():
    rule = EarlyStopping(EarlyStoppingConfig(metric="f1", patience=5), "mAP")
    before = EarlyStoppingState("mAP", 0.9, 10, 4)
    assert rule.updated(before, 20, {"f1": 0.2}) == EarlyStoppingState("f1", 0.2, 20)
    assert not rule.reason(EarlyStoppingState("mAP", 0.9, 10, 99))


def test_the_reason_names_the_best_and_its_step():
    rule = EarlyStopping(EarlyStoppingConfig(patience=2), "mAP")
    assert "0.5124 of step 120" in rule.reason(EarlyStoppingState("mAP", 0.51239, 120, 2))


def warned_after(pairs):
    """After which evaluations there was a warning, and the first; saved and restored at times."""
    curves, found = LossCurves(), []
    for number, (training, val) in enumerate(pairs, start=1):
        curves.trained(training + 0.5)
        curves.trained(training - 0.5)
        warning = curves.evaluated(val)
        if number % 7 == 0:
            curves = LossCurves(**json.loads(json.dumps(asdict(curves))))
        if warning:
            found.append((number, warning))
    return found


def test_overfitting_warns_once_when_losses_diverge():
    training = [3.0 - 0.05 * n for n in range(40)]
    val = [3.0 - 0.05 * n if n < 15 else 2.3 + 0.04 * (n - 15) for n in range(40)]
    found = warned_after(zip(training, val))
    assert len(found) == 1 and 25 <= found[0][0] <= 32
    assert "over-fitting: in the last" in found[0][1] and "early_stopping" in found[0][1]


@pytest.mark.parametrize("kind", ["both fall", "noise", "both rise", "one bad evaluation", "nan"])
def test_over_fitting_is_not_warned_of_when(kind):
    rng = np.random.default_rng(0)
    falling = np.linspace(4, 1, 100)
    training, val = {
        "both fall": (falling, falling + 1),
        "noise": (falling, 2 + 0.06 * rng.normal(size=100)),
        "both rise": (falling[::-1], falling[::-1] + 1),  # a loss that gets another assignment
        "one bad evaluation": (falling, np.where(np.arange(100) % 10 == 5, 9.0, 2.0)),
        "nan": (falling, np.full(100, np.nan)),
    }[kind]
    assert not warned_after(zip(training.tolist(), val.tolist()))


def test_ten_noisy_evaluations_are_no_overfitting():
    rng = np.random.default_rng(0)
    for _ in range(30):
        val = 2 + 0.06 * np.repeat(rng.normal(size=10), 10)
        assert not warned_after(zip(np.linspace(4, 1, 100).tolist(), val.tolist()))


OVERRIDES = [
    "train.batch_size_per_card=4", "train.epochs=20", "log.every_steps=1", "log.images=2",
    "optimizer.reference_batch_size=8", "early_stopping={patience: 2}",
]  # fmt: skip
# By epoch.  Of ten images two ranks make an epoch of two steps; three of these are in vain.
SCORES = {1: 0.1, 2: 0.3, 3: 0.29, 4: 0.4, 5: 0.39, 6: 0.4, 6.5: 0.2, 7: 0.9}


def trained(data, output, *overrides, resume=None):
    """Exit code and trainer of a run whose evaluations score as above."""

    def score(trainer):
        inner = trainer.evaluations.evaluator.evaluate

        def evaluate(*arguments):
            epochs = trainer.state.step / trainer.schedule.steps_per_epoch
            return {**inner(*arguments), "mAP": SCORES[epochs]}

        trainer.evaluations.evaluator.evaluate = evaluate

    own = [*OVERRIDES, *overrides]
    return train(data, output, *own, model=FASTEST, evaluate=True, resume=resume, before=score)


@pytest.mark.slow
def test_more_patience_on_resume_goes_on(shapes, tmp_path):
    epochs_of_one_step = ("train.batch_size_per_card=10", "log.images=0")
    assert trained(shapes, tmp_path, *epochs_of_one_step)[1].state.step == 6
    more = (*epochs_of_one_step, "early_stopping.patience=3", "train.max_steps=7")
    code, trainer = trained(shapes, tmp_path, *more, resume=tmp_path)
    assert (code, trainer.state.step, trainer.state.best_step) == (0, 7, 7)
    assert records(tmp_path)[-1]["finished"] == "total"


def test_without_evaluations_it_is_refused(shapes, tmp_path):
    with raises("evaluation_missing"):
        build_run(shapes, tmp_path / "run", *OVERRIDES, model=FASTEST)


def test_metric_unknown_to_model_is_refused(tmp_path):
    file = tmp_path / "wrong.yml"
    file.write_text(
        "data: {format: coco, root: x, train: {images: a, annotations: b}, "
        "val: {images: a, annotations: b}}\n"
        "model: {name: ppyoloe, num_classes: 3}\nearly_stopping: {metric: top1}\n"
    )
    with raises("bad_value", "early_stopping.metric", "of mAP, mAP50, fitness"):
        parse_config(file, [], ExperimentConfig)
