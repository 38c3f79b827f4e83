"""The precision of a training step: autocast, and the loss scale of float16."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import paddle
from paddle import Tensor

from ppdist.optim.updater import Updater

_FIRST_SCALE = 1024.0


class Precision:
    """float32, or what `train.amp` asks for: Paddle's autocast, on a CPU oneDNN's kernels.

    float16 has few small numbers, so losses are multiplied by a scale before backward, and
    gradients divided by it after the exchange.  The scale halves where a step overflows, and
    doubles after many that did not.

    Attributes:
        autocast: makes a context in which forward passes are in this precision.
        scaler: Paddle's; it does nothing where losses are not scaled.
    """

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        scales: bool = False,
    ) -> None:
        """Args: scales: losses are scaled, for float16."""
        self.autocast = autocast
        self.scaler = paddle.amp.GradScaler(enable=scales, init_loss_scaling=_FIRST_SCALE)

    def scale(self, loss: Tensor) -> Tensor:
        """Scales a loss before backward."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    @property
    def loss_scale(self) -> float:
        """Loss scale for float16; 0: losses are not scaled."""
        scaler = self.scaler
        return float(scaler.state_dict()["scale"][0]) if scaler.is_enable() else 0.0

    def widen(self, parameters: Iterable[Tensor]) -> None:
        """Gives parameters of lower precision (AMP O2) float32 gradients.

        So unscaling, clipping and the update lose nothing.
        Not `master_grad` of `paddle.amp.decorate`, which does the same after every backward: the
        gradient all-reduce takes gradients in the precision of their parameters, so after the first
        of several micro-steps it would find another one.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype != paddle.float32:
                wide = gradient.astype("float32")
                parameter.clear_gradient(False)  # it does not change its precision in place
                parameter.grad = wide

    def unscale(self, optimizer: Updater) -> None:
        """Divides the gradients by the loss scale."""
        self.scaler.unscale_(optimizer.wrapped)

    def update(self, optimizer: Updater) -> None:
        """Applies unscaled gradients.  Collective where the optimizer is sharded."""
        optimizer.update(self.scaler.step)
        self.scaler.update()

    def reject(self, lowers_scale: bool) -> None:
        """Takes back `unscale`, and halves the loss scale after a step that was not finite.

        Else `update` of the scaler would take the step for a good one.  GradScaler hears of an
        overflow only in its own `step`, which still updates where nothing but the loss was not
        finite; and what it prints of an overflow is an error from numpy 2.4 on.
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
        """The state of the loss scale as JSON; {}: losses are not scaled."""
        state = self.scaler.state_dict()
        return {key: x.tolist() if hasattr(x, "tolist") else x for key, x in state.items()}

    def load(self, state: dict[str, object]) -> None:
        """Continues from what `state` gave."""
        if state:
            self.scaler.load_state_dict(state)
