"""Dense O2O's data: mosaics of whole images, in a window that is a share of the run."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppdist.common.errors import ConfigError
from ppdist.config.augment import AugmentConfig
from ppdist.config.parse import parse_config
from ppdist.config.section import Section
from ppdist.data.transforms.geometry import GREY
from ppdist.data.transforms.mix import grid_layout
from ppdist.data.types import SampleKey
from tests.unit.data.sets import write_coco
from tests.unit.data.transforms.blocks import STILL, samples

WHOLE = {**STILL, "mosaic": 1.0, "mosaic_whole": True}


@pytest.fixture(scope="module")
def flat(tmp_path_factory) -> Path:
    """Four images of one colour each, all of it one object; wide, tall, square, wide."""
    root = tmp_path_factory.mktemp("flat")
    (root / "images").mkdir()
    images, annotations = [], []
    for index, (width, height) in enumerate(((80, 40), (40, 80), (60, 60), (120, 30))):
        pixels = np.full((height, width, 3), 40 + 50 * index, np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{index}.png")
        images.append(
            {"id": index + 1, "file_name": f"{index}.png", "width": width, "height": height}
        )
        annotations.append({"image_id": index + 1, "category_id": 1, "bbox": [0, 0, width, height]})
    categories = [{"id": label + 1, "name": f"{label}"} for label in range(3)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "set.json").write_text(json.dumps(content), encoding="utf-8")
    return root


def test_whole_mosaic_cells_tile_input_exactly():
    for size in ((96, 120), (64, 64), (320, 256), (100, 70)):
        layout = grid_layout(size)
        assert layout.canvas == size and len(layout.slots) == 4
        cells = [slot.tile(*layout.cell) for slot in layout.slots]
        seen_HW = np.zeros(size, int)
        for number, (row, column) in enumerate(np.ndindex(2, 2)):
            x1, y1, x2, y2 = cells[number]
            sides = x2 - x1, y2 - y1
            assert sides == pytest.approx((size[1] // 2, size[0] // 2))
            assert size[1] * column / 2 <= x1 and x2 <= size[1] * (column + 1) / 2
            assert size[0] * row / 2 <= y1 and y2 <= size[0] * (row + 1) / 2
            seen_HW[round(y1) : round(y2), round(x1) : round(x2)] += 1
        assert seen_HW.max() == 1 and seen_HW.mean() > 0.93


@pytest.mark.parametrize("resize", ["stretch", "letterbox"])
def test_each_image_is_shown_whole_in_a_cell_of_its_own(flat, resize):
    under_test = samples(flat, {**WHOLE, "flip": 0.5}, resize)
    height, width = 96, 144
    cell = np.array([width // 2, height // 2])
    sides = {0: (80, 40), 1: (40, 80), 2: (60, 60), 3: (120, 30)}
    for index in range(4):
        sample = under_test.make(SampleKey(0, index, height, width))
        assert sample.index == index and len(sample.boxes_M4) == 4
        for x1, y1, x2, y2 in sample.boxes_M4:
            middle = int((y1 + y2) / 2), int((x1 + x2) / 2)
            shown = (int(sample.image_HW3[middle][0]) - 40) / 50
            assert shown in sides
            original = np.array(sides[int(shown)])
            whole = cell if resize == "stretch" else original * (cell / original).min()
            np.testing.assert_allclose([x2 - x1, y2 - y1], whole, atol=1)
            at = np.array([x1 + x2, y1 + y2]) / 2 / cell
            np.testing.assert_allclose(at % 1, 0.5, atol=0.03)
            inside_HW3 = sample.image_HW3[int(y1) + 1 : int(y2) - 1, int(x1) + 1 : int(x2) - 1]
            assert (inside_HW3 == sample.image_HW3[middle]).all()
        grey = (sample.image_HW3 == GREY).all(2).mean()
        assert grey == 0 if resize == "stretch" else 0.1 < grey < 0.7


# --- a window in shares of the run ---------------------------------------------------------------


def acting(config: AugmentConfig, epochs: int) -> list[int]:
    """The epochs in which images are combined."""
    return [epoch for epoch in range(epochs) if config.in_epoch(epoch, epochs).mosaic > 0]


def test_fractional_window_scales_with_run_length():
    config = AugmentConfig(mosaic=1.0, combine_epochs=(0.05, 0.5))
    assert acting(config, 20) == [*range(1, 10)]
    assert acting(config, 60) == [*range(3, 30)]
    assert acting(config, 7) == [*range(0, 4)]
    assert acting(config.with_epoch_scale(3.0), 60) == [*range(3, 30)]
    assert acting(AugmentConfig(mosaic=1.0, combine_epochs=(0.0, 1.0)), 5) == [*range(5)]
    assert acting(AugmentConfig(mosaic=1.0, combine_epochs=(0, 1)), 5) == [0]
    closed = AugmentConfig(mosaic=1.0, combine_epochs=(0.0, 1.0), close_mosaic_epochs=2)
    assert acting(closed, 5) == [0, 1, 2]


def test_shares_need_the_length_of_the_run(tmp_path):
    write_coco(tmp_path, 4)
    augment = {**WHOLE, "combine_epochs": (0.0, 0.5)}
    with pytest.raises(ValueError, match="the length of the run is needed, and for shares"):
        samples(tmp_path, augment)
    within, after = (SampleKey(epoch, 1, 64, 64) for epoch in (1, 2))
    windowed = samples(tmp_path, augment, epochs=4)
    always = samples(tmp_path, {**augment, "combine_epochs": None})
    single = samples(tmp_path, STILL)
    np.testing.assert_array_equal(windowed.make(within).image_HW3, always.make(within).image_HW3)
    np.testing.assert_array_equal(windowed.make(after).image_HW3, single.make(after).image_HW3)


def test_epochs_and_shares_are_told_apart_by_their_point(tmp_path):
    class Root(Section):
        augment: AugmentConfig

    def window(text: str):
        file = tmp_path / "window.yml"
        file.write_text(f"augment: {{combine_epochs: {text}}}\n", encoding="utf-8")
        return parse_config(file, [], Root).augment.combine_epochs

    for text, expected in {
        "[0, 1]": (0, 1),
        "[4, 30]": (4, 30),
        "[0.0, 1.0]": (0.0, 1.0),
        "[0, 0.5]": (0.0, 0.5),
    }.items():
        found = window(text)
        assert found == expected and type(found[1]) is type(expected[1])
    for text, said in {
        "[0.5, 0.2]": r"\[0.5, 0.2\] holds no epoch; write \[first, end\)",
        "[0.5, 30]": r"\[0.5, 30\] is neither epochs, .*, nor shares of the run, .*; write ",
        "[0.1, 1.5]": r"\[0.1, 1.5\] is neither epochs, .*, nor shares of the run, .*; write ",
        "[2.0, 30]": r"\[2.0, 30\] is neither epochs, .*, nor shares of the run, .*; write ",
        "[a, 1]": r"combine_epochs\[0\]: found \"a\" \(text\), expected ",
    }.items():
        with pytest.raises(ConfigError, match=said) as refused:
            window(text)
        assert "problems" not in str(refused.value)
