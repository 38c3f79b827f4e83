"""YOLO text files: a line `class cx cy w h` an object, in fractions of the image."""

import os
from pathlib import Path

from PIL import ExifTags, Image

from ppdist.data.annotations import Box, BoxPolicy, inside_folder, read_text, record
from ppdist.data.images import is_image_name
from ppdist.data.names import class_names, read_list
from ppdist.data.sample import DetectionSet, ImageRecord
from ppdist.errors import DataError


def read_yolo(
    root: Path, images: Path, annotations: Path, names: tuple[str, ...], bad_boxes: str
) -> DetectionSet:
    """Records of the images of a list (paths relative to root), or of a folder of label files.

    With a folder, the label of images/a/b.jpg is annotations/a/b.txt; with a list, that of
    .../images/a/b.jpg is .../labels/a/b.txt.  An image without a label file shows no object.

    Args:
        images: the folder of the images; with a list, of no concern.
        annotations: the folder or the list.
        names: of the classes, by number; none: see names.class_names.
        bad_boxes: see BoxPolicy.
    Raises: DataError: a malformed line or an unknown class, with its file and line; no names.
    """
    known = class_names(root, names)
    if not known:
        raise DataError(
            f"{root}: YOLO labels do not name their classes; set data.class_names: [...] or write "
            f"them, one a line, to {root / 'classes.txt'}"
        )
    if annotations.is_dir():
        paths = sorted(path for path in images.rglob("*") if is_image_name(path.name))
        labels = [annotations / path.relative_to(images).with_suffix(".txt") for path in paths]
    else:
        paths = [inside_folder(root, name, str(annotations)) for name in read_list(annotations)]
        labels = [_label_file(path, root) for path in paths]
    if labels and not any(label.is_file() for label in labels):
        raise DataError(
            f"{annotations}: none of {len(labels)} images has a label file; expected the first at "
            f"{labels[0]}"
        )
    policy = BoxPolicy(bad_boxes, annotations)
    records = tuple(
        _record(path, label, position + 1, known, policy)
        for position, (path, label) in enumerate(zip(paths, labels))
    )
    ids = tuple(range(1, len(known) + 1))
    return DetectionSet(records, known, ids, str(annotations), policy.report())


def _label_file(image: Path, root: Path) -> Path:
    """The last folder `images` below root becomes `labels`."""
    folders = [*image.relative_to(root).parent.parts]
    if "images" in folders:
        last = len(folders) - 1 - folders[::-1].index("images")
        folders[last] = "labels"
    return root.joinpath(*folders, f"{image.stem}.txt")


def _record(
    image: Path, label_file: Path, image_id: int, names: tuple[str, ...], policy: BoxPolicy
) -> ImageRecord:
    width, height = image_size(image)
    boxes: list[Box] = []
    labels = []
    text = read_text(label_file) if os.path.isfile(label_file) else ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{label_file}:{number}"
        label, cx, cy, w, h = _numbers(line, where)
        if not 0 <= label < len(names) or label != int(label):
            raise DataError(
                f"{where}: class {label:g}: expected 0 to {len(names) - 1} ({', '.join(names)})"
            )
        corners = (
            (cx - w / 2) * width,
            (cy - h / 2) * height,
            (cx + w / 2) * width,
            (cy + h / 2) * height,
        )
        box = policy.apply(corners, width, height, where)
        if box is not None:
            boxes.append(box)
            labels.append(int(label))
    return record(image, image_id, (width, height), boxes, labels)


def _numbers(line: str, where: str) -> list[float]:
    words = line.split()
    try:
        numbers = [float(word) for word in words]
    except ValueError as error:
        raise DataError(f"{where}: {line!r}: expected five numbers: class cx cy w h") from error
    if len(numbers) != 5:
        raise DataError(
            f"{where}: {line[:80]!r} has {len(numbers)} numbers; expected five: class cx cy w h"
        )
    return numbers


def image_size(image: Path) -> tuple[int, int]:
    """(width, height) upright, from the file's header.

    (1, 1) for a file that is absent or no image: the check of the whole split names all absent
    ones at once, and `data.bad_images` decides about the others.
    """
    try:
        with Image.open(image) as opened:
            width, height = opened.size
            turned = opened.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    except (OSError, Image.DecompressionBombError):
        return 1, 1
    return (height, width) if turned else (width, height)
