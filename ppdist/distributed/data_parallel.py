"""A model and an optimizer whose gradients are averaged over ranks by fleet."""

import contextlib
from typing import Any

import paddle
from paddle import nn
from paddle.distributed import fleet

from ppdist.distributed.ranks import world_size


def wrap(model: nn.Layer) -> nn.Layer:
    """fleet's model, whose backward averages gradients over ranks.  Collective.

    Parameters of rank 0 are sent to all.  On one process it is the model itself:
    `fleet.distributed_model` raises there in Paddle 3.3.1.
    """
    return model if world_size() == 1 else fleet.distributed_model(model)


def wrap_optimizer(optimizer: paddle.optimizer.Optimizer) -> Any:
    """fleet's optimizer, for `unscale_` and `step` of a GradScaler.

    Under data parallelism it changes nothing.  GradScaler knows an optimizer by its identity, so
    both calls take this one; state and rates are the inner one's.
    """
    return optimizer if world_size() == 1 else fleet.distributed_optimizer(optimizer)


def local_gradients(model: nn.Layer) -> contextlib.AbstractContextManager[None]:
    """Inside, backward adds to this rank's gradients, without communication."""
    return model.no_sync() if world_size() > 1 else contextlib.nullcontext()
