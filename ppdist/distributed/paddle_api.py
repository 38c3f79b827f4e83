"""Access to the parts of Paddle that Paddle does not promise to keep.

Private attributes and modules of Paddle are used only here (tests/test_architecture.py), so that a
new version of Paddle requires changes only in this file.  All supported versions have them (README,
Versions of Paddle); if one is missing, the function that uses it raises AttributeError.

In this order: batch norm, convolution, suppression, optimizer, storage, fleet and its store, the
machine.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn
from paddle import distributed as pd

from ppdist.common.machine import kernel_text

core: Any = paddle.base.core  # Paddle's compiled half


# Batch norm


def running_statistics(norm: nn.Layer) -> tuple[Tensor, Tensor]:
    """Returns the running mean and variance of a batch norm: the tensors themselves, not copies."""
    return norm._mean, norm._variance


def normalise_by_running(norm: nn.Layer) -> None:
    """Freezes a batch norm's running statistics, in training as well."""
    norm._use_global_stats = True


def normalises_by_running(norm: nn.Layer) -> bool:
    """Returns True if `normalise_by_running` was called for this batch norm."""
    return bool(norm._use_global_stats)


def epsilon(norm: nn.Layer) -> float:
    """Returns the epsilon that a batch norm adds to the variance."""
    return norm._epsilon


def momentum(norm: nn.Layer) -> float:
    """Returns the weight of the old running statistics in a batch norm."""
    return norm._momentum


def set_momentum(norm: nn.Layer, value: float) -> None:
    """Sets the `momentum` of a built batch norm."""
    norm._momentum = value


# Convolution


class ConvSettings(NamedTuple):
    """The settings of a convolution, as Paddle keeps them."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int
    data_format: str
    padding_mode: str


def conv_settings(conv: nn.Conv2D) -> ConvSettings:
    """Returns the settings with which a convolution was built."""
    return ConvSettings(
        conv._stride, conv._padding, conv._dilation, conv._groups, conv._data_format,
        conv._padding_mode,
    )  # fmt: skip


# Suppression


def multiclass_nms3(
    boxes_BN4: Tensor,
    scores_BCN: Tensor,
    *,
    score_threshold: float,
    pre_nms_topk: int,
    max_detections: int,
    iou_threshold: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes rows_R6 and count_B of `losses.nms.multiclass_nms` by Paddle's operator.

    Args:
        pre_nms_topk: number of best boxes of each class that enter suppression.
        max_detections: number of best boxes returned per image.
    Returns: rows_R6; of one class index_R, int32: the position of each among the B * N boxes; and
        count_B.
    """
    rows_R6, index_R1, count_B = paddle._C_ops.multiclass_nms3(
        boxes_BN4,
        scores_BCN,
        None,  # rois_num: all images have the same N
        score_threshold,
        pre_nms_topk,
        max_detections,
        iou_threshold,
        True,  # a box [0, 1] is one unit wide, not two pixels
        1.0,  # eta: the threshold does not adapt
        -1,  # no class is background
    )
    return rows_R6, index_R1.flatten(), count_B


# Optimizer

Accumulators = Mapping[str, Mapping[str, Tensor]]  # kind -> name of the parameter -> state


def master_weights(optimizer: Any) -> dict[str, Tensor]:
    """Returns the float32 master weights of low-precision parameters, by name; not copies."""
    return optimizer._master_weights


def accumulators(optimizer: Any) -> Accumulators:
    """Returns the state of an optimizer for each parameter; not copies."""
    return optimizer._accumulators


def forget_loaded_state(optimizer: Any) -> None:
    """Frees Paddle's second copy of loaded state."""
    if accumulators(optimizer):
        optimizer._accumulators_holder = {}


def first_power(optimizer: Any, kind: str) -> float:
    """Returns the initial value of an accumulator: beta1 or beta2 of AdamW, else 0."""
    if isinstance(optimizer, paddle.optimizer.Momentum):
        return 0.0
    betas = {"beta1_pow_acc": optimizer._beta1, "beta2_pow_acc": optimizer._beta2}
    return float(betas.get(kind, 0.0))


def set_optimizer_momentum(optimizer: Any, value: float) -> None:
    """Sets the momentum that an optimizer uses from its next step on."""
    for group in optimizer._param_groups:
        group["momentum"] = value


def trained_parameters(optimizer: Any) -> list[Tensor]:
    """Lists the parameters that an optimizer updates, group by group."""
    return [parameter for group in optimizer._param_groups for parameter in group["params"]]


