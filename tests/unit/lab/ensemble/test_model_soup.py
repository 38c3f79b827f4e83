"""Averages of weights: what is averaged, what is left out, what is refused."""

from pathlib import Path

import numpy as np
import pytest

from ppdist.common.manifest import CARD_NOTE
from ppdist.engine.build import build_model
from ppdist.lab.ensemble.model_soup import (
    average_weights,
    read_weights,
    require_different,
    set_weights,
)
from ppdist.models.model_card import ModelCard
from ppdist.models.weights import arrays_of, write_arrays
from tests.errors import raises
from tests.unit.engine.tiny import tiny_config


def several(tmp_path: Path, count: int, model: str = "yolov5"):
    """A model and files with weights like its own, each moved by other noise."""
    built = build_model(tiny_config(tmp_path, model=model))
    own, paths = arrays_of(built), []
    named = dict(built.named_parameters())
    for place in range(count):
        rng = np.random.default_rng(place)
        moved = {
            key: value + rng.random(value.shape).astype(np.float32) if key in named else value
            for key, value in own.items()
        }
        paths.append(tmp_path / f"{place}.npz")
        write_arrays(paths[-1], moved)
    return built, paths


@pytest.mark.parametrize("name", ["yolov5", "ppyoloe", "yolov5_cls"])
def test_weights_are_averaged_constants_kept(name, tmp_path: Path) -> None:
    model, paths = several(tmp_path, 3, name)
    before = arrays_of(model)
    set_weights(model, average_weights(model, paths)[0])
    files = [dict(np.load(path)) for path in paths]
    changed = set()
    for key, value in arrays_of(model).items():
        expected = np.mean([file[key].astype(np.float64) for file in files], axis=0)
        np.testing.assert_array_equal(value, expected.astype(value.dtype))
        changed |= {key} if (value != before[key]).any() else set()
    assert any(key.endswith("._mean") for key in changed)
    assert {key for key in before if key not in changed} == (
        {"head.anchors"} if name == "yolov5" else set()
    )


def test_the_mean_of_equals_is_the_same(tmp_path: Path) -> None:
    model, (path,) = several(tmp_path, 1)
    mean, same = average_weights(model, [path] * 3)
    arrays = read_weights(model, path)
    assert same == arrays.keys()
    assert all((value == arrays[key]).all() for key, value in mean.items())


def test_what_is_the_same_is_known_by_key(tmp_path: Path) -> None:
    model, (path,) = several(tmp_path, 1)
    arrays = read_weights(model, path)
    key = next(key for key in arrays if key.endswith("._mean"))
    write_arrays(tmp_path / "other.npz", {**arrays, key: arrays[key] + 1})
    assert average_weights(model, [path, tmp_path / "other.npz"])[1] == arrays.keys() - {key}


def test_other_anchors_are_refused(tmp_path: Path) -> None:
    model, (first, second) = several(tmp_path, 2)
    arrays = dict(np.load(second))
    write_arrays(second, {**arrays, "head.anchors": arrays["head.anchors"] * 2})
    with raises("weights_not_alike", str(second), "head.anchors"):
        average_weights(model, [first, second])


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    model, (path,) = several(tmp_path, 1)
    write_arrays(tmp_path / "other.npz", {"a": np.zeros(3, np.float32)})
    with raises("weights_of_other_architecture"):
        average_weights(model, [path, tmp_path / "other.npz"])


def test_one_file_or_the_same_one_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "best").symlink_to("step-1")
    with raises("weights_repeated", str(tmp_path), "/best", "/step-1"):
        require_different([tmp_path / "step-1", tmp_path / "best"])
    with raises("weights_too_few"):
        require_different([tmp_path / "best"])


def test_classes_are_averaged_by_name(tmp_path: Path) -> None:
    model, paths = several(tmp_path, 2, "ppyoloe")
    first, second = dict(np.load(paths[0])), dict(np.load(paths[1]))
    names, turned = ("red", "green", "blue"), ("blue", "red", "green")
    for key, value in second.items():
        if key.startswith(model.class_layers):
            second[key] = value[[2, 0, 1]]
    expected = average_weights(model, paths)[0]
    for path, arrays, order in zip(paths, (first, second), (names, turned)):
        write_arrays(path, arrays, {CARD_NOTE: ModelCard(class_names=order).text()})
    found = average_weights(model, paths, names)[0]
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)
    with raises("classes_differ", str(paths[0]), "red, green, blue", "red, green, pink"):
        average_weights(model, paths, ("red", "green", "pink"))
