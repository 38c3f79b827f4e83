"""What all plots have in common: colours, letters, how they are written.

Figures are made and written by themselves; pyplot, with its state and its choice of a window
system, is never imported.
"""

from functools import cache
from pathlib import Path
from typing import Any

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from ppdist.files import writing

# Blue, orange, green, vermilion, purple, sky blue of Okabe & Ito 2008, as in drawing.py, and grey:
# those of them that can be seen on white.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f7f7f")
DASHES = ("-", "--", ":", "-.")  # where there are more lines than colours
MARKERS = "os^"
MAP = "Blues"  # one hue, so all eyes see the same; more is darker
_DOTS = 110  # per inch
_MOST_LETTERS = 40  # of a class's name
# Fonts with Chinese, Japanese and Korean letters, of Linux, macOS and Windows.
_EASTERN = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
)


def save(figure: Figure | None, path: Path) -> bool:
    """Writes a PNG file and returns True; there is nothing to write without a figure.

    Raises: UserError: the system refused.
    """
    if figure is None:
        return False
    with writing(path):
        figure.savefig(path, dpi=_DOTS)
    return True


@cache
def fonts() -> list[str]:
    """Families to take letters from, in this order: those of `_EASTERN` that are installed."""
    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in _EASTERN if name in installed)]


def drawable(name: str, label: int, most: int = _MOST_LETTERS) -> str:
    """A class's name, cut where it is long, or `#label` where no font here has its letters."""
    name = name if len(name) <= most else f"{name[: most - 3]}..."
    missing = set(map(ord, name))
    for family in fonts():
        font = font_manager.get_font(font_manager.findfont(family))
        missing -= set(font.get_charmap())
    if missing:
        return f"#{label}"
    return f" {name}" if name.startswith("_") else name  # legends leave out what begins so


def as_written(*texts: Text) -> None:
    """Class names as they are: no `$` begins mathematics, and any font may give a letter."""
    for text in texts:
        text.set_parse_math(False)
        text.set_fontfamily(fonts())


def legend(axes: Axes, **placing: Any) -> None:
    """A legend whose names are shown as they are; none where nothing has a name."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        as_written(*axes.legend(handles, names, **placing).get_texts())


def empty(axes: Axes, why: str) -> None:
    """Says in the middle of a panel why there is nothing in it."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="0.4")
