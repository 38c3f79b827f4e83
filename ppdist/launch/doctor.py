"""Preflight check of one host: problems that would stop a run, and their remedies.

Driver and network are read from /proc and /sys, so it needs neither Paddle nor root.  What was
measured between ranks comes from ppdist/lab/verify/cluster.py; a slow rank is named in training.
"""

import importlib.util
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdist.common.child import output_of, python
from ppdist.common.errors import LaunchError, StorageError, UserError
from ppdist.common.machine import available_memory, existing_folder, free_disk, kernel_text
from ppdist.common.process import PADDLE_REMEDY, paddle_numbers, unknown_paddle
from ppdist.launch.cli import find_fleetrun
from ppdist.launch.options import refuse_stale_environment
from ppdist.launch.topology import LaunchPlan, Machine, installed_version

OK, WARN, FAIL = "OK", "WARN", "FAIL"
_PROTOBUF_7_FROM = (3, 3, 1)  # fleet.init of older Paddle reads a field that protobuf 7 dropped
_IMPORT_SECONDS = 300
_OTHER_NAME = "installed under another name"
_GIB = 1 << 30
_OPENCV = (
    *("opencv-python", "opencv-python-headless"),
    *("opencv-contrib-python", "opencv-contrib-python-headless"),
)  # each contains the module cv2

_ROOT = Path("/")

# Facts that hosts are compared by (see `collect_facts`), and the remedy where they differ.
_REMEDIES = {
    "cards": "every step waits for the slowest card, and the smallest memory sets the batch",
    "driver": "install the same on every host",
    "CUDA of Paddle": "install the same build of Paddle on every host",
    "cores": "the host with the fewest sets the pace of loading: give data.workers there its own",
    "MTU": "set it alike on all hosts: large packets may vanish, so that only large messages hang",
    "speed": "every step waits for the slowest link",
}

