"""Images from disk, and what is accepted as one."""

import os
import stat
from pathlib import Path

import cv2
import numpy as np

from ppdist.data.containers import MOST_PIXELS, damage
from ppdist.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_MOST_BYTES = 8 * MOST_PIXELS  # four channels of 16 bits, not compressed
# Flags are bits: of REDUCED_COLOR_2 those without IMREAD_COLOR say how far to reduce.
_REDUCED = {
    2: cv2.IMREAD_REDUCED_COLOR_2 & ~cv2.IMREAD_COLOR,
    4: cv2.IMREAD_REDUCED_COLOR_4 & ~cv2.IMREAD_COLOR,
    8: cv2.IMREAD_REDUCED_COLOR_8 & ~cv2.IMREAD_COLOR,
}


def is_image_name(name: str) -> bool:
    """Whether a file is taken for an image by its name; hidden ones (`._a.jpg`) are none."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def reduction(scale: float) -> int:
    """1, 2, 4 or 8: how far an image may be reduced that is to be shown at `scale` of its size."""
    return next((factor for factor in (8, 4, 2) if factor * scale <= 1), 1)


def read_image(
    path: str | Path, size: tuple[int, int] | None = None, reduced: int = 1
) -> np.ndarray:
    """The image of a file as uint8 RGB [H, W, 3], turned upright as its EXIF data say.

    Grey becomes three equal channels, of 16 bits the upper 8 count, CMYK becomes RGB, transparency
    is ignored (but a TIFF's is blended over black); of several frames the first is taken.  Pixels
    that a cut file lacks are never made up; damage amid a JPEG shows in its picture alone, and
    `ppdist.data.check.scan` finds it.

    Args:
        size: the (height, width) it must have; an image that has it without being turned stays.
        reduced: 2, 4, 8: a half, quarter or eighth of each side, rounded up.  A JPEG is decoded so,
            which is three times as fast and averages the pixels left out.
    Raises: DataError: absent, unreadable, damaged, cut short, of more than containers.MOST_PIXELS,
        or of another size (within `reduced` pixels).
    """
    content = _content(path)
    found = damage(content)
    if found is not None:
        raise DataError(found.text, code=found.code, where=str(path))
    if reduced > 1 and _is_jpeg(content) and not _turns_unnoticed(size, reduced):
        image_HW3 = _decode(path, content, _REDUCED[reduced])
        if size is None or image_HW3.shape[:2] == _reduced_size(size, reduced):
            return image_HW3
    image_HW3 = _decode(path, content)
    if size is not None and image_HW3.shape[:2] != size:
        image_HW3 = _decode(path, content, cv2.IMREAD_IGNORE_ORIENTATION)
    if size is not None and image_HW3.shape[:2] != size:
        height, width = image_HW3.shape[:2]
        raise DataError(
            f"the image is {width}x{height} but its annotation says {size[1]}x{size[0]}",
            code="size_mismatch",
            where=str(path),
        )
    if reduced > 1:
        height, width = _reduced_size(image_HW3.shape[:2], reduced)
        image_HW3 = cv2.resize(image_HW3, (width, height), interpolation=cv2.INTER_AREA)
    return image_HW3


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
    except FileNotFoundError as error:
        raise DataError(
            error.strerror or str(error), code="image_missing", where=str(path)
        ) from error
    except OSError as error:
        raise DataError(
            error.strerror or str(error), code="image_unreadable", where=str(path)
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _reduced_size(size: tuple[int, ...], factor: int) -> tuple[int, int]:
    return -(-size[0] // factor), -(-size[1] // factor)


def _turns_unnoticed(size: tuple[int, int] | None, factor: int) -> bool:
    """Whether an image of this size, once reduced, has the same size on its side as upright."""
    if size is None or size[0] == size[1]:
        return False
    return _reduced_size(size, factor) == _reduced_size(size[::-1], factor)


def _is_jpeg(content: bytes) -> bool:
    return content[:2] == b"\xff\xd8"


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
