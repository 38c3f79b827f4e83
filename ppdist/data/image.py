"""Images from disk: pixels as RGB, damage, and the header.

A decoder trusts lengths: OpenCV 5.0 asks for 4 GB, or dies, over a PNG of 100 bytes whose chunk
claims them, paints what is missing of a JPEG grey, and unpacks a PNG of 107 KB that is all white to
900 million pixels, 5 GB at its peak.  So the structure of a file is checked before a decoder sees
it.
"""

import os
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cv2
import numpy as np
from PIL import BmpImagePlugin, ExifTags, Image, JpegImagePlugin, TiffImagePlugin, WebPImagePlugin

from ppdist.common.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
MOST_PIXELS = 1 << 28  # 16384 x 16384: 0.8 GB once decoded, and as much again while it is
_MOST_BYTES = 8 * MOST_PIXELS  # four channels of 16 bits, not compressed
# The first bytes of a file.
_JPEG, _PNG, _BMP, _WEBP = b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF"
# Flags are bits: of REDUCED_COLOR_2 those without IMREAD_COLOR say how far to reduce.
_REDUCED = {
    2: cv2.IMREAD_REDUCED_COLOR_2 & ~cv2.IMREAD_COLOR,
    4: cv2.IMREAD_REDUCED_COLOR_4 & ~cv2.IMREAD_COLOR,
    8: cv2.IMREAD_REDUCED_COLOR_8 & ~cv2.IMREAD_COLOR,
}


