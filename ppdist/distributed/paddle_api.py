"""What ppdist uses of Paddle that Paddle does not promise to keep.

Private attributes and modules of Paddle are named here alone (tests/test_architecture.py), so that
a new version of it is a change of this file.  Each function first takes the private way, which all
tested versions have; where that is gone it takes a public one, slower or coarser, as its docstring
says; where there is none it raises `paddle_api_missing` instead of doing something else.

In this order: batch norm, convolution, suppression, optimizer, storage, fleet and its store, the
machine.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle import distributed as pd

from ppdist.common.errors import ExportError, UserError
from ppdist.common.machine import kernel_text
from ppdist.common.process import warn

core: Any = getattr(getattr(paddle, "base", None), "core", None)  # Paddle's compiled half


def _missing(name: str) -> UserError:
    return UserError(
        f"the installed Paddle {paddle.__version__} has no {name} any more, and ppdist knows no "
        "other way to what it does",
        code="paddle_api_missing",
        fix="install a version that ppdist was run with: README, Versions of Paddle",
    )


# Batch norm


def running_statistics(norm: nn.Layer) -> tuple[Tensor, Tensor]:
    """Running mean and variance of a batch norm, the tensors that it uses.

    Without the attributes: of its state dict what is neither scale nor shift, in that order.
    """
    try:
        return norm._mean, norm._variance
    except AttributeError:
        state = norm.state_dict(include_sublayers=False)
        mean_C, variance_C = (state[key] for key in state if key not in ("weight", "bias"))
        return mean_C, variance_C


def normalise_by_running(norm: nn.Layer) -> None:
    """From here on a batch norm uses its running statistics and leaves them, in training too.

    Without the attribute: by a `forward` of its own, which calls F.batch_norm.
    """
    if hasattr(norm, "_use_global_stats"):
        norm._use_global_stats = True
    else:
        norm.forward = partial(_by_running, norm)


def normalises_by_running(norm: nn.Layer) -> bool:
    """Whether `normalise_by_running` was called for it."""
    try:
        return bool(norm._use_global_stats)
    except AttributeError:
        return "forward" in vars(norm)


def _by_running(norm: nn.Layer, x: Tensor) -> Tensor:
    mean_C, variance_C = running_statistics(norm)
    return F.batch_norm(
        x, mean_C, variance_C, norm.weight, norm.bias, epsilon=epsilon(norm), use_global_stats=True
    )


def epsilon(norm: nn.Layer) -> float:
    """What a batch norm adds to the variance; without the attribute: read out of its repr."""
    try:
        return norm._epsilon
    except AttributeError:
        return _shown(norm, "epsilon")


def momentum(norm: nn.Layer) -> float:
    """Weight of the old running statistics; without the attribute: read out of its repr."""
    try:
        return norm._momentum
    except AttributeError:
        return _shown(norm, "momentum")


def _shown(norm: nn.Layer, name: str) -> float:
    found = re.search(rf"\b{name}=([^,)]+)", repr(norm))
    if found is None:
        raise _missing(f"{type(norm).__name__}._{name}")
    return float(found[1])


def set_momentum(norm: nn.Layer, value: float) -> None:
    """Sets `momentum` of a built layer.

    Raises: UserError: this Paddle has another way, and no public one.
    """
    if not hasattr(norm, "_momentum"):
        raise _missing(f"{type(norm).__name__}._momentum")
    norm._momentum = value


# Convolution


class ConvSettings(NamedTuple):
    """How a convolution was made, as Paddle keeps it."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int
    data_format: str
    padding_mode: str


def conv_settings(conv: nn.Conv2D) -> ConvSettings | None:
    """None: this Paddle keeps them elsewhere; then the layer has to run as Paddle runs it."""
    try:
        return ConvSettings(
            conv._stride, conv._padding, conv._dilation, conv._groups, conv._data_format,
            conv._padding_mode,
        )  # fmt: skip
    except AttributeError:
        return None


# Suppression


