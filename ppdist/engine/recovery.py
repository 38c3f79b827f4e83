"""Recovery from failed steps: skip, roll back, smaller micro-batches, unequal replicas.

Every decision follows from sums or values that all ranks hold, so it is the same on each.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.common.errors import ConfigError, StorageError, UserError, is_out_of_memory
from ppdist.common.files import append
from ppdist.common.job import SKIP_STEP_VARIABLE
from ppdist.common.run_log import RunLog
from ppdist.distributed import comm, device
from ppdist.distributed.agreement import equal_ranks
from ppdist.engine.checkpoint import Snapshot
from ppdist.engine.continuation import read_note, write_note
from ppdist.engine.data import BatchSource
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.state import TrainState, restore_state
from ppdist.engine.train_step import StepResult, TrainStep, loss_scale

MAX_ROLLBACKS = 3  # of a whole run; the last continues at an eighth of the learning rate
_LR_FACTOR = 0.5  # of each
_SHOWN = 8  # images, or ranks, in a message
_BAD_STEPS = "bad_steps.jsonl"
_MICRO_BATCH_FILE = "max_micro_batch.json"  # a note for the next attempt of the job
_DIGEST_BITS, _PARTS = 64, 4  # 16 bits each, which a float32 holds exactly
_ODD = 0x9E3779B97F4A7C15  # mixes the sums of tensors, so that their order counts
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Recovery:
    """What a run does about failed steps.  Methods are collective unless Local.

    Attributes:
        skipped_steps: numbers, from 1, of steps at which the run ended twice; they are not made.
    """

    def __init__(
        self,
        *,
        train_step: TrainStep,
        batch_source: BatchSource,
        schedule: ScheduleSetup,
        log: RunLog,
        output_dir: Path,
        bad_steps_limit: int,
    ) -> None:
        """Args: bad_steps_limit: `train.bad_steps_limit`."""
        self.skipped_steps = _steps_of(os.environ.get(SKIP_STEP_VARIABLE, ""))
        self._train_step = train_step
        self._batch_source = batch_source
        self._batch_size = schedule.batch_size_per_card
        self._log = log
        self._folder = output_dir
        self._limit = bad_steps_limit
        self._good: Snapshot | None = None
        self._repeated = -1  # the step of the snapshot from which `roll_back_once` has repeated

    def begin(self, state: TrainState, snapshot: Snapshot) -> None:
        """Prepares for the first step of this process.

        Args: snapshot: where the run is.
        """
        self.keep(snapshot)
        noted_W = comm.all_gather_object(read_note(_MICRO_BATCH_FILE))
        known = [most for most in (state.max_micro_batch, *noted_W) if most is not None]
        state.max_micro_batch = min(known, default=None)
        parts = self._batch_source.parts = parts_of(self._batch_size, state.max_micro_batch)
        if parts > 1:  # with train.sync_bn another number on other ranks
            self._log.warning(
                f"a rank ran out of memory before: micro-batches are made in {parts} parts, of at "
                f"most {state.max_micro_batch} images on a rank, and batch norm normalises over "
                f"each part"
            )

    def keep(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot for rollback unless taken during bad steps.  Local.

        A run that resumes from such a snapshot (the best, or the end) rolls back no further.
        """
        if self._good is None or not snapshot.state["bad_steps"]:
            self._good = snapshot

    def handle_bad_step(self, result: StepResult, state: TrainState) -> bool:
        """Handles a step that was skipped because of non-finite values.

        Returns: whether the run was rolled back, and `state` with it.
        Raises: UserError, on every rank: rolling back did not help.
        """
        step = state.step + 1
        found = f"loss {result.losses['loss']:g}, gradient norm {result.gradient_norm:g}"
        scale = loss_scale(self._train_step.scaler)
        if result.searching:
            self._log.warning(
                f"step {step}: {found}: float16 overflow, step skipped on all ranks; the "
                f"loss scale is now {scale:g}"
            )
            return False
        state.bad_steps += 1
        hint = ""
        if 0 < scale < 1:
            hint = (
                "; float16 does not reach that far: set train.amp.dtype: bfloat16, which needs no "
                "loss scale"
            )
        _, terms = self._record(
            step, "not finite", result.own_images, result.own_loss, result.not_finite
        )
        self._log.warning(
            f"step {step}: {found}: not finite: {terms}; step skipped on all ranks{hint}"
        )
        if state.bad_steps < self._limit:
            return False
        list_file = comm.run_on_main(self._list_of_images)
        if state.rollbacks >= MAX_ROLLBACKS:
            remedy = "lower optimizer.lr, set train.clip_norm, or"
            if math.isfinite(result.losses["loss"]):  # then no step was too long
                remedy = "look at these images and their boxes, or"
            raise UserError(
                f"loss or gradient was not finite for {self._limit} steps in a row, up to step "
                f"{step} ({terms}), and {MAX_ROLLBACKS} rollbacks, each with half the learning "
                f"rate, did not help; their images are listed in {list_file}",
                code="training_diverged",
                fix=f"{remedy} turn train.amp off; earlier checkpoints are intact{hint}",
            )
        self._roll_back(state)
        state.rollbacks += 1
        factor = lr_factor(state.rollbacks)
        self._log.warning(
            f"not finite for {self._limit} steps in a row, up to step {step}: rolled back to the "
            f"weights after step {state.step}, with {factor:g} of the learning rate from now "
            f"on (rollback {state.rollbacks} of at most {MAX_ROLLBACKS}); the images of these "
            f"steps are listed in {list_file}"
        )
        record = _record_of_rollback(state, step, "loss or gradient not finite")
        self._log.metrics({**record, "lr_factor": factor})
        return True

    def roll_back_once(self, state: TrainState) -> bool:
        """Rolls back where replicas differ and none is known right.

        Returns: whether it did; once for each snapshot, because steps that make replicas differ
            again would be repeated forever.
        """
        assert self._good is not None, "begin was not called"
        if self._repeated == self._good.step:
            return False
        self._repeated = self._good.step
        step = state.step
        self._roll_back(state)
        self._log.warning(
            f"after step {step}: rolled back to each rank's copy of the weights after step "
            f"{state.step}; repeating the steps since"
        )
        record = _record_of_rollback(state, step, "ranks held different weights")
        self._log.metrics(record)
        return True

    def _roll_back(self, state: TrainState) -> None:
        assert self._good is not None, "begin was not called"
        restored, _ = restore_state(self._good, self._train_step)
        self._train_step.forget()
        state.roll_back_to(restored)
        self._log.rollback(state.step)

    def require_images(self, result: StepResult) -> None:
        """Checks images after a step that was given up.

        Raises: StorageError, on every rank: the images of some stay away.
        """
        told_W = comm.all_gather_large_object(
            [None if result.outage is None else f"{result.outage}", comm.host()]
        )
        away = [rank for rank, (text, _) in enumerate(told_W) if text is not None]
        if away:
            ranks = comm.ranks_named(away, [host for _, host in told_W])
            raise StorageError(
                f"{ranks}: {told_W[away[0]][0]}",
                code="storage_unreachable",
                fix="then start with --resume (--max_restart does it for you)",
            )

    def shrink_micro_batches(self, result: StepResult, state: TrainState) -> None:
        """Halves the micro-batches after some rank ran out of memory.

        Raises: ConfigError, on every rank: they have one image already.
        """
        step = state.step + 1
        told_W = comm.all_gather_large_object([result.ran_out, comm.host()])
        ranks = comm.ranks_named(
            [rank for rank, (ran_out, _) in enumerate(told_W) if ran_out],
            [host for _, host in told_W],
        )
        most = _halved(self._batch_size, self._batch_source.parts, step, ranks)
        state.max_micro_batch = most
        self._batch_source.parts = parts_of(self._batch_size, most)
        self._log.warning(
            f"step {step}: {ranks} ran out of memory; from here on all ranks use micro-batches of "
            f"at most {most} instead of {self._batch_size} images (train.batch_size_per_card), "
            f"{self._batch_source.parts} times as many; batch norm normalises over these, total "
            f"batch, learning rate and order of the images stay; repeating the step"
        )

    @contextlib.contextmanager
    def watching_memory(self, step: int) -> Iterator[None]:
        """Around a step, notes an out-of-memory that other ranks miss.  Local.

        The next attempt of the job then starts with smaller micro-batches.
        Raises: MemoryError: on this rank alone.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            me = f"rank {comm.rank()} (host {comm.host()})"
            most = _halved(self._batch_size, self._batch_source.parts, step, me)
            with contextlib.suppress(OSError):  # then the next attempt runs out of memory, too
                write_note(_MICRO_BATCH_FILE, most)
            where = " while the others wait for it in a collective" * (comm.world_size() > 1)
            raise MemoryError(
                f"step {step}: {me} ran out of memory{where};"
                f" fleetrun --max_restart resumes with micro-batches of at most {most} images; "
                f"without it, lower train.batch_size_per_card, raise train.accumulate_steps by the "
                f"same factor, and start again with --resume --resume-changed"
            ) from error

    def skip_step(self, state: TrainState) -> None:
        """Skips the next step, one of `skipped_steps`, without opening its images."""
        step = state.step + 1
        images = self._batch_source.images_of(state.step, state.class_scores)
        self._train_step.skip(state.step)
        shown, _ = self._record(step, "left out", images, math.nan)
        self._log.warning(
            f"step {step} is skipped, because the run ended there twice; its images: {shown}"
        )

    def _record(
        self, step: int, reason: str, images: list[int], loss: float, not_finite: Sequence[str] = ()
    ) -> tuple[str, str]:
        """Adds the images of a step to bad_steps.jsonl.  Collective.

        They are those of the ranks where a term was not finite; if no rank has such a term, those
        of all ranks.

        Args:
            reason: what was wrong with the step.
            images: positions in the set, of this rank.
            loss: of this rank, a sum over them.
            not_finite: see `StepResult`.
        Returns: the first images and the terms with their ranks, both as text for a message.
        """
        own_loss = loss if math.isfinite(loss) else f"{loss}"
        told_W = comm.all_gather_large_object([own_loss, images, not_finite, comm.host()])
        lines = [
            {
                "time": round(time.time(), 3),
                "step": step,
                "rank": rank,
                "why": reason,
                "not_finite": terms,
                "loss": loss,
                "images": [self._batch_source.path(index) for index in indices],
            }
            for rank, (loss, indices, terms, _) in enumerate(told_W)
        ]
        lines = [line for line in lines if line["not_finite"]] or lines
        if comm.is_main():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            self._log.put(_BAD_STEPS, partial(append, self._folder / _BAD_STEPS, text.encode()))
        paths = [path for line in lines for path in line["images"]]
        first_images = ", ".join(paths[:_SHOWN]) + (
            f" and {len(paths) - _SHOWN} more" * (len(paths) > _SHOWN)
        )
        return first_images, _terms_by_rank([(terms, host) for *_, terms, host in told_W])

    def _list_of_images(self) -> str:
        """Returns the path of bad_steps.jsonl, with the host if there are several.  Local."""
        several = len({*comm.addresses()}) > 1
        return f"{self._folder / _BAD_STEPS}" + f" on host {comm.host()}" * several


def _terms_by_rank(terms_W: Sequence[tuple[Sequence[str], str]]) -> str:
    """Names terms and their ranks: `loss on rank 1 (host a)`.

    Args: terms_W: for each rank its terms that were not finite, and its host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, (terms, _) in enumerate(terms_W):
        for term in terms:
            ranks_of.setdefault(term, []).append(rank)
    if not ranks_of:
        return "the norm of the gradient, though each rank's own gradient is finite"
    if len(terms_W) == 1:
        return ", ".join(ranks_of)
    hosts_W = [host for _, host in terms_W]
    return "; ".join(
        f"{term} on {comm.ranks_named(ranks[:_SHOWN], hosts_W)}"
        + f" and {len(ranks) - _SHOWN} more" * (len(ranks) > _SHOWN)
        for term, ranks in ranks_of.items()
    )


