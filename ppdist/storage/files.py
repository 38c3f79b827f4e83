"""Files of a data set: on disk, in shards, in stores.

See `ppdist/common/addresses.py` for their paths.  Failures are OSError, as with a disk; a store
that stays unavailable is a StorageError.
"""

import errno
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from ppdist.common import addresses, files
from ppdist.common.addresses import Place, is_remote, place_in_shard
from ppdist.common.opener import Identity, Opener, of_stat
from ppdist.storage import stores
from ppdist.storage.shards import find_member, forget_index, index_of, open_member, read_member


class StorageOpener(Opener):
    """An opener for shards and stores; files on disk go to the disk opener that it extends."""

    def open(self, path: str | Path) -> BinaryIO:
        """Opens a file on disk, in a shard or a store.  Raises: OSError, StorageError."""
        text, place = _locate(path)
        if place is not None:
            return open_member(place)
        if not is_remote(text):
            return super().open(text)
        identity = stores.listed_identity(text)
        if identity is None or not identity.bytes:
            return io.BytesIO(stores.fetch(text))
        # A range request, which needs no size beforehand.
        return io.BytesIO(stores.fetch(text, 0, identity.bytes))

    def read(self, path: str | Path, most_bytes: int) -> bytes:
        """Reads all bytes of a file.

        Raises: OSError: the file cannot be read, or has more than `most_bytes`.  StorageError.
        """
        text, place = _locate(path)
        if not is_remote(text):
            if place is None:
                return super().read(text, most_bytes)
            return read_member(place, most_bytes)
        # A server may not report the size, so one byte more than allowed shows that there are too
        # many.
        with self.open(text) as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise files.too_large(len(content), most_bytes, os.fspath(path))
        return content

    def can_be_read(self, path: str | Path) -> bool:
        """Returns True if a file, a folder or the shard of an image can be read now."""
        text, place = _locate(path)
        if place is not None:
            text = os.path.join(place.folder, place.shard)
        if not is_remote(text):
            return super().can_be_read(text)
        try:
            stores.identity_of(text)
        except IsADirectoryError:
            return True
        except OSError:
            return False
        return True

    def identity_of(self, path: str) -> Identity:
        """Returns the content identity of a file.

        On a server that cannot list folders it is unknown (size 0, no mark); no request is sent.
        """
        text, place = _locate(path)
        remote = is_remote(text)
        if place is not None:
            shard, member = os.path.join(place.folder, place.shard), find_member(place)
            # The shard's own mark, too: an index may stay the same when a shard is replaced.
            shard_identity = stores.cached_identity(shard) if remote else of_stat(os.stat(shard))
            marks = f"{shard_identity.mark} {member.mark} {member.offset}"
            mark = marks if shard_identity.mark else ""
            return Identity(member.size, mark)
        if not remote:
            return super().identity_of(text)
        folder, _, name = text.rpartition("/")
        listed = stores.list_folder(folder)
        if listed is None:
            return Identity(0, "")
        if name not in listed:
            raise FileNotFoundError(errno.ENOENT, "does not exist in the store", text)
        return listed[name]


def _locate(path: str | os.PathLike[str]) -> tuple[str, Place | None]:
    """Returns the path, or the URL if in a store; and the location in a shard, if any."""
    text = os.fspath(path)
    text = addresses.absolute(text) if is_remote(text) else text
    return text, place_in_shard(text)


STORAGE = StorageOpener()


def forget_listings(folders: Collection[str]) -> None:
    """Forgets the listings and shard indexes of these folders, so that they are read again."""
    stores.forget_listings(folders)
    for folder in folders:
        forget_index(os.path.dirname(folder))


def list_absent(folder: str, names: Collection[str]) -> list[str] | None:
    """Lists the missing images of a store or shard.

    Returns: None if the store cannot list its folders.
    Raises: OSError: the folder or the index of its shards cannot be read.
    """
    place = place_in_shard(f"{folder}/{next(iter(names))}")
    if place is not None:
        index, inner = index_of(place.folder), os.path.dirname(place.name)
        return [
            name for name in names if index.find(place.shard, os.path.join(inner, name)) is None
        ]
    try:
        listed = stores.list_folder(folder)
    except FileNotFoundError:
        return [*names]
    return None if listed is None else [name for name in names if name not in listed]
