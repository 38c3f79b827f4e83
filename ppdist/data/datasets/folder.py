"""Classified images: a folder for each class, or a CSV file.

A classified image is an image with one object that covers it, so it has the types of detection:
`labels_M` is its one class.  No image is opened here (ImageNet has 1.28 million): width, height and
the box are 0, "unknown", and images of a class share their arrays.
"""

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ppdist.common.addresses import absolute
from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import (
    abbreviate,
    files_below,
    find_class_names,
    is_ignored,
    join_inside,
    read_text,
)
from ppdist.data.image import is_image_name
from ppdist.data.types import DetectionSet, ImageRecord, Records

_HEADER = ("path", "label")
_SHOWN = 5
_MOST_NUMBERED = 100_000
_SEPARATORS = ((";", "semicolon"), ("\t", "tab"))


def read_folder(
    root: Path, images: Path, names: tuple[str, ...], *, naming_folder: Path | None = None
) -> DetectionSet:
    """Reads all images in the class folders of a folder.

    The folder of an image is its class.  Classes and images are in the order of their names.  Files
    without an image suffix are left out and counted in a note; hidden files, and those that macOS
    adds to archives (`__MACOSX`), are ignored.  Follows links to folders.

    Args:
        root: searched for files of class names, see `find_class_names`.
        images: holds one folder per class, in which images may lie at any depth.
        names: class names, by number; if empty, see `find_class_names`, else the folders in
            `naming_folder` (the training split; by default `images`).
    Raises: DataError: there is no class folder, or one whose name is not a class.
    """
    folders = _list_class_folders(images)
    class_names = find_class_names(root, names)
    if not class_names:
        naming = naming_folder or images
        class_names = tuple(folders if naming == images else _list_class_folders(naming))
    strange = [name for name in folders if name not in set(class_names)]
    if strange:
        raise DataError(
            f"{len(strange)} folders are not classes, first {abbreviate(strange, _SHOWN)}; "
            f"the {len(class_names)} classes are {abbreviate(class_names, _SHOWN)}",
            code="class_unknown",
            where=str(images),
        )
    label_of = {name: label for label, name in enumerate(class_names)}
    ignored_kinds: Counter[str] = Counter()
    labelled_images: list[tuple[str, int]] = []
    for name in folders:
        files = _iterate_images(images / name, ignored_kinds)
        labelled_images += [(file, label_of[name]) for file in files]
    notes: tuple[str, ...] = ()
    if ignored_kinds:
        kinds = ", ".join(
            f"{count} {suffix}" for suffix, count in ignored_kinds.most_common(_SHOWN)
        )
        notes = (f"{images}: {ignored_kinds.total()} files are not images and left out ({kinds})",)
    return build_classified_set(labelled_images, class_names, images, notes)


def _list_class_folders(images: Path) -> list[str]:
    if not images.is_dir():
        raise DataError(
            f"{images} is not a folder",
            code="image_folder_missing",
            fix="it should hold one folder of images per class",
        )
    with os.scandir(images) as entries:
        folders = sorted(e.name for e in entries if e.is_dir() and not is_ignored(e.name))
    if not folders:
        raise DataError(
            f"contains no folders; expected one per class, such as {images / 'cat' / '1.jpg'}",
            code="class_folders_missing",
            where=str(images),
        )
    return folders


def _iterate_images(folder: Path, ignored_kinds: Counter[str]) -> Iterator[str]:
    """Yields the images among `files_below`; counts the other files by suffix."""
    for file in files_below(folder):
        if is_image_name(os.path.basename(file)):
            yield file
        else:
            ignored_kinds[os.path.splitext(file)[1].lower() or "without suffix"] += 1


