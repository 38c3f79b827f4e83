"""Writing files: a file is replaced, and a link never followed.

    replace_file, replacing   a whole file, by way of a draft beside it
    open_own                  a file that grows, such as a log
    draft_of                  the name of a draft, for what has to be written by name

A folder of results may come from somebody else, in an archive that keeps links.  Whoever opened
`train.log` there for writing would write to whatever file it names.
"""

import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

_NAME_BYTES, _NAME_LETTERS = 100, 25  # of a path in its draft's name; a file system allows 255
_NO_FILES = (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK)  # a pipe would block its writer
_DRAFT_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def draft_of(path: Path) -> Path:
    """Returns a new name beside `path`, under which to write or delete it.

    It is `.NAME.HOST.PID.RANDOM`: nobody can put a link there beforehand, and a later process can
    tell whose it was (`common.drafts.remove_drafts`).
    """
    name = path.name
    if len(os.fsencode(name)) > _NAME_BYTES:
        name = name[:_NAME_LETTERS]
    owner = f"{socket.gethostname()}.{os.getpid()}"
    return path.with_name(f".{name}.{owner}.x{secrets.token_hex(4)}")


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` when the block succeeds.

    Args: sync: to disk before the file is replaced, so that it survives a power failure.
    Raises: OSError: it cannot be written; what was there before stays.
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

    Args and errors: as of `replacing`.
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
    """Opens a file that grows for writing, as `open` does; see `own_handle`.

    Raises: OSError.
    """
    return open(path, mode, opener=own_handle, **options)


def own_handle(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a file that has no other name for writing, as `os.open` does.

    A link or a pipe there is deleted.  Of a file with more names, as `cp -al` makes, this one gets
    a copy of its own: the other keeps its content.

    Raises: OSError.
    """
    with suppress(FileNotFoundError):
        there = os.lstat(path)
        if stat.S_ISREG(there.st_mode) and there.st_nlink > 1:
            with replacing(Path(path)) as copy:
                if not flags & os.O_TRUNC:
                    _copy(path, copy)
    return linkless_handle(path, flags, mode)


def linkless_handle(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """`os.open` for writing, after deleting a link or a pipe there.

    Raises: OSError.
    """
    with suppress(FileNotFoundError):
        if stat.S_IFMT(os.lstat(path).st_mode) in _NO_FILES:
            os.unlink(path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)


def _copy(path: str | Path, copy: BinaryIO) -> None:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        shutil.copyfileobj(file, copy)
