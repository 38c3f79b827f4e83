"""Handshake: how a host of a run was started, and which settings must agree on all hosts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from ppdist.common.job import PER_HOST_KEYS
from ppdist.launch.connection import Message, read_integer, read_text
from ppdist.launch.network import MOST_HOSTS, typed_hosts
from ppdist.launch.options import MOST_RESTARTS, MOST_SECONDS, Options
from ppdist.launch.topology import LaunchPlan, installed_version

_LIST_LIMIT, _WORD_LIMIT = MOST_HOSTS, 4096


@dataclass(frozen=True)
class Handshake:
    """One host's view of the run."""

    host: str  # this host, one of `hosts`
    hosts: tuple[str, ...]  # addresses
    processes: int  # on this host
    device: str  # cpu, gpu or another kind of card
    script: str
    arguments: tuple[str, ...]
    ppdist: str  # version of ppdist; below: of Paddle
    paddle: str
    names: tuple[str, ...] = ()  # the hosts as they were typed
    max_restart: int = 0
    min_hosts: int = 0  # 0: all hosts are required
    rejoin_seconds: int = 0
    attempt: int = 0  # how many worlds of the run this host has seen end
    changes: int = 0  # how many of them ended because a host left or joined
    skip: tuple[int, ...] = ()  # steps that failed twice and are left out

    def message(self) -> Message:
        """Returns the message that another host reads with `read_handshake`."""
        return {"type": "handshake"} | {
            field.name: getattr(self, field.name) for field in fields(self)
        }

    @property
    def place(self) -> int:
        """Returns the position of the host in --ips, from 0."""
        return self.hosts.index(self.host)

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def is_elastic(self) -> bool:
        """Returns True if the run goes on without hosts that are lost."""
        return 0 < self.min_hosts < len(self.hosts)

    @property
    def has_names(self) -> bool:
        """Returns True if hosts were typed as names, whose addresses may change."""
        return self.names not in ((), self.hosts)

    def has_same_hub(self, remote: "Handshake") -> bool:
        """Returns True if --ips begins with the same host on the remote host."""
        return remote.hosts[0] == self.hosts[0] or remote.names[:1] == self.names[:1] != ()

    def has_same_names(self, remote: "Handshake") -> bool:
        """Returns True if the same hosts were typed; a name may mean another address there."""
        return remote.names == self.names != ()


def make_handshake(
    options: Options, plan: LaunchPlan, attempt: int, changes: int, skip: tuple[int, ...]
) -> Handshake:
    """Builds the handshake of this host."""
    return Handshake(
        host=plan.host,
        hosts=plan.hosts,
        processes=plan.processes,
        device=plan.device,
        script=options.script,
        arguments=options.script_arguments,
        ppdist=installed_version("ppdist"),
        paddle=installed_version("paddlepaddle-gpu") or installed_version("paddlepaddle"),
        names=tuple(typed_hosts(options.ips or "")),
        max_restart=options.max_restart,
        min_hosts=options.min_hosts or 0,
        rejoin_seconds=options.rejoin_seconds,
        attempt=attempt,
        changes=changes,
        skip=skip,
    )


def read_handshake(message: Message) -> Handshake | None:
    """Reads a handshake from a message; None if the message holds none."""
    if message["type"] != "handshake":
        return None
    values: dict[str, Any] = {
        "processes": read_integer(message, "processes", 1, 4096),
        "max_restart": read_integer(message, "max_restart", 0, MOST_RESTARTS),
        "min_hosts": read_integer(message, "min_hosts", 0, _LIST_LIMIT),
        "rejoin_seconds": read_integer(message, "rejoin_seconds", 0, MOST_SECONDS),
        "attempt": read_integer(message, "attempt", 0, MOST_RESTARTS),
        "changes": read_integer(message, "changes", 0, MOST_RESTARTS),
        "skip": read_steps(message),
        **{key: read_words(message, key) for key in ("hosts", "arguments", "names")},
    }
    if None in values.values() or len(values["names"]) not in (0, len(values["hosts"])):
        return None
    for field in fields(Handshake):
        if field.name not in values:
            values[field.name] = read_text(message, field.name, _WORD_LIMIT)
    return Handshake(**values) if values["host"] in values["hosts"] else None


