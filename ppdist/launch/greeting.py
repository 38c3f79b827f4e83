"""What the fleetruns of a run's hosts tell each other before it starts, and what must agree."""

import importlib.metadata
import platform
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from ppdist.config.distributed import HOSTS_OWN_KEYS
from ppdist.launch.connection import Message, integer_of, text_of
from ppdist.launch.membership import proof, proves
from ppdist.launch.network import typed_hosts
from ppdist.launch.options import MOST_RESTARTS, Options
from ppdist.launch.plan import CPU_VARIABLE, LaunchPlan

_LIST_LIMIT, _WORD_LIMIT = 4096, 4096


@dataclass(frozen=True)
class Greeting:
    """One host's view of the run."""

    host: str  # which of `hosts` it is
    hosts: tuple[str, ...]  # addresses
    processes: int  # on this host
    device: str  # gpu or cpu
    script: str
    arguments: tuple[str, ...]
    ppdist: str  # versions
    paddle: str
    python: str
    names: tuple[str, ...] = ()  # of the hosts, as they were typed
    max_restart: int = 0
    attempt: int = 0  # how often this host has restarted the run
    skip: tuple[int, ...] = ()  # steps that failed twice and are left out
    identity: str = field(default_factory=lambda: secrets.token_hex(16))  # of this fleetrun
    proof: str = ""  # that it knows the token of the job

    def message(self) -> Message:
        """As it is sent."""
        return {"type": "hello", **asdict(self)}

    def signed(self, token: str) -> "Greeting":
        """The same with its proof."""
        return replace(self, proof=proof(token, asdict(replace(self, proof=""))))

    def is_signed(self, token: str) -> bool:
        """Whether who sent it has the same token, or as here none."""
        return proves(token, asdict(replace(self, proof="")), self.proof)

    @property
    def is_first(self) -> bool:
        return self.host == self.hosts[0]

    @property
    def has_names(self) -> bool:
        """Whether hosts were named, so that they may come back with other addresses."""
        return self.names not in ((), self.hosts)

    def means_others(self, theirs: "Greeting") -> bool:
        """Whether the same names have other addresses there."""
        return theirs.names == self.names != () and theirs.hosts != self.hosts


def own_greeting(
    options: Options, plan: LaunchPlan, attempt: int, skip: tuple[int, ...]
) -> Greeting:
    """What this host says."""
    return Greeting(
        host=plan.host,
        hosts=plan.hosts,
        processes=plan.processes,
        device="cpu" if plan.environment.get(CPU_VARIABLE) else "gpu",
        script=options.script,
        arguments=options.script_arguments,
        ppdist=_version("ppdist"),
        paddle=_version("paddlepaddle-gpu") or _version("paddlepaddle"),
        python=platform.python_version(),
        names=tuple(typed_hosts(options.ips or "")),
        max_restart=options.max_restart,
        attempt=attempt,
        skip=skip,
    )


def read_greeting(message: Message) -> Greeting | None:
    """The greeting that a message holds, None when it holds none."""
    if message["type"] != "hello":
        return None
    values: dict[str, Any] = {
        "processes": integer_of(message, "processes", 1, 4096),
        "max_restart": integer_of(message, "max_restart", 0, MOST_RESTARTS),
        "attempt": integer_of(message, "attempt", 0, MOST_RESTARTS),
        "skip": steps_of(message),
    }
    if None in values.values():
        return None
    for each in fields(Greeting):
        if each.name in ("hosts", "arguments", "names"):
            words = message.get(each.name)
            if not isinstance(words, list) or len(words) > _LIST_LIMIT:
                return None
            if not all(isinstance(word, str) and len(word) <= _WORD_LIMIT for word in words):
                return None
            values[each.name] = tuple(words)
        elif each.name not in values:
            values[each.name] = text_of(message, each.name, _WORD_LIMIT)
    if values["host"] not in values["hosts"]:
        return None
    return Greeting(**values)


def steps_of(message: Message) -> tuple[int, ...] | None:
    """The steps to leave out that a message holds, None where it holds something else."""
    steps = message.get("skip")
    if not isinstance(steps, list) or len(steps) > _LIST_LIMIT:
        return None
    if not all(type(step) is int and 0 < step < 10**12 for step in steps):
        return None
    return tuple(steps)


def differences(mine: Greeting, theirs: Greeting) -> list[str]:
    """What keeps two hosts from training together, each with both sides; [] if nothing does."""
    found = []

    def differ(what: str, own: str, other: str, remedy: str) -> None:
        if own != other:
            found.append(f"{what}: {mine.host} has {own}, {theirs.host} has {other}; {remedy}")

    remedy = "type the same hosts in the same order everywhere (rank 0's host stands first)"
    if mine.means_others(theirs):
        remedy = f"{','.join(mine.names)} must mean the same everywhere: correct DNS or /etc/hosts"
    differ("--ips", ",".join(mine.hosts), ",".join(theirs.hosts), remedy)
    remedy = "ranks are numbered by it: give the same --nproc_per_node or number of cards"
    differ("processes on a host", str(mine.processes), str(theirs.processes), remedy)
    remedy = "gloo and NCCL cannot talk to each other: use cards on all hosts, or on none"
    differ("device", mine.device, theirs.device, remedy)
    remedy = "start the same script on every host"
    differ("script", PurePath(mine.script).name, PurePath(theirs.script).name, remedy)
    for own, other in _different_words(mine.arguments, theirs.arguments):
        if not _may_differ(own, other):
            remedy = "start every host with the same command"
            differ("arguments of the script", own or "none", other or "none", remedy)
    remedy = "hosts restart together: give the same --max_restart on every host"
    differ("restarts", str(mine.max_restart), str(theirs.max_restart), remedy)
    remedy = "install the same version on every host"
    differ("ppdist", mine.ppdist or "none", theirs.ppdist or "none", remedy)
    differ("paddle", mine.paddle or "none", theirs.paddle or "none", remedy)
    return found


def remarks(mine: Greeting, theirs: Greeting) -> list[str]:
    """What differs and may: worth a line."""
    pairs = [("script", mine.script, theirs.script), ("python", mine.python, theirs.python)]
    pairs += [
        ("argument", own, other)
        for own, other in _different_words(mine.arguments, theirs.arguments)
    ]
    return [
        f"note: {what} {own} here, {other} on host {theirs.host}"
        for what, own, other in pairs
        if own != other
    ]


def _different_words(mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    own, other = _of_the_run(mine), _of_the_run(theirs)
    if len(own) == len(other):
        return [pair for pair in zip(own, other) if pair[0] != pair[1]]
    # One has more: what both have in the same order at the beginning and the end says nothing.
    start = _same(own, other)
    end = _same(own[start:][::-1], other[start:][::-1])
    return [(" ".join(own[start : len(own) - end]), " ".join(other[start : len(other) - end]))]


def _same(own: Sequence[str], other: Sequence[str]) -> int:
    """How many words are the same from the beginning on."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(own, other))))


def _of_the_run(words: Sequence[str]) -> list[str]:
    """The arguments without those that set where something lies on this host."""
    kept = [word for word in words if word.partition("=")[0] not in HOSTS_OWN_KEYS]
    alone = len(kept) < len(words)  # an -o may have lost all its values
    return [
        word
        for word, following in zip(kept, [*kept[1:], "-"])
        if not (alone and word == "-o" and following.startswith("-"))
    ]


def _may_differ(own: str, other: str) -> bool:
    """True for two paths to a file of one name."""
    has_path = ("/" in own or "/" in other) and "=" not in own + other
    return has_path and PurePath(own).name == PurePath(other).name != ""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
