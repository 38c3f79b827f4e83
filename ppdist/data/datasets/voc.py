"""Pascal VOC: one XML file per image (VOC2012 development kit)."""

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
    file_exists,
    files_below,
    find_class_names,
    find_image,
    has_image,
    ignore_issue,
    parse_area,
    parse_outlines,
    read_lines,
    read_text_of_image,
    report_repeated_images,
    resolve_size,
)
from ppdist.data.image import is_image_name
from ppdist.data.types import Box, Complain, Issue, RawImage, RawObject, RawSet
from ppdist.distributed.store import alive
from ppdist.runtime.decoder import IMAGE_SUFFIXES

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_OBJECT_TAGS = {"name", "bndbox", "difficult"}
_IMAGE_TAGS = {"filename", "size", "object"}
_PAIR = re.compile(  # names may contain blanks
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
    """Reads the images that a list names, or those of a folder of XML files.

    A line of the list is the name of an image without suffix, whose XML file is in
    root/Annotations, or `IMAGE XML`, both relative to root.  The image of a/b.xml in a folder is
    beside it, or images/a/b.jpg, or else the only one below `images` with that name or that of
    <filename>.  Corners are used unchanged: xmax is an edge, not the last pixel.  Objects marked
    difficult are treated like COCO's crowds: not learned, ignored in evaluation.  All other tags
    are in `extra`; areas and outlines, which ppdist once wrote into tags of its own, are read.

    Args:
        images: the folder of the images.
        annotations: the list, or the folder of XML files, which may have subfolders.
        names: class names, by number; if empty, see `find_class_names`, else the sorted names that
            the images of `naming` (the training split; by default `annotations`) use.
        everything: also reads outlines and `extra`, which training without masks does not need.
        opener: opens the images.
    Raises: DataError: the list cannot be read, the folder has no XML file, or lists of class names
        contradict each other.
    """
    labelled_images = _read_images(root, images, annotations, complain, everything, opener)
    class_names = find_class_names(root, names, complain)
    if not class_names:
        naming_set = labelled_images
        if naming is not None and naming != annotations:
            naming_set = _read_images(root, images, naming, ignore_issue, False, opener)
        class_names = tuple(sorted({name for _, labels in naming_set for name in labels}))
    label_of = {name: label for label, name in enumerate(class_names)}
    for image, labels in labelled_images:
        for annotation, name in zip(image.objects, labels):
            annotation.label = label_of.get(name, -1)
            if name not in label_of:
                message = f"class {name!r} is not among {', '.join(class_names)}"
                complain(Issue("class_unknown", message, str(image.path), annotation.where))
        usable_objects = [annotation for annotation in image.objects if annotation.label >= 0]
        image.lost += len(image.objects) - len(usable_objects)
        image.objects = usable_objects
    raw_images = [image for image, _ in labelled_images]
    report_repeated_images(raw_images, complain)
    return RawSet(raw_images, class_names, tuple(range(1, len(class_names) + 1)), str(annotations))


def _read_images(
    root: Path,
    images: Path,
    annotations: Path,
    complain: Complain,
    everything: bool,
    opener: Opener,
) -> list[tuple[RawImage, list[str]]]:
    """Reads images, with the class names of their objects, which have no label yet."""
    result: list[tuple[RawImage, list[str]]] = []
    is_folder = annotations.is_dir()
    entries = _folder_entries if is_folder else _list_entries
    for position, entry in enumerate(entries(root, images, annotations, complain), start=1):
        alive()
        if entry is None:
            continue
        file, path, image_of = entry
        try:
            tree = _parse_xml(file, complain)
            if path is None:
                path = image_of(tree)
            if path is not None:
                image = _make_image(tree, file, path, position, complain, everything, opener)
                result.append((image, _add_objects(image, tree, complain, everything)))
        except Malformed as error:
            complain(replace(error.issue, image=str(path or "")))
    return result


# An XML file; its image, if known without opening the file; a function that finds the image.
_Entry = tuple[Path, Path | None, Callable[[ElementTree.Element], Path | None]]


def _list_entries(
    root: Path, images: Path, image_list: Path, complain: Complain
) -> Iterator[_Entry | None]:
    """Yields an entry for each line of a list; None if the image is left out."""
    for line in read_lines(image_list, complain):
        path: Path | None = None
        stem = ""
        paired = _PAIR.fullmatch(line)
        if paired:
            words = paired.groups()
            path = find_image(root, words[0], str(image_list), complain)
            file = find_image(root, words[1], str(image_list), complain)
        else:
            stem = _image_stem(root, line)
            suffix = ".XML" if file_exists(root / "Annotations" / f"{stem}.XML") else ".xml"
            folder, usual = root / "Annotations", Path(f"{stem}{suffix}")
            issues: list[Issue] = []
            file = find_image(folder, str(usual), str(image_list), issues.append)
            renamed = file is not None and file.stem != usual.stem
            if file is not None and renamed and has_image(images / usual.parent, file.stem):
                file, issues = folder / usual, []  # that file belongs to another image
            for issue in issues:
                complain(issue)
        if file is None or (paired and path is None):
            yield None
            continue
        yield (
            file,
            path,
            partial(_find_listed_image, images=images, stem=stem, file=file, complain=complain),
        )


def _folder_entries(
    root: Path, images: Path, annotations: Path, complain: Complain
) -> Iterator[_Entry | None]:
    """Yields an entry for each XML file of a folder."""
    files = [Path(file) for file in xml_files(annotations)]
    if not files:
        raise DataError(
            "holds no XML file, not even in subfolders",
            code="annotation_file_missing",
            where=str(annotations),
            fix="name the folder of the XML files, or a list of images, as data.*.annotations",
        )
    # Images by name, with and without suffix.  Label Studio percent-encodes some names: decoded
    # ones are tried last, and only for images without an XML file of their own name.
    images_by_name: defaultdict[str, list[Path]] = defaultdict(list)
    decoded: defaultdict[str, list[Path]] = defaultdict(list)
    stems = {file.stem for file in files}
    for image in map(Path, files_below(images)):
        if is_image_name(image.name):
            for name in (image.name, image.stem):
                images_by_name[name].append(image)
                if image.stem not in stems:
                    decoded[unquote(name)].append(image)

    start = Path(os.path.abspath(annotations))
    for file in files:
        places = file.parent, Path(os.path.abspath(images)) / file.relative_to(start).parent
        matches, decoded_matches = (
            images_by_name.get(file.stem, []),
            decoded.get(unquote(file.stem), []),
        )
        candidates = (
            [path for path in matches if path.parent in places]
            or _images_with_stem(file.parent / file.stem)
            or matches
            or [path for path in decoded_matches if path.parent in places]
            or decoded_matches
        )
        if len(candidates) == 1 and candidates[0].stem != file.stem:
            message = f"{file.stem}: not found; using {candidates[0]}"
            complain(Issue("image_elsewhere", message, str(candidates[0]), str(file)))
        yield (
            file,
            candidates[0] if len(candidates) == 1 else None,
            partial(
                _find_named_image,
                images_by_name=images_by_name,
                decoded=decoded,
                images=images,
                file=file,
            ),
        )


def _images_with_stem(stem: Path) -> list[Path]:
    """Returns the images with this stem and a known suffix."""
    suffixes = (case for suffix in IMAGE_SUFFIXES for case in (suffix, suffix.upper()))
    candidates = (stem.with_name(f"{stem.name}{suffix}") for suffix in suffixes)
    return [path for path in candidates if path.is_file()]


def _find_named_image(
    tree: ElementTree.Element,
    *,
    images_by_name: Mapping[str, list[Path]],
    decoded: Mapping[str, list[Path]],
    images: Path,
    file: Path,
) -> Path:
    """Finds the image that <filename> refers to.

    Raises: Malformed: there is none, or more than one.
    """
    name = (tree.findtext("filename") or "").strip().replace("\\", "/").rpartition("/")[2]

    def find_by_name(text: str) -> list[Path]:
        return images_by_name.get(text) or decoded.get(unquote(text), [])

    matches = find_by_name(name) if name else []
    if len(matches) != 1:
        candidates = matches or find_by_name(file.stem)
        message = f"no image below {images} is called {file.stem} or {name or 'as <filename> says'}"
        if candidates:
            message = (
                f"{len(candidates)} images may be meant: {', '.join(map(str, candidates[:3]))}"
            )
        raise Malformed(Issue("image_missing", message, where=str(file)))
    return matches[0]


def xml_files(folder: Path) -> Iterator[str]:
    """Yields the absolute paths of all XML files in or below a folder, sorted."""
    return (file for file in files_below(folder) if file.lower().endswith(".xml"))


def _image_stem(root: Path, line: str) -> str:
    """Returns the image name in a line, without its suffix and VOC's 1, 0 or -1."""

    def has_xml(name: str) -> bool:
        return os.path.isfile(os.path.join(root, "Annotations", f"{name}.xml"))

    first, *rest = line.rsplit(maxsplit=1)
    if rest and rest[0] in ("1", "0", "-1") and not has_xml(line):
        line = first
    stem, suffix = os.path.splitext(line)
    is_file_name = suffix.lower() == ".xml" or is_image_name(line)
    return stem if is_file_name and not has_xml(line) else line


def _parse_xml(file: Path, complain: Complain) -> ElementTree.Element:
    if not os.path.isfile(file):
        message = "does not exist, but its image is listed"
        raise Malformed(Issue("annotation_missing", message, where=str(file)))
    text = read_text_of_image(file, complain)
    with _malformed_on_error(str(file)):
        if "<!ENTITY" in text:  # a few of them can stand for gigabytes, and no annotation has any
            raise ValueError("it defines XML entities")
        return ElementTree.fromstring(text)


@contextlib.contextmanager
def _malformed_on_error(where: str) -> Iterator[None]:
    """Converts errors in the block, which processes the XML file `where`, to Malformed."""
    try:
        yield
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        message = f"not a Pascal VOC annotation: {error}"
        if isinstance(error, ElementTree.ParseError):
            where = f"{where}:{error.position[0]}"
        raise Malformed(Issue("annotation_unreadable", message, where=where)) from error


def _find_listed_image(
    tree: ElementTree.Element, images: Path, stem: str, file: Path, complain: Complain
) -> Path | None:
    """Finds the image of an XML file in a list.

    <filename> is often outdated, so the name in the list is tried first.
    """
    name = (tree.findtext("filename") or "").strip() or f"{file.stem}.jpg"
    problems: list[Issue] = []
    named = find_image(images, name, str(file), problems.append)
    # The suffix of <filename> is outdated more rarely than its stem.
    suffixes = [Path(name).suffix, *IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES)]
    for position, suffix in enumerate(suffixes):
        beside = find_image(images, f"{stem}{suffix}", str(file), ignore_issue)
        if beside is not None and os.path.isfile(beside):
            return beside
        if position == 0 and named is not None and os.path.isfile(named):
            return named
    for problem in problems:
        complain(problem)
    return named


