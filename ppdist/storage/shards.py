"""Tar shards in WebDataset's layout, read by offset.

    FOLDER/train-000000.tar      a plain tar: KEY.jpg, KEY.json, KEY.jpg, ...
    FOLDER/index.csv             name,shard,offset,size of every image: where its bytes lie

ppdist treats a shard as a folder of images: FOLDER/train-000000.tar/KEY.jpg.  So a sample is read
by its position, in any order, by any rank, from a disk or a store.  KEY.json has the image's
entries from COCO's JSON, for WebDataset's readers; ppdist's readers use the JSON file of the whole
split.
"""

import csv
import errno
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ppdist.common import addresses
from ppdist.common.addresses import SHARD_SUFFIX, Place
from ppdist.common.files import open_file, read_file, too_large, writing
from ppdist.storage import stores
from ppdist.storage.download import local_copy

INDEX_FILE = "index.csv"
_COLUMNS = ["name", "shard", "offset", "size"]
_MAX_INDEX_BYTES = 1 << 32
_HEADER_BYTES = tarfile.BLOCKSIZE


class Member(NamedTuple):
    """An index entry: location of an image's content in a shard.

    offset, size: in bytes; mark: mark of the index that lists them.
    """

    offset: int
    size: int
    mark: str


class ShardIndex:
    """An index of the shards in a folder: the offset and size of every image.

    Flat arrays sorted by a digest of `SHARD/NAME`: 24 bytes per image, shared by forked workers.
    """

    def __init__(self, content: bytes, where: str) -> None:
        """Parses an index.

        Args: content: content of index.csv; where: its path, for messages.
        Raises: OSError: it is not an index, lists an image twice, or has a negative number.
        """
        try:
            rows = csv.reader(io.StringIO(content.decode("utf-8")))
            if next(rows, None) != _COLUMNS:
                raise ValueError
            digests, spans = [], []
            for name, shard, offset, size in rows:
                digests.append(_digest(f"{shard}/{name}"))
                spans.append((int(offset), int(size)))
            digest_N = np.array(digests, np.uint64)
            span_N2 = np.array(spans, np.int64).reshape(-1, 2)
            if (span_N2 < 0).any() or len(np.unique(digest_N)) < len(digest_N):
                raise ValueError
        except (ValueError, OverflowError, csv.Error) as error:
            raise OSError(
                errno.EINVAL, f"no index of shards: expected lines {','.join(_COLUMNS)}", where
            ) from error
        # Sorted once, so that a look-up is a binary search without a Python object per image.
        order_N = np.argsort(digest_N)
        self._digest_N, self._span_N2 = digest_N[order_N], span_N2[order_N]
        self.mark = hashlib.blake2b(content, digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._digest_N)

    def find(self, shard: str, name: str) -> Member | None:
        """Finds an image of a shard by its name; None: the index does not list it."""
        digest = np.uint64(_digest(f"{shard}/{name}"))
        position = int(np.searchsorted(self._digest_N, digest))
        if position == len(self._digest_N) or self._digest_N[position] != digest:
            return None
        offset, size = self._span_N2[position].tolist()
        return Member(offset, size, self.mark)


def _digest(text: str) -> int:
    # 64 bits: two of a million digests are equal with a probability of 3e-8, which is noticed.
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "little")


_indexes: dict[str, ShardIndex] = {}  # by folder; workers inherit those of their rank


def index_of(folder: str) -> ShardIndex:
    """Returns the index of a folder of shards, read once per process.

    Raises: OSError: the index cannot be read.  UserError: it cannot be fetched from the store.
    """
    index = _indexes.get(folder)
    if index is None:
        path = os.path.join(folder, INDEX_FILE)
        content = read_file(local_copy(Path(path)), _MAX_INDEX_BYTES)
        index = _indexes[folder] = ShardIndex(content, addresses.absolute(path))
    return index


def forget_index(folder: str) -> None:
    """Drops the cached index: the file may have changed since."""
    _indexes.pop(folder, None)


def find_member(place: Place) -> Member:
    """Finds an image in the index of its shards.

    Raises: OSError: FileNotFoundError if the index does not list it.
    """
    member = index_of(place.folder).find(place.shard, place.name)
    if member is None:
        path = os.path.join(*place)
        raise FileNotFoundError(errno.ENOENT, f"not listed in {INDEX_FILE} of its shards", path)
    return member


def open_member(place: Place) -> BinaryIO:
    """Opens an image in a shard as a file of its own.

    Reads only the requested bytes of the shard.

    Raises: OSError: the image is absent or unreadable, or the index belongs to other shards.
    """
    member = find_member(place)
    shard = os.path.join(place.folder, place.shard)
    if addresses.is_remote(shard):
        return io.BytesIO(read_member(place, member.size))
    file = open_file(shard)
    try:
        # With an outdated index, the bytes would be those of another image, without any error.
        header = os.pread(file.fileno(), _HEADER_BYTES, member.offset - _HEADER_BYTES)
        _require_header(header, member, place)
        return io.BufferedReader(_Span(file, member.offset, member.size), 1 << 16)
    except BaseException:
        file.close()
        raise


