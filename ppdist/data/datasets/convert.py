"""Conversion of a split to another format, and division into several.

    OUT/images/SPLIT/...                    copies of the images, or links to them, or tar shards
    coco  OUT/annotations/instances_SPLIT.json
    yolo  OUT/SPLIT.txt                     OUT/labels/SPLIT/....txt        OUT/data.yaml

    images -> groups of one content -> parts (`divide`) -> files of the set's own format (`write`)

A division gives each part its share of every class; it changes no entry of annotation files and
moves no image.  Existing files are never overwritten.
"""

import csv
import hashlib
import io
import json
import math
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from ppdist.common.addresses import absolute, is_remote, place_in_shard
from ppdist.common.errors import ConfigError, DataError, UserError
from ppdist.common.files import make_folder, make_parent, replace_file, replacing, writing
from ppdist.common.opener import Opener
from ppdist.config.data import DataConfig
from ppdist.data.datasets.annotations import (
    find_class_names,
    ignore_issue,
    read_lines,
    read_text,
    write_text,
)
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.coco import coco_content, write_coco
from ppdist.data.datasets.layout import VAL_FRACTION
from ppdist.data.datasets.yolo import write_yolo
from ppdist.data.image import ImageHeader, read_header
from ppdist.data.types import Box, DetectionSet, RawImage, RawSet, keyed_generator
from ppdist.runtime.decoder import MOST_BYTES
from ppdist.storage.shards import ShardWriter

Format = Literal["coco", "yolo"]
Images = Literal["copy", "link", "none"]


def convert(
    raw: RawSet,
    form: Format,
    out: Path,
    *,
    images: Images,
    split: str,
    shard_bytes: int | None = None,
) -> list[str]:
    """Writes a split that reads back as the same images and objects.

    Boxes read back exactly (from YOLO's fractions within 1e-12 pixels, exactly in float32); so do
    ids, areas, outlines, crowds and further properties if the format can represent them.  Images
    with the same name get a number, and names become UTF-8.  Boxes that are not finite, images with
    only such boxes (they are not background), and images of unknown size are left out.  YOLO's
    fractions refer to the pixels in the file: annotations of the stored image, before it is turned
    upright, are turned with it; those for any other size are left out with their image.

    Args:
        out: a folder, created if needed; several splits may share it.
        images: copy: copies into out; link: symbolic links there; none: images stay where they are
            (not for YOLO, which finds labels by the path of the image).
        split: name of the split in out.
        shard_bytes: writes the copies into tar shards, each ended once it reaches this size (COCO
            only).
    Returns: a line for each kind of loss or change.
    Raises: DataError: there are no boxes, the format cannot distinguish the classes, or a split of
        this name exists.  UserError: a file cannot be written.  StorageError: a store stays
        unavailable.  After an error no file of the split is left.
    """
    _require_convertible(raw, form, out, images, split)
    with remove_on_failure(list_targets(out, form, images, split)):
        return _write_split(raw, form, out, images, split, shard_bytes)


def list_targets(out: Path, form: Format, images: Images, split: str) -> list[Path]:
    """Lists the files and folders that `convert` writes for one split alone."""
    targets = [_annotation_file(form, split)]
    targets += [f"labels/{split}"] if form == "yolo" else []
    targets += [f"images/{split}"] if images != "none" else []
    return [out / target for target in targets]


@contextmanager
def remove_on_failure(targets: Sequence[Path]) -> Iterator[None]:
    """Deletes these paths if the block fails, as a later run would refuse to overwrite them."""
    try:
        yield
    except BaseException:  # an interrupt, too
        for target in targets:
            if target.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            else:
                with suppress(OSError):  # it does not exist yet
                    target.unlink()
        raise


