"""Waiting for storage that is away: once, outside, and for no longer than asked."""

import logging

import pytest

from ppdist.common import retry
from ppdist.common.errors import StorageError
from ppdist.common.retry import unavailable, with_retries


class Away:
    """Storage that answers at the attempt of this number; pauses are noted, not waited."""

    def __init__(self, attempt: int, monkeypatch) -> None:
        self.left, self.now, self.pauses = attempt, 1000.0, []
        monkeypatch.setattr(retry.time, "monotonic", lambda: self.now)

    def __call__(self) -> str:
        self.left -= 1
        if self.left > 0:
            raise unavailable("no answer", "s3://bucket")
        return "content"

    def pause(self, seconds: float, _: StorageError) -> None:
        self.pauses.append(round(seconds, 3))
        self.now += seconds


def test_pauses_double_and_only_the_outermost_waits(monkeypatch, caplog):
    away, inner = Away(5, monkeypatch), []

    def call() -> str:
        return with_retries(away, 60.0, pause=lambda *words: inner.append(words))

    with caplog.at_level(logging.INFO, "ppdist.data"):
        assert with_retries(call, 60.0, pause=away.pause) == "content"
    assert away.pauses == [0.2, 0.4, 0.8, 1.6] and not inner
    waiting, again = caplog.messages
    assert "60 s" in waiting and "3 s" in again


@pytest.mark.parametrize(
    ("seconds", "pauses", "words"),
    [
        (1.0, [0.2, 0.4, 0.4], "no answer; waited for 1 s;"),
        (100.0, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 19.0], "waited for 100 s"),
        (0.0, [], "waited for 0 s; mount it again"),
    ],
)
def test_storage_that_stays_away_is_one_error(seconds, pauses, words, monkeypatch):
    away = Away(99, monkeypatch)
    with pytest.raises(StorageError) as caught:
        with_retries(away, seconds, pause=away.pause)
    assert away.pauses == pauses and caught.value.code == "storage_unreachable"
    assert words in str(caught.value)


def test_shortest_pauses_are_told_nobody(monkeypatch, caplog):
    away = Away(3, monkeypatch)
    with caplog.at_level(logging.INFO, "ppdist.data"):
        with_retries(away, 60.0, pause=away.pause)
    assert away.pauses == [0.2, 0.4] and not caplog.messages
