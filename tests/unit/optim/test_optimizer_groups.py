"""Parameter groups: which weights they are, and what one step makes of them."""

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.config.optimizer import OptimizerConfig, ParameterGroupConfig
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.optimizer import (
    build_optimizer,
    parameter_group_lines,
    parameter_groups,
)
from ppdist.optim.updater import Updater
from tests.errors import raises


class Net(nn.Layer):
    """A backbone of two stages with norms, and a head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Layer()
        self.backbone.stem = nn.Linear(3, 3)
        self.backbone.norm = nn.LayerNorm(3)
        self.backbone2 = nn.Linear(3, 3)  # not in `backbone`
        self.head = nn.Linear(3, 1)

    @property
    def stages(self):
        keys = [key for key, _ in self.named_parameters()]
        return {
            "backbone": [key for key in keys if key.startswith("backbone.")],
            "head": [key for key in keys if not key.startswith("backbone.")],
        }

    def forward(self, x):
        x = self.backbone.norm(nn.functional.sigmoid(self.backbone.stem(x)))
        return self.head(nn.functional.sigmoid(self.backbone2(x)))


def group(match, lr_factor=1.0, weight_decay_factor=1.0):
    return ParameterGroupConfig(
        match=match, lr_factor=lr_factor, weight_decay_factor=weight_decay_factor
    )


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["backbone"], {"backbone.stem.weight": 0, "backbone.stem.bias": 0,
            "backbone.norm.weight": 0, "backbone.norm.bias": 0}),
        (["*.bias", "backbone.*"], {"backbone.stem.bias": 0, "backbone.norm.bias": 0,
            "backbone2.bias": 0, "head.bias": 0, "backbone.stem.weight": 1,
            "backbone.norm.weight": 1}),
        (["head.weight", "head."], {"head.weight": 0, "head.bias": 1}),
    ],
)  # fmt: skip
def test_the_first_group_that_matches_counts(patterns, expected):
    groups = [group(each) for each in patterns]
    found = parameter_groups(Net(), groups)
    assert {key: groups.index(each) for key, each in found.items()} == expected


@pytest.mark.parametrize(
    ("patterns", "where", "message"),
    [
        (["bakbone"], "optimizer.groups.0.match", "expected one of backbone, backbone2, head"),
        (["head", "backbone.stam"], "optimizer.groups.1.match", "expected backbone.{stem, norm}"),
        (["*.nom.weight"], "optimizer.groups.0.match", "the nearest are backbone.norm.weight"),
        ([""], "optimizer.groups.0.match", "expected one of"),
        (["backbone", "backbone.stem"], "optimizer.groups.1.match", "in a group before it"),
    ],
)
def test_a_group_without_weights_is_an_error(patterns, where, message):
    with raises("parameter_group_empty") as caught:
        parameter_groups(Net(), [group(each) for each in patterns])
    assert caught.value.where == where and message in str(caught.value)


def test_the_log_says_what_each_group_trains():
    groups = (group("backbone", lr_factor=0.1), group("*.bias", weight_decay_factor=0.0))
    first, second = parameter_group_lines(Net(), groups)
    assert all(fact in first for fact in ("backbone: 18 weights", "rate x 0.1", "decay x 1"))
    assert all(fact in second for fact in ("*.bias: 4 weights", "rate x 1", "decay x 0"))


GROUPS = (
    group("backbone.stem.weight", lr_factor=0.1, weight_decay_factor=0.5),
    group("backbone", lr_factor=0.25),
    group("head", weight_decay_factor=0.0),
)
LR = {"backbone.stem.weight": 0.05, "backbone.stem.bias": 0.125, "backbone.norm.weight": 0.125,
      "backbone.norm.bias": 0.125}  # with layer_decay 0.5 # fmt: skip
DECAY = {"backbone.stem.weight": 0.05, "backbone.stem.bias": 0.1, "backbone2.weight": 0.1,
         "backbone2.bias": 0.1}  # norms are exempt, the head by its group # fmt: skip


def gradients_of(model, step):
    x = paddle.to_tensor(np.random.RandomState(step).standard_normal((4, 3)), "float32")
    for parameter in model.parameters():
        parameter.clear_gradient()
    model(x).square().sum().backward()
    return {key: each.grad.numpy().astype("float64") for key, each in model.named_parameters()}


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_groups_have_their_own_rate_and_decay(name):
    """Beside layer-wise rates, in numpy; also where no weight of a group is updated (ZeRO)."""
    model = Net()
    config = OptimizerConfig(
        name=name, weight_decay=0.1, layer_decay=0.5, betas=(0.9, 0.99), epsilon=1e-6,
        groups=GROUPS,
    )  # fmt: skip
    optimizer = build_optimizer(model, config, 0.1, False)
    weights = {key: p.numpy().astype("float64") for key, p in model.named_parameters()}
    first, second = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    model.head.weight.stop_gradient = model.head.bias.stop_gradient = True
    for step in range(1, 5):
        rate = 0.02 * step
        model.head.weight.stop_gradient = model.head.bias.stop_gradient = False
        gradients = gradients_of(model, step)
        Updater(optimizer, model).set_rates(LearningRates(rate, 3 * rate, 0.9))
        model.head.weight.stop_gradient = model.head.bias.stop_gradient = True
        optimizer.step()
        for key, parameter in model.named_parameters():
            own = LR.get(key, 1.0) * (3 * rate if key.endswith("bias") else rate)
            decay, gradient = DECAY.get(key, 0.0), gradients[key]
            if key.startswith("head."):
                own = 0.0
            if name == "momentum":
                first[key] = 0.9 * first[key] + gradient + decay * weights[key]
                weights[key] -= own * first[key]
            else:
                first[key] = 0.9 * first[key] + 0.1 * gradient
                second[key] = 0.99 * second[key] + 0.01 * gradient**2
                weights[key] *= 1 - own * decay
                root = np.sqrt(second[key] / (1 - 0.99**step)) + 1e-6
                weights[key] -= own * first[key] / (1 - 0.9**step) / root
            np.testing.assert_allclose(
                parameter.numpy(), weights[key], rtol=1e-4, atol=1e-5, err_msg=key
            )
