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
    SAVES_AT_SIGTERM,
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


@pytest.mark.slow
def test_ranks_count_across_hosts_and_end_together(start, port: str) -> None:
    code = WAITS_FOR_ALL + "if rank == 3: time.sleep(2)\nprint('rank', rank)\n"
    hosts = both(start, port, write(code), "--nproc_per_node", "2")
    first, second = [host.ended() for host in hosts]
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert (first.output, second.output) == ("rank 0\n", "rank 2\n")
    assert "fleetrun: host 1 of 2, 2 processes on CPU" in first.errors
    assert "fleetrun: all 2 hosts are connected" in first.errors
    assert "rank 3" in Path(f"log_{B}/workerlog.1").read_text()


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
    assert (
        f"fleetrun: host {B}: error: a.json: no images [no_images]; stopping the ranks here"
        in first.errors
    )


@pytest.mark.slow
def test_sigterm_on_one_host_saves_on_both(start, port: str) -> None:
    hosts = both(start, port, write(SAVES_AT_SIGTERM))
    wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())
    hosts[1].process.terminate()
    for host in hosts:
        ended = host.ended()
        assert (ended.code, ended.output) == (75, "saved\n"), ended.errors
    assert f"host {B}: got SIGTERM; stopping the ranks here too" in hosts[0].said


@pytest.mark.slow
def test_a_host_whose_fleetrun_is_killed_ends_the_other(start, port: str) -> None:
    hosts = both(start, port, write("Path(f'ready{rank}').touch()\ntime.sleep(120)\n"))
    wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())
    hosts[1].process.send_signal(signal.SIGKILL)
    ended = hosts[0].ended()
    assert ended.code == 1
    assert f"fleetrun: host {B}: connection lost: its fleetrun was killed" in ended.errors


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


@pytest.mark.slow
def test_who_never_comes_is_named_and_the_exit_code_is_2(start, port: str) -> None:
    common = ("--ips", f"{A},{B}", "--start_port", port, "--start_timeout", "2", write(""))
    ended = start(A, "--host", A, *common).ended()
    assert ended.code == 2
    assert "ppdist: error: gave up after 2 s (--start_timeout): still waiting for " in ended.errors
    assert f" on port {port}: {B} (not called yet" in ended.errors


def test_a_port_that_another_program_has_is_named(start, port: str) -> None:
    common = ("--ips", f"{A},{B}", "--start_port", port, write(""))
    with socket.create_server((A, int(port))):
        ended = start(A, "--host", A, *common).ended()
    assert ended.code == 2
    assert f"port {port} is in use on this machine" in ended.errors


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_named(start, port: str, variable: str) -> None:
    common = ("--ips", f"{A},{B}", "--start_port", port, write(""))
    ended = start(A, "--host", A, *common, variables={variable: "ib7"}).ended()
    assert ended.code == 2
    assert f"ppdist: error: {variable}=ib7" in ended.errors and "lo (127.0.0.1)" in ended.errors


FAILS_ONCE = """
attempt = int(os.environ.get("PPDIST_RESTART", "0"))
with open(f"attempts{rank}", "a") as file:
    print(attempt, file=file)
if rank == 1 and attempt == 0: os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0: time.sleep(120)
"""


def attempts(rank: int) -> list[str]:
    return Path(f"attempts{rank}").read_text().split()


@pytest.mark.slow
def test_all_hosts_restart_together(start, port: str) -> None:
    script = write(WAITS_FOR_ALL + FAILS_ONCE)
    first, second = [host.ended() for host in both(start, port, script, "--max_restart", "2")]
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert attempts(0) == attempts(1) == ["0", "1"]
    assert f"fleetrun: host {B}: rank 1 failed first: it was killed by SIGKILL" in first.errors
    for host in (first, second):
        assert "fleetrun: restart 1 of 2 in 1 s" in host.errors
        assert host.errors.count("all 2 hosts are connected") == 2


@pytest.mark.slow
@pytest.mark.parametrize("lost", [A, B])
def test_a_lost_host_started_again_joins_the_next_attempt(
    start, port: str, lost: str, record_property
) -> None:
    command = ("--ips", f"{A},{B}", "--start_port", port, "--max_restart", "2")
    script = write(WAITS_FOR_ALL + WAITS_FOR_A_RESTART)
    hosts = {host: start(host, "--host", host, *command, script) for host in (B, A)}
    wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())
    hosts[lost].process.send_signal(signal.SIGKILL)
    other = hosts[A if lost == B else B]
    wait_for(lambda: "restart 1 of 2" in other.said)
    time.sleep(1)
    begin = time.monotonic()
    again = start(lost, "--host", lost, *command, script)
    ended = [other.ended(), again.ended()]
    record_property("seconds_from_its_start_to_the_end", round(time.monotonic() - begin, 1))
    assert [host.code for host in ended] == [0, 0], ended
    assert attempts(0) == attempts(1) == ["0", "1"]
    assert f"host {lost}: connection lost: its fleetrun" in ended[0].errors


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


@pytest.mark.slow
def test_restarts_that_differ_are_refused(start, port: str) -> None:
    common = ("--ips", f"{A},{B}", "--start_port", port)
    script = write("")
    first = start(A, "--host", A, *common, "--max_restart", "3", script)
    second = start(B, "--host", B, *common, script)
    for host in (first, second):
        ended = host.ended()
        assert ended.code == 2 and "give the same --max_restart" in ended.errors
