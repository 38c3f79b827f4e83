"""The export matrix: what it compares, what it calls a miss, where its table goes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.model import YOLOv5Config
from ppdist.export.export import prepare_input
from ppdist.export.verify import eager_outputs
from ppdist.models.yolov5 import YOLOv5
from tests.errors import raises
from tests.reference import export_matrix as matrix
from tests.reference.export_subjects import MODELS, Subject, enliven, images_of, threshold_for
from tests.unit.export.tiny import NMS, tiny_spec

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_row_passes_within_the_limits_alone() -> None:
    good = matrix.Row(
        "m", "paddle", "f", "trained", score=9e-5, box=0.04, boxes=3, mAP_eager=0.5, mAP=0.5
    )
    assert good.passed
    for change in ({"score": 2e-4}, {"box": 0.06}, {"mAP": 0.498}, {"error": "no file"}):
        assert not replace(good, **change).passed
        assert not replace(good, judged=False, error="no file").passed
    assert replace(good, mAP=0.4, judged=False).passed


def test_random_weights_give_image_dependent_scores() -> None:
    subject = lively()
    scores, _ = (part.numpy() for part in subject.model.predict(tensor(subject.images_N3HW)))
    assert np.abs(scores[0] - scores[1]).max() > 0.1 * scores.max()
    threshold = threshold_for(list(scores))
    assert np.sum(scores >= threshold) == 160


def tensor(images: np.ndarray):  # type: ignore[no-untyped-def]
    import paddle

    return paddle.to_tensor(images)


def lively() -> Subject:
    import paddle

    paddle.seed(0)
    model = YOLOv5(YOLOv5Config(size="n", num_classes=3, depth_multiple=0.1, width_multiple=0.125))
    spec = tiny_spec().model_copy(update={"model": "tiny"})
    images = np.stack([prepare_input(image, spec) for image in images_of(None)[:4]])
    enliven(model, images)
    threshold = threshold_for([scores for scores, _ in eager_outputs(model, [images])])
    nms = NMS.model_copy(update={"score_threshold": threshold})
    spec = spec.model_copy(update={"nms": nms})
    return Subject("tiny", "random", model, spec, images)


def test_the_table_stands_between_its_marks(tmp_path: Path) -> None:
    document = tmp_path / "deploy.md"
    document.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    good = matrix.Row("m", "onnx", "any", "random", score=3.1e-6, box=2e-4, boxes=7, megabytes=1.25)
    bad = replace(good, error="no kernel")
    matrix.write_table(document, matrix.table([good, bad]))
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith(f"{matrix.END}\nafter\n")
    assert all(f"| {cell} |" in text for cell in ("3e-06", "0.0002", "ok"))
    assert "FAILED: no kernel" in text and "old" not in text
    document.write_text("no marks")
    with raises("document_marks_missing"):
        matrix.write_table(document, "")


def test_the_page_has_the_marks_of_the_table() -> None:
    text = (REPOSITORY / "docs" / "dev" / "export_matrix.md").read_text(encoding="utf-8")
    assert text.count(matrix.BEGIN) == text.count(matrix.END) == 1


def test_every_model_of_the_matrix_has_its_configuration() -> None:
    for name, file in MODELS.items():
        assert (REPOSITORY / "configs" / file).is_file(), name


@pytest.mark.slow
def test_verify_export_prints_rows_and_writes_json(tmp_path: Path) -> None:
    pytest.importorskip("paddle2onnx")
    report = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.reference", "export", "--models", "yolov5n"]
    done = subprocess.run(
        [*command, "--json", str(report)], cwd=REPOSITORY, capture_output=True, text=True,
        timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 8 of 8" in done.stdout
    assert all(each["passed"] for each in json.loads(report.read_text()))
