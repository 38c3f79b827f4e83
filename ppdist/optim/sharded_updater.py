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
    """Updater in which each rank updates only its share of the parameters.

    The state of the optimizer (momentum: one float32 for each weight, AdamW: two) is created where
    it is used, so a rank holds 1 / ranks of it.  Weights, gradients and the norm for clipping are
    complete on every rank, and an update depends on one parameter only, so the weights are bit for
    bit the same as without sharding.  The price: after each step every weight is sent once more.

    Paddle's DygraphShardingOptimizer does the same, but requires its HybridParallelOptimizer and
    model wrapper, which fold clipping and loss scaling into the update.  This class was not run on
    a GPU.
    Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, stage 1 (P_os), with an all-reduce of
    gradients instead of their reduce-scatter, which Paddle's gloo backend lacks.
    """

    def __init__(
        self,
        optimizer: paddle.optimizer.Optimizer,
        model: nn.Layer,
        parameters: Mapping[str, Tensor],
    ) -> None:
        """Assigns the parameters to ranks.

        Args:
            parameters: the trained parameters, float32, by state-dict key; in the same order on
                every rank.
        """
        super().__init__(optimizer, model)
        sizes = [parameter.size for parameter in parameters.values()]
        owners = assign_parameters(sizes, ranks.world_size())
        self._owner = dict(zip(parameters, owners))
        self._shares: list[list[Tensor]] = [[] for _ in range(ranks.world_size())]
        for parameter, owner in zip(parameters.values(), owners):
            self._shares[owner].append(parameter)

    @paddle.no_grad()
    def update(self, step: Callable[[Any], None]) -> None:
        """Updates this rank's share, and sends it to all ranks.  Collective."""
        with self._updating_share():
            step(self.wrapped)
        for owner, share in enumerate(self._shares):
            collectives.broadcast_tensors(share, owner)

    @contextlib.contextmanager
    def _updating_share(self) -> Iterator[None]:
        """Makes the optimizer update only this rank's share inside the context.

        Paddle's optimizers skip parameters with stop_gradient; the gradients themselves stay.
        """
        own_parameters = self._shares[ranks.rank()]
        other_ranks_parameters = [
            p for share in self._shares if share is not own_parameters for p in share
        ]
        for parameter in other_ranks_parameters:
            parameter.stop_gradient = True
        try:
            yield
        finally:
            for parameter in other_ranks_parameters:
                parameter.stop_gradient = False

    def shared_state(self) -> list[Tensor]:
        """Returns nothing: each rank has a share of its own."""
        return []

    def state(self) -> dict[str, np.ndarray]:
        """Returns the state of all ranks on rank 0, and on other ranks their own.

        Collective; ranks may be minutes apart.
        """
        arrays = super().state()
        full_state = {} if ranks.is_main() else dict(arrays)
        # Shapes first: a rank does not know the accumulators of parameters that it does not update.
        shapes_W = gathering.all_gather_large_object(
            {key: array.shape for key, array in arrays.items()}
        )
        for owner, shapes in enumerate(shapes_W):
            if owner == ranks.rank():
                tensors = [paddle.to_tensor(arrays[key]) for key in shapes]
            else:
                tensors = [paddle.zeros(shape, "float32") for shape in shapes.values()]
            collectives.broadcast_tensors(tensors, owner)
            # On other ranks the state must not take the memory that shares save.
            if ranks.is_main():
                full_state |= {key: tensor.numpy() for key, tensor in zip(shapes, tensors)}
        return full_state

    def _local(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Selects this rank's share of the state.

        Entries that belong to no parameter stay, so that an error can name them.
        """
        rank = ranks.rank()
        return {
            entry: array
            for entry, array in arrays.items()
            if self._owner.get(entry.rpartition("/")[0], rank) == rank
        }


def assign_parameters(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assigns parameters to ranks, the largest first to the rank with the least."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners
