"""A host of two is lost, and comes back: the job goes on with the same bits."""

import time
from pathlib import Path

import pytest

from tests.faults.scenario import FaultScenario, first_difference
from tests.ports import free_port

pytestmark = pytest.mark.slow
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.mark.parametrize("lost", [1, 0], ids=["second", "first"])
def test_a_host_that_comes_back_joins_the_next_attempt(
    lost: int, scenario: FaultScenario, undisturbed: Path, record_property
) -> None:
    name, port = f"hosts-{lost}", str(free_port())

    def host(number: int, log: str):
        launch = ["--host", ADDRESSES[number], f"--ips={','.join(ADDRESSES)}"]
        launch += ["--start_port", port, "--max_restart", "2"]
        return scenario.job(name, ranks=1, log=log, launch=launch)

    with host(0, f"{name}-a") as first, host(1, f"{name}-b") as second:
        jobs = [first, second]
        first.reaches(6)
        died = time.time()
        jobs[lost].kill_all()
        with host(lost, f"{name}-c") as back:
            assert [jobs[1 - lost].wait(), back.wait()] == [0, 0], back.text
    speaks = back if lost == 0 else first  # rank 0 does
    after = [line.time for line in speaks.lines if line.time > died and "  step " in line.text]
    record_property("figure", f"goes on {after[0] - died:.1f} s after the host died")
    assert first_difference(undisturbed, first.output_dir) == ""
