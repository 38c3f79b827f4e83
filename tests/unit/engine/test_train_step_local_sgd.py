"""Ranks that do not do the same: local SGD between synchronised steps."""

import hashlib
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest

from ppdist.distributed import comm
from tests.distributed import run_on_ranks
from tests.unit.engine.tiny import build_step, ema_of, fixed_batch, init_cpu, take_step, tiny_config

PARTS = ((0, 4), (4, 8))  # 11 objects and 1
STEPS, BAD = 6, 4  # and the one whose loss is not finite on rank 1


def train(overrides):
    """What each step said and, in digests, left behind."""
    init_cpu()
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(Path(folder), ["train.batch_size_per_card=4", *overrides])
    step, rates = build_step(config, frozen=False)

    def poison(loss, arguments, output):
        bad = comm.rank() == 1 and arguments[4] == BAD
        return type(output)(output.total * (math.nan if bad else 1.0), *output[1:])

    step.loss.register_forward_post_hook(poison)
    history = []
    for number in range(STEPS):
        result = take_step(step, [fixed_batch(number, *PARTS[comm.rank()])], number, rates)
        states = {
            "model": step.model.state_dict(),
            "ema": ema_of(step).average,
            "optimizer": step.optimizer.state(),
        }
        said = {"applied": result.applied, "updates": ema_of(step).updates}
        said["norm"] = result.gradient_norm if result.applied else None
        said["synchronised"] = step.exchange.synchronised(number)
        history.append(said | {name: digest(arrays) for name, arrays in states.items()})
    return history


def digest(arrays):
    return hashlib.sha256(b"".join(np.array(arrays[key]) for key in sorted(arrays))).hexdigest()


# Adam turns a gradient of rounding noise into a step of lr.
@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["lr: 0.003, nesterov: true", "lr: 0.0001, name: adamw"], ids=["momentum", "adamw"]
)
def test_replicas_are_equal_only_after_synced_steps(optimizer):
    settings = [f"optimizer={{{optimizer}, weight_decay: 0.01}}", "distributed.local_sgd_steps=3"]
    ranks = run_on_ranks(2, f"{__name__}:train", settings)
    for number, (one, other) in enumerate(zip(*ranks)):
        together = number in (2, 5)
        assert one["synchronised"] == other["synchronised"] == together
        for part in ("model", "optimizer"):
            assert (one[part] == other[part]) == together
        assert one["ema"] == other["ema"]  # moves with the synchronised weights only
        assert one["applied"] == other["applied"] == (number != BAD)
        assert one["norm"] == other["norm"]
    # One of the three updates before the second synchronisation was none.
    assert [said["updates"] for said in ranks[0]] == [0, 0, 3, 3, 3, 5]
