"""Text on images: with a font of the system where ASCII is not enough."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import font_manager, get_data_path

from ppdist.viz import draw, plots
from ppdist.viz.draw import readable, text_size, write_text

GREEK = "Γάτα"
SERIF = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSerif.ttf"


@pytest.fixture
def fonts(monkeypatch, tmp_path):
    """The folder that is searched for fonts, empty."""
    if sys.platform != "linux":
        pytest.skip("the folders of fonts are fixed elsewhere")
    caches = (draw.installed_fonts, draw._find_font, draw._open_font, plots.fonts)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path))
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*font_manager.fontManager.ttflist])
    (tmp_path / "fonts").mkdir()
    for each in caches:
        each.cache_clear()
    yield tmp_path / "fonts"
    for each in caches:
        each.cache_clear()


def test_a_name_without_a_font_is_its_number(fonts):
    assert readable("红细胞", 7) == "#7" and readable("cat", 7) == "cat"


def test_letters_missing_from_fonts_are_known():
    assert readable("\U00012000", 3) == "#3"


def test_a_font_that_cannot_be_read_is_none(fonts):
    (fonts / "wqy-zenhei.ttc").write_bytes(b"no font")
    assert readable(GREEK, 1) == "#1" and plots.fonts() == ["DejaVu Sans"]


def test_images_and_plots_take_letters_from_the_same_file(fonts):
    (fonts / "truetype").mkdir()
    shutil.copy(SERIF, fonts / "truetype" / "wqy-zenhei.ttc")
    assert readable(GREEK, 1) == GREEK
    assert plots.fonts() == ["DejaVu Sans", "DejaVu Serif"]


def test_a_text_beyond_ascii_is_in_its_place(fonts):
    shutil.copy(SERIF, fonts / "arial.ttf")
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
