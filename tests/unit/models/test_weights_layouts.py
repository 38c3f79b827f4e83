"""Torch files: what is transposed, what is joined, and which names a file has."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.models.base import ImageModel, KeyTable
from ppdist.models.weights import (
    ClassNames,
    arrays_of,
    linear_keys,
    load_weights,
    official_arrays_of,
    write_arrays,
)
from tests.errors import raises

WIDTH = 4
CLASSES = ("cat", "dog", "bus", "car")


class Attention(nn.Layer):
    """Query, key and value in one matrix, and a square layer of its own."""

    linear_weights = ("in_proj_weight",)

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = self.create_parameter([WIDTH, 3 * WIDTH])
        self.in_proj_bias = self.create_parameter([3 * WIDTH], is_bias=True)
        self.out_proj = nn.Linear(WIDTH, WIDTH)


class Net(ImageModel):
    """Matrices of every kind."""

    class_layers = ("classify.", "label.")

    def __init__(self, num_classes: int = len(CLASSES)) -> None:
        super().__init__(num_classes, 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.backbone = nn.Layer()
        self.backbone.original_keys = dict
        self.attention = Attention()
        self.label = nn.Embedding(num_classes, WIDTH)
        self.query = nn.Embedding(30, 64)
        self.table = self.create_parameter([WIDTH, WIDTH])
        self.classify = nn.Linear(WIDTH, num_classes)

    def key_tables(self):
        whole = {key: key for key in self.state_dict()}  # the same names, in torch's layout
        whole["query.weight"] = "query_embed.weight"
        apart = {key: f"model.{key}" for key in self.state_dict()}
        for part in ("weight", "bias"):
            names = (f"model.attention.{name}_proj.{part}" for name in "qkv")
            apart[f"attention.in_proj_{part}"] = tuple(names)
        return KeyTable(whole), KeyTable(apart)


LINEAR = {"attention.in_proj_weight", "attention.out_proj.weight", "classify.weight"}


def net(seed: int, num_classes: int = len(CLASSES)) -> Net:
    paddle.seed(seed)
    model = Net(num_classes)
    for value in model.state_dict().values():
        value.set_value(paddle.rand(value.shape))
    return model


def in_torch(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value.T if key in LINEAR else value for key, value in arrays.items()}


def whole(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"query.weight": "query_embed.weight"}
    return {names.get(key, key): value for key, value in in_torch(arrays).items()}


def apart(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {f"model.{key}": value for key, value in in_torch(arrays).items()}
    for part in ("weight", "bias"):
        joined = found.pop(f"model.attention.in_proj_{part}")
        for name, each in zip("qkv", np.split(joined, 3)):
            found[f"model.attention.{name}_proj.{part}"] = each
    return found


def test_only_layers_that_multiply_by_a_matrix_are_linear() -> None:
    assert linear_keys(Net()) == LINEAR


@pytest.mark.parametrize("form", [dict, whole, apart])
@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_each_implementation_gives_the_same_weights(tmp_path: Path, form, ending: str) -> None:
    source, target = net(1), net(2)
    path = tmp_path / f"w{ending}"
    write_arrays(path, form(arrays_of(source)))
    report = load_weights(target, path)
    assert not report.fresh and not report.ignored
    wanted = arrays_of(source)
    for key, value in arrays_of(target).items():
        np.testing.assert_array_equal(value, wanted[key], err_msg=key)


def test_a_part_of_a_joined_entry_that_is_missing_is_an_error(tmp_path: Path) -> None:
    arrays = apart(arrays_of(net(1)))
    del arrays["model.attention.k_proj.weight"]
    write_arrays(tmp_path / "w.pt", arrays)
    with raises("weights_shape_mismatch", "attention.in_proj_weight"):
        load_weights(net(2), tmp_path / "w.pt")


@pytest.mark.parametrize("form", [dict, whole, apart])
def test_rows_of_classes_are_found_in_linear_layers_and_embeddings(tmp_path: Path, form) -> None:
    source, target = net(1), net(2, num_classes=WIDTH - 1)
    ours = ("bus", "tram", "cat")
    write_arrays(tmp_path / "w.pt", form(arrays_of(source)))
    report = load_weights(target, tmp_path / "w.pt", ClassNames(CLASSES, ours))
    assert report.by_name == "2 of 3 classes kept by name, fresh: tram"
    for place, name in ((0, "bus"), (2, "cat")):
        row = CLASSES.index(name)
        np.testing.assert_array_equal(target.label.weight[place], source.label.weight[row])
        there, here = source.classify.weight[:, row], target.classify.weight[:, place]
        np.testing.assert_array_equal(here, there)


def test_another_number_of_classes_leaves_both_fresh(tmp_path: Path) -> None:
    write_arrays(tmp_path / "w.pt", apart(arrays_of(net(1))))
    report = load_weights(net(2, num_classes=2), tmp_path / "w.pt")
    assert {*report.fresh} == {"label.weight", "classify.weight", "classify.bias"}
    assert report.reason == "class layers, the file knows 4 classes, the model 2"


def test_the_original_form_of_paddle_names_is_paddles() -> None:
    model = net(1)
    for key, value in official_arrays_of(model).items():
        np.testing.assert_array_equal(value, arrays_of(model)[key])
