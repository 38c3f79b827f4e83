"""Turns the bytes of a stranger into an image, or a refusal with its reason.

Nothing here touches the file system.  Headers are read before a decoder sees the bytes, because
decoders trust them (see ppdist_runtime/decoder.py, which decodes).  Less is accepted than of local
files: no animation, few parts, few passes.  What is read here has to be what the decoder will read;
where the two might differ the image is refused.
"""

import re
import struct
from functools import partial
from itertools import islice

import cv2
import numpy as np
from ppdist_runtime import decoder
from ppdist_runtime.decoder import PNG
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

FORMATS = "JPEG, PNG, WebP or BMP"
# First bytes of what is often sent instead -> its name.
_OTHER_KINDS = {
    b"GIF8": "a GIF",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"PK\3\4": "a ZIP archive",
    b"\x1f\x8b": "gzip data",
    b"%PDF": "a PDF",
    b"<svg": "an SVG",
    b"<!DO": "an HTML page",
    b"<htm": "an HTML page",
}
# The next marker as libjpeg looks for it; marks between pixels (0xD0 to 0xD7) are no concern here.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of a frame's size
# A progressive JPEG has about ten passes over its pixels; each costs the time of a whole image,
# however few bytes it has (measured: 100 passes, 24 megapixels, 148 KB: 8 s).
_MOST_SCANS = 50
_MOST_PARTS = 20_000  # segments of a JPEG, chunks of a PNG; OpenCV writes one every 8 KB
_MOST_FORM_PARTS = 16
# Limits of each part of a form.  The parser takes time for every byte of them, and old versions the
# square of it (0.0.26: 15 s for 1 MB of semicolons; 0.0.27 has bounds of its own).
_MOST_HEADERS, _MOST_HEADER_BYTES = 7, 3072
_PIECE = 4096  # bytes of a form that are parsed at once: limits are checked after each piece


