"""A job that is stopped, or killed as a whole, goes on where it was, and leaves no process."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.scenario import FaultScenario, Job, first_difference
from tests.unit.launch.hosts import wait_for

STOPPED = 75


def to_fleetrun(job: Job, number: int) -> None:
    job.process.send_signal(number)


def to_one_rank(job: Job, number: int) -> None:
    os.kill(job.ranks()[1], number)


def go_on(scenario: FaultScenario, name: str, undisturbed: Path) -> Job:
    """Resumes it to its end, which must be that of the undisturbed run."""
    job = scenario.run(name, train=["--resume"])
    assert job.process.returncode == 0, job.text
    assert first_difference(undisturbed, job.output_dir) == ""
    return job


@pytest.mark.slow  # one of them by default: the first test of test_jobs.py
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("send", [to_fleetrun, to_one_rank])
def test_signal_ends_job_with_75_and_loses_no_step(
    send: Callable[[Job, int], None],
    number: signal.Signals,
    scenario: FaultScenario,
    undisturbed: Path,
    record_property,
) -> None:
    name = f"{send.__name__}-{number.name}"
    with scenario.job(name) as job:
        job.reaches(5)
        began = time.monotonic()
        send(job, number)
        assert job.wait() == STOPPED, job.text
        took = time.monotonic() - began
        assert job.processes() == {}
    resumed = go_on(scenario, name, undisturbed)
    assert resumed.steps[0] == job.steps[-1] + 1
    record_property("figure", f"0 steps lost, ended after {took:.1f} s")


@pytest.mark.slow
def test_two_seconds_of_grace_are_enough(
    scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    with scenario.job("grace") as job:
        job.reaches(7)
        job.process.terminate()
        time.sleep(2)
        job.kill_all()
    resumed = go_on(scenario, "grace", undisturbed)
    lost = job.steps[-1] + 1 - resumed.steps[0]
    record_property("figure", f"{lost} steps made again")
    assert 0 <= lost < 4


@pytest.mark.slow
def test_power_loss_resumes_from_newest_checkpoint(
    scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    with scenario.job("power") as job:
        job.reaches(10)
        job.kill_all()
    resumed = go_on(scenario, "power", undisturbed)
    lost = job.steps[-1] + 1 - resumed.steps[0]
    record_property("figure", f"{lost} steps made again")
    assert 0 <= lost < 8  # a checkpoint that was being written does not count


@pytest.mark.slow
def test_nothing_outlives_a_fleetrun_that_was_killed(
    scenario: FaultScenario, record_property
) -> None:
    with scenario.job("orphans", overrides=["data.workers=1"]) as job:
        job.reaches(3)
        began = time.monotonic()
        job.process.kill()
        wait_for(lambda: not job.processes(), 120)
        took = time.monotonic() - began
    record_property("figure", f"no process left after {took:.1f} s")
