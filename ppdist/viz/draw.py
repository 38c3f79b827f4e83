"""Draws boxes, classes and text on images, and joins images.

It also holds what images and plots share: the palette and the fonts with Chinese letters.
"""

import math
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ppdist.common.errors import UserError
from ppdist.common.files import write_whole

Colour = tuple[int, int, int]  # red, green, blue, 0 to 255
# Colours distinguishable with any common colour blindness: Okabe & Ito 2008, "Color Universal
# Design", https://jfly.uni-koeln.de/color/, black replaced by a mid grey.
ORANGE, SKY_BLUE, GREEN, YELLOW = (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66)
BLUE, VERMILION, PURPLE, GREY = (0, 114, 178), (213, 94, 0), (204, 121, 167), (153, 153, 153)
# Colours of classes; if there are more classes than colours, labels distinguish them.
PALETTE = (ORANGE, SKY_BLUE, GREEN, YELLOW, BLUE, VERMILION, PURPLE, GREY)
# Files of fonts with Chinese, Japanese and Korean letters, of Linux, macOS and Windows.
CJK_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "NotoSansCJKsc-Regular.otf",
    "NotoSansSC-Regular.otf",
    "wqy-microhei.ttc",
    "wqy-zenhei.ttc",
    "SourceHanSansSC-Regular.otf",
    "PingFang.ttc",
    "Hiragino Sans GB.ttc",
    "msyh.ttc",
    "simhei.ttf",
)
_PADDING = 2
_GAP = 6  # pixels between the pictures of a grid
_WHITE = 255
_LEAST_PIXELS = 480  # smallest size, across or down, of a picture with text
_MOST_PIXELS = 1920  # largest size, across or down, of a picture for viewing
_JPEG_QUALITY = 90
_JPEG_PIXELS = 65500  # across or down: libjpeg's limit


def draw_boxes(
    image_HW3: np.ndarray,
    boxes_N4: np.ndarray,
    labels_N: np.ndarray,
    class_names: tuple[str, ...],
    scores_N: np.ndarray | None = None,
) -> np.ndarray:
    """Draws labelled boxes on a copy of the image, coloured by class.

    The highest score is on top.  A class name with letters that no installed font has is shown as
    `#index`.  See `draw_labelled`.

    Args:
        image_HW3: uint8 RGB; not changed.
        boxes_N4: xyxy in pixels of this image.
        labels_N: class indices in [0, C).
        class_names: C names.
        scores_N: in [0, 1], written after the name; None writes the name alone.
    """
    order = np.arange(len(boxes_N4)) if scores_N is None else np.argsort(scores_N, kind="stable")
    labels = np.asarray(labels_N)[order].astype(int).tolist()
    scores = [None] * len(order) if scores_N is None else scores_N[order].tolist()
    texts = [_label_text(label, class_names, score) for label, score in zip(labels, scores)]
    colours = [PALETTE[label % len(PALETTE)] for label in labels]
    return draw_labelled(image_HW3, np.asarray(boxes_N4).reshape(-1, 4)[order], texts, colours)


def draw_labelled(
    image_HW3: np.ndarray, boxes_N4: np.ndarray, texts: Sequence[str], colours: Sequence[Colour]
) -> np.ndarray:
    """Draws boxes on a copy of the image, with labels above them, or inside at the edge.

    An image smaller than 480 pixels in both dimensions is enlarged by an integer factor.  A box
    that is not finite is left out; parts outside the image are cut off.

    Args:
        image_HW3: uint8 RGB; not changed.
        boxes_N4: xyxy in pixels of this image, the topmost last.
        texts: `readable` labels.

    Returns: uint8 RGB [zoom * H, zoom * W, 3].
    """
    canvas, zoom = _enlarge(image_HW3)
    height, width = canvas.shape[:2]
    finite_N = np.isfinite(boxes_N4).all(axis=1)
    limits = np.array([width - 1, height - 1, width - 1, height - 1])
    shown_N4 = np.clip(np.rint(np.where(finite_N[:, None], boxes_N4, 0) * zoom), 0, limits)
    thickness = max(2, round(max(height, width) / 320))
    drawn = [index for index in range(len(texts)) if finite_N[index]]
    for index in drawn:
        x1, y1, x2, y2 = shown_N4[index].astype(int).tolist()
        cv2.rectangle(canvas, (x1, y1), (x2, y2), colours[index], thickness)
    for index in drawn:
        text = texts[index]
        x1, y1, _, _ = shown_N4[index].astype(int).tolist()
        plate_width, plate_height = _plate_size(canvas, text)
        left = max(0, min(x1, width - plate_width))
        # A label that does not fit above its box is written inside.
        top = y1 - plate_height if y1 >= plate_height else y1
        _draw_plate(canvas, (left, top), text, colours[index])
    return canvas


