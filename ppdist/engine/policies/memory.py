"""Ranks that run out of memory: all ranks repeat the step with smaller micro-batches."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ppdist.common.errors import ConfigError, is_out_of_memory
from ppdist.common.job import read_note, write_note
from ppdist.common.run_log import RunLog
from ppdist.data.types import Arrays, Batch
from ppdist.distributed import comm, device
from ppdist.engine.data import BatchSource
from ppdist.engine.run_policy import Next, RunPolicy
from ppdist.engine.state import TrainState
from ppdist.engine.step_policy import Pass, StepPolicy, StepResult, Verdict
from ppdist.losses.base import LossOutput

_VOTE = "short_of_memory"
_MICRO_BATCH_FILE = "max_micro_batch.json"  # a note for the next attempt of the job


class StandIn(StepPolicy):
    """The policy that runs a blank image in place of a micro-batch that does not fit into memory.

    Attributes:
        short: whether this rank ran out of memory in this step.
    """

    votes = (_VOTE,)
    short = False

    def before_step(self, step: int, synchronised: bool) -> None:
        self.short = False

    def around(self, run: Pass, batch: Batch, communicated: Callable[[], bool]) -> LossOutput:
        """Runs a pass; if it does not fit into memory, the rest of the step runs a blank image.

        So this rank reaches all collectives of the step, and the others learn of it from the vote.

        Raises: the error of the pass: collectives within forward or backward may have been missed,
            and it is unknown which.
        """
        if not self.short:
            try:
                return run(batch)
            except Exception as error:
                if not is_out_of_memory(error) or communicated():
                    raise
            # Not inside the except clause: the exception refers to frames, which keep the memory.
            device.release_memory()
            self.short = True
        return run(_make_blank(batch))

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        return {_VOTE: self.short}

    def verdict(self, totals: Mapping[str, float]) -> Verdict:
        return Verdict.REPEAT if totals[_VOTE] else Verdict.APPLY


class SmallerMicroBatches(RunPolicy):
    """The policy that halves the micro-batches of all ranks after one ran out of memory."""

    def __init__(
        self, stand_in: StandIn, batch_source: BatchSource, batch_size: int, log: RunLog
    ) -> None:
        """Args: batch_size: images of a micro-batch on one rank, as configured."""
        self._stand_in = stand_in
        self._batch_source = batch_source
        self._batch_size = batch_size
        self._log = log

    def begin(self, state: TrainState) -> Next:
        """Starts with the smallest micro-batch that an earlier attempt of the job has recorded."""
        noted_W = comm.all_gather_object(read_note(_MICRO_BATCH_FILE))
        sizes = [size for size in (state.max_micro_batch, *noted_W) if size is not None]
        state.max_micro_batch = min(sizes, default=None)
        parts = self._batch_source.parts = count_parts(self._batch_size, state.max_micro_batch)
        if parts > 1:  # with train.sync_bn another number on other ranks
            self._log.warning(
                f"a rank ran out of memory before: micro-batches are made in {parts} parts, of at "
                f"most {state.max_micro_batch} images on a rank, and batch norm normalises over "
                f"each part"
            )
        return Next.CONTINUE

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        """Halves the micro-batches after some rank ran out of memory.

        Raises: ConfigError, on every rank: the micro-batches have only one image already.
        """
        if result is None or not result.totals[_VOTE]:
            return Next.CONTINUE
        step = state.step + 1
        short_W = comm.all_gather_large_object([self._stand_in.short, comm.host()])
        ranks = comm.ranks_named(
            [rank for rank, (short, _) in enumerate(short_W) if short],
            [host for _, host in short_W],
        )
        max_images = _halve_micro_batch(self._batch_size, self._batch_source.parts, step, ranks)
        state.max_micro_batch = max_images
        self._batch_source.parts = count_parts(self._batch_size, max_images)
        self._log.warning(
            f"step {step}: {ranks} ran out of memory; from here on all ranks use micro-batches of "
            f"at most {max_images} instead of {self._batch_size} images "
            f"(train.batch_size_per_card), "
            f"{self._batch_source.parts} times as many; batch norm normalises over these, total "
            f"batch, learning rate and order of the images stay; repeating the step"
        )
        return Next.REPEAT

    @contextlib.contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Records that this rank ran out of memory while others wait in a collective.  Local.

        The next attempt of the job then starts with smaller micro-batches.

        Raises: MemoryError: on this rank alone.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            rank = f"rank {comm.rank()} (host {comm.host()})"
            max_images = _halve_micro_batch(self._batch_size, self._batch_source.parts, step, rank)
            with contextlib.suppress(OSError):  # then the next attempt runs out of memory, too
                write_note(_MICRO_BATCH_FILE, max_images)
            where = " while the others wait for it in a collective" * (comm.world_size() > 1)
            raise MemoryError(
                f"step {step}: {rank} ran out of memory{where};"
                f" fleetrun --max_restart resumes with micro-batches of at most {max_images} "
                f"images; "
                f"without it, lower train.batch_size_per_card, raise train.accumulate_steps by the "
                f"same factor, and start again with --resume --resume-changed"
            ) from error


def count_parts(batch_size: int, max_micro_batch: int | None) -> int:
    """Returns the number of parts into which a micro-batch is split; 1 for None.

    The count is a power of two, so that halving once more halves the present parts.
    """
    parts = 1
    while max_micro_batch is not None and math.ceil(batch_size / parts) > max(1, max_micro_batch):
        parts *= 2
    return parts


def _halve_micro_batch(batch_size: int, parts: int, step: int, ranks: str) -> int:
    """Returns half of the images of a micro-batch.

    Args:
        step: the step (from 1), for the message.
        ranks: the ranks that ran out of memory, for the message.
    Raises: ConfigError: the micro-batch has only one image already.
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


def _make_blank(batch: Batch) -> Batch:
    """Creates a blank batch with the shapes of a batch's first image; see `Batch`."""
    return replace(batch, **{n: getattr(batch, n)[:1] for n in Arrays._fields}, real=False)
