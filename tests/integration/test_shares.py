"""`distributed.shares`: a slow rank gets fewer micro-batches, and training stays the same."""

import re
import time
from pathlib import Path

import numpy as np
import pytest

from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from ppdist.engine.callbacks import Callback
from tests.distributed import run_on_ranks
from tests.unit.engine.tiny import FASTEST, init_cpu, tiny_config

STEPS, PER_EPOCH = 32, 4  # two comparisons of 15 steps
SLOWER = 0.1  # seconds a micro-batch


class Recorder(Callback):
    def __init__(self) -> None:
        """Each micro-batch takes longer on rank 1."""
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_begin(self, run):
        if comm.rank() == 1:
            run.train_step.model.register_forward_pre_hook(lambda *_: time.sleep(SLOWER))

    def on_step_end(self, step, result, lr, seconds):
        self.losses.append(result.losses["loss"])
        self.seconds.append(seconds.wall)


def train(argument):
    """Makes steps of six micro-batches."""
    init_cpu()
    folder, recorder = Path(argument["folder"]), Recorder()
    overrides = [
        f"distributed.shares={argument['shares']}",
        "train.total_batch=6",
        "train.batch_size_per_card=1",
        f"train.epochs={STEPS // PER_EPOCH}",
        "optimizer.lr=0.0001",
    ]
    output_dir = folder / argument["name"]
    experiment = build_training(
        tiny_config(folder, overrides, FASTEST), output_dir=output_dir, evaluate=False,
        command=[], callbacks=[recorder],
    )  # fmt: skip
    experiment.trainer.fit()
    experiment.log.close()
    return {"losses": recorder.losses, "seconds": recorder.seconds}


@pytest.mark.slow
def test_the_list_of_a_stragglers_warning_shortens_the_step(tmp_path, record_property):
    make_shapes(tmp_path, train=6 * PER_EPOCH, val=4, size=64, seed=0)

    def run(name, shares):
        argument = {"folder": str(tmp_path), "name": name, "shares": shares}
        return run_on_ranks(2, "tests.integration.test_shares:train", argument)[0]

    even = run("even", "null")
    log = (tmp_path / "even" / "train.log").read_text(encoding="utf-8")
    shares = re.search(r"`distributed.shares` to (\[1, [\d.]+\])", " ".join(log.split()))[1]
    apart = run("apart", shares.replace(" ", ""))
    before, after = (float(np.median(each["seconds"][1:])) for each in (even, apart))
    record_property("figure", f"{shares}: a step takes {before:.2f} s, then {after:.2f} s")
    assert after < before
    np.testing.assert_allclose(apart["losses"], even["losses"], rtol=1e-4)
