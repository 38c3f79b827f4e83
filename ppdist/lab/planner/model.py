"""Predicts training speed on N cards with a model.

A step on N cards takes

    T(N) = max(T_in, (t0 + b t1) (1 + sigma c(N))) + delta [N > 1] + exposed

b: images per card; t0, t1: fixed and per image; sigma c(N): the slowest of N cards; delta: the
    cost of being one of several cards on a host; exposed: the part of the gradients' all-reduce
    between hosts that the backward pass does not hide.  A step waits for the loader or the
    arithmetic, whichever is longer, and then for the rest.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from statistics import NormalDist

_BACKWARD = 2 / 3  # of the arithmetic: two matrix products per layer, and one in forward
# Bytes of the last bucket, whose all-reduce nothing can hide: last_comm_group_size_MB of Paddle's
# DataParallel is 1.
_LAST_BUCKET = 1 << 20
_LIMIT = 0.05  # of the step: a cause below this is not a limit


@dataclass(frozen=True)
class Link:
    """A link between two hosts."""

    latency_seconds: float  # per hop, however small the message
    bytes_per_second: float  # in each direction


ANY_LINK = Link(0.0, math.inf)  # for a single host


@dataclass(frozen=True)
class Cluster:
    """A number of equal hosts with equally many cards."""

    hosts: int
    cards: int  # per host
    across: Link = ANY_LINK  # between hosts; all cards of a host share it

    @property
    def size(self) -> int:
        """Returns the number of cards in all hosts."""
        return self.hosts * self.cards

    def __str__(self) -> str:
        return f"{self.hosts} x {self.cards}" if self.hosts > 1 else f"{self.cards}"


def all_reduce_seconds(size: float, cluster: Cluster) -> float:
    """Predicts the seconds that a ring all-reduce of `size` bytes over the hosts takes.

    Every host sends its share 2 (M - 1) times: 2 (M - 1) latency + 2 (M - 1) / M size / bandwidth,
    whether one card per host sends the whole share or each card sends its part.  The second term
    is the minimum for any algorithm with messages between pairs (NVIDIA/nccl-tests,
    doc/PERFORMANCE.md).  The time among the cards of one host is in `parallel_seconds`.
    """
    hosts, link = cluster.hosts, cluster.across
    return 2 * (hosts - 1) * (link.latency_seconds + size / hosts / link.bytes_per_second)


# Step


@dataclass(frozen=True)
class Job:
    """A training job, measured on one card and predicted on N."""

    fixed_seconds: float  # t0 of a step on one card, however few images it has
    image_seconds: float  # t1
    batch: int  # images per card
    jitter: float = 0.0  # sigma: standard deviation of a step's arithmetic / its mean
    parallel_seconds: float = 0.0  # delta
    parameters: float = 0.0  # number of parameters, whose float32 gradients are summed
    overlap: float = 0.9  # part of the backward pass that can hide their all-reduce
    card_input: float | None = None  # images per second of the loader of one card
    images: int = 0  # in the training set
    epochs: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """The seconds per step by cause, which add up to the whole step."""

    compute: float
    stragglers: float
    input: float
    parallel: float
    network: float

    @property
    def seconds(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def limit(self) -> str:
        """Names the largest cause of lost time, or "compute" if none is large."""
        lost_seconds = {
            name: seconds for name, seconds in asdict(self).items() if name != "compute"
        }
        worst = max(lost_seconds, key=lambda name: lost_seconds[name])
        return worst if lost_seconds[worst] > _LIMIT * self.seconds else "compute"


@cache
def slowest_of(count: int) -> float:
    """Computes c(N), the expected maximum of N standard normal variables.

    It is how many standard deviations the slowest of N equal cards is above the mean: 0.56 for 2
    cards, 1.42 for 8, 2.07 for 32.

        c(N) = integral of 1 - Phi(x)^N over x > 0  -  integral of Phi(x)^N over x < 0
    """
    if count == 1:
        return 0.0
    width, phi = 0.01, NormalDist().cdf
    # Trapezoidal rule: the value at 0 counts for half a step.
    above = sum(1 - phi(width * i) ** count for i in range(1, 1000))
    below = sum(phi(-width * i) ** count for i in range(1, 1000))
    return width * (above - below + (1 - 2 * 0.5**count) / 2)


def network_seconds(job: Job, cluster: Cluster) -> float:
    """Predicts the seconds of the gradient all-reduce that the backward pass cannot hide.

    max(last bucket, all-reduce - overlap * backward); Li et al. 2020, arXiv:2006.15704.
    """
    if cluster.hosts == 1:
        return 0.0
    size = 4 * job.parameters
    backward = _BACKWARD * (job.fixed_seconds + job.batch * job.image_seconds)
    return max(
        all_reduce_seconds(min(size, _LAST_BUCKET), cluster),
        all_reduce_seconds(size, cluster) - job.overlap * backward,
    )


def step_time(job: Job, cluster: Cluster) -> StepTime:
    """Predicts a step with the model at the top of this file."""
    compute = job.fixed_seconds + job.batch * job.image_seconds
    stragglers = job.jitter * compute * slowest_of(cluster.size)
    reading = job.batch / job.card_input if job.card_input else 0.0
    return StepTime(
        compute=compute,
        stragglers=stragglers,
        input=max(0.0, reading - compute - stragglers),
        parallel=job.parallel_seconds if cluster.size > 1 else 0.0,
        network=network_seconds(job, cluster),
    )


# Training


@dataclass(frozen=True)
class Prediction:
    """The speed and duration of one job on one cluster."""

    cluster: Cluster
    total_batch: int
    step: StepTime
    images_per_second: float  # of all cards
    efficiency: float  # images_per_second / (cards * that of one card)
    hours: float  # for the steps alone; 0 if the job has no images or epochs

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.cluster.size


def predict(job: Job, cluster: Cluster) -> Prediction:
    """Predicts the steps of a training job."""
    total_batch = cluster.size * job.batch
    step = step_time(job, cluster)
    alone = step_time(job, Cluster(1, 1))
    return Prediction(
        cluster=cluster,
        total_batch=total_batch,
        step=step,
        images_per_second=total_batch / step.seconds,
        efficiency=alone.seconds / step.seconds,
        hours=job.epochs * math.ceil(job.images / total_batch) * step.seconds / 3600,
    )


def clusters_up_to(cluster: Cluster) -> list[Cluster]:
    """Lists clusters of 1, 2, 4, ... cards up to the requested one.

    First on the cards of one host, then on 2, 4, ... hosts.
    """

    def doubling(last: int) -> list[int]:
        return [*(1 << i for i in range(last.bit_length()) if 1 << i < last), last]

    return [
        *(replace(cluster, hosts=1, cards=n) for n in doubling(cluster.cards)),
        *(replace(cluster, hosts=n) for n in doubling(cluster.hosts) if n > 1),
    ]
