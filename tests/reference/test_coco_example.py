"""COCO's own example, and what is said of files that are not that."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from ppdist.metrics.coco import METRICS
from tests.errors import raises
from tests.reference import __main__ as command
from tests.reference import coco_example
from tests.reference.coco_example import PUBLISHED, RESULTS, TRUTH, Row, compare, lines


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
    assert "PASS: all 12 equal those of pycocotools to 1e-09" in capsys.readouterr().out
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == list(METRICS)
    assert [round(row["ours"], 3) for row in rows] == pytest.approx(list(PUBLISHED))
    assert [row["ours"] for row in rows] == pytest.approx(
        [row["of_pycocotools"] for row in rows], abs=1e-9
    )


def test_other_detections_are_difference_with_exit_1(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(example / TRUTH, tmp_path)
    results = json.loads((example / RESULTS).read_text())
    (tmp_path / RESULTS).write_text(json.dumps(results[:300]))
    assert run(monkeypatch, "--reference", tmp_path) == 1
    said = capsys.readouterr().out
    assert "DIFFERS" in said and "FAIL: 12 of 12 differ" in said


def test_missing_pycocotools_uses_published_metrics(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco_example.importlib.util, "find_spec", lambda name: None)
    rows = compare(example)
    assert all(row.equal and row.of_pycocotools is None for row in rows)
    assert lines(rows)[-1] == "PASS: all 12 equal those of COCO"


def test_metric_off_in_tenth_digit_is_difference() -> None:
    assert Row("mAP", 0.505, 0.505 + 1e-10, 0.505).equal
    assert not Row("mAP", 0.505, 0.505 + 1e-8, 0.505).equal
    assert not Row("mAP", 0.5056, 0.5056, 0.505).equal


def test_a_folder_without_the_example_is_the_users_error(tmp_path: Path) -> None:
    with raises("file_not_found", str(TRUTH)):
        compare(tmp_path)


def test_results_of_other_images_are_user_error(tmp_path: Path) -> None:
    truth = {
        "images": [{"id": 1, "file_name": "1.jpg", "width": 9, "height": 9}],
        "categories": [{"id": 1, "name": "cat"}], "annotations": [],
    }  # fmt: skip
    (tmp_path / TRUTH).write_text(json.dumps(truth))
    result = {"image_id": 2, "category_id": 1, "bbox": [0, 0, 4, 4], "score": 0.5}
    (tmp_path / RESULTS).write_text(json.dumps([result]))
    with raises("not_coco_results", "not a COCO result file of", str(RESULTS)):
        compare(tmp_path)
