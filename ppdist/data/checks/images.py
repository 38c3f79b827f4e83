"""What each image file is, and which are equal.

Headers are read by threads.  Pixels are decoded in child processes: a decoder that crashes or hangs
takes no rank with it, and its file is named.  What no header tells, such as a damaged picture or
one that uses few of its 16 bits, the loader's workers find in training.
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

    size: (width, height) in pixels as annotated, None: not known.
    """

    path: str
    size: tuple[int, int] | None
    opener: Opener = DISK


class ImageCheck(NamedTuple):
    """What one file is.

    problem: why the image cannot be used; None: it can.
    notes: kinds of what is unusual.
    digest: equal for two files of the same content (decoded: surely; else: head, tail and length).
    certain: only for those, as it is of all bytes.
    passing: the problem may be gone the next time without a change to the file: no permission, no
        memory, a decoder that was killed.
    """

    problem: Damage | None = None
    notes: tuple[str, ...] = ()
    digest: str = ""
    passing: bool = False
    certain: bool = False


CheckedImages = Sequence[tuple[str, ImageCheck]]  # the path of each listed image, and what it is


def check_files(
    files: Sequence[ImageFile], *, decode: bool, workers: int, done: Callable[[int], object]
) -> list[ImageCheck]:
    """An ImageCheck of each file, in their order.

    Args:
        decode: all pixels, as `check_images`; else headers.  An image in a store is not opened for
            its header, which is half of the way to it: the store's listing has to do.
        workers: child processes that decode, at least 1.
        done: called with the number of files that have been checked since the last call.
    Raises: StorageError: a store stays away.
    """
    if decode:
        return check_images(files, workers=workers, done=done)

    def check_header(at: int) -> ImageCheck:
        file = files[at]
        if is_remote(file.path):
            return check_listed(file.path, file.opener)
        return check_image(file.path, file.size, decode=False, opener=file.opener)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of odd files
        return [*in_threads(check_header, len(files), done)]


T = TypeVar("T")
_THREADS = 16  # a network disk answers each request late, but many at once
_MOST_AT_ONCE = 64  # files of a thread at a time


