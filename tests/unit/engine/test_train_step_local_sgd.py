"""Ranks that do not do the same: local SGD between synchronised steps, shares of the optimizer."""

import hashlib
import json
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppdist.distributed import comm
from ppdist.engine.train_step import Clock
from ppdist.optim.optimizer import optimizer_arrays
from tests.distributed import run_on_ranks
from tests.unit.engine.runs import build_run
from tests.unit.engine.tiny import build_step, fixed_batch, init_cpu, tiny_config

HERE = "tests.unit.engine.test_train_step_local_sgd"
PARTS = ((0, 4), (4, 8))  # 11 objects and 1
MOMENTUM = "optimizer={lr: 0.003, nesterov: true, weight_decay: 0.01}"
# Adam turns a gradient of rounding noise into a step of lr
ADAMW = "optimizer={lr: 0.0001, name: adamw, weight_decay: 0.01}"


def train(overrides, steps, poisoned=()):
    """What each step said and, in digests, left behind, and the state at the end.

    At the `poisoned` steps rank 1's loss is NaN.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = ["train.batch_size_per_card=4", *overrides]
        config = tiny_config(Path(folder), common)
    train_step, rates = build_step(config, frozen=False)
    now = {"step": 0}

    def poison(loss, arguments, output):
        bad = comm.rank() == 1 and now["step"] in poisoned
        return output._replace(total=output.total * (float("nan") if bad else 1.0))

    train_step.loss.register_forward_post_hook(poison)
    history = []
    for step in range(steps):
        now["step"] = step
        batches = iter([fixed_batch(step, *PARTS[comm.rank()])])
        result = train_step(batches, range(1), step, rates, False, Clock())
        state = state_of(train_step)
        said = {
            "loss": result.losses["loss"],
            "norm": result.gradient_norm,
            "applied": result.applied,
            "synchronised": train_step.grad_sync.synchronised(step),
            "ema_updates": train_step.ema.updates,
            **{part: digest(arrays) for part, arrays in state.items()},
        }
        history.append(said)
    return history, state


def state_of(train_step):
    groups = {
        "model": train_step.model.state_dict(),
        "ema": train_step.ema.average,
        "optimizer": optimizer_arrays(train_step.optimizer, train_step.model),
    }
    return {
        name: {key: np.array(value) for key, value in group.items()}
        for name, group in groups.items()
    }


def digest(arrays):
    return hashlib.sha256(b"".join(arrays[key].tobytes() for key in sorted(arrays))).hexdigest()


def distance(first, second):
    """Largest difference of two states, relative to the largest value of each array."""
    return max(
        float(np.abs(array - second[key]).max() / max(np.abs(array).max(), 1e-3))
        for key, array in first.items()
    )


def local(argument):
    init_cpu()
    plain = [MOMENTUM, "train.clip_norm=null"]
    gradients, gradients_state = train(plain, 4)
    weights, weights_state = train([*plain, "distributed.sync_every=1"], 4)
    return {
        "losses": [[step["loss"] for step in steps] for steps in (gradients, weights)],
        "distances": {
            part: distance(state, weights_state[part]) for part, state in gradients_state.items()
        },
        "every three": train([MOMENTUM, "distributed.sync_every=3"], 6, poisoned=[4])[0],
        "adamw": train([ADAMW, "distributed.sync_every=2"], 2)[0],
    }


@pytest.fixture(scope="module")
def local_runs():
    return run_on_ranks(2, f"{HERE}:local")


@pytest.mark.slow
def test_local_sgd_every_step_equals_allreduce(local_runs):
    for runs in local_runs:
        gradients, weights = runs["losses"]
        assert weights == pytest.approx(gradients, rel=1e-5)
        assert max(runs["distances"].values()) < 1e-4, runs["distances"]


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


def sharded(argument):
    """By optimizer: what is not the same with and without shares; this rank's part of the state."""
    init_cpu()
    found = {}
    for name, optimizer in {"momentum": MOMENTUM, "adamw": ADAMW}.items():
        (whole, state), (share, part) = (
            train([optimizer, f"distributed.shard_optimizer={on}"], 4) for on in ("false", "true")
        )
        differ = [
            key for key in ("loss", "norm", "model", "ema") if whole[-1][key] != share[-1][key]
        ]
        mine = part["optimizer"]
        everything = state["optimizer"]
        differ += [key for key in mine if not np.array_equal(mine[key], everything[key])]
        size = sum(each.size for each in mine.values())
        found[name] = {
            "differ": differ,
            "entries": sorted(mine),
            "all": sorted(everything),
            "share": size / sum(each.size for each in everything.values()),
        }
    return found


