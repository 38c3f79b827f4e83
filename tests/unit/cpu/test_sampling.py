"""Samples by sparse products against gathered ones; operations on rows."""

import weakref
from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from ppdist.cpu import feature_maps, onednn
from ppdist.cpu.layers import SparseMSDeformableAttention
from ppdist.models import functional
from ppdist.models.attention import HEADS, Memory, MSDeformableAttention

try:
    onednn.library()
except (OSError, onednn.OneDNNError) as error:
    pytest.skip(f"no oneDNN in this Paddle: {error}", allow_module_level=True)

POINTS = (2, 3)
RNG = np.random.default_rng(0)


def drawn(*shape, of=RNG.standard_normal):
    x = paddle.to_tensor(of(shape).astype("float32"))
    x.stop_gradient = False
    return x


def gradients(y, *inputs):
    weight = np.random.default_rng(1).standard_normal(y.shape).astype("float32")
    found = paddle.grad((y * paddle.to_tensor(weight)).sum(), inputs)
    return [x.numpy() for x in (y, *found)]


def test_sparse_samples_equal_gathered_ones():
    maps = [drawn(2, 16, 5, 7), drawn(2, 16, 3, 4)]
    # Offsets of up to several boxes: many points lie outside the maps.
    offsets, weights = drawn(2, 9, HEADS * 5 * 2), drawn(2, 9, HEADS, 5)
    boxes = paddle.to_tensor(RNG.random((2, 9, 4)).astype("float32"))
    layer = MSDeformableAttention(16, POINTS, projected=False)
    results = []
    for kind in (MSDeformableAttention, SparseMSDeformableAttention):
        layer.__class__ = kind
        y = layer.sample_offsets(Memory.of(maps, POINTS), 4 * offsets, weights, boxes)
        results.append(gradients(y, *maps, offsets, weights))
    for plain, sparse in zip(*results, strict=True):
        np.testing.assert_allclose(sparse, plain, rtol=0, atol=2e-6 * np.abs(plain).max())


def test_samples_of_a_box_that_is_not_finite_are_not():
    layer = MSDeformableAttention(16, POINTS, projected=False)
    layer.__class__ = SparseMSDeformableAttention
    boxes = paddle.to_tensor([[[0.5, 0.5, 0.2, 0.2], [np.nan, 0.5, 0.2, np.inf]]])
    memory = Memory.of([drawn(1, 16, 5, 7), drawn(1, 16, 3, 4)], POINTS)
    y = layer.sample_offsets(memory, drawn(1, 2, HEADS * 10), drawn(1, 2, HEADS, 5), boxes)
    finite = np.isfinite(y.numpy())
    assert finite[0, 0].all() and not finite[0, 1].any()


OPERATIONS = {
    "softmax": (functional.softmax, F.softmax),
    "log_softmax": (functional.log_softmax, F.log_softmax),
    "relu": (functional.relu, F.relu),
    "largest": (partial(functional.largest, count=4), lambda x: x.topk(4)[0]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_on_rows_equals_paddles(name):
    fast, plain = OPERATIONS[name]
    x = drawn(3, 4, 33)
    functional.compute_by(feature_maps.compute)
    found = gradients(fast(x), x)
    for ours, paddles in zip(found, gradients(plain(x), x), strict=True):
        np.testing.assert_allclose(ours, paddles, rtol=1e-5, atol=1e-5)


def test_softmax_is_freed_without_a_backward_pass():
    functional.compute_by(feature_maps.compute)
    y = functional.softmax(drawn(3, 5))
    reference = weakref.ref(y)
    del y
    assert reference() is None


def test_largest_of_equal_numbers_are_distinct_columns():
    functional.compute_by(feature_maps.compute)
    x = paddle.zeros([1, 1, 9])
    x.stop_gradient = False
    (dx,) = paddle.grad(functional.largest(x, 4).sum(), [x])
    assert dx.flatten().tolist() == [1.0] * 4 + [0.0] * 5
