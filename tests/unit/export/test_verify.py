"""What an exported file is compared on."""

import numpy as np

from ppdist.export.spec import InputSection
from ppdist.export.verify import check_images


def shapes(**changes) -> list[tuple[int, ...]]:
    section = InputSection(size=(64, 96), **changes)
    sample = np.zeros((3, 64, 96), np.float32)
    return [images.shape for images in check_images(section, [sample])]


def test_dynamic_graph_is_checked_at_other_shapes() -> None:
    one, sample = (1, 3, 64, 96), (1, 3, 64, 96)
    assert shapes(dynamic_batch=False, dynamic_size=False) == [one, sample]
    assert shapes(dynamic_batch=True, dynamic_size=False) == [one, (2, 3, 64, 96), sample]
    assert shapes(dynamic_batch=False, dynamic_size=True) == [one, (1, 3, 96, 64), sample]
