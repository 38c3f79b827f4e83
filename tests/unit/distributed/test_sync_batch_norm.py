"""Batch norm over ranks equals batch norm of one process over all images."""

import numpy as np
import paddle
from paddle import nn

from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm
from ppdist.distributed.paddle_api import running_statistics
from ppdist.distributed.sync_batch_norm import synchronize_batch_norm
from tests.distributed import run_on_ranks

CHANNELS = 3


def data():
    rng = np.random.RandomState(0)
    x = rng.standard_normal((5, CHANNELS, 4, 6)).astype("float32") * 3 + 100  # far from 0
    return x, rng.standard_normal(x.shape).astype("float32")


def normalise(share):
    """share: [start, stop) of the images for each rank; uneven on purpose, [] for a blank one."""
    comm.init("cpu", DistributedConfig())
    return [normalised(each) for each in share[comm.rank()]]


def normalised(share):
    paddle.seed(1)
    layer = nn.Sequential(nn.BatchNorm2D(CHANNELS))
    synchronize_batch_norm(layer)
    layer[0].counts = bool(share)
    layer[0].weight.set_value(np.array([0.5, 1.0, 2.0], "float32"))
    if share:
        x, dy = (paddle.to_tensor(part[slice(*share)]) for part in data())
    else:  # a blank image, of whose gradient the others must hear nothing
        x, dy = (paddle.full_like(paddle.to_tensor(part[:1]), np.nan) for part in data())
    x.stop_gradient = False
    y = layer(x)
    y.backward(dy)
    gradients = [layer[0].weight.grad, layer[0].bias.grad]
    return {
        "y": y.tolist(),
        "dx": x.grad.tolist(),
        "dparameters": [comm.all_reduce_sum(g).tolist() for g in gradients],
        "mean": running_statistics(layer[0])[0].tolist(),
        "variance": running_statistics(layer[0])[1].tolist(),
        "keys": sorted(layer.state_dict()),
    }


def test_ranks_normalise_like_one_process():
    # By rank: uneven in three ways, with ranks that have no image.
    shares = [[[0, 4], [0, 5], [0, 1]], [[4, 5], [], [1, 3]], [[], [], [3, 5]]]
    by_rank = run_on_ranks(3, "tests.unit.distributed.test_sync_batch_norm:normalise", shares)
    (alone,) = normalise([[[0, 5]]])
    for ranks in zip(*by_rank, strict=True):
        for key in ("y", "dx"):
            together = np.concatenate([rank[key] for rank in ranks])
            np.testing.assert_allclose(together[:5], alone[key], rtol=2e-5, atol=2e-5)
            assert not np.any(together[5:]), "a rank that does not count has no say"
        for rank in ranks:
            assert rank["keys"] == alone["keys"]
            for key in ("dparameters", "mean", "variance"):
                np.testing.assert_allclose(rank[key], alone[key], rtol=2e-5, atol=1e-4)
