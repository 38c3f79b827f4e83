"""Plots of runs, evaluations, data sets and studies, by matplotlib.

Figures are made and written by themselves; pyplot, with its state and its choice of a window
system, is never imported.  Letters: C classes, T confidences, R records or recalls, W ranks.
"""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.scale import LogScale, SymmetricalLogScale
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from ppdist.common.errors import DataError
from ppdist.common.files import make_folder, writing
from ppdist.common.records import MetricRecords, Record
from ppdist.data.checks.statistics import Objects, per_class
from ppdist.data.image import read_image
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
    Colour,
    caption,
    draw_labelled,
    grid,
    installed,
    readable,
)

# Those of the palette that can be seen on white.
COLOURS = tuple(
    "#{:02x}{:02x}{:02x}".format(*colour)
    for colour in (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY_BLUE, GREY)
)
DASHES = ("-", "--", ":", "-.")  # where there are more lines than colours
# Curves of a class have the colour of its boxes (draw.PALETTE), but a yellow for white paper.
CLASS_COLOURS = tuple(
    "#b3a600" if colour == YELLOW else "#{:02x}{:02x}{:02x}".format(*colour) for colour in PALETTE
)
MARKERS = "os^"
MAP = "Blues"  # one hue, so all eyes see the same; more is darker
_DOTS = 110  # per inch
_MOST_LETTERS = 40  # of a class's name


def save(figure: Figure | None, path: Path) -> bool:
    """Writes a PNG file; returns whether there was a figure.

    Raises: UserError: the system refused.
    """
    if figure is None:
        return False
    with writing(path):
        _print(figure, path)
    return True


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    content = io.BytesIO()
    _print(figure, content)
    return content.getvalue()


def _print(figure: Figure, to: Path | io.BytesIO) -> None:
    figure.set_dpi(_DOTS)
    FigureCanvasAgg(figure).print_png(to)  # `savefig` would draw it twice


@cache
def fonts() -> list[str]:
    """Font families in order of preference; the first comes with matplotlib."""
    families = ["DejaVu Sans"]
    for file in installed(CJK_FONTS):
        font_manager.fontManager.addfont(file)
        families.append(font_manager.FontProperties(fname=file).get_name())
    return families


def drawable(name: str, label: int, most: int = _MOST_LETTERS) -> str:
    """The class name, shortened, or `#label` if fonts lack its letters."""
    name = name if len(name) <= most else f"{name[: most - 3]}..."
    missing = set(map(ord, name))
    for family in fonts():
        font = font_manager.get_font(font_manager.findfont(family))
        missing -= set(font.get_charmap())
    if missing:
        return f"#{label}"
    return f" {name}" if name.startswith("_") else name  # legends leave out what begins so


def as_written(*texts: Text) -> None:
    """Shows class names verbatim: `$` starts no mathematics, any font may serve."""
    for text in texts:
        text.set_parse_math(False)
        text.set_fontfamily(fonts())


def legend(axes: Axes, **placing: Any) -> None:
    """A legend that shows names verbatim; none if nothing has a name."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        as_written(*axes.legend(handles, names, **placing).get_texts())


def empty(axes: Axes, why: str) -> None:
    """Writes in the middle of an empty panel why it is empty."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="0.4")


# Curves of classes.

_MOST_NAMED_CURVES = 16  # classes with a line and a name of their own
_CURVE_NAME_LETTERS = 24  # letters


# Name of a plot -> of `curves`: what lies across, the curves of classes, their mean; and the score
# of `per_class` beside their names.
CLASS_CURVES = {
    "pr_curve": ("recall_R", "precision_CR", "mean_precision_R", "AP50"),
    "p_curve": ("confidence_T", "precision_CT", "mean_precision_T", "precision"),
    "r_curve": ("confidence_T", "recall_CT", "mean_recall_T", "recall"),
    "f1_curve": ("confidence_T", "f1_CT", "mean_f1_T", "f1"),
}


def class_curves(evaluation: Mapping[str, Any], plot: str) -> Figure | None:
    """A curve per class and a thick mean; None: no such curves.

    Args: plot: of `CLASS_CURVES`.
    """
    curves = evaluation.get("curves") or {}
    across, each, mean, score = CLASS_CURVES[plot]
    if not curves.get(each):
        return None
    at_X, value_CX = _numbers(curves[across]), _numbers(curves[each])
    labels = [name.split("_")[0].replace("f1", "F1") for name in (across, each)]
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots()
    names = [_class_label(evaluation, label, score) for label in curves["curve_classes"]]
    _class_lines(axes, at_X, value_CX, names, curves["curve_classes"])
    _mean_line(axes, at_X, _numbers(curves[mean]), evaluation.get("metrics") or {}, score)
    axes.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, 1), ylim=(0, 1.01))
    axes.set_title(f"{labels[1]} over {labels[0]}, IoU 0.5")
    axes.grid(alpha=0.25)
    legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    return figure


