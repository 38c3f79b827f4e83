"""A split written anew in another format, or in its own.

    OUT/images/SPLIT/...                    copies of the images, or links to them
    coco  OUT/annotations/instances_SPLIT.json
    voc   OUT/ImageSets/Main/SPLIT.txt      OUT/Annotations/SPLIT/....xml   OUT/label_list.txt
    yolo  OUT/SPLIT.txt                     OUT/labels/SPLIT/....txt        OUT/data.yaml

Nothing that is there is ever overwritten.
"""

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from ppdist.data.formats.annotations import write_text
from ppdist.data.formats.coco import write_coco
from ppdist.data.formats.frame import read_frame, turned_upright
from ppdist.data.formats.names import class_names
from ppdist.data.formats.raw import RawImage, RawSet
from ppdist.data.formats.voc import write_voc
from ppdist.data.formats.yolo import write_yolo
from ppdist.errors import DataError
from ppdist.files import make_folder, writing

Format = Literal["coco", "voc", "yolo"]
Images = Literal["copy", "link", "none"]
_DEEPEST = 50  # lists and mappings in one another
# Ends of lines to Python, or nothing that XML may contain.
_NO_NAME = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029\ufffe\uffff\ud800-\udfff]")


def convert(raw: RawSet, form: Format, out: Path, *, images: Images, split: str) -> list[str]:
    """Writes a split so that reading it back gives the same images and objects.

    Boxes come back exactly (through YOLO's fractions within 1e-12 pixels, exactly in float32); ids,
    areas, outlines, crowds and further properties do where the format can hold them.  Images of one
    name are told apart by a number, and names become UTF-8.  Boxes that are not finite are left
    out, and images of which nobody knows the size.  YOLO's fractions are of the image as its file
    has it: annotations of another frame are turned with it, or left out with their image.

    Args:
        out: a folder, made if need be; several splits may share it.
        images: copy: into out; link: symbolic links there; none: they stay where they are (not
            for YOLO, which finds labels by the place of the image).
        split: what it is called there.
    Returns: what was lost or changed, a line for each kind.
    Raises: DataError: there are no boxes, classes that the format cannot tell apart, or a split of
        this name is there already.  UserError: something cannot be written.
    """
    _check(raw, form, out, images, split)
    lines: list[str] = []
    folder = _common_folder(raw)
    raw = _finite(_sized(raw, lines), lines)
    if form != "coco":
        raw = _once(raw, lines)
    if form == "yolo":
        raw = _as_files_are(raw, lines)
    names = _new_names(raw, folder, form, lines)
    make_folder(out)
    if form != "coco":
        _write_classes(raw, form, out)
        _say_what_is_lost(raw, form, lines)
    if images == "none":
        own = [os.path.relpath(os.path.abspath(image.path), folder) for image in raw.images]
        _check_names_stay(form, own)
    else:
        _place_images(raw, names, out / "images" / split, images, lines)
    if form == "coco":
        written = own if images == "none" else names
        lines += write_coco(out / "annotations" / f"instances_{split}.json", raw, written)
    elif form == "voc":
        written = own if images == "none" else [f"{split}/{name}" for name in names]
        place = _place_of_xml(out, split, folder) if images == "none" else split
        stems = [f"{place}/{os.path.splitext(name)[0]}" for name in names]
        list_file = out / "ImageSets" / "Main" / f"{split}.txt"
        lines += write_voc(list_file, out / "Annotations", raw, written, stems)
    else:
        listed = [f"./images/{split}/{name}" for name in names]
        lines += write_yolo(out / f"{split}.txt", out / "labels" / split, raw, names, listed)
    return lines


def snippet(raws: Mapping[str, RawSet], form: Format, out: Path, *, images: Images) -> str:
    """The `data:` section of a config that reads what `convert` wrote, as YAML.

    Args:
        raws: what was converted, by the name of the split.
    """
    data: dict[str, object] = {"format": form, "root": os.path.abspath(out)}
    for split, raw in raws.items():
        annotations = {
            "coco": f"annotations/instances_{split}.json",
            "voc": f"ImageSets/Main/{split}.txt",
            "yolo": f"{split}.txt",
        }[form]
        folder = "images" if form == "voc" else f"images/{split}"
        if images == "none":
            folder = _common_folder(raw)
        data[split] = {"images": folder, "annotations": annotations}
    return yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True)


