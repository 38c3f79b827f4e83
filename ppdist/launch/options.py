"""Command line of fleetrun: its own options and Paddle's launcher's.

Paddle's parser takes the value of an option that it does not know for the training script, so
everything before the script is checked here and nothing unknown reaches it.  Its launcher starts
the ranks only with --master; what would have no effect without it is refused.
"""

import difflib
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppdist.common.errors import LaunchError
from ppdist.launch.network import typed_hosts

USAGE = """\
usage: fleetrun [options] script.py [arguments of the script]
       fleetrun [options] ppdist COMMAND [arguments of the command]

Starts one process of the script per card (or per --nproc_per_node on a CPU) on this host; with
--ips, type the same command on every host.  Exit codes: 0 done; 2 the input is wrong (one message);
75 stopped by a signal after a clean checkpoint; 1 anything else (the failing rank is named).
"""

# The script run for `ppdist`; PATH may contain no ppdist, or that of another Python.
_OWN_COMMANDS = str(Path(__file__).resolve().parents[1] / "__main__.py")

# Paddle's launcher sets these for its workers.  If they are left over from another launch, they
# override the command line: two hosts become rank 0, or the ranks wait for a dead master.
STALE_VARIABLES = (
    "PADDLE_MASTER",
    "PADDLE_TRAINER_ENDPOINTS",
    "DISTRIBUTED_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_TRAINER_ID",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_RANK",
    "PADDLE_NNODES",
    "PADDLE_GLOBAL_RANK",
    "PADDLE_GLOBAL_SIZE",
    "PADDLE_LOCAL_RANK",
    "PADDLE_LOCAL_SIZE",
    "PADDLE_RANK_IN_NODE",
    "FLAGS_selected_gpus",
)
KIND_VARIABLE = "PADDLE_XCCL_BACKEND"  # Paddle's: the kind of cards that a plug-in brings
# The token that the user passes to all hosts of a job (see connection.py), or the file with it.
TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "PPDIST_JOB_TOKEN", "PPDIST_JOB_TOKEN_FILE"
TOKEN_VARIABLES = (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)
_MIN_TOKEN, _MAX_TOKEN = 16, 4096  # characters
START_SECONDS = 600
MOST_RESTARTS, MOST_SECONDS = 1_000_000, 1_000_000
REJOIN_SECONDS = 60


@dataclass(frozen=True)
class Option:
    """A command-line option; it always takes a value, as `--name value` or `--name=value`."""

    names: tuple[str, ...]
    metavar: str
    help: str = ""
    variables: tuple[str, ...] = ()  # environment variables that stand in for it, first wins

    @property
    def key(self) -> str:
        return self.names[0].lstrip("-")


