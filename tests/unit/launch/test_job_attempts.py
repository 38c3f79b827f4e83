"""From one attempt of a job to the next, without starting any process."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ppdist.common.errors import LaunchError
from ppdist.launch import cli, topology
from ppdist.launch import job as front
from ppdist.launch.connection import Connection
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.job import name_job
from ppdist.launch.outcome import Outcome
from ppdist.launch.signals import collect_signals
from ppdist.launch.topology import Machine
from tests.errors import raises
from tests.unit.launch.machines import machine
from tests.unit.launch.sockets import socket_pair

A, B = "10.9.0.1", "10.9.0.2"
FAILED = Outcome(1, "rank 1 failed first", remote_message="rank 1 failed first")


@pytest.fixture(autouse=True)
def short_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    monkeypatch.setattr(front.Restarts, "pause", 0.01)


def connected() -> tuple[Connection, Connection]:
    """Both ends of a connection."""
    one, other = socket_pair()
    return Connection(one), Connection(other, calls=True)


def attempts(*ends: Outcome | Exception, restarts: int = 5) -> tuple[int, int]:
    """Runs a job whose attempts end so; its exit code, and how many attempts it had."""
    left = list(ends)

    def run(*arguments: object) -> Outcome:
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    words = ["--max_restart", str(restarts), "t.py"]
    with collect_signals() as received:
        code = front.fleetrun(words, {}, lambda: machine(), run, received)
    return code, len(ends) - len(left)


def test_an_attempt_that_cannot_start_counts_as_one() -> None:
    missing = LaunchError("port 6070 is taken", code="port_in_use")
    assert attempts(FAILED, missing, Outcome(0, "")) == (0, 3)
    assert attempts(FAILED, missing, missing, restarts=2) == (1, 3)
    with raises("port_in_use"):  # the very first: the command is wrong
        attempts(missing)


def test_signal_during_machine_check_ends_with_75(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """nvidia-smi may take seconds."""

    def look() -> Machine:
        os.kill(os.getpid(), signal.SIGUSR1)
        return machine()

    monkeypatch.setattr(topology, "this_machine", look)
    monkeypatch.setattr(sys, "argv", ["fleetrun", "t.py"])
    assert cli.main() == 75
    assert "stopped by SIGUSR1" in capfd.readouterr().err


def test_help_leaves_the_signals_as_they_were(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    handler = signal.getsignal(signal.SIGPIPE)
    monkeypatch.setattr(sys, "argv", ["fleetrun", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGPIPE) is handler


def test_a_full_disk_is_said_with_its_folder(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with raises("temporary_folder_unwritable", "ppdist-", "/0"):
        attempts(Outcome(0, ""))


def test_a_signal_in_the_pause_ends_the_job_with_75(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(restarts: front.Restarts, most: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(front.Restarts, "pause", property(lambda self: 60.0 * self.attempt))
    monkeypatch.setattr(front.Restarts, "announcement", stop)
    assert attempts(FAILED) == (75, 1)


@pytest.mark.parametrize("stopped", [0, 1])
def test_signal_to_one_host_in_pause_ends_all_hosts(stopped: int) -> None:
    one, other = connected()
    lines = [
        ControlChannel(A, (A, B), {B: one}, print),
        ControlChannel(B, (A, B), {A: other}, print),
    ]
    received: list[list[int]] = [[], []]
    codes: dict[int, int] = {}

    def pause(number: int) -> None:
        assert not front.pause_attempt(60, lines[number], received[number])
        outcome = front.report_early_stop(received[number])
        codes[number] = lines[number].finish(outcome, received[number]).code

    threads = [threading.Thread(target=pause, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    received[stopped].append(signal.SIGTERM)
    for thread in threads:
        thread.join(20)
    assert codes == {0: 75, 1: 75}


def test_other_host_failure_in_pause_is_no_signal() -> None:
    one, other = connected()
    line = ControlChannel(A, (A, B), {B: one}, print)
    other.send({"type": "ended", "host": B, "code": 1, "message": "no room", "age_ms": 0})
    other.receive()  # and proves what it must before
    line.watch([])
    other.receive()
    assert front.pause_attempt(60, line, [])


def test_a_token_of_any_bytes_works() -> None:
    token = os.fsdecode(b"\xff\xfe secret")
    assert len(name_job(token, "nonce")) == 64
    assert name_job(token, "nonce") == name_job(token, "nonce") != name_job("", "nonce")
    assert name_job("") != name_job(""), "a host alone draws"
