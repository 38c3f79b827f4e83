"""Cache of annotations: flat arrays in a file, which ranks map.

    first start     read the annotations -> DetectionSet -> file
    later starts    compare what it was read from -> map the file

The file stands in $XDG_CACHE_HOME/ppdist or ~/.cache/ppdist, named by the settings that decide the
result; its head says what it was read from: of single files the content, of folders of many files
the names, sizes and times.  It appears whole or not at all, and a checksum tells damage.  Whatever
is wrong with it, the annotations are read instead: it never is an error.

The ranks of a host need no such file: `read_on_host` lets the first of them read, and the others
map what it has, its file in the cache or else memory without a name.
"""

import hashlib
import json
import logging
import mmap
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppdist import __version__
from ppdist.common.files import user_cache
from ppdist.data.cache import first_on_host
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm

_LOGGER = logging.getLogger("ppdist.data")
_VERSION = f"2 {__version__}"  # raise the number when readers find another result in the same files
_NAME = "annotations-{}.bin"
_MAGIC = b"ppdist annotations\n"
_PLACES = 64  # bytes: where an array may begin
_SHORT_SECONDS = 0.5  # a set that is read sooner is not worth a file
_SETTLED_SECONDS = 2.0  # after so long a change of a file changes its times, too
_MOST_BYTES, _MOST_SECONDS = 16 << 30, 90 * 86400  # of all such files; since one was last used
_DRAFT_SECONDS = 3600  # since one was last written to: whoever began it has ended
_THREADS = 16  # a network disk answers each request late, but many at once
_BLOCK_BYTES = 1 << 20


class Sources(NamedTuple):
    """What a split was read from.

    files: whose content matters.  folders: each of whose files matters, by size and time.
    listings: of which only the names inside matter.  Not what is below them.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    listings: tuple[str, ...] = ()


class Read(NamedTuple):
    """A split that was read.

    said: lines that reading it logged.  sources: None: nobody knows; it is not kept.
    """

    dataset: DetectionSet
    said: tuple[str, ...]
    sources: Sources | None


def kept_or_read(settings: object, read: Callable[[], Read], *, anew: bool) -> tuple[Read, bool]:
    """What was kept, if nothing has changed since; else what is read now, which is kept.

    Args:
        settings: everything besides files that decides the result; it must survive JSON.
        anew: read in any case.
    Returns: the split, and whether it was kept.
    """
    file = _file(settings)
    if file is not None and not anew and (found := _kept(file)) is not None:
        return found, True
    began, clock = time.time(), time.monotonic()
    found = read()
    if file is None or found.sources is None or time.monotonic() - clock < _SHORT_SECONDS:
        return found, False
    try:
        state = _state(found.sources, began)
        if state is None:
            return found, False
        _write(file, found, state)
        dataset = _open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), str(file)).dataset
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        _say_once(f"{file.parent}: annotations are not kept for the next start: {why}")
        return found, False
    _clean(file)
    return found._replace(dataset=dataset), False


@cache
def _say_once(text: str) -> None:
    """A warning, which training and validation set have in common."""
    _LOGGER.warning(text)


def read_on_host(
    read: Callable[[], Sequence[DetectionSet | None]], root: str
) -> Sequence[DetectionSet | None]:
    """Reads sets once a host: its first rank does, the others map what it has.  Collective.

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
    """Of a file with the set, for other processes to open; -1: there can be none."""
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
            _put(memory.write, Read(dataset, (), None), {})
    except OSError as error:
        _LOGGER.warning("annotations are not shared by the ranks of this host: %s", error)
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


def _of_rank(process: int, descriptor: int | None) -> DetectionSet | None:
    """Raises: OSError, ValueError: that process does not show it."""
    if descriptor is None:
        return None
    if descriptor < 0:
        raise OSError("it could not make a file of them")
    path = f"/proc/{process}/fd/{descriptor}"
    return _open(os.open(path, os.O_RDONLY), "", compare=False).dataset


