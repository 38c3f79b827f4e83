"""The small set that most trainings of these tests see."""

from pathlib import Path

import pytest

from ppdist.data.datasets.synthetic import make_shapes


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten training and five validation images of 64 pixels."""
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, train=10, val=5, size=64, seed=0)
    return folder
