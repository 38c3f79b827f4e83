"""What deploy/serving reads as an image, and what it refuses."""

import io
import itertools
import struct
import sys
import threading
import zlib
from collections.abc import AsyncIterator

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.deploy.fake_model import encoded, picture
from tests.deploy.serving_cases import JPEG, PNG, ask, served

import uploads  # isort: skip  # found by serving_cases


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(width: int, height: int, pixels: bytes = b"", before: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    parts = (b"\x89PNG\r\n\x1a\n", header, before, chunk(b"IDAT", zlib.compress(pixels)))
    return b"".join(parts) + chunk(b"IEND", b"")


def two_faced_jpeg() -> bytes:
    """8 x 8 for whoever jumps over FF 00 like over a segment; libjpeg reads on in it and finds
    12000 x 10000 (by the reviewer who decoded it: 453 bytes, 784 MB)."""
    content = encoded(np.full((8, 8), 128, np.uint8), ".jpg")
    at = content.index(b"\xff\xc0")
    end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    frame, rest = content[at:end], content[end:]
    huge = frame[:5] + struct.pack(">HH", 10000, 12000) + frame[9:]
    hidden = content[2:at] + huge + rest[:-2]
    return b"\xff\xd8\xff\0" + struct.pack(">H", 2 + len(hidden)) + hidden + frame + rest


def animated(format: str) -> bytes:
    frames = [Image.fromarray(picture(seed=seed)) for seed in (1, 2)]
    file = io.BytesIO()
    frames[0].save(file, format, save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp"])
@pytest.mark.parametrize("size", [(120, 80), (121, 97), (1, 1), (7, 500)])
def test_every_promised_format_is_read_at_odd_sizes(suffix, size):
    content = encoded(np.full((size[1], size[0], 3), 200, np.uint8), suffix)
    assert uploads.read_header(content)[1:] == size
    image_HW3 = uploads.decode(content, 10**6)
    assert image_HW3.shape == (size[1], size[0], 3)
    assert abs(image_HW3.astype(int) - 200).max() <= 3


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 80}, {"exif": b"Exif\0\0"}])
def test_the_three_kinds_of_webp_are_told_apart(options):
    file = io.BytesIO()
    Image.fromarray(picture()).save(file, "WEBP", **options)
    assert uploads.read_header(file.getvalue()) == ("WebP", 120, 80)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "I;16", "CMYK"])
def test_grey_palette_alpha_16bit_cmyk_become_rgb(mode):
    image = Image.fromarray(np.full((20, 30, 3), 153, np.uint8))
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 30), 153 * 257, np.uint16))
    else:
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG")
    image_HW3 = uploads.decode(file.getvalue(), 10**6)
    assert image_HW3.shape == (20, 30, 3) and image_HW3.dtype == np.uint8
    if mode != "1":
        assert abs(image_HW3.astype(int) - 153).max() <= 2


