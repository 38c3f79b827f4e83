"""Switches a model's CPU layers to oneDNN, and compares the two.

These are convolutions, linear layers, layer norm, attention and the sampling of feature maps.

`use_onednn(model)` changes the class of layers inside a built model in place: parameters, buffers
and state-dict keys stay the same objects; `use_plain_layers(model)` changes it back (before
export).  The values are those of the plain layers up to the order of float32 sums;
`self_check(model)` compares both on this machine, and training stays eager if they differ.  The
check takes a fifth of a small run's start, and its result depends only on this processor, this
Paddle, this code and the model, so `check_once` stores a pass in $XDG_CACHE_HOME or ~/.cache; a
failure is never stored.

Layers of ppdist/models/ combine and scale feature maps only with models/functional.py, whose
operations feature_maps.py computes; so between them maps stay in oneDNN's layout, and in bfloat16
where it computes in bfloat16. Any other layer, and everything inside it, gets maps in the form that
Paddle's operators take: a detector of a plug-in may use any operator.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from ppdist.common.keyed_cache import KeyedCache
from ppdist.common.machine import kernel_text
from ppdist.common.opener import of_stat
from ppdist.cpu import feature_maps, onednn
from ppdist.cpu.layers import (
    OneDNNConv2D,
    OneDNNConvBNLayer,
    OneDNNLayerNorm,
    OneDNNLinear,
    OneDNNMultiHeadAttention,
    OneDNNRepConv,
    SparseMSDeformableAttention,
)
from ppdist.cpu.precision import FLOAT32, Kernels, compute_in
from ppdist.distributed import paddle_api
from ppdist.models import functional
from ppdist.models.attention import MSDeformableAttention, MultiHeadAttention
from ppdist.models.base import ImageModel, Targets, tensors_in
from ppdist.models.layers import ConvBNLayer, RepConv

LAYER_TOLERANCE = 2e-4  # of the largest value; measured 1e-7 to 1e-5, a wrong kernel gives > 1e-1
MODEL_TOLERANCE = 2e-3  # of the gradient's norm over all parameters; measured 2e-5 to 4e-5
# In bfloat16, relative to a norm: if ReLU passes one value more or less, the largest difference is
# as large as the largest value. Measured 0.01, with ReLU 0.11; a wrong kernel gives > 1.
BFLOAT16_LAYER_TOLERANCE = 0.25
# In a fresh deep model, rounding or noise of 2**-9 in the images changes the direction of the
# gradient (measured 0.06 to 1.5 of the norm), but not its length (measured 0.93 to 1.05).
BFLOAT16_LENGTH_RATIO = 2.0
_LAYER_SIZE = 10  # pixels, one layer's input
_DRAWS = 3  # of images: a ReLU whose input rounds to the other side of zero changes the gradient
_TIMED_LAYERS = ((64, 40, 3), (64, 80, 1))  # channels, side of the map, kernel: of a small net
_TIMED_ROUNDS = 4  # the quickest counts: the first also creates what is cached
_MAX_CACHE_BYTES = 16 << 20  # of stored passes
_KERNEL_VARIABLES = ("ONEDNN_", "DNNL_", "OMP_", "KMP_", "MKL_", "FLAGS_")  # prefixes
_CORE_FIELDS = (
    "processor",
    "cpu MHz",
    "bogomips",
    "core id",
    "apicid",
    "initial apicid",
    "siblings",
)

_ONEDNN_CLASSES: dict[type[nn.Layer], type[nn.Layer]] = {
    nn.Conv2D: OneDNNConv2D, ConvBNLayer: OneDNNConvBNLayer, RepConv: OneDNNRepConv,
    nn.Linear: OneDNNLinear, nn.LayerNorm: OneDNNLayerNorm,
    MultiHeadAttention: OneDNNMultiHeadAttention,
    MSDeformableAttention: SparseMSDeformableAttention,
}  # fmt: skip
_PLAIN_CLASSES = {fast: plain for plain, fast in _ONEDNN_CLASSES.items()}


def use_onednn(model: nn.Layer) -> int:
    """Switches a model's layers to oneDNN, in place; returns the number of convolutions.

    Some ranks may use oneDNN and others not: the values agree up to rounding.

    Raises: OSError, onednn.OneDNNError: no usable library, which `self_check` reports before.
    """
    onednn.library()
    functional.compute_by(feature_maps.compute)  # it leaves plain float32 maps to Paddle
    count = _change_classes(model, _ONEDNN_CLASSES)
    _keep_layouts(model, isinstance(model, ImageModel))
    return count


def use_plain_layers(model: nn.Layer) -> int:
    """Undoes `use_onednn`, in place; returns the number of convolutions that changed."""
    return _change_classes(model, _PLAIN_CLASSES)


def is_on_onednn(model: nn.Layer) -> bool:
    """Returns True if `use_onednn` switched a model that has convolutions."""
    return any(type(layer) is OneDNNConv2D for layer in model.sublayers(include_self=True))


def _keep_layouts(layer: nn.Layer, is_ours: bool) -> None:
    """Lets layers output oneDNN's layout if all layers around them are ours."""
    if isinstance(layer, OneDNNConvBNLayer | OneDNNRepConv):
        layer.keeps_layout = is_ours
    kind = type(layer)
    is_ours = is_ours and (
        kind in (nn.Sequential, nn.LayerList) or kind.__module__.startswith("ppdist.models.")
    )
    for part in layer.children():
        _keep_layouts(part, is_ours)


