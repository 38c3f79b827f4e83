"""Caches of decoded images, for all workers and ranks of a host.

    ram    anonymous memory (memfd_create): it does not count against /dev/shm, and is freed with
           the last process that has it open, however that one ends
    disk   a file for each image, also for later runs

A cache changes no pixel, and its failure is never an error: an image that is not in it is decoded.
Two processes that store the same image at once write the same bytes, so no lock is needed.
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
_MAX_SHARE = 0.75  # share of the memory or disk free at the start; training needs the rest
_SPARE = 2 << 30  # bytes to leave free in any case
_STEP_BYTES = 256 << 20  # bytes reserved before looking again how much is left
_GIB = 2**30


class MemoryCache:
    """A cache of the images of a set, by position, in memory that the ranks of a host share.

    The memory begins with one byte per image, 1 if the image is there; the images follow.  Pixels
    are written before that byte, so an image that a killed process has half written counts as
    absent.
    """

    def __init__(self, descriptor: int, sizes_N2: np.ndarray, capacity: int) -> None:
        """Maps the memory.

        Args:
            descriptor: file descriptor of memory laid out by `image_offsets(sizes_N2)`, open for
                reading and writing; the cache closes it.
            sizes_N2: (height, width) of the images, 0 if unknown: those are never cached.
            capacity: only the first `capacity` images may be written.
        Raises: OSError: it cannot be mapped.
        """
        self._descriptor, self._sizes_N2, self._capacity = descriptor, sizes_N2, capacity
        self._offsets_N1 = image_offsets(sizes_N2)
        self._memory = mmap.mmap(descriptor, int(self._offsets_N1[-1]), prot=mmap.PROT_READ)
        self._is_there_N = np.frombuffer(self._memory, np.uint8, len(sizes_N2))

    def __del__(self) -> None:
        os.close(self._descriptor)

    def get(self, index: int) -> np.ndarray | None:
        """Returns a cached image, uint8 RGB [H, W, 3], read-only; None if not cached yet."""
        if not self._is_there_N[index]:
            return None
        height, width = self._sizes_N2[index].tolist()
        offset = int(self._offsets_N1[index])
        pixels = np.frombuffer(self._memory, np.uint8, 3 * height * width, offset)
        return pixels.reshape(height, width, 3)

    def put(self, index: int, image_HW3: np.ndarray) -> None:
        """Stores an image for which `get` has just returned None, if there is room for it.

        Raises: ValueError: its size is not the reduced size of its record.
        """
        size_2 = self._sizes_N2[index]
        if index >= self._capacity or not size_2.all():
            return
        pixels = _image_bytes(index, image_HW3, size_2)
        offset = int(self._offsets_N1[index])
        # One call may write only part of the data.
        while pixels:
            written = os.pwrite(self._descriptor, pixels, offset)
            pixels, offset = pixels[written:], offset + written
        # Set last, so that no other process sees an image before all of its pixels are written.
        os.pwrite(self._descriptor, b"\1", index)


def image_offsets(sizes_N2: np.ndarray) -> np.ndarray:
    """Computes the offset of each image in memory, and the total size, in bytes: int64 [N + 1].

    The images follow a block of N bytes; see `MemoryCache`.
    """
    return np.cumsum([len(sizes_N2), *(3 * sizes_N2.prod(axis=1)).tolist()])


class DiskCache:
    """A cache of images as files of their pixels, `FOLDER/3f/3f9c...`, on a disk of this host.

    A name is a digest of the image's path and content identity (bytes, mtime, ctime) and of its
    reduction, so a file never holds another image; `of_stat` says why mtime alone is not enough.
    Files are written under another name, then renamed.  One that a power cut has shortened counts
    as absent.
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
        """Creates a cache in a folder that exists.

        Args:
            reductions_N: of each image when it is decoded: 1, 2, 4, 8.
            sizes_N2: (height, width) of the reduced images, 0 if unknown: those are never cached.
            least_free: bytes that must stay free on the disk.
            opener: of the images.
        """
        self._folder = folder
        self._records = records
        self._reductions_N = reductions_N
        self._sizes_N2 = sizes_N2
        self._least_free = least_free
        self._opener = opener
        self._absent: tuple[int, Path] | None = None  # the image that `get` missed last
        self._full = mmap.mmap(-1, 1)  # shared: tells all workers that the disk is full

    def get(self, index: int) -> np.ndarray | None:
        """Returns a cached image, as `MemoryCache.get` does."""
        path = self._path_of(index)
        self._absent = None if path is None else (index, path)
        if path is None:
            return None
        try:
            pixels = np.fromfile(path, np.uint8)
        except OSError:  # missing, or its disk is unavailable
            return None
        height, width = self._sizes_N2[index].tolist()
        if pixels.size != 3 * height * width:
            return None
        # Read-only as from memory: a transform that writes in place must fail with any kind of
        # cache.
        pixels.flags.writeable = False
        return pixels.reshape(height, width, 3)

    def put(self, index: int, image_HW3: np.ndarray) -> None:
        """Stores an image for which `get` has just returned None, as `MemoryCache.put` does.

        If the disk is full, a rank logs one line, and it and its workers stop writing.
        """
        # The cache name was computed before the file was read; the file may have been replaced
        # since.
        if self._full[0] or self._absent is None or self._absent[0] != index:
            return
        pixels, path = _image_bytes(index, image_HW3, self._sizes_N2[index]), self._absent[1]
        try:
            if shutil.disk_usage(self._folder).free < self._least_free + len(pixels):
                raise OSError(f"{self._least_free / _GIB:.2f} GiB of its disk stay free")
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(pixels)
        except OSError as error:
            was_full, self._full[0] = self._full[0], 1
            if not was_full:
                _warn(
                    f"no more images are kept in {self._folder} ({error.strerror or error}); the "
                    f"others are decoded each time"
                )

    def _path_of(self, index: int) -> Path | None:
        """Returns the path of an image in the cache; None: it cannot be cached."""
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


