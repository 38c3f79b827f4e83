"""Topology of a run: the ranks of this host and their variables.

Decides everything from the command, the cards (cards.py) and the network (network.py) of this host,
and starts nothing.
"""

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppdist.common.errors import LaunchError
from ppdist.common.job import (
    EXIT_DIR_VARIABLE,
    JOB_DIR_VARIABLE,
    JOB_VARIABLE,
    MIN_HOSTS_VARIABLE,
    RESTART_VARIABLE,
    SKIP_STEP_VARIABLE,
    STARTED_VARIABLE,
)
from ppdist.common.process import PADDLE_REMEDY
from ppdist.launch.cards import Card, detect_cards, expand_ids, name_cards, visible_labels
from ppdist.launch.network import (
    Network,
    check_interfaces,
    choose_port,
    find_own_address,
    first_rank_port,
    refuse_metrics_port,
    resolve_hosts,
    socket_variables,
)
from ppdist.launch.options import KIND_VARIABLE, OPTION_VARIABLES, TOKEN_VARIABLES, Options
from ppdist.launch.worker import CPU_VARIABLE

LAUNCHER_VARIABLE = "PPDIST_LAUNCHER"  # tells a rank that ppdist's fleetrun started it
# fleetrun sets these for its ranks; inherited values belong to an enclosing run.
_OWN_VARIABLES = (
    EXIT_DIR_VARIABLE, JOB_DIR_VARIABLE, JOB_VARIABLE, MIN_HOSTS_VARIABLE, RESTART_VARIABLE,
    SKIP_STEP_VARIABLE, STARTED_VARIABLE,
)  # fmt: skip


def paddle_build() -> str:
    """Names the build of the installed Paddle: `gpu`, `cpu`, `other` or `none`."""
    if importlib.util.find_spec("paddle") is None:
        return "none"
    if installed_version("paddlepaddle-gpu"):
        return "gpu"
    # Otherwise Paddle was built by the user, or for another accelerator.
    return "cpu" if installed_version("paddlepaddle") else "other"


def installed_version(distribution: str) -> str:
    """Returns the version of an installed distribution, or ""."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Machine:
    """A machine as a plan sees it: its cards, Paddle, cores and network."""

    cards: Sequence[Card]
    build: str  # build of Paddle, see `paddle_build`
    cores: int  # number of cores that this process may use
    network: Network = field(default_factory=Network)


def this_machine() -> Machine:
    """Inspects the real machine; takes as long as nvidia-smi."""
    return Machine(detect_cards(), paddle_build(), len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch: how the processes of this host are started."""

    device: str  # cpu, gpu or another kind of card
    processes: int  # number of processes on this host
    environment: dict[str, str]  # environment of all processes
    devices: tuple[
        dict[str, str], ...
    ]  # variables by which each rank finds its card; () for Paddle's
    first_port: int  # port of the first rank of each host; 0: Paddle's launcher chooses it
    launcher_options: dict[str, str]  # options of Paddle's launcher on this host, if it is needed
    hosts: tuple[str, ...]  # all hosts, rank 0's first; empty with --master
    host: str  # this host, one of `hosts`; "" if --master has to determine it
    rendezvous_port: int | None  # port of the first host that the others call; None: no others
    description: str  # one line for the user
    note: str  # the part of the description about cards that are not used
    gpus: tuple[str, ...] = ()  # physical ids, in the order of local ranks

    @property
    def ranks(self) -> tuple[dict[str, str], ...]:
        """Returns the variables that identify each rank to Paddle; () with Paddle's launcher.

        Source: launch/controllers/collective.py of Paddle 3.3.1; tests compare with its variables.
        """
        count, port = len(self.devices), self.first_port
        endpoints = [f"{host}:{port + local}" for host in self.hosts for local in range(count)]
        variables = []
        for local, device in enumerate(self.devices):
            rank, world = self.hosts.index(self.host) * count + local, str(len(endpoints))
            variables.append(
                {
                    "PADDLE_MASTER": endpoints[0],
                    "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                    "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                    "PADDLE_TRAINER_ID": str(rank),
                    "PADDLE_GLOBAL_RANK": str(rank),
                    "PADDLE_TRAINERS_NUM": world,
                    "PADDLE_GLOBAL_SIZE": world,
                    "PADDLE_LOCAL_RANK": str(local),
                    "PADDLE_RANK_IN_NODE": str(local),
                    "PADDLE_LOCAL_SIZE": str(count),
                    "PADDLE_NNODES": str(len(self.hosts)),
                    "PADDLE_AUTO_CLUSTER": "0",
                    **device,
                }
            )
        return tuple(variables)

    @property
    def paddle_options(self) -> dict[str, str]:
        """Returns the options for Paddle's launcher except --log_dir; {} if it is not needed."""
        return {} if self.devices else self.launcher_options


