"""What a training on N cards takes, and what would help.

    network   seconds of an all-reduce on N cards
    step      seconds of one optimizer step
    training  epochs, evaluations, hours; what limits them; what would help

A step on N cards takes

    T(N) = max(T_in(N), k (t0 + b t1) + sigma c(N)) + delta [N > 1] + exposed + SyncBN

k micro-batches of b images; t0, t1: fixed and per image; sigma c(N): the slowest of N cards;
delta: what being one of several costs on any number of them.  A step waits for the loader or the
arithmetic, whichever is longer, and for the rest after either; a loader that fills its queue
during communication too does a little better.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from statistics import NormalDist

from ppdist.config.train import takers

_BACKWARD = 2 / 3  # of the arithmetic: two matrix products a layer there, one forward
# Bytes of the last bucket, which nothing is left to hide: last_comm_group_size_MB of Paddle's
# DataParallel is 1.
_LAST_BUCKET = 1 << 20
_HOPELESS = 50.0  # mean times between failures, in which nothing gets done
_LIMIT = 0.05  # of the hours: what takes less does not limit


@dataclass(frozen=True)
class Link:
    """Between two cards, or two hosts."""

    latency_seconds: float  # of one hop, however small the message
    bytes_per_second: float  # each way


ANY_LINK = Link(0.0, math.inf)  # of a cluster whose links play no part


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equally many cards."""

    hosts: int
    cards: int  # of each host
    inside: Link  # between the cards of one host
    across: Link  # between hosts; all cards of a host share it

    @property
    def size(self) -> int:
        """Cards in all."""
        return self.hosts * self.cards

    def __str__(self) -> str:
        return f"{self.hosts} x {self.cards}" if self.hosts > 1 else f"{self.cards}"


# Network: the latency-bandwidth model.


def ring_seconds(ranks: int, size: float, link: Link) -> float:
    """Seconds of a ring all-reduce of `size` bytes.

    Every rank sends its share 2 (n - 1) times: 2 (n - 1) latency + 2 (n - 1) / n size / bandwidth.
    The second term is the least that any algorithm of messages between pairs can take
    (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    """
    return 2 * (ranks - 1) * (link.latency_seconds + size / ranks / link.bytes_per_second)


def tree_seconds(ranks: int, size: float, link: Link) -> float:
    """Seconds of a tree all-reduce, up and down.

    2 log2(n) latency + 2 size / bandwidth.
    """
    if ranks == 1:
        return 0.0
    return 2 * math.log2(ranks) * link.latency_seconds + 2 * size / link.bytes_per_second


def all_reduces(size: float, cluster: Cluster) -> dict[str, float]:
    """Seconds of an all-reduce of `size` bytes, by algorithm.

    On several hosts a flat ring goes at the pace of the slower link.  In two levels (summed over
    the cards of a host, then over hosts, then handed back to the cards) only 2 (M - 1) / M of the
    size crosses between M hosts, whether one card of each sends all of it or each of them its part.
    """
    inside, across = cluster.inside, cluster.across
    if cluster.hosts == 1:
        return {
            "ring": ring_seconds(cluster.cards, size, inside),
            "tree": tree_seconds(cluster.cards, size, inside),
        }
    slower = Link(
        max(inside.latency_seconds, across.latency_seconds),
        min(inside.bytes_per_second, across.bytes_per_second),
    )
    if cluster.cards == 1:
        slower = across
    within = min(f(cluster.cards, size, inside) for f in (ring_seconds, tree_seconds))
    between = min(f(cluster.hosts, size, across) for f in (ring_seconds, tree_seconds))
    return {"ring": ring_seconds(cluster.size, size, slower), "two levels": within + between}


def all_reduce_seconds(size: float, cluster: Cluster) -> float:
    """By the fastest algorithm, as NCCL chooses; 0 on one card."""
    return min(all_reduces(size, cluster).values())


# Step