def is_image_name(name: str) -> bool:
    """Whether a file is taken for an image by its name; hidden ones (`._a.jpg`) are none."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def read_image(
    path: str | Path, size: tuple[int, int] | None = None, reduced: int = 1
) -> np.ndarray:
    """The image of a file as uint8 RGB [H, W, 3], turned upright as its EXIF data say.

    Grey becomes three equal channels, of 16 bits the upper 8 count, CMYK becomes RGB, transparency
    is ignored (but a TIFF's is blended over black); of several frames the first is taken.  Pixels
    that a cut file lacks are never made up; damage amid a JPEG shows in its picture alone, and
    `ppdist.data.validate` finds it.

    Args:
        size: the (height, width) it must have; an image that has it without being turned stays.
        reduced: 2, 4, 8: a half, quarter or eighth of each side, rounded up.  A JPEG is decoded so,
            which is three times as fast and averages the pixels left out.
    Raises: DataError: absent, unreadable, damaged, cut short, of more than MOST_PIXELS, or of
        another size (within `reduced` pixels).
    """
    content = _content(path)
    found = damage(content)
    if found is not None:
        raise DataError(found.text, code=found.code, where=str(path))
    if reduced > 1 and content.startswith(_JPEG) and not _turns_unnoticed(size, reduced):
        image_HW3 = _decode(path, content, _REDUCED[reduced])
        if size is None or image_HW3.shape[:2] == _reduced_size(size, reduced):
            return image_HW3
    image_HW3 = _decode(path, content)
    if size is not None and image_HW3.shape[:2] != size:
        image_HW3 = _decode(path, content, cv2.IMREAD_IGNORE_ORIENTATION)
    height, width = image_HW3.shape[:2]
    if size is not None and (height, width) != size:
        raise DataError(
            f"the image is {width}x{height} but its annotation says {size[1]}x{size[0]}",
            code="size_mismatch",
            where=str(path),
        )
    if reduced > 1:
        height, width = _reduced_size((height, width), reduced)
        image_HW3 = cv2.resize(image_HW3, (width, height), interpolation=cv2.INTER_AREA)
    return image_HW3


def reduction(scale: float) -> int:
    """1, 2, 4 or 8: how far an image may be reduced that is to be shown at `scale` of its size."""
    return next((factor for factor in (8, 4, 2) if factor * scale <= 1), 1)


def _reduced_size(size: tuple[int, int], factor: int) -> tuple[int, int]:
    return -(-size[0] // factor), -(-size[1] // factor)


def _turns_unnoticed(size: tuple[int, int] | None, factor: int) -> bool:
    """Whether an image of this size, once reduced, has the same size on its side as upright."""
    if size is None or size[0] == size[1]:
        return False
    return _reduced_size(size, factor) == _reduced_size(size[::-1], factor)


def _content(path: str | Path) -> bytes:
    """All bytes of a file that is one: a pipe would be waited for, a device is endless."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError("not a file", code="image_unreadable", where=str(path))
            if status.st_size > _MOST_BYTES:
                raise DataError(
                    f"{status.st_size} bytes: too large for an image",
                    code="image_unreadable",
                    where=str(path),
                )
            return file.read()
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise DataError(
            error.strerror or str(error),
            code="image_missing" if absent else "image_unreadable",
            where=str(path),
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _decode(path: str | Path, content: bytes, flags: int = 0) -> np.ndarray:
    """Straight to RGB: a JPEG takes a sixth longer by way of BGR."""
    try:
        image_HW3 = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB | flags)
    except cv2.error as error:
        raise DataError(
            f"OpenCV cannot decode it: {error.err}", code="image_unreadable", where=str(path)
        ) from error
    if image_HW3 is None:
        raise DataError("not an image, or damaged", code="image_unreadable", where=str(path))
    return image_HW3


# --- what is wrong with a file -------------------------------------------------------------------

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_DEFLATE = 1032  # bytes that one byte of a PNG's pixels can become at most
_JPEG_PIXELS = 2048  # that one byte of a JPEG can hold at most (a bit a block: 512), and spare
# A JPEG marker that has a length, found as libjpeg finds it: of 0xFF with 0, with 0xFF and with the
# markers that stand alone (0x01, 0xD0 to 0xD8), and of other bytes in between, it takes no notice.
_SEGMENT = re.compile(b"\xff[\x02-\xcf\xd9-\xfe]")
_SCAN = 0xDA  # the JPEG marker before the pixels
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers of a frame's size
# The first bytes of a TIFF -> byte order, and whether places in it have 64 bits.
_TIFF = {
    b"II*\0": ("<", False),
    b"MM\0*": (">", False),
    b"II+\0": ("<", True),
    b"MM\0+": (">", True),
}
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257  # tags
_TIFF_WHOLE = {3: "H", 4: "I", 16: "Q"}  # types of whole numbers
_MOST_TIFF_ENTRIES = 1000


class Damage(NamedTuple):
    """code: one of KINDS (data/datasets/annotations.py); text: what follows the file's name."""

    code: str
    text: str


def damage(content: bytes, length: int | None = None) -> Damage | None:
    """What keeps a file from being decoded, as far as its structure shows; None: nothing.

    Knows JPEG, PNG, BMP and WebP, and the size of a TIFF; whatever else is for the decoder to judge
    (OpenCV refuses more than 2**30 pixels).

    Args:
        content: all of the file; its first 64 bytes are enough unless it is a JPEG or PNG.
        length: bytes of the file, where that is more than `content`.
    """
    length = len(content) if length is None else length
    if not content:
        return Damage("image_empty", "the file is empty")
    if content.startswith(_JPEG):
        return _jpeg_damage(content)
    if content.startswith(_PNG):
        return _png_damage(content)
    if content.startswith(_WEBP) and content[8:12] == b"WEBP":
        return _webp_damage(content, length)
    if content.startswith(_BMP):
        return _bmp_damage(content, length)
    if content[:4] in _TIFF:
        return _too_large("TIFF", *_tiff_size(content))
    return None


def _cut_short(name: str) -> Damage:
    return Damage("image_truncated", f"the {name} data end early (incomplete file)")


def _absurd(name: str, width: int, height: int, found: int) -> Damage:
    return Damage(
        "image_unreadable",
        f"the {name} claims {width}x{height} pixels, which {found} bytes cannot hold",
    )


def _too_large(name: str, width: int, height: int) -> Damage | None:
    if width * height <= MOST_PIXELS:
        return None
    return Damage(
        "image_unreadable",
        f"the {name} has {width}x{height} pixels, more than {MOST_PIXELS}: cut it into tiles",
    )


def _jpeg_damage(content: bytes) -> Damage | None:
    """Walks the segments up to the pixels (a thumbnail inside a segment has an end of its own);
    within coded pixels 0xFF is always followed by 0, so 0xFFD9 there is the true end.

    The walk must be that of the decoder: else it jumps over a frame that the decoder then finds.
    """
    position, marker = 2, 0
    while marker != _SCAN:
        segment = _SEGMENT.search(content, position)
        if segment is None:
            return _cut_short("JPEG")
        marker, position = content[segment.end() - 1], segment.end()
        if marker in _FRAMES and position + 7 <= len(content):
            height, width = struct.unpack_from(">HH", content, position + 3)
            if width * height > _JPEG_PIXELS * len(content):
                return _absurd("JPEG", width, height, len(content))
            if too_large := _too_large("JPEG", width, height):
                return too_large
        position += max(2, int.from_bytes(content[position : position + 2], "big"))
    return _cut_short("JPEG") if content.find(b"\xff\xd9", position) < 0 else None


def _png_damage(content: bytes) -> Damage | None:
    if len(content) < 33:
        return _cut_short("PNG")
    if content[8:16] != b"\0\0\0\rIHDR":
        return Damage("image_unreadable", "the PNG does not begin with its size")
    width, height, bits, colour = struct.unpack_from(">IIBB", content, 16)
    if not (width and height and bits in (1, 2, 4, 8, 16) and colour in _PNG_CHANNELS):
        return Damage("image_unreadable", "the PNG's header makes no sense")
    row = width * bits * _PNG_CHANNELS[colour] // 8
    if row * height > _DEFLATE * len(content):
        return _absurd("PNG", width, height, len(content))
    if too_large := _too_large("PNG", width, height):
        return too_large
    position = 8
    while position + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, position)
        position += 12 + length
        if position <= len(content) and kind == b"IEND":
            return None
    return _cut_short("PNG")


