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
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from ppdist.common.files import replacing, user_cache
from ppdist.common.keyed_cache import place_of
from ppdist.common.machine import available_memory
from ppdist.common.opener import Opener
from ppdist.data.types import DetectionSet, Records
from ppdist.distributed import comm

_LOGGER = logging.getLogger("ppdist.data")
_FORMAT = f"ppdist image 1, OpenCV {cv2.__version__}"
_SHARE = 0.75  # of the memory or disk that is free at the start: training needs the rest
_SPARE = 2 << 30  # bytes to leave free in any case
_STEP = 256 << 20  # bytes reserved before looking again how much is left
_GIB = 2**30


class MemoryCache:
    """Images of a set, by position, in memory that the ranks of a host share.

    First a byte for each image that says whether it is there, then the images.  Pixels are written
    before that byte: what a killed process left half written counts as absent.
    """

    def __init__(self, descriptor: int, sizes_N2: np.ndarray, kept: int) -> None:
        """
        Args:
            descriptor: of memory of `places_of(sizes_N2)`, open for reading and writing; closed by
                the cache.
            sizes_N2: (height, width) of the images, 0 where not known: such are never kept.
            kept: so many images, from the first on, may be written.
        Raises: OSError: it cannot be mapped.
        """
        self._descriptor, self._sizes_N2, self._kept = descriptor, sizes_N2, kept
        self._places_N1 = places_of(sizes_N2)
        self._memory = mmap.mmap(descriptor, int(self._places_N1[-1]), prot=mmap.PROT_READ)
        self._is_there_N = np.frombuffer(self._memory, np.uint8, len(sizes_N2))

    def __del__(self) -> None:
        os.close(self._descriptor)

    def get(self, index: int) -> np.ndarray | None:
        """Cached image, uint8 RGB [H, W, 3], read-only; None: not there (yet)."""
        if not self._is_there_N[index]:
            return None
        height, width = self._sizes_N2[index].tolist()
        place = int(self._places_N1[index])
        pixels = np.frombuffer(self._memory, np.uint8, 3 * height * width, place)
        return pixels.reshape(height, width, 3)

    def put(self, index: int, image_HW3: np.ndarray) -> None:
        """Keeps an image that `get` has just not found, if there is room for it.

        Raises: ValueError: its size is not that of its record, reduced.
        """
        size_2 = self._sizes_N2[index]
        if index >= self._kept or not size_2.all():
            return
        pixels = _pixels_of(index, image_HW3, size_2)
        place = int(self._places_N1[index])
        while pixels:
            written = os.pwrite(self._descriptor, pixels, place)
            pixels, place = pixels[written:], place + written
        os.pwrite(self._descriptor, b"\1", index)


def places_of(sizes_N2: np.ndarray) -> np.ndarray:
    """Where each image begins behind N bytes, and at last the end of all: int64 [N + 1]."""
    return np.cumsum([len(sizes_N2), *(3 * sizes_N2.prod(axis=1)).tolist()])


class DiskCache:
    """Images as files of their pixels, `FOLDER/3f/3f9c...`, on a disk of this host.

    A name is a digest of the image's path and content identity (bytes, mtime, ctime) and of its
    reduction, so a file never holds another image; `of_stat` says why mtime alone is not enough.
    A file is written aside and renamed.  One that a power cut left shorter counts as absent.
    """

    def __init__(
        self,
        folder: Path,
        records: Records,
        reductions_N: np.ndarray,
        sizes_N2: np.ndarray,
        least_free: int,
        opener: Opener,
    ) -> None:
        """
        Args:
            sizes_N2: of the reduced images, 0 where not known: such are never kept.
            least_free: bytes of the disk that stay free.
            opener: of the images.
        """
        self._folder = folder
        self._records = records
        self._reductions_N = reductions_N
        self._sizes_N2 = sizes_N2
        self._least_free = least_free
        self._opener = opener
        self._absent: tuple[int, Path] | None = None  # what `get` did not find last
        self._full = mmap.mmap(-1, 1)  # all workers see that one of them found no room

    def get(self, index: int) -> np.ndarray | None:
        """As `MemoryCache.get`."""
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
        """As `MemoryCache.put`.

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
            identity = self._opener.identity_of(path)
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
) -> MemoryCache | DiskCache | None:
    """Opens the cache of this host's ranks; logs its capacity.  Collective if kind is `ram`.

    That on disk lies in $XDG_CACHE_HOME or ~/.cache, as all of this user's.
    Where memory or disk do not suffice for all images, the first that fit are kept, or none.

    Args:
        reductions_N: how far each image is reduced when it is decoded: 1, 2, 4, 8.
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
            place, least_free = _folder_on_disk()
            return DiskCache(place, records, reductions_N, reduced_N2, least_free, dataset.opener)
    except OSError as error:
        _warn_without(error)
        return None
    return _memory_of_host(reduced_N2)


