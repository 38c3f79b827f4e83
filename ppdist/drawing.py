"""Boxes with labels, drawn on images."""

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
        text = class_names[label] if class_names[label].isascii() else f"#{label}"
        if scores_N is not None:
            text = f"{text} {scores_N[index]:.2f}"
        _draw_one(canvas, box, text, PALETTE[label % len(PALETTE)])
    return canvas


def side_by_side(left_HW3: np.ndarray, right_HW3: np.ndarray) -> np.ndarray:
    """Two uint8 RGB images of one height with a white bar between: [H, W1 + 4 + W2, 3]."""
    bar = np.full((left_HW3.shape[0], 4, 3), 255, np.uint8)
    return np.concatenate([left_HW3, bar, right_HW3], axis=1)


def _draw_one(canvas: np.ndarray, box: list[int], text: str, color: tuple[int, int, int]) -> None:
    height, width = canvas.shape[:2]
    thickness = max(2, round(max(height, width) / 320))
    scale = max(0.4, max(height, width) / 1600)
    x1, y1, x2, y2 = box
    cv2.rectangle(canvas, (x1, y1), (x2, y2), color, thickness)
    (text_width, text_height), baseline = cv2.getTextSize(text, _FONT, scale, 1)
    plate_height = text_height + baseline + _PADDING
    left = max(0, min(x1, width - text_width - 2 * _PADDING))
    top = y1 - plate_height if y1 >= plate_height else y1  # inside, where there is no room above
    corner = (left + text_width + 2 * _PADDING, top + plate_height)
    cv2.rectangle(canvas, (left, top), corner, color, cv2.FILLED)
    red, green, blue = color
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    ink = (0, 0, 0) if luminance > 110 else (255, 255, 255)
    origin = (left + _PADDING, top + text_height + _PADDING)
    cv2.putText(canvas, text, origin, _FONT, scale, ink, 1, cv2.LINE_AA)
