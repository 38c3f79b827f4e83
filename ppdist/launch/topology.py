"""Topology of a run: cards, hosts, ports, variables of each rank.

A card is named by its physical id, the number nvidia-smi shows; CUDA_VISIBLE_DEVICES lists physical
ids (or UUIDs) and what is asked for must be in it: that is how Paddle's launcher reads both.  Cards
of another kind are taken as they are named: only Paddle's plug-in could count them.

Schedulers make host names known late and give them to other addresses, so names are looked up until
they answer.
"""

import contextlib
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import os
import random
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ppdist.common.errors import LaunchError
from ppdist.common.process import (
    EXIT_DIR_VARIABLE,
    JOB_DIR_VARIABLE,
    JOB_VARIABLE,
    RESTART_VARIABLE,
    SKIP_STEP_VARIABLE,
    STARTED_VARIABLE,
)
from ppdist.launch.options import KIND_VARIABLE, OPTION_VARIABLES, TOKEN_VARIABLE, Options
from ppdist.launch.watchdog import Stopped
from ppdist.launch.worker import CPU_VARIABLE

LAUNCHER_VARIABLE = "PPDIST_LAUNCHER"  # how a worker knows that our front started it
# Of a run around this one.
_OWN_VARIABLES = (
    EXIT_DIR_VARIABLE, JOB_DIR_VARIABLE, JOB_VARIABLE, RESTART_VARIABLE, SKIP_STEP_VARIABLE,
    STARTED_VARIABLE,
)  # fmt: skip

_SMI_SECONDS = 60.0  # the first call after boot wakes every card

_SIOCGIFADDR = 0x8915
_LOOK_SECONDS, _REPORT_SECONDS = 1.0, 10.0  # between two questions for a name; two lines about it

_SEVERAL_HOSTS_PORT = 6070  # Paddle's own; the hosts meet there and must all use the same
_ONE_HOST_PORTS = (20000, 32000)  # below the ports that Linux hands out by itself
_LISTENING = "0A"  # state in /proc/net/tcp
_COMMAND_LENGTH = 200

T = TypeVar("T")


@dataclass(frozen=True)
class Card:
    """One physical GPU."""

    index: int
    name: str = "GPU"
    uuid: str = ""


def machine_cards() -> list[Card]:
    """The NVIDIA cards of this machine, visible to CUDA or not; [] where there is none."""
    return _cards_of_nvidia_smi() or _cards_of_driver()


def _cards_of_nvidia_smi() -> list[Card]:
    program = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    if program is None:
        return []
    try:
        listed = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_nvidia_smi(listed.stdout) if listed.returncode == 0 else []


def parse_nvidia_smi(listing: str) -> list[Card]:
    """Reads the lines of `nvidia-smi -L`; those of MIG slices are indented and left out."""
    pattern = re.compile(r"^GPU (\d+): (.*?)(?: \(UUID: (\S+)\))?\s*$", re.MULTILINE)
    return [Card(int(index), name, uuid or "") for index, name, uuid in pattern.findall(listing)]


