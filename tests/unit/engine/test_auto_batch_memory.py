"""What is read of the memory that there is, and of what was taken."""

import resource
import sys
from subprocess import run

import pytest

from ppdist.distributed import device
from ppdist.engine import auto_batch
from ppdist.engine.auto_batch import ADDRESSES, CARD, HOST, Meter, free_memory

GIB = 1 << 30


def test_a_card_that_does_not_say_what_is_free_is_left_out(monkeypatch):
    monkeypatch.setattr(auto_batch, "_free_on_card", lambda: None)
    monkeypatch.setattr(device, "on_accelerator", lambda: True)
    assert CARD not in free_memory(1)


@pytest.mark.slow
def test_host_memory_is_shared_but_limit_is_per_rank():
    alone, shared = free_memory(1), free_memory(4)
    assert shared[HOST] == pytest.approx(alone[HOST] / 4, rel=0.1)
    assert ADDRESSES not in alone
    code = (
        "from ppdist.common.machine import process_memory\n"
        "from ppdist.engine.auto_batch import ADDRESSES, free_memory\n"
        "import resource\n"
        "limit = process_memory()['VmSize'] + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "print(free_memory(4)[ADDRESSES])\n"
    )
    found = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout.split()[-1]) == pytest.approx(GIB, rel=0.05)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.slow
def test_a_meter_sees_what_was_taken_and_given_back():
    code = (
        "from ppdist.engine.auto_batch import HOST, ADDRESSES, Meter\n"
        "meter = Meter()\n"
        "taken = bytearray(200 << 20)\n"
        "taken[::4096] = b'1' * len(taken[::4096])\n"
        "del taken\n"
        "peak = meter.peak()\n"
        "print(peak[HOST] >> 20, peak[ADDRESSES] >> 20)\n"
    )
    found = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(199 <= int(number) < 230 for number in found.stdout.split()[-2:])
    assert Meter().peak()[HOST] >= 0
