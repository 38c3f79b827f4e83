"""Files of a run: users' paths, writing whole files, the lock.

A path that cannot be written is the user's error.  Two trainings must not write into one folder:
the second is refused while the first lives.
"""

import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ppdist.common.errors import ConfigError, UserError

_BLOCK_BYTES = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns OSErrors of writing `path` into a UserError that names it.

    For example a missing folder, no permission, or a full disk.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            code="disk_full" if is_disk_full(error) else "file_unwritable",
            where=f"{path}",
        ) from error


def is_disk_full(error: OSError) -> bool:
    """No room is left there, or none that this user may take."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def can_be_read(path: str | Path) -> bool:
    """Whether a regular file or a non-empty folder is there now."""
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                return any(True for _ in entries)
        with open_file(path) as file:
            file.read(1)
    except OSError:
        return False
    return True


def make_folder(path: Path) -> None:
    """Creates a writable folder and its parents if missing.

    Raises: UserError: it cannot be made, or not be written to.
    """
    if path.exists() and not path.is_dir():
        raise UserError(
            "cannot be written to: it is a file",
            code="folder_expected",
            where=f"{path}",
            fix="expected a folder",
        )
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise UserError(
            "cannot be written to: no permission", code="folder_unwritable", where=f"{path}"
        )


def make_parent(path: Path) -> None:
    """Creates the parent folder of a file to be written.

    Call it before the work whose result the file is.

    Raises: UserError: it cannot be made, or not be written to, or the path is a folder.
    """
    make_folder(path.parent)
    if path.is_dir():
        raise UserError(
            "cannot be written: it is a folder",
            code="file_name_expected",
            where=f"{path}",
            fix="expected a file name",
        )


def user_cache() -> Path | None:
    """This user's ppdist cache folder; None: the user has no home.

    It lies in $XDG_CACHE_HOME or ~/.cache and holds what ppdist can recreate.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppdist"
    except RuntimeError:
        return None


