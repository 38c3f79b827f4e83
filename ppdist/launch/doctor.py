"""Preflight of one host: what a run would stumble over, each with what to do about it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppdist.errors import LaunchError, UserError
from ppdist.launch.cards import visible_labels
from ppdist.launch.network import (
    Network,
    check_interfaces,
    choose_port,
    own_address,
    resolve_hosts,
    socket_variables,
)
from ppdist.launch.options import refuse_stale_environment
from ppdist.launch.plan import Machine
from ppdist.launch.stock import whose_fleetrun

OK, WARN, FAIL = "OK", "WARN", "FAIL"
_PADDLE_VERSIONS = ((3, 2, 2), (3, 4))  # from, to (excluded): what ppdist is tested with
_PROTOBUF_7_FROM = (3, 3, 1)  # fleet.init of older Paddle reads a field that protobuf 7 dropped
_IMPORT_SECONDS = 300
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str  # OK, WARN (it may work) or FAIL (it will not)
    subject: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n       -> {self.remedy}" if self.remedy else ""
        return f"{self.level:<4}  {self.subject}: {self.found}{remedy}"


def attempt(subject: str, check: Callable[[], str]) -> Finding:
    """Runs a check that says what it found; a UserError of it becomes a FAIL."""
    try:
        return Finding(OK, subject, check())
    except UserError as error:
        return Finding(FAIL, subject, str(error))


def check_host(
    ips: str | None,
    host: str | None,
    start_port: int | None,
    environment: Mapping[str, str],
    machine: Machine,
    processes: int | None = None,
    cards: Sequence[str] = (),
) -> list[Finding]:
    """Everything that can be known of this host without starting a run; none of it is changed.

    Args:
        ips, host, start_port, processes: as for fleetrun; processes: None for one a card.
        cards: those of the run, by physical id; none: all that are visible.
    """
    return [
        *check_software(machine.build, cards),
        check_cards(machine, environment.get("CUDA_VISIBLE_DEVICES")),
        *check_resources(machine.cores, len(machine.cards)),
        check_fleetrun(),
        attempt("environment", lambda: _check_environment(environment)),
        *check_network(ips, host, start_port, machine, processes, environment),
    ]


def _check_environment(environment: Mapping[str, str]) -> str:
    refuse_stale_environment(environment)
    return "nothing left over from another launch"


def check_software(build: str, cards: Sequence[str] = ()) -> list[Finding]:
    """Python, Paddle (imported in a process of its own) and numpy."""
    findings = [Finding(OK, "python", f"{platform.python_version()} ({sys.executable})")]
    if build == "none":
        remedy = "pip install 'ppdist[cpu]', or the paddlepaddle-gpu build for your CUDA"
        findings.append(Finding(FAIL, "paddle", "not installed", remedy))
    else:
        findings.append(_check_paddle(cards))
    for module, name in (
        ("numpy", "numpy"),
        ("cv2", "opencv-python-headless"),
        ("hotcoco", "hotcoco"),
        ("visualdl", "visualdl"),
    ):
        if importlib.util.find_spec(module) is None:
            findings.append(Finding(FAIL, module, "not installed", f"pip install {name}"))
        else:
            findings.append(Finding(OK, name, _version(name)))
    return findings


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed under another name"


def _check_paddle(cards: Sequence[str]) -> Finding:
    # Each card computes: that finds a driver in trouble, and a card the build has no code for.
    code = (
        "import paddle; cuda = paddle.is_compiled_with_cuda()\n"
        "count = paddle.device.cuda.device_count() if cuda else 0\n"
        "for card in range(count):\n"
        "    paddle.set_device(f'gpu:{card}')\n"
        "    assert float(paddle.ones([2]).sum()) == 2, f'card {card} computes 1 + 1 wrong'\n"
        "print('ppdist', paddle.__version__, paddle.version.cuda() if cuda else 'CPU', count)"
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {})},
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(FAIL, "paddle", f"importing it takes over {_IMPORT_SECONDS} s")
    answer = [line.split() for line in ended.stdout.splitlines() if line.startswith("ppdist ")]
    if ended.returncode or not answer:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        remedy = "reinstall it; where an error of CUDA is named, look at nvidia-smi"
        return Finding(FAIL, "paddle", f"cannot be used: {last}", remedy)
    _, version, cuda, count = answer[0]
    if cuda == "CPU":
        return judge_paddle(version, f"{version}, CPU build", _version("protobuf"))
    found = f"{version}, CUDA {cuda}, computes on {count} cards"
    if count == "0":
        remedy = "nvidia-smi must work here; docker run --gpus all; see CUDA_VISIBLE_DEVICES"
        return Finding(WARN, "paddle", f"{version}, CUDA {cuda}, sees no card", remedy)
    return judge_paddle(version, found, _version("protobuf"))


def judge_paddle(version: str, found: str, protobuf: str) -> Finding:
    """Whether ppdist knows this Paddle, and this Paddle the protobuf beside it."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not _PADDLE_VERSIONS[0] <= numbers < _PADDLE_VERSIONS[1]:
        return Finding(WARN, "paddle", found, "ppdist is tested with 3.2.2 to 3.3.x")
    major = protobuf.split(".")[0]
    if numbers < _PROTOBUF_7_FROM and major.isdigit() and int(major) >= 7:
        found += f"; runs of several processes fail in it with protobuf {protobuf}"
        return Finding(FAIL, "paddle", found, "pip install 'protobuf<7'")
    return Finding(OK, "paddle", found)