@dataclass(frozen=True)
class Job:
    """One training: measured on one card, predicted on N."""

    # A step on one card.
    fixed_seconds: float  # t0, of each micro-batch however few its images
    image_seconds: float  # t1
    batch: int  # images of a card in a micro-batch
    accumulate: int = 1
    # What more cards bring.
    jitter: float = 0.0  # standard deviation of a micro-batch's arithmetic / its mean
    speeds: tuple[float, ...] = ()  # of each card / that of the measured one; empty: all 1
    by_speed: bool = False  # they share micro-batches by these: distributed.shares
    parallel_seconds: float = 0.0  # delta
    parameters: float = 0.0  # gradients summed over cards, each ...
    gradient_bytes: int = 4  # ... so large on the wire
    overlap: float = 0.9  # part of the backward pass behind which float32 gradients can hide
    sync_bn_layers: int = 0
    # Images a second that can be read.
    card_input: float | None = None  # by the workers of one card
    host_input: float | None = None  # by one host
    total_input: float | None = None  # by all together: shared storage
    # The whole training.
    images: int = 0  # of the training set
    epochs: float = 0.0  # at `reference_batch`
    reference_batch: int = 0
    critical_batch: float | None = None  # at which twice the epochs are needed; None: not modelled
    whole_epochs: bool = False
    evaluation_images: int = 0
    evaluation_rate: float | None = None  # images a second of one card
    scoring_seconds: float = 0.0  # of an evaluation, after the boxes are found, on one rank
    evaluate_every: int = 1  # epochs
    sharded_evaluation: bool = True
    startup_seconds: float = 0.0
    # Hosts that fail, or are taken away.
    host_hours: float | None = None  # mean time between failures of one host; None: none fails
    away_seconds: float = 0.0  # until a lost host, or one in its place, is there
    restart_seconds: float = 0.0  # from then to the next step
    checkpoint_seconds: float = 0.0  # for which one holds up the steps
    checkpoint_epochs: float = 1.0  # from one to the next
    goes_on: bool = False  # without the lost host, until it is back


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause; they add up."""

    compute: float
    stragglers: float
    input: float
    parallel: float
    network: float
    sync_bn: float

    @property
    def seconds(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@cache
def slowest_of(count: int) -> float:
    """c(N): expected maximum of N standard normal variables.

    It is how many standard deviations the slowest of N equal cards lies above the mean: 0.56 of 2,
    1.42 of 8, 2.07 of 32.

        c(N) = integral of 1 - Phi(x)^N over x > 0  -  integral of Phi(x)^N over x < 0
    """
    if count == 1:
        return 0.0
    width, phi = 0.01, NormalDist().cdf
    # Trapezoids: of the value at 0, half a step.
    above = sum(1 - phi(width * i) ** count for i in range(1, 1000))
    below = sum(phi(-width * i) ** count for i in range(1, 1000))
    return width * (above - below + (1 - 2 * 0.5**count) / 2)


def input_seconds(job: Job, cluster: Cluster) -> float:
    """T_in: seconds to read a step's images; 0 without known rates."""
    of_card = job.batch * job.accumulate
    pairs = ((job.card_input, 1), (job.host_input, cluster.cards), (job.total_input, cluster.size))
    return max((of_card * cards / rate for rate, cards in pairs if rate), default=0.0)


def network_seconds(job: Job, cluster: Cluster) -> float:
    """Seconds of the gradients' all-reduce that the backward pass cannot hide.

    The backward pass is that of the last micro-batch: max(last bucket, all-reduce - overlap *
    backward); Li et al. 2020, arXiv:2006.15704.
    Gradients of fewer bytes than float32 are rounded and sent after it, and hide nothing.
    """
    if cluster.size == 1 or not job.parameters:
        return 0.0
    size = job.parameters * job.gradient_bytes
    backward = _BACKWARD * (job.fixed_seconds + job.batch * job.image_seconds)
    overlap = job.overlap if job.gradient_bytes == 4 else 0.0
    return max(
        all_reduce_seconds(min(size, _LAST_BUCKET), cluster),
        all_reduce_seconds(size, cluster) - overlap * backward,
    )


def step_time(job: Job, cluster: Cluster) -> StepTime:
    """The model at the top of this file."""
    count = cluster.size
    micro = job.fixed_seconds + job.batch * job.image_seconds
    compute = job.accumulate * micro
    # Independent micro-batches: their deviations add up as squares.
    sigma = job.jitter * micro * job.accumulate**0.5
    stragglers = sigma * slowest_of(count)
    if speeds := job.speeds[:count]:
        taken = takers(job.accumulate * count, speeds if job.by_speed else (1.0,) * count)
        last = max(taken.count(card) / speed for card, speed in enumerate(speeds))
        stragglers += last * micro - compute
    # Two sums over cards a layer, forward and backward, too small for bandwidth to matter.
    sums = 2 * job.sync_bn_layers * job.accumulate if count > 1 else 0
    return StepTime(
        compute=compute,
        stragglers=stragglers,
        input=max(0.0, input_seconds(job, cluster) - compute - stragglers),
        parallel=job.parallel_seconds if count > 1 else 0.0,
        network=network_seconds(job, cluster),
        sync_bn=sums * all_reduce_seconds(0, cluster),
    )