_GPU = "gpu"
_CARDS = Option(
    ("--devices", "--selected_gpus", "--selected_gpu", "--gpus", "--xpus", "--npus"),
    "0-3,6",
    "cards to use, one process each: a list with ranges of their physical ids.  Of another kind "
    "than NVIDIA's: --devices KIND:0-7, or --npus 0-7, or --devices 0-7 with "
    f"{KIND_VARIABLE}=KIND in the environment; KIND is Paddle's name, such as npu, xpu, mlu",
    ("PADDLE_DEVICES",),
)
_KIND_OF_NAME = {"--xpus": "xpu", "--npus": "npu"}
_IPS = Option(("--ips",), "A,B", "all hosts of the run, rank 0's first", ("PADDLE_IPS",))
_FLEETRUN_OPTIONS = (
    _CARDS,
    _IPS,
    Option(
        ("--nproc_per_node",),
        "N",
        "processes on each host; with cards, the first N of them",
        ("PADDLE_NPROC_PER_NODE",),
    ),
    Option(
        ("--max_restart",),
        "K",
        "start again from the newest checkpoint up to K times after a failure, on all hosts "
        "together (default 0)",
        ("PADDLE_MAX_RESTART",),
    ),
    Option(
        ("--min_hosts",),
        "N",
        "with --ips: go on without other hosts than the first that are lost or leave, while N are "
        "there; those that come back are taken in at the next checkpoint (docs/distributed.md; "
        "default: all)",
    ),
    Option(
        ("--rejoin_seconds",),
        "SECONDS",
        f"with --min_hosts: how long to wait for a lost host (default {REJOIN_SECONDS})",
    ),
    Option(("--host",), "A", "this host in --ips, where it cannot be detected", ("POD_IP",)),
    Option(
        ("--start_port",),
        "P",
        "first port (default: any free one; with several hosts 6070, the same on all: their "
        "fleetruns meet on it, the ranks use those after it)",
        ("FLAGS_START_PORT", "PADDLE_START_PORT"),
    ),
    Option(
        ("--start_timeout",),
        "SECONDS",
        f"how long to wait until all hosts have started (default {START_SECONDS})",
    ),
    Option(
        ("--log_dir",),
        "DIR",
        "where workerlog.N and rank-N.json (how each ended) go (default: log)",
        ("PADDLE_LOG_DIR",),
    ),
    Option(
        ("--metrics_port",),
        "[ADDRESS:]PORT",
        "serve Prometheus metrics of this host (docs/monitoring.md); without "
        "ADDRESS on that of --ips, else 127.0.0.1",
    ),
    Option(("--master",), "IP:PORT", "Paddle's rendezvous server, instead of --ips"),
)
_PADDLE_OPTIONS = (
    Option(("--nnodes",), "N", "hosts of the run; with --master"),
    Option(("--rank",), "N", "number of this host; with --master"),
    Option(("--job_id",), "NAME", variables=("PADDLE_JOB_ID",)),
)
_BY_NAME = {name: option for option in _FLEETRUN_OPTIONS + _PADDLE_OPTIONS for name in option.names}
_ELASTIC = (
    "--ips A,B --min_hosts N goes on without hosts that are lost; with etcd start Paddle's own "
    "launcher, python -m paddle.distributed.launch"
)
_NO_SERVERS = "ppdist has no parameter servers: all ranks train"
# Paddle's options that have an effect only with --master, by key: the reason, and what to type
# instead.
_WITH_MASTER = {
    "nnodes": ("without --master each host would train for itself", "name the hosts: --ips A,B"),
    "rank": ("without --master the number of a host is its place in --ips", "leave it out"),
}
# Options of other launchers that do not exist here: the reason, and the alternative.
_REFUSED = {
    "--legacy": "it starts Paddle's old launcher, which leaves its processes running when it is "
    "stopped; leave the option out",
    "--run_mode": "the ranks of ppdist are always collective; leave the option out",
    "--servers": _NO_SERVERS,
    "--trainers": _NO_SERVERS,
    "--server_num": _NO_SERVERS,
    "--trainer_num": f"{_NO_SERVERS}; --nproc_per_node N sets how many",
    "--gloo_port": "the ranks use the ports after --start_port P; give that",
    "--with_gloo": "CPU ranks always use it and cards never do; leave the option out",
    "--enable_gpu_log": "cards are watched by --metrics_port (docs/monitoring.md); leave it out",
    "--auto_parallel_config": "ppdist trains with data parallelism only; leave the option out",
    "--auto_cluster_config": "ppdist trains with data parallelism only; leave the option out",
    "--log_overwrite": "workerlog.N is appended to; give another --log_dir, or delete it before",
    "--preemption_file": "send SIGUSR1 to fleetrun once the file is there: "
    "`until [ -e FILE ]; do sleep 1; done; kill -USR1 PID`",
    "--elastic_level": _ELASTIC,
    "--elastic_timeout": _ELASTIC,
    "--sort_ip": "hosts are in the order of --ips: list them as wanted",
    "--log_level": "it is of Paddle's launcher, which is kept silent; leave it out",
    "--auto_tuner_json": "`ppdist tune` searches settings; leave the option out",
    # Options of torchrun and torch.distributed.launch.
    "--node_rank": "the number of a host is its place in --ips A,B; leave the option out",
    "--master_addr": "the first host of --ips A,B is it; leave the option out",
    "--master_port": "hosts meet on --start_port P; give that",
    "--rdzv_endpoint": "hosts meet at the first of --ips A,B, on --start_port P; give these",
}
# The options above read these variables, so Paddle's launcher must not see them: there they would
# override the command line.
OPTION_VARIABLES = tuple(
    name for option in _FLEETRUN_OPTIONS + _PADDLE_OPTIONS for name in option.variables
)


@dataclass(frozen=True)
class Options:
    """The requested launch, not yet compared with the machine."""

    script: str
    script_arguments: tuple[str, ...]
    typed: tuple[str, ...]  # all words before the script, for messages that suggest a command
    kind: str = _GPU  # kind of the cards
    cards: str | None = None
    ips: str | None = None
    processes: int | None = None
    host: str | None = None
    start_port: int | None = None
    start_timeout: int = START_SECONDS
    metrics_address: str = ""  # "": this host's address in --ips, or 127.0.0.1 without --ips
    metrics_port: int | None = None
    master: str | None = None
    max_restart: int = 0
    min_hosts: int | None = None  # None: all hosts are required
    rejoin_seconds: int = REJOIN_SECONDS
    log_dir: str = "log"
    token: str = field(default="", repr=False)  # token of the job; "": there is none
    passed: Mapping[str, str] = field(default_factory=dict)  # Paddle's own options, by key

    @property
    def shown_script(self) -> str:
        """Returns the script as a user types it."""
        return "ppdist" if self.script == _OWN_COMMANDS else self.script

    @property
    def trains(self) -> bool:
        """Returns True if the script is `ppdist train`."""
        script = Path(self.script).absolute()
        # The second case is `ppdist` typed with its path.
        if self.script == _OWN_COMMANDS or script.name == "ppdist":
            return self.script_arguments[:1] == ("train",)
        return script.parts[-2:] == ("tools", "train.py")

    @property
    def needs_paddle(self) -> bool:
        """Returns True if Paddle's launcher has to start the ranks."""
        return self.master is not None


