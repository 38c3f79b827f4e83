"""YOLO text files: a line `class cx cy w h` an object.

Further numbers may be an outline, `class x1 y1 x2 y2 x3 y3 ...`, of which the box is what it
fills; or a score, the number of a track, or points, behind a box.  One line does not tell which,
all lines of a set do: `_read_columns`.
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
    class_names,
    encoded_name,
    files_below,
    find_image,
    find_repeats,
    has_image,
    is_name_list,
    is_there,
    listed,
    name_lists,
    own_size,
    points_shape,
    quietly,
    read_list,
    read_text,
    read_text_of_image,
    write_text,
)
from ppdist.data.image import is_image_name
from ppdist.data.types import Box, Complain, Issue, RawImage, RawObject, RawSet
from ppdist.distributed.progress import Progress
from ppdist.runtime.decoder import unread_kind

_LOGGER = logging.getLogger("ppdist.data")
_FEWEST_OUTLINE = 6  # numbers: three points
_OUTLINE_TOLERANCE = 1.0  # pixels by which an outline's extent may differ from its box
_FAR = 2.0  # no fraction of an image, however far an object sticks out
_BORDER = 0.02  # of an image: tools round
_FEWEST_ALIKE = 3  # lines that show a rule


def read_yolo(
    root: Path,
    folders: Sequence[Path],
    annotations: Sequence[Path],
    names: tuple[str, ...],
    complain: Complain,
    *,
    opener: Opener = DISK,
) -> RawSet:
    """The images of folders, or of files that list them.

    Paths in a list are relative to root, or else to the list.  The label of .../images/a/b.jpg is
    .../labels/a/b.txt, without a folder `images` below root, or without one called so, it lies
    beside the image; where a folder of labels is given, that of images/a/b.jpg is
    annotations/a/b.txt.  An image without a label file shows no object.  Numbers of classes are
    those of the nearest list of classes above a label file, which is matched by name.

    Args:
        folders: of the images; ignored with lists.
        annotations: none, the folder of the labels of the only folder of images, or lists.
        names: of the classes, by number; none: see `class_names`.
        opener: of the images.
    Raises: DataError: no class names, no label file at all, or it is unclear what the
        numbers in them are.
    """
    known = class_names(root, names, complain)
    if not known:
        raise DataError(
            "YOLO labels do not name their classes",
            code="class_names_missing",
            where=str(root),
            fix=f"set data.class_names: [...] or write them, one a line, to {root / 'classes.txt'}",
        )
    pairs: list[tuple[Path, Path]] = []
    if not annotations or annotations[0].is_dir():
        for images in folders:
            pairs += _in_folder(root, images, annotations[0] if annotations else None, complain)
    else:
        for listing in annotations:
            lines = read_list(listing, complain)
            found = [_listed_image(root, line, listing, complain) for line in lines]
            pairs += [(path, label_file(path, root)) for path in found if path is not None]
    source = ", ".join(map(str, annotations or folders))
    labelled = [is_there(label) for _, label in pairs]
    if pairs and not any(labelled):
        _refuse_unlabelled(pairs, source)
    if not all(labelled):
        what = (
            f"{labelled.count(False)} of {len(pairs)} images have no label file: used as background"
        )
        complain(Issue("label_missing", what, where=source))
    for path, label in pairs:
        if label.stem != path.stem:  # see `_label_in`
            what = f"the label file of {path.name}: one of the names is percent-encoded"
            complain(Issue("label_encoded", what, str(path), str(label)))
    progress, images_read, lines_read = Progress(_LOGGER, f"reading {source}", len(pairs)), [], []
    for position, ((path, label), present) in enumerate(zip(pairs, labelled), start=1):
        image = _image(path, label, position, opener)
        images_read.append(image)
        lines_read += _lines(image, complain) if present else []
        progress.add()
    columns = _read_columns(lines_read, points_shape(root), source, complain)
    _hint_at_numbers(lines_read, known, source, complain)
    numbers_in = _Classes(root, known, source, complain)
    for line in lines_read:
        try:
            line.image.objects.append(_object(line, columns[len(line.numbers)], numbers_in))
        except Malformed as wrong:
            line.image.lost += 1
            complain(replace(wrong.issue, image=str(line.image.path)))
    find_repeats(images_read, complain)
    _find_shared(images_read, complain)
    return RawSet(images_read, known, tuple(range(1, len(known) + 1)), source)


def _refuse_unlabelled(pairs: Sequence[tuple[Path, Path]], source: str) -> None:
    absent = [path for path, _ in pairs if not is_there(path)]
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


def _in_folder(
    root: Path, images: Path, annotations: Path | None, complain: Complain
) -> list[tuple[Path, Path]]:
    """Each image in or below a folder, with its label file."""
    start = len(os.path.join(os.path.abspath(images), ""))
    names_below = [Path(file[start:]) for file in files_below(images)]
    below = sorted(name for name in names_below if is_image_name(name.name))
    unread = [name for name in names_below if unread_kind(name.name)]
    for name in unread:
        path, kind = str(images / name), unread_kind(name.name)
        what = f"{kind}: this kind is not read; make it JPEG or PNG"
        complain(Issue("image_kind_unread", what, path, path))

    def label_of(name: Path) -> Path:
        if annotations is None:
            return label_file(images / name, root)
        return _label_in(annotations / name.parent, images / name)

    labels = [label_of(name) for name in (*below, *unread)]
    known = {os.path.abspath(label) for label in labels}
    for file in files_below(annotations or label_folder(images, root)):
        if file not in known and is_label(Path(file)):
            what = f"there is no image of this name in {images}"
            complain(Issue("label_without_image", what, where=file))
    return [(images / name, label) for name, label in zip(below, labels)]


def _listed_image(root: Path, line: str, listing: Path, complain: Complain) -> Path | None:
    """Image on a line of a list, relative to root or list."""
    beside = os.path.normpath(listing.parent / line.replace("\\", "/"))
    if not is_there(root / line) and is_there(beside):
        return find_image(root, beside, str(listing), complain)
    return find_image(root, line, str(listing), complain)


def is_label(file: Path) -> bool:
    """Whether a text file has lines of objects, unlike a README."""
    if file.suffix.lower() != ".txt" or is_name_list(file.name):
        return False
    try:
        lines = read_text(file, quietly).splitlines()
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


def label_file(image: Path, root: Path) -> Path:
    """Where the objects of an image are, or are expected."""
    folder = label_folder(image.parent, root)
    label = _label_in(folder, image)
    beside = _label_in(image.parent, image)
    return beside if not is_there(folder) and is_there(beside) else label


def _label_in(folder: Path, image: Path) -> Path:
    usual = folder / f"{image.stem}.txt"
    others = (folder / f"{image.stem}{suffix}" for suffix in (".TXT", ".Txt"))
    label = next((path for path in (usual, *others) if is_there(path)), None)
    if label is None and (encoded := encoded_name(folder, usual.name)):
        label = None if has_image(image.parent, Path(encoded).stem) else Path(encoded)
    return label or usual


def label_folder(images: Path, root: Path) -> Path:
    """Folder of labels: the last `images` below root becomes `labels`."""
    below = os.path.relpath(images, root)  # with .. where images are elsewhere
    folders = [*Path(below).parts]
    small = [each.lower() for each in folders]
    if "images" not in small:
        return root.joinpath(*folders)
    last = len(small) - 1 - small[::-1].index("images")
    top = root.joinpath(*folders[:last])
    spelt = [each for each in ("labels", "Labels", "LABELS") if is_there(top / each)]
    return top.joinpath(*spelt[:1] or ("labels",), *folders[last + 1 :])


def _image(path: Path, label: Path, image_id: int, opener: Opener) -> RawImage:
    size = own_size(path, opener)
    return RawImage(path, image_id, size.width, size.height, [], str(label), size_known=size.known)


class _Line(NamedTuple):
    """A line of a label file; numbers: those behind the class."""

    image: RawImage
    place: int
    label: float
    numbers: list[float]

    @property
    def where(self) -> str:
        return f"{self.image.where}:{self.place}"


def _lines(image: RawImage, complain: Complain) -> list[_Line]:
    try:
        text = read_text_of_image(Path(image.where), complain)
    except Malformed as wrong:
        complain(replace(wrong.issue, image=str(image.path)))
        return []
    found = []
    for place, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                label, *numbers = map(float, line.split())
            except ValueError:
                image.lost += 1
                what = f"{line[:80]!r}: expected five numbers separated by spaces: class cx cy w h"
                where = f"{image.where}:{place}"
                complain(Issue("annotation_line", what, str(image.path), where))
            else:
                found.append(_Line(image, place, label, numbers))
    return found


# --- what the numbers of a set are ----------------------------------------------------------------

_BOX, _OUTLINE, _NOTHING = "box", "outline", ""


def _read_columns(
    lines: Sequence[_Line], shape: tuple[int, int] | None, source: str, complain: Complain
) -> Mapping[int, str]:
    """_BOX, _OUTLINE or _NOTHING for each line length of a set.

    Args: shape: of points, as a data file says it.
    Raises: DataError: the numbers are ambiguous.
    """
    rows_of: dict[int, list[list[float]]] = defaultdict(list)
    for line in lines:
        rows_of[len(line.numbers)].append(line.numbers)
    tables = {count: np.array(rows, np.float64) for count, rows in rows_of.items()}
    # Columns after a box are equally many everywhere; outlines vary in length.
    outlines = sum(count >= _FEWEST_OUTLINE and count % 2 == 0 for count in tables) > 1
    found = {}
    for count, table_RN in tables.items():
        found[count], what = _column_form(table_RN, shape, outlines)
        if found[count] == _BOX and count > 4:
            what = f"{len(table_RN)} lines of {count + 1} numbers: class cx cy w h and {what}"
            complain(Issue("label_columns", f"{what}, not used", where=source))
        elif what:
            first = next(line for line in lines if len(line.numbers) == count)
            raise DataError(
                f"{len(table_RN)} lines of {count + 1} numbers could be {what}",
                code="labels_ambiguous",
                where=first.where,
                fix="write only `class cx cy w h`; for key points, add kpt_shape: [POINTS, 2] to "
                "the data.yaml beside the images",
            )
    return found


def _column_form(
    table_RN: np.ndarray, shape: tuple[int, int] | None, outlines: bool
) -> tuple[str, str]:
    """Form of lines of N numbers, and what follows their boxes.

    Where the form is ambiguous, the second result says what the lines could be.

    Args: outlines: other lines of the set are longer or shorter, as only those of outlines are.
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
        outside = 1 - _inside(table_RN[:, :4]).mean()
        if len(table_RN) >= _FEWEST_ALIKE and outside > 0.1 and _inside(table_RN[:, 1:]).all():
            return _NOTHING, "a score in front of a box: class score cx cy w h"
        return _BOX, f"a score ({further_RN.min():g} to {further_RN.max():g})"
    if count == 5 and _are_numbers(further_RN[:, 0]):
        return _BOX, "a track number"
    # In pixels all are far: those are outlines, and refused as boxes in pixels are.
    far_R = (np.abs(further_RN) > _FAR).any(1) & (np.abs(table_RN[:, :4]) <= _FAR).any(1)
    is_outline = count >= _FEWEST_OUTLINE and count % 2 == 0 and far_R.mean() <= 0.5
    if is_outline and outlines:
        return _OUTLINE, ""
    tracked = count == 6 and _are_scores(further_RN[:, 0]) and _are_numbers(further_RN[:, 1])
    if tracked and (not is_outline or _inside(table_RN[:, :4]).all()):
        return _BOX, "a score and a track number"
    seen = (count - 4) % 3 == 0 and np.isin(table_RN[:, 6::3], (0, 1, 2)).all()
    if seen and (not is_outline or _surround(table_RN, 3)):
        return _BOX, "key points with visibility"
    if count % 2:
        return _NOTHING, ""
    if not is_outline:
        return _NOTHING, "neither boxes nor outlines: they have numbers up to " + (
            f"{np.abs(table_RN).max():g}"
        )
    if _surround(table_RN, 2) and not _are_plain_outlines(table_RN):
        return _NOTHING, "outlines or boxes with key points"
    return _OUTLINE, ""