def _write_split(
    raw: RawSet, form: Format, out: Path, images: Images, split: str, shard_bytes: int | None
) -> list[str]:
    """Writes a split for `convert`, which has checked that none of its files exist."""
    lines: list[str] = []
    folder = _common_folder(raw)
    raw = _drop_not_finite(_drop_unknown_sizes(raw, lines), lines)
    if form == "yolo":
        raw = match_file_sizes(_merge_repeated(raw, lines), lines)
    names = _choose_names(raw, folder, lines, by_key=form == "yolo" or shard_bytes is not None)
    make_folder(out)
    if form == "yolo":
        _write_classes(raw, out, split)
        _report_losses(raw, lines)
    file = out / _annotation_file(form, split)
    if shard_bytes is not None:
        content, new_lines = _write_shards(raw, names, out / "images" / split, split, shard_bytes)
        write_coco(file, content)
        return lines + new_lines
    if images == "none":
        names = [os.path.relpath(absolute(image.path), folder) for image in raw.images]
    else:
        _copy_images(raw, names, out / "images" / split, images, lines)
    if form == "coco":
        content, new_lines = coco_content(raw, names)
        write_coco(file, content)
        lines += new_lines
    else:
        list_lines = [f"./images/{split}/{name}" for name in names]
        lines += write_yolo(file, out / "labels" / split, raw, names, list_lines)
    return lines


def conversion_section(
    raws: Mapping[str, RawSet], form: Format, out: Path, *, images: Images
) -> str:
    """Returns the `data:` section that reads the result of `convert`, as YAML.

    Args: raws: the converted splits, by name.
    """
    data: dict[str, object] = {"format": form, "root": os.path.abspath(out)}
    for split, raw in raws.items():
        folder = f"images/{split}"
        if images == "none":
            folder = absolute(_common_folder(raw))
        data[split] = {"images": folder, "annotations": _annotation_file(form, split)}
    if {*raws} == {"train"}:
        data["val_fraction"] = VAL_FRACTION
    return yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True)


def _annotation_file(form: Format, split: str) -> str:
    """Returns the path below OUT for `data.*.annotations`."""
    return f"annotations/instances_{split}.json" if form == "coco" else f"{split}.txt"


# Characters that end a line in Python, and those that a text file may not contain.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029\ufffe\uffff\ud800-\udfff]")


def _require_convertible(raw: RawSet, form: Format, out: Path, images: Images, split: str) -> None:
    if any(image.width <= 0 or image.height <= 0 for image in raw.images):
        raise DataError(
            "images of unknown size (classified, without boxes)",
            code="size_unknown",
            where=raw.source,
        )
    if form == "yolo" and images == "none":
        raise DataError(
            "YOLO labels must be beside the images",
            code="images_needed",
            fix="use --image-files copy or link",
        )
    if images == "link":
        for image in raw.images:
            if is_remote(image.path) or place_in_shard(str(image.path)) is not None:
                raise DataError(
                    "images in a shard or an object store cannot be linked",
                    code="images_unlinkable",
                    where=str(image.path),
                    fix="use --image-files copy",
                )
    for target in list_targets(out, form, images, split):
        # Not `exists`: a dangling link would be overwritten, too.
        if os.path.lexists(target):
            raise DataError(
                "already exists",
                code="file_exists",
                where=str(target),
                fix="choose a new folder",
            )
    if form == "yolo":
        _check_class_names(raw)


def _check_class_names(raw: RawSet) -> None:
    twice = [name for name, count in Counter(raw.class_names).items() if count > 1]
    if twice:
        raise DataError(
            f"two classes are called {twice[0]!r}; only COCO tells them apart",
            code="class_name_duplicate",
            where=raw.source,
        )
    strange = [name for name in raw.class_names if name != name.strip() or _FORBIDDEN.search(name)]
    if strange or "" in raw.class_names:
        first = strange[0] if strange else ""
        raise DataError(
            f"class {first!r}: yolo files cannot hold this name",
            code="class_name_unwritable",
            where=raw.source,
        )


def _drop_unknown_sizes(raw: RawSet, lines: list[str]) -> RawSet:
    unknown = [image.path for image in raw.images if not image.size_known]
    if unknown:
        lines.append(
            f"{len(unknown)} images: absent or unreadable, so it is unknown where their boxes "
            f"are, left out, first {unknown[0]}"
        )
    return replace(raw, images=[image for image in raw.images if image.size_known])


