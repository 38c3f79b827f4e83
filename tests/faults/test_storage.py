"""The images of a job are taken away for a while, from outside: no step is lost or changed."""

import shutil
import time
from pathlib import Path

import pytest

from tests.faults.scenario import FaultScenario, Job, first_difference

pytestmark = pytest.mark.slow


def take_away(job: Job, images: Path, step: int, seconds: float) -> None:
    job.reaches(step)
    images.rename(images.with_name("away"))
    time.sleep(seconds)
    images.with_name("away").rename(images)


@pytest.fixture
def data(scenario: FaultScenario, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scenario.folder / "data", tmp_path / "data"))


@pytest.mark.parametrize("workers", [0, 1])
def test_images_away_for_8_seconds_cost_no_step(
    workers: int, scenario: FaultScenario, undisturbed: Path, data: Path, record_property
) -> None:
    overrides = [f"data.root={data}", f"data.workers={workers}"]
    with scenario.job(f"away-{workers}", overrides=overrides) as job:
        take_away(job, data / "images", 5, 8)
        assert job.wait() == 0, job.text
    assert job.steps == list(range(1, scenario.steps + 1))
    assert first_difference(undisturbed, job.output_dir) == ""
    assert job.text.count("their storage is away") == 1, job.text
    again = [line for line in job.text.splitlines() if "the images can be read again" in line]
    assert len(again) == 1
    record_property("figure", f"waited {again[0].rpartition('after ')[2]}, 0 steps made again")


def test_images_away_for_longer_cost_one_restart(
    scenario: FaultScenario, undisturbed: Path, data: Path, record_property
) -> None:
    """Longer than is waited for: a checkpoint of the very step, and a restart that goes on."""
    overrides = [f"data.root={data}", "distributed.timeout_seconds=30"]
    with scenario.job("away-long", launch=["--max_restart", "2"], overrides=overrides) as job:
        take_away(job, data / "images", 5, 22)
        assert job.wait() == 0, job.text
    assert job.steps == list(range(1, scenario.steps + 1))
    assert first_difference(undisturbed, job.output_dir) == ""
    assert job.text.count("steps per epoch") == 2, job.text  # attempts
    assert "instances_train" not in job.text and "data.root" not in job.text  # no user's mistake
    record_property("figure", "1 restart, 0 steps made again")
