import cv2
import numpy as np
import pytest

from ppdist.viz import draw as lettering
from ppdist.viz.draw import (
    PALETTE,
    caption,
    draw_boxes,
    draw_classes,
    grid,
    side_by_side,
    within,
    write_jpeg,
)
from tests.errors import raises

NAMES = ("cat", "狗")


def grey() -> np.ndarray:
    return np.full((240, 480, 3), 128, np.uint8)


def draw(boxes, labels=None, scores=None, image_HW3=None) -> np.ndarray:
    boxes_N4 = np.array(boxes, np.float32).reshape(-1, 4)
    labels_N = np.zeros(len(boxes_N4), np.int64) if labels is None else np.array(labels)
    scores_N = None if scores is None else np.array(scores)
    image_HW3 = grey() if image_HW3 is None else image_HW3
    return draw_boxes(image_HW3, boxes_N4, labels_N, NAMES, scores_N)


def test_the_outline_has_the_colour_of_its_class():
    drawn = draw([[20, 40, 120, 90]], labels=[1])
    for x, y in ((120, 60), (60, 90), (20, 70)):
        assert tuple(drawn[y, x]) == PALETTE[1]
    assert (drawn[45:85, 25:115] == 128).all()  # its label hides nothing of it


def test_the_image_given_stays_as_it_was():
    image_HW3 = grey()
    draw([[20, 40, 120, 90]], image_HW3=image_HW3)
    assert (image_HW3 == 128).all()


def test_no_box_gives_an_equal_copy():
    image_HW3 = grey()
    drawn = draw([], image_HW3=image_HW3)
    assert (drawn == image_HW3).all() and drawn is not image_HW3


def test_boxes_over_the_edge_are_no_error():
    drawn = draw([[-50, -50, 500, 500], [900, 900, 950, 950], [np.nan, 0, 5, 5], [0, 0, np.inf, 9]])
    assert tuple(drawn[50, 0]) == PALETTE[0] and tuple(drawn[50, 479]) == PALETTE[0]


def test_the_surest_box_lies_on_top():
    drawn = draw([[20, 40, 120, 90], [20, 40, 120, 90]], labels=[0, 1], scores=[0.9, 0.2])
    assert tuple(drawn[60, 120]) == PALETTE[0]


def _plates(drawn: np.ndarray, colour) -> list[tuple[int, int, int, int]]:
    """xyxy of each ground of the colour with letters on it: labels, no outlines."""
    mask = (drawn == colour).all(axis=2).astype(np.uint8)
    mask = cv2.morphologyEx(mask, cv2.MORPH_CLOSE, np.ones((5, 5)))  # letters
    mask = cv2.morphologyEx(mask, cv2.MORPH_OPEN, np.ones((8, 8)))  # outlines
    _, _, stats, _ = cv2.connectedComponentsWithStats(mask)
    return [(x, y, x + width, y + height) for x, y, width, height, _ in stats[1:].tolist()]


def test_the_label_stays_inside_the_image():
    (plate,) = _plates(draw([[460, 0, 479, 60]], scores=[0.5]), PALETTE[0])
    assert plate[2] - plate[0] > 40 and plate[0] > 350 and plate[2] <= 480, "moved, not cut off"


@pytest.mark.parametrize(("shape", "zoom"), [((64, 48), 8), ((479, 10), 2), ((480, 640), 1)])
def test_small_images_are_drawn_large_enough_to_read(shape, zoom):
    image_HW3 = np.full((*shape, 3), 128, np.uint8)
    drawn = draw([[10, 20, 40, 44]], image_HW3=image_HW3)
    assert drawn.shape == (zoom * shape[0], zoom * shape[1], 3)
    if zoom == 8:
        assert tuple(drawn[240, 80]) == PALETTE[0]


def test_a_name_without_a_font_is_its_index(monkeypatch):
    monkeypatch.setattr(lettering, "_find_font", lambda text: None)
    by_name = draw([[20, 40, 120, 90]], labels=[1])
    boxes_N4, label_N = np.array([[20.0, 40, 120, 90]]), np.array([1])
    by_index = draw_boxes(grey(), boxes_N4, label_N, ("cat", "#1"))
    assert (by_name == by_index).all()


def test_two_images_stand_side_by_side():
    both = side_by_side(grey(), np.zeros((240, 50, 3), np.uint8))
    assert both.shape == (240, 534, 3)
    assert (both[:, 480:484] == 255).all() and (both[:, 484:] == 0).all()


def test_classes_are_written_below_each_other():
    image_HW3 = np.full((120, 480, 3), 7, np.uint8)
    drawn = draw_classes(image_HW3, np.array([1, 0]), ("cat", "dog"), np.array([0.75, 0.25]))
    assert drawn.shape == image_HW3.shape and (image_HW3 == 7).all()
    assert tuple(drawn[0, 0]) == PALETTE[1]
    rows = [y for y in range(120) if tuple(drawn[y, 0]) == PALETTE[0]]
    assert rows and rows[0] > 8 and (drawn[rows[-1] + 1 :] == 7).all()
    assert (draw_classes(image_HW3, np.array([], int), ("cat",)) == 7).all()


def test_a_grid_is_filled_row_by_row():
    one, other = np.full((4, 6, 3), 10, np.uint8), np.full((5, 3, 3), 20, np.uint8)
    assert grid([one, other, one]).shape == (5 + 6 + 5, 6 + 6 + 6, 3)
    row = grid([one, other], across=2)
    assert row.shape == (5, 18, 3) and (row[0, 12] == 20).all() and (row[4, :6] == 255).all()


def test_only_large_pictures_are_made_smaller(tmp_path):
    assert within(np.zeros((10, 40, 3), np.uint8), 20).shape == (5, 20, 3)
    small = np.zeros((10, 20, 3), np.uint8)
    assert within(small, 20) is small
    assert within(np.zeros((1, 400, 3), np.uint8), 20).shape == (1, 20, 3)


def test_a_caption_lies_below_and_is_cut_at_the_edge():
    captioned = caption(grey(), "a long line of text " * 20)
    assert captioned.shape[0] > 250 and captioned.shape[1:] == (480, 3)
    assert (captioned[:240] == 128).all() and captioned[240:].min() < 60


def test_a_jpeg_has_the_colours_of_the_image(tmp_path):
    write_jpeg(tmp_path / "new" / "a.jpg", np.full((16, 16, 3), (200, 30, 90), np.uint8))
    read_HW3 = cv2.imread(str(tmp_path / "new" / "a.jpg"))[:, :, ::-1].astype(int)
    assert np.abs(read_HW3 - (200, 30, 90)).max() < 12
    with raises("file_name_expected"):
        write_jpeg(tmp_path / "new", grey())
    with raises("picture_too_large", "65501", "65500"):
        write_jpeg(tmp_path / "tall.jpg", np.zeros((65501, 2, 3), np.uint8))


def test_the_surest_class_is_never_left_out():
    low = np.full((20, 480, 3), 7, np.uint8)
    drawn = draw_classes(low, np.array([0, 1, 2]), ("a", "b", "c"))
    colours = {tuple(pixel) for pixel in drawn[:, 0].tolist()}
    assert PALETTE[0] in colours and PALETTE[2] not in colours
    tiny = draw_classes(np.zeros((4, 4, 3), np.uint8), np.array([0]), ("ünknown",))
    assert tuple(tiny[0, 0]) == PALETTE[0]
