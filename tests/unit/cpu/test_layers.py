"""oneDNN layers equal the plain ones, leave the model's parameters alone, and work on ranks."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.config.distributed import DistributedConfig
from ppdist.config.model import PPYOLOEConfig
from ppdist.cpu import layers, onednn, switch
from ppdist.cpu.precision import FLOAT32, compute_in
from ppdist.cpu.switch import self_check, use_onednn, use_plain_layers
from ppdist.distributed import collectives, comm
from ppdist.distributed.sync_batch_norm import SyncBatchNorm2D
from ppdist.models.attention import HIDDEN, MultiHeadAttention
from ppdist.models.build import build_model
from ppdist.models.layers import (
    ACTIVATIONS,
    ConvBNLayer,
    RepConv,
    set_activation,
)
from tests.distributed import run_on_ranks

try:
    onednn.library()
except (OSError, onednn.OneDNNError) as error:
    pytest.skip(f"no oneDNN in this Paddle: {error}", allow_module_level=True)

LAYERS = {
    "3x3": lambda: nn.Conv2D(16, 32, 3, padding=1, bias_attr=False),
    "1x1 with bias": lambda: nn.Conv2D(48, 20, 1),
    "stride 2, odd channels": lambda: nn.Conv2D(3, 13, 3, stride=2, padding=1),
    "depthwise": lambda: nn.Conv2D(24, 24, 3, padding=1, groups=24),
    "depthwise, 5x5": lambda: nn.Conv2D(32, 32, 5, padding=2, groups=32, bias_attr=False),
    "groups": lambda: nn.Conv2D(12, 18, 3, padding=1, groups=3),
    "dilated": lambda: nn.Conv2D(8, 8, 3, padding=2, dilation=2),
    "5x1, uneven padding": lambda: nn.Conv2D(8, 8, (5, 1), padding=(2, 0)),
    "frozen weight": lambda: frozen(nn.Conv2D(17, 1, 1, bias_attr=False)),
    "norm, silu": lambda: ConvBNLayer(16, 24, 3, 2),
    "norm": lambda: ConvBNLayer(16, 24, 1, activation=None),
    "two branches": lambda: RepConv(24),
    "two branches, alpha": lambda: RepConv(16, scaled_branch=True),
    **{
        f"norm, {name}": partial(ConvBNLayer, 16, 24, 3, 2, name)
        for name in ACTIVATIONS
        if name != "silu"
    },
    "two branches, relu": lambda: with_activation(RepConv(24), "relu"),
}
TOKENS = {
    "linear": lambda: nn.Linear(24, 40),
    "linear without bias": lambda: nn.Linear(24, 7, bias_attr=False),
    "layer norm": lambda: nn.LayerNorm(24),
    "attention": lambda: Attending(24, hides=False),
    "attention, some hidden": lambda: Attending(24, hides=True),
}
UNSUPPORTED = {
    "NHWC": lambda: nn.Conv2D(8, 8, 3, padding=1, data_format="NHWC"),
    "SAME": lambda: nn.Conv2D(8, 8, 3, padding="SAME"),
    "reflect": lambda: nn.Conv2D(8, 8, 3, padding=1, padding_mode="reflect"),
}


class Attending(nn.Layer):
    """Attention with a position.

    Args: hides: each of the first tokens sees those up to itself, the others see each other.
    """

    def __init__(self, width, hides):
        super().__init__()
        self.inside, self.hides = MultiHeadAttention(width), hides

    def forward(self, x):
        batch, tokens = x.shape[:2]
        hidden = paddle.triu(paddle.full([tokens // 2, tokens], HIDDEN), 1)
        bias = hidden.tile([batch, 1, 1, 1]) if self.hides else None
        return self.inside(x, x.cos(), bias)


def with_activation(layer, name):
    set_activation(nn.Sequential(layer), name)
    return layer


def frozen(layer):
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    return layer


def images(layer, seed=0, shape=(3, 9, 11)):
    first = next(s for s in layer.sublayers(include_self=True) if isinstance(s, nn.Conv2D))
    batch, height, width = shape
    size = [batch, first._in_channels, height, width]
    if first._data_format == "NHWC":
        size = [batch, height, width, first._in_channels]
    return np.random.RandomState(seed).standard_normal(size).astype("float32")


def outcome(layer, x, needs_dx=True):
    """Output, gradients and state after one forward and backward."""
    x = paddle.to_tensor(x, stop_gradient=not needs_dx)
    y = layer(x)
    factor = paddle.to_tensor(np.random.RandomState(1).uniform(-1, 1, y.shape).astype("float32"))
    if not y.stop_gradient:
        (y * factor).sum().backward()
    found = {"y": y, "dx": x.grad} | {n: p.grad for n, p in layer.named_parameters()}
    found |= {f"state {name}": tensor for name, tensor in layer.state_dict().items()}
    return {name: None if t is None else t.numpy() for name, t in found.items()}


def assert_equal(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        if value is not None:
            # One number (the gradient of alpha) sums thousands of terms, which may cancel.
            scale = max(float(np.abs(value).max()), 1e-3 if value.size > 1 else 10.0)
            np.testing.assert_allclose(
                found[name], value, rtol=0, atol=tolerance * scale, err_msg=name
            )


@pytest.mark.parametrize("kind", LAYERS)
def test_values_and_gradients_equal_plain_layer(kind):
    plain = LAYERS[kind]()
    fast = copy.deepcopy(plain)
    assert use_onednn(fast) > 0
    for shape in ((3, 9, 11), (1, 16, 8), (3, 9, 11)):
        x = images(plain, shape=shape)
        assert_equal(outcome(fast, x), outcome(plain, x))
        for layer in (plain, fast):
            layer.clear_gradients()


@pytest.mark.parametrize("kind", TOKENS)
def test_layers_of_tokens_equal_the_plain_ones(kind):
    plain = TOKENS[kind]()
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert [type(each) for each in fast.sublayers(include_self=True)] != [
        type(each) for each in plain.sublayers(include_self=True)
    ]
    for shape in ((3, 5, 24), (1, 8, 24)):
        x = np.random.RandomState(0).standard_normal(shape).astype("float32")
        assert_equal(outcome(fast, x), outcome(plain, x))
        for layer in (plain, fast):
            layer.clear_gradients()


@pytest.mark.parametrize("kind", ["3x3", "norm, silu", "two branches"])
def test_inputs_strided_or_without_gradient_accepted(kind):
    plain = LAYERS[kind]()
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    x = images(plain)
    assert_equal(outcome(fast, x, needs_dx=False), outcome(plain, x, needs_dx=False))
    turned = paddle.to_tensor(x).transpose([0, 1, 3, 2])
    np.testing.assert_allclose(fast(turned).numpy(), plain(turned).numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["norm, silu", "norm, hardswish", "two branches, alpha"])
def test_eval_and_sync_bn_equal_plain_layer(kind):
    plain = LAYERS[kind]()
    for layer in plain.sublayers():
        if type(layer) is nn.BatchNorm2D and kind == "norm, silu":
            layer.__class__ = SyncBatchNorm2D
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    x = images(plain)
    assert_equal(outcome(fast, x), outcome(plain, x))
    plain.eval()
    fast.eval()
    with paddle.no_grad():
        y = plain(paddle.to_tensor(x)).numpy()
        np.testing.assert_allclose(fast(paddle.to_tensor(x)).numpy(), y, atol=1e-5)
    for layer in (plain, fast):
        layer.clear_gradients()
    assert_equal(outcome(fast, x), outcome(plain, x))  # evaluation mode with gradients


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_convolution_runs_as_before(kind):
    plain = UNSUPPORTED[kind]()
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert_equal(outcome(fast, images(plain)), outcome(plain, images(plain)), 0)


def test_switch_keeps_parameters_and_can_be_undone():
    model = nn.Sequential(ConvBNLayer(3, 8, 3), RepConv(8), nn.Conv2D(8, 4, 1))
    before = {name: id(p) for name, p in model.named_parameters()}
    classes = [type(layer) for layer in model.sublayers()]
    assert use_onednn(model) == 4
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == list(plain_model_keys(model))
    assert use_onednn(model) == 0
    assert use_plain_layers(model) == 4
    assert [type(layer) for layer in model.sublayers()] == classes


def plain_model_keys(model):
    twin = copy.deepcopy(model)
    use_plain_layers(twin)
    return twin.state_dict()


def small_detector():
    paddle.seed(3)
    return build_model(
        PPYOLOEConfig(variant="plus", width_multiple=0.25, depth_multiple=0.33, num_classes=3)
    )


def test_self_check_leaves_detector_and_rng_as_is():
    model = small_detector()
    state = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    generator = paddle.get_rng_state()
    expected = paddle.rand([4]).tolist()
    paddle.set_rng_state(generator)
    model.eval()
    assert self_check(model) is None
    assert not model.training
    assert paddle.rand([4]).tolist() == expected
    assert all(p.grad is None for p in model.parameters())
    assert not any(isinstance(s, layers.OneDNNConv2D) for s in model.sublayers())
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), state[name], err_msg=name)


def test_self_check_names_layer_with_wrong_gradient(monkeypatch):
    right = onednn.Convolution.weight_gradient

    def wrong(self, x, dy):
        dw, db = right(self, x, dy)
        return dw * 1.01, db

    monkeypatch.setattr(onednn.Convolution, "weight_gradient", wrong)
    reason = self_check(nn.Sequential(nn.Conv2D(3, 8, 3), ConvBNLayer(8, 8, 1)))
    assert reason is not None
    assert "weight of 0 (Conv2D" in reason


@pytest.mark.parametrize(("wrong", "reason"), [({1, 2}, None), ({1, 2, 3}, "on draw 1")])
def test_what_is_wrong_on_some_images_only_is_rounding(wrong, reason, monkeypatch):
    def check(model, size, kernels, draw):
        return f"on draw {draw}" if draw in wrong else None

    monkeypatch.setattr("ppdist.cpu.switch._check_model", check)
    assert self_check(nn.Sequential(nn.Conv2D(3, 8, 3))) == reason


def test_the_self_check_says_that_there_is_no_library(monkeypatch):
    def missing():
        raise OSError("no libdnnl.so in libs")

    monkeypatch.setattr(switch.onednn, "library", missing)
    assert self_check(nn.Sequential(nn.Conv2D(3, 8, 3))) == "no libdnnl.so in libs"


def test_a_shape_without_a_kernel_runs_as_before():
    class Refusing:
        @staticmethod
        def Convolution(*arguments):
            raise onednn.OneDNNError("oneDNN convolution: status 3")

    plain = ConvBNLayer(3, 8, 3)
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    with compute_in(replace(FLOAT32, made_by=Refusing)):
        assert_equal(outcome(fast, images(plain)), outcome(plain, images(plain)), 0)


class Foreign(nn.Layer):
    """A layer of somebody else's."""

    def __init__(self):
        super().__init__()
        self.block = ConvBNLayer(3, 16, 3)

    def forward(self, x):
        return {"a map": self.block(x)}


