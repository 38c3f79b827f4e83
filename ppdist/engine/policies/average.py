"""Averaged weights: the EMA of a training step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from paddle import Tensor

from ppdist.engine.step_policy import Groups, StepPolicy, Verdict
from ppdist.optim.ema import EMA
from ppdist.optim.updater import Updater


class AveragedWeights(StepPolicy):
    """The policy that updates the average of the weights whenever all ranks hold equal weights."""

    def __init__(self, ema: EMA, optimizer: Updater) -> None:
        self.ema = ema
        self._optimizer = optimizer
        self._updates = 0  # since the ranks held the same weights

    def before_step(self, step: int, synchronised: bool) -> None:
        if synchronised and self.ema.is_due_to_restart(step):
            self.ema.restart(self._optimizer.masters())

    def after_update(self, step: int, verdict: Verdict, synchronised: bool) -> None:
        self._updates += verdict is Verdict.APPLY
        if synchronised:
            self.ema.update(self._optimizer.masters(), self._updates)
            self._updates = 0

    def averaged(self) -> Mapping[str, Tensor]:
        return self.ema.average

    def state(self) -> tuple[Groups, dict[str, Any]]:
        facts = {"ema_updates": self.ema.updates, "ema_restarted": self.ema.restarted}
        return {"ema": self.ema.state()}, facts

    def load(self, groups: Mapping[str, Mapping[str, np.ndarray] | None], facts: Any) -> None:
        """Restores the average; without one in the checkpoint, starts from its weights."""
        arrays = groups.get("ema") or groups["model"]
        assert arrays is not None
        self.ema.load(arrays, facts["ema_updates"], facts.get("ema_restarted"))
        self._updates = 0
