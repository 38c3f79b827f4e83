"""The loader is measured beside one without cache; memory that is shared counts once."""

import os
import signal
import time

import numpy as np
import pytest

from ppdist.benchmark import loader
from tests.unit.benchmark.tool import report_of


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_is_measured_beside_one_without_cache(workers):
    options = ["data.cache=ram", f"data.workers={workers}", "--seconds", "0.4", "--epochs", "2"]
    result = report_of("loader", *options)["result"]
    assert result["images"] > 0 and result["workers"] == workers
    assert result["images_per_second_per_worker"] == result["images_per_second"] > 0
    assert result["without_cache"]["images_per_second"] > 0
    memory = result["memory"]
    assert set(memory) == {"rss_mb", "pss_mb", "own_mb"}
    assert all(len(row) == 2 for row in memory.values())
    assert 1 < memory["own_mb"][1] <= memory["pss_mb"][1] <= memory["rss_mb"][1]


def test_shared_memory_counts_once_in_pss():
    shared = np.ones(64 << 20, np.uint8)
    child = os.fork()
    if child == 0:
        time.sleep(60)
    try:
        one, both = (loader.memory_of(those) for those in ([child], [child, os.getpid()]))
        assert child in loader.children()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert shared[0] == 1
    assert one["rss_mb"] > 64 > one["own_mb"] and one["pss_mb"] > 32
    assert both["rss_mb"] - both["pss_mb"] > 64
