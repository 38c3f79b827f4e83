"""Selection of classes: `data.classes` and `data.single_class`, the same for every format.

The result is the same as if the other classes had been removed from the set by hand.
"""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.config.data import DataConfig
from ppdist.data.datasets.annotations import abbreviate
from ppdist.data.types import DetectionSet, RawColumns, Records

SINGLE_CLASS = "object"  # name of the only class with `data.single_class`


def select_classes(
    columns: RawColumns, classes: Sequence[str | int], single: bool = False
) -> RawColumns:
    """Selects the objects of some classes and renumbers these classes in their order.

    Images without such an object are kept.

    Args:
        classes: names or numbers; empty: all.
        single: merges all classes into one.
    Raises: ConfigError: the set has no such class.
    """
    if not classes and not single:
        return columns
    numbers = find_classes(classes, columns.class_names, columns.source)
    label_C = _number_anew(numbers, len(columns.class_names))
    selected = columns.select_objects(label_C[columns.labels_O] >= 0)
    labels_O = label_C[selected.labels_O]
    names, ids = _pick(numbers, columns.class_names, columns.category_ids)
    if single:
        labels_O = np.zeros_like(labels_O)
        names, ids = _join_names(names), ids[:1]
    return replace(selected, labels_O=labels_O, class_names=names, category_ids=ids)


def select_image_classes(dataset: DetectionSet, classes: Sequence[str | int]) -> DetectionSet:
    """Selects the classified images of some classes and renumbers these classes in their order.

    Args: classes: names or numbers; empty: all.
    Raises: ConfigError: the set has no such class.
    """
    if not classes:
        return dataset
    numbers = find_classes(classes, dataset.class_names, dataset.source)
    label_C = _number_anew(numbers, len(dataset.class_names))
    label_1_C = [np.array([label], np.int64) for label in label_C.tolist()]  # shared by images
    records = Records.of(
        replace(record, labels_M=label_1_C[label])
        for record in dataset.records
        if label_C[label := int(record.labels_M[0])] >= 0
    )
    names, ids = _pick(numbers, dataset.class_names, dataset.category_ids)
    return replace(dataset, records=records, class_names=names, category_ids=ids)


def selected_names(config: DataConfig) -> tuple[str, ...]:
    """Returns the names of the model's classes according to `data.class_names`; () if it is empty.

    Raises: ConfigError: `data.classes` contains other classes.
    """
    names = config.class_names
    if not names:
        return ()
    numbers = find_classes(config.classes, names, "data.class_names")
    names = tuple(names[number] for number in numbers)
    return _join_names(names) if config.single_class else names


def find_classes(
    classes: Sequence[str | int], class_names: Sequence[str], source: str
) -> tuple[int, ...]:
    """Returns the sorted numbers of classes, specified by name or number; all if empty.

    Args: source: where the names are from, for messages.
    Raises: ConfigError: there is no such class.
    """
    numbers = {find_class(wanted, class_names, source, "data.classes") for wanted in classes}
    return tuple(sorted(numbers)) if classes else tuple(range(len(class_names)))


def find_class(wanted: str | int, class_names: Sequence[str], source: str, where: str) -> int:
    """Returns the number of a class, specified by name or number.

    Args: source, where: what has the names, and what names the class, for messages.
    Raises: ConfigError: there is no such class.
    """
    if wanted in class_names:
        return class_names.index(str(wanted))
    if f"{wanted}".isdecimal() and int(wanted) < len(class_names):
        return int(wanted)
    # Names are compared in lower case, so that a wrong case is recognised as a mistake, too.
    lower = {name.lower(): name for name in class_names}
    near = get_close_matches(f"{wanted}".lower(), lower, 1)
    hint = f"did you mean {lower[near[0]]}? " if near else ""
    raise ConfigError(
        f"{source} has no class {wanted!r}",
        code="class_unknown",
        where=where,
        fix=f"{hint}expected some of {abbreviate(class_names)}, or numbers from 0 to "
        f"{len(class_names) - 1}",
    )


def _join_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return names if len(names) == 1 else (SINGLE_CLASS,)


def _number_anew(numbers: Sequence[int], count: int) -> np.ndarray:
    """Returns the new number of each of `count` classes: [C] int64; -1 if not selected."""
    label_C = np.full(count, -1, np.int64)
    label_C[list(numbers)] = np.arange(len(numbers))
    return label_C


def _pick(
    numbers: Sequence[int], class_names: Sequence[str], category_ids: Sequence[int]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names = tuple(class_names[number] for number in numbers)
    return names, tuple(category_ids[number] for number in numbers)