def _cards_of_driver() -> list[Card]:
    """For containers without nvidia-smi: the driver's count, or else the device files."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return []
    files = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [Card(index) for index in range(len(files))]
    # The driver counts visible cards only: with CUDA_VISIBLE_DEVICES set the files may say more.
    if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        return [Card(index) for index in range(max(count.value, len(files)))]
    return []


def visible_labels(cards: Sequence[Card], variable: str | None) -> list[str]:
    """The cards a process would see, by physical id, in the order CUDA gives them.

    Args:
        variable: the value of CUDA_VISIBLE_DEVICES, or None when it is not set.
    Returns: ids as text; a UUID that no card has (a MIG slice) stays as it is.
    Raises: LaunchError: the variable names a card that the machine does not have.
    """
    if variable is None or variable.strip() == "all":
        return [str(card.index) for card in cards]
    if not cards:
        return []
    labels = []
    for label in (part.strip() for part in variable.split(",")):
        if label in ("", "-1", "NoDevFiles"):
            break  # CUDA reads the list up to the first entry that names nothing
        if label.isdigit() and int(label) not in [card.index for card in cards]:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={variable} names card {label}, but this machine has "
                f"{_ids(card.index for card in cards)}",
                code="visible_devices_wrong",
                fix="correct or unset the variable",
            )
        named = [card for card in cards if card.uuid and card.uuid.startswith(label)]
        labels.append(str(named[0].index) if len(named) == 1 and not label.isdigit() else label)
    return labels


def expand_ids(text: str) -> list[str]:
    """Ids of a list with ranges: `0-3,6` -> 0 1 2 3 6.  Spaces and quotes do not matter.

    Raises: LaunchError: not a list of ids, a range that runs backwards, or an id twice.
    """
    bare = re.sub(r"(?<=\d)\s*-\s*(?=\d)", "-", text.strip(" '\""))
    ids: list[str] = []
    for part in re.split(r"[,\s]+", bare.strip(" ,")):
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        if span:
            first, last = int(span[1]), int(span[2])
            if first > last or last - first > 1023:
                raise LaunchError(
                    f"{part} is not a range from low to high",
                    code="cards_invalid",
                    where=f"cards {text!r}",
                )
            ids += [str(index) for index in range(first, last + 1)]
        elif part.isdigit():
            ids.append(str(int(part)))
        elif part.startswith(("GPU-", "MIG-")):
            ids.append(part)
        else:
            raise LaunchError(
                f"{part!r} is no card id",
                code="cards_invalid",
                where=f"cards {text!r}",
                fix="expected a list such as 0,1 or 0-3,6",
            )
    double = sorted({index for index in ids if ids.count(index) > 1})
    if double:
        raise LaunchError(
            f"{', '.join(double)} stands there twice",
            code="cards_repeated",
            where=f"cards {text!r}",
        )
    return ids


def cards_of_runs(text: str) -> list[list[str]]:
    """Cards of runs side by side: `0,1|2-3` -> 0 1 for one and 2 3 for the other.

    Raises: LaunchError: as `expand_ids`; they have unlike numbers of cards, or share one.
    """
    runs_RC = [expand_ids(part) for part in text.strip(" '\"").split("|")]
    if len({len(cards) for cards in runs_RC}) > 1:
        raise LaunchError(
            "give each as many, or they cannot be compared",
            code="cards_uneven",
            where=f"cards {text!r}",
        )
    every = [card for cards in runs_RC for card in cards]
    double = sorted({card for card in every if every.count(card) > 1})
    if double:
        raise LaunchError(
            f"{', '.join(double)} is of two of them", code="cards_repeated", where=f"cards {text!r}"
        )
    return runs_RC


def deal_out(visible: Sequence[str], runs: int, each: int) -> list[list[str]]:
    """Cards of runs side by side, the first of `visible` for the first.

    Raises: LaunchError: there are not enough.
    """
    if runs * each > len(visible):
        raise LaunchError(
            f"{runs} at a time with {each} card{'s' * (each > 1)} each need {runs * each}, and "
            f"this machine has {len(visible)} visible",
            code="cards_too_few",
            fix=(
                "ask for fewer, or hide the cards to compute on the CPU: CUDA_VISIBLE_DEVICES= "
                "before the command"
            ),
        )
    return [list(visible[run * each : (run + 1) * each]) for run in range(runs)]


def _ids(labels: Iterable[object]) -> str:
    texts = [str(label) for label in labels]
    return f"card {texts[0]}" if len(texts) == 1 else f"cards {', '.join(texts)}"


def paddle_build() -> str:
    """Which Paddle is installed, read from package metadata: `gpu`, `cpu`, `other` or `none`."""
    if importlib.util.find_spec("paddle") is None:
        return "none"
    if installed_version("paddlepaddle-gpu"):
        return "gpu"
    # Otherwise built by the user, or for another accelerator.
    return "cpu" if installed_version("paddlepaddle") else "other"


def installed_version(distribution: str) -> str:
    """Of a package by its name in the index; "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


class NotYetKnown(LaunchError):
    """A host that may become known: where schedulers name hosts, names come up with them."""


class Network:
    """What this machine's network answers; tests put a made-up one in its place."""

    def resolve(self, name: str) -> str | None:
        """The IPv4 address of a host name or address, or None."""
        try:
            return socket.gethostbyname(name)
        except (OSError, UnicodeError):
            return None

    def is_local(self, address: str) -> bool:
        """True when this machine holds the address: only then can a socket be bound to it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return False
        return True

    def is_free(self, port: int, address: str = "") -> bool:
        """True when nothing listens on the port (of that address; of any without one), and no job
        of this machine is about to."""
        if _claims(port):
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
        return True

    def interfaces(self) -> dict[str, str]:
        """Interface -> its first IPv4 address.  Further addresses of an interface are not found."""
        found = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:
                    continue  # it has no IPv4 address
                found[name] = socket.inet_ntoa(answer[20:24])
        return found

    def interface_names(self) -> list[str]:
        """All interfaces, also those without an IPv4 address."""
        return [name for _, name in socket.if_nameindex()]

    def towards(self, address: str) -> str | None:
        """This machine's address as the other one sees it; nothing is sent."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                return None
            return probe.getsockname()[0]


