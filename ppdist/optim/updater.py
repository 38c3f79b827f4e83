"""The update of a step: rates, Paddle's optimizer, its state by the model's keys."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from ppdist.distributed import collectives, data_parallel, gathering, paddle_api, ranks
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.optimizer import (
    biases,
    filter_optimizer_state,
    load_optimizer_arrays,
    optimizer_arrays,
    set_rates,
)


class Updater:
    """An optimizer of Paddle and the model that it trains.

    Attributes:
        optimizer: Paddle's.
        wrapped: what a GradScaler takes for it; see `data_parallel.wrap_optimizer`.
    """

    def __init__(self, optimizer: paddle.optimizer.Optimizer, model: nn.Layer) -> None:
        self.optimizer = optimizer
        self.wrapped = data_parallel.wrap_optimizer(optimizer)
        self._model = model
        self._biases = biases(model)

    def clear_gradients(self) -> None:
        """Drops the gradients of all parameters."""
        self.optimizer.clear_grad()

    def set_rates(self, rates: LearningRates) -> None:
        """Sets the rates of one step."""
        set_rates(self.optimizer, self._biases, rates)

    def update(self, step: Callable[[Any], None]) -> None:
        """Makes an update.

        Args: step: makes it with the optimizer that it is given, as `GradScaler.step` does.
        """
        step(self.wrapped)

    def forget_lists(self) -> None:
        """Has Paddle look anew for the parameters that have a gradient."""
        paddle_api.forget_update_lists(self.optimizer)

    def masters(self) -> dict[str, Tensor]:
        """Float32 masters of low-precision parameters (AMP O2), by state-dict key."""
        masters = paddle_api.master_weights(self.optimizer)
        named = self._model.named_parameters()
        return {key: masters[p.name] for key, p in named if p.name in masters}

    def shared_state(self) -> list[Tensor]:
        """State that all ranks hold alike."""
        state = dict(self.optimizer.state_dict())
        masters = state.pop("master_weights", {})
        return [*masters.values(), *(x for x in state.values() if isinstance(x, Tensor))]

    def state(self) -> dict[str, np.ndarray]:
        """All state as arrays, on rank 0.  Collective where ranks have shares of it."""
        return optimizer_arrays(self.optimizer, self._model)

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Restores what `state` gave.

        Returns: a warning, if other parameters were trained then; else "".
        """
        arrays, warning = filter_optimizer_state(self.optimizer, self._model, arrays)
        load_optimizer_arrays(self.optimizer, self._model, self._local(arrays))
        return warning

    def _local(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays


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