def multiclass_nms3(
    boxes_BN4: Tensor,
    scores_BCN: Tensor,
    *,
    score_threshold: float,
    candidates: int,
    keep: int,
    iou_threshold: float,
) -> tuple[Tensor, Tensor]:
    """rows_R6 and count_B of `losses.nms.multiclass_nms`, by Paddle's operator.

    Without the operator: eager only, image by image and class by class, by paddle.vision.ops.nms.

    Args:
        candidates: the best of each class that enter; keep: the best of an image that leave.
    Raises: ExportError: no operator, and a graph is made.
    """
    operator = getattr(getattr(paddle, "_C_ops", None), "multiclass_nms3", None)
    if operator is None:
        return _nms_by_class(
            boxes_BN4, scores_BCN, score_threshold, candidates, keep, iou_threshold
        )
    rows_R6, _, count_B = operator(
        boxes_BN4,
        scores_BCN,
        None,  # rois_num: all images have the same N
        score_threshold,
        candidates,
        keep,
        iou_threshold,
        True,  # a box [0, 1] is one unit wide, not two pixels
        1.0,  # eta: the threshold does not adapt
        -1,  # no class is background
    )
    return rows_R6, count_B


def _nms_by_class(
    boxes_BN4: Tensor,
    scores_BCN: Tensor,
    score_threshold: float,
    candidates: int,
    keep: int,
    iou_threshold: float,
) -> tuple[Tensor, Tensor]:
    if not paddle.in_dynamic_mode():
        raise ExportError(
            f"the installed Paddle {paddle.__version__} has no operator multiclass_nms3, without "
            "which suppression cannot be part of a graph",
            code="nms_operator_missing",
            fix="export --without-nms, or with a version of Paddle that ppdist was run with",
        )
    rows, counts = [], []
    for boxes_N4, scores_CN in zip(boxes_BN4, scores_BCN):
        kept = [paddle.zeros([0, 6], boxes_BN4.dtype)]
        for label, score_N in enumerate(scores_CN):
            place_K = paddle.nonzero(score_N > score_threshold).flatten()
            if place_K.shape[0] == 0:
                continue
            order_K = score_N[place_K].argsort(descending=True, stable=True)[:candidates]
            place_K = place_K[order_K]
            boxes_K4, score_K = boxes_N4[place_K], score_N[place_K]
            stay_P = paddle.vision.ops.nms(boxes_K4, iou_threshold, score_K)
            label_P1 = paddle.full([stay_P.shape[0], 1], label, boxes_BN4.dtype)
            score_P1 = score_K[stay_P].unsqueeze(1)
            kept.append(paddle.concat([label_P1, score_P1, boxes_K4[stay_P]], axis=1))
        rows_P6 = paddle.concat(kept)
        best_K = rows_P6[:, 1].argsort(descending=True, stable=True)[:keep].sort()
        rows.append(rows_P6[best_K])
        counts.append(best_K.shape[0])
    return paddle.concat(rows), paddle.to_tensor(counts, "int32")


# Optimizer

Accumulators = Mapping[str, Mapping[str, Tensor]]  # kind -> name of the parameter -> state
_KINDS = ("velocity", "moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")


def master_weights(optimizer: Any) -> dict[str, Tensor]:
    """Float32 masters of low-precision parameters, by the parameter's name, the tensors in use.

    Without the attribute: of the state dict, which gathers all state for it.
    """
    try:
        return optimizer._master_weights
    except AttributeError:
        return optimizer.state_dict().get("master_weights", {})


def accumulators(optimizer: Any) -> Accumulators:
    """What an optimizer keeps of each parameter, the tensors in use.

    Without the attribute: of the state dict, for the kinds of Momentum and AdamW.
    """
    try:
        return optimizer._accumulators
    except AttributeError:
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer.state_dict().items():
            for kind in _KINDS:
                name, is_kind, _ = key.rpartition(f"_{kind}_")
                if is_kind:
                    found.setdefault(kind, {})[name] = value
        return found


