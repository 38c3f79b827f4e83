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
    are_same_lists,
    check_files,
    find_duplicates,
    find_leaks,
    iterate_in_threads,
)
from ppdist.data.datasets.annotations import KINDS
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm
from ppdist.distributed.progress import Progress

_LOGGER = logging.getLogger("ppdist.data")
_EXAMPLES = 3


class Checked(NamedTuple):
    """The result of the check, for both splits.

    train, val: with `unreadable` set; val is None if there is no validation split.
    lines: warnings, one for each kind and split; the same on every rank.
    pixels: fingerprint of the training images, as far as they were checked; "": unknown.
    """

    train: DetectionSet
    val: DetectionSet | None
    lines: tuple[str, ...]
    pixels: str = ""


def check_before_training(
    config: DataConfig, train: DetectionSet, val: DetectionSet | None, workers: int
) -> Checked:
    """Checks the images of both splits according to `data.check_images`.  Collective.

    Rank 0 checks and all ranks get its result, so all leave out the same images; they wait as long
    as rank 0 makes progress.  The result is cached in $XDG_CACHE_HOME or ~/.cache: the next start
    compares only times and sizes of the files.

    Args:
        workers: child processes that check images.
    Raises: DataError: an image is bad and data.bad_images is `error`; a split has no good image.
    """
    if config.check_images == "none":
        return Checked(train, val, ())
    sets = {"train": train} if val is None else {"train": train, "val": val}
    decode = config.check_images == "decode"
    result = comm.run_on_main(lambda: _cached_result(sets, decode=decode, workers=workers))
    checked = {}
    for name, dataset in sets.items():
        bad = result["bad"][name]
        if bad and config.bad_images == "error":
            position, reason, code = bad[0]
            fix = "remove it, or set data.bad_images: skip"
            raise DataError(reason, code=code, where=dataset.records[position].path, fix=fix)
        unreadable = {**dataset.unreadable, **{position: reason for position, reason, _ in bad}}
        if len(unreadable) == len(dataset.records):
            position, reason = next(iter(unreadable.items()))
            raise DataError(
                f"no image can be used; the first is {dataset.records[position].path}: {reason}",
                code="no_good_image",
                where=dataset.source,
            )
        checked[name] = replace(dataset, unreadable=unreadable)
    pixels = f"{config.check_images} {result['pixels']}" if result["pixels"] else ""
    return Checked(checked["train"], checked.get("val"), tuple(result["lines"]), pixels)


def _cached_result(
    sets: Mapping[str, DetectionSet], *, decode: bool, workers: int
) -> dict[str, Any]:
    """Returns the result of a check, from the cache if no file has changed.

    Returns: "bad": split -> a list of [position, reason, kind]; "lines", "pixels": see Checked.
    """
    started = time.monotonic()
    records = {split: Records.of(dataset.records) for split, dataset in sets.items()}
    keys = {
        split: _image_keys(split_records, sets[split].opener, decode)
        for split, split_records in records.items()
    }
    not_cached = "data check: not kept for the next time: %s"
    cache = KeyedCache.of_user(
        "checks", _MOST_BYTES, lambda reason: _LOGGER.info(not_cached, reason)
    )
    # A change to an image without a mark would go unnoticed.
    cacheable = cache is not None and all((keys_N != _UNKNOWN).all() for keys_N in keys.values())
    name = "\n".join(os.path.abspath(dataset.source) for dataset in sets.values())
    summary = hashlib.blake2b(digest_size=16)
    for split, keys_N in keys.items():
        summary.update(f"\n{split}".encode() + keys_N.tobytes())
    key = f"{name}\n{summary.hexdigest()}"
    stored = cache.get(key) if cache is not None and cacheable else None
    result = None if stored is None else json.loads(stored)
    suffix = " (unchanged since the last check)" if result else ""
    if result is None:
        checked = {
            split: _check_images(images, sets[split].opener, decode=decode, workers=workers)
            for split, images in records.items()
        }
        result = _summarize(sets, checked)
        # A problem that may have disappeared has to be checked again at the next start.
        passing = any(
            image_check.passing for images in checked.values() for _, image_check in images
        )
        if cache is not None and cacheable and not passing:
            cache.put(key, json.dumps(result).encode())
    count = sum(map(len, records.values()))
    seconds, subject = time.monotonic() - started, "pixels" if decode else "headers"
    if not decode and any(is_remote(d.records[0].path) for d in sets.values() if d.records):
        subject = "headers (in an object store: only the listing)"
    report = "data check: %s of %d images in %.1f s%s"
    _LOGGER.info(report, subject, count, seconds, suffix, extra=DETAIL)
    return result


