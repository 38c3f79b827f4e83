"""What all ranks do together about a step that failed: pass over it, go back, take smaller bites.

Every decision here follows from sums or values that all ranks hold, so it is the same on each.

Whether all ranks hold the same training state, and what is done about a rank that does not.

A flipped bit of memory, or a sum that went wrong on one rank only, makes ranks train different
models from there on without a word.  So now and then each adds up the bits of what it holds, and
they compare.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.common.errors import ConfigError, is_out_of_memory
from ppdist.common.logging import RunLog
from ppdist.common.process import JOB_DIR_VARIABLE, SKIP_STEP_VARIABLE
from ppdist.distributed import comm
from ppdist.engine.checkpoint import Snapshot
from ppdist.engine.data import Feed
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.state import TrainState, restore_state
from ppdist.engine.train_step import StepResult, TrainStep, loss_scale

MOST_RETURNS = 3  # of a whole run; the last continues at an eighth of the learning rate
_RATE_FACTOR = 0.5
_SHOWN = 8  # images in a message
_NOT_FINITE = "loss or gradient not finite"


def _left_out(text: str) -> set[int]:
    """`7,12`  Raises: ConfigError: it is something else."""
    if text and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text, re.ASCII):
        raise ConfigError(
            f"{SKIP_STEP_VARIABLE}={text}: expected the numbers of steps, from 1, as in 7,12",
            code="skip_step_invalid",
            fix="fleetrun --max_restart sets it by itself",
        )
    return {int(step) for step in text.split(",") if step}


def _returned(progress: TrainState, step: int, reason: str) -> dict[str, Any]:
    """The record of a return from a step to where the run is now."""
    return {"step": progress.step, "returned_from_step": step, "reason": reason}


def rate_factor(returns: int) -> float:
    """By what the learning rate is multiplied after so many returns to earlier weights."""
    return _RATE_FACTOR**returns


class Recovery:
    """Every rank has one, and calls each method at the same time as the others.

    Attributes:
        left_out: the numbers, from 1, of steps that are not to be computed, because twice the run
            ended there.
    """

    def __init__(
        self,
        *,
        train_step: TrainStep,
        feed: Feed,
        derived: ScheduleSetup,
        log: RunLog,
        output_dir: Path,
        bad_steps_limit: int,
    ) -> None:
        """Args: bad_steps_limit: `train.bad_steps_limit`."""
        self.left_out = _left_out(os.environ.get(SKIP_STEP_VARIABLE, ""))
        self._train_step = train_step
        self._feed = feed
        self._batch_size = derived.batch_size_per_card
        self._log = log
        self._folder = output_dir
        self._limit = bad_steps_limit
        self._good: Snapshot | None = None
        self._doubted = -1  # the step of the snapshot that `doubt` has gone back to

    def begin(self, progress: TrainState, snapshot: Snapshot) -> None:
        """Before the first step of this process.

        Args: snapshot: where the run is.
        """
        self.keep(snapshot)
        known = [most for most in (progress.most_images, noted()) if most is not None]
        progress.most_images = min(known, default=None)
        self._feed.parts = parts_of(self._batch_size, progress.most_images)

    def keep(self, snapshot: Snapshot) -> None:
        """The state to go back to from now on, unless taken amid steps that were not finite.

        A run that resumes from such a one (it was the best, or the end) goes back no further.
        """
        if self._good is None or not snapshot.state["bad_steps"]:
            self._good = snapshot

    def meet(self, result: StepResult, progress: TrainState) -> bool:
        """Looks at a step that was not applied because something was not finite.

        Returns: whether the run is back at earlier weights, and `progress` with it.
        Raises: FloatingPointError, on every rank: going back did not help.
        """
        step = progress.step + 1
        found = f"loss {result.losses['loss']:g}, gradient norm {result.gradient_norm:g}"
        scale = loss_scale(self._train_step.scaler)
        if result.searching:
            self._log.warning(
                f"step {step}: {found}: too large for float16, so no rank applied it; the loss "
                f"scale is {scale:g} from here on"
            )
            return False
        progress.bad_steps += 1
        hint = ""
        if 0 < scale < 1:
            hint = (
                "; float16 no longer reaches: set train.amp.dtype: bfloat16, which needs no scale"
            )
        self._log.warning(f"step {step}: {found}: not finite, so no rank applied it{hint}")
        self._write_down(step, "not finite", result.own_images, result.own_loss)
        if progress.bad_steps < self._limit:
            return False
        if progress.returns >= MOST_RETURNS:
            raise FloatingPointError(
                f"loss or gradient was not finite for {self._limit} steps in a row, up to step "
                f"{step}, and {MOST_RETURNS} returns to earlier weights with half the learning "
                f"rate did not help; their images are in {self._folder / 'bad_steps.jsonl'}; lower "
                f"optimizer.lr, set train.clip_norm, or turn train.amp off; checkpoints up to here "
                f"are intact{hint}"
            )
        self._go_back(progress)
        progress.returns += 1
        factor = rate_factor(progress.returns)
        self._log.warning(
            f"not finite for {self._limit} steps in a row, up to step {step}: back to the weights "
            f"after step {progress.step}, and from there on with {factor:g} of the learning rate "
            f"(return {progress.returns} of at most {MOST_RETURNS}); the images of these steps are "
            f"in {self._folder / 'bad_steps.jsonl'}"
        )
        self._log.metrics({**_returned(progress, step, _NOT_FINITE), "lr_factor": factor})
        return True

    def doubt(self, progress: TrainState) -> bool:
        """When ranks held different weights, and nobody knows which of them were right.

        Returns: whether the run is back at the state that was kept, before they differed; once for
            each state, because steps that make them differ again would be made for ever.
        """
        assert self._good is not None, "begin was not called"
        if self._doubted == self._good.step:
            return False
        self._doubted = self._good.step
        step = progress.step
        self._go_back(progress)
        self._log.warning(
            f"after step {step}: back to the weights after step {progress.step}, as each rank has "
            f"kept them; the steps since are made again"
        )
        self._log.metrics(_returned(progress, step, "ranks held different weights"))
        return True

    def _go_back(self, progress: TrainState) -> None:
        assert self._good is not None, "begin was not called"
        restored, _ = restore_state(self._good, self._train_step)
        self._train_step.forget()
        progress.go_back_to(restored)
        self._log.rollback(progress.step)

    def make_smaller(self, result: StepResult, progress: TrainState) -> None:
        """Halves the micro-batches after a step for which some rank had too little memory.

        Raises: ConfigError, on every rank: they have one image already.
        """
        step = progress.step + 1
        told_W = comm.all_gather_objects([result.ran_out, comm.host()])
        ranks = comm.ranks_named(
            [rank for rank, (ran_out, _) in enumerate(told_W) if ran_out],
            [host for _, host in told_W],
        )
        most = halved(self._batch_size, self._feed.parts, step, ranks)
        progress.most_images = most
        self._feed.parts = parts_of(self._batch_size, most)
        self._log.warning(
            f"step {step}: {ranks} ran out of memory; from here on all ranks take micro-batches of "
            f"at most {most} of the {self._batch_size} images (train.batch_size_per_card) and "
            f"{self._feed.parts} times as many; total batch, learning rate and order of the images "
            f"stay, and the step is made again"
        )

    @contextlib.contextmanager
    def watching_memory(self, step: int) -> Iterator[None]:
        """Around a step: when this rank runs out of memory where it cannot tell the others, it ends
        with what to do, and leaves it to the next attempt of the job.

        Raises: MemoryError: on this rank alone.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            me = f"rank {comm.rank()} (host {comm.host()})"
            most = halved(self._batch_size, self._feed.parts, step, me)
            note(most)
            where = " where the others wait for it in a collective" * (comm.world_size() > 1)
            raise MemoryError(
                f"step {step}: {me} ran out of memory{where};"
                f" fleetrun --max_restart goes on with micro-batches of at most {most} images; "
                f"without it, lower train.batch_size_per_card and raise train.accumulate_steps by "
                f"as much, and start again with --resume"
            ) from error

    def leave_out(self, progress: TrainState) -> None:
        """Passes over a step of `left_out`, once it is next, without opening its images."""
        step = progress.step + 1
        images = self._feed.images_of(progress.step, progress.class_scores)
        self._train_step.leave_out(progress.step)
        shown = self._write_down(step, "left out", images, math.nan)
        self._log.warning(
            f"step {step} is left out, because the run ended there twice; its images: {shown}"
        )

    def _write_down(self, step: int, why: str, images: list[int], loss: float) -> str:
        """Adds what each rank had in a step to bad_steps.jsonl; returns the first images of all.

        Args:
            images: positions in the set, of this rank.
            loss: of this rank, a sum over them.
        """
        own_loss = loss if math.isfinite(loss) else f"{loss}"
        told_W = comm.all_gather_objects([own_loss, images])
        lines = [
            {
                "time": round(time.time(), 3),
                "step": step,
                "rank": rank,
                "why": why,
                "loss": loss,
                "images": [self._feed.path(index) for index in indices],
            }
            for rank, (loss, indices) in enumerate(told_W)
        ]
        if comm.is_main():
            self._append("".join(json.dumps(line) + "\n" for line in lines))
        paths = [path for line in lines for path in line["images"]]
        return ", ".join(paths[:_SHOWN]) + (
            f" and {len(paths) - _SHOWN} more" * (len(paths) > _SHOWN)
        )

    def _append(self, text: str) -> None:
        try:
            with (self._folder / "bad_steps.jsonl").open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._log.warning(f"bad_steps.jsonl cannot be written ({error}): {text}")


