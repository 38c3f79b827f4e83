"""Text on images; also in letters that OpenCV lacks, where the system has a font with them."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

_PLAIN = cv2.FONT_HERSHEY_SIMPLEX  # ASCII only
_PIXELS = 30  # height of another font at scale 1, which looks as large as OpenCV's
_NO_LETTER = "\uffff"  # a place that Unicode leaves empty: fonts show their sign for that
_FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
    "C:/Windows/Fonts",
)
# Two with the letters of Europe, then some with Chinese ones.
_FILES = (
    "DejaVuSans.ttf",
    "arial.ttf",
    "NotoSansCJK-Regular.ttc",
    "NotoSansCJKsc-Regular.otf",
    "NotoSansSC-Regular.otf",
    "wqy-microhei.ttc",
    "wqy-zenhei.ttc",
    "SourceHanSansSC-Regular.otf",
    "PingFang.ttc",
    "Hiragino Sans GB.ttc",
    "msyh.ttc",
    "simhei.ttf",
)


def readable(name: str, label: int) -> str:
    """A class's name, or `#label` where there is no font here with all its letters."""
    return name if name.isascii() or _font_of(name) else f"#{label}"


def text_size(text: str, scale: float) -> tuple[int, int, int]:
    """Width, height and what is below the baseline, in pixels, of a text that is `readable`."""
    if text.isascii():
        (width, height), below = cv2.getTextSize(text, _PLAIN, scale, 1)
        return width, height, below
    font = _sized(text, scale)
    above, below = font.getmetrics()
    return round(font.getlength(text)), above, below


def write_text(
    canvas_HW3: np.ndarray,
    text: str,
    origin: tuple[int, int],
    scale: float,
    ink: tuple[int, int, int],
) -> None:
    """Writes a `readable` text into a uint8 image.

    Args: origin: x and y of the left end of its baseline.
    """
    if text.isascii():
        cv2.putText(canvas_HW3, text, origin, _PLAIN, scale, ink, 1, cv2.LINE_AA)
        return
    width, above, below = text_size(text, scale)
    left, top = origin[0], origin[1] - above
    # Only the pixels that the text covers go to Pillow and back.
    field = canvas_HW3[max(0, top) : top + above + below, max(0, left) : left + width + 1]
    if not field.size:
        return
    picture = Image.fromarray(np.ascontiguousarray(field))
    place = min(0, left), min(0, top)
    ImageDraw.Draw(picture).text(place, text, font=_sized(text, scale), fill=ink)
    field[:] = np.asarray(picture)


def _sized(text: str, scale: float) -> ImageFont.FreeTypeFont:
    file = _font_of(text)
    assert file is not None, "the caller asked `readable` before"
    return _opened(file, max(12, round(_PIXELS * scale)))


@cache
def _opened(file: Path, pixels: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(file), pixels)


@cache
def _font_of(text: str) -> Path | None:
    """The first font that has all letters of a text."""
    return next((file for file in _fonts() if _has(file, text)), None)


def _has(file: Path, text: str) -> bool:
    try:
        font = _opened(file, 16)
        nothing = bytes(font.getmask(_NO_LETTER))
        return all(letter.isspace() or bytes(font.getmask(letter)) != nothing for letter in text)
    except OSError:  # no font after all
        return False


@cache
def _fonts() -> tuple[Path, ...]:
    """Those of `_FILES` that are installed, in that order."""
    found: dict[str, Path] = {}
    for file in _installed():
        found.setdefault(file.name, file)
    return tuple(found[name] for name in _FILES if name in found)


def _installed() -> Iterator[Path]:
    for folder in _FOLDERS:
        try:
            yield from sorted(Path(folder).expanduser().rglob("*.[to]t[fc]"))
        except (OSError, RuntimeError):  # not ours to read; a user without a home
            continue
