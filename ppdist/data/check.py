"""What must hold of a split before training starts, and what is worth knowing about it."""

import os
from collections import Counter, defaultdict

import numpy as np

from ppdist.data.sample import DetectionSet
from ppdist.data.transforms import read_image
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
        names = ", ".join(dataset.class_names[:10]) + (", ..." if found > 10 else "")
        raise DataError(
            f"model.num_classes is {num_classes} but {dataset.source} has {found} categories "
            f"({names}): set model.num_classes: {found}"
        )


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
        try:
            read_image(record.path, (record.height, record.width))
        except DataError as error:
            problems.append(str(error))
    return problems


def describe(dataset: DetectionSet) -> list[tuple[str, str]]:
    """(what, value) lines about a split."""
    counts = np.array([len(record.labels_M) for record in dataset.records])
    sizes = Counter((record.width, record.height) for record in dataset.records)
    shown = [f"{width}x{height} ({count})" for (width, height), count in sizes.most_common(3)]
    other = len(dataset.records) - sum(count for _, count in sizes.most_common(3))
    area_M = np.concatenate([record.area_M for record in dataset.records])
    label_M = np.concatenate([record.labels_M for record in dataset.records])
    crowd = sum(int(record.crowd_M.sum()) for record in dataset.records)
    small, large = int((area_M < _SMALL).sum()), int((area_M >= _LARGE).sum())
    per_class = np.bincount(label_M, minlength=len(dataset.class_names))
    paths = Counter(record.path for record in dataset.records)
    twice = sum(count > 1 for count in paths.values())
    rows = [
        ("images", f"{len(dataset.records)}"),
        ("  sizes", ", ".join([*shown, f"others ({other})"] if other else shown)),
        ("  without an object", f"{int((counts == 0).sum())}"),
        ("boxes", f"{counts.sum()} ({counts.mean():.1f} an image, at most {counts.max()})"),
        ("  small / medium / large", f"{small} / {len(area_M) - small - large} / {large}"),
        ("  crowds, not learned", f"{crowd}"),
        ("classes", f"{len(dataset.class_names)}"),
    ]
    rows += [
        (f"  {category} {name}", f"{count}" + (" (none to learn from)" if not count else ""))
        for category, name, count in zip(dataset.category_ids, dataset.class_names, per_class)
    ]
    rows += [("images listed twice", f"{twice}")] if twice else []
    rows += [("defects", note.removeprefix(f"{dataset.source}: ")) for note in dataset.notes]
    return rows