def forget_loaded_state(optimizer: Any) -> None:
    """Frees the second copy that Paddle keeps of all state that was set; else it stays."""
    if accumulators(optimizer) and hasattr(optimizer, "_accumulators_holder"):
        optimizer._accumulators_holder = {}


def first_power(optimizer: Any, kind: str) -> float:
    """What an accumulator starts with: of AdamW beta1 or beta2, others 0.

    Raises: UserError: this Paddle keeps betas elsewhere, and says them nowhere.
    """
    name = {"beta1_pow_acc": "_beta1", "beta2_pow_acc": "_beta2"}.get(kind)
    if name is None or isinstance(optimizer, paddle.optimizer.Momentum):
        return 0.0
    if not hasattr(optimizer, name):
        raise _missing(f"{type(optimizer).__name__}.{name}")
    return float(getattr(optimizer, name))


def set_optimizer_momentum(optimizer: Any, value: float) -> None:
    """Sets what the next step uses: Paddle reads it from its groups, not from the optimizer.

    Raises: UserError: this Paddle has another way, and no public one.
    """
    if not hasattr(optimizer, "_param_groups"):
        raise _missing(f"{type(optimizer).__name__}._param_groups")
    for group in optimizer._param_groups:
        group["momentum"] = value


def trained_parameters(optimizer: Any) -> list[Tensor]:
    """What an optimizer updates, group by group.

    Raises: UserError: this Paddle has another way, and no public one.
    """
    if not hasattr(optimizer, "_param_groups"):
        raise _missing(f"{type(optimizer).__name__}._param_groups")
    return [parameter for group in optimizer._param_groups for parameter in group["params"]]


def forget_update_lists(optimizer: Any) -> None:
    """Before a step that updates other parameters than the last: Paddle's Momentum lists them once.

    It would pair the gradients there are with the parameters there were.  Without these
    attributes there are no such lists.
    """
    if getattr(optimizer, "_use_multi_tensor", None):
        for name in ("_param_dict", "_velocity_dict", "_regularization_method_dict",
                     "_regularization_coeff_dict"):  # fmt: skip
            setattr(optimizer, name, optimizer._create_multi_tensor_dict())


# Storage

_COALESCE = "coalesce_tensor"


def part(flat_F: Tensor, start: int, size: int) -> Tensor:
    """[size]: so many elements from `start` on, in the same storage; without the method a copy."""
    stop = start + size
    return flat_F._slice(start, stop) if hasattr(flat_F, "_slice") else flat_F[start:stop].clone()


def share_buffer(source: Tensor, into: Tensor) -> None:
    """From here on `into`, of its own shape, lies where `source` does.

    Without the method: it gets the values once; who shares looks at addresses.
    """
    if hasattr(source, "_share_buffer_to"):
        source._share_buffer_to(into)
    else:
        paddle.assign(source.reshape(into.shape), into)


def release(tensor: Tensor) -> None:
    """Lets go of a tensor's storage; its shape stays.  Without the method it keeps it."""
    if hasattr(tensor, "_clear_data"):
        tensor._clear_data()


