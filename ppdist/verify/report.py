"""Judges how far many ranks and one rank are apart."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdist.verify.trace import Trace

if TYPE_CHECKING:
    from ppdist.config import ExperimentConfig

Report = dict[str, Any]

# By the lowest precision that numbers of a step pass through; relative.  Those below float32 are
# a few of its roundings: not run on a GPU.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
_ROUNDINGS_ALLOWED = 10.0  # times what the second run is off by: it is but one example
_SOME_ROUNDINGS = 1e-6  # of float32, relative: how close two arrays can be at all
_NOT_FINITE = 1e9  # a difference that is no number, as JSON can hold it
# A step where more is allowed proves nothing: of a loss or a norm; of what training moved.
_BLIND, _BLIND_OF_MOVED = 0.05, 0.1


def tolerance_of(config: "ExperimentConfig") -> float:
    """How far ranks may be off, of the lowest precision that is configured."""
    names = [config.distributed.gradient_dtype]
    names += [config.train.amp.dtype] if config.train.amp.enabled else []
    return max(TOLERANCES[name] for name in names)


@dataclass(frozen=True)
class Measurement:
    """The ranks against one rank, at the step where they are furthest off for what is allowed.

    Attributes:
        difference: relative.
        step: counted from 1.
        rounding: how far rounding has carried the run of one rank by then, or by the step after.
        allowed: of `difference`.
        telling_steps: where so little is allowed that a wrong step would be found out.
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


def compare(
    ranks: Trace, alone: Trace, moved: Trace, *, tolerance: float, statistics: bool
) -> Report:
    """What is measured of the ranks, and how much of it proves anything.

    Args:
        moved: one rank as in `alone`, moved by a rounding.
        statistics: compare running statistics of batch norm too.
    """
    found = measure(ranks, alone, moved, tolerance=tolerance, statistics=statistics)
    # A step tells right from wrong if one of the two does.
    rounding_S = np.minimum(losses_off(moved, alone), norm_off(moved, alone))
    tells_S = _ROUNDINGS_ALLOWED * _envelope(rounding_S) <= _BLIND
    return {
        "tolerance": tolerance,
        "measured": [{**asdict(each), "passed": each.passed} for each in found],
        "steps_that_tell": int(tells_S.sum()),
        "weights_moved": float(_moved(alone, "weights")[-1]),
    }


def measure(
    ranks: Trace, alone: Trace, moved: Trace, *, tolerance: float, statistics: bool
) -> list[Measurement]:
    """The rows of `compare`."""
    found = []
    for name, off_by_step in (("losses", losses_off), ("gradient norm", norm_off)):
        rounding_S = _envelope(off_by_step(moved, alone))
        allowed_S = np.maximum(tolerance, _ROUNDINGS_ALLOWED * rounding_S)
        off_S = off_by_step(ranks, alone)
        found.append(_worst(name, off_S, rounding_S, allowed_S, np.full(len(off_S), _BLIND)))
    for group in ("weights", *["statistics"] * statistics):
        moved_S = _moved(alone, group)
        if moved_S.any():  # a model without statistics has none that move
            rounding_S = _envelope(sketches_off(moved, alone, group))
            allowed_S = np.maximum(tolerance * moved_S, _ROUNDINGS_ALLOWED * rounding_S)
            allowed_S = np.maximum(allowed_S, _SOME_ROUNDINGS)
            off_S = sketches_off(ranks, alone, group)
            limit_S = _BLIND_OF_MOVED * moved_S
            found.append(_worst(group, off_S, rounding_S, allowed_S, limit_S))
    if "average/off" in alone:
        found.append(_averages(ranks, alone))
    return found


def _averages(ranks: Trace, alone: Trace) -> Measurement:
    """Against what they should be of the weights beside them: those are compared already, and what
    rounding made of weights excuses nothing here."""
    expected_S = alone["average/decay"]
    # A wrong decay is wrong weights of the average, by about as much.
    off_S = ranks["average/off"] + np.abs(ranks["average/decay"] - expected_S)
    off_S = np.nan_to_num(off_S, nan=_NOT_FINITE, posinf=_NOT_FINITE)
    allowed_S = np.full(len(off_S), _SOME_ROUNDINGS)
    limit_S = _BLIND_OF_MOVED * _moved(alone, "weights")
    return _worst("averaged weights", off_S, alone["average/off"], allowed_S, limit_S)


def _worst(
    name: str, off_S: np.ndarray, rounding_S: np.ndarray, allowed_S: np.ndarray, limit_S: np.ndarray
) -> Measurement:
    """Args: limit_S: a step where more is allowed proves nothing."""
    at = int(np.argmax(off_S / allowed_S))
    row = float(off_S[at]), at + 1, float(rounding_S[at]), float(allowed_S[at])
    return Measurement(name, *row, int((allowed_S <= limit_S).sum()))


