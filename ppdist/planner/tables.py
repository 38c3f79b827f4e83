"""Predictions and fits as tables for people; predictions as a plot."""

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ppdist.common.files import make_parent, write_whole
from ppdist.planner.fit import Fit, left_out
from ppdist.planner.what_if import PARTS, Job, Prediction, what_ifs

_NO_EFFECT = 0.001


def table(rows: Sequence[Sequence[str]]) -> str:
    """A text table with columns as wide as their longest cell.

    The first column is aligned left, numbers right.
    """
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
    """A table row per number of cards: step breakdown and throughput."""
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
    rows = [(PARTS[name], value, value / prediction.hours) for name, value in parts if value]
    return table([[name, hours(value), f"{100 * share:.1f} %"] for name, value, share in rows])


def helps(job: Job, prediction: Prediction) -> str:
    """What each change would save, best first.

    It saves time of the whole training, or raises the rate.  Changes that would do harm or nothing
    are listed apart.
    """
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
    """The fitted parameters, and each row's error with and without itself."""
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


# Okabe & Ito 2008, distinct also for the colour-blind.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_NAMES = {"parallel": "data parallel", "sync_bn": "SyncBN"}


def plot_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Writes a PNG of predictions for a growing number of cards.

    Raises: UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow, and only for this

    make_parent(path)
    count = 3 if predictions[0].hours else 2
    figure = Figure(figsize=(15 if count == 3 else 10.5, 4.6), layout="constrained")
    speed, step, *time = figure.subplots(1, count)
    places = range(len(predictions))  # at equal distances, as the numbers of cards double
    for axes in figure.axes:
        axes.set_xticks(places, [str(prediction.cluster) for prediction in predictions])
        axes.set_xlabel("cards (hosts x cards per host)")
    rates = [prediction.images_per_second for prediction in predictions]
    alone = rates[0] / predictions[0].cluster.size
    perfect = [alone * prediction.cluster.size for prediction in predictions]
    speed.plot(places, perfect, ":", color="0.5", label="linear scaling")
    speed.plot(places, rates, "o-", color=_COLOURS[0], label="predicted")
    for place, (rate, prediction) in enumerate(zip(rates, predictions)):
        said = f"{100 * prediction.efficiency:.0f} %"
        speed.annotate(said, (place, rate), (4, -12), textcoords="offset points", fontsize=8)
    speed.set(title="training speed and efficiency", ylabel="images per second", yscale="log")
    speed.margins(x=0.12, y=0.12)
    speed.legend(loc="upper left")
    parts = [asdict(prediction.step) for prediction in predictions]
    below = [0.0] * len(parts)
    for colour, name in zip(_COLOURS, parts[0]):
        heights = [1000 * part[name] for part in parts]
        if any(heights):
            step.bar(places, heights, bottom=below, color=colour, label=_NAMES.get(name, name))
        below = [a + b for a, b in zip(below, heights)]
    step.set(title="step time by part", ylabel="milliseconds", ylim=(0, 1.35 * max(below)))
    step.legend(loc="upper left", ncols=2, fontsize=8)
    for axes in time:
        spent = [prediction.gpu_hours for prediction in predictions]
        axes.plot(places, [p.hours for p in predictions], "o-", color=_COLOURS[0], label="hours")
        axes.plot(places, spent, "s--", color=_COLOURS[1], label="GPU-hours")
        for place, prediction in zip(places, predictions):
            axes.annotate(
                hours(prediction.hours), (place, prediction.hours), (-5, -9),
                textcoords="offset points", fontsize=8, ha="right",
            )  # fmt: skip
        axes.set(title="total training time", ylabel="hours", yscale="log")
        axes.margins(x=0.12, y=0.15)
        axes.legend(loc="lower left")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_whole(path, picture.getvalue())
