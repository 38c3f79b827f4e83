"""Conversion of images to uint8 RGB, by one rule; headers of files.

    read_image, decode_image         a file, or its bytes
    convert_array, convert_pillow    arrays and Pillow images

Grey becomes three equal channels, 16 bits become their upper 8, transparency is ignored, and only
EXIF turns an image.  `ppdist.runtime.decoder` checks the structure of a file before it is decoded.
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
    """Returns True if a file name has an image suffix and is not hidden like `._a.jpg`."""
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

    See `decode` for the conversion.  Missing pixels of a truncated file are never invented.  Damage
    within a JPEG shows only in its pixels; `ppdist.data.checks.images` finds it.

    Args:
        size: expected (height, width); an image that has it before EXIF is applied is not turned.
        reduced: 2, 4, 8: a half, quarter or eighth of each side, rounded up.  A JPEG is decoded at
            that size, which is three times as fast and averages the pixels.
        note_dark: called if DARK applies, which cannot be seen from the header.
        opener: of the file; see `DetectionSet`.
    Raises: DataError: missing, unreadable, damaged, truncated, more than MOST_PIXELS, or of another
        size (within `reduced` pixels).
    """
    content = read_content(path, opener)
    problem = damage(content)
    if problem is not None:
        raise DataError(problem.text, code=problem.code, where=str(path))
    # A reduced size that fits both ways does not show if EXIF turned the image; then the full size
    # decides.
    if reduced > 1 and content.startswith(JPEG) and not _is_turn_ambiguous(size, reduced):
        image_HW3 = _decode(path, content, reduced)
        if size is None or image_HW3.shape[:2] == _reduced_size(size, reduced):
            return image_HW3
    image_HW3 = _decode(path, content)
    # Some tools annotate the stored pixels of an image that EXIF turns.
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
    """Decodes the bytes of an image file, as `read_image` does.

    Raises: DataError: not an image, damaged, truncated, or more than MOST_PIXELS.
    """
    problem = damage(content)
    if problem is not None:
        raise DataError(problem.text, code=problem.code, where=name)
    return _decode(name, content)


def convert_array(array: np.ndarray) -> np.ndarray:
    """Converts an array to uint8 RGB [H, W, 3], copied if necessary.

    Args: array: uint8 or uint16 [H, W] or [H, W, C]; C is 1 or 2 for grey, 3 or 4 for RGB.
    Raises: DataError: the type or shape is not one of these.
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


def convert_pillow(picture: Image.Image) -> np.ndarray:
    """Converts a Pillow image to pixels as `read_image` returns them.

    Raises: DataError: unsupported pixel mode, more than MOST_PIXELS, or damaged.
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
        raise DataError(
            f"{error}", code="image_unreadable", where=_picture_name(picture)
        ) from error
    turn = _TURNS.get(_orientation(picture.info.get("exif", b"")))
    # Pillow has already rotated a TIFF.
    if turn is not None and not isinstance(picture, TiffImagePlugin.TiffImageFile):
        picture = picture.transpose(turn)
    mode, of_16_bits = picture.mode, picture.format in ("PNG", "PPM")  # older Pillows: mode I
    if mode in _PILLOW_KINDS and not (mode == "I" and of_16_bits):
        raise DataError(
            f"a Pillow image with {_PILLOW_KINDS[mode]} (mode {mode})",
            code="pixel_kind",
            where=_picture_name(picture),
            fix="choose the black and white values, then convert it to mode L or RGB",
        )
    if mode.startswith("I"):
        return convert_array(np.asarray(picture).astype(np.uint16))
    if mode == "CMYK" and picture.format in ("JPEG", "MPO"):
        return _convert_cmyk(np.asarray(picture))
    if mode in _PILLOW_STEPS:
        picture = picture.convert(_PILLOW_STEPS[mode])
    return np.array(picture.convert("RGB"))


def _convert_cmyk(image_HW4: np.ndarray) -> np.ndarray:
    """Converts CMYK to RGB as OpenCV does for JPEG.

    libtiff converts CMYK TIFFs as Pillow does.
    """
    ink_HW3, white_HW1 = image_HW4[:, :, :3].astype(np.uint16), 255 - image_HW4[:, :, 3:]
    return (white_HW1 - (ink_HW3 * white_HW1 >> 8)).astype(np.uint8)