def check_cards(machine: Machine, variable: str | None) -> Finding:
    """The cards, those CUDA_VISIBLE_DEVICES leaves, and whether Paddle can use them."""
    try:
        visible = visible_labels(machine.cards, variable)
    except LaunchError as error:
        return Finding(FAIL, "cards", str(error))
    if not machine.cards:
        return Finding(OK, "cards", "none: runs use CPU processes (--nproc_per_node N)")
    names = ", ".join(sorted({card.name for card in machine.cards}))
    found = f"{len(machine.cards)} x {names}, visible: {','.join(visible) or 'none'}"
    if visible and machine.build == "cpu":
        remedy = "install the paddlepaddle-gpu build for your CUDA to use them"
        return Finding(WARN, "cards", f"{found}; Paddle is the CPU build", remedy)
    return Finding(OK, "cards", found)


def check_resources(cores: int, cards: int) -> list[Finding]:
    """Cores, memory, with several cards shared memory, and disk."""
    findings = [Finding(OK, "cores", f"{cores} usable of {os.cpu_count()}")]
    memory = available_memory()
    if memory is not None:
        remedy = "" if memory >= 2 * _GIB else "close other programs; use fewer processes"
        level = WARN if remedy else OK
        findings.append(Finding(level, "memory", f"{memory / _GIB:.1f} GiB available", remedy))
    if cards > 1:  # NCCL's; our own workers and sums need none of it
        shared = Path("/dev/shm")
        free = shutil.disk_usage(shared).free if shared.is_dir() else 0
        remedy = "" if free >= _GIB else "docker run --shm-size=8g (or --ipc=host)"
        level = WARN if remedy else OK
        findings.append(Finding(level, "/dev/shm", f"{free / _GIB:.1f} GiB free", remedy))
    free = shutil.disk_usage(".").free
    remedy = "" if free >= 5 * _GIB else "checkpoints and logs need room: free some, or move"
    level = WARN if remedy else OK
    findings.append(Finding(level, "disk", f"{free / _GIB:.1f} GiB free here", remedy))
    return findings


