"""Cache of decoded images, for all workers and ranks of a host.

    ram    a file in memory that has no name (memfd_create): it does not count against /dev/shm, and
           is gone with the last process that has it open, however that one ends
    disk   a sparse file, named by the content identity of its images, also for later runs

Both are one file, and one code: a table of N checksums, then the pixels of each image at a place
that follows from the sizes in the annotations.  Images are read through a mapping that cannot be
written to, and written with `pwrite`, where a full disk is an error and not a signal; where a
signal ends a reader (SIGBUS: its disk is away), the loader gives the cache up.  The checksum goes
in after the pixels, and each process compares it at its first look at an image: what a killed
process or a power cut left half written counts as absent.  Two that write the same image at once
write the same bytes, so no lock is needed.
"""

import hashlib
import logging
import mmap
import os
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import cv2
import numpy as np

from ppdist.common.errors import StorageError
from ppdist.common.files import user_cache
from ppdist.common.machine import available_memory
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm
from ppdist.storage import files as storage
from ppdist.storage.retry import is_outage, unavailable

_LOGGER = logging.getLogger("ppdist.data")
_FORMAT = "ppdist image cache 2"
_NAME = "images-{}.cache"
_WRITTEN = 1 << 32  # set in a table entry, so that a checksum of 0 is told from no image
_SHARE = 0.75  # of the memory or disk that is free at the start: training needs the rest
_SPARE = 2 << 30  # bytes to leave free in any case
_STEP = 256 << 20  # bytes reserved before looking again how much is left
_GIB = 2**30


