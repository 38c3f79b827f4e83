"""Content identity: whether a file is still the same one.

    a file       its bytes, mtime and ctime
    http         Content-Length, with ETag or Last-Modified
    a store      bytes, with ETag or the time of its last change

Modification times alone are not enough: archives restore old ones, and copies keep them.  No
program can set ctime, and every way to put other content in a place (write, link, rename) changes
it on a local disk and on NFS.  Inodes would tell nothing more there, and FUSE numbers the same
files differently at each mount.  If a file's mark is unknown, nothing of it is kept across runs.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

_VALIDATORS = ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "updated", "created")


class Identity(NamedTuple):
    """Size of a file, and a mark that changes with its content.

    mark: "": unknown.
    """

    bytes: int
    mark: str

    @property
    def number(self) -> int:
        """The identity as an int64."""
        digest = hashlib.blake2b(f"{self.bytes} {self.mark}".encode("utf-8", "replace"))
        return int.from_bytes(digest.digest()[:8], "little", signed=True)


def of_stat(found: os.stat_result) -> Identity:
    """Identity of a file on disk."""
    return Identity(found.st_size, f"{found.st_mtime_ns} {found.st_ctime_ns}")


def mark_in(told: Mapping[str, Any], *, strong: bool = False) -> str:
    """Mark in a response's headers, or a store's description; "": none.

    Args: strong: guarantees equal bytes, as a resumed download needs; weak ETags do not count.
    """
    for key in _VALIDATORS:
        value = told.get(key)
        if value is not None and not (strong and str(value).startswith("W/")):
            return str(value)
    return ""
