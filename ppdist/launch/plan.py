"""From what was typed and what the machine is to what Paddle's launcher is given."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppdist.errors import (
    EXIT_DIR_VARIABLE,
    JOB_DIR_VARIABLE,
    JOB_VARIABLE,
    RESTART_VARIABLE,
    SKIP_STEP_VARIABLE,
    LaunchError,
)
from ppdist.launch.cards import (
    Card,
    choose,
    expand_ids,
    machine_cards,
    paddle_build,
    visible_labels,
)
from ppdist.launch.membership import TOKEN_VARIABLE
from ppdist.launch.network import (
    Network,
    check_interfaces,
    choose_port,
    own_address,
    ranks_port,
    refuse_metrics_port,
    resolve_hosts,
    socket_variables,
)
from ppdist.launch.options import OPTION_VARIABLES, Options

LAUNCHER_VARIABLE = "PPDIST_LAUNCHER"  # how a worker knows that our front started it
CPU_VARIABLE = "PPDIST_CPU"  # set for workers that shall see no card
# Of a run around this one.
_OWN_VARIABLES = (
    EXIT_DIR_VARIABLE, JOB_DIR_VARIABLE, JOB_VARIABLE, RESTART_VARIABLE, SKIP_STEP_VARIABLE,
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What the plan depends on besides the command; tests put a made-up one in its place."""

    cards: Sequence[Card]
    build: str  # of Paddle, see cards.paddle_build
    cores: int  # that this process may use
    network: Network = field(default_factory=Network)


def this_machine() -> Machine:
    """The machine as it is; takes as long as nvidia-smi, where there is one."""
    return Machine(machine_cards(), paddle_build(), len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class LaunchPlan:
    """One start of Paddle's launcher on this host."""

    arguments: tuple[str, ...]  # of Paddle's launcher, without its --log_dir and its script
    environment: dict[str, str]  # the whole environment of the run
    processes: int  # on this host
    hosts: tuple[str, ...]  # all, rank 0's first; empty where --master brings them together
    host: str  # which of them this is; "" with --master
    meeting_port: int | None  # of the first host, where the others' fleetruns come; None: no others
    description: str  # one line for the user
    cards: tuple[str, ...] = ()  # by physical id, in the order of local ranks; none on CPU


def make_plan(options: Options, environment: Mapping[str, str], machine: Machine) -> LaunchPlan:
    """Decides everything and starts nothing.

    Args:
        environment: of fleetrun itself.
    Raises: LaunchError: the command does not fit this machine.
    """
    _check_paddle_and_script(options, machine)
    variables = {name: value for name, value in environment.items() if name not in OPTION_VARIABLES}
    variables[LAUNCHER_VARIABLE] = "fleetrun"
    for name in (*_OWN_VARIABLES, TOKEN_VARIABLE):
        variables.pop(name, None)
    variables.setdefault("GLOG_minloglevel", "1")  # not every connection that Paddle opens
    arguments: list[str] = []
    notes: list[str] = []
    labels = cards_of_run(options, environment, machine, notes)
    if labels:
        processes = len(labels)
        arguments += ["--devices", ",".join(labels)]
        what = f"card{'s' * (processes > 1)} {','.join(labels)}"
        if "CUDA_VISIBLE_DEVICES" in environment:  # Paddle compares texts, spaces and all
            visible = visible_labels(machine.cards, environment["CUDA_VISIBLE_DEVICES"])
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    else:
        processes = options.processes or 1
        arguments += ["--nproc_per_node", str(processes)]
        what = f"CPU (gloo), {_share_cores(variables, processes, machine)}"
    hosts, port = _add_hosts(options, arguments, variables, processes, machine)
    host = arguments[arguments.index("--host") + 1] if hosts else ""
    for key, value in options.passed.items():
        arguments += [f"--{key}", value]
    where = f"host {hosts.index(host) + 1} of {len(hosts)}, " if hosts[1:] else ""
    plural = "process" if processes == 1 else "processes"
    notes.insert(0, f"{where}{processes} {plural} on {what}")
    return LaunchPlan(
        arguments=tuple(arguments),
        environment=variables,
        processes=processes,
        hosts=tuple(hosts),
        host=host,
        meeting_port=port if len(hosts) > 1 else None,
        description="; ".join(notes),
        cards=tuple(labels),
    )


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
            f"there is no script {script!r} (looked from {Path.cwd()})",
            code="script_not_found",
        )
    if options.max_restart and options.master:
        raise LaunchError(
            "--max_restart does not work with --master: hosts that restart by themselves would "
            "meet ranks of the failed run",
            code="options_conflict",
            fix="name the hosts with --ips",
        )


