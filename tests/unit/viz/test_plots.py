"""Plots: files that are there, show something, and survive odd sets."""

import warnings
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from ppdist.common.errors import UserError
from ppdist.data.checks.statistics import Objects
from ppdist.viz.plots import plot_statistics

ALL = ["classes.png", "boxes.png", "positions.png", "images.png"]


def made(count: int, classes: int, seed: int = 0, images: int = 20) -> Objects:
    """Boxes of every size anywhere in images of two sizes."""
    rng = np.random.RandomState(seed)
    image_M = np.sort(rng.randint(0, images, count))
    sizes_N2 = np.where(np.arange(images)[:, None] % 2, (640, 480), (300, 500))
    side_M2 = np.exp(rng.uniform(0, 5, (count, 2)))
    low_M2 = rng.rand(count, 2) * np.maximum(sizes_N2[image_M] - side_M2, 1)
    return Objects(
        image_M=image_M,
        labels_M=rng.randint(0, classes, count),
        crowd_M=rng.rand(count) < 0.05,
        boxes_M4=np.concatenate([low_M2, low_M2 + side_M2], 1),
        area_M=side_M2.prod(1),
        input_M2=side_M2,
        sizes_N2=sizes_N2,
    )


def colours(path: Path) -> int:
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) > 250
        red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), np.int32), -1, 0)
        return len(np.unique(red << 16 | green << 8 | blue))


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.slow
def test_every_plot_of_splits_shows_something(tmp_path):
    splits = {"train": made(400, 3), "val": made(150, 3, seed=1)}
    paths = plot_statistics(splits, ("cat", "dog", "$odd_name"), tmp_path / "new")
    assert [path.name for path in paths] == ALL
    assert all(path.parent == tmp_path / "new" and colours(path) > 20 for path in paths)
    pixels = np.asarray(Image.open(paths[0]).convert("RGB")).reshape(-1, 3)
    assert {(0, 114, 178), (230, 159, 0)} <= set(map(tuple, pixels[::3].tolist()))


@pytest.mark.slow
def test_a_set_with_hardly_a_box_is_plotted(tmp_path):
    paths = plot_statistics({"train": made(1, 2), "val": made(0, 2)}, ("a", "b"), tmp_path)
    assert [path.name for path in paths] == ALL and all(map(colours, paths))


def test_more_classes_than_bars_have_room_for_are_points(tmp_path):
    names = tuple(f"class {number}" for number in range(500))
    splits = {"train": made(3000, 500), "val": made(900, 500)}
    with_boxes = plot_statistics(splits, names, tmp_path, boxes=False)
    assert [path.name for path in with_boxes] == ["classes.png"]
    with Image.open(with_boxes[0]) as image:
        assert image.height < 1000


def figures(splits, names, folder, boxes=True):
    """What was written, by name."""
    found = {}

    def keep(path, figure):
        found[path.stem] = figure

    with mock.patch("ppdist.viz.plots.save", keep):
        plot_statistics(splits, names, folder, boxes=boxes)
    return found


def test_classified_images_have_one_panel_and_boxes_two(tmp_path):
    splits = {"train": made(40, 2), "val": made(20, 2)}
    for boxes, titles in (
        (False, ["images of each class"]),
        (True, ["objects of each class", "images that show it"]),
    ):
        figure = figures(splits, ("a", "b"), tmp_path, boxes)["classes"]
        assert [axes.get_title() for axes in figure.axes] == titles


@pytest.mark.slow
@pytest.mark.parametrize("sides", [(1.0, 1.0), (30.0, 30.5), (0.01, 20_000.0), (7.0, 90.0)])
def test_labels_of_axes_do_not_overlap(tmp_path, sides):
    objects = made(200, 2)
    objects.boxes_M4[:, 2:] = objects.boxes_M4[:, :2] + np.resize(sides, (200, 2))
    objects.input_M2[:] = np.resize(sides, (200, 2))
    figure = figures({"train": objects}, ("a", "b"), tmp_path)["boxes"]
    figure.draw_without_rendering()
    for axes in figure.axes[:3]:
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) in range(2, 10)
        shown = [text.get_window_extent() for text in axes.get_xticklabels()]
        assert all(one.x1 < other.x0 for one, other in pairwise(shown))


def test_numbers_and_names_stay_in_the_picture(tmp_path):
    names = ("common", "rare " * 50)
    for rare in (1, 900):  # a logarithmic axis, a linear one
        objects = made(2000, 1, images=2000)
        objects.labels_M[:rare] = 1
        figure = figures({"train": objects}, names, tmp_path)["classes"]
        figure.draw_without_rendering()
        for axes in figure.axes:
            assert axes.get_window_extent().width > 200
            limit = axes.get_window_extent().x1
            assert all(text.get_window_extent().x1 < limit for text in axes.texts)


@pytest.mark.slow
def test_counts_far_apart_are_all_seen(tmp_path):
    objects = made(2000, 1)
    objects.labels_M[:2] = 1
    (path, *_) = plot_statistics({"train": objects}, ("common", "rare"), tmp_path)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    lower_bar = pixels[pixels.shape[0] * 6 // 10 : pixels.shape[0] * 7 // 10]
    assert ((lower_bar == (0, 114, 178)).all(-1).sum(1) > 20).any()


@pytest.mark.slow
def test_names_without_a_font_are_numbers(tmp_path):
    names = ("红细胞", "\U00012000", "œuf")
    splits = {"train": made(50, 3), "val": made(50, 3)}
    assert colours(plot_statistics(splits, names, tmp_path)[0]) > 20


def test_an_unwritable_folder_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="it is a file; expected a folder"):
        plot_statistics({"train": made(5, 1)}, ("a",), tmp_path / "file")
