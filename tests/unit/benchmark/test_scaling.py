"""Ratios are of one round, and the machine is told from communication."""

import json
import os
import sys
from pathlib import Path

import pytest

from ppdist.benchmark import scaling
from ppdist.benchmark.scaling import launch, measure_scaling
from tests.errors import raises
from tests.unit.benchmark.tool import report_of


def test_scaling_compares_within_rounds(monkeypatch):
    drift = iter([1.0, 0.5, 3.0])  # of the machine's speed, from round to round
    slice_seconds = []

    def interleave(groups, seconds):
        """Leaves what each run would have found: together, and apart."""
        slice_seconds.append(seconds)
        speed = next(drift)
        for group in groups:
            for command in group.commands:
                file = Path(command[command.index("--json") + 1])
                processes = int(command[2]) if command[0] == "fleetrun" else 1
                rate, step = {1: (5.0, 0.8), 2: (8.0, 1.0)}[processes]
                if command[0] != "fleetrun":
                    rate, step = 4.5, 0.9
                variant = {"images_per_second": rate * speed, "step_seconds": step / speed,
                           "sent_bytes_per_step": 7}  # fmt: skip
                result = {"variants": {"base": variant}, "gradient_all_reduce_seconds": 0.4}
                file.write_text(json.dumps({"result": result}))

    monkeypatch.setattr(scaling, "interleave", interleave)
    report = measure_scaling(
        ["fleetrun"], ["train"], counts=[1, 2], rounds=3, slice_seconds=2.5
    )  # fmt: skip
    assert slice_seconds == [2.5] * 3
    assert report["1"]["speed_up"] == report["1"]["efficiency"] == 1
    two = report["2"]
    assert two["images_per_second"] == 8.0 and two["of_rounds"] == [8.0, 4.0, 24.0]
    assert two["speed_up"] == pytest.approx(8 / 5)
    assert two["efficiency_of_rounds"] == pytest.approx([4 / 5] * 3)
    assert two["efficiency"] == pytest.approx(4 / 5)
    assert two["machine_limit"] == pytest.approx(9 / 10)
    assert two["efficiency_of_limit"] == pytest.approx(8 / 9)
    assert two["exposed_seconds"] == two["exposed_share_of_step"] == pytest.approx(0.1)
    assert two["hidden_share"] == pytest.approx(0.75)
    assert two["sent_bytes_per_step"] == 7


def test_a_failed_scaling_run_names_its_command():
    fails = [sys.executable, "-c", "import sys; sys.exit(3)"]
    with raises("run_failed"):
        launch(fails, ["benchmark.py", "train"], 2, environment=os.environ)


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does():
    options = ["--repeats", "1", "--processes", "1", "2"]
    result = report_of("eval", *options)["result"]
    assert result["metrics_identical"] and result["images"] == 4
    one, two = (result["processes"][count] for count in ("1", "2"))
    assert one["of_first"] == 1 and two["of_first"] == two["seconds"] / one["seconds"]
    assert [len(each["parts"]) for each in (one, two)] == [1, 2]
    losses = [each["metrics"]["val_loss"] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
