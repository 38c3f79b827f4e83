"""Membership: which hosts of a job train together, world after world.

A world is a numbered set of hosts that train together.  The first needs all hosts of --ips.  Where
one ends because a host was lost, left or came back, those that are there form the next:

    gathering   each host follows the first host of --ips that it reaches: the hub of all
    proposal    the hub proposes a world; its hosts agree, and remember that they did
    world       all have agreed; it begins

Two worlds never train at once.  One of all hosts may always begin.  Where hosts share output_dir,
the hub of fewer needs the lease in it.
Elsewhere a world needs more than half of the hosts of the last one, and of each that was proposed
since and may have begun unheard.  A fleetrun that was started anew remembers neither, so it has no
vote, unless all of the last world are there and half of them remember.

Source: Yeger Lotem, Keidar and Dolev, Dynamic Voting for Consistent Primary Components, PODC 1997.

Hosts are counted by their place in --ips.  No sockets, no clock: rendezvous.py drives it, and a
simulator in the tests does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_PROPOSAL_SECONDS = 10.0  # for all hosts of a proposal to agree
_HIGHER_SECONDS = 2.0  # after which a host that reached none before it in --ips calls those after
_MOST_WORLDS = 4096  # in a message
_KNOCK_SECONDS = 10.0  # a host that waits to be taken in asks each second

Message = dict[str, Any]


class World(NamedTuple):
    """Hosts that train together, and how many worlds came before."""

    number: int  # the first is 1
    places: frozenset[int]
    base: int = 0  # number of the newest world of which its hosts knew


_NO_WORLD = World(0, frozenset())


@dataclass
class Memory:
    """What one fleetrun remembers of the worlds of its job."""

    formed: World = _NO_WORLD  # the newest of which it heard that all had agreed
    proposed: list[World] = field(default_factory=list)  # later ones, to which it agreed
    abandoned: list[World] = field(default_factory=list)  # it proposed them; they never begin
    left: frozenset[int] = frozenset()  # of `formed`: said that they go, and remember no more
    awaited: frozenset[int] = frozenset()  # asked to be taken into the next
    shared_output: str = ""  # an output_dir that all hosts share, so that a lease in it decides

    def message(self) -> Message:
        """As it is sent."""
        return {
            "formed": _listed(self.formed),
            "proposed": [_listed(world) for world in self.proposed],
            "abandoned": [_listed(world) for world in self.abandoned],
            "left": sorted(self.left),
            "awaited": sorted(self.awaited),
            "shared_output": self.shared_output,
        }

    @classmethod
    def read(cls, message: Message, hosts: int) -> "Memory | None":
        """The memory in a message, or None.

        None: it holds no memory of a job of so many hosts.
        """
        formed = _world(message.get("formed"), hosts)
        proposed, abandoned = (
            _worlds(message.get(key), hosts) for key in ("proposed", "abandoned")
        )
        left, awaited = (_places(message.get(key), hosts) for key in ("left", "awaited"))
        if formed is None or proposed is None or abandoned is None:
            return None
        if left is None or awaited is None:
            return None
        shared = message.get("shared_output")
        if not isinstance(shared, str):
            return None
        return cls(formed, proposed, abandoned, left, awaited, shared)

    def form(self, world: World) -> None:
        """All hosts of a world have agreed to it."""
        self.formed, self.proposed, self.abandoned = world, [], []
        self.left = self.awaited = frozenset()


def _by_number(world: World) -> int:
    return world.number


def _listed(world: World) -> list[Any]:
    return [world.number, sorted(world.places), world.base]


def _world(value: Any, hosts: int) -> World | None:
    if not isinstance(value, list) or len(value) != 3:
        return None
    number, listed, base = value
    places = _places(listed, hosts)
    if places is None or not all(
        type(each) is int and 0 <= each < 10**9 for each in (number, base)
    ):
        return None
    return World(number, places, base)


def _worlds(value: Any, hosts: int) -> list[World] | None:
    if not isinstance(value, list) or len(value) > _MOST_WORLDS:
        return None
    found = [_world(each, hosts) for each in value]
    known = [world for world in found if world is not None]
    return known if len(known) == len(found) else None


def _places(value: Any, hosts: int) -> frozenset[int] | None:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        return None
    return frozenset(value) if all(0 <= each < hosts for each in value) else None


class Present:
    """The hosts that follow a hub, and what together they remember."""

    def __init__(self, memories: Mapping[int, Memory]) -> None:
        self.memories = memories
        self.formed = max((each.formed for each in memories.values()), key=_by_number)
        same = [each for each in memories.values() if each.formed == self.formed]
        self.left = frozenset[int]().union(*(each.left for each in same))
        self.awaited = frozenset[int]().union(*(each.awaited for each in same))
        self.abandoned = {world for each in memories.values() for world in each.abandoned}
        every = {world for each in memories.values() for world in each.proposed}
        self.proposed = {world for world in every if self._may_have_begun(world)}
        known = (self.formed, *every, *self.abandoned)
        self.next_number = 1 + max(world.number for world in known)
        # A hub that was started anew learns of it from the others.
        told = (each.shared_output for each in memories.values())
        self.shared_output = next(filter(None, told), "")

    def _may_have_begun(self, world: World) -> bool:
        """Whether a proposed world may train, as far as these hosts know."""
        if world.number <= self.formed.number or world in self.abandoned:
            return False
        return not any(
            place in world.places and memory.formed.number == world.base > 0
            and world not in memory.proposed  # so it was there, and did not agree
            for place, memory in self.memories.items()
        )  # fmt: skip

    @property
    def lost(self) -> frozenset[int]:
        """Hosts of the last world that are missing and did not leave."""
        last = max((self.formed, *self.proposed), key=_by_number)
        return last.places - self.left - self.memories.keys()

    @property
    def absent(self) -> frozenset[int]:
        """Hosts that asked to be taken in, and are not here yet."""
        return self.awaited - self.memories.keys()

    def lacks(self, world: World, without: Iterable[int] = ()) -> str:
        """Why other hosts of an earlier world may train already, or ""."""
        asked = world.places - frozenset(without)
        there = asked & self.memories.keys()
        knowing = [
            place
            for place in there
            if self.memories[place].formed == world or world in self.memories[place].proposed
        ]
        if 2 * len(knowing) > len(asked) or (there == asked and 2 * len(knowing) == len(asked)):
            return ""
        return (
            f"{len(knowing)} of the {len(asked)} hosts that trained last are here and remember it; "
            "more than half are needed, for the others may train without these"
        )


class Gathering:
    """One host until the next world begins.

    Attributes:
        hub: the host that this one follows; itself: it is the hub of those that follow it.
        world: that has begun; None before.
        waits_for: why the hub proposes no world yet, as text for a message.
    """

    def __init__(
        self,
        memory: Memory,
        place: int,
        hosts: int,
        min_hosts: int,
        rejoin_seconds: float,
        now: float,
        send: Callable[[int, Message], None],
        drop: Callable[[int], None],
        take_lease: Callable[[str], bool] = lambda folder: True,
    ) -> None:
        """
        Args:
            place: of this host.
            hosts: of --ips.
            min_hosts: fewer never train.
            rejoin_seconds: how long to wait for a host of the last world once enough are here.
            now: seconds of any clock that goes on.
            send: a message to a host that was met.
            drop: ends the connection to a host.
            take_lease: whether this host holds the lease in this folder now.
        """
        self._memory, self.place, self._hosts = memory, place, hosts
        self._least, self._rejoin, self._began = min_hosts, rejoin_seconds, now
        self._send, self._drop, self._take_lease = send, drop, take_lease
        self.hub, self.waits_for = place, ""
        self.world: World | None = None
        self._followers: dict[int, Memory] = {}
        self._proposal: World | None = None
        self._proposed = now
        self._enough: float | None = None  # since when enough hosts are here for the next world
        self._agreed: set[int] = set()

    @property
    def followers(self) -> list[int]:
        return sorted(self._followers)

    def wanted(self, now: float) -> list[int]:
        """Hosts that this one should call."""
        if self.hub != self.place:
            return []
        waited, before = now - self._began, self.place
        if self._least == self._hosts:
            before = min(before, 1)
        elif before:  # of a thousand not all at once
            before = min(before, int(waited) + 1)
        after = self.place == 0 or (self._least < self._hosts and waited > _HIGHER_SECONDS)
        places = (*range(before), *range(self.place + 1, self._hosts if after else 0))
        return [place for place in places if place not in self._followers]

    def meet(self, place: int) -> None:
        """A connection to a host that was started alike."""
        if place < self.hub and (place == 0 or self._least < self._hosts):
            self._send(place, {"type": "join", **self._memory.message()})
        elif place < self.place:  # this host follows one that stands before it
            self._drop(place)

    def hear(self, place: int, message: Message) -> bool:
        """Acts on a met host's message; False: the message is invalid."""
        kind = message["type"]
        if kind == "join":
            memory = Memory.read(message, self._hosts)
            if memory is None:
                return False
            if self.hub == self.place:
                self._followers[place] = memory
                self._send(place, {"type": "joined"})
            else:
                self._send_away(place)
        elif kind == "joined":
            if place < self.hub:
                self._follow(place)
            elif place != self.hub:
                self._drop(place)
        elif kind == "moved":
            self._drop(place)
            self.lose(place)
        elif kind in ("world", "agreed", "begin"):
            world = _world(message.get("world"), self._hosts)
            if world is None:
                return False
            self._negotiate(kind, place, world)
        else:
            return False
        return True

    def lose(self, place: int) -> None:
        """A connection has ended."""
        if place == self.hub != self.place:
            self.hub = self.place
        self._followers.pop(place, None)
        if self._proposal is not None and place in self._proposal.places:
            self._abandon()

    def tick(self, now: float) -> None:
        """Proposes a world once it may."""
        if self.hub != self.place or self.world is not None:
            return
        if self._proposal is not None:
            if now - self._proposed > _PROPOSAL_SECONDS:
                for place in self._proposal.places - self._agreed:
                    self._drop(place)
                    self.lose(place)
            return
        present = Present({self.place: self._memory, **self._followers})
        self.waits_for = self._obstacle(present, now)
        if not self.waits_for:
            places = frozenset(present.memories)
            world = World(present.next_number, places, present.formed.number)
            self._proposal, self._agreed, self._proposed = world, {self.place}, now
            self._memory.proposed.append(world)
            for place in self._followers:
                self._send(place, {"type": "world", "world": _listed(world)})
            self._begin_if_agreed()

    def _obstacle(self, present: Present, now: float) -> str:
        """Why no world may begin yet, or ""."""
        if len(present.memories) == self._hosts:  # nobody is left who could train elsewhere
            return ""
        lacking = self._lacking(present)
        if lacking:
            self._enough = None
            return lacking
        if self._enough is None:
            self._enough = now
        waited = now - self._enough
        if present.lost and waited < self._rejoin:
            return f"waiting up to {self._rejoin:g} s (--rejoin_seconds) for lost hosts"
        if present.absent and waited < _KNOCK_SECONDS:
            return "waiting for hosts that asked to be taken in"
        folder = present.shared_output
        if folder and not self._take_lease(folder):
            return f"another host holds the lease in {folder}"
        return ""

    def _lacking(self, present: Present) -> str:
        """Why too few are here for a smaller world, or ""."""
        count = len(present.memories)
        if not present.formed.number and not present.proposed:
            return "the first steps need all hosts of --ips"
        if count < self._least:
            return f"{count} of at least {self._least} hosts (--min_hosts) are here"
        if present.shared_output:
            return ""
        lacking = [present.lacks(world) for world in present.proposed]
        return next(filter(None, [present.lacks(present.formed, present.left), *lacking]), "")

    def _negotiate(self, kind: str, place: int, world: World) -> None:
        if kind == "agreed":
            if place in self._followers:
                self._followers[place].proposed.append(world)
            if world == self._proposal:
                self._agreed.add(place)
                self._begin_if_agreed()
        elif place == self.hub and kind == "world":
            self._memory.proposed.append(world)
            self._send(place, {"type": "agreed", "world": _listed(world)})
        elif place == self.hub:
            self._begin(world)

    def _begin_if_agreed(self) -> None:
        world = self._proposal
        if world is not None and self._agreed == world.places:
            for place in sorted(world.places - {self.place}):
                self._send(place, {"type": "begin", "world": _listed(world)})
            self._begin(world)

    def _begin(self, world: World) -> None:
        for place in self._followers.keys() - world.places:  # came too late
            self._send_away(place)
        self._memory.form(world)
        self.world, self._proposal = world, None

    def _follow(self, place: int) -> None:
        """Follows a host that stands before the one so far."""
        if self.hub != self.place:
            self._drop(self.hub)
        for each in self.followers:
            self._send_away(each)
        self._abandon()
        self._followers = {}
        self.hub = place

    def _abandon(self) -> None:
        """Gives up the proposal; no host has heard that all agreed."""
        if self._proposal is not None:
            self._memory.abandoned.append(self._proposal)
            self._memory.proposed.remove(self._proposal)
            self._proposal = None

    def _send_away(self, place: int) -> None:
        self._send(place, {"type": "moved"})
        self._drop(place)


class Knocks:
    """Hosts that ask the hub of a running world to join."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}

    def hear(self, place: int, now: float) -> None:
        self._heard[place] = now

    def waiting(self, now: float) -> frozenset[int]:
        """Those that asked just now."""
        return frozenset(
            place for place, heard in self._heard.items() if now - heard < _KNOCK_SECONDS
        )
