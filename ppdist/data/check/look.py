"""One image file, looked at: can it be used, and what is unusual about it."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import cv2
from PIL import Image, TiffImagePlugin

from ppdist.data.containers import Damage, damage
from ppdist.data.formats.frame import read_frame
from ppdist.data.images import read_image
from ppdist.errors import DataError

_HEAD, _TAIL = 64 * 1024, 8 * 1024  # bytes that a look at the header reads of a large file
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg"),
    "MPO": (".jpg", ".jpeg"),  # a JPEG with more pictures behind it, of some cameras
    "PNG": (".png",),
    "BMP": (".bmp",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
}
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}  # of a JPEG, of a PNG
# What libjpeg and libtiff print when they make up pixels; "extraneous bytes" does no harm.
_INVENTED = (b"premature end", b"bad Huffman", b"RST", b"Inconsistent progression", b"not yet in")
# Tags of TIFF: bits of each channel; where strips and tiles of pixels begin, and their bytes.
_BITS_PER_SAMPLE, _BEGINNINGS, _BYTES = 258, (273, 324), (279, 325)


class Look(NamedTuple):
    """What one file is.

    problem: a kind of findings.KINDS and the sentence for the user, of an image that cannot be
        used; ("", "") else.
    notes: kinds of what is unusual.
    digest: equal for two files of the same content (decoded: surely; else: head, tail and length).
    passing: the problem may be gone the next time without a change to the file: no permission, no
        memory, a decoder that was killed.
    """

    problem: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = ()
    digest: str = ""
    passing: bool = False


def look(path: str, size: tuple[int, int] | None, *, decode: bool) -> Look:
    """Looks at one image file; never raises because of it.

    A decoder may crash on it or not come back: `scan` calls this in a child process.

    Args:
        size: (width, height) that the annotation says; None: not known.
        decode: all of its pixels; else its header and its end (0.1 to 0.4 ms), and
            all of it where these say that it cannot be used: the decoder has the last word.
    """
    try:
        with open(path, "rb") as file:
            return _look(file, path, size, decode)
    except FileNotFoundError:
        return Look(("image_missing", f"{path}: does not exist"), passing=True)
    except OSError as error:
        return Look(("image_unreadable", f"{path}: {error.strerror or error}"), passing=True)
    except MemoryError:
        text = f"{path}: not enough memory to decode it"
        return Look(("image_unreadable", text), passing=True)


def _look(file: BinaryIO, path: str, size: tuple[int, int] | None, decode: bool) -> Look:
    length = os.fstat(file.fileno()).st_size
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
    found = damage(head, length) if whole or head[:2] not in _ENDS else None
    if found is not None:
        return Look((found.code, f"{path}: {found.text}"), (), digest.hexdigest())
    header = _header(file, path, length)
    doubtful = header is None or header.cut_short or (size and size not in header.sizes)
    found = _decoded(path, size) if decode or doubtful else None
    problem = ("", "") if found is None else (found.code, found.text)
    return Look(problem, header.notes if header else (), digest.hexdigest())


class _Header(NamedTuple):
    """sizes: each (width, height) for which training surely takes the image, if it can decode it.
    cut_short: pixels should lie beyond the end of the file."""

    sizes: tuple[tuple[int, int], ...]
    cut_short: bool
    notes: tuple[str, ...]


def _header(file: BinaryIO, path: str, length: int) -> _Header | None:
    """What is said without decoding; None: it cannot be understood so (OpenCV may)."""
    frame = read_frame(path)
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
            cut_short = any(
                begin + count > length
                for begins, counts in zip(_BEGINNINGS, _BYTES)
                for begin, count in zip(tags.get(begins, ()), tags.get(counts, ()))
            )
    except Exception:  # Pillow's own bugs on damaged files are of many types
        return None
    if frame is None:
        return None
    # OpenCV turns a TIFF even when asked not to.
    sizes = (frame.upright,) if tags else (frame.upright, frame.stored)
    return _Header(sizes, cut_short, tuple(kind for kind, found in notes.items() if found))


def _decoded(path: str, size: tuple[int, int] | None) -> Damage | None:
    """Raises: OSError, MemoryError: it cannot be said."""
    with _stderr() as said:
        try:
            image_HW3 = read_image(path, None if size is None else size[::-1])
        except DataError as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                raise cause from None
            if isinstance(cause, cv2.error) and cause.code == cv2.Error.StsNoMem:
                raise MemoryError from error
            mismatch = error.code == "size_mismatch"
            return Damage("size_mismatch" if mismatch else "image_unreadable", str(error))
        said.seek(0)
        heard = said.read()
    if any(sign in heard for sign in _INVENTED):
        height, width = image_HW3.shape[:2]
        return Damage(
            "image_unreadable",
            f"{path}: damaged amid its {width}x{height} pixels, which the decoder partly made up",
        )
    return None


@contextmanager
def _stderr() -> Iterator[BinaryIO]:
    """What native libraries print inside goes to the file that is given."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)
