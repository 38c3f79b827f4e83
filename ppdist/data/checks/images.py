"""Checks of image files, and groups of equal ones.

Threads read headers.  Child processes decode pixels: a decoder that crashes or hangs does not stop
its rank, and its file is named.  Defects that no header shows, such as damaged pixels or an image
that uses few of its 16 bits, are found by the workers of the loader during training.
"""

import hashlib
import os
import signal
import tempfile
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import cv2
import numpy as np
from PIL import Image, TiffImagePlugin

from ppdist.common.addresses import is_in_shard, is_remote
from ppdist.common.child import ForkedChild
from ppdist.common.errors import DataError, StorageError
from ppdist.common.opener import DISK, Opener
from ppdist.common.retry import with_retries
from ppdist.data.image import read_header, read_image
from ppdist.runtime.decoder import (
    FORMATS,
    JPEG,
    Damage,
    damage,
    is_dark,
    tiff_of,
    unread_pixels,
    usual_jpeg,
)


class ImageFile(NamedTuple):
    """An image file to check.

    size: (width, height) in pixels as annotated; None if unknown.
    """

    path: str
    size: tuple[int, int] | None
    opener: Opener = DISK


class ImageCheck(NamedTuple):
    """The result of checking one file.

    problem: why the image cannot be used; None if it can.
    notes: kinds of unusual properties.
    digest: equal for files of equal content; computed from all bytes, or from head, tail and
        length.
    certain: the digest was computed from all bytes.
    passing: the problem may disappear without a change of the file: no permission, no memory, a
        decoder that was killed.
    """

    problem: Damage | None = None
    notes: tuple[str, ...] = ()
    digest: str = ""
    passing: bool = False
    certain: bool = False


CheckedImages = Sequence[tuple[str, ImageCheck]]  # path and check of each listed image


def check_files(
    files: Sequence[ImageFile], *, decode: bool, workers: int, done: Callable[[int], object]
) -> list[ImageCheck]:
    """Checks each file; returns the checks in the order of the files.

    Args:
        decode: decodes all pixels, as `check_images` does; else reads headers.  An image in a store
            is then only looked up in a listing, as reading its header would take half as long as
            reading all of it.
        workers: child processes that decode, at least 1.
        done: called with the number of files that have been checked since the last call.
    Raises: StorageError: a store stays unavailable.
    """
    if decode:
        return check_images(files, workers=workers, done=done)

    def check_header(index: int) -> ImageCheck:
        file = files[index]
        if is_remote(file.path):
            return check_listing(file.path, file.opener)
        return check_image(file.path, file.size, decode=False, opener=file.opener)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Pillow about odd files
        return [*iterate_in_threads(check_header, len(files), done)]


T = TypeVar("T")
_THREADS = 16  # a network disk answers slowly, but many requests at once
_MOST_AT_ONCE = 64  # files of a thread at a time


