"""Pascal VOC: one XML file an image (Everingham et al., VOC2012 development kit)."""

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from ppdist.data.annotations import Box, BoxPolicy, inside_folder, read_text, record
from ppdist.data.names import class_names, read_list
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError

_SIDES = ("xmin", "ymin", "xmax", "ymax")


class _Annotation(NamedTuple):
    """An XML file: its image's name, (width, height), and (class, corners, difficult) of each."""

    file: Path
    image: Path
    size: tuple[int, int]
    objects: list[tuple[str, Box, bool]]


def read_voc(
    root: Path,
    images: Path,
    image_list: Path,
    names: tuple[str, ...],
    bad_boxes: str,
    *,
    naming_list: Path | None = None,
) -> DetectionSet:
    """Records of the images a list names; their XML files are in root/Annotations.

    A line of the list is an image's name without suffix, or `IMAGE XML`, both relative to root.
    Corners are used as they stand: xmax is an edge, not the last pixel.  Objects marked difficult
    are treated like COCO's crowds: not learned, ignored in evaluation.

    Args:
        images: the folder of the images.
        names: of the classes, by number; none: see names.class_names, else the sorted names that
            the images of `naming_list` (the training split; by default `image_list`) use.
        bad_boxes: see BoxPolicy.
    Raises: DataError: an XML file is missing or malformed, or uses an unknown class.
    """
    annotations = _read(root, images, image_list)
    known = class_names(root, names)
    if not known:
        naming = annotations
        if naming_list is not None and naming_list != image_list:
            naming = _read(root, images, naming_list)
        known = tuple(sorted({name for entry in naming for name, *_ in entry.objects}))
    label_of = {name: label for label, name in enumerate(known)}
    policy = BoxPolicy(bad_boxes, image_list)
    records = []
    for position, (file, image, size, objects) in enumerate(annotations):
        boxes: list[Box] = []
        labels, crowd = [], []
        for number, (name, corners, difficult) in enumerate(objects, start=1):
            where = f"{file}: object {number}"
            if name not in label_of:
                raise DataError(f"{where}: class {name!r} is not among {', '.join(known)}")
            box = policy.apply(corners, *size, where)
            if box is not None:
                boxes.append(box)
                labels.append(label_of[name])
                crowd.append(difficult)
        records.append(record(image, position + 1, size, boxes, labels, crowd))
    ids = tuple(range(1, len(known) + 1))
    return DetectionSet(tuple(records), known, ids, str(image_list), policy.report())


def _read(root: Path, images: Path, image_list: Path) -> list[_Annotation]:
    result = []
    for line in read_list(image_list):
        words = line.rsplit(maxsplit=1)
        if line.lower().endswith(".xml") and len(words) == 2:
            image, file = (inside_folder(root, word, str(image_list)) for word in words)
            result.append(_parse(file)._replace(image=image))
            continue
        stem = words[0] if words[-1] in ("1", "0", "-1") else line  # VOC's lists of one class
        file = inside_folder(root / "Annotations", f"{stem}.xml", str(image_list))
        entry = _parse(file)
        named = inside_folder(images, str(entry.image), str(file))
        beside = images / f"{stem}{named.suffix}"  # <filename> is often stale: the list decides
        result.append(entry._replace(image=beside if beside.is_file() else named))
    return result


def _parse(file: Path) -> _Annotation:
    if not file.is_file():
        raise DataError(f"{file}: does not exist, but its image is listed")
    try:
        tree = ElementTree.fromstring(read_text(file))
        size = tree.find("size")
        if size is None:
            raise DataError(f"{file}: has no <size>; expected the image's width and height")
        width, height = (int(float(size.findtext(side, "0"))) for side in ("width", "height"))
        objects = [_object(entry) for entry in tree.iter("object")]
    except DataError:
        raise
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{file}: not a Pascal VOC annotation: {error}") from error
    if width <= 0 or height <= 0:
        raise DataError(f"{file}: <size> is {width}x{height}; expected the image's size in pixels")
    name = (tree.findtext("filename") or "").strip() or f"{file.stem}.jpg"
    return _Annotation(file, Path(name), (width, height), objects)


def _object(entry: ElementTree.Element) -> tuple[str, Box, bool]:
    x1, y1, x2, y2 = (float(entry.findtext(f"bndbox/{side}", "no number")) for side in _SIDES)
    difficult = entry.findtext("difficult", "0").strip() == "1"
    return entry.findtext("name", "").strip(), (x1, y1, x2, y2), difficult
