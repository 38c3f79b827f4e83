"""Replicas compared over ranks: one that differs is repaired, or the run rolls back."""

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
_ODD = 0x9E3779B97F4A7C15  # mixes the sums of tensors, so that their order counts
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class ReplicaCheck(RunPolicy):
    """Compares what ranks should hold alike, every so many steps."""

    def __init__(
        self,
        train_step: TrainStep,
        every: int,
        roll_back_once: Callable[[TrainState, int], bool],
        log: RunLog,
    ) -> None:
        """
        Args:
            every: steps from one comparison to the next; 0: never, but after a rollback.
            roll_back_once: rolls back, after a step, where replicas differ and none is known right;
                returns whether it did.
        """
        self._train_step = train_step
        self._every = train_step.exchange.next_synchronised(every)
        self._roll_back_once = roll_back_once
        self._log = log

    def after_step(self, state: TrainState, result: StepResult | None) -> Next:
        step = state.step + 1
        due = self._every > 0 and step % self._every == 0
        return self._compare(state, step) if due else Next.CONTINUE

    def after_rollback(self, state: TrainState) -> Next:
        """Compares, as each rank went back to what it had kept itself."""
        return self._compare(state, state.step)

    def _compare(self, state: TrainState, step: int) -> Next:
        warning, sure = check_replica_consistency(self._train_step)
        if warning:
            self._log.warning(f"after step {step}: {warning}")
        if sure or not self._roll_back_once(state, step):
            return Next.CONTINUE
        return Next.ROLLED_BACK


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
    finite = all(
        bool(paddle.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point()
    )
    states_W = comm.all_gather_large_object([finite, comm.host(), sums])
    right, sure = trusted(groups, [finite for finite, _, _ in states_W])
    source = right[0]
    wrong = [rank for rank in range(comm.world_size()) if rank not in right]
    differing = [
        name
        for at, name in enumerate(names)
        if any(states_W[rank][2][at] != states_W[source][2][at] for rank in wrong)
    ]
    for group in _by_type(step):
        comm.broadcast_tensors(group, source)
    hosts_W = [host for _, host, _ in states_W]
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
    yield from step.model.state_dict().items()
    for policy in step.policies:
        for name, tensor in policy.averaged().items():
            yield f"the average of {name}", tensor


def _by_type(step: TrainStep) -> list[list[paddle.Tensor]]:
    """Everything that ranks share, grouped by dtype in the same order everywhere."""
    tensors = [tensor for _, tensor in _compared(step)] + step.optimizer.shared_state()
    types = sorted({str(tensor.dtype) for tensor in tensors})
    return [[tensor for tensor in tensors if str(tensor.dtype) == kind] for kind in types]


@paddle.no_grad()
def _sums(tensors: tuple[paddle.Tensor, ...]) -> list[int]:
    """Sum of each tensor's bits, read as integers.

    Any flipped bit changes it.
    """
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


def _digest(sums: list[int]) -> paddle.Tensor:
    """Digest of many numbers, [4] float32.

    Each element holds 16 bits, which any transport keeps.
    """
    mixed = 0
    for number in sums:
        mixed = (mixed * _ODD + number) % 2**_DIGEST_BITS
    parts = [mixed >> (16 * part) & 0xFFFF for part in range(_PARTS)]
    return paddle.to_tensor(parts, dtype="float32")
