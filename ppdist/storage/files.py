"""Files of a data set: on disk, in shards, in stores.

A path is what it was: `/data/images/a.jpg`; through a shard `/data/shards/train-000003.tar/a.jpg`;
in a store `s3://bucket/images/a.jpg`, and both at once.  Failures are those of a disk, OSError; a
store that stays away is a StorageError.
"""

import errno
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from ppdist.common import files
from ppdist.storage import addresses, download, stores
from ppdist.storage.addresses import is_remote as is_remote
from ppdist.storage.identity import Identity, of_stat
from ppdist.storage.shards import (
    find_member,
    forget_index,
    index_of,
    is_shard,
    open_member,
    place_in_shard,
    read_member,
)

_GIB = 1 << 30
_LONGEST_REQUEST_SECONDS = 20.0


def use(store_cache_gib: float, worker_timeout_seconds: float) -> None:
    """Configures access to stores for this process and its forks.

    See the keys of `data`.
    """
    # A worker says that it lives between requests; one takes twice its time at most.
    seconds = min(_LONGEST_REQUEST_SECONDS, worker_timeout_seconds / 3)
    stores.use(None, int(store_cache_gib * _GIB), seconds)


def folder_of(root: str, name: str = "") -> Path:
    """A folder, or what is relative to it; an address stays one."""
    if is_remote(name) or name.startswith("file:/"):
        root, name = name, ""
    place = addresses.url_of(root) if root.startswith("file:/") else root
    return Path(place, name)


def absolute(path: str | os.PathLike[str]) -> str:
    """An absolute path, or the address of a file in a store."""
    return addresses.url_of(path)


def is_in_shard(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a tar file, or leads through one."""
    text = os.fspath(path)
    return is_shard(text) or place_in_shard(text) is not None


def open_file(path: str | Path) -> BinaryIO:
    """Opens a file for reading.  Raises: OSError: as files.open_file; StorageError."""
    text = os.fspath(path)
    if not is_remote(text):
        try:
            return files.open_file(text)
        except NotADirectoryError:
            place = place_in_shard(text)
            if place is None:
                raise
            return open_member(place)
    text = addresses.url_of(text)
    place = place_in_shard(text)
    if place is not None:
        return open_member(place)
    known = stores.listed_identity(text)
    if known is None or not known.bytes:
        return io.BytesIO(stores.fetch(text))
    # A range request, which needs no size beforehand.
    return io.BytesIO(stores.fetch(text, 0, known.bytes))


def read_file(path: str | Path, most_bytes: int) -> bytes:
    """All bytes of a file.

    Raises: OSError: as `open_file`, or it has more than `most_bytes`.
    """
    text = os.fspath(path)
    try:
        if not is_remote(text):
            return files.read_file(text, most_bytes)
    except NotADirectoryError:
        place = place_in_shard(text)
        if place is None:
            raise
        return read_member(place, most_bytes)
    with open_file(text) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise files.too_large(len(content), most_bytes, text)
    return content


def can_be_read(path: str | Path) -> bool:
    """Whether a regular file or a non-empty folder is there now."""
    text = os.fspath(path)
    place = place_in_shard(text)
    if place is not None:
        text = os.path.join(place.folder, place.shard)
    if not is_remote(text):
        return files.can_be_read(text)
    try:
        stores.identity_of(text)
    except IsADirectoryError:
        return True
    except OSError:
        return False
    return True


def identity_of(path: str) -> Identity:
    """Content identity of a file, without opening images.

    A server that cannot list is not asked.

    Raises: OSError: it is not there.
    """
    place, remote = None, is_remote(path)
    if not remote:
        try:
            return of_stat(os.stat(path))
        except NotADirectoryError:
            place = place_in_shard(path)
            if place is None:
                raise
    path = addresses.url_of(path)
    place = place or place_in_shard(path)
    if place is not None:
        shard, member = os.path.join(place.folder, place.shard), find_member(place)
        whole = stores.known_identity(shard) if remote else of_stat(os.stat(shard))
        mark = f"{whole.mark} {member.mark} {member.offset}" if whole.mark else ""
        return Identity(member.size, mark)
    folder, _, name = path.rpartition("/")
    listed = stores.list_folder(folder)
    if listed is None:
        return Identity(0, "")
    if name not in listed:
        raise FileNotFoundError(errno.ENOENT, "does not exist in the store", path)
    return listed[name]


def look_anew(folders: Collection[str]) -> None:
    """What was listed of these folders before may have changed since."""
    stores.look_anew(folders)
    for folder in folders:
        forget_index(os.path.dirname(folder))


def absent_of(folder: str, names: Collection[str]) -> list[str] | None:
    """Missing images of a store or shard; None: the store cannot list.

    Raises: OSError: they cannot be listed.
    """
    through = place_in_shard(f"{folder}/{next(iter(names))}")
    if through is not None:
        index, inner = index_of(through.folder), os.path.dirname(through.name)
        return [
            name for name in names if index.find(through.shard, os.path.join(inner, name)) is None
        ]
    try:
        listed = stores.list_folder(folder)
    except FileNotFoundError:
        return [*names]
    return None if listed is None else [name for name in names if name not in listed]


def local_copy(path: Path) -> Path:
    """The file itself, or what was fetched of it.  Raises: UserError, StorageError."""
    return download.local_copy(path) if is_remote(path) else path
