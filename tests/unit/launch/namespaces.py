"""Network namespaces joined by a cable or a switch: hosts with addresses of their own."""

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.unit.launch.hosts import Ended, Host

A, B = "10.213.7.1", "10.213.7.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Cable:
    """Two namespaces and the cable between them."""

    namespaces: tuple[str, str]

    def prefix(self, host: str) -> Sequence[str]:
        return ("ip", "netns", "exec", self.namespaces[host == B])

    def pull(self) -> None:
        ip("-n", self.namespaces[1], "link", "set", "cable1", "down")


@dataclass
class Switch:
    """Namespaces of hosts, and one with a bridge that joins them."""

    name: str
    namespaces: Sequence[str]

    @property
    def addresses(self) -> list[str]:
        return [f"10.215.7.{place + 1}" for place in range(len(self.namespaces))]

    def prefix(self, place: int) -> Sequence[str]:
        return ("ip", "netns", "exec", self.namespaces[place])

    def install(self) -> None:
        """Joins the namespaces, which are there."""
        for bridge in ("joined", "apart"):
            ip("-n", self.name, "link", "add", bridge, "type", "bridge")
            ip("-n", self.name, "link", "set", bridge, "up")
        for place, (name, address) in enumerate(zip(self.namespaces, self.addresses)):
            peer = ("peer", "name", "cable", "netns", name)
            ip("-n", self.name, "link", "add", f"port{place}", "type", "veth", *peer)
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", self.name, "link", "set", f"port{place}", "up")
        self.heal(range(len(self.namespaces)))

    def divide(self, places: Iterable[int]) -> None:
        """These hosts reach one another still, and no other."""
        self.plug(places, "apart")

    def heal(self, places: Iterable[int]) -> None:
        self.plug(places, "joined")

    def plug(self, places: Iterable[int], bridge: str) -> None:
        for place in places:
            ip("-n", self.name, "link", "set", f"port{place}", "master", bridge)


def ended(hosts: Sequence[Host], seconds: float = 100) -> list[Ended]:
    return [host.ended(seconds) for host in hosts]
