"""The update of a step: rates, Paddle's optimizer, its state by the model's keys."""

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from ppdist.distributed import collectives, paddle_api
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.optimizer import (
    LR_FACTOR,
    biases,
    filter_optimizer_state,
    load_optimizer_arrays,
    split_name,
    structured_keys,
)


class Updater:
    """A Paddle optimizer with the model that it trains.

    Attributes:
        optimizer: Paddle's optimizer.
        wrapped: the object that a GradScaler takes; see `collectives.wrap_optimizer`.
    """

    def __init__(self, optimizer: paddle.optimizer.Optimizer, model: nn.Layer) -> None:
        self.optimizer = optimizer
        self.wrapped = collectives.wrap_optimizer(optimizer)
        self._model = model
        self._biases = biases(model)

    def set_rates(self, rates: LearningRates) -> None:
        """Sets the rates of one step.

        Paddle stores the rate of a single parameter as a multiple of the common rate, or as a
        tensor, and the momentum in its groups, which overwrite the optimizer's attribute in every
        step. Parameters with the same multiple share a tensor, which Paddle would create for each.
        """
        self.optimizer.set_lr(rates.lr)
        # Paddle multiplies the common rate, so the rate of biases is expressed as a multiple of it.
        bias = rates.bias_lr / rates.lr if rates.lr else 1.0
        bias_ids = {id(parameter) for parameter in self._biases}
        tensors: dict[float, Tensor] = {}
        common = paddle.full([1], rates.lr, "float32")
        for parameter in paddle_api.trained_parameters(self.optimizer):
            factor = parameter.optimize_attr.get(LR_FACTOR, 1.0)
            # Factors of layers and of parameter groups multiply the rate of biases, too.
            multiple = (bias if id(parameter) in bias_ids else 1.0) * factor
            if multiple != 1.0 and multiple not in tensors:
                tensors[multiple] = common * multiple
            parameter.optimize_attr["learning_rate"] = tensors.get(multiple, 1.0)
        if isinstance(self.optimizer, paddle.optimizer.Momentum):
            paddle_api.set_optimizer_momentum(self.optimizer, rates.momentum)

    def update(self, step: Callable[[Any], None]) -> None:
        """Updates the parameters.

        Args: step: function that takes a step with the optimizer passed to it, like
        `GradScaler.step`.
        """
        step(self.wrapped)

    def masters(self) -> dict[str, Tensor]:
        """Returns float32 masters of low-precision parameters (AMP O2), by state-dict key."""
        masters = paddle_api.master_weights(self.optimizer)
        if not masters:  # nearly always: then the walk through the model would take 2 ms of a step
            return {}
        named = self._model.named_parameters()
        return {key: masters[p.name] for key, p in named if p.name in masters}

    def shared_state(self) -> list[Tensor]:
        """Returns the state that is equal on all ranks."""
        state = dict(self.optimizer.state_dict())
        masters = state.pop("master_weights", {})
        return [*masters.values(), *(x for x in state.values() if isinstance(x, Tensor))]

    def state(self) -> dict[str, np.ndarray]:
        """Returns all state as arrays, on rank 0: `<parameter key>/<accumulator>` -> array.

        Collective if the state is sharded over ranks.  Paddle names accumulators after generated
        parameter names (`conv2d_3.w_0_velocity_0`), which change when another layer is built first;
        a checkpoint must not depend on that.  Float32 masters (AMP O2) are
        `<parameter key>/fp32_master_0`, and their accumulators
        `<parameter key>/fp32_master_0_velocity_0`.
        """
        arrays = {}
        state = dict(self.optimizer.state_dict())
        masters = state.pop("master_weights", {})
        names = structured_keys(self._model)
        tensors = [(name, value) for name, value in state.items() if isinstance(value, Tensor)]
        tensors += [(value.name, value) for value in masters.values()]
        for name, value in tensors:
            key, accumulator = split_name(name, names)
            arrays[f"{key}/{accumulator}"] = value.numpy()
        return arrays

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Restores the result of `state`.

        Returns: a warning if other parameters were trained when the state was saved; else "".
        """
        arrays, warning = filter_optimizer_state(self.optimizer, self._model, arrays)
        load_optimizer_arrays(self.optimizer, self._model, self._local(arrays))
        return warning

    def _local(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Selects this rank's share of the state: here all of it."""
        return arrays
