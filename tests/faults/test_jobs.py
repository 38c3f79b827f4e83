"""A tiny training on two ranks, under the real fleetrun, ends with the same bits whatever strikes.

"The same" are weights, average and optimizer state of a run that nothing disturbs.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ppdist.common.records import read_metrics
from tests.faults import clock
from tests.faults.scenario import RANKS, FaultScenario, Job, first_difference


def recovered(job: Job, record: Callable[[str, object], None]) -> None:
    """Notes how long it took to go on, and how much was lost."""
    (each,) = job.recoveries()
    record("figure", f"goes on after {each['seconds']:.1f} s, {each['steps_lost']} steps again")
    assert 0 <= each["steps_lost"] < 4  # it saves every fourth step


def stop_after(step: int, job: Job) -> None:
    """SIGTERM to fleetrun: the job saves and ends, long before its last step."""
    job.reaches(step)
    job.process.terminate()
    assert job.wait() == 75, job.text
    assert job.processes() == {} and len(job.steps) < 12


@pytest.mark.slow
def test_stop_and_three_faults_leave_weights_equal(
    scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    overrides = ["data.workers=1"]
    with scenario.job("quick", overrides=overrides) as stopped:
        stop_after(2, stopped)
    fault = "loader-kill@rank0:step13,disk-full=1@rank0:step14,kill@rank1:step23"
    job = scenario.survive("quick", fault, 1, overrides=overrides, train=["--resume"])
    assert job.steps[0] == stopped.steps[-1] + 1  # none is lost
    assert first_difference(undisturbed, job.output_dir) == ""
    assert job.processes() == {}
    recovered(job, record_property)


# What ends or hangs a rank: kind -> seconds until the next step at most, on a busy machine.
ENDING = {
    "kill": 120, "segv": 120, "abort": 120, "exception": 120, "exit0": 120,
    "stop": 240, "hang": 240, "hang-gil": 240, "skip-collective": 240,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDING)
def test_job_survives_failed_or_hung_rank(
    kind: str, scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    job = scenario.survive(f"ends-{kind}", f"{kind}@rank1:step7", 1)
    assert first_difference(undisturbed, job.output_dir) == ""
    assert job.processes() == {}
    recovered(job, record_property)
    assert job.recoveries()[0]["seconds"] < ENDING[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "hang", "hang-gil"])
def test_a_rank_that_hangs_is_named_with_its_step(kind: str, scenario: FaultScenario) -> None:
    with scenario.job(f"named-{kind}", f"{kind}@rank1:step7") as job:
        assert job.wait() == 1
    assert "rank 1" in job.text and "has made no progress" in job.text, job.text
    stacks = sorted((scenario.folder / f"named-{kind}-log").glob("stacks*"))
    assert len(stacks) == RANKS, job.text
    assert all("(most recent call first)" in path.read_text() for path in stacks), job.text


@pytest.mark.slow
def test_killed_rank_0_leaves_weights_equal(
    scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    job = scenario.survive("ends-0", "kill@rank0:step10", 1)
    assert first_difference(undisturbed, job.output_dir) == ""
    recovered(job, record_property)


HARMLESS = {
    "loader-kill@rank1:step3": ["data.workers=1"],
    "loader-hang@rank1:step3": ["data.workers=1", "data.worker_timeout_seconds=3"],
    "disk-full=2@rank0:step3": [],
    "disk-blocks=8@rank0:step3": [],
    "log-full=3@rank0:step3": [],
    "terminal-blocks=8@rank0:step3": [],
    "storage-error=2@rank1:step3": ["data.workers=1"],
    "storage-blocks=8@rank1:step3": ["data.workers=1"],
    "clock=600@rank1:step3": [],
    "clock=-600@rank0:step3": [],
    "slow=0.2@rank1:step3": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", HARMLESS)
def test_what_one_rank_can_bear_needs_no_restart(
    fault: str, scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    if fault.startswith("clock") and clock.COMPILER is None:
        pytest.skip("no C compiler, cc")
    name = fault.partition("@")[0].replace("=", "-")
    job = scenario.survive(f"bears-{name}", fault, 0, overrides=HARMLESS[fault])
    assert first_difference(undisturbed, job.output_dir) == ""
    steps = job.steps
    if fault.startswith("terminal"):  # a quick run ends before it, and lines for it are dropped
        records = read_metrics(job.output_dir / "metrics.jsonl")
        steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, scenario.steps + 1))
    record_property("figure", "0 steps made again")


@pytest.mark.slow
def test_a_terminal_that_is_gone_costs_lines_only(
    scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    job = scenario.survive("bears-terminal-error", "terminal-error@rank0:step3", 0)
    assert first_difference(undisturbed, job.output_dir) == ""
    log = (job.output_dir / "train.log").read_text(encoding="utf-8")
    assert len(re.findall(r"cannot write to stdout", log)) == 1 and f"step {scenario.steps}/" in log
    record_property("figure", "0 steps made again")


@pytest.mark.slow
def test_exception_shows_rank_and_step_at_once(scenario: FaultScenario, record_property) -> None:
    with scenario.job("exception", "exception@rank1:step7") as job:
        assert job.wait() == 1
    (fault,) = job.struck()
    cause = "RuntimeError: fault on purpose: exception@rank1:step7"
    seen = [line.time for line in job.lines if cause in line.text]
    record_property("figure", f"cause shown after {seen[0] - fault['time']:.1f} s")
    assert len(seen) == 1 and "rank 1" in job.text and "step 6" in job.text, job.text
    assert seen[0] - fault["time"] < 20  # 2 on a machine that is not busy


@pytest.mark.slow
def test_a_slow_rank_is_named_and_nobody_is_killed(
    scenario: FaultScenario, record_property
) -> None:
    job = scenario.survive("slow", "slow=0.5@rank1:step2", 0, overrides=["train.epochs=13"])
    steps = [int(match[1]) for match in re.finditer(r"  step (\d+)/", before_naming(job))]
    record_property("figure", f"named after {len(steps)} steps")
    assert 0 < len(steps) <= 50 and job.steps == list(range(1, 53))


def before_naming(job: Job) -> str:
    text, named, _ = job.text.partition("rank 1 (host")
    assert named and "with a compute time of" in job.text, job.text
    return text


@pytest.mark.slow
def test_evaluation_failure_on_one_rank_keeps_state(
    scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    words = {"train": ["--eval"], "overrides": ["evaluate.every_epochs=2"]}
    job = scenario.survive("eval", "eval-error@rank1:step7", 0, **words)
    assert first_difference(undisturbed, job.output_dir) == ""
    assert "eval-error" in job.text
    record_property("figure", "0 steps made again")
