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
shared = Path("shared").exists()
step = 0
while not Path("over").exists():
    step += 1
    text = json.dumps({"saved": step, "shared": shared, "output_dir": os.getcwd()})
    replace_file(note, text.encode())
    time.sleep(0.1)
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


@pytest.mark.parametrize("lost", [2, 0], ids=["last", "first"])
def test_hosts_go_on_without_one_and_take_it_in_again(lost: int, start: Start) -> None:
    hosts = [start(place, "--min_hosts", "2") for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    kill(hosts[lost])
    first, second = (place for place in range(3) if place != lost)
    wait_for_worlds([first, second], 2)
    hosts[lost] = start(lost, "--min_hosts", "2", name="back")
    wait_for_worlds([first, second], 3)
    wait_for_worlds([lost], 2)
    Path("over").touch()
    assert [host.ended().code for host in hosts] == [0, 0, 0]
    assert worlds(first)[1:] == ["0 2 1", f"{first} 3 2"]
    assert worlds(second)[1:] == ["1 2 1", f"{second} 3 2"]
    assert worlds(lost)[1:] == [f"{lost} 3 2"]


@pytest.mark.parametrize("notice", ["SIGUSR1", "file"])
def test_a_host_with_a_notice_leaves_and_the_others_go_on(notice: str, start: Start) -> None:
    options = ["--min_hosts", "1"]
    hosts = [start(place, *options, "--preemption_file", f"gone{place}") for place in range(3)]
    wait_for_worlds([0, 1, 2], 1)
    if notice == "file":
        Path("gone0").touch()
    else:
        hosts[0].process.send_signal(signal.SIGUSR1)
    assert hosts[0].ended().code == 75
    wait_for_worlds([1, 2], 2)
    hosts[1].process.terminate()  # of two that remember, one may go on once the other has left
    assert hosts[1].ended().code == 75
    wait_for_worlds([2], 3)
    Path("over").touch()
    assert hosts[2].ended().code == 0
    assert worlds(2) == ["2 3 0", "1 2 1", "0 1 2"]


def test_ctrl_c_still_ends_the_run_on_all_hosts(start: Start) -> None:
    hosts = [start(place, "--min_hosts", "1", count=2) for place in range(2)]
    wait_for_worlds([0, 1], 1)
    hosts[1].process.send_signal(signal.SIGINT)
    assert [host.ended().code for host in hosts] == [75, 75]


@pytest.mark.parametrize("shared", [True, False])
def test_one_of_two_goes_on_only_with_the_lease(shared: bool, start: Start) -> None:
    if shared:
        Path("shared").touch()
    options = ["--min_hosts", "1", "--start_timeout", "25"]
    hosts = [start(place, *options, count=2) for place in range(2)]
    wait_for_worlds([0, 1], 1)
    wait_for(lambda: "all 2 hosts" in hosts[1].said)
    kill(hosts[0])
    if shared:
        wait_for_worlds([1], 2)
        Path("over").touch()
    ended = hosts[1].ended()
    assert ended.code == (0 if shared else 1), ended.errors
    assert shared or "1 of the 2 hosts that trained last are here" in ended.errors


def test_of_a_divided_network_only_the_larger_side_goes_on(switch: Switch, start: Start) -> None:
    """And the host that was cut off, the first, is taken in once the network is whole."""
    hosts = [start(place, "--min_hosts", "1", switch=switch) for place in range(4)]
    wait_for_worlds([0, 1, 2, 3], 1)
    wait_for(lambda: all("all 4 hosts" in host.said for host in hosts))
    switch.divide([0])
    wait_for_worlds([1, 2, 3], 2)
    wait_for(lambda: "1 of the 4 hosts that trained last are here" in hosts[0].said)
    switch.heal([0])
    wait_for_worlds([1, 2, 3], 3)
    wait_for_worlds([0], 2)
    Path("over").touch()
    assert [host.ended().code for host in hosts] == [0, 0, 0, 0]
    assert worlds(0)[1:] == ["0 4 2"]
    assert worlds(1)[1:] == ["0 3 1", "1 4 2"]


def test_neither_half_of_a_divided_network_goes_on(switch: Switch, start: Start) -> None:
    hosts = [start(place, "--min_hosts", "1", switch=switch) for place in range(4)]
    wait_for_worlds([0, 1, 2, 3], 1)
    wait_for(lambda: all("all 4 hosts" in host.said for host in hosts))
    switch.divide([1, 3])
    half = "2 of the 4 hosts that trained last are here"
    wait_for(lambda: half in hosts[0].said and half in hosts[1].said)
    assert [len(worlds(place)) for place in range(4)] == [1, 1, 1, 1]
    switch.heal([1, 3])
    wait_for_worlds([0, 1, 2, 3], 2)
    Path("over").touch()
    assert [host.ended().code for host in hosts] == [0, 0, 0, 0]
    assert [worlds(place)[1] for place in range(4)] == [f"{place} 4 1" for place in range(4)]
