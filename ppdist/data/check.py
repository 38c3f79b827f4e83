"""What must hold of a split before training starts, and what is worth knowing about it."""

import os
from collections import Counter, defaultdict

import numpy as np

from ppdist.data.images import read_image
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError

_SMALL, _LARGE = 32**2, 96**2  # square pixels, COCO's limits


def check_files(dataset: DetectionSet) -> None:
    """Every image is there: one listing per folder, not one look-up per image.

    Raises: DataError: no image is listed, or listed ones do not exist.
    """
    if not dataset.records:
        raise DataError(f"{dataset.source}: lists no image")
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for record in dataset.records:
        folder, name = os.path.split(record.path)
        wanted[folder].append(name)
    absent: set[str] = set()
    for folder, names in wanted.items():
        present = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        absent.update(os.path.join(folder, name) for name in names if name not in present)
    if absent:
        first = [record.path for record in dataset.records if record.path in absent][:3]
        raise DataError(
            f"{dataset.source}: {len(absent)} of {len(dataset.records)} images do not exist, "
            f"first {', '.join(first)}; check data.root and the images folder"
        )


def check_classes(dataset: DetectionSet, num_classes: int) -> None:
    """The data have as many classes as the model.  Raises: DataError."""
    found = len(dataset.class_names)
    if found != num_classes:
        message = (
            f"model.num_classes is {num_classes} but {dataset.source} has {found} categories "
            f"({_listed(dataset.class_names)}): set model.num_classes: {found}"
        )
        if dataset.class_names[:1] == ("0",) and all(0 not in r.labels_M for r in dataset.records):
            message += "; nothing there is of class 0, and numbers of classes start at 0"
        raise DataError(message)


def check_names(dataset: DetectionSet, configured: tuple[str, ...]) -> None:
    """data.class_names, where given, says what a file that names its classes says.

    Raises: DataError: it does not.
    """
    if configured and configured != dataset.class_names:
        raise DataError(
            f"data.class_names is {_listed(configured)} but the categories of {dataset.source} "
            f"are {_listed(dataset.class_names)}; its names count: leave data.class_names out"
        )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def check_same_classes(train: DetectionSet, val: DetectionSet) -> None:
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
            f"{train.source} and {val.source} have different categories ({shown}); "
            f"give both files the same list of ids and names"
        )


def check_images(dataset: DetectionSet) -> list[str]:
    """Decodes every image; one line for each that is damaged or has not the annotated size."""
    problems = []
    for record in dataset.records:
        size = (record.height, record.width) if record.height else None
        try:
            read_image(record.path, size)
        except DataError as error:
            problems.append(str(error))
    return problems


def unused_classes(dataset: DetectionSet) -> tuple[str, ...]:
    """Names of the classes that no object of a split is of; crowds do not count."""
    label_M = np.concatenate([record.labels_M[~record.crowd_M] for record in dataset.records])
    used = set(label_M.tolist())
    return tuple(name for label, name in enumerate(dataset.class_names) if label not in used)


def describe_classes(dataset: DetectionSet) -> list[tuple[str, str]]:
    """(what, value) lines about a split of classified images."""
    label_N = np.array([record.labels_M[0] for record in dataset.records], np.int64)
    per_class = np.bincount(label_N, minlength=len(dataset.class_names))
    low, middle, high = int(per_class.min()), float(np.median(per_class)), int(per_class.max())
    rows = [
        ("images", f"{len(dataset.records)}"),
        ("classes", f"{len(dataset.class_names)} (of {low} to {high} images, median {middle:g})"),
    ]
    return rows + _per_class(dataset, per_class) + _oddities(dataset)


def describe(dataset: DetectionSet) -> list[tuple[str, str]]:
    """(what, value) lines about a split of images with boxes."""
    counts = np.array([len(record.labels_M) for record in dataset.records])
    sizes = Counter((record.width, record.height) for record in dataset.records)
    shown = [f"{width}x{height} ({count})" for (width, height), count in sizes.most_common(3)]
    other = len(dataset.records) - sum(count for _, count in sizes.most_common(3))
    area_M = np.concatenate([record.area_M for record in dataset.records])
    label_M = np.concatenate([record.labels_M for record in dataset.records])
    crowd = sum(int(record.crowd_M.sum()) for record in dataset.records)
    small, large = int((area_M < _SMALL).sum()), int((area_M >= _LARGE).sum())
    per_class = np.bincount(label_M, minlength=len(dataset.class_names))
    rows = [
        ("images", f"{len(dataset.records)}"),
        ("  sizes", ", ".join([*shown, f"others ({other})"] if other else shown)),
        ("  without an object", f"{int((counts == 0).sum())}"),
        ("boxes", f"{counts.sum()} ({counts.mean():.1f} an image, at most {counts.max()})"),
        ("  small / medium / large", f"{small} / {len(area_M) - small - large} / {large}"),
        ("  crowds, not learned", f"{crowd}"),
        ("classes", f"{len(dataset.class_names)}"),
    ]
    return rows + _per_class(dataset, per_class) + _oddities(dataset)


def _per_class(dataset: DetectionSet, counts_C: np.ndarray) -> list[tuple[str, str]]:
    rows = zip(dataset.category_ids, dataset.class_names, counts_C)
    return [(f"  {category} {name}", f"{count}") for category, name, count in rows]


def _oddities(dataset: DetectionSet) -> list[tuple[str, str]]:
    paths = Counter(record.path for record in dataset.records)
    twice = sum(count > 1 for count in paths.values())
    rows = [("images listed twice", f"{twice}")] if twice else []
    return rows + [("defects", note.removeprefix(f"{dataset.source}: ")) for note in dataset.notes]