def _change_classes(model: nn.Layer, classes: dict[type[nn.Layer], type[nn.Layer]]) -> int:
    """Changes the classes of layers; returns the number of convolutions among them."""
    count = 0
    for layer in model.sublayers(include_self=True):
        if type(layer) in classes:
            layer.__class__ = classes[type(layer)]
            count += isinstance(layer, nn.Conv2D)
    return count


def check_once(check: Callable[[], str | None], model: Any) -> str | None:
    """Runs a check unless it has passed on this machine before.

    Args:
        check: returns None if it passes, else the reason of the failure.
        model: everything that defines the model, including its code, in JSON types.
    Returns: the reason of a failure; None: it passed.
    """
    libraries = sorted((Path(paddle.__file__).parent / "libs").glob("*dnn*"))
    first_core = kernel_text(Path("/proc/cpuinfo")).partition("\n\n")[0].splitlines()
    facts = {
        "model": model,
        "paddle": paddle.__version__,
        "libraries": [[file.name, *of_stat(file.stat())] for file in libraries],
        "processor": [line for line in first_core if line.partition("\t")[0] not in _CORE_FIELDS],
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(_KERNEL_VARIABLES)
        },
    }
    cache, key = KeyedCache.of_user("kernels", _MAX_CACHE_BYTES), json.dumps(facts, sort_keys=True)
    if cache is not None and cache.get(key) is not None:
        return None
    reason = check()
    if reason is None and cache is not None:
        cache.put(key, b"passed")
    return reason


