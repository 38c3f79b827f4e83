"""Gradients of a step, from backward to the update."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import paddle
from paddle import Tensor, nn

from ppdist.distributed import paddle_api
from ppdist.engine.loss_sums import LossSums, SeparateDivisor
from ppdist.engine.precision import Precision
from ppdist.optim.exchange import Exchange
from ppdist.optim.flat_storage import FlatGradients
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.updater import Updater


class Gradients:
    """Gradients that backward passes have accumulated in the parameters of a model.

    Attributes:
        parameters: the trained parameters.
    """

    def __init__(
        self,
        model: nn.Layer,
        separate_keys: tuple[str, ...],
        optimizer: Updater,
        precision: Precision,
    ) -> None:
        """Args: separate_keys: see `Loss`."""
        self._model = model
        self.parameters = [p for p in model.parameters() if not p.stop_gradient]
        self._separate = SeparateDivisor(model, separate_keys)
        self._optimizer = optimizer
        self._precision = precision
        self._flat: FlatGradients | None = None  # of the last step

    def drop(self) -> None:
        """Drops the gradients, and frees their memory for the next backward pass."""
        self._optimizer.optimizer.clear_grad()
        if self._flat is not None:
            self._flat.release()

    @paddle.no_grad()
    def average(
        self, exchange: Exchange, sums: LossSums, totals: Tensor, factor: Callable[[], float]
    ) -> Tensor:
        """Averages the gradients of all ranks, in float32.  Collective.

        Args:
            totals: `sums` over all ranks, at the end of a tensor on the device.
            factor: returns the factor by which the gradients will be multiplied; it waits for the
                device, so only exchanges that hold back part of the gradients call it.
        Returns: the square of the averaged gradients' norm, [1].
        """
        self._precision.widen(self.parameters)
        self._separate.apply(sums, totals)
        trained = [p for p in self.parameters if p.grad is not None]
        exchange.average([p.grad for p in trained], factor)
        self._precision.unscale(self._optimizer)
        # Only parameters with a gradient are updated, and these may change from step to step.
        if self._flat is None or not self._flat.are_of(trained):
            self._flat = FlatGradients(trained)
            paddle_api.forget_update_lists(self._optimizer.optimizer)
        self._flat.collect()
        return exchange.norm_square(self._flat.square())

    @paddle.no_grad()
    def apply(self, factor: float, rates: LearningRates) -> None:
        """Updates the weights using the gradients times `factor`.

        Collective if the optimizer is sharded.
        """
        assert self._flat is not None, "they were not averaged"
        self._flat.scale_(factor)
        self._optimizer.set_rates(rates)
        self._precision.update(self._optimizer)

    def not_finite(self) -> list[str]:
        """Names the gradients that are not finite, for a message."""
        return [
            f"gradient of {name}"
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
            and not bool(paddle.isfinite(parameter.grad.astype("float32")).all())
        ]

    @contextmanager
    def adding_zeros(self) -> Iterator[None]:
        """Creates a context in which backward passes add only zeros to the gradients.

        A parameter's hook receives the gradient of one pass before it is added to earlier gradients
        and before an exchange within the backward pass takes the sum.
        """
        hooks = [parameter.register_hook(paddle.zeros_like) for parameter in self.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
