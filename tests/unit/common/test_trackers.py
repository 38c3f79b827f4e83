"""Trackers have a process of their own, and whatever they do there costs no run."""

import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ppdist.common import trackers
from ppdist.common.records import read_metrics
from ppdist.common.run_log import RunLog
from ppdist.common.trackers import TRACKERS, TrackedRun, TrackerProcess
from ppdist.common.writers import MetricWriters, scalar_points
from ppdist.config import output
from ppdist.config.experiment import experiment_of, load_config
from ppdist.config.section import Section
from ppdist.runtime.writer_thread import WriterThread
from tests.errors import raises

NOTING = "tests.unit.common.noting:Noting"


def start(folder: Path, resume_step: int | None = None) -> TrackerProcess:
    run = TrackedRun(None, folder / "noting", "a run", resume_step)
    return TrackerProcess(NOTING, run)


def noted(folder: Path) -> list[str]:
    file = folder / "noting" / "noted.txt"
    return file.read_text().splitlines() if file.exists() else []


def test_tracker_gets_everything_in_order(tmp_path: Path) -> None:
    tracker = start(tmp_path, resume_step=4)
    tracker.describe({"lr": 0.1}, ["eval/mAP"], {"train": "epochs=1"})
    tracker.add_scalars(5, {"train/loss": 2.5})
    tracker.add_scalars(5, {})  # a record without numbers
    tracker.add_images(6, "val", [np.zeros((4, 5, 3), np.uint8)])
    tracker.rollback(5)
    while len(noted(tmp_path)) < 5:
        time.sleep(0.02)
    os.kill(tracker.process.pid, signal.SIGTERM)  # it ends with the run and not before
    tracker.close()
    tracker.close()
    begin, *rest = noted(tmp_path)
    assert begin.split()[-2:] == ["4", "True"]
    assert rest == [
        "{'lr': 0.1} ['eval/mAP'] {'train': 'epochs=1'}",
        "5 ('train/loss', 2.5)",
        f"6 val {(4, 5, 3)}",
        "rollback 5",
        "closed",
    ]
    assert tracker.process.returncode == 0


