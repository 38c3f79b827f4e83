"""Images from disk, and what is accepted as one."""

from pathlib import Path

import cv2
import numpy as np

from ppdist.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_REDUCED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
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

    Args:
        size: the (height, width) it must have; an image that has it without being turned stays.
        reduced: 2, 4, 8: a half, quarter or eighth of each side, rounded up.  A JPEG is decoded so,
            which is three times as fast and averages the pixels left out.
    Raises: DataError: absent, unreadable, damaged, cut short, or of another size (within
        `reduced` pixels).
    """
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not content.size:
        raise DataError(f"{path}: the file is empty")
    if _is_cut_short(content.tobytes()):
        raise DataError(f"{path}: the JPEG data end early (incomplete file)")
    if reduced > 1 and _is_jpeg(content) and not _turns_unnoticed(size, reduced):
        image_HW3 = _decode(path, content, _REDUCED[reduced])
        if size is None or image_HW3.shape[:2] == _reduced_size(size, reduced):
            return cv2.cvtColor(image_HW3, cv2.COLOR_BGR2RGB)
    image_HW3 = _decode(path, content, cv2.IMREAD_COLOR)
    if size is not None and image_HW3.shape[:2] != size:
        image_HW3 = _decode(path, content, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if size is not None and image_HW3.shape[:2] != size:
        height, width = image_HW3.shape[:2]
        raise DataError(
            f"{path}: the image is {width}x{height} but its annotation says {size[1]}x{size[0]}"
        )
    if reduced > 1:
        height, width = _reduced_size(image_HW3.shape[:2], reduced)
        image_HW3 = cv2.resize(image_HW3, (width, height), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(image_HW3, cv2.COLOR_BGR2RGB)


def _reduced_size(size: tuple[int, ...], factor: int) -> tuple[int, int]:
    return -(-size[0] // factor), -(-size[1] // factor)


def _turns_unnoticed(size: tuple[int, int] | None, factor: int) -> bool:
    """Whether an image of this size, once reduced, has the same size on its side as upright."""
    if size is None or size[0] == size[1]:
        return False
    return _reduced_size(size, factor) == _reduced_size(size[::-1], factor)


def _is_jpeg(content: np.ndarray) -> bool:
    return content[:2].tobytes() == b"\xff\xd8"


def _decode(path: str | Path, content: np.ndarray, flags: int) -> np.ndarray:
    try:
        image_HW3 = cv2.imdecode(content, flags)
    except cv2.error as error:
        raise DataError(f"{path}: OpenCV cannot decode it: {error.err}") from error
    if image_HW3 is None:
        raise DataError(f"{path}: not an image, or damaged")
    return image_HW3


def _is_cut_short(content: bytes) -> bool:
    """Whether a JPEG lacks its end; OpenCV would silently paint the missing part grey.

    Walks the segments up to the pixels (a thumbnail inside a segment has an end of its own);
    within coded pixels 0xFF is always followed by 0, so 0xFFD9 there is the true end.
    """
    if not content.startswith(b"\xff\xd8"):
        return False
    position = 2
    while content[position : position + 1] == b"\xff" and content[position + 1 :][:1] != b"\xda":
        if content[position + 1] in (0xFF, 0x01, *range(0xD0, 0xD9)):  # no length follows
            position += 1 if content[position + 1] == 0xFF else 2
        else:
            position += 2 + int.from_bytes(content[position + 2 : position + 4], "big")
    return content.find(b"\xff\xd9", position) < 0
