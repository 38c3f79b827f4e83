"""What a soak says of the jobs it has struck."""

import json

import pytest

from tests.faults import fault as faults
from tests.faults import soak
from tests.faults.scenario import Job, Line


class Ended:
    """A job of a scenario, without one."""

    def __init__(self, output_dir, code, lines=()):
        self.output_dir, self.lines, self.text = output_dir, list(lines), "what it said"
        self.process = self
        self.returncode = code

    struck, recoveries, step_after = Job.struck, Job.recoveries, Job.step_after


def strike(output_dir, text, time):
    (fault,) = faults.parse_faults(text)
    line = json.dumps({"fault": str(fault), "time": time})
    with faults.struck_file(output_dir, fault.rank).open("a") as file:
        file.write(line + "\n")


def test_recovery_time_starts_at_fatal_fault(tmp_path):
    strike(tmp_path, "kill@rank0:step9", 100.0)
    strike(tmp_path, "slow=0.2@rank1:step10", 101.0)  # while the first is being noticed
    lines = [
        Line(90, "train.log says why each number"),
        Line(104, "train.log says why each number"),
        Line(105, "epoch 3/6  step 9/24  "),
    ]
    found = Ended(tmp_path, 0, lines).recoveries()
    assert found == [{"fault": "kill@rank0:step9", "seconds": 5.0, "steps_lost": 0}]


def test_steps_that_a_stopped_rank_made_later_are_not_lost(tmp_path):
    strike(tmp_path, "stop@rank1:step7", 100.0)
    said = {
        90: "train.log says why each number",
        160: "epoch 3/6  step 9/24  ",
        161: "train.log says why each number",
    }
    lines = [Line(moment, text) for moment, text in said.items()]
    lines.append(Line(163, "epoch 3/6  step 9/24  "))  # its checkpoint is of step 8
    assert Ended(tmp_path, 0, lines).recoveries()[0]["steps_lost"] == 0


@pytest.fixture
def scenario(monkeypatch, tmp_path):
    """One whose jobs end with these codes, one after the other."""
    codes = []

    class Scenario:
        steps = 24
        folder = tmp_path

        def __init__(self, folder):
            pass

        def run(self, name, *_, **__):
            output_dir = tmp_path / name
            output_dir.mkdir()
            return Ended(output_dir, codes.pop(0))

    monkeypatch.setattr(soak, "FaultScenario", Scenario)
    monkeypatch.setattr(soak, "first_difference", lambda *folders: "")
    return codes


def test_soak_without_restart_has_no_times(scenario, tmp_path):
    scenario += [0, 0]
    report = soak.kills(tmp_path, points=1, per_job=1, seed=0)
    assert "NaN" not in json.dumps(report) and report["restarts"] == 0
    assert "1 of them did not strike" in report["failures"][0]


def test_scenario_failing_without_faults_is_rejected(scenario, tmp_path):
    scenario += [1]
    with pytest.raises(RuntimeError, match="without faults ended with code 1:\nwhat it said"):
        soak.kills(tmp_path, points=1, per_job=1, seed=0)
