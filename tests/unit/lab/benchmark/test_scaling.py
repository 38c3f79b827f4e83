"""Ratios are of one round."""

import sys

import pytest

from ppdist.lab.benchmark import scaling
from ppdist.lab.benchmark.scaling import measure_scaling, run_training
from tests.errors import raises
from tests.unit.lab.benchmark.tool import report_of


def test_scaling_compares_within_rounds(monkeypatch):
    speeds = iter([1.0, 1.0, 0.5, 0.5, 3.0, 3.0])  # of the machine, from run to run

    def run(launcher, script, count):
        return {"images_per_second": {1: 5.0, 2: 8.0}[count] * next(speeds)}

    monkeypatch.setattr(scaling, "run_training", run)
    report = measure_scaling(["fleetrun"], ["train"], counts=[1, 2], rounds=3)
    assert report["1"]["speed_up"] == report["1"]["efficiency"] == 1
    two = report["2"]
    assert two["images_per_second"] == 8.0 and two["of_rounds"] == [8.0, 4.0, 24.0]
    assert two["speed_up"] == pytest.approx(8 / 5)
    assert two["efficiency"] == pytest.approx(4 / 5)
    assert two["last_round"]["images_per_second"] == 24


def test_a_failed_scaling_run_names_its_command():
    fails = [sys.executable, "-c", "import sys; sys.exit(3)"]
    with raises("run_failed"):
        run_training(fails, ["benchmark.py", "train"], 2)


@pytest.mark.slow
def test_two_processes_train_through_fleetrun():
    options = ["--repeats", "1", "--steps", "1", "--warmup", "0"]
    result = report_of("scaling", *options)["result"]
    assert result["1"]["efficiency"] == 1 and result["2"]["images_per_second"] > 0