def read_member(place: Place, most_bytes: int) -> bytes:
    """Reads a whole image from a shard, in one request.

    Raises: OSError: see `open_member`; or the image has more than `most_bytes`.
    """
    member = find_member(place)
    shard = os.path.join(place.folder, place.shard)
    if member.size > most_bytes:
        raise too_large(member.size, most_bytes, os.path.join(*place))
    begin, length = member.offset - _HEADER_BYTES, _HEADER_BYTES + member.size
    if addresses.is_remote(shard):
        content = stores.fetch(shard, begin, length)
    else:
        with open_file(shard) as file:
            content = os.pread(file.fileno(), length, begin)
    _require_header(content[:_HEADER_BYTES], member, place)
    if len(content) != length:
        raise OSError(errno.EINVAL, "the shard is cut short", shard)
    return content[_HEADER_BYTES:]


def _require_header(header: bytes, member: Member, place: Place) -> None:
    """Checks that the tar header before an image agrees with the index.

    Raises: OSError: it is the header of another file.
    """
    # Fields of POSIX.1-1988; parsing them with tarfile takes twice as long as the rest of reading.
    name, size, kind = header[:100].rstrip(b"\0"), header[124:136].rstrip(b" \0"), header[257:262]
    same_size = kind == b"ustar" and size == b"%011o" % member.size
    if same_size and name and os.fsencode(place.name).startswith(name):
        return
    message = f"{INDEX_FILE} is of other shards: there is no {place.name} at byte {member.offset}"
    raise OSError(errno.EINVAL, message, os.path.join(place.folder, place.shard))


class _Span(io.RawIOBase):
    """A range of bytes of a file, as a file of its own; closing it closes the underlying file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._at))
        content = os.pread(self._file.fileno(), wanted, self._begin + self._at)
        view[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


class ShardWriter:
    """Writes images and their annotations into shards, and the index beside them."""

    def __init__(self, folder: Path, split: str, shard_bytes: int) -> None:
        """Creates a writer.

        Args:
            folder: an existing, empty folder.
            split: prefix of the name of every shard.
            shard_bytes: a shard that has reached this size takes no further image.
        """
        self._folder, self._split, self._shard_bytes = folder, split, shard_bytes
        self._tar: tarfile.TarFile | None = None
        self._rows: list[tuple[str, str, int, int]] = []
        self._shards = 0

    def add(self, name: str, image: bytes, annotation: Mapping[str, Any]) -> str:
        """Adds an image `KEY.SUFFIX` and its `KEY.json`.

        Returns: the path of the image relative to the folder, through its shard.
        Raises: UserError: the disk is full.
        """
        with writing(self._folder):
            # Checked before an image, so that it is in the same shard as its annotation.
            if self._tar is None or self._tar.offset >= self._shard_bytes:
                self._start_shard()
            tar = self._tar
            assert tar is not None
            shard = self._shard_name(self._shards - 1)
            offset = self._append(tar, name, image)
            self._rows.append((name, shard, offset, len(image)))
            text = json.dumps(annotation, ensure_ascii=False).encode("utf-8", "backslashreplace")
            self._append(tar, f"{os.path.splitext(name)[0]}.json", text)
        return f"{shard}/{name}"

    def close(self) -> int:
        """Closes the last shard and writes the index.

        Returns: number of shards.
        """
        with writing(self._folder / INDEX_FILE):
            if self._tar is not None:
                self._tar.close()
            # "x": an existing index belongs to other shards.
            with open(self._folder / INDEX_FILE, "x", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *self._rows])
        return self._shards

    def _start_shard(self) -> None:
        if self._tar is not None:
            self._tar.close()
        name = self._shard_name(self._shards)
        # GNU format: the block before a file's content is its header, however long the name.
        self._tar = tarfile.open(  # noqa: SIM115
            self._folder / name, "x", format=tarfile.GNU_FORMAT
        )
        self._shards += 1

    def _shard_name(self, number: int) -> str:
        return f"{self._split}-{number:06d}{SHARD_SUFFIX}"

    def _append(self, tar: tarfile.TarFile, name: str, content: bytes) -> int:
        """Appends a file to a shard; returns the offset of its content in bytes."""
        entry = tarfile.TarInfo(name)  # no owner and no time: the same set gives the same bytes
        entry.size, entry.mode = len(content), 0o644
        tar.addfile(entry, io.BytesIO(content))
        return int(tar.offset) - -(-len(content) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