# Training

PARTS = {
    "compute": "arithmetic of the epochs at the reference batch",
    "stragglers": "waiting for the slowest card",
    "input": "waiting for images",
    "parallel": "fixed cost of data parallel",
    "network": "gradients on the network, not hidden behind the backward pass",
    "sync_bn": "latency of SyncBN",
    "evaluation": "evaluation",
    "epochs": "more epochs, which a large batch needs",
    "startup": "start-up",
    "failures": "checkpoints, lost hosts, and steps made again",
}


@dataclass(frozen=True)
class Prediction:
    """Of one job on one cluster."""

    cluster: Cluster
    total_batch: int
    step: StepTime
    images_per_second: float  # training, all cards
    efficiency: float  # images a second / (cards * those of one card)
    epochs: float
    hours: float  # 0: the job names no images or epochs
    parts: dict[str, float]  # hours by PARTS; they add up to `hours`
    limit: str  # of PARTS: where most hours go, apart from the arithmetic, if worth naming

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.cluster.size


def epochs_needed(job: Job, total_batch: int) -> float:
    """Epochs to the accuracy that `job.epochs` reach at the reference batch.

        E(B) = E(B_ref) (1 + B / B_c) / (1 + B_ref / B_c)

    B_c, the critical batch, is measured, not known beforehand; without it E is constant.  Never
    fewer than `job.epochs`, as `train.epochs_compensation` has it, and never less than a whole one
    where they are whole.
    Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.11: E = E_min (1 + B / B_crit).
    """
    epochs = job.epochs
    if job.critical_batch:
        reference = 1 + job.reference_batch / job.critical_batch
        epochs *= max(1.0, (1 + total_batch / job.critical_batch) / reference)
    return float(max(1, round(epochs))) if job.whole_epochs else epochs


def evaluation_seconds(job: Job, cards: int) -> float:
    """Of one evaluation; only one card works where it is not sharded."""
    if not job.evaluation_images or not job.evaluation_rate:
        return 0.0
    working = cards if job.sharded_evaluation else 1
    return job.evaluation_images / job.evaluation_rate / working + job.scoring_seconds


def failure_factor(job: Job, hosts: int, interval: float) -> float:
    """Wall clock with checkpoints and failures / without.

        T / T_s = M / tau  e^(R / M)  (e^((tau + delta) / M) - 1)

    M: mean time between failures of the job, that of a host / hosts; tau: `interval`, seconds of
    training between two checkpoints; delta: what one costs; R: from a loss to the next step.  Who
    waits for lost hosts has R = away + restart.  Who goes on has R = restart, a second restart when
    the host is back, and meanwhile the pace of the hosts that are there.
    Source: Daly 2006, doi:10.1016/j.future.2004.11.016, equation 20.
    """
    if not job.host_hours or not interval:
        return 1.0
    between = 3600 * job.host_hours / hosts
    goes_on = job.goes_on and hosts > 1
    back = job.restart_seconds + (0.0 if goes_on else job.away_seconds)
    restarting = math.exp(min(back / between, _HOPELESS))
    training = math.expm1(min((interval + job.checkpoint_seconds) / between, _HOPELESS))
    factor = between / interval * restarting * training
    if goes_on:
        away = job.away_seconds / (3600 * job.host_hours + job.away_seconds)
        factor *= (1 + job.restart_seconds / between) / (1 - away)
    return factor


