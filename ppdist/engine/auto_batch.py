"""`train.batch_size_per_card: auto` and `train.total_batch`: from what is wanted to numbers.

Each rank finds out what it has memory for; all take the least.  A run that goes on takes what its
checkpoint was trained with and looks for nothing.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppdist import dist
from ppdist.checkpoint import Snapshot
from ppdist.config import ExperimentConfig
from ppdist.config.augment import AugmentConfig
from ppdist.data.sample import ImageRecord
from ppdist.engine.batch_probe import search, trial_of
from ppdist.engine.memory import CARD, room
from ppdist.errors import CheckpointError, ConfigError

_DRAWS = 10_000
_OF_PATIENCE = 0.5  # of the time that ranks wait for one another at a meeting


def settle_batch(
    config: ExperimentConfig, records: Sequence[ImageRecord], images: int, saved: Snapshot | None
) -> tuple[ExperimentConfig, list[str]]:
    """The configuration with a number where `train.batch_size_per_card` was auto; every rank calls
    it, before anything large is built.

    Args:
        records: the training images.
        images: of an epoch over all ranks.
        saved: what the run goes on from; None: it begins.
    Returns: the configuration, which is the same on every rank, and lines for the log.
    Raises: UserError, on every rank: not even one image fits somewhere, the run could not be built,
        or the total batch cannot be dealt out.
    """
    train, world = config.train, dist.world_size()
    if train.batch_size_per_card != "auto":
        train.micro_steps(world)  # raises where total_batch does not divide
        return config, []
    if saved is not None:
        batch, changes = batch_of(saved.state, world, train.total_batch, train.accumulate_steps)
        config, said = _with(config, batch, changes), f"auto is {batch}, as in the checkpoint"
        if changes:
            said = (
                f"auto is {batch}, and micro-steps are {config.train.micro_steps(world)} "
                f"(train.accumulate_steps: {train.accumulate_steps}), for the "
                f"{saved.state['total_batch']} images of a step of the checkpoint"
            )
        return config, [f"train.batch_size_per_card: {said}"]
    share = per_rank(train.total_batch, world)
    once = -(-images // (world * train.accumulate_steps))  # deals out an epoch's images
    most = min(train.auto_batch_most, share or max(1, once))
    objects = most_objects([len(record.labels_M) for record in records], config.data.augment)
    # A meeting, too: the others look before the first process takes some of it.
    free = dist.together(lambda: _usable(train.auto_batch_memory))
    patience = _OF_PATIENCE * config.distributed.timeout_seconds
    trial = trial_of(job_of(config, objects, images), free, time.monotonic() + patience)
    own = dist.together(lambda: search(trial, free, most))
    told_W = dist.exchange([own.images, own.why])
    hosts_W = dist.exchange(dist.host())
    least = min(found for found, _ in told_W)
    batch = least if share is None else largest_divisor(share, least)
    ranks = [rank for rank, (found, _) in enumerate(told_W) if found == least]
    said = f"auto is {batch}: of {dist.ranks_named(ranks, hosts_W)} {told_W[ranks[0]][1]}"
    if batch != least:
        said += f"; {batch} of them divide the {share} of a rank's share of train.total_batch"
    return _with(config, batch, {}), [f"train.batch_size_per_card: {said}"]


def _usable(share: float) -> dict[str, int]:
    """What training may take on this rank, by kind.

    Raises: ConfigError: the card does not say how much it has free.
    """
    free = room(dist.local_size())
    if dist.on_gpu() and CARD not in free:
        raise ConfigError(
            "auto: the card does not say how much memory it has free",
            code="free_memory_unknown",
            where="train.batch_size_per_card",
            fix="give a number, or install Paddle 3.3",
        )
    return {kind: int(limit * share) for kind, limit in free.items()}


def job_of(config: ExperimentConfig, objects: int, images: int) -> dict[str, Any]:
    """What the process that trains for its memory is asked: a `batch_process.Job` without what
    changes from trial to trial.

    Args:
        objects: padded boxes of an image at the most.
        images: of an epoch over all ranks.
    """
    train = config.train
    several = 2 if (train.total_batch is not None or train.accumulate_steps > 1) else 1
    settled = _with(config, 1, {"total_batch": None, "accumulate_steps": several})
    device = {"device": "gpu" if dist.on_gpu() else "cpu"}
    return {
        "config": settled.model_copy(update=device).model_dump(mode="json"),
        "micro_steps": several,
        "objects": objects,
        "images": images,
        "several_ranks": dist.world_size() > 1,
    }


def batch_of(
    state: Mapping[str, Any], world: int, asked: int | None, accumulate_steps: int
) -> tuple[int, dict[str, int]]:
    """Images per rank and micro-step with which a run goes on, and what else that changes in
    `train`; another number of ranks deals the same total batch out anew, in no larger pieces.

    Args:
        state: of the checkpoint.
        asked: `train.total_batch`; another one than the checkpoint's stays, for `settle_run` to
            refuse.
        accumulate_steps: those of the configuration, which hold where pieces stay small enough.
    Raises: UserError: the ranks cannot share a step evenly.
    """
    total = state["total_batch"]
    # Absent in checkpoints before there was `auto`; what does not fit then is halved as it shows.
    before = state.get("batch_size_per_card", total // state["world"])
    if asked not in (None, total):
        return largest_divisor(per_rank(asked, world) or 1, before), {}
    if total % world:
        raise CheckpointError(
            f"the steps of the checkpoint are of {total} images, which {world} ranks cannot share "
            "evenly",
            code="batch_indivisible",
            fix="start a number of ranks that divides it",
        )
    share = total // world
    if asked is not None:
        return largest_divisor(share, before), {}
    if share % accumulate_steps == 0 and share // accumulate_steps <= before:
        return share // accumulate_steps, {}
    return largest_divisor(share, before), {"total_batch": total, "accumulate_steps": 1}


def per_rank(total_batch: int | None, world: int) -> int | None:
    """Images of a step on each rank; None: no total batch is asked for.

    Raises: ConfigError: they cannot share it evenly.
    """
    if total_batch is None:
        return None
    if total_batch % world:
        raise ConfigError(
            f"{total_batch} images of a step cannot be shared evenly by {world} ranks",
            code="batch_indivisible",
            where="train.total_batch",
            fix=f"start a number of ranks that divides it, or take a multiple of {world}",
        )
    return total_batch // world


def largest_divisor(number: int, most: int) -> int:
    """Of a number, up to `most`; 1 at least."""
    return max(each for each in range(1, max(1, min(number, most)) + 1) if number % each == 0)


def most_objects(objects_N: Sequence[int], augment: AugmentConfig) -> int:
    """Boxes that an image of a batch may have, those of images put together included: the most of
    many drawings of as many images as are combined."""
    composed: int = augment.mosaic_images if augment.mosaic else 1
    partners = (augment.mixup > 0) + (augment.cutmix > 0)
    images = composed * (1 + partners) + (augment.copy_paste > 0)
    counts_N = np.array(objects_N, np.int64)
    drawn = np.random.default_rng(0).choice(counts_N, (_DRAWS, images)).sum(1).max()
    return int(max(1, drawn, counts_N.max()))


def _with(config: ExperimentConfig, batch: int, changes: Mapping[str, Any]) -> ExperimentConfig:
    train = config.train.model_copy(update={"batch_size_per_card": batch, **changes})
    return config.model_copy(update={"train": train})
