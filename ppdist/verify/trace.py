"""Trace of some training steps, to tell two runs apart."""

import hashlib
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import paddle

from ppdist.common.errors import ConfigError
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.train_step import Clock, TrainStep
from ppdist.models.layers import take_gloo_batch_norm
from ppdist.optim.ema import Decay

if TYPE_CHECKING:
    from ppdist.config import ExperimentConfig

# What training leaves, float64; S steps:
#   losses/NAME, norm/gradient                  [S]
#   sketch/weights, sketch/statistics           [S + 1, parts]  before the first step, after each
#   average/off, average/decay                  [S]             see Average; none without EMA
#   digest                                      of all that it ends with, bit for bit
Trace = dict[str, np.ndarray]

ROUNDINGS = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_OF_SYNC_BN = 8  # on GPUs synchronised statistics are another program, which rounds in every layer
_PARTS = 64  # of an array in a sketch


@dataclass(frozen=True)
class Rounding:
    """How far every weight is moved in every step, up or down: relative to itself, and to what the
    step before made of it (gradients of lower precision make it that inexact)."""

    of_weight: float
    of_update: float

    @classmethod
    def of(cls, config: "ExperimentConfig") -> "Rounding":
        amp = config.train.amp
        of_weight = ROUNDINGS[amp.dtype if amp.enabled else "float32"]
        of_update = ROUNDINGS[config.distributed.gradient_dtype]
        another_program = config.train.sync_bn and comm.on_gpu()
        return cls(of_weight * (_OF_SYNC_BN if another_program else 1), of_update)

    def move(self, weights: dict[str, paddle.Tensor], before: dict[str, np.ndarray], step: int):
        """Args: before: the weights when the last step began."""
        rng = np.random.default_rng(step)
        for key, weight in weights.items():
            value = _array(weight)
            size = self.of_weight * value + self.of_update * (value - before[key])
            moved = value + size * rng.choice(np.array([-1, 1], np.float32), value.shape)
            weight.set_value(paddle.to_tensor(moved).astype(weight.dtype))


class Average:
    """What the EMA should hold, made again from the weights of the very run: no chaos comes between
    the two, so a wrong average stands out however far training amplifies a rounding."""

    def __init__(self, weights: dict[str, np.ndarray], decay: Decay) -> None:
        self.decay = decay
        self.updates = 0
        self.expected = weights

    def update(self, weights: dict[str, np.ndarray]) -> None:
        self.updates += 1
        keep = self.decay(self.updates)
        self.expected = {
            key: value + np.float32(1 - keep) * (weights[key] - value)
            for key, value in self.expected.items()
        }

    def off(self, found: dict[str, paddle.Tensor]) -> float:
        """|found - expected| / |expected|."""
        pairs = [(_array(found[key]), value) for key, value in self.expected.items()]
        off = sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in pairs)
        size = sum(float(np.square(b.astype(np.float64)).sum()) for _, b in pairs)
        return (off / max(size, 1e-24)) ** 0.5