def cards_of_run(
    options: Options, environment: Mapping[str, str], machine: Machine, notes: list[str]
) -> list[str]:
    """Cards to use, in the order of local ranks; [] for a run on CPU."""
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = None if options.cards is None else expand_ids(options.cards)
    visible = visible_labels(machine.cards, variable)
    if wanted is not None and not visible:
        raise LaunchError(
            _no_cards(options, wanted, machine, variable),
            code="no_cards",
        )
    if visible and machine.build == "cpu":
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
        notes.append(f"note: {problem}, so no card is used")
        return []
    if wanted is not None:
        chosen = choose(wanted, visible, variable)
        if options.processes not in (None, len(chosen)):
            raise LaunchError(
                f"{len(chosen)} cards and --nproc_per_node {options.processes} contradict each "
                "other",
                code="options_conflict",
                fix="each card gets one process: leave one of the two out",
            )
        return chosen
    if options.processes is not None and options.processes > len(visible) > 0:
        raise LaunchError(
            f"this machine has {len(visible)} visible GPUs and each process needs its own",
            code="cards_too_few",
            where=f"--nproc_per_node {options.processes}",
            fix="for a run on CPU: CUDA_VISIBLE_DEVICES= fleetrun ...",
        )
    return visible[: options.processes]


def _no_cards(
    options: Options, wanted: Sequence[str], machine: Machine, variable: str | None
) -> str:
    found = "this machine has no visible GPU"
    if machine.cards:
        found = f"CUDA_VISIBLE_DEVICES={variable!r} hides all GPUs of this machine"
    return (
        f"cards {','.join(wanted)} were asked for, but {found}; to train on its CPU, type: "
        f"{_instead(options, len(wanted), machine)}"
    )


def _instead(options: Options, count: int, machine: Machine) -> str:
    """The same command for CPU processes."""
    kept = ["--ips", options.ips] if options.ips else []
    command = ["fleetrun", *kept, "--nproc_per_node", str(count), options.script]
    text = shlex.join([*command, *options.script_arguments])
    if count > machine.cores:
        text += f"   (this machine has {machine.cores} CPU cores: fewer processes may be faster)"
    return text


def _share_cores(variables: dict[str, str], processes: int, machine: Machine) -> str:
    """Sets what CPU workers need in `variables`; returns what to tell the user."""
    variables[CPU_VARIABLE] = "1"
    if "CUDA_VISIBLE_DEVICES" in variables:
        # Paddle's launcher takes even an empty list for a list of one card; the worker hides it.
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in range(processes))
    threads = variables.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores // processes)))
    return f"OMP_NUM_THREADS={threads} each"


def _add_hosts(
    options: Options,
    arguments: list[str],
    variables: dict[str, str],
    processes: int,
    machine: Machine,
) -> tuple[list[str], int | None]:
    """Adds the hosts, this one's address and the ports to `arguments`.

    Returns: the hosts ([] with --master) and the first port.
    """
    network = machine.network
    if options.master is not None:
        _add_master(options, arguments, variables, network)
        return [], None
    if options.ips is None:
        hosts, own = ["127.0.0.1"], "127.0.0.1"
        check_interfaces(variables, None, network)
        # The name of a lone host need not resolve.  NCCL finds its way on one host by itself.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        hosts = resolve_hosts(options.ips, network)
        own = own_address(hosts, options.host, network)
        _choose_interfaces(own, variables, network)
    port = choose_port(
        options.start_port, processes, len(hosts), own == hosts[0], network, own,
        options.metrics_port,
    )  # fmt: skip
    arguments += ["--ips", ",".join(hosts), "--host", own]
    arguments += ["--start_port", str(ranks_port(port, len(hosts)))]
    return hosts, port


def _choose_interfaces(own: str, variables: dict[str, str], network: Network) -> None:
    check_interfaces(variables, own, network)
    for name, value in socket_variables(own, network).items():
        variables.setdefault(name, value)


def _add_master(
    options: Options, arguments: list[str], variables: dict[str, str], network: Network
) -> None:
    if options.ips is not None:
        raise LaunchError(
            "--master and --ips are two ways to bring hosts together",
            code="options_conflict",
            fix="give one",
        )
    master = options.master or ""
    arguments += ["--master", master]
    name = master.rpartition("://")[2].partition(":")[0]
    address = network.resolve(name)
    if ":" not in master or address is None:
        raise LaunchError(
            "expected IP:PORT of a known host",
            code="option_invalid",
            where=f"--master {master}",
        )
    port = master.rpartition(":")[2]
    if port.isascii() and port.isdigit():
        refuse_metrics_port(options.metrics_port, range(int(port), int(port) + 1))
    own = options.host or (address if network.is_local(address) else network.towards(address))
    if own is not None:
        arguments += ["--host", own]
        _choose_interfaces(own, variables, network)
    if options.start_port is not None:
        arguments += ["--start_port", str(options.start_port)]
