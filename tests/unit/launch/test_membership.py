"""Random losses, returns, cuts and slow links: two worlds never train at once, and none hangs."""

import itertools
import random
from collections import deque
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field

import pytest

from ppdist.launch.membership import Gathering, Knocks, Memory, Message, World

FOLDER = "/runs/x"
REJOIN, DETECT, STEPS_A_CHECKPOINT = 20.0, 15.0, 4


@dataclass
class Link:
    """A connection between two hosts; messages arrive in order, and late."""

    seconds: float
    queue: deque[tuple[float, int, Message]] = field(default_factory=deque)  # when, to whom, what
    cut: float | None = None  # since when nothing passes; both ends notice later


class Host:
    """fleetrun on one host; killed and started again it has forgotten."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.memory, self.gathering, self.knocks = Memory(), None, Knocks()
        self.gathering: Gathering | None
        self.world: World | None = None  # that it trains in, as far as it knows
        self.generation = 0  # of the training that this fleetrun took part in last


class Simulation:
    """A job on hosts whose network and power fail as a seed says."""

    def __init__(self, seed: int, shared: bool) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(2, 6)
        self.least = self.random.randint(1, self.count)
        self.shared, self.lease = shared, None
        self.lease: Host | None
        self.now, self.step, self.cuts = 0.0, 0, set()
        self.cuts: set[frozenset[int]]
        self.alive: dict[int, Host] = {}
        self.links: dict[frozenset[int], Link] = {}
        self.trains: list[Host] = []  # hosts that made the last step
        self.generation = self.made = 0
        # Of each host's newest checkpoint, generation and step; and of one that all hosts wrote.
        self.saved, self.safe = dict.fromkeys(range(self.count), (0, 0)), (0, 0)
        for place in range(self.count):
            self.start(place)

    # What happens to hosts

    def start(self, place: int) -> None:
        self.alive[place] = Host(place)
        self.gather(self.alive[place])

    def kill(self, place: int) -> None:
        host = self.alive.pop(place)
        if self.lease is host:
            self.lease = None
        for pair in [pair for pair in self.links if place in pair]:
            self.end_link(pair)
        self.end_worlds_with({place})

    def gather(self, host: Host) -> None:
        host.world, place = None, host.place
        for pair in [pair for pair in self.links if place in pair]:
            self.end_link(pair)

        def take_lease(folder: str) -> bool:
            assert folder == FOLDER
            self.lease = self.lease or host
            return self.lease is host

        host.memory.awaited |= host.knocks.waiting(self.now)
        host.gathering = Gathering(
            host.memory, place, self.count, self.least, REJOIN, self.now,
            lambda to, message: self.send(place, to, message),
            lambda other: self.end_link(frozenset({place, other}), told=place),
            take_lease,
        )  # fmt: skip

    def send(self, own: int, to: int, message: Message) -> None:
        link = self.links.get(frozenset({own, to}))
        if link is not None:
            last = link.queue[-1][0] if link.queue else 0.0
            late = self.now + link.seconds * self.random.random()
            link.queue.append((max(last, late), to, message))

    def end_link(self, pair: frozenset[int], told: int = -1) -> None:
        """Args: told: the end that closes it, after what it has sent."""
        link = self.links.get(pair)
        if link is None:
            return
        if told >= 0 and link.cut is None:
            (other,) = pair - {told}
            self.send(told, other, {"type": "closed"})
            link.queue = deque(each for each in link.queue if each[1] == other)
            return
        del self.links[pair]
        for place in pair & self.alive.keys():
            gathering = self.alive[place].gathering
            if gathering is not None:
                gathering.lose(min(pair - {place}))

    def reaches(self, one: int, other: int) -> bool:
        return {one, other} <= self.alive.keys() and frozenset({one, other}) not in self.cuts

    # What passes in a second

    def tick(self) -> None:
        self.now += 1.0
        for pair in [*self.links]:
            self.deliver(pair)
        for host in [*self.alive.values()]:
            if host.gathering is not None:
                self.look(host)
        self.train()

    def deliver(self, pair: frozenset[int]) -> None:
        link = self.links.get(pair)
        if link is None:
            return
        if pair in self.cuts:
            link.cut = self.now if link.cut is None else link.cut
            if self.now - link.cut > DETECT:
                self.end_link(pair)
            return
        link.cut = None
        while link.queue and link.queue[0][0] <= self.now and self.links.get(pair) is link:
            _, to, message = link.queue.popleft()
            if message["type"] == "closed":
                self.end_link(pair)
            elif (gathering := self.alive[to].gathering) is not None:
                assert gathering.hear(min(pair - {to}), message)
                self.begin(self.alive[to])

    def look(self, host: Host) -> None:
        gathering = host.gathering
        assert gathering is not None
        for place in range(self.count):
            pair = frozenset({host.place, place})
            if place not in gathering.wanted(self.now) or not self.reaches(host.place, place):
                continue
            other = self.alive[place]
            if other.gathering is None:  # only a hub listens while a world trains
                if other.world is not None and place == min(other.world.places):
                    other.knocks.hear(host.place, self.now)
            elif pair not in self.links:
                self.links[pair] = Link(self.random.choice((0.2, 0.2, 1.0, 4.0)))
                other.gathering.meet(host.place)
                gathering.meet(place)
        gathering.tick(self.now)
        self.begin(host)
        if self.lease is host and gathering.hub != host.place:
            self.lease = None

    def begin(self, host: Host) -> None:
        if host.gathering is None or host.gathering.world is None:
            return
        world = host.gathering.world
        host.world, host.gathering, host.knocks = world, None, Knocks()
        for pair in [
            pair for pair in self.links if host.place in pair and not pair <= world.places
        ]:
            self.end_link(pair, told=host.place)  # as rendezvous.py does

    # Training

    def train(self) -> None:
        worlds = {host.world for host in self.alive.values() if host.world is not None}
        complete = [world for world in worlds if self.is_complete(world)]
        assert len(complete) <= 1, f"two worlds train at once: {complete}"
        for world in worlds:  # as silence is noticed in the end
            if not self.is_complete(world) and self.random.random() < 2 / DETECT:
                self.end_worlds_with(world.places, world)
        for world in complete:
            self.make_step(world)

    def is_complete(self, world: World) -> bool:
        there = [self.alive.get(place) for place in world.places]
        pairs = itertools.combinations(world.places, 2)
        linked = all(self.reaches(one, other) for one, other in pairs)
        return linked and all(host is not None and host.world == world for host in there)

    def make_step(self, world: World) -> None:
        hosts = [self.alive[place] for place in sorted(world.places)]
        if hosts != self.trains:
            start = max(self.saved[host.place] for host in hosts)
            if self.shared:
                start = max(self.saved.values())
            assert start >= self.safe, "steps that all hosts have saved are made again"
            self.generation = 1 + max(start[0], *(host.generation for host in hosts))
            self.trains, self.step = hosts, start[1]
            for host in hosts:
                host.generation = self.generation
                host.memory.shared_output = FOLDER if self.shared else ""
        self.step += 1
        self.made += 1
        if self.step % STEPS_A_CHECKPOINT == 0:
            self.save(hosts)
            if hosts[0].knocks.waiting(self.now):
                self.end_worlds_with(world.places, world)

    def save(self, hosts: list[Host]) -> None:
        """A checkpoint, which a full disk may refuse."""
        written = [host for host in hosts if self.random.random() < 0.9]
        for host in written:
            self.saved[host.place] = (self.generation, self.step)
        if written == hosts:
            self.safe = (self.generation, self.step)

    def end_worlds_with(self, places: Collection[int], world: World | None = None) -> None:
        """The hosts of these worlds gather again."""
        for host in [*self.alive.values()]:
            mine = host.world
            if mine is not None and (mine == world or (world is None and mine.places & {*places})):
                self.gather(host)

    def leave(self, place: int) -> None:
        """A host says that it goes, after a checkpoint."""
        world = self.alive[place].world
        if world is None or not self.is_complete(world):
            return
        hosts = [self.alive[each] for each in sorted(world.places)]
        if hosts == self.trains:
            self.save(hosts)
        for host in hosts:
            host.memory.left |= {place}
        self.kill(place)

    def disturb(self) -> None:
        kind = self.random.choice(("kill", "start", "cut", "heal", "leave", "split", "kill"))
        place, other = self.random.sample(range(self.count), 2)
        if kind == "kill" and place in self.alive:
            self.kill(place)
        elif kind == "leave" and place in self.alive:
            self.leave(place)
        elif kind == "start" and place not in self.alive:
            self.start(place)
        elif kind == "cut":
            self.cuts.add(frozenset({place, other}))
        elif kind == "heal":
            self.cuts.clear()
        elif kind == "split":
            one = set(self.random.sample(range(self.count), self.random.randint(1, self.count - 1)))
            others = set(range(self.count)) - one
            self.cuts |= {frozenset({a, b}) for a in one for b in others}

    def check_progress(self) -> None:
        """More than half of the hosts of each world that may train are connected: they go on."""
        known = [host.memory for host in self.alive.values()]
        newest = max((memory.formed for memory in known), default=World(0, frozenset()))
        worlds = {newest, *(world for memory in known for world in memory.proposed)}
        votes = {world: 0 for world in worlds if world.number >= newest.number > 0}
        for memory in known:
            for world in {memory.formed, *memory.proposed} & votes.keys():
                votes[world] += 1
        told = any(memory.shared_output for memory in known)
        enough = all(2 * votes[world] > len(world.places) for world in votes)
        if votes and len(known) >= self.least and (enough or told):
            before = self.made
            for _ in range(90):
                self.tick()
            assert self.made > before, "enough hosts are there and do not train"

    def run(self) -> None:
        for _ in range(self.random.randint(2, 8)):
            for _ in range(self.random.randint(1, 40)):
                self.tick()
            self.disturb()
        self.cuts.clear()
        self.check_progress()
        for place in range(self.count):  # as an operator does
            if place not in self.alive:
                self.start(place)
        before = self.made
        for _ in range(150):
            self.tick()
        assert self.made > before, "hosts that are all there do not train"
        assert len(self.trains) == self.count, "a host was not taken in"


@pytest.mark.parametrize("shared", [False, True], ids=["majority", "lease"])
def test_random_schedules(shared: bool) -> None:
    for seed in range(150):
        Simulation(seed, shared).run()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["majority", "lease"])
def test_five_thousand_random_schedules(shared: bool) -> None:
    for seed in range(1000, 6000):
        Simulation(seed, shared).run()


ALL = World(1, frozenset(range(5)))
FRESH, KNOWS = Memory(), Memory(ALL)
NEXT = World(2, frozenset({0, 1, 2}), base=1)


def agreed(*worlds: World) -> Memory:
    return Memory(ALL, proposed=[*worlds])


@pytest.mark.parametrize(
    ("memories", "may"),
    [
        ({0: KNOWS, 1: KNOWS, 2: KNOWS}, True),
        ({0: KNOWS, 1: KNOWS}, False),
        ({0: KNOWS, 1: FRESH, 2: FRESH}, False),  # those forgot what they agreed to since
        ({1: agreed(NEXT), 3: KNOWS, 4: KNOWS}, False),  # 0 and 2 may train by that
        ({1: agreed(NEXT), 2: KNOWS, 3: KNOWS}, True),  # 2 never agreed, so it never began
        ({0: Memory(ALL, abandoned=[NEXT]), 1: agreed(NEXT), 3: KNOWS}, True),
        ({1: agreed(NEXT), 2: agreed(NEXT), 3: KNOWS}, True),
        ({3: KNOWS, 4: KNOWS, 0: Memory(ALL, left=frozenset({2}))}, True),
        ({3: KNOWS, 4: Memory(ALL, left=frozenset({0, 1}))}, True),  # two of the three that stay
    ],
)
def test_a_world_needs_votes_of_hosts_that_remember(memories: dict[int, Memory], may: bool) -> None:
    said: list[Message] = []
    first = min(memories)
    own = deepcopy(memories[first])
    hub = Gathering(own, first, 5, 1, 0.0, 0.0, lambda _, message: said.append(message), print)
    for place in memories.keys() - {first}:
        read = Memory.read(memories[place].message(), 5)
        assert read == memories[place]
        hub.hear(place, {"type": "join", **memories[place].message()})
    hub.tick(30.0)
    assert ("world" in [message["type"] for message in said]) == may, hub.waits_for


def test_a_hub_cut_off_for_long_gives_late_hosts_their_time() -> None:
    """Enough were here only after its own waiting; the rest may be a second behind."""
    said: list[Message] = []
    hub = Gathering(
        deepcopy(KNOWS), 0, 5, 1, 10.0, 0.0, lambda _, message: said.append(message), print
    )
    for place, now in ((1, 100.0), (2, 101.0)):
        hub.hear(place, {"type": "join", **KNOWS.message()})
        hub.tick(now)
    hub.tick(110.0)
    assert "world" not in [message["type"] for message in said]
    hub.tick(111.0)
    assert "world" in [message["type"] for message in said], hub.waits_for
