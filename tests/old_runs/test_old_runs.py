"""Runs that earlier versions made go on: they predict, evaluate, export and resume as they did.

Each folder beside this file holds runs of one commit, and what its own commands made of them;
make.py makes both.  A key that goes needs a row in ppdist/config/removed.py, a new field of
state.json a default.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_here, succeeded
from tests.old_runs.outcomes import detections, outcomes

HERE = Path(__file__).parent
RUNS = [
    (file.parent.name, name)
    for file in sorted(HERE.glob("*/expected.json"))
    for name in json.loads(file.read_text(encoding="utf-8"))
]
FAST = ("powersgd", "classifier")
TEACHERS = {"distilled": "yolov5"}
# Rounding differs between machines, and what is learned from it grows apart.
SCORE, PIXELS, LOSS = 2e-3, 0.25, 5e-3


def command(name: str, *words: object) -> None:
    succeeded(run_here("infer" if name == "predict" else name, *words))


def unpack(commit: str, *names: str) -> None:
    for name in names:
        with tarfile.open(HERE / commit / f"{name}.tar.xz") as archive:
            archive.extractall(filter="data")


def assert_same(found: list[Any], stored: list[Any]) -> None:
    """Looks up stored detections, the surest of all; near-ties may change places."""
    assert found[0][2] == pytest.approx(stored[0][2], abs=SCORE)
    for image, label, score, *box in stored:
        assert any(
            (image, label) == tuple(row[:2])
            and row[2] == pytest.approx(score, abs=SCORE)
            and row[3:] == [pytest.approx(one, abs=PIXELS) for one in box]
            for row in found
        ), (image, label, score, box)


@pytest.mark.parametrize(
    ("commit", "name"),
    [
        pytest.param(commit, name, marks=() if name in FAST else pytest.mark.slow)
        for commit, name in RUNS
    ],
)
def test_old_run_predicts_evaluates_exports_and_resumes(commit, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = json.loads((HERE / commit / "expected.json").read_text(encoding="utf-8"))[name]
    data = "patterns" if name == "classifier" else "shapes"
    unpack(commit, data, name, *filter(None, [TEACHERS.get(name)]))
    found = outcomes(name, command)
    assert_same(found["detections"], stored["detections"])
    assert_same(found["exported"], stored["exported"])
    for key, value in stored["metrics"].items():
        if isinstance(value, float):
            assert found["metrics"][key] == pytest.approx(value, abs=SCORE), key
    assert found["losses"] == pytest.approx(stored["losses"], rel=LOSS)


@pytest.mark.parametrize("commit", sorted({commit for commit, _ in RUNS}))
def test_old_export_predicts(commit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unpack(commit, "shapes", "yolov5_exported")
    stored = json.loads((HERE / commit / "expected.json").read_text(encoding="utf-8"))["yolov5"]
    found = detections(command, ("--model", "yolov5_exported"), "shapes/images/val")
    assert_same(found, stored["exported"])
