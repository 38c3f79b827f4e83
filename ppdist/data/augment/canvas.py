"""An input in the making: images drawn into it, and the objects they bring."""

from collections.abc import Sequence

import cv2
import numpy as np

from ppdist.data.augment.affine import covered, map_by_matrix, moved, paste
from ppdist.data.augment.transforms import GREY
from ppdist.data.samples import Sample


class Canvas:
    """Grey at first, of the input's `size` (height, width)."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._image_HW3 = np.full((*size, 3), GREY[0], np.uint8)  # one number: 30 times as fast
        self._boxes = [np.zeros((0, 4), np.float32)]
        self._labels = [np.zeros(0, np.int64)]

    def draw(
        self, image_HW3: np.ndarray, source: Sequence[float], matrix_33: np.ndarray, reduced: int
    ) -> np.ndarray:
        """As `paste`, in pixels of the original, of which `reduced` are one of the image.

        Returns: where the image lies now, which is where its boxes lie too.
        """
        part = [side / reduced for side in source]
        enlarge_33, reduce_33 = (moved(scale=(by, by)) for by in (reduced, 1 / reduced))
        return paste(self._image_HW3, image_HW3, part, matrix_33 @ enlarge_33) @ reduce_33

    def shows(self, width: int, height: int, matrix_33: np.ndarray) -> bool:
        """Whether anything of an image of these sides would be seen."""
        source = (0, 0, width, height)
        left, top, right, bottom = covered(source, matrix_33, self._image_HW3.shape[:2])
        return left < right and top < bottom

    def note(self, boxes_M4: np.ndarray, labels_M: np.ndarray, matrix_33: np.ndarray) -> np.ndarray:
        """Keeps the boxes that are seen.  Returns: keep_M: which they are."""
        height, width = self._image_HW3.shape[:2]
        mapped_M4, keep_M = map_by_matrix(boxes_M4, matrix_33, (height, width))
        self._boxes.append(mapped_M4[keep_M])
        self._labels.append(labels_M[keep_M])
        return keep_M

    def sample(self, index: int, colours_34: np.ndarray | None) -> Sample:
        """The input; nothing more may be drawn then."""
        image_HW3 = self._image_HW3
        if colours_34 is not None:
            image_HW3 = cv2.transform(image_HW3, colours_34)
        return Sample(image_HW3, np.concatenate(self._boxes), np.concatenate(self._labels), index)