class Refused(Exception):
    """A refused request: its HTTP status, and the reason for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def decode(content: bytes, most_pixels: int) -> np.ndarray:
    """Decodes an image as uint8 RGB [H, W, 3], turned upright by its EXIF data as in training.

    Raises: Refused: 413 too many pixels; 415 no image of one of FORMATS; 422 damaged.
    """
    name, width, height = read_header(content)
    if not width or not height:
        raise Refused(422, f"the {name} is damaged: its size is {width}x{height} pixels")
    if width * height > most_pixels:
        raise Refused(
            413, f"the {name} has {width}x{height} pixels, more than the {most_pixels} allowed here"
        )
    try:
        image_HW3 = decoder.decode(content)
    except cv2.error:
        image_HW3 = None
    if image_HW3 is None or image_HW3.shape[0] * image_HW3.shape[1] > most_pixels:
        raise Refused(422, f"the {name} is damaged: it cannot be decoded")
    return image_HW3


def read_header(content: bytes) -> tuple[str, int, int]:
    """Reads (format, width, height) from the header of an image that is complete.

    Raises: Refused: 400 empty; 415 no image of one of FORMATS, or an animated one; 422 cut short.
    """
    if not content:
        raise Refused(400, f"the image is empty; send a {FORMATS} image")
    if content.startswith(b"\xff\xd8"):
        return ("JPEG", *_jpeg_size(content))
    if content.startswith(PNG):
        return ("PNG", *_png_size(content))
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return ("WebP", *_webp_size(content))
    if content.startswith(b"BM"):
        return ("BMP", *_bmp_size(content))
    kind = _OTHER_KINDS.get(content[:4]) or _OTHER_KINDS.get(content[:2]) or "no image"
    raise Refused(415, f"this is {kind}; send a {FORMATS} image")


def _cut_short(name: str) -> Refused:
    return Refused(422, f"the {name} is damaged: its data end early")


def _too_many_parts(name: str) -> Refused:
    return Refused(422, f"the {name} has more than {_MOST_PARTS} parts")


def _animated(name: str) -> Refused:
    return Refused(415, f"this {name} is animated; send single images")


def _jpeg_size(content: bytes) -> tuple[int, int]:
    """Walks the segments up to the end of the image, and over its pixels.

    A thumbnail inside a segment has sizes and an end of its own, and every pass over the pixels
    costs time.  Within coded pixels 0xFF is always followed by 0 or by a mark that has no length.
    """
    width = height = scans = 0
    offset = 2
    for _ in range(_MOST_PARTS):
        match = _JPEG_MARKER.search(content, offset)
        if match is None:
            raise _cut_short("JPEG")
        # libjpeg skips unknown bytes, and might find another size in them.
        if not scans and content[offset : match.start()].strip(b"\xff"):
            raise Refused(422, "the JPEG is damaged: there is something between its segments")
        marker, offset = match[1][0], match.end()
        if marker == 0xD9:
            return width, height
        if marker in (0x01, 0xD8):  # they have no length
            continue
        length = int.from_bytes(content[offset : offset + 2], "big")
        if marker < 0xC0 or length < 2 or (marker in _JPEG_FRAMES and width):
            raise Refused(422, "the JPEG is damaged: its segments make no sense")
        if marker in _JPEG_FRAMES and offset + 7 <= len(content):
            height, width = struct.unpack_from(">HH", content, offset + 3)
        scans += marker == 0xDA
        if scans > _MOST_SCANS:
            raise Refused(422, f"the JPEG has more than {_MOST_SCANS} passes over its pixels")
        offset += length
    raise _too_many_parts("JPEG")


def _png_size(content: bytes) -> tuple[int, int]:
    if len(content) < 33 or content[8:16] != b"\0\0\0\rIHDR":
        raise Refused(422, "the PNG is damaged: it does not begin with its size")
    kinds = [kind for kind, _, _ in islice(decoder.png_chunks(content), _MOST_PARTS)]
    if kinds[-1] != b"IEND":
        raise _too_many_parts("PNG") if len(kinds) == _MOST_PARTS else _cut_short("PNG")
    if b"acTL" in kinds:
        raise _animated("PNG")
    if kinds.count(b"IHDR") > 1:
        raise Refused(422, "the PNG is damaged: it has several sizes")
    width, height = struct.unpack_from(">II", content, 16)
    return width, height


def _webp_size(content: bytes) -> tuple[int, int]:
    if len(content) < 30 or int.from_bytes(content[4:8], "little") + 8 > len(content):
        raise _cut_short("WebP")
    kind = content[12:16]
    if kind == b"VP8X":
        if content[20] & 2:
            raise _animated("WebP")
        width, height = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
    elif kind == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", content, 26))
    return width, height


def _bmp_size(content: bytes) -> tuple[int, int]:
    """Reads the size of an uncompressed BMP: nobody sends others, and their end is not known."""
    if len(content) < 34:
        raise _cut_short("BMP")
    start, header, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", content, 10)
    is_supported = bits in (1, 4, 8, 16, 24, 32) and compression in (0, 3, 6)
    if header < 40 or width <= 0 or not is_supported:
        raise Refused(415, "this kind of BMP is not read; send it as a PNG")
    if start + (width * bits + 31) // 32 * 4 * abs(height) > len(content):
        raise _cut_short("BMP")
    return width, abs(height)


def file_part(content_type: str, body: bytes) -> bytes:
    """Returns the one file of a multipart/form-data body, whatever its field is called.

    Starlette's own reader would write large parts to disk.  This one takes time for every part and
    every byte of their headers, so these are limited.

    Raises: Refused: 400: broken, no file in it, several, or too many parts or headers.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise Refused(400, "multipart/form-data without a boundary")
    files: list[bytearray] = []
    headers: list[tuple[bytes, bytes]] = []
    field, value, in_file, ended = bytearray(), bytearray(), False, False
    parts = header_bytes = 0

    def part_begins() -> None:
        nonlocal parts, header_bytes
        parts += 1
        if parts > _MOST_FORM_PARTS:
            raise Refused(400, f"the form has more than {_MOST_FORM_PARTS} parts; send one image")
        headers.clear()
        header_bytes = 0

    def add(text: bytearray, chunk: bytes, start: int, end: int) -> None:
        nonlocal header_bytes
        header_bytes += end - start
        if header_bytes > _MOST_HEADER_BYTES:
            raise Refused(
                400, f"a part of the form has more than {_MOST_HEADER_BYTES} bytes of headers"
            )
        text += chunk[start:end]

    def header_ended() -> None:
        if len(headers) == _MOST_HEADERS:
            raise Refused(400, f"a part of the form has more than {_MOST_HEADERS} headers")
        headers.append((bytes(field).lower(), bytes(value)))
        field.clear()
        value.clear()

    def headers_ended() -> None:
        nonlocal in_file
        # A part with a file name holds the image; other fields are ignored.
        disposition = dict(headers).get(b"content-disposition", b"").decode("latin-1")
        in_file = b"filename" in parse_options_header(disposition)[1]
        if in_file:
            files.append(bytearray())

    def form_ended() -> None:
        nonlocal ended
        ended = True

    def data(chunk: bytes, start: int, end: int) -> None:
        if in_file:
            files[-1] += chunk[start:end]

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": part_begins,
                "on_header_field": partial(add, field),
                "on_header_value": partial(add, value),
                "on_header_end": header_ended,
                "on_headers_finished": headers_ended,
                "on_part_data": data,
                "on_end": form_ended,
            },
        )
        for start in range(0, len(body), _PIECE):
            parser.write(body[start : start + _PIECE])
    except FormParserError as error:
        raise Refused(400, "the multipart/form-data body is broken") from error
    if not ended:
        raise Refused(400, "the multipart/form-data body ends early")
    if len(files) != 1:
        raise Refused(400, f"expected one file in the form, found {len(files)}; send one image")
    return bytes(files[0])
