"""What a data set holds: classes, box sizes, positions, images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.scale import LogScale, SymmetricalLogScale
from matplotlib.ticker import MaxNLocator

from ppdist.data.statistics import Objects, per_class
from ppdist.files import make_folder
from ppdist.plots.style import COLOURS, drawable, fonts, save

_MOST_BARS = 80
_UNEVEN = 30  # times as many: a bar of the least could not be seen on a linear axis
_MOST_TICKS = 8
_MOST_WRITTEN = 12  # powers of two up to 4096 are written out
_MOST_FIELDS = 40  # across and down of a map of positions


def plot_statistics(
    splits: Mapping[str, Objects], class_names: Sequence[str], folder: Path, *, boxes: bool = True
) -> list[Path]:
    """Writes classes.png, boxes.png, positions.png and images.png; returns their paths.

    Args:
        splits: name of each split -> its objects; two at most, of the same classes.
        boxes: False for classified images, of which there is classes.png alone.
    Raises: UserError: the folder cannot be written to.
    """
    make_folder(folder)
    figures = {"classes": _classes(splits, class_names, boxes)}
    if boxes:
        figures |= {
            "boxes": _boxes(splits),
            "positions": _positions(splits),
            "images": _images(splits),
        }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        save(figure, paths[-1])
    return paths


def _classes(splits: Mapping[str, Objects], class_names: Sequence[str], boxes: bool) -> Figure:
    """Objects (with boxes) and images of each class, the most common above."""
    counts = {name: per_class(objects, len(class_names)) for name, objects in splits.items()}
    order_C = np.argsort(-next(iter(counts.values()))[0], kind="stable")
    shown = len(class_names) <= _MOST_BARS
    titles = {0: "objects of each class", 1: "images that show it"}
    if not boxes:
        titles = {1: "images of each class"}
    height = 1.5 + (0.32 * len(class_names) if shown else 5)
    figure = Figure(figsize=(1 + 6 * len(titles), max(3.0, height)), layout="constrained")
    panels = figure.subplots(1, len(titles), sharey=shown, squeeze=False)[0]
    for axes, (what, title) in zip(panels, titles.items()):
        series = {name: count[what][order_C] for name, count in counts.items()}
        (_bars if shown else _points)(axes, series)
        axes.set_title(title)
    if shown:
        with_number = [drawable(class_names[label], label) for label in order_C]
        panels[0].set_yticks(range(len(order_C)), with_number, parse_math=False)
        panels[0].set_ylim(len(order_C) - 0.5, -0.5)
        for text in panels[0].get_yticklabels():
            text.set_fontfamily(fonts())
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _bars(axes: Axes, series: Mapping[str, np.ndarray]) -> None:
    thick = 0.8 / len(series)
    for position, (name, count_C) in enumerate(series.items()):
        offset = (position - (len(series) - 1) / 2) * thick
        bars = axes.barh(
            np.arange(len(count_C)) + offset, count_C, thick, color=COLOURS[position], label=name
        )
        axes.bar_label(bars, [f"{count}" for count in count_C], padding=2, fontsize=7)
    _numbers(axes.xaxis, series)


def _points(axes: Axes, series: Mapping[str, np.ndarray]) -> None:
    """A point for each class, where there are too many for bars."""
    for colour, (name, count_C) in zip(COLOURS, series.items()):
        axes.plot(count_C, ".", color=colour, label=name, markersize=3)
    _numbers(axes.yaxis, series)
    axes.set_xlabel("classes, the most common first")


def _numbers(axis: XAxis | YAxis, series: Mapping[str, np.ndarray]) -> None:
    """From 0, logarithmic where they lie far apart; an eighth stays free, for what is beside."""
    everything = np.concatenate(list(series.values()))
    most, name = max(1, everything.max()), axis.axis_name
    if most > _UNEVEN * max(1, everything.min()):
        axis.axes.set(**{f"{name}scale": SymmetricalLogScale(None, linthresh=1)})
        axis.axes.set(**{f"{name}lim": (0, most * (10 * most) ** (1 / 7))})
        axis.set_label_text("number, logarithmic")
    else:
        axis.axes.set(**{f"{name}lim": (0, most * 8 / 7)})
        axis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.set_label_text("number")


def _boxes(splits: Mapping[str, Objects]) -> Figure:
    """Sizes in the input, and shapes; crowds do not count."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    plane, sides, shapes = figure.subplots(1, 3)
    alone = {name: ~objects.crowd_M for name, objects in splits.items()}
    first, objects = next(iter(splits.items()))
    input_M2 = np.maximum(objects.input_M2[alone[first]], 0.1)
    low, high = (input_M2.min(), input_M2.max()) if len(input_M2) else (1, 1)
    bins = np.geomspace(low / 1.1, high * 1.1, 50)
    counts, _, _ = np.histogram2d(input_M2[:, 0], input_M2[:, 1], bins=[bins, bins])
    found = np.ma.masked_equal(counts.T, 0)
    mesh = plane.pcolormesh(bins, bins, found, norm=PowerNorm(0.5, 0, max(1, counts.max())))
    plane.set(title=f"box sizes, {first}")
    plane.set(xlabel="width in the input, pixels", ylabel="height in the input, pixels")
    for axis in (plane.xaxis, plane.yaxis):
        _powers_of_two(axis, bins)
    figure.colorbar(mesh, ax=plane, label="boxes")
    _shares(
        sides,
        {name: np.sqrt(o.input_M2[alone[name]].prod(1)) for name, o in splits.items()},
        "side in the input, pixels",
        "side = square root of the area",
    )
    _shares(
        shapes,
        {name: o.shapes_M[alone[name]] for name, o in splits.items()},
        "width / height in the original",
        "shapes",
    )
    shapes.axvline(1, color="0.5", linewidth=0.8, zorder=0)
    return figure


