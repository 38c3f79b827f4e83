"""Comparison of the replicas of all ranks: one that differs is repaired, or the run rolls back."""

from collections.abc import Callable, Iterator

import numpy as np
import paddle

from ppdist.common.run_log import RunLog
from ppdist.distributed import comm, device
from ppdist.distributed.agreement import equal_ranks
from ppdist.engine.run_policy import Next, RunPolicy
from ppdist.engine.state import TrainState
from ppdist.engine.step_policy import StepResult
from ppdist.engine.train_step import TrainStep

_DIGEST_BITS, _PARTS = 64, 4  # 16 bits each, which a float32 holds exactly
_ODD = 0x9E3779B97F4A7C15  # odd multiplier of the digest, so that the order of tensors counts
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class ReplicaCheck(RunPolicy):
    """The policy that compares the replicas of all ranks at a regular interval of steps."""

    def __init__(
        self,
        train_step: TrainStep,
        every: int,
        roll_back_once: Callable[[TrainState, int], bool],
        log: RunLog,
    ) -> None:
        """
        Args:
            every: steps from one comparison to the next; 0 compares only after a rollback.
            roll_back_once: rolls back after a step at which replicas differ and none is known to be
                right; returns True if it rolled back.
        """
        self._train_step = train_step
        self._every = train_step.exchange.next_synchronised(every)
        self._roll_back_once = roll_back_once
        self._log = log

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        step = state.step + 1
        is_due = self._every > 0 and step % self._every == 0
        return self._compare(state, step) if is_due else Next.CONTINUE

    def after_rollback(self, state: TrainState) -> Next:
        """Compares the replicas, because each rank restored its own copy."""
        return self._compare(state, state.step)

    def _compare(self, state: TrainState, step: int) -> Next:
        warning, is_certain = check_replica_consistency(self._train_step)
        if warning:
            self._log.warning(f"after step {step}: {warning}")
        if is_certain or not self._roll_back_once(state, step):
            return Next.CONTINUE
        return Next.ROLLED_BACK


@paddle.no_grad()
def check_replica_consistency(step: TrainStep) -> tuple[str, bool]:
    """Compares the replicas of all ranks and repairs those that differ.  Collective.

    Compares weights, running statistics and EMA.  A flipped bit, or a sum that went wrong on one
    rank, would silently make the ranks train different models.  Values are trusted if more than
    half of the ranks hold them, or if no others are finite.  Otherwise, as with two ranks that
    differ, all ranks get the most frequent values; in a tie, the values of the lowest rank.
    The optimizer state is copied with them but not compared: where it differs, so do the weights
    one step later.

    Returns: a warning that names the ranks that differed, or ""; False if it is unknown which ranks
        were right.  The same on every rank.
    """
    if comm.world_size() == 1:
        return "", True
    names, tensors = zip(*_iterate_compared(step))
    sums = _sum_bits(tensors)
    digests_WP = comm.all_gather(_digest_sums(sums)).numpy()
    groups = equal_ranks(digests_WP.tolist())
    if len(groups) == 1:
        return "", True
    finite = all(
        bool(paddle.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point()
    )
    states_W = comm.all_gather_large_object([finite, comm.host(), sums])
    right_ranks, is_certain = find_trusted_ranks(groups, [finite for finite, _, _ in states_W])
    source = right_ranks[0]
    wrong_ranks = [rank for rank in range(comm.world_size()) if rank not in right_ranks]
    differing = [
        name
        for at, name in enumerate(names)
        if any(states_W[rank][2][at] != states_W[source][2][at] for rank in wrong_ranks)
    ]
    for group in _group_by_dtype(step):
        comm.broadcast_tensors(group, source)
    hosts_W = [host for _, host, _ in states_W]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    remedy = (
        f"repaired with those of rank {source}"
        if is_certain
        else f"which of them are right is unknown, so all have those of rank {source} for now"
    )
    warning = (
        f"{comm.ranks_named(wrong_ranks, hosts_W)} held other weights than "
        f"{comm.ranks_named(right_ranks, hosts_W)} (first {differing[0]}{more}); {remedy}; faulty "
        f"memory or a faulty card causes that: check the hardware of a rank that is named again"
    )
    return warning, is_certain


def find_trusted_ranks(groups: list[list[int]], finite_W: list[bool]) -> tuple[list[int], bool]:
    """Finds the ranks to copy from.

    Args:
        groups: ranks with equal values.
        finite_W: True for a rank whose values are all finite.
    Returns: these ranks; True if their values are certainly right.
    """
    right_ranks = max(groups, key=lambda ranks: (len(ranks), finite_W[ranks[0]], -ranks[0]))
    finite = [ranks for ranks in groups if finite_W[ranks[0]]]
    return right_ranks, 2 * len(right_ranks) > len(finite_W) or finite == [right_ranks]


def _iterate_compared(step: TrainStep) -> Iterator[tuple[str, paddle.Tensor]]:
    """Yields the tensors that must be equal on all ranks, by name."""
    yield from step.model.state_dict().items()
    for policy in step.policies:
        for name, tensor in policy.averaged().items():
            yield f"the average of {name}", tensor


def _group_by_dtype(step: TrainStep) -> list[list[paddle.Tensor]]:
    """Groups all tensors that ranks share according to dtype, in the same order on every rank."""
    tensors = [tensor for _, tensor in _iterate_compared(step)] + step.optimizer.shared_state()
    types = sorted({str(tensor.dtype) for tensor in tensors})
    return [[tensor for tensor in tensors if str(tensor.dtype) == kind] for kind in types]


@paddle.no_grad()
def _sum_bits(tensors: tuple[paddle.Tensor, ...]) -> list[int]:
    """Sums the bits of each tensor, read as integers, so that any flipped bit changes the sum."""
    if device.on_accelerator():
        flat = [
            paddle.view(tensor.flatten(), _INTEGERS[tensor.element_size()]) for tensor in tensors
        ]
        return [int(total) for total in paddle.stack([bits.sum() for bits in flat]).numpy()]
    sums = []
    for tensor in tensors:
        array = tensor.numpy()
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        sums.append(int(bits.sum(dtype=np.uint64)))
    return sums


def _digest_sums(sums: list[int]) -> paddle.Tensor:
    """Combines many sums into one digest, [4] float32.

    Each element holds 16 bits, which a float32 carries exactly over any transport.
    """
    mixed = 0
    for number in sums:
        mixed = (mixed * _ODD + number) % 2**_DIGEST_BITS
    parts = [mixed >> (16 * part) & 0xFFFF for part in range(_PARTS)]
    return paddle.to_tensor(parts, dtype="float32")