def _folder_on_disk() -> tuple[Path, int]:
    """Folder of the images, and the bytes of its disk that stay free.

    Raises: OSError: it is not there and cannot be made.
    """
    parent = user_cache()
    if parent is None:
        raise OSError("this user has no home folder; set XDG_CACHE_HOME")
    place = parent / "images"
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    room = _room(free)
    _say(f"disk: up to {room / _GIB:.2f} GiB more in {place}; delete it when no run needs it")
    return place, free - room


def _memory_of_host(sizes_N2: np.ndarray) -> MemoryCache | None:
    """Memory that the first rank of this host takes, and the others open.  Collective.

    They reach it through the first rank's entry in /proc, which needs no name and no permission but
    that of the same user.
    """
    rank = comm.rank()
    cache: MemoryCache | None = None
    first = first_on_host() if comm.world_size() > 1 else rank
    own = comm.run_on_all_ranks(lambda: _take_memory(sizes_N2) if rank == first else (-1, 0))
    process, descriptor, kept = comm.all_gather_large_object([os.getpid(), *own])[first]
    if kept:
        try:
            if rank != first:
                descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
            cache = MemoryCache(descriptor, sizes_N2, kept)
        except OSError as error:
            _warn_without(error)
    comm.barrier()  # the first keeps it open until the others have it
    return cache


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


def _take_memory(sizes_N2: np.ndarray) -> tuple[int, int]:
    """Takes memory for as many images as fit; returns its descriptor and their number.

    It looks at what is left before every step, because a container that takes more than its limit
    does not see an allocation fail: a process in it is killed.

    Returns: -1, 0, and a line says why: there is none.
    """
    places_N1, room = places_of(sizes_N2), _room(available_memory())
    kept, count = int(np.searchsorted(places_N1[1:], room, side="right")), len(sizes_N2)
    wanted, needed = int(places_N1[kept]), int(places_N1[-1])
    _say(
        f"ram: room for {kept} of {count} images: {needed / _GIB:.2f} GiB are needed and "
        f"{room / _GIB:.2f} GiB of memory can be spared; the others are decoded each time"
        if kept < count
        else f"ram: room for all {count} images, {needed / _GIB:.2f} GiB"
    )
    if not kept:
        return -1, 0
    descriptor = -1
    try:
        descriptor = os.memfd_create("ppdist-images")
        os.truncate(descriptor, needed)
        for begin in range(0, wanted, _STEP):
            step = min(_STEP, wanted - begin)
            if available_memory() < step + _SPARE:
                raise OSError("something else takes the memory at the same time")
            os.posix_fallocate(descriptor, begin, step)
    except OSError as error:
        _warn_without(error)
        if descriptor >= 0:
            os.close(descriptor)
        return -1, 0
    return descriptor, kept


def _room(free: int) -> int:
    """Bytes a cache may take of the free ones."""
    return max(0, min(int(_SHARE * free), free - _SPARE))


def _say(text: str) -> None:
    _LOGGER.info("data.cache: %s", text)


def _warn(text: str) -> None:
    _LOGGER.warning("data.cache: %s", text)


def _warn_without(error: OSError) -> None:
    where = f"{error.filename}: " if error.filename else ""
    _warn(f"training continues without it: {where}{error.strerror or error}")