def read_words(message: Message, key: str) -> tuple[str, ...] | None:
    """Reads a list of strings from a message; None if the message holds none."""
    words = message.get(key)
    if not isinstance(words, list) or len(words) > _LIST_LIMIT:
        return None
    # The hub reads this of every host, with all names of hosts: no loop in Python.
    if set(map(type, words)) - {str} or max(map(len, words), default=0) > _WORD_LIMIT:
        return None
    return tuple(words)


def read_steps(message: Message) -> tuple[int, ...] | None:
    """Reads the steps to skip from a message; None if the message holds none."""
    steps = message.get("skip")
    if not isinstance(steps, list) or len(steps) > _LIST_LIMIT:
        return None
    if not all(type(step) is int and 0 < step < 10**12 for step in steps):
        return None
    return tuple(steps)


def differences(local: Handshake, remote: Handshake) -> list[str]:
    """Lists the differences that keep two hosts from training together, with both values."""
    lines = []

    def compare(subject: str, local_value: str, remote_value: str, remedy: str) -> None:
        if local_value != remote_value:
            lines.append(
                f"{subject}: {local.host} has {local_value}, {remote.host} has {remote_value}; "
                f"{remedy}"
            )

    if not local.has_same_names(remote):
        remedy = "type the same hosts in the same order everywhere (rank 0's host stands first)"
        compare("--ips", ",".join(local.hosts), ",".join(remote.hosts), remedy)
    remedy = "ranks are numbered by it: give the same --nproc_per_node or number of cards"
    compare("processes on a host", str(local.processes), str(remote.processes), remedy)
    remedy = "gloo and NCCL cannot talk to each other: use cards on all hosts, or on none"
    compare("device", local.device, remote.device, remedy)
    remedy = "start the same script on every host"
    compare("script", PurePath(local.script).name, PurePath(remote.script).name, remedy)
    for local_value, remote_value in _pair_differing_words(local.arguments, remote.arguments):
        has_path = (
            "/" in local_value or "/" in remote_value
        ) and "=" not in local_value + remote_value
        same_file = has_path and PurePath(local_value).name == PurePath(remote_value).name != ""
        if not same_file:
            remedy = "start every host with the same command"
            compare(
                "arguments of the script", local_value or "none", remote_value or "none", remedy
            )
    remedy = "hosts restart together: give the same --max_restart on every host"
    compare("restarts", str(local.max_restart), str(remote.max_restart), remedy)
    remedy = "hosts must agree on when to go on without one: give the same options on every host"
    compare("--min_hosts", str(local.min_hosts), str(remote.min_hosts), remedy)
    compare("--rejoin_seconds", str(local.rejoin_seconds), str(remote.rejoin_seconds), remedy)
    remedy = "install the same version on every host"
    compare("ppdist", local.ppdist or "none", remote.ppdist or "none", remedy)
    compare("paddle", local.paddle or "none", remote.paddle or "none", remedy)
    return lines


def _pair_differing_words(local: Sequence[str], remote: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs the arguments that differ, as (local, remote)."""
    local_words, remote_words = _drop_per_host_arguments(local), _drop_per_host_arguments(remote)
    if len(local_words) == len(remote_words):
        return [pair for pair in zip(local_words, remote_words) if pair[0] != pair[1]]
    # The lists differ in length: only the part between their common beginning and end differs.
    start = _count_common(local_words, remote_words)
    end = _count_common(local_words[start:][::-1], remote_words[start:][::-1])
    return [
        (
            " ".join(local_words[start : len(local_words) - end]),
            " ".join(remote_words[start : len(remote_words) - end]),
        )
    ]


def _count_common(local_words: Sequence[str], remote_words: Sequence[str]) -> int:
    """Counts the words at the beginning that are the same in both lists."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(local_words, remote_words))))


def _drop_per_host_arguments(words: Sequence[str]) -> list[str]:
    """Drops the arguments that are paths on one host, which may differ between hosts."""
    shared = [word for word in words if word.partition("=")[0] not in PER_HOST_KEYS]
    # An `-o` left without values would still differ from the other host's command.
    is_shortened = len(shared) < len(words)
    return [
        word
        for word, following in zip(shared, [*shared[1:], "-"])
        if not (is_shortened and word == "-o" and following.startswith("-"))
    ]
