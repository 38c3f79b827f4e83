"""Views of single images: mirrored, at other sizes, fused."""

import numpy as np
import pytest

from ppdist.lab.ensemble.views import mirrored, with_views
from ppdist.predict.model import LoadedModel, make_loaded
from tests.errors import raises
from tests.unit.export.tiny import tiny_spec

WIDTH = 96


def brightest(dynamic_size: bool = True, label: float = 0.0) -> LoadedModel:
    """Finds the bright columns and rows of its input: one box around them, with score 0.8."""

    def graph(batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = []
        for image_3HW in batch_B3HW:
            y, x = np.nonzero(image_3HW[0] > 128)
            # A mirrored image is seen as one of another class.
            seen = label if x.mean() > image_3HW.shape[2] / 2 else 0.0
            rows.append([seen, 0.8, x.min(), y.min(), x.max() + 1, y.max() + 1])
        return np.array(rows, np.float32), np.ones(len(rows), np.int32)

    graph.output_names = ()  # type: ignore[attr-defined]
    return make_loaded(tiny_spec(dynamic_size=dynamic_size), graph, True)  # type: ignore[arg-type]


def image() -> np.ndarray:
    image_HW3 = np.zeros((64, WIDTH, 3), np.uint8)
    image_HW3[16:32, 8:40] = 255
    return image_HW3


def test_mirrored_boxes_come_back() -> None:
    (rows_R6,) = mirrored(brightest())([image()])
    np.testing.assert_allclose(rows_R6[0, 2:], [8, 16, 40, 32], atol=1)


@pytest.mark.parametrize("scales", [(1.0,), (0.5, 1.0, 2.0)])
def test_views_that_agree_are_one_box(scales: tuple[float, ...]) -> None:
    (rows_R6,) = with_views(brightest(), scales)([image()])
    assert rows_R6.shape == (1, 6) and rows_R6[0, 1] == pytest.approx(0.8, abs=1e-6)
    np.testing.assert_allclose(rows_R6[0, 2:], [8, 16, 40, 32], atol=1)


def test_agnostic_holds_for_fused_boxes() -> None:
    model = brightest(label=1.0)
    assert len(with_views(model)([image()])[0]) == 2
    assert len(with_views(model, agnostic=True)([image()])[0]) == 1


def test_an_export_of_one_size_has_no_scales() -> None:
    with raises("options_conflict"):
        with_views(brightest(dynamic_size=False), (0.5, 1.0))
    assert len(with_views(brightest(dynamic_size=False))([image()])[0]) == 1
