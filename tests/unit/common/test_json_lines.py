"""Console lines as JSON: of a run, of a command, of fleetrun."""

import json
import logging

import pytest

from ppdist.common import json_lines, process
from ppdist.common.errors import DataError
from ppdist.common.run_log import RunLog
from ppdist.launch import console
from ppdist.runtime.writer_thread import TERMINAL

FIELDS = ["time", "source", "level", "rank", "step", "code", "message"]


@pytest.fixture(autouse=True)
def as_json(monkeypatch):
    monkeypatch.setenv(json_lines.FORMAT_VARIABLE, "json")
    json_lines.choose_format("json")  # forgets the step of an earlier run
    yield
    json_lines.choose_format("text")


def read_lines(text: str) -> list[dict]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(list(line) == FIELDS for line in lines)
    return lines


def test_run_prints_one_object_a_line(tmp_path, capfd):
    with RunLog(tmp_path, True, 100, 10, None, every_steps=20, visualdl=False) as log:
        log.headline("data", "7 images")
        log.progress(20, {"loss": "2.5"})
        log.warning("a name\nof two lines \u202e", "bad_name")
        log.row("epoch", "    1", "epoch 1")
        log.table("derived", [("a", "b", "c")])
        log.detail("for train.log")
        log.table("the end", [("best", "mAP 0.5", "checkpoints/best")], on_console=True)
    TERMINAL.flush()
    lines = read_lines(capfd.readouterr().out)
    assert [line["message"].split("  ETA")[0] for line in lines] == [
        "data: 7 images",
        "epoch 2/10  step 20/100  loss 2.5",
        "a name\nof two lines \u202e",
        "epoch 1",
        "best: mAP 0.5 (checkpoints/best)",
    ]
    assert [line["step"] for line in lines] == [None, 20, 20, 20, 20]
    assert (lines[2]["level"], lines[2]["code"]) == ("warning", "bad_name")
    text = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert "WARNING a name" in text and "for train.log" in text and "{" not in text


def test_key_of_configuration_holds_until_the_next_run(monkeypatch, capfd):
    monkeypatch.delenv(json_lines.FORMAT_VARIABLE)
    json_lines.choose_format("json")
    process.say("ppdist: warning: slow disk")
    json_lines.choose_format("text")
    process.say("ppdist: warning: slow disk")
    first, second = capfd.readouterr().err.splitlines()
    assert json.loads(first)["message"] == "slow disk" and second == "ppdist: warning: slow disk"


def test_error_has_its_code_and_rank(monkeypatch, capfd):
    monkeypatch.setenv("PADDLE_TRAINER_ID", "3")

    def fail() -> None:
        logging.getLogger("ppdist").warning("before")
        raise DataError("no images", code="no_images", where="shapes")

    with pytest.raises(SystemExit) as ended:
        process.run(fail)
    assert ended.value.code == 2
    before, line = read_lines(capfd.readouterr().err)
    assert (before["level"], before["message"]) == ("warning", "before")
    shown = {name: line[name] for name in FIELDS[1:]}
    assert shown == {
        "source": "ppdist", "level": "error", "rank": 3, "step": None, "code": "no_images",
        "message": "shapes: no images",
    }  # fmt: skip


def test_fleetrun_prints_json_too(capfd):
    console.say("rank 1 (host b) failed: no images [no_images]", fails=True)
    console.say("logs in log/")
    console.finish()
    failure, note = read_lines(capfd.readouterr().err)
    assert (failure["source"], failure["rank"]) == ("fleetrun", None)
    assert (failure["level"], failure["code"]) == ("error", "no_images")
    assert failure["message"].endswith("no images")
    assert (note["level"], note["code"]) == ("info", None)
