"""Boxes with labels, and classes of whole images, drawn on images."""

import cv2
import numpy as np

# Eight colours that stay apart with any common colour blindness: Okabe & Ito 2008, "Color
# Universal Design", https://jfly.uni-koeln.de/color/, black replaced by a mid grey.  With more
# classes than colours the label tells them apart.
PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (153, 153, 153),
)
_FONT = cv2.FONT_HERSHEY_SIMPLEX  # ASCII only
_PADDING = 2


def draw_boxes(
    image_HW3: np.ndarray,
    boxes_N4: np.ndarray,
    labels_N: np.ndarray,
    class_names: tuple[str, ...],
    scores_N: np.ndarray | None = None,
) -> np.ndarray:
    """A copy of the image with each box outlined in its class's colour and labelled.

    Boxes are drawn in the order of rising score, so the surest lie on top.  A box that is not
    finite is left out; parts outside the image are cut off.  A class name with letters the
    built-in font lacks (Chinese, say) is shown as `#index`.

    Args:
        image_HW3: uint8 RGB; not changed.
        boxes_N4: xyxy in pixels of this image.
        labels_N: class indices in [0, C).
        class_names: C names.
        scores_N: in [0, 1], written behind the name; None writes the name alone.

    Returns: uint8 RGB [H, W, 3].
    """
    canvas = np.ascontiguousarray(image_HW3).copy()
    height, width = canvas.shape[:2]
    order = np.arange(len(boxes_N4)) if scores_N is None else np.argsort(scores_N, kind="stable")
    for index in order:
        if not np.isfinite(boxes_N4[index]).all():
            continue
        limits = np.array([width - 1, height - 1, width - 1, height - 1])
        box = np.clip(np.rint(boxes_N4[index]), 0, limits).astype(int).tolist()
        label = int(labels_N[index])
        score = None if scores_N is None else float(scores_N[index])
        _draw_one(canvas, box, _text(label, class_names, score), PALETTE[label % len(PALETTE)])
    return canvas


def draw_classes(
    image_HW3: np.ndarray,
    labels_K: np.ndarray,
    class_names: tuple[str, ...],
    scores_K: np.ndarray | None = None,
) -> np.ndarray:
    """A copy of the image with classes of the whole of it in its corner, one below the other.

    Lines for which there is no room are left out; for names see `draw_boxes`.

    Args:
        image_HW3: uint8 RGB; not changed.
        labels_K: class indices in [0, C), the surest first.
        class_names: C names.
        scores_K: in [0, 1], written behind the names; None writes the names alone.

    Returns: uint8 RGB [H, W, 3].
    """
    canvas = np.ascontiguousarray(image_HW3).copy()
    top = 0
    for position, label in enumerate(labels_K.astype(int).tolist()):
        score = None if scores_K is None else float(scores_K[position])
        text = _text(label, class_names, score)
        bottom = top + _plate_size(canvas, text)[1]
        if bottom > canvas.shape[0] and position:
            break
        _draw_plate(canvas, (0, top), text, PALETTE[label % len(PALETTE)])
        top = bottom
    return canvas


def _text(label: int, class_names: tuple[str, ...], score: float | None) -> str:
    name = class_names[label] if class_names[label].isascii() else f"#{label}"
    return name if score is None else f"{name} {score:.2f}"


def side_by_side(left_HW3: np.ndarray, right_HW3: np.ndarray) -> np.ndarray:
    """Two uint8 RGB images of one height with a white bar between: [H, W1 + 4 + W2, 3]."""
    bar = np.full((left_HW3.shape[0], 4, 3), 255, np.uint8)
    return np.concatenate([left_HW3, bar, right_HW3], axis=1)


def _draw_one(canvas: np.ndarray, box: list[int], text: str, color: tuple[int, int, int]) -> None:
    height, width = canvas.shape[:2]
    x1, y1, x2, y2 = box
    cv2.rectangle(canvas, (x1, y1), (x2, y2), color, max(2, round(max(height, width) / 320)))
    plate_width, plate_height = _plate_size(canvas, text)
    left = max(0, min(x1, width - plate_width))
    top = y1 - plate_height if y1 >= plate_height else y1  # inside, where there is no room above
    _draw_plate(canvas, (left, top), text, color)


def _text_scale(canvas: np.ndarray) -> float:
    return max(0.4, max(canvas.shape[:2]) / 1600)


def _plate_size(canvas: np.ndarray, text: str) -> tuple[int, int]:
    """Width and height of the coloured ground of a text."""
    (width, height), baseline = cv2.getTextSize(text, _FONT, _text_scale(canvas), 1)
    return width + 2 * _PADDING, height + baseline + _PADDING


def _draw_plate(
    canvas: np.ndarray, corner: tuple[int, int], text: str, color: tuple[int, int, int]
) -> None:
    """Draws a text on its coloured ground, whose upper left corner is given."""
    left, top = corner
    width, height = _plate_size(canvas, text)
    scale = _text_scale(canvas)
    (_, text_height), _ = cv2.getTextSize(text, _FONT, scale, 1)
    cv2.rectangle(canvas, corner, (left + width, top + height), color, cv2.FILLED)
    red, green, blue = color
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    ink = (0, 0, 0) if luminance > 110 else (255, 255, 255)
    origin = (left + _PADDING, top + text_height + _PADDING)
    cv2.putText(canvas, text, origin, _FONT, scale, ink, 1, cv2.LINE_AA)
