"""Hosts that wait for each other: threads of this process, each with a loopback address."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ppdist.common.errors import LaunchError
from ppdist.launch import rendezvous
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.handshake import Handshake
from ppdist.launch.rendezvous import Hub

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"
TRAIN = Handshake(
    host=A,
    hosts=(A, B),
    processes=2,
    device="cpu",
    script="tools/train.py",
    arguments=("-c", "cfg.yml", "-o", "seed=1"),
    ppdist="0.1.0",
    paddle="3.3.1",
)


@dataclass
class Host:
    """One fleetrun that waits for the others, in a thread."""

    handshake: Handshake
    port: int
    seconds: float = 8
    said: list[str] = field(default_factory=list)
    channel: ControlChannel | None = None
    error: str = ""
    code: str = ""
    received: list[int] = field(default_factory=list)
    token: str = ""
    resolve: Callable[[str], str | None] = lambda name: None
    hub: Hub | None = None  # of the first host
    compare: Sequence[str] = ()

    def start(self) -> None:
        self.open_hub()  # so that it listens before another host or a stranger calls
        self.thread = threading.Thread(target=self.meet, daemon=True)
        self.thread.start()

    def open_hub(self) -> None:
        try:
            if self.handshake.is_first and self.hub is None:
                self.hub = Hub(self.handshake, self.port, self.said.append, self.token)
        except LaunchError as error:
            self.error, self.code = str(error), error.code

    def meet(self) -> None:
        if self.error:
            return
        try:
            self.channel = rendezvous.rendezvous(
                self.handshake, self.port, self.seconds, self.said.append, self.received,
                self.token, self.resolve, self.hub, self.compare,
            )  # fmt: skip
        except LaunchError as error:
            self.error, self.code = str(error), error.code
        except rendezvous.Stopped:
            self.error = "stopped"

    def end(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive(), f"{self.handshake.host} hangs: {self.said}"
        if self.channel is not None:
            self.channel.close()
        if self.hub is not None:
            self.hub.close()


def host(own: str, hosts: Sequence[str] = (A, B), **changes) -> Handshake:
    return replace(TRAIN, host=own, hosts=tuple(hosts), **changes)