def coalesced(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copies of float32 tensors in one storage, and all of it, [F].

    Without the operator: two copies, one of which is whole.
    """
    operator = getattr(getattr(paddle, "_C_ops", None), _COALESCE, None)
    if operator is not None:
        return operator(tensors, paddle.float32, True, False, False, 0.0, False, -1, -1, [], [])
    flat_F = paddle.concat([tensor.flatten() for tensor in tensors])
    parts = paddle.split(flat_F, [tensor.size for tensor in tensors])
    return [each.reshape(tensor.shape) for each, tensor in zip(parts, tensors)], flat_F


# Fleet and its store


def global_store() -> Any:
    """The TCP store of all ranks; the first call connects to it, or on rank 0 opens it.

    Raises: UserError: this Paddle makes it elsewhere, and no public way leads to it.
    """
    make = getattr(core, "create_or_get_global_tcp_store", None)
    if make is None:
        raise _missing("paddle.base.core.create_or_get_global_tcp_store")
    return make()


def make_store(address: str, port: int, is_master: bool) -> Any:
    """A TCP store besides that of all ranks.

    Raises: UserError: this Paddle has none, and no public one.
    """
    kind = getattr(core, "TCPStore", None)
    if kind is None:
        raise _missing("paddle.base.core.TCPStore")
    return kind(address, port, is_master, 0)


def group_store() -> Any:
    """The store at which Paddle makes groups; without the attribute: that of all ranks."""
    return getattr(pd.collective, "_default_store", None) or global_store()


@contextmanager
def groups_at(store: Any) -> Iterator[None]:
    """Inside, Paddle makes groups at another store; without the attribute: at its own."""
    if not hasattr(pd.collective, "_default_store"):
        yield
        return
    usual = pd.collective._default_store
    pd.collective._default_store = store
    try:
        yield
    finally:
        pd.collective._default_store = usual


def default_group() -> Any:
    """Paddle's group of all ranks, once they have joined; without the function: group 0."""
    find = getattr(pd.collective, "_get_default_group", None)
    return pd.get_group(0) if find is None else find()


def quiet_fleet() -> None:
    """Keeps fleet from printing pages about its strategy; without its logger they are printed."""
    base = getattr(pd.fleet, "base", None)
    logger = getattr(getattr(base, "distributed_strategy", None), "logger", None)
    if logger is not None:
        logger.setLevel(logging.WARNING)


def set_fleet_bucket(mb: int) -> bool:
    """Sets the size of fleet's messages of gradients, before `fleet.distributed_model`.

    Returns: False: this Paddle keeps its strategy elsewhere; then it is that of `fleet.init`.
    """
    strategy = getattr(pd.fleet.fleet, "_user_defined_strategy", None)
    if strategy is None:
        return False
    strategy.fuse_grad_size_in_MB = mb
    return True


# The machine

_TF32_SWITCHES = ("cublas_switch", "cudnn_switch")


def set_num_threads(threads: int) -> None:
    """CPU threads of eager operators.

    Without the function: as many as OMP_NUM_THREADS said at the start, with a warning.
    """
    change = getattr(core, "set_num_threads", None)
    if change is None:
        warn(
            f"Paddle {paddle.__version__} cannot change its number of threads: of the eager model "
            "it is that of OMP_NUM_THREADS"
        )
    else:
        change(threads)


def has_fast_bfloat16(root: Path = Path("/")) -> bool:
    """Whether oneDNN computes in bfloat16 on this processor.

    Without the function: whether Linux says that it has such instructions.

    Args: root: of the files that Linux shows; tests put another one in its place.
    """
    ask = getattr(core, "supports_bfloat16_fast_performance", None)
    if ask is not None:
        return bool(ask())
    return bool(bfloat16_flags(root))


def bfloat16_flags(root: Path = Path("/")) -> set[str]:
    """Which of avx512_bf16 and amx_bf16 Linux shows of this processor; root: see above."""
    flags = re.findall(r"^flags\s*:(.*)", kernel_text(root / "proc/cpuinfo"), re.MULTILINE)
    return {"avx512_bf16", "amx_bf16"} & {flag for line in flags for flag in line.split()}


@contextmanager
def whole_float32() -> Iterator[None]:
    """Inside, products of float32 are float32: an NVIDIA card may take TF32 for them, which keeps
    10 of 23 bits.  Without the switches (CPU builds have none): nothing.  Not run on a GPU."""
    names = [name for name in _TF32_SWITCHES if hasattr(core, f"get_{name}")]
    before = {name: getattr(core, f"get_{name}")() for name in names}
    set_tf32(False)
    try:
        yield
    finally:
        for name, value in before.items():
            getattr(core, f"set_{name}")(value)


def set_tf32(allow: bool) -> bool:
    """Whether matrix products and convolutions of float32 may use TF32 on NVIDIA's cards.

    Returns: False: this Paddle has no such switches.
    """
    switches = [getattr(core, f"set_{name}", None) for name in _TF32_SWITCHES]
    for switch in switches:
        if switch is not None:
            switch(allow)
    return None not in switches
