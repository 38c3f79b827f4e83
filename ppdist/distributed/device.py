"""The device of a rank's tensors: the CPU, or any accelerator.

A kind is Paddle's own name for a type of device: `cpu`, `gpu` (CUDA or ROCm), `xpu`, or the name of
a plug-in's device (`npu`, `mlu`, ...).  No code outside this folder refers to a kind by name.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import paddle
from paddle import distributed as pd

from ppdist.common.errors import ConfigError
from ppdist.distributed.ranks import host, rank, world_size

CPU = "cpu"
BACKEND = "PADDLE_DISTRI_BACKEND"  # the launcher sets it to gloo for processes without a card
_NVIDIA_BUILDS = "https://www.paddlepaddle.org.cn/packages/stable/cu129/"


def accelerators() -> list[str]:
    """Lists the kinds of accelerators that Paddle can use here."""
    kinds = []
    if paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0:
        kinds.append("gpu")
    if paddle.device.is_compiled_with_xpu() and paddle.device.xpu.device_count() > 0:
        kinds.append("xpu")
    plugin_kinds = [
        device_name.partition(":")[0] for device_name in paddle.device.get_available_custom_device()
    ]
    return kinds + list(dict.fromkeys(plugin_kinds))


def card_count() -> int:
    """Returns the number of cards of this rank's kind; 0 on the CPU."""
    return paddle.device.device_count() if on_accelerator() else 0


def kind() -> str:
    """Returns the kind of this rank's device."""
    return paddle.device.get_device().partition(":")[0]


def on_accelerator() -> bool:
    """Returns True if tensors are not in the memory of the host."""
    return kind() != CPU


def choose(requested: str) -> str:
    """Sets the device of this rank's tensors; returns its kind.

    Args: requested: a kind, or `auto`: the first usable accelerator, or the CPU if there is none or
        the launcher has started processes for CPUs.
    Raises: ConfigError: this Paddle cannot use the kind, the launcher has started processes for
        CPUs, or the card computes wrong results.
    """
    usable = accelerators()
    for_cpus = world_size() > 1 and os.environ.get(BACKEND) == "gloo"
    if requested not in ("auto", CPU, *usable):
        supported = [CPU, *paddle.device.get_all_device_type()]
        problem = "sees no card" if requested in supported else f"knows only {', '.join(supported)}"
        raise ConfigError(
            f"{requested} was requested, but the installed Paddle {paddle.__version__} {problem}",
            code="device_unavailable",
            where="device",
            fix="install the Paddle for it (README.md, On a GPU), or set device: cpu",
        )
    if requested not in ("auto", CPU) and for_cpus:
        raise ConfigError(
            f"{requested} was requested, but the launcher started CPU processes",
            code="launched_for_cpu",
            where="device",
            fix="start it with --selected_gpus (--devices for other kinds), or set device: cpu",
        )
    if requested == CPU or for_cpus or not usable:
        paddle.set_device(CPU)
        # A build for cards would choose the communication backend for cards.
        os.environ[BACKEND] = "gloo"
        return CPU
    chosen = usable[0] if requested == "auto" else requested
    paddle.set_device(f"{chosen}:{pd.ParallelEnv().device_id}")
    require_arithmetic()
    return chosen


def require_arithmetic() -> None:
    """Checks that 1 + 1 is 2 on the card.

    If the wheel contains no code for a card, Paddle only warns, every operator returns zeros, and
    training continues with them (PaddlePaddle/Paddle#72252).

    Raises: ConfigError: the card computes wrong results.
    """
    two = (paddle.ones([1]) + paddle.ones([1])).item()
    if two != 2.0:
        raise ConfigError(
            f"rank {rank()} (host {host()}): 1 + 1 is {two:g} on {_card()}, for which this Paddle "
            f"{paddle.__version__} has no kernels",
            code="card_without_code",
            where="device",
            fix=(
                "install the build that has them (README.md, On a GPU); for the newest cards: "
                f"pip install paddlepaddle-gpu -i {_NVIDIA_BUILDS}"
            ),
        )


def put(values: Any) -> paddle.Tensor:
    """Copies an array to the device; asynchronous.

    The card reads the array from pinned memory, in order with its other work.  That memory lives as
    long as the tensor: keep the tensor until a result is read back.
    """
    if not on_accelerator():
        return paddle.to_tensor(values)
    pinned = {"gpu": "CUDAPinnedPlace", "xpu": "XPUPinnedPlace"}.get(kind(), "")
    place = getattr(paddle, pinned, paddle.CPUPlace)()
    staged = paddle.to_tensor(values, place=place)
    tensor = staged.to(_card(), blocking=False)
    # The copy runs later, so the tensor keeps its source alive.
    tensor.staged = staged
    return tensor


def synchronize() -> None:
    """Waits until the device has finished its queued work."""
    if on_accelerator():
        paddle.device.synchronize()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Creates new tensors on the CPU inside the block."""
    card = paddle.device.get_device()
    paddle.set_device(CPU)
    try:
        yield
    finally:
        paddle.set_device(card)


def release_memory() -> None:
    """Returns cached memory of the card to the driver; for the CPU see `comm.keep_freed_memory`."""
    if on_accelerator():
        paddle.device.empty_cache()


def peak_allocated_bytes() -> int:
    """Returns the peak memory of tensors on the card, in bytes; 0 on CPU."""
    return paddle.device.max_memory_allocated(_card()) if on_accelerator() else 0


def peak_reserved_bytes() -> int:
    """Returns the peak memory of Paddle's allocator on the card, in bytes; 0 on CPU."""
    return paddle.device.max_memory_reserved(_card()) if on_accelerator() else 0


def _card() -> str:
    # Without the number Paddle would query the first card of a plug-in.
    return paddle.device.get_device()
