"""A bounded cache on disk: contents by key, shared by all processes.

One file per entry, named by a digest of its key; the least recently used are deleted first.  A key
contains everything its content depends on, files by their content identity; where that is only
known with the content, as behind http, the content begins with it (stores.py).  An entry is written
under another name, then renamed, and carries a checksum: a damaged one counts as missing.  A
failing disk is not an error: nothing more is cached then.

    FOLDER/3f/3f9c...   64 bytes (mark, checksum, length), content
    FOLDER/bytes        grows by one byte per 4 KiB written: its length is the size of the cache,
                        without a lock; a process that finds it too long recounts and deletes
"""

import hashlib
import mmap
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppdist.common.files import FileLock, own_handle, user_cache

_HEAD = struct.Struct("<4sIQ48x")  # mark, CRC-32 of the content, its bytes; arrays stay aligned
_MARK = b"ppd2"
_BLOCK = 4096
_KEPT_SHARE = 0.9  # of the limit, after deleting old entries
_SPARE = 1 << 30  # bytes of the disk that the cache leaves free
_FRESH_SECONDS = 60.0  # an entry used this recently is not marked again


def _ignore(_: str) -> None:
    pass


class KeyedCache:
    """A cache of byte contents by key, limited in size."""

    def __init__(
        self, folder: Path, most_bytes: int, say: Callable[[str], object] = _ignore
    ) -> None:
        """Uses `folder`, which is created with the first entry.

        Args: say: called once, by one forked worker, with the reason why caching ended.
        """
        self.folder = folder
        self.most_bytes = most_bytes
        self._say = say
        self._failed = mmap.mmap(-1, 1)  # shared by the workers that are forked from now on

    @classmethod
    def of_user(
        cls, name: str, most_bytes: int, say: Callable[[str], object] = _ignore
    ) -> "KeyedCache | None":
        """Opens the named cache of this user; None if the user has no home folder."""
        folder = user_cache()
        return None if folder is None else cls(folder / name, most_bytes, say)

    def get(self, key: str) -> bytes | None:
        """Reads the content of a key; None: missing, or damaged and now deleted."""
        try:
            with open(self.open(key), "rb") as file:
                content = file.read()
        except OSError:
            return None
        return self._verify(key, memoryview(content), lambda view: bytes(view))

    def map(self, key: str) -> memoryview | None:
        """Maps the content of a key into memory; otherwise like `get`."""
        try:
            with open(self.open(key), "rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
            return None
        return self._verify(key, view, lambda view: view)

    def open(self, key: str) -> int:
        """Opens the file of an entry; returns its descriptor.  Raises: OSError: there is none."""
        return os.open(self.place(key), os.O_RDONLY | os.O_NOFOLLOW)

    def _verify(self, key: str, view: memoryview, convert: Callable[[memoryview], Any]) -> Any:
        """Returns the content if its checksum is right, else deletes the entry."""
        path = self.place(key)
        if len(view) >= _HEAD.size:
            mark, checksum, length = _HEAD.unpack_from(view)
            body = view[_HEAD.size :]
            if mark == _MARK and length == len(body) and checksum == zlib.crc32(body):
                with suppress(OSError):
                    if time.time() - os.stat(path).st_mtime > _FRESH_SECONDS:
                        os.utime(path)
                return convert(body)
        with suppress(OSError):
            path.unlink()
        return None

    def put(self, key: str, *parts: Any) -> bool:
        """Stores content, passed in parts; returns False if it was not stored."""
        size = _HEAD.size + sum(len(part) for part in parts)
        # A very large entry would displace many others.
        if self._failed[0] or size > self.most_bytes // 8:
            return False
        path = self.place(key)
        # Not the process id: ids repeat between containers that share a cache.
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_space(size)
            try:
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
                with open(descriptor, "wb") as file:
                    file.writelines([_make_head(parts), *parts])
                draft.replace(path)
            except OSError:
                with suppress(OSError):
                    draft.unlink()
                raise
            self._add_size(size)
        except OSError as error:
            self._disable(error)
            return False
        return True

    def _disable(self, error: OSError) -> None:
        """Ends caching in all processes of the run, with one message."""
        was_disabled, self._failed[0] = self._failed[0], 1
        if not was_disabled:
            self._say(f"{self.folder}: nothing more is kept ({error.strerror or error})")

    def place(self, key: str) -> Path:
        """Returns the path of an entry."""
        return place_of(self.folder, key)

    def _make_space(self, needed: int) -> None:
        """Deletes old entries if the disk is full.  Raises: OSError: it is still full."""
        if _free_bytes(self.folder) >= needed + _SPARE:
            return
        self._delete_old(int(_KEPT_SHARE * self._read_size()))
        if _free_bytes(self.folder) < needed + _SPARE:
            raise OSError(f"less than {_SPARE >> 20} MiB of its disk are free")

    def _read_size(self) -> int:
        """Returns the bytes in the cache, as counted so far."""
        try:
            return os.stat(self.folder / "bytes").st_size * _BLOCK
        except FileNotFoundError:
            return 0

    def _add_size(self, added: int) -> None:
        """Adds to the counted size; deletes old entries beyond the limit."""
        # Appending is atomic, so processes need no lock to add to the size.
        ledger = own_handle(self.folder / "bytes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(ledger, b"." * -(-added // _BLOCK))
            total = os.fstat(ledger).st_size * _BLOCK
        finally:
            os.close(ledger)
        if total > self.most_bytes:
            self._delete_old(int(_KEPT_SHARE * self.most_bytes))

    def _delete_old(self, target_bytes: int) -> None:
        """Deletes least recently used entries down to `target_bytes` bytes, in one process."""
        lock = FileLock(self.folder / "lock")
        try:
            if not lock.try_acquire():
                return
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if total <= target_bytes:
                    break
                with suppress(OSError):
                    os.unlink(path)
                total -= size
            ledger = own_handle(self.folder / "bytes", os.O_WRONLY)
            os.ftruncate(ledger, max(0, total) // _BLOCK)
            os.close(ledger)
        finally:
            lock.close()

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yields (time of last use, bytes on disk, path) of each file."""
        for folder in os.scandir(self.folder):
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                with suppress(OSError):
                    state = entry.stat()
                    yield state.st_mtime, -(-state.st_size // _BLOCK) * _BLOCK, entry.path


def place_of(folder: Path, key: str) -> Path:
    """Returns the path of the file for a key: `FOLDER/3f/3f9c...`."""
    name = hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
    return folder / name[:2] / name


def _make_head(parts: Sequence[Any]) -> bytes:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return _HEAD.pack(_MARK, checksum, sum(map(len, parts)))


def _free_bytes(folder: Path) -> int:
    """Returns the bytes free on the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
