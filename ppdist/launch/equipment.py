"""Driver, network, clock and limits of a host: what hosts of one run need in order, and alike.

Everything is read from /proc and /sys, so it needs neither Paddle nor root.  The rows about cards
and RDMA are written from the documentation of Linux, NVIDIA and NCCL: neither was within reach, so
tests make up those files.
"""

import ctypes
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppdist.errors import LaunchError
from ppdist.launch.doctor import OK, WARN, Finding
from ppdist.launch.network import (
    Network,
    nccl_takes,
    own_address,
    resolve_hosts,
    socket_variables,
)
from ppdist.launch.plan import Machine

_ROOT = Path("/")
# First driver branch that runs programs of a CUDA major version, whatever its minor version:
# docs.nvidia.com/deploy/cuda-compatibility, "Minor Version Compatibility", table 1.
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
_CAP_IPC_LOCK = 14  # linux/capability.h: locks memory beyond the limit
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


@dataclass(frozen=True)
class RdmaPort:
    """One port of a device that writes into another host's memory without its processor."""

    name: str  # mlx5_0:1
    kind: str  # InfiniBand, RoCE or EFA
    state: str  # ACTIVE where it can be used
    rate: str  # "400 Gb/sec (4X NDR)"


def check_equipment(
    machine: Machine,
    ips: str | None,
    host: str | None,
    environment: Mapping[str, str],
    root: Path = _ROOT,
) -> list[Finding]:
    """The driver where there are cards; with several hosts also interface, RDMA and clock.

    Args:
        ips, host: as for fleetrun.
        root: of the files to read; tests give a made-up one.
    """
    findings = [check_driver(driver_version(root), cuda_of_paddle())] if machine.cards else []
    if ips is None:
        return findings
    interface = interface_of(ips, host, environment, machine.network)
    if interface is not None:
        found = ", ".join(f"{name} {value}" for name, value in link_facts(interface, root).items())
        findings.append(Finding(OK, "link", f"{interface}: {found or 'nothing known'}"))
    findings.append(check_clock(clock_state()))
    if machine.cards:  # gloo talks over TCP
        findings.append(check_rdma(rdma_ports(root), environment, root))
    return findings


def facts(machine: Machine, environment: Mapping[str, str], root: Path = _ROOT) -> dict[str, str]:
    """What hosts of a run are compared by, as texts; what one lacks is not in it.

    Args: environment: of a rank, to which fleetrun has told its interface.
    """
    models = sorted(card.name for card in machine.cards)
    ports = [port for port in rdma_ports(root) if port.state == "ACTIVE"]
    found = {
        "cards": _counted(models),
        "driver": driver_version(root) if models else "",
        "CUDA of Paddle": cuda_of_paddle(),
        "cores": str(machine.cores),
        "RDMA": _counted([f"{port.kind} {port.rate}" for port in ports]),
        **link_facts(environment.get("GLOO_SOCKET_IFNAME", ""), root),
    }
    return {name: value for name, value in found.items() if value}


def interface_of(
    ips: str, host: str | None, environment: Mapping[str, str], network: Network
) -> str | None:
    """The interface that a run over these hosts uses here; None where that is not known."""
    try:
        own = own_address(resolve_hosts(ips, network), host, network)
    except LaunchError:  # check_network has said it
        return None
    chosen = {**socket_variables(own, network), **environment}
    return chosen.get("GLOO_SOCKET_IFNAME")


