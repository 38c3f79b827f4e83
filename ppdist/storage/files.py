"""Files of a data set: on disk, in shards, in stores.

`ppdist/common/addresses.py` says what paths lead there.  Failures are those of a disk, OSError; a
store that stays away is a StorageError.
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
    """Opens what is in shards and stores, and the rest as the opener of disks that it wraps."""

    def open(self, path: str | Path) -> BinaryIO:
        """As `Opener.open`.  Raises: StorageError, too."""
        text, place = _locate(path)
        if place is not None:
            return open_member(place)
        if not is_remote(text):
            return super().open(text)
        known = stores.listed_identity(text)
        if known is None or not known.bytes:
            return io.BytesIO(stores.fetch(text))
        # A range request, which needs no size beforehand.
        return io.BytesIO(stores.fetch(text, 0, known.bytes))

    def read(self, path: str | Path, most_bytes: int) -> bytes:
        """As `Opener.read`.  Raises: StorageError, too."""
        text, place = _locate(path)
        if not is_remote(text):
            if place is None:
                return super().read(text, most_bytes)
            return read_member(place, most_bytes)
        with self.open(text) as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise files.too_large(len(content), most_bytes, os.fspath(path))
        return content

    def can_be_read(self, path: str | Path) -> bool:
        """As `Opener.can_be_read`; of an image in a shard, whether its shard can."""
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
        """As `Opener.identity_of`.  A server that cannot list is not asked."""
        text, place = _locate(path)
        remote = is_remote(text)
        if place is not None:
            shard, member = os.path.join(place.folder, place.shard), find_member(place)
            whole = stores.known_identity(shard) if remote else of_stat(os.stat(shard))
            mark = f"{whole.mark} {member.mark} {member.offset}" if whole.mark else ""
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
    """Gives the path, of one in a store its URL; and its place in a shard, if it leads there."""
    text = os.fspath(path)
    text = addresses.absolute(text) if is_remote(text) else text
    return text, place_in_shard(text)


STORAGE = StorageOpener()


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