Measured = Mapping[str, Any]  # measurements between ranks, from lab/verify/cluster.py


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    level: str  # OK, WARN (it may work) or FAIL (it will not)
    subject: str
    observation: str
    remedy: str = ""

    @classmethod
    def warning_if(cls, remedy: str, subject: str, observation: str) -> "Finding":
        """Creates a WARN finding if there is a remedy, else an OK finding."""
        return cls(WARN if remedy else OK, subject, observation, remedy)

    def as_json(self) -> dict[str, str]:
        """Returns this line for doctor's --json, whose readers call the observation `found`."""
        return {
            "level": self.level,
            "subject": self.subject,
            "found": self.observation,
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        remedy = f"\n       -> {self.remedy}" if self.remedy else ""
        return f"{self.level:<4}  {self.subject}: {self.observation}{remedy}"


def attempt(subject: str, check: Callable[[], str]) -> Finding:
    """Runs a check; turns a user error or storage error into a FAIL finding."""
    try:
        return Finding(OK, subject, check())
    except (UserError, StorageError) as error:
        return Finding(FAIL, subject, str(error))


def check_host(
    plan: LaunchPlan | None, environment: Mapping[str, str], machine: Machine
) -> Iterator[Finding]:
    """Checks this host; starts and changes nothing.

    Args: plan: plan of the run; None if fleetrun would reject the command.
    """
    yield from check_software(machine.build, plan.gpus if plan else ())
    names = [card.name for card in machine.cards]
    card_counts = _count_cards(names) or "none: runs use CPU processes (--nproc_per_node N)"
    yield Finding(OK, "cards", card_counts)
    yield from check_resources(machine.cores, len(machine.cards))
    yield check_fleetrun()
    try:
        refuse_stale_environment(environment)
        yield Finding(OK, "environment", "nothing left over from another launch")
    except LaunchError as error:
        yield Finding(FAIL, "environment", str(error))
    name = socket.gethostname()
    address = machine.network.resolve(name)
    remedy = "" if address else "add it to /etc/hosts"
    yield Finding.warning_if(remedy, "host name", f"{name} is {address or 'not known here'}")
    if plan is not None:
        yield from check_plan(plan)


def check_plan(plan: LaunchPlan) -> Iterator[Finding]:
    """Reports what fleetrun would start here, its interface and its ports."""
    remedy = "to use the cards, install the paddlepaddle-gpu for them (README.md, On a GPU)"
    yield Finding.warning_if(remedy if plan.note else "", "run", plan.description)
    port = plan.rendezvous_port
    if port is None:
        yield Finding(OK, "ports", f"{plan.first_port} and up are free")
        return
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    chosen = [f"{name}={plan.environment[name]}" for name in names if plan.environment.get(name)]
    remedy = f"export {' and '.join(names)} with the interface's name"
    yield Finding.warning_if(
        remedy if len(chosen) < len(names) else "",
        "interface",
        "; ".join(chosen) or f"{plan.host} is no interface's first address",
    )
    reachability = f"this host must be able to connect to port {port} of {plan.hosts[0]}"
    if plan.host == plan.hosts[0]:
        reachability = (
            f"{port} and up are free; every other host must be able to connect to {port} here"
        )
    yield Finding(OK, "ports", reachability)


def check_software(build: str, cards: Sequence[str] = ()) -> list[Finding]:
    """Checks Python, Paddle (imported in a separate process) and the other packages."""
    findings = [Finding(OK, "python", f"{platform.python_version()} ({sys.executable})")]
    if build == "none":
        findings.append(Finding(FAIL, "paddle", "not installed", PADDLE_REMEDY))
    else:
        findings.append(_check_paddle(cards))
    for module, name in (
        ("numpy", "numpy"),
        ("cv2", "opencv-python-headless"),
        ("pycocotools", "pycocotools"),
        ("visualdl", "visualdl"),
    ):
        if importlib.util.find_spec(module) is None:
            findings.append(Finding(FAIL, module, "not installed", f"pip install {name}"))
        else:
            findings.append(Finding(OK, name, installed_version(name) or _OTHER_NAME))
    opencv = [name for name in _OPENCV if installed_version(name)]
    # The extra `track` installs a second one.
    if len(opencv) > 1:
        remedy = (
            f"pip uninstall {' '.join(opencv)}, then pip install --force-reinstall "
            "opencv-python-headless"
        )
        conflict = f"{', '.join(opencv)} are installed and share the files of cv2"
        findings.append(Finding(WARN, "cv2", conflict, remedy))
    return findings


def _check_paddle(cards: Sequence[str]) -> Finding:
    # Each card computes something: this finds a broken driver, or a card that the build has no code
    # for.
    code = (
        "import paddle; cuda = paddle.is_compiled_with_cuda()\n"
        "count = paddle.device.cuda.device_count() if cuda else 0\n"
        "for card in range(count):\n"
        "    paddle.set_device(f'gpu:{card}')\n"
        "    assert float(paddle.ones([2]).sum()) == 2, f'card {card} computes 1 + 1 wrong'\n"
        "print('ppdist', paddle.__version__, paddle.version.cuda() if cuda else 'CPU', count)"
    )
    variables = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {})}
    result = output_of(python(code), _IMPORT_SECONDS, variables)
    if result is None:
        return Finding(FAIL, "paddle", f"importing it takes over {_IMPORT_SECONDS} s")
    exit_code, output, errors = result
    answers = [line.split() for line in output.splitlines() if line.startswith("ppdist ")]
    if exit_code or not answers:
        last_line = (errors.strip().splitlines() or [f"exit code {exit_code}"])[-1]
        remedy = "reinstall it; where an error of CUDA is named, look at nvidia-smi"
        return Finding(FAIL, "paddle", f"cannot be used: {last_line}", remedy)
    _, version, cuda, count = answers[0]
    if cuda == "CPU":
        return judge_paddle(version, f"{version}, CPU build", installed_version("protobuf"))
    description = f"{version}, CUDA {cuda}, computes on {count} card{'s' * (count != '1')}"
    if count == "0":
        remedy = "nvidia-smi must work here; docker run --gpus all; see CUDA_VISIBLE_DEVICES"
        return Finding(WARN, "paddle", f"{version}, CUDA {cuda}, sees no card", remedy)
    return judge_paddle(version, description, installed_version("protobuf"))