def _record_of_rollback(state: TrainState, step: int, reason: str) -> dict[str, Any]:
    """Record of a rollback for metrics.jsonl.

    It leads from a step to where the run is now.
    """
    return {"step": state.step, "returned_from_step": step, "reason": reason}


def lr_factor(rollbacks: int) -> float:
    """Learning-rate factor after a number of rollbacks."""
    return _LR_FACTOR**rollbacks


def _steps_of(text: str) -> set[int]:
    """Parses `7,12`.

    Raises: ConfigError: it is something else.
    """
    if text and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text, re.ASCII):
        raise ConfigError(
            f"{SKIP_STEP_VARIABLE}={text}: expected the numbers of steps, from 1, as in 7,12",
            code="skip_step_invalid",
            fix="fleetrun --max_restart sets it automatically",
        )
    return {int(step) for step in text.split(",") if step}


def parts_of(batch_size: int, max_micro_batch: int | None) -> int:
    """Number of parts a micro-batch is split into; None: 1.

    A power of two, so that halving again halves the parts there are.
    """
    parts = 1
    while max_micro_batch is not None and math.ceil(batch_size / parts) > max(1, max_micro_batch):
        parts *= 2
    return parts


def _halved(batch_size: int, parts: int, step: int, ranks: str) -> int:
    """Half of the images of a micro-batch.

    Args:
        step: for the message, from 1.
        ranks: who ran out of memory, for the message.
    Raises: ConfigError: it has one image already.
    """
    images = math.ceil(batch_size / parts)
    if images == 1:
        raise ConfigError(
            f"{ranks} ran out of memory with one image at a time",
            code="no_image_fits",
            where=f"step {step}",
            fix=(
                "lower model.image_size (or train.multi_scale), data.workers, or take a smaller "
                "model"
            ),
        )
    return math.ceil(images / 2)