def typed_hosts(ips: str) -> list[str]:
    """The hosts in the value of --ips, as they were typed."""
    return [name for name in re.split(r"[,\s]+", ips.strip().strip("'\"")) if name]


def resolve_hosts(ips: str, network: Network) -> list[str]:
    """The addresses behind the value of --ips, in its order.

    Raises: LaunchError: a name does not resolve, or stands there twice, or is one that other hosts
        cannot reach.
    """
    names = typed_hosts(ips)
    if not names:
        raise LaunchError(
            "--ips is empty",
            code="ips_empty",
            fix="expected the hosts of the run, e.g. --ips 10.0.0.1,10.0.0.2",
        )
    addresses = []
    for name in names:
        if ":" in name:
            raise LaunchError(
                "expected an IPv4 address or a host name, without a port (--start_port P sets the "
                "ports)",
                code="ips_invalid",
                where=f"--ips: {name}",
            )
        address = network.resolve(name)
        if address is None:
            raise NotYetKnown(
                f"the name {name} is not known on this machine",
                code="host_name_unknown",
                where="--ips",
                fix="give its IPv4 address, or add it to /etc/hosts on every host",
            )
        addresses.append(address)
    for place, address in enumerate(addresses):
        same = [names[other] for other in range(place) if addresses[other] == address]
        if same:
            what = f"{names[place]} and {same[0]} are both {address}"
            fix = "each host stands there once (processes per host: --nproc_per_node)"
            if names[place] == same[0]:
                raise LaunchError(what, code="ips_repeated", where="--ips", fix=fix)
            # One of two names may be that of a host which has lost this address.
            raise NotYetKnown(what, code="ips_repeated", where="--ips", fix=fix)
    _refuse_loopback_among_hosts(names, addresses)
    return addresses


def _refuse_loopback_among_hosts(names: Sequence[str], addresses: Sequence[str]) -> None:
    if len(addresses) == 1:
        return
    loopback = [address.startswith("127.") for address in addresses]
    for name, address, loops in zip(names, addresses, loopback):
        if loops and (not all(loopback) or address == "127.0.0.1"):
            shown = name if name == address else f"{name} (here {address})"
            raise LaunchError(
                f"{shown} means every machine to itself, so the others cannot reach it",
                code="ips_loopback",
                where="--ips",
                fix="give the address that they see (ip -br addr shows it)",
            )


def own_address(addresses: Sequence[str], host: str | None, network: Network) -> str:
    """Which of the hosts this machine is.

    Args:
        addresses: from `resolve_hosts`.
        host: the value of --host, or None to find out.
    Raises: LaunchError: none of them, or several.
    """
    listed = ", ".join(addresses)
    if host is not None:
        address = network.resolve(host)
        if address is None or address not in addresses:
            raise NotYetKnown(f"--host {host} is not among --ips {listed}", code="host_not_in_ips")
        return address
    local = [address for address in addresses if network.is_local(address)]
    if len(local) == 1:
        return local[0]
    mine = ", ".join(sorted(set(network.interfaces().values()))) or "none"
    if local:
        raise LaunchError(
            f"{', '.join(local)} are all this machine's",
            code="ips_ambiguous",
            where="--ips",
            fix=f"say which one this launch is: --host {local[0]}",
        )
    raise LaunchError(
        f"none of --ips {listed} is this machine (its addresses: {mine})",
        code="ips_without_this_host",
        fix="start fleetrun on each of the hosts, or correct --ips",
    )


