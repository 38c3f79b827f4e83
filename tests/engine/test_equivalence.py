"""The signature: many ranks, or many micro-batches, train like one rank with all the images."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from ppdist import dist
from tests.distributed import run_on_ranks
from tests.engine.tiny import IMAGES, MODELS, build_step, init_cpu, run_steps, tiny_config

STEPS = 20


def train(argument):
    """argument: {model, parts: per rank, per micro-batch [start, stop), overrides, frozen}."""
    init_cpu()
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(Path(folder), argument["overrides"], argument["model"])
    parts = argument["parts"][dist.rank()]
    train_step, rates = build_step(config, argument["frozen"])
    losses = run_steps(train_step, rates, STEPS, parts)
    weights = {key: value.numpy() for key, value in train_step.model.state_dict().items()}
    return {
        "lr": rates.lr,
        "losses": losses,
        "norms": {key: float(np.linalg.norm(value)) for key, value in weights.items()},
    }


def run(model, world, accumulate, parts, frozen, sync_bn=False):
    overrides = [
        f"train.batch_size_per_card={IMAGES // world // accumulate}",
        f"train.accumulate_steps={accumulate}",
        f"train.sync_bn={str(sync_bn).lower()}",
    ]
    argument = {"model": model, "parts": parts, "overrides": overrides, "frozen": frozen}
    if world == 1:
        return [train(argument)]
    return run_on_ranks(world, "tests.engine.test_equivalence:train", argument)


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request):
    return request.param


@pytest.fixture(scope="module")
def alone(model):
    """One rank with all eight images, by kind of batch norm (frozen statistics or not)."""
    return {frozen: run(model, 1, 1, [[[0, 8]]], frozen)[0] for frozen in (True, False)}


def assert_same_training(results, reference):
    for result in results:
        assert result["lr"] == reference["lr"]
        np.testing.assert_allclose(result["losses"], reference["losses"], rtol=1e-5)
        for key, norm in reference["norms"].items():
            np.testing.assert_allclose(result["norms"][key], norm, rtol=1e-4, atol=1e-5)


def test_two_ranks_with_sync_bn_step_like_one_rank_with_both_batches(alone, model):
    results = run(model, 2, 1, [[[0, 4]], [[4, 8]]], frozen=False, sync_bn=True)
    assert_same_training(results, alone[False])


def test_two_ranks_with_frozen_statistics_step_like_one_rank_with_both_batches(alone, model):
    assert_same_training(run(model, 2, 1, [[[0, 4]], [[4, 8]]], frozen=True), alone[True])


def test_accumulating_four_micro_batches_steps_like_one_batch(alone, model):
    parts = [[[0, 2], [2, 4], [4, 6], [6, 8]]]
    assert_same_training(run(model, 1, 4, parts, frozen=True), alone[True])


def test_two_ranks_with_two_micro_batches_each_step_like_one_rank(alone, model):
    parts = [[[0, 2], [2, 4]], [[4, 6], [6, 8]]]
    assert_same_training(run(model, 2, 2, parts, frozen=True), alone[True])


def test_a_rank_without_images_changes_nothing(alone, model):
    parts = [[[0, 8]], [[]]]
    assert_same_training(run(model, 2, 1, parts, frozen=True), alone[True])


def test_a_micro_batch_blank_on_all_ranks_leaves_synchronised_statistics_alone(alone, model):
    parts = [[[0, 4], None], [[4, 8], None]]
    results = run(model, 2, 2, parts, frozen=False, sync_bn=True)
    assert_same_training(results, alone[False])


def test_twenty_steps_move_the_losses_ten_times_the_tolerance_and_more(alone):
    for run_alone in alone.values():
        first_visit, last_visit = run_alone["losses"][:4], run_alone["losses"][16:]  # same images
        assert max(abs(b / a - 1) for a, b in zip(first_visit, last_visit)) > 1e-4
