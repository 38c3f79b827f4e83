"""Check of the images before training, once while no file changes."""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

import numpy as np

from ppdist.common.addresses import is_remote
from ppdist.common.errors import DataError
from ppdist.common.keyed_cache import KeyedCache
from ppdist.common.opener import Opener
from ppdist.common.process import DETAIL
from ppdist.common.retry import unavailable
from ppdist.config.data import DataConfig
from ppdist.data.checks.images import (
    CheckedImages,
    ImageCheck,
    ImageFile,
    check_files,
    duplicates,
    in_threads,
    leaks,
    same_list,
)
from ppdist.data.datasets.annotations import KINDS
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm
from ppdist.distributed.progress import Progress

_LOGGER = logging.getLogger("ppdist.data")
_EXAMPLES = 3


class Checked(NamedTuple):
    """Both splits after the check.

    train, val: with `unreadable` filled; val is None where none was given.
    lines: what to warn of, one for each kind and split; the same on every rank.
    pixels: fingerprint of the training images, as far as they were looked at; "": not known.
    """

    train: DetectionSet
    val: DetectionSet | None
    lines: tuple[str, ...]
    pixels: str = ""


def check_before_training(
    config: DataConfig, train: DetectionSet, val: DetectionSet | None, workers: int
) -> Checked:
    """Checks the images of both splits as `data.check_images` says.  Collective.

    Rank 0 checks and all ranks get its result, so all leave out the same images; however long that
    takes, they wait while it gets on.  The result is kept in $XDG_CACHE_HOME or ~/.cache: the next
    start compares only the files' times and sizes, and an interrupted one continues.

    Args:
        workers: child processes that check images.
    Raises: DataError: a bad image where data.bad_images is `error`; no good one in a split.
    """
    if config.check_images == "none":
        return Checked(train, val, ())
    sets = {"train": train} if val is None else {"train": train, "val": val}
    decode = config.check_images == "decode"
    found = comm.run_on_main(lambda: _remembered(sets, decode=decode, workers=workers))
    checked = {}
    for name, dataset in sets.items():
        bad = found["bad"][name]
        if bad and config.bad_images == "error":
            at, why, code = bad[0]
            fix = "remove it, or set data.bad_images: skip"
            raise DataError(why, code=code, where=dataset.records[at].path, fix=fix)
        unreadable = {**dataset.unreadable, **{at: why for at, why, _ in bad}}
        if len(unreadable) == len(dataset.records):
            at, why = next(iter(unreadable.items()))
            raise DataError(
                f"no image can be used; the first is {dataset.records[at].path}: {why}",
                code="no_good_image",
                where=dataset.source,
            )
        checked[name] = replace(dataset, unreadable=unreadable)
    pixels = f"{config.check_images} {found['pixels']}" if found["pixels"] else ""
    return Checked(checked["train"], checked.get("val"), tuple(found["lines"]), pixels)


def _remembered(sets: Mapping[str, DetectionSet], *, decode: bool, workers: int) -> dict[str, Any]:
    """Result of a check, from the cache while no file has changed.

    Returns: "bad": split -> [position, why, kind] each; "lines", "pixels": see Checked.
    """
    started = time.monotonic()
    records = {split: Records.of(dataset.records) for split, dataset in sets.items()}
    keys = {split: _keys(each, sets[split].opener, decode) for split, each in records.items()}
    unkept = "data check: not kept for the next time: %s"
    kept = KeyedCache.of_user("checks", _MOST_BYTES, lambda why: _LOGGER.info(unkept, why))
    certain = kept is not None and all((keys_N != _UNKNOWN).all() for keys_N in keys.values())
    name = "\n".join(os.path.abspath(dataset.source) for dataset in sets.values())
    summary = hashlib.blake2b(digest_size=16)
    for split, keys_N in keys.items():
        summary.update(f"\n{split}".encode() + keys_N.tobytes())
    key = f"{name}\n{summary.hexdigest()}"
    stored = kept.get(key) if kept is not None and certain else None
    known = None if stored is None else json.loads(stored)
    again = " (unchanged since the last check)" if known else ""
    if known is None:
        checked = {
            split: _checked(images, sets[split].opener, decode=decode, workers=workers)
            for split, images in records.items()
        }
        known = _outcome(sets, checked)
        passing = any(found.passing for images in checked.values() for _, found in images)
        if kept is not None and certain and not passing:
            kept.put(key, json.dumps(known).encode())
    count = sum(map(len, records.values()))
    seconds, what = time.monotonic() - started, "pixels" if decode else "headers"
    if not decode and any(is_remote(d.records[0].path) for d in sets.values() if d.records):
        what = "headers (in an object store: only the listing)"
    said = "data check: %s of %d images in %.1f s%s"
    _LOGGER.info(said, what, count, seconds, again, extra=DETAIL)
    return known


