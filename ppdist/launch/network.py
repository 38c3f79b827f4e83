"""Network of a host: its position in --ips, interfaces, ports.

Schedulers publish host names late and move them to other addresses, so names are looked up until
they resolve.
"""

import fcntl
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ppdist.common.errors import LaunchError
from ppdist.launch.signals import Stopped

_SIOCGIFADDR = 0x8915
_LOOK_SECONDS, _REPORT_SECONDS = 1.0, 10.0  # between two lookups of a name; two lines about it

MOST_HOSTS = 4096  # the names of so many hosts fit into the handshake
_LISTED_HOSTS = 3
_SEVERAL_HOSTS_PORT = 6070  # Paddle's default, for the rendezvous: equal on all hosts
_ONE_HOST_PORTS = (20000, 32000)  # below the ephemeral ports of Linux

T = TypeVar("T")


class NotYetKnown(LaunchError):
    """The error for a host name that may resolve once its host is up."""


class Network:
    """The network of this machine; tests replace it."""

    def resolve(self, name: str) -> str | None:
        """Resolves a host name or address to its IPv4 address, or None."""
        try:
            return socket.gethostbyname(name)
        except (OSError, UnicodeError):
            return None

    def is_local(self, address: str) -> bool:
        """Returns True if this machine holds the address."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return False
        return True

    def is_free(self, port: int) -> bool:
        """Returns True if no program uses the port."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
        return True

    def interfaces(self) -> dict[str, str]:
        """Maps each interface to its first IPv4 address, or to "" if it has none."""
        addresses = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    addresses[name] = socket.inet_ntoa(answer[20:24])
                except OSError:
                    addresses[name] = ""
        return addresses

    def source_address(self, address: str) -> str | None:
        """Returns this machine's source address for packets to another host; sends nothing."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                return None
            return probe.getsockname()[0]


def typed_hosts(ips: str) -> list[str]:
    """Splits the value of --ips into its hosts, as typed."""
    return [name for name in re.split(r"[,\s]+", ips.strip().strip("'\"")) if name]


def list_hosts(hosts: Sequence[str]) -> str:
    """Lists the first hosts, and counts the rest: `10.0.0.1, 10.0.0.2, 10.0.0.3 and 997 more`."""
    more = len(hosts) - _LISTED_HOSTS
    return ", ".join(hosts[:_LISTED_HOSTS]) + (f" and {more} more" if more > 0 else "")


def resolve_hosts(ips: str, network: Network) -> list[str]:
    """Resolves the hosts in --ips to their addresses, in order.

    Raises: LaunchError: a name does not resolve, is listed twice, or is one that other hosts
        cannot reach.
    """
    names = typed_hosts(ips)
    if not names:
        raise LaunchError(
            "--ips is empty",
            code="ips_empty",
            fix="expected the hosts of the run, e.g. --ips 10.0.0.1,10.0.0.2",
        )
    if len(names) > MOST_HOSTS:
        raise LaunchError(
            f"{len(names)} hosts; a run has at most {MOST_HOSTS}",
            code="ips_invalid",
            where="--ips",
        )
    addresses = []
    for name in names:
        if ":" in name:
            raise LaunchError(
                "expected a host name or an IPv4 address (Paddle's ranks reach one another by IPv4 "
                "only), without a port (--start_port P sets the ports)",
                code="ips_invalid",
                where=f"--ips: {name}",
            )
        address = network.resolve(name)
        if address is None:
            raise NotYetKnown(
                f"the name {name} has no IPv4 address on this machine",
                code="host_name_unknown",
                where="--ips",
                fix="give its IPv4 address, or add it to /etc/hosts on every host",
            )
        addresses.append(address)
    for place, address in enumerate(addresses):
        earlier = [names[index] for index in range(place) if addresses[index] == address]
        if earlier:
            problem = f"{names[place]} and {earlier[0]} are both {address}"
            fix = "list each host once (processes per host: --nproc_per_node)"
            if names[place] == earlier[0]:
                raise LaunchError(problem, code="ips_repeated", where="--ips", fix=fix)
            # One of the two names may belong to a host that no longer has this address.
            raise NotYetKnown(problem, code="ips_repeated", where="--ips", fix=fix)
    _refuse_loopback_among_hosts(names, addresses)
    return addresses


def _refuse_loopback_among_hosts(names: Sequence[str], addresses: Sequence[str]) -> None:
    if len(addresses) == 1:
        return
    loopback = [address.startswith("127.") for address in addresses]
    for name, address, is_loopback in zip(names, addresses, loopback):
        if is_loopback and (not all(loopback) or address == "127.0.0.1"):
            description = name if name == address else f"{name} (here {address})"
            raise LaunchError(
                f"{description} is a loopback address, which other hosts cannot reach",
                code="ips_loopback",
                where="--ips",
                fix="give the address that they see (ip -br addr shows it)",
            )


def find_own_address(addresses: Sequence[str], host: str | None, network: Network) -> str:
    """Finds the address of this machine among those of the hosts.

    Args:
        addresses: from `resolve_hosts`.
        host: the value of --host; None: the address is detected.
    Raises: LaunchError: none of the addresses belongs to this machine, or several do.
    """
    among = f"--ips {list_hosts(addresses)}"
    if host is not None:
        address = network.resolve(host)
        if address is None or address not in addresses:
            raise NotYetKnown(f"--host {host} is not among {among}", code="host_not_in_ips")
        return address
    local = [address for address in addresses if network.is_local(address)]
    if len(local) == 1:
        return local[0]
    local_addresses = ", ".join(sorted(set(network.interfaces().values()) - {""})) or "none"
    if local:
        raise LaunchError(
            f"{', '.join(local)} are all addresses of this machine",
            code="ips_ambiguous",
            where="--ips",
            fix=f"choose the one for this launch: --host {local[0]}",
        )
    raise LaunchError(
        f"none of {among} is this machine (its addresses: {local_addresses})",
        code="ips_without_this_host",
        fix="start fleetrun on each of the hosts, or correct --ips",
    )


def retry_until_known(
    decide: Callable[[], T],
    ips: str,
    network: Network,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int],
) -> T:
    """Retries `decide` until the names in --ips resolve to the run's hosts.

    A pod's name resolves once the pod runs, and for some seconds still to the previous pod.  If
    --ips lists only addresses, there is nothing to wait for.

    Args:
        decide: raises NotYetKnown for failures that may be temporary.
        seconds: the timeout.
        received: signals so far; any of them ends the wait.
    Raises: LaunchError: the timeout, or a permanent failure.  Stopped: a signal.
    """
    begin = time.monotonic()
    reported: float | None = None
    while not received:
        try:
            return decide()
        except NotYetKnown as error:
            now = time.monotonic()
            if all(network.resolve(name) == name for name in typed_hosts(ips)):
                raise
            if now - begin > seconds:
                raise LaunchError(
                    f"{error} (waited {seconds:g} s: --start_timeout)", code="ips_not_settled"
                ) from error
            if reported is None or now - reported >= _REPORT_SECONDS:
                reported = now
                say(f"{error}; waiting for that to change ({now - begin:.0f} s)")
        time.sleep(_LOOK_SECONDS)
    raise Stopped


def socket_variables(address: str, network: Network) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL use the interface with this address.

    By default gloo connects to whatever the host's name resolves to, often 127.0.0.1.  Returns {}
    if the address is not the first address of an interface.
    """
    for name, held_address in network.interfaces().items():
        if held_address == address:
            # `=` makes NCCL compare the whole name: eth1 alone would match eth10 as well.
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def check_interfaces(environment: Mapping[str, str], address: str | None, network: Network) -> None:
    """Rejects an interface that gloo cannot use; NCCL itself reports such an error.

    Args:
        address: this host's address in the run; None skips the check of the address.
    Raises: LaunchError: there is no such interface, or gloo's interface has another address.
    """
    addresses = network.interfaces()
    holder = next((name for name in addresses if addresses[name] == address), None)
    descriptions = [f"{name} ({addresses[name] or 'without IPv4'})" for name in addresses]
    here = f"this machine has {', '.join(descriptions)}"
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    remedy = f"; {address} is on {holder}: use that or unset it" if holder else "; correct it"
    if gloo and not addresses.get(gloo):
        problem = (
            "has no IPv4 address" if gloo in addresses else "is not an interface of this machine"
        )
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME={gloo} {problem}: {here}{remedy}", code="interface_wrong"
        )
    if gloo and holder and gloo != holder:
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME={gloo} holds {addresses[gloo]}, but this host of the run is "
            f"{address}, which is on {holder}: unset the variable, or give --ips the addresses of "
            "that network",
            code="interface_wrong",
        )


