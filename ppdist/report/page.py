"""Writes the page: one HTML file that loads nothing else.

Jinja2 escapes everything that the templates print.  The page also forbids, by a content security
policy, any script but ours and any address: text in the name of a class or a file can be read, but
not run.
"""

import base64
import hashlib
import io
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from ppdist.common.eta import duration
from ppdist.common.files import write_text
from ppdist.common.process import printable
from ppdist.metrics.run import Run, read_run
from ppdist.report.content import changed_settings, format_value, show

_HERE = Path(__file__).parent
_MOST_PICTURE_BYTES = 1_500_000  # largest picture that is embedded unchanged
_MOST_FILE_BYTES = 100_000_000  # largest file that is opened at all
_MOST_PICTURE_PIXELS = 64_000_000
_LARGEST_SIDE = 1600
# Pictures of the engine and ppdist/viz: position in the page -> pattern in plots/ -> caption.
_PICTURES = {
    "train": {
        "train_batch_[0-9].jpg": "a training batch, as the network sees it",
        "train_batch_epoch_*.jpg": "a training batch since augmentation changed",
    },
    "val": {"val_batch_*.jpg": "validation images, truth beside prediction"},
    "worst": {"worst.jpg": "the worst images", "best.jpg": "the best images"},
    "curves": {"results.png": "losses and scores"},
    "scores": {"pr_curve.png": "precision over recall"},
    "confusion": {"confusion.png": "confusion of the classes"},
    "data": {"classes.png": "objects of each class"},
}
_MOST_PER_PATTERN = 3


@dataclass(frozen=True)
class Embedded:
    """A picture embedded in the page."""

    name: str
    what: str
    address: Markup  # data:image/...


def write_report(folder: Path, out: Path) -> list[str]:
    """Writes the page about one run.

    Returns: a line for each part that could not be read and is missing.
    Raises: UserError: the folder holds no run; the page cannot be written.
    """
    run = read_run(folder)
    if not run.is_evaluation:  # ppdist eval writes no other files
        run.problems += [f"{name} is not there" for name in run.missing]
    write_text(out, _make_page(run))
    return [f"{run.folder}: {problem}" for problem in run.problems]


def _make_page(run: Run) -> str:
    settings, reason = changed_settings(run.config_tree)
    pictures = {place: _embed_pictures(run, place) for place in _PICTURES}
    return _render(
        "run.html",
        title=f"{run.name} · run",
        page=show(run),
        settings=settings,
        why_none=reason,
        config=[(key, format_value(value)) for key, value in run.config.items()],
        environment=[
            (key, shlex.join(map(str, value)) if isinstance(value, list) else format_value(value))
            for key, value in run.environment.items()
        ],
        pictures=pictures,
    )


def _embed_pictures(run: Run, place: str) -> list[Embedded]:
    pictures = []
    for pattern, caption in _PICTURES[place].items():
        for path in sorted((run.folder / "plots").glob(pattern))[:_MOST_PER_PATTERN]:
            try:
                pictures.append(Embedded(path.name, caption, _data_url(path)))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                run.problems.append(f"plots/{path.name} cannot be shown: {error}")
    return pictures


def _data_url(path: Path) -> Markup:
    """Builds a data URL from a picture, shrunk if it is large.

    Raises: OSError, ValueError, SyntaxError, DecompressionBombError: it is not a JPEG or PNG, or it
        is absurdly large.
    """
    if not path.is_file():  # a pipe would never end
        raise ValueError("not a file")
    size = path.stat().st_size
    if size > _MOST_FILE_BYTES:
        raise ValueError(f"it has {size} bytes")
    content = path.read_bytes()
    with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
        kind = str(image.format).lower()
        width, height = image.size
        if width * height > _MOST_PICTURE_PIXELS:
            raise ValueError(f"it has {width} x {height} pixels")
        if size > _MOST_PICTURE_BYTES:
            # The page embeds all pictures; large pictures would make it too slow to open.
            image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
            smaller = io.BytesIO()
            image.convert("RGB").save(smaller, "JPEG", quality=85)
            content, kind = smaller.getvalue(), "jpeg"
    return _encode(kind, content)


def _encode(kind: str, content: bytes) -> Markup:
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content).decode()}")


def _render(template: str, **content: Any) -> str:
    style, script = (
        (_HERE / "templates" / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable_text,
    )
    environment.filters |= {
        "breakable": breakable,
        "number": number,
        "duration": duration,
        "clock": clock,
    }
    environment.globals |= {
        "style": Markup(style), "style_hash": _digest(style),
        "script": Markup(script), "script_hash": _digest(script),
        "made": clock(time.time()),
    }  # fmt: skip
    return environment.get_template(template).render(**content)


def _printable_text(value: Any) -> Any:
    """Returns printable text: names of strangers may hold characters that turn the text around
    them.
    """
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def number(value: object) -> str:
    """Formats a table cell.

    Floats get three decimal places, large numbers get separators, None becomes a dash.
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def breakable(name: object) -> Markup:
    """Marks a key so that a narrow column breaks it after its dots and underscores."""
    return Markup(re.sub(r"([._/])(?=\w)", r"\1<wbr>", str(escape(printable(str(name))))))


def clock(seconds: float) -> str:
    """Formats seconds since 1970 as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "–"
