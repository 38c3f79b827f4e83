"""YOLO text files: a line `class cx cy w h` an object.

Files for segmentation have outlines, `class x1 y1 x2 y2 x3 y3 ...`; the box is then what the
outline fills.  An outline has three points at least, so the two cannot be taken for each other.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import (
    NAME_FILES,
    Malformed,
    class_names,
    files_below,
    find_image,
    find_repeats,
    read_list,
    read_text_of_image,
    write_text,
)
from ppdist.data.decoder import unread_kind
from ppdist.data.image import image_size, is_image_name
from ppdist.data.types import Box, Complain, Issue, RawImage, RawObject, RawSet
from ppdist.distributed.progress import Progress

_LOGGER = logging.getLogger("ppdist.data")
_FEWEST_OUTLINE = 7  # numbers: the class and three points
_OUTLINE_TOLERANCE = 1.0  # pixels by which an outline's extent may differ from its box


def read_yolo(
    root: Path,
    folders: Sequence[Path],
    annotations: Sequence[Path],
    names: tuple[str, ...],
    complain: Complain,
) -> RawSet:
    """The images of folders, or of files that list them.

    Paths in a list are relative to root, or else to the list.  The label of .../images/a/b.jpg is
    .../labels/a/b.txt, without a folder `images` below root it lies beside the image; where a
    folder of labels is given, that of images/a/b.jpg is annotations/a/b.txt.  An image without a
    label file shows no object.

    Args:
        folders: of the images; with lists, of no concern.
        annotations: none, the folder of the labels of the only folder of images, or lists.
        names: of the classes, by number; none: see `class_names`.
    Raises: DataError: no names of classes, no label file at all.
    """
    known = class_names(root, names, complain)
    if not known:
        raise DataError(
            "YOLO labels do not name their classes",
            code="class_names_missing",
            where=str(root),
            fix=f"set data.class_names: [...] or write them, one a line, to {root / 'classes.txt'}",
        )
    paths: list[Path] = []
    labels: list[Path] = []
    if not annotations or annotations[0].is_dir():
        for images in folders:
            of_labels = annotations[0] if annotations else None
            for path, label in _in_folder(root, images, of_labels, complain):
                paths.append(path)
                labels.append(label)
    else:
        for listing in annotations:
            lines = read_list(listing, complain)
            found = [_listed_image(root, line, listing, complain) for line in lines]
            paths += [path for path in found if path is not None]
        labels = [_label_file(path, root) for path in paths]
    source = ", ".join(map(str, annotations or folders))
    if labels and not any(map(os.path.isfile, labels)):
        absent = [path for path in paths if not os.path.isfile(path)]
        if absent:
            raise DataError(
                f"{len(absent)} of its {len(paths)} images do not exist, first {absent[0]}",
                code="image_missing",
                where=source,
                fix="paths in a list are relative to data.root: check both",
            )
        raise DataError(
            f"none of {len(labels)} images has a label file; expected the first at {labels[0]}",
            code="label_files_missing",
            where=source,
        )
    progress, kept = Progress(_LOGGER, f"reading the labels of {source}", len(paths)), []
    for position, (path, label) in enumerate(zip(paths, labels), start=1):
        kept.append(_image(path, label, position, known, complain))
        progress.add()
    find_repeats(kept, complain)
    _find_shared(kept, complain)
    return RawSet(kept, known, tuple(range(1, len(known) + 1)), source)


def _in_folder(
    root: Path, images: Path, annotations: Path | None, complain: Complain
) -> list[tuple[Path, Path]]:
    """Each image of a folder, and those below it, with its label file."""
    start = len(os.path.join(os.path.abspath(images), ""))
    names_below = [Path(file[start:]) for file in files_below(images)]
    below = sorted(name for name in names_below if is_image_name(name.name))
    unread = [name for name in names_below if unread_kind(name.name)]
    for name in unread:
        _say_unread(images / name, complain)

    def label_of(name: Path) -> Path:
        if annotations is None:
            return _label_file(images / name, root)
        return annotations / name.with_suffix(".txt")

    known_labels = [label_of(name) for name in (*below, *unread)]
    _find_unused(annotations or label_folder(images, root), known_labels, images, complain)
    return [(images / name, label_of(name)) for name in below]


def _listed_image(root: Path, line: str, listing: Path, complain: Complain) -> Path | None:
    """The image of a line; `./a.jpg` may also be meant from where the list is."""
    path = find_image(root, line, str(listing), complain)
    beside = os.path.normpath(listing.parent / line)
    if path is not None and not os.path.isfile(path) and os.path.isfile(beside):
        return find_image(root, beside, str(listing), complain)
    return path


def _say_unread(path: Path, complain: Complain) -> None:
    what = f"{unread_kind(path.name)}: this kind is not read; make it JPEG or PNG"
    complain(Issue("image_kind_unread", what, str(path), str(path)))


def _find_unused(folder: Path, labels: Sequence[Path], images: Path, complain: Complain) -> None:
    known = {os.path.abspath(label) for label in labels}
    for file in files_below(folder):
        if file.endswith(".txt") and file not in known and os.path.basename(file) not in NAME_FILES:
            what = f"there is no image of this name in {images}"
            complain(Issue("label_without_image", what, where=file))


def _label_file(image: Path, root: Path) -> Path:
    return label_folder(image.parent, root) / f"{image.stem}.txt"


def label_folder(images: Path, root: Path) -> Path:
    """Of the labels of a folder of images: the last `images` below root becomes `labels`."""
    below = os.path.relpath(images, root)  # with .. where images are elsewhere
    folders = [*Path(below).parts]
    if "images" in folders:
        last = len(folders) - 1 - folders[::-1].index("images")
        folders[last] = "labels"
    return root.joinpath(*folders)


def _image(
    path: Path, label_file: Path, image_id: int, names: tuple[str, ...], complain: Complain
) -> RawImage:
    size = image_size(path)
    # The check of the whole split names all absent images at once, and `data.bad_images` decides
    # about the others: no image of another size than 1x1 can be taken for one.
    width, height = size or (1, 1)
    image = RawImage(
        path, image_id, width, height, [], str(label_file), size_known=size is not None
    )
    try:
        text = read_text_of_image(label_file, complain) if os.path.isfile(label_file) else ""
    except Malformed as wrong:
        complain(replace(wrong.issue, image=str(path)))
        return image
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                image.objects.append(_object(line, f"{label_file}:{number}", image, names))
            except Malformed as wrong:
                image.lost += 1
                complain(replace(wrong.issue, image=str(path)))
    return image


def _object(line: str, where: str, image: RawImage, names: tuple[str, ...]) -> RawObject:
    words = line.split()
    try:
        label, *numbers = (float(word) for word in words)
    except ValueError as error:
        what = f"{line[:80]!r}: expected five numbers: class cx cy w h"
        raise Malformed(Issue("annotation_line", what, where=where)) from error
    outlined = len(words) >= _FEWEST_OUTLINE and len(words) % 2 == 1
    if len(words) != 5 and not outlined:
        what = (
            f"{line[:80]!r} has {len(words)} numbers; expected five: class cx cy w h, or an "
            f"outline: class x1 y1 x2 y2 x3 y3 ..."
        )
        raise Malformed(Issue("annotation_line", what, where=where))
    if not 0 <= label < len(names) or label != int(label):
        what = f"class {label:g}: expected 0 to {len(names) - 1} ({', '.join(names)})"
        raise Malformed(Issue("class_unknown", what, where=where))
    if outlined:
        part_K2, box = _outline(numbers, image)
        return RawObject(box, int(label), where, polygons=(part_K2,))
    cx, cy, w, h = numbers
    (x1, x2), (y1, y2) = _edges(cx, w, image.width), _edges(cy, h, image.height)
    return RawObject((x1, y1, x2, y2), int(label), where)


def _outline(numbers: Sequence[float], image: RawImage) -> tuple[np.ndarray, Box]:
    """Points [K, 2] in pixels, and the box that they fill."""
    part_K2 = np.array(numbers).reshape(-1, 2) * (image.width, image.height)
    (x1, y1), (x2, y2) = part_K2.min(0).tolist(), part_K2.max(0).tolist()
    return part_K2, (x1, y1, x2, y2)


def _edges(centre: float, side: float, pixels: int) -> tuple[float, float]:
    return (centre - side / 2) * pixels, (centre + side / 2) * pixels


def _find_shared(images: Sequence[RawImage], complain: Complain) -> None:
    first_of: dict[str, RawImage] = {}
    for image in images:
        first = first_of.setdefault(image.where, image)
        if first.path != image.path and image.objects:
            what = f"the label file of both {first.path.name} and {image.path.name}"
            complain(Issue("label_shared", what, str(image.path), image.where))


def write_yolo(
    image_list: Path, labels: Path, raw: RawSet, names: Sequence[str], listed: Sequence[str]
) -> list[str]:
    """Writes a list and label files for `read_yolo`.

    Boxes, outlines and classes come back.  An object has a box or one outline here, so an outline
    is written where it is the only one and fills its box.  Crowds are left out: they would be
    learned as single objects.

    Args:
        labels: the folder of the label files.
        names: of the images, relative to their folder, no two alike without their suffix.
        listed: what the list calls each image.
    Returns: what YOLO could not hold, a line for each kind.
    Raises: UserError: a file cannot be written, or is there already.
    """
    lost = dict.fromkeys(("crowd", "outline", "extent", "area", "extra"), 0)
    for image, name in zip(raw.images, names):
        lines = []
        lost["extra"] += bool(image.extra)
        for thing in image.objects:
            if thing.crowd:
                lost["crowd"] += 1
                continue
            outline = _outline_numbers(thing, image)
            lost["outline"] += bool(thing.polygons) and outline is None
            lost["extent"] += outline is not None and outline[1] != thing.box
            lost["area"] += thing.area is not None
            lost["extra"] += bool(thing.extra)
            numbers = _box_numbers(thing.box, image) if outline is None else outline[0]
            lines.append(" ".join([str(thing.label), *map(_decimal, numbers)]))
        text = "".join(f"{line}\n" for line in lines)
        write_text(labels / f"{os.path.splitext(name)[0]}.txt", text)
    write_text(image_list, "".join(f"{one}\n" for one in listed))
    said = {
        "crowd": "crowds (difficult objects): left out",
        "outline": "objects: outlines of several parts, or that do not fill the box: box only",
        "extent": "objects: the box becomes the extent of the outline (within a pixel)",
        "area": "objects: area",
        "extra": "images and objects: ids or other properties",
    }
    return [f"{count} {said[kind]}" for kind, count in lost.items() if count]


def _outline_numbers(thing: RawObject, image: RawImage) -> tuple[list[float], Box] | None:
    """The numbers of an object's outline, and the box that is read from them."""
    if len(thing.polygons) != 1 or len(thing.polygons[0]) < 3:
        return None
    numbers = [
        _fraction(value, side)
        for point in thing.polygons[0].tolist()
        for value, side in zip(point, (image.width, image.height))
    ]
    _, box = _outline(numbers, image)
    fills = all(abs(a - b) <= _OUTLINE_TOLERANCE for a, b in zip(box, thing.box))
    return (numbers, box) if fills else None


def _fraction(value: float, pixels: int) -> float:
    """The shortest fraction that is read as exactly this many pixels."""
    exact = value / pixels
    candidates = (round(exact, digits) for digits in range(6, 17))
    return next((short for short in candidates if short * pixels == value), exact)


def _box_numbers(box: Box, image: RawImage) -> list[float]:
    x1, y1, x2, y2 = box
    (cx, w), (cy, h) = _centred(x1, x2, image.width), _centred(y1, y2, image.height)
    return [cx, cy, w, h]


def _centred(low: float, high: float, pixels: int) -> tuple[float, float]:
    """(centre, side) as the shortest fractions from which `_edges` gives exactly these edges.

    Often no fractions of 64 bits do; the nearest are then off by 1e-12 pixels.
    """
    centre, side = (low + high) / 2 / pixels, (high - low) / pixels
    candidates = ((round(centre, digits), round(side, digits)) for digits in range(6, 17))
    exact = (short for short in candidates if _edges(*short, pixels) == (low, high))
    return next(exact, (centre, side))


def _decimal(value: float) -> str:
    """Exact, and without an exponent: some readers of such files do not know them."""
    return np.format_float_positional(value, trim="0")