def make_plan(options: Options, environment: Mapping[str, str], machine: Machine) -> LaunchPlan:
    """Plans the launch on this host; starts nothing.

    Args:
        environment: environment of fleetrun itself.
    Raises: LaunchError: the command does not fit this machine.
    """
    _check_paddle_and_script(options, machine)
    variables = _clean_environment(environment)
    labels, note = choose_cards(options, environment, machine)
    processes = len(labels) or options.processes or 1
    name, visible = _find_visible(options, environment, machine)
    if name in variables and visible is not None:
        # Some readers of the variable keep the spaces that users type.
        variables[name] = ",".join(visible if labels else ())
    if labels:
        device = options.kind
        cards = []
        for label in labels:
            index = label if visible is None else str(visible.index(label))
            card_variables = {f"FLAGS_selected_{device}s": index}
            # Paddle itself is built for these two kinds; plug-ins add the others.
            if device not in ("gpu", "xpu"):
                card_variables |= {"PADDLE_DISTRI_BACKEND": "xccl", KIND_VARIABLE: device}
            cards.append(card_variables)
        devices_text = f"card{'s' * (processes > 1)}" if device == "gpu" else device
        devices_text += f" {','.join(labels)}"
    else:
        device, cards = "cpu", [{"PADDLE_DISTRI_BACKEND": "gloo"}] * processes
        threads = variables.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores // processes)))
        devices_text = f"CPU (gloo), OMP_NUM_THREADS={threads} each"
    hosts: list[str] = []
    port: int | None = None
    first_port, host_text = options.start_port, ""
    if options.master is not None:
        host = _resolve_master(options, options.master, variables, machine.network)
        launcher_options = {"--master": options.master}
    else:
        hosts, host = _resolve_ips(options, variables, machine.network)
        port = choose_port(
            options.start_port, processes, len(hosts), host == hosts[0], machine.network,
            options.metrics_port,
        )  # fmt: skip
        first_port = first_rank_port(port, len(hosts))
        launcher_options = {}
        host_text = f"host {hosts.index(host) + 1} of {len(hosts)}, " if hosts[1:] else ""
    if options.needs_paddle:
        launcher_options |= (
            {"--devices": ",".join(labels)} if labels else {"--nproc_per_node": f"{processes}"}
        )
        launcher_options |= {"--host": host} if host else {}
        launcher_options |= {"--start_port": str(first_port)} if first_port else {}
        launcher_options |= {f"--{key}": value for key, value in options.passed.items()}
        if not labels:
            variables[CPU_VARIABLE] = "1"
            if "CUDA_VISIBLE_DEVICES" in variables:
                # Paddle's launcher treats even an empty list as a list of one card; the worker
                # hides the card.
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(processes)))
    else:
        launcher_options = {}
    if options.min_hosts is not None and not 1 <= options.min_hosts <= len(hosts) > 1:
        raise LaunchError(
            f"--ips names {len(hosts)} host{'s' * (len(hosts) != 1)}"
            if options.ips
            else "the hosts of the run are not named",
            code="option_invalid",
            where=f"--min_hosts {options.min_hosts}",
            fix="name two or more with --ips, and give at most their number",
        )
    plural = "process" if processes == 1 else "processes"
    return LaunchPlan(
        device=device,
        processes=processes,
        environment=variables,
        devices=() if options.needs_paddle else tuple(cards),
        first_port=first_port or 0,
        launcher_options=launcher_options,
        hosts=tuple(hosts),
        host=host,
        rendezvous_port=port if len(hosts) > 1 else None,
        description="; ".join(
            filter(None, (f"{host_text}{processes} {plural} on {devices_text}", note))
        ),
        note=note,
        gpus=tuple(labels) if device == "gpu" else (),
    )


