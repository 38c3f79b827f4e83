"""tools/tune.py as a user runs it: real trainings of a few steps."""

import json
from pathlib import Path

import pytest

from tests.forked import run_tool, succeeded
from tests.project import TINY_PPYOLOE, write_config
from tests.unit.lab.tune.studies import seeds_of

pytest.importorskip("optuna")

EXPERIMENT = """
loss: {static_assigner_epochs: 1}
train: {epochs: 4, batch_size_per_card: 4}
optimizer: {lr: 0.001}
schedule: {warmup_epochs: 0}
checkpoint: {every_epochs: 1}
log: {images: 0, every_steps: 1}
"""
STUDY = """
config: experiment.yml
variants: {plain: [], fast: [optimizer.lr=0.004]}
seeds: [3]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    sizes = ["--train", 8, "--val", 4, "--size", 64]
    succeeded(run_tool("data", "synthetic", "--out", folder / "data", *sizes))
    write_config(folder, EXPERIMENT, TINY_PPYOLOE, name="experiment.yml")
    (folder / "study.yml").write_text(STUDY, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_study_is_made_and_shown(project: Path) -> None:
    out = project / "out"
    said = succeeded(
        run_tool("tune", "run", "-c", project / "study.yml", "--out", out, "--workers", 2,
                 "-o", "train.epochs=2")
    )  # fmt: skip
    assert "001 (fast" in said
    config = (out / "trials" / "001" / "config.yml").read_text(encoding="utf-8")
    assert "seed: 3" in config and "lr: 0.004" in config and "epochs: 2" in config
    rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    assert [len(row["curve"]) for row in rows] == [2, 2]
    assert "study: 2 complete" in succeeded(run_tool("tune", "show", out))
    again = run_tool("tune", "run", "-c", project / "study.yml", "--out", out)
    assert again.returncode == 2 and "[study_settings_differ]" in again.stderr


def test_the_table_has_the_best_setting_first(tmp_path: Path) -> None:
    rows = [*seeds_of("plain", 0.5, 0.5, 0.5), *seeds_of("mal", 0.6, 0.6, 0.6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "trials.jsonl").write_text(text, encoding="utf-8")
    shown = succeeded(run_tool("tune", "show", tmp_path))
    assert "cells: 6 complete" in shown and shown.index("mal") < shown.index("plain")
    assert "best: mal: -o a.b=1" in shown
    gone = run_tool("tune", "table", tmp_path / "trials.jsonl")
    assert gone.returncode == 2 and "`ppdist tune show DIR`" in gone.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cards", "0,1|"], "cards '': "),
        (["--cards", "0,1|2"], "cards '0,1|2': "),
        (["--cards", "0", "--workers", "2"], "--cards"),
        (["--budget", "nan"], "'nan'"),
        (["--budget", "-1"], "'-1'"),
    ],
)
def test_messages_of_the_command_line(tmp_path: Path, options: list[str], said: str) -> None:
    done = run_tool("tune", "run", "-c", "study.yml", "--out", tmp_path / "x", *options)
    assert done.returncode == 2 and said in done.stderr


def test_a_folder_without_a_study_is_named(tmp_path: Path) -> None:
    done = run_tool("tune", "show", tmp_path / "nowhere")
    assert done.returncode == 2 and "[study_not_found]" in done.stderr
