"""Pictures to pixels as uint8 RGB, by one rule; headers of files.

    read_image, decode_image     a file, or its bytes
    of_array, of_pillow          what Python holds

Grey becomes three equal channels, of 16 bits the upper 8 count, transparency is ignored, and EXIF
alone says how a picture is turned.  `ppdist.runtime.decoder` looks at the structure of a
file before a decoder sees it.
"""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cv2
import numpy as np
from PIL import BmpImagePlugin, ExifTags, Image, JpegImagePlugin, TiffImagePlugin, WebPImagePlugin
from PIL.Image import Transpose

from ppdist.common.errors import DataError, StorageError
from ppdist.common.opener import DISK, Opener
from ppdist.runtime.decoder import (
    BMP,
    IMAGE_SUFFIXES,
    JPEG,
    MOST_BYTES,
    MOST_PIXELS,
    PNG,
    WEBP,
    damage,
    decode,
    has_sixteen_bits,
    is_dark,
    tiff_of,
    unread_pixels,
)


def is_image_name(name: str) -> bool:
    """Whether a file name is an image's, and not hidden like `._a.jpg`."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


DARK = (
    "an image with 16 bits per channel uses 14 of them or fewer (perhaps 12); only the upper 8 are "
    "read, so it looks nearly black; scale its values so that white is near 65535"
)


def read_image(
    path: str | Path,
    size: tuple[int, int] | None = None,
    reduced: int = 1,
    note_dark: Callable[[], None] = lambda: None,
    opener: Opener = DISK,
) -> np.ndarray:
    """Reads an image upright by EXIF, as uint8 RGB [H, W, 3].

    `decode` says what its pixels become.  Pixels that a cut file lacks are never made up; damage
    amid a JPEG shows in its picture alone, and `ppdist.data.checks.images` finds it.

    Args:
        size: the (height, width) it must have; an image that has it without being turned stays.
        reduced: 2, 4, 8: a half, quarter or eighth of each side, rounded up.  A JPEG is decoded so,
            which is three times as fast and averages the pixels left out.
        note_dark: called where DARK holds, which no header tells.
        opener: of the file; see `DetectionSet`.
    Raises: DataError: absent, unreadable, damaged, cut short, of more than MOST_PIXELS, or of
        another size (within `reduced` pixels).
    """
    content = read_content(path, opener)
    found = damage(content)
    if found is not None:
        raise DataError(found.text, code=found.code, where=str(path))
    if reduced > 1 and content.startswith(JPEG) and not _turns_unnoticed(size, reduced):
        image_HW3 = _decode(path, content, reduced)
        if size is None or image_HW3.shape[:2] == _reduced_size(size, reduced):
            return image_HW3
    image_HW3 = _decode(path, content)
    if size is not None and image_HW3.shape[:2] != size:
        image_HW3 = _decode(path, content, upright=False)
    height, width = image_HW3.shape[:2]
    if size is not None and (height, width) != size:
        raise DataError(
            f"the image is {width}x{height} but its annotation says {size[1]}x{size[0]}",
            code="size_mismatch",
            where=str(path),
        )
    if has_sixteen_bits(content) and is_dark(image_HW3):
        note_dark()
    if reduced > 1:
        height, width = _reduced_size((height, width), reduced)
        image_HW3 = cv2.resize(image_HW3, (width, height), interpolation=cv2.INTER_AREA)
    return image_HW3


def decode_image(content: bytes, name: str) -> np.ndarray:
    """The image in these bytes of a file, as `read_image` gives it.

    Raises: DataError: not an image, damaged, cut short, or of more than MOST_PIXELS.
    """
    found = damage(content)
    if found is not None:
        raise DataError(found.text, code=found.code, where=name)
    return _decode(name, content)


def of_array(array: np.ndarray) -> np.ndarray:
    """Converts an array to uint8 RGB [H, W, 3], copied if necessary.

    Args: array: uint8 or uint16 [H, W] or [H, W, C]: C of grey 1 or 2, of RGB 3 or 4.
    Raises: DataError: of another type or shape.
    """
    image = array[:, :, None] if array.ndim == 2 else array
    if image.ndim != 3 or not image.size or not 1 <= image.shape[2] <= 4:
        fitting = False
    else:
        fitting = image.dtype in (np.uint8, np.uint16) or image.dtype == np.dtype(">u2")
    if not fitting:
        raise DataError(
            f"an array of {array.dtype} {list(array.shape)}; expected uint8 [height, width, 3], "
            "RGB",
            code="image_array",
            fix="for OpenCV's BGR: image[:, :, ::-1]; for values from 0 to 1: "
            "(image * 255).astype('uint8')",
        )
    image = image[:, :, :1] if image.shape[2] < 3 else image[:, :, :3]
    if image.dtype != np.uint8:
        image = (image >> 8).astype(np.uint8)
    return image if image.shape[2] == 3 else np.repeat(image, 3, axis=2)


# Pillow modes that are not colours of 8 or 16 bits, and their meaning.
_PILLOW_KINDS = {"F": "float numbers", "I": "32-bit integers", "LAB": "CIELAB colours"}
# Modes that Pillow does not turn into RGB at once.
_PILLOW_STEPS = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA", "1": "L"}
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}  # fmt: skip


def of_pillow(picture: Image.Image) -> np.ndarray:
    """Converts a Pillow image to the pixels `read_image` gives.

    Raises: DataError: of another kind of pixels, of more than MOST_PIXELS, or damaged.
    """
    if picture.width * picture.height > MOST_PIXELS:
        raise DataError(
            f"{picture.width}x{picture.height} pixels, more than {MOST_PIXELS}",
            code="image_unreadable",
            fix="cut it into tiles",
        )
    try:
        picture.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{error}", code="image_unreadable", where=_name_of(picture)) from error
    turn = _TURNS.get(_orientation(picture.info.get("exif", b"")))
    if turn is not None and not isinstance(picture, TiffImagePlugin.TiffImageFile):  # turned it
        picture = picture.transpose(turn)
    mode, of_16_bits = picture.mode, picture.format in ("PNG", "PPM")  # older Pillows: mode I
    if mode in _PILLOW_KINDS and not (mode == "I" and of_16_bits):
        raise DataError(
            f"a Pillow image with {_PILLOW_KINDS[mode]} (mode {mode})",
            code="pixel_kind",
            where=_name_of(picture),
            fix="choose the black and white values, then convert it to mode L or RGB",
        )
    if mode.startswith("I"):
        return of_array(np.asarray(picture).astype(np.uint16))
    if mode == "CMYK" and picture.format in ("JPEG", "MPO"):
        return _of_cmyk(np.asarray(picture))
    if mode in _PILLOW_STEPS:
        picture = picture.convert(_PILLOW_STEPS[mode])
    return np.array(picture.convert("RGB"))


def _of_cmyk(image_HW4: np.ndarray) -> np.ndarray:
    """Converts CMYK to RGB as OpenCV does for JPEG.

    libtiff converts CMYK TIFFs as Pillow does.
    """
    ink_HW3, white_HW1 = image_HW4[:, :, :3].astype(np.uint16), 255 - image_HW4[:, :, 3:]
    return (white_HW1 - (ink_HW3 * white_HW1 >> 8)).astype(np.uint8)


def _name_of(picture: Image.Image) -> str:
    return str(getattr(picture, "filename", "") or "a picture of Pillow")


def reduction(scale: float) -> int:
    """Reduction (1, 2, 4 or 8) for an image shown at `scale`.

    Args: scale: shown size / size of the image.
    """
    return next((factor for factor in (8, 4, 2) if factor * scale <= 1), 1)


def _reduced_size(size: tuple[int, int], factor: int) -> tuple[int, int]:
    return -(-size[0] // factor), -(-size[1] // factor)


def _turns_unnoticed(size: tuple[int, int] | None, factor: int) -> bool:
    """Whether the reduced image, turned, would have the same size."""
    if size is None or size[0] == size[1]:
        return False
    return _reduced_size(size, factor) == _reduced_size(size[::-1], factor)


def read_content(path: str | Path, opener: Opener = DISK) -> bytes:
    """Reads the bytes of an image file.

    Raises: DataError: absent, unreadable, or too many.
    """
    try:
        return opener.read(path, MOST_BYTES)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise DataError(
            error.strerror or str(error),
            code="image_missing" if absent else "image_unreadable",
            where=str(path),
        ) from error


def _decode(path: str | Path, content: bytes, reduced: int = 1, upright: bool = True) -> np.ndarray:
    try:
        image_HW3 = decode(content, reduced, upright)
    except cv2.error as error:
        raise DataError(
            f"OpenCV cannot decode it: {error.err}", code="image_unreadable", where=str(path)
        ) from error
    if image_HW3 is None:
        raise DataError("not an image, or damaged", code="image_unreadable", where=str(path))
    return image_HW3


# --- what a header says --------------------------------------------------------------------------

# Opened directly: Image.open refuses images of more than 180 million pixels.
_READERS: tuple[tuple[bytes, Any], ...] = (
    (JPEG, JpegImagePlugin.JpegImageFile),
    (WEBP, WebPImagePlugin.WebPImageFile),
    (BMP, BmpImagePlugin.BmpImageFile),
)


class ImageHeader(NamedTuple):
    """Header of an image.

    width, height: pixels as they are stored.  orientation: 1 to 8, of EXIF.
    """

    width: int
    height: int
    orientation: int

    @property
    def stored(self) -> tuple[int, int]:
        """(width, height) before it is turned."""
        return self.width, self.height

    @property
    def upright(self) -> tuple[int, int]:
        """(width, height) once turned, as `read_image` gives it."""
        return self.stored if self.orientation < 5 else (self.height, self.width)


def image_size(path: str | Path, opener: Opener = DISK) -> tuple[int, int] | None:
    """(width, height) upright; None: absent, or no image we can read."""
    header = read_header(path, opener)
    return None if header is None else header.upright


def read_header(path: str | Path, opener: Opener = DISK) -> ImageHeader | None:
    """Reads an image header as OpenCV does; None: absent or not readable.

    No pixel is decoded, whatever the size: 0.05 to 0.2 ms.  An orientation in XMP alone does not
    count, as it does not when the image is read.
    """
    try:
        with opener.open(path) as file:
            found = _header_of_png(file) if file.read(8) == PNG else _header_by_pillow(file)
    except StorageError:
        raise
    except Exception:  # Pillow's readers raise nearly anything for damaged files
        return None
    return found if found.width > 0 and found.height > 0 else None


def _header_of_png(file: BinaryIO) -> ImageHeader:
    """Reads the header from PNG chunks.

    eXIf may come last; Pillow would decode the pixels to find it.
    """
    length, kind, width, height = struct.unpack(">I4sII", file.read(16))
    if kind != b"IHDR":
        raise ValueError("no PNG header")
    orientation = 1
    while kind not in (b"IEND", b"eXIf"):
        file.seek(length - 8 if kind == b"IHDR" else length, os.SEEK_CUR)
        head = file.read(12)[4:]  # behind the checksum
        if len(head) < 8:
            break
        length, kind = struct.unpack(">I4s", head)
    if kind == b"eXIf":
        content = file.read(length)
        # As libpng, which passes over a chunk with a wrong sum.
        if file.read(4) == struct.pack(">I", zlib.crc32(kind + content)):
            orientation = _orientation(content)
    return ImageHeader(width, height, orientation)


def _header_by_pillow(file: BinaryIO) -> ImageHeader:
    file.seek(0)
    start = file.read(66)
    if tiff := tiff_of(lambda at, count: _read_at(file, at, count)):
        if unread_pixels(tiff):
            raise ValueError("a TIFF that is not read")
        return ImageHeader(tiff.width, tiff.height, _valid(tiff.orientation))
    file.seek(0)
    reader = next((reader for sign, reader in _READERS if start.startswith(sign)), Image.open)
    with reader(file) as image:
        width, height = image.size
        return ImageHeader(width, height, _orientation(image.info.get("exif", b"")))


def _read_at(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _orientation(content: bytes) -> int:
    """Orientation in the bytes of EXIF.

    That of XMP, which Pillow's `getexif` takes, too, does not count.
    """
    if not content:
        return 1
    exif = Image.Exif()
    exif.load(content)
    return _valid(exif.get(ExifTags.Base.Orientation, 1))


def _valid(orientation: Any) -> int:
    return orientation if orientation in range(1, 9) else 1