def self_check(model: nn.Layer, size: int = 64, kernels: Kernels = FLOAT32) -> str | None:
    """Compares each kind of layer, and the model, with eager.

    Convolutions are of one kind by kernel, channels, stride, padding, dilation, groups, bias, and
    what follows; linear layers, layer norm and attention by the shape of their weights.  For each
    kind, the check compares output, gradients of input and parameters, and running statistics;
    for the model, with SiLU in all layers, a scalar of its outputs on two small images and the
    gradients of all parameters.  Both have to agree on one of _DRAWS inputs: a wrong kernel differs
    on all inputs, rounding at ReLU's zero only on few. It takes 1-3 s, does not use Paddle's random
    generators, and leaves values, gradients, mode and classes of the model (plain or switched) as
    they were.

    Args:
        size: side of the two images in pixels: twice the largest stride, because batch norm over
            fewer cells amplifies every rounding.
        kernels: oneDNN's, in their precision; Paddle's side is float32.
    Returns: None if all agree, else the first reason, as text for a log.
    """
    switched, training = is_on_onednn(model), model.training
    computed_by = functional.compute_by(None)
    use_plain_layers(model)
    model.train()
    for layer in model.sublayers():
        if isinstance(layer, nn.Dropout):  # it would drop different values the second time
            layer.training = False
    try:
        for kind in _kinds(model):
            problem = _check_draws(partial(_check_layer, *kind, kernels))
            if problem is not None:
                return problem
        with _smooth_activations(model):
            return _check_draws(partial(_check_model, model, size, kernels))
    except (OSError, onednn.OneDNNError) as error:
        return str(error)
    finally:
        model.train() if training else model.eval()
        functional.compute_by(computed_by)
        if switched:
            use_onednn(model)


def _kinds(model: nn.Layer) -> Iterator[tuple[str, nn.Layer, nn.Layer, list[int]]]:
    """Yields one layer of each kind: (name, layer, first part with weights, input shape)."""
    seen = set()
    for name, layer in model.named_sublayers(include_self=True):
        first, form = layer, ""
        if type(layer) is ConvBNLayer:
            first, form = layer.conv, f"norm, {layer.activation}"
        elif type(layer) is RepConv and layer.conv is None:
            first = layer.conv1.conv
            form = f"two branches, {layer.alpha is not None}, {layer.activation}"
        elif type(layer) is MultiHeadAttention:
            first = layer.in_proj
        elif type(layer) not in (nn.Conv2D, nn.Linear, nn.LayerNorm) or layer.weight is None:
            continue
        settings_text, shape = "", [2, _LAYER_SIZE, first.weight.shape[0]]
        if isinstance(first, nn.Conv2D):
            settings = paddle_api.conv_settings(first)
            settings_text = str(settings)
            shape = [2, first.weight.shape[1] * settings.groups, _LAYER_SIZE, _LAYER_SIZE]
        kind = (type(layer), form, tuple(first.weight.shape), first.bias is None, settings_text)
        if kind not in seen:
            seen.add(kind)
            yield name, layer, first, shape


def _check_draws(check: Callable[[int], str | None]) -> str | None:
    """Runs a check of draws 1, 2, ... until one passes; returns the first reason if none does."""
    # Lazily: a second input is only tried if the first one differs.
    problems = (check(draw) for draw in range(1, 1 + _DRAWS))
    first = next(problems)
    return None if first is None or None in problems else first


def _check_layer(
    name: str, layer: nn.Layer, first: nn.Layer, shape: list[int], kernels: Kernels, draw: int
) -> str | None:
    """Compares one layer, as `_kinds` describes it; returns the first difference as text."""
    x = paddle.to_tensor(np.random.default_rng(draw).standard_normal(shape).astype(np.float32))
    x.stop_gradient = False
    # Attention takes a position as well.
    inputs = [x, x] if isinstance(layer, MultiHeadAttention) else [x]
    plain, fast = _compute_both(layer, partial(layer, *inputs), [x], kernels)
    for quantity, expected in plain.items():
        difference = _difference(fast[quantity], expected, kernels.dtype)
        if difference is not None:
            return (
                f"{quantity} of {name} ({type(layer).__name__} {first.weight.shape}) differs "
                f"from eager by {difference}"
            )
    return None


@contextmanager
def _smooth_activations(model: nn.Layer) -> Iterator[None]:
    """Sets the activations of a model's layers to SiLU, and restores them afterwards.

    ReLU's derivative jumps at zero: in a deep net the rounding of one sum, on whichever kernels,
    changes the gradient by up to 0.04 of its norm, more than many wrong kernels would.  Each kind
    of layer is compared with its own activation.
    """
    layers = [
        (layer, layer.activation)
        for layer in model.sublayers(include_self=True)
        if isinstance(layer, ConvBNLayer | RepConv) and layer.activation is not None
    ]
    try:
        for layer, _ in layers:
            layer.activation = "silu"
        yield
    finally:
        for layer, activation in layers:
            layer.activation = activation