def _image_bytes(index: int, image_HW3: np.ndarray, size_2: np.ndarray) -> memoryview:
    """Returns the bytes of an image.  Raises: ValueError: its size is wrong."""
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

    The disk cache is below $XDG_CACHE_HOME or ~/.cache.  If memory or disk do not suffice for all
    images, the first that fit are cached, or none.

    Args:
        reductions_N: the reduction of each image when it is decoded: 1, 2, 4, 8.
    Returns: None if nothing can be cached.
    """
    if kind == "none":
        return None
    records = Records.of(dataset.records)
    # Rounded up, as `read_image` reduces.
    reduced_N2 = -(-records.sizes_N2.astype(np.int64) // reductions_N.astype(np.int64)[:, None])
    if not reduced_N2.any():
        _warn("the annotations give no image sizes, so no image can be kept")
        return None
    try:
        if kind == "disk":
            folder, least_free = _make_disk_folder()
            return DiskCache(folder, records, reductions_N, reduced_N2, least_free, dataset.opener)
    except OSError as error:
        _warn_no_cache(error)
        return None
    return _open_host_memory(reduced_N2)


def _make_disk_folder() -> tuple[Path, int]:
    """Creates the folder of the cached images.

    Returns: the folder, and the bytes of its disk that stay free.
    Raises: OSError: the folder cannot be created.
    """
    parent = user_cache()
    if parent is None:
        raise OSError("this user has no home folder; set XDG_CACHE_HOME")
    folder = parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    usable = _usable_bytes(free)
    _log(f"disk: up to {usable / _GIB:.2f} GiB more in {folder}; delete it when no run needs it")
    return folder, free - usable


def _open_host_memory(sizes_N2: np.ndarray) -> MemoryCache | None:
    """Allocates memory on this host's first rank, and opens it on the others.  Collective.

    They open it through the entry of the first rank in /proc, which needs no name and only the
    permissions of the same user.
    """
    rank = comm.rank()
    cache: MemoryCache | None = None
    first = first_on_host() if comm.world_size() > 1 else rank
    memory = comm.run_on_all_ranks(lambda: _take_memory(sizes_N2) if rank == first else (-1, 0))
    process, descriptor, capacity = comm.all_gather_large_object([os.getpid(), *memory])[first]
    if capacity:
        try:
            if rank != first:
                descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
            cache = MemoryCache(descriptor, sizes_N2, capacity)
        except OSError as error:
            _warn_no_cache(error)
    comm.barrier()  # the first rank keeps it open until the others have opened it
    return cache


def first_on_host(group: str = "") -> int:
    """Returns the first rank whose open files this one can open.  Collective.

    Args: group: only ranks of the same group are considered.
    """
    hosts_W = comm.all_gather_object([_host_name(), group])
    return hosts_W.index(hosts_W[comm.rank()])


def _host_name() -> str:
    """Returns a name that processes which see one another in /proc share.

    If it is unknown, each process gets a name of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        # The namespace, too: containers on one machine share its boot id, but not /proc.
        return f"{boot.strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        _warn(
            f"which ranks share this machine cannot be told ({error.filename}: {error.strerror}); "
            f"each makes its own"
        )
        return f"rank {comm.rank()}"


def _take_memory(sizes_N2: np.ndarray) -> tuple[int, int]:
    """Allocates memory for as many images as fit.

    Checks the free memory before every step: in a container that exceeds its limit no allocation
    fails, but a process is killed.

    Returns: its descriptor and the number of images; -1, 0 and a logged reason if there is none.
    """
    offsets_N1, usable = image_offsets(sizes_N2), _usable_bytes(available_memory())
    capacity, count = int(np.searchsorted(offsets_N1[1:], usable, side="right")), len(sizes_N2)
    wanted, needed = int(offsets_N1[capacity]), int(offsets_N1[-1])
    _log(
        f"ram: room for {capacity} of {count} images: {needed / _GIB:.2f} GiB are needed and "
        f"{usable / _GIB:.2f} GiB of memory can be spared; the others are decoded each time"
        if capacity < count
        else f"ram: room for all {count} images, {needed / _GIB:.2f} GiB"
    )
    if not capacity:
        return -1, 0
    descriptor = -1
    try:
        descriptor = os.memfd_create("ppdist-images")
        # The address range covers all images, but only the first ones get memory.
        os.truncate(descriptor, needed)
        for begin in range(0, wanted, _STEP_BYTES):
            step = min(_STEP_BYTES, wanted - begin)
            if available_memory() < step + _SPARE:
                raise OSError("something else takes the memory at the same time")
            # Reserves memory: after `truncate` alone a later write may get the process killed.
            os.posix_fallocate(descriptor, begin, step)
    except OSError as error:
        _warn_no_cache(error)
        if descriptor >= 0:
            os.close(descriptor)
        return -1, 0
    return descriptor, capacity


def _usable_bytes(free: int) -> int:
    """Returns how many of the free bytes a cache may take."""
    return max(0, min(int(_MAX_SHARE * free), free - _SPARE))


def _log(text: str) -> None:
    _LOGGER.info("data.cache: %s", text)


def _warn(text: str) -> None:
    _LOGGER.warning("data.cache: %s", text)


def _warn_no_cache(error: OSError) -> None:
    prefix = f"{error.filename}: " if error.filename else ""
    _warn(f"training continues without it: {prefix}{error.strerror or error}")
