"""The files of VisualDL and TensorBoard, read back by the readers of the two programs' own kind."""

import contextlib
import io
import struct
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.run_log import RunLog
from ppdist.common.writers import histogram, pr_curves
from tests.unit.common.analysis import ANALYSIS

PARAMETERS = {"lr": 0.01, "ranks": 2, "model": "yolov5 n"}


def write(folder: Path, resume_step: int | None, steps: range, **config) -> None:
    with RunLog(folder, True, 100, 10, resume_step, **config) as log:
        log.writers.describe(PARAMETERS, ["mAP", "eval_seconds"], {"run": f"seed={resume_step}"})
        for step in steps:
            log.metrics({"step": step, "mAP": step / 100, "eval_seconds": 1.0})
            log.images("validation", step, [np.full((8, 8, 3), 120, np.uint8)])
            log.writers.pr_curves(step, ANALYSIS)
            log.writers.histograms(step, {"weights/head": np.arange(100.0) - 50})


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

    spreads = visualdl_records(tmp_path, "histogram", "weights/head")
    assert [each.id for each in spreads] == steps
    assert sum(spreads[0].histogram.hist) == 100
    assert spreads[0].histogram.bin_edges[0] == -50 and spreads[0].histogram.bin_edges[-1] == 49

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


def events(folder: Path) -> list:
    """All events in the order in which TensorBoard reads them, checksums compared."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found: list = []
    for file in sorted((folder / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            body = data[12 : 12 + length]
            assert struct.unpack_from("<I", data, 8) == (masked_crc32c(data[:8]),)
            assert struct.unpack_from("<I", data, 12 + length) == (masked_crc32c(body),)
            found.append(Event.FromString(body))
            data = data[16 + length :]
    return found


def test_tensorboard_gets_the_same_and_nothing_twice(tmp_path):
    pytest.importorskip("tensorboardX")
    write(tmp_path, None, range(10, 40, 10), tensorboard=True)
    (first,) = (tmp_path / "tensorboard").iterdir()
    with open(first, "ab") as torn:
        torn.write(b"\x40\0\0\0\0\0\0\0half an event")
    write(tmp_path, 20, range(30, 50, 10), tensorboard=True)
    assert [each.step for each in events(tmp_path) if each.HasField("session_log")] == [21]
    by_tag: dict[str, list] = {}
    for event in events(tmp_path):
        for value in event.summary.value:
            by_tag.setdefault(value.tag, []).append((event.step, value))
    for tag in ("eval/mAP", "validation/0", "PR/RBC", "weights/head"):
        assert [step for step, _ in by_tag[tag]] == [10, 20, 30, 40], tag
    assert by_tag["eval/mAP"][0][1].simple_value == pytest.approx(0.1)
    assert by_tag["validation/0"][0][1].image.encoded_image_string.startswith(b"\xff\xd8")
    histo = by_tag["weights/head"][0][1].histo
    assert sum(histo.bucket) == histo.num == 100 and histo.sum == -50
    tensor = np.array(by_tag["PR/RBC"][0][1].tensor.float_val).reshape(6, -1)
    assert tensor[:, 50] == pytest.approx([12, 3, 0, 8, 0.8, 0.6])
    assert "_hparams_/experiment" in by_tag and "_hparams_/session_start_info" in by_tag


def test_new_run_restarts_tensorboard_keeps_others(tmp_path):
    pytest.importorskip("tensorboardX")
    write(tmp_path, None, range(10, 20, 10), tensorboard=True)
    other = tmp_path / "tensorboard" / "events.out.tfevents.1.mine"
    other.write_bytes(b"")
    write(tmp_path, None, range(20, 30, 10), tensorboard=True)
    assert {event.step for event in events(tmp_path)} == {0, 20}
    assert other.exists()


def test_full_disk_costs_tensorboard_one_warning(tmp_path, capsys):
    pytest.importorskip("tensorboardX")

    class FullDisk(io.FileIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    with RunLog(tmp_path, True, 100, 10, None, tensorboard=True) as log:
        file = log.writers._writers["TensorBoard"]
        path = file._file.name
        file._file.close()
        file._file = FullDisk(path, "ab")
        for step in range(50):  # more than the queue of tensorboardX's own writer holds
            log.metrics({"step": step, "loss": 1.0})
    assert capsys.readouterr().out.count("TensorBoard cannot be written") == 1


def test_a_spread_leaves_out_what_is_not_finite():
    assert histogram(np.array([np.nan, np.inf])) is None
    for same in (0.0, 1.0, -3e-20, 1e30):
        assert histogram(np.array([same, np.nextafter(np.float32(same), 2)])).counts_K.sum() == 2
    found = histogram(np.array([1.0, np.nan, 3.0]))
    assert found.counts_K.sum() == 2 and found.total == 4.0 and found.total_of_squares == 10.0


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