def judge_paddle(version: str, description: str, protobuf: str) -> Finding:
    """Checks that ppdist supports this Paddle, and that Paddle supports the installed protobuf."""
    unknown, major = unknown_paddle(version), protobuf.split(".")[0]
    is_old = not unknown and paddle_numbers(version) < _PROTOBUF_7_FROM
    if is_old and major.isdigit() and int(major) >= 7:
        description += f"; runs of several processes fail in it with protobuf {protobuf}"
        return Finding(FAIL, "paddle", description, "pip install 'protobuf<7'")
    return Finding.warning_if(unknown, "paddle", description)


def check_resources(cores: int, cards: int) -> list[Finding]:
    """Checks the cores, the memory, the disk and, with several cards, the shared memory."""
    findings = [Finding(OK, "cores", f"{cores} usable of {os.cpu_count()}")]

    def check_room(subject: str, free: int, where: str, least_gib: int, remedy: str) -> None:
        shortage = remedy if free < least_gib * _GIB else ""
        findings.append(Finding.warning_if(shortage, subject, f"{free / _GIB:.1f} GiB {where}"))

    check_room(
        "memory", available_memory(), "available", 2, "close other programs; use fewer processes"
    )
    # NCCL uses /dev/shm; ppdist's own workers and all-reduce do not.
    if cards > 1:
        shared = Path("/dev/shm")
        free = free_disk(shared) if shared.is_dir() else 0
        check_room("/dev/shm", free, "free", 1, "docker run --shm-size=8g (or --ipc=host)")
    remedy = "checkpoints and logs need room: free some, or move"
    check_room("disk", free_disk("."), "free here", 5, remedy)
    return findings


def check_writable(folder: Path) -> str:
    """Checks that output_dir can be written; returns its file system and free space as text.

    Raises: LaunchError: output_dir cannot be written.
    """
    existing = existing_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"ppdist")
            os.fsync(file.fileno())
    except OSError as error:
        raise LaunchError(
            f"cannot write in {existing}: {error.strerror}",
            code="folder_unwritable",
            fix=(
                "the first host writes checkpoints there: correct its owner or its mount, or set "
                "output_dir"
            ),
        ) from error
    free = free_disk(existing) / _GIB
    return f"{folder} can be written ({file_system_of(existing)}, {free:.1f} GiB free)"