def once_known(
    look: Callable[[], T],
    ips: str,
    network: Network,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int],
) -> T:
    """What `look` returns, which is called until names of --ips mean the hosts of the run.

    A pod's name is known once the pod runs, and for some seconds it still is that of the one before
    it.  Addresses are not waited for.

    Args:
        look: raises NotYetKnown for what may pass.
        seconds: how long to wait.
        received: signals so far; with one the waiting ends.
    Raises: LaunchError: not in time, or it is wrong in a way that does not pass.  Stopped.
    """
    begin = time.monotonic()
    reported: float | None = None
    while not received:
        try:
            return look()
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
    """Makes gloo and NCCL use the interface that holds the address.

    By itself gloo connects to whatever the host's name resolves to, often 127.0.0.1.  Empty for an
    address that is not an interface's first.
    """
    for name, held in network.interfaces().items():
        if held == address:
            # `=` makes NCCL compare the whole name: eth1 alone would match eth10 as well.
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def check_interfaces(environment: Mapping[str, str], address: str | None, network: Network) -> None:
    """Refuses interfaces that the user chose and that cannot work, before gloo or NCCL wait there.

    gloo takes one name.  NCCL takes a list of beginnings of names, of whole names after `=`, of
    those to leave out after `^`; it may well use another network than gloo.

    Args:
        address: of this host in the run; None where any will do.
    Raises: LaunchError: no such interface, or gloo's holds another address.
    """
    names, held = network.interface_names(), network.interfaces()
    holder = next((name for name in held if held[name] == address), None)
    shown = [f"{name} ({held.get(name, 'without IPv4')})" for name in names]
    here = f"this machine has {', '.join(shown)}"
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    instead = f"; {address} is on {holder}: use that or unset it" if holder else "; correct it"
    if gloo and gloo not in held:
        problem = "has no IPv4 address" if gloo in names else "is no interface of this machine"
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME={gloo} {problem}: {here}{instead}", code="interface_wrong"
        )
    if gloo and holder and gloo != holder:
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME={gloo} holds {held[gloo]}, but this host of the run is {address}, "
            f"which is on {holder}: unset the variable, or give --ips the addresses of that "
            "network",
            code="interface_wrong",
        )
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    if wanted and not any(nccl_takes(wanted, name) for name in names):
        raise LaunchError(
            f"NCCL_SOCKET_IFNAME={wanted} fits no interface of this machine: {here}{instead}",
            code="interface_wrong",
        )


def nccl_takes(wanted: str, name: str) -> bool:
    """Whether NCCL's selection of interfaces holds one; as described for NCCL_SOCKET_IFNAME."""
    without = wanted.startswith("^")
    whole = wanted.removeprefix("^").startswith("=")
    words = [word for word in wanted.lstrip("^=").split(",") if word]
    return without != any(name == word if whole else name.startswith(word) for word in words)


def choose_port(
    wanted: int | None,
    count: int,
    hosts: int,
    first: bool,
    network: Network,
    own: str = "",
    metrics_port: int | None = None,
) -> int:
    """The first port of this run.

    One host takes any `count` free ones in a row, so that two runs on a machine do not collide.
    Several hosts must agree without talking, so they take the same fixed ones: their fleetruns meet
    on the first, the ranks use the `count` after it.

    Args:
        wanted: the port asked for, or None.
        first: whether this host is the one with rank 0: it alone has to be reached there.
        own: this host's address.
        metrics_port: not for the ranks: who listens there may only be about to open it.
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
    ranks = _ranks_port(start, hosts)
    if ranks + count - 1 > 65535:
        raise LaunchError(
            f"{count} processes need ports up to 65535",
            code="port_too_high",
            where=f"--start_port {start}",
        )
    _refuse_metrics_port(metrics_port, range(start, ranks + count))
    taken = []
    if first:
        taken = [port for port in range(ranks, ranks + count) if not network.is_free(port)]
        if ranks != start and not network.is_free(start, own if network.is_local(own) else ""):
            taken.insert(0, start)
    if taken:
        raise port_in_use(taken[0], hosts)
    return start


def _refuse_metrics_port(port: int | None, ports: range) -> None:
    """Refuses a --metrics_port on which the run itself meets: who came second would fail.

    All hosts decide alike, so that none waits for one that was refused.

    Raises: LaunchError.
    """
    if port in ports:
        own = f"port {port}" if len(ports) == 1 else f"ports {ports[0]}-{ports[-1]}"
        raise LaunchError(
            f"the run itself needs {own}",
            code="metrics_port_taken",
            where=f"--metrics_port {port}",
            fix="choose another",
        )


def _ranks_port(start: int, hosts: int) -> int:
    """The first port of the ranks: with several hosts the one before it is the fleetruns' own."""
    return start + (hosts > 1)


