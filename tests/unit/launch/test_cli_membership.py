"""fleetrun on hosts that go and come back, with a script that needs no Paddle."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.unit.launch.hosts import Host, hosts_of_a_test, wait_for, write
from tests.unit.launch.namespaces import Switch

pytestmark = pytest.mark.slow
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# Notes its world, saves ten times a second, and stops at SIGTERM; the file `over` ends it.
TRAINS = """
import json
from ppdist.common.files import replace_file
note = Path(os.environ["PPDIST_JOB_DIR"]) / "run.json"
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
with open(f"worlds{os.environ['PLACE']}", "a") as file:
    print(rank, os.environ["PADDLE_TRAINERS_NUM"], os.environ.get("PPDIST_RESTART", 0), file=file)
step = 0
while not Path("over").exists() and not Path(f"fails{os.environ['PLACE']}").exists():
    step += 1
    replace_file(note, json.dumps({"saved": step}).encode())
    time.sleep(0.1)
if not Path("over").exists():
    sys.exit(int(Path(f"fails{os.environ['PLACE']}").read_text()))
"""
Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts fleetrun on a host, with further options."""
    monkeypatch.chdir(tmp_path)
    script, port = write(TRAINS), str(free_port())
    with hosts_of_a_test() as started:

        def start(
            place: int, *words: str, count: int = 3, name: str = "", switch: Switch | None = None
        ) -> Host:
            hosts, prefix = list(HOSTS[:count]), ()
            if switch is not None:
                hosts, prefix = switch.addresses, switch.prefix(place)
            launch = ["--ips", ",".join(hosts), "--host", hosts[place], *words]
            launch += ["--nproc_per_node", "1", "--start_port", port]
            launch += ["--rejoin_seconds", "5" if switch else "1"]
            variables = {"PLACE": str(place)}
            return started(
                name or f"h{place}", *launch, script, prefix=prefix, variables=variables
            )  # fmt: skip

        yield start


def worlds(place: int) -> list[str]:
    """Rank, world size and attempt of each world that a host was in."""
    file = Path(f"worlds{place}")
    return file.read_text().splitlines() if file.exists() else []


def wait_for_worlds(places: list[int], count: int) -> None:
    wait_for(lambda: all(len(worlds(place)) == count for place in places))


def kill(host: Host) -> None:
    """As when the power is lost; its ranks end with it."""
    os.kill(host.process.pid, signal.SIGKILL)
    host.process.wait()


