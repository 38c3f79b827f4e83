"""Tensors in one storage: the same tensors as before, wherever operators put them."""

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.distributed.paddle_api import share_buffer
from ppdist.optim.ema import EMA, Decay
from ppdist.optim.flat_storage import FlatGradients, FlatStorage
from tests.unit.engine.tiny import build_step, fixed_batch, init_cpu, take_step, tiny_config

SHAPES = ([3, 5], [1], [16], [2, 4, 3, 3])


def tensors():
    return [paddle.full(shape, 1.0 + at) for at, shape in enumerate(SHAPES)]


def leave(tensor, value):
    """As an operator does that runs where this accelerator has no kernel."""
    share_buffer(paddle.full(tensor.shape, value), tensor)


def test_what_is_done_to_the_storage_is_done_to_all():
    parts = tensors()
    storage = FlatStorage(parts)
    storage.gather().scale_(10.0)
    for at, (tensor, shape) in enumerate(zip(parts, SHAPES)):
        assert list(tensor.shape) == shape and tensor.data_ptr() % 64 == 0
        assert (tensor.numpy() == 10.0 * (1 + at)).all()


def test_writing_into_a_tensor_writes_into_the_storage():
    parts = tensors()
    storage = FlatStorage(parts)
    paddle.assign(paddle.full(SHAPES[0], 7.0), parts[0])
    parts[1].set_value(np.array([8.0], "float32"))
    parts[2].add_(paddle.ones(SHAPES[2]))
    values = storage.gather().numpy()[storage.places().numpy()]
    assert values.tolist() == [7.0] * 15 + [8.0] + [4.0] * 16 + [4.0] * 72


def test_a_tensor_that_left_the_storage_comes_back():
    parts = tensors()
    storage = FlatStorage(parts)
    leave(parts[2], 9.0)
    storage.gather().scale_(2.0)
    assert [float(each.max()) for each in parts] == [2.0, 4.0, 18.0, 8.0]


def test_values_that_left_the_storage_are_given_back():
    parts = tensors()
    storage = FlatStorage(parts)
    storage.scatter(storage.gather() * 5.0)
    assert [float(each.max()) for each in parts] == [5.0, 10.0, 15.0, 20.0]
    storage.gather().scale_(2.0)
    assert [float(each.max()) for each in parts] == [10.0, 20.0, 30.0, 40.0]


def test_the_average_follows_a_weight_that_left():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1D(2))
    ema = EMA(model, Decay(0.0))
    leave(model[0].weight, 3.0)
    leave(ema.average["0.bias"], 5.0)  # and an average
    ema.update({})
    assert ema.average["0.weight"].numpy() == pytest.approx(3.0, rel=1e-6)  # one rounding
    assert (ema.average["0.bias"].numpy() == 0.0).all()


def test_training_leaves_all_tensors_in_their_storage(tmp_path, monkeypatch):
    init_cpu()
    step, rates = build_step(tiny_config(tmp_path), frozen=False)

    def moved(storage):
        raise AssertionError("an operator gave a tensor another storage")

    monkeypatch.setattr(FlatStorage, "_lay_out", moved)
    poison = {"by": 1.0}
    step.loss.register_forward_post_hook(
        lambda loss, given, output: type(output)(output.total * poison["by"], *output[1:])
    )
    for number, poison["by"] in enumerate((1.0, float("nan"), 1.0)):  # the second is undone
        result = take_step(step, [fixed_batch(number, 0, 8)], number, rates)
        assert result.applied == (number != 1)


def parameters_with_gradients(draw):
    found = []
    for shape in ([8, 3], [5], [8, 3], [700, 1000], [5], [1]):
        parameter = paddle.create_parameter(shape, "float32")
        gradient = paddle.to_tensor(draw.standard_normal(shape).astype("float32"))
        (parameter.t() * gradient.t() if len(shape) > 1 else parameter * gradient).sum().backward()
        found.append(parameter)
    return found


def test_flat_gradients_are_norm_and_scale_of_each():
    parameters = parameters_with_gradients(np.random.default_rng(0))
    gradients = [each.grad.clone() for each in parameters]
    flat = FlatGradients(parameters)
    flat.collect()
    one_by_one = [paddle.dot(each.flatten(), each.flatten()) for each in gradients]
    assert flat.square().item() == paddle.stack(one_by_one).sum().item()  # every bit
    flat.scale_(0.3)
    for parameter, gradient in zip(parameters, gradients):
        assert np.array_equal(parameter.grad.numpy(), gradient.scale_(0.3).numpy())


def test_flat_gradients_of_an_operator_that_moved_them(monkeypatch):
    parameters = parameters_with_gradients(np.random.default_rng(1))
    expected = [each.grad.numpy() * np.float32(0.5) for each in parameters]
    flat = FlatGradients(parameters)
    flat.collect()
    scale = paddle.Tensor.scale_

    def elsewhere(tensor, factor):
        share_buffer(tensor * 1.0, tensor)
        return scale(tensor, factor)

    monkeypatch.setattr(paddle.Tensor, "scale_", elsewhere)
    flat.scale_(0.5)
    for parameter, values in zip(parameters, expected):
        assert np.array_equal(parameter.grad.numpy(), values)
