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
    """Decay of the average at each update of kappa reference batches.

        reference:  r_t = decay * (1 - exp(-t / ramp_steps)), or min(decay, (1 + t) / (10 + t))
        here:       r_(kappa t) ** kappa,                     or min(decay ** kappa, ...)

    so that the average spans the same number of images.  The second ramp needs no kappa: its
    (1 + t) / (10 + t) = 1 - 9 / (10 + t) forgets 9 / t of the past in a step whatever its batch,
    and the rule would make 1 - 9 / (10 / kappa + t) of it, to first order.
    Source: Busbridge et al. 2023, arXiv:2307.13813, definition 1.2 (the EMA scaling rule).
    """

    decay: float
    kappa: float = 1.0
    ramp_steps: float | None = None

    @property
    def limit(self) -> float:
        """The decay of a long run."""
        return self.decay**self.kappa

    def __call__(self, update: int) -> float:
        """The decay of one update, counted from 1."""
        if self.ramp_steps is None:
            return min(self.limit, (1 + update) / (10 + update))
        ramp = 1 - math.exp(-update * self.kappa / self.ramp_steps)
        return (self.decay * ramp) ** self.kappa


class Restart(NamedTuple):
    """Where an average starts again: before which step, with what decay."""

    step: int
    decay: Decay


class EMA:
    """Float32 average of a state dict's floating entries; the others are copied.

        average = d_t * average + (1 - d_t) * value

    The average starts at the model's own values, so it needs no bias correction.  Every rank holds
    the same average because every rank holds the same model.

    Attributes:
        updates: since it started.
        restarted: step before which it started again; None: it has not.
    """

    def __init__(
        self,
        model: nn.Layer,
        decay: Decay,
        constant: Collection[str] = frozenset(),
        restart: Restart | None = None,
    ) -> None:
        """Args: constant: keys of what never changes (frozen): there is nothing to average."""
        self._decay = decay
        self._restart = restart
        self.restarted: int | None = None
        self._constant = constant
        self.updates = 0
        self._live = dict(model.state_dict())
        self.average = {
            key: (each.astype("float32") if each.is_floating_point() else each).detach().clone()
            for key, each in ((key, value.contiguous()) for key, value in self._live.items())
        }
        changing = [key for key in self.average if key not in constant]
        self._copied = [key for key in changing if not self._live[key].is_floating_point()]
        floating = {id(self.average[key]): key for key in changing if key not in self._copied}
        buckets = collectives.buckets(
            [self.average[key] for key in floating.values()], BUCKET_BYTES
        )
        self._buckets = [
            ([floating[id(each)] for each in bucket], FlatStorage(bucket, aligned=False))
            for bucket in buckets
        ]

    @property
    def decay(self) -> Decay:
        """The decay by number of updates.

        A longer run, which restarts later, has its first one again.
        """
        restart = self._restart
        return restart.decay if restart and restart.step == self.restarted else self._decay

    def is_due_to_restart(self, step: int) -> bool:
        """Whether it has to start again before a step."""
        return self._restart is not None and step >= self._restart.step != self.restarted

    @paddle.no_grad()
    def restart(self, masters: dict[str, paddle.Tensor]) -> None:
        """Starts again from the model's own values.

        Source: D-FINE (arXiv:2410.13842) and DEIM (arXiv:2412.04234) give it another decay where
        strong augmentation stops; they go on from their best weights and average.

        Args: masters: see `update`.
        """
        assert self._restart is not None
        for key, average in self.average.items():
            value = masters[key] if key in masters else self._live[key]
            paddle.assign(value.astype(average.dtype), average)
        self.updates, self.restarted = 0, self._restart.step

    @paddle.no_grad()
    def update(self, masters: dict[str, paddle.Tensor], steps: int = 1) -> None:
        """Moves the average by `steps` updates; 0: not at all.

        Args:
            masters: float32 master weight of each parameter kept in a lower precision, by the
                state-dict key; empty without AMP O2.
        """
        if steps == 0:
            return
        keep = math.prod(self.decay(self.updates + each) for each in range(1, steps + 1))
        self.updates += steps
        for keys, storage in self._buckets:
            values = [masters[key] if key in masters else self._live[key] for key in keys]
            _, value = paddle_api.coalesce([each.astype("float32") for each in values])
            average = storage.gather() if len(keys) > 1 else self.average[keys[0]]
            # The difference of a constant (anchors) is 0, so it stays exactly what it is.
            # lerp_ says the same and took four times as long on a CPU.
            average.add_((value - average).scale_(1.0 - keep))
            if len(keys) > 1:
                storage.scatter(average)
        for key in self._copied:
            paddle.assign(self._live[key], self.average[key])

    def state(self) -> dict[str, np.ndarray]:
        """The average as arrays, for a checkpoint."""
        # Of a clone: the array of a part of a storage would hold all of it.
        return {key: value.clone().numpy() for key, value in self.average.items()}

    def load(
        self, arrays: Mapping[str, np.ndarray], updates: int, restarted: int | None = None
    ) -> None:
        """Continues from a checkpoint's average, `updates` and `restarted`.

        What is constant from here on is its own average, whatever it was before; the model has the
        checkpoint's weights already.
        """
        self.updates, self.restarted = updates, restarted
        for key, average in self.average.items():
            value = self._live[key] if key in self._constant else paddle.to_tensor(arrays[key])
            paddle.assign(value.astype(average.dtype), average)