def _file(settings: object) -> Path | None:
    """Where the result of these settings is kept; None: this user has no home."""
    folder = user_cache()
    text = json.dumps([_VERSION, settings], sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
    return None if folder is None else folder / _NAME.format(name)


def _kept(file: Path) -> Read | None:
    """None: there is none that can be used."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = _open(descriptor, str(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOGGER.warning("%s is damaged (%s): the annotations are read again", file, error)
        return None
    if not _is_fresh(found.state):
        return None
    with suppress(OSError):
        os.utime(file)
    return found.read


def _is_fresh(state: Mapping[str, Any]) -> bool:
    """Whether nothing has changed of what a set was read from."""
    return (
        all(
            (times is not None and times == _times(path)) or digest == _digest(path)
            for path, times, digest in state["files"]
        )
        and all(summary == _summary_of_listing(path) for path, summary in state["listings"])
        and all(summary == _summary_of_files(path)[0] for path, summary in state["folders"])
    )


def _state(sources: Sources, began: float) -> dict[str, Any] | None:
    """What `_is_fresh` compares.  Args: began: when reading did, in seconds since 1970.

    Returns: None: something has changed meanwhile, or so shortly before that its times do not tell.
    """
    settled = int((began - _SETTLED_SECONDS) * 1e9)
    files = []
    for path in sources.files:
        times = _times(path)
        if times is not None and max(times[1:3]) > int(began * 1e9):
            return None
        certain = times is not None and max(times[1:3]) < settled
        files.append((path, times if certain else None, _digest(path)))
    folders = []
    for path in sources.folders:
        summary, newest = _summary_of_files(path)
        if newest >= settled:
            return None
        folders.append((path, summary))
    listings = [(path, _summary_of_listing(path)) for path in sources.listings]
    if any(summary and max(summary[:2]) >= settled for _, summary in listings):
        return None
    return {"files": files, "folders": folders, "listings": listings}


def _times(path: str) -> list[int] | None:
    """Size, times in ns, inode and device of a file; None: absent."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _digest(path: str) -> str:
    """Of the content of a file; "": it cannot be read."""
    content = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                content.update(block)
    except OSError:
        return ""
    return content.hexdigest()


def _summary_of_listing(path: str) -> list[int] | None:
    """It changes with the names in a folder; None: there is no such folder."""
    times = _times(path)
    return times and times[1:]


def _summary_of_files(path: str) -> tuple[str, int]:
    """It changes with each file in a folder; and the newest time, in ns."""
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return "", 0
    shares = [names[begin::_THREADS] for begin in range(_THREADS)] if len(names) > 999 else [names]

    def look(share: Sequence[str]) -> list[tuple[str, list[int] | None]]:
        return [(name, _of_file(os.path.join(path, name))) for name in share]

    with ThreadPoolExecutor(len(shares)) as pool:
        found = sorted(each for share in pool.map(look, shares) for each in share)
    summary = hashlib.blake2b(repr(found).encode(errors="surrogateescape"), digest_size=16)
    newest = max((max(times[1:3]) for _, times in found if times), default=0)
    return summary.hexdigest(), newest


def _of_file(path: str) -> list[int] | None:
    """As `_times`; of a folder nothing: what is in it is told by its own summary."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


class _Opened(NamedTuple):
    """read: the set, whose arrays are the file's.  state: see `_state`."""

    read: Read
    state: Mapping[str, Any]

    @property
    def dataset(self) -> DetectionSet:
        return self.read.dataset


def _write(file: Path, found: Read, state: Mapping[str, Any]) -> None:
    """Raises: OSError: it cannot be written; what was there before stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{file.stem}-", dir=file.parent)
    try:
        with open(descriptor, "wb") as output:
            _put(output.write, found, state)
        os.replace(draft, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _put(write: Callable[[Any], Any], found: Read, state: Mapping[str, Any]) -> None:
    """Magic, checksum of the rest, bytes of the head, head, arrays."""
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
    head += b" " * (-(len(_MAGIC) + 16 + len(head)) % _PLACES)
    parts: list[Any] = [len(head).to_bytes(8, "little"), head]
    for array in arrays.values():
        parts += [array.reshape(-1).view(np.uint8).data if array.nbytes else b""]
        parts += [bytes(-array.nbytes % _PLACES)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    for part in [_MAGIC, checksum.to_bytes(8, "little"), *parts]:
        write(part)


def _open(descriptor: int, file: str, *, compare: bool = True) -> _Opened:
    """Maps a file and closes its descriptor.

    Args:
        file: its path, "" where it has none.
        compare: the checksum, too.
    Raises: OSError, ValueError, KeyError, TypeError: it is none of ours, or damaged.
    """
    try:
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    start = len(_MAGIC) + 8
    if mapped[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not of this kind")
    view = memoryview(mapped)
    if compare and zlib.crc32(view[start:]) != int.from_bytes(view[len(_MAGIC) : start], "little"):
        raise ValueError("its checksum differs")
    first = start + 8 + int.from_bytes(view[start : start + 8], "little")
    head = json.loads(bytes(view[start + 8 : first]))
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
    return _Opened(Read(dataset, tuple(head["said"]), None), head["state"])


def _clean(file: Path) -> None:
    """Removes what nobody has used for long, the oldest of too many, and what was broken off."""
    now, held = time.time(), 0
    for other, state in _by_last_use(file.parent):
        held += state.st_size
        most = _DRAFT_SECONDS if other.name.startswith(".") else _MOST_SECONDS
        if other != file and (held > _MOST_BYTES or now - state.st_mtime > most):
            with suppress(OSError):
                other.unlink()


def _by_last_use(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    found = []
    for pattern in (_NAME.format("*"), f".{Path(_NAME.format('*')).stem}-*"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                found.append((path, path.stat()))
    return iter(sorted(found, key=lambda each: -each[1].st_mtime))