def open_file(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading.

    A pipe would block, and a device is endless.

    Raises: OSError: absent, no permission, or neither a regular file nor a link to one.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file", str(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_file(path: str | Path, most_bytes: int) -> bytes:
    """All bytes of a file that is one.

    Raises: OSError: as `open_file`, or it has more bytes than that.
    """
    with open_file(path) as file:
        size, content = os.fstat(file.fileno()).st_size, b""
        if 0 < size <= most_bytes:
            content = file.read(size)
        elif size == 0:  # files of /proc, too, whatever they hold
            blocks = iter(lambda: file.read(_BLOCK_BYTES), b"")
            content = b"".join(islice(blocks, most_bytes // _BLOCK_BYTES + 1))
            size = len(content)
        if size > most_bytes:
            raise too_large(size, most_bytes, path)
        return content


def too_large(size: int, most_bytes: int, path: str | Path) -> OSError:
    """The error `read_file` raises for a file that is too large."""
    return OSError(
        errno.EFBIG, f"too large: {size} bytes, expected at most {most_bytes}", str(path)
    )


def digest_of_file(path: Path) -> str:
    """16-character digest of a file's content, or why it cannot be read."""
    content = hashlib.blake2b(digest_size=8)
    try:
        with open_file(path) as file:
            while block := file.read(_BLOCK_BYTES):
                content.update(block)
    except OSError as error:
        return f"cannot be read: {error.strerror}"  # loading it says more
    return content.hexdigest()


def digest_of_text(text: str) -> str:
    """A fingerprint of a text to compare, 16 characters."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Writes a file atomically through a temporary file beside it.

    Args: sync: to disk before the file is replaced, so that it survives a power failure.
    Raises: OSError: it cannot be written; what was there before stays.
    """
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)


def sync_path(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk.

    Raises: OSError.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """Content of a JSON file; None if it is missing or broken."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def write_json(path: Path, content: object, indent: int | None = None) -> None:
    """Writes JSON in UTF-8 atomically.

    A file name that is not UTF-8 gets JSON's escapes of the characters Python has for its bytes.

    Raises: UserError: it cannot be written.
    """
    text = json.dumps(content, ensure_ascii=False, indent=indent)
    write_whole(path, text.encode("utf-8", errors="backslashreplace"))


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically; creates its folder if missing.

    Raises: UserError: it cannot be written.
    """
    make_parent(path)
    with writing(path):
        if path.exists() and not path.is_file():  # /dev/stdout: not to be replaced by a file
            path.write_bytes(data)
        else:
            replace_file(path.resolve(), data)


class FileLock:
    """A lock between processes on a file; it ends with its process.

    It does so however the process ends.  The file stays and means nothing by itself, so none has
    to find out whether the holder of a stale one still lives.  The lock is one of POSIX rather than
    flock's: that would pass to processes that this one forks, such as the loader's workers, which
    may outlive a killed rank for a moment.  Such a lock ends when its process closes the file
    anywhere, so it must be opened by this class alone: one process, one thread, one object a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def open(self) -> int:
        """Makes the file and its folder, or opens it.  Raises: OSError."""
        if self._handle is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        return self._handle

    def acquire(self) -> bool:
        """Waits for it.  Returns: True."""
        while not self.try_acquire():
            time.sleep(0.02)
        return True

    def try_acquire(self) -> bool:
        """Takes the lock if it is free.

        Raises: OSError: the file cannot be made, or its file system has no locks.
        """
        return _lock(self.open(), fcntl.LOCK_EX)

    def release(self) -> None:
        assert self._handle is not None
        fcntl.lockf(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives it back, if it was taken."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def read(self) -> bytes:
        """What the file says, of its holder or of the last one."""
        return os.pread(self.open(), 4096, 0)

    def write(self, content: bytes) -> None:
        """Writes what others read when they find the lock taken.

        Raises: OSError.
        """
        os.ftruncate(self.open(), 0)
        os.pwrite(self.open(), content, 0)

    def is_taken(self) -> bool:
        """Whether another process holds the lock; not for its holder.

        False if the file system cannot tell.
        """
        assert self._handle is None
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            return not _lock(handle, fcntl.LOCK_SH)
        except OSError:
            return False
        finally:
            os.close(handle)  # and with it the lock, if it was free

    def __enter__(self) -> "FileLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(handle: int, kind: int) -> bool:
    """Takes the lock if it is free; returns whether it did.

    Raises: OSError: the file system has no locks.
    """
    try:
        fcntl.lockf(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


_LOCK_FILE = "run.lock"
_LOCK_TIMEOUT_SECONDS = 5.0  # a run that was killed just now takes a moment to be gone
_held: dict[Path, FileLock] = {}  # by folder, for the life of this process


def hold(output_dir: Path, seconds: float = _LOCK_TIMEOUT_SECONDS) -> list[str]:
    """Locks `output_dir` until this process ends; only ranks that write there.

    The lock ends however the process ends.

    Args: seconds: how long to wait for it.

    Returns: a warning where the file system has no locks, else nothing.
    Raises: ConfigError: another process holds it, or nothing can be written there.
    """
    folder = output_dir.resolve()
    if folder in _held:
        return []
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.open()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {output_dir}: {error}", code="folder_unwritable", where="output_dir"
        ) from error
    deadline = time.monotonic() + seconds
    try:
        while not lock.try_acquire():
            if time.monotonic() > deadline:
                holder = _described(lock.read())
                lock.close()
                raise ConfigError(
                    f"{output_dir}: another training writes there ({holder})",
                    code="output_dir_in_use",
                    where="output_dir",
                    fix="wait for it or stop it, or give this one its own folder: "
                    "-o output_dir=...",
                )
            time.sleep(0.1)
    except OSError as error:
        lock.close()
        return [
            f"output_dir: {output_dir} is on a file system without locks "
            f"({error.strerror}): nothing keeps a second training from writing there"
        ]
    _held[folder] = lock
    about = {"pid": os.getpid(), "host": socket.gethostname()}
    about["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # a full disk: the lock holds all the same
        lock.write(json.dumps(about).encode())
    return []


def is_held(output_dir: Path) -> bool:
    """Whether a training writes into the folder now.

    False if the file system cannot tell.
    """
    # One of this process would be lost by looking.
    return output_dir.resolve() in _held or FileLock(output_dir / _LOCK_FILE).is_taken()


def _described(content: bytes) -> str:
    """The holder as `process 123 on host a since 2024-01-01 00:00:00`."""
    try:
        about = json.loads(content)
        return f"process {about['pid']} on host {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "which is not known yet"
