"""A small experiment, studies of it, searches whose trainings are fake_train.py's, and rows."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppdist.config.study import StudyConfig, load_study
from ppdist.lab.tune.search import Search
from ppdist.lab.tune.store import Store
from ppdist.lab.tune.trial import Launcher

EXPERIMENT = """
data:
  root: .
  train: {annotations: annotations/instances_train.json}
  val: {annotations: annotations/instances_val.json}
model: {name: ppyoloe, num_classes: 3, image_size: [64, 64]}
train: {epochs: 60}
"""
GRID = """
overrides: [train.epochs=4]
variants: {plain: [], fast: [optimizer.lr=0.002]}
seeds: [0, 1]
"""
SEARCH = """
overrides: [train.epochs=4]
sampler: tpe
trials: 6
space:
  optimizer.lr: {from: 1e-4, to: 1e-2, log: true}
  model.size: {choices: [s, m]}
"""
FAKE = str(Path(__file__).with_name("fake_train.py"))
LAUNCHER = Launcher([sys.executable, FAKE], ["train.py"], 1)


def write_study(folder: Path, text: str) -> Path:
    """experiment.yml and study.yml in a folder."""
    (folder / "experiment.yml").write_text(EXPERIMENT, encoding="utf-8")
    file = folder / "study.yml"
    file.write_text("config: experiment.yml\n" + text.strip() + "\n", encoding="utf-8")
    return file


def study_of(folder: Path, text: str) -> StudyConfig:
    return load_study(write_study(folder, text))


def search_in(
    store: Store, *, workers: int = 1, stop: Callable[[], bool] = lambda: False
) -> tuple[Search, list[str]]:
    """A search and what it will have said."""
    said: list[str] = []
    places = [["--nproc_per_node", "1"]] * workers
    return Search(store, LAUNCHER, places, stop, said.append, poll_seconds=0.1), said


def row(variant: str, seed: int, value: float, **more: Any) -> dict[str, Any]:
    """A row of trials.jsonl."""
    return {
        "study": "cells", "config": "configs/x.yml", "overrides": ["train.epochs=4"],
        "metric": "mAP", "lower_is_better": False, "trial": seed, "state": "complete",
        "setting": variant, "variant": variant, "params": {}, "seed": seed,
        "variant_overrides": [] if variant == "plain" else ["a.b=1"],
        "minutes": 4.0, "epochs": 9.5, "final": {"mAP": value}, "best": {"mAP": value + 0.01},
        "curve": [[9.5, value]], "why": "", **more,
    }  # fmt: skip


def seeds_of(variant: str, *values: float) -> list[dict[str, Any]]:
    return [row(variant, seed, value) for seed, value in enumerate(values)]
