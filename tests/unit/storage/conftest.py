"""What tests of stores share, also with those of data/."""

import pytest

from ppdist.storage import stores
from tests.unit.data.conftest import checked_here as checked_here


@pytest.fixture
def as_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store was used by this process."""
    monkeypatch.setattr(stores, "_settings", stores._Settings())
    stores._listings.clear()
