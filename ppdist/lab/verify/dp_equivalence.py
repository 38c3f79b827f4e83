"""Proves that many ranks train like one, on the user's data.

The ranks train some steps as configured, and keep what each step began with.  Then rank 0, while
the others wait, starts one process that makes the same steps alone, of the same micro-batches: they
are one after the other there what ranks share here, and with train.sync_bn each is whole there of
which every rank has a part here.

Two ways to add the same numbers differ by rounding, and training amplifies that.  So each step of
the process alone begins with the weights, the optimizer's state and the statistics with which the
ranks began it: what is compared is one step, and nothing adds up.  How far a rounding carries one
step depends on the network; so the process makes each once more with every weight moved by one
rounding, and the ranks may be off by the tolerance or by a few times that.  One rounding is but one
example: where the ranks are further off, it draws others before it says so.  Where a rounding does
as much as what is measured, a step proves nothing, and what no step proves does not pass.

Every step of the run is compared, also the last of an epoch, which has fewer images, of which some
ranks may have none.  With synchronised statistics the moved run computes batch norm by the program
of the ranks, for that is what differs; and the run alone needs the images of all ranks on one card.
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
# What training leaves, float64; S steps:
#   losses/NAME, norm/gradient                  [S]
#   before/GROUP, after/GROUP                   [S, parts]      sketches of weights, statistics
#   digest                                      of all that it ends with, bit for bit
Trace = dict[str, np.ndarray]

# Relative, by the lowest precision that the numbers of a step pass through.  Those below float32
# are a few roundings of that precision; they were not tried on a GPU.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
_TOLERANCE_OF_CPU = 1e-3  # of a card against the CPU, whose kernels differ; not tried on a GPU
_ROUNDINGS_ALLOWED = 10.0  # times the difference that a perturbed run shows
_DRAWS = 4  # of roundings at most; the next is drawn if the ranks are further off than allowed
_NOT_FINITE = 1e9  # a difference that is not a number, in a form that JSON can hold
# A step where more than this is allowed proves nothing: as a part of a loss or norm, and as a part
# of what training moved.
_BLIND, _BLIND_OF_MOVED = 0.05, 0.1
ROUNDINGS = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_PARTS = 64  # of an array in a sketch


# Training on all ranks, then on one alone.


def require_comparable(config: ExperimentConfig) -> None:
    """Requires a configuration whose result does not depend on the ranks.

    Raises: ConfigError: many ranks differ from one by design; names the keys to change.
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
        command: runs `judge` in a process of its own, when the overrides for one rank and then
            `--alone FOLDER` are put behind it.
        on_cpu: that process is to compute on the CPU.
    Returns: what `judge` found, and which ranks do not hold rank 0's weights.
    Raises: ConfigError: many ranks differ from one by design; LaunchError: the process failed.
    """
    require_comparable(config)
    world = comm.world_size()
    micro_batches = config.train.micro_batches(world)
    overrides_alone = [  # one rank then trains as many would
        f"train.total_batch={micro_batches.total_batch}",
        f"train.batch_size_per_card={micro_batches.images}",
        *("train.accumulate_steps=1", "distributed.shares=null"),
        *(["device=cpu"] if on_cpu else []),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with redirect_stdout(sys.stderr):
            ranks = train_steps(config, steps, keep=folder)
        device.release_memory()  # the process alone needs the same card
        # Replicas must hold the same bits, whatever one rank alone would compute.
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
    """Runs a command of ours on this rank's card, as one rank.

    Raises: LaunchError: it failed; its messages are in our stderr.
    """
    code = start_here(command, stdout=DISCARD, env=own_environment()).wait()
    if code:
        raise LaunchError(
            f"the run of one rank ended with exit code {code}, what it said is "
            f"above: {' '.join(command)}",
            code="run_failed",
        )


def judge(config: ExperimentConfig, folder: Path) -> None:
    """Repeats the ranks' training on one rank; writes a report.

    Args:
        config: the configuration with which one rank trains as many.
        folder: has the trace of the ranks and what their steps began with, and gets the report.
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
    with redirect_stdout(io.StringIO()):  # the ranks have printed all of it already
        alone = train_steps(config, job["steps"], begin=folder)
        moved: list[Trace] = []
        for draw in range(_DRAWS):  # another rounding only while something is too far off
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

    It moves a weight up or down, relative to its value and to its last update (gradients of lower
    precision make the update that inexact).
    """

    of_weight: float
    of_update: float
    draw: int = 0  # one of several

    @classmethod
    def of(cls, config: ExperimentConfig, draw: int = 0) -> "Rounding":
        amp = config.train.amp
        of_weight = ROUNDINGS[amp.dtype if amp.enabled else "float32"]
        of_update = ROUNDINGS[config.distributed.gradient_dtype]
        return cls(of_weight, of_update, draw)

    def move(self, weights: dict[str, paddle.Tensor], before: dict[str, np.ndarray], step: int):
        """Perturbs the weights.

        Args: before: the weights when the last step began.
        """
        rng = np.random.default_rng([step, self.draw])
        for key, weight in weights.items():
            value = _to_float32(weight)
            size = self.of_weight * value + self.of_update * (value - before[key])
            # Up or down at random, as roundings fall.
            moved = value + size * rng.choice(np.array([-1, 1], np.float32), value.shape)
            weight.set_value(paddle.to_tensor(moved).astype(weight.dtype))


@paddle_api.exact_float32()  # TF32 keeps 10 bits: what float32 may be off by would tell nothing
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
        steps: it takes fewer if the run is shorter.
        rounding: is done to the weights before every step.  With synchronised statistics one rank
            then computes batch norm as ranks do, not as it would.
        keep: a folder in which rank 0 saves what each step begins with, as a checkpoint.
        begin: such a folder; each step but the first begins with what is saved there.
    """
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_training(
            config, output_dir=Path(folder), evaluate=False, command=["verify"]
        )
        experiment.log.close()
    trainer, schedule = experiment.trainer, experiment.trainer.schedule
    step = trainer.train_step
    if rounding is not None and config.train.sync_bn:
        # Use the batch norm of several ranks here, too: its rounding in every layer adds up to more
        # than a few roundings of the weights do.
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
    """Returns the trained weights; for parameters of a lower precision their float32 masters."""
    masters = step.optimizer.masters()
    named = step.model.named_parameters()
    return {key: _to_float32(masters.get(key, p)) for key, p in named if not p.stop_gradient}