class Layout(NamedTuple):
    """Where each image lies in the file.

    sizes_N2: int64 (height, width) of the reduced image, 0 where not known: such are never kept.
    places_N: int64 byte at which its pixels begin; bytes: of the whole file.
    """

    sizes_N2: np.ndarray
    places_N: np.ndarray
    bytes: int

    @classmethod
    def of(cls, sizes_N2: np.ndarray, reductions_N: np.ndarray) -> "Layout":
        """Layout of the file for images of these sizes.

        Args: sizes_N2: of the originals; reductions_N: 1, 2, 4 or 8, see read_image.
        """
        reduced_N2 = -(-sizes_N2.astype(np.int64) // reductions_N.astype(np.int64)[:, None])
        ends = np.cumsum([8 * len(reduced_N2), *(3 * reduced_N2.prod(axis=1)).tolist()])
        return cls(reduced_N2, ends[:-1], int(ends[-1]))

    def fitting(self, size: int) -> int:
        """Number of images, from the first, within `size` bytes of the file."""
        return int(np.searchsorted([*self.places_N[1:], self.bytes], size, side="right"))


class ImageCache:
    """Images of a set by position, for a rank and its workers."""

    def __init__(self, descriptor: int, layout: Layout, kept: int) -> None:
        """
        Args:
            descriptor: of a file of `layout.bytes` bytes, open for reading and writing; the
                cache closes it.
            kept: so many images, from the first on, may be written.
        Raises: OSError: it cannot be mapped.
        """
        self._descriptor = descriptor
        self._layout = layout
        self._kept = kept
        self._memory = mmap.mmap(descriptor, layout.bytes, prot=mmap.PROT_READ)
        self._table_N = np.frombuffer(self._memory, np.int64, len(layout.places_N))
        self._compared_N = np.zeros(len(layout.places_N), bool)  # each worker gets its own
        # All workers see that writing failed for one of them, or reading.
        self._failed, self._lost = mmap.mmap(-1, 1), mmap.mmap(-1, 1)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def get(self, index: int) -> np.ndarray | None:
        """Cached image, uint8 RGB [H, W, 3], read-only; None: not there (yet).

        Its pixels are those that were put.
        """
        if self._lost[0]:
            return None
        entry = int(self._table_N[index])
        if not entry:
            return None
        height, width = self._layout.sizes_N2[index].tolist()
        place, size = int(self._layout.places_N[index]), 3 * height * width
        pixels = np.frombuffer(self._memory, np.uint8, size, place)
        if not self._compared_N[index]:
            if entry != _checksum(pixels):
                return None
            self._compared_N[index] = True
        return pixels.reshape(height, width, 3)

    def give_up(self) -> bool:
        """Stops reading and writing the cache; returns whether it was in use.

        Logs one line.
        """
        lost, self._lost[0], self._failed[0] = self._lost[0], 1, 1
        if not lost:
            _warn(
                "reading it failed (SIGBUS: its disk is unavailable, or the file was cut); images "
                "are decoded each time from now on"
            )
        return not lost

    def put(self, index: int, image_HW3: np.ndarray) -> None:
        """Keeps an image, if there is room for it.

        On a full disk a rank logs one line, and it and its workers stop writing.

        Raises: ValueError: its size is not that of its record, reduced.
        """
        size = tuple(self._layout.sizes_N2[index].tolist())
        if index >= self._kept or self._failed[0] or not all(size):
            return
        if image_HW3.shape != (*size, 3) or image_HW3.dtype != np.uint8:
            raise ValueError(f"image {index}: {image_HW3.shape} {image_HW3.dtype}: expected {size}")
        pixels = np.ascontiguousarray(image_HW3).reshape(-1)
        try:
            self._write(pixels.data, int(self._layout.places_N[index]))
            entry = np.array([_checksum(pixels)], np.int64)
            self._write(entry.data.cast("B"), 8 * index)
        except OSError as error:
            said, self._failed[0] = self._failed[0], 1
            if not said:
                _warn(
                    f"no more images are kept, because writing one failed "
                    f"({error.strerror or error}); the others are decoded each time"
                )

    def _write(self, content: memoryview, place: int) -> None:
        while content:
            written = os.pwrite(self._descriptor, content, place)
            content, place = content[written:], place + written


def _checksum(pixels: np.ndarray) -> int:
    return _WRITTEN | zlib.crc32(pixels.data)


class _Opened(NamedTuple):
    """An opened cache file.

    descriptor: of the file, -1: none; kept: how many images it has room for.
    """

    descriptor: int
    kept: int


_NOTHING = _Opened(-1, 0)


def open_cache(
    kind: Literal["none", "ram", "disk"],
    dataset: DetectionSet,
    reductions_N: np.ndarray,
    folder: str | Path | None = None,
) -> ImageCache | None:
    """Opens the cache of this host's ranks; logs its capacity.  Collective.

    Reserves the space now: where memory or disk do not suffice for all images, the first that fit
    are kept, or none.  That is never an error, and changes no pixel.  Not collective if kind is
    `none`.

    Args:
        reductions_N: how far each image is reduced when it is decoded: 1, 2, 4, 8.
        folder: of the file on disk; None: ppdist in $XDG_CACHE_HOME or ~/.cache.
    Returns: None where nothing can be kept.
    """
    if kind == "none":
        return None
    records = Records.of(dataset.records)
    layout = Layout.of(records.sizes_N2, reductions_N)

    def begin() -> _Opened:
        if layout.bytes == 8 * len(records):
            _warn("the annotations give no image sizes, so no image can be kept")
            return _NOTHING
        if kind == "ram":
            return _made_or_nothing(lambda: _in_memory(layout), 0.0)
        # An earlier attempt of the job had it.
        seconds = comm.storage_seconds() if comm.was_restarted() else 0.0
        return _made_or_nothing(
            lambda: _on_disk(layout, _folder(folder), _name_of(records, reductions_N)), seconds
        )

    opened = _of_first_on_host(begin)
    if not opened.kept:
        return None
    try:
        return ImageCache(opened.descriptor, layout, opened.kept)
    except OSError as error:
        why = error.strerror or error
        _warn(f"training continues without it, because it cannot be mapped: {why}")
        return None


def _made_or_nothing(make: Callable[[], _Opened], seconds: float) -> _Opened:
    """Makes the cache, or nothing with a warning if that fails.

    Args: seconds: how long to wait for unavailable storage.
    """

    def once() -> _Opened:
        try:
            return make()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            why = f"{where}{error.strerror or error}"
            if is_outage(error) and seconds:
                raise unavailable(why, "data.cache") from error
            _warn(f"training continues without it, because it cannot be created: {why}")
            return _NOTHING

    try:
        return comm.once_there(once, seconds)
    except StorageError as error:
        _warn(f"training continues without it, because it cannot be created: {error.what}")
        return _NOTHING


def _of_first_on_host(begin: Callable[[], _Opened]) -> _Opened:
    """Runs `begin` on each host's first rank; the others open its file.

    They reach it through the first rank's entry in /proc, which needs no name and no permission but
    that of the same user.  Where /proc does not let them, each begins its own.
    """
    if comm.world_size() == 1:
        return begin()
    first = first_on_host()
    own = comm.run_on_all_ranks(begin if first == comm.rank() else lambda: _NOTHING)
    process, descriptor, kept = comm.all_gather_large_object([os.getpid(), *own])[first]
    if first != comm.rank() and kept:
        try:
            own = _Opened(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR), kept)
        except OSError as error:
            _warn(f"not shared with rank {first}, this rank makes its own ({error.strerror})")
            own = begin()
    comm.barrier()  # the first keeps it open until the others have it
    return own


def first_on_host(place: str = "") -> int:
    """The first rank whose open files this one can open.  Collective.

    Args: place: only ranks that have the same one count.
    """
    hosts_W = comm.all_gather_object([_host(), place])
    return hosts_W.index(hosts_W[comm.rank()])