def _are_scores(column_R: np.ndarray) -> bool:
    return bool(((column_R >= 0) & (column_R <= 1)).all())


def _are_numbers(column_R: np.ndarray) -> bool:
    return bool(((column_R >= 0) & (column_R == column_R.round())).all())


def _inside(boxes_R4: np.ndarray) -> np.ndarray:
    """Which are boxes, as centre and sides, inside their images: [R] bool."""
    low_R2, high_R2 = boxes_R4[:, :2] - boxes_R4[:, 2:] / 2, boxes_R4[:, :2] + boxes_R4[:, 2:] / 2
    inside_R2 = (low_R2 >= -_BORDER) & (high_R2 <= 1 + _BORDER) & (boxes_R4[:, 2:] > 0)
    return np.asarray(inside_R2.all(1))


def _surround(table_RN: np.ndarray, width: int) -> bool:
    """Whether each line's box, its first four numbers, surrounds its points."""
    if not _inside(table_RN[:, :4]).all():
        return False
    points_RK2 = table_RN[:, 4:].reshape(len(table_RN), -1, width)[..., :2]
    shown_RK = (points_RK2 != 0).any(-1)  # a point that is not annotated is 0 0
    off_RK2 = np.abs(points_RK2 - table_RN[:, None, :2]) - table_RN[:, None, 2:4] / 2
    return bool((off_RK2.max(-1) <= _BORDER)[shown_RK].all())