def _enlarge(image_HW3: np.ndarray) -> tuple[np.ndarray, int]:
    """Copies an image, enlarged so that text is legible; returns the copy and its zoom factor."""
    zoom = max(1, math.ceil(_LEAST_PIXELS / max(image_HW3.shape[:2])))
    image_HW3 = np.ascontiguousarray(image_HW3)
    if zoom == 1:
        return image_HW3.copy(), 1
    height, width = image_HW3.shape[:2]
    size = zoom * width, zoom * height
    return cv2.resize(image_HW3, size, interpolation=cv2.INTER_CUBIC), zoom


def draw_classes(
    image_HW3: np.ndarray,
    labels_K: np.ndarray,
    class_names: tuple[str, ...],
    scores_K: np.ndarray | None = None,
) -> np.ndarray:
    """Writes image-level classes in the corner of a copy of the image, one below the other.

    Lines that do not fit are left out.  For names see `draw_boxes`, for the size `draw_labelled`.

    Args:
        image_HW3: uint8 RGB; not changed.
        labels_K: class indices in [0, C), the highest score first.
        class_names: C names.
        scores_K: in [0, 1], written after the names; None writes the names alone.

    Returns: uint8 RGB [zoom * H, zoom * W, 3].
    """
    canvas, _ = _enlarge(image_HW3)
    top = 0
    for position, label in enumerate(labels_K.astype(int).tolist()):
        score = None if scores_K is None else float(scores_K[position])
        text = _label_text(label, class_names, score)
        bottom = top + _plate_size(canvas, text)[1]
        if bottom > canvas.shape[0] and position:
            break
        _draw_plate(canvas, (0, top), text, PALETTE[label % len(PALETTE)])
        top = bottom
    return canvas


def caption(image_HW3: np.ndarray, text: str) -> np.ndarray:
    """Adds a line of text on white below a uint8 RGB image.

    The text is cut at the width of the image.
    """
    scale = 0.45
    _, above, below = text_size(text, scale)
    strip = np.full((above + below + 8, image_HW3.shape[1], 3), _WHITE, np.uint8)
    write_text(strip, text, (3, above + 4), scale, (0, 0, 0))
    return np.concatenate([image_HW3, strip])


def side_by_side(left_HW3: np.ndarray, right_HW3: np.ndarray) -> np.ndarray:
    """Joins two uint8 RGB images of equal height with a white bar between them.

    Returns: [H, W1 + 4 + W2, 3].
    """
    bar = np.full((left_HW3.shape[0], 4, 3), 255, np.uint8)
    return np.concatenate([left_HW3, bar, right_HW3], axis=1)