def _difference(actual: np.ndarray, expected: np.ndarray, dtype: str) -> str | None:
    """Describes a difference beyond the rounding of this precision; None: there is none."""
    if dtype == "float32":
        largest, error = float(np.abs(expected).max()), float(np.abs(actual - expected).max())
        agrees = error <= LAYER_TOLERANCE * max(largest, 1e-3)
        return None if agrees else f"{error:.2g} where the largest value is {largest:.2g}"
    norm, error = (float(np.linalg.norm(values)) for values in (expected, actual - expected))
    # A single number (the gradient of alpha) is the sum of thousands of terms, which may cancel.
    norm = max(norm, 1e-3 if expected.size > 1 else 10.0)
    agrees = error <= BFLOAT16_LAYER_TOLERANCE * norm
    return None if agrees else f"{error / norm:.2g} of its norm, in {dtype}"


def _check_model(model: nn.Layer, size: int, kernels: Kernels, draw: int) -> str | None:
    """Compares outputs and gradients of the model; returns the first difference as text."""
    images = np.random.default_rng(draw).standard_normal((2, 3, size, size))
    x = paddle.to_tensor(images.astype(np.float32))
    inputs = model.training_inputs(x, Targets.example(x)) if isinstance(model, ImageModel) else (x,)

    def scalar() -> Tensor:
        trained_outputs = [out for out in tensors_in(model(*inputs)) if not out.stop_gradient]
        return paddle.add_n(
            [out.astype("float32").square().mean() for out in trained_outputs]
        ).reshape([1])

    plain, fast = _compute_both(model, scalar, [], kernels)
    value, fast_value = plain.pop("output").item(), fast.pop("output").item()
    is_float32 = kernels.dtype == "float32"
    tolerance = LAYER_TOLERANCE if is_float32 else BFLOAT16_LAYER_TOLERANCE
    if not abs(value - fast_value) <= tolerance * abs(value):
        return f"a scalar of the model's outputs is {fast_value:.7g}, in eager {value:.7g}"
    gradients = [quantity for quantity in plain if quantity.startswith("gradient")]
    norm = sum(float(np.square(plain[quantity]).sum()) for quantity in gradients) ** 0.5
    if is_float32:
        error = sum(float(np.square(fast[name] - plain[name]).sum()) for name in gradients) ** 0.5
        if not error <= MODEL_TOLERANCE * norm:
            return f"the gradient of all parameters differs by {error / norm:.2g} of its norm"
        return None
    length = sum(float(np.square(fast[quantity]).sum()) for quantity in gradients) ** 0.5
    if not norm / BFLOAT16_LENGTH_RATIO <= length <= norm * BFLOAT16_LENGTH_RATIO:
        return f"the norm of the gradient of all parameters is {length:.4g}, in eager {norm:.4g}"
    return None


def measure_cost(kernels: Kernels) -> float:
    """Measures the CPU time of layers in these kernels as a multiple of float32's, in 0.1 s.

    The layers are convolutions with batch norm and SiLU, forward and backward, in oneDNN's layout;
    both precisions take turns.  It does not use Paddle's random generators.
    """
    passes = [[_build_pass(k, *form) for form in _TIMED_LAYERS] for k in (FLOAT32, kernels)]
    quickest = [math.inf, math.inf]
    for _ in range(_TIMED_ROUNDS):
        for i, layers in enumerate(passes):
            began = time.process_time()  # other programs do not count
            for run in layers:
                run()
            quickest[i] = min(quickest[i], time.process_time() - began)
    return quickest[1] / quickest[0]