def train_steps(config: "ExperimentConfig", steps: int, rounding: Rounding | None = None) -> Trace:
    """Trains and returns what it left; every rank calls it.

    Args:
        steps: it takes fewer if the run is shorter.
        rounding: is done to the weights before every step.  With synchronised statistics one rank
            then computes batch norm as gloo ranks do, not as it would.
    Raises: ConfigError: one rank can have the batch of no step.
    """
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_training(
            config, output_dir=Path(folder), evaluate=False, resume=None, command=["verify"]
        )
        experiment.log.close()
    trainer, derived = experiment.trainer, experiment.trainer.derived
    step = trainer.train_step
    if rounding is not None and config.train.sync_bn and not comm.on_gpu():
        # Of the two programs that compute batch norm the other one: what they round differently in
        # every layer becomes more than what a few roundings of the weights become.
        take_gloo_batch_norm(step.model)
    count = min(steps, comparable_steps(derived, config.train.sync_bn))
    parameters = {k: v for k, v in step.model.named_parameters() if not v.stop_gradient}
    weights = before = _weights(step)
    average = Average(weights, derived.ema_decay)
    sketches, averages = [_sketches(step, weights)], []
    batches, results = trainer.feed.batches(0, None), []
    for number in range(count):
        if rounding is not None:
            rounding.move(parameters, before, number)
            before = {key: _array(value) for key, value in parameters.items()}
        rates = derived.schedule.rates(number)
        results.append(step(batches, derived.accumulate_steps, number, rates, False, Clock()))
        weights = _weights(step)
        sketches.append(_sketches(step, weights))
        if results[-1].applied:
            average.update(weights)
        if step.ema is not None:
            decay = average.decay(number + 1)
            averages.append({"off": average.off(step.ema.average), "decay": decay})
    trace = _columns("losses", [result.losses for result in results]) | _columns("sketch", sketches)
    trace |= _columns("average", averages)
    trace["norm/gradient"] = np.array([result.gradient_norm for result in results])
    trace["digest"] = _digest(step)
    return trace


def comparable_steps(derived: ScheduleSetup, sync_bn: bool) -> int:
    """How many steps of a run there are whose batches one rank can have just so: with synchronised
    statistics not the last, smaller step of an epoch, if a micro-step of it has other images on one
    rank, or a rank has none.

    Raises: ConfigError: none.
    """
    left = derived.dataset_size % derived.total_batch
    if not (sync_bn and left and (derived.accumulate_steps > 1 or left < derived.world)):
        return derived.total_steps
    if derived.steps_per_epoch == 1:
        raise ConfigError(
            "with train.sync_bn: true one rank cannot have the batch of this run: an epoch of "
            f"{derived.dataset_size} images is one step of less than the total batch of "
            f"{derived.total_batch} ({derived.world} ranks x {derived.batch_size_per_card} "
            f"images x {derived.accumulate_steps} micro-steps)",
            code="epoch_shorter_than_step",
            fix=(
                "lower train.batch_size_per_card or train.accumulate_steps until an epoch has "
                "a whole step"
            ),
        )
    return min(derived.total_steps, derived.steps_per_epoch - 1)


def _columns(group: str, rows: list[dict]) -> Trace:
    names = rows[0] if rows else []
    return {f"{group}/{name}": np.array([row[name] for row in rows]) for name in names}


def _array(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float32").numpy()


def _weights(step: TrainStep) -> dict[str, np.ndarray]:
    """What is trained: of parameters in a lower precision their float32 masters."""
    masters = step._masters()
    named = step.model.named_parameters()
    return {key: _array(masters.get(key, p)) for key, p in named if not p.stop_gradient}


def _sketches(step: TrainStep, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    # Paddle keeps running statistics of batch norm as parameters that take no gradient.
    others = {k: _array(v) for k, v in step.model.state_dict().items() if k not in weights}
    return {"weights": sketch(weights), "statistics": sketch(others)}


def sketch(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Each array as 64 sums of its values with random signs, the same for the same names.

    The L2 norm of a sketch, and of the difference of two, is about that of the arrays: its square
    has the same mean.  So one keeps every step of a large model.
    Source: Alon, Matias, Szegedy 1996, "The space complexity of approximating the frequency
    moments", section 2.2.
    """
    rows = [np.zeros(0)]
    for key, value in arrays.items():
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        signs = rng.integers(0, 2, value.size, np.int8) * np.int8(2) - np.int8(1)
        padded = np.zeros(-(-value.size // _PARTS) * _PARTS)
        padded[: value.size] = value.ravel() * signs
        rows.append(padded.reshape(-1, _PARTS).sum(0))
    return np.concatenate(rows)


def _digest(step: TrainStep) -> np.ndarray:
    digest = hashlib.blake2b(digest_size=16)
    averages = {} if step.ema is None else step.ema.average
    for tensor in [*step.model.state_dict().values(), *averages.values()]:
        digest.update(np.ascontiguousarray(_array(tensor)).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
