"""Automatic mixed precision: its section of the configuration, and what Paddle's leaves to do."""

import paddle


def make_float32(parameters: list[paddle.Tensor]) -> None:
    """Gives parameters of lower precision (AMP O2) float32 gradients, so that unscaling, clipping
    and the update lose nothing.

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


def loss_scale(scaler: paddle.amp.GradScaler) -> float:
    """By what losses are multiplied for float16; 0: they are not."""
    return float(scaler.state_dict()["scale"][0]) if scaler.is_enable() else 0.0


def lower_scale(scaler: paddle.amp.GradScaler) -> None:
    """Halves the loss scale after a step that was not applied; `update` took it for a good one.

    GradScaler hears of an overflow only in its own `step`, which still updates where nothing but
    the loss was not finite; and what it prints of an overflow is an error from numpy 2.4 on.
    """
    if scaler.is_enable():
        state = scaler.state_dict()
        lower = state["scale"] * scaler.get_decr_ratio()
        scaler.load_state_dict({**state, "scale": lower, "incr_count": 0})
