"""Exponential moving average of a model's weights and statistics: what is evaluated and shipped."""

import numpy as np
import paddle
from paddle import nn
from pydantic import Field

from ppdist.config import Section


class EMAConfig(Section):
    """Averaging of weights over steps."""

    enabled: bool = Field(default=True, description="Evaluate and keep averaged weights.")
    decay: float = Field(
        default=0.9998,
        gt=0,
        lt=1,
        description="Decay per step at the reference batch size (optimizer.reference_batch_size); "
        "raised to the power total batch / reference batch.",
    )


def scaled_decay(decay: float, total_batch: int, reference_batch: int) -> float:
    """decay ** (total_batch / reference_batch): the average spans the same number of images.

    Source: Busbridge et al. 2023, arXiv:2307.13813, definition 1.2 (the EMA scaling rule).
    """
    return decay ** (total_batch / reference_batch)


class EMA:
    """A float32 average of every floating entry of a state dict; other entries are copied.

        d_t = min(decay, (1 + t) / (10 + t));   average = d_t * average + (1 - d_t) * value

    The ramp is PP-YOLOE's ("threshold"); the average starts at the model's own values, so it needs
    no bias correction.  Every rank holds the same average because every rank holds the same model.
    """

    def __init__(self, model: nn.Layer, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._live = dict(model.state_dict())
        self.average = {
            key: (value.astype("float32") if _floating(value) else value).detach().clone()
            for key, value in self._live.items()
        }

    @paddle.no_grad()
    def update(self, masters: dict[str, paddle.Tensor]) -> None:
        """Moves the average one step.

        Args:
            masters: float32 master weight of each parameter kept in a lower precision, by the
                state-dict key; empty without AMP O2.
        """
        self.updates += 1
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for key, average in self.average.items():
            value = masters[key] if key in masters else self._live[key]
            if not _floating(value):
                paddle.assign(value, average)
            else:
                # lerp_ says the same and took four times as long on a CPU
                average.scale_(keep).add_(value.astype("float32") * (1.0 - keep))

    def state(self) -> dict[str, np.ndarray]:
        """The average as arrays, for a checkpoint."""
        return {key: value.numpy() for key, value in self.average.items()}

    def load(self, arrays: dict[str, np.ndarray], updates: int) -> None:
        """Continues from a checkpoint's average and number of updates."""
        self.updates = updates
        for key, average in self.average.items():
            paddle.assign(paddle.to_tensor(arrays[key]).astype(average.dtype), average)


def _floating(value: paddle.Tensor) -> bool:
    return value.dtype in (paddle.float32, paddle.float16, paddle.bfloat16, paddle.float64)
