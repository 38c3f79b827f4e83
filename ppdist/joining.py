"""What ranks make sure of before Paddle connects them, because Paddle waits and does not say why.

At a store that cannot be reached it waits 15 minutes, at a port of gloo that a firewall closes
about 3, and ranks that join in different ways wait for ever.  Plain sockets find out in seconds,
and the message names the two hosts.
"""

import ctypes
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from paddle.base import core

from ppdist.errors import ConfigError, LaunchError

Exchange = Callable[[Any], list[Any]]  # gives what every rank gave to it, in rank order
_CONNECT_SECONDS = 10.0  # a lost packet is sent again after 1, 3 and 7
_SILENT_SECONDS = 30.0  # a host that is up answers at once, if only that nothing listens
_START_SECONDS = 300.0  # rank 0 may import Paddle from a cold disk while nothing listens yet
_PAUSE_SECONDS = 0.2
_CALLS_AT_ONCE = 32
_LATER_NS = 30_000_000
_PR_SET_TIMERSLACK = 29


@contextmanager
def drowsy_threads() -> Iterator[None]:
    """Inside, gloo makes its groups: two threads each, which wake up every 10 ms to look whether
    they are to end, 0.3 to 0.5 % of a core that computes.

    Linux may wake up those that were made inside 30 ms later.  What comes over a connection wakes
    them at once as before (latency measured: the same); joining takes up to 0.3 s longer.
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_LATER_NS))  # threads inherit it from who makes them
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0))  # that of before


def wait_for_store(endpoint: str, here: str, patience: float) -> None:
    """Returns once something listens where rank 0 holds the store; every other rank calls it.

    Args:
        endpoint: `ADDRESS:PORT` of the store.
        here: this host, for the message.
        patience: the most it waits, in seconds.
    Raises: LaunchError: nothing does.
    """
    address, _, port = endpoint.rpartition(":")
    began = time.monotonic()
    while (problem := _call(address, int(port))) is not None:
        refused = isinstance(problem, ConnectionRefusedError)
        waited = time.monotonic() - began
        if waited > min(patience, _START_SECONDS if refused else _SILENT_SECONDS):
            why = (
                "nothing listens there: see in its log what keeps rank 0"
                if refused
                else "a firewall between the hosts? Open everything between them"
            )
            raise LaunchError(
                f"host {here} cannot reach port {port} of {address}, where rank 0 keeps what ranks "
                f"tell each other ({problem.strerror or problem}, tried for {waited:.0f} s): {why}",
                code="store_unreachable",
            )
        time.sleep(_PAUSE_SECONDS)


@contextmanager
def store_apart(
    collective: Any,
    exchange: Exchange,
    addresses_W: Sequence[str],
    rank: int,
    members: Sequence[int],
) -> Iterator[None]:
    """Inside, Paddle makes a group of gloo at a store that this group alone knows; every rank of
    the run calls it.

    Paddle 3.3.1 keeps the addresses of all groups under the same names (0, 1, ...), so members of a
    second group may read those of the first, and fail (`sizeof(impl_) == bytes.size()`, or a
    refused connection), when they come before the new ones are there.

    Args:
        collective: the module that holds Paddle's store.
        addresses_W: of the host of each rank.
        members: ranks of the group; the first keeps its store.
    """
    usual = collective._default_store
    address, store = addresses_W[members[0]], usual
    port = _free_port() if rank == members[0] else 0
    if rank == members[0]:
        store = core.TCPStore(address, port, True, 0)
    port = exchange(port)[members[0]]  # who calls before it listens tries again after 3 s
    if rank in members[1:]:
        store = core.TCPStore(address, port, False, 0)
    collective._default_store = store
    try:
        yield
    finally:
        collective._default_store = usual


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("", 0))
        return chosen.getsockname()[1]


def require_same(exchange: Exchange, host: str, settings: Mapping[str, Any]) -> None:
    """Every rank calls it.

    Args: settings: what decides how a rank joins, by name.
    Raises: ConfigError, on every rank: they are not the same.
    """
    found_W = exchange([host, dict(settings)])
    first_host, first = found_W[0]
    for other, (place, found) in enumerate(found_W):
        for key, value in first.items():
            if found.get(key) != value:
                raise ConfigError(
                    f"{key}: {value} on rank 0 (host {first_host}), {found.get(key)} on rank "
                    f"{other} (host {place}): they cannot train together",
                    code="ranks_differ",
                    fix=(
                        "give every host the same configuration, the same command and the same "
                        "build of Paddle"
                    ),
                )


def require_ways(
    exchange: Exchange, addresses_W: Sequence[str], rank: int, environment: Mapping[str, str]
) -> None:
    """The first rank of each host connects to that of every other at a port the system chose, as
    gloo and NCCL will; every rank calls it.

    Args: addresses_W: of the host of each rank.
    Raises: LaunchError, on every rank: a host does not reach another one.
    """
    hosts = list(dict.fromkeys(addresses_W))
    if len(hosts) < 2:
        return
    own = addresses_W[rank]
    speaks = addresses_W.index(own) == rank and not _other_network(environment)
    listener = _listen(own, len(hosts)) if speaks else None
    try:
        ports_W = exchange(listener and listener.getsockname()[1])
        targets = [
            (address, port)
            for address, port in zip(addresses_W, ports_W)
            if speaks and port and address != own
        ]
        with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
            problems = pool.map(lambda target: _call(*target), targets)
        failed = [
            f"{own} -> {address} (port {port}: {problem.strerror or problem})"
            for (address, port), problem in zip(targets, problems)
            if problem is not None
        ]
        failed_W = exchange(failed)
    finally:
        if listener is not None:
            listener.close()
    lost = [way for failed in failed_W for way in failed]
    if lost:
        raise LaunchError(
            f"hosts do not reach one another: {'; '.join(lost)}. gloo and NCCL choose such ports "
            "by themselves: open everything between these hosts in the firewall, and see that "
            f"{interfaces(environment)} is the interface of their network",
            code="hosts_unreachable",
        )


def interfaces(environment: Mapping[str, str]) -> str:
    """The interfaces that gloo and NCCL were told to take, for messages."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return ", ".join(f"{name}={environment.get(name, 'not set')}" for name in names)


def _other_network(environment: Mapping[str, str]) -> bool:
    """Whether the user chose for NCCL another interface than that of this host's address."""
    chosen = environment.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
    on_gpu = environment.get("PADDLE_DISTRI_BACKEND") != "gloo"
    return on_gpu and bool(chosen) and chosen != environment.get("GLOO_SOCKET_IFNAME", chosen)


def _listen(address: str, callers: int) -> socket.socket:
    """The system answers who connects; nobody has to accept."""
    try:
        return socket.create_server((address, 0), backlog=callers)
    except OSError:  # an address that only others see, behind a translation
        return socket.create_server(("", 0), backlog=callers)


def _call(address: str, port: int) -> OSError | None:
    """Why there is no connection, None where there is one."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None
