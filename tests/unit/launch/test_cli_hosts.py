"""Two hosts of one run on the loopback addresses 127.0.0.2 and 127.0.0.3, with the real fleetrun.

What hosts say to each other in detail is in test_rendezvous.py and
test_rendezvous_control_channel.py, without processes.
"""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppdist.launch.options import TOKEN_VARIABLE
from tests.ports import free_port
from tests.unit.launch.hosts import (
    WAITS_FOR_A_RESTART,
    WAITS_FOR_ALL,
    Host,
    hosts_of_a_test,
    wait_for,
    write,
)

A, B = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    monkeypatch.chdir(tmp_path)
    with hosts_of_a_test() as starter:
        yield starter


@pytest.fixture
def port() -> str:
    return str(free_port())


def both(start: Callable[..., Host], port: str, script: str, *words: str) -> list[Host]:
    common = ("--ips", f"{A},{B}", "--start_port", port, *words, script)
    return [start(host, "--host", host, *common) for host in (B, A)][::-1]


def test_a_failing_rank_ends_both_hosts_by_its_name(start, port: str) -> None:
    code = """
def main():
    if rank == 1: raise DataError("a.json: no images", code="no_images")
    time.sleep(120)
run(main)
"""
    first, second = [host.ended() for host in both(start, port, write(WAITS_FOR_ALL + code))]
    assert (first.code, second.code) == (2, 2)
    assert f"ppdist: host {B}: error: a.json: no images [no_images]\n" in first.errors
    assert "ppdist: error: a.json: no images [no_images]\n" in second.errors


def test_different_commands_are_refused_before_start(start, port: str) -> None:
    script = write("Path(f'ran{rank}').touch()\n")
    common = ("--ips", f"{A},{B}", "--start_port", port)
    known = {"variables": {TOKEN_VARIABLE: "sixteen letters or more"}}
    first = start(A, "--host", A, *common, script, "-c", "a.yml", **known)
    words = (*common, "--nproc_per_node", "2", script, "-c", "b.yml")
    second = start(B, "--host", B, *words, **known)
    for host in (first, second):
        ended = host.ended()
        assert ended.code == 2 and "Traceback" not in ended.errors
        for words in ("arguments of the script", "a.yml", "b.yml", "processes on a host"):
            assert words in ended.errors
    assert not list(Path().glob("ran*"))


@pytest.mark.slow
def test_a_host_that_cannot_write_its_logs_ends_both(start, port: str) -> None:
    script = write("time.sleep(120)\n")
    Path(f"log_{B}").write_text("a file where the folder should be")
    first, second = [host.ended() for host in both(start, port, script)]
    assert (first.code, second.code) == (2, 2), first.errors
    assert f"ppdist: host {B}: error: --log_dir log_{B}: File exists" in first.errors
    assert f"ppdist: error: --log_dir log_{B}: File exists" in second.errors


def test_a_port_that_another_program_has_is_named(start, port: str) -> None:
    common = ("--ips", f"{A},{B}", "--start_port", port, write(""))
    with socket.create_server((A, int(port))):
        ended = start(A, "--host", A, *common).ended()
    assert ended.code == 2
    assert f"port {port} " in ended.errors


def attempts(rank: int) -> list[str]:
    return Path(f"attempts{rank}").read_text().split()


@pytest.mark.slow
def test_a_host_started_again_too_early_waits(start, port: str) -> None:
    command = ("--ips", f"{A},{B}", "--start_port", port, "--max_restart", "2")
    script = write(WAITS_FOR_ALL + WAITS_FOR_A_RESTART)
    hosts = {host: start(host, "--host", host, *command, script) for host in (B, A)}
    wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())
    again = start("again", "--host", B, *command, script)  # B has come back, A does not know
    time.sleep(5)
    hosts[B].process.send_signal(signal.SIGKILL)
    ended = [hosts[A].ended(), again.ended()]
    assert [host.code for host in ended] == [0, 0], ended
    assert attempts(0) == attempts(1) == ["0", "1"]