def _drop_not_finite(raw: RawSet, lines: list[str]) -> RawSet:
    lost: Counter[str] = Counter()
    images = []
    for image in raw.images:
        # NaN and infinity survive a sum, so one test is enough for four numbers.
        objects = [t for t in image.objects if math.isfinite(sum(t.box))]
        lost["objects: box is not finite, left out"] += len(image.objects) - len(objects)
        if image.objects and not objects:
            lost["images: none of their boxes is finite, left out"] += 1
            continue
        objects = [
            replace(t, extra=_replace_not_finite(t.extra, lost)) if t.extra else t for t in objects
        ]
        images.append(replace(image, objects=objects, extra=_replace_not_finite(image.extra, lost)))
    extra = _replace_not_finite(raw.extra, lost)
    class_extras = tuple(_replace_not_finite(extra, lost) for extra in raw.class_extras)
    lines += [f"{count} {message}" for message, count in lost.items() if count]
    return replace(raw, images=images, extra=extra, class_extras=class_extras)


_DEEPEST = 50  # nested lists and mappings


def _replace_not_finite(value: Any, lost: Counter[str], depth: int = 0) -> Any:
    """Replaces NaN, infinity and values nested too deep with null, for JSON."""
    if isinstance(value, dict | list) and depth == _DEEPEST:
        lost["further properties: nested too deeply, become null"] += 1
        return None
    if isinstance(value, dict):
        return {
            key: _replace_not_finite(element, lost, depth + 1) for key, element in value.items()
        }
    if isinstance(value, list):
        return [_replace_not_finite(element, lost, depth + 1) for element in value]
    if isinstance(value, float) and not math.isfinite(value):
        lost["further properties: not finite, become null"] += 1
        return None
    return value


def _merge_repeated(raw: RawSet, lines: list[str]) -> RawSet:
    """Merges the objects of images that are listed several times."""
    first: dict[Path, RawImage] = {}
    for image in raw.images:
        previous = first.setdefault(image.path, image)
        if previous is not image:
            first[image.path] = replace(previous, objects=previous.objects + image.objects)
    if len(first) < len(raw.images):
        repeats = len(raw.images) - len(first)
        lines.append(f"{repeats} images: listed more than once, their objects merged")
    return replace(raw, images=list(first.values()))


def match_file_sizes(raw: RawSet, lines: list[str]) -> RawSet:
    """Adapts annotations to the size of the image file, to which YOLO's fractions refer."""
    images, turned, mismatched = [], 0, []
    for image in raw.images:
        frame, size = read_header(image.path, raw.opener), (image.width, image.height)
        if frame is None or size == frame.upright:
            images.append(image)
        elif size == frame.stored:
            turned += 1
            images.append(turn_annotations(image, frame))
        else:
            mismatched.append(image.path)
    if turned:
        lines.append(f"{turned} images: annotated as they are stored, turned as EXIF says")
    if mismatched:
        lines.append(
            f"{len(mismatched)} images: not as large as annotated, left out, first {mismatched[0]}"
        )
    return replace(raw, images=images)


def turn_annotations(image: RawImage, frame: ImageHeader) -> RawImage:
    """Turns annotations of the stored pixels in the same way as the image."""
    objects = []
    for annotation in image.objects:
        x1, y1, x2, y2 = annotation.box
        (left, right), (top, bottom) = map(
            sorted, zip(_turn_point(x1, y1, frame), _turn_point(x2, y2, frame))
        )
        box: Box = (left, top, right, bottom)
        if x2 < x1 or y2 < y1:  # keeps swapped corners swapped
            box = (right, bottom, left, top)
        parts = [part_K2.copy() for part_K2 in annotation.polygons]
        for part_K2 in parts:
            x_K, y_K = part_K2.T.copy()
            part_K2[:, 0], part_K2[:, 1] = _turn_point(x_K, y_K, frame)
        objects.append(replace(annotation, box=box, polygons=tuple(parts)))
    width, height = frame.upright
    return replace(image, width=width, height=height, objects=objects)


def _turn_point(x: Any, y: Any, frame: ImageHeader) -> tuple[Any, Any]:
    """Maps a point of the stored pixels to the upright image.

    EXIF 2.32, tag 274; points are edges, not centres.
    """
    width, height = frame.stored
    return {
        1: (x, y),
        2: (width - x, y),
        3: (width - x, height - y),
        4: (x, height - y),
        5: (y, x),
        6: (height - y, x),
        7: (height - y, width - x),
        8: (y, width - x),
    }[frame.orientation]


def _common_folder(raw: RawSet) -> str:
    folders = {os.path.dirname(_path_beside_shard(image.path)) for image in raw.images}
    return os.path.commonpath(folders) if folders else os.path.abspath("images")


