"""Optimizer groups, state by structured names, and the weight average."""

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.config.optimizer import OptimizerConfig
from ppdist.optim.ema import EMA, Decay
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.optimizer import (
    build_optimizer,
    load_optimizer_arrays,
)
from ppdist.optim.updater import Updater
from tests.errors import raises
from tests.unit.engine.amp import create_state


def network():
    return nn.Sequential(nn.Conv2D(3, 4, 3), nn.BatchNorm2D(4))


def nested():
    """Layers within layers, as backbones have them."""
    block = nn.Sequential(nn.Conv2D(4, 4, 3), nn.BatchNorm2D(4))
    return nn.Sequential(nn.Conv2D(3, 4, 3), nn.Sequential(block, nn.LayerNorm([4, 2, 2])))


def train(model, optimizer, steps):
    for step in range(steps):
        x = paddle.to_tensor(np.random.RandomState(step).standard_normal((2, 3, 8, 8)), "float32")
        (model(x) ** 2 * x.mean()).sum().backward()
        optimizer.step()
        optimizer.clear_grad()


@pytest.mark.parametrize("decay_biases", [True, False])
@pytest.mark.parametrize(
    ("build", "norms"), [(network, ("1.",)), (nested, ("1.0.1.", "1.1."))], ids=["flat", "nested"]
)
def test_decay_skips_normalisation_and_biases_where_asked(build, norms, decay_biases):
    model = build()
    config = OptimizerConfig(weight_decay=1.0, decay_biases=decay_biases)
    optimizer = build_optimizer(model, config, 0.1, False)
    for parameter in model.parameters():
        parameter.set_value(parameter + 1.0)  # else biases are 0
    before = {key: p.numpy().copy() for key, p in model.named_parameters()}
    for parameter in model.parameters():
        (parameter * 0.0).sum().backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        spared = key.startswith(norms) or (key.endswith("bias") and not decay_biases)
        factor = 1.0 if spared else 0.9  # w - lr * decay * w
        np.testing.assert_allclose(parameter.numpy(), before[key] * factor, rtol=1e-6)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_state_survives_other_generated_names(name):
    config = OptimizerConfig(name=name)
    model = network()
    optimizer = build_optimizer(model, config, 0.01, False)
    train(model, optimizer, 3)
    weights = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    state = Updater(optimizer, model).state()
    assert all("/" in key and key.split("/")[0] in weights for key in state)

    nn.Linear(2, 2)  # shifts Paddle's generated names
    other = network()
    other.set_state_dict(weights)
    resumed = build_optimizer(other, config, 0.01, False)
    load_optimizer_arrays(resumed, other, state)
    train(model, optimizer, 2)
    train(other, resumed, 2)
    for key, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), other.state_dict()[key].numpy()), key


def test_optimizer_state_of_another_model_is_refused():
    model = network()
    optimizer = build_optimizer(model, OptimizerConfig(), 0.01, False)
    with raises("checkpoint_of_other_config", "head.weight"):
        load_optimizer_arrays(optimizer, model, {"head.weight/velocity_0": np.zeros(3, "float32")})


def test_ema_follows_formula_and_covers_statistics():
    model = network()
    ema = EMA(model, decay=Decay(0.9))
    expected = model.state_dict()["1._mean"].numpy().copy()
    for step in range(1, 40):
        model.state_dict()["1._mean"].set_value(np.full(4, step, "float32"))
        ema.update({})
        keep = min(0.9, (1 + step) / (10 + step))
        expected = keep * expected + (1 - keep) * step
    np.testing.assert_allclose(ema.average["1._mean"].numpy(), expected, rtol=1e-5)
    twin = EMA(network(), decay=Decay(0.9))
    twin.load(ema.state(), ema.updates)
    assert all(np.array_equal(twin.state()[key], value) for key, value in ema.state().items())


def test_the_average_of_a_constant_is_the_constant():
    model = network()
    constant = np.float32([0.1, 1.25, 3.40625, 12.3])
    model.state_dict()["1._mean"].set_value(constant)
    ema = EMA(model, Decay(0.9998))
    for _ in range(100):
        ema.update({})
    np.testing.assert_array_equal(ema.average["1._mean"].numpy(), constant)


def test_biases_and_momentum_follow_rates_of_their_own():
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.0), 0.1, False)
    expected = {key: value.numpy().astype("float64") for key, value in model.state_dict().items()}
    velocity = {key: 0.0 for key in expected}
    for step in range(4):
        rates = LearningRates(
            lr=0.01 * (step + 1), bias_lr=0.1 / (step + 1), momentum=0.5 + 0.1 * step
        )
        optimizer.clear_grad()
        model(paddle.ones([4, 3])).square().sum().backward()
        Updater(optimizer, model).set_rates(rates)
        optimizer.step()
        for key, parameter in model.named_parameters():
            velocity[key] = rates.momentum * velocity[key] + parameter.grad.numpy()
            lr = rates.bias_lr if key == "bias" else rates.lr
            expected[key] = expected[key] - lr * velocity[key]
            np.testing.assert_allclose(parameter.numpy(), expected[key], rtol=1e-5, atol=1e-6)


def half_precision_network():
    model = network()
    model[0].to(dtype="float16")
    return model


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_master_weights_survive_other_names(name):
    """What AMP O2 keeps on a GPU; a CPU has no such update, so state is made without a step."""

    def optimizer_of(model):
        return build_optimizer(model, OptimizerConfig(name=name), 0.01, master_weights=True)

    model = half_precision_network()
    optimizer = optimizer_of(model)
    create_state(optimizer, model, filled=True)
    state = Updater(optimizer, model).state()
    assert state["0.weight/fp32_master_0"].dtype == np.float32

    nn.Linear(2, 2)  # shifts Paddle's generated names
    other = half_precision_network()
    resumed = optimizer_of(other)
    load_optimizer_arrays(resumed, other, state)
    create_state(resumed, other)
    restored = Updater(resumed, other).state()
    assert set(restored) == set(state)
    for key, value in state.items():
        assert np.array_equal(value, restored[key]), key


def test_state_of_other_optimizer_kind_refused():
    model = network()
    optimizer = build_optimizer(model, OptimizerConfig(name="momentum"), 0.01, False)
    train(model, optimizer, 1)
    state = Updater(optimizer, model).state()
    other = build_optimizer(model, OptimizerConfig(name="adamw"), 0.01, False)
    with raises("checkpoint_of_other_config"):
        load_optimizer_arrays(other, model, state)
