"""Exponential moving average of a model's weights and statistics."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import paddle
from paddle import nn

from ppdist.distributed import collectives, paddle_api
from ppdist.optim.flat_storage import BUCKET_BYTES, FlatStorage


@dataclass(frozen=True)
class Decay:
    """Decay of the average at each update, for a batch of kappa reference batches.

        reference:  r_t = decay * (1 - exp(-t / ramp_steps)), or min(decay, (1 + t) / (10 + t))
        here:       r_(kappa t) ** kappa,                     or min(decay ** kappa, ...)

    so that the average spans the same number of images.  The second ramp needs no kappa: its
    (1 + t) / (10 + t) = 1 - 9 / (10 + t) forgets 9 / t of the past in a step of any batch, and the
    rule would turn it into 1 - 9 / (10 / kappa + t), to first order.
    Source: Busbridge et al. 2023, arXiv:2307.13813, definition 1.2 (the EMA scaling rule).
    """

    decay: float
    kappa: float = 1.0
    ramp_steps: float | None = None

    @property
    def limit(self) -> float:
        """Returns the decay that a long run approaches."""
        return self.decay**self.kappa

    def __call__(self, update: int) -> float:
        """Returns the decay for one update; updates are counted from 1."""
        if self.ramp_steps is None:
            return min(self.limit, (1 + update) / (10 + update))
        ramp = 1 - math.exp(-update * self.kappa / self.ramp_steps)
        return (self.decay * ramp) ** self.kappa


class Restart(NamedTuple):
    """Restart of an average: the step before which it happens, and the decay afterwards."""

    step: int
    decay: Decay


class EMA:
    """Float32 average of a state dict's floating entries, with copies of the other entries.

        average = d_t * average + (1 - d_t) * value

    The average starts at the model's values, so it needs no bias correction.  All ranks hold the
    same average, because they hold the same model.

    Attributes:
        updates: number of updates since the average started.
        restarted: step before which the average was restarted; None: never.
    """

    def __init__(
        self,
        model: nn.Layer,
        decay: Decay,
        constant: Collection[str] = frozenset(),
        restart: Restart | None = None,
    ) -> None:
        """Copies the model's values.

        Args: constant: keys of tensors that never change (frozen), which need no average.
        """
        self._decay = decay
        self._restart = restart
        self.restarted: int | None = None
        self._constant = constant
        self.updates = 0
        self._live = dict(model.state_dict())
        self.average = {
            key: (value.astype("float32") if value.is_floating_point() else value).detach().clone()
            for key, value in ((key, entry.contiguous()) for key, entry in self._live.items())
        }
        # Frozen entries stay as they are; integers, such as counters, are copied, not averaged.
        changing = [key for key in self.average if key not in constant]
        self._copied = [key for key in changing if not self._live[key].is_floating_point()]
        floating = {id(self.average[key]): key for key in changing if key not in self._copied}
        buckets = collectives.buckets(
            [self.average[key] for key in floating.values()], BUCKET_BYTES
        )
        self._buckets = [
            ([floating[id(average)] for average in bucket], FlatStorage(bucket, aligned=False))
            for bucket in buckets
        ]

    @property
    def decay(self) -> Decay:
        """Returns the decay as a function of the number of updates.

        A resumed run that was lengthened restarts later, and uses its first decay until then.
        """
        restart = self._restart
        return restart.decay if restart and restart.step == self.restarted else self._decay

    def is_due_to_restart(self, step: int) -> bool:
        """Returns True if the average has to restart before a step."""
        return self._restart is not None and step >= self._restart.step != self.restarted

    @paddle.no_grad()
    def restart(self, masters: dict[str, paddle.Tensor]) -> None:
        """Restarts the average from the model's values.

        Source: D-FINE (arXiv:2410.13842) and DEIM (arXiv:2412.04234) change the decay where strong
        augmentation stops; they continue from their best weights and average.

        Args: masters: see `update`.
        """
        assert self._restart is not None
        # From float32 masters where there are any: a weight in bfloat16 has only 8 bits.
        for key, average in self.average.items():
            value = masters[key] if key in masters else self._live[key]
            paddle.assign(value.astype(average.dtype), average)
        self.updates, self.restarted = 0, self._restart.step

    @paddle.no_grad()
    def update(self, masters: dict[str, paddle.Tensor], steps: int = 1) -> None:
        """Moves the average by `steps` updates; 0: not at all.

        Args:
            masters: float32 master weight of each parameter in a lower precision, by state-dict
                key; empty without AMP O2.
        """
        if steps == 0:
            return
        decay = math.prod(self.decay(self.updates + offset) for offset in range(1, steps + 1))
        self.updates += steps
        for keys, storage in self._buckets:
            values = [masters[key] if key in masters else self._live[key] for key in keys]
            _, value = paddle_api.coalesce([_widen(value) for value in values])
            average = storage.gather() if len(keys) > 1 else self.average[keys[0]]
            # The difference of a constant (anchors) is 0, so it stays exactly equal.
            # lerp_ computes the same and took four times as long on a CPU.
            average.add_((value - average).scale_(1.0 - decay))
            if len(keys) > 1:
                storage.scatter(average)
        for key in self._copied:
            paddle.assign(self._live[key], self.average[key])

    def state(self) -> dict[str, np.ndarray]:
        """Returns the average as arrays, for a checkpoint."""
        # Cloned, because an array of part of a storage would keep the whole storage in memory.
        return {key: value.clone().numpy() for key, value in self.average.items()}

    def load(
        self, arrays: Mapping[str, np.ndarray], updates: int, restarted: int | None = None
    ) -> None:
        """Continues from a checkpoint's average, `updates` and `restarted`.

        The average of constant tensors is set to their value, whatever it was before; the model
        already has the checkpoint's weights.
        """
        self.updates, self.restarted = updates, restarted
        for key, average in self.average.items():
            value = self._live[key] if key in self._constant else paddle.to_tensor(arrays[key])
            paddle.assign(value.astype(average.dtype), average)


def _widen(value: paddle.Tensor) -> paddle.Tensor:
    """Returns a value as float32.  `astype` takes 5 us even where it changes nothing."""
    return value if value.dtype == paddle.float32 else value.astype("float32")
