"""One tiny course for all drills, and the run that no fault disturbs."""

from pathlib import Path

import pytest

from ppdist.drill import Course
from tests.once import for_all_workers


@pytest.fixture(scope="session")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = for_all_workers(tmp_path_factory, "course", lambda folder: Course(folder))
    return Course(folder)


@pytest.fixture(scope="session")
def undisturbed(course: Course, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its output_dir."""

    def train(_: Path) -> None:
        job = course.run("undisturbed")
        assert job.process.returncode == 0, job.text

    for_all_workers(tmp_path_factory, "undisturbed", train)
    return course.folder / "undisturbed"