def _clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Copies fleetrun's environment for the ranks, without the variables of the launch."""
    variables = {name: value for name, value in environment.items() if name not in OPTION_VARIABLES}
    variables[LAUNCHER_VARIABLE] = "fleetrun"
    for name in (*_OWN_VARIABLES, *TOKEN_VARIABLES):
        variables.pop(name, None)
    # Otherwise Paddle reports every connection that it opens.
    variables.setdefault("GLOG_minloglevel", "1")
    # As Paddle's launcher does: POD_NAME tells its auto-parallel that ranks were launched, and a
    # proxy is reported to disturb NCCL.
    variables.setdefault("POD_NAME", socket.gethostname())
    for name in ("http_proxy", "https_proxy"):
        if name in variables:
            variables[f"{name}_original"] = variables.pop(name)
    return variables


def _check_paddle_and_script(options: Options, machine: Machine) -> None:
    if machine.build == "none":
        raise LaunchError(
            "PaddlePaddle is not installed in this Python",
            code="paddle_missing",
            fix=PADDLE_REMEDY,
        )
    script = options.script
    if script.isdigit():
        raise LaunchError(
            f"expected a script, found {script!r}",
            code="script_missing",
            fix="write lists with commas, e.g. --selected_gpus 0,1",
        )
    path = Path(script)
    command = _COMMAND_OF_SCRIPT.get(path.stem)
    exists = path.is_file() if script.endswith(".py") else shutil.which(script) is not None
    if not exists:
        raise LaunchError(
            f"script {script!r} not found (in {Path.cwd()})",
            code="script_not_found",
            # tools/train.py in a folder that is no clone
            fix=f"write `fleetrun ... ppdist {command} ...` (tools/ exists only in a clone)"
            if command and (path.parent.name == "tools" or not path.suffix)
            else "",
        )
    if options.max_restart and options.master:
        raise LaunchError(
            "--max_restart does not work with --master: hosts that restart by themselves would "
            "meet ranks of the failed run",
            code="options_conflict",
            fix="name the hosts with --ips",
        )


_COMMAND_OF_SCRIPT = {"infer": "predict"} | {
    name: name for name in ("train", "eval", "predict", "export")
}


def choose_cards(
    options: Options, environment: Mapping[str, str], machine: Machine
) -> tuple[list[str], str]:
    """Chooses the cards of this host; returns them by local rank ([]: CPU) and a note."""
    wanted = None if options.cards is None else expand_ids(options.cards)
    name, visible = _find_visible(options, environment, machine)
    if visible is None:
        if wanted is None and options.processes is None:
            raise LaunchError(
                f"cannot count the {options.kind} cards of this machine",
                code="no_cards",
                where=f"{KIND_VARIABLE}={options.kind}",
                fix="list them, as in --devices 0-7, or give their number: --nproc_per_node N",
            )
        visible = wanted or [str(index) for index in range(options.processes or 0)]
    variable, noun = environment.get(name), "GPU" if options.kind == "gpu" else options.kind
    if wanted is not None and not visible:
        problem = f"this machine has no visible {noun}"
        if machine.cards or options.kind != "gpu":
            problem = f"{name}={variable!r} hides all {noun}s of this machine"
        raise LaunchError(
            f"cards {','.join(wanted)} were requested, but {problem}; to train on its CPU, type: "
            f"{_cpu_command(options, len(wanted), machine)}",
            code="no_cards",
        )
    if visible and machine.build == "cpu" and options.kind == "gpu":
        mismatch = (
            f"this machine has {len(visible)} visible GPU{'s' * (len(visible) > 1)}, but the "
            f"installed paddlepaddle is the CPU build"
        )
        if wanted is not None:
            raise LaunchError(
                mismatch,
                code="paddle_without_cards",
                fix=(
                    "install the paddlepaddle-gpu for your cards (README.md, On a GPU), or train "
                    f"on CPU: {_cpu_command(options, len(wanted), machine)}"
                ),
            )
        return [], f"note: {mismatch}, so no card is used"
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