def _path_beside_shard(path: Path) -> str:
    """Returns the absolute path of an image; if it is in a shard, a path beside that shard."""
    place = place_in_shard(absolute(path))
    return absolute(path) if place is None else os.path.join(place.folder, place.name)


def _choose_names(raw: RawSet, folder: str, lines: list[str], *, by_key: bool) -> list[str]:
    """Chooses the new name of each image relative to its folder, unique by path.

    Args: by_key: names also differ without their suffixes, as label files require.
    """
    name_of: dict[Path, str] = {}
    taken: set[str] = set()
    changed = []
    for image in raw.images:
        if image.path in name_of:
            continue
        old = os.path.relpath(_path_beside_shard(image.path), folder)
        stem, suffix = os.path.splitext(_clean_name(old))
        name, number = f"{stem}{suffix}", 1
        while (key := os.path.splitext(name)[0] if by_key else name) in taken:
            number += 1
            name = f"{stem}_{number}{suffix}"
        taken.add(key)
        name_of[image.path] = name
        if name != old:
            changed.append(f"{old!r} -> {name!r}")
    if changed:
        lines.append(f"{len(changed)} images: renamed, first {', '.join(changed[:3])}")
    return [name_of[image.path] for image in raw.images]


def _clean_name(name: str) -> str:
    """Makes a name valid in UTF-8 and in lists, such that YOLO finds its label."""
    content = os.fsencode(name)
    for encoding in ("utf-8", "gb18030"):
        try:
            name = content.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    *folders, file = _FORBIDDEN.sub("_", name).split(os.sep)
    stem, suffix = os.path.splitext(file)
    folders = ["images_" if part == "images" else _clean_part(part) for part in folders]
    return "/".join([*folders, f"{_clean_part(stem)}{suffix.rstrip()}"])


def _clean_part(part: str) -> str:
    """Strips surrounding whitespace; "_" for names that would be `.`, `..` or empty."""
    bare = part.strip()
    return "_" if bare in ("", ".", "..") else bare


def _write_classes(raw: RawSet, out: Path, split: str) -> None:
    written = find_class_names(out, ())
    if written and written != raw.class_names:
        raise DataError(
            f"already holds files with classes ({', '.join(written[:5])}) other than those of "
            f"{raw.source} ({', '.join(raw.class_names[:5])})",
            code="folder_of_other_classes",
            where=str(out),
            fix="choose a new folder",
        )
    splits = [name for name in ("train", "val") if (out / f"{name}.txt").exists()]
    # A file that the user has changed stays as it is.
    file, expected = out / "data.yaml", _format_data_yaml(raw, splits)
    if not written:
        write_text(file, _format_data_yaml(raw, [split]))
    elif file.is_file() and file.read_text(encoding="utf-8") == expected:
        # The file is unchanged since another split was written.
        with writing(file):
            replace_file(file, _format_data_yaml(raw, [*splits, split]).encode())


def _format_data_yaml(raw: RawSet, splits: Sequence[str]) -> str:
    """Formats a data file for ultralytics, with only the splits that exist."""
    lists = {split: f"{split}.txt" for split in splits}
    content = {"path": ".", **lists, "names": [*raw.class_names]}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _report_losses(raw: RawSet, lines: list[str]) -> None:
    if raw.extra:
        lines.append(f"{', '.join(map(str, raw.extra))}: of the whole set, left out")
    of_classes = dict.fromkeys(str(key) for extra in raw.class_extras for key in extra)
    if of_classes:
        lines.append(f"{', '.join(of_classes)}: of classes, left out")
    if raw.category_ids != tuple(range(1, len(raw.category_ids) + 1)):
        lines.append(f"category ids: become 1 to {len(raw.category_ids)}")
    ids = [image.image_id for image in raw.images]
    if ids != list(range(1, len(ids) + 1)):
        lines.append(f"image ids: become 1 to {len(ids)}")


