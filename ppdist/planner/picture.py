"""Plot of a prediction over cards, with the parts of a step."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppdist.common.files import make_parent, writing
from ppdist.planner.run import Prediction
from ppdist.planner.text import hours

# Okabe & Ito 2008, distinct also for the colour-blind.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_NAMES = {"parallel": "data parallel", "sync_bn": "SyncBN"}


def plot_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Writes a PNG of predictions for a growing number of cards.

    Raises: UserError: the file cannot be written.
    """
    make_parent(path)
    whole = bool(predictions[0].hours)
    figure = Figure(figsize=(15 if whole else 10.5, 4.6), layout="constrained")
    speed, step, *time = figure.subplots(1, 3 if whole else 2)
    _speed(speed, predictions)
    _step(step, predictions)
    if time:
        _time(time[0], predictions)
    for axes in figure.axes:
        axes.set_xlabel("cards (hosts x cards per host)")
    with writing(path):
        figure.savefig(path, dpi=110, format="png")


def _places(axes: Axes, predictions: Sequence[Prediction]) -> range:
    """The numbers of cards at equal distances, as they double."""
    places = range(len(predictions))
    axes.set_xticks(places, [str(prediction.cluster) for prediction in predictions])
    return places


def _speed(axes: Axes, predictions: Sequence[Prediction]) -> None:
    places = _places(axes, predictions)
    rates = [prediction.images_per_second for prediction in predictions]
    alone = predictions[0].images_per_second / predictions[0].cluster.size
    perfect = [alone * prediction.cluster.size for prediction in predictions]
    axes.plot(places, perfect, ":", color="0.5", label="linear scaling")
    axes.plot(places, rates, "o-", color=_COLOURS[0], label="predicted")
    for place, prediction in zip(places, predictions):
        axes.annotate(
            f"{100 * prediction.efficiency:.0f} %",
            (place, prediction.images_per_second),
            (4, -12),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(title="training speed and efficiency", ylabel="images per second", yscale="log")
    axes.margins(x=0.12, y=0.12)
    axes.legend(loc="upper left")


def _step(axes: Axes, predictions: Sequence[Prediction]) -> None:
    places = _places(axes, predictions)
    parts = [asdict(prediction.step) for prediction in predictions]
    below = [0.0] * len(parts)
    for colour, name in zip(_COLOURS, parts[0]):
        heights = [1000 * part[name] for part in parts]
        if any(heights):
            label = _NAMES.get(name, name)
            axes.bar(places, heights, bottom=below, color=colour, label=label)
        below = [a + b for a, b in zip(below, heights)]
    axes.set(title="step time by part", ylabel="milliseconds")
    axes.set_ylim(0, 1.35 * max(below))
    axes.legend(loc="upper left", ncols=2, fontsize=8)


def _time(axes: Axes, predictions: Sequence[Prediction]) -> None:
    places = _places(axes, predictions)
    spent = [prediction.gpu_hours for prediction in predictions]
    axes.plot(places, [p.hours for p in predictions], "o-", color=_COLOURS[0], label="hours")
    axes.plot(places, spent, "s--", color=_COLOURS[1], label="GPU-hours")
    for place, prediction in zip(places, predictions):
        said = hours(prediction.hours)
        axes.annotate(said, (place, prediction.hours), (-5, -9), textcoords="offset points",
                      fontsize=8, ha="right")  # fmt: skip
    axes.set(title="total training time", ylabel="hours", yscale="log")
    axes.margins(x=0.12, y=0.15)
    axes.legend(loc="lower left")
