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
from ppdist.common.addresses import is_remote, place_in_shard
from ppdist.common.opener import Identity, Opener, of_stat
from ppdist.storage import stores
from ppdist.storage.shards import find_member, forget_index, index_of, open_member, read_member


class StorageOpener(Opener):
    """Opens what is in shards and stores, and the rest as the opener of disks that it wraps."""

    def open(self, path: str | Path) -> BinaryIO:
        """As `Opener.open`.  Raises: StorageError, too."""
        text = os.fspath(path)
        if not is_remote(text):
            try:
                return super().open(text)
            except NotADirectoryError:
                place = place_in_shard(text)
                if place is None:
                    raise
                return open_member(place)
        text = addresses.absolute(text)
        place = place_in_shard(text)
        if place is not None:
            return open_member(place)
        known = stores.listed_identity(text)
        if known is None or not known.bytes:
            return io.BytesIO(stores.fetch(text))
        # A range request, which needs no size beforehand.
        return io.BytesIO(stores.fetch(text, 0, known.bytes))

    def read(self, path: str | Path, most_bytes: int) -> bytes:
        """As `Opener.read`.  Raises: StorageError, too."""
        text = os.fspath(path)
        try:
            if not is_remote(text):
                return super().read(text, most_bytes)
        except NotADirectoryError:
            place = place_in_shard(text)
            if place is None:
                raise
            return read_member(place, most_bytes)
        with self.open(text) as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise files.too_large(len(content), most_bytes, text)
        return content

    def can_be_read(self, path: str | Path) -> bool:
        """As `Opener.can_be_read`; of an image in a shard, whether its shard can."""
        text = os.fspath(path)
        place = place_in_shard(text)
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
        place, remote = None, is_remote(path)
        if not remote:
            try:
                return super().identity_of(path)
            except NotADirectoryError:
                place = place_in_shard(path)
                if place is None:
                    raise
        path = addresses.absolute(path)
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
