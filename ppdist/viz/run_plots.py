"""Draws the plots at the end of a run from its files.

metrics.jsonl    -> results.png
evaluation.json  -> confusion, pr_curve, worst.jpg, best.jpg
the data set     -> classes

Nothing here raises, even if matplotlib is missing or broken: it is imported when needed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdist.common.files import make_folder, require_no_link
from ppdist.config.data import DataConfig
from ppdist.data.checks.statistics import collect_objects
from ppdist.data.types import DetectionSet
from ppdist.metrics.run import Run, read_run
from ppdist.viz.draw import write_jpeg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOGGER = logging.getLogger("ppdist")
METRICS, EVALUATION = "metrics.jsonl", "evaluation.json"
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
    files: tuple[str, ...] = (METRICS, EVALUATION),
) -> list[Path]:
    """Draws metrics.jsonl and evaluation.json of a folder into its folder `plots`.

    If a picture fails, it is omitted with a warning; nothing is raised.  A picture with nothing to
    show (a run without evaluation, a classifier without boxes) is not drawn.

    Args:
        image_folders: only images in these folders are shown; None for the folders of the set in
            the configuration in output_dir.
        tell: called before each picture with the number of pictures done, and their total number.
        files: which of the two files to draw.
    Returns: the files that were written.
    """
    folder, written = output_dir / "plots", list[Path]()
    try:
        require_no_link(folder)
        from ppdist.viz import plots  # a broken matplotlib counts as a missing one

        has_records = any((output_dir / name).exists() for name in files)
        run = read_run(output_dir) if has_records else Run(output_dir)
        failed = [problem for problem in run.problems if problem.startswith(files)]
        images = validation_folders(run.config) if image_folders is None else image_folders
        pictures = _pictures(run, images, files)
        make_folder(folder)
        for done, (name, draw) in enumerate(pictures.items()):
            tell(done, len(pictures))
            try:
                picture = draw()
                if picture is None:
                    continue
                if isinstance(picture, np.ndarray):
                    write_jpeg(folder / name, picture)
                else:
                    plots.save(folder / name, picture)
                written.append(folder / name)
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
        if failed:
            raise ValueError("; ".join(failed))
    except Exception as error:
        _LOGGER.warning(f"{folder}: could not draw everything: {error}")
    return written


def _pictures(
    run: Run, image_folders: Sequence[Path], files: tuple[str, ...]
) -> dict[str, "Callable[[], Figure | np.ndarray | None]"]:
    """Lists the name of each picture and the function that draws it, or returns None."""
    from ppdist.viz import plots

    pictures = dict[str, Any]()
    if METRICS in files:
        ended = _ENDS.get(run.finished, run.finished)
        title = run.name + (f" ({ended})" if ended else "")
        pictures["results.png"] = partial(plots.results, run, title)
    evaluation = run.evaluation
    if EVALUATION in files and evaluation is not None:
        pictures["confusion.png"] = partial(plots.confusion, evaluation)
        pictures["pr_curve.png"] = partial(plots.pr_curve, evaluation)
        for name in ("worst", "best"):
            entries, names = evaluation.get(name) or [], evaluation.get("class_names") or []
            pictures[f"{name}.jpg"] = partial(plots.mosaic, entries, names, image_folders)
    return pictures


def validation_folders(config: Mapping[str, Any]) -> list[Path]:
    """Returns the folders of the validation images according to a configuration.

    Args: config: flat, as `Run.config`.
    """
    root = config.get("data.root")
    if not isinstance(root, str):
        return []
    return [Path(root, str(config.get("data.val.images") or "")), Path(root)]


def draw_labels(
    output_dir: Path,
    sets: Mapping[str, DetectionSet],
    config: DataConfig,
    image_size: tuple[int, int],
) -> list[Path]:
    """Draws object statistics of a run's datasets into its folder `plots`.

    If the picture fails, it is omitted with a warning; nothing is raised.

    Args:
        sets: name of the split -> its data set; at most two.
        image_size: (height, width) of the input in pixels.
    """
    folder = output_dir / "plots"
    try:
        require_no_link(folder)
        from ppdist.viz import plots

        objects = {
            split: collect_objects(dataset, image_size, config.resize)
            for split, dataset in sets.items()
        }
        names = next(iter(sets.values())).class_names
        picture = folder / "classes.png"
        plots.plot_classes(objects, names, picture, boxes=config.task == "detect")
        return [picture]
    except Exception as error:
        _LOGGER.warning(f"{folder}: could not draw the objects of the sets: {error}")
        return []
