"""Image files checked in child processes that may die."""

import os
import signal
import time

import cv2
import numpy as np
import pytest
from PIL import Image
from PIL import ImageFile as PillowFile

from ppdist.common.errors import DataError
from ppdist.common.machine import is_alive
from ppdist.common.opener import Opener
from ppdist.common.retry import unavailable, with_retries
from ppdist.data.checks import images as module
from ppdist.data.checks.images import (
    ImageCheck,
    ImageFile,
    check_files,
    check_image,
    check_images,
)
from ppdist.data.image import read_header, read_image
from ppdist.runtime.decoder import damage
from tests.unit.data.corpus import (
    SIZE,
    exif,
    hollow_jpeg,
    picture,
    write_images,
    write_picture,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def kinds(folder) -> dict[str, str]:
    return write_images(folder)


def checked(files, decode):
    return check_files(files, decode=decode, workers=2, done=lambda count: None)


@pytest.mark.parametrize("decode", [True, False])
def test_each_defect_of_a_file_is_found_and_nothing_else(folder, kinds, decode):
    files = []
    for name in kinds:
        size = (50, 50) if name == "other_size.jpg" else SIZE
        files.append(ImageFile(str(folder / name), size))
    checks = dict(zip(kinds, checked(files, decode)))
    assert checks["copy.jpg"].digest == checks["good0.jpg"].digest != checks["good1.jpg"].digest
    for name, kind in kinds.items():
        problem = checks[name].problem
        found = [*([problem.code] if problem else []), *checks[name].notes]
        assert found == ([] if kind in ("", "image_duplicate") else [kind]), name
        assert problem is None or str(folder) not in problem.text  # who reports it names the file


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("size", [SIZE, SIZE[::-1], (50, 50)])
def test_header_decoding_and_training_agree_on_the_size(tmp_path, suffix, orientation, size):
    file = write_picture(tmp_path / f"a.{suffix}", 0, exif=exif(orientation))
    seen = [check_image(str(file), size, decode=decode) for decode in (False, True)]
    assert seen[0] == seen[1]
    assert seen[0].notes == (("exif_orientation",) if orientation > 1 else ())
    try:
        read_image(file, size[::-1])
        assert seen[0].problem is None
    except DataError as error:
        assert seen[0].problem == ("size_mismatch", error.what)
    turned = orientation > 4
    if suffix != "tif" or not turned:
        assert (seen[0].problem is None) == (size == SIZE or (turned and size == SIZE[::-1]))


def test_damage_amid_a_jpeg_is_found_by_decoding_alone(tmp_path):
    file = tmp_path / "a.jpg"
    Image.fromarray(picture(0, (320, 240))).save(file, quality=90)
    file.write_bytes(hollow_jpeg(file.read_bytes()))
    (found,) = checked([ImageFile(str(file), None)], False)
    assert found.problem is None
    (found,) = checked([ImageFile(str(file), None)], True)
    assert found.problem.code == "image_unreadable" and "filled in" in found.problem.text


def test_a_large_file_is_judged_by_its_head_and_end(tmp_path):
    noise = np.random.RandomState(0).randint(0, 256, (300, 400, 3)).astype(np.uint8)
    for suffix in ("jpg", "png"):
        file = tmp_path / f"a.{suffix}"
        Image.fromarray(noise).save(file, **({"quality": 95} if suffix == "jpg" else {}))
        whole = file.read_bytes()
        assert len(whole) > 80_000
        first = check_image(str(file), (400, 300), decode=False)
        assert first.problem is None
        file.write_bytes(whole + bytes(20_000))  # padding is not damage
        assert check_image(str(file), (400, 300), decode=False).problem is None
        file.write_bytes(whole[:-9000])
        cut = check_image(str(file), (400, 300), decode=False)
        assert cut.problem.code == "image_truncated" and cut.digest != first.digest


@pytest.mark.parametrize("suffix", ["bmp", "webp", "tif"])
def test_truncated_large_file_of_any_format_is_found(tmp_path, suffix):
    """Of a TIFF, whose pixels may lie anywhere, when it is decoded."""
    noise = np.random.RandomState(0).randint(0, 256, (300, 400, 3)).astype(np.uint8)
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(file, **({"quality": 98} if suffix == "webp" else {}))
    whole = file.read_bytes()
    assert check_image(str(file), (400, 300), decode=False).problem is None
    for length in (len(whole) - 2, 80_000):
        assert length > 74_000
        file.write_bytes(whole[:length])
        problem = check_image(str(file), (400, 300), decode=suffix == "tif").problem
        code = "image_unreadable" if suffix == "tif" else "image_truncated"
        assert problem.code == code, length


def test_what_a_header_does_not_tell_is_left_to_the_workers(tmp_path):
    """Of a file that begins as an image."""
    (tmp_path / "a.tif").write_bytes(b"II*\0" + bytes(40))
    found = check_image(str(tmp_path / "a.tif"), SIZE, decode=False)
    assert found.problem is None and found.digest
    assert check_image(str(tmp_path / "a.tif"), SIZE, decode=True).problem is not None


def test_a_look_at_a_header_decodes_no_pixel(tmp_path, monkeypatch):
    def decoded(*arguments, **options):
        raise AssertionError("decoded")

    files = [
        write_picture(tmp_path / f"a.{end}", 0) for end in ("jpg", "png", "bmp", "webp", "tif")
    ]
    monkeypatch.setattr(PillowFile.ImageFile, "load", decoded)
    monkeypatch.setattr(module, "read_image", decoded)
    for file in files:
        assert check_image(str(file), SIZE, decode=False).problem is None, file


def test_transient_problem_is_told_from_file_problem(tmp_path, monkeypatch):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    assert not check_image(str(bad), None, decode=False).passing
    assert check_image(str(tmp_path / "absent.jpg"), None, decode=False).passing
    found = check_image(str(tmp_path), None, decode=False)
    assert found.passing and found.problem == ("image_unreadable", "Is a directory")
    good = write_picture(tmp_path / "good.png", 0)
    full = cv2.error("Insufficient memory")
    full.code, full.err = cv2.Error.StsNoMem, "Insufficient memory"
    for error in (full, MemoryError(), OSError(5, "Input/output error")):
        monkeypatch.setattr(cv2, "imdecode", _raising(error))
        found = check_image(str(good), SIZE, decode=True)
        assert found.passing and found.problem.code == "image_unreadable", error
        assert ("Input/output error" if isinstance(error, OSError) else "not enough memory") in (
            found.problem.text
        )


def _raising(error: BaseException):
    def fail(*arguments):
        raise error

    return fail


def _deadly(path: str, size: object, *, decode: bool, opener: Opener) -> ImageCheck:
    name = os.path.basename(path)
    if "segv" in name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "hang" in name:
        time.sleep(60)
    if "once" in name and not os.path.exists(path):
        with open(path, "x"):
            os.kill(os.getpid(), signal.SIGKILL)
    return ImageCheck(digest=path)


def test_file_killing_or_hanging_child_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "check_image", _deadly)
    names = [f"{number}" for number in range(100)]
    names[7], names[40], names[41], names[99] = "segv1", "segv2", "hang", "once"
    files = [ImageFile(str(tmp_path / name), None) for name in names]
    checks = check_images(files, workers=3, timeout=1.0)
    assert len(checks) == 100
    for name, file, found in zip(names, files, checks):
        if "segv" in name:
            killed = "decoding it kills the process (SIGSEGV)"
            assert found.problem == ("image_crashes_decoder", killed) and found.passing
        elif "hang" in name:
            assert found.problem.code == "image_hangs_decoder" and found.passing
        else:  # also the one that was killed once, by the system as it seems
            assert found == ImageCheck(digest=file.path)


