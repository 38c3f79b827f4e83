"""Pascal VOC: one XML file an image (VOC2012 development kit)."""

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from ppdist.common.errors import DataError
from ppdist.common.opener import DISK, Opener
from ppdist.data.datasets.annotations import (
    Malformed,
    area_in,
    class_names,
    files_below,
    find_image,
    find_repeats,
    has_image,
    is_there,
    outlines_in,
    quietly,
    read_list,
    read_text_of_image,
    size_of,
)
from ppdist.data.image import is_image_name
from ppdist.data.types import Box, Complain, Issue, RawImage, RawObject, RawSet
from ppdist.distributed.store import alive
from ppdist.runtime.decoder import IMAGE_SUFFIXES

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_OBJECT_TAGS = {"name", "bndbox", "difficult"}
_IMAGE_TAGS = {"filename", "size", "object"}
_PAIR = re.compile(  # names may have blanks in them
    rf"(.+?(?:{'|'.join(map(re.escape, IMAGE_SUFFIXES))})|\S+)\s+(.+\.xml)", re.IGNORECASE
)
_TAG = re.compile(r"[^\W\d][\w.-]*\Z")


def read_voc(
    root: Path,
    images: Path,
    annotations: Path,
    names: tuple[str, ...],
    complain: Complain,
    *,
    naming: Path | None = None,
    everything: bool = True,
    opener: Opener = DISK,
) -> RawSet:
    """Images that a list names, or those of a folder's XML files.

    A line of the list is an image's name without suffix, whose XML file is in root/Annotations, or
    `IMAGE XML`, both relative to root.  The image of a folder's a/b.xml lies beside it, or is
    images/a/b.jpg, or else the only one below `images` that is called so or as <filename> says.
    Corners are used as they stand: xmax is an edge, not the last pixel.  Objects marked difficult
    are treated like COCO's crowds: not learned, ignored in evaluation.  All other tags are in
    `extra`; ppdist once wrote areas and outlines into tags of its own, which are read.

    Args:
        images: the folder of the images.
        annotations: the list, or the folder of XML files, also below it.
        names: of the classes, by number; none: see `class_names`, else the sorted names that
            the images of `naming` (the training split; by default `annotations`) use.
        everything: also outlines and `extra`, which training without masks has no use for.
        opener: of the images.
    Raises: DataError: the list cannot be read, the folder has no XML file, class names contradict
        each other.
    """
    found = _read(root, images, annotations, complain, everything, opener)
    known = class_names(root, names, complain)
    if not known:
        naming_set = found
        if naming is not None and naming != annotations:
            naming_set = _read(root, images, naming, quietly, False, opener)
        known = tuple(sorted({name for _, labels in naming_set for name in labels}))
    label_of = {name: label for label, name in enumerate(known)}
    for image, labels in found:
        for thing, name in zip(image.objects, labels):
            thing.label = label_of.get(name, -1)
            if name not in label_of:
                what = f"class {name!r} is not among {', '.join(known)}"
                complain(Issue("class_unknown", what, str(image.path), thing.where))
        known_objects = [thing for thing in image.objects if thing.label >= 0]
        image.lost += len(image.objects) - len(known_objects)
        image.objects = known_objects
    kept = [image for image, _ in found]
    find_repeats(kept, complain)
    return RawSet(kept, known, tuple(range(1, len(known) + 1)), str(annotations))


def _read(
    root: Path,
    images: Path,
    annotations: Path,
    complain: Complain,
    everything: bool,
    opener: Opener,
) -> list[tuple[RawImage, list[str]]]:
    """Each image with its objects' class names; they have no label yet."""
    result: list[tuple[RawImage, list[str]]] = []
    is_folder = annotations.is_dir()
    entries = _of_folder if is_folder else _of_list
    for position, entry in enumerate(entries(root, images, annotations, complain), start=1):
        alive()
        if entry is None:
            continue
        file, path, image_of = entry
        try:
            tree = _parse(file, complain)
            if path is None:
                path = image_of(tree)
            if path is not None:
                image = _image(tree, file, path, position, complain, everything, opener)
                result.append((image, _add_objects(image, tree, complain, everything)))
        except Malformed as wrong:
            complain(replace(wrong.issue, image=str(path or "")))
    return result


# An XML file, and its image where that is known without opening the file, else how to find it.
_Entry = tuple[Path, Path | None, Callable[[ElementTree.Element], Path | None]]


