"""Plots at the end of a run, from its files.

metrics.jsonl    -> results.png, lr.png, speed.png
evaluation.json  -> confusion, pr_curve, p_curve, r_curve, f1_curve, per_class, calibration, errors,
                    worst.jpg, best.jpg
the data set     -> classes, boxes, positions, images

Nothing here raises, also where matplotlib is missing or broken: it is imported when needed.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdist.common.errors import ConfigError
from ppdist.common.files import make_folder
from ppdist.common.records import MetricRecords, read_metrics
from ppdist.config.data import DataConfig
from ppdist.config.yaml import Reader
from ppdist.data.checks.statistics import objects_of
from ppdist.data.types import DetectionSet
from ppdist.viz.draw import write_jpeg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LOGGER = logging.getLogger("ppdist")
_ENDS = {
    "total": "completed",
    "early_stopping": "early stopping",
    "hours": "out of train.hours",
    "signal": "stopped by a signal",
}


def draw_run(
    output_dir: Path,
    image_folders: Sequence[Path] | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Draws metrics.jsonl and evaluation.json of a folder into its folder `plots`.

    Whatever fails costs a warning and the picture; nothing is raised.  A picture of which there is
    nothing to show (a run without evaluation, a classifier without boxes) is not made.

    Args:
        image_folders: images in them may be shown, others are not; None: the folders of the set
            in the configuration that is in output_dir.
        tell: called before each picture with the number of pictures done.
    Returns: the files that were written.
    """
    try:  # a broken matplotlib is as good as none
        return _draw(output_dir, image_folders, tell)
    except Exception as error:
        _LOGGER.warning(f"{output_dir / 'plots'}: nothing can be drawn: {_said(error)}")
        return []


def draw_labels(
    output_dir: Path,
    sets: Mapping[str, DetectionSet],
    config: DataConfig,
    image_size: tuple[int, int],
) -> list[Path]:
    """Draws object statistics of a run's datasets into its folder `plots`.

    A failure costs a warning and the picture; nothing is raised.

    Args:
        sets: by the name of the split; two at most.
        image_size: (height, width) of the input in pixels.
    """
    folder = output_dir / "plots"
    try:
        from ppdist.viz import plots

        objects = {
            split: objects_of(each, image_size, config.resize) for split, each in sets.items()
        }
        names = next(iter(sets.values())).class_names
        return plots.plot_statistics(objects, names, folder, boxes=config.task == "detect")
    except Exception as error:
        _LOGGER.warning(f"{folder}: the objects of the sets cannot be drawn: {_said(error)}")
        return []


def _draw(
    output_dir: Path, image_folders: Sequence[Path] | None, tell: Callable[[int, int], None]
) -> list[Path]:
    config = _read_config(output_dir / "config.yml")
    folders = folders_of_images(config) if image_folders is None else image_folders
    pictures: dict[str, Callable[[Path], bool]] = {}
    written, failed = [], []
    for file, pictures_of in {
        "metrics.jsonl": lambda file: _of_run(file, config),
        "evaluation.json": lambda file: _of_evaluation(file, folders),
    }.items():
        try:
            place = output_dir / file
            if place.is_file():
                pictures |= pictures_of(place)
            elif place.exists():  # a pipe would be waited for
                failed.append(f"what {file} says (it is not a file)")
        except Exception as error:  # one bad file costs no picture of the other
            failed.append(f"what {file} says ({_said(error)})")
    make_folder(output_dir / "plots")
    for done, (name, draw) in enumerate(pictures.items()):
        tell(done, len(pictures))
        path = output_dir / "plots" / name
        try:
            if draw(path):
                written.append(path)
        except Exception as error:
            failed.append(f"{name} ({_said(error)})")
    if failed:
        _LOGGER.warning(f"{output_dir / 'plots'}: could not draw {', '.join(failed)}")
    return written


def _of_run(file: Path, config: Mapping[str, Any]) -> dict[str, Callable[[Path], bool]]:
    """Picture name -> function that draws it, returning False if empty."""
    from ppdist.viz import plots

    found = MetricRecords.of(read_metrics(file))
    run = plots.History.of(found, str(_section(config, "evaluate").get("metric")))
    ended = _ENDS.get(found.finished, found.finished)
    title = file.parent.resolve().name + (f" ({ended})" if ended else "")
    figures = {"results": plots.results, "lr": plots.rate, "speed": plots.speed}
    return {f"{name}.png": _drawn(draw, run, title) for name, draw in figures.items()}


def _of_evaluation(file: Path, folders: Sequence[Path]) -> dict[str, Callable[[Path], bool]]:
    """As `_of_run`.  Args: folders: of images that may be shown."""
    from ppdist.viz import plots

    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not isinstance(found.get("class_names"), list):
        raise ValueError("it is not what an evaluation writes")

    def write_examples(path: Path) -> bool:
        picture = plots.mosaic(found.get(path.stem) or [], found["class_names"], folders)
        if picture is not None:
            write_jpeg(path, picture)
        return picture is not None

    figures = {
        "confusion": _drawn(plots.confusion, found),
        **{name: _drawn(plots.class_curves, found, name) for name in plots.CLASS_CURVES},
        "per_class": _drawn(plots.per_class_scores, found),
        "calibration": _drawn(plots.calibration, found),
        "errors": _drawn(plots.errors, found),
    }
    pictures = {f"{name}.png": draw for name, draw in figures.items()}
    return {**pictures, "worst.jpg": write_examples, "best.jpg": write_examples}


def _drawn(figure: Callable[..., "Figure | None"], *of: Any) -> Callable[[Path], bool]:
    """Makes a function that draws a figure into a file.

    It returns False if there was nothing to draw.
    """
    from ppdist.viz import plots

    return lambda path: plots.save(figure(*of), path)


def folders_of_images(config: Mapping[str, Any]) -> list[Path]:
    """Where a configuration says that the images of the validation set are."""
    data = _section(config, "data")
    if not isinstance(data.get("root"), str):
        return []
    root = Path(data["root"])
    return [root / str(_section(data, "val").get("images") or ""), root]


def _read_config(file: Path) -> Mapping[str, Any]:
    """config.yml of a run; empty if it is missing or unreadable."""
    try:
        found = Reader().read_alone(str(file)).plain()
    except (ConfigError, OSError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
