"""COCO detection JSON (cocodataset.org/#format-data)."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import (
    Malformed,
    area_in,
    extent_of,
    find_image,
    find_repeats,
    listed,
    outlines_in,
    quietly,
    read_text,
    size_of,
    write_text,
)
from ppdist.data.types import Box, Complain, Issue, RawImage, RawObject, RawSet

NEEDED = {
    "images": ("id", "file_name"),
    "annotations": ("image_id", "category_id"),
    "categories": ("id", "name"),
}
_IMAGE_KEYS = {"id", "file_name", "width", "height"}
_OBJECT_KEYS = {"image_id", "category_id", "bbox", "area", "iscrowd", "segmentation"}
_NOTHING: Mapping[str, Any] = {}


class KnownClasses(NamedTuple):
    """Class names that come from elsewhere than the file itself.

    source: what does, for messages: data.class_names, or the file of the training split.
    """

    names: tuple[str, ...] = ()
    source: str = ""


OWN_CLASSES = KnownClasses()  # the file itself says them


class Categories(NamedTuple):
    """The categories of a file as classes.

    name_of: all of them, by id.  label_of: id -> class, of those that are one.  names, ids: of the
    classes; what a result file calls each of them.  known: see `classes_of`.
    """

    name_of: Mapping[int, str]
    label_of: Mapping[int, int]
    names: tuple[str, ...]
    ids: tuple[int, ...]
    known: KnownClasses


def read_coco(
    images: Path,
    annotations: Path,
    complain: Complain,
    *,
    known: KnownClasses = OWN_CLASSES,
    everything: bool = True,
) -> RawSet:
    """The images of a COCO file in its order.

    Class numbers follow category ids, or `known`.  A box that is not given is that of the outline
    or mask.  A file without `annotations` is one of images to be annotated.  `extra` of an object
    holds its id, masks that are no polygons (RLE), and keys COCO has not; that of the set, info and
    licenses; that of a class, its supercategory and the like.

    Args:
        images: folder that `file_name` is relative to.
        annotations: the JSON file.
        everything: also outlines and `extra`, which training without masks has no use for.
    Raises: DataError: the file as a whole is not COCO.
    """
    content = _load(annotations, complain, optional="annotations")
    entries = content["annotations"]
    categories = classes_of(content["categories"], _used(entries), annotations, complain, known)
    image_of = _images(content["images"], images, annotations, complain)
    seen: set[int] = set()
    for number, entry in enumerate(entries):
        try:
            image, thing = _object(entry, number, annotations, image_of, categories)
        except Malformed as wrong:
            of = whole_number(entry.get("image_id")) if isinstance(entry, dict) else None
            owner = None if of is None else image_of.get(of)
            if owner is not None:
                owner.lost += 1
            complain(wrong.issue)
            continue
        identity = whole_number(entry.get("id"))
        if identity is not None and identity in seen:
            what, path = "an annotation before it has the same id", str(image.path) if image else ""
            complain(Issue("annotation_id_duplicate", what, path, thing.where))
        elif identity is not None:
            seen.add(identity)
        if image is not None:
            _add_area(thing, entry, image, complain)
            if everything:
                _add_everything(thing, entry, image, complain)
            image.objects.append(thing)
    kept = [image for image in image_of.values() if image is not None]
    find_repeats(kept, complain)
    raw = RawSet(kept, categories.names, categories.ids, str(annotations))
    if everything:
        raw.extra = _further(content, NEEDED)
        raw.class_extras = _class_extras(content["categories"], categories)
    return raw


def index_of(annotations: Path) -> tuple[list[str], tuple[str, ...]]:
    """What `read_index` gives, by Python's own parser.

    Raises: DataError: the file as a whole is not COCO.
    """
    content = _load(annotations, quietly)
    used = _used(content["annotations"])
    classes = classes_of(content["categories"], used, annotations, quietly)
    entries = (entry for entry in content["images"] if isinstance(entry, dict))
    return [str(entry.get("file_name", "")) for entry in entries], classes.names


def _used(entries: Iterable[Any]) -> set[int | None]:
    """Ids of the categories that annotations have."""
    return {whole_number(each.get("category_id")) for each in entries if isinstance(each, dict)}


def _load(path: Path, complain: Complain, optional: str = "") -> dict[str, Any]:
    """Args: optional: a list that may be absent, and is empty then."""
    try:
        content = json.loads(read_text(path, complain))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"not JSON: {error}", code="not_json", where=str(path)) from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise DataError(
            f"not COCO detection JSON: expected an object, found a {kind}",
            code="not_coco",
            where=str(path),
        )
    for part in NEEDED:
        if part == optional and part not in content and "categories" in content:
            content[part] = []
        if not isinstance(content.get(part), list):
            found = ", ".join(list(content)[:8]) or "nothing"
            raise DataError(
                f"not COCO detection JSON: it has no list {part!r} (it has: {found})",
                code="not_coco",
                where=str(path),
            )
    return content


def _check_keys(part: str, number: int, entry: Any, file: Path) -> None:
    missing = [key for key in NEEDED[part] if not isinstance(entry, dict) or key not in entry]
    if missing:
        entry = str(entry)[:120]
        what = f"not COCO detection JSON: {part}[{number}] has no {missing[0]!r}: {entry}"
        raise Malformed(Issue("annotation_line", what, where=str(file)))


def classes_of(
    entries: Sequence[Any],
    used: Collection[int | None],
    file: Path,
    complain: Complain,
    known: KnownClasses = OWN_CLASSES,
) -> Categories:
    """Maps categories to classes: merges equal names, drops a mere group.

    Args:
        used: ids that annotations have.
        known: the classes; categories are those of the same name.  Without it, all names in the
            order of their ids.
    Raises: DataError: an entry is malformed.
    """
    name_of = _names_by_id(entries, file)
    group = _group(entries, used)
    own: dict[str, int] = {}  # the first id of each name
    for identity, name in name_of.items():
        if name in own:
            what = f"categories {own[name]} and {identity} are both called {name!r}: one class"
            complain(Issue("class_names_same", what, where=str(file)))
        own.setdefault(name, identity)
    if group in own and group not in known.names:
        number = own.pop(group)
        what = f"category {number} {group!r} has no objects and groups the others: not a class"
        complain(Issue("class_group", what, where=str(file)))
    names = known.names or tuple(own)
    number_of = {name: label for label, name in enumerate(names)}
    label_of = {i: number_of[name] for i, name in name_of.items() if name in number_of}
    if known.names:
        if known.names != tuple(own):
            what = f"categories are {listed([*own])}; mapped by name to those of {known.source}"
            complain(Issue("class_list_differs", what, where=str(file)))
    elif [*label_of] not in ([*range(len(names))], [*range(1, len(names) + 1)]):
        shown = listed([f"{i} {name_of[i]} -> {label}" for i, label in label_of.items()])
        what = f"category ids are not 1 to {len(names)}: mapped to classes {shown}"
        complain(Issue("class_ids_gap", what, where=str(file)))
    free = max(name_of, default=0) + 1
    ids = []
    for name in names:  # one that the file has not still has an id of its own in results
        ids.append(own.get(name, free))
        free += name not in own
    return Categories(name_of, label_of, names, tuple(ids), known)


def _group(entries: Sequence[Mapping[str, Any]], used: Collection[int | None]) -> str:
    """The category that is all others' supercategory and no annotation's, as Roboflow's first."""
    for entry in entries:
        others = [each.get("supercategory") for each in entries if each is not entry]
        if whole_number(entry["id"]) not in used and {*map(str, others)} == {str(entry["name"])}:
            return str(entry["name"])
    return ""