def port_in_use(port: int, hosts: int) -> LaunchError:
    """The error to raise."""
    others = " (the same on every host)" if hosts > 1 else ""
    who = port_holder(port)
    by = f"by {who}" if who else "by another run or one that did not end"
    if _claims(port):
        by = f"by another running job{f', {who}' if who else ''}"
    hint = "" if who else "; `ss -ltnp` shows who has it"
    end = ", or end that process" if who else ""
    return LaunchError(
        f"port {port} is in use on this machine, {by}",
        code="port_in_use",
        fix=f"choose another with --start_port P or FLAGS_START_PORT=P{others}{end}{hint}",
    )


_CLAIM = "ppdist-port-{}"


@contextmanager
def claimed(ports: Iterable[int], hosts: int) -> Iterator[None]:
    """Inside, no other job of this machine gets these ports, though nobody listens there yet.

    Rank 0 opens its port seconds after the plan is made; of two jobs that start together the second
    would die in Paddle.  A name of the kernel's marks a port, in the same network namespace as the
    port, for all users; it ends with this process, however that ends.

    Args: hosts: of the run, for the message.
    Raises: LaunchError: another job was faster.
    """
    with contextlib.ExitStack() as held:
        for port in ports if sys.platform == "linux" else ():
            mark = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                mark.bind("\0" + _CLAIM.format(port))
            except OSError as error:
                raise port_in_use(port, hosts) from error
        yield


def _claims(port: int) -> set[str]:
    """Inodes of the marks of a job that has the port, or is about to open it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
        words = [line.split() for line in lines if line.endswith("@" + _CLAIM.format(port))]
        return {each[6] for each in words}
    return set()


def port_holder(port: int) -> str:
    """`process 123 (python train.py)`; "" where that cannot be found out, as for other users'."""
    inodes = {f"socket:[{inode}]" for inode in _inodes(port)}
    for place in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(link) in inodes for link in (place / "fd").iterdir()):
                return f"process {place.name} ({_command(place)})"
    return ""


def _inodes(port: int) -> set[str]:
    """Of the sockets that listen on it, or say that a job is about to."""
    found = _claims(port)
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found


def _command(place: Path) -> str:
    text = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= _COMMAND_LENGTH else f"{shown[:_COMMAND_LENGTH]}..."


@dataclass(frozen=True)
class Machine:
    """What the plan depends on besides the command; tests put a made-up one in its place."""

    cards: Sequence[Card]
    build: str  # of Paddle, see `paddle_build`
    cores: int  # that this process may use
    network: Network = field(default_factory=Network)