@paddle.no_grad()
def check_replica_consistency(step: TrainStep) -> tuple[str, bool]:
    """Compares replicas over ranks and repairs those that differ.  Collective.

    Compares weights, running statistics and EMA.  A flipped bit, or a sum that went wrong on one
    rank, would silently make the ranks train different models.  What more than half of the ranks
    hold is right, or what alone is finite.  Otherwise, as with two ranks, it is unclear: all get
    the most frequent values, and of equally frequent ones those of the lowest rank.  The optimizer
    state is copied with them but not compared: where it differs, so do the weights one step later.

    Returns: "", or a warning that names the ranks that differed; False: which of them were right
        cannot be told.  The same on every rank.
    """
    if comm.world_size() == 1:
        return "", True
    names, tensors = zip(*_compared(step))
    sums = _sums(tensors)
    digests_WP = comm.all_gather(_digest(sums)).numpy()
    groups = equal_ranks(digests_WP.tolist())
    if len(groups) == 1:
        return "", True
    finite = all(bool(paddle.isfinite(each).all()) for each in tensors if each.is_floating_point())
    told_W = comm.all_gather_large_object([finite, comm.host(), sums])
    right, sure = trusted(groups, [finite for finite, _, _ in told_W])
    source = right[0]
    wrong = [rank for rank in range(comm.world_size()) if rank not in right]
    differing = [
        name
        for at, name in enumerate(names)
        if any(told_W[rank][2][at] != told_W[source][2][at] for rank in wrong)
    ]
    for group in _by_type(step):
        comm.broadcast_tensors(group, source)
    hosts_W = [host for _, host, _ in told_W]
    others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    whose = (
        f"repaired with those of rank {source}"
        if sure
        else f"which of them are right is unknown, so all have those of rank {source} for now"
    )
    warning = (
        f"{comm.ranks_named(wrong, hosts_W)} held other weights than "
        f"{comm.ranks_named(right, hosts_W)} (first {differing[0]}{others}); {whose}; faulty "
        f"memory or a faulty card causes that: check the hardware of a rank that is named again"
    )
    return warning, sure