def _names_by_id(entries: Sequence[Any], file: Path) -> dict[int, str]:
    """In the order of ids.  Raises: DataError: an entry is malformed."""
    found: dict[int, str] = {}
    for number, entry in enumerate(entries):
        try:
            _check_keys("categories", number, entry, file)
        except Malformed as wrong:
            raise DataError(wrong.issue.what, code="not_coco", where=str(file)) from wrong
        identity = whole_number(entry["id"])
        if identity is None:
            raise DataError(
                f"id {entry['id']!r}{_as_text(entry['id'])}: expected a whole number",
                code="bad_category_id",
                where=f"{file}: categories[{number}]",
            )
        if identity in found:
            raise DataError(
                "two entries of 'categories' have the same id",
                code="category_id_duplicate",
                where=str(file),
            )
        found[identity] = str(entry["name"])
    return dict(sorted(found.items()))


def _images(
    entries: Sequence[Any], folder: Path, file: Path, complain: Complain
) -> dict[int, RawImage | None]:
    """By id; None for what is left out, so that its objects are left out without a word."""
    found: dict[int, RawImage | None] = {}
    number_of: dict[int, int] = {}
    for number, entry in enumerate(entries):
        where = f"{file}: images[{number}]"
        identity = whole_number(entry.get("id")) if isinstance(entry, dict) else None
        try:
            _check_keys("images", number, entry, file)
            if identity is None:
                what = f"id {entry['id']!r}{_as_text(entry['id'])}: expected a whole number"
                raise Malformed(Issue("annotation_line", what, where=where))
            if identity in number_of:
                first = number_of[identity]
                what = f"images[{number}] has the same id as images[{first}]: {identity}"
                raise Malformed(Issue("image_id_duplicate", what, where=str(file)))
            number_of[identity], found[identity] = number, None
            found[identity] = _image(entry, identity, folder, file, where, complain)
        except Malformed as wrong:
            complain(wrong.issue)
    return found


