"""A copy of both splits without their defects."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ppdist.common.errors import DataError
from ppdist.common.files import make_folder, writing
from ppdist.data.checks.images import ImageCheck, are_same_lists, find_duplicates, find_leaks
from ppdist.data.checks.validate import Report, ValidatedSplit, good_objects
from ppdist.data.datasets.annotations import KINDS
from ppdist.data.datasets.build import check_same_classes
from ppdist.data.datasets.convert import Format, Images, convert
from ppdist.data.types import RawImage, RawSet

_EXCLUDING_KINDS = (  # kinds of issues whose image is left out
    "annotation_unreadable",
    "image_missing",
    "image_empty",
    "image_unreadable",
    "image_truncated",
    "pixel_kind",
    "image_crashes_decoder",
    "image_hangs_decoder",
    "size_mismatch",
    "image_objects_lost",  # last: any other kind is the better reason
)
# Kinds that need no step here: readers leave the faulty parts out, or writers correct them.
_FIXED_BY_WRITING = (
    "annotation_missing",
    "annotation_line",
    "encoding",
    "line_ends",
    "class_unknown",
    "outline_malformed",
    "area_invalid",
    "label_encoded",
    "label_without_image",
    "label_shared",
    "image_unknown",
    "image_id_duplicate",
    "annotation_id_duplicate",
    "class_count_differs",
    "class_group",
    "class_names_same",
    "image_kind_unread",
    "size_missing",
    "path_outside",
    "image_unlisted",
)


class Cleaned(NamedTuple):
    """The result of `clean_copy`.

    lines: one for each kind and split.  raws: split -> the set that was written.
    """

    lines: list[str]
    raws: dict[str, RawSet]


def clean_copy(report: Report, form: Format, out: Path, *, images: Images) -> Cleaned:
    """Writes both splits to a new folder, with the fixes that annotations.KINDS describes.

    In the result `validate` finds only notes, and warnings that only the owner of the set can
    decide on: classes with nearly equal names, and one set for both splits.  The folder receives
    the complete copy or nothing.

    Args:
        form: format to write, which may be that of the data or another one.
        out: a folder that is empty or does not exist yet.
        images: see `convert`.
    Raises: DataError: no good image or no object is left in a split, the classes of the splits
        differ or are numbered from 1, or the format cannot represent them.  UserError: a file
        cannot be written.
    """
    check_same_classes(report.splits["train"].raw, report.splits["val"].raw)
    _require_fixable(report)
    lines, raws = [], {}
    for split, left_out in _choose_left_out(report).items():
        validated = report.splits[split]
        done = Counter(left_out.values())
        raws[split] = _clean(validated.raw, left_out, done)
        if not raws[split].images:
            raise DataError(
                "no image can be used; nothing was written",
                code="no_good_image",
                where=validated.raw.source,
            )
        if not any(image.objects for image in raws[split].images):
            raise DataError(
                "no usable object; nothing was written",
                code="objects_missing",
                where=validated.raw.source,
            )
        done.update(f.code for f in validated.issues if f.code in _FIXED_BY_WRITING)
        done.update(  # where the reader left the image out
            issue.code
            for issue in validated.issues
            if issue.code == "annotation_unreadable" and issue.image not in left_out
        )
        lines += [
            f"{split}: {count} {kind}: {KINDS[kind].fix}"
            for kind, count in sorted(done.items(), key=lambda entry: [*KINDS].index(entry[0]))
        ]
    return Cleaned(lines + _write(raws, form, out, images), raws)


def _require_fixable(report: Report) -> None:
    """Refuses what is wrong with a split as a whole: what is left of it would be wrong, too."""
    for validated in report.splits.values():
        for issue in validated.issues:
            if issue.fix:
                raise DataError(
                    f"{issue.what}; nothing was written",
                    code=issue.code,
                    where=issue.where,
                    fix=issue.fix,
                )


def _choose_left_out(report: Report) -> dict[str, dict[str, str]]:
    """Chooses the images that the copy leaves out: split -> path -> kind.

    These are images that cannot be used; of the rest, training images that are also in the
    validation split; then all but the first of equal images.  So one of several equal images is
    always kept.
    """
    train, val = report.splits["train"], report.splits["val"]
    result = {split: _unusable_images(validated) for split, validated in report.splits.items()}

    def stays(split: str) -> list[tuple[str, ImageCheck]]:
        return [entry for entry in report.splits[split].images if entry[0] not in result[split]]

    if not are_same_lists(train.images, val.images):
        leaking = find_leaks(stays("train"), stays("val"), train.raw.opener)
        result["train"] |= dict.fromkeys(leaking, "leakage")
    for split in result:
        repeated = find_duplicates(stays(split), report.splits[split].raw.opener)
        result[split] |= dict.fromkeys(repeated, "image_duplicate")
    return result


def _unusable_images(validated: ValidatedSplit) -> dict[str, str]:
    listed = {path for path, _ in validated.images}
    return {
        issue.image: issue.code
        for issue in reversed(validated.issues)  # so that the first issue of an image counts
        if issue.code in _EXCLUDING_KINDS and issue.image in listed
    }


def _clean(raw: RawSet, left_out: Mapping[str, str], done: Counter[str]) -> RawSet:
    images_by_path: dict[str, RawImage] = {}
    for image in raw.images:
        path = str(image.path)
        if path in left_out:
            continue
        if path in images_by_path:
            done["image_listed_twice"] += 1
            images_by_path[path] = replace(
                images_by_path[path], objects=images_by_path[path].objects + image.objects
            )
        else:
            images_by_path[path] = image
    images = [
        replace(image, objects=good_objects(image, done)) for image in images_by_path.values()
    ]
    return replace(raw, images=images)


def _write(raws: Mapping[str, RawSet], form: Format, out: Path, images: Images) -> list[str]:
    """Writes the copy under another name, then renames it: a failure leaves nothing behind."""
    make_folder(out)
    if any(out.iterdir()):
        raise DataError(
            "is not empty", code="folder_not_empty", where=str(out), fix="choose a new folder"
        )
    with writing(out):
        # Inside `out`, as a rename is only atomic within one file system.
        draft = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
    lines = []
    try:
        for split, raw in raws.items():
            done = convert(raw, form, draft, images=images, split=split)
            lines += [f"{split}: {line}" for line in done]
        with writing(out):
            for entry in sorted(draft.iterdir()):
                entry.rename(out / entry.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return lines
