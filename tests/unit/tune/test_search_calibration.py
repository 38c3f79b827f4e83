"""How long a variant may be, from what it measured in miniature."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ppdist.config import load_config
from ppdist.tune.search import (
    Timed,
    calibrated,
    epochs_for_calibration,
    evaluations_in,
    evaluations_of,
    every_epochs,
    for_calibration,
    lengthened,
)
from tests.errors import raises
from tests.unit.tune.studies import GRID, study_of

PHASES = [
    "train.epochs=60", "evaluate.every_epochs=5", "loss.static_assigner_epochs=20",
    "checkpoint.every_epochs=10",
]  # fmt: skip


def write_run(folder: Path, step_seconds: float) -> Path:
    """Two epochs of ten steps, of which the first are ten times slower, and evaluations of 6 and
    4 s."""
    folder.mkdir()
    records: list[dict] = [{"step": 0, "derived": {"steps_per_epoch": {"value": 10}}}]
    for step in range(1, 21):
        seconds = step_seconds * (10 if step <= 10 else 1)
        records.append({"step": step, "loss": 1.0, "step_seconds": seconds})
    records.append({"step": 10, "epoch": 1.0, "mAP": 0.1, "eval_seconds": 6.0})
    records.append({"step": 20, "epoch": 2.0, "mAP": 0.1, "eval_seconds": 4.0})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return folder


def test_epochs_fill_the_minutes_that_are_left(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", 0.5), write_run(tmp_path / "b", 0.7)]
    # Each copy: 20 steps and 10 s of evaluations; the rest of the wall time is overhead.
    walls = [20 * 0.5 + 10 + 30, 20 * 0.7 + 10 + 30]
    found = calibrated([*map(Timed, folders, walls)], 4.0, wanted=6)
    assert found.step_seconds == pytest.approx(0.6)
    assert found.overhead_seconds == pytest.approx(30)
    # 30 + 30 * 10 * 0.6 + 6 * 4 = 234 s; another epoch would bring another evaluation
    assert found.epochs == 30.0 and found.evaluations == 6
    assert found.minutes == pytest.approx(3.9)


def test_evaluations_are_counted_as_made(tmp_path: Path) -> None:
    run = Timed(write_run(tmp_path / "a", 0.5), 50)
    for wanted in (1, 3, 7, 12):
        for minutes in np.arange(0.8, 6, 0.037):
            found = calibrated([run], float(minutes), wanted)
            every = every_epochs(found.epochs, wanted)
            steps = range(1, round(found.epochs * 10) + 1)
            made = sum(step % (every * 10) == 0 or step == steps[-1] for step in steps)
            assert made == found.evaluations
            assert found.minutes <= minutes
            longer = found.epochs + (0.1 if found.epochs < 20 else 1)
            count = evaluations_in(longer, 10, every_epochs(longer, wanted))
            assert dataclasses.replace(found, epochs=longer, evaluations=count).minutes > minutes


def test_short_runs_get_tenths_of_epochs(tmp_path: Path) -> None:
    run = Timed(write_run(tmp_path / "a", 0.5), 50)
    # (60 - 30 - 4) / 5 = 5.2, but one evaluation each 5 epochs and one at the end are two
    assert calibrated([run], 1.0, wanted=1).epochs == 5.0
    assert calibrated([run], 0.95, wanted=1).epochs == 4.6  # (57 - 30 - 4) / 5
    with raises("minutes_too_few", "30"):
        calibrated([run], 0.57, wanted=1)


def test_phases_keep_their_share_of_the_run(tmp_path: Path) -> None:
    study = study_of(tmp_path, GRID)
    config = load_config(study.config, [*PHASES, *lengthened(study, PHASES, 12.0)])
    assert config.train.epochs == 12 and config.train.phases_for_epochs == 60
    assert config.evaluate.every_epochs == 1 and evaluations_of(study, PHASES) == 12
    assert config.checkpoint.every_epochs == 2
    longer = [*PHASES, "train.epochs=120", "train.phases_for_epochs=60"]
    config = load_config(study.config, [*longer, *lengthened(study, longer, 30.0)])
    assert config.train.phases_for_epochs == 60  # as they were written


def test_a_set_of_few_steps_an_epoch_is_measured_longer(tmp_path: Path) -> None:
    assert epochs_for_calibration(write_run(tmp_path / "a", 0.5)) == 4


def test_the_miniature_has_all_phases(tmp_path: Path) -> None:
    study = study_of(tmp_path, GRID)
    config = load_config(study.config, [*PHASES, *for_calibration(study, PHASES, 2)])
    assert config.train.epochs == 2 and config.evaluate.every_epochs == 1
    assert config.log.every_steps == 1
    assert config.train.phases_for_epochs == 60
