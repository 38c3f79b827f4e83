"""Draws plots of runs, evaluations, data sets and studies with matplotlib.

Figures are made and written directly; pyplot, with its state and its choice of a window system, is
never imported.  Letters: C classes, T confidences, R records or recalls, W ranks.
"""

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import XAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.scale import SymmetricalLogScale
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from ppdist.common.errors import DataError
from ppdist.common.files import make_folder, write_whole
from ppdist.data.checks.statistics import Objects, count_per_class
from ppdist.data.image import read_image
from ppdist.metrics.analysis import EXTRA, MISSED, counts_objects_twice
from ppdist.metrics.run import Numbers, Run
from ppdist.storage.files import STORAGE
from ppdist.viz.draw import (
    BLUE,
    CJK_FONTS,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY_BLUE,
    VERMILION,
    YELLOW,
    caption,
    draw_labelled,
    grid,
    installed_fonts,
    readable,
    without_emoji,
)

# The colours of the palette that are visible on white.
COLOURS = tuple(
    "#{:02x}{:02x}{:02x}".format(*colour)
    for colour in (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY_BLUE, GREY)
)
DASHES = ("-", "--", ":", "-.")  # used when there are more lines than colours
# Curves of a class have the colour of its boxes (draw.PALETTE), but a yellow for white paper.
CLASS_COLOURS = tuple(
    "#b3a600" if colour == YELLOW else "#{:02x}{:02x}{:02x}".format(*colour) for colour in PALETTE
)
MARKERS = "os^"
MAP = "Blues"  # one hue, so that colour blindness does not matter; more is darker
_DOTS = 110  # per inch
_MOST_LETTERS = 40  # of a class name in a plot


def save(path: Path, figure: Figure) -> None:
    """Writes a figure as a PNG file.

    Raises: UserError: the file cannot be written.
    """
    write_whole(path, png(figure))


def png(figure: Figure) -> bytes:
    """Encodes a figure as PNG."""
    content = io.BytesIO()
    figure.set_dpi(_DOTS)
    FigureCanvasAgg(figure).print_png(content)  # `savefig` would draw it twice
    return content.getvalue()


@cache
def fonts() -> list[str]:
    """Lists the font families in order of preference; the first comes with matplotlib."""
    families = ["DejaVu Sans"]
    for file in installed_fonts(CJK_FONTS):
        font_manager.fontManager.addfont(file)
        families.append(font_manager.FontProperties(fname=file).get_name())
    return families


def drawable(name: str, label: int, max_letters: int = _MOST_LETTERS) -> str:
    """Returns the class name, shortened; without emoji, or `#label`, if fonts lack its letters."""
    name = name if len(name) <= max_letters else f"{name[: max_letters - 3]}..."
    name = name if _in_fonts(name) else without_emoji(name)
    if not name or not _in_fonts(name):
        return f"#{label}"
    return f" {name}" if name.startswith("_") else name  # legends leave out names that begin with _


def _in_fonts(text: str) -> bool:
    missing = set(map(ord, text))
    for family in fonts():
        font = font_manager.get_font(font_manager.findfont(family))
        missing -= set(font.get_charmap())
    return not missing


def show_verbatim(*texts: Text) -> None:
    """Shows class names verbatim: `$` does not start a formula, and any font may be used."""
    for text in texts:
        text.set_parse_math(False)
        text.set_fontfamily(fonts())


