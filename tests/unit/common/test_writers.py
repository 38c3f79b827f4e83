"""The files of VisualDL, read back by its own reader."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.run_log import RunLog
from ppdist.common.writers import pr_curves
from tests.unit.common.analysis import ANALYSIS

PARAMETERS = {"lr": 0.01, "ranks": 2, "model": "yolov5 n"}


def write(folder: Path, resume_step: int | None, steps: range) -> None:
    with RunLog(folder, True, 100, 10, resume_step) as log:
        log.writers.describe(PARAMETERS, ["mAP", "eval_seconds"], {"run": f"seed={resume_step}"})
        for step in steps:
            log.metrics({"step": step, "mAP": step / 100, "eval_seconds": 1.0})
            log.images("validation", step, [np.full((8, 8, 3), 120, np.uint8)])
            log.writers.pr_curves(step, ANALYSIS)


def visualdl_records(folder: Path, kind: str, tag: str) -> list:
    from visualdl import LogReader

    with contextlib.redirect_stdout(io.StringIO()):
        return LogReader(file_path=str(folder / "vdl/vdlrecords.ppdist.log")).get_data(kind, tag)


def test_visualdl_reads_pr_curves_and_hparams(tmp_path):
    write(tmp_path, None, range(10, 40, 10))
    write(tmp_path, 20, range(30, 50, 10))
    steps = [10, 20, 30, 40]
    curves = visualdl_records(tmp_path, "pr_curve", "PR/RBC")
    assert [each.id for each in curves] == steps, "continued, not doubled"
    (half,) = [k for k in range(100) if (k + 1) / 100 == 0.5]
    curve = curves[0].pr_curve
    assert curve.precision[half] == pytest.approx(0.8) and curve.recall[half] == pytest.approx(0.6)
    assert (curve.TP[half], curve.FP[half], curve.FN[half]) == (12, 3, 8)
    assert len(curve.TP) == len(curve.TN) == len(curve.precision) == 100
    assert not visualdl_records(tmp_path, "pr_curve", "PR/none"), "a class without objects"

    (run,) = visualdl_records(tmp_path, "hyper_parameters", "hparam")
    told = {info.name: info for info in run.hparam.hparamInfos}
    assert told["lr"].float_value == 0.01 and told["ranks"].float_value == 2.0
    assert told["model"].string_value == "yolov5 n"
    assert [info.name for info in run.hparam.metricInfos] == ["eval/mAP", "train/loss"]
    (text,) = visualdl_records(tmp_path, "text", "config/run")
    assert text.text.encoded_text_string == "seed=20", "what the run now is"


def test_visualdl_keeps_hparams_after_rollback(tmp_path):
    with RunLog(tmp_path, True, 100, 10, None) as log:
        log.writers.describe(PARAMETERS, ["mAP"], {"run": "a=1"})
        for step in (10, 20):
            log.metrics({"step": step, "loss": 1.0})
        log.rollback(10)
        log.metrics({"step": 20, "loss": 2.0})
    assert len(visualdl_records(tmp_path, "hyper_parameters", "hparam")) == 1
    points = visualdl_records(tmp_path, "scalar", "train/loss")
    assert [(each.id, each.value) for each in points] == [(10, 1.0), (20, 2.0)]


def test_an_evaluation_without_curves_has_none():
    assert pr_curves({"class_names": ["cat"], "per_class": []}) == {}


def test_only_listed_classes_have_curves_if_many():
    curves = dict(ANALYSIS["curves"], curve_classes=[1])
    curves["precision_CT"], curves["recall_CT"] = (
        [[0.25, 1, 1], [0, 0, 0]],
        [[1, 0.5, 0], [0, 0, 0]],
    )
    found = pr_curves({**ANALYSIS, "curves": curves})
    assert list(found) == ["PR/WBC"] and found["PR/WBC"].objects == 4
