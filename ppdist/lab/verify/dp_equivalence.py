"""Verifies, on the user's data, that many ranks train like one.

The ranks train some steps as configured, and save the state in which each step begins.  Then rank
0, while the others wait, starts one process that runs the same steps alone, on the same
micro-batches: it computes one after the other the micro-batches that the ranks divide among
themselves.  With train.sync_bn it computes as a whole each micro-batch of which every rank has a
part.

Adding the same numbers in a different order changes the rounding, and training amplifies that.  So
each step of the single process begins with the weights, optimizer state and statistics with which
the ranks began it: single steps are compared, and differences do not accumulate.  How much a
rounding error changes a step depends on the network; so the process runs each step once more with
every weight perturbed by one rounding, and the ranks may differ by the tolerance or by a few times
the effect of that.  One perturbation is only a sample: if the ranks differ by more, others are
drawn before the result is a failure.  A step in which rounding has as large an effect as the
quantity measured proves nothing, and what no step proves does not pass.

Every step of the run is compared, including the last of an epoch, which has fewer images, possibly
none on some ranks.  With synchronised statistics the perturbed run computes batch norm with the
code of the ranks, because that is what differs; and the single process needs the images of all
ranks on one card.
"""

import hashlib
import io
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.common.child import DISCARD, own_environment, start_here
from ppdist.common.errors import ConfigError, LaunchError
from ppdist.config.experiment import ExperimentConfig
from ppdist.distributed import comm, device, paddle_api
from ppdist.distributed.sync_batch_norm import take_sync_batch_norm
from ppdist.engine.build import build_training
from ppdist.engine.checkpoint import (
    Snapshot,
    path_of,
    read_checkpoint,
    save_checkpoint,
    unpack_arrays,
)
from ppdist.engine.clock import Clock
from ppdist.engine.state import TrainState, capture_state, restore_state
from ppdist.engine.train_step import TrainStep

Report = dict[str, Any]
# The trace of training, float64; S steps:
#   losses/NAME, norm/gradient                  [S]
#   before/GROUP, after/GROUP                   [S, parts]      sketches of weights, statistics
#   digest                                      of the exact final state
Trace = dict[str, np.ndarray]

# Relative, by the lowest precision that the numbers of a step pass through.  For precisions below
# float32 they are a few roundings of that precision; these have not been tried on a GPU.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
_TOLERANCE_OF_CPU = 1e-3  # card vs CPU, whose kernels differ; not tried on a GPU
_ROUNDINGS_ALLOWED = 10.0  # times the difference of a perturbed run
_DRAWS = 4  # maximum number of perturbations; the next is drawn if the ranks differ too much
_NOT_FINITE = 1e9  # a difference that is not a number, in a form that JSON can hold
# A step with a larger allowed difference proves nothing: as a fraction of a loss or norm, and as a
# fraction of the change by training.
_BLIND, _BLIND_OF_MOVED = 0.05, 0.1
ROUNDINGS = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_PARTS = 64  # parts of an array in a sketch


# Training on all ranks, then on a single one.


def require_comparable(config: ExperimentConfig) -> None:
    """Requires a configuration whose result does not depend on the ranks.

    Raises: ConfigError: many ranks differ from one by design; the message names the keys to change.
    """
    reasons = []
    if config.train.batch_size_per_card == "auto":
        reasons.append("train.batch_size_per_card=8 (one rank would choose another batch size)")
    if getattr(config.model, "dropout", 0) > 0 and config.train.sync_bn:
        reasons.append(
            "model.dropout=0 (each rank drops other values of its part of a micro-batch)"
        )
    if config.data.sampling.name == "difficulty":
        reasons.append("data.sampling.name=balanced (difficulty follows evaluations)")
    ranks = config.distributed
    if ranks.local_sgd_steps is not None:
        reasons.append(
            "distributed.local_sgd_steps=null (ranks step on their own, each with its norm)"
        )
    if ranks.topk_fraction is not None:
        reasons.append("distributed.topk_fraction=null (dropped gradients are applied late)")
    if ranks.gradient_rank is not None:
        reasons.append("distributed.gradient_rank=null (dropped gradients are applied late)")
    if reasons:
        raise ConfigError(
            "with these settings, many ranks differ from one by design",
            code="differs_by_design",
            fix=f"to compare the rest, add -o with {' and '.join(reasons)}",
        )


