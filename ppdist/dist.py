"""The one seam around paddle.distributed: above this file the same code runs on one rank or many.

Two kinds of meeting exist, and every rank must reach both:

* collectives (gradients, statistics): fast, but gloo gives up after 30 s whatever is configured;
* meetings at the TCP store (`barrier`, `on_main`, `together`): slow (tens of ms) and patient, for
  the places where ranks may be minutes apart: evaluation, checkpoints, start-up.

On one process every function is the identity or a plain call, so nobody above asks.
"""

import contextlib
import io
import itertools
import json
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import distributed as pd
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.base import distributed_strategy
from pydantic import Field

from ppdist.config import Section
from ppdist.errors import ConfigError, UserError

_BACKEND = "PADDLE_DISTRI_BACKEND"  # set by the launcher to gloo for processes without a card
_POLL_SECONDS = 0.02
_LINGER_SECONDS = 10.0  # rank 0 holds the store: at most so long it stays for the others to read it
_meetings = itertools.count()  # every rank counts the same meetings, so the numbers agree
_patience_seconds = 1800.0


class DistributedConfig(Section):
    """How ranks talk to one another."""

    bucket_mb: int = Field(
        default=25,
        gt=0,
        description="Gradients are all-reduced in buckets of this many MiB while backward runs.",
    )
    timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="How long a rank waits for the others at an evaluation or a checkpoint "
        "before it ends with an error, in seconds. (A collective of gloo gives up after 30 s; "
        "that limit cannot be configured in Paddle.)",
    )


def rank() -> int:
    """This process's rank in [0, world_size)."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def world_size() -> int:
    """Number of ranks of the run; 1 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def local_size() -> int:
    """Number of ranks on this host; 1 without a launcher."""
    return int(os.environ.get("PADDLE_LOCAL_SIZE", "1"))


def is_main() -> bool:
    """True on rank 0.  Never put a collective behind it: see `on_main`."""
    return rank() == 0


def on_gpu() -> bool:
    """True when tensors live on a GPU."""
    return paddle.device.get_device().startswith("gpu")


def init(device: str, config: DistributedConfig) -> None:
    """Chooses the device and joins the other ranks; every rank calls it once, before any tensor.

    Args:
        device: `auto` (a GPU when this Paddle can use one), `gpu` or `cpu`.
    Raises: ConfigError: a GPU was asked for, and this Paddle cannot use one or the launcher has
        started processes for CPUs.
    """
    global _patience_seconds
    _patience_seconds = config.timeout_seconds
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # Not quite: Paddle has put a handler of its own below Python's, which prints a page about a
        # "FatalError" when this rank is ended because another one failed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    usable = paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if device == "gpu" and not usable:
        found = "sees no card" if paddle.device.is_compiled_with_cuda() else "is the CPU build"
        raise ConfigError(
            f"device: gpu was asked for, but the installed Paddle {paddle.__version__} {found}; "
            f"install paddlepaddle-gpu for your CUDA version, or set device: cpu"
        )
    if device == "gpu" and world_size() > 1 and os.environ.get(_BACKEND) == "gloo":
        raise ConfigError(
            "device: gpu was asked for, but the launcher started processes for CPUs; start it "
            "with --selected_gpus, or set device: cpu"
        )
    if device == "cpu" or not usable:
        paddle.set_device("cpu")
        os.environ[_BACKEND] = "gloo"  # a GPU build would take NCCL
    else:
        paddle.set_device(f"gpu:{pd.ParallelEnv().device_id}")
    if world_size() > 1:
        _join(config)


def _join(config: DistributedConfig) -> None:
    """Makes this process a rank of the fleet, without the pages that Paddle prints about it."""
    distributed_strategy.logger.setLevel(logging.WARNING)
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = fleet.DistributedStrategy()
        strategy.fuse_grad_size_in_MB = config.bucket_mb
        strategy.find_unused_parameters = False  # every loss stays connected to every head
        fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")


def wrap(model: nn.Layer) -> nn.Layer:
    """The model whose backward averages gradients over ranks (fleet collective data parallel).

    Every rank calls it; parameters of rank 0 are sent to all.  On one process the model itself:
    `fleet.distributed_model` raises there in Paddle 3.3.1.
    """
    return fleet.distributed_model(model) if world_size() > 1 else model


@contextlib.contextmanager
def local_gradients(model: nn.Layer) -> Iterator[None]:
    """Inside, backward of a wrapped model adds to this rank's gradients without communication."""
    if world_size() > 1:
        with model.no_sync():
            yield
    else:
        yield


def all_reduce_sum(tensor: paddle.Tensor) -> paddle.Tensor:
    """Sums a float32 tensor over ranks, in place, and returns it.  Every rank calls it."""
    if world_size() > 1:
        pd.all_reduce(tensor, op=pd.ReduceOp.SUM)
    return tensor


def all_gather(tensor: paddle.Tensor) -> paddle.Tensor:
    """Stacks a tensor of one shape from every rank: [W, *shape] in rank order; all call it."""
    if world_size() == 1:
        return tensor.unsqueeze(0)
    parts: list[paddle.Tensor] = []
    pd.all_gather(parts, tensor)
    return paddle.stack(parts)


