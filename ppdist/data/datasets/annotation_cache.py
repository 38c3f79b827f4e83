"""Cache of annotations: flat arrays in a file, which ranks map.

    first start     read the annotations -> DetectionSet -> file
    later starts    compare the files that it was read from -> map the file

The key of an entry consists of the settings that determine the result and of the content identity
of its sources; a second entry, with the settings alone as its key, lists these sources.  So hosts
that share a home directory but have their own data never map each other's entries.

The ranks of a host share an entry: `read_on_host` lets the first rank read, and the others then
map what it has cached.  A set that is read quickly, or cannot be cached, is read by every rank.
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
_VERSION = (
    f"6 {__version__}"  # increase it when readers return a different result for the same files
)
_ALIGNMENT = 64  # bytes: arrays begin at multiples of it
_SHORT_SECONDS = 0.5  # a set that is read faster is not worth caching
_SETTLED_SECONDS = 2.0  # later changes of a file are sure to change its times
_MOST_BYTES = 16 << 30
_THREADS = 16  # a network disk answers slowly, but many requests at once


class Sources(NamedTuple):
    """The files and folders that a split was read from.

    files: files, and folders of which only the names inside matter.  folders: folders whose files
        all matter, but not their subfolders.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


class ReadResult(NamedTuple):
    """A split that was read.

    warnings: lines logged while it was read.  sources: None if unknown; it is then not cached.
    """

    dataset: DetectionSet
    warnings: tuple[str, ...]
    sources: Sources | None


@cache
def _warn_once(reason: str) -> None:
    """Warns only once, as the reason is the same for the training and the validation set."""
    _LOGGER.warning("annotations are not kept for the next start: %s", reason)


def load_or_read(
    settings: object, read: Callable[[], ReadResult], *, force: bool
) -> tuple[ReadResult, bool]:
    """Loads a split from the cache if nothing has changed; else reads and caches it.

    Args:
        settings: everything except files that determines the result; must survive a JSON round
            trip.
        force: reads the split even if the cache has it.
    Returns: the split, and True if it came from the cache.
    """
    entries = KeyedCache.of_user("annotations", _MOST_BYTES, _warn_once)
    name = json.dumps([_VERSION, settings], sort_keys=True)
    if entries is not None and not force and (sources_json := entries.get(name)) is not None:
        content, _ = _digest_sources(Sources(*map(tuple, json.loads(sources_json))))
        if (result := _load_entry(entries, f"{name} {content}")) is not None:
            return result, True
    begin, clock = time.time(), time.monotonic()
    result = read()
    if entries is None or result.sources is None or time.monotonic() - clock < _SHORT_SECONDS:
        return result, False
    content, newest = _digest_sources(result.sources)
    if newest >= int((begin - _SETTLED_SECONDS) * 1e9):  # a file may have changed while it was read
        return result, False
    key = f"{name} {content}"
    try:
        parts = _entry_parts(result)
    except UnicodeEncodeError:  # a path that is not UTF-8
        return result, False
    if entries.put(key, *parts) and (again := _load_entry(entries, key)) is not None:
        # Written last: the list of sources must not refer to a missing entry.
        entries.put(name, json.dumps(result.sources).encode())
        result = result._replace(dataset=again.dataset)
    return result, False


def read_on_host(
    read: Callable[[], Sequence[DetectionSet | None]], root: str
) -> Sequence[DetectionSet | None]:
    """Reads sets on the first rank of a host; the others then map its cache entries.  Collective.

    Args: root: folder of the data on this rank; only ranks with the same root share an entry.
    Raises: all errors of `read`, on every rank.
    """
    if comm.world_size() == 1:
        return read()
    is_first = first_on_host(root) == comm.rank()
    sets: Sequence[DetectionSet | None] = comm.run_on_all_ranks(read if is_first else lambda: ())
    mapped_sets: Sequence[DetectionSet | None] = comm.run_on_all_ranks(
        (lambda: sets) if is_first else read
    )
    return mapped_sets


def _digest_sources(sources: Sources) -> tuple[str, int]:
    """Computes a digest of the content identities of the sources, and their newest time in ns."""
    inside = [path for folder in sorted(sources.folders) for path in _list_paths(folder)]
    paths = [*sorted(sources.files), *inside]
    shares = [paths[begin::_THREADS] for begin in range(_THREADS)] if len(paths) > 999 else [paths]

    def list_states(share: Sequence[str]) -> list[tuple[str, os.stat_result | None]]:
        return [(path, _stat_or_none(path)) for path in share]

    with ThreadPoolExecutor(len(shares)) as pool:
        states = dict(entry for share in pool.map(list_states, shares) for entry in share)
    # Subfolders count only if they are sources themselves.
    for path in {*inside} - {*sources.files}:
        if (state := states[path]) is not None and stat.S_ISDIR(state.st_mode):
            states[path] = None
    identities = [(path, state and of_stat(state)) for path in paths for state in [states[path]]]
    content = hashlib.blake2b(repr(identities).encode(errors="surrogateescape"), digest_size=16)
    times = [max(state.st_mtime_ns, state.st_ctime_ns) for state in states.values() if state]
    return content.hexdigest(), max(times, default=0)


def _list_paths(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _stat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


class _Head(msgspec.Struct):
    """The head of a cache file, before its arrays.

    dataset: the set without its records.  arrays: type, shape and offset of each array.
    """

    dataset: DetectionSet
    warnings: tuple[str, ...] = msgspec.field(name="said")
    arrays: dict[str, tuple[str, tuple[int, ...], int]]


def _entry_parts(result: ReadResult) -> list[Any]:
    """Returns the parts of a cache file: size of the head, head, arrays."""
    arrays = Records.of(result.dataset.records).arrays
    head, end = _Head(replace(result.dataset, records=()), result.warnings, {}), 0
    parts: list[Any] = []
    for name, array in arrays.items():
        head.arrays[name] = (array.dtype.str, array.shape, end)
        parts += [array.reshape(-1).view(np.uint8).data if array.nbytes else b""]
        # Aligned, as arrays of 8-byte numbers are mapped in place.
        parts += [bytes(-array.nbytes % _ALIGNMENT)]
        end += sum(map(len, parts[-2:]))
    text = msgspec.json.encode(head)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return [len(text).to_bytes(8, "little"), text, *parts]


def _load_entry(entries: KeyedCache, key: str) -> ReadResult | None:
    """Maps a cache entry into memory, which its arrays share; None if there is no entry."""
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
    return ReadResult(replace(head.dataset, records=records), head.warnings, None)
