"""What an attempt that failed teaches the next one, and who is asked to stop by which signal."""

import os
import signal
import socket

import pytest

from ppdist.launch.cli import Restarts
from ppdist.launch.topology import port_holder
from ppdist.launch.watchdog import Outcome, at_once, code_of, signals_noted


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
    assert Outcome(1, "stopped by SIGTERM; rank 1 left no checkpoint", signal.SIGTERM).is_final
    assert not failed().is_final


def test_signals_within_a_second_are_one_request(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("ppdist.launch.watchdog.time.monotonic", lambda: now)
    with signals_noted() as received:
        for pause, number in ((0, "SIGTERM"), (0.2, "SIGTERM"), (0.7, "SIGHUP"), (0.3, "SIGINT")):
            now += pause
            os.kill(os.getpid(), getattr(signal, number))
            assert at_once(received) == (number == "SIGINT")
    assert received == [signal.SIGTERM, signal.SIGINT] and code_of(received) == 130
    assert code_of([signal.SIGINT, signal.SIGTERM]) == 1


def test_ctrl_c_again_and_again_is_heard(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("ppdist.launch.watchdog.time.monotonic", lambda: now)
    with signals_noted() as received:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            now += 0.6
    assert at_once(received)


def test_a_hangup_ignored_by_nohup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_noted() as received:
        os.kill(os.getpid(), signal.SIGHUP)
    assert received == []


def test_the_process_that_has_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_holder(port).startswith(f"process {os.getpid()} (")
    assert port_holder(port) == ""