def legend(axes: Axes, **placement: Any) -> None:
    """Adds a legend beside the axes that shows names verbatim; none if nothing has a name."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        show_verbatim(*axes.legend(handles, names, **placement).get_texts())


def panels(
    count: int,
    across: int,
    width: float,
    height: float,
    besides: float = 0.0,
    *,
    xlabel: str = "",
    title: str = "",
    grid: bool = True,
    layout: Literal["constrained"] | None = "constrained",
) -> tuple[Figure, list[Axes]]:
    """Creates a figure; returns it, and its axes row by row.

    Args:
        across: maximum number of axes per row.
        width, height: size of each of the axes, in inches; besides: height of the title, in inches.
        xlabel: label of the x axis of all axes.
        title: title of the figure, shown verbatim.
    """
    across = min(count, across)
    down = -(-count // across)
    figure = Figure(figsize=(across * width, down * height + besides), layout=layout)
    axes = list(np.ravel(figure.subplots(down, across, squeeze=False)))
    for unused in axes[count:]:
        unused.set_visible(False)
    for panel in axes[:count]:
        panel.set_xlabel(xlabel)
        if grid:
            panel.grid(alpha=0.25)
    if title:
        show_verbatim(figure.suptitle(title))
    return figure, axes[:count]


# Curves of classes.

_MOST_NAMED_CURVES = 16  # classes; of more, the weakest have a name, and all others are grey
_WEAKEST = 8
_CURVE_NAME_LETTERS = 24  # letters


def pr_curve(evaluation: Mapping[str, Any]) -> Figure | None:
    """Draws precision over recall: a thin curve for each class, and a thick curve for the mean.

    Of very many classes, only the weakest are named.

    Returns: the figure; None if there are no such curves.
    """
    curves, metrics = evaluation.get("curves") or {}, evaluation.get("metrics") or {}
    if not curves.get("precision_CR"):
        return None
    recall_R, precision_CR, mean_R = (
        np.array(curves[key], np.float64)
        for key in ("recall_R", "precision_CR", "mean_precision_R")
    )
    figure, (axes,) = panels(1, 1, 9, 5.6)
    measured_C = np.isfinite(precision_CR).any(1)
    indices = np.flatnonzero(measured_C).tolist()
    styles = [curves["curve_classes"][index] for index in indices]
    if len(indices) > _MOST_NAMED_CURVES:
        axes.plot(recall_R, precision_CR[measured_C].T, color="0.7", linewidth=0.6, alpha=0.7)
        # A single legend entry represents all grey lines.
        axes.plot([], [], color="0.7", label=f"{len(indices)} classes; the weakest:")
        label_C, rows = curves["curve_classes"], evaluation["per_class"]
        indices.sort(key=lambda index: rows[label_C[index]].get("AP50") or 0.0)
        indices = indices[:_WEAKEST]
        styles = [*range(len(indices))]
    elif max(styles, default=0) >= len(CLASS_COLOURS) * len(DASHES):  # a few of very many classes
        styles = [*range(len(indices))]
    for index, style in zip(indices, styles):
        label = curves["curve_classes"][index]
        name = drawable(evaluation["class_names"][label], label, _CURVE_NAME_LETTERS)
        value = evaluation["per_class"][label].get("AP50")
        axes.plot(
            recall_R, precision_CR[index], DASHES[style // len(CLASS_COLOURS)], linewidth=1.4,
            color=CLASS_COLOURS[style % len(CLASS_COLOURS)],
            label=name if value is None else f"{name} {value:.3f}",
        )  # fmt: skip
    if np.isfinite(mean_R).any():
        value = metrics.get("mAP50")
        label = "mean" if value is None else f"mean {value:.3f}"
        axes.plot(recall_R, mean_R, color="black", linewidth=3, label=label)
    axes.set(xlabel="recall", ylabel="precision", title="precision over recall, IoU 0.5")
    axes.set(xlim=(0, 1), ylim=(0, 1.01))
    legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    return figure


# The best and the worst images.

_MOST_EXAMPLES = 12  # images
_ACROSS = 4
_TILE_WIDTH = 480  # pixels; four tiles are about as wide as a screen
_MOST_TILE_HEIGHT = 2 * _TILE_WIDTH
_MOST_WRONG = 15  # wrong boxes drawn on an image: the surest
_FOUND, _MISSED, _WRONG = GREEN, VERMILION, SKY_BLUE


def mosaic(
    entries: Sequence[Mapping[str, Any]], class_names: Sequence[str], folders: Sequence[Path]
) -> np.ndarray | None:
    """Arranges images in rows, each with its detections and a caption below.

    Found objects are outlined in green, missed ones in vermilion, wrong detections in blue.

    Args:
        entries: `worst` or `best` of evaluation.json.
        folders: the folders of the files.  Other files are not shown: evaluation.json may come from
            an untrusted source.
    Returns: uint8 RGB; None if no image is readable.
    """
    tiles = [_draw_tile(entry, class_names, folders) for entry in entries[:_MOST_EXAMPLES]]
    shown_tiles = [tile for tile in tiles if tile is not None]
    if not shown_tiles:
        return None
    picture = grid(shown_tiles, across=min(_ACROSS, len(shown_tiles)))
    return caption(picture, "green: found; red: missed; blue: wrong, with its score")


def _draw_tile(
    entry: Mapping[str, Any], class_names: Sequence[str], folders: Sequence[Path]
) -> np.ndarray | None:
    """Draws the boxes of an entry on its image: `true` and `predicted`, see
    ppdist.metrics.analysis.
    """
    image_HW3 = _read_within(str(entry["file"]), folders)
    if image_HW3 is None:
        return None
    height, width = image_HW3.shape[:2]
    scale = min(_TILE_WIDTH / width, _MOST_TILE_HEIGHT / height)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    image_HW3 = cv2.resize(
        image_HW3, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    )
    # The highest scores come first; an untrained model has hundreds of wrong boxes, which would
    # hide the image.
    wrong = [row for row in entry.get("predicted") or () if row[-1] != "correct"]
    labelled_boxes = [
        (box_4, readable(str(class_names[label]), label), _FOUND if was_found else _MISSED)
        for label, *box_4, was_found in entry.get("true") or ()
    ] + [
        (box_4, f"{readable(str(class_names[label]), label)} {score:.2f}", _WRONG)
        for label, score, *box_4, _ in wrong[:_MOST_WRONG]
    ]
    boxes, texts, colours = zip(*labelled_boxes) if labelled_boxes else ((), (), ())
    boxes_N4 = scale * np.array(boxes).reshape(-1, 4)
    image_HW3 = draw_labelled(image_HW3, boxes_N4, texts, colours)
    room = max(0, _TILE_WIDTH - size[0])  # widens a narrow image, for the text below it
    white = (255, 255, 255)
    image_HW3 = cv2.copyMakeBorder(image_HW3, 0, 0, 0, room, cv2.BORDER_CONSTANT, value=white)
    counts = ", ".join(f"{what} {entry[what]}" for what in ("objects", "found", "missed", "wrong"))
    if entry["wrong"] > _MOST_WRONG:
        counts += f" ({_MOST_WRONG} drawn)"
    return caption(caption(image_HW3, counts), readable(Path(str(entry["file"])).name, 0))


def _read_within(file: str, folders: Sequence[Path]) -> np.ndarray | None:
    """Reads the first readable candidate that lies in one of the folders.

    Links inside the folders are followed.
    """
    allowed = [Path(os.path.abspath(folder)) for folder in folders]
    for folder in (Path(), *folders):
        path = Path(os.path.abspath(folder / file))  # without `..`
        try:
            if any(path.is_relative_to(folder) for folder in allowed):
                return read_image(path, opener=STORAGE)
        except (DataError, OSError, ValueError):  # a name with a zero byte is a ValueError
            continue
    return None


# The course of a run.

# Panels of scores that belong together; only the scores that the run has are drawn.
_SCORES = {
    "mean average precision": ("mAP", "mAP50", "mAP75"),
    "mAP by size of the objects": ("mAP_small", "mAP_medium", "mAP_large"),
    "average recall": ("AR1", "AR10", "AR100"),
    "at the confidence of the best F1": ("precision", "recall", "f1"),
    "accuracy": ("top1", "top5"),
}
# First scores of the panel in which the best evaluation is marked.
_RANKING_METRICS = ("mAP", "top1")
_SPREAD = 20  # a curve with a larger ratio gets a logarithmic axis
# Legends below the label of the axis, where they hide no curve.
_BELOW: dict[str, Any] = {
    "loc": "upper center", "bbox_to_anchor": (0.5, -0.21), "ncols": 4, "fontsize": 8,
    "frameon": False, "columnspacing": 1.2, "handlelength": 1.6, "borderaxespad": 0,
}  # fmt: skip
_LOW = 0.3  # if the best score is below, the axis ends below 1
_FEW = 60  # up to this many points are drawn raw; beyond that a running mean is added


def column(records: Sequence[Numbers], name: str) -> np.ndarray:
    """Returns the values of a key in all records, float64 [R]; NaN where a record lacks it."""
    return np.array([record.get(name, np.nan) for record in records], np.float64)


def _has(records: Sequence[Numbers], name: str) -> bool:
    return any(name in record for record in records)


def _x_unit(run: Run) -> str:
    return "epoch" if _has([*run.train, *run.evaluations], "epoch") else "step"


def _x_positions(run: Run, step_R: np.ndarray) -> np.ndarray:
    """Returns the epochs [R] of some steps; the steps if no epoch is recorded."""
    with_epoch = [record for record in (*run.train, *run.evaluations) if "epoch" in record]
    if not with_epoch:
        return step_R
    pairs = np.array([[0.0, 0.0], *([record["step"], record["epoch"]] for record in with_epoch)])
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return np.interp(step_R, pairs[:, 0], pairs[:, 1])


def results(run: Run, title: str) -> Figure | None:
    """Draws every loss in training and validation, then the scores."""
    names = dict.fromkeys(["loss", *(name for record in run.train for name in record)])
    losses = [name for name in names if re.match("loss(_|$)", name) and _has(run.train, name)]
    scores = {
        what: present
        for what, names in _SCORES.items()
        if (present := [name for name in names if _has(run.evaluations, name)])
    }
    count = len(losses) + len(scores)
    if not count:
        return None
    step_R, evaluated_R = (
        _x_positions(run, column(records, "step")) for records in (run.train, run.evaluations)
    )
    across = math.ceil(count / math.ceil(count / _ACROSS))  # 5 panels are 3 + 2, not 4 + 1
    figure, panel_axes = panels(
        count, across, 4, 3.4, 0.4, xlabel=_x_unit(run), title=title, layout=None
    )
    for axes, name in zip(panel_axes, losses):
        validation = f"val_{name}"
        _curve(axes, step_R, column(run.train, name), "training")
        if _has(run.evaluations, validation):
            axes.plot(
                evaluated_R, column(run.evaluations, validation), color=COLOURS[3],
                marker=MARKERS[1], markersize=3.5, label="validation",
            )  # fmt: skip
        _scale_axis(axes, [column(run.train, name), column(run.evaluations, validation)])
        axes.set_title(name)
        legend(axes, **_BELOW)
    for axes, (what, present) in zip(panel_axes[len(losses) :], scores.items()):
        highest = 0.0
        for colour, marker, name in zip(COLOURS, MARKERS, present):
            value_R = column(run.evaluations, name)
            highest = max(highest, np.nanmax(value_R))
            axes.plot(evaluated_R, value_R, color=colour, marker=marker, markersize=3.5, label=name)
        if present[0] in _RANKING_METRICS and run.best:
            # Fitness has no curve of its own.
            name = run.metric if run.metric in present else present[0]
            best = _x_positions(run, np.array([run.best["step"]])), [run.best.get(name, np.nan)]
            label = f"best {run.metric_text}: {run.best[run.metric]:.3f}"
            axes.plot(*best, "o", markersize=10, markerfacecolor="none", color="black", label=label)
        axes.set_ylim(0, 1 if highest > _LOW or not highest else 1.2 * highest)
        axes.set_title(what)
        legend(axes, **_BELOW)
    # Constrained layout would find about the same margins, but take as long as everything else.
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, wspace=0.2,
        bottom=0.75 / height, top=1 - 0.75 / height, hspace=0.5,
    )  # fmt: skip
    return figure


def _curve(
    axes: Axes, x_R: np.ndarray, y_R: np.ndarray, label: str, colour: str = COLOURS[0]
) -> None:
    """Draws a curve; a long curve is drawn faintly, with its running mean on top."""
    if len(y_R) <= _FEW:
        axes.plot(x_R, y_R, color=colour, marker=".", markersize=3, label=label)
        return
    axes.plot(x_R, y_R, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(x_R, _smooth(y_R, len(y_R) // _FEW + 2), color=colour, label=label)


def _smooth(value_R: np.ndarray, reach: int) -> np.ndarray:
    """Computes the moving average over `reach` values on each side; ignores NaN."""
    window = np.ones(2 * reach + 1)
    finite_R = np.isfinite(value_R)
    total_R = np.convolve(np.where(finite_R, value_R, 0), window, "same")
    count_R = np.convolve(finite_R.astype(np.float64), window, "same")
    return np.where(count_R > 0, total_R / np.maximum(count_R, 1), np.nan)


def _scale_axis(axes: Axes, values: Sequence[np.ndarray]) -> None:
    """Chooses a logarithmic axis if values lie far apart, otherwise an axis that starts at 0."""
    finite = np.concatenate(values)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        axes.text(
            0.5, 0.5, "nothing was finite", ha="center", va="center", transform=axes.transAxes,
            color="0.4",
        )  # fmt: skip
    elif finite.min() > 0 and finite.max() > _SPREAD * np.median(finite):
        axes.set_yscale("log")
    elif finite.min() >= 0:
        axes.set_ylim(0, 1.05 * finite.max() or 1)


# Confusion of classes.

_BESIDE = 20  # classes; with more, the two matrices stand one below the other
_MOST_ROWS = 80  # classes; of more, the most confused are drawn, so that all can be read
_MOST_CONFUSED = 40  # of them
_ROW_NAME_LETTERS = 18  # letters
_LETTERS_ACROSS = 50  # of horizontal names below a matrix; more letters are written upright
_OTHERS = "(others)"


def confusion(evaluation: Mapping[str, Any]) -> Figure | None:
    """Draws the confusion matrices in percent of the true objects and in counts.

    A row sums to the objects of its class: the diagonal is the recall, followed by other classes,
    classes that are not drawn, and missed objects.  Extra detections have a row in counts.

    Returns: the figure; None if there is no confusion matrix, or no object and no detection in it.
    """
    table = evaluation.get("confusion")
    size = len(table.get("counts") or table["true_counts"]) if table else 0
    if not table or not size:
        return None
    cells = np.array(table.get("cells") or [], np.int64).reshape(-1, 3)
    if matrix := table.get("counts"):
        counts_SS = np.array(matrix, np.int64)
        rows, columns = np.nonzero(counts_SS)
        cells = np.stack([rows, columns, counts_SS[rows, columns]], axis=1)
    class_names = [*evaluation["class_names"]]
    of_boxes = size == len(class_names) + 1  # of a classifier nothing is missed or extra
    classes = size - of_boxes
    label_C = _drawn_classes(cells, classes)
    if not len(label_C):
        return None
    drawn, cut = len(label_C), len(label_C) < classes
    place_S = np.full(size, drawn)  # that of other classes
    place_S[label_C] = np.arange(drawn)
    place_S[classes:] = drawn + cut
    edge = drawn + cut + of_boxes
    counts = np.zeros((drawn + cut + 1, drawn + cut + 1))
    np.add.at(counts, tuple(place_S[cells[:, :2]].T), cells[:, 2])
    true_S = np.array(table.get("true_counts") or np.bincount(cells[:, 0], cells[:, 2], size))
    for label, row in enumerate(evaluation.get("per_class") or ()):
        true_S[label] = row.get("objects") or true_S[label]
    true_C = true_S[label_C]
    if cut:  # of very many classes the smallest cells are not written
        counts[:drawn, drawn] = 0
        counts[:drawn, drawn] = np.maximum(0, true_C - counts[:drawn].sum(1))
    names = [drawable(class_names[label], label, _ROW_NAME_LETTERS) for label in label_C.tolist()]
    across = [*names, *[_OTHERS] * cut, *[MISSED] * of_boxes]
    beside = edge <= _BESIDE
    side = float(np.clip(0.205 * edge, 3.2, 18)) + 2.4
    title, iou, confidence = "confusion", table.get("iou"), table.get("confidence")
    if iou is not None and confidence is not None:
        title += f" of boxes that meet with IoU {iou:g} or more, confidence {confidence:.3g}"
    if cut:
        choice = "most confused" if drawn == _MOST_CONFUSED else "with objects or detections"
        title += f"; {drawn} of {classes} classes: those {choice}"
    width = side if beside else side + 0.6
    figure, (shares, absolute) = panels(2, 1 + beside, width, side, title=title, grid=False)
    part = 100 * counts[:drawn, :edge] / np.maximum(true_C, 1)[:, None]
    _draw_matrix(shares, part, names, across, drawn, Normalize(0, 100))
    shown = counts[:drawn, :edge]
    down = names
    if of_boxes:
        shown, down = np.vstack([shown, counts[drawn + cut, :edge]]), [*names, EXTRA]
    norm = PowerNorm(0.4, 0, max(1.0, shown.max()))
    _draw_matrix(absolute, shown, down, across, drawn, norm)
    twice = "\n(of an earlier version: some count twice)" * counts_objects_twice(evaluation)
    shares.set_title("% of the true objects" + twice if of_boxes else "% of the true images")
    absolute.set_title("number of objects, and of extra detections" if of_boxes else "images")
    return figure


def _drawn_classes(cells_K3: np.ndarray, classes: int) -> np.ndarray:
    """Chooses the classes of a confusion matrix to draw: of very many, the most confused.

    First the classes confused with other classes, in either direction, then those with the most
    missed objects or extra detections, then those with objects.
    """
    if classes <= _MOST_ROWS:
        return np.arange(classes)
    true_K, called_K, count_K = cells_K3.T
    wrong_K = count_K * (true_K != called_K)
    confused_K = wrong_K * (np.maximum(true_K, called_K) < classes)

    def per_class(count_K: np.ndarray) -> np.ndarray:
        total_S = np.bincount(true_K, count_K, classes + 1)
        return (total_S + np.bincount(called_K, count_K, classes + 1))[:classes]

    present_C = per_class(count_K) > 0
    order_C = np.lexsort((-per_class(wrong_K), -per_class(confused_K), ~present_C))
    order_C = order_C[:_MOST_CONFUSED]
    return np.sort(order_C[present_C[order_C]])


def _draw_matrix(
    axes: Axes,
    value: np.ndarray,
    down: Sequence[str],
    across: Sequence[str],
    classes: int,
    norm: Normalize,
) -> None:
    """Draws a matrix: cells below 0.5 stay white, others show a number.

    Args: down, across: names of its rows and columns; a line separates the first `classes` of them.
    """
    axes.imshow(np.ma.masked_less(value, 0.5), cmap=MAP, norm=norm, interpolation="nearest")
    axes.set(xlabel="predicted", ylabel="true", anchor="N")
    letters = 10.0 if len(across) <= 12 else 7.5 if len(across) <= 41 else 6.5
    upright = len(across) * max(map(len, across)) > _LETTERS_ACROSS
    axes.set_xticks(range(len(across)), across, rotation=90 if upright else 0, fontsize=letters)
    axes.set_yticks(range(len(down)), down, fontsize=letters)
    show_verbatim(*axes.get_xticklabels(), *axes.get_yticklabels())
    for names, draw_line in ((across, axes.axvline), (down, axes.axhline)):
        if len(names) > classes:
            draw_line(classes - 0.5, color="0.4", linewidth=1)
    digits = 9.0 if len(across) <= 12 else 6.5 if len(across) <= 41 else 5.0
    for row, column in zip(*np.nonzero(value >= 0.5)):
        dark = norm(value[row, column]) > 0.5
        axes.text(
            column, row, _short(value[row, column]), ha="center", va="center", fontsize=digits,
            color="white" if dark else "black",
        )  # fmt: skip


def _short(value: float) -> str:
    """Formats a number with at most three characters: 7, 42, 650, 3k, 20k."""
    if value < 999.5:
        return f"{max(1.0, value):.0f}"
    return f"{value / 1e3:.0f}k" if value < 999.5e3 else f"{value / 1e6:.0f}M"


# The objects of the sets.

_MOST_COUNT_BARS = 80  # classes; of more, the most and the least common are drawn
_COMMONEST = _RAREST = 20
_UNEVEN = (
    30  # a larger ratio of counts needs a logarithmic axis, for the smallest bar to be visible
)


def plot_classes(
    splits: Mapping[str, Objects], class_names: Sequence[str], path: Path, *, boxes: bool = True
) -> None:
    """Writes a PNG with the number of objects and images of each class.

    Args:
        splits: name of each split -> its objects; two at most, of the same classes.
        boxes: whether the objects are boxes; False for classified images.
    Raises: UserError: the file cannot be written.
    """
    make_folder(path.parent)
    save(path, _draw_classes(splits, class_names, boxes))


def _draw_classes(splits: Mapping[str, Objects], class_names: Sequence[str], boxes: bool) -> Figure:
    """Draws objects (with boxes) and images of each class, the most common on top."""
    counts = {name: count_per_class(objects, len(class_names)) for name, objects in splits.items()}
    order_C = np.argsort(-next(iter(counts.values()))[0], kind="stable")
    titles = {0: "objects of each class", 1: "images that show it"}
    if not boxes:
        titles = {1: "images of each class"}
    note, cut = "", False
    if len(order_C) > _MOST_COUNT_BARS:
        objects_C = np.sum([count[0] for count in counts.values()], axis=0)
        present = int((objects_C > 0).sum())
        note = f"{present} of {len(class_names)} classes have objects"
        order_C = order_C[objects_C[order_C] > 0] if present else order_C[:1]
        if cut := len(order_C) > _MOST_COUNT_BARS:
            note += f"; the {_COMMONEST} commonest and the {_RAREST} rarest of them"
            order_C = np.concatenate([order_C[:_COMMONEST], order_C[-_RAREST:]])
    figure = Figure(
        figsize=(5.4 * len(titles), max(3.0, 1.5 + 0.32 * len(order_C))), layout="constrained"
    )
    columns = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    thick = 0.8 / len(splits)
    for axes, (quantity, title) in zip(columns, titles.items()):
        series = {name: count[quantity][order_C] for name, count in counts.items()}
        for position, (colour, (name, count_C)) in enumerate(zip(COLOURS, series.items())):
            offset = (position - (len(series) - 1) / 2) * thick
            places_C = np.arange(len(count_C)) + offset
            bars = axes.barh(places_C, count_C, thick, color=colour, label=name)
            axes.bar_label(bars, [f"{count}" for count in count_C], padding=2, fontsize=7)
        if cut:
            axes.axhline(_COMMONEST - 0.5, color="0.4", linewidth=1)
        _scale_count_axis(axes.xaxis, series)
        axes.set_title(title)
    if note:
        figure.suptitle(note, fontsize="medium")
    names = [drawable(class_names[label], label) for label in order_C]
    columns[0].set_yticks(range(len(order_C)), names)
    columns[0].set_ylim(len(order_C) - 0.5, -0.5)
    show_verbatim(*columns[0].get_yticklabels())
    figure.legend(
        *columns[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(splits)
    )
    return figure


def _scale_count_axis(axis: XAxis, series: Mapping[str, np.ndarray]) -> None:
    """Scales a count axis from 0, logarithmic if values lie far apart.

    An eighth of the axis is left free for annotations.
    """
    counts = np.concatenate(list(series.values()))
    highest, name = max(1, counts.max()), axis.axis_name
    if highest > _UNEVEN * max(1, counts.min()):
        axis.axes.set(**{f"{name}scale": SymmetricalLogScale(None, linthresh=1)})
        axis.axes.set(**{f"{name}lim": (0, highest * (10 * highest) ** (1 / 7))})
        axis.set_label_text("number, logarithmic")
    else:
        axis.axes.set(**{f"{name}lim": (0, highest * 8 / 7)})
        axis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.set_label_text("number")
