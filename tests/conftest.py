"""Fixtures every test may use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference values beside the checkout; where they are absent the test is skipped."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "parity").is_dir():
        pytest.skip("the reference values that stand beside the checkout are not here")
    return folder
