"""What one rank meets inside a step, all ranks answer alike: the job goes on without a restart."""

import json
from pathlib import Path

import pytest

from tests.faults.scenario import FaultScenario, Job, first_difference

pytestmark = pytest.mark.slow


def weights_are_finite(job: Job) -> bool:
    records = map(json.loads, (job.output_dir / "metrics.jsonl").open())
    losses = [record["loss"] for record in records if "loss" in record]
    return losses[-1] is not None


def test_a_loss_that_is_not_finite_costs_one_step(scenario: FaultScenario, record_property) -> None:
    job = scenario.survive("nan", "nan=1@rank1:step7", 0)
    assert job.text.count("skipped on all ranks") == 1
    assert job.steps == list(range(1, scenario.steps + 1)) and weights_are_finite(job)
    record_property("figure", "1 step left out by all ranks")


def test_non_finite_losses_roll_back_with_half_lr(scenario: FaultScenario, record_property) -> None:
    job = scenario.survive("nan-3", "nan=3@rank1:step7", 0)
    bad = [json.loads(line) for line in (job.output_dir / "bad_steps.jsonl").open()]
    assert {line["step"] for line in bad} == {7, 8, 9}
    back = [step for before, step in zip(job.steps, job.steps[1:]) if step <= before]
    assert len(back) == 1 and job.steps[-1] == scenario.steps and weights_are_finite(job)
    record_property("figure", f"after 3 steps back to step {back[0] - 1}")


def test_out_of_memory_rank_splits_all_micro_batches(
    scenario: FaultScenario, record_property
) -> None:
    job = scenario.survive("oom", "oom@rank1:step7", 0)
    assert "out of memory" in job.text
    assert job.steps == list(range(1, scenario.steps + 1)) and weights_are_finite(job)
    record_property("figure", "1 step made again")


def test_a_flipped_bit_is_found_and_the_rank_is_named(
    scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    every = 2
    overrides = [f"distributed.check_weights_every={every}"]
    job = scenario.survive("flip", "flip@rank1:step7", 0, overrides=overrides)
    told = [line.text for line in job.lines if "rank 1" in line.text and "weights" in line.text]
    assert told, job.text
    assert first_difference(undisturbed, job.output_dir) == ""
    record_property("figure", f"found at the next comparison, every {every} steps here")


def test_a_batch_that_kills_a_rank_twice_is_left_out(
    scenario: FaultScenario, record_property
) -> None:
    launch = ["--max_restart", "3"]
    job = scenario.run("poison", "poison@rank1:step7", launch=launch, seconds=600)
    assert job.process.returncode == 0, job.text
    assert job.attempts == 3
    assert job.steps[-1] == scenario.steps
    record_property("figure", "left out in the attempt after 2 crashes")
