"""Images that are there more than once: within a split, or in training and validation."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence

from ppdist.data.check.look import Look

Looked = Sequence[tuple[str, Look]]  # the path of each listed image, and what it is


def duplicates(images: Looked) -> dict[str, str]:
    """Path -> an earlier path with the same content."""
    result = {}
    for group in _same_content(images):
        first, *others = dict.fromkeys(images[position][0] for position in group)
        result.update(dict.fromkeys(others, first))
    return result


def leaks(train: Looked, val: Looked) -> dict[str, str]:
    """Path of a training image -> path of the same file, or a copy, in the validation split."""
    held = {path for path, _ in val}
    result = {path: path for path, _ in train if path in held}
    both = [*train, *val]
    for group in _same_content(both):
        copies = [both[position][0] for position in group if position >= len(train)]
        if copies:
            for position in group:
                if position < len(train):
                    result.setdefault(both[position][0], copies[0])
    return result


def same_list(train: Looked, val: Looked) -> bool:
    """Whether both splits are one list, of the same files or of copies: to over-fit on purpose, so
    nothing leaks."""
    return len(train) == len(val) and all(
        path == other or (found.digest != "" and found.digest == copy.digest)
        for (path, found), (other, copy) in zip(train, val)
    )


def _same_content(images: Looked) -> list[list[int]]:
    """Groups of positions whose files have equal content; each group has two paths or more."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for position, (_, found) in enumerate(images):
        if found.digest and found.problem[0] != "image_empty":
            alike[found.digest].append(position)
    groups: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
    for digest, positions in alike.items():
        if len({images[position][0] for position in positions}) > 1:
            for position in positions:
                groups[digest, _hash(images[position][0])].append(position)
    return [group for group in groups.values() if len({images[p][0] for p in group}) > 1]


def _hash(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            summary = hashlib.blake2b(digest_size=16)
            while block := file.read(1 << 20):
                summary.update(block)
            return summary.digest()
    except OSError:  # gone since it was looked at
        return os.fsencode(path)
