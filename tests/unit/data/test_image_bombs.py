"""Images of strangers: small on disk and endless in memory, or no files at all."""

import os
import resource
import struct
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import cv2
import numpy as np
import pytest

from ppdist.common.errors import DataError
from ppdist.data.image import read_image
from ppdist.runtime.decoder import MOST_PIXELS, damage
from tests.errors import raises
from tests.unit.data.pictures import png_chunk

SIDE = 30_000  # more than MOST_PIXELS as a square, fewer than OpenCV's own limit


@cache
def white_png(side: int) -> bytes:
    """True to its size: one bit a pixel, all the same."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(side // 8 + 1)) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", rows)
        + png_chunk(b"IEND", b"")
    )  # fmt: skip


def tiff(width: int, height: int, order: str = "<", large: bool = False) -> bytes:
    """Its first directory, and no pixels."""
    kinds = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 200, 277: 1, 279: 16}
    start = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if large else 42)
    if large:
        start += struct.pack(order + "HHQQ", 8, 0, 16, len(kinds))
        entries = [struct.pack(order + "HHQQ", tag, 16, 1, one) for tag, one in kinds.items()]
    else:
        start += struct.pack(order + "IH", 8, len(kinds))
        entries = [struct.pack(order + "HHII", tag, 4, 1, one) for tag, one in kinds.items()]
    return start + b"".join(entries) + bytes(300)


def bmp(side: int) -> bytes:
    """Says that its pixels are compressed (runs of 8 bits)."""
    sizes = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 500, 0, 0, 54) + sizes + bytes(500)


def webp(side: int) -> bytes:
    """A canvas for several pictures."""
    canvas = b"VP8X" + struct.pack("<IBBBB", 10, 2, 0, 0, 0) + 2 * (side - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(canvas) + 4) + b"WEBP" + canvas


def jpeg(side: int) -> bytes:
    """A frame of this size, and enough bytes behind it to be believed."""
    _, whole = cv2.imencode(".jpg", np.zeros((64, 64), np.uint8))
    content = bytearray(whole.tobytes())
    frame = content.index(b"\xff\xc0")
    struct.pack_into(">HH", content, frame + 5, side, side)
    return bytes(content[:-2]) + bytes(side * side // 2048) + b"\xff\xd9"


@pytest.mark.parametrize("trick", ["no marker", "a stray byte", "a length of nothing"])
def test_hidden_frame_is_found_before_decoder(trick: str) -> None:
    """A JPEG of 8x8 pixels for whoever is led past, or away from, the other frame in its header."""
    _, encoded = cv2.imencode(".jpg", np.zeros((8, 8), np.uint8))
    small = encoded.tobytes()
    large = bytearray(small[2:-2])
    struct.pack_into(">HH", large, large.index(b"\xff\xc0") + 5, SIDE, SIDE)
    before = {
        "no marker": b"\xff\0" + struct.pack(">H", len(large) + 2),
        "a stray byte": b"\xff\xfe\0\2x",
        "a length of nothing": b"\xff\xfe\0\0",
    }
    found = damage(small[:2] + before[trick] + large + small[2:])
    assert found is not None and f"claims {SIDE}x{SIDE} pixels" in found.text
    assert damage(small[:2] + b"\xff\xfe\0\2x" + small[2:]) is None


@pytest.mark.parametrize(
    ("suffix", "made"),
    [
        (".png", partial(white_png, SIDE)),
        (".jpg", partial(jpeg, SIDE)),
        (".bmp", partial(bmp, SIDE)),
        (".webp", partial(webp, SIDE)),
        (".tif", partial(tiff, SIDE, SIDE)),
        (".tiff", partial(tiff, SIDE, SIDE, ">")),
        (".big.tif", partial(tiff, SIDE, SIDE, "<", large=True)),
        (".huge.tif", partial(tiff, 2**32 - 1, 2**32 - 1, ">", large=True)),
    ],
)
def test_too_many_pixels_are_refused_before_decoding(
    suffix: str, made: Callable[[], bytes], tmp_path: Path
) -> None:
    file, content = tmp_path / f"bomb{suffix}", made()
    file.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises("image_unreadable"):
        read_image(file)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000, f"{grown} KB for {len(content)} bytes"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("large", [False, True])
def test_tiff_size_is_read_and_fitting_one_decoded(order, large) -> None:
    side = 1 << 14
    assert side * side == MOST_PIXELS
    assert damage(tiff(side, side, order, large)) is None
    assert damage(tiff(side + 1, side, order, large)) is not None
    beyond = struct.pack(order + ("Q" if large else "I"), 2**63 if large else 2**31)
    at = 8 if large else 4
    whole = tiff(SIDE, SIDE, order, large)
    assert damage(whole[:at] + beyond + whole[at + len(beyond) :]) is None
    for length in range(4, 200, 7):
        assert damage(tiff(SIDE, SIDE, order, large)[:length]) is None or length > 40
    assert damage(b"II*\0" + bytes(40)) is None


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    with (tmp_path / "large.jpg").open("wb") as file:
        file.truncate(1 << 33)  # it takes up no room
    for name, says in (
        ("pipe", "not a file"),
        ("zero", "not a file"),
        ("folder", "Is a directory|not a file"),
        ("large", "too large: 8589934592 bytes"),
    ):
        with pytest.raises(DataError, match=says) as caught:
            read_image(tmp_path / f"{name}.jpg")
        assert caught.value.code == "image_unreadable"
