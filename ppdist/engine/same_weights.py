"""Whether all ranks hold the same training state, and what is done about a rank that does not.

A flipped bit of memory, or a sum that went wrong on one rank only, makes ranks train different
models from there on without a word.  So now and then each adds up the bits of what it holds, and
they compare.
"""

from collections.abc import Iterator

import numpy as np
import paddle

from ppdist import dist
from ppdist.engine.step import TrainStep

_DIGEST_BITS, _PARTS = 64, 4  # 16 bits each, which a float32 holds exactly
_ODD = 0x9E3779B97F4A7C15  # mixes the sums of tensors, so that their order counts
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@paddle.no_grad()
def agree_on_weights(step: TrainStep) -> tuple[str, bool]:
    """Compares weights, running statistics and their average over ranks; a rank whose differ gets
    those of the others, and their optimizer state.  Every rank calls it, when all should be alike.

    Right is what more than half of the ranks hold, or what alone is finite.  Otherwise, as of two
    ranks, nobody can tell; all get what most hold, and of equally many the lowest rank.
    What the optimizer holds is not compared: where it differs, so do the weights one step later.

    Returns: "", or a warning that names the ranks that differed; False: which of them were right
        cannot be told.  The same on every rank.
    """
    if dist.world_size() == 1:
        return "", True
    names, tensors = zip(*_compared(step))
    sums = _sums(tensors)
    digests_WP = dist.all_gather(_digest(sums)).numpy()
    holders: dict[bytes, list[int]] = {}
    for rank, digest_P in enumerate(digests_WP):
        holders.setdefault(digest_P.tobytes(), []).append(rank)
    if len(holders) == 1:
        return "", True
    finite = all(bool(paddle.isfinite(each).all()) for each in tensors if each.is_floating_point())
    told_W = dist.all_gather_objects([finite, dist.host(), sums])
    right, sure = trusted([*holders.values()], [finite for finite, _, _ in told_W])
    source = right[0]
    wrong = [rank for rank in range(dist.world_size()) if rank not in right]
    differing = [
        name
        for at, name in enumerate(names)
        if any(told_W[rank][2][at] != told_W[source][2][at] for rank in wrong)
    ]
    for group in _by_type(step):
        dist.broadcast_tensors(group, source)
    hosts_W = [host for _, host, _ in told_W]
    others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    whose = (
        f"now has those of rank {source}"
        if sure
        else f"which of them are right cannot be told; all have those of rank {source} for now"
    )
    warning = (
        f"{dist.ranks_named(wrong, hosts_W)} held other weights than "
        f"{dist.ranks_named(right, hosts_W)} (first {differing[0]}{others}) and {whose}; faulty "
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
    if dist.on_gpu():  # not run on one
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