def _check_images(records: Records, opener: Opener, *, decode: bool, workers: int) -> CheckedImages:
    """Checks the images of a split.

    The images of a restarted job were there before: if some are missing, they are checked again
    once their storage is back.

    Raises: StorageError: the storage stays unavailable.
    """

    def check(positions: Sequence[int]) -> list[ImageCheck]:
        progress = Progress(_LOGGER, "data check", len(positions))
        files = _Files(records, opener, positions)
        return check_files(files, decode=decode, workers=workers, done=progress.add)

    checks = check(range(len(records)))
    failed = [position for position, result in enumerate(checks) if result.passing]
    if failed and comm.was_restarted():
        comm.once_there(lambda: _require_storage(records, opener, failed))
        for position, result in zip(failed, check(failed)):
            checks[position] = result
    return [(records.path(position), result) for position, result in enumerate(checks)]


def _require_storage(records: Records, opener: Opener, failed: Sequence[int]) -> None:
    """Checks that the storage of the failed images is available.

    Raises: StorageError: no file beside a failed one can be read.
    """
    folder_of = [os.path.dirname(records.path(position)) for position in range(len(records))]
    for folder in dict.fromkeys(folder_of[position] for position in failed):
        candidates = [
            records.path(position)
            for position, folder_of_image in enumerate(folder_of)
            if folder_of_image == folder
        ]
        if not candidates[1:]:  # the only image there: probe others of the set, or the folder
            neighbours = [
                records.path(position) for position in range(min(len(folder_of), _PROBED))
            ]
            candidates = neighbours if neighbours[1:] else [folder]
        if not any(map(opener.can_be_read, candidates[:_PROBED])):
            reason = "cannot be read, though an earlier attempt of this job has read it"
            raise unavailable(reason, candidates[0])


class _Files(Sequence[ImageFile]):
    """A sequence of some images of a set, each created on access.

    A list of a million images would take 0.5 GB.
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
        position = self._positions[index]
        height, width = self._records.sizes_N2[position].tolist()
        size = (width, height) if width > 0 else None
        return ImageFile(self._records.path(position), size, self._opener)


def _summarize(
    sets: Mapping[str, DetectionSet], checked: Mapping[str, CheckedImages]
) -> dict[str, Any]:
    """Summarizes the checks of all images; see `_cached_result`."""
    bad, lines = {}, []
    for split, images in checked.items():
        problems = [
            (position, path, check.problem)
            for position, (path, check) in enumerate(images)
            if check.problem is not None
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
            for path, first in find_duplicates(images, sets[split].opener).items()
        ]
        for kind, count in Counter(kind for kind, _ in doubts).items():
            examples = [text for code, text in doubts if code == kind][:_EXAMPLES]
            row = KINDS[kind]
            follows = f"training: {row.training}"
            if split != "train" and row.evaluation:
                follows = row.evaluation
            lines.append(
                f"{sets[split].source}: {kind}: {count} of {len(images)} images: {row.meaning}; "
                f"{follows}; first: {'; '.join(examples)}"
            )
    if "val" in checked and not are_same_lists(checked["train"], checked["val"]):
        leaking = [*find_leaks(checked["train"], checked["val"], sets["train"].opener)]
        if leaking:
            lines.append(
                f"leakage: {len(leaking)} of {len(checked['train'])} training images are in the "
                f"validation split too, by content: scores will be too good; "
                f"first: {', '.join(leaking[:_EXAMPLES])}"
            )
    # Hashed in order and without paths: equal sets have the same fingerprint on every host.
    digests = [check.digest for _, check in checked["train"]]
    fingerprint = hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()
    return {"bad": bad, "lines": lines, "pixels": fingerprint if all(digests) else ""}


_PROBED = 8  # images of a folder that are opened to find out if its storage is available
_VERSION = 8  # of the cached result: increase it when the check of an image changes


def map_in_threads(function: Callable[[int], int], count: int, progress: Progress) -> np.ndarray:
    """Calls function(0), function(1), ... in threads; returns the results, int64 [count]."""
    return np.fromiter(iterate_in_threads(function, count, progress.add), np.int64, count)


_UNKNOWN = 0  # key of an image whose changes cannot be detected
_MOST_BYTES = 1 << 30


def _image_keys(records: Records, opener: Opener, decode: bool) -> np.ndarray:
    """Computes, per image, a key of everything that its check depends on, int64 [N].

    That is its path, its annotated size, and its content identity (the ctime changes with
    permissions, too).  _UNKNOWN: changes cannot be detected.
    """
    start = hashlib.blake2b(f"{_VERSION} {decode}".encode(), digest_size=8)

    def image_key(position: int) -> int:
        path = records.path(position)
        try:
            identity = opener.identity_of(path)
            if not identity.mark:
                return _UNKNOWN
            identity_text = " ".join(map(str, identity))
        except OSError:
            identity_text = "absent"
        height, width = records.sizes_N2[position].tolist()
        content = start.copy()
        content.update(os.fsencode(f"{path}\0{width} {height} {identity_text}"))
        return int.from_bytes(content.digest(), "little", signed=True)

    progress = Progress(_LOGGER, "data check: what has changed", len(records))
    return map_in_threads(image_key, len(records), progress)
