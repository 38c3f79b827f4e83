"""Which signals are one request to stop."""

import os
import signal

from ppdist.launch.signals import collect_signals, exit_code_of_kill, must_kill


def test_signals_within_a_second_are_one_request(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("ppdist.launch.watchdog.time.monotonic", lambda: now)
    with collect_signals() as received:
        for pause, number in ((0, "SIGTERM"), (0.2, "SIGTERM"), (0.7, "SIGHUP"), (0.3, "SIGINT")):
            now += pause
            os.kill(os.getpid(), getattr(signal, number))
            assert must_kill(received) == (number == "SIGINT")
    assert received == [signal.SIGTERM, signal.SIGINT] and exit_code_of_kill(received) == 130
    assert exit_code_of_kill([signal.SIGINT, signal.SIGTERM]) == 1


def test_ctrl_c_again_and_again_is_heard(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("ppdist.launch.watchdog.time.monotonic", lambda: now)
    with collect_signals() as received:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            now += 0.6
    assert must_kill(received)


def test_a_hangup_ignored_by_nohup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with collect_signals() as received:
        os.kill(os.getpid(), signal.SIGHUP)
    assert received == []
