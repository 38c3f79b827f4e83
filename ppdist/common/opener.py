"""How the files of a data set are opened, and what tells that one is still the same.

`Opener` opens those of a disk; `ppdist/storage/files.py` has one around it that also opens shards
and stores.  Whoever reads a set gives it the opener that its images need.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ppdist.common import files


class Identity(NamedTuple):
    """Size of a file, and a mark that changes with its content.

    mark: of a file on disk its mtime and ctime; "": unknown, so nothing of it is kept across runs.
    """

    bytes: int
    mark: str


def of_stat(found: os.stat_result) -> Identity:
    """Identity of a file on disk.

    Its mtime alone is not enough: archives restore old ones, and copies keep them.  No program can
    set ctime, and every way to put other content in a place (write, link, rename) changes it on a
    local disk and on NFS.  The inode would tell nothing more there, and FUSE numbers the same files
    differently at each mount.
    """
    return Identity(found.st_size, f"{found.st_mtime_ns} {found.st_ctime_ns}")


@dataclass(frozen=True)
class Opener:
    """Opens files of a disk.  Has no state: workers and other ranks get it as it is.

    Failures are OSError; where storage stays away, StorageError.
    """

    def open(self, path: str | Path) -> BinaryIO:
        """Opens a file for reading."""
        return files.open_file(path)

    def read(self, path: str | Path, most_bytes: int) -> bytes:
        """All bytes of a file.  Raises: OSError: also if it has more than `most_bytes`."""
        return files.read_file(path, most_bytes)

    def can_be_read(self, path: str | Path) -> bool:
        """Whether a regular file or a non-empty folder is there now."""
        try:
            if os.path.isdir(path):
                with os.scandir(path) as entries:
                    return any(True for _ in entries)
            with self.open(path) as file:
                file.read(1)
        except OSError:
            return False
        return True

    def identity_of(self, path: str) -> Identity:
        """Identity of a file's content, without opening it."""
        return of_stat(os.stat(path))


DISK = Opener()
