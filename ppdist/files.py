"""Files that a user named: a path that cannot be written is the user's error."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppdist.errors import UserError

_BLOCK_BYTES = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, what the system refuses (no such place, no permission, a full disk) is a UserError
    that names the path."""
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


def make_folder(path: Path) -> None:
    """Makes a folder that is to be written to, and those above it, where it is not there.

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
            "cannot be written to: no permission",
            code="folder_unwritable",
            where=f"{path}",
        )


def make_parent(path: Path) -> None:
    """Makes the folder of a file that is to be written; call it before the work whose result it is.

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
    """Where this user's programs keep what they can make again ($XDG_CACHE_HOME or ~/.cache), the
    folder for ours; None: the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppdist"
    except RuntimeError:
        return None


def digest_of_file(path: Path) -> str:
    """A fingerprint of a file's content to compare, 16 characters; or why it cannot be read."""
    content = hashlib.blake2b(digest_size=8)
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                content.update(block)
    except OSError as error:
        return f"cannot be read: {error.strerror}"  # whoever loads it says more
    return content.hexdigest()


def write_json(path: Path, content: object, indent: int | None = None) -> None:
    """Writes what JSON can hold, UTF-8; the file appears whole or not at all.

    A file name that is not UTF-8 gets JSON's escapes of the characters Python has for its bytes.

    Raises: UserError: it cannot be written.
    """
    make_parent(path)
    text = json.dumps(content, ensure_ascii=False, indent=indent)
    with writing(path):
        if path.exists() and not path.is_file():  # /dev/stdout: not to be replaced by a file
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        target = path.resolve()
        draft = target.with_name(target.name + ".tmp")
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(target)
