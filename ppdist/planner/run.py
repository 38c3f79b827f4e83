"""Epochs and hours of a training on N cards, and its limits."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ppdist.planner.network import Cluster, Link
from ppdist.planner.step import Job, StepTime, step_time

_LIMIT = 0.05  # of the hours: what takes less does not limit

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
    limit: str  # of PARTS: where most hours go besides the arithmetic, if they are worth naming

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
    """1, 2, 4, ... cards of one host, then 2, 4, ... hosts, and the one asked for."""
    of_host = _doubling(cluster.cards)
    hosts = [n for n in _doubling(cluster.hosts) if n > 1]
    return [
        *(replace(cluster, hosts=1, cards=n) for n in of_host),
        *(replace(cluster, hosts=n) for n in hosts),
    ]


def _doubling(last: int) -> list[int]:
    return [*(1 << i for i in range(last.bit_length()) if 1 << i < last), last]


def what_ifs(job: Job, cluster: Cluster) -> list[tuple[str, Prediction]]:
    """What could be changed, the most helpful first; accuracy is nobody's promise."""
    changed = [(name, predict(j, c)) for name, j, c in _changes(job, cluster)]
    return sorted(changed, key=lambda pair: _cost(pair[1], job))


def _cost(prediction: Prediction, job: Job) -> float:
    if prediction.hours:
        return prediction.hours
    return 1 / prediction.images_per_second


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
        yield (
            "a host that reads twice as fast",
            replace(job, host_input=2 * job.host_input),
            cluster,
        )
    if job.total_input:
        more = replace(job, total_input=2 * job.total_input)
        yield "shared storage twice as fast", more, cluster
    if several and job.evaluation_images and not job.sharded_evaluation:
        yield "evaluation on all cards", replace(job, sharded_evaluation=True), cluster
    if job.evaluation_images:
        rarer = replace(job, evaluate_every=2 * job.evaluate_every)
        yield "half as many evaluations", rarer, cluster
    if several and job.sync_bn_layers:
        yield "no SyncBN", replace(job, sync_bn_layers=0), cluster
    if several and job.jitter:
        yield "cards of even speed (no jitter)", replace(job, jitter=0.0), cluster
    if several and job.own_sizes:
        yield "one image size for all cards", replace(job, own_sizes=()), cluster
    if several:
        yield "twice the accumulation", replace(job, accumulate=2 * job.accumulate), cluster
    yield "twice the batch per card", replace(job, batch=2 * job.batch), cluster
    if job.batch > 1:
        yield "half the batch per card", replace(job, batch=job.batch // 2), cluster


ANY_LINK = Link(0.0, math.inf)  # of a cluster whose links play no part
