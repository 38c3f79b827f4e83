"""Bounded cache on disk of what came from object stores.

One file an entry, named by a digest of its key; the least recently used go first.  All workers and
ranks of a host share the folder, and later runs.  An entry appears by a rename, and carries a
checksum: what is damaged is as good as absent.

    FOLDER/objects/3f/3f9c...   checksum, content
    FOLDER/objects/bytes        grows by a byte for each 4 KiB written: its length is what is there,
                                and needs no lock; who finds it too long counts anew and deletes
"""

import hashlib
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ppdist.common.files import FileLock

_LOGGER = logging.getLogger("ppdist.data")
_HEAD = struct.Struct("<4sIQ")  # mark, CRC-32 of the content, its bytes
_MARK = b"ppd1"
_BLOCK = 4096
_KEPT_SHARE = 0.9  # of the limit, after old entries were deleted
_SPARE = 1 << 30  # bytes of the disk to leave free in any case
_FRESH_SECONDS = 60.0  # an entry used so recently is not marked as used again


class StoreCache:
    """Contents by key, within so many bytes; none of its failures is an error."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder / "objects"
        self.most_bytes = most_bytes
        self._failed = mmap.mmap(-1, 1)  # shared by the workers that are forked from now on

    def get(self, key: str) -> bytes | None:
        """What was put there; None: not there, or damaged, which deletes it."""
        place = self._place(key)
        try:
            with open(place, "rb") as file:
                state = os.fstat(file.fileno())
                content = file.read()
        except OSError:
            return None
        if len(content) >= _HEAD.size:
            mark, checksum, length = _HEAD.unpack_from(content)
            body = content[_HEAD.size :]
            if mark == _MARK and length == len(body) and checksum == zlib.crc32(body):
                if time.time() - state.st_mtime > _FRESH_SECONDS:
                    with suppress(OSError):
                        os.utime(place)
                return body
        with suppress(OSError):
            place.unlink()
        return None

    def put(self, key: str, content: bytes) -> None:
        """Keeps a content, if there is room for it; a line says once that there is none."""
        if self._failed[0] or len(content) > self.most_bytes // 8:
            return
        place = self._place(key)
        draft = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._require_room(len(content))
            try:
                with open(draft, "wb") as file:
                    file.write(_HEAD.pack(_MARK, zlib.crc32(content), len(content)))
                    file.write(content)
                draft.replace(place)
            except OSError:
                with suppress(OSError):
                    draft.unlink()
                raise
            self._count(len(content))
        except OSError as error:
            said, self._failed[0] = self._failed[0], 1
            if not said:
                _LOGGER.warning(
                    "data.store_cache_gib: %s: nothing more is kept (%s); the run goes on and "
                    "fetches each time what is not there",
                    self.folder, error.strerror or error,
                )  # fmt: skip

    def _place(self, key: str) -> Path:
        name = hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
        return self.folder / name[:2] / name

    def _require_room(self, needed: int) -> None:
        """Raises: OSError: the disk has none to spare, also without old entries."""
        if _free(self.folder) >= needed + _SPARE:
            return
        self._delete_old(int(_KEPT_SHARE * self._counted()))
        if _free(self.folder) < needed + _SPARE:
            raise OSError(f"less than {_SPARE >> 20} MiB of its disk are free")

    def _counted(self) -> int:
        """Bytes that lie there, as far as they were counted."""
        try:
            return os.stat(self.folder / "bytes").st_size * _BLOCK
        except FileNotFoundError:
            return 0

    def _count(self, added: int) -> None:
        blocks = -(-(added + _HEAD.size) // _BLOCK)
        ledger = os.open(self.folder / "bytes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(ledger, b"." * blocks)
            total = os.fstat(ledger).st_size * _BLOCK
        finally:
            os.close(ledger)
        if total > self.most_bytes:
            self._delete_old(int(_KEPT_SHARE * self.most_bytes))

    def _delete_old(self, wanted: int) -> None:
        """Deletes the least recently used until the rest is small enough; one process does."""
        lock = FileLock(self.folder / "lock")
        try:
            if not lock.try_acquire():
                return
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if total <= wanted:
                    break
                with suppress(OSError):
                    os.unlink(path)
                total -= size
            os.truncate(self.folder / "bytes", max(0, total) // _BLOCK)
        finally:
            lock.close()

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """(time of last use, bytes on disk, path) of each, drafts of killed processes too."""
        for folder in os.scandir(self.folder):
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                with suppress(OSError):
                    state = entry.stat()
                    yield state.st_mtime, -(-state.st_size // _BLOCK) * _BLOCK, entry.path


def _free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