def parse_options(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Parses the command line; environment variables stand in for options.

    Args:
        arguments: the words after the program's name.
    Raises: LaunchError: an unknown or incomplete option, no script, or a stale environment.
    """
    values, rest = _split_arguments(arguments)
    refuse_stale_environment(environment)
    token = job_token(environment)
    if not rest:
        raise LaunchError(f"no script was given.\n{USAGE}", code="script_missing")
    given = {key: f"--{key} {value}" for key, value in values.items()}  # as typed, for messages
    for option in _FLEETRUN_OPTIONS + _PADDLE_OPTIONS:
        for variable in option.variables:
            if environment.get(variable) and option.key not in values:
                values[option.key] = environment[variable]
                given[option.key] = f"{variable}={environment[variable]}"
    _refuse_without_effect(values, given)
    taken = {option.key for option in _FLEETRUN_OPTIONS}
    metrics_address, metrics_port = _parse_endpoint(values, "metrics_port")
    rejoin = _parse_integer(values, "rejoin_seconds", 0, MOST_SECONDS)
    kind, cards = _parse_cards(values.get(_CARDS.key), environment.get(KIND_VARIABLE) or _GPU)
    return Options(
        script=_OWN_COMMANDS if rest[0] == "ppdist" else rest[0],
        script_arguments=tuple(rest[1:]),
        typed=tuple(arguments[: len(arguments) - len(rest)]),
        kind=kind,
        cards=cards,
        ips=values.get(_IPS.key),
        processes=_parse_integer(values, "nproc_per_node", 1, 4096),
        host=values.get("host"),
        start_port=_parse_integer(values, "start_port", 1024, 65535),
        start_timeout=_parse_integer(values, "start_timeout", 1, MOST_SECONDS) or START_SECONDS,
        metrics_address=metrics_address,
        metrics_port=metrics_port,
        master=values.get("master"),
        max_restart=_parse_integer(values, "max_restart", 0, MOST_RESTARTS) or 0,
        min_hosts=_parse_integer(values, "min_hosts", 1, 4096),
        rejoin_seconds=REJOIN_SECONDS if rejoin is None else rejoin,
        log_dir=values.get("log_dir", "log"),
        token=token,
        passed={key: value for key, value in values.items() if key not in taken},
    )


def _refuse_without_effect(values: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Rejects options that would have no effect.

    Args: given: each option as it was typed, by key.
    Raises: LaunchError.
    """
    if "rejoin_seconds" in values and "min_hosts" not in values:
        raise LaunchError(
            "it would have no effect: without --min_hosts, --start_timeout is how long hosts wait",
            code="option_without_effect",
            where=given["rejoin_seconds"],
            fix="add --min_hosts N",
        )
    hosts = len(typed_hosts(values.get("ips", ""))) or 1
    for key, default in (("nnodes", f"{hosts}"), ("rank", "0")):
        if values.get(key, default) != default and "master" not in values:
            reason, fix = _WITH_MASTER[key]
            raise LaunchError(
                f"it would have no effect: {reason}",
                code="option_without_effect",
                where=given[key],
                fix=fix,
            )


def help_text() -> str:
    """Returns the help text of `fleetrun --help`."""
    lines = [USAGE, "options:"]
    for option in _FLEETRUN_OPTIONS:
        lines.append(f"  {', '.join(option.names)} {option.metavar}")
        lines.append(_wrap(option.help, "      "))
    lines.append("\nWith --master Paddle's launcher starts the ranks, which takes a second and")
    lines.append("300 MB more; it also takes, and gets unchanged:")
    lines.append(
        _wrap(", ".join(name for option in _PADDLE_OPTIONS for name in option.names), "  ")
    )
    return "\n".join(lines)


def _wrap(text: str, indent: str) -> str:
    """Wraps text to the width of a usual terminal, without breaking options."""
    return textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent,
                         break_on_hyphens=False)  # fmt: skip


def refuse_stale_environment(environment: Mapping[str, str]) -> None:
    """Rejects environment variables of an earlier launch, which would override this one.

    Raises: LaunchError.
    """
    stale = [name for name in STALE_VARIABLES if name in environment]
    if stale:
        remove = " ".join(f"-u {name}" for name in stale)
        raise LaunchError(
            "the environment holds "
            f"{', '.join(f'{name}={environment[name]!r}' for name in stale)} from another "
            "launch, which Paddle's launcher would obey instead of the command line",
            code="environment_of_other_launch",
            fix=f"start with: env {remove} fleetrun ...",
        )


