"""What a training is made of, before it begins."""

import shlex
import sys
from pathlib import Path

import pytest

from ppdist.cli.train import parse
from ppdist.engine import run
from ppdist.engine.continuation import ANEW
from ppdist.engine.recipe import TrainOptions
from ppdist.engine.run import TrainingPlan, build_resume_command, plan_training, run_training
from tests.errors import raises
from tests.unit.engine.tiny import tiny_config


def test_absent_weights_are_told_before_the_data_are_read(tmp_path):
    options = TrainOptions(model="yolov5n", weights="yolov5n_cocoo")
    with raises("weights_not_found") as caught:
        plan_training(data=tmp_path / "set", config=None, options=options, overrides=[])
    assert "yolov5n_coco" in (caught.value.fix or "")


@pytest.mark.parametrize("evaluate", [True, False])
def test_the_command_that_continues_is_one_of_train(evaluate, monkeypatch):
    words = shlex.split(build_resume_command(Path("output/a b"), evaluate))
    assert words[:2] == ["ppdist", "train"]
    monkeypatch.setattr(sys, "argv", words[1:])
    arguments = parse()
    assert arguments.resume == "output/a b"
    assert arguments.eval in ((None, True) if evaluate else (False,))
    longer = shlex.split(build_resume_command(Path("output/a b"), evaluate, ["--steps", "+30"]))
    assert longer == [*words, "--steps", "+30"]
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "2")
    ranks = shlex.split(build_resume_command(Path("output/a b"), evaluate))
    assert ranks == ["fleetrun", "--nproc_per_node", "2", *words]
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "1")
    assert "on every host" in build_resume_command(Path("output/a b"), evaluate)


@pytest.mark.parametrize("name, place", [("link/run", "disk/run"), ("plain", "plain")])
def test_a_run_writes_where_its_link_led_at_the_start(name, place, tmp_path, monkeypatch):
    class Started(Exception):
        pass

    def build(config, *, output_dir, **_):
        raise Started(output_dir)

    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.setattr(run, "build_training", build)
    plan = TrainingPlan(tiny_config(tmp_path), ANEW)
    with pytest.raises(Started) as started:
        run_training(plan, tmp_path / name, evaluate=False, command=[])
    assert started.value.args == (tmp_path / place,)