def iterate_in_threads(
    function: Callable[[int], T], count: int, done: Callable[[int], object]
) -> Iterator[T]:
    """Yields function(0), function(1), ..., in order, computed by threads.

    Args: done: called with the number of results since the last call.
    """
    # Several at a time, as a task per file costs more than reading a header from a fast disk.
    batch = min(max(count // (8 * _THREADS), 1), _MOST_AT_ONCE)

    def call_batch(begin: int) -> list[T]:
        return [*map(function, range(begin, min(count, begin + batch)))]

    with ThreadPoolExecutor(_THREADS) as pool:
        for results in pool.map(call_batch, range(0, count, batch)):
            done(len(results))
            yield from results


def check_listing(path: str, opener: Opener) -> ImageCheck:
    """Checks an image using the listing of its store, without opening it.

    Finds out only whether it exists and is not empty.
    """
    try:
        identity = opener.identity_of(path)
    except FileNotFoundError:
        return ImageCheck(Damage("image_missing", "does not exist"), passing=True)
    except OSError as error:
        problem = Damage("image_unreadable", error.strerror or str(error))
        return ImageCheck(problem, passing=True)
    if not identity.bytes and identity.mark:
        return ImageCheck(Damage("image_empty", "empty (0 bytes)"))
    has_digest = identity.mark and not is_in_shard(path)
    return ImageCheck(digest=f"{identity.bytes} {identity.mark}" if has_digest else "")


def find_duplicates(images: CheckedImages, opener: Opener) -> dict[str, str]:
    """Finds images with equal content: path -> an earlier path with the same content."""
    result = {}
    for group in _group_by_content(images, opener):
        first, *repeated = dict.fromkeys(images[position][0] for position in group)
        result.update(dict.fromkeys(repeated, first))
    return result


def find_leaks(train: CheckedImages, val: CheckedImages, opener: Opener) -> dict[str, str]:
    """Finds training images that are also in validation: path -> path of the duplicate there."""
    held = {path for path, _ in val}
    result = {path: path for path, _ in train if path in held}
    images = [*train, *val]
    for group in _group_by_content(images, opener):
        held_paths = [images[position][0] for position in group if position >= len(train)]
        if held_paths:
            for position in group:
                if position < len(train):
                    result.setdefault(images[position][0], held_paths[0])
    return result


def are_same_lists(train: CheckedImages, val: CheckedImages) -> bool:
    """Returns True if both splits list the same files, or duplicates of them, in the same order.

    Then the user over-fits on purpose, and nothing counts as leaked.
    """
    return len(train) == len(val) and all(
        path == val_path or (check.digest != "" and check.digest == val_check.digest)
        for (path, check), (val_path, val_check) in zip(train, val)
    )


def _group_by_content(images: CheckedImages, opener: Opener) -> list[list[int]]:
    """Groups the positions of images with equal content; a group has at least two paths."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for position, (_, image_check) in enumerate(images):
        if image_check.digest and not (
            image_check.problem and image_check.problem.code == "image_empty"
        ):
            alike[image_check.digest].append(position)
    groups: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
    for digest, positions in alike.items():
        if len({images[position][0] for position in positions}) > 1:
            for position in positions:
                path, check = images[position]
                # Digests of head and tail may be equal for different images; then all bytes decide.
                groups[digest, b"" if check.certain else _hash_file(path, opener)].append(position)
    return [group for group in groups.values() if len({images[p][0] for p in group}) > 1]


def _hash_file(path: str, opener: Opener) -> bytes:
    try:
        with opener.open(path) as file:
            summary = hashlib.blake2b(digest_size=16)
            while block := file.read(1 << 20):
                summary.update(block)
            return summary.digest()
    except OSError:  # deleted since it was checked
        return os.fsencode(path)


_AT_ONCE = 32  # files that a child gets at a time
_TRIES = 2  # a child that died once may have been killed for the memory of another


def check_images(
    files: Sequence[ImageFile],
    *,
    workers: int,
    timeout: float = 60.0,
    done: Callable[[int], object] = lambda count: None,
) -> list[ImageCheck]:
    """Decodes and checks each file; returns the checks in the order of the files.

    Returns a check of every file, even if many children crash or hang.

    Args:
        workers: child processes, at least 1.
        timeout: seconds after which a child that is still checking the same file counts as hung.
        done: see `check_files`.
    Raises: StorageError: a store stays unavailable.
    """
    checks: list[ImageCheck | None] = [None] * len(files)
    waiting = deque(range(len(files)))
    crashes: Counter[int] = Counter()
    # At least eight files per child, as forking one takes longer than checking a few files.
    children = [_Child(files) for _ in range(min(max(workers, 1), -(-len(files) // 8)))]
    try:
        while any(child.busy for child in children) or waiting:
            for child in children:
                child.assign(waiting)
            for position, check in _receive_answers(children, timeout):
                checks[position] = check
                done(1)
            for number, child in enumerate(children):
                if child.ended is None:
                    continue
                position, *rest = child.busy
                # Only the first file was being decoded; the others are not to blame.
                waiting.extendleft(reversed(rest))
                crashes[position] += 1
                if child.ended.code == "image_hangs_decoder" or crashes[position] == _TRIES:
                    checks[position] = ImageCheck(child.ended, passing=True)
                else:
                    waiting.appendleft(position)
                child.stop()
                children[number] = _Child(files)
    finally:
        for child in children:
            child.stop()
    return [check for check in checks if check is not None]


class _Child:
    """A process that checks files, and answers for each of them."""

    def __init__(self, files: Sequence[ImageFile]) -> None:
        self.pipe, child_end = Pipe()
        self.busy: deque[int] = deque()
        self.since = time.monotonic()
        self.ended: Damage | None = None
        parent = os.getpid()
        self._process = ForkedChild(lambda: _serve(child_end, files, parent))
        child_end.close()

    def assign(self, waiting: deque[int]) -> None:
        """Gives the first files of the queue to an idle child."""
        if self.busy or self.ended or not waiting:
            return
        self.busy.extend(waiting.popleft() for _ in range(min(_AT_ONCE, len(waiting))))
        self.since = time.monotonic()
        try:
            self.pipe.send(list(self.busy))
        except OSError:  # it ended while it waited, which `receive` reports
            return

    def receive(self) -> tuple[int, ImageCheck] | None:
        """Receives an answer; None if it is only a sign of life, or if `ended` is set."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            code = self._process.end()
            how = f"ends the process with code {code}"
            if code is not None and code < 0:
                how = f"kills the process ({signal.Signals(-code).name})"
            self.ended = Damage("image_crashes_decoder", f"decoding it {how}")
            return None
        self.since = time.monotonic()
        if answer is None:
            return None
        position, check = answer
        if isinstance(check, StorageError):
            raise check
        self.busy.popleft()
        return position, check

    def stop(self) -> None:
        self._process.end()
        self.pipe.close()


def _receive_answers(children: list[_Child], timeout: float) -> Iterator[tuple[int, ImageCheck]]:
    """Yields results of the children; marks one that has been silent for `timeout` as hung."""
    ready = wait([child.pipe for child in children if child.busy], min(timeout, 1.0))
    for child in children:
        if child.pipe in ready:
            answer = child.receive()
            if answer is not None:
                yield answer
        elif child.busy and time.monotonic() - child.since > timeout:
            child.ended = Damage("image_hangs_decoder", f"not decoded after {timeout:g} s")


def _serve(pipe: "Connection[Any, Any]", files: Sequence[ImageFile], parent: int) -> None:
    """Runs a child until its parent ends.

    It also stops in the middle of an image, whose decoding may never end.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its children
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders print about damaged files
    warnings.simplefilter("ignore")
    cv2.setNumThreads(0)
    # `read_image` has a higher limit, MOST_PIXELS.
    Image.MAX_IMAGE_PIXELS = None

    def pause(seconds: float, _: StorageError) -> None:
        pipe.send(None)  # waiting for a store may take longer than a child may be silent
        time.sleep(seconds)

    while os.getppid() == parent:
        if not pipe.poll(1.0):
            continue
        for position in pipe.recv():
            file = files[position]
            check = partial(check_image, file.path, file.size, decode=True, opener=file.opener)
            result: ImageCheck | StorageError
            try:
                result = with_retries(check, pause=pause)
            except StorageError as error:
                result = error
            pipe.send((position, result))


_HEAD, _TAIL = 64 * 1024, 8 * 1024  # bytes of a large file that a check of its header reads
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}  # start -> end of JPEG, PNG


def check_image(
    path: str, size: tuple[int, int] | None, *, decode: bool, opener: Opener = DISK
) -> ImageCheck:
    """Checks one image file.

    Unavailable storage is no property of the image.

    Args:
        size: (width, height) as annotated; None if unknown.
        decode: decodes its pixels, on which a decoder may crash or hang, so `check_images` calls
            this in a child process.  Else reads its header and its end (0.1 to 0.4 ms).
    Raises: StorageError: its store stays unavailable.
    """
    try:
        with opener.open(path) as file:
            return _check_content(file, path, size, decode, opener)
    except FileNotFoundError:
        problem = Damage("image_missing", "does not exist")
    except OSError as error:
        problem = Damage("image_unreadable", error.strerror or str(error))
    except MemoryError:
        problem = Damage("image_unreadable", "not enough memory to decode it")
    return ImageCheck(problem, passing=True)


def _check_content(
    file: BinaryIO, path: str, size: tuple[int, int] | None, decode: bool, opener: Opener
) -> ImageCheck:
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    is_complete = decode or length <= _HEAD + _TAIL
    head = file.read() if is_complete else file.read(_HEAD)
    tail = b""
    if not is_complete:
        file.seek(length - _TAIL)
        tail = file.read()
        if _ENDS.get(head[:2], b"") not in tail:  # no end, or not near the end of the file
            file.seek(0)
            is_complete, head, tail = True, file.read(), b""
    digest = hashlib.blake2b(b"%d " % length + head + tail, digest_size=16)
    problem = damage(head, length) if is_complete or head[:2] not in _ENDS else None
    if problem is not None:
        return ImageCheck(problem, digest=digest.hexdigest(), certain=is_complete)
    header = _jpeg_header(head, path) or _pillow_header(file, path, opener)
    notes = header.notes if header else ()
    if decode:
        problem, image_HW3 = _decode_checked(path, size, opener)
        if "sixteen_bit" in notes and image_HW3 is not None and is_dark(image_HW3):
            notes = (*notes, "dark_sixteen_bit")
    elif header is None:
        problem = _find_unreadable(file, path)
    elif size and size not in header.sizes:
        (width, height), (says_width, says_height) = header.sizes[-1], size
        text = f"the image is {width}x{height} but its annotation says {says_width}x{says_height}"
        problem = Damage("size_mismatch", text)
    return ImageCheck(problem, notes, digest.hexdigest(), certain=is_complete)


def _find_unreadable(file: BinaryIO, path: str) -> Damage | None:
    """Returns why OpenCV cannot read a file without a usable header; None if it may be able to."""

    def read(offset: int, count: int) -> bytes:
        file.seek(offset)
        return file.read(count)

    tiff = tiff_of(read)  # its header may be at its end
    if tiff is not None and (kind := unread_pixels(tiff)):
        return Damage("pixel_kind", f"a TIFF of {kind}")
    if os.path.isfile(path) and not cv2.haveImageReader(path):
        return Damage("image_unreadable", "not an image, or damaged")
    return None


# Keyed by Pillow's format name; an MPO is a JPEG followed by further images.
_SUFFIXES = {**FORMATS, "MPO": FORMATS["JPEG"]}
_BITS_PER_SAMPLE = 258  # tag of TIFF: bits of each channel


class _Header(NamedTuple):
    """The header of an image, read without decoding it.

    sizes: the annotated (width, height) with which training accepts the image.
    """

    sizes: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def _jpeg_header(head: bytes, path: str) -> _Header | None:
    """Reads the header from the first bytes of a usual JPEG, six times as fast as `_pillow_header`.

    Returns: None if the file is not a usual JPEG.
    """
    usual = usual_jpeg(head, upright=True) if head.startswith(JPEG) else None
    if usual is None:
        return None
    height, width, channels = usual
    notes = [] if Path(path).suffix.lower() in FORMATS["JPEG"] else ["wrong_extension"]
    return _Header(((width, height),) * 2, (*notes, *["grey"][channels - 1 :]))


def _pillow_header(file: BinaryIO, path: str, opener: Opener) -> _Header | None:
    """Reads the header of an image; None if Pillow does not understand it, though OpenCV may."""
    frame = read_header(path, opener)
    try:
        file.seek(0)
        first = file.read(26)
        file.seek(0)
        with Image.open(file) as image:
            tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
            bits = tags.get(_BITS_PER_SAMPLE, ())
            sixteen = first.startswith(b"\x89PNG") and first[24] == 16
            mode, suffix = image.mode, Path(path).suffix.lower()
            notes = {
                "wrong_extension": suffix not in _SUFFIXES.get(image.format or "", (suffix,)),
                "exif_orientation": frame is not None and frame.orientation != 1,
                "grey": mode in ("1", "L", "LA") or mode.startswith("I"),
                "alpha": mode in ("LA", "PA", "RGBA") or "transparency" in image.info,
                "sixteen_bit": sixteen or 16 in bits or mode.startswith("I;16"),
                "cmyk": mode == "CMYK",
            }
    except Exception:  # Pillow raises errors of many types for damaged files
        return None
    if frame is None:
        return None
    # OpenCV turns a TIFF even when asked not to.
    sizes = (frame.upright,) if tags else (frame.upright, frame.stored)
    return _Header(sizes, tuple(kind for kind, applies in notes.items() if applies))


# Parts of what libjpeg and libtiff print when they invent pixels; "extraneous bytes" is harmless.
_INVENTED = (b"premature end", b"bad Huffman", b"RST", b"Inconsistent progression", b"not yet in")


def _decode_checked(
    path: str, size: tuple[int, int] | None, opener: Opener
) -> tuple[Damage | None, np.ndarray | None]:
    """Decodes an image and checks that the decoder did not invent pixels.

    Returns: (problem, None) or (None, pixels).
    Raises: OSError, MemoryError: the state of the image is unknown.
    """
    # Native libraries report invented pixels nowhere else.
    with _capture_stderr() as stderr_file:
        try:
            image_HW3 = read_image(path, None if size is None else size[::-1], opener=opener)
        except DataError as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                raise cause from None
            if isinstance(cause, cv2.error) and cause.code == cv2.Error.StsNoMem:
                raise MemoryError from error
            has_own_code = error.code in ("size_mismatch", "pixel_kind")
            return Damage(error.code if has_own_code else "image_unreadable", error.what), None
        stderr_file.seek(0)
        stderr = stderr_file.read()
    if any(sign in stderr for sign in _INVENTED):
        height, width = image_HW3.shape[:2]
        message = (
            f"pixel data of the {width}x{height} image is damaged; the decoder filled in a part"
        )
        return Damage("image_unreadable", message), None
    return None, image_HW3


@contextmanager
def _capture_stderr() -> Iterator[BinaryIO]:
    """Redirects what native libraries print to the file that it yields."""
    original = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(original, 2)
            os.close(original)