def this_machine() -> Machine:
    """The machine as it is; takes as long as nvidia-smi, where there is one."""
    return Machine(machine_cards(), paddle_build(), len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class LaunchPlan:
    """How the processes of this host are started."""

    device: str  # cpu, gpu or another kind of card
    processes: int  # on this host
    environment: dict[str, str]  # of all of them
    ranks: tuple[dict[str, str], ...]  # what each gets beside; () where Paddle's launcher does it
    paddle_options: dict[str, str]  # of that, but its --log_dir; else {}
    hosts: tuple[str, ...]  # all, rank 0's first; empty where --master brings them together
    host: str  # which of them this is; "" where --master has to find out
    rendezvous_port: int | None  # of the first host, where the others call; None: no others
    description: str  # one line for the user
    gpus: tuple[str, ...] = ()  # by physical id, in the order of local ranks
    ports: tuple[int, ...] = ()  # that rank 0's host opens, of those fleetrun knows


def make_plan(options: Options, environment: Mapping[str, str], machine: Machine) -> LaunchPlan:
    """Decides everything and starts nothing.

    Args:
        environment: of fleetrun itself.
    Raises: LaunchError: the command does not fit this machine.
    """
    _check_paddle_and_script(options, machine)
    variables = _clean(environment)
    labels, note = cards_of_run(options, environment, machine)
    processes = len(labels) or options.processes or 1
    name, visible = _visible(options, environment, machine)
    if name in variables and visible is not None:
        variables[name] = ",".join(visible if labels else ())  # some readers keep its spaces
    if labels:
        device = options.kind
        cards = [_card_variables(device, label, visible) for label in labels]
        what = f"card{'s' * (processes > 1)}" if device == "gpu" else device
        what += f" {','.join(labels)}"
    else:
        device, cards = "cpu", [{"PADDLE_DISTRI_BACKEND": "gloo"}] * processes
        threads = variables.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores // processes)))
        what = f"CPU (gloo), OMP_NUM_THREADS={threads} each"
    hosts: list[str] = []
    port: int | None = None
    ranks_port, where = options.start_port, ""
    if options.master is not None:
        own = _with_master(options, options.master, variables, machine.network)
        place = {"--master": options.master}
    else:
        hosts, own = _with_hosts(options, variables, machine.network)
        port = choose_port(
            options.start_port, processes, len(hosts), own == hosts[0], machine.network, own,
            options.metrics_port,
        )  # fmt: skip
        ranks_port = _ranks_port(port, len(hosts))
        place = {"--ips": ",".join(hosts)}
        where = f"host {hosts.index(own) + 1} of {len(hosts)}, " if hosts[1:] else ""
    if options.needs_paddle:
        place |= {"--devices": ",".join(labels)} if labels else {"--nproc_per_node": f"{processes}"}
        place |= {"--host": own} if own else {}
        place |= {"--start_port": str(ranks_port)} if ranks_port else {}
        place |= {f"--{key}": value for key, value in options.passed.items()}
        if not labels:
            variables[CPU_VARIABLE] = "1"
            if "CUDA_VISIBLE_DEVICES" in variables:
                # Paddle's takes even an empty list for one of one card; the worker hides it.
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(processes)))
        ranks: tuple[dict[str, str], ...] = ()
    else:
        ranks, place = rank_variables(hosts, own, ranks_port or 0, cards), {}
    plural = "process" if processes == 1 else "processes"
    ports: tuple[int, ...] = ()
    if port is not None and own == hosts[0]:
        ports = tuple(sorted({port, _ranks_port(port, len(hosts))}))
    return LaunchPlan(
        device=device,
        processes=processes,
        environment=variables,
        ranks=ranks,
        paddle_options=place,
        hosts=tuple(hosts),
        host=own,
        rendezvous_port=port if len(hosts) > 1 else None,
        description="; ".join(filter(None, (f"{where}{processes} {plural} on {what}", note))),
        gpus=tuple(labels) if device == "gpu" else (),
        ports=ports,
    )


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """What the ranks get of fleetrun's own environment."""
    variables = {name: value for name, value in environment.items() if name not in OPTION_VARIABLES}
    variables[LAUNCHER_VARIABLE] = "fleetrun"
    for name in (*_OWN_VARIABLES, TOKEN_VARIABLE):
        variables.pop(name, None)
    variables.setdefault("GLOG_minloglevel", "1")  # not every connection that Paddle opens
    # As Paddle's launcher does: by POD_NAME its auto-parallel knows that ranks were launched, and
    # a proxy is said to disturb NCCL.
    variables.setdefault("POD_NAME", socket.gethostname())
    for name in ("http_proxy", "https_proxy"):
        if name in variables:
            variables[f"{name}_original"] = variables.pop(name)
    return variables


def rank_variables(
    hosts: Sequence[str], own: str, port: int, cards: Sequence[Mapping[str, str]]
) -> tuple[dict[str, str], ...]:
    """What Paddle's launcher gives to each process of a host, by which Paddle knows its rank.

    Args:
        own: which of the hosts it is.
        port: of the first rank of each host.
        cards: variables of the device of each process.
    Source: launch/controllers/collective.py of Paddle 3.3.1; tests compare it with what that gives.
    """
    count = len(cards)
    endpoints = [f"{host}:{port + local}" for host in hosts for local in range(count)]
    first = hosts.index(own) * count
    found = []
    for local, card in enumerate(cards):
        rank, world = str(first + local), str(len(endpoints))
        found.append(
            {
                "PADDLE_MASTER": endpoints[0],
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[first + local],
                "PADDLE_TRAINER_ID": rank,
                "PADDLE_GLOBAL_RANK": rank,
                "PADDLE_TRAINERS_NUM": world,
                "PADDLE_GLOBAL_SIZE": world,
                "PADDLE_LOCAL_RANK": str(local),
                "PADDLE_RANK_IN_NODE": str(local),
                "PADDLE_LOCAL_SIZE": str(count),
                "PADDLE_NNODES": str(len(hosts)),
                "PADDLE_AUTO_CLUSTER": "0",
                **card,
            }
        )
    return tuple(found)


