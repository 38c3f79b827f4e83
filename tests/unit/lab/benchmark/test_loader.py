"""The loader is measured with and without workers."""

import pytest

from tests.unit.lab.benchmark.tool import report_of


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_is_measured(workers):
    options = ["data.cache=ram", f"data.workers={workers}", "--seconds", "0.4"]
    result = report_of("loader", *options)["result"]
    assert result["images"] > 0 and result["workers"] == workers
    assert result["images_per_second_per_worker"] == result["images_per_second"] > 0
