"""RT-DETR and D-FINE compute what transformers computes: detr_outputs.json says with what."""

import json
from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from ppdist.config.model import RTDETR_SIZES, RTDETRConfig
from ppdist.distributed import paddle_api
from ppdist.models import functional
from ppdist.models.rtdetr import RTDETR
from ppdist.models.weights import linear_keys
from tests.reference.detr_outputs import (
    CASES,
    CLASSES,
    FILE,
    OUTPUTS,
    QUERIES,
    image,
    named,
    noise,
    stored,
    stored_gradients,
    weight_of,
)

STORED = json.loads(FILE.read_text(encoding="utf-8"))["cases"]
GRADIENTS = 1e-3  # of a part's norm
FAST = ("dfine_n",)


def build(name: str) -> RTDETR:
    variant, size = name.split("_")
    model = RTDETR(
        RTDETRConfig(
            variant=variant, size=size, num_classes=CLASSES, queries=QUERIES, denoising=0
        )
    )  # fmt: skip
    official, linear = model.official_keys(), linear_keys(model)
    for key, tensor in model.state_dict().items():
        shape = tuple(tensor.shape[::-1] if key in linear else tensor.shape)
        value = weight_of(official[key], shape)
        if value is not None:
            tensor.set_value(value.T if key in linear else value)
    for layer in model.sublayers():  # not eval mode, in which Paddle's gradient is another one
        if isinstance(layer, paddle.nn.BatchNorm2D):
            paddle_api.normalise_by_running(layer)
    return model


@pytest.fixture(autouse=True)
def computed_by_paddle() -> Iterator[None]:
    """A training of another test in this process leaves oneDNN's operations, which round anew."""
    before = functional.compute_by(None)
    yield
    functional.compute_by(before)


def test_every_size_has_a_reference() -> None:
    sizes = {f"{variant}_{size}" for variant, row in RTDETR_SIZES.items() for size in row}
    assert sizes == {*CASES} == {*STORED}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_outputs_and_gradients_equal_transformers(name: str) -> None:
    model, x = build(name), paddle.to_tensor(image(name))
    outputs = named(model(x))
    expected = STORED[name]["outputs"]
    assert outputs.keys() == expected.keys()
    for key, output in outputs.items():
        found = stored(key, output.numpy())
        assert found["shape"] == expected[key]["shape"]
        want = np.array(expected[key]["values"])
        assert found["values"] == pytest.approx(want, abs=OUTPUTS * max(1, abs(want).max())), key
    factors = {key: noise(key, x.shape).astype("float32") for key, x in outputs.items()}
    paddle.add_n([(x * paddle.to_tensor(factors[k])).sum() for k, x in outputs.items()]).backward()

    official, linear = model.official_keys(), linear_keys(model)
    gradients = {
        official[key]: p.grad.numpy().T if key in linear else p.grad.numpy()
        for key, p in model.named_parameters()
        if p.grad is not None
    }
    norms = stored_gradients(gradients)
    assert norms.keys() == STORED[name]["gradients"].keys()
    for part, (norm, product) in STORED[name]["gradients"].items():
        assert norms[part] == pytest.approx([norm, product], abs=GRADIENTS * norm), part
