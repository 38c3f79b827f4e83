"""Counts what one training step makes Paddle do: operators by part, and blocking reads."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle
import pytest

from ppdist.data.types import Batch
from ppdist.distributed import heartbeat
from ppdist.engine.clock import Clock
from ppdist.engine.step_policy import StepResult
from ppdist.engine.train_step import TrainStep
from ppdist.optim.lr_scheduler import LearningRates
from tests.source_tree import REPOSITORY
from tests.unit.engine.tiny import numbered

_PACKAGE = REPOSITORY / "ppdist"  # the folder of the clone may be named like it
_LIST = paddle.base.core  # Paddle's own list of the operators it has dispatched
# What brings values of a tensor to the host.  On an accelerator the host then waits until the
# device has done all that was queued before.
_READS = ("numpy", "item", "tolist", "cpu", "__array__", "__float__", "__int__", "__bool__",
          "__index__")  # fmt: skip
_LEARNING = ("teacher", "forward", "loss", "backward", "counts")


@dataclass
class StepCounts:
    """Of one step.

    Attributes:
        operators: that Python dispatches, by part of the step (see `Clock`) and name; `counts` are
            those of `Loss.local_normalizers`.  What backward dispatches itself is not among them.
        reads: where each was made, `module.py:function`.
        watched: how many of them within `heartbeat.Waiting`.
    """

    operators: dict[str, Counter[str]] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    watched: int = 0

    @property
    def bookkeeping(self) -> int:
        """Operators of all that is not forward, loss or backward."""
        return sum(
            sum(names.values()) for part, names in self.operators.items() if part not in _LEARNING
        )


class _CountingClock(Clock):
    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self.counts = counts

    def lap(self, part: str) -> None:
        super().lap(part)
        self.counts.operators.setdefault(part, Counter()).update(_dispatched())


def count_step(
    step: TrainStep, batches: list[Batch], number: int, rates: LearningRates
) -> tuple[StepResult, StepCounts]:
    """Makes a step of these micro-batches and counts."""
    counts = StepCounts()
    clock = _CountingClock(counts)
    counts_of_targets = step.loss.local_normalizers

    def apart(*arguments: Any) -> Any:
        clock.lap("communication")
        found = counts_of_targets(*arguments)
        clock.lap("counts")
        return found

    with pytest.MonkeyPatch.context() as patch, _listing():
        patch.setattr(step.loss, "local_normalizers", apart)
        _watch_reads(patch, counts)
        result = step(numbered(batches), number, rates, clock)
        clock.lap("rest")
    return result, counts


@contextlib.contextmanager
def _listing() -> Iterator[None]:
    paddle.set_flags({"FLAGS_low_precision_op_list": 1})
    _LIST.clear_low_precision_op_list()
    try:
        yield
    finally:
        paddle.set_flags({"FLAGS_low_precision_op_list": 0})
        _LIST.clear_low_precision_op_list()


def _dispatched() -> dict[str, int]:
    """Operators since the last call: Paddle lists them as `name` -> calls in each of 4 types."""
    found = _LIST.get_low_precision_op_list()
    _LIST.clear_low_precision_op_list()
    return {name: sum(map(int, calls.split(","))) for name, calls in found.items()}


def _watch_reads(patch: pytest.MonkeyPatch, counts: StepCounts) -> None:
    within = {"read": 0, "waiting": 0}

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not within["read"]:  # one may be made of another
                frames = traceback.extract_stack(limit=8)
                ours = [each for each in frames if Path(each.filename).is_relative_to(_PACKAGE)]
                counts.reads += [f"{Path(each.filename).name}:{each.name}" for each in ours[-1:]]
                counts.watched += within["waiting"] > 0
            within["read"] += 1
            try:
                return read(*arguments, **options)
            finally:
                within["read"] -= 1

        return call

    for name in _READS:
        patch.setattr(paddle.Tensor, name, watched(getattr(paddle.Tensor, name)))
    enter, leave = heartbeat.Waiting.__enter__, heartbeat.Waiting.__exit__

    def entered(waiting: heartbeat.Waiting) -> None:
        within["waiting"] += 1
        enter(waiting)

    def left(waiting: heartbeat.Waiting, *error: object) -> None:
        within["waiting"] -= 1
        leave(waiting, *error)

    patch.setattr(heartbeat.Waiting, "__enter__", entered)
    patch.setattr(heartbeat.Waiting, "__exit__", left)
