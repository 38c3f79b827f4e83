"""A decoder of image files, which checks their structure first.

Decoders trust their input.  OpenCV 5.0 crashes on animated PNGs of 700 bytes with frames that do
not fit.  It allocates 4 GB, or crashes, for a PNG of 100 bytes with a chunk that claims them.  It
paints the missing part of a JPEG grey, and it unpacks an all-white PNG of 107 KB to 900 million
pixels, 5 GB at its peak.  So callers call `damage` first, and `decode` passes only the parts that
pixels need to OpenCV.  Depending on its version, OpenCV ignores the masks of a BMP or refuses it:
such BMPs are refused.

Every image is decoded this way: in training, the tools, `deploy/python` and `deploy/serving`.

If simplejpeg is installed, it decodes upright JPEGs of one or three channels: the same pixels, bit
for bit, in less time.  Both are libjpeg-turbo; OpenCV allocates an image twice and copies it.
"""

import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import cv2
import numpy as np

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

MOST_PIXELS = 1 << 28  # 16384 x 16384: 0.8 GB decoded, and as much again while decoding
MOST_BYTES = 8 * MOST_PIXELS  # size of a file: four channels of 16 bits, uncompressed
# Supported formats, by their names in Pillow; suffixes match in upper and lower case.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),  # only the first picture of a .mpo is read
    "PNG": (".png",),
    "BMP": (".bmp",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
}
IMAGE_SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
UNREAD_SUFFIXES = (
    *(".avif", ".gif", ".heic", ".heif", ".jp2", ".j2k", ".jxl"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".psd", ".svg", ".dng"),
)
# The first bytes of a file.
JPEG, PNG, BMP, WEBP = b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF"
# The chunks of a PNG that pixels need, and that OpenCV gets.  Others change no pixel: frames of an
# animation, on which OpenCV crashes; texts and profiles, which may be compressed and which libpng
# unpacks (0.13 s for a text of 7.7 KB that becomes 7.9 MB, and there may be hundreds).
_PNG_NEEDED = frozenset((b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"IEND"))
# Most chunks of a PNG or segments of a JPEG; at 12 bytes each, more could cost seconds and a
# gigabyte.
_MOST_PARTS = 1 << 18  # OpenCV writes a chunk every 8 KB
_CHUNK = struct.Struct(">I4s")  # length of the data, and kind
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_DEFLATE = 1032  # most bytes that one byte of a PNG's pixel data can unpack to
_JPEG_PIXELS = 2048  # most pixels per byte of a JPEG (a bit per block: 512), with a margin
# A JPEG marker with a length, found as libjpeg finds it.  It ignores 0xFF followed by 0, by 0xFF or
# by a marker without a length (0x01, 0xD0 to 0xD8), and other bytes in between.
_SEGMENT = re.compile(b"\xff[\x02-\xcf\xd9-\xfe]")
_SCAN = 0xDA  # the JPEG marker before the pixels
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers of a frame's size
_USUAL_FRAMES = (0xC0, 0xC1, 0xC2)  # Huffman coded; the other kinds depend on the build
_END = b"\xff\xd9"
_APP1 = 0xE1  # the JPEG marker of EXIF
_ORIENTATION = 0x112  # a tag of EXIF
# The first bytes of a TIFF -> byte order, and whether its offsets have 64 bits.
_TIFF = {
    b"II*\0": ("<", False),
    b"MM\0*": (">", False),
    b"II+\0": ("<", True),
    b"MM\0+": (">", True),
}
# The bits that REDUCED_COLOR_2 adds to IMREAD_COLOR select the reduction.
_REDUCED = {
    1: 0,
    2: cv2.IMREAD_REDUCED_COLOR_2 & ~cv2.IMREAD_COLOR,
    4: cv2.IMREAD_REDUCED_COLOR_4 & ~cv2.IMREAD_COLOR,
    8: cv2.IMREAD_REDUCED_COLOR_8 & ~cv2.IMREAD_COLOR,
}
# A BMP's masks select the bits of each colour in a pixel; they follow the first 40 bytes of its
# header, inside it or after it.
_BMP_RGB, _BMP_MASKS = 0, (3, 6)  # compression; the last also has an alpha mask
_BMP_HEADERS = (40, 52, 56, 108, 124)  # sizes of those with masks inside or after them
_MASKS_AT = 54
# Masks of 32 and 16 bits that OpenCV reads (16 bits only after the shortest header); it treats
# three empty masks of 32 bits as the usual ones.
_USUAL_MASKS = ((0xFF0000, 0xFF00, 0xFF), (0, 0, 0))
_USUAL_MASKS_16 = ((0x7C00, 0x3E0, 0x1F), (0xF800, 0x7E0, 0x1F))
_TIFF_INTEGERS = {3: "H", 4: "I", 16: "Q"}  # integer types
_MOST_TIFF_ENTRIES = 1000
# Tags of a TIFF -> the names that `Tiff` has for their first values.
_TIFF_TAGS = {
    256: "width", 257: "height", 258: "bits", 262: "colours", 274: "orientation", 277: "samples",
    338: "extra", 339: "numbers",
}  # fmt: skip
_TIFF_SAMPLES = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3}  # per pixel, by `colours`, without extra ones
_TIFF_COLOURS = {8: "CIELAB", 9: "CIELAB", 10: "CIELAB", 32803: "raw", 34892: "raw"}
_TIFF_NUMBERS = {2: "signed", 3: "float", 5: "complex", 6: "complex"}
_UNASSOCIATED_ALPHA = 2  # a value of `extra`: transparency, which libtiff would blend over black
_DARK = 64  # if no pixel of a 16-bit image is brighter, it uses 14 bits or fewer
_JPEG_2000 = (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
_DENSEST = 4096  # most pixels per byte of other formats: a GIF can reach 2731


def decode(content: bytes, reduced: int = 1, upright: bool = True) -> np.ndarray | None:
    """Decodes an image to upright uint8 RGB; returns None if the file is not an image.

    Grey becomes three equal channels, 16-bit channels keep their upper 8 bits, CMYK becomes RGB,
    and transparency is ignored.  If there are several frames, the first is used; for an animated
    PNG, the picture shown by programs without support for animation.

    Args:
        content: a file in which `damage` finds nothing.
        reduced: 2, 4 or 8: for a JPEG, a half, quarter or eighth of each side, rounded up.
        upright: False: as stored, ignoring the EXIF orientation.
    Raises: cv2.error.
    """
    if content.startswith(PNG):
        content = _strip_png(content)
    if simplejpeg is not None and content.startswith(JPEG):
        image_HW3 = _decode_by_simplejpeg(content, reduced, upright)
        if image_HW3 is not None:
            return image_HW3
    if content[:4] in _TIFF:
        content = _unmark_alpha(content)
    # Straight to RGB: through BGR, a JPEG takes a sixth longer.
    flags = cv2.IMREAD_COLOR_RGB | _REDUCED[reduced]
    flags |= 0 if upright else cv2.IMREAD_IGNORE_ORIENTATION
    return cv2.imdecode(np.frombuffer(content, np.uint8), flags)


def _decode_by_simplejpeg(jpeg: bytes, reduced: int, upright: bool) -> np.ndarray | None:
    """Decodes a usual, upright, undamaged JPEG; returns None if it is left to OpenCV."""
    size = usual_jpeg(jpeg, upright)
    if size is None:
        return None
    try:
        image_HW3: np.ndarray = simplejpeg.decode_jpeg(
            jpeg,
            "RGB",
            min_height=-(-size[0] // reduced),
            min_width=-(-size[1] // reduced),
            min_factor=reduced,
        )
    except ValueError:
        return None
    return image_HW3


def usual_jpeg(jpeg: bytes, upright: bool) -> tuple[int, int, int] | None:
    """Returns (height, width, channels) of a usual, upright JPEG; None if it may be unusual.

    Walks the segments as `_jpeg_damage` does, up to the pixels.
    """
    size, position, marker, exifs = None, 2, 0, 0
    while marker != _SCAN:
        segment = _SEGMENT.search(jpeg, position)
        if segment is None:
            return None
        marker, position = jpeg[segment.end() - 1], segment.end()
        end = position + max(2, int.from_bytes(jpeg[position : position + 2], "big"))
        if marker in _FRAMES:
            if size or marker not in _USUAL_FRAMES or position + 8 > len(jpeg):
                return None
            bits, height, width, channels = struct.unpack_from(">BHHB", jpeg, position + 2)
            if bits != 8 or channels not in (1, 3) or not (height and width):
                return None
            size = height, width, channels
        elif marker == _APP1 and upright and jpeg[position + 8 : position + 10] in (b"II", b"MM"):
            exifs += 1
            if exifs > 1 or not _is_upright(jpeg[position + 8 : end]):
                return None
        position = end
    return size


def _is_upright(exif: bytes) -> bool:
    """Returns True if the first EXIF directory is readable and keeps the orientation."""
    if exif[:4] not in (b"II*\0", b"MM\0*"):
        return False
    order = _TIFF[exif[:4]][0]
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, start)
        for number in range(entries):
            tag, value = struct.unpack_from(order + "H6xH", exif, start + 2 + 12 * number)
            if tag == _ORIENTATION and value != 1:
                return False
    except struct.error:
        return False
    return True


def _strip_png(png: bytes) -> bytes:
    """Returns a PNG with only the chunks that its pixels need."""
    chunks = [*png_chunks(png)]
    if all(kind in _PNG_NEEDED for kind, _, _ in chunks):
        return png
    needed = [png[start:end] for kind, start, end in chunks if kind in _PNG_NEEDED]
    return b"".join([PNG, *needed])


def _unmark_alpha(tiff: bytes) -> bytes:
    """Returns a TIFF whose alpha channel is no longer marked as transparency."""
    header = tiff_of(lambda offset, count: tiff[offset : offset + count])
    if header is None or header.extra != _UNASSOCIATED_ALPHA:
        return tiff
    return b"".join([tiff[: header.extra_at], b"\0\0", tiff[header.extra_at + 2 :]])


def has_sixteen_bits(content: bytes) -> bool:
    """Returns True if a PNG or TIFF has 16 bits per channel."""
    if content.startswith(PNG):
        return content[24] == 16
    tiff = tiff_of(lambda offset, count: content[offset : offset + count])
    return tiff is not None and tiff.bits == 16


def is_dark(image_HW3: np.ndarray) -> bool:
    """Returns True if pixels use at most a quarter of their 8 bits."""
    return 0 < int(image_HW3.max()) < _DARK


def format_of(suffix: str) -> str:
    """Returns the suffix for which OpenCV writes this format: `.jpg` for `.JFIF`."""
    matches = (suffixes for suffixes in FORMATS.values() if suffix.lower() in suffixes)
    return next(matches, (suffix,))[0]


def unread_kind(name: str) -> str:
    """Names the unsupported image format of a file; "" if it is supported or not an image."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix[1:].upper() if suffix in UNREAD_SUFFIXES else ""


def unread_kinds(names: Iterable[str]) -> str:
    """Returns a line that counts files in unsupported image formats; "" if there are none."""
    counts = Counter(filter(None, map(unread_kind, names)))
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return f"left out: {kinds}: unsupported; convert to JPEG or PNG" if counts else ""


def _unread_masks(content: bytes) -> tuple[int, int, int] | None:
    """Returns the red, green and blue masks if some OpenCV version ignores or rejects them."""
    if len(content) < _MASKS_AT + 12:
        return None
    header, _, _, _, bits, compression = struct.unpack_from("<IiiHHI", content, 14)
    if compression not in _BMP_MASKS or header not in _BMP_HEADERS or bits not in (16, 32):
        return None
    masks = struct.unpack_from("<III", content, _MASKS_AT)
    usual = _USUAL_MASKS if bits == 32 else _USUAL_MASKS_16 if header == 40 else ()
    return None if compression == 3 and masks in usual else masks


class Damage(NamedTuple):
    """The damage of a file that cannot be used.

    Attributes:
        code: image_empty, image_truncated, image_unreadable or pixel_kind.
        text: the message, to follow the file's name.
    """

    code: str
    text: str


def damage(content: bytes, length: int | None = None) -> Damage | None:
    """Finds damage that is visible in the structure of a file; None if there is none.

    It examines JPEG, PNG, BMP, WebP and TIFF, and the size of some other formats; the rest is left
    to the decoder (OpenCV refuses more than 2**30 pixels).

    Args:
        content: the whole file; its first 66 bytes are enough unless it is a JPEG or PNG.
        length: size of the file in bytes, if it is longer than `content`.
    """
    length = len(content) if length is None else length
    if not content:
        return Damage("image_empty", "the file is empty")
    if content.startswith(JPEG):
        return _jpeg_damage(content)
    if content.startswith(PNG):
        return _png_damage(content)
    if content.startswith(WEBP) and content[8:12] == b"WEBP":
        return _webp_damage(content, length)
    if content.startswith(BMP):
        return _bmp_damage(content, length)
    if content[:4] in _TIFF:
        return _tiff_damage(content)
    for name, width, height in _other_sizes(content):
        if width * height > _DENSEST * length:
            return _implausible(name, width, height, length)
        if too_large := _too_large(name, width, height):
            return too_large
    return None


def _truncated(name: str) -> Damage:
    return Damage("image_truncated", f"the {name} data end early (incomplete file)")


def _too_many_parts(name: str) -> Damage:
    return Damage("image_unreadable", f"the {name} has more than {_MOST_PARTS} parts")


def _implausible(name: str, width: int, height: int, byte_count: int) -> Damage:
    return Damage(
        "image_unreadable",
        f"the {name} claims {width}x{height} pixels, which {byte_count} bytes cannot hold",
    )


def _too_large(name: str, width: int, height: int) -> Damage | None:
    if width * height <= MOST_PIXELS:
        return None
    return Damage(
        "image_unreadable",
        f"the {name} has {width}x{height} pixels, more than {MOST_PIXELS}: cut it into tiles",
    )


def _jpeg_damage(content: bytes) -> Damage | None:
    """Finds damage in a JPEG: in its segments, or a missing end.

    A thumbnail inside a segment has its own end mark; within coded pixels, 0xFF is always followed
    by 0, so 0xFFD9 there is the true end.  The walk must match the decoder's: otherwise it could
    skip a frame that the decoder finds.
    """
    position, marker, parts = 2, 0, 0
    while marker != _SCAN:
        segment, parts = _SEGMENT.search(content, position), parts + 1
        if parts > _MOST_PARTS:
            return _too_many_parts("JPEG")
        if segment is None:
            return _truncated("JPEG")
        marker, position = content[segment.end() - 1], segment.end()
        if marker in _FRAMES and position + 7 <= len(content):
            height, width = struct.unpack_from(">HH", content, position + 3)
            if width * height > _JPEG_PIXELS * len(content):
                return _implausible("JPEG", width, height, len(content))
            if too_large := _too_large("JPEG", width, height):
                return too_large
        position += max(2, int.from_bytes(content[position : position + 2], "big"))
    # For most files this avoids a search through all pixels.
    if content.endswith(_END) and len(content) >= position + 2:
        return None
    return _truncated("JPEG") if content.find(_END, position) < 0 else None


def _png_damage(content: bytes) -> Damage | None:
    """Finds damage in a PNG: in its header, in its chunks, or a missing end."""
    if len(content) < 33:
        return _truncated("PNG")
    if content[8:16] != b"\0\0\0\rIHDR":
        return Damage("image_unreadable", "the PNG does not begin with its size")
    width, height, bits, colour = struct.unpack_from(">IIBB", content, 16)
    if not (width and height and bits in (1, 2, 4, 8, 16) and colour in _PNG_CHANNELS):
        return Damage("image_unreadable", "the PNG's header makes no sense")
    row = width * bits * _PNG_CHANNELS[colour] // 8
    if row * height > _DEFLATE * len(content):
        return _implausible("PNG", width, height, len(content))
    if too_large := _too_large("PNG", width, height):
        return too_large
    kinds = [kind for kind, _, _ in islice(png_chunks(content), _MOST_PARTS)]
    if kinds[-1] != b"IEND":
        return _too_many_parts("PNG") if len(kinds) == _MOST_PARTS else _truncated("PNG")
    if kinds.count(b"IHDR") > 1:
        return Damage("image_unreadable", "the PNG has several sizes")
    return None


def png_chunks(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields (kind, begin, end) of each complete chunk of a PNG."""
    position, size = len(PNG), len(content)
    while position + 12 <= size:
        length, kind = _CHUNK.unpack_from(content, position)
        start, position = position, position + 12 + length
        if position > size:
            return
        yield kind, start, position
        if kind == b"IEND":
            return


def _bmp_damage(content: bytes, length: int) -> Damage | None:
    """Finds damage in a BMP: incomplete uncompressed pixels; the decoder checks compressed ones."""
    if len(content) < 34:
        return _truncated("BMP")
    start, header, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", content, 10)
    if header < 40:
        return None
    if too_large := _too_large("BMP", width, abs(height)):
        return too_large
    if compression not in (_BMP_RGB, *_BMP_MASKS):
        return None
    if width <= 0 or height == 0 or bits not in (1, 4, 8, 16, 24, 32):
        return Damage("image_unreadable", "the BMP's header makes no sense")
    needed = start + (width * bits + 31) // 32 * 4 * abs(height)
    if needed > length:
        return _truncated("BMP")
    if masks := _unread_masks(content):
        text = ", ".join(f"{mask:#x}" for mask in masks)
        return Damage("pixel_kind", f"a BMP of unusual masks of colours ({text}): save it as PNG")
    return None


def _webp_damage(content: bytes, length: int) -> Damage | None:
    """Finds damage in a WebP: a missing end, or too many pixels."""
    if content[12:16] == b"VP8X" and len(content) >= 30:
        width, height = (
            int.from_bytes(content[offset : offset + 3], "little") + 1 for offset in (24, 27)
        )
        if too_large := _too_large("WebP", width, height):
            return too_large
    declared = int.from_bytes(content[4:8], "little") + 8
    return _truncated("WebP") if declared > length else None


def _other_sizes(content: bytes) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, width, height) in other formats that unpack to many times their size.

    OpenCV took 21 s and 7 GB for a GIF of 627 bytes, 23 s and 13 GB for a JPEG 2000 of 265 bytes.
    """
    if content.startswith(b"GIF8") and len(content) >= 10:
        yield "GIF", *struct.unpack_from("<HH", content, 6)
    elif content.startswith(_JPEG_2000):  # all headers: decoders skip false ones before the true
        for size in re.finditer(b"\xff\x4f\xff\x51.{4}(.{16})", content, re.DOTALL):
            right, lower, left, upper = struct.unpack(">IIII", size[1])
            yield "JPEG 2000", max(0, right - left), max(0, lower - upper)
    elif content.startswith(b"\x59\xa6\x6a\x95") and len(content) >= 12:
        yield "Sun raster", *struct.unpack_from(">II", content, 4)
    elif content.startswith(b"#?R"):
        for height, width in re.findall(
            rb"[-+][XY] +(\d{1,9}) +[-+][XY] +(\d{1,9})", content[:4096]
        ):
            yield "HDR", int(width), int(height)


class Tiff(NamedTuple):
    """The first picture of a TIFF, as described by its directory (TIFF 6.0, section 8).

    Attributes:
        bits: number of bits per sample.
        samples: number of samples per pixel.
        numbers: kind of the samples, a key of _TIFF_NUMBERS, or 1: unsigned integers.
        colours: meaning of the samples.
        extra: meaning of the first sample that is not a colour, stored in the file at `extra_at`.
    """

    width: int = 0
    height: int = 0
    orientation: int = 1
    bits: int = 1
    samples: int = 1
    numbers: int = 1
    colours: int = -1
    extra: int = 0
    extra_at: int = 0


def tiff_of(read: Callable[[int, int], bytes]) -> Tiff | None:
    """Reads the header of a TIFF; returns None if it is not a TIFF, or truncated.

    Args: read: called with an offset and a count; returns those bytes of the file, or fewer.
    """
    head = read(0, 16)
    if head[:4] not in _TIFF:
        return None
    order, large = _TIFF[head[:4]]
    offset_type, count_type, entry_size, value_start = (
        ("Q", "Q", 20, 12) if large else ("I", "H", 12, 8)
    )
    fields: dict[str, int] = {}
    try:
        (start,) = struct.unpack_from(order + offset_type, head, 8 if large else 4)
        (entries,) = struct.unpack(order + count_type, read(start, struct.calcsize(count_type)))
        start += struct.calcsize(count_type)
        entries = min(entries, _MOST_TIFF_ENTRIES)
        directory = read(start, entry_size * entries)
        for entry in range(0, entry_size * entries, entry_size):
            tag, kind, values = struct.unpack_from(order + "HH" + offset_type, directory, entry)
            if tag not in _TIFF_TAGS or kind not in _TIFF_INTEGERS:
                continue
            layout = order + _TIFF_INTEGERS[kind]
            value_offset = start + entry + value_start
            # Values too long for the entry are stored elsewhere, and the entry holds their offset.
            if values * struct.calcsize(layout) > entry_size - value_start:
                (value_offset,) = struct.unpack_from(
                    order + offset_type, directory, entry + value_start
                )
            (number,) = struct.unpack(layout, read(value_offset, struct.calcsize(layout)))
            fields[_TIFF_TAGS[tag]] = number
            if _TIFF_TAGS[tag] == "extra":
                fields["extra_at"] = value_offset
    except (struct.error, OverflowError, ValueError, OSError):  # truncated, or no such offset
        return None
    return Tiff(**fields)


def _tiff_damage(content: bytes) -> Damage | None:
    """Finds damage in a TIFF: too many pixels, or pixels without an 8-bit RGB form."""
    tiff = tiff_of(lambda offset, count: content[offset : offset + count])
    if tiff is None:
        return None
    if too_large := _too_large("TIFF", tiff.width, tiff.height):
        return too_large
    kind = unread_pixels(tiff)
    return Damage("pixel_kind", f"a TIFF of {kind}") if kind else None


def unread_pixels(tiff: Tiff) -> str:
    """Explains why pixels have no obvious 8-bit RGB form; "" if they have one."""
    if tiff.numbers in _TIFF_NUMBERS or tiff.bits > 16:
        kind = f"{tiff.bits}-bit {_TIFF_NUMBERS.get(tiff.numbers, 'integer')} numbers"
        return f"{kind}: choose the black and white values, then save as unsigned 8 or 16 bits"
    colour_samples = _TIFF_SAMPLES.get(tiff.colours)
    if tiff.colours in _TIFF_COLOURS:
        return f"{_TIFF_COLOURS[tiff.colours]} colours: convert it to RGB"
    if colour_samples is not None and not colour_samples <= tiff.samples <= colour_samples + 1:
        return f"{tiff.samples} channels: save one or three of them"
    return ""