def _bmp_damage(content: bytes, length: int) -> Damage | None:
    """Uncompressed pixels must be there; others are for the decoder to judge."""
    if len(content) < 34:
        return _cut_short("BMP")
    start, header, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", content, 10)
    if header < 40:
        return None
    if too_large := _too_large("BMP", width, abs(height)):
        return too_large
    if compression not in (0, 3):
        return None
    if width <= 0 or height == 0 or bits not in (1, 4, 8, 16, 24, 32):
        return Damage("image_unreadable", "the BMP's header makes no sense")
    needed = start + (width * bits + 31) // 32 * 4 * abs(height)
    return _cut_short("BMP") if needed > length else None


def _webp_damage(content: bytes, length: int) -> Damage | None:
    """A single picture has at most 16383 pixels a side; the canvas of several may be larger."""
    if content[12:16] == b"VP8X" and len(content) >= 30:
        width, height = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
        if too_large := _too_large("WebP", width, height):
            return too_large
    declared = int.from_bytes(content[4:8], "little") + 8
    return _cut_short("WebP") if declared > length else None


def _tiff_size(content: bytes) -> tuple[int, int]:
    """(width, height) of the first picture; 0 where they are not found (TIFF 6.0, section 2)."""
    order, large = _TIFF[content[:4]]
    place, count, entry, value = ("Q", "Q", 20, 12) if large else ("I", "H", 12, 8)
    sides = {_TIFF_WIDTH: 0, _TIFF_HEIGHT: 0}
    try:
        (start,) = struct.unpack_from(order + place, content, 8 if large else 4)
        (entries,) = struct.unpack_from(order + count, content, start)
        start += struct.calcsize(count)
        for number in range(min(entries, _MOST_TIFF_ENTRIES)):
            tag, kind = struct.unpack_from(order + "HH", content, start + entry * number)
            if tag in sides and kind in _TIFF_WHOLE:
                at = start + entry * number + value
                (sides[tag],) = struct.unpack_from(order + _TIFF_WHOLE[kind], content, at)
    except (struct.error, OverflowError):  # cut short, or a place beyond all memory
        return 0, 0
    return sides[_TIFF_WIDTH], sides[_TIFF_HEIGHT]


# --- what a header says --------------------------------------------------------------------------

# Opened directly: Image.open refuses images of more than 180 million pixels.
_READERS: tuple[tuple[bytes, Any], ...] = (
    (_JPEG, JpegImagePlugin.JpegImageFile),
    (_WEBP, WebPImagePlugin.WebPImageFile),
    (_BMP, BmpImagePlugin.BmpImageFile),
    (b"II", TiffImagePlugin.TiffImageFile),
    (b"MM", TiffImagePlugin.TiffImageFile),
)


class ImageHeader(NamedTuple):
    """width, height: pixels as they are stored.  orientation: 1 to 8, of EXIF."""

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


def image_size(path: str | Path) -> tuple[int, int] | None:
    """(width, height) upright; None: absent, or no image we can read."""
    header = read_header(path)
    return None if header is None else header.upright


def read_header(path: str | Path) -> ImageHeader | None:
    """What the header says, as OpenCV understands it; None: absent, or no image we can read.

    No pixel is decoded, whatever the size: 0.05 to 0.2 ms.  An orientation in XMP alone does not
    count, as it does not when the image is read.
    """
    try:
        with open(path, "rb") as file:
            found = _header_of_png(file) if file.read(8) == _PNG else _header_by_pillow(file)
    except Exception:  # Pillow's readers raise nearly anything for damaged files
        return None
    return found if found.width > 0 and found.height > 0 else None


def _header_of_png(file: BinaryIO) -> ImageHeader:
    """From its chunks, of which eXIf may come last; Pillow would decode the pixels to find it."""
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
        orientation = _orientation(file.read(length))
    return ImageHeader(width, height, orientation)


def _header_by_pillow(file: BinaryIO) -> ImageHeader:
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    reader = next((reader for sign, reader in _READERS if start.startswith(sign)), Image.open)
    with reader(file) as image:
        if isinstance(image, TiffImagePlugin.TiffImageFile):  # its `size` may be turned already
            tags: Mapping[int, Any] = image.tag_v2
            turned = _valid(tags.get(ExifTags.Base.Orientation, 1))
            sides = tags[ExifTags.Base.ImageWidth], tags[ExifTags.Base.ImageLength]
            return ImageHeader(int(sides[0]), int(sides[1]), turned)
        width, height = image.size
        return ImageHeader(width, height, _orientation(image.info.get("exif", b"")))


def _orientation(content: bytes) -> int:
    if not content:
        return 1
    exif = Image.Exif()
    exif.load(content)
    return _valid(exif.get(ExifTags.Base.Orientation, 1))


def _valid(orientation: Any) -> int:
    return orientation if orientation in range(1, 9) else 1