def _of_list(
    root: Path, images: Path, image_list: Path, complain: Complain
) -> Iterator[_Entry | None]:
    """One entry per line of a list; None: image left out."""
    for line in read_list(image_list, complain):
        path: Path | None = None
        stem = ""
        paired = _PAIR.fullmatch(line)
        if paired:
            words = paired.groups()
            path = find_image(root, words[0], str(image_list), complain)
            file = find_image(root, words[1], str(image_list), complain)
        else:
            stem = _stem(root, line)
            suffix = ".XML" if is_there(root / "Annotations" / f"{stem}.XML") else ".xml"
            folder, usual = root / "Annotations", Path(f"{stem}{suffix}")
            issues: list[Issue] = []
            file = find_image(folder, str(usual), str(image_list), issues.append)
            renamed = file is not None and file.stem != usual.stem
            if file is not None and renamed and has_image(images / usual.parent, file.stem):
                file, issues = folder / usual, []  # that file is of another image
            for issue in issues:
                complain(issue)
        if file is None or (paired and path is None):
            yield None
            continue
        yield file, path, partial(_named, images=images, stem=stem, file=file, complain=complain)


def _of_folder(
    root: Path, images: Path, annotations: Path, complain: Complain
) -> Iterator[_Entry | None]:
    """One for each XML file of a folder."""
    files = [Path(file) for file in xml_files(annotations)]
    if not files:
        raise DataError(
            "holds no XML file, not even in subfolders",
            code="annotation_file_missing",
            where=str(annotations),
            fix="name the folder of the XML files, or a list of images, as data.*.annotations",
        )
    # By name, with and without suffix.  Label Studio percent-encodes some of the names: those are
    # looked for last, and an image is not that of another file where it has one of its own name.
    below: defaultdict[str, list[Path]] = defaultdict(list)
    decoded: defaultdict[str, list[Path]] = defaultdict(list)
    stems = {file.stem for file in files}
    for image in map(Path, files_below(images)):
        if is_image_name(image.name):
            for name in (image.name, image.stem):
                below[name].append(image)
                if image.stem not in stems:
                    decoded[unquote(name)].append(image)

    start = Path(os.path.abspath(annotations))
    for file in files:
        places = file.parent, Path(os.path.abspath(images)) / file.relative_to(start).parent
        exact, meant = below.get(file.stem, []), decoded.get(unquote(file.stem), [])
        only = (
            [each for each in exact if each.parent in places]
            or _with_suffix(file.parent / file.stem)
            or exact
            or [each for each in meant if each.parent in places]
            or meant
        )
        if len(only) == 1 and only[0].stem != file.stem:
            what = f"{file.stem}: not found; using {only[0]}"
            complain(Issue("image_elsewhere", what, str(only[0]), str(file)))
        yield (
            file,
            only[0] if len(only) == 1 else None,
            partial(_called, below=below, decoded=decoded, images=images, file=file),
        )


def _with_suffix(stem: Path) -> list[Path]:
    """Images with this stem and a known suffix."""
    suffixes = (each for suffix in IMAGE_SUFFIXES for each in (suffix, suffix.upper()))
    found = (stem.with_name(f"{stem.name}{suffix}") for suffix in suffixes)
    return [path for path in found if path.is_file()]


def _called(
    tree: ElementTree.Element,
    *,
    below: Mapping[str, list[Path]],
    decoded: Mapping[str, list[Path]],
    images: Path,
    file: Path,
) -> Path:
    """Image that <filename> means.

    Raises: Malformed: there is none, or several.
    """
    name = (tree.findtext("filename") or "").strip().replace("\\", "/").rpartition("/")[2]

    def called(text: str) -> list[Path]:
        return below.get(text) or decoded.get(unquote(text), [])

    found = called(name) if name else []
    if len(found) != 1:
        several = found or called(file.stem)
        what = f"no image below {images} is called {file.stem} or {name or 'as <filename> says'}"
        if several:
            what = f"{len(several)} images may be meant: {', '.join(map(str, several[:3]))}"
        raise Malformed(Issue("image_missing", what, where=str(file)))
    return found[0]


def xml_files(folder: Path) -> Iterator[str]:
    """Absolute paths of all XML files in or below a folder, sorted."""
    return (file for file in files_below(folder) if file.lower().endswith(".xml"))


def _stem(root: Path, line: str) -> str:
    """Image name in a line, without suffix and VOC's 1, 0, -1."""

    def is_whole(name: str) -> bool:
        return os.path.isfile(os.path.join(root, "Annotations", f"{name}.xml"))

    first, *rest = line.rsplit(maxsplit=1)
    if rest and rest[0] in ("1", "0", "-1") and not is_whole(line):
        line = first
    stem, suffix = os.path.splitext(line)
    is_file_name = suffix.lower() == ".xml" or is_image_name(line)
    return stem if is_file_name and not is_whole(line) else line


def _parse(file: Path, complain: Complain) -> ElementTree.Element:
    if not os.path.isfile(file):
        what = "does not exist, but its image is listed"
        raise Malformed(Issue("annotation_missing", what, where=str(file)))
    text = read_text_of_image(file, complain)
    with _unreadable(str(file)):
        if "<!ENTITY" in text:  # a few of them can stand for gigabytes, and no annotation has any
            raise ValueError("it defines XML entities")
        return ElementTree.fromstring(text)


