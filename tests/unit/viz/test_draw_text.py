import numpy as np
import pytest

from ppdist.viz import draw
from ppdist.viz.draw import readable, text_size, write_text

GREEK = "Γάτα"


@pytest.fixture
def no_fonts(monkeypatch):
    monkeypatch.setattr(draw, "_installed", lambda: iter(()))
    draw._fonts.cache_clear()
    draw._font_of.cache_clear()
    yield
    draw._fonts.cache_clear()
    draw._font_of.cache_clear()


def test_a_name_without_a_font_is_its_number(no_fonts):
    assert readable("红细胞", 7) == "#7" and readable("cat", 7) == "cat"


def test_letters_that_no_font_has_are_known_to_be_missing():
    assert readable("\U00012000", 3) == "#3"


def test_a_font_that_cannot_be_read_is_none(no_fonts, monkeypatch, tmp_path):
    file = tmp_path / "wqy-zenhei.ttc"
    file.write_bytes(b"no font")
    monkeypatch.setattr(draw, "_installed", lambda: iter([file]))
    assert readable(GREEK, 1) == "#1"


def test_a_text_beyond_ascii_is_written_where_it_belongs_also_over_the_edge():
    if readable(GREEK, 0) != GREEK:
        pytest.skip("no font with Greek letters is installed")
    canvas_HW3 = np.zeros((60, 120, 3), np.uint8)
    width, above, below = text_size(GREEK, 0.5)
    write_text(canvas_HW3, GREEK, (20, 40), 0.5, (255, 128, 0))
    rows, columns = np.nonzero(canvas_HW3[:, :, 0])
    assert columns.min() >= 15 and columns.max() <= 20 + width
    assert 40 - above <= rows.min() and rows.max() <= 40 + below
    assert (canvas_HW3[:, :, 2] == 0).all()
    edge_HW3 = np.zeros((20, 30, 3), np.uint8)
    for origin in ((-5, 5), (25, 30), (200, 10), (0, -50)):
        write_text(edge_HW3, GREEK, origin, 0.5, (255, 255, 255))
    assert edge_HW3.any()