def verify_ranks(
    config: ExperimentConfig, steps: int, command: Sequence[str], *, on_cpu: bool = False
) -> Report:
    """Trains on all ranks, then on rank 0 alone, and compares.  Collective.

    Args:
        command: runs `judge` in a separate process, once the overrides for one rank and
            `--alone FOLDER` are appended.
        on_cpu: run that process on the CPU.
    Returns: what `judge` found, and which ranks do not hold rank 0's weights.
    Raises: ConfigError: many ranks differ from one by design; LaunchError: the process failed.
    """
    require_comparable(config)
    world = comm.world_size()
    micro_batches = config.train.micro_batches(world)
    overrides_alone = [  # so that one rank trains as many would
        f"train.total_batch={micro_batches.total_batch}",
        f"train.batch_size_per_card={micro_batches.images}",
        *("train.accumulate_steps=1", "distributed.shares=null"),
        *(["device=cpu"] if on_cpu else []),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with redirect_stdout(sys.stderr):
            ranks = train_steps(config, steps, keep=folder)
        device.release_memory()  # the single process needs the same card
        # Replicas must be equal bit for bit, whatever a single rank would compute.
        digests = comm.all_gather_large_object(ranks["digest"].tobytes().hex())
        differing_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        job = {
            **{"ranks": world, "steps": len(ranks["norm/gradient"]), "steps_asked_for": steps},
            "tolerance": max(tolerance_of(config), _TOLERANCE_OF_CPU if on_cpu else 0.0),
        }

        def compare_alone() -> Report:
            np.savez(folder / "ranks.npz", **ranks)  # type: ignore[arg-type]
            (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
            run_alone([*command, "-o", *overrides_alone, "--alone", f"{folder}"])
            return json.loads((folder / "report.json").read_text(encoding="utf-8"))

        report = comm.run_on_main(compare_alone)
    return {**report, "ranks_with_other_weights": differing_ranks}


def run_alone(command: Sequence[str]) -> None:
    """Runs one of our commands on this rank's card, as a single rank.

    Raises: LaunchError: the command failed; its messages are in our stderr.
    """
    code = start_here(command, stdout=DISCARD, env=own_environment()).wait()
    if code:
        raise LaunchError(
            f"the run of one rank ended with exit code {code}, what it said is "
            f"above: {' '.join(command)}",
            code="run_failed",
        )


def judge(config: ExperimentConfig, folder: Path) -> None:
    """Repeats the training of the ranks on one rank; writes a report.

    Args:
        config: configuration with which one rank trains as many would.
        folder: contains the trace of the ranks and the states in which their steps began; the
            report is written there.
    """
    comm.init(config.device, config.distributed)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    with np.load(folder / "ranks.npz") as file:
        ranks = dict(file)
    batches = config.train.micro_batches(1)
    report = {
        **job,
        "micro_batches": {"count": batches.count, "images": batches.images},
        "sync_bn": batches.spread,
    }
    with redirect_stdout(io.StringIO()):  # the ranks have already printed the same
        alone = train_steps(config, job["steps"], begin=folder)
        moved: list[Trace] = []
        for draw in range(_DRAWS):  # another perturbation only while something fails
            rounding = Rounding.of(config, draw)
            moved.append(train_steps(config, job["steps"], rounding, begin=folder))
            report |= compare(ranks, alone, moved, tolerance=job["tolerance"])
            if all(measured["passed"] for measured in report["measured"]):
                break
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


# The trace of a run.


@dataclass(frozen=True)
class Rounding:
    """The size of the random perturbation of every weight in every step.

    A weight moves up or down, relative to its value and to its last update (which lower-precision
    gradients make inexact by that much).
    """

    of_weight: float
    of_update: float
    draw: int = 0  # index of the random draw

    @classmethod
    def of(cls, config: ExperimentConfig, draw: int = 0) -> "Rounding":
        amp = config.train.amp
        of_weight = ROUNDINGS[amp.dtype if amp.enabled else "float32"]
        of_update = ROUNDINGS[config.distributed.gradient_dtype]
        return cls(of_weight, of_update, draw)

    def move(self, weights: dict[str, paddle.Tensor], before: dict[str, np.ndarray], step: int):
        """Perturbs the weights.

        Args: before: the weights at the beginning of the last step.
        """
        rng = np.random.default_rng([step, self.draw])
        for key, weight in weights.items():
            value = _to_float32(weight)
            size = self.of_weight * value + self.of_update * (value - before[key])
            # Up or down at random, like rounding errors.
            moved = value + size * rng.choice(np.array([-1, 1], np.float32), value.shape)
            weight.set_value(paddle.to_tensor(moved).astype(weight.dtype))


@paddle_api.exact_float32()  # TF32 keeps 10 bits: float32 tolerances would be meaningless
def train_steps(
    config: ExperimentConfig,
    steps: int,
    rounding: Rounding | None = None,
    *,
    keep: Path | None = None,
    begin: Path | None = None,
) -> Trace:
    """Trains some steps and returns their trace.  Collective.

    Args:
        steps: maximum number of steps; fewer if the run is shorter.
        rounding: perturbs the weights before every step.  With synchronised statistics, one rank
            then also computes batch norm as several ranks do.
        keep: folder in which rank 0 saves the state at the beginning of each step, as a checkpoint.
        begin: such a folder; each step but the first begins with the state saved there.
    """
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_training(
            config, output_dir=Path(folder), evaluate=False, command=["verify"]
        )
        experiment.log.close()
    trainer, schedule = experiment.trainer, experiment.trainer.schedule
    step = trainer.train_step
    if rounding is not None and config.train.sync_bn:
        # Use the batch norm of several ranks here, too: its rounding errors in all layers add up to
        # more than a few roundings of the weights do.
        take_sync_batch_norm(step.model)
    count = min(steps, schedule.total_steps)
    parameters = {k: v for k, v in step.model.named_parameters() if not v.stop_gradient}
    before = _trained_weights(step)
    sketches_before, sketches_after = [], []
    steps_of_batches, results = trainer.batch_source.steps(0, None), []
    for number in range(count):
        if keep is not None:
            state = capture_state(step, TrainState(step=number), schedule)
            comm.run_on_main(partial(_write_state, keep, state))
        if begin is not None and number:
            restore_state(_read_state(begin, number), step)
        if rounding is not None:
            rounding.move(parameters, before, number)
            before = {key: _to_float32(value) for key, value in parameters.items()}
        sketches_before.append(_sketches(step, _trained_weights(step)))
        rates = schedule.lr_scheduler.rates(number)
        results.append(step(next(steps_of_batches), number, rates, Clock()))
        sketches_after.append(_sketches(step, _trained_weights(step)))
    trace = _stack_columns("losses", [result.losses for result in results])
    trace |= _stack_columns("before", sketches_before) | _stack_columns("after", sketches_after)
    trace["norm/gradient"] = np.array([result.gradient_norm for result in results])
    trace["digest"] = _digest(step)
    return trace


def _write_state(folder: Path, state: Snapshot) -> None:
    save_checkpoint(folder, state.step, state.groups, state.state, config_yaml="")


def _read_state(folder: Path, step: int) -> Snapshot:
    checkpoint = read_checkpoint(path_of(folder, step))
    groups = {
        file.stem: unpack_arrays(checkpoint.files[file.name], file)
        for file in map(Path, checkpoint.files)
        if file.suffix == ".safetensors"
    }
    return Snapshot(step, groups, checkpoint.state)


def _stack_columns(group: str, rows: list[dict]) -> Trace:
    names = rows[0] if rows else []
    return {f"{group}/{name}": np.array([row[name] for row in rows]) for name in names}


def _to_float32(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float32").numpy()


def _trained_weights(step: TrainStep) -> dict[str, np.ndarray]:
    """Returns the trained weights; for lower-precision parameters, their float32 master weights."""
    masters = step.optimizer.masters()
    named = step.model.named_parameters()
    return {key: _to_float32(masters.get(key, p)) for key, p in named if not p.stop_gradient}


def _sketches(step: TrainStep, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    # Paddle keeps running statistics of batch norm as parameters that take no gradient.
    statistics = {k: _to_float32(v) for k, v in step.model.state_dict().items() if k not in weights}
    return {"weights": sketch(weights), "statistics": sketch(statistics)}


def sketch(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Projects each array randomly: 64 sums with random signs.

    The signs depend only on the names.  The L2 norm of a sketch, or of the difference of two, is
    about that of the arrays: its square has the same mean.  So sketches make it possible to keep
    every step of a large model.
    Source: Alon, Matias, Szegedy 1996, "The space complexity of approximating the frequency
    moments", section 2.2.
    """
    rows = [np.zeros(0)]
    for key, value in arrays.items():
        # Signs depend on the name: two processes compute the same sketch of an array.
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        signs = rng.integers(0, 2, value.size, np.int8) * np.int8(2) - np.int8(1)
        padded = np.zeros(-(-value.size // _PARTS) * _PARTS)
        padded[: value.size] = value.ravel() * signs
        rows.append(padded.reshape(-1, _PARTS).sum(0))
    return np.concatenate(rows)


def _digest(step: TrainStep) -> np.ndarray:
    digest = hashlib.blake2b(digest_size=16)
    averages = [tensor for policy in step.policies for tensor in policy.averaged().values()]
    for tensor in [*step.model.state_dict().values(), *averages]:
        digest.update(np.ascontiguousarray(_to_float32(tensor)).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


# The difference of two traces.


def tolerance_of(config: ExperimentConfig) -> float:
    """Returns the allowed difference at the lowest configured precision."""
    names: list[str] = [config.distributed.gradient_dtype]
    names += [config.train.amp.dtype] if config.train.amp.enabled else []
    return max(TOLERANCES[name] for name in names)


@dataclass(frozen=True)
class Measurement:
    """The largest difference between the ranks and one rank, relative to `allowed`.

    Attributes:
        difference: relative difference in this step.
        step: number of the step, from 1.
        rounding: difference that a perturbation of the weights causes in this step of one rank.
        allowed: maximum allowed `difference`.
        telling_steps: number of steps with an allowed difference so small that an error would
            show.
    """

    name: str
    difference: float
    step: int
    rounding: float
    allowed: float
    telling_steps: int

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


def compare(ranks: Trace, alone: Trace, moved: Sequence[Trace], *, tolerance: float) -> Report:
    """Compares the ranks to one rank, and measures how much the comparison proves.

    Args:
        alone: trace of one rank, whose steps begin in the same states as those of the ranks.
        moved: the same, with perturbed weights.
    """
    measurements = measure(ranks, alone, moved, tolerance=tolerance)
    # A step can show an error if one of the two can.
    rounding_S = np.minimum(
        *(_largest(off, moved, alone) for off in (compare_losses, compare_norms))
    )
    tells_S = _ROUNDINGS_ALLOWED * rounding_S <= _BLIND
    return {
        "tolerance": tolerance,
        "measured": [
            {**asdict(measurement), "passed": measurement.passed} for measurement in measurements
        ],
        "steps_that_tell": int(tells_S.sum()),
        "weights_moved": float(_relative(ranks, "weights", ranks["before/weights"][:1])[-1]),
    }


def measure(
    ranks: Trace, alone: Trace, moved: Sequence[Trace], *, tolerance: float
) -> list[Measurement]:
    """Measures the rows of `compare`: losses, gradient norm, weights and statistics."""
    measurements = []
    for name, off_by_step in (("losses", compare_losses), ("gradient norm", compare_norms)):
        rounding_S = _largest(off_by_step, moved, alone)
        allowed_S = np.maximum(tolerance, _ROUNDINGS_ALLOWED * rounding_S)
        off_S = off_by_step(ranks, alone)
        measurements.append(_worst(name, off_S, rounding_S, allowed_S, np.full(len(off_S), _BLIND)))
    for group in ("weights", "statistics"):
        moved_S = _relative(alone, group, alone[f"before/{group}"])
        if not moved_S.any():  # a model without statistics has none that move
            continue
        off_by_step = partial(compare_updates, group=group)
        rounding_S = _largest(off_by_step, moved, alone)
        allowed_S = np.maximum(tolerance * moved_S, _ROUNDINGS_ALLOWED * rounding_S)
        allowed_S = np.maximum(allowed_S, ROUNDINGS["float32"])
        off_S = off_by_step(ranks, alone)
        measurements.append(_worst(group, off_S, rounding_S, allowed_S, _BLIND_OF_MOVED * moved_S))
    return measurements


def _largest(
    off_by_step: Callable[[Trace, Trace], np.ndarray], moved: Sequence[Trace], alone: Trace
) -> np.ndarray:
    """Returns the largest effect of rounding on each step over all draws [S]."""
    return np.max([off_by_step(trace, alone) for trace in moved], axis=0)


def _worst(
    name: str, off_S: np.ndarray, rounding_S: np.ndarray, allowed_S: np.ndarray, limit_S: np.ndarray
) -> Measurement:
    """Picks the step where `off_S` is largest relative to `allowed_S`.

    Args: limit_S: a step with a larger allowed difference proves nothing.
    """
    index = int(np.argmax(off_S / allowed_S))
    row = float(off_S[index]), index + 1, float(rounding_S[index]), float(allowed_S[index])
    return Measurement(name, *row, int((allowed_S <= limit_S).sum()))


def _finite(off_S: np.ndarray) -> np.ndarray:
    return np.nan_to_num(off_S, nan=_NOT_FINITE, posinf=_NOT_FINITE)


def compare_losses(ranks: Trace, reference: Trace) -> np.ndarray:
    """Returns the largest difference of a loss term, relative to the reference's total [S]."""
    total_S = np.maximum(np.abs(reference["losses/loss"]), 1e-12)
    keys = [key for key in reference if key.startswith("losses/")]
    terms = [np.abs(ranks[key] - reference[key]) / total_S for key in keys]
    return _finite(np.max(terms, axis=0))


def compare_norms(ranks: Trace, reference: Trace) -> np.ndarray:
    """Returns the relative difference of the gradient's norm before clipping [S]."""
    expected_S = reference["norm/gradient"]
    off_S = np.abs(ranks["norm/gradient"] - expected_S) / np.maximum(np.abs(expected_S), 1e-12)
    return _finite(off_S)


def compare_updates(ranks: Trace, reference: Trace, *, group: str) -> np.ndarray:
    """Measures the difference of the updates in each step, relative to the resulting values [S].

        |update of ranks - update of reference| / |reference|

    L2 norms over all arrays of a group.
    """
    update = ranks[f"after/{group}"] - ranks[f"before/{group}"]
    return _relative(reference, group, reference[f"before/{group}"] + update)


def _relative(trace: Trace, group: str, rows: np.ndarray) -> np.ndarray:
    """Computes |after - rows| / |after| for each step [S]; L2 norms over all arrays."""
    after = trace[f"after/{group}"]
    size_S = np.maximum(np.linalg.norm(after, axis=1), 1e-12)
    return _finite(np.linalg.norm(after - rows, axis=1) / size_S)


def verdict(report: Report) -> str:
    """Returns PASS, FAIL, or INCONCLUSIVE.

    INCONCLUSIVE: for one of the measurements, no step could have shown an error of the ranks.
    """
    if report["ranks_with_other_weights"] or not all(m["passed"] for m in report["measured"]):
        return "FAIL"
    tells = report["steps_that_tell"] >= min(2, report["steps"])
    blind = any(m["telling_steps"] == 0 for m in report["measured"])
    return "PASS" if tells and not blind else "INCONCLUSIVE"


def format_lines(report: Report) -> list[str]:
    """Formats the table for one number of ranks, with notes and verdict."""
    steps, differing = report["steps"], report["ranks_with_other_weights"]
    size = report["micro_batches"]
    batches = f"{size['count']} micro-batch(es) of {size['images']} images"
    result = [
        f"{report['ranks']} rank(s) against 1 rank, {steps} steps of {batches}",
        f"  {'each step alone':<18}{'off by':>9}{'step':>6}{'by rounding':>13}{'allowed':>9}",
    ]
    for row in report["measured"]:
        text = f"  {row['name']:<18}{row['difference']:>9.1e}{row['step']:>6}"
        text += f"{row['rounding']:>13.1e}{row['allowed']:>9.1e}"
        note = "" if row["telling_steps"] else "  proves nothing"
        result.append(f"{text}{note if row['passed'] else '  TOO FAR OFF'}")
    result.append(f"  training moved the weights by {report['weights_moved']:.1e}")
    if differing:
        result.append(f"  other weights than rank 0: rank {', '.join(map(str, differing))}")
    if steps < report["steps_asked_for"]:
        result.append("  the run has no more")
    if report["steps_that_tell"] < steps:
        result.append(
            f"  {steps - report['steps_that_tell']} of the steps prove nothing: rounding alone may "
            f"explain {_BLIND:.0%} of them"
        )
    if any(row["telling_steps"] == 0 for row in report["measured"]):
        result.append(
            f"  proves nothing: in every step rounding may explain {_BLIND:.0%} of it, of weights "
            f"{_BLIND_OF_MOVED:.0%} of what training moved; set schedule.warmup_epochs=0 if they "
            f"hardly move, train larger batches, or in float32"
        )
    return [*result, f"  {verdict(report)}"]