def _are_plain_outlines(table_RN: np.ndarray) -> bool:
    """Whether no line crosses itself or has a far-off second point.

    In lines of boxes with points, the second point would be the size of the box, which has nothing
    to do with the places of the points.
    """
    for row_N in table_RN[:1000]:
        ring_K2 = row_N.reshape(-1, 2)
        others_K2 = np.delete(ring_K2, 1, axis=0)
        middle_2, reach = others_K2.mean(0), np.ptp(others_K2, axis=0).max()
        if np.abs(ring_K2[1] - middle_2).max() > 2 * reach or _crosses(ring_K2):
            return False
    return True


def _crosses(ring_K2: np.ndarray) -> bool:
    """Whether two edges of a ring cross."""
    begin_K2, end_K2 = ring_K2, np.roll(ring_K2, -1, axis=0)

    def side_KK(of_K2: np.ndarray) -> np.ndarray:
        """Of which side of edge i a point j lies."""
        edge_K12 = (end_K2 - begin_K2)[:, None]
        to_KK2 = of_K2[None] - begin_K2[:, None]
        return np.sign(edge_K12[..., 0] * to_KK2[..., 1] - edge_K12[..., 1] * to_KK2[..., 0])

    parts_KK = side_KK(begin_K2) * side_KK(end_K2) < 0
    return bool((parts_KK & parts_KK.T).any())


