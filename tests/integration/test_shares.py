"""`distributed.shares: auto`: a slow rank gets fewer micro-batches, and training stays the same."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from ppdist.engine.callbacks import Callback
from ppdist.engine.train_step import TrainStep
from tests.distributed import run_on_ranks
from tests.unit.engine.tiny import FASTEST, init_cpu, tiny_config

STEPS, PER_EPOCH = 24, 4
CHANGE = 16  # the first end of an epoch after times were compared
SLOWER = 0.1  # seconds a micro-batch


class Recorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_step_end(self, step, result, lr, seconds):
        self.losses.append(result.losses["loss"])
        self.seconds.append(seconds.wall)


def train(argument):
    """Steps of six micro-batches, each of which takes longer on rank 1."""
    init_cpu()
    folder, recorder = Path(argument["folder"]), Recorder()
    if comm.rank() == 1:
        forward_backward = TrainStep._forward_backward

        def slow(*words):
            time.sleep(SLOWER)
            return forward_backward(*words)

        TrainStep._forward_backward = slow
    overrides = [
        f"distributed.shares={argument['shares']}",
        "train.total_batch=6",
        "train.batch_size_per_card=1",
        f"train.epochs={STEPS // PER_EPOCH}",
        "optimizer.lr=0.0001",
    ]
    output_dir = folder / f"{argument['shares']}"
    experiment = build_training(
        tiny_config(folder, overrides, FASTEST), output_dir=output_dir, evaluate=False,
        command=[], callbacks=[recorder],
    )  # fmt: skip
    experiment.trainer.fit()
    experiment.log.close()
    return {"losses": recorder.losses, "seconds": recorder.seconds}


@pytest.mark.slow
def test_slow_rank_gets_fewer_micro_batches_at_an_epochs_end(
    tmp_path, monkeypatch, record_property
):
    make_shapes(tmp_path, train=6 * PER_EPOCH, val=4, size=64, seed=0)
    runs = {}
    for shares in ("null", "auto"):
        argument = {"folder": str(tmp_path), "shares": shares}
        runs[shares] = run_on_ranks(2, "tests.integration.test_shares:train", argument)[0]
    lines = (tmp_path / "auto" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    changes = [record for record in map(json.loads, lines) if "shares" in record]
    assert [record["step"] for record in changes] == [CHANGE]
    assert changes[0]["shares_before"] == [3, 3]
    assert changes[0]["shares"] in ([5, 1], [4, 2])  # the latter on a busy machine
    before, after = (
        float(np.median(runs["auto"]["seconds"][part]))
        for part in (slice(1, CHANGE), slice(CHANGE + 1, None))
    )
    record_property("figure", f"a step takes {before:.2f} s, then {after:.2f} s")
    assert after < before
    even = runs["null"]["losses"]
    np.testing.assert_allclose(runs["auto"]["losses"], even, rtol=1e-4)
