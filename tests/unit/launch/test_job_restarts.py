"""What an attempt that failed teaches the next one."""

import signal

import pytest

from ppdist.launch.job import Restarts
from ppdist.launch.outcome import Outcome


def failed(step: int | None = None) -> Outcome:
    return Outcome(1, "rank 1 failed first", step=step)


def test_pauses_double_until_an_attempt_got_further() -> None:
    restarts = Restarts()
    pauses = []
    for step in (None, None, None, 7, 7, 3, 8, *[None] * 9):
        restarts.learn(failed(step))
        pauses.append(restarts.pause)
    assert pauses == [1, 2, 4, 1, 2, 4, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_a_step_that_failed_twice_stays_left_out() -> None:
    restarts = Restarts()
    assert restarts.variables == {}
    restarts.learn(failed(7))
    assert restarts.variables == {"PPDIST_RESTART": "1"}
    restarts.learn(failed(7))
    assert restarts.variables == {"PPDIST_RESTART": "2", "PPDIST_SKIP_STEP": "7"}
    for step in (12, 12, None, None):
        restarts.learn(failed(step))
    assert restarts.variables == {"PPDIST_RESTART": "6", "PPDIST_SKIP_STEP": "7,12"}


def test_a_step_that_was_passed_meanwhile_is_no_poison() -> None:
    restarts = Restarts()
    for step in (7, 20, 7):
        restarts.learn(failed(step))
    assert restarts.skip == ()
    restarts.learn(failed(20))
    assert restarts.skip == (20,)


def test_a_job_that_gets_further_pauses_shortly() -> None:
    restarts = Restarts()
    pauses = []
    for reached in (4, 8, 12, 12, 16):
        restarts.learn(Outcome(1, "no room", reached=reached))
        pauses.append(restarts.pause)
    assert pauses == [1, 1, 1, 2, 1]


def test_however_often_a_job_fails_the_pause_is_a_minute() -> None:
    restarts = Restarts()
    assert restarts.pause == 0
    for _ in range(1100):
        restarts.learn(failed())
    assert restarts.pause == 60


@pytest.mark.parametrize("outcome", [Outcome(0, ""), Outcome(2, "x"), Outcome(75, "")])
def test_what_is_done_wrong_or_wanted_is_not_restarted(outcome: Outcome) -> None:
    assert outcome.is_final
    assert Outcome(1, "stopped by SIGTERM", signal.SIGTERM).is_final
    assert not failed().is_final