def _envelope(off_S: np.ndarray) -> np.ndarray:
    """The largest up to the step after each: of two runs that part, now one and now the other is
    near to where they began.  Not so in the first step, which both begin with equal weights."""
    later_S = np.append(off_S[1:], off_S[-1:])
    later_S[0] = off_S[0]
    return np.maximum.accumulate(np.maximum(off_S, later_S))


def losses_off(one: Trace, other: Trace) -> np.ndarray:
    """[S]: the largest difference of a term of the loss, as part of the other's whole loss."""
    whole_S = np.maximum(np.abs(other["losses/loss"]), 1e-12)
    keys = [key for key in other if key.startswith("losses/")]
    terms = [np.abs(one[key] - other[key]) / whole_S for key in keys]
    return np.nan_to_num(np.max(terms, axis=0), nan=_NOT_FINITE, posinf=_NOT_FINITE)


def norm_off(one: Trace, other: Trace) -> np.ndarray:
    """[S]: relative difference of the gradient's norm before clipping."""
    expected_S = other["norm/gradient"]
    off_S = np.abs(one["norm/gradient"] - expected_S) / np.maximum(np.abs(expected_S), 1e-12)
    return np.nan_to_num(off_S, nan=_NOT_FINITE, posinf=_NOT_FINITE)


def sketches_off(one: Trace, other: Trace, group: str) -> np.ndarray:
    """[S]: |one - other| / |other| after each step, L2 norms of all arrays of a group."""
    return _relative(one[f"sketch/{group}"] - other[f"sketch/{group}"], other, group)[1:]


def _moved(trace: Trace, group: str) -> np.ndarray:
    """[S]: |now - at first| / |now| after each step, L2 norms of all arrays of a group."""
    rows = trace[f"sketch/{group}"]
    return _relative(rows - rows[0], trace, group)[1:]


def _relative(difference: np.ndarray, of: Trace, group: str) -> np.ndarray:
    size = np.maximum(np.linalg.norm(of[f"sketch/{group}"], axis=1), 1e-12)
    off = np.linalg.norm(difference, axis=1) / size
    return np.nan_to_num(off, nan=_NOT_FINITE, posinf=_NOT_FINITE)


def verdict(report: Report) -> str:
    """PASS, FAIL, or INCONCLUSIVE: of something that was measured, no step could have told the
    ranks from wrong ones."""
    if report["ranks_with_other_weights"] or not all(m["passed"] for m in report["measured"]):
        return "FAIL"
    tells = report["steps_that_tell"] >= min(2, report["steps"])
    blind = any(m["telling_steps"] == 0 for m in report["measured"])
    return "PASS" if tells and not blind else "INCONCLUSIVE"


def lines(report: Report) -> list[str]:
    """The table of one number of ranks, what has to be known about it, and the verdict."""
    one, steps, odd = report["one_rank"], report["steps"], report["ranks_with_other_weights"]
    dealt = f"{one['batch_size_per_card']} images x {one['accumulate_steps']} micro-step(s)"
    result = [
        f"{report['ranks']} rank(s) against 1 rank of {dealt}, {steps} steps",
        f"  {'':<18}{'off by':>9}{'step':>6}{'by rounding':>13}{'allowed':>9}",
    ]
    for m in report["measured"]:
        row = f"  {m['name']:<18}{m['difference']:>9.1e}{m['step']:>6}{m['rounding']:>13.1e}"
        mark = "" if m["telling_steps"] else "  proves nothing"
        result.append(f"{row}{m['allowed']:>9.1e}{mark if m['passed'] else '  TOO FAR OFF'}")
    result.append(f"  training moved the weights by {report['weights_moved']:.1e}")
    if odd:
        result.append(f"  other weights than rank 0: rank {', '.join(map(str, odd))}")
    if not report["sync_bn"] and report["ranks"] > 1:
        result.append(
            "  not compared: running statistics of batch norm (one rank meets the micro-batches "
            "one after the other; those of ranks are averaged)"
        )
    if steps < report["steps_asked_for"]:
        result.append("  the run (with train.sync_bn: its first epoch) has no more to compare")
    if report["steps_that_tell"] < steps:
        result.append(
            f"  rounding alone may explain {_BLIND:.0%} after step {report['steps_that_tell']}: "
            f"later ones prove nothing; a lower optimizer.lr lets more of them tell"
        )
    if any(m["telling_steps"] == 0 for m in report["measured"]):
        result.append(
            f"  proves nothing: in every step rounding may explain {_BLIND:.0%} of it, of weights "
            f"{_BLIND_OF_MOVED:.0%} of what training moved; set schedule.warmup_epochs=0 if they "
            f"hardly move, train larger batches, or in float32"
        )
    return [*result, f"  {verdict(report)}"]
