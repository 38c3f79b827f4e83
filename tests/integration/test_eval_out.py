"""tools/eval.py --out, on models that nobody trained."""

import json
from pathlib import Path

import paddle
import pytest

from ppdist.config.experiment import load_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.engine.build import build_model
from ppdist.metrics.coco import METRICS
from tests.forked import run_here, run_tool, succeeded
from tests.project import write_config
from tests.unit.data.classified import CONFIG as CLASSIFIER
from tests.unit.data.classified import PATTERNS, write_patterns

CONFIG = """
train: {epochs: 1, batch_size_per_card: 2}
nms: {score_threshold: 0.0, keep: 50}
"""


def fresh_weights(folder: Path) -> Path:
    paddle.seed(0)
    model = build_model(load_config(str(folder / "cfg.yml"), []))
    file = folder / "fresh.pdparams"
    paddle.save(model.state_dict(), str(file))
    return file


@pytest.mark.slow
def test_detector_writes_tables_detections_and_plots(tmp_path: Path) -> None:
    make_shapes(tmp_path / "data", train=1, val=4, size=64, seed=0)
    write_config(tmp_path, CONFIG)
    out = tmp_path / "out"
    weights = fresh_weights(tmp_path)
    more = ["--out", out, "--json", tmp_path / "metrics.json"]
    said = succeeded(run_tool("eval", "-c", tmp_path / "cfg.yml", "-w", weights, *more))
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert "4 images" in said and "mAP50" in said and "-1" not in said
    content = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert content["images"] == 4 and len(content["per_class"]) == 3
    for name in METRICS:
        assert content["metrics"][name] == (None if metrics[name] < 0 else metrics[name])
    detections = json.loads((out / "detections.json").read_text())
    assert 0 < len(detections) <= 4 * 50, "an untrained model, too, gives no more than nms.keep"
    assert {"confusion.png", "pr_curve.png"} <= {path.name for path in (out / "plots").iterdir()}


@pytest.mark.slow
def test_classifier_writes_accuracy_and_confusion(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_patterns(tmp_path / split, 2, seed=0)
    (tmp_path / "cfg.yml").write_text(CLASSIFIER.format(root=tmp_path), encoding="utf-8")
    out = tmp_path / "out"
    done = run_tool("eval", "-c", tmp_path / "cfg.yml", "-w", fresh_weights(tmp_path), "--out", out)
    succeeded(done)
    content = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in content["per_class"]] == list(PATTERNS)
    assert sum(map(sum, content["confusion"]["counts"])) == 6
    assert len(json.loads((out / "detections.json").read_text())) == 6


def test_file_in_place_of_folder_is_refused_early(tmp_path: Path) -> None:
    write_patterns(tmp_path / "train", 1, seed=0)
    write_patterns(tmp_path / "val", 1, seed=0)
    (tmp_path / "cfg.yml").write_text(CLASSIFIER.format(root=tmp_path), encoding="utf-8")
    (tmp_path / "out").write_text("in the way")
    done = run_here("eval", "-c", tmp_path / "cfg.yml", "-w", "no.pdparams", "--out",
                    tmp_path / "out")  # fmt: skip
    assert done.returncode == 2
    assert "[folder_expected]" in done.stderr
