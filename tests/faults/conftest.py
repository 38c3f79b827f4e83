"""One tiny scenario for all jobs, and the run that no fault disturbs."""

from pathlib import Path

import pytest

from tests.faults.scenario import FaultScenario
from tests.once import for_all_workers


@pytest.fixture(scope="session")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> FaultScenario:
    folder = for_all_workers(tmp_path_factory, "scenario", lambda folder: FaultScenario(folder))
    return FaultScenario(folder)


@pytest.fixture(scope="session")
def undisturbed(scenario: FaultScenario, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its output_dir."""

    def train(_: Path) -> None:
        job = scenario.run("undisturbed")
        assert job.process.returncode == 0, job.text

    for_all_workers(tmp_path_factory, "undisturbed", train)
    return scenario.folder / "undisturbed"
