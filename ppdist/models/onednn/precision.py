"""The precision in which oneDNN layers compute: float32, or bfloat16.

    with compute_in(BFLOAT16): outputs = model(images)

is to the CPU what `paddle.amp.auto_cast` is to a GPU, and which Paddle ignores on a CPU.  Layers of
`layers.py` then round their operands to bfloat16 (8 bits of mantissa), multiply those exactly, and
sum in float32, as the processor's instructions do (AVX512-BF16, AMX).  Parameters, their gradients
and the statistics of batch norm are float32: no other weights have to be kept, no loss scaled.
What is between layers follows the level of AMP:

    O1: tensors between layers are float32, and so is what other operators do with them
    O2: they are bfloat16, half the bytes, and sums, concatenation, max pooling and upsampling
        take and give that (feature_maps.py), and so do means and the gates made of them, which
        are float32 between

Plain convolutions, which predict or feed a gate, give float32 at both levels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ppdist.distributed import paddle_api
from ppdist.models.onednn import ops


@dataclass(frozen=True)
class Kernels:
    """What computes in a precision; tests put other ones in the place of a processor's.

    Attributes:
        dtype: of buffers.
        between: of the feature maps that layers with batch norm give.
        convolution, batch_norm, activation, sum, max_pool, mean_pool, upsample: what does the work
            of these classes of ops.py.
        missing: says why this machine cannot; "" where it can.
    """

    dtype: str = "float32"
    between: str = "float32"
    convolution: Callable[..., ops.Convolution] = ops.Convolution
    batch_norm: Callable[..., ops.BatchNorm] = ops.BatchNorm
    activation: Callable[..., ops.Activation] = ops.Activation
    sum: Callable[..., ops.Sum] = ops.Sum
    max_pool: Callable[..., ops.MaxPool] = ops.MaxPool
    mean_pool: Callable[..., ops.MeanPool] = ops.MeanPool
    upsample: Callable[..., ops.Upsample] = ops.Upsample
    missing: Callable[[], str] = lambda: ""

    def take(self, dtype: str) -> bool:
        """Whether layers compute feature maps of this dtype."""
        return dtype in ("float32", self.dtype)

    def at(self, level: str) -> "Kernels":
        """These at a level of AMP, O1 or O2."""
        return replace(self, between=self.dtype if level == "O2" else "float32")


def missing_bfloat16() -> str:
    """Why oneDNN cannot train in bfloat16 on this machine; "" where it can.

    AVX2 processors with AVX-NE-CONVERT have bfloat16 for inference only; AVX-512 without
    AVX512-BF16 computes it by detours, slower than float32.
    """
    if not paddle_api.bfloat16_flags():
        return "this processor has neither avx512_bf16 nor amx_bf16 among its flags (/proc/cpuinfo)"
    try:
        conv = ops.Convolution(
            (1, 16, 8, 8), (16, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, False, dtype="bfloat16"
        )
        ops.MaxPool(conv.y, 5)
        ops.MeanPool(ops.layout((1, 16, 8, 8), 16, "bfloat16"))
        ops.BatchNorm(conv.y, 1e-5)
        ops.Activation("silu", conv.y)
    except (OSError, ops.OneDNNError) as error:
        flags = ", ".join(sorted(paddle_api.bfloat16_flags()))
        return (
            f"oneDNN refuses bfloat16 ({error}) though this processor has {flags}; does "
            "ONEDNN_MAX_CPU_ISA limit it?"
        )
    return ""


FLOAT32 = Kernels()
BFLOAT16 = Kernels("bfloat16", missing=missing_bfloat16)

_current = FLOAT32


def current() -> Kernels:
    """Those of the innermost `compute_in`."""
    return _current


@contextmanager
def compute_in(kernels: Kernels) -> Iterator[None]:
    """Inside, layers compute forward with these kernels; backward with what forward took."""
    global _current
    before, _current = _current, kernels
    try:
        yield
    finally:
        _current = before
