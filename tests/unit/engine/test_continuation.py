"""A run that goes on from its folder alone, also beyond its end."""

import json

import pytest

from ppdist.common.job import JOB_DIR_VARIABLE
from ppdist.config.parse import dump_yaml
from ppdist.engine.continuation import config_of_run
from ppdist.metrics.run import history, write_history
from tests.errors import raises
from tests.unit.engine.runs import build_run, run_to_end
from tests.unit.engine.tiny import FASTEST, tiny_config

# ten images in batches of four: three steps an epoch
OWN = ("train.batch_size_per_card=4", "early_stopping={patience: 5}", "checkpoint.every_epochs=1")


@pytest.fixture
def run(tmp_path):
    """The folder of a run of ten epochs, as it stands after four of them."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step-12"
    checkpoint.mkdir(parents=True)
    (folder / "checkpoints" / "last").symlink_to("step-12")
    (checkpoint / "manifest.json").touch()
    (checkpoint / "state.json").write_text(json.dumps({"epoch": 4.0, "step": 12}))
    config = tiny_config(tmp_path, ["output_dir=elsewhere", "train.max_steps=12", *OWN])
    (checkpoint / "config.yml").write_text(dump_yaml(config))
    return folder


def ended(run, reason):
    (run / "metrics.jsonl").write_text(json.dumps({"step": 12, "finished": reason}) + "\n")


@pytest.mark.parametrize(
    ("asked", "reason", "epochs"),
    [
        (None, "signal", 10),
        ("15", "total", 15),
        ("+5", "total", 15),
        ("+5", "early_stopping", 9),
        ("5", "signal", 5),
    ],
)
def test_epochs_are_of_the_whole_run_or_added(run, asked, reason, epochs):
    ended(run, reason)
    for place in (run, run / "checkpoints" / "step-12"):
        config, extends = config_of_run(place, asked, ["train.clip_norm=2"])
        assert config.train.epochs == epochs and config.train.clip_norm == 2
        assert extends == (asked is not None) and config.output_dir == str(run)
        assert config.train.max_steps == (12 if asked is None else None)


@pytest.mark.parametrize("asked", ["4", "3"])
def test_epochs_that_are_over_are_an_error(run, asked):
    with raises("bad_value"):
        config_of_run(run, asked, [])


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with raises("checkpoint_missing"):
        config_of_run(tmp_path, "+5", [])


def test_a_restarted_job_adds_its_epochs_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv(JOB_DIR_VARIABLE, str(tmp_path))
    assert config_of_run(run, "+5", [])[0].train.epochs == 15
    longer, _ = config_of_run(run, "+5", ["train.max_steps=null"])
    (run / "checkpoints" / "last" / "config.yml").write_text(dump_yaml(longer))
    assert config_of_run(run, "+5", [])[0].train.epochs == 15


def test_an_ended_run_trains_on_and_keeps_its_history(shapes, tmp_path):
    run_to_end(shapes, tmp_path, *OWN, "train.epochs=2", model=FASTEST, evaluate=True)
    before = history(tmp_path)
    assert [each["epoch"] for each in before] == [1, 2] and "mAP" in before[1]
    with raises("config_changed"):
        build_run(
            shapes, tmp_path, *OWN, "train.epochs=4", model=FASTEST, resume=True, evaluate=True
        )
    longer = (*OWN, "train.epochs=4")
    run_to_end(shapes, tmp_path, *longer, model=FASTEST, resume=True, extends=True, evaluate=True)
    after = history(tmp_path)
    assert after[:2] == before and [each["step"] for each in after] == [3, 6, 9, 12]
    assert after[1]["lr"] < after[2]["lr"] > after[3]["lr"], "a schedule over all epochs"
    assert "epoch 2 to 4" in (tmp_path / "train.log").read_text()
    write_history(tmp_path, tmp_path / "epochs.csv")
    header, *rows = (tmp_path / "epochs.csv").read_text().splitlines()
    assert header.startswith("epoch,step,loss,") and "mAP" in header.split(",") and len(rows) == 4
