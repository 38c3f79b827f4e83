"""The log of a run: what reaches console, train.log and metrics.jsonl, whatever fails."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.console import EarlyLog, Opening
from ppdist.common.errors import ConfigError
from ppdist.common.process import DETAIL, WHOLE
from ppdist.common.records import read_metrics
from ppdist.common.run_log import RunLog
from tests.errors import raises


def open_log(folder, resume_step=None, main=True, **config) -> RunLog:
    return RunLog(folder, main, 100, 10, resume_step, **config)


def visualdl_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read back by VisualDL itself, which prints and so is kept quiet."""
    from visualdl import LogReader

    (file,) = (folder / "vdl").iterdir()
    with contextlib.redirect_stdout(io.StringIO()):
        reader = LogReader(file_path=str(file))
        tags = reader.get_tags().get("scalar", [])
        return {tag: [(p.id, p.value) for p in reader.get_data("scalar", tag)] for tag in tags}


def test_record_is_json_line_with_point_per_number(tmp_path):
    with open_log(tmp_path) as log:
        log.metrics({"step": 5, "epoch": 0.5, "loss": 2.5, "lr": 0.01, "images_per_second": 40.0})
        scores = {"mAP": 0.25, "mAP_small": -1.0, "AP/RBC": 0.5, "val_loss": 2.0}
        log.metrics({"step": 10, **scores, "eval_seconds": 4.0, "note": "text", "list": [1.0]})
        log.flush()
        on_disk = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in on_disk] == [5, 10]
    assert json.loads(on_disk[1])["mAP_small"] == -1.0
    points = visualdl_points(tmp_path)
    assert points["train/loss"] == [(5, 2.5)]
    assert points["lr/lr"] == [(5, pytest.approx(0.01))]
    assert points["speed/images_per_second"] == [(5, 40.0)]
    assert points["eval/mAP"] == [(10, 0.25)]
    assert points["eval_per_class/RBC"] == [(10, 0.5)]
    assert points["val/loss"] == [(10, 2.0)] and points["speed/eval_seconds"] == [(10, 4.0)]
    assert len(points) == 7, "a size without objects has no curve, nor has a text or a list"


def test_points_are_readable_while_the_run_goes_on(tmp_path):
    with open_log(tmp_path) as log:
        log.metrics({"step": 1, "loss": 1.0})
        log.flush()
        assert visualdl_points(tmp_path)["train/loss"] == [(1, 1.0)]
        log.metrics({"step": 2, "loss": 0.5})
        log.flush()
        assert visualdl_points(tmp_path)["train/loss"] == [(1, 1.0), (2, 0.5)]


def test_a_resumed_run_drops_what_it_will_compute_again(tmp_path):
    with open_log(tmp_path) as log:
        for step in (10, 20, 30):
            log.metrics({"step": step, "loss": float(step)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 15, "lo')  # a crash in the middle of a line
    (file,) = (tmp_path / "vdl").iterdir()
    with open(file, "ab") as torn:
        torn.write(b"\x40\0\0\0\0\0\0\0half a record")
    with open_log(tmp_path, resume_step=20) as log:
        log.metrics({"step": 30, "loss": 0.5})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["loss"]) for r in records] == [(10, 10.0), (20, 20.0), (30, 0.5)]
    assert visualdl_points(tmp_path)["train/loss"] == [(10, 10.0), (20, 20.0), (30, 0.5)]


def test_a_new_run_begins_its_files_anew(tmp_path):
    for loss in (1.0, 2.0):
        with open_log(tmp_path) as log:
            log.metrics({"step": 10, "loss": loss})
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [2.0]
    assert visualdl_points(tmp_path)["train/loss"] == [(10, 2.0)]


def test_sync_puts_records_and_their_folder_on_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "os.fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}"))
    )
    with open_log(tmp_path, visualdl=False) as log:
        log.metrics({"step": 1, "loss": 1.0})
        assert log.sync(5.0)
        assert {str(tmp_path), str(tmp_path / "metrics.jsonl")} <= set(synced)
        (tmp_path / "metrics.jsonl").unlink()
        assert not log.sync(5.0)