def predict(job: Job, cluster: Cluster) -> Prediction:
    """The whole training, with its hours by what they are spent on."""
    total_batch = cluster.size * job.batch * job.accumulate
    step = step_time(job, cluster)
    alone = step_time(job, replace(cluster, hosts=1, cards=1))
    steps_of_epoch = math.ceil(job.images / total_batch)
    epochs = epochs_needed(job, total_batch)
    evaluations = math.ceil(epochs / job.evaluate_every)
    parts = {k: v * steps_of_epoch * job.epochs / 3600 for k, v in asdict(step).items()}
    parts["evaluation"] = evaluations * evaluation_seconds(job, cluster.size) / 3600
    # Rounding to whole epochs may take some off: then this is negative; the parts still add up.
    parts["epochs"] = (epochs - job.epochs) * steps_of_epoch * step.seconds / 3600
    interval = job.checkpoint_epochs * steps_of_epoch * step.seconds
    parts["failures"] = sum(parts.values()) * (failure_factor(job, cluster.hosts, interval) - 1)
    parts["startup"] = job.startup_seconds / 3600
    hours = sum(parts.values()) if job.images and job.epochs else 0.0
    lost = parts if hours else asdict(step)
    worst = max((name for name in lost if name != "compute"), key=lambda name: lost[name])
    return Prediction(
        cluster=cluster,
        total_batch=total_batch,
        step=step,
        images_per_second=total_batch / step.seconds,
        efficiency=alone.seconds / step.seconds,
        epochs=epochs,
        hours=hours,
        parts=parts,
        limit=worst if lost[worst] > _LIMIT * sum(lost.values()) else "compute",
    )


def clusters_up_to(cluster: Cluster) -> list[Cluster]:
    """Clusters of 1, 2, 4, ... cards up to the requested one.

    Cards of one host first, then 2, 4, ... hosts.
    """

    def doubling(last: int) -> list[int]:
        return [*(1 << i for i in range(last.bit_length()) if 1 << i < last), last]

    return [
        *(replace(cluster, hosts=1, cards=n) for n in doubling(cluster.cards)),
        *(replace(cluster, hosts=n) for n in doubling(cluster.hosts) if n > 1),
    ]


def what_ifs(job: Job, cluster: Cluster) -> list[tuple[str, Prediction]]:
    """Possible changes, the most helpful first; accuracy is not considered."""
    changed = [(name, predict(j, c)) for name, j, c in _changes(job, cluster)]
    return sorted(changed, key=lambda pair: pair[1].hours or 1 / pair[1].images_per_second)


def _changes(job: Job, cluster: Cluster) -> Iterator[tuple[str, Job, Cluster]]:
    """(name, job, cluster) of each change that means something here."""
    several = cluster.size > 1
    if several and job.gradient_bytes == 4:
        yield "bfloat16 gradients", replace(job, gradient_bytes=2), cluster
    if cluster.hosts > 1:
        link = replace(cluster.across, bytes_per_second=2 * cluster.across.bytes_per_second)
        yield "a link twice as fast between hosts", job, replace(cluster, across=link)
    if job.card_input:
        yield "twice the loader workers", replace(job, card_input=2 * job.card_input), cluster
    if job.host_input:
        faster = replace(job, host_input=2 * job.host_input)
        yield "a host that reads twice as fast", faster, cluster
    if job.total_input:
        faster = replace(job, total_input=2 * job.total_input)
        yield "shared storage twice as fast", faster, cluster
    if several and job.evaluation_images and not job.sharded_evaluation:
        yield "evaluation on all cards", replace(job, sharded_evaluation=True), cluster
    if job.evaluation_images:
        rarer = replace(job, evaluate_every=2 * job.evaluate_every)
        yield "half as many evaluations", rarer, cluster
    if job.host_hours:
        often = replace(job, checkpoint_epochs=job.checkpoint_epochs / 2)
        yield "checkpoints twice as often", often, cluster
        if cluster.hosts > 1 and not job.goes_on:
            yield "going on without a lost host", replace(job, goes_on=True), cluster
    if several and job.sync_bn_layers:
        yield "no SyncBN", replace(job, sync_bn_layers=0), cluster
    if several and job.jitter:
        yield "cards of even speed (no jitter)", replace(job, jitter=0.0), cluster
    if several and len(set(job.speeds)) > 1 and not job.by_speed:
        yield "micro-batches by speed (distributed.shares)", replace(job, by_speed=True), cluster
    if several:
        yield "twice the accumulation", replace(job, accumulate=2 * job.accumulate), cluster
    yield "twice the batch per card", replace(job, batch=2 * job.batch), cluster
    if job.batch > 1:
        yield "half the batch per card", replace(job, batch=job.batch // 2), cluster
