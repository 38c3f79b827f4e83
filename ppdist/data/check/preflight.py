"""The look at every image before training, once for as long as no file changes."""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ppdist import dist
from ppdist.config.data import DataConfig
from ppdist.data.check.copies import Looked, leaks, same_list
from ppdist.data.check.findings import KINDS
from ppdist.data.check.look import Look
from ppdist.data.check.scan import ImageFile, scan
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError
from ppdist.files import user_cache

_LOGGER = logging.getLogger("ppdist.data")
_VERSION = 3  # of what is kept: raise it when a look at an image sees more
_EXAMPLES = 3


class Checked(NamedTuple):
    """train, val: with `unreadable` filled; val is None where none was given.
    lines: what to warn of, one for each kind and split; the same on every rank."""

    train: DetectionSet
    val: DetectionSet | None
    lines: tuple[str, ...]


def check_before_training(
    config: DataConfig, train: DetectionSet, val: DetectionSet | None, workers: int
) -> Checked:
    """Looks at both splits as `data.check_images` says; every rank calls it.

    Rank 0 looks, the others take its word, so all leave out the same images.  What was found also
    goes to a file in $XDG_CACHE_HOME or ~/.cache: the next start compares the files' times and
    sizes alone.

    Args:
        workers: child processes that look.
    Raises: DataError: a bad image where data.bad_images is `error`; no good one in a split.
    """
    if config.check_images == "none":
        return Checked(train, val, ())
    sets = {"train": train} if val is None else {"train": train, "val": val}
    decode = config.check_images == "decode"
    found = dist.on_main(lambda: _remembered(sets, decode=decode, workers=workers))
    checked = {name: _without(dataset, found["bad"][name]) for name, dataset in sets.items()}
    for name, dataset in checked.items():
        if found["bad"][name] and config.bad_images == "error":
            at, why, code = found["bad"][name][0]
            fix = "remove it, or set data.bad_images: skip"
            raise DataError(why, code=code, where=dataset.records[at].path, fix=fix)
        if len(dataset.unreadable) == len(dataset.records):
            at, why = next(iter(dataset.unreadable.items()))
            raise DataError(
                f"not one image can be used, first {dataset.records[at].path}: {why}",
                code="no_good_image",
                where=dataset.source,
            )
    return Checked(checked["train"], checked.get("val"), tuple(found["lines"]))


def _without(dataset: DetectionSet, bad: list[tuple[int, str, str]]) -> DetectionSet:
    found = {position: why for position, why, _ in bad}
    return replace(dataset, unreadable={**dataset.unreadable, **found})


def _remembered(sets: Mapping[str, DetectionSet], *, decode: bool, workers: int) -> dict[str, Any]:
    """{"bad": split -> [position, why, kind] each, "lines": for the log}; kept from the last time
    where no file changed since."""
    started = time.monotonic()
    fingerprint = _fingerprint(sets, decode)
    kept = _kept_in(sets)
    known = _load(kept, fingerprint, [*sets])
    count = sum(len(dataset.records) for dataset in sets.values())
    again = " (unchanged since the last check)" if known else ""
    if known is None:
        looked = {
            split: _look(dataset, decode=decode, workers=workers) for split, dataset in sets.items()
        }
        known = _outcome(sets, looked)
        if not any(found.passing for images in looked.values() for _, found in images):
            _keep(kept, known | {"fingerprint": fingerprint})
    seconds, what = time.monotonic() - started, "pixels" if decode else "headers"
    _LOGGER.info("data check: %s of %d images in %.1f s%s", what, count, seconds, again)
    return known


def _look(dataset: DetectionSet, *, decode: bool, workers: int) -> list[tuple[str, Look]]:
    files = [
        ImageFile(record.path, (record.width, record.height) if record.height > 0 else None)
        for record in dataset.records
    ]
    looks = scan(files, decode=decode, workers=workers)
    return [(file.path, found) for file, found in zip(files, looks)]


def _outcome(sets: Mapping[str, DetectionSet], looked: Mapping[str, Looked]) -> dict[str, Any]:
    bad, lines = {}, []
    for split, images in looked.items():
        problems = [found.problem for _, found in images]
        bad[split] = [
            (position, found.problem[1].removeprefix(f"{path}: "), found.problem[0])
            for position, (path, found) in enumerate(images)
            if found.problem[0]
        ]
        for kind, count in Counter(kind for kind, _ in problems if kind).items():
            first = [text for of, text in problems if of == kind][:_EXAMPLES]
            lines.append(
                f"{sets[split].source}: {kind}: {count} of {len(images)} images: "
                f"{KINDS[kind].meaning}; training: {KINDS[kind].training}; "
                f"first: {'; '.join(first)}"
            )
    if "val" in looked and not same_list(looked["train"], looked["val"]):
        leaking = [*leaks(looked["train"], looked["val"])]
        if leaking:
            lines.append(
                f"leakage: {len(leaking)} of {len(looked['train'])} training images are in the "
                f"validation split too, by content: scores will be too good; "
                f"first: {', '.join(leaking[:_EXAMPLES])}"
            )
    return {"bad": bad, "lines": lines}


def _fingerprint(sets: Mapping[str, DetectionSet], decode: bool) -> str:
    """Of everything that the outcome depends on: annotated sizes, and each file's size and
    times (that of its inode tells of new permissions)."""
    summary = hashlib.blake2b(f"{_VERSION} {decode}".encode(), digest_size=16)
    for split, dataset in sets.items():
        summary.update(f"\n{split}".encode())
        for record in dataset.records:
            try:
                state = os.stat(record.path)
                seen = f"{state.st_mtime_ns} {state.st_ctime_ns} {state.st_size}"
            except OSError:
                seen = "absent"
            summary.update(os.fsencode(f"\n{record.path}\0{record.width} {record.height} {seen}"))
    return summary.hexdigest()


def _kept_in(sets: Mapping[str, DetectionSet]) -> Path | None:
    """The file that holds the last outcome for these annotation files; None: there is no home."""
    folder = user_cache()
    if folder is None:
        return None
    names = "\n".join(os.path.abspath(dataset.source) for dataset in sets.values())
    name = hashlib.blake2b(os.fsencode(names), digest_size=8).hexdigest()
    return folder / f"check-{name}.json"


def _load(file: Path | None, fingerprint: str, splits: Sequence[str]) -> dict[str, Any] | None:
    """What was kept, if it is of the same files; else, or if it cannot be read, None."""
    try:
        known = json.loads(file.read_bytes()) if file else {}
        if known.get("fingerprint") != fingerprint:
            return None
        return {
            "bad": {
                split: [(int(at), str(why), str(kind)) for at, why, kind in known["bad"][split]]
                for split in splits
            },
            "lines": [str(line) for line in known["lines"]],
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError):  # or of another form
        return None


def _keep(file: Path | None, outcome: dict[str, Any]) -> None:
    """Writes it where that is possible; a home that cannot be written to does not matter."""
    if file is None:
        return
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(outcome), encoding="ascii")
        draft.replace(file)
    except OSError as error:
        _LOGGER.info("data check: not kept for the next time: %s", error)