def _make_image(
    tree: ElementTree.Element,
    file: Path,
    path: Path,
    position: int,
    complain: Complain,
    everything: bool,
    opener: Opener,
) -> RawImage:
    entry = tree.find("size")
    annotated, width, height = "has no <size>", 0, 0
    if entry is not None:
        sides = [(entry.findtext(side) or "0").strip() for side in ("width", "height")]
        annotated = f"<size> is {'x'.join(side[:20] for side in sides)}"
        with contextlib.suppress(ValueError, OverflowError):
            width, height = (int(float(side)) for side in sides)
    size = resolve_size(path, width, height, annotated, str(file), complain, opener)
    extra: dict[str, Any] = {}
    if everything:
        with _malformed_on_error(str(file)):
            extra = _parse_children(tree, _IMAGE_TAGS)
            further = {} if entry is None else _parse_children(entry, {"width", "height"})
        extra |= {"size": further} if further else {}
    return RawImage(
        path, position, size.width, size.height, [], str(file), extra, size_known=size.is_known
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
            box = _parse_box(entry, where)
            difficult = (entry.findtext("difficult") or "").strip() == "1"
            annotation = RawObject(box, -1, where, crowd=difficult)
            if everything:
                with _malformed_on_error(image.where):
                    annotation.extra = _parse_children(entry, _OBJECT_TAGS)
                _restore_extras(annotation, image, complain)
        except Malformed as error:
            image.lost += 1
            complain(replace(error.issue, code="annotation_line", image=str(image.path)))
            continue
        image.objects.append(annotation)
        names.append(name)
    return names


def _parse_box(entry: ElementTree.Element, where: str) -> Box:
    if entry.find("bndbox") is None:
        shape_tag = next((child.tag for child in entry if len(child)), "")
        instead = f", but <{shape_tag}>: only upright boxes are read" if shape_tag else ""
        raise Malformed(Issue("annotation_line", f"has no <bndbox>{instead}", where=where))
    texts = [entry.findtext(f"bndbox/{side}") for side in _SIDES]
    try:
        x1, y1, x2, y2 = (float(text or "") for text in texts)
    except ValueError as error:
        values = ", ".join(f"{side} {text!r}" for side, text in zip(_SIDES, texts))
        message = f"<bndbox> has {values}: expected four numbers"
        raise Malformed(Issue("annotation_line", message, where=where)) from error
    return x1, y1, x2, y2


def _restore_extras(annotation: RawObject, image: RawImage, complain: Complain) -> None:
    """Restores the area and outline that ppdist once wrote into VOC files as JSON."""
    extra = dict(annotation.extra)
    annotation.area = parse_area(extra.get("area"))
    if annotation.area is not None:
        del extra["area"]
    if isinstance(extra.get("segmentation"), list):
        outlines = parse_outlines(extra.pop("segmentation"))
        if outlines is None:
            message = "<segmentation>: expected lists of x1, y1, x2, y2, ..."
            complain(Issue("outline_malformed", message, str(image.path), annotation.where))
        annotation.polygons = outlines or ()
    annotation.extra = extra


def _parse_children(element: ElementTree.Element, known_tags: Set[str]) -> dict[str, Any]:
    """Parses child tags to text, mappings, or lists if a tag repeats.

    Raises: ValueError: malformed JSON in a tag that is marked as JSON.
    """
    values_by_tag: dict[str, list[Any]] = {}
    for child in element:
        if child.tag in known_tags:
            continue
        value: Any = child.text or ""
        if child.get("type") == "json":
            value = json.loads(value)
        elif len(child):
            value = _parse_children(child, set())
        values_by_tag.setdefault(child.tag, []).append(value)
    return {tag: values[0] if len(values) == 1 else values for tag, values in values_by_tag.items()}
