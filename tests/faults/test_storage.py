"""The images of a job are taken away for a while, from outside: no step is lost or changed."""

import re
import shutil
import time
from pathlib import Path

import pytest

from ppdist.data.datasets.synthetic import make_shapes
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
    # A rank that had read the images of its step before they went has nothing to say.
    other = (scenario.folder / f"away-{workers}-log" / "workerlog.1").read_text(encoding="utf-8")
    warnings = [text.count("their storage is unavailable") for text in (job.text, other)]
    assert max(warnings) == 1
    waits = re.findall(r"the images can be read again, after (.*)", job.text)  # rank 0's
    assert len(waits) == warnings[0]
    record_property("figure", f"waited {', '.join(waits) or 'on rank 1'}, 0 steps made again")


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
    assert job.attempts == 2, job.text
    assert "instances_train" not in job.text and "data.root" not in job.text  # no user's mistake
    record_property("figure", "1 restart, 0 steps made again")


def test_check_longer_than_the_timeout_ends_no_job(
    scenario: FaultScenario, tmp_path: Path, record_property
) -> None:
    """Looking at its files takes 16 s, 16 at a time; the ranks wait 10 s for one another."""
    make_shapes(tmp_path / "data", train=120, val=4, size=64, seed=0)
    overrides = [f"data.root={tmp_path / 'data'}", "distributed.timeout_seconds=10"]
    overrides += ["train.max_steps=2"]
    with scenario.job(
        "slow-check", "slow-stat=2@rank0:step1", overrides=overrides,
        variables={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    ) as job:  # fmt: skip
        assert job.wait() == 0, job.text
    assert "what has changed: " in job.text, job.text
    log = (job.output_dir / "train.log").read_text(encoding="utf-8")
    (line,) = [each for each in log.splitlines() if "headers of 120 images in" in each]
    record_property("figure", f"a check of {line.rpartition(' in ')[2]}, a timeout of 10 s")