def _image(
    entry: dict[str, Any], identity: int, folder: Path, file: Path, where: str, complain: Complain
) -> RawImage | None:
    name = entry["file_name"]
    if not isinstance(name, str):
        what = f"file_name {name!r}: expected a name"
        raise Malformed(Issue("annotation_line", what, where=where))
    path = find_image(folder, name, str(file), complain)
    if path is None:
        return None
    sides = entry.get("width"), entry.get("height")
    width, height = map(whole_number, sides)
    said = f"width {sides[0]!r:.20}, height {sides[1]!r:.20}"
    size = size_of(path, width, height, said, where, complain)
    extra = _further(entry, _IMAGE_KEYS)
    return RawImage(
        path, identity, size.width, size.height, [], where, extra, size_known=size.known
    )


def _object(
    entry: Any,
    number: int,
    file: Path,
    image_of: Mapping[int, RawImage | None],
    categories: Categories,
) -> tuple[RawImage | None, RawObject]:
    """An annotation and its image, None if that is left out."""
    _check_keys("annotations", number, entry, file)
    where = f"{file}: annotation {entry.get('id', f'number {number}')}"
    identity, category = whole_number(entry["image_id"]), whole_number(entry["category_id"])
    if identity is None or identity not in image_of:
        given = entry["image_id"]
        what = f"image_id {given} is not among the file's images"
        if isinstance(given, str):
            what = f"image_id {given!r}{_as_text(given)}: expected a whole number"
        raise Malformed(Issue("image_unknown", what, where=where))
    image = image_of[identity]
    path = str(image.path) if image is not None else ""
    if category is None or category not in categories.label_of:
        what = _unknown_class(entry["category_id"], category, categories)
        raise Malformed(Issue("class_unknown", what, path, where))
    if image is not None:
        where = f"{where} of image {image.path.name!r}"
    return image, RawObject(
        box=_box(entry, where, path),
        label=categories.label_of[category],
        where=where,
        crowd=is_crowd(entry.get("iscrowd")),
        extra=_NOTHING,
    )


def _unknown_class(given: Any, category: int | None, categories: Categories) -> str:
    name, known = categories.name_of.get(category or 0), categories.known
    if category is not None and name is not None:
        return f"class {name!r} is not a class of {known.source} ({listed(known.names)})"
    shown = listed([f"{i} {name}" for i, name in categories.name_of.items()])
    if isinstance(given, str):
        return f"category_id {given!r}{_as_text(given)}: expected a whole number ({shown})"
    return f"category_id {given} is not among the file's categories ({shown})"


