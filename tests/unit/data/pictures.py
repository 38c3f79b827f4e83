"""Noise as pixels, and as a JPEG with its orientation; PNGs put together by hand."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def picture(height=48, width=64, seed=0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


def jpeg(image_HW3, **options) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image_HW3).save(content, "JPEG", quality=95, **options)
    return content.getvalue()


def exif(orientation: int, thumbnail: bytes = b"") -> bytes:
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes() + thumbnail


def png_chunk(kind: bytes, content: bytes) -> bytes:
    total = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + total


def broken_animation(height=12, width=16) -> bytes:
    """A black PNG of 200 bytes with two moving frames, of which the first cannot be unpacked."""
    frame = struct.pack(">IIIIHHBB", width, height, 0, 0, 1, 20, 0, 0)
    black = zlib.compress(bytes((3 * width + 1) * height))
    no_filter = zlib.compress(b"\x09" * (3 * width + 1) * height)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"acTL", struct.pack(">II", 3, 0)),
        (b"IDAT", black),
    ]
    for number, pixels in ((1, no_filter), (3, black)):
        parts.append((b"fcTL", struct.pack(">I", number) + frame))
        parts.append((b"fdAT", struct.pack(">I", number + 1) + pixels))
    parts.append((b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def tiff_of_channels(array_HWC: np.ndarray) -> bytes:
    """A TIFF that says of its first channel that it is grey, and of the others nothing."""
    height, width, channels = array_HWC.shape
    pixels, bits = array_HWC.tobytes(), 8 * array_HWC.dtype.itemsize
    first = 8 + len(pixels)
    bits_at, extra_at = first, first + 2 * channels
    lists = struct.pack(f"<{channels}H", *[bits] * channels) + bytes(2 * (channels - 1))
    place = extra_at if channels > 3 else 0
    tags = [
        (256, 3, 1, width), (257, 3, 1, height),
        (258, 3, channels, bits_at if channels > 2 else bits | bits << 16), (259, 3, 1, 1),
        (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, channels), (278, 3, 1, height),
        (279, 4, 1, len(pixels)), (338, 3, channels - 1, place),
    ]  # fmt: skip
    lists += bytes(len(lists) % 2)
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    start = struct.pack("<2sHI", b"II", 42, first + len(lists))
    return start + pixels + lists + directory + bytes(4)
