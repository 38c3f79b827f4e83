"""Network namespaces joined by a cable that can be pulled: hosts with addresses of their own."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tests.unit.launch.hosts import Ended, Host

A, B = "10.213.7.1", "10.213.7.2"
MANAGEMENT = "10.214.7.1"  # a second network of the first host


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

    def block(self, target: str) -> None:
        """B finds no way to the target any more."""
        ip("-n", self.namespaces[1], "route", "add", "blackhole", target)

    def unblock(self, target: str) -> None:
        ip("-n", self.namespaces[1], "route", "del", "blackhole", target)


def ended(hosts: Sequence[Host], seconds: float = 100) -> list[Ended]:
    return [host.ended(seconds) for host in hosts]