def _copy_images(
    raw: RawSet, names: Sequence[str], folder: Path, images: Images, lines: list[str]
) -> None:
    absent = []
    make_folder(folder)
    for path, name in dict(zip((image.path for image in raw.images), names)).items():
        source, target = absolute(path), folder / name
        plain = os.path.isfile(source) and os.access(source, os.R_OK)
        content = None if plain else _read_content(source, raw.opener)
        if content is None and not plain:
            absent.append(source)
            continue
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if images == "link":
                target.symlink_to(source)
            elif content is None:
                with open(source, "rb") as image, replacing(target) as file:
                    shutil.copyfileobj(image, file)
            else:
                replace_file(target, content)
    if absent:
        lines.append(_describe_absent(absent))


def _describe_absent(absent: Sequence[str]) -> str:
    return (
        f"{len(absent)} images: do not exist or cannot be read, first {absent[0]}; only their "
        f"annotations were written"
    )


def _read_content(source: str, opener: Opener) -> bytes | None:
    """Reads an image file from a store, a shard or a disk; None if it is unreadable."""
    try:
        return opener.read(source, MOST_BYTES)
    except OSError:
        return None


def _write_shards(
    raw: RawSet, names: Sequence[str], folder: Path, split: str, shard_bytes: int
) -> tuple[dict[str, Any], list[str]]:
    """Writes the shards of a split.

    Returns: the content of the COCO file for them, and lines for the user.
    """
    keys = _choose_shard_names(names)
    content, lines = coco_content(raw, keys)
    renamed = sum(key != name for key, name in zip(keys, names))
    if renamed:
        lines.append(f"{renamed} images: dots in their names became _, as a key ends at the first")
    objects: defaultdict[int, list[Any]] = defaultdict(list)
    for entry in content["annotations"]:
        objects[entry["image_id"]].append(entry)
    listings: defaultdict[Path, list[dict[str, Any]]] = defaultdict(list)
    for image, entry in zip(raw.images, content["images"]):
        listings[image.path].append(entry)
    make_folder(folder)
    writer, absent = ShardWriter(folder, split, shard_bytes), []
    try:
        for path, entries in listings.items():
            image_bytes = _read_content(absolute(path), raw.opener)
            if image_bytes is None:
                absent.append(absolute(path))
                continue
            annotations = [annotation for entry in entries for annotation in objects[entry["id"]]]
            image_content = {"images": entries, "annotations": annotations}
            place = writer.add(entries[0]["file_name"], image_bytes, image_content)
            for entry in entries:
                entry["file_name"] = place
    finally:
        writer.close()
    if absent:
        lines.append(_describe_absent(absent))
    return content, lines


def _choose_shard_names(names: Sequence[str]) -> list[str]:
    """Chooses names without dots in the stem, as WebDataset's key ends at the first dot."""
    result: dict[str, str] = {}
    taken: set[str] = set()
    for name in dict.fromkeys(names):
        folder, file = os.path.split(name)
        stem, suffix = os.path.splitext(file)
        bare = os.path.join(folder, stem.replace(".", "_"))
        key, number = bare, 1
        while key in taken:
            number += 1
            key = f"{bare}_{number}"
        taken.add(key)
        result[name] = key + suffix
    return [result[name] for name in names]


_NAME = re.compile(r"[\w-]+")


