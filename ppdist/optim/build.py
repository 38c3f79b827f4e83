"""How the ranks of a configuration become one: what is averaged, and who updates what."""

import paddle

from ppdist import dist
from ppdist.config.distributed import DistributedConfig
from ppdist.optim.averaging import Averaging, DuringBackward, next_synchronised
from ppdist.optim.compression import LowPrecision, LowRank, TopK
from ppdist.optim.local_sgd import LocalSGD
from ppdist.optim.sharding import Sharding


def build_averaging(
    config: DistributedConfig,
    parameters: dict[str, paddle.Tensor],
    optimizer: paddle.optimizer.Optimizer,
    steps: int,
) -> Averaging:
    """What the configuration and the device call for; on one rank nothing needs to be sent.

    Args:
        parameters: what the optimizer trains, by state-dict key.
        steps: of the whole run.
    """
    if dist.world_size() == 1:
        return DuringBackward()
    if config.sync_every is not None:
        return LocalSGD([*parameters.values()], optimizer, config.sync_every, steps)
    if config.gradient_dtype != "float32":
        return LowPrecision(config.gradient_dtype)
    if config.gradient_rank is not None:
        return LowRank(parameters, config.gradient_rank)
    if config.topk_fraction is not None:
        return TopK(parameters, config.topk_fraction)
    # gloo overlaps nothing with backward, so nothing is lost by coming after it.
    return DuringBackward() if dist.on_gpu() else Averaging()


def build_sharding(
    config: DistributedConfig, parameters: dict[str, paddle.Tensor]
) -> Sharding | None:
    """The shares of the optimizer's state; None: each rank holds all of it."""
    if not config.shard_optimizer or dist.world_size() == 1:
        return None
    return Sharding(parameters)


def last_step(max_steps: int | None, config: DistributedConfig) -> int | None:
    """`train.max_steps`, or the next step at which the ranks of this run can stop."""
    if max_steps is None or config.sync_every is None or dist.world_size() == 1:
        return max_steps
    return next_synchronised(max_steps, config.sync_every)
