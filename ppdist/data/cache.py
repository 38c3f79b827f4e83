"""Caches of decoded images, for all workers and ranks of a host.

    ram    memory without a name (memfd_create): it does not count against /dev/shm, and is gone
           with the last process that has it open, however that one ends
    disk   a file for each image, also for later runs

A cache changes no pixel, and what is wrong with it is never an error: an image that is not there is
decoded.  Two processes that keep the same image at once write the same bytes, so no lock is needed.
"""

import logging
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import cv2
import numpy as np

from ppdist.common.files import replacing, user_cache
from ppdist.common.machine import available_memory
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm
from ppdist.storage import files as storage
from ppdist.storage.keyed_cache import place_of

_LOGGER = logging.getLogger("ppdist.data")
_FORMAT = f"ppdist image 1, OpenCV {cv2.__version__}"
_SHARE = 0.75  # of the memory or disk that is free at the start: training needs the rest
_SPARE = 2 << 30  # bytes to leave free in any case
_STEP = 256 << 20  # bytes reserved before looking again how much is left
_GIB = 2**30


class ImageCache(Protocol):
    """Decoded images of a set by position, as a rank and its workers see them."""

    def get(self, index: int) -> np.ndarray | None:
        """Cached image, uint8 RGB [H, W, 3], read-only; None: not there (yet)."""

    def put(self, index: int, image_HW3: np.ndarray) -> None:
        """Keeps an image that `get` has just not found, if there is room for it.

        Raises: ValueError: its size is not that of its record, reduced.
        """


class Layout(NamedTuple):
    """Where each image lies in memory: behind N bytes that say which images are there.

    sizes_N2: int64 (height, width) of the reduced image, 0 where not known: such are never kept.
    places_N: int64 byte at which its pixels begin; bytes: of the whole.
    """

    sizes_N2: np.ndarray
    places_N: np.ndarray
    bytes: int

    @classmethod
    def of(cls, sizes_N2: np.ndarray) -> "Layout":
        """Layout of images of these sizes."""
        ends = np.cumsum([len(sizes_N2), *(3 * sizes_N2.prod(axis=1)).tolist()])
        return cls(sizes_N2, ends[:-1], int(ends[-1]))

    def fitting(self, size: int) -> int:
        """Number of images, from the first, within `size` bytes."""
        return int(np.searchsorted([*self.places_N[1:], self.bytes], size, side="right"))


class MemoryCache:
    """Images in memory that the ranks of a host share.

    Pixels are written with `pwrite`, before the byte that says that they are there: what a killed
    process left half written counts as absent.
    """

    def __init__(self, descriptor: int, layout: Layout, kept: int) -> None:
        """
        Args:
            descriptor: of `layout.bytes` bytes, open for reading and writing; closed by the cache.
            kept: so many images, from the first on, may be written.
        Raises: OSError: it cannot be mapped.
        """
        self._descriptor = descriptor
        self._layout = layout
        self._kept = kept
        self._memory = mmap.mmap(descriptor, layout.bytes, prot=mmap.PROT_READ)
        self._is_there_N = np.frombuffer(self._memory, np.uint8, len(layout.places_N))

    def __del__(self) -> None:
        os.close(self._descriptor)

    def get(self, index: int) -> np.ndarray | None:
        """See `ImageCache`."""
        if not self._is_there_N[index]:
            return None
        height, width = self._layout.sizes_N2[index].tolist()
        place = int(self._layout.places_N[index])
        pixels = np.frombuffer(self._memory, np.uint8, 3 * height * width, place)
        return pixels.reshape(height, width, 3)

    def put(self, index: int, image_HW3: np.ndarray) -> None:
        """See `ImageCache`."""
        size_2 = self._layout.sizes_N2[index]
        if index >= self._kept or not size_2.all():
            return
        pixels = _pixels_of(index, image_HW3, size_2)
        place = int(self._layout.places_N[index])
        while pixels:
            written = os.pwrite(self._descriptor, pixels, place)
            pixels, place = pixels[written:], place + written
        os.pwrite(self._descriptor, b"\1", index)


