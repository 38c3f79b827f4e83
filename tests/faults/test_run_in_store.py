"""A run whose output_dir is in an object store: killed, and resumed on a machine with no disk."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.common.addresses import work_folder
from tests.faults.object_store import KEY, SECRET, FaultProxy, environment, object_store
from tests.faults.scenario import FaultScenario, Job, first_difference

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.slow
URL = "s3://bucket/runs/killed"


@pytest.fixture
def store() -> Iterator[FaultProxy]:
    with object_store() as proxy:
        yield proxy


def was_put(store: FaultProxy, name: str) -> bool:
    with store.lock:
        return any(
            method == "PUT" and path.endswith(f"/runs/killed/{name}")
            for method, path, _ in store.asked
        )


def test_a_run_that_was_killed_goes_on_without_its_disk(
    scenario: FaultScenario, undisturbed: Path, store: FaultProxy, record_property
) -> None:
    def job(disk: str, *train: str, fault: str = ""):
        """A job on a disk of its own."""
        (scenario.folder / disk).mkdir()
        return scenario.job(
            f"{disk}/run", fault, train=train,
            overrides=[f"output_dir={URL}"], variables=environment(store),
        )  # fmt: skip

    # Slow enough that the second one starts while it trains.
    with job("first", fault="slow=8@rank0:step9") as first:
        deadline = time.monotonic() + 300
        while not was_put(store, "checkpoints/step-00000008/manifest.json"):
            assert first.process.poll() is None and time.monotonic() < deadline, first.text
            time.sleep(0.05)
        with job("second", "--resume") as second:
            assert_refused(second, "another training writes there")
        assert first.process.poll() is None, first.text
        first.kill_all()
    assert first.steps[-1] < scenario.steps, first.text
    with job("third") as third:
        assert_refused(third, "has a run already")
    with job("fourth", "--resume") as fourth:
        assert fourth.wait() == 0, fourth.text
    assert fourth.steps[0] in (9, 13, 17, 21), fourth.text  # after a checkpoint
    assert fourth.steps[-1] == scenario.steps, fourth.text
    assert first_difference(undisturbed, scenario.folder / "fourth" / work_folder(URL)) == ""
    with job("fifth", "--resume") as fifth:  # the store has all of it
        assert fifth.wait() == 0, fifth.text
    assert not fifth.steps
    assert first_difference(undisturbed, scenario.folder / "fifth" / work_folder(URL)) == ""
    for text in (first.text, second.text, fourth.text):
        assert SECRET not in text and KEY not in text
    record_property("figure", f"{first.steps[-1] - fourth.steps[0] + 1} steps made again")


def assert_refused(job: Job, reason: str) -> None:
    assert job.wait() == 2, job.text
    assert reason in job.text and not job.steps
