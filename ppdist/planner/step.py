"""Seconds of one optimizer step on N cards.

    T(N) = max(T_in(N), k (t0 + b t1) + sigma c(N)) + delta [N > 1] + exposed + SyncBN

k micro-batches of b images; t0, t1: fixed and per image; sigma c(N): the slowest of N cards;
delta: what being one of several costs on any number of them.  A step waits for the loader or the
arithmetic, whichever is longer, and for the rest after either; a loader that fills its queue
during communication too does a little better.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from statistics import NormalDist

from ppdist.planner.network import Cluster, all_reduce_seconds

_BACKWARD = 2 / 3  # of the arithmetic: two matrix products a layer there, one forward
# Bytes of the last bucket, which nothing is left to hide: last_comm_group_size_MB of Paddle's
# DataParallel is 1.
_LAST_BUCKET = 1 << 20


@dataclass(frozen=True)
class Job:
    """One training; what it does on a card is measured, on N of them predicted."""

    # A step on one card.
    fixed_seconds: float  # t0, of each micro-batch however few its images
    image_seconds: float  # t1
    batch: int  # images of a card in a micro-batch
    accumulate: int = 1
    # What more cards bring.
    jitter: float = 0.0  # standard deviation of a micro-batch's arithmetic / its mean
    parallel_seconds: float = 0.0  # delta
    parameters: float = 0.0  # gradients summed over cards, each ...
    gradient_bytes: int = 4  # ... so large on the wire
    overlap: float = 0.9  # part of the backward pass behind which float32 gradients can hide
    sync_bn_layers: int = 0
    own_sizes: tuple[int, ...] = ()  # each card draws its own image size; (): all the same
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


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on; they add up."""

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
    """c(N): how many standard deviations the slowest of N equal cards lies above the mean.

    The expected maximum of N normal variables: 0.56 of 2, 1.42 of 8, 2.07 of 32.

        c(N) = integral of 1 - Phi(x)^N over x > 0  -  integral of Phi(x)^N over x < 0
    """
    if count == 1:
        return 0.0
    width, phi = 0.01, NormalDist().cdf
    # Trapezoids: of the value at 0, half a step.
    above = sum(1 - phi(width * i) ** count for i in range(1, 1000))
    below = sum(phi(-width * i) ** count for i in range(1, 1000))
    return width * (above - below + (1 - 2 * 0.5**count) / 2)


def size_skew(count: int, sizes: Sequence[int]) -> float:
    """Expected largest cost / mean cost of N cards that each draw an image size; the cost grows
    with the area.  1 where all draw the same (`sizes` empty), as ppdist does.

    E[max] = sum_i v_i (P(max <= v_i) - P(max < v_i)), of n values v_i in order (i / n)^N.
    """
    if not sizes:
        return 1.0
    values, n = sorted(float(size) ** 2 for size in sizes), len(sizes)
    largest = sum(v * (((i + 1) / n) ** count - (i / n) ** count) for i, v in enumerate(values))
    return largest * n / sum(values)


def input_seconds(job: Job, cluster: Cluster) -> float:
    """T_in: for the images of one step to be read; 0 where no rate is known."""
    of_card = job.batch * job.accumulate
    pairs = ((job.card_input, 1), (job.host_input, cluster.cards), (job.total_input, cluster.size))
    return max((of_card * cards / rate for rate, cards in pairs if rate), default=0.0)


def network_seconds(job: Job, cluster: Cluster) -> float:
    """Of the gradients' all-reduce, what the backward pass of the last micro-batch cannot hide.

    max(last bucket, all-reduce - overlap * backward); Li et al. 2020, arXiv:2006.15704.
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
    skew = size_skew(count, job.own_sizes)
    stragglers = (skew - 1) * compute + skew * sigma * slowest_of(count)
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
