"""The update of a step: rates, Paddle's optimizer, its state by the model's keys."""

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from ppdist.distributed import data_parallel, paddle_api
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