def _check(raw: RawSet, form: Format, out: Path, images: Images, split: str) -> None:
    if any(image.width <= 0 or image.height <= 0 for image in raw.images):
        raise DataError(
            "images of unknown size (classified, without boxes)",
            code="size_unknown",
            where=raw.source,
        )
    if form == "yolo" and images == "none":
        raise DataError(
            "YOLO labels lie beside the images",
            code="images_needed",
            fix="choose to copy the images or to link them",
        )
    targets = {
        "coco": [f"annotations/instances_{split}.json"],
        "voc": [f"ImageSets/Main/{split}.txt", f"Annotations/{split}"],
        "yolo": [f"{split}.txt", f"labels/{split}"],
    }[form]
    targets += [f"images/{split}"] if images != "none" else []
    for target in targets:
        if os.path.lexists(out / target):
            raise DataError(
                "is there already",
                code="file_exists",
                where=str(out / target),
                fix="choose a new folder",
            )
    if form == "coco":
        return
    twice = [name for name, count in Counter(raw.class_names).items() if count > 1]
    if twice:
        raise DataError(
            f"two classes are called {twice[0]!r}; only COCO tells them apart",
            code="class_name_duplicate",
            where=raw.source,
        )
    strange = [name for name in raw.class_names if name != name.strip() or _NO_NAME.search(name)]
    if strange or "" in raw.class_names:
        first = strange[0] if strange else ""
        raise DataError(
            f"class {first!r}: {form} files cannot hold this name",
            code="class_name_unwritable",
            where=raw.source,
        )


def _sized(raw: RawSet, lines: list[str]) -> RawSet:
    unknown = [image.path for image in raw.images if not image.size_known]
    if unknown:
        lines.append(
            f"{len(unknown)} images: absent or unreadable, so that nobody knows where their boxes "
            f"are, left out, first {unknown[0]}"
        )
    return replace(raw, images=[image for image in raw.images if image.size_known])


def _finite(raw: RawSet, lines: list[str]) -> RawSet:
    lost: Counter[str] = Counter()
    kept = []
    for image in raw.images:
        objects = [t for t in image.objects if math.isfinite(sum(t.box))]
        lost["objects: box is not finite, left out"] += len(image.objects) - len(objects)
        objects = [replace(t, extra=_finite_only(t.extra, lost)) if t.extra else t for t in objects]
        kept.append(replace(image, objects=objects, extra=_finite_only(image.extra, lost)))
    extra = _finite_only(raw.extra, lost)
    class_extras = tuple(_finite_only(extra, lost) for extra in raw.class_extras)
    lines += [f"{count} {what}" for what, count in lost.items() if count]
    return replace(raw, images=kept, extra=extra, class_extras=class_extras)