def test_non_finite_number_is_null_without_point(tmp_path):
    with open_log(tmp_path) as log:
        log.metrics({"step": 1, "loss": float("nan"), "lr": np.float32(0.5)})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["loss"] is None and record["lr"] == 0.5
    assert "train/loss" not in visualdl_points(tmp_path)


def test_images_come_back_from_visualdl_as_they_went_in(tmp_path):
    import cv2
    from visualdl import LogReader

    image_HW3 = np.zeros((48, 64, 3), np.uint8)
    image_HW3[:, :, 0] = 200  # red
    with open_log(tmp_path) as log:
        log.images("val", 7, [image_HW3, image_HW3])
        log.flush()
        (file,) = (tmp_path / "vdl").iterdir()
        reader = LogReader(file_path=str(file))
    assert reader.get_tags()["image"] == ["val/0", "val/1"]
    (point,) = reader.get_data("image", "val/1")
    encoded = np.frombuffer(point.image.encoded_image_string, np.uint8)
    back_HW3 = cv2.imdecode(encoded, cv2.IMREAD_COLOR)[:, :, ::-1]
    assert point.id == 7
    assert np.abs(back_HW3.astype(int) - image_HW3).max() <= 3


def test_other_ranks_write_nothing(tmp_path, capsys):
    with open_log(tmp_path / "run", main=False) as log:
        log.info("hello")
        log.warning("hello")
        log.table("t", [("a", "b", "c")])
        log.metrics({"step": 1, "loss": 1.0})
        log.images("val", 1, [np.zeros((8, 8, 3), np.uint8)])
        log.progress(1, {})
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_uncreatable_output_dir_is_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("folder_unwritable", "file/run"):
        open_log(tmp_path / "file" / "run")


def test_no_terminal_tells_of_a_step_after_a_silent_minute(tmp_path, capsys, monkeypatch):
    with open_log(tmp_path, every_steps=5) as log:
        for step in range(1, 13):
            silent = 0.0 if step == 10 else 1e9
            monkeypatch.setattr("ppdist.common.run_log._SILENT_SECONDS", silent)
            log.progress(step, {"loss": f"{step}.0"})
    (line,) = capsys.readouterr().out.splitlines()
    assert "step 10/100  loss 10.0" in line
    text = (tmp_path / "train.log").read_text()
    assert text.count("step 10/100") == 1 == text.count("step 5/100")


def test_a_growing_table_repeats_its_header(tmp_path, capsys):
    with open_log(tmp_path) as log:
        for row in range(25):
            log.row("epoch", f"{row:5}")
    lines = capsys.readouterr().out.splitlines()
    assert [at for at, line in enumerate(lines) if line == "epoch"] == [0, 21]
    assert (tmp_path / "train.log").read_text().count("    7\n") == 1