def is_crowd(value: Any) -> bool:
    """What `iscrowd` says."""
    if isinstance(value, str):  # some tools write numbers as text
        return value.strip().lower() not in ("", "0", "0.0", "false")
    return bool(value)


def _add_area(thing: RawObject, entry: dict[str, Any], image: RawImage, complain: Complain) -> None:
    given = entry.get("area")
    thing.area = area_in(given)
    if given is not None and thing.area is None:
        what = f"area {given!r:.80}: expected a number"
        complain(Issue("area_invalid", what, str(image.path), thing.where))


def _add_everything(
    thing: RawObject, entry: dict[str, Any], image: RawImage, complain: Complain
) -> None:
    """Outlines and what else an annotation has."""
    thing.extra = _further(entry, _OBJECT_KEYS)
    given = entry.get("segmentation")
    if isinstance(given, dict):
        thing.extra["segmentation"] = given
        return
    outlines = outlines_in([] if given is None else given)
    if outlines is None:
        what = "segmentation: expected lists of x1, y1, x2, y2, ..."
        complain(Issue("outline_malformed", what, str(image.path), thing.where))
    thing.polygons = outlines or ()


def _further(entry: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in known}


def _class_extras(
    entries: Sequence[Mapping[str, Any]], categories: Categories
) -> tuple[Mapping[str, Any], ...]:
    """In the order of the classes; none where no class has any."""
    of_id = {whole_number(each["id"]): _further(each, NEEDED["categories"]) for each in entries}
    extras = tuple(of_id.get(identity, {}) for identity in categories.ids)
    return extras if any(extras) else ()


def _as_text(value: Any) -> str:
    """What a message says of a number in quotes, which looks like one without them."""
    return " is text" if isinstance(value, str) else ""


