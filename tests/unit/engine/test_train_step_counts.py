"""What a step costs the host: operators that Python dispatches, and reads that block."""

import tempfile
from pathlib import Path

import pytest

from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import parse_config
from ppdist.distributed import comm
from ppdist.optim.lr_scheduler import LearningRates
from tests.distributed import run_on_ranks
from tests.source_tree import REPOSITORY
from tests.unit.engine.counters import count_step
from tests.unit.engine.tiny import build_step, fixed_batch, init_cpu, tiny_config

CONFIGS = {
    "ppyoloe": "ppyoloe/ppyoloe_plus_s_80e_coco.yml",
    "yolov5": "yolov5/yolov5s_300e_coco.yml",
}


def recipe(name: str, folder: Path, *overrides: str) -> ExperimentConfig:
    """A published recipe of full width, without its data."""
    return parse_config(
        REPOSITORY / "configs" / CONFIGS[name],
        [f"data.root={folder}", "train.cpu_kernels=plain", *overrides],
        ExperimentConfig,
    )


# Paddle 3.3.1 updates by AdamW one parameter at a time: 272 of these.
@pytest.mark.parametrize(
    ("name", "overrides", "limit"),
    [
        ("ppyoloe", (), 300),
        pytest.param("yolov5", (), 300, marks=pytest.mark.slow),
        pytest.param("yolov5", ("optimizer.layer_decay=0.8",), 300, marks=pytest.mark.slow),
        pytest.param("ppyoloe", ("optimizer.name=adamw",), 550, marks=pytest.mark.slow),
    ],
)
def test_bookkeeping_operators_of_a_step(name, overrides, limit, tmp_path, record_property):
    init_cpu()
    step, rates = build_step(recipe(name, tmp_path, *overrides), frozen=False)
    rates = LearningRates(rates.lr, 2 * rates.lr, rates.momentum)  # as in the warm-up
    for number in range(2):  # the first makes state
        result, counts = count_step(step, [fixed_batch(number, 0, 2)], number, rates)
    assert result.applied
    record_property("figure", f"{name}: {counts.bookkeeping} operators, {counts.reads}")
    assert 0 < counts.bookkeeping < limit, counts.operators
    assert len(counts.reads) == 1, counts.reads


def counted_on_a_rank(argument):
    init_cpu()
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(Path(folder), ["train.batch_size_per_card=4"])
    step, rates = build_step(config, frozen=False)
    start = 4 * comm.rank()
    _, counts = count_step(step, [fixed_batch(0, start, start + 4)], 0, rates)
    return len(counts.reads), counts.watched


@pytest.mark.slow
def test_straggler_watch_sees_the_only_read():
    """On an accelerator a rank that is early waits for the others in it."""
    found = run_on_ranks(2, "tests.unit.engine.test_train_step_counts:counted_on_a_rank")
    assert found == [[1, 1]] * 2
