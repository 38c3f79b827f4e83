"""What must hold of the splits before training starts: images on disk, classes that agree."""

import os
from collections import defaultdict

from ppdist.data.formats.raw import RawSet
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError


def check_files(dataset: DetectionSet) -> None:
    """Every image is there: one listing per folder, and a look-up only of each that is a link.

    Raises: DataError: no image is listed, listed ones do not exist, or a folder cannot be listed.
    """
    if not dataset.records:
        raise DataError("lists no image", code="no_images", where=dataset.source)
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for record in dataset.records:
        folder, name = os.path.split(record.path)
        wanted[folder].append(name)
    absent: set[str] = set()
    for folder, names in wanted.items():
        is_link = _listing(folder, dataset.source)
        for name in names:
            path = os.path.join(folder, name)
            if name not in is_link or (is_link[name] and _leads_nowhere(path)):
                absent.add(path)
    if absent:
        first = [record.path for record in dataset.records if record.path in absent][:3]
        raise DataError(
            f"{len(absent)} of {len(dataset.records)} images do not exist, first "
            f"{', '.join(first)}",
            code="image_missing",
            where=dataset.source,
            fix="check data.root and the images folder",
        )


def _listing(folder: str, source: str) -> dict[str, bool]:
    """Name -> whether it is a link; nothing where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise DataError(
            f"the folder of images that {source} lists cannot be listed: {error.strerror or error}",
            code="folder_unreadable",
            where=folder,
            fix="give this user the right to read it",
        ) from error


def _leads_nowhere(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # there is something: who reads it will say what is wrong
        return False
    return False


def check_classes(dataset: DetectionSet, num_classes: int) -> None:
    """The data have as many classes as the model.  Raises: DataError."""
    found = len(dataset.class_names)
    if found != num_classes:
        fix = f"set model.num_classes: {found}"
        if dataset.class_names[:1] == ("0",) and all(0 not in r.labels_M for r in dataset.records):
            fix += "; nothing there is of class 0, and numbers of classes start at 0"
        raise DataError(
            f"model.num_classes is {num_classes} but {dataset.source} has {found} categories "
            f"({_listed(dataset.class_names)})",
            code="num_classes_differ",
            fix=fix,
        )


def check_names(dataset: DetectionSet, configured: tuple[str, ...]) -> None:
    """data.class_names, where given, says what a file that names its classes says.

    Raises: DataError: it does not.
    """
    if configured and configured != dataset.class_names:
        raise DataError(
            f"data.class_names is {_listed(configured)} but the categories of {dataset.source} "
            f"are {_listed(dataset.class_names)}",
            code="class_names_differ",
            fix="its names count: leave data.class_names out",
        )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def check_same_classes(train: DetectionSet | RawSet, val: DetectionSet | RawSet) -> None:
    """Both splits mean the same by each class number.

    A class that only one split knows, or another order, would go unnoticed as a low score.

    Raises: DataError: names or category ids differ.
    """
    ours = [*zip(train.category_ids, train.class_names)]
    theirs = [*zip(val.category_ids, val.class_names)]
    if ours != theirs:
        differing = [pair for pair in ours if pair not in theirs][:5]
        differing += [pair for pair in theirs if pair not in ours][:5]
        shown = ", ".join(f"{number} {name}" for number, name in differing)
        raise DataError(
            f"{train.source} and {val.source} have different categories ({shown})",
            code="classes_differ",
            fix="give both files the same list of ids and names",
        )