def test_the_console_is_short_before_the_first_step(tmp_path, capsys):
    with EarlyLog(True) as early:
        logging.getLogger("ppdist.data").warning("boxes " * 60)
        logging.getLogger("ppdist.data").info("details", extra=DETAIL)
    with open_log(tmp_path, early=early) as log:
        for number in range(8):
            log.warning(f"warning {number}")
        log.note("a note")
        logging.getLogger("ppdist.engine").warning("disk " * 60, extra=WHOLE)
        log.headline("model", "yolov5 n")
        log.progress(1, {})
        log.warning("long " * 60)
    lines = capsys.readouterr().out.splitlines()
    assert 154 < len(lines[0]) <= 160, "two lines of 80 columns"
    assert lines[0].endswith("boxes ...")
    assert [line[-1] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert lines[5].endswith("disk " * 60), "what loses a run is whole"
    assert lines[6] == "model     yolov5 n"
    assert lines[7].startswith("4 more warnings, 1 note: ")
    assert lines[-1].endswith("long " * 60), "later ones are whole"
    text = (tmp_path / "train.log").read_text()
    assert all(each in text for each in ("boxes " * 60, "details", "warning 7", "yolov5 n"))


@pytest.mark.parametrize("end", ["docs/finetuning.md", "`ppdist data check x`"])
def test_a_cut_warning_keeps_the_page_or_command_at_its_end(end):
    short = Opening(80).shorten(f"{'boxes ' * 60}: {end}")
    assert 150 < len(short) <= 160 and short.endswith(f"boxes ... {end}")


def test_what_was_cut_is_told_where_no_run_begins(capsys):
    with raises("bad_value"), EarlyLog(True):
        logging.getLogger("ppdist.data").warning("boxes " * 60)
        raise ConfigError("x", code="bad_value")
    assert "boxes " * 60 in capsys.readouterr().err


def test_terminal_gets_bar_and_file_still_gets_lines(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("ppdist.common.console._REFRESH_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with open_log(tmp_path, every_steps=5) as log:
        for step in range(1, 8):
            log.progress(step, {"loss": "1.0"})
        log.info("above the bar")
    assert "1/10  loss 1.0" in screen.getvalue() and "━" in screen.getvalue()
    assert "above the bar" in screen.getvalue()
    assert (tmp_path / "train.log").read_text().count(" step ") == 1


def test_messages_reach_console_and_file_once(tmp_path, capsys):
    with open_log(tmp_path) as log:
        log.info("a run [0, 1]")
        logging.getLogger("ppdist.data.datasets.coco").warning("12 boxes clipped")
        log.table("derived", [("total batch", "16", "2 ranks x 8 images")], on_console=True)
        log.detail("for the file")
    out, err = capsys.readouterr()
    text = (tmp_path / "train.log").read_text()
    for place in (out, text):
        assert place.count("a run [0, 1]") == 1
        assert place.count("12 boxes clipped") == 1
        assert place.count("ranks x 8 images") == 1
    assert "for the file" in text and "for the file" not in out
    assert "warning: 12 boxes clipped" in out and err == ""
    assert logging.getLogger("ppdist").propagate, "closing gives the logger back as it was"


def test_logging_imports_neither_paddle_nor_visualdl():
    code = "import sys, ppdist.common.run_log; print({'paddle', 'visualdl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_visualdl_off_writes_no_folder(tmp_path, monkeypatch):
    with open_log(tmp_path, visualdl=False) as log:
        log.metrics({"step": 1, "loss": 1.0})
        log.images("val", 1, [np.zeros((8, 8, 3), np.uint8)])
    assert not (tmp_path / "vdl").exists()


def test_run_summary_names_best_last_and_paths(tmp_path, capsys):
    checkpoints = tmp_path / "checkpoints"
    for step in (10, 20):
        (checkpoints / f"step-{step}").mkdir(parents=True)
    (checkpoints / "best").symlink_to("step-10")
    (checkpoints / "last").symlink_to("step-20")
    with open_log(tmp_path) as log:
        for step, score in ((10, 0.5), (20, 0.4)):
            log.metrics({"step": step, "loss": 1.5, "gradient_norm": 1.0})
            log.metrics({"step": step, "mAP": score, "eval_seconds": 1.0})
        with log.spending("evaluation", 20):
            time.sleep(0.05)
        log.run_summary()
    out = " ".join(capsys.readouterr().out.split())
    for text in ("best │ mAP 0.5000", "last │ mAP 0.4000", "visualdl --logdir", "evaluation "):
        assert text in out, f"{text} in {out}"
    assert "plots" not in out, "what is not there has no row"


def test_a_notebook_shows_a_table_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # displays what it prints, too
    with open_log(tmp_path) as log:
        log.table("derived", [("ranks", "1", "why")], on_console=True)
    assert capsys.readouterr().out.count("ranks") == 1
