"""Fine-tuning maps rows of classes by name, exactly, in every family."""

import numpy as np
import paddle
import pytest

from ppdist.config.model import PPYOLOEConfig, YOLOv5ClsConfig, YOLOv5Config
from ppdist.models.base import ImageModel
from ppdist.models.build import build_model
from ppdist.models.weights import (
    ClassNames,
    LoadReport,
    arrays_of,
    load_all_weights,
    load_weights,
    write_arrays,
)
from tests.errors import raises
from tests.unit.models.kept import built_once

FILE = ("cat", "dog", "bus", "car")


@built_once
def yolov5(count: int, seed: int) -> ImageModel:
    paddle.seed(seed)
    return build_model(YOLOv5Config(size="n", width_multiple=0.0625, num_classes=count))


@built_once
def ppyoloe(count: int, seed: int) -> ImageModel:
    paddle.seed(seed)
    config = PPYOLOEConfig(size="t", width_multiple=0.125, num_classes=count, one_to_one=True)
    return build_model(config)


@built_once
def classifier(count: int, seed: int) -> ImageModel:
    paddle.seed(seed)
    return build_model(YOLOv5ClsConfig(size="n", width_multiple=0.0625, num_classes=count))


FAMILIES = pytest.mark.parametrize("build", [yolov5, ppyoloe, classifier])


def shaken(model: ImageModel) -> dict[str, np.ndarray]:
    """Weights none of which equals another."""
    for number, value in enumerate(model.state_dict().values()):
        if value.dtype == paddle.float32:
            value.set_value(paddle.rand(value.shape) + number)
    return arrays_of(model)


def tune(build, tmp_path, ours: tuple[str, ...], theirs: tuple[str, ...] = FILE):
    """Weights of a model of FILE's classes, of one of `ours` before and after it took them."""
    source = shaken(build(len(FILE), 1))
    write_arrays(tmp_path / "w.npz", source)
    target = build(len(ours), 2)
    before = arrays_of(target)
    report = load_weights(target, tmp_path / "w.npz", ClassNames(theirs, ours))
    return source, before, arrays_of(target), report


def classes_of(model: ImageModel, array: np.ndarray, count: int) -> np.ndarray:
    """[groups, rows before the classes + count, ...], the classes' axis second."""
    rows = array.T if array.ndim == 2 else array
    return rows.reshape(-1, model.rows_before_classes + count, *rows.shape[1:])


def assert_rows(build, tuned, ours: tuple[str, ...]) -> LoadReport:
    """Each row is that of its name in the file, or the initial one."""
    source, before, after, report = tuned
    model = build(1, 0)
    first, seen = model.rows_before_classes, 0
    for key, value in after.items():
        if not key.startswith(model.class_layers):
            np.testing.assert_array_equal(value, source[key])
            continue
        seen += 1
        there = classes_of(model, source[key], len(FILE))
        then = classes_of(model, before[key], len(ours))
        now = classes_of(model, value, len(ours))
        np.testing.assert_array_equal(now[:, :first], there[:, :first])
        for place, name in enumerate(ours):
            expected = (
                there[:, first + FILE.index(name)] if name in FILE else then[:, first + place]
            )
            np.testing.assert_array_equal(now[:, first + place], expected)
    assert seen and not report.fresh
    return report


@FAMILIES
@pytest.mark.parametrize(
    ("ours", "told"),
    [
        (("bus", "tram", "cat"), "2 of 3 classes"),
        (("car", "bus", "dog", "cat"), "4 of 4 classes"),  # in another order
        (("a", "b", "c", "d"), "0 of 4 classes"),
    ],
)
def test_rows_follow_their_names(tmp_path, build, ours, told) -> None:
    report = assert_rows(build, tune(build, tmp_path, ours), ours)
    assert report.by_name.startswith(told)


@pytest.mark.parametrize(
    "names",
    [(FILE, FILE), ((), FILE), (FILE, ()), (FILE, ("class 0", "class 1", "class 2", "class 3")),
     (FILE[:3], FILE[::-1]), (("cat", "CAT ", "bus", "car"), FILE), (("Cat", *FILE[1:]), FILE)],
)  # fmt: skip
def test_without_use_of_names_rows_stay(tmp_path, names) -> None:
    source = shaken(yolov5(4, 1))
    write_arrays(tmp_path / "w.npz", source)
    target = yolov5(4, 2)
    report = load_weights(target, tmp_path / "w.npz", ClassNames(*names))
    for key, value in arrays_of(target).items():
        np.testing.assert_array_equal(value, source[key])
    assert not report.by_name and not report.fresh


@pytest.mark.parametrize("build", [ppyoloe, classifier])
def test_no_common_name_leaves_the_layers_fresh(tmp_path, build) -> None:
    _, before, after, report = tune(build, tmp_path, ("a", "b"))
    assert report.fresh and not report.by_name
    for key in report.fresh:
        np.testing.assert_array_equal(after[key], before[key])


def test_box_and_objectness_stay_without_a_common_name(tmp_path) -> None:
    report = assert_rows(yolov5, tune(yolov5, tmp_path, ("a", "b")), ("a", "b"))
    assert report.by_name.startswith("0 of 2 classes")


def test_half_precision_rows_are_converted(tmp_path) -> None:
    source = {key: value.astype("float16") for key, value in shaken(yolov5(4, 1)).items()}
    write_arrays(tmp_path / "w.npz", source)
    target = yolov5(2, 2)
    load_weights(target, tmp_path / "w.npz", ClassNames(FILE, ("car", "dog")))
    found = arrays_of(target)["head.predict3.bias"].reshape(3, 7)
    expected = source["head.predict3.bias"].reshape(3, 9)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[:, 5:], expected[:, [8, 6]])


@FAMILIES
def test_weights_are_evaluated_by_name_whatever_the_order(build, tmp_path):
    theirs = shaken(build(4, 1))
    file = tmp_path / "w.npz"
    write_arrays(file, theirs)
    ours = build(4, 2)
    told = load_all_weights(ours, file, ClassNames(FILE, ("bus", "cat", "Dog", "car")))
    assert told.startswith("4 of 4 classes")
    again = build(4, 3)
    for renamed in (("a", "b", "c", "d"), ("cat", "dog", "bus", "tram")):
        assert "matched by order" in load_all_weights(again, file, ClassNames(FILE, renamed))
        for key, value in arrays_of(again).items():
            np.testing.assert_array_equal(value, theirs[key])
    assert load_all_weights(again, file, ClassNames(FILE, FILE)) == ""
    for other in (("dog", "cat", "bus", "tram"), (*FILE, "tram"), ("cat", "tram"), ("a", "b", "c")):
        with raises("classes_differ", "cat, dog, bus, car", ", ".join(other)):
            load_all_weights(build(len(other), 3), file, ClassNames(FILE, other))