def _hint_at_numbers(
    lines: Sequence[_Line], names: Sequence[str], source: str, complain: Complain
) -> None:
    """Warns if class numbers seem to start at 1."""
    used = {line.label for line in lines}
    if used and min(used) == 1 and max(used) == len(names):
        what = f"classes are numbered 1 to {len(names)}; YOLO counts from 0: subtract 1"
        complain(Issue("class_unknown", what, where=source))


class _Classes:
    """Maps class numbers of lists beside label files to the set's."""

    def __init__(self, root: Path, names: tuple[str, ...], source: str, complain: Complain) -> None:
        self._root = root
        self._names = names
        self._number_of = {name: number for number, name in enumerate(names)}
        self._source = source
        self._complain = complain
        self._lists: dict[str, tuple[str, tuple[str, ...]]] = {}

    def number(self, line: _Line) -> int:
        """Class number of a line.

        Raises: Malformed: it is none.
        """
        where, names = self._list_of(line.image)
        label = line.label
        if not 0 <= label < len(names) or label != int(label):
            what = f"class {label:g}: expected 0 to {len(names) - 1} ({', '.join(names)})"
            raise Malformed(Issue("class_unknown", what, where=line.where))
        if names is self._names:
            return int(label)
        name = names[int(label)]
        if name not in self._number_of:
            what = f"class {label:g} is {name!r} in {where}; expected one of {listed(self._names)}"
            raise Malformed(Issue("class_unknown", what, where=line.where))
        return self._number_of[name]

    def _list_of(self, image: RawImage) -> tuple[str, tuple[str, ...]]:
        place = os.path.dirname(image.where)
        if place not in self._lists:
            found = own_names(self._root, (Path(place), image.path.parent))
            if found is None or found[1] == self._names[: len(found[1])]:
                self._lists[place] = "", self._names
            else:
                what = f"{listed(found[1])}: matched by name with {listed(self._names)}"
                self._complain(Issue("class_list_differs", what, where=found[0]))
                self._lists[place] = found
        return self._lists[place]