def _card_variables(kind: str, label: str, visible: Sequence[str] | None) -> dict[str, str]:
    """By which Paddle finds the card of a rank: its place among those that are visible."""
    index = label if visible is None else str(visible.index(label))
    selected = {f"FLAGS_selected_{kind}s": index}
    if kind in ("gpu", "xpu"):  # which Paddle is built for; others come with a plug-in
        return selected
    return selected | {"PADDLE_DISTRI_BACKEND": "xccl", KIND_VARIABLE: kind}


def _check_paddle_and_script(options: Options, machine: Machine) -> None:
    if machine.build == "none":
        raise LaunchError(
            "PaddlePaddle is not installed in this Python: pip install 'ppdist[cpu]', or on a GPU "
            "machine the paddlepaddle-gpu build for your CUDA (see README.md)",
            code="paddle_missing",
        )
    script = options.script
    if script.isdigit():
        raise LaunchError(
            f"{script!r} stands where the script belongs",
            code="script_missing",
            fix="write lists with commas, e.g. --selected_gpus 0,1",
        )
    found = Path(script).is_file() if script.endswith(".py") else shutil.which(script) is not None
    if not found:
        raise LaunchError(
            f"found no script {script!r} (looked in {Path.cwd()})",
            code="script_not_found",
            fix=_own_command(script),
        )
    if options.max_restart and options.master:
        raise LaunchError(
            "--max_restart does not work with --master: hosts that restart by themselves would "
            "meet ranks of the failed run",
            code="options_conflict",
            fix="name the hosts with --ips",
        )


_OWN = {"infer": "predict"} | {name: name for name in ("train", "eval", "predict", "export")}


def _own_command(script: str) -> str:
    """What to write for `tools/train.py` outside a clone, or `train` alone; "": it is neither."""
    path = Path(script)
    command = _OWN.get(path.stem)
    if command is None or (path.suffix and path.parent.name != "tools"):
        return ""
    return f"write `fleetrun ... ppdist {command} ...` (tools/ exists only in a clone)"


def cards_of_run(
    options: Options, environment: Mapping[str, str], machine: Machine
) -> tuple[list[str], str]:
    """Cards to use, in the order of local ranks, [] for a run on CPU; a note about them, or ""."""
    wanted = None if options.cards is None else expand_ids(options.cards)
    name, visible = _visible(options, environment, machine)
    if visible is None:
        if wanted is None and options.processes is None:
            raise LaunchError(
                f"how many cards of kind {options.kind} this machine has is not known here",
                code="no_cards",
                where=f"{KIND_VARIABLE}={options.kind}",
                fix="name them, as in --devices 0-7, or say how many: --nproc_per_node N",
            )
        visible = wanted or [str(index) for index in range(options.processes or 0)]
    variable, noun = environment.get(name), "GPU" if options.kind == "gpu" else options.kind
    if wanted is not None and not visible:
        found = f"this machine has no visible {noun}"
        if machine.cards or options.kind != "gpu":
            found = f"{name}={variable!r} hides all {noun}s of this machine"
        raise LaunchError(
            f"cards {','.join(wanted)} were asked for, but {found}; to train on its CPU, type: "
            f"{_instead(options, len(wanted), machine)}",
            code="no_cards",
        )
    if visible and machine.build == "cpu" and options.kind == "gpu":
        problem = (
            f"this machine has {len(visible)} visible GPU{'s' * (len(visible) > 1)}, but the "
            f"installed paddlepaddle is the CPU build"
        )
        if wanted is not None:
            raise LaunchError(
                problem,
                code="paddle_without_cards",
                fix=(
                    "install the paddlepaddle-gpu for your CUDA (see README.md), or train on CPU: "
                    f"{_instead(options, len(wanted), machine)}"
                ),
            )
        return [], f"note: {problem}, so no card is used"
    if wanted is not None:
        _refuse_absent(wanted, visible, name, variable)
        if options.processes not in (None, len(wanted)):
            raise LaunchError(
                f"{len(wanted)} cards and --nproc_per_node {options.processes} contradict each "
                "other",
                code="options_conflict",
                fix="each card gets one process: leave one of the two out",
            )
        return wanted, ""
    if options.processes is not None and options.processes > len(visible) > 0:
        raise LaunchError(
            f"this machine has {len(visible)} visible {noun}s and each process needs its own",
            code="cards_too_few",
            where=f"--nproc_per_node {options.processes}",
            fix=f"for a run on CPU: {name}= fleetrun ...",
        )
    return visible[: options.processes], ""