def whole_number(value: Any) -> int | None:
    """A whole number that 64 bits can hold, also where it is written as 3.0; else None."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**63 else None


NO_BOXES: tuple[Any, ...] = (None, [], [0, 0, 0, 0])  # of which the outline has the last word


def _box(entry: Mapping[str, Any], where: str, image: str) -> Box:
    bbox, outline = entry.get("bbox"), entry.get("segmentation")
    if bbox in NO_BOXES and (outline or bbox != NO_BOXES[-1]):
        box = _mask_extent(outline) if isinstance(outline, dict) else extent_of(outline)
        if box is None:
            what = f"bbox {bbox!r}, and no outline or mask to take a box from: {str(outline)[:80]}"
            raise Malformed(Issue("annotation_line", what, image, where))
        return box
    if not isinstance(bbox, list) or len(bbox) != 4:
        what = f"bbox {bbox!r}: expected [x, y, width, height]"
        raise Malformed(Issue("annotation_line", what, image, where))
    try:
        x, y, width, height = (float(value) for value in bbox)
    except (TypeError, ValueError, OverflowError) as error:
        what = f"bbox {bbox!r}: expected four numbers"
        raise Malformed(Issue("annotation_line", what, image, where)) from error
    return x, y, x + width, y + height


def _mask_extent(mask: Mapping[str, Any]) -> Box | None:
    """The box of a run-length mask, columns first; None: it is empty, or malformed.

    Source: github.com/cocodataset/cocoapi, common/maskApi.c, rleToBbox.
    """
    try:
        height, width = mask["size"]
        counts = mask["counts"]
        runs = np.array(_runs_of(counts) if isinstance(counts, str) else counts, np.int64)
        ends = runs.cumsum()
        if height < 1 or (runs < 0).any() or ends[-1] != height * width:
            return None
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    first, last = (ends - runs)[1::2], ends[1::2] - 1  # pixels of the mask's own runs
    first, last = first[last >= first], last[last >= first]
    if not len(first):
        return None
    whole = (first // height != last // height).any()  # a run goes on in the next column
    top, bottom = (0, height) if whole else ((first % height).min(), (last % height).max() + 1)
    return float(first[0] // height), float(top), float(last[-1] // height + 1), float(bottom)


def _runs_of(text: str) -> list[int]:
    """Lengths of the runs that a compressed mask says.

    Raises: IndexError, ValueError: it is none.
    Source: github.com/cocodataset/cocoapi, common/maskApi.c, rleFrString.
    """
    runs: list[int] = []
    place = 0
    while place < len(text):
        run, bits, more = 0, 0, True
        while more:
            digit = ord(text[place]) - 48
            if not 0 <= digit < 64 or bits > 60:
                raise ValueError("not a mask")
            run |= (digit & 31) << bits
            more, place, bits = bool(digit & 32), place + 1, bits + 5
            if not more and digit & 16:
                run -= 1 << bits
        runs.append(run + (runs[-2] if len(runs) > 2 else 0))
    return runs


def write_coco(file: Path, content: Mapping[str, Any]) -> None:
    """Writes what `coco_content` gave.

    Raises: UserError: the file cannot be written, or is there already.
    """
    write_text(file, json.dumps(content, ensure_ascii=False, allow_nan=False))


def coco_content(raw: RawSet, names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """A COCO file that `read_coco` reads as the same set, for `json`.

    Args:
        names: of the images, relative to their folder.
    Returns: the content; what COCO could not hold, a line for each kind.
    """
    used = {
        identity
        for image in raw.images
        for thing in image.objects
        if (identity := whole_number(thing.extra.get("id"))) is not None
    }
    free = max(used, default=0) + 1
    renumbered = 0
    annotations = []
    for image in raw.images:
        for thing in image.objects:
            identity = whole_number(thing.extra.get("id"))
            if identity in used:
                used.discard(identity)
            else:  # none, or that of an object before
                renumbered += "id" in thing.extra
                identity, free = free, free + 1
            annotations.append(_entry(thing, identity, image.image_id, raw.category_ids))
    class_extras = raw.class_extras or [_NOTHING] * len(raw.class_names)
    content = {
        **raw.extra,
        "images": [
            {
                **image.extra,
                "id": image.image_id,
                "file_name": name,
                "width": image.width,
                "height": image.height,
            }
            for image, name in zip(raw.images, names)
        ],
        "annotations": annotations,
        "categories": [
            {**extra, "id": identity, "name": name}
            for extra, identity, name in zip(class_extras, raw.category_ids, raw.class_names)
        ],
    }
    lines = [f"{renumbered} objects: another has their id, numbered anew"] if renumbered else []
    return content, lines


def _entry(
    thing: RawObject, identity: int | None, image_id: int, category_ids: Sequence[int]
) -> dict[str, Any]:
    bbox = _bbox(thing.box)
    entry: dict[str, Any] = {
        **thing.extra,
        "id": identity,
        "image_id": image_id,
        "category_id": category_ids[thing.label],
        "bbox": bbox,
        "iscrowd": int(thing.crowd),
        # pycocotools needs an area; read back, 0 would count as none as well.
        "area": bbox[2] * bbox[3] if thing.area is None else _short(thing.area),
    }
    if thing.polygons:
        outlines = [part_K2.reshape(-1).tolist() for part_K2 in thing.polygons]
        entry["segmentation"] = [[_short(value) for value in outline] for outline in outlines]
    return entry


def _bbox(box: Box) -> list[float]:
    """[x, y, w, h] so short that x + w is still exactly the right edge."""
    x1, y1, x2, y2 = box
    return [_short(value) for value in (x1, y1, _side(x1, x2), _side(y1, y2))]


def _side(low: float, high: float) -> float:
    """What gives `high` when added to `low`; of several such numbers the one of fewest digits."""
    side = high - low
    candidates = [round(side, digits) for digits in range(17)]
    candidates += [math.nextafter(side, math.inf), math.nextafter(side, -math.inf)]
    return next((short for short in candidates if low + short == high), side)


def _short(value: float) -> float:
    """A whole number without a decimal point."""
    return int(value) if value.is_integer() else value