def parse_shares(texts: Sequence[str]) -> dict[str, float]:
    """Parses parts and their shares from texts like `train=0.8`.

    Raises: ConfigError: a text is malformed, there are fewer than two parts, or the shares do not
        add up to 1.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            shares[name] = float(number)
        except ValueError:
            shares[name] = 0.0
        if not _NAME.fullmatch(name) or not 0 < shares[name] < 1:
            raise ConfigError(
                "expected a name (letters, digits, - and _) and a share between 0 and 1, such as "
                "train=0.8",
                code="bad_parts",
                where=f"--parts {text}",
            )
    if len(shares) < max(2, len(texts)) or abs(sum(shares.values()) - 1) > 1e-6:
        raise ConfigError(
            "expected two parts or more, of different names, whose shares make 1, such as "
            "train=0.8 val=0.2",
            code="bad_parts",
            where=f"--parts {' '.join(texts)}",
        )
    return shares


def make_folds(count: int) -> dict[str, Collection[int]]:
    """Returns the parts of cross-validation for `write_parts`: `fold1_train`, `fold1_val`, ... ->
    parts.
    """
    folds: dict[str, Collection[int]] = {}
    for fold in range(count):
        folds[f"fold{fold + 1}_train"] = {part for part in range(count) if part != fold}
        folds[f"fold{fold + 1}_val"] = {fold}
    return folds


def group_by_content(paths: Sequence[str]) -> np.ndarray:
    """Groups files with the same content: int64 [N], the same number for equal files.

    Reads only files that have the same length as another, so a set without copies costs one stat
    call per file.  A missing image forms a group of its own.
    """
    same_length: defaultdict[int, list[int]] = defaultdict(list)
    group_N = np.arange(len(paths))
    for index, path in enumerate(paths):
        if os.path.isfile(path):
            same_length[os.path.getsize(path)].append(index)
    for indices in same_length.values():
        first: dict[bytes, int] = {}
        for index in indices if len(indices) > 1 else ():
            digest = hashlib.blake2b(Path(paths[index]).read_bytes(), digest_size=16).digest()
            group_N[index] = first.setdefault(digest, index)
    return group_N


_STREAM = 7  # of random numbers, beside those of training


def divide(
    classes: Sequence[np.ndarray], group_N: np.ndarray, shares: Sequence[float], seed: int
) -> np.ndarray:
    """Divides images into parts: int64 [N], the part of each; depends only on the arguments.

    Distributes the rarest class first, then the rarest of the remaining ones: each image goes to
    the part that lacks most of the class; among equals, to the one that lacks most images.  If a
    class has no more images left than there are parts without it, they go to those parts; so the
    rarest class is in every part if it has enough images.  Images of a group stay together.

    Args:
        classes: the classes of the objects in each image.
        group_N: see `group_by_content`.
        shares: shares of the parts, each above 0, with sum 1.
    Source: Sechidis et al. 2011, "On the stratification of multi-label data", ECML PKDD,
        algorithm 1; groups, and rare classes in every part, are our additions.
    """
    share_P = np.asarray(shares, np.float64)
    groups, of_group_N = np.unique(group_N, return_inverse=True)
    weight_G = np.bincount(of_group_N, minlength=len(groups))
    shown = _union_classes(classes, of_group_N, len(groups))
    count = 1 + max((int(labels[-1]) for labels in shown if len(labels)), default=-1)
    order_G = keyed_generator(seed, _STREAM).permutation(len(groups))
    showing: list[list[int]] = [[] for _ in range(count)]
    total_C, left_C = np.zeros(count), np.zeros(count, np.int64)
    for group in order_G.tolist():
        for label in shown[group].tolist():
            showing[label].append(group)
        total_C[shown[group]] += weight_G[group]
        left_C[shown[group]] += 1
    lacking_PC, lacking_P = share_P[:, None] * total_C, share_P * len(classes)
    without_PC = np.ones(lacking_PC.shape, bool)
    part_G = np.full(len(groups), -1, np.int64)

    def put(group: int, part: int) -> None:
        part_G[group] = part
        lacking_P[part] -= weight_G[group]
        lacking_PC[part, shown[group]] -= weight_G[group]
        without_PC[part, shown[group]] = False
        left_C[shown[group]] -= 1

    while left_C.any():
        rarest = int(np.where(left_C, left_C, len(groups) + 1).argmin())
        for group in showing[rarest]:
            if part_G[group] >= 0:
                continue
            lacking_P_of_class = lacking_PC[:, rarest]
            if left_C[rarest] <= without_PC[:, rarest].sum():
                lacking_P_of_class = np.where(without_PC[:, rarest], lacking_P_of_class, -np.inf)
            # A tolerance, as sums of shares such as 0.8 are not exact.
            most_P = lacking_P_of_class >= lacking_P_of_class.max() - 1e-9
            put(group, int(np.where(most_P, lacking_P, -np.inf).argmax()))
    for group in order_G[part_G[order_G] < 0].tolist():
        put(group, int(lacking_P.argmax()))
    return part_G[of_group_N]


def _union_classes(
    classes: Sequence[np.ndarray], of_group_N: np.ndarray, groups: int
) -> list[np.ndarray]:
    """Returns the classes that the images of each group show, sorted and distinct."""
    labels_of_group: list[set[int]] = [set() for _ in range(groups)]
    for group, labels in zip(of_group_N.tolist(), classes):
        labels_of_group[group].update(labels.tolist())
    return [np.array(sorted(labels), np.int64) for labels in labels_of_group]


def table_of_parts(dataset: DetectionSet, part_N: np.ndarray, parts: int) -> list[list[str]]:
    """Builds table rows: image counts by part, in total and by class."""
    shown_CP = _count_images(dataset, part_N, parts)
    sizes_P = np.bincount(part_N, minlength=parts)
    rows = [["any", *map(str, (len(part_N), *sizes_P))]]
    for name, count_P in zip(dataset.class_names, shown_CP):
        rows.append([name, *map(str, (count_P.sum(), *count_P))])
    return rows


def find_absent_classes(
    dataset: DetectionSet, part_N: np.ndarray, names: Sequence[str]
) -> list[str]:
    """Lists `CLASS in PART` for classes that only other parts show."""
    return [
        f"{kind} in {part}"
        for kind, count_P in zip(dataset.class_names, _count_images(dataset, part_N, len(names)))
        for part, count in zip(names, count_P)
        if count_P.any() and not count
    ]


def _count_images(dataset: DetectionSet, part_N: np.ndarray, parts: int) -> np.ndarray:
    """Counts the images that show each class, by part: int64 [C, parts]; crowds do not count."""
    shown_CP = np.zeros((len(dataset.class_names), parts), np.int64)
    for record, part in zip(dataset.records, part_N):
        shown_CP[np.unique(record.labels_M[~record.crowd_M]), part] += 1
    return shown_CP


def write_parts(
    config: DataConfig,
    dataset: DetectionSet,
    part_N: np.ndarray,
    parts_of_file: Mapping[str, Collection[int]],
    out: Path | None,
) -> list[Path]:
    """Writes the files of one or several parts.

    Entries and lines are copied from the divided file.  COCO: a JSON file with the same
    categories and everything else outside the lists; VOC and YOLO: a list of images; CSV: the
    lines, with the header; a folder of classes becomes CSV files.

    Args:
        config: its `train` split is divided.
        dataset: that split.
        part_N: part number of each record.
        parts_of_file: name -> numbers of the parts in its file, in their original order; the file
            has the name of the divided one, followed by `_` and this name.
        out: the output folder; None: the folder of the divided file (data.root if the set is a
            folder).
    Raises: DataError: a file would be empty, the images of the file are not those of the set, or a
        list could not refer to its labels.  UserError: a file exists, or cannot be written.
    """
    empty = [name for name, parts in parts_of_file.items() if not np.isin(part_N, [*parts]).any()]
    if empty:
        raise DataError(
            f"{len(part_N)} images (duplicates stay together) leave none for {', '.join(empty)}",
            code="empty_part",
            where=dataset.source,
            fix="give it a larger share, or use fewer parts",
        )
    root = Path(config.root)
    sources = [root / name for name in config.train.annotation_files]
    if config.format != "folder" and len(sources) == 1 and not sources[0].is_dir():
        folder, stem = out or sources[0].parent, sources[0].stem
    else:
        images = root / config.train.image_folders[0]
        origin = images if config.format == "folder" else [*sources, images][0]
        folder, stem = out or root, origin.stem if origin.is_file() else origin.name
    suffix = {"coco": ".json", "folder": ".csv", "csv": ".csv"}.get(config.format, ".txt")
    files = [folder / f"{stem}_{name}{suffix}" for name in parts_of_file]
    existing = [str(file) for file in files if file.exists()]
    if existing:
        raise UserError(
            "already exists",
            code="file_exists",
            where=", ".join(existing),
            fix="remove it, or choose --out",
        )
    # All texts are built before the first file is written, so that an error leaves no file.
    texts = _split_texts(config, dataset, part_N, [*parts_of_file.values()])
    for file, text in zip(files, texts):
        make_parent(file)
        with writing(file):
            replace_file(file, text.encode())
    return files


def _split_texts(
    config: DataConfig,
    dataset: DetectionSet,
    part_N: np.ndarray,
    parts_of_files: list[Collection[int]],
) -> list[str]:
    root = Path(config.root)
    sources = [root / name for name in config.train.annotation_files]
    named = ", ".join(map(str, sources)) or str(root / config.train.image_folders[0])
    if config.format == "coco":
        part_of = {record.image_id: int(part) for record, part in zip(dataset.records, part_N)}
        content = json.loads(read_text(sources[0], ignore_issue))
        return [_select_coco(content, part_of, parts) for parts in parts_of_files]
    if config.format == "folder":
        images = Path(os.path.abspath(root / config.train.image_folders[0]))
        names = [dataset.class_names[int(record.labels_M[0])] for record in dataset.records]
        rows = [[os.path.relpath(r.path, images), name] for r, name in zip(dataset.records, names)]
        header, lines = "path,label\n", [_format_csv_line(row) for row in rows]
    elif config.format == "csv":
        header, lines = _read_csv_lines(sources[0], len(dataset.records))
    elif sources and not sources[0].is_dir():
        header, lines = (
            "",
            [line for source in sources for line in read_lines(source, ignore_issue)],
        )
    else:
        header, top = "", os.path.abspath(root)
        lines = [os.path.relpath(record.path, top) for record in dataset.records]
        if config.format == "voc":  # a line is an image and its XML file
            annotated = read_raw(config, "train", ignore_issue).images
            files = [os.path.relpath(os.path.abspath(image.where), top) for image in annotated]
            lines = [f"{line} {file}" for line, file in zip(lines, files, strict=True)]
        elif sources:
            _require_labels_beside_images(config)
    if len(lines) != len(dataset.records):
        raise DataError(
            f"{len(lines)} lines for {len(dataset.records)} images: it cannot be split line by "
            f"line",
            code="list_not_divisible",
            where=named,
            fix="run `ppdist data check DATA` to see what is wrong",
        )
    texts = [[line for line, of in zip(lines, part_N) if of in parts] for parts in parts_of_files]
    return [header + "\n".join(text) + "\n" for text in texts]


def _select_coco(content: dict[str, Any], part_of: dict[int, int], parts: Collection[int]) -> str:
    chosen = {image["id"] for image in content["images"] if part_of.get(image["id"]) in parts}
    images = [image for image in content["images"] if image["id"] in chosen]
    annotations = [entry for entry in content["annotations"] if entry.get("image_id") in chosen]
    changed = content | {"images": images, "annotations": annotations}
    return json.dumps(changed, ensure_ascii=False)


def _format_csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _read_csv_lines(table: Path, count: int) -> tuple[str, list[str]]:
    """Reads the header, if a table has one row more than images, and the lines."""
    rows = [
        row
        for row in csv.reader(read_text(table, ignore_issue).splitlines())
        if any(map(str.strip, row))
    ]
    header = f"{_format_csv_line(rows.pop(0))}\n" if len(rows) == count + 1 else ""
    return header, [_format_csv_line(row) for row in rows]


def _require_labels_beside_images(config: DataConfig) -> None:
    """Checks that the labels of YOLO are in `labels` beside `images`.

    The labels of `images/a.jpg` in a list are always searched in `labels/`, whatever the
    configuration says.
    """
    (images, *_), (labels, *_) = config.train.image_folders, config.train.annotation_files
    *above, last = Path(images).parts
    expected = Path(*above, "labels") if last == "images" else None
    if Path(labels) != expected:
        raise DataError(
            "a list of images needs the folders `images` and `labels` side by side",
            code="labels_not_beside_images",
            where=str(Path(config.root) / labels),
            fix=f"rename {images} and {labels} accordingly",
        )


def data_section(
    config: DataConfig, dataset: DetectionSet, files: Sequence[Path], names: Sequence[str]
) -> str:
    """Returns the `data:` section that uses the result of `write_parts`, as YAML.

    The first file trains and the second evaluates.  Class names are included if each part would
    otherwise derive its own.
    """
    root = os.path.abspath(config.root)
    data: dict[str, Any] = {"format": "csv" if config.format == "folder" else config.format}
    data["root"] = root
    if config.format != "coco":
        data["class_names"] = list(dataset.class_names)
    for key, file in zip(("train", "val"), files):
        path = os.path.abspath(file)
        inside = path.startswith(os.path.join(root, ""))
        annotations = os.path.relpath(path, root) if inside else path
        several = len(config.train.image_folders) > 1  # paths in a list of YOLO include the folder
        images = "." if several else config.train.image_folders[0]
        data[key] = {"images": images, "annotations": annotations}
    text = yaml.safe_dump(
        {"data": data}, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000
    )
    return text + "".join(f"# {name}: {file}\n" for name, file in zip(names[2:], files[2:]))