def trusted(groups: list[list[int]], finite_W: list[bool]) -> tuple[list[int], bool]:
    """Ranks to copy from, and whether they are surely right.

    Args: finite_W: whether all values of a rank are finite.
    """
    right = max(groups, key=lambda ranks: (len(ranks), finite_W[ranks[0]], -ranks[0]))
    finite = [ranks for ranks in groups if finite_W[ranks[0]]]
    return right, 2 * len(right) > len(finite_W) or finite == [right]


def _compared(step: TrainStep) -> Iterator[tuple[str, paddle.Tensor]]:
    for name, tensor in step.model.state_dict().items():
        yield name, tensor
    if step.ema is not None:
        for name, tensor in step.ema.average.items():
            yield f"the average of {name}", tensor


def _by_type(step: TrainStep) -> list[list[paddle.Tensor]]:
    """Everything that ranks share, grouped by dtype in the same order everywhere."""
    tensors = [tensor for _, tensor in _compared(step)]
    if step.sharding is None:  # else each rank has a share of its own
        state = dict(step.optimizer.state_dict())
        tensors += state.pop("master_weights", {}).values()
        tensors += [each for each in state.values() if isinstance(each, paddle.Tensor)]
    types = sorted({str(each.dtype) for each in tensors})
    return [[each for each in tensors if str(each.dtype) == kind] for kind in types]


@paddle.no_grad()
def _sums(tensors: tuple[paddle.Tensor, ...]) -> list[int]:
    """Sum of each tensor's bits, read as integers.

    Any flipped bit changes it.
    """
    if device.on_accelerator():
        flat = [paddle.view(each.flatten(), _INTEGERS[each.element_size()]) for each in tensors]
        return [int(each) for each in paddle.stack([each.sum() for each in flat]).numpy()]
    sums = []
    for tensor in tensors:
        array = tensor.numpy()
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        sums.append(int(bits.sum(dtype=np.uint64)))
    return sums


def _digest(sums: list[int]) -> paddle.Tensor:
    """Digest of many numbers, [4] float32.

    Each element holds 16 bits, which any transport keeps.
    """
    mixed = 0
    for each in sums:
        mixed = (mixed * _ODD + each) % 2**_DIGEST_BITS
    parts = [mixed >> (16 * part) & 0xFFFF for part in range(_PARTS)]
    return paddle.to_tensor(parts, dtype="float32")