def _shares(axes: Axes, series: Mapping[str, np.ndarray], xlabel: str, title: str) -> None:
    """Histograms on one logarithmic axis, each as shares of its own values."""
    positive = {name: np.maximum(values, 1e-3) for name, values in series.items()}
    everything = np.concatenate(list(positive.values()))
    low, high = (everything.min(), everything.max()) if len(everything) else (1, 1)
    bins = np.geomspace(low / 1.05, high * 1.05, 50)
    for colour, (name, values) in zip(COLOURS, positive.items()):
        weights = np.full(len(values), 100 / max(1, len(values)))
        axes.hist(
            values,
            bins.tolist(),
            weights=weights,
            histtype="step",
            color=colour,
            linewidth=1.6,
            label=name,
        )
    axes.set(xlabel=xlabel, ylabel="% of the boxes", title=title)
    axes.set_ylim(bottom=0)
    _powers_of_two(axes.xaxis, bins)
    axes.legend()


def _powers_of_two(axis: XAxis | YAxis, bins: np.ndarray) -> None:
    """A logarithmic axis, as strides and scales go: 8, 16, 32; from a power to a power."""
    name = axis.axis_name
    low, high = np.floor(np.log2(bins[0])), np.ceil(np.log2(bins[-1]))
    axis.axes.set(**{f"{name}scale": LogScale(None, base=2), f"{name}lim": (2**low, 2**high)})
    step = int(np.ceil((high - low) / _MOST_TICKS))
    axis.set_ticks(2.0 ** np.arange(low, high + 1, step), minor=False)
    axis.set_major_formatter(lambda value, _: _power(round(np.log2(value))))


def _power(exponent: int) -> str:
    if abs(exponent) > _MOST_WRITTEN:
        return f"$2^{{{exponent}}}$"
    return f"{2**exponent}" if exponent >= 0 else f"1/{2**-exponent}"


def _positions(splits: Mapping[str, Objects]) -> Figure:
    """Where the centres of the boxes lie."""
    figure = Figure(figsize=(6 * len(splits), 5), layout="constrained")
    for axes, (name, objects) in zip(np.ravel(figure.subplots(1, len(splits))), splits.items()):
        centres_M2 = objects.centres_M2[~objects.crowd_M]
        # About eight boxes a field, or chance would be all there is to see.
        fields = int(np.clip(np.sqrt(len(centres_M2) / 8), 5, _MOST_FIELDS))
        counts, _, _ = np.histogram2d(
            centres_M2[:, 1], centres_M2[:, 0], bins=fields, range=((0, 1), (0, 1))
        )
        image = axes.imshow(
            counts, extent=(0, 1, 1, 0), cmap="magma", vmin=0, vmax=max(1, counts.max())
        )
        axes.set(title=f"centres of the boxes, {name}", xlabel="x / width", ylabel="y / height")
        figure.colorbar(image, ax=axes, label="boxes", shrink=0.8)
    return figure


def _images(splits: Mapping[str, Objects]) -> Figure:
    """How many objects images have, and how large they are."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    objects_axes, sizes_axes = figure.subplots(1, 2)
    counts = {name: objects.per_image_N for name, objects in splits.items()}
    most = int(max(count_N.max(initial=1) for count_N in counts.values()))
    step = -(-(most + 1) // _MOST_BARS)
    bins = (np.arange(0, most + 1 + step, step) - 0.5).tolist()
    for colour, (name, count_N) in zip(COLOURS, counts.items()):
        weights = np.full(len(count_N), 100 / max(1, len(count_N)))
        objects_axes.hist(
            count_N, bins, weights=weights, histtype="step", color=colour, linewidth=1.6, label=name
        )
    objects_axes.set(
        xlabel="objects in an image", ylabel="% of the images", title="objects in an image"
    )
    objects_axes.locator_params(integer=True)
    objects_axes.legend()
    for colour, marker, (name, objects) in zip(COLOURS, "os", splits.items()):
        sizes_S2, count_S = np.unique(objects.sizes_N2, axis=0, return_counts=True)
        area_S = 12 + 500 * count_S / count_S.sum()
        sizes_axes.scatter(
            *sizes_S2.T, s=area_S, marker=marker, facecolor="none", edgecolor=colour, label=name
        )
    sizes_axes.set(
        xlabel="width, pixels", ylabel="height, pixels", title="image sizes, area by frequency"
    )
    widest, highest = np.max([objects.sizes_N2.max(0) for objects in splits.values()], axis=0)
    sizes_axes.set(xlim=(0, 1.1 * widest), ylim=(0, 1.1 * highest))
    for handle in sizes_axes.legend().legend_handles:
        handle.set_sizes([40])
    return figure