def _checked(records: Records, opener: Opener, *, decode: bool, workers: int) -> CheckedImages:
    """Checks the images of a split.

    Those of a job that was started anew were there before: where some are away, they are checked
    again once their storage is back.

    Raises: StorageError: it stays away.
    """

    def check(positions: Sequence[int]) -> list[ImageCheck]:
        progress = Progress(_LOGGER, "data check", len(positions))
        files = _Files(records, opener, positions)
        return check_files(files, decode=decode, workers=workers, done=progress.add)

    checks = check(range(len(records)))
    failed = [at for at, result in enumerate(checks) if result.passing]
    if failed and comm.was_restarted():
        comm.once_there(lambda: _require_storage(records, opener, failed))
        for at, result in zip(failed, check(failed)):
            checks[at] = result
    return [(records.path(at), result) for at, result in enumerate(checks)]


def _require_storage(records: Records, opener: Opener, failed: Sequence[int]) -> None:
    """Raises: StorageError: no file beside a failed one can be read."""
    folder_of = [os.path.dirname(records.path(at)) for at in range(len(records))]
    for folder in dict.fromkeys(folder_of[at] for at in failed):
        inside = [records.path(at) for at, place in enumerate(folder_of) if place == folder]
        if not inside[1:]:  # it is alone there: any others of the set, or the folder
            others = [records.path(at) for at in range(min(len(folder_of), _PROBED))]
            inside = others if others[1:] else [folder]
        if not any(map(opener.can_be_read, inside[:_PROBED])):
            why = "cannot be read, though an earlier attempt of this job has read it"
            raise unavailable(why, inside[0])


class _Files(Sequence[ImageFile]):
    """Some images of a set, each created on access.

    A list of a million takes 0.5 GB.
    """

    def __init__(self, records: Records, opener: Opener, positions: Sequence[int]) -> None:
        self._records, self._opener, self._positions = records, opener, positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> ImageFile: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ImageFile]: ...
    def __getitem__(self, index: int | slice) -> ImageFile | Sequence[ImageFile]:
        if isinstance(index, slice):
            return _Files(self._records, self._opener, self._positions[index])
        at = self._positions[index]
        height, width = self._records.sizes_N2[at].tolist()
        size = (width, height) if width > 0 else None
        return ImageFile(self._records.path(at), size, self._opener)


def _outcome(
    sets: Mapping[str, DetectionSet], checked: Mapping[str, CheckedImages]
) -> dict[str, Any]:
    bad, lines = {}, []
    for split, images in checked.items():
        problems = [
            (position, path, found.problem)
            for position, (path, found) in enumerate(images)
            if found.problem is not None
        ]
        bad[split] = [(position, problem.text, problem.code) for position, _, problem in problems]
        doubts = [(problem.code, f"{path}: {problem.text}") for _, path, problem in problems]
        doubts += [
            (kind, path)
            for path, image in images
            for kind in image.notes
            if KINDS[kind].severity == "warning"
        ]
        doubts += [
            ("image_duplicate", f"{path} and {first}")
            for path, first in duplicates(images, sets[split].opener).items()
        ]
        for kind, count in Counter(kind for kind, _ in doubts).items():
            examples = [text for code, text in doubts if code == kind][:_EXAMPLES]
            what = KINDS[kind]
            follows = f"training: {what.training}"
            if split != "train" and what.evaluation:
                follows = what.evaluation
            lines.append(
                f"{sets[split].source}: {kind}: {count} of {len(images)} images: {what.meaning}; "
                f"{follows}; first: {'; '.join(examples)}"
            )
    if "val" in checked and not same_list(checked["train"], checked["val"]):
        leaking = [*leaks(checked["train"], checked["val"], sets["train"].opener)]
        if leaking:
            lines.append(
                f"leakage: {len(leaking)} of {len(checked['train'])} training images are in the "
                f"validation split too, by content: scores will be too good; "
                f"first: {', '.join(leaking[:_EXAMPLES])}"
            )
    digests = [found.digest for _, found in checked["train"]]
    whole = hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()
    return {"bad": bad, "lines": lines, "pixels": whole if all(digests) else ""}


_PROBED = 8  # images of a folder that are opened to see whether its storage is there
_VERSION = 8  # of the kept result: raise it when a check of an image finds other things


def look_at_all(look: Callable[[int], int], count: int, progress: Progress) -> np.ndarray:
    """Collects look(0), look(1), ..., each int64, with threads."""
    return np.fromiter(in_threads(look, count, progress.add), np.int64, count)


_UNKNOWN = 0  # key of an image whose changes cannot be detected
_MOST_BYTES = 1 << 30


def _keys(records: Records, opener: Opener, decode: bool) -> np.ndarray:
    """Keys, int64 [N], of what each image's check depends on.

    These are its path, its annotated size, and its content identity (ctime: new permissions, too).
    _UNKNOWN: changes cannot be detected.
    """
    start = hashlib.blake2b(f"{_VERSION} {decode}".encode(), digest_size=8)

    def key(at: int) -> int:
        path = records.path(at)
        try:
            identity = opener.identity_of(path)
            if not identity.mark:
                return _UNKNOWN
            seen = " ".join(map(str, identity))
        except OSError:
            seen = "absent"
        height, width = records.sizes_N2[at].tolist()
        content = start.copy()
        content.update(os.fsencode(f"{path}\0{width} {height} {seen}"))
        return int.from_bytes(content.digest(), "little", signed=True)

    progress = Progress(_LOGGER, "data check: what has changed", len(records))
    return look_at_all(key, len(records), progress)
