"""Curves as geometry."""

import math
import random
import re
from pathlib import Path

import pytest

from ppdist.report import charts
from ppdist.report.charts import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Series,
    chart,
    thinned,
    ticks,
)
from ppdist.report.content import _CLASS_COLOURS
from ppdist.viz import plots


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_few_round_different_and_inside(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.uniform(-1, 1) * 10 ** rng.randint(-6, 6)
    high = low + rng.uniform(0.01, 5) * 10 ** rng.randint(-3, 6)
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    room = 1e-6 * (high - low)
    assert all(low - room <= value <= high + room for value, _ in found)
    for value, text in found:
        said = float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1)
        assert math.isclose(said, value, rel_tol=0.006, abs_tol=0.02 * (high - low))


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-299, 1e299])
def test_values_of_any_size_make_a_chart(size: float) -> None:
    for values in ([size, 2 * size, 3 * size], [-size, size], [size]):
        found = chart("c", [Series("s", [*enumerate(values)])])
        assert found is not None and found.y_ticks


def test_ticks_say_what_their_values_are() -> None:
    assert [text for _, text in ticks(0, 1)] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert [text for _, text in ticks(0, 0.012)][:3] == ["0.0000", "0.0025", "0.0050"]
    assert [text for _, text in ticks(0, 0.0001)][:3] == ["0", "2e-5", "4e-5"]
    assert [text for _, text in ticks(0, 2_200_000)] == ["0", "0.5M", "1M", "1.5M", "2M"]
    assert [text for _, text in ticks(0, 150_000)] == ["0", "50k", "100k", "150k"]
    assert [text for _, text in ticks(0, 400)] == ["0", "100", "200", "300", "400"]


def test_long_curves_are_thinned_to_means() -> None:
    points = [(float(x), float(x % 2)) for x in range(10_001)]
    thin = thinned(points)
    assert len(thin) <= 401 and thin[-1] == points[-1]
    assert all(abs(y - 0.5) < 0.03 for _, y in thin[:-1] if y is not None)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)


def test_points_lie_where_the_axes_say() -> None:
    drawn = chart("a", [Series("s", [(0, 0.0), (5, None), (10, 1.0)])], y_limits=(0.0, 1.0))
    assert drawn is not None
    (line,) = drawn.lines
    assert line.marks == [(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, drawn.y_ticks[-1][0])]
    assert line.path.count("M") == 2  # the gap


def test_a_high_first_loss_flattens_no_curve() -> None:
    points = [(step, 1 / step) for step in range(1, 60)]
    drawn = chart("a", [Series("s", [(0, 500.0), *points])])
    assert drawn is not None and drawn.note == "1 value lies above the chart"
    assert float(drawn.y_ticks[-1][1]) <= 4


def test_scores_are_never_cut_off() -> None:
    scores = Series("mAP50", [(0, 0.02), (1, 0.03), (2, 0.45)])
    assert chart("a", [scores]).note  # type: ignore[union-attr]  # the rule for losses
    drawn = chart("a", [scores], whole=True)
    assert drawn is not None and not drawn.note and float(drawn.y_ticks[-1][1]) >= 0.4


def test_page_and_plots_have_the_same_colours() -> None:
    style = (Path(charts.__file__).parent / "templates" / "page.css").read_text()
    light = style[: style.index("}")]
    page = [re.search(rf"--c{number}: (#\w+);", light)[1] for number in range(COLOURS)]  # type: ignore[index]
    assert page[: len(plots.COLOURS)] == [*plots.COLOURS]
    assert tuple(page[number] for number in _CLASS_COLOURS) == plots.CLASS_COLOURS


@pytest.mark.parametrize(
    "points", [[], [(0, None)], [(math.nan, 1.0)], [(1, math.inf)], [(0, math.nan)]]
)
def test_nothing_to_draw_is_no_chart(points: list[tuple[float, float | None]]) -> None:
    assert chart("a", [Series("s", points)]) is None


@pytest.mark.parametrize("y", [0.0, 1.0, -3.0, 1e12, 1e-12, 1e299])
def test_a_single_point_and_a_constant_can_be_drawn(y: float) -> None:
    for points in ([(3.0, y)], [(float(x), y) for x in range(5)]):
        drawn = chart("a", [Series("s", points)], from_zero=True)
        assert drawn is not None and "nan" not in drawn.lines[0].path
