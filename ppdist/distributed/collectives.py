"""Collectives of tensors and arrays over all ranks, and those that fleet runs within backward.

On CPUs, data within a host goes through shared memory; otherwise it goes through gloo's sockets or
the accelerator's library.  Every rank makes the same calls in the same order, with tensors of the
same shapes.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import distributed as pd
from paddle import nn
from paddle.distributed import fleet

from ppdist.distributed import heartbeat
from ppdist.distributed.ranks import world_size


@dataclass
class Routes:
    """The routes of messages between ranks; `comm.init` sets them.

    Attributes:
        memory: a `SharedMemoryAllReduce`, on CPUs where a host has several ranks.
        leaders: group of the first ranks of all hosts, if there are several hosts.
        bucket_mb: size of the messages that `sum_tensors` sends, MiB.
    """

    memory: Any = None
    leaders: Any = None
    bucket_mb: int = 25


routes = Routes()


def all_reduce_sum(tensor: paddle.Tensor) -> paddle.Tensor:
    """Sums a tensor over ranks, in place, and returns it.  Collective."""
    if world_size() > 1 and not _sum_in_memory([tensor]):
        with heartbeat.Waiting(f"all_reduce of {tensor.size} values"):
            pd.all_reduce(tensor, op=pd.ReduceOp.SUM)
    return tensor


def read(*tensors: paddle.Tensor) -> list[float]:
    """Copies the sums of a step to the host, one by one; waits for the device.

    On an accelerator a collective is only queued, so an early rank waits for late ranks here, and a
    hung rank is noticed here.
    """
    values = paddle.concat(tensors) if len(tensors) > 1 else tensors[0]
    has_peers = world_size() > 1
    with heartbeat.Waiting("the sums of a step") if has_peers else contextlib.nullcontext():
        return [float(value) for value in values.numpy()]


def _sum_in_memory(tensors: Sequence[paddle.Tensor], factor: float = 1.0) -> bool:
    """Sums tensors in place: through shared memory within hosts, through sockets between them.

    Returns: False if there is no shared memory, or it does not sum this dtype; nothing has changed
        then.
    """
    if routes.memory is None or (tensors and tensors[0].dtype != paddle.float32):
        return False

    def sum_across_hosts(part_F: np.ndarray) -> None:
        tensor = paddle.to_tensor(part_F)
        pd.all_reduce(tensor, op=pd.ReduceOp.SUM, group=routes.leaders)
        part_F[:] = tensor.numpy()

    dense = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    # tensor.size would take 3 us.
    blocks = [(tensor.data_ptr(), math.prod(tensor.shape)) for tensor in dense]
    with heartbeat.Waiting(f"sum of {sum(count for _, count in blocks)} values"):
        routes.memory.sum(blocks, None if routes.leaders is None else sum_across_hosts, factor)
    for tensor, summed in zip(tensors, dense):
        if summed is not tensor:
            paddle.assign(summed, tensor)
    return True


def sum_tensors(tensors: Sequence[paddle.Tensor]) -> None:
    """Sums tensors of one dtype over all ranks, in place.  Collective.

    Every rank must pass tensors of the same shapes in the same order; they are sent in buckets.
    """
    if world_size() > 1 and not _sum_in_memory(tensors):
        _apply_in_messages(tensors, all_reduce_sum)


def mean_tensors(tensors: Sequence[paddle.Tensor]) -> None:
    """Averages float32 tensors over all ranks, in place; see `sum_tensors`."""
    if world_size() == 1 or _sum_in_memory(tensors, 1.0 / world_size()):
        return
    sum_tensors(tensors)
    for tensor in tensors:
        tensor.scale_(1.0 / world_size())


def broadcast_tensors(tensors: Sequence[paddle.Tensor], source: int) -> None:
    """Broadcasts tensors of one dtype from rank `source` to all ranks, in place.  Collective.

    Every rank must pass tensors of the same shapes in the same order; they are sent in buckets.
    """
    if world_size() > 1:
        with heartbeat.Waiting(f"broadcast from rank {source}"):
            _apply_in_messages(tensors, lambda flat: pd.broadcast(flat, src=source))


def _apply_in_messages(
    tensors: Sequence[paddle.Tensor], work: Callable[[paddle.Tensor], Any]
) -> None:
    """Applies `work` to tensors in place, concatenated into buckets."""
    for bucket in buckets(tensors, routes.bucket_mb << 20):
        flat = paddle.concat([tensor.flatten() for tensor in bucket])
        work(flat)
        sizes = [tensor.size for tensor in bucket]
        for tensor, part in zip(bucket, paddle.split(flat, sizes)):
            paddle.assign(part.reshape(tensor.shape), tensor)


def buckets(tensors: Sequence[paddle.Tensor], size: int) -> Iterator[list[paddle.Tensor]]:
    """Splits tensors, in order, into runs of at most `size` bytes each."""
    message: list[paddle.Tensor] = []
    held_bytes = 0
    for tensor in tensors:
        # Cached, because the query takes 20 microseconds.
        needed_bytes = tensor.element_size() * tensor.size
        if message and held_bytes + needed_bytes > size:
            yield message
            message, held_bytes = [], 0
        message.append(tensor)
        held_bytes += needed_bytes
    if message:
        yield message


def all_gather(tensor: paddle.Tensor) -> paddle.Tensor:
    """Gathers a tensor from every rank, stacked to [W, *shape].  Collective."""
    if world_size() == 1:
        return tensor.unsqueeze(0)
    tensor = tensor.contiguous()
    is_short = routes.memory is not None and 4 * tensor.size <= routes.memory.message_bytes
    fits_memory = routes.leaders is None and tensor.dtype == paddle.float32
    if routes.memory is not None and is_short and fits_memory:
        stacked = paddle.empty([world_size(), *tensor.shape])
        with heartbeat.Waiting(f"gather of {tensor.size} values"):
            routes.memory.gather((tensor.data_ptr(), tensor.size), stacked.data_ptr())
        return stacked
    parts: list[paddle.Tensor] = []
    with heartbeat.Waiting(f"all_gather of {tensor.size} values"):
        pd.all_gather(parts, tensor)
    return paddle.stack(parts)


def wrap(model: nn.Layer) -> nn.Layer:
    """Wraps a model so that backward averages its gradients over ranks.  Collective.

    The parameters of rank 0 are sent to all ranks.  On one process the model itself is returned:
    `fleet.distributed_model` raises there in Paddle 3.3.1.
    """
    return model if world_size() == 1 else fleet.distributed_model(model)


def wrap_optimizer(optimizer: paddle.optimizer.Optimizer) -> Any:
    """Wraps an optimizer in fleet's optimizer, for `unscale_` and `step` of a GradScaler.

    Under data parallelism the wrapper changes nothing.  GradScaler identifies an optimizer by the
    object, so both calls need the wrapper; state and learning rates remain in the inner optimizer.
    """
    return optimizer if world_size() == 1 else fleet.distributed_optimizer(optimizer)


def local_gradients(model: nn.Layer) -> contextlib.AbstractContextManager[None]:
    """Keeps backward, inside the block, from communicating: gradients accumulate locally."""
    return model.no_sync() if world_size() > 1 else contextlib.nullcontext()
