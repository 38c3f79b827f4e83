"""Content identity: whether a file is still the same one.

    a file       its bytes, mtime, ctime and inode
    http         Content-Length, with ETag or Last-Modified
    a store      bytes, with ETag or the time of its last change

The times alone do not tell: archives unpack with those of another day, copies keep them.  Where
nobody tells a mark, nothing of such a file is kept across runs.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

_VALIDATORS = ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "updated", "created")


class Identity(NamedTuple):
    """Bytes of a file, and a mark that changes with its content; mark "": not known."""

    bytes: int
    mark: str

    @property
    def number(self) -> int:
        """The identity as an int64."""
        digest = hashlib.blake2b(f"{self.bytes} {self.mark}".encode("utf-8", "replace"))
        return int.from_bytes(digest.digest()[:8], "little", signed=True)


def of_stat(found: os.stat_result) -> Identity:
    """Identity of a file on disk."""
    return Identity(found.st_size, f"{found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}")


def mark_in(told: Mapping[str, Any], *, strong: bool = False) -> str:
    """Mark in the headers of an answer, or in what a store says of a file; "": none.

    Args: strong: byte for byte, as resuming a download needs it; a weak ETag does not count.
    """
    for key in _VALIDATORS:
        value = told.get(key)
        if value is not None and not (strong and str(value).startswith("W/")):
            return str(value)
    return ""