def test_the_self_check_reads_a_dict_of_outputs():
    assert self_check(Foreign()) is None


def train_on_ranks(argument):
    """Gradients and statistics of two accumulated micro-batches, per rank."""
    fast = argument == "fast"
    comm.init("cpu", DistributedConfig())
    paddle.seed(5)
    model = nn.Sequential(ConvBNLayer(3, 16, 3), RepConv(16), nn.Conv2D(16, 4, 1))
    if fast:
        use_onednn(model)
    wrapped = collectives.wrap(model)
    rng = np.random.RandomState(comm.rank())
    batches = [rng.standard_normal((2, 3, 8, 8)).astype("float32") for _ in range(2)]
    with collectives.local_gradients(wrapped):
        wrapped(paddle.to_tensor(batches[0])).square().mean().backward()
    wrapped(paddle.to_tensor(batches[1])).square().mean().backward()
    found = {name: p.grad.tolist() for name, p in model.named_parameters() if p.grad is not None}
    return found


@pytest.mark.slow
def test_two_ranks_average_gradients_as_plain_layers():
    plain = run_on_ranks(2, "tests.unit.cpu.test_layers:train_on_ranks", "plain")
    fast = run_on_ranks(2, "tests.unit.cpu.test_layers:train_on_ranks", "fast")
    assert len(plain[0]) == 11
    assert fast[0] == fast[1]
    assert_equal(*({n: np.array(g) for n, g in ranks[0].items()} for ranks in (fast, plain)))