class DiskCache:
    """Images as files of their pixels, `FOLDER/3f/3f9c...`, on a disk of this host.

    A name is a digest of the image's path and content identity (bytes, mtime, ctime) and of its
    reduction, so a file never holds another image; identity.py says why mtime alone is not enough.
    A file is written aside and renamed.  One that a power cut left shorter counts as absent.
    """

    def __init__(
        self,
        folder: Path,
        records: Records,
        reductions_N: np.ndarray,
        sizes_N2: np.ndarray,
        least_free: int,
    ) -> None:
        """
        Args:
            sizes_N2: of the reduced images, 0 where not known: such are never kept.
            least_free: bytes of the disk that stay free.
        """
        self._folder = folder
        self._records = records
        self._reductions_N = reductions_N
        self._sizes_N2 = sizes_N2
        self._least_free = least_free
        self._absent: tuple[int, Path] | None = None  # what `get` did not find last
        self._full = mmap.mmap(-1, 1)  # all workers see that one of them found no room

    def get(self, index: int) -> np.ndarray | None:
        """See `ImageCache`."""
        place = self._place(index)
        self._absent = None if place is None else (index, place)
        if place is None:
            return None
        try:
            pixels = np.fromfile(place, np.uint8)
        except OSError:  # not there, or its disk is away
            return None
        height, width = self._sizes_N2[index].tolist()
        if pixels.size != 3 * height * width:
            return None
        pixels.flags.writeable = False
        return pixels.reshape(height, width, 3)

    def put(self, index: int, image_HW3: np.ndarray) -> None:
        """See `ImageCache`.

        Where the disk is full a rank logs one line, and it and its workers stop writing.
        """
        # The name is of the file before it was read: it may have been replaced meanwhile.
        if self._full[0] or self._absent is None or self._absent[0] != index:
            return
        pixels, place = _pixels_of(index, image_HW3, self._sizes_N2[index]), self._absent[1]
        try:
            if shutil.disk_usage(self._folder).free < self._least_free + len(pixels):
                raise OSError(f"{self._least_free / _GIB:.2f} GiB of its disk stay free")
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as file:
                file.write(pixels)
        except OSError as error:
            full, self._full[0] = self._full[0], 1
            if not full:
                _warn(
                    f"no more images are kept in {self._folder} ({error.strerror or error}); the "
                    f"others are decoded each time"
                )

    def _place(self, index: int) -> Path | None:
        """File of an image; None: it cannot be kept, or its own file is not there."""
        if not self._sizes_N2[index].all():
            return None
        path = self._records.path(index)
        try:
            identity = storage.identity_of(path)
        except OSError:
            return None
        if not identity.mark:  # its changes would not be noticed
            return None
        key = f"{_FORMAT}\0{self._reductions_N[index]} {identity.bytes} {identity.mark}\0"
        return place_of(self._folder, key + os.path.abspath(path))


def _pixels_of(index: int, image_HW3: np.ndarray, size_2: np.ndarray) -> memoryview:
    """Bytes of an image.  Raises: ValueError: it has another size."""
    if image_HW3.shape != (*size_2.tolist(), 3) or image_HW3.dtype != np.uint8:
        content = f"{image_HW3.shape} {image_HW3.dtype}"
        raise ValueError(f"image {index}: {content}: expected {size_2.tolist()}")
    return np.ascontiguousarray(image_HW3).reshape(-1).data


def open_cache(
    kind: Literal["none", "ram", "disk"],
    dataset: DetectionSet,
    reductions_N: np.ndarray,
    folder: str | Path | None = None,
) -> ImageCache | None:
    """Opens the cache of this host's ranks; logs its capacity.  Collective if kind is `ram`.

    Where memory or disk do not suffice for all images, the first that fit are kept, or none.

    Args:
        reductions_N: how far each image is reduced when it is decoded: 1, 2, 4, 8.
        folder: of `disk`; None: ppdist in $XDG_CACHE_HOME or ~/.cache.
    Returns: None where nothing can be kept.
    """
    if kind == "none":
        return None
    records = Records.of(dataset.records)
    reduced_N2 = -(-records.sizes_N2.astype(np.int64) // reductions_N.astype(np.int64)[:, None])
    if not reduced_N2.any():
        _warn("the annotations give no image sizes, so no image can be kept")
        return None
    try:
        if kind == "disk":
            place, least_free = _folder_on_disk(folder)
            return DiskCache(place, records, reductions_N, reduced_N2, least_free)
        layout = Layout.of(reduced_N2)
        opened = _of_first_on_host(lambda: _made_or_nothing(layout))
        return MemoryCache(opened.descriptor, layout, opened.kept) if opened.kept else None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _warn(f"training continues without it: {where}{error.strerror or error}")
        return None


def _folder_on_disk(folder: str | Path | None) -> tuple[Path, int]:
    """Folder of the images, and the bytes of its disk that stay free.

    Raises: OSError: it is not there and cannot be made.
    """
    parent = user_cache() if folder is None else Path(folder)
    if parent is None:
        raise OSError("this user has no home folder; set data.cache_dir")
    place = parent / "images"
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    room = _room(free)
    _say(f"disk: up to {room / _GIB:.2f} GiB more in {place}; delete it when no run needs it")
    return place, free - room


class _Opened(NamedTuple):
    """Memory of a cache.

    descriptor: of it, -1: none; kept: how many images it has room for.
    """

    descriptor: int
    kept: int


_NOTHING = _Opened(-1, 0)


def _made_or_nothing(layout: Layout) -> _Opened:
    """Takes the memory of a cache; nothing, with a warning, where that fails."""
    try:
        return _in_memory(layout)
    except OSError as error:
        _warn(f"training continues without it: {error.strerror or error}")
        return _NOTHING


def _of_first_on_host(begin: Callable[[], _Opened]) -> _Opened:
    """Runs `begin` on each host's first rank; the others open its memory.

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
    _say(f"ram: {_extent(layout, kept, most)}")
    if kept:
        return _Opened(descriptor, kept)
    os.close(descriptor)
    return _NOTHING


def _room(free: int) -> int:
    """Bytes a cache may take of the free ones."""
    return max(0, min(int(_SHARE * free), free - _SPARE))


def _extent(layout: Layout, kept: int, most: int) -> str:
    total = len(layout.places_N)
    if kept == total:
        return f"room for all {total} images, {layout.bytes / _GIB:.2f} GiB"
    return (
        f"room for {kept} of {total} images, because {layout.bytes / _GIB:.2f} GiB are needed and "
        f"{most / _GIB:.2f} GiB of memory can be spared; the others are decoded each time"
    )


def _say(text: str) -> None:
    _LOGGER.info("data.cache: %s", text)


def _warn(text: str) -> None:
    _LOGGER.warning("data.cache: %s", text)