_DIGEST_BITS, _PARTS = 64, 4  # 16 bits each, which a float32 holds exactly
_ODD = 0x9E3779B97F4A7C15  # mixes the sums of tensors, so that their order counts
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


_OUT_OF_MEMORY_FILE = "out_of_memory.json"


def parts_of(batch_size: int, most_images: int | None) -> int:
    """In how many parts micro-batches must come so that none has more than `most_images`; None: 1.

    A power of two, so that halving again halves the parts there are.
    """
    parts = 1
    while most_images is not None and math.ceil(batch_size / parts) > max(1, most_images):
        parts *= 2
    return parts


def halved(batch_size: int, parts: int, step: int, ranks: str) -> int:
    """The most images of a micro-batch from now on, where some rank has no memory for them all.

    Args:
        step: for the message, from 1.
        ranks: who had none, for the message.
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


def note(most_images: int) -> None:
    """Leaves for the next attempt of this job that micro-batches must be smaller.

    For a rank that ran out of memory where it cannot tell the others any more.
    """
    folder = os.environ.get(JOB_DIR_VARIABLE)
    if folder:
        with contextlib.suppress(OSError):  # then the next attempt finds out for itself
            text = json.dumps({"most_images": most_images})
            (Path(folder) / _OUT_OF_MEMORY_FILE).write_text(text, encoding="utf-8")


def noted() -> int | None:
    """What an attempt of this job before left by `note`, on any host; None: nothing.

    Every rank calls it.
    """
    found, folder = None, os.environ.get(JOB_DIR_VARIABLE)
    if folder:
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = (Path(folder) / _OUT_OF_MEMORY_FILE).read_text(encoding="utf-8")
            found = int(json.loads(text)["most_images"])
    return min((most for most in comm.exchange(found) if most is not None), default=None)


@paddle.no_grad()
def check_replica_consistency(step: TrainStep) -> tuple[str, bool]:
    """Compares weights, running statistics and their average over ranks; a rank whose differ gets
    those of the others, and their optimizer state.  Every rank calls it, when all should be alike.

    Right is what more than half of the ranks hold, or what alone is finite.  Otherwise, as of two
    ranks, nobody can tell; all get what most hold, and of equally many the lowest rank.
    What the optimizer holds is not compared: where it differs, so do the weights one step later.

    Returns: "", or a warning that names the ranks that differed; False: which of them were right
        cannot be told.  The same on every rank.
    """
    if comm.world_size() == 1:
        return "", True
    names, tensors = zip(*_compared(step))
    sums = _sums(tensors)
    digests_WP = comm.all_gather(_digest(sums)).numpy()
    holders: dict[bytes, list[int]] = {}
    for rank, digest_P in enumerate(digests_WP):
        holders.setdefault(digest_P.tobytes(), []).append(rank)
    if len(holders) == 1:
        return "", True
    finite = all(bool(paddle.isfinite(each).all()) for each in tensors if each.is_floating_point())
    told_W = comm.all_gather_objects([finite, comm.host(), sums])
    right, sure = trusted([*holders.values()], [finite for finite, _, _ in told_W])
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
        f"now has those of rank {source}"
        if sure
        else f"which of them are right cannot be told; all have those of rank {source} for now"
    )
    warning = (
        f"{comm.ranks_named(wrong, hosts_W)} held other weights than "
        f"{comm.ranks_named(right, hosts_W)} (first {differing[0]}{others}) and {whose}; faulty "
        f"memory or a faulty card does that: if the same rank is named again, have it looked at"
    )
    return warning, sure


def trusted(groups: list[list[int]], finite_W: list[bool]) -> tuple[list[int], bool]:
    """Of groups of ranks that hold the same, the one whose state the others get, and whether it is
    known to be right.

    Args: finite_W: whether all that a rank holds is finite.
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
    """All that ranks have in common, in lists of one type, in the same order on every rank."""
    tensors = [tensor for _, tensor in _compared(step)]
    if step.sharding is None:  # else each rank has a share of its own
        state = dict(step.optimizer.state_dict())
        tensors += state.pop("master_weights", {}).values()
        tensors += [each for each in state.values() if isinstance(each, paddle.Tensor)]
    types = sorted({str(each.dtype) for each in tensors})
    return [[each for each in tensors if str(each.dtype) == kind] for kind in types]


@paddle.no_grad()
def _sums(tensors: tuple[paddle.Tensor, ...]) -> list[int]:
    """The sum of the bits of each tensor, read as integers: any one flipped bit changes it."""
    if comm.on_gpu():  # not run on one
        flat = [paddle.view(each.flatten(), _INTEGERS[each.element_size()]) for each in tensors]
        return [int(each) for each in paddle.stack([each.sum() for each in flat]).numpy()]
    sums = []
    for tensor in tensors:
        array = tensor.numpy()
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        sums.append(int(bits.sum(dtype=np.uint64)))
    return sums


def _digest(sums: list[int]) -> paddle.Tensor:
    """[4] float32: one number out of many, in parts that survive any way to travel."""
    mixed = 0
    for each in sums:
        mixed = (mixed * _ODD + each) % 2**_DIGEST_BITS
    parts = [mixed >> (16 * part) & 0xFFFF for part in range(_PARTS)]
    return paddle.to_tensor(parts, dtype="float32")