def _sketches(step: TrainStep, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    # Paddle keeps running statistics of batch norm as parameters that take no gradient.
    statistics = {k: _to_float32(v) for k, v in step.model.state_dict().items() if k not in weights}
    return {"weights": sketch(weights), "statistics": sketch(statistics)}


def sketch(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Projects each array randomly: 64 sums with random signs.

    The signs are the same for the same names.  The L2 norm of a sketch, and of the difference of
    two, is about that of the arrays: its square has the same mean.  So one keeps every step of a
    large model.
    Source: Alon, Matias, Szegedy 1996, "The space complexity of approximating the frequency
    moments", section 2.2.
    """
    rows = [np.zeros(0)]
    for key, value in arrays.items():
        # Signs by name: two processes sketch the same array alike.
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
    """Returns the allowed difference of the ranks at the lowest configured precision."""
    names: list[str] = [config.distributed.gradient_dtype]
    names += [config.train.amp.dtype] if config.train.amp.enabled else []
    return max(TOLERANCES[name] for name in names)


@dataclass(frozen=True)
class Measurement:
    """The largest difference between the ranks and one rank, relative to `allowed`.

    Attributes:
        difference: relative.
        step: counted from 1.
        rounding: how far a rounding of the weights carries this step of one rank.
        allowed: of `difference`.
        telling_steps: number of steps where so little is allowed that a wrong one is noticed.
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
    """Measures the ranks against one rank, and how much that proves.

    Args:
        alone: one rank, whose steps begin with what those of the ranks began with.
        moved: the same, perturbed by roundings.
    """
    measurements = measure(ranks, alone, moved, tolerance=tolerance)
    # A step tells right from wrong if one of the two does.
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
    """Returns how far roundings carry each step, the largest of all draws [S]."""
    return np.max([off_by_step(trace, alone) for trace in moved], axis=0)


def _worst(
    name: str, off_S: np.ndarray, rounding_S: np.ndarray, allowed_S: np.ndarray, limit_S: np.ndarray
) -> Measurement:
    """Picks the step where `off_S` is the largest part of what is allowed.

    Args: limit_S: a step where more is allowed proves nothing.
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
    """Measures how far apart the updates of each step are, relative to what they lead to [S].

        |update of ranks - update of reference| / |reference|

    L2 norms of all arrays of a group.
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

    INCONCLUSIVE: for something that was measured, no step could have told the ranks from wrong
    ones.
    """
    if report["ranks_with_other_weights"] or not all(m["passed"] for m in report["measured"]):
        return "FAIL"
    tells = report["steps_that_tell"] >= min(2, report["steps"])
    blind = any(m["telling_steps"] == 0 for m in report["measured"])
    return "PASS" if tells and not blind else "INCONCLUSIVE"


def format_lines(report: Report) -> list[str]:
    """Formats the table of one number of ranks, with notes and verdict."""
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