def _picture_name(picture: Image.Image) -> str:
    return str(getattr(picture, "filename", "") or "a picture of Pillow")


def choose_reduction(scale: float) -> int:
    """Returns the largest reduction (1, 2, 4 or 8) for an image shown at `scale`.

    Args: scale: shown size / size of the image.
    """
    return next((factor for factor in (8, 4, 2) if factor * scale <= 1), 1)


def _reduced_size(size: tuple[int, int], factor: int) -> tuple[int, int]:
    return -(-size[0] // factor), -(-size[1] // factor)


def _is_turn_ambiguous(size: tuple[int, int] | None, factor: int) -> bool:
    """Returns True if the reduced image has the same size with and without the EXIF rotation."""
    if size is None or size[0] == size[1]:
        return False
    return _reduced_size(size, factor) == _reduced_size(size[::-1], factor)


def read_content(path: str | Path, opener: Opener = DISK) -> bytes:
    """Reads the bytes of an image file.

    Raises: DataError: the file is missing, unreadable, or too large.
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


# --- image headers --------------------------------------------------------------------------------

# Opened directly: Image.open refuses images of more than 180 million pixels.
_READERS: tuple[tuple[bytes, Any], ...] = (
    (JPEG, JpegImagePlugin.JpegImageFile),
    (WEBP, WebPImagePlugin.WebPImageFile),
    (BMP, BmpImagePlugin.BmpImageFile),
)


class ImageHeader(NamedTuple):
    """The header of an image.

    width, height: pixels as they are stored.  orientation: 1 to 8, of EXIF.
    """

    width: int
    height: int
    orientation: int

    @property
    def stored(self) -> tuple[int, int]:
        """Returns (width, height) before the EXIF rotation."""
        return self.width, self.height

    @property
    def upright(self) -> tuple[int, int]:
        """Returns (width, height) after the EXIF rotation, as `read_image` returns the image."""
        return self.stored if self.orientation < 5 else (self.height, self.width)


def image_size(path: str | Path, opener: Opener = DISK) -> tuple[int, int] | None:
    """Returns (width, height) upright; None: missing, or not an image that can be read."""
    header = read_header(path, opener)
    return None if header is None else header.upright


def read_header(path: str | Path, opener: Opener = DISK) -> ImageHeader | None:
    """Reads an image header as OpenCV does; None: missing or not readable.

    Decodes no pixel, so it takes 0.05 to 0.2 ms whatever the size.  An orientation in XMP alone is
    ignored, as it is when the image is read.
    """
    try:
        with opener.open(path) as file:
            header = _png_header(file) if file.read(8) == PNG else _pillow_header(file)
    except StorageError:
        raise
    except Exception:  # Pillow's readers raise nearly anything for damaged files
        return None
    return header if header.width > 0 and header.height > 0 else None


def _png_header(file: BinaryIO) -> ImageHeader:
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
        # As libpng does, which ignores a chunk with a wrong checksum.
        if file.read(4) == struct.pack(">I", zlib.crc32(kind + content)):
            orientation = _orientation(content)
    return ImageHeader(width, height, orientation)


def _pillow_header(file: BinaryIO) -> ImageHeader:
    file.seek(0)
    start = file.read(66)
    if tiff := tiff_of(lambda offset, count: _read_at(file, offset, count)):
        if unread_pixels(tiff):
            raise ValueError("a TIFF that is not read")
        return ImageHeader(tiff.width, tiff.height, _valid_orientation(tiff.orientation))
    file.seek(0)
    reader = next((reader for sign, reader in _READERS if start.startswith(sign)), Image.open)
    with reader(file) as image:
        width, height = image.size
        return ImageHeader(width, height, _orientation(image.info.get("exif", b"")))


def _read_at(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def _orientation(content: bytes) -> int:
    """Returns the orientation stored in EXIF bytes.

    Unlike Pillow's `getexif`, it ignores the orientation in XMP.
    """
    if not content:
        return 1
    exif = Image.Exif()
    exif.load(content)
    return _valid_orientation(exif.get(ExifTags.Base.Orientation, 1))


def _valid_orientation(orientation: Any) -> int:
    return orientation if orientation in range(1, 9) else 1
