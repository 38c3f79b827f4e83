"""What a process has freed stays its own."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from ppdist.distributed.comm import keep_freed_memory

def page_faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        np.ones(50_000_000, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = page_faults(4)
keep_freed_memory()
page_faults(1)
print(usual, page_faults(4))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone is told to keep memory")
def test_freed_memory_is_not_mapped_anew() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    usual, kept = map(int, done.stdout.split())
    assert usual > 80  # huge pages need few
    assert kept < 20
