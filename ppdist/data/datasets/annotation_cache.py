"""Cache of annotations: flat arrays in a file, which ranks map.

    first start     read the annotations -> DetectionSet -> file
    later starts    compare what it was read from -> map the file

An entry of the cache is named by the settings that decide the result; its head says what it was
read from, by content identity.

The ranks of a host need no such file: `read_on_host` lets the first of them read, and the others
map what it has, its file in the cache or else memory without a name.
"""

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
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
_VERSION = f"3 {__version__}"  # raise the number when readers find another result in the same files
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

    said: lines that reading it logged.  sources: None: nobody knows; it is not kept.
    """

    dataset: DetectionSet
    said: tuple[str, ...]
    sources: Sources | None


@cache
def _say_once(why: str) -> None:
    """A warning, which training and validation set have in common."""
    _LOGGER.warning("annotations are not kept for the next start: %s", why)


def kept_or_read(settings: object, read: Callable[[], Read], *, anew: bool) -> tuple[Read, bool]:
    """Cached split if nothing has changed since; else reads it anew.

    What is read is cached.

    Args:
        settings: everything besides files that decides the result; it must survive JSON.
        anew: read in any case.
    Returns: the split, and whether it came from the cache.
    """
    entries = KeyedCache.of_user("annotations", _MOST_BYTES, _say_once)
    key = json.dumps([_VERSION, settings], sort_keys=True)
    if entries is not None and not anew and (found := _kept(entries, key)) is not None:
        return found, True
    began, clock = time.time(), time.monotonic()
    found = read()
    if (
        entries is None
        or found.sources is None
        or time.monotonic() - clock < _SHORT_SECONDS
        or (state := _state(found.sources, began)) is None
        or not entries.put(key, *_parts(found, state))
        or (view := entries.map(key)) is None
    ):
        return found, False
    return found._replace(dataset=_opened(view, str(entries.place(key)))[0].dataset), False


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
            memory.writelines(packed(*_parts(Read(dataset, (), None), {})))
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
    return _opened(mapped(os.open(path, os.O_RDONLY)), "")[0].dataset


def _kept(entries: KeyedCache, key: str) -> Read | None:
    """Cached entry; None: there is none, or its inputs have changed."""
    view = entries.map(key)
    if view is None:
        return None
    found, state = _opened(view, str(entries.place(key)))
    fresh = all(identity == _identity(path) for path, identity in state["files"]) and all(
        summary == _summary(path)[0] for path, summary in state["folders"]
    )
    return found if fresh else None


def _state(sources: Sources, began: float) -> dict[str, Any] | None:
    """State of the inputs that `_kept` compares.

    Args: began: when reading did, in seconds since 1970.
    Returns: None: something has changed meanwhile, or so shortly before that its times do not tell.
    """
    settled = int((began - _SETTLED_SECONDS) * 1e9)
    folders = [(path, *_summary(path)) for path in sources.folders]
    times = [newest for *_, newest in folders]
    for path in sources.files:
        with suppress(OSError):
            found = os.stat(path)
            times += [found.st_mtime_ns, found.st_ctime_ns]
    if max(times, default=0) >= settled:
        return None
    return {
        "files": [(path, _identity(path)) for path in sources.files],
        "folders": [(path, summary) for path, summary, _ in folders],
    }


def _identity(path: str) -> str:
    """Content identity of a file or folder on disk; "": absent."""
    try:
        return " ".join(map(str, of_stat(os.stat(path))))
    except OSError:
        return ""


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


def _parts(found: Read, state: Mapping[str, Any]) -> list[Any]:
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
            "said": found.said,
            "state": state,
            "arrays": places,
        }
    ).encode()
    head += b" " * (-(8 + len(head)) % _PLACES)
    parts: list[Any] = [len(head).to_bytes(8, "little"), head]
    for array in arrays.values():
        parts += [array.reshape(-1).view(np.uint8).data if array.nbytes else b""]
        parts += [bytes(-array.nbytes % _PLACES)]
    return parts


def _opened(view: memoryview, file: str) -> tuple[Read, Mapping[str, Any]]:
    """The set in a file, and its `_state`.

    The set's arrays are the file's.

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
    )
    return Read(dataset, tuple(head["said"]), None), head["state"]