def check_writable(folder: Path) -> str:
    """Where a run will write: that it can, on which kind of file system, and how much is free.

    Raises: LaunchError: it cannot.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"ppdist")
            os.fsync(file.fileno())
    except OSError as error:
        raise LaunchError(
            f"cannot write in {place}: {error.strerror}",
            code="folder_unwritable",
            fix=(
                "the first host writes checkpoints there: correct its owner or its mount, or set "
                "output_dir"
            ),
        ) from error
    free = shutil.disk_usage(place).free / _GIB
    return f"{folder} can be written ({file_system_of(place)}, {free:.1f} GiB free)"


def file_system_of(place: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that holds the folder, such as ext4 or nfs4."""
    try:
        rows = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown file system"
    inside = [row for row in rows if place.resolve().is_relative_to(row[1].replace("\\040", " "))]
    inside.reverse()  # of several mounts on one path the last one is seen
    return max(inside, key=lambda row: len(row[1]))[2] if inside else "unknown file system"


def available_memory() -> int | None:
    """Bytes this process can still get: of the machine, or of its container if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
    if kib is None:
        return None
    available = kib * 1024
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    try:
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # not in a container, or without a limit ("max")
        return available


def check_fleetrun(search_path: str | None = None) -> Finding:
    """Whether typing `fleetrun` starts ours, from this Python."""
    owner, path = whose_fleetrun(search_path)
    remedy = "use python tools/launch.py in its place, or reinstall ppdist last"
    if path is None:
        remedy = "activate the environment ppdist is in, or use python tools/launch.py"
        return Finding(WARN, "fleetrun", "not on PATH", remedy)
    if owner != "ppdist":
        whose = "Paddle's own script" if owner == "paddle" else "not ppdist's"
        return Finding(WARN, "fleetrun", f"{path} is {whose}", remedy)
    if path.parent.resolve() != Path(sys.executable).parent.resolve():
        here = Path(sys.executable).parent
        return Finding(WARN, "fleetrun", f"{path} belongs to another Python than {here}", remedy)
    return Finding(OK, "fleetrun", f"{path} is ppdist's")


def check_network(
    ips: str | None,
    host: str | None,
    start_port: int | None,
    machine: Machine,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """This host among the hosts, its interface, its name and the ports."""
    network = machine.network
    count = processes or max(1, len(machine.cards))
    findings = [_check_host_name(machine)]
    if ips is None:
        ports = attempt(
            "ports", lambda: f"{choose_port(start_port, count, 1, True, network)} and up are free"
        )
        return [*findings, ports]
    try:
        hosts = resolve_hosts(ips, network)
        own = own_address(hosts, host, network)
    except LaunchError as error:
        return [*findings, Finding(FAIL, "hosts", str(error))]
    place = hosts.index(own)
    findings.append(Finding(OK, "hosts", f"this is {own}, host {place + 1} of {len(hosts)}"))
    findings.append(_check_interface(own, environment or {}, network))
    return [
        *findings,
        attempt("ports", lambda: _check_ports(hosts, own, start_port, count, network)),
    ]


def _check_interface(own: str, environment: Mapping[str, str], network: Network) -> Finding:
    """What gloo and NCCL will use: what the user chose, else what holds this host's address."""
    try:
        check_interfaces(environment, own, network)
    except LaunchError as error:
        return Finding(FAIL, "interface", str(error))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    chosen = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    variables = socket_variables(own, network)
    if variables:
        found = f"{own} is on {variables['GLOO_SOCKET_IFNAME']}"
        return Finding(OK, "interface", "; ".join([found, *chosen]))
    if len(chosen) == len(names):
        return Finding(OK, "interface", "; ".join(chosen))
    remedy = "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface's name"
    found = f"{own} is no interface's first address"
    return Finding(WARN, "interface", "; ".join([found, *chosen]), remedy)


def _check_ports(
    hosts: list[str], own: str, wanted: int | None, count: int, network: Network
) -> str:
    first = own == hosts[0]
    port = choose_port(wanted, count, len(hosts), first, network, own)
    if first:
        return f"{port} and up are free; every other host must be able to connect to {port} here"
    return f"this host must be able to connect to port {port} of {hosts[0]}"


def _check_host_name(machine: Machine) -> Finding:
    name = socket.gethostname()
    address = machine.network.resolve(name)
    if address is None:
        return Finding(WARN, "host name", f"{name} does not resolve", "add it to /etc/hosts")
    return Finding(OK, "host name", f"{name} is {address}")