def _finite_only(value: Any, lost: Counter[str], depth: int = 0) -> Any:
    """NaN and infinity, which JSON has not, become null, and so does what nobody can nest."""
    if isinstance(value, dict | list) and depth == _DEEPEST:
        lost["further properties: nested too deeply, become null"] += 1
        return None
    if isinstance(value, dict):
        return {key: _finite_only(one, lost, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite_only(one, lost, depth + 1) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        lost["further properties: not finite, become null"] += 1
        return None
    return value


def _as_files_are(raw: RawSet, lines: list[str]) -> RawSet:
    """Each image as large as its file says, so that fractions of it mean the same pixels."""
    kept, turned, strange = [], 0, []
    for image in raw.images:
        frame, size = read_frame(image.path), (image.width, image.height)
        if frame is None or size == frame.upright:
            kept.append(image)
        elif size == frame.stored:
            turned += 1
            kept.append(turned_upright(image, frame))
        else:
            strange.append(image.path)
    if turned:
        lines.append(f"{turned} images: annotated as they are stored, turned as EXIF says")
    if strange:
        lines.append(
            f"{len(strange)} images: not as large as annotated, left out, first {strange[0]}"
        )
    return replace(raw, images=kept)


def _once(raw: RawSet, lines: list[str]) -> RawSet:
    """An image that is listed several times has one annotation file: all of its objects."""
    first: dict[Path, RawImage] = {}
    for image in raw.images:
        before = first.setdefault(image.path, image)
        if before is not image:
            first[image.path] = replace(before, objects=before.objects + image.objects)
    if len(first) < len(raw.images):
        repeats = len(raw.images) - len(first)
        lines.append(f"{repeats} images: listed before, their objects put together")
    return replace(raw, images=list(first.values()))


def _common_folder(raw: RawSet) -> str:
    folders = {os.path.dirname(os.path.abspath(image.path)) for image in raw.images}
    return os.path.commonpath(folders) if folders else os.path.abspath("images")


def _new_names(raw: RawSet, folder: str, form: Format, lines: list[str]) -> list[str]:
    """Of each image relative to its folder: one name for one path, another for another."""
    name_of: dict[Path, str] = {}
    taken: set[str] = set()
    changed = []
    for image in raw.images:
        if image.path in name_of:
            continue
        old = os.path.relpath(os.path.abspath(image.path), folder)
        stem, suffix = os.path.splitext(_clean(old))
        name, number = f"{stem}{suffix}", 1
        while (key := name if form == "coco" else os.path.splitext(name)[0]) in taken:
            number += 1
            name = f"{stem}_{number}{suffix}"
        taken.add(key)
        name_of[image.path] = name
        if name != old:
            changed.append(f"{old!r} -> {name!r}")
    if changed:
        lines.append(f"{len(changed)} images: renamed, first {', '.join(changed[:3])}")
    return [name_of[image.path] for image in raw.images]


def _clean(name: str) -> str:
    """A name that UTF-8, XML and lists can hold, and whose labels YOLO finds."""
    content = os.fsencode(name)
    for encoding in ("utf-8", "gb18030"):
        try:
            name = content.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    *folders, file = _NO_NAME.sub("_", name).split(os.sep)
    stem, suffix = os.path.splitext(file)
    folders = ["images_" if part == "images" else _named(part) for part in folders]
    return "/".join([*folders, f"{_named(stem)}{suffix.rstrip()}"])


def _named(part: str) -> str:
    """Without blanks around it; what they kept from meaning another folder does not mean it now."""
    bare = part.strip()
    return "_" if bare in ("", ".", "..") else bare


def _check_names_stay(form: Format, names: Sequence[str]) -> None:
    strange = [name for name in names if _NO_NAME.search(name) or name != name.strip()]
    if form == "voc" and strange:
        raise DataError(
            f"XML cannot hold the file name {strange[0]!r}",
            code="file_name_unwritable",
            fix="choose to copy the images",
        )


def _write_classes(raw: RawSet, form: Format, out: Path) -> None:
    known = class_names(out, ())
    if known and known != raw.class_names:
        raise DataError(
            f"there are files of other classes ({', '.join(known[:5])}) than those of "
            f"{raw.source} ({', '.join(raw.class_names[:5])})",
            code="folder_of_other_classes",
            where=str(out),
            fix="choose a new folder",
        )
    if known:
        return
    if form == "voc":
        write_text(out / "label_list.txt", "".join(f"{name}\n" for name in raw.class_names))
        return
    content = {"path": ".", "train": "train.txt", "val": "val.txt", "names": [*raw.class_names]}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    write_text(out / "data.yaml", text)


def _place_of_xml(out: Path, split: str, folder: str) -> str:
    """Below Annotations; a reader would take images in a folder of this name for those meant."""
    place = split
    while os.path.lexists(os.path.join(folder, place)) or (out / "Annotations" / place).exists():
        place += "_"
    return place


def _say_what_is_lost(raw: RawSet, form: Format, lines: list[str]) -> None:
    if raw.extra:
        lines.append(f"{', '.join(map(str, raw.extra))}: said of the whole set, left out")
    of_classes = dict.fromkeys(str(key) for extra in raw.class_extras for key in extra)
    if of_classes:
        lines.append(f"{', '.join(of_classes)}: said of classes, left out")
    if raw.category_ids != tuple(range(1, len(raw.category_ids) + 1)):
        lines.append(f"category ids: become 1 to {len(raw.category_ids)}")
    ids = [image.image_id for image in raw.images]
    if form == "yolo" and ids != list(range(1, len(ids) + 1)):
        lines.append(f"image ids: become 1 to {len(ids)}")


def _place_images(
    raw: RawSet, names: Sequence[str], folder: Path, images: Images, lines: list[str]
) -> None:
    absent = []
    make_folder(folder)
    for path, name in dict(zip((image.path for image in raw.images), names)).items():
        source, target = os.path.abspath(path), folder / name
        if not os.path.isfile(source) or not os.access(source, os.R_OK):
            absent.append(source)
            continue
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if images == "link":
                target.symlink_to(source)
            else:
                shutil.copyfile(source, target)
    if absent:
        lines.append(
            f"{len(absent)} images: do not exist or cannot be read, first {absent[0]}; only their "
            f"annotations were written"
        )