def _host() -> str:
    """Name shared by processes that see one another in /proc.

    Where that is unknown, each process has its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{boot.strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        _warn(
            f"which ranks share this machine cannot be told ({error.filename}: {error.strerror}); "
            f"each makes its own"
        )
        return f"rank {comm.rank()}"


def _in_memory(layout: Layout) -> _Opened:
    """Preallocates the cache in memory, for as many images as fit.

    It looks at what is left before every step, because a container that takes more than its limit
    does not see an allocation fail: a process in it is killed.
    """
    most = _room(available_memory())
    kept = layout.fitting(most)
    needed = int(layout.places_N[kept]) if kept < len(layout.places_N) else layout.bytes
    descriptor = os.memfd_create("ppdist-images")
    os.truncate(descriptor, layout.bytes)
    reserved = 0
    while kept and reserved < needed:
        step = min(_STEP, needed - reserved)
        try:
            if available_memory() < step + _SPARE:
                raise MemoryError
            os.posix_fallocate(descriptor, reserved, step)
        except (OSError, MemoryError):  # somebody else took it in the meantime
            most, kept = reserved, layout.fitting(reserved)
            break
        reserved += step
    _say(f"ram: {_extent(layout, kept, most, 'memory')}")
    return _opened_or_closed(descriptor, kept)


def _on_disk(layout: Layout, folder: Path, name: str) -> _Opened:
    """Opens the sparse file on disk, made where it does not exist.

    Args: name: "": it has none, and is gone with this run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if name:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    else:
        descriptor, draft = tempfile.mkstemp(dir=folder)
        os.unlink(draft)
    os.truncate(descriptor, layout.bytes)
    disk, written = os.statvfs(folder), os.fstat(descriptor).st_blocks * 512
    most = _room(disk.f_bavail * disk.f_frsize) + written
    kept = layout.fitting(most)
    place = folder / name if name else f"{folder}, for this run: its server tells no changes"
    _say(
        f"disk: {_extent(layout, kept, most, 'disk')} in {place}, {written / _GIB:.2f} GiB by now"
        + _others(folder, name)
    )
    return _opened_or_closed(descriptor, kept)


def _others(folder: Path, name: str) -> str:
    """Warns about unused cache files, which nobody deletes."""
    sizes: list[int] = []
    with suppress(OSError):  # one is deleted meanwhile, or the folder cannot be listed
        others = [other for other in folder.glob(_NAME.format("*")) if other.name != name]
        sizes.extend(os.stat(other).st_blocks * 512 for other in others)
    if not sizes:
        return ""
    caches = "1 other cache is" if len(sizes) == 1 else f"{len(sizes)} other caches are"
    return f"; {caches} there, {sum(sizes) / _GIB:.2f} GiB: delete those that no run needs"


def _opened_or_closed(descriptor: int, kept: int) -> _Opened:
    if kept:
        return _Opened(descriptor, kept)
    os.close(descriptor)
    return _NOTHING


def _room(free: int) -> int:
    """Bytes a cache may take of the free ones."""
    return max(0, min(int(_SHARE * free), free - _SPARE))


def _extent(layout: Layout, kept: int, most: int, what: str) -> str:
    total = len(layout.places_N)
    if kept == total:
        return f"room for all {total} images, {layout.bytes / _GIB:.2f} GiB"
    return (
        f"room for {kept} of {total} images, because {layout.bytes / _GIB:.2f} GiB are needed and "
        f"{most / _GIB:.2f} GiB of {what} can be spared; the others are decoded each time"
    )


def _folder(folder: str | Path | None) -> Path:
    """Parent folder of the cache file.

    Raises: OSError: none is given, and the user has none.
    """
    parent = user_cache() if folder is None else Path(folder)
    if parent is None:
        raise OSError("this user has no home folder; set data.cache_dir")
    return parent


def _name_of(records: Records, reductions_N: np.ndarray) -> str:
    """Cache file name, a digest of all that the content depends on.

    That is the files, their sizes, and how they are decoded.

    Returns: "": changes of some image cannot be detected.
    """
    summary = hashlib.blake2b(f"{_FORMAT} {cv2.__version__}".encode(), digest_size=10)
    for index in range(len(records)):
        path = records.path(index)
        try:
            identity = storage.identity_of(path)
            if not identity.mark:
                return ""
            version = " ".join(map(str, identity))
        except OSError:
            version = "absent"
        summary.update(os.fsencode(path) + b"\0" + version.encode() + b"\0")
    summary.update(records.sizes_N2.tobytes())
    summary.update(reductions_N.astype(np.uint8).tobytes())
    return _NAME.format(summary.hexdigest())


def _say(text: str) -> None:
    _LOGGER.info("data.cache: %s", text)


def _warn(text: str) -> None:
    _LOGGER.warning("data.cache: %s", text)
