"""One tiny course for all drills, and the run that no fault disturbs."""

from pathlib import Path

import pytest

from ppdist.drill import Course


@pytest.fixture(scope="session")
def course(tmp_path_factory) -> Course:
    return Course(tmp_path_factory.mktemp("course"))


@pytest.fixture(scope="session")
def undisturbed(course) -> Path:
    """Its output_dir."""
    job = course.run("undisturbed")
    assert job.process.returncode == 0, job.text
    return job.output_dir
