"""Curves as geometry for inline SVG.

x, y of the data  ->  pixels of a WIDTH x HEIGHT picture, which the page scales
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ppdist.common.process import printable

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 38  # room for the numbers of the axes
_MOST_POINTS = 400  # of a curve: more than it has pixels
_MOST_MARKED = 120  # so few in a picture are shown as points, too
COLOURS = 8  # of page.css, as ppdist/viz has them
INK = 8  # the colour of text: for means and references
_TINY = 1e-300  # below it numbers lose their digits
_SPIKE = 4  # times the range of nearly all values: what lies beyond is cut off

Point = tuple[float, float | None]  # x, y; None leaves a gap


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        colour: of page.css.
        dashed: as a second mark beside the colour.
        group: what the legend calls it, together with others of the same; "": its name.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    dashed: bool = False
    group: str = ""


@dataclass(frozen=True)
class Line:
    """A series as it is drawn: an SVG path, marks, and the values for reading off."""

    name: str
    group: str
    style: str
    path: str
    marks: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Everything that the template draws; ticks are (pixel, text)."""

    title: str
    x_label: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    data: dict[str, Any]
    note: str = ""

    @property
    def legend(self) -> dict[str, str]:
        """Group -> style, each once."""
        return {line.group: line.style for line in self.lines}


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "epoch",
    x_limits: tuple[float, float] | None = None,
    y_limits: tuple[float, float] | None = None,
    from_zero: bool = False,
    whole: bool = False,
    note: str = "",
) -> Chart | None:
    """Lays out curves; None where there is nothing to draw.

    Args:
        x_limits, y_limits: of the axes, in units of the data; None: from the data.
        from_zero: the y axis begins at 0.
        whole: no value is cut off, however far it lies from the others.
    """
    thin = [replace(each, points=thinned(each.points)) for each in series]
    shown = [each for each in thin if any(y is not None for _, y in each.points)]
    if not shown:
        return None
    x_low, x_high = x_limits or _span([x for each in shown for x, _ in each.points])
    cut = 0
    if y_limits is None:
        heights = [[y for _, y in each.points if y is not None] for each in shown]
        y_limits, cut = _limits(heights, from_zero, whole)
    y_low, y_high = y_limits
    if cut:
        values = "value lies" if cut == 1 else "values lie"
        note = f"{note}; " * bool(note) + f"{cut} {values} above the chart"

    marked = sum(len(each.points) for each in shown) <= _MOST_MARKED

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        up = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    return Chart(
        title=title,
        x_label=x_label,
        lines=[_line(each, at, marked) for each in shown],
        x_ticks=[(at(x, y_low)[0], text) for x, text in ticks(x_low, x_high)],
        y_ticks=[(at(x_low, y)[1], text) for y, text in ticks(y_low, y_high)],
        data={
            "x": x_label,
            "limits": [x_low, x_high],
            "names": [printable(each.name) for each in shown],
            "series": [[[_short(x), _short(y)] for x, y in each.points] for each in shown],
        },
        note=note,
    )


def _line(series: Series, at: Any, marked: bool) -> Line:
    style = f"c{series.colour}" + " dashed" * series.dashed
    path, marks, begun = [], [], False
    for x, y in series.points:
        if y is None:
            begun = False
            continue
        marks.append(at(x, y))
        x, y = marks[-1]
        path.append(f"L{x:g} {y:g}" if begun else f"M{x:g} {y:g}h0")  # h0: a point by itself
        begun = True
    group = series.group or series.name
    return Line(series.name, group, style, "".join(path), marks if marked else [])


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS`: means of neighbours, and the very last as it is."""
    usable = [(x, y) for x, y in points if math.isfinite(x) and (y is None or math.isfinite(y))]
    if len(usable) <= _MOST_POINTS:
        return usable
    result: list[Point] = []
    bounds = [round(number * (len(usable) - 1) / _MOST_POINTS) for number in range(_MOST_POINTS)]
    for first, end in pairwise([*bounds, len(usable) - 1]):
        group = usable[first:end]
        measured = [y for _, y in group if y is not None]
        mean = sum(measured) / len(measured) if measured else None
        result.append((sum(x for x, _ in group) / len(group), mean))
    return [*result, usable[-1]]


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round values between two, at most six, and how to write them."""
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    values = [number * step for number in range(first, last + 1)]
    places = max(0, -math.floor(math.log10(step) + 1e-9) + (round(step / size, 1) == 2.5))
    most = max(abs(low), abs(high))
    if 1e5 <= most < 1e9 and step >= 1000:
        unit, letter = (1e6, "M") if most >= 1e6 else (1e3, "k")
        return [(value, f"{value / unit:g}{letter}" if value else "0") for value in values]
    if places <= 4 and most < 1e6:
        return [(value, f"{value:.{places}f}") for value in values]
    return [(value, _short_text(value)) for value in values]


def _short_text(value: float) -> str:
    """7.5e-4 for 0.00075: on a phone seven characters do not fit beside the axis."""
    digits, e, exponent = f"{value:.3g}".partition("e")
    if not e and 0 < abs(value) < 1e-3:
        digits, _, exponent = f"{value:.2e}".partition("e")
        digits = digits.rstrip("0").rstrip(".")
    return f"{digits}e{int(exponent)}" if exponent else digits


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > max(1e-12 * max(abs(low), abs(high)), _TINY):
        return low, high
    room = abs(low) / 2 if abs(low) > _TINY else 0.5
    return low - room, high + room


def _limits(
    curves: Sequence[Sequence[float]], from_zero: bool, whole: bool
) -> tuple[tuple[float, float], int]:
    """A y axis, and how many values lie beyond it: the first losses may be a hundred times the
    others, which would be a line on the floor."""
    ordered = [sorted(values) for values in curves]
    low, most = min(values[0] for values in ordered), max(values[-1] for values in ordered)
    low = 0.0 if from_zero and low >= 0 else low
    usual = max(values[math.floor(0.97 * (len(values) - 1))] for values in ordered)
    if not whole and usual > low and most - low > _SPIKE * (usual - low):
        near = low + _SPIKE * (usual - low)
        most = max(value for values in ordered for value in values if value <= near)
    low, high = _span([low, most])
    room = 0.05 * (high - low)
    limits = (low if from_zero and low == 0 else low - room, high + room)
    return limits, sum(value > limits[1] for values in curves for value in values)


def _short(value: float | None) -> float | None:
    """Five digits, which is more than a picture shows."""
    return None if value is None else float(f"{value:.5g}")
