"""How many workers a rank has: a function of its cores."""

import logging

import pytest

from ppdist.data.loading import loader
from ppdist.data.loading.loader import worker_count


@pytest.mark.parametrize(
    ("available", "ranks", "gpu", "expected"),
    [
        (2, 1, False, 1), (2, 2, False, 1), (8, 1, False, 2), (64, 1, False, 4),
        (16, 1, True, 15), (64, 8, True, 7), (128, 1, True, 16), (2, 8, True, 1),
        (0.5, 1, True, 1),
    ],
)  # fmt: skip
def test_the_worker_count_follows_from_cores_and_ranks(
    monkeypatch, caplog, available, ranks, gpu, expected
):
    monkeypatch.setattr(loader, "available_cores", lambda: float(available))
    monkeypatch.setattr(loader.device, "on_accelerator", lambda: gpu)
    worker_count.cache_clear()
    with caplog.at_level(logging.INFO, "ppdist.data"):
        assert worker_count("auto", ranks) == expected
    assert f"data.workers: auto is {expected} per rank: {available} cores" in caplog.text


def test_worker_count_is_kept_and_excess_is_named(monkeypatch, caplog):
    monkeypatch.setattr(loader, "available_cores", lambda: 4.0)
    worker_count.cache_clear()
    assert worker_count(0, 1) == 0 and worker_count(2, 2) == 2
    assert not caplog.records
    for _ in ("training", "evaluation"):
        assert worker_count(8, 2) == 8
    assert len(caplog.records) == 1
    assert "8 per rank" in caplog.text and "4 cores" in caplog.text