def driver_version(root: Path = _ROOT) -> str:
    """Of NVIDIA's kernel module, such as 535.129.03; "" where there is none."""
    text = _text(root, "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else ""


def cuda_of_paddle() -> str:
    """The CUDA version that the installed Paddle was built for, "" for none; imports nothing."""
    found = importlib.util.find_spec("paddle")
    for folder in (found and found.submodule_search_locations) or ():
        text = _text(Path(folder), "version/__init__.py")
        version = re.search(r"^cuda_version\s*=\s*'(\d[\d.]*)'", text, re.MULTILINE)
        if version:
            return version[1]
    return ""


def check_driver(driver: str, cuda: str) -> Finding:
    """Whether the driver runs what Paddle was built for."""
    if not driver:
        return Finding(OK, "driver", "of an unknown version")
    needed = _DRIVER_OF_CUDA.get(int(cuda.split(".")[0])) if cuda else None
    if needed is None or int(driver.split(".")[0]) >= needed:
        return Finding(OK, "driver", driver)
    remedy = (
        f"install driver {needed} or newer on this host, or a Paddle for an older CUDA; data "
        f"centre cards may have CUDA's forward compatibility (cuda-compat) in place of it"
    )
    found = f"{driver}, but Paddle is built for CUDA {cuda}, which needs {needed} or newer"
    return Finding(WARN, "driver", found, remedy)  # whether it works: `paddle` computes on cards


def link_facts(interface: str, root: Path = _ROOT) -> dict[str, str]:
    """Largest packet and speed of an interface, as far as Linux knows them."""
    if not interface or "/" in interface:
        return {}
    mtu = _text(root, f"sys/class/net/{interface}/mtu")
    speed = _text(root, f"sys/class/net/{interface}/speed")  # Mb/s; -1 or no answer in most VMs
    found = {"MTU": mtu} if mtu else {}
    return found | ({"speed": f"{int(speed) / 1000:g} Gb/s"} if speed.isdigit() else {})


def rdma_ports(root: Path = _ROOT) -> list[RdmaPort]:
    """All ports, active or not."""
    found = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        device = folder.parents[1]
        layer = _text(folder, "link_layer")
        kind = {"Ethernet": "RoCE"}.get(layer, layer or "unknown")
        if (device / "device/driver").resolve().name == "efa":
            kind = "EFA"
        state = _text(folder, "state").rpartition(": ")[2]  # "4: ACTIVE"
        found.append(RdmaPort(f"{device.name}:{folder.name}", kind, state, _text(folder, "rate")))
    return found


def check_rdma(
    ports: Sequence[RdmaPort], environment: Mapping[str, str], root: Path = _ROOT
) -> Finding:
    """Whether NCCL can use RDMA; without a device it talks over TCP, which is no finding."""
    if not ports:
        return Finding(OK, "RDMA", "no device, so NCCL talks over TCP")
    active = [port for port in ports if port.state == "ACTIVE"]
    found = _counted([f"{port.kind} {port.rate}" for port in active]) or "no port is active"
    troubles = [] if active else [("", "look at the cable and, for InfiniBand, the subnet manager")]
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        troubles.append(("switched off by NCCL_IB_DISABLE", "unset it, unless that is meant"))
    wanted = environment.get("NCCL_IB_HCA", "")
    if wanted and not any(_is_chosen(wanted, port) for port in active):
        names = ", ".join(port.name for port in active) or "none"
        troubles.append((f"NCCL_IB_HCA={wanted} fits no active port ({names})", "correct it"))
    if not list(root.glob("dev/infiniband/uverbs*")):
        troubles.append(("/dev/infiniband is empty here", "docker run --device=/dev/infiniband"))
    limit = memory_lock_limit(root)
    if limit:
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1; Slurm: limits of slurmd)"
        troubles.append((f"only {limit} of memory can be locked", remedy))
    said = [text for text, _ in troubles if text]
    remedies = "; ".join(remedy for _, remedy in troubles)
    return Finding(WARN if troubles else OK, "RDMA", "; ".join([found, *said]), remedies)


def _is_chosen(wanted: str, port: RdmaPort) -> bool:
    """Whether NCCL_IB_HCA takes the port: it lists devices or device:port, to leave out after ^."""
    takes = [nccl_takes(wanted, name) for name in (port.name, port.name.partition(":")[0])]
    return all(takes) if wanted.startswith("^") else any(takes)


def memory_lock_limit(root: Path = _ROOT) -> str:
    """How much memory this process may lock, as a text; "" for any amount."""
    limits = re.search(r"^Max locked memory\s+(\S+)", _text(root, "proc/self/limits"), re.MULTILINE)
    capable = re.search(r"^CapEff:\s*(\w+)", _text(root, "proc/self/status"), re.MULTILINE)
    if limits is None or limits[1] == "unlimited":
        return ""
    if capable and int(capable[1], 16) >> _CAP_IPC_LOCK & 1:
        return ""
    return f"{int(limits[1]) / 1024:g} KiB"


def clock_state() -> int | None:
    """What adjtimex(2) says of this machine's clock; None where it may not be asked."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # zeros: only read
    except (OSError, AttributeError):
        return None
    return None if state < 0 else int(state)


def check_clock(state: int | None) -> Finding:
    """Whether something keeps the clock right; training itself measures time by other clocks."""
    if state is None:
        return Finding(OK, "clock", "Linux does not say whether it is kept right")
    if state == _TIME_ERROR:
        remedy = (
            "start chrony (its option rtcsync lets Linux know) or systemd-timesyncd on the host, "
            "if neither runs there: logs of hosts are read by time"
        )
        found = "Linux was not told that something keeps it right (adjtimex: TIME_ERROR)"
        return Finding(WARN, "clock", found, remedy)
    return Finding(OK, "clock", "kept right (adjtimex)")


def _counted(names: Sequence[str]) -> str:
    """`8 x this, 1 x that`"""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # absent, or a device that does not answer
        return ""
