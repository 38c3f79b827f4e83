"""Plots: files that are there, show something, and survive odd sets."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from ppdist.common.errors import UserError
from ppdist.data.checks.statistics import Objects
from ppdist.viz.plots import plot_classes


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


pytestmark = pytest.mark.usefixtures("no_warning")


def test_two_splits_are_told_apart(tmp_path):
    splits = {"train": made(400, 3), "val": made(150, 3, seed=1)}
    path = tmp_path / "new" / "classes.png"
    plot_classes(splits, ("cat", "dog", "$odd_name"), path)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    assert {(0, 114, 178), (230, 159, 0)} <= set(map(tuple, pixels[::3].tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("a", "b", "c"), ("红细胞", "\U00012000", "œuf")])
def test_few_boxes_and_odd_names_are_plotted(tmp_path, names):
    plot_classes({"train": made(1, 3), "val": made(0, 3)}, names, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG" and min(image.size) > 250


def test_of_very_many_classes_the_commonest_and_the_rarest_have_bars(tmp_path):
    names = tuple(f"class {number}" for number in range(500))
    splits = {"train": made(3000, 500), "val": made(900, 500)}
    plot_classes(splits, names, tmp_path / "a.png", boxes=False)
    with Image.open(tmp_path / "a.png") as image:
        assert image.height < 2000
    figure = figure_of({"train": made(50, 3)}, names)
    assert {text.get_text() for text in figure.axes[0].get_yticklabels()} == {*names[:3]}
    assert "3 of 500 classes" in figure.get_suptitle()


def figure_of(splits, names, boxes=True):
    """What was written."""
    with mock.patch("ppdist.viz.plots.save") as save:
        plot_classes(splits, names, Path("a.png"), boxes=boxes)
    return save.call_args.args[1]


def test_classified_images_have_one_panel_and_boxes_two():
    splits = {"train": made(40, 2), "val": made(20, 2)}
    for boxes, titles in (
        (False, ["images of each class"]),
        (True, ["objects of each class", "images that show it"]),
    ):
        figure = figure_of(splits, ("a", "b"), boxes)
        assert [axes.get_title() for axes in figure.axes] == titles


def test_numbers_and_names_stay_in_the_picture():
    names = ("common", "rare " * 50)
    for rare in (1, 900):  # a logarithmic axis, a linear one
        objects = made(2000, 1, images=2000)
        objects.labels_M[:rare] = 1
        figure = figure_of({"train": objects}, names)
        figure.draw_without_rendering()
        for axes in figure.axes:
            assert axes.get_window_extent().width > 200
            limit = axes.get_window_extent().x1
            assert all(text.get_window_extent().x1 < limit for text in axes.texts)


@pytest.mark.slow
def test_counts_far_apart_are_all_seen(tmp_path):
    objects = made(2000, 1)
    objects.labels_M[:2] = 1
    path = tmp_path / "a.png"
    plot_classes({"train": objects}, ("common", "rare"), path)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    lower_bar = pixels[pixels.shape[0] * 6 // 10 : pixels.shape[0] * 7 // 10]
    assert ((lower_bar == (0, 114, 178)).all(-1).sum(1) > 20).any()


def test_an_unwritable_folder_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="it is a file; expected a folder"):
        plot_classes({"train": made(5, 1)}, ("a",), tmp_path / "file" / "a.png")
