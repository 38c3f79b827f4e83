"""Cache of annotations: flat arrays in a file, which ranks map.

    first start     read the annotations -> DetectionSet -> file
    later starts    look which files it was read from, and what they are now -> map the file

An entry is named by the settings that decide the result and by the content identity of all that it
was read from; a second one, named by the settings alone, lists what that is.  So hosts with one
home and data of their own never map each other's.

The ranks of a host share it: `read_on_host` lets the first of them read, and the others then find
what it has kept.  A set that is read in no time, or cannot be kept, each of them reads itself.
"""

import hashlib
import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ppdist import __version__
from ppdist.common.keyed_cache import KeyedCache
from ppdist.common.opener import of_stat
from ppdist.data.cache import first_on_host
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm

_LOGGER = logging.getLogger("ppdist.data")
_VERSION = f"6 {__version__}"  # raise the number when readers find another result in the same files
_PLACES = 64  # bytes: where an array may begin
_SHORT_SECONDS = 0.5  # a set that is read sooner is not worth a file
_SETTLED_SECONDS = 2.0  # after so long a change of a file changes its times, too
_MOST_BYTES = 16 << 30
_THREADS = 16  # a network disk answers each request late, but many at once


class Sources(NamedTuple):
    """What a split was read from.

    files: files, and folders of which only the names inside matter.  folders: each of whose files
    matters.  Not what is below them.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


class Read(NamedTuple):
    """A split that was read.

    said: lines that reading it logged.  sources: None: unknown; not cached.
    """

    dataset: DetectionSet
    said: tuple[str, ...]
    sources: Sources | None


@cache
def _say_once(why: str) -> None:
    """A warning, which training and validation set have in common."""
    _LOGGER.warning("annotations are not kept for the next start: %s", why)


def kept_or_read(settings: object, read: Callable[[], Read], *, anew: bool) -> tuple[Read, bool]:
    """Cached split if nothing has changed since; else reads it again.

    What is read is cached.

    Args:
        settings: everything but files that determines the result; must survive JSON.
        anew: read in any case.
    Returns: the split, and whether it came from the cache.
    """
    entries = KeyedCache.of_user("annotations", _MOST_BYTES, _say_once)
    name = json.dumps([_VERSION, settings], sort_keys=True)
    if entries is not None and not anew and (told := entries.get(name)) is not None:
        content, _ = _content_of(Sources(*map(tuple, json.loads(told))))
        if (found := _kept(entries, f"{name} {content}")) is not None:
            return found, True
    began, clock = time.time(), time.monotonic()
    found = read()
    if entries is None or found.sources is None or time.monotonic() - clock < _SHORT_SECONDS:
        return found, False
    content, newest = _content_of(found.sources)
    if newest >= int((began - _SETTLED_SECONDS) * 1e9):  # it may have changed while it was read
        return found, False
    key = f"{name} {content}"
    try:
        parts = _parts(found)
    except UnicodeEncodeError:  # a path that is not UTF-8
        return found, False
    if entries.put(key, *parts) and (again := _kept(entries, key)) is not None:
        entries.put(name, json.dumps(found.sources).encode())
        found = found._replace(dataset=again.dataset)
    return found, False


def read_on_host(
    read: Callable[[], Sequence[DetectionSet | None]], root: str
) -> Sequence[DetectionSet | None]:
    """Reads sets on the first rank of a host; others then map what it has kept.  Collective.

    Args: root: below which this rank has its files; only ranks with the same one share.
    Raises: whatever `read` raises, on every rank.
    """
    if comm.world_size() == 1:
        return read()
    is_first = first_on_host(root) == comm.rank()
    sets: Sequence[DetectionSet | None] = comm.run_on_all_ranks(read if is_first else lambda: ())
    others: Sequence[DetectionSet | None] = comm.run_on_all_ranks(
        (lambda: sets) if is_first else read
    )
    return others


def _content_of(sources: Sources) -> tuple[str, int]:
    """Digest of the sources' content identities, and their newest time in ns."""
    inside = [path for folder in sorted(sources.folders) for path in _paths_in(folder)]
    paths = [*sorted(sources.files), *inside]
    shares = [paths[begin::_THREADS] for begin in range(_THREADS)] if len(paths) > 999 else [paths]

    def look(share: Sequence[str]) -> list[tuple[str, os.stat_result | None]]:
        return [(path, _state_of(path)) for path in share]

    with ThreadPoolExecutor(len(shares)) as pool:
        states = dict(entry for share in pool.map(look, shares) for entry in share)
    for path in {*inside} - {*sources.files}:  # folders have a listing of their own, or none
        if (state := states[path]) is not None and stat.S_ISDIR(state.st_mode):
            states[path] = None
    told = [(path, state and of_stat(state)) for path in paths for state in [states[path]]]
    content = hashlib.blake2b(repr(told).encode(errors="surrogateescape"), digest_size=16)
    times = [max(state.st_mtime_ns, state.st_ctime_ns) for state in states.values() if state]
    return content.hexdigest(), max(times, default=0)


def _paths_in(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _state_of(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


class _Head(msgspec.Struct):
    """What a file says before its arrays.

    dataset: without records.  arrays: type, shape and first byte of each.
    """

    dataset: DetectionSet
    said: tuple[str, ...]
    arrays: dict[str, tuple[str, tuple[int, ...], int]]


def _parts(found: Read) -> list[Any]:
    """Parts of a cache file: size of the head, head, arrays."""
    arrays = Records.of(found.dataset.records).arrays
    head, end = _Head(replace(found.dataset, records=()), found.said, {}), 0
    parts: list[Any] = []
    for name, array in arrays.items():
        head.arrays[name] = (array.dtype.str, array.shape, end)
        parts += [array.reshape(-1).view(np.uint8).data if array.nbytes else b""]
        parts += [bytes(-array.nbytes % _PLACES)]
        end += sum(map(len, parts[-2:]))
    text = msgspec.json.encode(head)
    text += b" " * (-(8 + len(text)) % _PLACES)
    return [len(text).to_bytes(8, "little"), text, *parts]


def _kept(entries: KeyedCache, key: str) -> Read | None:
    """Entry of the cache, whose memory its arrays share; None: there is none."""
    view = entries.map(key)
    if view is None:
        return None
    first = 8 + int.from_bytes(view[:8], "little")
    head = msgspec.json.decode(view[8:first], type=_Head)
    arrays = {}
    for name, (kind, shape, place) in head.arrays.items():
        count = math.prod(shape)
        array = np.frombuffer(view, kind, count, first + place) if count else np.zeros(0, kind)
        arrays[name] = array.reshape(shape)
    records = Records.of_arrays(arrays, str(entries.place(key)))
    return Read(replace(head.dataset, records=records), head.said, None)