@pytest.mark.slow
def test_sharded_optimizer_state_gives_same_weights():
    runs = run_on_ranks(2, f"{HERE}:sharded")
    for name in ("momentum", "adamw"):
        first, second = (run[name] for run in runs)
        assert first["differ"] == second["differ"] == []
        assert sorted(first["entries"] + second["entries"]) == first["all"]
        assert abs(first["share"] - 0.5) < 0.01


def whole_runs(argument):
    """Trains as told, one run after another, on the ranks of one start."""
    common = ("train.batch_size_per_card=3", "train.epochs=5", "optimizer.reference_batch_size=8",
              "log.every_steps=1", "checkpoint.every_steps=3")  # fmt: skip
    for output, overrides, resume, interrupt in argument["runs"]:
        experiment = build_run(
            argument["shapes"], output, *common, *overrides,
            evaluate=argument["evaluate"], resume=resume, changed=resume,
        )  # fmt: skip
        with experiment.log:
            if interrupt and comm.rank() == 1:
                signals_itself(experiment.trainer)
            code = experiment.trainer.fit()
        assert code == (75 if interrupt else 0)


def signals_itself(trainer):
    prepare = trainer.train_step.loss.prepare

    def and_signal(model, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        prepare(model, step)

    trainer.train_step.loss.prepare = and_signal


def saved(output_dir, link="last"):
    folder = output_dir / "checkpoints" / link
    return {
        f"{group}/{key}": array
        for group in ("model", "ema", "optimizer")
        for key, array in load_file(folder / f"{group}.safetensors").items()
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert [key for key in first if not np.array_equal(first[key], second[key])] == []


def steps_of(output_dir, what):
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if what in record]


@pytest.mark.slow
def test_local_sgd_stops_saves_and_resumes_exactly(shapes, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    every = ["distributed.sync_every=3", "checkpoint.every_steps=2"]
    runs = [
        (f"{whole}", every, False, False),
        (f"{parts}", [*every, "train.max_steps=2"], False, False),
        (f"{parts}", every, True, True),  # a signal during the fifth step
        (f"{parts}", every, True, False),
    ]
    argument = {"shapes": str(shapes), "evaluate": True, "runs": runs}
    run_on_ranks(2, f"{HERE}:whole_runs", argument)
    assert steps_of(whole, "loss") == steps_of(parts, "loss") == [*range(1, 11)]
    # An epoch has two steps, there are ten; a stop does not wait for an evaluation.
    assert steps_of(whole, "mAP") == steps_of(parts, "mAP") == [3, 6, 9, 10]
    assert_same(saved(whole), saved(parts))
    for folder in (whole, parts):
        steps = {path.name for path in (folder / "checkpoints").glob("step-*")}
        assert steps >= {"step-00000006", "step-00000009", "step-00000010"}


@pytest.mark.slow
def test_sharded_checkpoint_resumes_on_any_ranks(shapes, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shares = ["distributed.shard_optimizer=true", "optimizer.name=adamw", "train.epochs=2"]
    runs = [
        (f"{whole}", shares[1:], False, False),
        (f"{parts}", [*shares, "train.max_steps=2"], False, False),
        (f"{parts}", shares, True, False),
    ]
    argument = {"shapes": str(shapes), "evaluate": False, "runs": runs}
    run_on_ranks(2, f"{HERE}:whole_runs", argument)
    ended = saved(parts)
    assert_same(saved(whole), ended)
    longer = [*shares, "train.epochs=3", "train.batch_size_per_card=6"]
    whole_runs({**argument, "runs": [(f"{parts}", longer, True, False)]})
    assert steps_of(parts, "loss") == list(range(1, 7))
    updates = [key for key in ended if key.endswith("beta1_pow_acc_0")]
    assert updates and all(saved(parts)[key] < ended[key] for key in updates)