def test_failing_tracker_costs_one_warning(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", NOTING)
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    settings = [(NOTING, output.ShippedTracker(name="wandb"))]
    with RunLog(tmp_path, True, 9, 9, None, visualdl=False, trackers=settings) as log:
        log.metrics({"step": 1, "fail": 1.0})
        log.info("begun")
        step, until = 1, time.monotonic() + 30
        while time.monotonic() < until:
            log.metrics({"step": (step := step + 1), "loss": 1.0})
            log.flush()
            if "cannot be" in (tmp_path / "train.log").read_text():
                break
        log.metrics({"step": step + 1, "loss": 1.0})
    text = (tmp_path / "train.log").read_text()
    assert text.count("wandb cannot be written") == 1
    assert "ConnectionError" in text
    assert [each["step"] for each in read_metrics(tmp_path / "metrics.jsonl")] == [
        *range(1, step + 2)
    ]


def test_hung_tracker_is_given_up_without_waiting(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trackers, "_MOST_BYTES", 1 << 20)
    tracker = start(tmp_path)
    tracker.add_scalars(1, {"hang": 1.0})
    image = np.zeros((600, 600, 3), np.uint8)
    with pytest.raises(RuntimeError, match="it is blocked"):
        for step in range(9):
            tracker.add_images(step, "val", [image])
    assert tracker.process.returncode == -signal.SIGKILL
    tracker.add_scalars(2, {"loss": 1.0})  # off: nothing, and no second complaint
    tracker.close()


@pytest.mark.parametrize(
    ("seconds", "told"), [((), r"0\.1 s of the end"), ((0.3,), r"0\.[23]\d* s of the end")]
)
def test_hung_tracker_is_stopped_at_the_end(seconds, told, tmp_path: Path, monkeypatch) -> None:
    """Of the run, or of the hours that it has."""
    monkeypatch.setattr(trackers, "_STOPPED_SECONDS", 0.1)
    tracker = start(tmp_path)
    tracker.add_scalars(1, {"hang": 1.0})
    tracker.limit_close(*seconds)
    with pytest.raises(RuntimeError, match=told):
        tracker.close()
    assert tracker.process.returncode == -signal.SIGKILL


def test_missing_package_is_said_before_training(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    settings = [(TRACKERS["mlflow"], output.ShippedTracker(name="mlflow"))]
    with raises("package_missing", "ppdist[mlflow]"):
        RunLog(tmp_path, True, 9, 9, None, visualdl=False, trackers=settings)
    RunLog(tmp_path, False, 9, 9, None, trackers=settings).close()  # other ranks need none


# --- the shipped ones, by what they leave on disk -------------------------------------------------


RECORDS = [
    {"step": 20, "epoch": 1, "loss": 2.5, "lr": 0.01, "images_per_second": 40.0},
    {"step": 40, "epoch": 2, "loss": 1.25, "lr": 0.005, "images_per_second": 41.0},
    {"step": 40, "mAP": 0.25, 'AP/tv: "x" 1': 0.5, "eval_seconds": 1.0},
]
RESUMED = [{"step": 60, "epoch": 3, "loss": 0.75, "lr": 0.001, "images_per_second": 42.0}]


def leave(folder: Path, config: Section, resume: bool) -> None:
    """Writes RECORDS, or what a run adds that resumes after them, by a log of a run."""
    settings = [(TRACKERS[config.name], config)]
    step = 40 if resume else None
    with RunLog(folder, True, 60, 20, step, visualdl=False, trackers=settings) as log:
        log.info("begun")
        log.writers.describe({"lr": 0.01, "model": "yolov5 n"}, ["mAP"], {"train": "epochs=3"})
        for record in RESUMED if resume else RECORDS:
            log.metrics(record)
        log.images("val", step or 40, [np.zeros((8, 8, 3), np.uint8)])
    assert "cannot be written" not in (folder / "train.log").read_text()


def points_of(folder: Path) -> set[tuple[str, int, float]]:
    """(tag, step, value) of metrics.jsonl."""
    return {
        (tag, record["step"], value)
        for record in read_metrics(folder / "metrics.jsonl")
        for tag, value in scalar_points(record).items()
    }


def require(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'ppdist[{name}]'")


def records_in(file: Path) -> Iterator[bytes]:
    """Records of a LevelDB log with a header of seven bytes, as two of the trackers write it.

    Blocks of 32 KiB hold chunks: checksum, length, kind (1 whole, 2 first, 3 middle, 4 last), data.
    """
    data, at, parts = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def test_tensorboard_gets_all_and_hides_what_is_made_again(tmp_path: Path, capsys) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    given = [(TRACKERS["tensorboard"], output.ShippedTracker())]
    for resume_step, steps in ((None, range(10, 40, 10)), (20, range(30, 50, 10))):
        with RunLog(tmp_path, True, 100, 10, resume_step, visualdl=False, trackers=given) as log:
            log.writers.describe({"lr": 0.01, "model": "n"}, ["mAP"], {"run": f"{resume_step}"})
            for step in steps:
                log.metrics({"step": step, "mAP": step / 100, "eval_seconds": 1.0})
                log.images("val", step, [np.full((8, 8, 3), 120, np.uint8)])
    assert "cannot be written" not in capsys.readouterr().out
    files = sorted((tmp_path / "trackers/tensorboard").glob("*tfevents*"))
    events = [[Event.FromString(data) for data in events_in(file)] for file in files]
    assert len(files) == 2
    assert [event.step for event in events[1] if event.HasField("session_log")] == [21]
    values = {value.tag: value for event in events[0] for value in event.summary.value}
    assert values["eval/mAP"].simple_value == pytest.approx(0.3)
    assert values["val/0"].image.width == 8
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= values.keys()


def events_in(file: Path) -> Iterator[bytes]:
    """Records of `uint64 length, checksum, message Event, checksum`."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        yield data[12 : 12 + length]
        data = data[16 + length :]


@pytest.mark.slow
def test_wandb_offline_has_the_points_of_the_run(tmp_path: Path, monkeypatch) -> None:
    require("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    from wandb.proto import wandb_internal_pb2

    for resume in (False, True):
        leave(tmp_path, output.ShippedTracker(name="wandb"), resume)
    files = sorted((tmp_path / "trackers" / "wandb").rglob("*.wandb"))
    points = set()
    for data in (data for file in files for data in records_in(file)):
        record = wandb_internal_pb2.Record.FromString(data)
        items = {
            each.key or each.nested_key[0]: json.loads(each.value_json)
            for each in record.history.item
            if len(each.nested_key) < 2  # else of an image
        }
        points |= {
            (tag, items["step"], value)
            for tag, value in items.items()
            if isinstance(value, int | float) and not tag.startswith("_") and tag != "step"
        }
    assert points == points_of(tmp_path) and len(points) == 12
    assert len(files) == 2 and len({file.stem for file in files}) == 1  # both starts are one run


@pytest.mark.slow
def test_mlflow_has_the_points_of_the_run(tmp_path: Path, monkeypatch) -> None:
    require("mlflow")
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "shapes")
    for resume in (False, True):
        leave(tmp_path, output.ShippedTracker(name="mlflow"), resume)
    folder = tmp_path / "trackers" / "mlflow" / "mlruns"
    client = mlflow.MlflowClient(tracking_uri=folder.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("shapes").experiment_id])
    points = {
        (tag, each.step, each.value)
        for tag in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, tag)
    }
    wanted = points_of(tmp_path)  # whose tags MLflow takes only without quotes and the like
    assert {point[1:] for point in points} == {point[1:] for point in wanted}
    assert len(points) == 12 and len(points & wanted) >= 11
    assert run.info.status == "FINISHED" and run.data.params["model"] == "yolov5 n"
    assert [*folder.rglob("*.png")]


@pytest.mark.slow
def test_swanlab_offline_has_the_points_of_the_run(tmp_path: Path, monkeypatch) -> None:
    require("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for resume in (False, True):
        leave(tmp_path, output.ShippedTracker(name="swanlab"), resume)
    files = sorted((tmp_path / "trackers" / "swanlab").rglob("*.swanlab"))
    found = [Record.FromString(data) for file in files for data in records_in(file)]
    scalars = [each.scalar for each in found if each.HasField("scalar")]
    points = {(each.key, each.step, each.value.number) for each in scalars}
    assert points == points_of(tmp_path) and len(points) == 12 and len(files) == 2
    assert [*(tmp_path / "trackers" / "swanlab").rglob("*.png")]


def test_hung_trackers_are_waited_for_together(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 2.0)
    thread = WriterThread()
    writers = MetricWriters(thread)
    hung = [start(tmp_path / name) for name in "ab"]
    for name, tracker in zip("ab", hung):
        writers.open(name, lambda tracker=tracker: tracker)
        tracker.add_scalars(1, {"hang": 1.0})
    began = time.monotonic()
    writers.close()
    thread.flush(30)
    warned = [f"{program}: {error}" for program, error in thread.failures]
    assert 2.0 <= time.monotonic() - began < 3.8
    assert [line[:2] for line in warned] == ["a:", "b:"] and "2 s of" in warned[1]
    assert all(tracker.process.returncode == -signal.SIGKILL for tracker in hung)


def test_no_file_of_a_tracker_shows_a_secret(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NOTING_API_KEY", "s3cr3t-of-all")
    tracker = start(tmp_path)
    tracker.add_scalars(1, {"fail": 1.0, "print": 1.0})
    tracker.process.wait(30)
    with pytest.raises(RuntimeError) as caught:
        tracker.add_scalars(2, {"loss": 1.0})
    texts = [file.read_text() for file in (tmp_path / "noting").iterdir()] + [f"{caught.value}"]
    assert not [text for text in texts if "s3cr3t" in text or "p4ss" in text]
    log = (tmp_path / "noting" / "log.txt").read_text()
    assert "key *** at https://***@host/x" in log and "Traceback" in log
    assert "ConnectionError: https://***@host/x: " in f"{caught.value}"


def test_a_tracker_of_earlier_versions_is_left_out_and_said(tmp_path: Path, caplog) -> None:
    trackers = [{"name": "clearml", "offline": True, "project": "x"}, {"name": "wandb"}]
    tree = load_config("demo").model_dump(mode="json")
    tree["log"]["trackers"] = trackers
    config = experiment_of(tree)
    assert [tracker.name for tracker in config.log.trackers] == ["wandb"]
    assert "clearml" in caplog.text
    with raises("removed_key", "wandb"):
        load_config("demo", ["log.trackers=[clearml]"])
