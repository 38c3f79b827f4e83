"""The update of a step where each rank holds the optimizer state of a share of the parameters."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from ppdist.distributed import collectives, gathering, ranks
from ppdist.optim.updater import Updater


class ShardedUpdater(Updater):
    """Each rank updates its share of the parameters.

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

    def __init__(
        self,
        optimizer: paddle.optimizer.Optimizer,
        model: nn.Layer,
        parameters: Mapping[str, Tensor],
    ) -> None:
        """
        Args:
            parameters: what the optimizer trains, float32, by state-dict key; in the same order on
                every rank.
        """
        super().__init__(optimizer, model)
        sizes = [parameter.size for parameter in parameters.values()]
        owners = share_out(sizes, ranks.world_size())
        self._owner = dict(zip(parameters, owners))
        self._shares: list[list[Tensor]] = [[] for _ in range(ranks.world_size())]
        for parameter, owner in zip(parameters.values(), owners):
            self._shares[owner].append(parameter)

    @paddle.no_grad()
    def update(self, step: Callable[[Any], None]) -> None:
        """Updates this rank's share, and gives all ranks what each has updated.  Collective."""
        with self._only_mine():
            step(self.wrapped)
        for owner, share in enumerate(self._shares):
            collectives.broadcast_tensors(share, owner)

    @contextlib.contextmanager
    def _only_mine(self) -> Iterator[None]:
        """Inside, the optimizer updates this rank's share only.

        Paddle's optimizers pass over what stops the gradient; the gradients themselves stay.
        """
        mine = self._shares[ranks.rank()]
        others = [p for share in self._shares if share is not mine for p in share]
        for parameter in others:
            parameter.stop_gradient = True
        try:
            yield
        finally:
            for parameter in others:
                parameter.stop_gradient = False

    def shared_state(self) -> list[Tensor]:
        """Nothing: each rank has a share of its own."""
        return []

    def state(self) -> dict[str, np.ndarray]:
        """The state of all ranks on rank 0, on the others their own.

        Collective; they may be minutes apart.
        """
        arrays = super().state()
        everything = {} if ranks.is_main() else dict(arrays)
        shapes_W = gathering.all_gather_large_object(
            {key: array.shape for key, array in arrays.items()}
        )
        for owner, shapes in enumerate(shapes_W):
            if owner == ranks.rank():
                tensors = [paddle.to_tensor(arrays[key]) for key in shapes]
            else:
                tensors = [paddle.zeros(shape, "float32") for shape in shapes.values()]
            collectives.broadcast_tensors(tensors, owner)
            if ranks.is_main():  # the others need the memory that they were to save
                everything |= {key: tensor.numpy() for key, tensor in zip(shapes, tensors)}
        return everything

    def _local(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's share of the whole state.

        What belongs to no parameter stays, to be named.
        """
        rank = ranks.rank()
        return {
            entry: array
            for entry, array in arrays.items()
            if self._owner.get(entry.rpartition("/")[0], rank) == rank
        }


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each parameter."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        owner = loads.index(min(loads))
        owners[at] = owner
        loads[owner] += sizes[at]
    return owners
