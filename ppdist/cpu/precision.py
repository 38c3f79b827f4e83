"""The precision in which oneDNN layers compute: float32, or bfloat16.

    with compute_in(BFLOAT16): outputs = model(images)

is the CPU's counterpart of `paddle.amp.auto_cast`, which Paddle ignores on a CPU.  Layers of
`layers.py` then round their operands to bfloat16 (8 bits of mantissa), multiply those exactly, and
sum in float32, as the processor's instructions do (AVX512-BF16, AMX).  Parameters, their gradients
and the statistics of batch norm are float32: there is no second copy of the weights and no loss
scaling.  The AMP level decides the dtype between layers:

    O1: tensors between layers are float32, and other operators compute in float32
    O2: they are bfloat16, half the bytes; sums, concatenation, max pooling and upsampling read and
        write it (feature_maps.py), and so do means and the gates computed from them, which use
        float32 in between

Plain convolutions, which predict or feed a gate, and linear layers output float32 at both
levels.
Layer norm and the products of attention compute in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ppdist.cpu import onednn
from ppdist.distributed import paddle_api

CACHED_KERNELS = 16384  # kinds of operation x image sizes x batch sizes


@dataclass(frozen=True)
class Kernels:
    """Kernels of one precision.

    Attributes:
        dtype: dtype of buffers.
        between: dtype of the feature maps that layers with batch norm output.
        made_by: module with the classes and functions of onednn.py, which create the kernels; tests
            replace it.
        missing: returns the reason why this machine cannot use the kernels; "" if it can.
    """

    dtype: str = "float32"
    between: str = "float32"
    made_by: Any = onednn
    missing: Callable[[], str] = lambda: ""

    def at(self, level: str) -> "Kernels":
        """Returns these kernels at AMP level O1 or O2."""
        return replace(self, between=self.dtype if level == "O2" else "float32")

    def get(self, name: str, *arguments: Any) -> Any:
        """Returns the kernel `onednn.<name>(*arguments)`, created once.

        Raises: onednn.OneDNNError: there is no such kernel.
        """
        kernel = _make_kernel(self.made_by, name, *arguments)
        if isinstance(kernel, str):
            raise onednn.OneDNNError(kernel)
        return kernel

    def find(self, name: str, *arguments: Any) -> Any:
        """Returns the kernel like `get`; None: there is no such kernel."""
        kernel = _make_kernel(self.made_by, name, *arguments)
        return None if isinstance(kernel, str) else kernel


@lru_cache(CACHED_KERNELS)
def _make_kernel(made_by: Any, name: str, *arguments: Any) -> Any:
    """Creates a kernel, or returns the reason why there is none; the result is cached."""
    try:
        return getattr(made_by, name)(*arguments)
    except onednn.OneDNNError as error:
        return str(error)


def missing_bfloat16() -> str:
    """Explains why oneDNN cannot train in bfloat16 here; "": it can.

    AVX2 processors with AVX-NE-CONVERT have bfloat16 for inference only; AVX-512 without
    AVX512-BF16 emulates it, slower than float32.
    """
    flags = ", ".join(sorted(paddle_api.bfloat16_flags()))
    if not flags:
        return "this processor has neither avx512_bf16 nor amx_bf16 among its flags (/proc/cpuinfo)"
    try:
        conv = onednn.Convolution(
            (1, 16, 8, 8), (16, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, False, dtype="bfloat16"
        )
        onednn.max_pool(conv.y, 5, 1, 2)
        onednn.mean_pool(onednn.layout((1, 16, 8, 8), 16, "bfloat16"))
        onednn.BatchNorm(conv.y, 1e-5)
        onednn.Activation("silu", conv.y)
    except (OSError, onednn.OneDNNError) as error:
        return (
            f"oneDNN refuses bfloat16 ({error}) though this processor has {flags}; does "
            "ONEDNN_MAX_CPU_ISA limit it?"
        )
    return ""


FLOAT32 = Kernels()
BFLOAT16 = Kernels("bfloat16", missing=missing_bfloat16)

_current = FLOAT32


def current() -> Kernels:
    """Returns the kernels of the innermost `compute_in`."""
    return _current


@contextmanager
def compute_in(kernels: Kernels) -> Iterator[None]:
    """Makes layers compute forward with these kernels; backward uses those of forward."""
    global _current
    before, _current = _current, kernels
    try:
        yield
    finally:
        _current = before
