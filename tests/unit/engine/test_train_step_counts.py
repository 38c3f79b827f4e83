"""What a step costs the host: operators that Python dispatches, and reads that block."""

from pathlib import Path

import pytest

from ppdist.config import ExperimentConfig
from ppdist.config.base import parse_config
from tests.source_tree import REPOSITORY
from tests.unit.engine.counters import count_step
from tests.unit.engine.tiny import build_step, fixed_batch, init_cpu

CONFIGS = {
    "ppyoloe": "ppyoloe/ppyoloe_plus_s_80e_coco.yml",
    "yolov5": "yolov5/yolov5s_300e_coco.yml",
}


def recipe(name: str, folder: Path, *overrides: str) -> ExperimentConfig:
    """A published recipe of full width, without its data."""
    return parse_config(
        REPOSITORY / "configs" / CONFIGS[name],
        [f"data.root={folder}", "train.cpu_convolutions=plain", *overrides],
        ExperimentConfig,
    )


@pytest.mark.parametrize(("name", "limit"), [("ppyoloe", 2647), ("yolov5", 1781)])
def test_bookkeeping_operators_of_a_step(name, limit, tmp_path, record_property):
    init_cpu()
    step, rates = build_step(recipe(name, tmp_path), frozen=False)
    rates = rates._replace(bias_lr=2 * rates.lr)  # as in the warm-up
    for number in range(2):  # the first makes state
        result, counts = count_step(step, [fixed_batch(number, 0, 2)], number, rates)
    assert result.applied
    record_property("figure", f"{name}: {counts.bookkeeping} operators, {counts.reads}")
    assert counts.bookkeeping <= limit, counts.operators
    assert len(counts.reads) == 3 and counts.watched == 0, counts.reads
