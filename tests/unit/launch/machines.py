"""Machines with made-up cards and networks."""

from ppdist.launch.cards import Card
from ppdist.launch.network import Network
from ppdist.launch.options import parse_options
from ppdist.launch.topology import LaunchPlan, Machine, make_plan

A, B = "10.9.0.1", "10.9.0.2"


class FakeNetwork(Network):
    """A machine that holds `addresses`, where the ports in `taken` are in use."""

    def __init__(self, addresses: dict[str, str], taken: tuple[int, ...] = ()) -> None:
        self.addresses, self.taken = addresses, taken
        self.names = {"node-a": A, "node-b": B, "self": "127.0.1.1"}

    def resolve(self, name: str) -> str | None:
        return name if name[0].isdigit() else self.names.get(name)

    def is_local(self, address: str) -> bool:
        return address in self.addresses.values() or address.startswith("127.")

    def is_free(self, port: int) -> bool:
        return port not in self.taken

    def interfaces(self) -> dict[str, str]:
        return self.addresses | {"sit0": ""}

    def source_address(self, address: str) -> str | None:
        return self.addresses["eth1"]


def planned(command: str, on: Machine, **environment: str) -> LaunchPlan:
    """The plan of a command with a script that exists."""
    words = [*command.split(), "ppdist", "train"]
    return make_plan(parse_options(words, environment), environment, on)


def machine(
    cards: int = 0, build: str = "gpu", own: str = A, taken: tuple[int, ...] = ()
) -> Machine:
    network = FakeNetwork({"lo": "127.0.0.1", "eth1": own}, taken)
    return Machine([Card(index, uuid=f"GPU-{index}") for index in range(cards)], build, 8, network)
