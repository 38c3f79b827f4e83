"""Predictions, fits and backtests as tables for people."""

from collections.abc import Sequence

from ppdist.planner.backtest import Table
from ppdist.planner.fit import Fit, left_out
from ppdist.planner.run import PARTS, Prediction, what_ifs
from ppdist.planner.step import Job

_NO_EFFECT = 0.001


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def hours(value: float) -> str:
    """In the unit that people would say."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(value) * 3600 >= 2 * seconds:
            return f"{value * 3600 / seconds:.1f} {unit}"
    return f"{value * 3600:.0f} s"


def percent(fraction: float) -> str:
    """With its sign; never -0.0."""
    return f"{round(100 * fraction, 1) + 0.0:+.1f} %"


def growth(predictions: Sequence[Prediction]) -> str:
    """A line for each number of cards: where a step's milliseconds go, and what comes of it."""
    heads = ["cards", "batch", "step ms", "compute", "stragglers", "input", "parallel", "network",
             "SyncBN", "img/s", "efficiency"]  # fmt: skip
    whole = bool(predictions[0].hours)
    rows = [heads + (["epochs", "time", "GPU-hours"] if whole else []) + ["limit"]]
    for p in predictions:
        step = p.step
        parts = (step.seconds, step.compute, step.stragglers, step.input, step.parallel,
                 step.network, step.sync_bn)  # fmt: skip
        row = [str(p.cluster), str(p.total_batch), *(f"{1000 * part:.1f}" for part in parts)]
        row += [f"{p.images_per_second:.1f}", f"{100 * p.efficiency:.0f} %"]
        if whole:
            row += [f"{p.epochs:.1f}", hours(p.hours), f"{p.gpu_hours:.1f}"]
        rows.append([*row, p.limit])
    return table(rows)


def spent(prediction: Prediction) -> str:
    """Where the hours go, the most first."""
    parts = sorted(prediction.parts.items(), key=lambda pair: -pair[1])
    return table(
        [
            [PARTS[name], hours(value), f"{100 * value / prediction.hours:.1f} %"]
            for name, value in parts
            if value
        ]
    )


def helps(job: Job, prediction: Prediction) -> str:
    """What each change would do to the time (or the rate) of the whole, the best first; apart from
    them, those that would do harm or nothing."""
    rows, harm, idle = [], [], []
    for name, changed in what_ifs(job, prediction.cluster):
        if prediction.hours:
            becomes, change = hours(changed.hours), changed.hours / prediction.hours - 1
            better = change < 0
        else:
            becomes = f"{changed.images_per_second:.1f} img/s"
            change = changed.images_per_second / prediction.images_per_second - 1
            better = change > 0
        if abs(change) < _NO_EFFECT:
            idle.append(name)
        elif better:
            rows.append([name, becomes, percent(change)])
        else:
            harm.append(f"{name} ({percent(change)})")
    lines = [table(rows) if rows else "None of the changes that were tried."]
    lines += [f"Worse: {', '.join(harm)}."] if harm else []
    lines += [f"No effect: {', '.join(idle)}."] if idle else []
    return "\n".join(lines)


def fitted(found: Fit) -> str:
    """The parameters, and how far off each row is, with and without itself."""
    lines = [
        f"fixed {1000 * found.fixed_seconds:.2f} ms a step, {1000 * found.image_seconds:.3f} ms an "
        f"image, jitter {100 * found.jitter:.1f} %, data parallel "
        f"{1000 * found.parallel_seconds:.1f} ms",
        f"{len(found.parameters)} parameters ({', '.join(found.parameters)}) from "
        f"{len(found.rows)} rows; 0: these rows cannot tell it",
    ]
    rows = [["cards x batch", "measured ms", "fitted ms", "error", "from the other rows"]]
    for row, alone in zip(found.rows, left_out(found.rows)):
        rows.append([
            f"{row.cards} x {row.batch}", f"{1000 * row.seconds:.1f}",
            f"{1000 * found.seconds(row):.1f}", percent(found.error(row)),
            "" if alone != alone else percent(alone),
        ])  # fmt: skip
    return "\n".join([*lines, table(rows)])


def tested(found: Table) -> str:
    """One published table."""
    rows = [["", f"measured, {found.unit}", "model", "error", ""]]
    for outcome in found.outcomes:
        how = "fitted" if outcome.fitted else "predicted"
        if not outcome.required:
            how = "not claimed"
        rows.append([
            outcome.name, f"{outcome.measured:g}", f"{outcome.predicted:.4g}",
            percent(outcome.error), how,
        ])  # fmt: skip
    verdict = "holds" if found.holds else "DOES NOT HOLD"
    claimed = sum(outcome.required for outcome in found.outcomes)
    return "\n".join([
        found.name,
        table(rows),
        f"largest error {100 * found.worst:.1f} %, at most {100 * found.tolerance:.0f} %: "
        f"{verdict}",
        f"parameters / rows: {len(found.free)} / {claimed}: {'; '.join(found.free)}",
        *(f"  - {remark}" for remark in found.remarks),
    ])  # fmt: skip
