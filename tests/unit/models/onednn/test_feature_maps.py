"""Feature maps in oneDNN's layouts take every operation as those in Paddle's do."""

import numpy as np
import paddle
import pytest

from ppdist.models.onednn import feature_maps, ops
from ppdist.models.onednn.feature_maps import layout_of, to_plain

try:
    ops.library()
except (OSError, ops.OneDNNError) as error:
    pytest.skip(f"no oneDNN in this Paddle: {error}", allow_module_level=True)

OPERATIONS = {
    "sum": lambda x, y: feature_maps.add(x, y),
    "concatenation": lambda x, y: feature_maps.concat([x, y]),
    "concatenation, one twice": lambda x, y: feature_maps.concat([x, y, x]),
    "max pooling": lambda x, y: feature_maps.max_pool(feature_maps.add(x, y), 3),
    "upsampling": lambda x, y: feature_maps.upsample2x(feature_maps.add(x, y)),
    "mean": lambda x, y: feature_maps.spatial_mean(feature_maps.add(x, y)),
    "gate": lambda x, y: feature_maps.scale_channels(x, feature_maps.spatial_mean(y)),
}
# Channels, and those of a block of each of the two maps; 0: Paddle's layout.
LAYOUTS = [(16, 8, 8), (16, 16, 16), (16, 8, 16), (8, 8, 8), (12, 12, 12), (16, 8, 0), (16, 0, 0)]


def in_blocks(x, block):
    """The same map in another layout, a leaf whose gradient is kept."""
    plain = layout_of(x)
    buffer = ops.Reorder(plain, ops.layout(tuple(plain.shape), block))(x.clone())
    buffer.stop_gradient = False
    return buffer


def result_and_gradients(operation, x, y):
    out = to_plain(operation(x, y))
    weight = np.random.default_rng(1).uniform(0.5, 1.5, out.shape).astype("float32")
    (out * paddle.to_tensor(weight)).sum().backward()
    for each in (x, y):
        assert each.grad.shape == each.shape
    return out, to_plain(x.grad), to_plain(y.grad)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_what_paddle_computes(name, layout, batch):
    channels, *blocks = layout
    values = np.random.default_rng(0).standard_normal((2, batch, channels, 6, 5))
    maps = [paddle.to_tensor(each.astype("float32"), stop_gradient=False) for each in values]
    expected = result_and_gradients(OPERATIONS[name], *maps)
    blocked = [in_blocks(x.detach(), block) for x, block in zip(maps, blocks, strict=True)]
    found = result_and_gradients(OPERATIONS[name], *blocked)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-5)