@contextlib.contextmanager
def _unreadable(where: str) -> Iterator[None]:
    """Turns errors of the XML file `where` inside into Malformed."""
    try:
        yield
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        what = f"not a Pascal VOC annotation: {error}"
        if isinstance(error, ElementTree.ParseError):
            where = f"{where}:{error.position[0]}"
        raise Malformed(Issue("annotation_unreadable", what, where=where)) from error


def _named(
    tree: ElementTree.Element, images: Path, stem: str, file: Path, complain: Complain
) -> Path | None:
    """The image of an XML file.

    <filename> is often stale, so the list decides where there is a choice.
    """
    name = (tree.findtext("filename") or "").strip() or f"{file.stem}.jpg"
    problems: list[Issue] = []
    named = find_image(images, name, str(file), problems.append)
    suffixes = [Path(name).suffix, *IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES)]
    for position, suffix in enumerate(suffixes):
        beside = find_image(images, f"{stem}{suffix}", str(file), quietly)
        if beside is not None and os.path.isfile(beside):
            return beside
        if position == 0 and named is not None and os.path.isfile(named):
            return named
    for problem in problems:
        complain(problem)
    return named


def _image(
    tree: ElementTree.Element,
    file: Path,
    path: Path,
    position: int,
    complain: Complain,
    everything: bool,
    opener: Opener,
) -> RawImage:
    entry = tree.find("size")
    said, width, height = "has no <size>", 0, 0
    if entry is not None:
        sides = [(entry.findtext(side) or "0").strip() for side in ("width", "height")]
        said = f"<size> is {'x'.join(side[:20] for side in sides)}"
        with contextlib.suppress(ValueError, OverflowError):
            width, height = (int(float(side)) for side in sides)
    size = size_of(path, width, height, said, str(file), complain, opener)
    extra: dict[str, Any] = {}
    if everything:
        with _unreadable(str(file)):
            extra = _children(tree, _IMAGE_TAGS)
            further = {} if entry is None else _children(entry, {"width", "height"})
        extra |= {"size": further} if further else {}
    return RawImage(
        path, position, size.width, size.height, [], str(file), extra, size_known=size.known
    )


def _add_objects(
    image: RawImage, tree: ElementTree.Element, complain: Complain, everything: bool
) -> list[str]:
    """Adds objects to an image; returns the class name of each."""
    names = []
    for number, entry in enumerate(tree.iter("object"), start=1):
        where = f"{image.where}: object {number}"
        try:
            name = (entry.findtext("name") or "").strip()
            if not name:
                raise Malformed(Issue("annotation_line", "has no <name>", where=where))
            box = _box(entry, where)
            difficult = (entry.findtext("difficult") or "").strip() == "1"
            thing = RawObject(box, -1, where, crowd=difficult)
            if everything:
                with _unreadable(image.where):
                    thing.extra = _children(entry, _OBJECT_TAGS)
                _take_foreign(thing, image, complain)
        except Malformed as wrong:
            image.lost += 1
            complain(replace(wrong.issue, code="annotation_line", image=str(image.path)))
            continue
        image.objects.append(thing)
        names.append(name)
    return names


def _box(entry: ElementTree.Element, where: str) -> Box:
    if entry.find("bndbox") is None:
        other = next((child.tag for child in entry if len(child)), "")
        instead = f", but <{other}>: only upright boxes are read" if other else ""
        raise Malformed(Issue("annotation_line", f"has no <bndbox>{instead}", where=where))
    texts = [entry.findtext(f"bndbox/{side}") for side in _SIDES]
    try:
        x1, y1, x2, y2 = (float(text or "") for text in texts)
    except ValueError as error:
        shown = ", ".join(f"{side} {text!r}" for side, text in zip(_SIDES, texts))
        what = f"<bndbox> has {shown}: expected four numbers"
        raise Malformed(Issue("annotation_line", what, where=where)) from error
    return x1, y1, x2, y2


def _take_foreign(thing: RawObject, image: RawImage, complain: Complain) -> None:
    """Takes the area and outline that ppdist wrote as JSON when it still wrote VOC."""
    extra = dict(thing.extra)
    thing.area = area_in(extra.get("area"))
    if thing.area is not None:
        del extra["area"]
    if isinstance(extra.get("segmentation"), list):
        outlines = outlines_in(extra.pop("segmentation"))
        if outlines is None:
            what = "<segmentation>: expected lists of x1, y1, x2, y2, ..."
            complain(Issue("outline_malformed", what, str(image.path), thing.where))
        thing.polygons = outlines or ()
    thing.extra = extra


def _children(element: ElementTree.Element, known: Set[str]) -> dict[str, Any]:
    """Child tags as text, mappings, or lists where a tag repeats.

    Raises: ValueError: not JSON where that is said to be written.
    """
    found: dict[str, list[Any]] = {}
    for child in element:
        if child.tag in known:
            continue
        value: Any = child.text or ""
        if child.get("type") == "json":
            value = json.loads(value)
        elif len(child):
            value = _children(child, set())
        found.setdefault(child.tag, []).append(value)
    return {tag: values[0] if len(values) == 1 else values for tag, values in found.items()}
