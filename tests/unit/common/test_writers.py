"""The files of VisualDL, read back by its own reader."""

import contextlib
import io
from pathlib import Path

import numpy as np

from ppdist.common.run_log import RunLog

PARAMETERS = {"lr": 0.01, "ranks": 2, "model": "yolov5 n"}


def write(folder: Path, resume_step: int | None, steps: range) -> None:
    with RunLog(folder, True, 100, 10, resume_step) as log:
        log.writers.describe(PARAMETERS, ["mAP", "eval_seconds"], {"run": f"seed={resume_step}"})
        for step in steps:
            log.metrics({"step": step, "mAP": step / 100, "eval_seconds": 1.0})
            log.images("validation", step, [np.full((8, 8, 3), 120, np.uint8)])


def visualdl_records(folder: Path, kind: str, tag: str) -> list:
    from visualdl import LogReader

    with contextlib.redirect_stdout(io.StringIO()):
        return LogReader(file_path=str(folder / "vdl/vdlrecords.ppdist.log")).get_data(kind, tag)


def test_visualdl_reads_scalars_and_hparams(tmp_path):
    write(tmp_path, None, range(10, 40, 10))
    write(tmp_path, 20, range(30, 50, 10))
    steps = [10, 20, 30, 40]
    points = visualdl_records(tmp_path, "scalar", "eval/mAP")
    assert [each.id for each in points] == steps, "continued, not doubled"

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