def test_child_that_waits_for_a_store_is_not_hung(tmp_path, monkeypatch):
    back = time.monotonic() + 1.8
    monkeypatch.setattr("ppdist.common.retry._LONGEST_PAUSE_SECONDS", 0.2)

    def read(path, size, *, decode, opener):
        if time.monotonic() < back:
            raise unavailable("no answer within 20 s", path)
        return ImageCheck(digest=path)

    # As a request of a store does, in the child alone.
    monkeypatch.setattr(module, "check_image", lambda *a, **k: with_retries(lambda: read(*a, **k)))
    path = str(tmp_path / "a.jpg")
    found = check_images([ImageFile(path, None)], workers=1, timeout=0.7)
    assert found == [ImageCheck(digest=path)]


def test_a_child_amid_an_image_ends_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "check_image", _endless)
    files = [ImageFile(str(tmp_path / "child"), None)]
    parent = os.fork()
    if parent == 0:
        check_images(files, workers=1)
        os.kill(os.getpid(), signal.SIGTERM)
    child = 0
    for _ in range(600):
        if child == 0 and (tmp_path / "child").exists():
            child = int((tmp_path / "child").read_text() or 0)
            if child:
                os.kill(parent, signal.SIGKILL)
                os.waitpid(parent, 0)
        if child and not is_alive(child):
            return
        time.sleep(0.05)
    os.kill(child or parent, signal.SIGKILL)
    pytest.fail("it outlives its parent")


def _endless(path: str, size: object, *, decode: bool, opener: Opener) -> ImageCheck:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(1)


def test_pipes_and_devices_are_named_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    files = [ImageFile(str(tmp_path / name), None) for name in ("pipe.png", "zero.png")]
    for decode in (False, True):
        checks = checked(files, decode)
        assert [found.problem for found in checks] == [("image_unreadable", "not a file")] * 2
    assert [read_header(file.path) for file in files] == [None, None]


def test_a_check_leaves_no_process_behind(folder, kinds):
    def children() -> set[str]:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(file.read().split())

    before = children()
    check_images([ImageFile(str(folder / name), None) for name in kinds], workers=3)
    assert children() <= before


def test_intact_file_of_any_writer_is_not_damaged(tmp_path):
    image = Image.fromarray(picture(0))
    for suffix, modes, options in (
        ("jpg", ("RGB", "L", "CMYK"), ({}, {"progressive": True}, {"optimize": True})),
        ("png", ("RGB", "RGBA", "L", "LA", "P", "1"), ({}, {"optimize": True})),
        ("bmp", ("RGB", "RGBA", "L", "P", "1"), ({},)),
        ("webp", ("RGB", "RGBA"), ({}, {"lossless": True})),
        ("tif", ("RGB", "L", "1"), ({}, {"compression": "tiff_lzw"})),
    ):
        for mode in modes:
            for option in options:
                file = tmp_path / f"a.{suffix}"
                image.convert(mode).save(file, **option)
                assert damage(file.read_bytes()) is None, (suffix, mode, option)
    blank = Image.new("L", (4000, 4000))
    for suffix in ("jpg", "png"):
        blank.save(tmp_path / f"blank.{suffix}", optimize=True)
        assert damage((tmp_path / f"blank.{suffix}").read_bytes()) is None


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "webp"])
def test_every_prefix_of_a_file_is_cut_short(tmp_path, suffix):
    content = write_picture(tmp_path / f"a.{suffix}", 0).read_bytes()
    for length in range(12, len(content) - 1, 7):
        found = damage(content[:length])
        assert found is not None and found.code == "image_truncated", length
