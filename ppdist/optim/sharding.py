"""Optimizer state in shares: each rank keeps that of the parameters which it updates."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import paddle

from ppdist import dist


class Sharding:
    """Each rank updates its share of the parameters and sends them to the others.

    The state of the optimizer (momentum: one float32 for each weight, AdamW: two) is made where it
    is used, so a rank holds 1 / ranks of it.  Weights, gradients and the norm for clipping stay
    whole on every rank, an update looks at one parameter only, and so the weights are bit for bit
    those without shares.  Price: after each step every weight travels once more.

    Not Paddle's own: DygraphShardingOptimizer does the same, but asks for its
    HybridParallelOptimizer and model wrapper, which fold clipping and loss scaling into the update.
    Not run on a GPU.
    Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, stage 1 (P_os), with an all-reduce of
    gradients where theirs scatters: gloo has no reduce-scatter in Paddle.
    """

    def __init__(self, parameters: dict[str, paddle.Tensor]) -> None:
        """
        Args:
            parameters: what the optimizer trains, float32, by state-dict key; in the same order on
                every rank.
        """
        sizes = [parameter.size for parameter in parameters.values()]
        owners = share_out(sizes, dist.world_size())
        self._owner = dict(zip(parameters, owners))
        self._shares: list[list[paddle.Tensor]] = [[] for _ in range(dist.world_size())]
        for parameter, owner in zip(parameters.values(), owners):
            self._shares[owner].append(parameter)

    @contextlib.contextmanager
    def only_mine(self) -> Iterator[None]:
        """Inside, a step of the optimizer updates this rank's share and makes state for it alone.

        Paddle's optimizers pass over what stops the gradient; the gradients themselves stay.
        """
        mine = self._shares[dist.rank()]
        others = [each for share in self._shares if share is not mine for each in share]
        for parameter in others:
            parameter.stop_gradient = True
        try:
            yield
        finally:
            for parameter in others:
                parameter.stop_gradient = False

    @paddle.no_grad()
    def exchange(self) -> None:
        """Gives all ranks the weights that each has updated.  Every rank calls it."""
        for owner, share in enumerate(self._shares):
            dist.broadcast_tensors(share, owner)

    def whole(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The optimizer state of all ranks together, on rank 0; the others get back their own.

        Every rank calls it; they may be minutes apart.
        Args: arrays: this rank's, float32, as `optimizer_arrays` names them.
        """
        everything = {} if dist.is_main() else dict(arrays)
        shapes_W = dist.all_gather_objects({key: array.shape for key, array in arrays.items()})
        for owner, shapes in enumerate(shapes_W):
            if owner == dist.rank():
                tensors = [paddle.to_tensor(arrays[key]) for key in shapes]
            else:
                tensors = [paddle.zeros(shape, "float32") for shape in shapes.values()]
            dist.broadcast_tensors(tensors, owner)
            if dist.is_main():  # the others need the memory that they were to save
                everything |= {key: tensor.numpy() for key, tensor in zip(shapes, tensors)}
        return everything

    def mine(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's share of the whole state; what belongs to no parameter stays, to be named."""
        rank = dist.rank()
        return {
            entry: array
            for entry, array in arrays.items()
            if self._owner.get(entry.rpartition("/")[0], rank) == rank
        }


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each parameter: the largest first, each to the rank that has least so far."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        owner = loads.index(min(loads))
        owners[at] = owner
        loads[owner] += sizes[at]
    return owners
