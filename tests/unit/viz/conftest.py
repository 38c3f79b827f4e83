import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_warning() -> Iterator[None]:
    """Turns warnings of the test into errors."""
    gc.collect()  # what earlier tests have left open is not this test's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
