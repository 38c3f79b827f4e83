"""The precision of a training step: autocast, and the loss scale of float16."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import paddle
from paddle import Tensor

from ppdist.optim.updater import Updater

_FIRST_SCALE = 1024.0


class Precision:
    """The precision of a step: float32, or the one set by `train.amp`.

    `train.amp` uses Paddle's autocast; on a CPU, oneDNN's kernels.  Small numbers underflow in
    float16, so losses are multiplied by a scale before backward, and gradients divided by it after
    the exchange.  The scale halves if a step overflows, and doubles after many steps that did not.

    Attributes:
        autocast: creates a context in which forward passes run in this precision.
        scaler: Paddle's GradScaler; it does nothing where losses are not scaled.
    """

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        scales: bool = False,
    ) -> None:
        """Args: scales: whether losses are scaled, as float16 requires."""
        self.autocast = autocast
        self.scaler = paddle.amp.GradScaler(enable=scales, init_loss_scaling=_FIRST_SCALE)

    def scale(self, loss: Tensor) -> Tensor:
        """Scales a loss before backward."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    @property
    def loss_scale(self) -> float:
        """Returns the loss scale of float16; 0 if losses are not scaled."""
        scaler = self.scaler
        return float(scaler.state_dict()["scale"][0]) if scaler.is_enable() else 0.0

    def widen(self, parameters: Iterable[Tensor]) -> None:
        """Gives parameters of lower precision (AMP O2) float32 gradients.

        So unscaling, clipping and the update lose nothing.  `master_grad` of `paddle.amp.decorate`
        does the same after every backward pass, but cannot be used: the gradient all-reduce expects
        gradients in the precision of their parameters, and with several micro-batches it would
        find float32 gradients after the first.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype != paddle.float32:
                wide = gradient.astype("float32")
                parameter.clear_gradient(False)  # a gradient's dtype cannot change in place
                parameter.grad = wide

    def unscale(self, optimizer: Updater) -> None:
        """Divides the gradients by the loss scale."""
        self.scaler.unscale_(optimizer.wrapped)

    def update(self, optimizer: Updater) -> None:
        """Applies unscaled gradients.  Collective where the optimizer is sharded."""
        optimizer.update(self.scaler.step)
        self.scaler.update()

    def reject(self, lowers_scale: bool) -> None:
        """Undoes `unscale`, and halves the loss scale if `lowers_scale`.

        Without this the scaler's `update` would count the step as a good one: GradScaler detects an
        overflow only in its own `step`, which would update the weights if only the loss was not
        finite, and whose overflow message raises an exception with numpy 2.4 or later.
        """
        if not self.scaler.is_enable():
            return
        state = self.scaler.state_dict()
        self.scaler.update()
        if lowers_scale:
            state = self.scaler.state_dict()
            lower = state["scale"] * self.scaler.get_decr_ratio()
            state = {**state, "scale": lower, "incr_count": 0}
        self.scaler.load_state_dict(state)

    def state(self) -> dict[str, object]:
        """Returns the state of the loss scale as JSON; {} if losses are not scaled."""
        state = self.scaler.state_dict()
        return {key: x.tolist() if hasattr(x, "tolist") else x for key, x in state.items()}

    def load(self, state: dict[str, object]) -> None:
        """Restores a state that `state` returned."""
        if state:
            self.scaler.load_state_dict(state)
