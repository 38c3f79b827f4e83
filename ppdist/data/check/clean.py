"""A copy of both splits without what an audit found, or with it put right."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ppdist.data.check.audit import Audited, Report
from ppdist.data.check.consistency import check_same_classes
from ppdist.data.check.copies import duplicates, leaks, same_list
from ppdist.data.check.findings import KINDS
from ppdist.data.check.look import Look
from ppdist.data.formats.annotations import box_in_order, box_problem, cut_box
from ppdist.data.formats.convert import Format, Images, convert
from ppdist.data.formats.raw import RawImage, RawObject, RawSet
from ppdist.errors import DataError
from ppdist.files import make_folder, writing

_LEAVES_OUT = (  # the image
    "annotation_unreadable",
    "image_missing",
    "image_empty",
    "image_unreadable",
    "image_truncated",
    "image_crashes_decoder",
    "image_hangs_decoder",
    "size_mismatch",
)
_BY_WRITING = (  # done already: readers leave out what they cannot use, writers do it right
    "annotation_missing",
    "annotation_line",
    "encoding",
    "line_ends",
    "class_unknown",
    "outline_malformed",
    "area_invalid",
    "label_without_image",
    "label_shared",
    "image_unknown",
    "image_id_duplicate",
    "annotation_id_duplicate",
    "size_invalid",
    "path_outside",
    "image_unlisted",
)


class Cleaned(NamedTuple):
    """lines: what was done, one for each kind and split.  raws: split -> what was written of it."""

    lines: list[str]
    raws: dict[str, RawSet]


def clean_copy(report: Report, form: Format, out: Path, *, images: Images) -> Cleaned:
    """Writes both splits to a new folder as findings.KINDS says; an audit of it finds only notes.

    The folder gets all of it, or nothing.

    Args:
        form: format to write, that of the data or another.
        out: a folder that is empty or not there yet.
        images: see `convert`.
    Raises: DataError: no good image is left in a split, the classes of the splits differ, the
        format cannot hold them.  UserError: something cannot be written.
    """
    check_same_classes(report.splits["train"].raw, report.splits["val"].raw)
    lines, raws = [], {}
    for split, left_out in _left_out(report).items():
        audited = report.splits[split]
        done = Counter(left_out.values())
        raws[split] = _clean(audited.raw, left_out, done)
        if not raws[split].images:
            raise DataError(
                "not one image is good; nothing was written",
                code="no_good_image",
                where=audited.raw.source,
            )
        done.update(f.code for f in audited.findings if f.code in _BY_WRITING)
        done.update(  # where the reader left the image out
            finding.code
            for finding in audited.findings
            if finding.code == "annotation_unreadable" and finding.image not in left_out
        )
        lines += [
            f"{split}: {count} {kind}: {KINDS[kind].fix}"
            for kind, count in sorted(done.items(), key=lambda entry: [*KINDS].index(entry[0]))
        ]
    return Cleaned(lines + _write(raws, form, out, images), raws)


def _write(raws: Mapping[str, RawSet], form: Format, out: Path, images: Images) -> list[str]:
    """Under another name first: whatever fails, no half of it stays there."""
    make_folder(out)
    if any(out.iterdir()):
        raise DataError(
            "is not empty", code="folder_not_empty", where=str(out), fix="choose a new folder"
        )
    with writing(out):
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


def _left_out(report: Report) -> dict[str, dict[str, str]]:
    """Split -> path -> kind of each image that does not go into the copy.

    First what cannot be used; of what stays, images of training that validation has; of what stays
    then, all but the first of equal ones: so one of them always stays.
    """
    train, val = report.splits["train"], report.splits["val"]
    result = {split: _bad(audited) for split, audited in report.splits.items()}

    def stays(split: str) -> list[tuple[str, Look]]:
        return [entry for entry in report.splits[split].looked if entry[0] not in result[split]]

    if not same_list(train.looked, val.looked):
        result["train"] |= dict.fromkeys(leaks(stays("train"), stays("val")), "leakage")
    for split in result:
        result[split] |= dict.fromkeys(duplicates(stays(split)), "image_duplicate")
    return result


def _bad(audited: Audited) -> dict[str, str]:
    listed = {path for path, _ in audited.looked}
    return {
        finding.image: finding.code
        for finding in reversed(audited.findings)  # so that the first kind of each image counts
        if finding.code in _LEAVES_OUT and finding.image in listed
    }


def _clean(raw: RawSet, left_out: Mapping[str, str], done: Counter[str]) -> RawSet:
    kept: dict[str, RawImage] = {}
    for image in raw.images:
        path = str(image.path)
        if path in left_out:
            continue
        if path in kept:
            done["image_listed_twice"] += 1
            kept[path] = replace(kept[path], objects=kept[path].objects + image.objects)
        else:
            kept[path] = image
    images = [replace(image, objects=_good(image, done)) for image in kept.values()]
    return replace(raw, images=images)


def _good(image: RawImage, done: Counter[str]) -> list[RawObject]:
    result: dict[tuple[object, ...], RawObject] = {}
    for thing in image.objects:
        box, size = thing.box, (image.width, image.height)
        if box_problem(box, *size) == "box_swapped":
            done["box_swapped"] += 1
            box = box_in_order(box)
        problem = box_problem(box, *size)
        if problem is not None:
            done[problem] += 1
        if problem == "box_sticking_out":
            x1, y1, x2, y2 = cut_box(box, *size)
            box = (float(x1), float(y1), float(x2), float(y2))  # corners at a border are whole
        elif problem is not None:
            continue
        key = (thing.label, thing.crowd, *box)
        if key in result:
            done["box_duplicate"] += 1
            continue
        result[key] = thing if box == thing.box else replace(thing, box=box)
    return [*result.values()]