def choose_port(
    wanted: int | None,
    count: int,
    hosts: int,
    first: bool,
    network: Network,
    metrics_port: int | None = None,
) -> int:
    """Chooses the first port of this run.

    A single host takes any `count` consecutive free ports, so that two runs on a machine do not
    collide.  Several hosts must agree without communicating, so they use the same fixed ports: the
    first for the rendezvous, the next `count` for the ranks.

    Args:
        wanted: the requested port, or None.
        first: True if this host has rank 0: only on that host must the ports be reachable.  The
            rendezvous opens its port itself, and keeps it open as long as the job lives.
        metrics_port: a port that ranks never get, because it may be opened later.
    Raises: LaunchError: a port is taken, or there is no free range.
    """
    if wanted is None and hosts == 1:
        for start in random.sample(range(*_ONE_HOST_PORTS), 200):
            ports = range(start, start + count)
            if metrics_port not in ports and all(network.is_free(port) for port in ports):
                return start
        raise LaunchError(
            f"found no {count} free ports in a row",
            code="no_free_ports",
            fix="give one: --start_port P",
        )
    start = _SEVERAL_HOSTS_PORT if wanted is None else wanted
    ranks = first_rank_port(start, hosts)
    if ranks + count - 1 > 65535:
        raise LaunchError(
            f"{count} processes need ports up to 65535",
            code="port_too_high",
            where=f"--start_port {start}",
        )
    refuse_metrics_port(metrics_port, range(start, ranks + count))
    taken = []
    if first:
        taken = [port for port in range(ranks, ranks + count) if not network.is_free(port)]
    if taken:
        raise make_port_error(taken[0], hosts)
    return start


def refuse_metrics_port(port: int | None, ports: range) -> None:
    """Rejects a --metrics_port that the run needs itself.

    All hosts make the same decision, so that none waits for another that has exited.

    Raises: LaunchError.
    """
    if port in ports:
        needed = f"port {port}" if len(ports) == 1 else f"ports {ports[0]}-{ports[-1]}"
        raise LaunchError(
            f"the run itself needs {needed}",
            code="metrics_port_taken",
            where=f"--metrics_port {port}",
            fix="choose another",
        )


def first_rank_port(start: int, hosts: int) -> int:
    """Returns the first port of the ranks; with several hosts, after the rendezvous port."""
    return start + (hosts > 1)


def make_port_error(port: int, hosts: int) -> LaunchError:
    """Builds the error for a port that is in use."""
    on_all_hosts = " (the same on every host)" if hosts > 1 else ""
    return LaunchError(
        f"port {port} is in use on this machine, by another job or program",
        code="port_in_use",
        fix=(
            f"choose another with --start_port P or FLAGS_START_PORT=P{on_all_hosts}; `ss -ltnp` "
            "shows who has it"
        ),
    )
