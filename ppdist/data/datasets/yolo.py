"""YOLO text files: a line `class cx cy w h` per object.

More numbers may be an outline, `class x1 y1 x2 y2 x3 y3 ...`, whose extent is the box; or a score,
a track number or points after a box.  A single line does not show which, but all lines of a set
together do: `_read_columns`.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppdist.common.errors import DataError
from ppdist.common.opener import DISK, Opener
from ppdist.data.datasets.annotations import (
    Malformed,
    abbreviate,
    file_exists,
    files_below,
    find_class_names,
    find_encoded,
    find_image,
    has_image,
    ignore_issue,
    is_class_list,
    read_class_lists,
    read_keypoint_shape,
    read_lines,
    read_size,
    read_text,
    read_text_of_image,
    report_repeated_images,
    write_text,
)
from ppdist.data.image import is_image_name
from ppdist.data.types import Box, Complain, Issue, RawImage, RawObject, RawSet
from ppdist.distributed.progress import Progress
from ppdist.runtime.decoder import unread_kind

_LOGGER = logging.getLogger("ppdist.data")
_FEWEST_OUTLINE = 6  # numbers: three points
_OUTLINE_TOLERANCE = 1.0  # pixels by which an outline's extent may differ from its box
_FAR = 2.0  # a larger number is no fraction of an image, even for an object that sticks out
_BORDER = 0.02  # of an image: tolerance for rounding tools
_MIN_EXAMPLES = 3  # lines that make a rule credible


def read_yolo(
    root: Path,
    folders: Sequence[Path],
    annotations: Sequence[Path],
    names: tuple[str, ...],
    complain: Complain,
    *,
    opener: Opener = DISK,
) -> RawSet:
    """Reads the images of folders, or of files that list them.

    Paths in a list are relative to root, or else to the list.  The label of .../images/a/b.jpg is
    .../labels/a/b.txt; without a folder `images` below root, or without a folder of labels, it is
    beside the image.  With a folder of labels in `annotations`, the label of images/a/b.jpg is
    annotations/a/b.txt.  An image without a label file shows no object.  Class numbers are those of
    the nearest list of classes above a label file, which is matched by name.

    Args:
        folders: folders of the images; ignored if there are lists.
        annotations: empty, or the label folder of the only image folder, or lists of images.
        names: class names, by number; if empty, see `find_class_names`.
        opener: opens the images.
    Raises: DataError: there are no class names or no label files, or their numbers are ambiguous.
    """
    class_names = find_class_names(root, names, complain)
    if not class_names:
        raise DataError(
            "YOLO labels do not name their classes",
            code="class_names_missing",
            where=str(root),
            fix=f"set data.class_names: [...] or write them, one a line, to {root / 'classes.txt'}",
        )
    pairs: list[tuple[Path, Path]] = []
    if not annotations or annotations[0].is_dir():
        for images in folders:
            pairs += _pair_images(root, images, annotations[0] if annotations else None, complain)
    else:
        for listing in annotations:
            lines = read_lines(listing, complain)
            paths = [_find_listed_image(root, line, listing, complain) for line in lines]
            pairs += [(path, label_path(path, root)) for path in paths if path is not None]
    source = ", ".join(map(str, annotations or folders))
    labelled = [file_exists(label) for _, label in pairs]
    if pairs and not any(labelled):
        _refuse_unlabelled(pairs, source)
    if not all(labelled):
        message = (
            f"{labelled.count(False)} of {len(pairs)} images have no label file: used as background"
        )
        complain(Issue("label_missing", message, where=source))
    for path, label in pairs:
        if label.stem != path.stem:  # see `_find_label`
            message = f"the label file of {path.name}: one of the names is percent-encoded"
            complain(Issue("label_encoded", message, str(path), str(label)))
    progress, images_read, lines_read = Progress(_LOGGER, f"reading {source}", len(pairs)), [], []
    for position, ((path, label), present) in enumerate(zip(pairs, labelled), start=1):
        image = _make_image(path, label, position, opener)
        images_read.append(image)
        lines_read += _parse_lines(image, complain) if present else []
        progress.add()
    columns = _read_columns(lines_read, read_keypoint_shape(root), source, complain)
    _warn_if_one_based(lines_read, class_names, source, complain)
    numbers_in = _ClassNumbers(root, class_names, source, complain)
    for line in lines_read:
        try:
            line.image.objects.append(_make_object(line, columns[len(line.numbers)], numbers_in))
        except Malformed as error:
            line.image.lost += 1
            complain(replace(error.issue, image=str(line.image.path)))
    report_repeated_images(images_read, complain)
    _report_shared_labels(images_read, complain)
    return RawSet(images_read, class_names, tuple(range(1, len(class_names) + 1)), source)


def _refuse_unlabelled(pairs: Sequence[tuple[Path, Path]], source: str) -> None:
    absent = [path for path, _ in pairs if not file_exists(path)]
    if absent:
        raise DataError(
            f"{len(absent)} of its {len(pairs)} images do not exist, first {absent[0]}",
            code="image_missing",
            where=source,
            fix="paths in a list are relative to data.root: check the list and data.root",
        )
    raise DataError(
        f"none of {len(pairs)} images has a label file; expected the first at {pairs[0][1]}",
        code="label_files_missing",
        where=source,
    )


def _pair_images(
    root: Path, images: Path, annotations: Path | None, complain: Complain
) -> list[tuple[Path, Path]]:
    """Returns each image in or below a folder, with its label file."""
    start = len(os.path.join(os.path.abspath(images), ""))
    names_below = [Path(file[start:]) for file in files_below(images)]
    image_names = sorted(name for name in names_below if is_image_name(name.name))
    unsupported = [name for name in names_below if unread_kind(name.name)]
    for name in unsupported:
        path, kind = str(images / name), unread_kind(name.name)
        message = f"{kind}: this kind is not read; make it JPEG or PNG"
        complain(Issue("image_kind_unread", message, path, path))

    def label_of(name: Path) -> Path:
        if annotations is None:
            return label_path(images / name, root)
        return _find_label(annotations / name.parent, images / name)

    labels = [label_of(name) for name in (*image_names, *unsupported)]
    expected_labels = {os.path.abspath(label) for label in labels}
    for file in files_below(annotations or label_folder(images, root)):
        if file not in expected_labels and is_label(Path(file)):
            message = f"there is no image of this name in {images}"
            complain(Issue("label_without_image", message, where=file))
    return [(images / name, label) for name, label in zip(image_names, labels)]


def _find_listed_image(root: Path, line: str, listing: Path, complain: Complain) -> Path | None:
    """Finds the image on a line of a list, relative to root or list."""
    beside = os.path.normpath(listing.parent / line.replace("\\", "/"))
    if not file_exists(root / line) and file_exists(beside):
        return find_image(root, beside, str(listing), complain)
    return find_image(root, line, str(listing), complain)


def is_label(file: Path) -> bool:
    """Returns True if a text file contains lines of objects, unlike a README."""
    if file.suffix.lower() != ".txt" or is_class_list(file.name):
        return False
    try:
        lines = read_text(file, ignore_issue).splitlines()
    except DataError:
        return False
    words = next((line.replace(",", " ").split() for line in lines if line.strip()), ["0"] * 5)
    return len(words) >= 5 and all(map(_is_number, words[1:]))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def label_path(image: Path, root: Path) -> Path:
    """Returns the path of the label file of an image, whether or not it exists."""
    folder = label_folder(image.parent, root)
    label = _find_label(folder, image)
    # Only without a folder of labels, in which files may be missing on purpose.
    beside = _find_label(image.parent, image)
    return beside if not file_exists(folder) and file_exists(beside) else label


def _find_label(folder: Path, image: Path) -> Path:
    usual = folder / f"{image.stem}.txt"
    spellings = (folder / f"{image.stem}{suffix}" for suffix in (".TXT", ".Txt"))
    label = next((path for path in (usual, *spellings) if file_exists(path)), None)
    if label is None and (encoded := find_encoded(folder, usual.name)):
        label = None if has_image(image.parent, Path(encoded).stem) else Path(encoded)
    return label or usual


def label_folder(images: Path, root: Path) -> Path:
    """Returns the folder of labels: the last `images` below root becomes `labels`."""
    below = os.path.relpath(images, root)  # begins with .. if images are elsewhere
    folders = [*Path(below).parts]
    lowered = [folder.lower() for folder in folders]
    if "images" not in lowered:
        return root.joinpath(*folders)
    last = len(lowered) - 1 - lowered[::-1].index("images")
    top = root.joinpath(*folders[:last])
    spellings = [name for name in ("labels", "Labels", "LABELS") if file_exists(top / name)]
    return top.joinpath(*spellings[:1] or ("labels",), *folders[last + 1 :])


def _make_image(path: Path, label: Path, image_id: int, opener: Opener) -> RawImage:
    size = read_size(path, opener)
    return RawImage(
        path, image_id, size.width, size.height, [], str(label), size_known=size.is_known
    )


class _Line(NamedTuple):
    """A line of a label file; numbers: the numbers after the class."""

    image: RawImage
    place: int
    label: float
    numbers: list[float]

    @property
    def where(self) -> str:
        return f"{self.image.where}:{self.place}"


def _parse_lines(image: RawImage, complain: Complain) -> list[_Line]:
    try:
        text = read_text_of_image(Path(image.where), complain)
    except Malformed as error:
        complain(replace(error.issue, image=str(image.path)))
        return []
    parsed = []
    for place, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                label, *numbers = map(float, line.split())
            except ValueError:
                image.lost += 1
                message = (
                    f"{line[:80]!r}: expected five numbers separated by spaces: class cx cy w h"
                )
                where = f"{image.where}:{place}"
                complain(Issue("annotation_line", message, str(image.path), where))
            else:
                parsed.append(_Line(image, place, label, numbers))
    return parsed


# --- what the numbers of a set are ----------------------------------------------------------------

_BOX, _OUTLINE, _NOTHING = "box", "outline", ""


def _read_columns(
    lines: Sequence[_Line], shape: tuple[int, int] | None, source: str, complain: Complain
) -> Mapping[int, str]:
    """Returns _BOX, _OUTLINE or _NOTHING for each line length of a set.

    Args: shape: number of points, and numbers per point, from a data file.
    Raises: DataError: the numbers are ambiguous.
    """
    rows_of: dict[int, list[list[float]]] = defaultdict(list)
    for line in lines:
        rows_of[len(line.numbers)].append(line.numbers)
    tables = {count: np.array(rows, np.float64) for count, rows in rows_of.items()}
    # Lines with columns after a box all have the same length; outlines vary in length.
    outlines = sum(count >= _FEWEST_OUTLINE and count % 2 == 0 for count in tables) > 1
    form_of_count = {}
    for count, table_RN in tables.items():
        form_of_count[count], message = _column_form(table_RN, shape, outlines)
        if form_of_count[count] == _BOX and count > 4:
            message = f"{len(table_RN)} lines of {count + 1} numbers: class cx cy w h and {message}"
            complain(Issue("label_columns", f"{message}, not used", where=source))
        elif message:
            first = next(line for line in lines if len(line.numbers) == count)
            raise DataError(
                f"{len(table_RN)} lines of {count + 1} numbers could be {message}",
                code="labels_ambiguous",
                where=first.where,
                fix="write only `class cx cy w h`; for key points, add kpt_shape: [POINTS, 2] to "
                "the data.yaml beside the images",
            )
    return form_of_count


def _column_form(
    table_RN: np.ndarray, shape: tuple[int, int] | None, outlines: bool
) -> tuple[str, str]:
    """Returns the form of lines of N numbers, and the meaning of numbers after their boxes.

    If the form is ambiguous, the second result describes what the lines could be.

    Args: outlines: lines of the set vary in length, as only those of outlines do.
    """
    count = table_RN.shape[1]
    further_RN = table_RN[:, 4:]
    if count == 4:
        return _BOX, ""
    if shape is not None and count == 4 + shape[0] * shape[1]:
        return _BOX, "key points"
    if count < 4 or not np.isfinite(table_RN).all():
        return (_OUTLINE if count >= _FEWEST_OUTLINE and count % 2 == 0 else _NOTHING), ""
    if count == 5 and _are_scores(further_RN[:, 0]):
        outside = 1 - _inside_image(table_RN[:, :4]).mean()
        if (
            len(table_RN) >= _MIN_EXAMPLES
            and outside > 0.1
            and _inside_image(table_RN[:, 1:]).all()
        ):
            return _NOTHING, "a score in front of a box: class score cx cy w h"
        return _BOX, f"a score ({further_RN.min():g} to {further_RN.max():g})"
    if count == 5 and _are_integers(further_RN[:, 0]):
        return _BOX, "a track number"
    # If all numbers are far beyond 1, they are outlines in pixels, rejected later like boxes in
    # pixels.
    far_R = (np.abs(further_RN) > _FAR).any(1) & (np.abs(table_RN[:, :4]) <= _FAR).any(1)
    is_outline = count >= _FEWEST_OUTLINE and count % 2 == 0 and far_R.mean() <= 0.5
    if is_outline and outlines:
        return _OUTLINE, ""
    tracked = count == 6 and _are_scores(further_RN[:, 0]) and _are_integers(further_RN[:, 1])
    if tracked and (not is_outline or _inside_image(table_RN[:, :4]).all()):
        return _BOX, "a score and a track number"
    has_visibility = (count - 4) % 3 == 0 and np.isin(table_RN[:, 6::3], (0, 1, 2)).all()
    if has_visibility and (not is_outline or _boxes_surround_points(table_RN, 3)):
        return _BOX, "key points with visibility"
    if count % 2:
        return _NOTHING, ""
    if not is_outline:
        return _NOTHING, "neither boxes nor outlines: they have numbers up to " + (
            f"{np.abs(table_RN).max():g}"
        )
    if _boxes_surround_points(table_RN, 2) and not _are_plain_outlines(table_RN):
        return _NOTHING, "outlines or boxes with key points"
    return _OUTLINE, ""


def _are_scores(column_R: np.ndarray) -> bool:
    return bool(((column_R >= 0) & (column_R <= 1)).all())


def _are_integers(column_R: np.ndarray) -> bool:
    return bool(((column_R >= 0) & (column_R == column_R.round())).all())


def _inside_image(boxes_R4: np.ndarray) -> np.ndarray:
    """Finds boxes, given as centre and sides, that lie inside their images: [R] bool."""
    low_R2, high_R2 = boxes_R4[:, :2] - boxes_R4[:, 2:] / 2, boxes_R4[:, :2] + boxes_R4[:, 2:] / 2
    inside_R2 = (low_R2 >= -_BORDER) & (high_R2 <= 1 + _BORDER) & (boxes_R4[:, 2:] > 0)
    return np.asarray(inside_R2.all(1))


def _boxes_surround_points(table_RN: np.ndarray, width: int) -> bool:
    """Returns True if the box of each line, its first four numbers, surrounds its points."""
    if not _inside_image(table_RN[:, :4]).all():
        return False
    points_RK2 = table_RN[:, 4:].reshape(len(table_RN), -1, width)[..., :2]
    shown_RK = (points_RK2 != 0).any(-1)  # a point that is not annotated is 0 0
    off_RK2 = np.abs(points_RK2 - table_RN[:, None, :2]) - table_RN[:, None, 2:4] / 2
    return bool((off_RK2.max(-1) <= _BORDER)[shown_RK].all())


def _are_plain_outlines(table_RN: np.ndarray) -> bool:
    """Returns True if no line crosses itself or has a far-off second point.

    In lines of boxes with points, the second point would be the size of the box, which is unrelated
    to the positions of the points.
    """
    for row_N in table_RN[:1000]:
        ring_K2 = row_N.reshape(-1, 2)
        rest_K2 = np.delete(ring_K2, 1, axis=0)
        middle_2, reach = rest_K2.mean(0), np.ptp(rest_K2, axis=0).max()
        if np.abs(ring_K2[1] - middle_2).max() > 2 * reach or _self_intersects(ring_K2):
            return False
    return True


def _self_intersects(ring_K2: np.ndarray) -> bool:
    """Returns True if two edges of a ring cross."""
    begin_K2, end_K2 = ring_K2, np.roll(ring_K2, -1, axis=0)

    def side_KK(of_K2: np.ndarray) -> np.ndarray:
        """Computes on which side of edge i a point j lies: -1, 0 or 1."""
        edge_K12 = (end_K2 - begin_K2)[:, None]
        to_KK2 = of_K2[None] - begin_K2[:, None]
        return np.sign(edge_K12[..., 0] * to_KK2[..., 1] - edge_K12[..., 1] * to_KK2[..., 0])

    parts_KK = side_KK(begin_K2) * side_KK(end_K2) < 0
    return bool((parts_KK & parts_KK.T).any())


def _warn_if_one_based(
    lines: Sequence[_Line], names: Sequence[str], source: str, complain: Complain
) -> None:
    """Warns if class numbers seem to start at 1."""
    used = {line.label for line in lines}
    if used and min(used) == 1 and max(used) == len(names):
        message = f"classes are numbered 1 to {len(names)}; YOLO counts from 0"
        fix = "subtract 1 from the first number of each line of the label files"
        complain(Issue("class_unknown", message, where=source, fix=fix))


class _ClassNumbers:
    """A map of class numbers from lists beside label files to those of the set."""

    def __init__(self, root: Path, names: tuple[str, ...], source: str, complain: Complain) -> None:
        self._root = root
        self._names = names
        self._number_of = {name: number for number, name in enumerate(names)}
        self._source = source
        self._complain = complain
        self._lists: dict[str, tuple[str, tuple[str, ...]]] = {}

    def number(self, line: _Line) -> int:
        """Returns the class number of a line.

        Raises: Malformed: its number is not a class.
        """
        where, names = self._list_of(line.image)
        label = line.label
        if not 0 <= label < len(names) or label != int(label):
            message = f"class {label:g}: expected 0 to {len(names) - 1} ({', '.join(names)})"
            raise Malformed(Issue("class_unknown", message, where=line.where))
        if names is self._names:
            return int(label)
        name = names[int(label)]
        if name not in self._number_of:
            message = (
                f"class {label:g} is {name!r} in {where}; expected one of {abbreviate(self._names)}"
            )
            raise Malformed(Issue("class_unknown", message, where=line.where))
        return self._number_of[name]

    def _list_of(self, image: RawImage) -> tuple[str, tuple[str, ...]]:
        place = os.path.dirname(image.where)
        if place not in self._lists:
            class_list = nearest_class_list(self._root, (Path(place), image.path.parent))
            if class_list is None or class_list[1] == self._names[: len(class_list[1])]:
                self._lists[place] = "", self._names
            else:
                message = (
                    f"{abbreviate(class_list[1])}: matched by name with {abbreviate(self._names)}"
                )
                self._complain(Issue("class_list_differs", message, where=class_list[0]))
                self._lists[place] = class_list
        return self._lists[place]


def nearest_class_list(root: Path, folders: Sequence[Path]) -> tuple[str, tuple[str, ...]] | None:
    """Finds the class list nearest to the folders, up to root; returns its path and names."""
    for folder in folders:
        for place in (folder, *folder.parents):
            if place == root or not place.is_relative_to(root):
                break
            for file, names in read_class_lists(place, ignore_issue).items():
                return str(file), names
    for file, names in read_class_lists(root, ignore_issue).items():
        return str(file), names
    return None


def _make_object(line: _Line, form: str, classes: _ClassNumbers) -> RawObject:
    """Builds the object that a line describes.

    Raises: Malformed: the line does not describe an object.
    """
    if form == _NOTHING:
        text = " ".join(f"{number:g}" for number in (line.label, *line.numbers))
        message = (
            f"{text[:80]!r} has {len(line.numbers) + 1} numbers; expected five: class cx cy w "
            f"h, or an outline: class x1 y1 x2 y2 x3 y3 ..."
        )
        raise Malformed(Issue("annotation_line", message, where=line.where))
    label, image = classes.number(line), line.image
    if form == _OUTLINE:
        part_K2, box = _outline_in_pixels(line.numbers, image)
        return RawObject(box, label, line.where, polygons=(part_K2,))
    cx, cy, w, h = line.numbers[:4]
    (x1, x2), (y1, y2) = _to_edges(cx, w, image.width), _to_edges(cy, h, image.height)
    return RawObject((x1, y1, x2, y2), label, line.where)


def _outline_in_pixels(numbers: Sequence[float], image: RawImage) -> tuple[np.ndarray, Box]:
    """Converts an outline to points [K, 2] in pixels, and the box around them."""
    part_K2 = np.array(numbers).reshape(-1, 2) * (image.width, image.height)
    (x1, y1), (x2, y2) = part_K2.min(0).tolist(), part_K2.max(0).tolist()
    return part_K2, (x1, y1, x2, y2)


def _to_edges(centre: float, side: float, pixels: int) -> tuple[float, float]:
    return (centre - side / 2) * pixels, (centre + side / 2) * pixels


def _report_shared_labels(images: Sequence[RawImage], complain: Complain) -> None:
    first_of: dict[str, RawImage] = {}
    for image in images:
        first = first_of.setdefault(image.where, image)
        if first.path != image.path and image.objects:
            message = f"the label file of both {first.path.name} and {image.path.name}"
            complain(Issue("label_shared", message, str(image.path), image.where))


def write_yolo(
    image_list: Path, labels: Path, raw: RawSet, names: Sequence[str], list_lines: Sequence[str]
) -> list[str]:
    """Writes a list and label files for `read_yolo`.

    Boxes, outlines and classes survive.  YOLO has a box or one outline per object, so an outline is
    written if it is the only one and fills its box.  Crowds are left out: they would be learned as
    single objects.

    Args:
        labels: folder of the label files.
        names: image names, relative to their folder, distinct even without their suffix.
        list_lines: line of each image in the list.
    Returns: a line for each kind of property that YOLO cannot represent.
    Raises: UserError: a file cannot be written, or exists already.
    """
    lost = dict.fromkeys(("crowd", "outline", "extent", "area", "extra"), 0)
    for image, name in zip(raw.images, names):
        lines = []
        lost["extra"] += bool(image.extra)
        for annotation in image.objects:
            if annotation.crowd:
                lost["crowd"] += 1
                continue
            outline = _outline_numbers(annotation, image)
            lost["outline"] += bool(annotation.polygons) and outline is None
            lost["extent"] += outline is not None and outline[1] != annotation.box
            lost["area"] += annotation.area is not None
            lost["extra"] += bool(annotation.extra)
            if outline is not None:
                numbers = outline[0]
            else:
                x1, y1, x2, y2 = annotation.box
                (cx, w), (cy, h) = _to_centre(x1, x2, image.width), _to_centre(y1, y2, image.height)
                numbers = [cx, cy, w, h]
            lines.append(" ".join([str(annotation.label), *map(_format_decimal, numbers)]))
        text = "".join(f"{line}\n" for line in lines)
        write_text(labels / f"{os.path.splitext(name)[0]}.txt", text)
    write_text(image_list, "".join(f"{line}\n" for line in list_lines))
    descriptions = {
        "crowd": "crowds (difficult objects): left out",
        "outline": "objects: outlines of several parts, or that do not fill the box: box only",
        "extent": "objects: the box becomes the extent of the outline (within a pixel)",
        "area": "objects: area",
        "extra": "images and objects: ids or other properties",
    }
    return [f"{count} {descriptions[kind]}" for kind, count in lost.items() if count]


def _outline_numbers(annotation: RawObject, image: RawImage) -> tuple[list[float], Box] | None:
    """Returns the numbers of an object's outline and their box; None if YOLO cannot hold them."""
    if len(annotation.polygons) != 1 or len(annotation.polygons[0]) < 3:
        return None
    numbers = [
        _shortest_fraction(value, side)
        for point in annotation.polygons[0].tolist()
        for value, side in zip(point, (image.width, image.height))
    ]
    _, box = _outline_in_pixels(numbers, image)
    fills = all(abs(a - b) <= _OUTLINE_TOLERANCE for a, b in zip(box, annotation.box))
    return (numbers, box) if fills else None


def _shortest_fraction(value: float, pixels: int) -> float:
    """Finds the shortest fraction that is read as exactly this many pixels."""
    exact = value / pixels
    candidates = (round(exact, digits) for digits in range(6, 17))
    return next((short for short in candidates if short * pixels == value), exact)


def _to_centre(low: float, high: float, pixels: int) -> tuple[float, float]:
    """Returns (centre, side) as shortest fractions that `_to_edges` maps to these edges.

    Often no 64-bit fractions do so exactly; the nearest ones are then off by 1e-12 pixels.
    """
    centre, side = (low + high) / 2 / pixels, (high - low) / pixels
    candidates = ((round(centre, digits), round(side, digits)) for digits in range(6, 17))
    exact = (short for short in candidates if _to_edges(*short, pixels) == (low, high))
    return next(exact, (centre, side))


def _format_decimal(value: float) -> str:
    """Formats a number exactly, without an exponent, which some readers do not know."""
    return np.format_float_positional(value, trim="0")