def _visible(
    options: Options, environment: Mapping[str, str], machine: Machine
) -> tuple[str, list[str] | None]:
    """The variable that hides cards, and the labels of those that a process would see, in order.

    None: the variable is not set, and only Paddle's plug-in could say.
    """
    if options.kind == "gpu":
        name = "CUDA_VISIBLE_DEVICES"
        return name, visible_labels(machine.cards, environment.get(name))
    # As Paddle's launcher calls it, launch/context/device.py.
    name = f"{options.kind.upper()}_VISIBLE_DEVICES"
    if options.kind == "xpu" and "XPULINK_VISIBLE_DEVICES" in environment:
        name = "XPULINK_VISIBLE_DEVICES"
    variable = environment.get(name, "all").strip()
    return name, None if variable == "all" else variable.replace(",", " ").split()


def _refuse_absent(
    wanted: Sequence[str], visible: Sequence[str], name: str, variable: str | None
) -> None:
    """Raises: LaunchError: a card that was asked for is not visible."""
    absent = ", ".join(label for label in wanted if label not in visible)
    if not absent:
        return
    if variable is None:
        raise LaunchError(
            f"there is no card {absent}: this machine has {_ids(visible)}",
            code="card_missing",
            fix="choose among these",
        )
    shown = "those nvidia-smi shows, here " if name == "CUDA_VISIBLE_DEVICES" else ""
    raise LaunchError(
        f"card {absent} is hidden by {name}={variable}: the ids are {shown}{_ids(visible)}",
        code="card_hidden",
        fix=f"choose among these, or unset {name}",
    )


def _instead(options: Options, count: int, machine: Machine) -> str:
    """The same command for CPU processes."""
    kept = ["--ips", options.ips] if options.ips else []
    command = ["fleetrun", *kept, "--nproc_per_node", str(count), options.shown_script]
    text = shlex.join([*command, *options.script_arguments])
    if count > machine.cores:
        text += f"   (this machine has {machine.cores} CPU cores: fewer processes may be faster)"
    return text


def _with_hosts(
    options: Options, variables: dict[str, str], network: Network
) -> tuple[list[str], str]:
    """The hosts and which of them this is; sets in `variables` how gloo and NCCL find them."""
    if options.ips is None:
        check_interfaces(variables, None, network)
        # The name of a lone host need not resolve.  NCCL finds its way on one host by itself.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return ["127.0.0.1"], "127.0.0.1"
    hosts = resolve_hosts(options.ips, network)
    own = own_address(hosts, options.host, network)
    _choose_interfaces(own, variables, network)
    return hosts, own


def _with_master(options: Options, master: str, variables: dict[str, str], network: Network) -> str:
    """As `_with_hosts`, for Paddle's own rendezvous: this host, "" where that is not known."""
    if options.ips is not None:
        raise LaunchError(
            "--master and --ips are two ways to bring hosts together",
            code="options_conflict",
            fix="give one",
        )
    name = master.rpartition("://")[2].partition(":")[0]
    address = network.resolve(name)
    if ":" not in master or address is None:
        raise LaunchError(
            "expected IP:PORT of a known host", code="option_invalid", where=f"--master {master}"
        )
    port = master.rpartition(":")[2]
    if port.isascii() and port.isdigit():
        _refuse_metrics_port(options.metrics_port, range(int(port), int(port) + 1))
    own = options.host or (address if network.is_local(address) else network.towards(address))
    if own is not None:
        _choose_interfaces(own, variables, network)
    return own or ""


def _choose_interfaces(own: str, variables: dict[str, str], network: Network) -> None:
    check_interfaces(variables, own, network)
    for name, value in socket_variables(own, network).items():
        variables.setdefault(name, value)


def metrics_endpoint(options: Options, machine: Machine) -> tuple[str, int] | None:
    """Address and port of --metrics_port; None without it.

    Raises: LaunchError: as `make_plan`, where the address is to be that of this host in --ips.
    """
    if options.metrics_port is None:
        return None
    address = options.metrics_address
    if not address and options.ips is not None:
        hosts = resolve_hosts(options.ips, machine.network)
        address = own_address(hosts, options.host, machine.network)
    return address or "127.0.0.1", options.metrics_port