def _find_visible(
    options: Options, environment: Mapping[str, str], machine: Machine
) -> tuple[str, list[str] | None]:
    """Finds the variable that hides cards, and the labels that it leaves visible.

    The labels are None if the variable is not set, so that only Paddle's plug-in could list the
    cards.
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
    """Rejects requested cards that are not visible.

    Raises: LaunchError.
    """
    absent = ", ".join(label for label in wanted if label not in visible)
    if not absent:
        return
    if variable is None:
        raise LaunchError(
            f"there is no card {absent}: this machine has {name_cards(visible)}",
            code="card_missing",
            fix="choose from these",
        )
    source = "those nvidia-smi shows, here " if name == "CUDA_VISIBLE_DEVICES" else ""
    raise LaunchError(
        f"card {absent} is hidden by {name}={variable}: the ids are {source}{name_cards(visible)}",
        code="card_hidden",
        fix=f"choose from these, or unset {name}",
    )


def _cpu_command(options: Options, count: int, machine: Machine) -> str:
    """Returns the same command for CPU processes, to suggest it."""
    hosts = ["--ips", options.ips] if options.ips else []
    command = ["fleetrun", *hosts, "--nproc_per_node", str(count), options.shown_script]
    text = shlex.join([*command, *options.script_arguments])
    if count > machine.cores:
        text += f"   (this machine has {machine.cores} CPU cores: fewer processes may be faster)"
    return text


def _resolve_ips(
    options: Options, variables: dict[str, str], network: Network
) -> tuple[list[str], str]:
    """Resolves the hosts, finds this one, and sets the interface of gloo and NCCL."""
    if options.ips is None:
        check_interfaces(variables, None, network)
        # The name of a lone host need not resolve.  On one host NCCL needs no interface setting.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return ["127.0.0.1"], "127.0.0.1"
    hosts = resolve_hosts(options.ips, network)
    local_address = find_own_address(hosts, options.host, network)
    _choose_interfaces(local_address, variables, network)
    return hosts, local_address


def _resolve_master(
    options: Options, master: str, variables: dict[str, str], network: Network
) -> str:
    """Finds the address of this host for --master, or ""; otherwise as `_resolve_ips`."""
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
        refuse_metrics_port(options.metrics_port, range(int(port), int(port) + 1))
    local_address = options.host or (
        address if network.is_local(address) else network.source_address(address)
    )
    if local_address is not None:
        _choose_interfaces(local_address, variables, network)
    return local_address or ""


def _choose_interfaces(local_address: str, variables: dict[str, str], network: Network) -> None:
    check_interfaces(variables, local_address, network)
    for name, value in socket_variables(local_address, network).items():
        variables.setdefault(name, value)


def metrics_endpoint(options: Options, machine: Machine) -> tuple[str, int] | None:
    """Returns the address and port of --metrics_port; None without the option.

    Raises: LaunchError: as in `make_plan`, if the address has to be that of this host in --ips.
    """
    if options.metrics_port is None:
        return None
    address = options.metrics_address
    if not address and options.ips is not None:
        hosts = resolve_hosts(options.ips, machine.network)
        address = find_own_address(hosts, options.host, machine.network)
    return address or "127.0.0.1", options.metrics_port
