"""COCO's own example, and what is said of files that are not that."""

import json
import sys
from pathlib import Path

import pytest

from ppdist.metrics.coco import METRICS
from tests.reference import __main__ as command
from tests.reference.coco_example import PUBLISHED, TRUTH, Row


@pytest.fixture(scope="session")
def example(shared_dir: Path) -> Path:
    folder = shared_dir / "data" / "coco_eval"
    if not (folder / TRUTH).is_file():
        pytest.skip("the example of the COCO API is not beside the checkout")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *options: object) -> int:
    monkeypatch.setattr(sys, "argv", ["reference", "coco", *map(str, options)])
    return command.main()


def test_twelve_example_metrics_equal_published_ones(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "coco.json"
    assert run(monkeypatch, "--reference", example, "--json", file) == 0
    assert "PASS: all 12 equal" in capsys.readouterr().out
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == list(METRICS)
    assert [round(row["ours"], 3) for row in rows] == pytest.approx(list(PUBLISHED))
    assert [row["ours"] for row in rows] == pytest.approx(
        [row["of_pycocotools"] for row in rows], abs=1e-9
    )


def test_metric_off_in_tenth_digit_is_difference() -> None:
    assert Row("mAP", 0.505, 0.505 + 1e-10, 0.505).equal
    assert not Row("mAP", 0.505, 0.505 + 1e-8, 0.505).equal
    assert not Row("mAP", 0.5056, 0.5056, 0.505).equal
