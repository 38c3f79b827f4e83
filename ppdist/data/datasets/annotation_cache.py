"""Cache of annotations: flat arrays in a file, which ranks map.

    first start     read the annotations -> DetectionSet -> file
    later starts    look which files it was read from, and what they are now -> map the file

An entry is named by the settings that decide the result and by the content identity of all that it
was read from; a second one, named by the settings alone, lists what that is.  So hosts with one
home and data of their own never map each other's.

The ranks of a host need no such file: `read_on_host` lets the first of them read, and the others
map what it has, its file in the cache or else memory without a name.
"""

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ppdist import __version__
from ppdist.data.cache import first_on_host
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm
from ppdist.storage.identity import of_stat
from ppdist.storage.keyed_cache import KeyedCache, mapped, packed

_LOGGER = logging.getLogger("ppdist.data")
_VERSION = f"5 {__version__}"  # raise the number when readers find another result in the same files
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
    if entries.put(key, *_parts(found)) and (again := _kept(entries, key)) is not None:
        entries.put(name, json.dumps(found.sources).encode())
        found = found._replace(dataset=again.dataset)
    return found, False


def read_on_host(
    read: Callable[[], Sequence[DetectionSet | None]], root: str
) -> Sequence[DetectionSet | None]:
    """Reads sets once per host; other ranks map the first's.  Collective.

    Args: root: below which this rank has its files; only ranks with the same one share.
    Raises: whatever `read` raises, on every rank.
    """
    if comm.world_size() == 1:
        return read()
    first = first_on_host(root)
    reads = first == comm.rank()
    sets: Sequence[DetectionSet | None] = comm.run_on_all_ranks(read if reads else lambda: ())
    own = [_descriptor(dataset) for dataset in sets]
    process, descriptors = comm.all_gather_object([os.getpid(), own])[first]

    def take() -> Sequence[DetectionSet | None]:
        try:
            return [_of_rank(process, each) for each in descriptors]
        except (OSError, ValueError) as error:
            if reads:
                return sets
            _LOGGER.warning("annotations are not shared with rank %d: %s", first, error)
            return read()

    taken: Sequence[DetectionSet | None] = comm.run_on_all_ranks(take)
    for descriptor in own:  # the others have it now
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)
    return taken


def _descriptor(dataset: DetectionSet | None) -> int | None:
    """Descriptor of a file with the set, for other processes to open.

    -1: there can be none.
    """
    if dataset is None:
        return None
    file = Records.of(dataset.records).file
    with suppress(OSError):
        if file:
            return os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    descriptor = -1
    try:
        descriptor = os.memfd_create("ppdist-annotations")
        with open(descriptor, "wb", closefd=False) as memory:
            memory.writelines(packed(*_parts(Read(dataset, (), None))))
    except OSError as error:
        _LOGGER.warning("annotations are not shared by the ranks of this host: %s", error)
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


def _of_rank(process: int, descriptor: int | None) -> DetectionSet | None:
    """Set that another rank's process shares.

    Raises: OSError, ValueError: that process does not show it.
    """
    if descriptor is None:
        return None
    if descriptor < 0:
        raise OSError("it could not make a file of them")
    path = f"/proc/{process}/fd/{descriptor}"
    return _opened(mapped(os.open(path, os.O_RDONLY)), "").dataset


def _kept(entries: KeyedCache, key: str) -> Read | None:
    """Entry of the cache; None: there is none."""
    view = entries.map(key)
    return None if view is None else _opened(view, str(entries.place(key)))


def _content_of(sources: Sources) -> tuple[str, int]:
    """Digest of the sources' content identities, and their newest time in ns."""
    told: list[tuple[str, object]] = []
    times = [0]
    for path in sorted(sources.files):
        found = None
        with suppress(OSError):
            found = os.stat(path)
            times += [found.st_mtime_ns, found.st_ctime_ns]
        told.append((path, found and of_stat(found)))
    for path in sorted(sources.folders):
        summary, newest = _summary(path)
        told.append((path, summary))
        times.append(newest)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest(), max(times)


def _summary(path: str) -> tuple[str, int]:
    """Summary of a folder, and its newest time in ns.

    It changes with each file in the folder.
    """
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return "", 0
    shares = [names[begin::_THREADS] for begin in range(_THREADS)] if len(names) > 999 else [names]

    def look(share: Sequence[str]) -> list[tuple[str, os.stat_result | None]]:
        return [(name, _of_file(os.path.join(path, name))) for name in share]

    with ThreadPoolExecutor(len(shares)) as pool:
        found = dict(each for share in pool.map(look, shares) for each in share)
    told = [(name, state and of_stat(state)) for name in names for state in [found[name]]]
    times = [max(state.st_mtime_ns, state.st_ctime_ns) for state in found.values() if state]
    summary = hashlib.blake2b(repr(told).encode(errors="surrogateescape"), digest_size=16)
    return summary.hexdigest(), max(times, default=0)


def _of_file(path: str) -> os.stat_result | None:
    """Status of a file; None: absent, or a folder.

    A folder has a summary of its own.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return None if stat.S_ISDIR(found.st_mode) else found


def _parts(found: Read) -> list[Any]:
    """Parts of a cache file: size of the head, head, arrays."""
    dataset = found.dataset
    arrays = Records.of(dataset.records).arrays
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = (array.dtype.str, array.shape, end)
        end += array.nbytes + -array.nbytes % _PLACES
    head = json.dumps(
        {
            "class_names": dataset.class_names,
            "category_ids": dataset.category_ids,
            "source": dataset.source,
            "notes": dataset.notes,
            "limited": dataset.limited,
            "duplicates": [*dataset.duplicates.items()],
            "said": found.said,
            "arrays": places,
        }
    ).encode()
    head += b" " * (-(8 + len(head)) % _PLACES)
    parts: list[Any] = [len(head).to_bytes(8, "little"), head]
    for array in arrays.values():
        parts += [array.reshape(-1).view(np.uint8).data if array.nbytes else b""]
        parts += [bytes(-array.nbytes % _PLACES)]
    return parts


def _opened(view: memoryview, file: str) -> Read:
    """The set in a file, whose memory its arrays share.

    Args: file: its path, or "".
    """
    first = 8 + int.from_bytes(view[:8], "little")
    head = json.loads(bytes(view[8:first]))
    arrays = {}
    for name, (kind, shape, place) in head["arrays"].items():
        count = int(np.prod(shape, dtype=np.int64))
        found = np.frombuffer(view, kind, count, first + place) if count else np.zeros(0, kind)
        arrays[str(name)] = found.reshape(shape)
    dataset = DetectionSet(
        records=Records.of_arrays(arrays, file),
        class_names=tuple(head["class_names"]),
        category_ids=tuple(head["category_ids"]),
        source=head["source"],
        notes=tuple(head["notes"]),
        limited=head["limited"],
        duplicates=dict(head["duplicates"]),
    )
    return Read(dataset, tuple(head["said"]), None)
