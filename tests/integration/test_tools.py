"""tools/*.py one after the other as a user runs them, on a tiny set that is trained on once."""

import json
import re
import subprocess
from pathlib import Path
from unittest import mock

import cv2
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ppdist.config.experiment import load_config
from ppdist.metrics.coco import METRICS
from tests.distributed import run_on_ranks
from tests.forked import exit_code_of, run_tool, succeeded
from tests.project import TINY_PPYOLOE, write_config
from tests.unit.engine.runs import records

STEPS, ALONE = 24, 22  # epochs of CONFIG: one rank makes the first ones, and two the others
CONFIG = """
data: {augment: {distort: 0, expand: 0, crop: 0, flip: 0, random_interpolation: false}}
model: {width_multiple: 0.25, image_size: [96, 96]}
loss: {static_assigner_epochs: 8}
train:
  {epochs: 24, batch_size_per_card: 2, clip_norm: 10.0, ema: {decay: 0.8}, cpu_kernels: plain}
optimizer: {name: adamw, lr: 0.008, weight_decay: 0.0}
schedule: {warmup_epochs: 2}
evaluate: {every_epochs: 11}
log: {every_steps: 1}
"""
# Four images, two ranks of two: a step an epoch.


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ of 4 + 5 images, cfg.yml, and out/: what a training left that two ranks resumed."""
    folder = tmp_path_factory.mktemp("project")
    sizes = ["--train", 4, "--val", 5, "--size", 256]
    made = succeeded(run_tool("data", "synthetic", "--out", folder / "data", *sizes))
    assert "wrote 4 + 5 images" in made
    write_config(folder, f"output_dir: {folder}/out{CONFIG}", TINY_PPYOLOE, val="train")
    assert run_on_ranks(1, f"{__name__}:begin", str(folder), hosts=1) == [0]
    assert run_on_ranks(2, f"{__name__}:resume", str(folder), hosts=1) == [0, 0]
    return folder


def begin(folder: str) -> int:
    """The first steps, of the same batch."""
    return train(folder, "-o", f"train.max_steps={ALONE}", "train.batch_size_per_card=4")


def resume(folder: str) -> int:
    return train(folder, "--eval", "--resume")


def train(folder: str, *arguments: str) -> int:
    """tools/train.py on this rank: its exit code.  Pictures are those of eval here."""
    with mock.patch("ppdist.engine.run._draw"):
        return exit_code_of("train", "-c", f"{folder}/cfg.yml", *arguments)


@pytest.fixture(scope="module")
def evaluated(project: Path) -> subprocess.CompletedProcess[str]:
    """tools/eval.py on one process with a floor it cannot reach; leaves eval.json, found.json and
    evaluated/."""
    return run_tool(
        "eval", "-c", project / "cfg.yml", "-w", weights(project),
        "--json", project / "eval.json", "--save-detections", project / "found.json",
        "--out", project / "evaluated", "--at-least", "mAP=1.01",
    )  # fmt: skip


def weights(project: Path) -> Path:
    return project / "out" / "checkpoints" / f"step-{STEPS:08d}"


def test_training_leaves_all_its_steps_and_scores(project: Path) -> None:
    out = project / "out"
    environment = json.loads((out / "environment.json").read_text())
    assert environment["ranks"] == 2 and environment["command"][0].endswith("train.py")
    assert f"after step {ALONE}" in (out / "train.log").read_text(encoding="utf-8")
    written = records(project / "out")
    assert [r["step"] for r in written if "loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in written if "mAP" in r] == [ALONE, STEPS]
    assert (out / "checkpoints" / "best").is_symlink()
    assert weights(project).is_dir() and weights(project) == (out / "checkpoints/last").resolve()
    assert any((out / "vdl").iterdir())


def test_eval_writes_the_scores_of_two_ranks(
    project: Path, evaluated: subprocess.CompletedProcess[str]
) -> None:
    metrics = json.loads((project / "eval.json").read_text())
    assert list(metrics)[:12] == list(METRICS)
    assert metrics["images"] == 4 and metrics["limit"] is None
    of_class = rf"circle .* {max(metrics['AP/circle'], 0):.3f}\n"
    for row in (rf"mAP +. {metrics['mAP']:.4f}", of_class):
        assert re.search(row, evaluated.stdout), evaluated.stdout
    last = [record for record in records(project / "out") if "mAP" in record][-1]
    assert [metrics[name] for name in METRICS] == pytest.approx([last[name] for name in METRICS])
    assert metrics["AR100"] > 0.1  # a run that learned nothing would make zeros agree
    assert json.loads((project / "evaluated" / "evaluation.json").read_text())["step"] == STEPS
    detections = json.loads((project / "evaluated" / "detections.json").read_text())
    assert 0 < len(detections) == len(json.loads((project / "found.json").read_text()))
    plots = {path.name for path in (project / "evaluated" / "plots").iterdir()}
    assert {"worst.jpg", "confusion.png", "pr_curve.png"} <= plots


def test_metric_below_floor_exits_2_with_one_message(
    evaluated: subprocess.CompletedProcess[str],
) -> None:
    assert evaluated.returncode == 2
    last = evaluated.stderr.strip().splitlines()[-1]
    assert last.startswith("ppdist: error: mAP is ") and last.endswith("[metric_below_floor]")


@pytest.mark.usefixtures("evaluated")
def test_saved_detections_score_the_same_in_pycocotools(project: Path) -> None:
    truth = COCO(str(project / "data" / "annotations" / "instances_train.json"))
    found = truth.loadRes(str(project / "found.json"))
    assert len(found.getAnnIds()) > 0
    evaluation = COCOeval(truth, found, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    metrics = json.loads((project / "eval.json").read_text())
    ours = [metrics[name] for name in METRICS]
    assert list(evaluation.stats) == pytest.approx(ours, abs=2e-3)  # coordinates are rounded


def test_export_infers_and_draws_without_config(project: Path, tmp_path: Path) -> None:
    exported, out = tmp_path / "exported", tmp_path / "out"
    shown = succeeded(
        run_tool("export", "-c", project / "cfg.yml", "-w", weights(project), "--out", exported)
    )
    assert "paddle: equals eager" in shown
    assert {file.name for file in exported.iterdir()} == {
        "model.json", "model.pdiparams", "infer.yml",
    }  # fmt: skip
    images = project / "data" / "images" / "val"
    succeeded(
        run_tool(
            "infer", "--model", exported, "--source", images, "--out", out, "--threshold", 0.05
        )
    )
    found = json.loads((out / "detections.json").read_text(encoding="utf-8"))
    names = [image["file_name"] for image in found["images"]]
    assert names == [f"{number:05d}.jpg" for number in range(5)]
    assert [category["name"] for category in found["categories"]] == [
        "circle",
        "square",
        "triangle",
    ]
    assert len(found["annotations"]) > 0
    assert all(cv2.imread(str(out / name)).shape == (512, 512, 3) for name in names)  # readable


def test_config_tool_prints_equivalent_file(project: Path) -> None:
    override = "train.epochs=7"
    shown = succeeded(run_tool("config", "show", "-c", project / "cfg.yml", "-o", override))
    assert "epochs: 7" in shown
    assert "iou_threshold: 0.7" in shown  # nobody wrote it
    (project / "shown.yml").write_text(shown, encoding="utf-8")
    assert load_config(project / "shown.yml") == load_config(project / "cfg.yml", [override])


def test_doctor_prints_one_line_per_check(project: Path) -> None:
    done = run_tool("doctor", "-c", project / "cfg.yml")
    *lines, summary = done.stdout.strip().splitlines()
    readable = re.compile(r"(OK|WARN|FAIL) +\S.*: \S| +-> \S")  # a finding, or its remedy
    assert all(readable.match(line) for line in lines), done.stdout
    failed = sum(line.startswith("FAIL") for line in lines)
    assert re.fullmatch(rf"{failed} failed, \d+ warnings", summary)
    assert done.returncode == (2 if failed else 0)
    assert any("data.train: 4 images" in line for line in lines)