def own_names(root: Path, folders: Sequence[Path]) -> tuple[str, tuple[str, ...]] | None:
    """Class list nearest to the folders, up to root, and its names."""
    for folder in folders:
        for place in (folder, *folder.parents):
            if place == root or not place.is_relative_to(root):
                break
            for file, names in name_lists(place, quietly).items():
                return str(file), names
    for file, names in name_lists(root, quietly).items():
        return str(file), names
    return None


def _object(line: _Line, form: str, classes: _Classes) -> RawObject:
    """Object of a line.

    Raises: Malformed: it is none.
    """
    if form == _NOTHING:
        text = " ".join(f"{number:g}" for number in (line.label, *line.numbers))
        what = (
            f"{text[:80]!r} has {len(line.numbers) + 1} numbers; expected five: class cx cy w "
            f"h, or an outline: class x1 y1 x2 y2 x3 y3 ..."
        )
        raise Malformed(Issue("annotation_line", what, where=line.where))
    label, image = classes.number(line), line.image
    if form == _OUTLINE:
        part_K2, box = _outline(line.numbers, image)
        return RawObject(box, label, line.where, polygons=(part_K2,))
    cx, cy, w, h = line.numbers[:4]
    (x1, x2), (y1, y2) = _edges(cx, w, image.width), _edges(cy, h, image.height)
    return RawObject((x1, y1, x2, y2), label, line.where)


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
            if outline is not None:
                numbers = outline[0]
            else:
                x1, y1, x2, y2 = thing.box
                (cx, w), (cy, h) = _centred(x1, x2, image.width), _centred(y1, y2, image.height)
                numbers = [cx, cy, w, h]
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
    """Numbers of an object's outline and their box; None: unfit."""
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


def _centred(low: float, high: float, pixels: int) -> tuple[float, float]:
    """(centre, side) as shortest fractions that `_edges` maps to these edges.

    Often no fractions of 64 bits do so exactly; the nearest are then off by 1e-12 pixels.
    """
    centre, side = (low + high) / 2 / pixels, (high - low) / pixels
    candidates = ((round(centre, digits), round(side, digits)) for digits in range(6, 17))
    exact = (short for short in candidates if _edges(*short, pixels) == (low, high))
    return next(exact, (centre, side))


def _decimal(value: float) -> str:
    """Exact decimal number without an exponent, which some readers do not know."""
    return np.format_float_positional(value, trim="0")
