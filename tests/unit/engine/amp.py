"""What AMP does on a GPU, where no CPU would: loss scaling, master weights, another optimizer."""

import numpy as np
import paddle


def enable_scaling(scaler: paddle.amp.GradScaler) -> None:
    """The state that GradScaler gives itself where it believes in float16."""
    donor = {"scale": [1024.0], "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000,
             "decr_every_n_nan_or_inf": 1, "incr_count": 0, "decr_count": 0,
             "use_dynamic_loss_scaling": True}  # fmt: skip
    scaler._enable = True
    scaler.load_state_dict(donor)
    for name in ("_found_inf", "_temp_found_inf_value_false", "_temp_found_inf_fp16",
                 "_temp_found_inf_bf16", "_temp_found_inf_fp32"):  # fmt: skip
        setattr(scaler, name, paddle.to_tensor([False]))
    scaler._cache_found_inf = None
    scaler.update()  # makes its table of optimizers


def create_state(optimizer: paddle.optimizer.Optimizer, model: paddle.nn.Layer, filled=False):
    """Makes an optimizer's state without a step, and fills it with something."""
    block = paddle.static.default_main_program().global_block()  # as Optimizer.step does
    optimizer._create_accumulators(block, [p for p in model.parameters() if not p.stop_gradient])
    if filled:
        for values in optimizer._accumulators.values():
            for value in values.values():
                value.fill_(np.random.RandomState(value.size).rand())
        for master in optimizer._master_weights.values():
            master.fill_(0.1)


class RecordingOptimizer:
    """Takes the place of an update that no CPU has: notes the gradient of every step."""

    def __init__(self, parameter) -> None:
        self.parameter = parameter
        self.gradients: list[float] = []
        self._grad_clip = None
        self._master_weights: dict = {}
        self._parameter_list = [parameter]
        self._param_groups = [{"params": [parameter]}]

    def clear_grad(self) -> None:
        self.parameter.clear_gradient()

    def set_lr(self, lr: float) -> None:
        pass

    def step(self) -> None:
        assert self.parameter.grad.dtype == paddle.float32
        self.gradients.append(self.parameter.grad.item())