def test_hosts_go_on_without_one_and_take_it_in_again(start: Start) -> None:
    hosts = [start(place, "--min_hosts", "2") for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    kill(hosts[2])
    wait_for_worlds([0, 1], 2)
    hosts[2] = start(2, "--min_hosts", "2", name="back")
    wait_for_worlds([0, 1], 3)
    wait_for_worlds([2], 2)
    Path("over").touch()
    assert [host.ended().code for host in hosts] == [0, 0, 0]
    assert worlds(0)[1:] == ["0 2 1", "0 3 2"]
    assert worlds(1)[1:] == ["1 2 1", "1 3 2"]
    assert worlds(2)[1:] == ["2 3 2"]


def test_two_hosts_lost_together_are_both_named(start: Start) -> None:
    hosts = [start(place, "--min_hosts", "1") for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    for host in hosts[1:]:
        os.kill(host.process.pid, signal.SIGKILL)
    wait_for_worlds([0], 2)
    Path("over").touch()
    ended = hosts[0].ended()
    assert ended.code == 0
    assert f"host {HOSTS[1]}, {HOSTS[2]}: connection lost" in ended.errors


def test_a_lost_hub_is_waited_for(start: Start) -> None:
    """It learns from the others how often the run was restarted."""
    hosts = [start(place, "--min_hosts", "2") for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    kill(hosts[0])
    wait_for(lambda: all("go on" in host.said for host in hosts[1:]))
    hosts[0] = start(0, "--min_hosts", "2", name="back")
    wait_for_worlds([0, 1, 2], 2)
    Path("over").touch()
    assert [host.ended().code for host in hosts] == [0, 0, 0]
    assert [worlds(place)[1] for place in range(3)] == ["0 3 1", "1 3 1", "2 3 1"]


@pytest.mark.parametrize(("place", "code"), [(2, 1), (0, 2), (0, 1)])
def test_a_host_that_comes_back_and_fails_at_once_ends_alone(
    place: int, code: int, start: Start
) -> None:
    """The others go on, or wait for it where it is the hub; no restart is counted."""
    options = ["--min_hosts", "2", "--max_restart", "3"]
    hosts = [start(each, *options) for each in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    Path(f"fails{place}").write_text(str(code))
    kill(hosts[place])
    if place != 0:
        wait_for_worlds([0, 1], 2)
    back = start(place, *options, name="back")
    assert (back.ended().code, len(worlds(place))) == (code, 2), back.said
    Path(f"fails{place}").unlink()
    hosts[place] = start(place, *options, name="again")
    wait_for_worlds([place], 3)
    wait_for(lambda: all(worlds(each)[-1].split()[1] == "3" for each in range(3)))
    Path("over").touch()
    assert [host.ended().code for host in hosts] == [0, 0, 0]
    assert not any("restart 1 of" in host.said for host in (*hosts, back))


def test_ctrl_c_while_the_hub_is_lost_ends_that_host_alone(start: Start) -> None:
    """There is no way to the others but through the hub."""
    hosts = [start(place, "--min_hosts", "2") for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    kill(hosts[0])
    wait_for(lambda: all("go on" in host.said for host in hosts[1:]))
    hosts[1].process.send_signal(signal.SIGINT)
    assert hosts[1].ended().code == 75
    hosts[0] = start(0, "--min_hosts", "2", name="back")
    wait_for_worlds([0, 2], 2)
    Path("over").touch()
    assert [hosts[place].ended().code for place in (0, 2)] == [0, 0]


def test_a_hub_that_stays_away_ends_the_others_with_one_code(start: Start) -> None:
    options = ["--min_hosts", "1", "--max_restart", "5", "--start_timeout", "4"]
    hosts = [start(place, *options) for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    kill(hosts[0])
    ended = [host.ended() for host in hosts[1:]]
    assert [end.code for end in ended] == [1, 1]
    for end in ended:
        assert "after 4 s" in end.errors and "restart 1 of" not in end.errors


def test_a_hub_with_too_few_waits_and_ends(start: Start) -> None:
    options = ["--min_hosts", "2", "--start_timeout", "4"]
    hosts = [start(place, *options, count=2) for place in range(2)]
    wait_for_worlds([0, 1], 1)
    kill(hosts[1])
    ended = hosts[0].ended()
    assert ended.code == 1 and len(worlds(0)) == 1


def test_a_host_with_a_notice_leaves_and_the_others_go_on(start: Start) -> None:
    hosts = [start(place, "--min_hosts", "1") for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    hosts[2].process.send_signal(signal.SIGUSR1)
    assert hosts[2].ended().code == 75
    wait_for_worlds([0, 1], 2)
    hosts[1].process.terminate()
    assert hosts[1].ended().code == 75
    wait_for_worlds([0], 3)
    Path("over").touch()
    assert hosts[0].ended().code == 0
    assert worlds(0) == ["0 3 0", "0 2 1", "0 1 2"]


@pytest.mark.parametrize(("place", "number"), [(1, signal.SIGINT), (0, signal.SIGTERM)])
def test_ctrl_c_or_a_notice_to_the_hub_ends_the_run_on_all_hosts(
    place: int, number: int, start: Start
) -> None:
    hosts = [start(place, "--min_hosts", "1", count=2) for place in range(2)]
    wait_for_worlds([0, 1], 1)
    hosts[place].process.send_signal(number)
    assert [host.ended().code for host in hosts] == [75, 75]


def test_of_a_divided_network_the_side_of_the_hub_goes_on(switch: Switch, start: Start) -> None:
    """And the hosts that were cut off are taken in once the network is whole."""
    hosts = [start(place, "--min_hosts", "1", switch=switch) for place in range(4)]
    wait_for_worlds([0, 1, 2, 3], 1)
    wait_for(lambda: all("all 4 hosts" in host.said for host in hosts))
    switch.divide([1, 2, 3])
    wait_for_worlds([0], 2)
    wait_for(lambda: all("still waiting for 1 of 4 hosts" in host.said for host in hosts[1:]))
    switch.heal([1])
    wait_for(lambda: len(worlds(1)) > 1)
    switch.heal([2, 3])  # who calls first is taken in first, and stops once more for the others
    wait_for(lambda: all(worlds(place)[-1].split()[1] == "4" for place in range(4)))
    Path("over").touch()
    assert [host.ended().code for host in hosts] == [0, 0, 0, 0]
    assert worlds(0)[1] == "0 1 1"