def _class_lines(
    axes: Axes,
    at_X: np.ndarray,
    value_CX: np.ndarray,
    names: Sequence[str],
    labels: Sequence[int],
) -> None:
    known_C = np.isfinite(value_CX).any(1)
    if known_C.sum() > _MOST_NAMED_CURVES:
        axes.plot(at_X, value_CX[known_C].T, color="0.7", linewidth=0.6, alpha=0.7)
        axes.plot([], [], color="0.7", label=f"{known_C.sum()} classes")
        return
    indices = np.flatnonzero(known_C).tolist()
    looks = [labels[index] for index in indices]
    if max(looks, default=0) >= len(CLASS_COLOURS) * len(DASHES):  # few of very many classes
        looks = [*range(len(indices))]
    for index, look in zip(indices, looks):
        colour = CLASS_COLOURS[look % len(CLASS_COLOURS)]
        dashes = DASHES[look // len(CLASS_COLOURS)]
        axes.plot(at_X, value_CX[index], dashes, color=colour, linewidth=1.4, label=names[index])


def _mean_line(
    axes: Axes, at_X: np.ndarray, mean_X: np.ndarray, metrics: Mapping[str, Any], score: str
) -> None:
    """Draws the mean over classes with objects, and its value if known."""
    value = metrics.get({"AP50": "mAP50"}.get(score, score))
    if not np.isfinite(mean_X).any():
        return
    text = "mean" if value is None else f"mean {value:.3f}"
    axes.plot(at_X, mean_X, color="black", linewidth=3, label=text)
    confidence = metrics.get("best_f1_threshold")
    if score != "AP50" and confidence is not None:
        label = f"confidence {confidence:.3f}:\nthe best mean F1"
        axes.axvline(confidence, color="black", linewidth=0.8, linestyle=":", label=label)


def _class_label(evaluation: Mapping[str, Any], label: int, score: str) -> str:
    """A class and its score."""
    name = drawable(evaluation["class_names"][label], label, _CURVE_NAME_LETTERS)
    value = evaluation["per_class"][label].get(score)
    return name if value is None else f"{name} {value:.3f}"


def _numbers(values: Any) -> np.ndarray:
    """float64, NaN for null."""
    return np.array(values, np.float64)


# The best and the worst images.

_MOST_EXAMPLES = 12  # images
_ACROSS = 4
_TILE_WIDTH = 480  # pixels of one; four of them are about as wide as a screen
_MOST_TILE_HEIGHT = 2 * _TILE_WIDTH
_MOST_WRONG = 15  # boxes drawn on an image: the surest
_FOUND, _MISSED, _WRONG = GREEN, VERMILION, SKY_BLUE


def mosaic(
    entries: Sequence[Mapping[str, Any]], class_names: Sequence[str], folders: Sequence[Path]
) -> np.ndarray | None:
    """Images in rows, each with its detections and a caption below.

    Found objects are outlined in green, missed ones in vermilion, wrong detections in blue.

    Args:
        entries: `worst` or `best` of evaluation.json.
        folders: where the files are.  Files elsewhere are not shown: evaluation.json may come from
            a stranger.
    Returns: uint8 RGB; None: no image is readable.
    """
    tiles = [_tile(entry, class_names, folders) for entry in entries[:_MOST_EXAMPLES]]
    shown = [tile for tile in tiles if tile is not None]
    if not shown:
        return None
    picture = grid(shown, across=min(_ACROSS, len(shown)))
    return caption(picture, "green: found; red: missed; blue: wrong, with its score")


def _tile(
    entry: Mapping[str, Any], class_names: Sequence[str], folders: Sequence[Path]
) -> np.ndarray | None:
    image_HW3 = _read_within(str(entry["file"]), folders)
    if image_HW3 is None:
        return None
    height, width = image_HW3.shape[:2]
    scale = min(_TILE_WIDTH / width, _MOST_TILE_HEIGHT / height)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    image_HW3 = cv2.resize(
        image_HW3, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    )
    image_HW3 = _verdicts(image_HW3, entry, class_names, scale)
    room = max(0, _TILE_WIDTH - size[0])  # beside a narrow one, to write below
    white = (255, 255, 255)
    image_HW3 = cv2.copyMakeBorder(image_HW3, 0, 0, 0, room, cv2.BORDER_CONSTANT, value=white)
    counts = ", ".join(f"{what} {entry[what]}" for what in ("objects", "found", "missed", "wrong"))
    if entry["wrong"] > _MOST_WRONG:
        counts += f" ({_MOST_WRONG} drawn)"
    named = caption(image_HW3, counts)
    return caption(named, readable(Path(str(entry["file"])).name, 0))


def _verdicts(
    image_HW3: np.ndarray, entry: Mapping[str, Any], class_names: Sequence[str], scale: float
) -> np.ndarray:
    """A picture with what an entry lists: `true` and `predicted`, see ppdist.metrics.analysis."""
    boxes: list[Sequence[float]] = []
    texts: list[str] = []
    colours: list[Colour] = []

    def add(box_4: Sequence[float], colour: Colour, label: int, score: float | None) -> None:
        name = readable(str(class_names[label]), label)
        boxes.append(box_4)
        texts.append(name if score is None else f"{name} {score:.2f}")
        colours.append(colour)

    for label, *box_4, found in entry.get("true") or ():
        add(box_4, _FOUND if found else _MISSED, label, None)
    # The surest come first; an untrained model has hundreds, which would hide the image.
    wrong = [each for each in entry.get("predicted") or () if each[-1] != "correct"]
    for label, score, *box_4, _ in wrong[:_MOST_WRONG]:
        add(box_4, _WRONG, label, score)
    return draw_labelled(image_HW3, scale * np.array(boxes).reshape(-1, 4), texts, colours)


def _read_within(file: str, folders: Sequence[Path]) -> np.ndarray | None:
    """Reads the first readable candidate that lies in one of the folders.

    Links inside the folders are followed.
    """
    allowed = [Path(os.path.abspath(folder)) for folder in folders]
    for folder in (Path(), *folders):
        path = Path(os.path.abspath(folder / file))  # without `..`
        try:
            if any(path.is_relative_to(each) for each in allowed):
                return read_image(path)
        except (DataError, OSError, ValueError):  # a name with a zero in it is a ValueError
            continue
    return None


# The course of a run.

# Panels of scores that are read together; those that the run has are drawn.
_SCORES = {
    "mean average precision": ("mAP", "mAP50", "mAP75"),
    "mAP by size of the objects": ("mAP_small", "mAP_medium", "mAP_large"),
    "average recall": ("AR1", "AR10", "AR100"),
    "at the confidence of the best F1": ("precision", "recall", "f1"),
    "accuracy": ("top1", "top5"),
}
_RULING = ("mAP", "top1")  # what a run is judged by, if its configuration says nothing else
_SPREAD = 20  # times as much: a linear axis would show the beginning of a curve and a flat rest
_LOW = 0.3  # a best score below it would lie at the bottom of an axis that ends at 1
_FEW = 60  # records that are drawn as they are; of more, their running mean, too
_MOST_RANKS = 64  # whose numbers stand below their bars


@dataclass(frozen=True)
class History:
    """What metrics.jsonl says, as far as it is drawn."""

    steps: Sequence[Record]
    evaluations: Sequence[Record]
    ranks: list[Record]  # such as `_rank_seconds` understands
    derived: Mapping[str, Any]  # what the run made of its configuration
    metric: str  # what its best evaluation is the best in; "" without evaluations

    @classmethod
    def of(cls, found: MetricRecords, metric: str = "") -> "History":
        """Args: metric: `evaluate.metric`; one that no evaluation has: the usual one."""
        have = {name for each in found.evaluations for name in each}
        return cls(
            steps=found.steps,
            evaluations=found.evaluations,
            ranks=[each for each in found.ranks if _rank_seconds(each) is not None],
            derived=found.starts[-1]["derived"] if found.starts else {},
            metric=next((name for name in (metric, *_RULING) if name in have), ""),
        )

    def axis(self, records: Sequence[Record]) -> np.ndarray:
        """Epochs [R] of the records; their steps if no epoch is known."""
        step_R = column(records, "step")
        pairs = np.array([[0.0, 0.0], *self._places()])
        if len(pairs) == 1:
            return step_R
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        return np.interp(step_R, pairs[:, 0], pairs[:, 1])

    @property
    def unit(self) -> str:
        return "epoch" if self._places() else "step"

    def _places(self) -> list[list[float]]:
        known = (*self.steps, *self.evaluations)
        pairs = [[_number(each.get("step")), _number(each.get("epoch"))] for each in known]
        return [pair for pair in pairs if np.isfinite(pair).all()]


def column(records: Sequence[Record], name: str) -> np.ndarray:
    """float64 [R], NaN where a record has no such number."""
    return np.array([_number(each.get(name)) for each in records], np.float64)


def results(history: History, title: str) -> Figure | None:
    """Each loss in training and validation, then scores."""
    losses = _losses(history.steps)
    scores = {
        what: [name for name in names if np.isfinite(_evaluation_scores(history, name)).any()]
        for what, names in _SCORES.items()
    }
    scores = {what: names for what, names in scores.items() if names}
    count = len(losses) + len(scores)
    if not count:
        return None
    rows = -(-count // _ACROSS)
    figure = Figure(figsize=(4 * min(count, _ACROSS), 3.1 * rows + 0.4), layout="constrained")
    panels = list(np.ravel(figure.subplots(rows, min(count, _ACROSS), squeeze=False)))
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes, name in zip(panels, losses):
        _draw_loss(axes, history, name)
    for axes, (what, names) in zip(panels[len(losses) :], scores.items()):
        _draw_score(axes, history, names)
        axes.set_title(what)
    for axes in panels[:count]:
        axes.set_xlabel(history.unit)
        axes.grid(alpha=0.25)
    as_written(figure.suptitle(title))
    return figure


def rate(history: History, title: str) -> Figure | None:
    """Learning rate with warm-up, gradient norm, and momentum if recorded."""
    names = {"lr": "learning rate", "momentum": "momentum", "gradient_norm": "norm of the gradient"}
    names = {
        name: said for name, said in names.items() if np.isfinite(column(history.steps, name)).any()
    }
    if "lr" not in names:
        return None
    figure = Figure(figsize=(8, 1 + 3 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    at_R, step_R = history.axis(history.steps), column(history.steps, "step")
    for axes, (name, said) in zip(panels, names.items()):
        if name == "gradient_norm":
            _curve(axes, at_R, column(history.steps, name), "")
        else:
            axes.plot(at_R, column(history.steps, name), color=COLOURS[0])
        _scale(axes, [column(history.steps, name)])
        axes.set_title(said)
        axes.grid(alpha=0.25)
    warm = _fact(history, "warmup_steps")
    if warm > 0 and step_R[-1] > 0:
        panels[0].set_title(f"learning rate; warm-up: {warm:g} steps (shaded)")
        end = min(warm / step_R[-1], 1) * at_R[-1]
        panels[0].axvspan(0, end, color=COLOURS[1], alpha=0.2, linewidth=0)
    panels[-1].set_xlabel(history.unit)
    as_written(figure.suptitle(title))
    return figure


def speed(history: History, title: str) -> Figure | None:
    """Images per second and the parts of the step time.

    Plots both over the run and by rank.
    """
    if not np.isfinite(column(history.steps, "images_per_second")).any():
        return None
    count = 2 + bool(history.ranks)
    figure = Figure(figsize=(5.3 * count, 4.2), layout="constrained")
    panels = figure.subplots(1, count)
    at_R = history.axis(history.steps)
    images_R = column(history.steps, "images_per_second")
    _curve(panels[0], at_R, images_R, "")
    middle = np.nanmedian(images_R)
    panels[0].axhline(middle, color="0.4", linewidth=0.8, linestyle="--")
    panels[0].text(
        0.98, 0.03, f"median {middle:.3g}", transform=panels[0].transAxes, ha="right", color="0.3"
    )
    panels[0].set_title("images per second, all ranks")
    names = {"step_seconds": "whole step", "data_seconds": "waiting for images"}
    for colour, (name, label) in zip(COLOURS, names.items()):
        _curve(panels[1], at_R, column(history.steps, name), f"{label}, rank 0", colour)
    panels[1].set_title("step time, s")
    if history.ranks:
        _compute_seconds(panels[1], history)
        _ranks(panels[2], history)
    legend(panels[1])
    for axes in panels[:2]:
        axes.set_xlabel(history.unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    as_written(figure.suptitle(title))
    return figure


# Panels that compare runs: what they show, and whether evaluations know it, else steps.
_COMPARED = {
    "loss": ("training loss", False),
    "val_loss": ("validation loss", True),
    "mAP": ("mAP", True),
    "mAP50": ("mAP50", True),
    "f1": ("f1", True),
    "top1": ("top1", True),
    "lr": ("learning rate", False),
    "gradient_norm": ("norm of the gradient", False),
    "images_per_second": ("images per second", False),
}


def compared(groups: Mapping[str, Sequence[History]]) -> Figure | None:
    """Losses, scores, rate and speed of several runs over one another.

    Args: groups: name -> its runs, which share a look.
    """
    runs = [run for group in groups.values() for run in group]
    metrics = dict.fromkeys(run.metric for run in runs if run.metric)
    panels = {**_COMPARED, **{name: (name, True) for name in metrics if name not in _COMPARED}}
    unit = "epoch" if all(run.unit == "epoch" for run in runs) else "step"
    looks = cycle([(colour, dash) for dash in DASHES for colour in COLOURS])
    drawn: dict[str, list[tuple[np.ndarray, np.ndarray, dict[str, str]]]] = {}
    for (name, group), (colour, dash) in zip(groups.items(), looks):
        for run in group:
            for key, (_, evaluated) in panels.items():
                records = run.evaluations if evaluated else run.steps
                value_R = _evaluation_scores(run, key) if evaluated else column(records, key)
                if np.isfinite(value_R).any():
                    at_R = run.axis(records) if unit == "epoch" else column(records, "step")
                    look = {"color": colour, "linestyle": dash, "label": name}
                    drawn.setdefault(key, []).append((at_R, value_R, look))
    if not drawn:
        return None
    across = min(len(drawn), 3)
    rows = -(-len(drawn) // across)
    figure = Figure(figsize=(5 * across, 3.3 * rows + 0.5), layout="constrained")
    shown = np.ravel(figure.subplots(rows, across, squeeze=False))
    handles: dict[str, Any] = {}
    for axes, key in zip(shown, [key for key in panels if key in drawn]):
        for at_R, value_R, look in drawn[key]:
            if len(value_R) > _FEW:
                value_R = _smooth(value_R, len(value_R) // _FEW + 2)
            (handles[look["label"]],) = axes.plot(at_R, value_R, alpha=0.8, **look)
        if not panels[key][1] or key.startswith("val_"):
            _scale(axes, [value_R for _, value_R, _ in drawn[key]])
        axes.set(title=panels[key][0], xlabel=unit)
        axes.grid(alpha=0.25)
    for axes in shown[len(drawn) :]:
        axes.set_visible(False)
    names = [drawable(name, number) for number, name in enumerate(handles)]
    columns = min(len(names), 2 * across)
    found = figure.legend([*handles.values()], names, loc="outside upper left", ncols=columns)
    as_written(*found.get_texts())
    return figure


def _compute_seconds(axes: Axes, history: History) -> None:
    """Band between fastest and slowest rank, without the time spent waiting."""
    records = _of_most_ranks(history.ranks)
    own_RW = np.stack([_rank_seconds(each)[1] for each in records])  # type: ignore[index]
    axes.fill_between(
        history.axis(records),
        own_RW.min(1),
        own_RW.max(1),
        color=COLOURS[2],
        alpha=0.35,
        linewidth=1,
        label="compute seconds, fastest to slowest rank",
    )


def _ranks(axes: Axes, history: History) -> None:
    """A bar for each rank, of medians over the run.

    Segments from below: data, computing, waiting.
    """
    records = _of_most_ranks(history.ranks)
    step_W, own_W, data_W = np.median([_rank_seconds(each) for each in records], axis=0)
    ranks_W = np.arange(len(step_W))
    computing_W = np.maximum(own_W - data_W, 0)
    waiting_W = np.maximum(step_W - own_W, 0)
    parts = {
        "waiting for images": (data_W, COLOURS[1]),
        "computing": (computing_W, COLOURS[2]),
        "waiting for other ranks": (waiting_W, COLOURS[6]),
    }
    below_W = np.zeros(len(step_W))
    for label, (part_W, colour) in parts.items():
        axes.bar(ranks_W, part_W, 0.85, bottom=below_W, color=colour, label=label)
        below_W += part_W
    axes.set(title="step time by rank, s", xlabel="rank", xlim=(-0.6, len(step_W) - 0.4))
    axes.set_ylim(0, 1.35 * max(below_W.max(), 1e-9))  # room for the legend
    if len(step_W) <= _MOST_RANKS:
        axes.set_xticks(ranks_W[:: -(-len(step_W) // 16)])
    legend(axes, loc="upper left")


def _losses(steps: Sequence[Record]) -> list[str]:
    """Names of the losses: the whole one, then its parts."""
    names = dict.fromkeys(name for each in steps for name in each)
    parts = [name for name in names if name.startswith("loss_")]
    return [name for name in ("loss", *parts) if np.isfinite(column(steps, name)).any()]


def _draw_loss(axes: Axes, history: History, name: str) -> None:
    trained_R = column(history.steps, name)
    measured_R = _evaluation_scores(history, f"val_{name}")
    _curve(axes, history.axis(history.steps), trained_R, "training")
    if np.isfinite(measured_R).any():
        axes.plot(
            history.axis(history.evaluations),
            measured_R,
            color=COLOURS[3],
            marker=MARKERS[1],
            markersize=3.5,
            label="validation",
        )
    _scale(axes, [trained_R, measured_R])
    axes.set_title(name)
    legend(axes, fontsize=8)


def _draw_score(axes: Axes, history: History, names: Sequence[str]) -> None:
    """Draws score curves in [0, 1].

    The panel of the main scores marks the best evaluation.
    """
    at_R, most = history.axis(history.evaluations), 0.0
    for colour, marker, name in zip(COLOURS, MARKERS, names):
        value_R = _evaluation_scores(history, name)
        most = max(most, np.nanmax(value_R))
        axes.plot(at_R, value_R, color=colour, marker=marker, markersize=3.5, label=name)
    judged_R = _evaluation_scores(history, history.metric)
    if names[0] in _RULING and np.isfinite(judged_R).any():
        place = int(np.nanargmax(judged_R))
        on = history.metric if history.metric in names else names[0]  # fitness has no curve
        label = f"best {history.metric}: {judged_R[place]:.3f}"
        best = at_R[place], _evaluation_scores(history, on)[place]
        axes.plot(*best, "o", markersize=10, markerfacecolor="none", color="black", label=label)
    axes.set_ylim(0, 1 if most > _LOW or not most else 1.2 * most)
    legend(axes, fontsize=8)


def _evaluation_scores(history: History, name: str) -> np.ndarray:
    """The metric [R] of the evaluations; COCO's -1 (undefined) becomes NaN."""
    value_R = column(history.evaluations, name)
    return value_R if name.startswith("val_") else np.where(value_R < 0, np.nan, value_R)


def _curve(
    axes: Axes, at_R: np.ndarray, value_R: np.ndarray, label: str, colour: str = COLOURS[0]
) -> None:
    """Draws a curve; a long one is faint below its running mean."""
    if len(value_R) <= _FEW:
        axes.plot(at_R, value_R, color=colour, marker=".", markersize=3, label=label)
        return
    axes.plot(at_R, value_R, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(at_R, _smooth(value_R, len(value_R) // _FEW + 2), color=colour, label=label)


def _smooth(value_R: np.ndarray, reach: int) -> np.ndarray:
    """Moving average over `reach` values on each side; ignores NaN."""
    window = np.ones(2 * reach + 1)
    known_R = np.isfinite(value_R)
    total_R = np.convolve(np.where(known_R, value_R, 0), window, "same")
    count_R = np.convolve(known_R.astype(np.float64), window, "same")
    return np.where(count_R > 0, total_R / np.maximum(count_R, 1), np.nan)


def _scale(axes: Axes, values: Sequence[np.ndarray]) -> None:
    """A logarithmic axis where values lie far apart, else one from 0."""
    known = np.concatenate(values)
    known = known[np.isfinite(known)]
    if not len(known):
        empty(axes, "nothing was finite")
    elif known.min() > 0 and known.max() > _SPREAD * np.median(known):
        axes.set_yscale("log")
    elif known.min() >= 0:
        axes.set_ylim(0, 1.05 * known.max() or 1)


def _fact(history: History, key: str) -> float:
    fact = history.derived.get(key)
    return _number(fact.get("value")) if isinstance(fact, Mapping) else np.nan


def _rank_seconds(record: Record) -> np.ndarray | None:
    """Times [3, W] of the ranks in s; None: another record.

    Step time, own time, time for data.
    """
    names = ("rank_step_seconds", "rank_own_seconds", "rank_data_seconds")
    found = [record.get(name) for name in names]
    if not all(isinstance(each, list) and each for each in found):
        return None
    if len({len(each) for each in found if each}) != 1:
        return None
    seconds_3W = np.array([[_number(value) for value in each or ()] for each in found])
    return seconds_3W if np.isfinite(seconds_3W).all() else None


def _of_most_ranks(records: Sequence[Record]) -> list[Record]:
    """Records with as many ranks as the last; resuming may change it."""
    count = len(records[-1]["rank_step_seconds"])
    return [each for each in records if len(each["rank_step_seconds"]) == count]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else np.nan


# Confusion of classes.

_BESIDE = 20  # classes; of more, the two matrices stand one below the other
_MOST_NAMED_ROWS = 100  # classes; of more, neither names nor numbers could be read
_MOST_DRAWN = 2000  # classes; about as many as the picture has pixels
_ROW_NAME_LETTERS = 18  # letters
_LETTERS_ACROSS = 50  # of names that lie below a matrix; if there are more, they stand
_BACKGROUND = "background"


def confusion(evaluation: Mapping[str, Any]) -> Figure | None:
    """Confusion matrices in percent of true classes and in counts; None: absent."""
    found = evaluation.get("confusion")
    counts = _confusion_counts(found) if found else None
    if found is None or counts is None:
        return None
    names = [
        drawable(name, at, _ROW_NAME_LETTERS) for at, name in enumerate(evaluation["class_names"])
    ]
    if len(counts) == len(names) + 1:  # of a classifier there is no background
        names.append(_BACKGROUND)
    size = float(np.clip(0.205 * len(names), 3.2, 18)) + 2.4
    beside = len(names) <= _BESIDE
    figure = Figure(
        figsize=(2 * size, size) if beside else (size + 0.6, 2 * size), layout="constrained"
    )
    shares_axes, counts_axes = figure.subplots(*((1, 2) if beside else (2, 1)))
    known = np.maximum(found.get("true_counts") or counts.sum(1), 1)
    percent = 100 * counts / known[:, None]
    _matrix(shares_axes, percent, names, Normalize(0, 100))
    _matrix(counts_axes, counts, names, PowerNorm(0.4, 0, max(1.0, counts.max())))
    shares_axes.set_title("row-normalised, %")
    counts_axes.set_title("detections" if _BACKGROUND in names[-1:] else "images")
    as_written(figure.suptitle(_confusion_title(found)))
    return figure


def _confusion_counts(found: Mapping[str, Any]) -> np.ndarray | None:
    """float64 [size, size]; None: too large to be seen."""
    if "counts" in found:
        return np.array(found["counts"], np.float64)
    size = len(found["true_counts"])
    if size > _MOST_DRAWN:
        return None
    counts = np.zeros((size, size))
    for row, column, count in found["cells"]:
        counts[row, column] = count
    return counts


def _confusion_title(found: Mapping[str, Any]) -> str:
    iou, confidence = found.get("iou"), found.get("confidence")
    if iou is None or confidence is None:
        return "confusion"
    return f"confusion of boxes that meet with IoU {iou:g} or more, confidence {confidence:.3g}"


def _matrix(axes: Axes, value: np.ndarray, names: Sequence[str], norm: Normalize) -> None:
    """Fields below a half stay white, in others stands a number."""
    axes.imshow(np.ma.masked_less(value, 0.5), cmap=MAP, norm=norm, interpolation="nearest")
    axes.set(xlabel="predicted", ylabel="true")
    if len(names) > _MOST_NAMED_ROWS + 1:
        return
    letters = 10.0 if len(names) <= 12 else 7.5 if len(names) <= 40 else 6.5
    places = range(len(names))
    upright = len(names) * max(map(len, names)) > _LETTERS_ACROSS
    axes.set_xticks(places, names, rotation=90 if upright else 0, fontsize=letters)
    axes.set_yticks(places, names, fontsize=letters)
    as_written(*axes.get_xticklabels(), *axes.get_yticklabels())
    digits = 9.0 if len(names) <= 12 else 6.5 if len(names) <= 40 else 5.0
    for row, column in zip(*np.nonzero(value >= 0.5)):
        dark = norm(value[row, column]) > 0.5
        axes.text(
            column, row, _short(value[row, column]), ha="center", va="center", fontsize=digits,
            color="white" if dark else "black",
        )  # fmt: skip


def _short(value: float) -> str:
    """Three characters at most: 7, 42, 650, 3k, 20k."""
    if value < 999.5:
        return f"{max(1.0, value):.0f}"
    return f"{value / 1e3:.0f}k" if value < 999.5e3 else f"{value / 1e6:.0f}M"


# Scores, calibration, error types.

_MOST_SCORE_BARS = 100
# What is drawn of a class: a bar, and where there is one a point.
_DETECTED, _CLASSIFIED = ("AP", "AP50"), ("top1", "top5")


def per_class_scores(evaluation: Mapping[str, Any]) -> Figure | None:
    """A bar for each class that has objects, the best above."""
    bar, point = _DETECTED if any("AP" in row for row in evaluation["per_class"]) else _CLASSIFIED
    rows = [
        (drawable(str(row["name"]), label), row)
        for label, row in enumerate(evaluation["per_class"])
        if row.get(bar) is not None
    ]
    if not rows:
        return None
    rows.sort(key=lambda named: -named[1][bar])
    score_C = np.array([row[bar] for _, row in rows])
    if len(rows) > _MOST_SCORE_BARS:
        return _score_points(score_C, bar)
    figure = Figure(figsize=(8.5, 1.4 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(rows))
    axes.barh(places, score_C, 0.75, color=COLOURS[0], label=bar)
    point_C = np.array([row.get(point) for _, row in rows], np.float64)  # None: NaN
    axes.plot(point_C, places, "D", color=COLOURS[1], markersize=4.5, label=point)
    for place, (_, row) in enumerate(rows):
        count = row.get("objects", row.get("images"))
        text = f"{row[bar]:.3f}" + (f"  of {count}" if count is not None else "")
        axes.text(1.01, place, text, va="center", fontsize=8)
    axes.set_yticks(places, [name for name, _ in rows], fontsize=8)
    as_written(*axes.get_yticklabels())
    axes.axvline(score_C.mean(), color="0.3", linewidth=0.8, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
    axes.set_title(f"{bar} of each class; mean {score_C.mean():.3f}", pad=24)
    legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def _score_points(score_C: np.ndarray, name: str) -> Figure:
    """Where there are too many classes for bars."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(score_C, ".", color=COLOURS[0], markersize=3)
    axes.axhline(score_C.mean(), color="0.3", linewidth=0.8, linestyle="--")
    axes.set(xlabel="classes, sorted by AP", ylabel=name, ylim=(0, 1))
    axes.set_title(f"{name} of each class; mean {score_C.mean():.3f}")
    axes.grid(alpha=0.25)
    return figure


def calibration(evaluation: Mapping[str, Any]) -> Figure | None:
    """How often detections of a confidence are right, and their number."""
    found = evaluation.get("calibration")
    if not found or not sum(found["count"]):
        return None
    edges = np.array(found["edges"], np.float64)
    precision_B = np.array(found["precision"], np.float64)  # null: NaN
    confidence_B = np.array(found["confidence"], np.float64)
    count_B = np.array(found["count"], np.float64)
    figure = Figure(figsize=(6, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    widths_B = np.diff(edges)
    above.bar(
        edges[:-1], precision_B, 0.96 * widths_B, align="edge", color=COLOURS[5], label="precision"
    )
    above.plot([0, 1], [0, 1], "--", color="0.4", linewidth=1, label="perfect calibration")
    above.plot(confidence_B, precision_B, "o-", color=COLOURS[0], markersize=4, linewidth=1)
    above.set(ylabel="precision", xlim=(0, 1), ylim=(0, 1))
    error = found.get("expected_error")
    least = found.get("expected_error_from")
    said = "" if error is None else f"; expected calibration error {error:.3f}"
    said += "" if error is None or least is None else f" from confidence {least:.2f} on"
    above.set_title(f"calibration{said}")
    above.legend(loc="upper left")
    below.bar(edges[:-1], count_B, 0.96 * widths_B, align="edge", color="0.5")
    below.set(xlabel="confidence", ylabel="detections", yscale="log", ylim=(0.7, None))
    for axes in (above, below):
        axes.grid(alpha=0.25)
    return figure


def errors(evaluation: Mapping[str, Any]) -> Figure | None:
    """How many of each kind, and what AP50 would gain without them."""
    found = evaluation.get("errors")
    if not found:
        return None
    gains = {kind: gain for kind, gain in found["AP50_gain"].items() if gain is not None}
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, values, text in zip(
        figure.subplots(1, 2), (found["counts"], gains), ("{:.0f}", "+{:.3f}")
    ):
        colours = [COLOURS[2] if kind == "correct" else COLOURS[3] for kind in values]
        bars = axes.barh([*values], list(values.values()), 0.7, color=colours)
        axes.bar_label(bars, [text.format(value) for value in values.values()], padding=3)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(1e-9, *values.values()) if values else 1)
        axes.grid(axis="x", alpha=0.25)
    left, right = figure.axes
    left.set(title="detections and objects by error type", xlabel="number")
    right.set(title="AP50 gain without each error type", xlabel="AP50")
    return figure


# What objects the sets hold.

_MOST_COUNT_BARS = 80
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
    shown = len(class_names) <= _MOST_COUNT_BARS
    titles = {0: "objects of each class", 1: "images that show it"}
    if not boxes:
        titles = {1: "images of each class"}
    height = 1.5 + (0.32 * len(class_names) if shown else 5)
    figure = Figure(figsize=(1 + 6 * len(titles), max(3.0, height)), layout="constrained")
    panels = figure.subplots(1, len(titles), sharey=shown, squeeze=False)[0]
    for axes, (what, title) in zip(panels, titles.items()):
        series = {name: count[what][order_C] for name, count in counts.items()}
        (_count_bars if shown else _count_points)(axes, series)
        axes.set_title(title)
    if shown:
        names = [drawable(class_names[label], label) for label in order_C]
        panels[0].set_yticks(range(len(order_C)), names)
        panels[0].set_ylim(len(order_C) - 0.5, -0.5)
        as_written(*panels[0].get_yticklabels())
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _count_bars(axes: Axes, series: Mapping[str, np.ndarray]) -> None:
    thick = 0.8 / len(series)
    for position, (name, count_C) in enumerate(series.items()):
        offset = (position - (len(series) - 1) / 2) * thick
        bars = axes.barh(
            np.arange(len(count_C)) + offset, count_C, thick, color=COLOURS[position], label=name
        )
        axes.bar_label(bars, [f"{count}" for count in count_C], padding=2, fontsize=7)
    _count_axis(axes.xaxis, series)


def _count_points(axes: Axes, series: Mapping[str, np.ndarray]) -> None:
    """A point for each class, where there are too many for bars."""
    for colour, (name, count_C) in zip(COLOURS, series.items()):
        axes.plot(count_C, ".", color=colour, label=name, markersize=3)
    _count_axis(axes.yaxis, series)
    axes.set_xlabel("classes, sorted by frequency")


def _count_axis(axis: XAxis | YAxis, series: Mapping[str, np.ndarray]) -> None:
    """Scales a count axis from 0, logarithmic if values lie far apart.

    An eighth stays free for annotations.
    """
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
    _size_histograms(
        sides,
        {name: np.sqrt(o.input_M2[alone[name]].prod(1)) for name, o in splits.items()},
        "side in the input, pixels",
        "side = square root of the area",
    )
    _size_histograms(
        shapes,
        {name: o.shapes_M[alone[name]] for name, o in splits.items()},
        "width / height in the original",
        "shapes",
    )
    shapes.axvline(1, color="0.5", linewidth=0.8, zorder=0)
    return figure


def _size_histograms(axes: Axes, series: Mapping[str, np.ndarray], xlabel: str, title: str) -> None:
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
    axes.set(xlabel=xlabel, ylabel="boxes, %", title=title)
    axes.set_ylim(bottom=0)
    _powers_of_two(axes.xaxis, bins)
    axes.legend()


def _powers_of_two(axis: XAxis | YAxis, bins: np.ndarray) -> None:
    """A base-2 logarithmic axis between powers of two, as for strides."""
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
    """Where the box centres lie."""
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
        axes.set(title=f"box centres, {name}", xlabel="x / width", ylabel="y / height")
        figure.colorbar(image, ax=axes, label="boxes", shrink=0.8)
    return figure


def _images(splits: Mapping[str, Objects]) -> Figure:
    """How many objects images have, and how large they are."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    objects_axes, sizes_axes = figure.subplots(1, 2)
    counts = {name: objects.per_image_N for name, objects in splits.items()}
    most = int(max(count_N.max(initial=1) for count_N in counts.values()))
    step = -(-(most + 1) // _MOST_COUNT_BARS)
    bins = (np.arange(0, most + 1 + step, step) - 0.5).tolist()
    for colour, (name, count_N) in zip(COLOURS, counts.items()):
        weights = np.full(len(count_N), 100 / max(1, len(count_N)))
        objects_axes.hist(
            count_N, bins, weights=weights, histtype="step", color=colour, linewidth=1.6, label=name
        )
    objects_axes.set(xlabel="objects per image", ylabel="images, %", title="objects per image")
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


# Studies.

_MOST_NAMED_SETTINGS = 12  # settings; of more, as in a search, each is a thin line without a name
_STUDY_POINTS = 50


def curves(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """The metric over training by setting: mean and range of its seeds.

    Runs of unequal length are drawn over the fraction that is done, because studies of equal time
    give fast settings more epochs.
    """
    settings: dict[str, list[np.ndarray]] = {}
    for row in rows:
        if row["state"] != "fail" and len(row["curve"]) > 1:
            settings.setdefault(row["setting"], []).append(np.array(row["curve"], np.float64))
    if not settings:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    named = len(settings) <= _MOST_NAMED_SETTINGS
    lengths = {round(curve[-1, 0], 3) for found in settings.values() for curve in found}
    in_shares = len(lengths) > 1 and named
    styles = cycle([(colour, dash) for dash in DASHES for colour in COLOURS])
    for (name, found), (colour, dash) in zip(settings.items(), styles):
        if not named:
            for curve in found:
                axes.plot(curve[:, 0], curve[:, 1], color=COLOURS[0], alpha=0.4, linewidth=0.8)
            continue
        x, values = _over_run(found, in_shares)
        axes.plot(x, values.mean(0), dash, color=colour, label=f"{name} ({len(found)})")
        if len(found) > 1:
            axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15)
    axes.set_xlabel("share of the run" if in_shares else "epoch")
    axes.set_ylabel(str(rows[0]["metric"]))
    axes.grid(alpha=0.25)
    legend(axes, fontsize="small")
    as_written(axes.set_title(str(rows[0]["study"])))
    return figure


def _over_run(found: Sequence[np.ndarray], in_shares: bool) -> tuple[np.ndarray, np.ndarray]:
    """Resamples curves on the common range between first and last evaluation.

    Returns: places on the axis, and the values of each curve there.
    """
    placed = [curve[:, 0] / (curve[-1, 0] if in_shares else 1.0) for curve in found]
    first, last = max(each[0] for each in placed), min(each[-1] for each in placed)
    x = np.linspace(min(first, last), last, _STUDY_POINTS)
    return x, np.stack([np.interp(x, at, curve[:, 1]) for at, curve in zip(placed, found)])


def importance(importances: Mapping[str, float]) -> Figure | None:
    """How much each key decides, the most important above."""
    if not importances:
        return None
    ordered = sorted(importances.items(), key=lambda item: item[1])
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(ordered)), [value for _, value in ordered], color=COLOURS[0])
    axes.set_yticks(range(len(ordered)), [key for key, _ in ordered])
    as_written(*axes.get_yticklabels())
    axes.set_xlabel("importance for the best tenth of the complete trials (PED-ANOVA)")
    axes.grid(axis="x", alpha=0.25)
    return figure