FORM = {"content-type": "multipart/form-data; boundary=b"}
HALF_A_FORM = b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\nabc'
TWO_FILES = HALF_A_FORM + b"\r\n" + HALF_A_FORM + b"\r\n--b--\r\n"
REFUSALS = {
    "empty": (b"", {}, 400, "the image is empty"),
    "text": (b"hello, world", {}, 415, "this is no image; send a JPEG, PNG, WebP or BMP image"),
    "HTML": (b"<!DOCTYPE html><p>", {}, 415, "this is an HTML page"),
    "ZIP": (b"PK\3\4" + bytes(100), {}, 415, "this is a ZIP archive"),
    "PDF": (b"%PDF-1.7", {}, 415, "this is a PDF"),
    "SVG": (b"<svg xmlns=''>", {}, 415, "this is an SVG"),
    "animated GIF": (animated("GIF"), {}, 415, "this is a GIF"),
    "animated PNG": (animated("PNG"), {}, 415, "this PNG is animated; send single images"),
    "animated WebP": (animated("WEBP"), {}, 415, "this WebP is animated"),
    "TIFF": (encoded(picture(), ".tiff"), {}, 415, "this is a TIFF"),
    "gzip body": (PNG, {"content-encoding": "gzip"}, 415, "compressed bodies are not read"),
    "cut JPEG": (JPEG[: len(JPEG) // 2], {}, 422, "the JPEG is damaged: its data end early"),
    "JPEG without end": (JPEG[:-2], {}, 422, "the JPEG is damaged: its data end early"),
    "JPEG without size": (b"\xff\xd8\xff\xd9", {}, 422, "its size is 0x0 pixels"),
    "slow JPEG": (
        JPEG[:-2] + b"\xff\xda\0\2" * 50 + b"\xff\xd9", {}, 422, "more than 50 passes"),
    "two-faced JPEG": (two_faced_jpeg(), {}, 422, "there is something between its segments"),
    "JPEG with a second size": (
        JPEG[:-2] + JPEG[JPEG.index(b"\xff\xc0") :], {}, 422, "its segments make no sense"),
    "JPEG of many marks": (
        JPEG[:2] + b"\xff\1" * 10**6 + JPEG[2:], {}, 422, "the JPEG has more than 20000 parts"),
    "PNG of many chunks": (
        png(8, 8, before=chunk(b"prIv", b"") * 10**5), {}, 422, "more than 20000 parts"),
    "PNG with a second size": (
        png(8, 8, before=png(9, 9)[8:33]), {}, 422, "the PNG is damaged: it has several sizes"),
    "cut PNG": (PNG[: len(PNG) // 2], {}, 422, "the PNG is damaged: its data end early"),
    "PNG of 0 pixels": (png(0, 5), {}, 422, "the PNG is damaged: its size is 0x5 pixels"),
    "PNG with few pixels": (png(50, 50, b"\0" * 99), {}, 422, "the PNG is damaged: it cannot be"),
    "PNG with a wrong sum": (PNG[:60] + b"!!" + PNG[62:], {}, 422, "the PNG is damaged"),
    "PNG with a huge chunk": (
        png(5, 5, before=b"\x7f\xff\xff\xffzTXt" + bytes(40)), {}, 422, "its data end early"),
    "huge PNG": (png(60000, 60000), {}, 413, "the PNG has 60000x60000 pixels, more than the"),
    "cut WebP": (encoded(picture(), ".webp")[:-5], {}, 422, "the WebP is damaged"),
    "cut BMP": (encoded(picture(), ".bmp")[:-9], {}, 422, "the BMP is damaged: its data end"),
    "no BMP": (b"BM" + bytes(60), {}, 415, "this kind of BMP is not read"),
    "form without boundary": (
        b"x", {"content-type": "multipart/form-data"}, 400, "without a boundary"),
    "form with a long boundary": (
        b"x", {"content-type": FORM["content-type"] + "b" * 300}, 400, "body is broken"),
    "form of many parts": (
        b"--b\r\nA:b\r\n\r\n\r\n" * 10**5, FORM, 400, "the form has more than 16 parts"),
    "form of many headers": (
        b"--b\r\n" + b"A:b\r\n" * 10**5, FORM, 400, "a part of the form has more than 7 headers"),
    "form of long headers": (
        b"--b\r\nContent-Disposition: form-data" + b";" * 10**6, FORM, 400,
        "a part of the form has more than 3072 bytes of headers"),
    "form cut short": (HALF_A_FORM, FORM, 400, "the multipart/form-data body ends early"),
    "no form": (b"\0\1\2", FORM, 400, "the multipart/form-data body is broken"),
    "form without file": (
        b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n--b--\r\n', FORM, 400,
        "expected one file in the form, found 0"),
    "form with two files": (TWO_FILES, FORM, 400, "expected one file in the form, found 2"),
    "unlucky size": (encoded(np.zeros((13, 13, 3), np.uint8)), {}, 422, "the model cannot take"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_no_usable_image_is_refused_in_words(name):
    content, headers, status, text = REFUSALS[name]
    with served() as (_, client):
        answer = ask(client, "POST", "/detect", content=content, headers=headers)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert text in answer.json()["error"]


def test_too_many_bytes_are_refused_before_they_are_read():
    pulled = []

    async def endless() -> AsyncIterator[bytes]:
        for number in range(1000):
            pulled.append(number)
            yield bytes(1000)

    with served(most_bytes=5000) as (_, client):
        declared = ask(client, "POST", "/detect", content=bytes(5001))
        chunked = ask(client, "POST", "/detect", content=endless())
        form = ask(client, "POST", "/detect", files={"f": ("a", bytes(5001))})
    for answer in (declared, chunked, form):
        assert answer.status_code == 413
        assert "5000 bytes" in answer.json()["error"]
    assert len(pulled) < 10


def test_a_bomb_never_reaches_the_decoder(monkeypatch):
    def explode(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(cv2, "imdecode", explode)
    bomb = png(30000, 30000, bytes(10**6))
    assert len(bomb) < 2000
    with pytest.raises(uploads.Refused, match="30000x30000 pixels, more than the 1000000"):
        uploads.decode(bomb, 10**6)


def test_padding_is_cheap_and_jpeg_may_have_trailer():
    lines = itertools.count()

    def count(*_: object):
        assert next(lines) < 10_000, "a step of Python for every byte"
        return count

    before = sys.gettrace()
    for content in (JPEG[:2] + b"\xff" * 9 * 10**6 + JPEG[2:], JPEG + b"\xff\xda" * 99):
        sys.settrace(count)
        try:
            decoded = uploads.decode(content, 10**6)
        finally:
            sys.settrace(before)
        assert decoded.shape == (80, 120, 3)


def test_png_text_chunks_never_reach_decoder(monkeypatch):
    seen: list[int] = []
    decode = cv2.imdecode
    monkeypatch.setattr(
        cv2, "imdecode", lambda content, how: seen.append(len(content)) or decode(content, how)
    )
    packed = zlib.compress(bytes(7_900_000), 9)
    extras = chunk(b"gAMA", struct.pack(">I", 99999)) + chunk(b"pHYs", bytes(9))
    bomb = PNG[:33] + extras + chunk(b"zTXt", b"k\0\0" + packed) * 60 + PNG[33:]
    assert (uploads.decode(bomb, 10**6) == picture()).all()
    assert seen == [len(PNG)]


def test_no_request_opens_a_file():
    opened: list[str] = []
    watching = threading.Event()
    sys.addaudithook(
        lambda event, arguments: (
            opened.append(str(arguments[0])) if event == "open" and watching.is_set() else None
        )
    )
    large = encoded(picture(900, 900, seed=1), ".bmp")  # 2.4 MB, which Starlette would spool
    with served() as (_, client):
        watching.set()
        try:
            answers = [
                ask(client, "POST", "/detect", files={"image": ("/etc/passwd", large)}),
                ask(client, "POST", "/detect?path=/etc/passwd", content=b"file:///etc/passwd"),
                ask(client, "GET", "/../../etc/passwd"),
                ask(client, "GET", "/docs"),
            ]
        finally:
            watching.clear()
    assert [answer.status_code for answer in answers] == [200, 415, 404, 200]
    assert opened == []