def forget_update_lists(optimizer: Any) -> None:
    """Drops the parameter lists of Paddle's Momentum.

    Call this before a step that updates other parameters than the previous step: Paddle builds the
    lists once, and would pair the new gradients with the old parameters.  Other optimizers have no
    such lists.
    """
    if getattr(optimizer, "_use_multi_tensor", None):
        for name in ("_param_dict", "_velocity_dict", "_regularization_method_dict",
                     "_regularization_coeff_dict"):  # fmt: skip
            setattr(optimizer, name, optimizer._create_multi_tensor_dict())


# Storage

_CPU = core.CPUPlace()


def allocate(shape: Sequence[int], dtype: paddle.dtype) -> Tensor:
    """Allocates a tensor on the CPU without setting its values.

    A step of YOLOv5n on oneDNN allocates 800 buffers, and `paddle.empty` takes four times as long
    to examine its arguments as to allocate.
    """
    return paddle._C_ops.empty(shape, dtype, _CPU)


def move_average(average: Tensor, value: Tensor, momentum: float) -> None:
    """Sets `average` to momentum * average + (1 - momentum) * value.

    The methods of `Tensor` do the same and take twice as long for some hundred numbers.
    """
    paddle._C_ops.scale_(average, momentum, 0.0, True)
    paddle._C_ops.add_(average, paddle._C_ops.scale(value, 1 - momentum, 0.0, True))


def part(flat_F: Tensor, start: int, size: int) -> Tensor:
    """Returns a slice of `size` elements from `start`, [size], in the same storage."""
    return flat_F._slice(start, start + size)


def share_buffer(source: Tensor, into: Tensor) -> None:
    """Lets `into` use the storage of `source` from now on; its shape is unchanged."""
    source._share_buffer_to(into)


def release(tensor: Tensor) -> None:
    """Frees a tensor's storage; its shape is unchanged."""
    tensor._clear_data()


@paddle.no_grad()
def coalesce(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copies float32 tensors into one storage, with one operator.

    Returns: the copies, which are views of the storage; the whole storage, [F], without gaps.
        A single tensor is returned unchanged.
    """
    if len(tensors) == 1:
        return [*tensors], tensors[0]
    return paddle._C_ops.coalesce_tensor(
        tensors, paddle.float32, True, False, False, 0.0, False, -1, -1, [], []
    )


# Fleet and its store


def global_store() -> Any:
    """Returns the TCP store of all ranks."""
    return core.create_or_get_global_tcp_store()


def make_store(address: str, port: int, is_master: bool) -> Any:
    """Opens an additional TCP store."""
    return core.TCPStore(address, port, is_master, 0)


def group_store() -> Any:
    """Returns the store through which Paddle creates groups."""
    return pd.collective._default_store or global_store()


@contextmanager
def groups_at(store: Any) -> Iterator[None]:
    """Lets Paddle, inside the block, create groups through another store."""
    original = pd.collective._default_store
    pd.collective._default_store = store
    try:
        yield
    finally:
        pd.collective._default_store = original


def default_group() -> Any:
    """Returns Paddle's group of all ranks, once they have joined."""
    return pd.collective._get_default_group()


def quiet_fleet() -> None:
    """Keeps fleet from printing pages of text about its strategy."""
    pd.fleet.base.distributed_strategy.logger.setLevel(logging.WARNING)


def set_fleet_bucket(mb: int) -> None:
    """Sets the size of fleet's gradient buckets; call this before `fleet.distributed_model`."""
    pd.fleet.fleet._user_defined_strategy.fuse_grad_size_in_MB = mb


# The machine

_TF32_SWITCHES = ("cublas_switch", "cudnn_switch")


def set_num_threads(threads: int) -> None:
    """Sets the number of CPU threads used by eager operators."""
    core.set_num_threads(threads)


def has_fast_bfloat16() -> bool:
    """Returns True if oneDNN computes in bfloat16 on this processor."""
    return bool(core.supports_bfloat16_fast_performance())


def bfloat16_flags() -> set[str]:
    """Returns which of avx512_bf16 and amx_bf16 Linux reports for this processor."""
    cpuinfo = kernel_text(Path("/proc/cpuinfo"))
    flags = re.findall(r"^flags\s*:(.*)", cpuinfo, re.MULTILINE)
    return {"avx512_bf16", "amx_bf16"} & {flag for line in flags for flag in line.split()}


@contextmanager
def exact_float32() -> Iterator[None]:
    """Computes products of float32 in full float32 precision inside the block.

    An NVIDIA card may use TF32 for them, which keeps 10 of 23 bits.  CPU builds have no switches.
    """
    names = [name for name in _TF32_SWITCHES if hasattr(core, f"get_{name}")]
    original = {name: getattr(core, f"get_{name}")() for name in names}
    for name in names:
        getattr(core, f"set_{name}")(False)
    try:
        yield
    finally:
        for name, value in original.items():
            getattr(core, f"set_{name}")(value)
