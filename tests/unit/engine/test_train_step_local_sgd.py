"""Ranks that do not do the same: local SGD between synchronised steps."""

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

from ppdist.distributed import comm
from tests.distributed import run_on_ranks
from tests.unit.engine.tiny import build_step, ema_of, fixed_batch, init_cpu, take_step, tiny_config

HERE = "tests.unit.engine.test_train_step_local_sgd"
PARTS = ((0, 4), (4, 8))  # 11 objects and 1
MOMENTUM = "optimizer={lr: 0.003, nesterov: true, weight_decay: 0.01}"
# Adam turns a gradient of rounding noise into a step of lr
ADAMW = "optimizer={lr: 0.0001, name: adamw, weight_decay: 0.01}"


def train(overrides, steps, poisoned=()):
    """What each step said and, in digests, left behind.

    At the `poisoned` steps rank 1's loss is NaN.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = ["train.batch_size_per_card=4", *overrides]
        config = tiny_config(Path(folder), common)
    train_step, rates = build_step(config, frozen=False)
    now = {"step": 0}

    def poison(loss, arguments, output):
        bad = comm.rank() == 1 and now["step"] in poisoned
        return type(output)(output.total * (float("nan") if bad else 1.0), *output[1:])

    train_step.loss.register_forward_post_hook(poison)
    history = []
    for step in range(steps):
        now["step"] = step
        batches = [fixed_batch(step, *PARTS[comm.rank()])]
        result = take_step(train_step, batches, step, rates)
        state = state_of(train_step)
        said = {
            "loss": result.losses["loss"],
            "norm": result.gradient_norm,
            "applied": result.applied,
            "synchronised": train_step.exchange.synchronised(step),
            "ema_updates": ema_of(train_step).updates,
            **{part: digest(arrays) for part, arrays in state.items()},
        }
        history.append(said)
    return history


def state_of(train_step):
    groups = {
        "model": train_step.model.state_dict(),
        "ema": ema_of(train_step).average,
        "optimizer": train_step.optimizer.state(),
    }
    return {
        name: {key: np.array(value) for key, value in group.items()}
        for name, group in groups.items()
    }


def digest(arrays):
    return hashlib.sha256(b"".join(arrays[key].tobytes() for key in sorted(arrays))).hexdigest()


def local(argument):
    init_cpu()
    return {
        "every three": train([MOMENTUM, "distributed.sync_every=3"], 6, poisoned=[4]),
        "adamw": train([ADAMW, "distributed.sync_every=2"], 2),
    }


@pytest.fixture(scope="module")
def local_runs():
    return run_on_ranks(2, f"{HERE}:local")


@pytest.mark.slow
def test_replicas_are_equal_only_after_synced_steps(local_runs):
    first, second = (runs["every three"] for runs in local_runs)
    for step, (one, other) in enumerate(zip(first, second)):
        together = step in (2, 5)
        assert one["synchronised"] == other["synchronised"] == together
        assert (one["model"] == other["model"]) == together
        assert (one["optimizer"] == other["optimizer"]) == together
        assert one["ema"] == other["ema"]  # moves with the synchronised weights only
    first, second = (runs["adamw"] for runs in local_runs)
    for part in ("model", "ema", "optimizer"):
        assert first[0][part] != second[0][part] or part == "ema"
        assert first[1][part] == second[1][part]


@pytest.mark.slow
def test_non_finite_gradient_on_one_rank_skips_all(local_runs):
    for runs in local_runs:
        history = runs["every three"]
        assert [each["applied"] for each in history] == [True] * 4 + [False, True]
        # one of the three updates before the second synchronisation was none
        assert [each["ema_updates"] for each in history] == [0, 0, 3, 3, 3, 5]
    norms = [
        [each["norm"] for each in runs["every three"] if each["applied"]] for runs in local_runs
    ]
    assert norms[0] == norms[1]
