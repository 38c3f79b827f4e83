"""What reaches OpenCV; that nothing which does ends a process, tests/faults/fuzz.py tries."""

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import struct
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.common.child import ends_with_this
from ppdist.runtime import decoder
from ppdist.runtime.decoder import damage, decode
from tests.unit.data.corpus import hollow_jpeg
from tests.unit.data.pictures import broken_animation, exif, jpeg, picture, png_chunk

SIZE = (12, 16)  # of every image here
SECONDS = 30  # for them: a bound against hanging


def encoded(mode: str, kind: str, **options: Any) -> bytes:
    if mode == "I;16":
        image = Image.fromarray(picture(*SIZE)[:, :, 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(picture(*SIZE)).convert(mode)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def read(content: bytes) -> str:
    """What `read_image` does with the bytes of a file, and how it ended."""
    if damage(content) is not None:
        return "refused"
    try:
        return "no image" if decode(content) is None else "decoded"
    except cv2.error:
        return "error"


def in_child(work: Callable[[bytes], str], contents: Sequence[bytes]) -> tuple[list[str], int]:
    """What it gave for each, and how the process ended: 0, or the negative number of a signal."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_work, args=(theirs, work, contents, ends_with_this(signal.SIGKILL))
    )
    process.start()
    theirs.close()
    given = []
    try:
        while ours.poll(SECONDS):
            given.append(ours.recv())
        process.kill()
    except EOFError:
        pass
    process.join()
    assert process.exitcode is not None
    return given, process.exitcode


def _work(
    pipe: Connection, work: Callable[[bytes], str], contents: Sequence[bytes],
    ask: Callable[[], None],
) -> None:  # fmt: skip
    ask()
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    cv2.setNumThreads(0)
    for content in contents:
        pipe.send(work(content))


def test_broken_animation_shows_its_still_picture() -> None:
    """OpenCV 5.0 dies of it: one of its moving frames is packed with a filter that is none."""
    content = broken_animation()
    assert damage(content) is None
    ends, code = in_child(read, [content])
    assert (ends, code) == (["decoded"], 0)
    image_HW3 = decode(content)
    assert image_HW3 is not None and (image_HW3 == 0).all()


def test_opencv_gets_only_chunks_that_pixels_need(monkeypatch) -> None:
    seen: list[bytes] = []
    whole = cv2.imdecode
    monkeypatch.setattr(
        cv2, "imdecode", lambda data, how: seen.append(data.tobytes()) or whole(data, how)
    )
    plain = encoded("RGB", "PNG")
    packed = png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(100_000)))
    extras = [png_chunk(b"gAMA", struct.pack(">I", 22_000)), png_chunk(b"sBIT", b"\1\1\1"), packed]
    for content in (plain, plain[:33] + b"".join(extras) + plain[33:]):
        image_HW3 = decode(content)
        assert image_HW3 is not None and (image_HW3 == picture(*SIZE)).all()
    assert seen == [plain, plain]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_first_frame_of_an_animation_is_taken(mode: str) -> None:
    frames = [Image.fromarray(picture(*SIZE, seed=seed)).convert(mode) for seed in range(3)]
    file, still = io.BytesIO(), io.BytesIO()
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:], duration=50)
    frames[0].save(still, "PNG")
    assert file.getvalue().count(b"fdAT") == 2
    np.testing.assert_array_equal(decode(file.getvalue()), decode(still.getvalue()))


def test_files_of_very_many_parts_are_refused() -> None:
    png, jpeg = encoded("RGB", "PNG"), encoded("RGB", "JPEG")
    for content in (
        png[:33] + png_chunk(b"prIv", b"") * 300_000 + png[33:],
        jpeg[:2] + b"\xff\xfe\0\2" * 300_000 + jpeg[2:],
    ):
        found = damage(content)
        assert found is not None and "262144 parts" in found.text


def test_other_kinds_claim_no_more_than_they_hold() -> None:
    """OpenCV 5.0 took 21 s and 7 GB for the first, 23 s and 13 GB for the second."""
    gif = encoded("P", "GIF")
    assert damage(gif) is None and decode(gif) is not None
    assert damage(b"GIF89a" + struct.pack("<HH", 1, 1)) is None  # cut short: not for us to say
    jp2 = cv2.imencode(".jp2", np.zeros((64, 64, 3), np.uint8))[1].tobytes()
    at = jp2.index(b"\xff\x4f\xff\x51")
    assert damage(jp2) is None
    hdr = cv2.imencode(".hdr", np.ones(SIZE, np.float32))[1].tobytes()
    assert damage(hdr) is None
    sides = struct.pack(">II", 30_000, 30_000)
    for content in (
        gif[:6] + struct.pack("<HH", 32_000, 32_000) + gif[10:],
        jp2[: at + 8] + sides + jp2[at + 16 :],
        jp2[at : at + 8] + sides + jp2[at + 16 :],
        jp2[:at] + jp2[at : at + 40] + jp2[at : at + 8] + sides + jp2[at + 16 :],
        hdr.replace(b"-Y 12 +X 16", b"-Y 30000 +X 30000"),
    ):
        found = damage(content)
        assert found is not None and "bytes cannot hold" in found.text
    found = damage(hdr.replace(b"-Y 12 +X 16", b"-Y 30000 +X 30000"), 1 << 30)
    assert found is not None and "cut it into tiles" in found.text


def test_a_png_of_two_sizes_is_refused() -> None:
    plain = encoded("RGB", "PNG")
    found = damage(plain[:33] + plain[8:33] + plain[33:])
    assert found is not None and "several sizes" in found.text


RGB_32, BGR_32 = (0xFF, 0xFF00, 0xFF0000), (0xFF0000, 0xFF00, 0xFF)
MASKS = {
    "blue first": (32, BGR_32),
    "none, as OpenCV takes it": (32, (0, 0, 0)),
    "red first": (32, RGB_32),
    "transparency first": (32, (0xFF00, 0xFF0000, 0xFF000000)),
    "ten bits": (32, (0x3FF00000, 0xFFC00, 0x3FF)),
    "few bits of 32": (32, (0xF800, 0x7E0, 0x1F)),
    "5, 6, 5": (16, (0xF800, 0x7E0, 0x1F)),
    "5, 5, 5": (16, (0x7C00, 0x3E0, 0x1F)),
    "red last": (16, (0x1F, 0x7E0, 0xF800)),
    "4, 4, 4": (16, (0xF00, 0xF0, 0xF)),
}


def masked_bmp(
    image_HW3: np.ndarray, bits: int, masks: tuple[int, int, int], header: int = 40,
    packing: int = 3, upwards: bool = True,
) -> bytes:  # fmt: skip
    """As whoever writes one by the book; header: its bytes, packing: 3 or 6 (with transparency)."""
    height, width = image_HW3.shape[:2]
    pixels_HW = np.zeros((height, width), np.uint64)
    for channel, mask in enumerate(masks if any(masks) else BGR_32):
        lowest = mask & -mask
        values_HW = image_HW3[..., channel].astype(np.uint64) * np.uint64(mask // lowest)
        pixels_HW |= (values_HW + np.uint64(127)) // np.uint64(255) * np.uint64(lowest)
    rows = [row.astype(f"<u{bits // 8}").tobytes() for row in pixels_HW]
    body = b"".join(row + bytes(-len(row) % 4) for row in (rows[::-1] if upwards else rows))
    shape = struct.pack("<IiiHH", header, width, height if upwards else -height, 1, bits)
    head = shape + struct.pack("<IIiiII", packing, len(body), 2835, 2835, 0, 0)
    head += struct.pack("<IIII", *masks, 0)[: max(header - 40, 12 if packing == 3 else 16)]
    start = 14 + len(head := head.ljust(header, b"\0"))
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + body


@pytest.mark.parametrize("name", MASKS)
def test_bmps_of_any_masks_are_read_right_or_refused(name) -> None:
    bits, masks = MASKS[name]
    image_HW3 = picture(5, 7)
    for header, packing in ((40, 3), (40, 6), (52, 3), (56, 3), (108, 3), (124, 3), (124, 6)):
        if (packing == 6 or bits == 16) and not any(masks):
            continue
        content = masked_bmp(image_HW3, bits, masks, header, packing)
        found = damage(content)
        assert found == damage(content[:66], len(content))
        if found is not None:
            assert found.code == "pixel_kind" and (name != "blue first" or packing == 6)
            continue
        step = 0 if max(masks).bit_length() - min(masks).bit_length() >= 16 else 17
        found_HW3 = decode(content)
        assert found_HW3 is not None
        assert np.abs(found_HW3.astype(int) - image_HW3).max() <= step, (header, packing)


def test_a_bmp_that_is_cut_short_is_refused() -> None:
    found = damage(masked_bmp(picture(5, 7), 32, BGR_32)[:-1])
    assert found is not None and found.code == "image_truncated"


JPEGS = [
    {"subsampling": sampling, "progressive": progressive, "quality": quality}
    for sampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1")
    for progressive in (False, True)
    for quality in (30, 95)
]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(48, 64), (33, 47), (1, 9)])
def test_simplejpeg_gives_the_pixels_of_opencv(monkeypatch, mode, size) -> None:
    pytest.importorskip("simplejpeg")
    image = Image.fromarray(picture(*size)).convert(mode)
    for options in JPEGS:
        file = io.BytesIO()
        image.save(file, "JPEG", **options)
        content = file.getvalue()
        ways = [(reduced, upright) for reduced in (1, 2, 4, 8) for upright in (True, False)]
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "simplejpeg", None)
            by_opencv = [decode(content, *way) for way in ways]
        with monkeypatch.context() as patch:
            patch.delattr(cv2, "imdecode")
            for way, image_HW3 in zip(ways, by_opencv):
                np.testing.assert_array_equal(decode(content, *way), image_HW3)


@pytest.mark.parametrize(
    "content",
    [
        encoded("CMYK", "JPEG"),
        jpeg(picture(*SIZE), exif=exif(6)),
        jpeg(picture(*SIZE), exif=exif(3)),
        jpeg(picture(*SIZE)).replace(b"\xff\xc0", b"\xff\xc9", 1),  # arithmetic coding
        hollow_jpeg(jpeg(picture())),
    ],
    ids=["cmyk", "on its side", "upside down", "arithmetic", "hollow"],
)
def test_opencv_keeps_what_is_not_plain(monkeypatch, content: bytes) -> None:
    pytest.importorskip("simplejpeg")
    seen: list[int] = []
    whole = cv2.imdecode

    def imdecode(data: np.ndarray, flags: int) -> np.ndarray | None:
        seen.append(flags)
        return whole(data, flags)

    monkeypatch.setattr(cv2, "imdecode", imdecode)
    with contextlib.suppress(cv2.error):
        decode(content)
    assert seen == [cv2.IMREAD_COLOR_RGB]