def job_token(environment: Mapping[str, str]) -> str:
    """Reads the token of the job; "" if there is none.

    Raises: LaunchError: other users can read its file, or it is too short to be safe.
    """
    token, where = environment.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    name = environment.get(TOKEN_FILE_VARIABLE, "")
    if name and not token:
        where = f"{TOKEN_FILE_VARIABLE}={name}"
        try:
            with open(name, encoding="utf-8", errors="surrogateescape") as file:
                mode = os.fstat(file.fileno()).st_mode
                token = file.read(_MAX_TOKEN).strip()
        except OSError as error:
            raise LaunchError(
                f"it cannot be read ({error.strerror})", code="job_token_unreadable", where=where
            ) from error
        if mode & 0o077:
            raise LaunchError(
                "others on this machine may read or change it",
                code="job_token_exposed",
                where=where,
                fix=f"chmod 600 {name}",
            )
    if (token or name) and len(token) < _MIN_TOKEN:
        raise LaunchError(
            f"a token of {len(token)} characters can be guessed: use {_MIN_TOKEN} or more",
            code="job_token_short",
            where=where,
            fix=f"give all hosts the same one from `openssl rand -hex {_MIN_TOKEN}`, or none",
        )
    return token


def _split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separates the options, by key, from the script and its arguments."""
    values: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        # torchrun accepts dashes and underscores, so users type both.
        with_underscores = f"--{name[2:].replace('-', '_')}"
        if with_underscores in (*_BY_NAME, *_REFUSED):
            name = with_underscores
        option = _BY_NAME.get(name)
        if name in _REFUSED:
            raise LaunchError(
                f"fleetrun does not take this option: {_REFUSED[name]}",
                code="option_refused",
                where=name,
            )
        if option is None:
            raise LaunchError(_describe_unknown(name), code="option_unknown")
        if not equals:
            if not rest or rest[0] in _BY_NAME:
                raise LaunchError(
                    f"{name} needs a value, e.g. {name} {option.metavar}",
                    code="option_without_value",
                )
            value = rest.pop(0)
        # `0, 1` without quotes is two words for the shell, and one list for its user.
        if option in (_CARDS, _IPS):
            while len(rest) > 1 and not rest[0].endswith(".py"):
                if not value.endswith(",") and not rest[0].startswith(","):
                    break
                value += rest.pop(0)
        value = value.strip().strip("'\"").strip()
        if name in _KIND_OF_NAME:
            value = f"{_KIND_OF_NAME[name]}:{value}"
        if option.key in values:
            raise LaunchError(
                f"{' / '.join(option.names)} is already given as {values[option.key]!r}",
                code="option_repeated",
                where=f"{name} {value}",
                fix="give it once",
            )
        values[option.key] = value
    return values, rest


def _describe_unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"did you mean {close[0]}? Otherwise: " if close else ""
    return (
        f"unknown option {name} before the script; {hint}options of the script go after it, and "
        f"fleetrun --help lists those that go before"
    )


def _parse_cards(text: str | None, kind: str) -> tuple[str, str | None]:
    """Splits `0-3` or `npu:0-3` into the kind and the list.

    Args: kind: the kind if the text names none.
    """
    typed, colon, cards = (text or "").rpartition(":")
    kind = typed if colon else kind
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kind) or kind == "cpu":
        raise LaunchError(
            f"{kind!r} is not a kind of card",
            code="cards_invalid",
            where=f"cards {text!r}" if colon else f"{KIND_VARIABLE}={kind}",
            fix="expected a list such as 0-3 or npu:0-3; for CPUs --nproc_per_node N alone",
        )
    return kind, None if text is None else cards


def _parse_integer(values: Mapping[str, str], key: str, minimum: int, maximum: int) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not re.fullmatch(r"\d+", text) or not minimum <= int(text) <= maximum:
        raise LaunchError(
            f"expected a whole number from {minimum} to {maximum}",
            code="option_invalid",
            where=f"--{key} {text}",
        )
    return int(text)


def _parse_endpoint(values: Mapping[str, str], key: str) -> tuple[str, int | None]:
    """Parses `9410`, `0.0.0.0:9410` or `[::1]:9410` into address and port."""
    text = values.get(key)
    if text is None:
        return "", None
    match = re.fullmatch(r"(?:([^:\[\]\s]+|\[[0-9a-fA-F:.]+\]):)?([0-9]{1,5})", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise LaunchError(
            "expected PORT or ADDRESS:PORT, as in 0.0.0.0:9410",
            code="option_invalid",
            where=f"--{key} {text}",
        )
    return (match[1] or "").strip("[]"), int(match[2])
