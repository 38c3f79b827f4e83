"""The file of a study: what it may say, and what a user is told where it is wrong."""

from pathlib import Path

import pytest

from ppdist.common.errors import ConfigError
from ppdist.config.study import Dimension, load_study
from ppdist.lab.tune.trial import Cell, grid
from tests.unit.lab.tune.studies import GRID, SEARCH, study_of, write_study


def test_grid_finishes_first_seed_before_second(tmp_path: Path) -> None:
    study = study_of(tmp_path, GRID + "space: {train.clip_norm: {choices: [null, 5.0]}}")
    labels = [cell.label for cell in grid(study)]
    assert labels[:4] == [
        "plain: train.clip_norm=null, seed 0",
        "plain: train.clip_norm=5, seed 0",
        "fast: train.clip_norm=null, seed 0",
        "fast: train.clip_norm=5, seed 0",
    ]
    assert len(labels) == len({cell.key() for cell in grid(study)}) == 8
    assert grid(study)[3].overrides(study) == [
        "train.epochs=4", "optimizer.lr=0.002", "train.clip_norm=5.0", "seed=0",
    ]  # fmt: skip


def test_path_is_relative_to_cwd_or_study_file(tmp_path: Path) -> None:
    assert study_of(tmp_path, GRID).config == str(tmp_path / "experiment.yml")


def test_cli_overrides_precede_those_of_variants(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, GRID), ("optimizer.lr=0.1",))
    cell = grid(study)[1]
    assert cell == Cell("fast", ("optimizer.lr=0.002",), {}, 0)
    assert cell.overrides(study)[-3:] == [
        "optimizer.lr=0.1", "optimizer.lr=0.002", "seed=0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "variants: {plain: [], odd: [train.epoch=3]}",
            "study.yml:2:23: variants.odd: -o train.epoch=3: train.epoch: unknown key; did you "
            "mean train.epochs?",
        ),
        (
            "sampler: random\ntrials: 3\nspace:\n  optimizer.lr: {from: -1, to: 1}",
            "study.yml:5:3: space.optimizer.lr: -o optimizer.lr=-1: optimizer.lr: found -1, "
            "expected number > 0",
        ),
        (
            "sampler: random\ntrials: 3\nspace:\n  optimizer.name: {choices: [adamw, adam]}",
            'study.yml:5:3: space.optimizer.name: -o optimizer.name="adam": optimizer.name: found',
        ),
        ("space: {optimizer.lr: {from: 0.1, to: 1.0}}", "a grid needs {choices: [...]}, or from"),
        (
            "space:\n  train.epochs: {from: 0, to: 4, step: 2}",
            "study.yml:3:3: space.train.epochs: -o train.epochs=0: train.epochs: found 0",
        ),
        ("space: {optimizer.lr: {from: 2, to: 1}}", "from: 2 is greater than to: 1"),
        ("space: {optimizer.lr: {from: 0, to: 1, log: true}}", "log: needs from > 0"),
        ("space: {optimizer.lr: {log: true}}", "expected {from: A, to: B} or {choices: [...]}"),
        ("sampler: tpe", "sampler: tpe: needs space, and trials: how many"),
        ("metric: mAP", "sampler: grid: needs variants, space or seeds"),
        (SEARCH + "seeds: [1]", "variants and seeds go with sampler: grid"),
        (GRID + "prunner: median", "unknown key; did you mean pruner?"),
        (GRID + "pruner: mean", "pruner.name: found"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        study_of(tmp_path, text)
    assert said in str(error.value)


def test_the_name_of_a_pruner_is_short_for_its_section(tmp_path: Path) -> None:
    assert study_of(tmp_path, GRID + "pruner: median").pruner.name == "median"


def test_grid_values_include_upper_end_and_integers() -> None:
    assert Dimension(**{"from": 1, "to": 7, "step": 3}).values() == [1, 4, 7]
    assert Dimension(**{"from": 2, "to": 4}).values() == [2, 3, 4]
    assert Dimension(**{"from": 0.1, "to": 0.3, "step": 0.1}).values() == [0.1, 0.2, 0.3]
    assert Dimension(**{"from": 0.1, "to": 0.7, "step": 0.1}).values()[-1] == 0.7


def test_studies_of_project_can_be_read() -> None:
    folder = Path(__file__).resolve().parents[3] / "configs" / "studies"
    files = sorted(folder.glob("*.yml"))
    assert files
    for file in files:
        load_study(file)