def file_system_of(place: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Names the kind of file system that holds a folder, such as ext4."""
    rows = [line.split() for line in kernel_text(mounts).splitlines()]
    inside = [row for row in rows if place.resolve().is_relative_to(row[1].replace("\\040", " "))]
    # Several mounts may share a path: the last one hides the earlier ones.
    inside.reverse()
    return max(inside, key=lambda row: len(row[1]))[2] if inside else "unknown file system"


def check_fleetrun(search_path: str | None = None) -> Finding:
    """Checks that the command `fleetrun` starts ppdist's fleetrun, from this Python."""
    owner, path = find_fleetrun(search_path)
    alternative = "type `ppdist launch` in its place (in a clone: python tools/launch.py)"
    reinstall = "pip install --force-reinstall --no-deps"
    remedy_here = (
        f"{alternative}, or bring ours back: `{reinstall} ppdist`, in a clone `{reinstall} -e .`"
    )
    if path is None:
        remedy = (
            f"activate the environment ppdist is in.  If Paddle or ppdist was removed, the one "
            f"script of that name went with it: {remedy_here}; Paddle's: `{reinstall} "
            "paddlepaddle` (or paddlepaddle-gpu)"
        )
        return Finding(WARN, "fleetrun", "not on PATH", remedy)
    if owner != "ppdist":
        whose = "Paddle's own script" if owner == "paddle" else "not ppdist's"
        return Finding(WARN, "fleetrun", f"{path} is {whose}", remedy_here)
    if path.parent.resolve() != Path(sys.executable).parent.resolve():
        here = Path(sys.executable).parent
        conflict = f"{path} belongs to another Python than {here}"
        return Finding(
            WARN, "fleetrun", conflict, f"{alternative}, or activate the environment you want"
        )
    return Finding(OK, "fleetrun", f"{path} is ppdist's")


def collect_facts(
    machine: Machine, environment: Mapping[str, str], root: Path = _ROOT
) -> dict[str, str]:
    """Collects the facts by which the hosts of a run are compared, as far as they can be read.

    Args: environment: environment of a rank, in which fleetrun has set the interface.
    """
    models = sorted(card.name for card in machine.cards)
    values = {
        "cards": _count_cards(models),
        "driver": driver_version(root) if models else "",
        "CUDA of Paddle": cuda_of_paddle(),
        "cores": str(machine.cores),
        **link_facts(environment.get("GLOO_SOCKET_IFNAME", ""), root),
    }
    return {name: value for name, value in values.items() if value}


def driver_version(root: Path = _ROOT) -> str:
    """Reads the version of NVIDIA's kernel module, such as 535.129.03; "" without one."""
    text = kernel_text(root / "proc/driver/nvidia/version")
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else ""


def cuda_of_paddle() -> str:
    """Reads the CUDA version of the installed Paddle, or ""; imports nothing."""
    spec = importlib.util.find_spec("paddle")
    for folder in (spec and spec.submodule_search_locations) or ():
        text = kernel_text(Path(folder) / "version/__init__.py")
        version = re.search(r"^cuda_version\s*=\s*'(\d[\d.]*)'", text, re.MULTILINE)
        if version:
            return version[1]
    return ""


def link_facts(interface: str, root: Path = _ROOT) -> dict[str, str]:
    """Reads the MTU and the speed of an interface, as far as the kernel reports them."""
    if not interface or "/" in interface:
        return {}
    device = root / "sys/class/net" / interface
    mtu = kernel_text(device / "mtu")
    speed = kernel_text(device / "speed")  # Mb/s; -1 or no answer in most VMs
    values = {"MTU": mtu} if mtu else {}
    return values | ({"speed": f"{int(speed) / 1000:g} Gb/s"} if speed.isdigit() else {})


def _count_cards(names: Sequence[str]) -> str:
    """Counts cards by name: `8 x this, 1 x that`."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def judge_speed(report: Measured) -> Iterator[Finding]:
    """Reports the time of an all-reduce, and the facts that differ between hosts."""
    latency, rate = report["latency_seconds"], report["bandwidth_bytes_per_second"]
    timing = f"{1e6 * report['sizes'][0]['seconds']:.0f} us for 1 KiB, bus bandwidth {_rate(rate)}"
    yield Finding(OK, "all-reduce", f"{timing} ({1e6 * latency:.0f} us a hop)")
    for line in report["differences"]:
        yield Finding(WARN, "hosts differ", line, _REMEDIES[line.partition(":")[0]])
    if len(set(report["hosts"])) > 1 and not report["differences"]:
        yield Finding(OK, "hosts alike", f"in {', '.join(_REMEDIES)}")


def format_table(report: Measured) -> Iterator[str]:
    """Yields the lines of the table of all-reduce times, for the terminal."""
    yield f"{report['world']} ranks, {report['device']}"
    yield f"{'all-reduce of':>14}  {'time':>10}  {'algorithm':>11}  {'bus':>11}"
    for row in report["sizes"]:
        rates = (_rate(row[f"{name}_bytes_per_second"]) for name in ("algorithm", "bus"))
        algorithm, bus = rates
        time = f"{1e3 * row['seconds']:.3f} ms"
        yield f"{_bytes(row['bytes']):>14}  {time:>10}  {algorithm:>11}  {bus:>11}"


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"
