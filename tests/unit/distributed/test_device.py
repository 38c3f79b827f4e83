"""The choice of a rank's device; tests/integration/test_accelerator.py has cards to choose."""

import pytest

from ppdist.distributed import device
from tests.errors import raises


@pytest.fixture
def no_cards(monkeypatch):
    monkeypatch.setattr(device, "accelerators", lambda: [])


def test_a_kind_that_is_not_there_is_named(no_cards):
    for kind in ("gpu", "npu"):
        with raises("device_unavailable", str(kind)):
            device.choose(kind)


def test_a_card_is_refused_to_processes_for_cpus(monkeypatch):
    monkeypatch.setattr(device, "accelerators", lambda: ["npu"])
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv(device.BACKEND, "gloo")
    with raises("launched_for_cpu"):
        device.choose("npu")
    assert device.choose("auto") == device.CPU


def test_auto_without_a_card_is_the_cpu(no_cards, monkeypatch):
    monkeypatch.setenv(device.BACKEND, "auto")
    assert device.choose("auto") == device.CPU == device.kind()
    assert not device.on_accelerator() and device.card_count() == 0
    assert device.peak_allocated_bytes() == device.peak_reserved_bytes() == 0
    device.synchronize()
    device.release_memory()
