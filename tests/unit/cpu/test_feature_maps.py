"""Feature maps in oneDNN's layouts take every operation as those in Paddle's do."""

import numpy as np
import paddle
import pytest

from ppdist.cpu import onednn, precision
from ppdist.cpu.feature_maps import compute, layout_of
from ppdist.models import functional
from ppdist.models.base import tensors_in
from tests.emulated_bfloat16 import EMULATED

try:
    onednn.library()
except (OSError, onednn.OneDNNError) as error:
    pytest.skip(f"no oneDNN in this Paddle: {error}", allow_module_level=True)


def numbers(x):
    """Two numbers, [1] each, that depend on a map."""
    x = functional.plain(x)
    return x.mean().reshape([1]), x.square().mean().reshape([1])


OPERATIONS = {
    "sum": functional.add,
    "concatenation": lambda x, y: functional.concat([x, y], axis=1),
    "concatenation, one twice": lambda x, y: functional.concat([x, y, x], axis=1),
    "concatenation of rows": lambda x, y: functional.concat([x, y], axis=2),
    "max pooling": lambda x, y: functional.max_pool2d(functional.add(x, y), 3, 1, 1),
    "max pooling, stride 2": lambda x, y: functional.max_pool2d(functional.add(x, y), 3, 2, 1),
    "max pooling of pairs": lambda x, y: functional.max_pool2d(functional.add(x, y), 2),
    "max pooling, overlapping pairs": lambda x, y: functional.max_pool2d(
        functional.add(x, y), 2, stride=1
    ),
    "mean of pairs": lambda x, y: functional.avg_pool2d(functional.add(x, y), 2),
    "zeros below": lambda x, y: functional.pad(functional.add(x, y), [0, 0, 0, 1]),
    "zeros right and below": lambda x, y: functional.pad(functional.add(x, y), [0, 2, 0, 1]),
    "zeros above": lambda x, y: functional.pad(functional.add(x, y), [0, 0, 1, 0]),
    "affine": lambda x, y: functional.affine(x, *numbers(y)),
    "second half": lambda x, y: functional.chunk(functional.add(x, y), 2, axis=1)[1],
    "activation": lambda x, y: functional.silu(functional.add(x, y)),
    "upsampling": lambda x, y: functional.upsample2x(functional.add(x, y)),
    "mean": lambda x, y: functional.spatial_mean(functional.add(x, y)),
    "gate": lambda x, y: functional.scale_channels(x, functional.spatial_mean(y)),
}
# Channels, and those of a block of each of the two maps; 0: Paddle's layout.
LAYOUTS = [(16, 8, 8), (16, 16, 16), (16, 8, 16), (8, 8, 8), (12, 12, 12), (16, 8, 0), (16, 0, 0)]


@pytest.fixture(autouse=True)
def _by_onednn():
    functional.compute_by(compute)


def in_blocks(x, block):
    """The same map in another layout, a leaf whose gradient is kept."""
    plain = layout_of(x)
    buffer = onednn.Reorder(plain, onednn.layout(tuple(plain.shape), block))(x.clone())
    buffer.stop_gradient = False
    return buffer


def result_and_gradients(operation, x, y):
    out = functional.plain(operation(x, y))
    weight = np.random.default_rng(1).uniform(0.5, 1.5, out.shape).astype("float32")
    (out * paddle.to_tensor(weight)).sum().backward()
    for each in (x, y):
        assert each.grad.shape == each.shape
    return out, functional.plain(x.grad), functional.plain(y.grad)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_what_paddle_computes(name, layout, batch):
    channels, *blocks = layout
    values = np.random.default_rng(0).standard_normal((2, batch, channels, 6, 5))
    plain = [paddle.to_tensor(each.astype("float32"), stop_gradient=False) for each in values]
    expected = result_and_gradients(OPERATIONS[name], *plain)
    blocked = [in_blocks(x.detach(), block) for x, block in zip(plain, blocks, strict=True)]
    found = result_and_gradients(OPERATIONS[name], *blocked)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [0, 8, 16])
def test_gradients_of_a_shared_map_are_summed_in_bfloat16(block):
    values = np.random.default_rng(0).standard_normal((3, 2, 16, 6, 5)).astype("float32")
    x = in_blocks(paddle.to_tensor(values[0]), block).detach().astype("bfloat16")
    x.stop_gradient = False
    with precision.compute_in(EMULATED):
        readers = functional.share(x, 3)
        assert {reader.data_ptr() for reader in readers} == {x.data_ptr()}
        weights = [in_blocks(paddle.to_tensor(each), block).detach() for each in values]
        weights = [weight.astype("bfloat16").astype("float32") for weight in weights]
        total = sum(
            (reader.astype("float32") * weight).sum()
            for reader, weight in zip(readers, weights, strict=True)
        )
        total.backward()
    expected = sum(weight.numpy() for weight in weights)
    np.testing.assert_allclose(x.grad.astype("float32").numpy(), expected, rtol=2**-6, atol=2**-7)


def test_a_shared_map_of_float32_is_one_tensor():
    x = paddle.ones([1, 16, 2, 2])
    assert all(reader is x for reader in functional.share(x, 2))


def test_a_layout_of_one_block_has_a_name():
    """Then it is passed on: 16 channels in a block of 16 are also channels side by side."""
    conv = onednn.Convolution(
        (2, 16, 8, 8), (16, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, False, 16, True
    )
    assert conv.x.block and conv.y.block
    assert conv.y_given.equals(conv.y) and conv.y_out.primitive is None


def test_bfloat16_of_a_card_is_left_to_paddle():
    """`paddle.amp` makes such maps there, where `compute_in` asks for nothing."""
    x, given = paddle.ones([1, 16, 2, 2], dtype="bfloat16"), []
    x.stop_gradient = False
    functions = functional.share, functional.add, functional.max_pool2d, functional.chunk
    for function, *settings in zip(functions, (2, x, 3, 2), strict=True):
        compute(function, lambda *arguments: given.append(arguments), x, *settings)
    compute(functional.concat, lambda *arguments: given.append(arguments), [x, x], 1)
    assert len(given) == 5
    for part in tensors_in(given):
        assert part is x