def _build_pass(kernels: Kernels, channels: int, side: int, size: int) -> Callable[[], None]:
    """Builds a layer of these kernels with numbers to compute; returns its two passes."""
    shape, w_shape = (1, channels, side, side), (channels, channels, size, size)
    form = (shape, w_shape, (1, 1), (size // 2, size // 2), (1, 1), 1, False)
    dtypes = (kernels.dtype, kernels.between, kernels.between)
    # In and out in the layout that the kernel itself prefers, as in the middle of a net.
    block = kernels.get("Convolution", *form, 0, True, *dtypes).y_given.block
    conv = kernels.get("Convolution", *form, block, True, *dtypes)
    norm = kernels.get("BatchNorm", conv.y, 1e-5)
    activation = kernels.get("Activation", "silu", conv.y)
    draw = np.random.default_rng(0).standard_normal
    x = paddle.to_tensor(draw(conv.x_given.tensor_shape).astype(np.float32))
    x = conv.x_in(x.astype(conv.x_given.dtype))
    weight = paddle.to_tensor(draw(w_shape).astype(np.float32))
    gamma_C, beta_C = paddle.ones([channels]), paddle.zeros([channels])

    def run() -> None:
        z = conv.forward(x, weight, None)
        normal, mean_C, variance_C = norm.train(z, gamma_C, beta_C)
        dy = activation.gradient(normal, activation.forward(normal))
        dz, *_ = norm.gradient(z, gamma_C, mean_C, variance_C, dy, True)
        conv.weight_gradient(x, dz)
        conv.data_gradient(dz, weight)

    return run


_Measurements = dict[str, np.ndarray]


def _compute_both(
    layer: nn.Layer, call: Callable[[], Tensor], inputs: list[Tensor], kernels: Kernels
) -> tuple[_Measurements, _Measurements]:
    """Runs `call` with the layer plain and on oneDNN; returns the two results.

    The layer is plain before and after; its running statistics and gradients are restored.
    """
    statistics = {n: t for n, t in layer.state_dict().items() if t.stop_gradient}
    kept_statistics = {name: tensor.numpy().copy() for name, tensor in statistics.items()}
    kept_gradients = [(p, None if p.grad is None else p.grad.clone()) for p in layer.parameters()]
    results = []
    for fast in (False, True):
        functional.compute_by(None)  # also of rows, whatever class a layer has
        if fast:
            use_onednn(layer)
        try:
            results.append(_measure(layer, call, inputs, kernels if fast else FLOAT32))
        finally:
            use_plain_layers(layer)
            for name, tensor in statistics.items():
                tensor.set_value(kept_statistics[name])
            for parameter, gradient in kept_gradients:
                parameter.clear_gradient(False)
                if gradient is not None:  # Paddle 3.2 cannot assign None
                    parameter.grad = gradient
    return results[0], results[1]


def _measure(
    layer: nn.Layer, call: Callable[[], Tensor], inputs: list[Tensor], kernels: Kernels
) -> _Measurements:
    """Runs `call` forward and backward; returns output, gradients and statistics by name."""
    parameters = {n: p for n, p in layer.named_parameters() if not p.stop_gradient}
    for tensor in [*parameters.values(), *inputs]:
        tensor.clear_gradient(False)  # to None; the binding ignores the keyword set_to_zero
    with compute_in(kernels):
        output = call().astype("float32")
    weight = np.random.default_rng(2).uniform(0.5, 1.5, output.shape).astype(np.float32)
    (output * paddle.to_tensor(weight)).sum().backward()
    values = {"output": output.numpy()}
    values |= {f"gradient of input {i}": t.grad.numpy() for i, t in enumerate(inputs)}
    with_gradient = {n: p for n, p in parameters.items() if p.grad is not None}
    values |= {f"gradient of {n}": p.grad.numpy() for n, p in with_gradient.items()}
    values |= {n: t.numpy().copy() for n, t in layer.state_dict().items() if t.stop_gradient}
    return values
