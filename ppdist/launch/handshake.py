"""Handshake: what a host of a run was started with, and what must agree with the others."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from ppdist.launch.connection import Message, integer_of, text_of
from ppdist.launch.network import MOST_HOSTS, typed_hosts
from ppdist.launch.options import MOST_RESTARTS, MOST_SECONDS, Options
from ppdist.launch.topology import LaunchPlan, installed_version

_LIST_LIMIT, _WORD_LIMIT = MOST_HOSTS, 4096


@dataclass(frozen=True)
class Handshake:
    """One host's view of the run."""

    host: str  # which of `hosts` it is
    hosts: tuple[str, ...]  # addresses
    processes: int  # on this host
    device: str  # cpu, gpu or another kind of card
    script: str
    arguments: tuple[str, ...]
    ppdist: str  # versions
    paddle: str
    names: tuple[str, ...] = ()  # of the hosts, as they were typed
    max_restart: int = 0
    min_hosts: int = 0  # 0: all of them
    rejoin_seconds: int = 0
    attempt: int = 0  # how many worlds of the run this host has seen end
    changes: int = 0  # how many of them because a host went or came
    skip: tuple[int, ...] = ()  # steps that failed twice and are left out
    identity: str = ""  # of this fleetrun, drawn at random

    def message(self) -> Message:
        """As it is sent."""
        return {"type": "handshake"} | {
            each.name: getattr(self, each.name) for each in fields(self)
        }

    @property
    def place(self) -> int:
        """Of the host in --ips, from 0."""
        return self.hosts.index(self.host)

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on without hosts that are lost."""
        return 0 < self.min_hosts < len(self.hosts)

    @property
    def has_names(self) -> bool:
        """Whether hosts were named: names may get other addresses."""
        return self.names not in ((), self.hosts)

    def same_names(self, theirs: "Handshake") -> bool:
        """Whether the same hosts were typed; names may mean other addresses there."""
        return theirs.names == self.names != ()


def own_handshake(
    options: Options, plan: LaunchPlan, attempt: int, changes: int, skip: tuple[int, ...]
) -> Handshake:
    """What this host says."""
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
        identity=secrets.token_hex(16),
    )


def read_handshake(message: Message) -> Handshake | None:
    """None: the message holds no handshake."""
    if message["type"] != "handshake":
        return None
    values: dict[str, Any] = {
        "processes": integer_of(message, "processes", 1, 4096),
        "max_restart": integer_of(message, "max_restart", 0, MOST_RESTARTS),
        "min_hosts": integer_of(message, "min_hosts", 0, _LIST_LIMIT),
        "rejoin_seconds": integer_of(message, "rejoin_seconds", 0, MOST_SECONDS),
        "attempt": integer_of(message, "attempt", 0, MOST_RESTARTS),
        "changes": integer_of(message, "changes", 0, MOST_RESTARTS),
        "skip": steps_of(message),
        **{key: words_of(message, key) for key in ("hosts", "arguments", "names")},
    }
    if None in values.values() or len(values["names"]) not in (0, len(values["hosts"])):
        return None
    for each in fields(Handshake):
        if each.name not in values:
            values[each.name] = text_of(message, each.name, _WORD_LIMIT)
    return Handshake(**values) if values["host"] in values["hosts"] else None


def words_of(message: Message, key: str) -> tuple[str, ...] | None:
    """A list of texts in a message, or None."""
    words = message.get(key)
    if not isinstance(words, list) or len(words) > _LIST_LIMIT:
        return None
    if not all(isinstance(word, str) and len(word) <= _WORD_LIMIT for word in words):
        return None
    return tuple(words)


def steps_of(message: Message) -> tuple[int, ...] | None:
    """The steps to leave out in a message, or None."""
    steps = message.get("skip")
    if not isinstance(steps, list) or len(steps) > _LIST_LIMIT:
        return None
    if not all(type(step) is int and 0 < step < 10**12 for step in steps):
        return None
    return tuple(steps)


def differences(mine: Handshake, theirs: Handshake) -> list[str]:
    """What keeps two hosts from training together, with both sides."""
    found = []

    def differ(what: str, own: str, other: str, remedy: str) -> None:
        if own != other:
            found.append(f"{what}: {mine.host} has {own}, {theirs.host} has {other}; {remedy}")

    if not mine.same_names(theirs):
        remedy = "type the same hosts in the same order everywhere (rank 0's host stands first)"
        differ("--ips", ",".join(mine.hosts), ",".join(theirs.hosts), remedy)
    remedy = "ranks are numbered by it: give the same --nproc_per_node or number of cards"
    differ("processes on a host", str(mine.processes), str(theirs.processes), remedy)
    remedy = "gloo and NCCL cannot talk to each other: use cards on all hosts, or on none"
    differ("device", mine.device, theirs.device, remedy)
    remedy = "start the same script on every host"
    differ("script", PurePath(mine.script).name, PurePath(theirs.script).name, remedy)
    for own, other in _different_words(mine.arguments, theirs.arguments):
        has_path = ("/" in own or "/" in other) and "=" not in own + other
        same_file = has_path and PurePath(own).name == PurePath(other).name != ""
        if not same_file:
            remedy = "start every host with the same command"
            differ("arguments of the script", own or "none", other or "none", remedy)
    remedy = "hosts restart together: give the same --max_restart on every host"
    differ("restarts", str(mine.max_restart), str(theirs.max_restart), remedy)
    remedy = "hosts must agree on when to go on without one: give the same options on every host"
    differ("--min_hosts", str(mine.min_hosts), str(theirs.min_hosts), remedy)
    differ("--rejoin_seconds", str(mine.rejoin_seconds), str(theirs.rejoin_seconds), remedy)
    remedy = "install the same version on every host"
    differ("ppdist", mine.ppdist or "none", theirs.ppdist or "none", remedy)
    differ("paddle", mine.paddle or "none", theirs.paddle or "none", remedy)
    return found


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
    # Here, because reading Sections would take half of the time and memory of fleetrun's start.
    from ppdist.config.distributed import PER_HOST_KEYS

    kept = [word for word in words if word.partition("=")[0] not in PER_HOST_KEYS]
    alone = len(kept) < len(words)  # an -o may have lost all its values
    return [
        word
        for word, following in zip(kept, [*kept[1:], "-"])
        if not (alone and word == "-o" and following.startswith("-"))
    ]