def grid(pictures: Sequence[np.ndarray], across: int | None = None) -> np.ndarray:
    """Arranges pictures in rows with white between them; uint8 RGB.

    Pictures keep their size; the cells are as large as the largest picture.

    Args: across: pictures per row; None for about as many as there are rows.
    """
    across = across or math.ceil(math.sqrt(len(pictures)))
    down = math.ceil(len(pictures) / across)
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    field_y, field_x = height + _GAP, width + _GAP
    canvas = np.full((down * field_y - _GAP, across * field_x - _GAP, 3), _WHITE, np.uint8)
    for position, picture in enumerate(pictures):
        top, left = position // across * field_y, position % across * field_x
        canvas[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return canvas


def within(image_HW3: np.ndarray, pixels: int = _MOST_PIXELS) -> np.ndarray:
    """Shrinks an image whose width or height exceeds `pixels`."""
    scale = pixels / max(image_HW3.shape[:2])
    if scale >= 1:
        return image_HW3
    size = [max(1, round(side * scale)) for side in (image_HW3.shape[1], image_HW3.shape[0])]
    return cv2.resize(image_HW3, size, interpolation=cv2.INTER_AREA)


def write_jpeg(path: Path, image_HW3: np.ndarray) -> None:
    """Writes a uint8 RGB image as JPEG.

    Raises: UserError: it cannot be written.
    """
    height, width = image_HW3.shape[:2]
    if max(height, width) > _JPEG_PIXELS:
        raise UserError(
            f"cannot be written: a picture of {width} x {height} pixels, but JPEG allows at most "
            f"{_JPEG_PIXELS} per side",
            code="picture_too_large",
            where=str(path),
        )
    image_bgr = cv2.cvtColor(image_HW3, cv2.COLOR_RGB2BGR)
    _, encoded = cv2.imencode(".jpg", image_bgr, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    write_whole(path, encoded.tobytes())


def _label_text(label: int, class_names: tuple[str, ...], score: float | None) -> str:
    name = readable(class_names[label], label)
    return name if score is None else f"{name} {score:.2f}"


def _text_scale(canvas: np.ndarray) -> float:
    return max(0.4, max(canvas.shape[:2]) / 1600)


def _plate_size(canvas: np.ndarray, text: str) -> tuple[int, int]:
    """Computes the width and height of the coloured background of a text."""
    width, height, below = text_size(text, _text_scale(canvas))
    return width + 2 * _PADDING, height + below + _PADDING


def _draw_plate(canvas: np.ndarray, corner: tuple[int, int], text: str, colour: Colour) -> None:
    """Draws text on a coloured plate.

    Args: corner: (x, y) of the plate's upper left corner.
    """
    left, top = corner
    width, height = _plate_size(canvas, text)
    scale = _text_scale(canvas)
    _, text_height, _ = text_size(text, scale)
    cv2.rectangle(canvas, corner, (left + width, top + height), colour, cv2.FILLED)
    red, green, blue = colour
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    ink = (0, 0, 0) if luminance > 110 else (255, 255, 255)
    origin = (left + _PADDING, top + text_height + _PADDING)
    write_text(canvas, text, origin, scale, ink)


_PLAIN = cv2.FONT_HERSHEY_SIMPLEX  # ASCII only
_PIXELS = 30  # height at which another font looks as large as OpenCV's at scale 1
_NO_LETTER = "\uffff"  # not a character: fonts show their sign for a missing letter
_EUROPEAN_FONTS = ("DejaVuSans.ttf", "arial.ttf")


def readable(name: str, label: int) -> str:
    """Returns the class name, without emoji if no font has them, or `#label`."""
    for text in (name, without_emoji(name)):
        if text and (text.isascii() or _find_font(text)):
            return text
    return f"#{label}"


def without_emoji(name: str) -> str:
    """Removes emoji and other symbols from a class name, for fonts that lack them."""
    letters = (
        letter
        for letter in name
        if unicodedata.category(letter) not in ("So", "Sk", "Cf", "Me")
        and not "\ufe00" <= letter <= "\ufe0f"  # variation selectors choose the form of a symbol
    )
    return " ".join("".join(letters).split())


def text_size(text: str, scale: float) -> tuple[int, int, int]:
    """Measures the width, height and depth below the baseline of a text, in pixels.

    Args: text: a `readable` text.
    """
    if text.isascii():
        (width, height), below = cv2.getTextSize(text, _PLAIN, scale, 1)
        return width, height, below
    font = _font_at(text, scale)
    above, below = font.getmetrics()
    return round(font.getlength(text)), above, below


def write_text(
    canvas_HW3: np.ndarray,
    text: str,
    origin: tuple[int, int],
    scale: float,
    ink: tuple[int, int, int],
) -> None:
    """Writes a `readable` text into a uint8 image.

    Args: origin: x and y of the left end of its baseline.
    """
    if text.isascii():
        cv2.putText(canvas_HW3, text, origin, _PLAIN, scale, ink, 1, cv2.LINE_AA)
        return
    width, above, below = text_size(text, scale)
    left, top = origin[0], origin[1] - above
    # Only the pixels that the text covers are converted to Pillow and back.
    field = canvas_HW3[max(0, top) : top + above + below, max(0, left) : left + width + 1]
    if not field.size:
        return
    picture = Image.fromarray(np.ascontiguousarray(field))
    place = min(0, left), min(0, top)
    ImageDraw.Draw(picture).text(place, text, font=_font_at(text, scale), fill=ink)
    field[:] = np.asarray(picture)


def _font_at(text: str, scale: float) -> ImageFont.FreeTypeFont:
    file = _find_font(text)
    assert file is not None, "the caller asked `readable` before"
    return _open_font(file, max(12, round(_PIXELS * scale)))


@cache
def _open_font(file: Path, pixels: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(file), pixels)


@cache
def _find_font(text: str) -> Path | None:
    """Finds the first font that has all letters of a text."""
    return next(
        (file for file in installed_fonts(_EUROPEAN_FONTS + CJK_FONTS) if _has_letters(file, text)),
        None,
    )


def _has_letters(file: Path, text: str) -> bool:
    font = _open_font(file, 16)
    missing_letter = bytes(font.getmask(_NO_LETTER))
    return all(letter.isspace() or bytes(font.getmask(letter)) != missing_letter for letter in text)


@cache
def installed_fonts(names: tuple[str, ...]) -> tuple[Path, ...]:
    """Finds which of these font files are installed on the system."""
    files = []
    for name in names:
        with suppress(OSError):
            files.append(Path(str(ImageFont.truetype(name).path)))
    return tuple(files)
