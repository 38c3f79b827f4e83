import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.launch.hosts import Host, hosts_of_a_test
from tests.unit.launch.namespaces import A, B, Cable, Switch, ip
from tests.unit.launch.sockets import close_sockets


@pytest.fixture(autouse=True)
def no_open_sockets() -> Iterator[None]:
    yield
    close_sockets()


@contextmanager
def namespaces_of(*names: str) -> Iterator[None]:
    """Network namespaces for the body; a test that cannot have them is skipped."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program ip (iproute2)")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            link = ("link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
            ip("-n", names[0], *link, "netns", names[-1])
            ip("-n", names[0], "link", "del", "probe0")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def cable() -> Iterator[Cable]:
    names = (f"ppdist-a{os.getpid()}", f"ppdist-b{os.getpid()}")
    with namespaces_of(*names):
        peer = ("peer", "name", "cable1", "netns", names[1])
        ip("-n", names[0], "link", "add", "cable0", "type", "veth", *peer)
        for place, address in enumerate((A, B)):
            ip("-n", names[place], "address", "add", f"{address}/24", "dev", f"cable{place}")
            ip("-n", names[place], "link", "set", f"cable{place}", "up")
        yield Cable(names)


@pytest.fixture
def switch() -> Iterator[Switch]:
    """Four hosts."""
    made = Switch(f"ppdist-s{os.getpid()}", [f"ppdist-{place}s{os.getpid()}" for place in range(4)])
    with namespaces_of(made.name, *made.namespaces):
        made.install()
        yield made


@pytest.fixture
def cabled(
    cable: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Host]]:
    """Starts fleetrun on one of the two hosts; neither gets --host."""
    monkeypatch.chdir(tmp_path)
    with hosts_of_a_test() as starter:

        def started(host: str, *words: str, **more) -> Host:
            return starter(host, "--ips", f"{A},{B}", *words, prefix=cable.prefix(host), **more)

        yield started