def read_csv(
    root: Path,
    images: Path,
    table: Path,
    names: tuple[str, ...],
    *,
    naming_table: Path | None = None,
) -> DetectionSet:
    """Reads the lines `path,label` of a table, in the order of the table.

    A first line with the words `path` and `label` is a header and may name further columns; without
    one, lines have exactly these two.  A label is the name of a class or, if no class has that
    name, its number.

    Args:
        root: searched for files of class names, see `find_class_names`.
        images: the folder that paths are relative to.
        table: the CSV file, UTF-8, commas, quotes where needed.
        names: class names, by number; if empty, see `find_class_names`, else those of
            `naming_table` (the training split; by default `table`): its sorted labels, or where all
            are numbers, 0 to the largest.
    Raises: DataError: a line is malformed, or its label is not a class.
    """
    rows = _read_rows(table)
    class_names = find_class_names(root, names)
    if not class_names:
        naming = naming_table or table
        naming_rows = rows if naming == table else _read_rows(naming)
        class_names = _names_from_labels([label for _, _, label in naming_rows], naming)
    label_of = {name: label for label, name in enumerate(class_names)}
    labelled_images = []
    for line, name, text in rows:
        where = f"{table}:{line}"
        label = label_of.get(text, int(text) if text.isdecimal() else -1)
        if not 0 <= label < len(class_names):
            hint = " (numbers start at 0)" if text.isdecimal() else ""
            raise DataError(
                f"label {text!r} is not a class; expected a name "
                f"({abbreviate(class_names, _SHOWN)}) "
                f"or a number from 0 to {len(class_names) - 1}{hint}",
                code="class_unknown",
                where=where,
            )
        labelled_images.append((str(join_inside(images, name, where)), label))
    return build_classified_set(labelled_images, class_names, table)


def _read_rows(table: Path) -> list[tuple[int, str, str]]:
    """Reads line number, path and label of each non-empty line except the header."""
    lines = _read_cells(table)
    path_column, label_column, columns = 0, 1, 2
    lowered = [cell.lower() for cell in lines[0][1]] if lines else []
    if set(_HEADER) <= set(lowered):
        path_column, label_column = map(lowered.index, _HEADER)
        columns = len(lowered)
        lines = lines[1:]
    elif _is_header(lines):
        number, cells = lines[0]
        raise DataError(
            f"{','.join(cells)[:80]!r}: a header without the columns `path` and `label`",
            code="bad_csv_header",
            where=f"{table}:{number}",
            fix="rename its columns, or remove the line",
        )
    for number, cells in lines:
        if len(cells) != columns or not cells[path_column] or not cells[label_column]:
            expected = "`path,label`" if columns == 2 else f"{columns} columns, as the header has"
            separator = next((name for mark, name in _SEPARATORS if mark in cells[0]), None)
            if separator and len(cells) == 1:
                expected += f" with a comma between, found a {separator}"
            raise DataError(
                f"{','.join(cells)[:80]!r}: expected {expected}",
                code="bad_csv_line",
                where=f"{table}:{number}",
            )
    return [(number, cells[path_column], cells[label_column]) for number, cells in lines]


def _is_header(lines: Sequence[tuple[int, list[str]]]) -> bool:
    """Returns True if the second line names an image, but the first does not."""
    names_image = [
        any(is_image_name(os.path.basename(cell)) for cell in cells) for _, cells in lines[:2]
    ]
    return names_image == [False, True] and len(lines[0][1]) > 1


def _read_cells(table: Path) -> list[tuple[int, list[str]]]:
    reader = csv.reader(read_text(table).splitlines(), skipinitialspace=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise DataError(
            f"not a CSV file: {error}", code="not_csv", where=f"{table}:{reader.line_num}"
        ) from error
    return [(number, cells) for number, cells in lines if any(cells)]


def _names_from_labels(labels: Sequence[str], table: Path) -> tuple[str, ...]:
    used = set(labels)
    if not used or not all(label.isdecimal() for label in used):
        return tuple(sorted(used))
    largest = max(map(int, used))
    if largest >= _MOST_NUMBERED:
        raise DataError(
            f"label {largest} is too large for a class index (indices start at 0)",
            code="class_number_too_large",
            where=str(table),
            fix="if labels are names made of digits, list them in data.class_names",
        )
    return tuple(map(str, range(largest + 1)))


def build_classified_set(
    labelled_images: Sequence[tuple[str, int]],
    names: tuple[str, ...],
    source: str | Path,
    notes: tuple[str, ...] = (),
) -> DetectionSet:
    """Builds the set of classified images.

    Args: labelled_images: (absolute path, label) of each image.
    """
    # Shared by all images: a million would otherwise need millions of small arrays.
    box_14, area_1 = np.zeros((1, 4), np.float32), np.zeros(1, np.float32)
    crowd_1 = np.zeros(1, bool)
    label_1 = [np.array([label], np.int64) for label in range(len(names))]
    records = Records.of(
        ImageRecord(
            path=absolute(path),
            image_id=position,
            width=0,
            height=0,
            boxes_M4=box_14,
            labels_M=label_1[label],
            crowd_M=crowd_1,
            area_M=area_1,
        )
        for position, (path, label) in enumerate(labelled_images, start=1)
    )
    return DetectionSet(records, names, tuple(range(len(names))), str(source), notes)
