"""Files of a run: users' paths, writing files, the lock.

A path that cannot be written is the user's error.  All files are written by functions of this
module: a file is replaced, never opened through a link.  A folder of results may come from somebody
else, in an archive that keeps links: opening `train.log` there for writing would write to whatever
file the link names.  Two trainings must not write into one folder: the second is refused while
the first lives.
"""

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO

from ppdist.common.errors import ConfigError, UserError

_LOGGER = logging.getLogger("ppdist")
_BLOCK_BYTES = 1 << 20
_REPLACED = (stat.S_IFREG, stat.S_IFLNK)
_NAME_BYTES, _NAME_LETTERS = 100, 25  # of a file's name in its draft's; a file system allows 255
_NO_FILES = (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK)  # a pipe would block its writer
_DRAFT_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def draft_of(path: Path) -> Path:
    """Returns a new path beside `path`, for writing its replacement or deleting it.

    It is `.NAME.HOST.PID.RANDOM`: nobody can put a link there beforehand, and a later process can
    tell which process created it (`common.drafts.remove_drafts`).
    """
    name = path.name
    if len(os.fsencode(name)) > _NAME_BYTES:
        name = name[:_NAME_LETTERS]
    owner = f"{socket.gethostname()}.{os.getpid()}"
    return path.with_name(f".{name}.{owner}.x{secrets.token_hex(4)}")


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` when the block succeeds.

    Args: sync: flushes to disk before the file is replaced, so that it survives a power failure.
    Raises: OSError: it cannot be written; the previous file stays.
    """
    draft = draft_of(path)
    try:
        with open(os.open(draft, _DRAFT_FLAGS, 0o666), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Writes a whole file atomically.

    Args and errors: see `replacing`.
    """
    with replacing(path, sync=sync) as file:
        file.write(content)


def sync_path(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk.

    Raises: OSError.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_own(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Opens a growing file for writing, like `open`; see `own_handle`.

    Raises: OSError.
    """
    return open(path, mode, opener=own_handle, **options)


def own_handle(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a file that has no other name for writing, as `os.open` does.

    A link or a pipe there is deleted.  A file with other names, as `cp -al` creates, is copied
    first, so that the other names keep their content.

    Raises: OSError.
    """
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            with replacing(Path(path)) as copy:
                if not flags & os.O_TRUNC:
                    _copy(path, copy)
    return linkless_handle(path, flags, mode)


def linkless_handle(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a file for writing, as `os.open` does, after deleting a link or a pipe there.

    Raises: OSError.
    """
    with suppress(FileNotFoundError):
        if stat.S_IFMT(os.lstat(path).st_mode) in _NO_FILES:
            os.unlink(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)


def _copy(path: str | Path, copy: BinaryIO) -> None:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        shutil.copyfileobj(file, copy)


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
    """Returns True if no space is left on the disk, or none that this user may take."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


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

    Call it before the work that produces the file.

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


def require_no_link(folder: Path) -> None:
    """Refuses a link in place of a folder whose path was not typed by a user.

    A run's folder from an archive must not decide where files are written.

    Raises: UserError `folder_is_link`.
    """
    if folder.is_symlink():
        raise UserError(
            f"is a link to {os.readlink(folder)}, and a run writes to no place that only a link in "
            "its folder names",
            code="folder_is_link",
            where=f"{folder}",
            fix="delete the link, or name its folder with --out or output_dir",
        )


def require_no_links(folder: Path) -> None:
    """Refuses links in place of a folder and all folders below, as `require_no_link` does."""
    require_no_link(folder)
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            require_no_link(Path(parent, name))


def user_cache() -> Path | None:
    """Returns this user's ppdist cache folder; None if the user has no home folder.

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
    """Reads all bytes of a regular file.

    Raises: OSError: as `open_file`, or it has more than `most_bytes`.
    """
    with open_file(path) as file:
        size, content = os.fstat(file.fileno()).st_size, b""
        if 0 < size <= most_bytes:
            content = file.read(size)
        elif size == 0:
            # Files of /proc have this size as well, whatever they hold.
            blocks = iter(lambda: file.read(_BLOCK_BYTES), b"")
            content = b"".join(islice(blocks, most_bytes // _BLOCK_BYTES + 1))
            size = len(content)
        if size > most_bytes:
            raise too_large(size, most_bytes, path)
        return content


def too_large(size: int, most_bytes: int, path: str | Path) -> OSError:
    """Builds the error that `read_file` raises for a file that is too large."""
    return OSError(
        errno.EFBIG, f"too large: {size} bytes, expected at most {most_bytes}", str(path)
    )


def digest_of_file(path: Path) -> str:
    """Computes a 16-character digest of a file's content, or says why it cannot be read."""
    content = hashlib.blake2b(digest_size=8)
    try:
        with open_file(path) as file:
            while block := file.read(_BLOCK_BYTES):
                content.update(block)
    except OSError as error:
        # The error is reported in more detail when the file is loaded.
        return f"cannot be read: {error.strerror}"
    return content.hexdigest()


def digest_of_text(text: str) -> str:
    """Computes a 16-character digest of a text, for comparison."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def bytes_of(path: Path) -> bytes:
    """Reads all bytes of a file of ppdist's.  Raises: OSError: as `open_file`."""
    with open_file(path) as file:
        return file.read()


def text_of(path: Path, errors: str = "strict") -> str:
    """Reads a UTF-8 text file of ppdist's.

    Raises: OSError: as `open_file`.  UnicodeDecodeError: with `errors` "strict".
    """
    return bytes_of(path).decode("utf-8", errors)


def read_json(path: Path) -> Any:
    """Reads a JSON file; returns None if it is missing or broken."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(text_of(path))
    return None


def write_json(
    path: Path, content: object, indent: int | None = None, *, sync: bool = False
) -> None:
    """Writes JSON in UTF-8 atomically.

    Bytes of a file name that are not UTF-8, which Python keeps as surrogates, become JSON escapes.

    Args: sync: see `replacing`.
    Raises: UserError: it cannot be written.
    """
    write_text(path, json.dumps(content, ensure_ascii=False, indent=indent), sync=sync)


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Writes text in UTF-8 as `write_whole` does.

    Characters that UTF-8 cannot hold, from file names in other encodings, become escapes.
    """
    write_whole(path, text.encode("utf-8", errors="backslashreplace"), sync=sync)


def write_whole(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Writes a file atomically; creates its folder if missing.

    Args: sync: see `replacing`.
    Raises: UserError: it cannot be written.
    """
    make_parent(path)
    with writing(path):
        if _is_device(path):
            with open(path, "wb", opener=_open_at_once) as file:  # a pipe that somebody reads
                os.set_blocking(file.fileno(), True)
                file.write(data)
        else:
            replace_file(path, data, sync=sync)


def _is_device(path: Path) -> bool:
    """Returns True if a path cannot be replaced by a file: /dev/stdout, a pipe, a folder."""
    if path.parent == Path("/dev") or path.parent.resolve().is_relative_to("/proc"):
        return True
    return os.path.lexists(path) and stat.S_IFMT(path.lstat().st_mode) not in _REPLACED


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Appends all of `data` to an unbuffered file, or nothing on failure.

    Raises: OSError: the disk is full, or the file was removed.
    """
    status = os.fstat(file.fileno())
    # Writing to a deleted file would succeed, and the data would be lost.
    if not status.st_nlink:
        raise FileNotFoundError(errno.ENOENT, "it was removed", file.name)
    size = status.st_size
    try:
        # An unbuffered write may take only a part.
        while data:
            data = data[file.write(data) :]
    except OSError:
        with suppress(OSError):  # a device
            file.truncate(size)
        raise


def open_appended(path: Path) -> io.FileIO:
    """Opens an unbuffered file for `append_whole`; deletes a link there, as `open_own` does."""
    return io.FileIO(path, "ab", opener=own_handle)


def append(path: Path, data: bytes) -> None:
    """Appends all of `data` to a file, or nothing; creates the file.

    Raises: OSError.
    """
    with open_appended(path) as file:
        append_whole(file, data)


_LOCK_TRIES = 5  # for a file that is replaced meanwhile
_PROBE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(eq=False)
class FileLock:
    """A lock between processes on a file; it ends with its process.

    The way in which the process ends does not matter.  The file stays and means nothing by itself,
    so nobody has to find out whether the holder of a stale one still lives.  The lock is flock's: a
    POSIX lock would end when its process closes the file anywhere, as a copy of its folder does.
    Processes that this one forks, such as the loader's workers, close their copies at once, because
    they may outlive a killed rank for a moment.
    """

    path: Path
    _handle: int | None = None

    def open(self) -> int:
        """Opens the lock's file; creates it and its folder.  Raises: OSError."""
        if self._handle is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = linkless_handle(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            _open_locks.add(self)
        return self._handle

    def is_current(self) -> bool:
        """Returns True if the opened file still has its name, or if this cannot be determined.

        If it was deleted or replaced, another process can lock a new file of this name.
        """
        assert self._handle is not None
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # its disk is unreachable
            return True
        return os.path.samestat(os.fstat(self._handle), status)

    def acquire(self) -> bool:
        """Waits for the lock and takes it.  Returns: True."""
        while not self.try_acquire():
            time.sleep(0.02)
        return True

    def try_acquire(self) -> bool:
        """Takes the lock on the file that currently has the name, if it is free.

        Raises: OSError: the file cannot be made, or its file system has no locks.
        """
        for _ in range(_LOCK_TRIES):
            is_locked = _lock(self.open(), fcntl.LOCK_EX)
            if self.is_current():
                if not (is_locked and os.fstat(self.open()).st_nlink > 1):
                    return is_locked
                # `cp -al` gave it a second name, whose content must stay.
                os.unlink(self.path)
            self.close()
        return False

    def release(self) -> None:
        """Releases the lock; the file stays open."""
        if self._handle is not None:  # None in a forked child
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file, and so releases the lock."""
        if self._handle is not None:
            _open_locks.discard(self)
            os.close(self._handle)
            self._handle = None

    def write(self, content: bytes) -> None:
        """Writes a note for processes that find the lock taken.

        On a full disk no note is written, but the lock is still held.
        """
        with suppress(OSError):
            os.ftruncate(self.open(), 0)
            os.pwrite(self.open(), content, 0)

    def read_there(self) -> bytes:
        """Reads the note in the file that currently has the name; b"" without a note or file."""
        try:
            with open(os.open(self.path, _PROBE_FLAGS), "rb") as file:
                return file.read(4096)
        except OSError:
            return b""

    def is_taken(self) -> bool:
        """Returns True if a process holds the lock; False if not, or if it is unknown."""
        try:
            handle = os.open(self.path, _PROBE_FLAGS)
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
    """Takes the lock if it is free; returns True if it did.

    Raises: OSError: the file system has no locks.
    """
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


_open_locks: set[FileLock] = set()


def _forget_locks() -> None:
    """Closes the locks in a forked child, which must not hold its parent's locks."""
    for lock in [*_open_locks]:
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)

_LOCK_FILE = "run.lock"
_LINKED = "checkpoints"  # the only folder of a run that may be a link
_LOCK_TIMEOUT_SECONDS = 5.0  # a run that was just killed takes a moment to end
_held: dict[Path, "_Held"] = {}  # by absolute path, for the life of this process
_check_lock = threading.Lock()  # records and checkpoints are written by two threads


@dataclass
class _Held:
    """A folder that this process has locked.

    Attributes:
        holder: the note about this process in the lock's file.
        lost: the error to raise, once another process owns the folder.
    """

    lock: FileLock
    holder: bytes
    lost: ConfigError | None = None


def hold(output_dir: Path, seconds: float = _LOCK_TIMEOUT_SECONDS) -> list[str]:
    """Locks `output_dir` until this process ends; call it only on ranks that write there.

    If the folder of its checkpoints is a link, the linked folder is locked as well.

    Args: seconds: the timeout.
    Returns: a warning where the file system has no locks, else nothing.
    Raises: ConfigError: another process holds it, or nothing can be written there.
    """
    warnings = _hold(output_dir, output_dir, seconds)
    linked = output_dir / _LINKED
    if linked.is_symlink():
        target = linked.resolve()  # perhaps that of another run, which has a lock
        is_of_run = target.name == _LINKED and (target.parent / _LOCK_FILE).exists()
        warnings += _hold(linked, target.parent if is_of_run else linked, seconds)
    return warnings


def _hold(folder: Path, lock_folder: Path, seconds: float) -> list[str]:
    """Locks `folder` with the lock file in `lock_folder`; see `hold`."""
    held = _held.get(_absolute_path(folder))
    if held is not None and held.lost is None and held.lock.is_current():
        return []
    # The lock's file was deleted or replaced, so the lock protects nothing any more.
    if held is not None:
        held.lock.close()
        del _held[_absolute_path(folder)]
    lock = FileLock(_absolute_path(lock_folder) / _LOCK_FILE)
    try:
        lock.open()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror}); give another: -o output_dir=PATH",
            code="folder_unwritable",
            where="output_dir",
        ) from error
    deadline = time.monotonic() + seconds
    try:
        while not lock.try_acquire():
            if time.monotonic() > deadline:
                holder = _describe_holder(lock.read_there())
                lock.close()
                raise ConfigError(
                    f"{folder}: another training writes there ({holder})",
                    code="output_dir_in_use",
                    where="output_dir",
                    fix="wait for it or stop it, or give this one its own folder: "
                    "-o output_dir=...",
                )
            time.sleep(0.1)
    except OSError as error:
        lock.close()
        return [
            f"output_dir: {folder} is on a file system without locks "
            f"({error.strerror}): nothing keeps a second training from writing there"
        ]
    note = {"pid": os.getpid(), "host": socket.gethostname()}
    note["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
    held = _held[_absolute_path(folder)] = _Held(lock, json.dumps(note).encode())
    lock.write(held.holder)
    return []


def _absolute_path(folder: Path) -> Path:
    # Unlike resolve() it does not access the disk, which may hang.
    return Path(os.path.abspath(folder))


def is_held(output_dir: Path) -> bool:
    """Returns True if a training run is currently writing to the folder.

    It returns False if not, or if this cannot be determined.
    """
    return FileLock(output_dir / _LOCK_FILE).is_taken()


def require_held(output_dir: Path) -> None:
    """Checks that a folder that `hold` has locked still belongs to this process.

    Call it before each write, in the thread that writes, because the disk may be slow.  A deleted
    lock is made and taken again unless another process was faster.  Folders that this process has
    not locked pass.

    Raises: ConfigError `output_dir_lost`: another training run owns the folder now.
    """
    for held in _held_in(output_dir):
        with _check_lock:
            if held.lost is None and not (held.lock.is_current() or _retake(held)):
                held.lost = ConfigError(
                    f"{held.lock.path.parent}: its contents were deleted or replaced while this "
                    "training wrote there, and another one has it now "
                    f"({_describe_holder(held.lock.read_there())})",
                    code="output_dir_lost",
                    where="output_dir",
                    fix="this one has stopped and writes nothing more; give each training its own "
                    "folder: -o output_dir=...",
                )
        if held.lost is not None:
            raise held.lost


def write_if_held(output_dir: Path, write: Callable[[], object]) -> None:
    """Calls `write`; raises if another training run owns the folder.  For the writing thread."""
    require_held(output_dir)
    write()


def give_up(output_dir: Path, error: ConfigError) -> None:
    """Makes `require_held` raise `error` from now on: another training owns the folder's copy."""
    for held in _held_in(output_dir):
        held.lost = held.lost or error


def is_lost(output_dir: Path) -> bool:
    """Returns True if the folder was found lost; safe in any thread, without disk access."""
    return any(held.lost is not None for held in _held_in(output_dir))


def _held_in(output_dir: Path) -> list[_Held]:
    """Lists the locks that this process holds on a run: its folder and linked checkpoints."""
    key = _absolute_path(output_dir)
    return [_held[folder] for folder in (key, key / _LINKED) if folder in _held]


def _retake(held: _Held) -> bool:
    """Takes a deleted or copied lock again; False if another process has taken it."""
    note = held.lock.read_there()
    if note not in (b"", held.holder):  # the note of a process that runs, or has ended since
        return False
    lock = FileLock(held.lock.path)
    try:
        if not lock.try_acquire():
            lock.close()
            # The file may be the same one, on a file system whose inode numbers change.
            return note == held.holder
    except OSError:
        # The disk is full or unreachable: the next write reports it.
        lock.close()
        return True
    held.lock.close()
    held.lock = lock
    lock.write(held.holder)
    _LOGGER.warning(
        "%s was deleted while this training runs and has been made again: what else was deleted "
        "in its folder is lost",
        lock.path,
    )
    return True


def _describe_holder(content: bytes) -> str:
    """Describes the holder: `process 123 on host a since 2024-01-01 00:00:00`."""
    try:
        note = json.loads(content)
        return f"process {note['pid']} on host {note['host']} since {note['since']}"
    except (ValueError, KeyError, TypeError):
        return "which is not known yet"
