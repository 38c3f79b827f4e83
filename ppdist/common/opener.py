"""Opening the files of a data set, and their identity: whether one is still the same.

`Opener` opens files on a disk; `ppdist/storage/files.py` has one around it that also opens shards
and stores.  The reader of a set gives it the opener that its images need.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ppdist.common import files


class Identity(NamedTuple):
    """The identity of a file's content: its size, and a mark that changes with the content.

    Attributes: mark: for a file on disk its mtime and ctime; "": unknown, so nothing derived from
        the file is cached across runs.
    """

    bytes: int
    mark: str


def of_stat(status: os.stat_result) -> Identity:
    """Builds the identity of a file on disk from its status.

    The mtime alone is not enough: archives restore old ones, and copies keep them.  No program can
    set ctime, and every change of the content under a path (write, link, rename) changes it on a
    local disk and on NFS.  The inode would add nothing there, and FUSE numbers the same files
    differently at each mount.
    """
    return Identity(status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}")


@dataclass(frozen=True)
class Opener:
    """An opener of files on a disk; without state, so it is sent to workers as it is.

    Failures raise OSError, or StorageError if storage stays unreachable.
    """

    def open(self, path: str | Path) -> BinaryIO:
        """Opens a file for reading."""
        return files.open_file(path)

    def read(self, path: str | Path, most_bytes: int) -> bytes:
        """Reads all bytes of a file.  Raises: OSError: also if it is larger than `most_bytes`."""
        return files.read_file(path, most_bytes)

    def can_be_read(self, path: str | Path) -> bool:
        """Returns True if a regular file or a non-empty folder is there now."""
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
        """Returns the identity of a file's content, without opening it."""
        return of_stat(os.stat(path))


DISK = Opener()