def in_threads(look: Callable[[int], T], count: int, done: Callable[[int], object]) -> Iterator[T]:
    """Yields look(0), look(1), ..., in order, looked at by threads.

    Args: done: called with the number of those that have been looked at since the last call.
    """
    at_once = min(max(count // (8 * _THREADS), 1), _MOST_AT_ONCE)

    def look_at_some(begin: int) -> list[T]:
        return [*map(look, range(begin, min(count, begin + at_once)))]

    with ThreadPoolExecutor(_THREADS) as pool:
        for some in pool.map(look_at_some, range(0, count, at_once)):
            done(len(some))
            yield from some


def check_listed(path: str, opener: Opener) -> ImageCheck:
    """Check of an image by a store's listing, without opening it.

    It is there, and not empty.
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
    told = identity.mark and not is_in_shard(path)
    return ImageCheck(digest=f"{identity.bytes} {identity.mark}" if told else "")


def duplicates(images: CheckedImages, opener: Opener) -> dict[str, str]:
    """Path -> an earlier path with the same content."""
    result = {}
    for group in _same_content(images, opener):
        first, *others = dict.fromkeys(images[position][0] for position in group)
        result.update(dict.fromkeys(others, first))
    return result


def leaks(train: CheckedImages, val: CheckedImages, opener: Opener) -> dict[str, str]:
    """Path of each training image -> path of its duplicate in validation."""
    held = {path for path, _ in val}
    result = {path: path for path, _ in train if path in held}
    both = [*train, *val]
    for group in _same_content(both, opener):
        held_there = [both[position][0] for position in group if position >= len(train)]
        if held_there:
            for position in group:
                if position < len(train):
                    result.setdefault(both[position][0], held_there[0])
    return result


def same_list(train: CheckedImages, val: CheckedImages) -> bool:
    """Whether both splits list the same files, or duplicates of them.

    Then somebody over-fits on purpose, and nothing leaks.
    """
    return len(train) == len(val) and all(
        path == other or (found.digest != "" and found.digest == duplicate.digest)
        for (path, found), (other, duplicate) in zip(train, val)
    )


def _same_content(images: CheckedImages, opener: Opener) -> list[list[int]]:
    """Groups of positions with equal file content.

    Each group has two paths or more.
    """
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for position, (_, found) in enumerate(images):
        if found.digest and not (found.problem and found.problem.code == "image_empty"):
            alike[found.digest].append(position)
    groups: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
    for digest, positions in alike.items():
        if len({images[position][0] for position in positions}) > 1:
            for position in positions:
                path, check = images[position]
                groups[digest, b"" if check.certain else _hash(path, opener)].append(position)
    return [group for group in groups.values() if len({images[p][0] for p in group}) > 1]


def _hash(path: str, opener: Opener) -> bytes:
    try:
        with opener.open(path) as file:
            summary = hashlib.blake2b(digest_size=16)
            while block := file.read(1 << 20):
                summary.update(block)
            return summary.digest()
    except OSError:  # gone since it was checked
        return os.fsencode(path)


_AT_ONCE = 32  # files that a child is given at a time
_TRIES = 2  # a child that dies once may have been another's victim (out of memory)


def check_images(
    files: Sequence[ImageFile],
    *,
    workers: int,
    timeout: float = 60.0,
    done: Callable[[int], object] = lambda count: None,
) -> list[ImageCheck]:
    """An ImageCheck of each file, decoded, in their order.

    It comes however many children crash or hang over it.

    Args:
        workers: child processes, at least 1.
        timeout: seconds after which a child that is at one file counts as hung.
        done: see `check_files`.
    Raises: StorageError: a store stays away.
    """
    checks: list[ImageCheck | None] = [None] * len(files)
    waiting = deque(range(len(files)))
    crashes: Counter[int] = Counter()
    children = [_Child(files) for _ in range(min(max(workers, 1), -(-len(files) // 8)))]
    try:
        while any(child.busy for child in children) or waiting:
            for child in children:
                child.give(waiting)
            for position, found in _answers(children, timeout):
                checks[position] = found
                done(1)
            for number, child in enumerate(children):
                if child.ended is None:
                    continue
                position, *rest = child.busy
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
    return [found for found in checks if found is not None]


class _Child:
    """A process that checks files, and gives an answer for each."""

    def __init__(self, files: Sequence[ImageFile]) -> None:
        self.pipe, theirs = Pipe()
        self.busy: deque[int] = deque()
        self.since = time.monotonic()
        self.ended: Damage | None = None
        parent = os.getpid()
        self._process = ForkedChild(lambda: _serve(theirs, files, parent))
        theirs.close()

    def give(self, waiting: deque[int]) -> None:
        """Gives an idle worker the first of the queue."""
        if self.busy or self.ended or not waiting:
            return
        self.busy.extend(waiting.popleft() for _ in range(min(_AT_ONCE, len(waiting))))
        self.since = time.monotonic()
        try:
            self.pipe.send(list(self.busy))
        except OSError:  # it ended while it waited; take() will find out
            return

    def take(self) -> tuple[int, ImageCheck] | None:
        """An answer; None: a sign of life, or `ended` is set."""
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
        position, found = answer
        if isinstance(found, StorageError):
            raise found
        self.busy.popleft()
        return position, found

    def stop(self) -> None:
        self._process.end()
        self.pipe.close()


def _answers(children: list[_Child], timeout: float) -> Iterator[tuple[int, ImageCheck]]:
    """Yields results of the children, or notes one that hangs.

    A child is hung if it has been silent for longer than `timeout`.
    """
    ready = wait([child.pipe for child in children if child.busy], min(timeout, 1.0))
    for child in children:
        if child.pipe in ready:
            answer = child.take()
            if answer is not None:
                yield answer
        elif child.busy and time.monotonic() - child.since > timeout:
            child.ended = Damage("image_hangs_decoder", f"not decoded after {timeout:g} s")


def _serve(pipe: "Connection[Any, Any]", files: Sequence[ImageFile], parent: int) -> None:
    """Main loop of a child, until its parent is gone.

    It also stops within an image, which may never end.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its children
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what decoders print of damaged files
    warnings.simplefilter("ignore")
    cv2.setNumThreads(0)
    Image.MAX_IMAGE_PIXELS = None

    def pause(seconds: float, _: StorageError) -> None:
        pipe.send(None)  # a store is waited for longer than a child may be silent
        time.sleep(seconds)

    while os.getppid() == parent:
        if not pipe.poll(1.0):
            continue
        for position in pipe.recv():
            file = files[position]
            check = partial(check_image, file.path, file.size, decode=True, opener=file.opener)
            found: ImageCheck | StorageError
            try:
                found = with_retries(check, pause=pause)
            except StorageError as error:
                found = error
            pipe.send((position, found))


_HEAD, _TAIL = 64 * 1024, 8 * 1024  # bytes that a check of the header reads of a large file
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}  # of a JPEG, of a PNG


def check_image(
    path: str, size: tuple[int, int] | None, *, decode: bool, opener: Opener = DISK
) -> ImageCheck:
    """Checks one image file.

    Storage that is away says nothing of it.

    Args:
        size: (width, height) that the annotation says; None: not known.
        decode: all of its pixels; a decoder may crash or hang on it, so `check_images` calls this
            in a child process.  Else its header and its end (0.1 to 0.4 ms).
    Raises: StorageError: its store stays away.
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
    whole = decode or length <= _HEAD + _TAIL
    head = file.read() if whole else file.read(_HEAD)
    tail = b""
    if not whole:
        file.seek(length - _TAIL)
        tail = file.read()
        if _ENDS.get(head[:2], b"") not in tail:  # no end, or further from the file's than usual
            file.seek(0)
            whole, head, tail = True, file.read(), b""
    digest = hashlib.blake2b(b"%d " % length + head + tail, digest_size=16)
    problem = damage(head, length) if whole or head[:2] not in _ENDS else None
    if problem is not None:
        return ImageCheck(problem, digest=digest.hexdigest(), certain=whole)
    header = _header_of_jpeg(head, path) or _header(file, path, opener)
    notes = header.notes if header else ()
    if decode:
        problem, image_HW3 = _decoded(path, size, opener)
        if "sixteen_bit" in notes and image_HW3 is not None and is_dark(image_HW3):
            notes = (*notes, "dark_sixteen_bit")
    elif header is None:
        problem = _not_read(file, path)
    elif size and size not in header.sizes:
        (width, height), (says_width, says_height) = header.sizes[-1], size
        text = f"the image is {width}x{height} but its annotation says {says_width}x{says_height}"
        problem = Damage("size_mismatch", text)
    return ImageCheck(problem, notes, digest.hexdigest(), certain=whole)


def _not_read(file: BinaryIO, path: str) -> Damage | None:
    """Why OpenCV surely does not read a file whose header is not understood; None: it may."""

    def read(at: int, count: int) -> bytes:
        file.seek(at)
        return file.read(count)

    tiff = tiff_of(read)  # its header may lie at its end
    if tiff is not None and (kind := unread_pixels(tiff)):
        return Damage("pixel_kind", f"a TIFF of {kind}")
    if os.path.isfile(path) and not cv2.haveImageReader(path):
        return Damage("image_unreadable", "not an image, or damaged")
    return None


# Of formats, by their names in Pillow; an MPO is a JPEG with more pictures behind it.
_SUFFIXES = {**FORMATS, "MPO": FORMATS["JPEG"]}
_BITS_PER_SAMPLE = 258  # tag of TIFF: bits of each channel


class _Header(NamedTuple):
    """Checks an image without decoding it.

    sizes: each (width, height) for which training takes the image, if it can decode it.
    """

    sizes: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def _header_of_jpeg(head: bytes, path: str) -> _Header | None:
    """As `_header`, of the first bytes of a usual JPEG, in a sixth of the time; None: none."""
    usual = usual_jpeg(head, upright=True) if head.startswith(JPEG) else None
    if usual is None:
        return None
    height, width, channels = usual
    notes = [] if Path(path).suffix.lower() in FORMATS["JPEG"] else ["wrong_extension"]
    return _Header(((width, height),) * 2, (*notes, *["grey"][channels - 1 :]))


def _header(file: BinaryIO, path: str, opener: Opener) -> _Header | None:
    """Header of an image; None: not understood (OpenCV may understand it)."""
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
    except Exception:  # Pillow's own bugs on damaged files are of many types
        return None
    if frame is None:
        return None
    # OpenCV turns a TIFF even when asked not to.
    sizes = (frame.upright,) if tags else (frame.upright, frame.stored)
    return _Header(sizes, tuple(kind for kind, found in notes.items() if found))


# What libjpeg and libtiff print when they make up pixels; "extraneous bytes" does no harm.
_INVENTED = (b"premature end", b"bad Huffman", b"RST", b"Inconsistent progression", b"not yet in")


def _decoded(
    path: str, size: tuple[int, int] | None, opener: Opener
) -> tuple[Damage | None, np.ndarray | None]:
    """What makes an image unusable; else its pixels.

    Raises: OSError, MemoryError: it cannot be said.
    """
    with _stderr() as said:
        try:
            image_HW3 = read_image(path, None if size is None else size[::-1], opener=opener)
        except DataError as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                raise cause from None
            if isinstance(cause, cv2.error) and cause.code == cv2.Error.StsNoMem:
                raise MemoryError from error
            known = error.code in ("size_mismatch", "pixel_kind")
            return Damage(error.code if known else "image_unreadable", error.what), None
        said.seek(0)
        heard = said.read()
    if any(sign in heard for sign in _INVENTED):
        height, width = image_HW3.shape[:2]
        made_up = (
            f"pixel data of the {width}x{height} image is damaged; the decoder filled in a part"
        )
        return Damage("image_unreadable", made_up), None
    return None, image_HW3


@contextmanager
def _stderr() -> Iterator[BinaryIO]:
    """Sends what native libraries print inside to the file it yields."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)