def all_gather_rows(rows_RK: np.ndarray) -> np.ndarray:
    """Concatenates the rows of all ranks in rank order; the counts R may differ, K may not.

    Every rank calls it, with zero rows too; ranks may arrive minutes apart.
    """
    if world_size() == 1:
        return rows_RK
    barrier()
    counts_W = all_gather(paddle.to_tensor([len(rows_RK)], dtype="int64")).numpy().ravel()
    padded = np.zeros((max(1, int(counts_W.max())), rows_RK.shape[1]), rows_RK.dtype)
    padded[: len(rows_RK)] = rows_RK
    gathered_WRK = all_gather(paddle.to_tensor(padded)).numpy()
    return np.concatenate([part[:count] for part, count in zip(gathered_WRK, counts_W)])


def all_gather_objects(value: Any) -> list[Any]:
    """What every rank gave, in rank order; it must survive JSON.

    Every rank calls it; ranks may arrive minutes apart.
    """
    line = f"{json.dumps(value)}\n".encode()
    bytes_R1 = all_gather_rows(np.frombuffer(line, np.uint8).reshape(-1, 1))
    return [json.loads(text) for text in bytes_R1.tobytes().decode().splitlines()]


def barrier() -> None:
    """Waits, up to the configured patience, until every rank is here; no collective is used."""
    if world_size() == 1:
        return
    key = f"ppdist/barrier/{next(_meetings)}"
    _arrive(key)
    _leave(key)


def on_main(work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0 while the others wait, and returns its result on every rank.

    Every rank calls it.  The others wait at the store, not in a collective, so the work may take
    longer than gloo's 30 s.

    Args:
        work: takes nothing; its result must survive JSON.
    Raises: whatever `work` raised, on rank 0; UserError with the same text on the other ranks.
    """
    if world_size() == 1:
        return work()
    key = f"ppdist/main/{next(_meetings)}"
    store = _store()
    if is_main():
        try:
            result = work()
            text = json.dumps({"value": result})
            return result
        except BaseException as error:
            text = json.dumps({"error": f"{error}"})
            raise
        finally:
            store.set(f"{key}/result", text)
            store.add(f"{key}/done", 1)
            _leave(key)
    deadline = time.monotonic() + _patience_seconds
    while store.add(f"{key}/done", 0) == 0:
        _sleep_until(deadline, "rank 0 did not finish its work")
    outcome = json.loads(bytes(store.get(f"{key}/result")).decode())
    _leave(key)
    if "error" in outcome:
        raise UserError(f"rank 0 failed: {outcome['error']}")
    return outcome["value"]


def together(work: Callable[[], Any]) -> Any:
    """Runs `work` on every rank; when it fails on one, it fails on all of them.

    For what each rank does by itself and may fail at alone, such as reading the files of its
    host: otherwise the others would go on into a collective and wait there for a rank that ended.
    Every rank calls it; they may be minutes apart.

    Returns: what `work` returned on this rank.
    Raises: whatever `work` raised, on the ranks where it did; on the others UserError, or
        RuntimeError if it was no UserError, that names such a rank and says what happened.
    """
    if world_size() == 1:
        return work()
    key = f"ppdist/together/{next(_meetings)}"
    store = _store()
    try:
        result = work()
    except Exception as error:
        kind = "user" if isinstance(error, UserError) else "bug"
        store.set(f"{key}/{kind}", json.dumps(f"rank {rank()} failed: {error}"))
        store.add(f"{key}/{kind}s", 1)
        _arrive(key)
        _leave(key)
        raise
    _arrive(key)
    failures = {
        kind: json.loads(bytes(store.get(f"{key}/{kind}")))
        for kind in ("bug", "user")
        if store.add(f"{key}/{kind}s", 0) > 0
    }
    _leave(key)
    if "bug" in failures:
        raise RuntimeError(failures["bug"])
    if "user" in failures:
        raise UserError(failures["user"])
    return result


def _arrive(key: str) -> None:
    """Waits, up to the configured patience, until every rank has called it with this key."""
    store = _store()
    deadline = time.monotonic() + _patience_seconds
    arrived = store.add(f"{key}/arrived", 1)
    while arrived < world_size():
        _sleep_until(deadline, f"{world_size() - arrived} of {world_size()} ranks did not arrive")
        arrived = store.add(f"{key}/arrived", 0)


def _leave(key: str) -> None:
    """Every rank calls it when it has read what it needs; rank 0 returns after the others, because
    the store ends with its process.  It does not wait long for a rank that may have ended."""
    store = _store()
    deadline = time.monotonic() + _LINGER_SECONDS
    left = store.add(f"{key}/left", 1)
    while is_main() and left < world_size() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = store.add(f"{key}/left", 0)


def _sleep_until(deadline: float, missing: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(
            f"rank {rank()} waited {_patience_seconds:g} s (distributed.timeout_seconds): {missing}"
        )
    time.sleep(_POLL_SECONDS)


def _store() -> Any:
    return paddle.base.core.create_or_get_global_tcp_store()
