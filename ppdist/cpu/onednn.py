"""oneDNN's C interface inside Paddle's CPU wheel, by ctypes.

Paddle's dygraph convolution on CPU is im2col and a single-threaded product at about 30 GFLOP/s.
The same wheel contains oneDNN (libdnnl), with kernels that reach 5-8 times that on one core and
can use several.  Dygraph cannot call them, so this module does: it provides descriptors, layout
conversions ("reorders") and the primitives that a convolutional detector needs.  `feature_maps.py`
and `layers.py` build on it.

A *buffer* here is a Paddle tensor, float32 or bfloat16, whose memory contains an activation in the
layout of its descriptor; Paddle's allocator owns it.  oneDNN prefers channels in blocks of 8 or 16,
or all of them side by side: such a layout without padding is a tensor [B, C / block, H, W, block]
to Paddle, any other one is flat. Kernels use OMP_NUM_THREADS threads, or one if it is unset
(Paddle's default; fleetrun sets cores / processes).  Nothing is loaded before `Library()` is
created; an `OSError` there means that the library is missing: stay eager.

Constants and signatures: oneDNN 3.x C interface, https://uxlfoundation.github.io/oneDNN (stable
through 3.x by its versioning policy; another major version is refused).
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import paddle
from paddle import Tensor

from ppdist.distributed import paddle_api
from ppdist.models.functional import LEAKY_SLOPE

_MAX_DIMS = 12
_CPU, _IN_ORDER, _ANY = 1, 1, 1
_DATA_TYPES = {"float32": (3, 4), "bfloat16": (2, 2)}  # oneDNN's number, bytes
_FORWARD_TRAINING, _FORWARD_INFERENCE, _BACKWARD = 64, 96, 128
_CONVOLUTION_DIRECT, _POOLING_MAX, _POOLING_MEAN, _NEAREST = 0x1, 0x1FF, 0x3FF, 0x2FFF0
_SOFTMAX, _LOG_SOFTMAX = 0x30000, 0x30001
_LINEAR, _BINARY_ADD = 0x26, 0x1FFF0
_POST_OPERATIONS = (1 << 15, 1 << 14)  # of oneDNN 3.6, and before it
_TAGS = {8: (102, b"aBcd8b"), 16: (78, b"aBcd16b")}  # by channels of a block
_DEPTHWISE_16 = 114  # of a depthwise convolution's weights, 16 channels in a block
BLOCKS = (0, *_TAGS)  # for any number of channels that they divide
# By the value of `model.activation`: eltwise algorithm, alpha, beta.
#   relu: x where x > 0, else alpha x;  swish: x sigmoid(alpha x);
#   hardswish: x max(0, min(1, alpha x + beta))
_ELTWISE = {
    "silu": (0x2C, 1.0, 0.0),
    "relu": (0x20, 0.0, 0.0),
    "hardswish": (0x34, 1 / 6, 1 / 2),
    "leaky_relu": (0x20, LEAKY_SLOPE, 0.0),
}
_COMPILED = b"jit", b"brg"  # names of kernels that are compiled for this processor
_GLOBAL_STATS, _SCALE, _SHIFT, _FUSED_RELU = 1, 2, 4, 8
# Queries of a primitive descriptor.
_Q_IMPLEMENTATION, _Q_EXECUTION = 8, 255
_Q_SRC, _Q_DIFF_SRC, _Q_WEIGHTS, _Q_DIFF_WEIGHTS, _Q_DST, _Q_DIFF_DST, _Q_WORKSPACE = range(
    129, 136
)
# Execution arguments.
_SRC, _SRC_1, _DST, _WEIGHTS, _BIAS, _MEAN, _VARIANCE, _A_SCALE, _A_SHIFT = (
    1,
    2,
    17,
    33,
    41,
    49,
    50,
    51,
    52,
)
_D_SRC, _D_DST, _D_WEIGHTS, _D_BIAS, _D_SCALE, _D_SHIFT = 129, 145, 161, 169, 255, 256
_WORKSPACE, _FIRST_OF_MANY = 64, 1024
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


class OneDNNError(RuntimeError):
    """Error of a oneDNN call; callers fall back to eager."""


class _Argument(ctypes.Structure):
    """dnnl_exec_arg_t of oneDNN."""

    _fields_ = [("index", c_int), ("memory", c_void_p)]


class _Version(ctypes.Structure):
    """dnnl_version_t of oneDNN."""

    _fields_ = [("major", c_int), ("minor", c_int), ("patch", c_int)]


class Library:
    """libdnnl with its CPU engine and an in-order stream.

    Raises: OSError: the library is missing or cannot be loaded; OneDNNError: it is not oneDNN 3.
    """

    def __init__(self) -> None:
        folder = Path(paddle.__file__).parent / "libs"
        files = sorted(folder.glob("libdnnl.so*"))
        if not files:
            raise OSError(f"no libdnnl.so in {folder}")
        self.c = ctypes.CDLL(str(files[0]))
        self.c.dnnl_version.restype = ctypes.POINTER(_Version)
        self.version = self.c.dnnl_version().contents
        if self.version.major != 3:
            raise OneDNNError(f"oneDNN {self.version.major}.{self.version.minor}, wanted 3.x")
        self.c.dnnl_primitive_desc_query_md.restype = c_void_p
        self.c.dnnl_primitive_desc_query_md.argtypes = [c_void_p, c_int, c_int]
        self.c.dnnl_memory_desc_get_size.restype = c_size_t
        self.c.dnnl_memory_desc_get_size.argtypes = [c_void_p]
        self.c.dnnl_memory_desc_equal.argtypes = [c_void_p, c_void_p]
        self.c.dnnl_memory_set_data_handle.argtypes = [c_void_p, c_void_p]
        self.c.dnnl_fmt_tag2str.restype = c_char_p
        # A wrong number would silently select another layout, so the names are compared.
        for tag, name in (*_TAGS.values(), (_DEPTHWISE_16, b"Abcde16a")):
            if self.c.dnnl_fmt_tag2str(tag) != name:
                raise OneDNNError(f"oneDNN's layout {tag} is not {name.decode()}")
        self.c.dnnl_primitive_execute.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
        self.engine = c_void_p()
        self.check(self.c.dnnl_engine_create(byref(self.engine), _CPU, c_size_t(0)), "engine")
        self.stream = c_void_p()
        self.check(self.c.dnnl_stream_create(byref(self.stream), self.engine, _IN_ORDER), "stream")
        _limit_spinning(folder)
        _keep_freed_memory()

    def check(self, status: int, action: str) -> None:
        """Checks the status of a call.

        Raises: OneDNNError: the status is not success.
        """
        if status != 0:
            raise OneDNNError(f"oneDNN {action}: status {status}")


def _limit_spinning(folder: Path) -> None:
    """Makes OpenMP's threads go to sleep 1 ms after a kernel.

    By default they spin for 200 ms, on a core that a data loader or another rank could use.

    The next kernel of a step follows within 1 ms, and waking a thread takes 50 us: with two threads
    that sleep at once, a step of YOLOv5n took 1.26 times as long on an idle machine (1.5 times in
    bfloat16), and 0.97 times while another process kept one of two cores busy.
    Paddle's wheel loads libiomp5, which then serves libdnnl's calls, though libdnnl names libgomp.
    """
    for file in folder.glob("libiomp5.so*"):
        ctypes.CDLL(str(file)).kmp_set_blocktime(c_int(1))


def _keep_freed_memory() -> None:
    """Makes the C library keep the memory that a step frees for the next step.

    By default it returns blocks above 32 MB, and free memory at the top of the heap, to the kernel,
    which then has to clear every page again: this takes a tenth of the step time of RT-DETR.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl does not
    if mallopt is not None:
        for limit in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            mallopt(limit, 2**31 - 1)


@cache
def library() -> Library:
    """Returns the library, loaded once.

    Raises: see `Library`.
    """
    return Library()


def _create(function: str, *arguments: Any) -> c_void_p:
    """Returns the handle that `dnnl_<function>` creates from these arguments."""
    handle = c_void_p()
    library().check(getattr(library().c, f"dnnl_{function}")(byref(handle), *arguments), function)
    return handle


def _describe(kind: str, *arguments: Any) -> c_void_p:
    """Creates the description from which a `_Primitive` is created."""
    return _create(f"{kind}_primitive_desc_create", library().engine, *arguments, None)


class Descriptor:
    """Shape, layout and dtype of a tensor.

    Attributes:
        shape: the logical shape, [B, C, H, W] of an activation.
        tensor_shape: shape of the Paddle tensors that hold it.
        block: number of channels that are adjacent in memory; 0: row-major; None: not a layout of
            `layout`.
    """

    def __init__(self, handle: c_void_p, shape: Sequence[int], dtype: str = "float32") -> None:
        self.handle = handle
        self.shape = list(shape)
        self.dtype = dtype
        size = library().c.dnnl_memory_desc_get_size(handle)
        self.tensor_shape = [-(-size // _DATA_TYPES[dtype][1])]
        self.block: int | None = None

    def equals(self, descriptor: "Descriptor") -> bool:
        """Returns True if shape, layout and dtype are equal."""
        return bool(library().c.dnnl_memory_desc_equal(self.handle, descriptor.handle))


def _dims(values: Sequence[int]) -> ctypes.Array[c_int64]:
    """Converts to oneDNN's dnnl_dims_t."""
    return (c_int64 * _MAX_DIMS)(*values)


def plain(shape: Sequence[int], dtype: str = "float32") -> Descriptor:
    """Returns the row-major layout, that of every contiguous Paddle tensor."""
    return layout(tuple(shape), 0, dtype)


def _describe_strides(
    shape: Sequence[int], strides: Sequence[int], dtype: str = "float32"
) -> Descriptor:
    """Returns the layout with the given strides, in elements."""
    handle = _create(
        "memory_desc_create_with_strides", len(shape), _dims(shape), _DATA_TYPES[dtype][0],
        _dims(strides),
    )  # fmt: skip
    return Descriptor(handle, shape, dtype)


@cache
def layout(shape: tuple[int, ...], block: int, dtype: str = "float32") -> Descriptor:
    """Returns the layout of tensors [B, C / block, H, W, block].

    Args: block: 0: row-major, any shape.
    """
    if block and block != shape[1]:
        result = Descriptor(_describe_tag(shape, _TAGS[block][0], dtype), shape, dtype)
    else:
        order = [0, 2, 3, 1] if block else range(len(shape))  # from the slowest axis to the fastest
        strides, step = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis]
        result = _describe_strides(shape, strides, dtype)
    result.block, result.tensor_shape = block, list(shape)
    if block:
        batch, channels, height, width = shape
        result.tensor_shape = [batch, channels // block, height, width, block]
    return result


def _describe_tag(shape: Sequence[int], tag: int, dtype: str = "float32") -> c_void_p:
    """Creates the layout of a tag; with `_ANY`, the primitive chooses the layout."""
    return _create(
        "memory_desc_create_with_tag", len(shape), _dims(shape), _DATA_TYPES[dtype][0], tag
    )


_Places = Sequence[tuple[int, Descriptor]]  # execution argument and layout of each tensor


class _Primitive:
    """A compiled kernel: takes its inputs, returns its outputs."""

    def __init__(self, description: c_void_p, inputs: _Places, outputs: _Places) -> None:
        self.handle = _create("primitive_create", description)
        self.outputs = [(y.tensor_shape, getattr(paddle, y.dtype)) for _, y in outputs]
        places = [*inputs, *outputs]
        self.arguments, self.memories = (_Argument * len(places))(), []
        self.addresses = [0] * len(places)
        # Memory objects are created once; each call only sets the addresses of the tensors.
        for slot, (index, descriptor) in zip(self.arguments, places, strict=True):
            memory = _create("memory_create", descriptor.handle, library().engine, c_void_p(0))
            self.memories.append(memory)
            slot.index, slot.memory = index, memory.value

    def __call__(self, *inputs: Tensor, into: Tensor | None = None) -> list[Tensor]:
        """Runs the kernel.

        Args: into: buffer of the first output, which may be one of the inputs.
        """
        outputs = [] if into is None else [into]
        for shape, dtype in self.outputs[len(outputs) :]:
            outputs.append(paddle_api.allocate(shape, dtype))
        self.run(*(tensor.data_ptr() for tensor in (*inputs, *outputs)))
        return outputs

    def run(self, *addresses: int) -> None:
        """Runs the kernel on inputs and outputs at the given addresses."""
        lib = library()
        # Most tensors lie where they lay in the last step.
        for at, (address, before) in enumerate(zip(addresses, self.addresses, strict=True)):
            if address != before:
                lib.c.dnnl_memory_set_data_handle(self.memories[at], address)
                self.addresses[at] = address
        status = lib.c.dnnl_primitive_execute(
            self.handle, lib.stream, len(self.arguments), self.arguments
        )
        lib.check(status, "execute")


def _layout(
    description: c_void_p, query: int, shape: Sequence[int], dtype: str = "float32"
) -> Descriptor:
    """Returns the layout that a primitive expects or produces, as `layout` has it if unpadded."""
    handle = library().c.dnnl_primitive_desc_query_md(description, query, 0)
    chosen, shape = Descriptor(c_void_p(handle), shape, dtype), tuple(shape)
    if len(shape) == 2:
        rows = plain(shape, dtype)
        return rows if rows.equals(chosen) else chosen
    if len(shape) != 4:
        return chosen
    blocks = [block for block in _TAGS if shape[1] % block == 0]
    for candidate in (layout(shape, block, dtype) for block in (0, *blocks, shape[1])):
        if candidate.equals(chosen):
            return candidate
    if shape[1] in blocks:  # one block of all channels: the same memory
        tagged = _describe_tag(shape, _TAGS[shape[1]][0], dtype)
        if Descriptor(tagged, shape, dtype).equals(chosen):
            return layout(shape, shape[1], dtype)
    return chosen


def _is_compiled(description: c_void_p) -> bool:
    """Returns True if the kernel is compiled for this processor, and not a slow general one."""
    name = c_char_p()
    library().c.dnnl_primitive_desc_query(description, _Q_IMPLEMENTATION, 0, byref(name))
    return (name.value or b"").startswith(_COMPILED)


def _reorder(source: Descriptor, target: Descriptor) -> _Primitive:
    """Creates the copy between two layouts or dtypes of one shape."""
    engine = library().engine
    description = _create(
        "reorder_primitive_desc_create", source.handle, engine, target.handle, engine, None
    )
    return _Primitive(description, [(_SRC, source)], [(_DST, target)])


class Reorder:
    """Copy between two layouts or dtypes of one shape."""

    def __init__(self, source: Descriptor, target: Descriptor, is_part: bool = False) -> None:
        """Creates the copy.

        Args: is_part: the source is part of a larger buffer, so even an equal layout is copied:
        with one image, the first part has the layout of a buffer of its own.
        """
        self.primitive: _Primitive | None = None
        if source.equals(target) and not is_part:
            return
        self.primitive = _reorder(source, target)

    def __call__(self, buffer: Tensor) -> Tensor:
        """Returns `buffer` in the target layout; `buffer` itself if the layouts are equal."""
        return buffer if self.primitive is None else self.primitive(buffer)[0]


class _WeightedOperation:
    """Kernels of an operation with weights, including reorders.

    Attributes:
        x, y: layouts of the kernel; x_given, y_given: layouts outside.
        w_shape: shape of the parameter.
    """

    def __init__(
        self, described: Sequence[c_void_p], inside: Sequence[Descriptor],
        outside: Sequence[Descriptor], weight: Descriptor, w_shape: Sequence[int],
        bias: Descriptor | None,
    ) -> None:  # fmt: skip
        """
        Args:
            described: descriptions of forward, gradient of the data, gradient of the weight.
            inside, outside: layouts of x and y.
            weight, bias: layouts of the parameters.
        """
        forward, to_data, to_weight = described
        (self.x, self.y), (self.x_given, self.y_given) = inside, outside
        self.w_shape, self.has_bias = list(w_shape), bias is not None
        x_shape, y_shape, dtype = self.x.shape, self.y.shape, self.x.dtype
        biases = [] if bias is None else [bias]
        w_forward = _layout(forward, _Q_WEIGHTS, weight.shape, dtype)
        self._forward = _Primitive(
            forward,
            [
                (_SRC, self.x),
                (_WEIGHTS, w_forward),
                *((_BIAS, bias_layout) for bias_layout in biases),
            ],
            [(_DST, self.y)],
        )
        w_data = _layout(to_data, _Q_WEIGHTS, weight.shape, dtype)
        dx = _layout(to_data, _Q_DIFF_SRC, x_shape, dtype)
        dy_data = _layout(to_data, _Q_DIFF_DST, y_shape, dtype)
        self._data = _Primitive(to_data, [(_D_DST, dy_data), (_WEIGHTS, w_data)], [(_D_SRC, dx)])
        x_weight = _layout(to_weight, _Q_SRC, x_shape, dtype)
        dy_weight = _layout(to_weight, _Q_DIFF_DST, y_shape, dtype)
        dw = _layout(to_weight, _Q_DIFF_WEIGHTS, weight.shape)
        self._weight = _Primitive(
            to_weight,
            [(_SRC, x_weight), (_D_DST, dy_weight)],
            [(_D_WEIGHTS, dw), *((_D_BIAS, bias_layout) for bias_layout in biases)],
        )
        self.x_in = Reorder(self.x_given, self.x)
        self.y_in, self.y_out = Reorder(self.y_given, self.y), Reorder(self.y, self.y_given)
        self._w_in, self._w_data_in = Reorder(weight, w_forward), Reorder(weight, w_data)
        self._dw_out = Reorder(dw, weight)
        self._x_to_weight, self._dx_out = Reorder(self.x, x_weight), Reorder(dx, self.x_given)
        self._y_to_weight, self._y_to_data = Reorder(self.y, dy_weight), Reorder(self.y, dy_data)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes a buffer in layout `self.y` from one in layout `self.x`.

        weight and bias have the plain layout.
        """
        return self._forward(x, self._w_in(weight), *([] if bias is None else [bias]))[0]

    def weight_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes plain gradients of weight and bias.

        x and dy are buffers in the layouts `self.x` and `self.y`.
        """
        dw, *d_bias = self._weight(self._x_to_weight(x), self._y_to_weight(dy))
        dw = self._dw_out(dw)
        # Paddle takes longer to reshape a tensor than oneDNN to reorder a small weight.
        dw = dw if dw.shape == self.w_shape else dw.reshape(self.w_shape)
        return dw, d_bias[0] if d_bias else None

    def data_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Computes a buffer in layout `self.x_given` from one in layout `self.y`."""
        return self._dx_out(self._data(self._y_to_data(dy), self._w_data_in(weight))[0])


class Convolution(_WeightedOperation):
    """Kernels of a convolution of one shape, including reorders.

    Args:
        x_shape [B, C, H, W]; w_shape [O, C / groups, kh, kw]; stride, padding, dilation [y, x].
        x_block: layout of x and of its gradient; see `layout`.
        keeps_layout: whether y and its gradient are in oneDNN's layout, if that has a name; else
            row-major.
        dtype: dtype of the kernels; they sum products of bfloat16 in float32, and parameters and
            their gradients are always float32.
        x_dtype, y_dtype: dtypes of x and y outside the kernels.
    Raises: OneDNNError: oneDNN has no kernel for it.
    """

    def __init__(
        self, x_shape: Sequence[int], w_shape: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int], groups: int, has_bias: bool,
        x_block: int = 0, keeps_layout: bool = False,
        dtype: str = "float32", x_dtype: str = "float32", y_dtype: str = "float32",
    ) -> None:  # fmt: skip
        batch, _, *size = x_shape
        windows = zip(size, padding, dilation, w_shape[2:], stride, strict=True)
        y_size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in windows]
        y_shape = [batch, w_shape[0], *y_size]
        grouped = list(w_shape) if groups == 1 else [groups, w_shape[0] // groups, *w_shape[1:]]
        bias = plain([w_shape[0]])
        x_any, w_any, y_any = (_describe_tag(s, _ANY, dtype) for s in (x_shape, grouped, y_shape))
        bias_handle = bias.handle if has_bias else None
        pads = _dims(padding)
        window = (_dims(stride), _dims([d - 1 for d in dilation]), pads, pads)
        direct = _CONVOLUTION_DIRECT
        forward = _describe(
            "convolution_forward", _FORWARD_TRAINING, direct, x_any, w_any, bias_handle, y_any,
            *window,
        )  # fmt: skip
        x = _layout(forward, _Q_SRC, x_shape, dtype)
        y = _layout(forward, _Q_DST, y_shape, dtype)
        # Try the layouts of the forward kernel first, which saves two reorders.
        to_data = None
        with suppress(OneDNNError):
            to_data = _describe(
                "convolution_backward_data", direct, x.handle, w_any, y.handle, *window,
                forward,
            )  # fmt: skip
        # Fall back to the layouts that the kernel prefers.
        if to_data is None or not _is_compiled(to_data):
            to_data = _describe(
                "convolution_backward_data", direct, x_any, w_any, y_any, *window, forward
            )
        to_weight = _describe(
            "convolution_backward_weights", direct, x_any, _describe_tag(grouped, _ANY),
            bias_handle, y_any, *window, forward,
        )  # fmt: skip
        block = y.block if keeps_layout else 0
        outside = (
            layout(tuple(x_shape), x_block, x_dtype), layout(tuple(y_shape), block or 0, y_dtype),
        )  # fmt: skip
        super().__init__(
            (forward, to_data, to_weight), (x, y), outside, plain(grouped), w_shape,
            bias if has_bias else None,
        )  # fmt: skip
        self._tap_products: _TapProducts | None = None
        is_depthwise = tuple(w_shape[:2]) == (groups, 1) and x_shape[1] == groups
        if is_depthwise and not has_bias and not _is_compiled(to_weight):
            with suppress(OneDNNError):
                self._tap_products = _TapProducts(x, y, w_shape, *window)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes plain gradients of weight and bias; see the base class."""
        if self._tap_products is None:
            return super().weight_gradient(x, dy)
        return self._tap_products(x, dy), None


class _TapProducts:
    """The gradient of a depthwise convolution's weight, itself a depthwise convolution.

        dw[c, i, j] = sum over images and cells of x[c, v + i - pad, u + j - pad] dy[c, v, u]

    dy is its weight, as large as the map, and all images are channels of one; neither changes its
    place in memory. oneDNN's own kernel for windows of 5 x 5 takes 40 times as long.
    """

    def __init__(
        self, x: Descriptor, y: Descriptor, w_shape: Sequence[int], strides: Any, gaps: Any,
        low: Any, high: Any,
    ) -> None:  # fmt: skip
        """Creates the kernel.

        Args: strides, gaps, low, high: of the convolution, `_dims` of [y, x].
        Raises: OneDNNError: the maps have other layouts or sizes, or oneDNN has no such kernel.
        """
        block = 16
        (batch, channels, height, width), window = y.shape, list(w_shape[2:])
        if x.shape != y.shape or x.block != block or y.block != block or [*gaps[:2]] != [0, 0]:
            raise OneDNNError("not a depthwise convolution that keeps the size of a blocked map")
        groups, grouped = batch * channels, [channels, 1, 1, *window]
        images = layout((1, groups, height, width), block, x.dtype)
        weight_shape = [groups, 1, 1, height, width]
        weight = Descriptor(_describe_tag(weight_shape, _DEPTHWISE_16, y.dtype), weight_shape)
        taps = layout((1, groups, *window), block)
        description = _describe(
            "convolution_forward", _FORWARD_TRAINING, _CONVOLUTION_DIRECT, images.handle,
            weight.handle, None, taps.handle, strides, gaps, low, high,
        )  # fmt: skip
        if not _is_compiled(description):
            raise OneDNNError("not compiled")
        self._products = _Primitive(
            description, [(_SRC, images), (_WEIGHTS, weight)], [(_DST, taps)]
        )
        by_image = [batch, channels // block, *window, block]
        self._by_image, self._w_shape = by_image, list(w_shape)
        blocked = Descriptor(_describe_tag(grouped, _DEPTHWISE_16), grouped)
        self._to_plain = Reorder(blocked, plain(grouped))

    def __call__(self, x: Tensor, dy: Tensor) -> Tensor:
        """Returns the plain gradient of x and dy, buffers of the convolution."""
        taps = self._products(x, dy)[0].reshape(self._by_image)
        return self._to_plain(taps.sum(axis=0)).reshape(self._w_shape)


class Linear(_WeightedOperation):
    """Kernels of x w + b for rows x.

    Args:
        x_shape [R, K]; w_shape [K, N], as in Paddle; other arguments as in `Convolution`.
    Raises: OneDNNError: oneDNN has no kernel for it.
    """

    def __init__(
        self, x_shape: Sequence[int], w_shape: Sequence[int], has_bias: bool,
        dtype: str = "float32", x_dtype: str = "float32", y_dtype: str = "float32",
    ) -> None:  # fmt: skip
        (rows, width), outputs = x_shape, w_shape[1]
        transposed, bias = [outputs, width], plain([outputs])
        x, y = plain(x_shape, dtype), plain([rows, outputs], dtype)
        bias_handle = bias.handle if has_bias else None
        any_weight = _describe_tag(transposed, _ANY, dtype)
        forward = _describe(
            "inner_product_forward", _FORWARD_TRAINING, x.handle, any_weight, bias_handle, y.handle
        )
        to_data = _describe("inner_product_backward_data", x.handle, any_weight, y.handle, forward)
        to_weight = _describe(
            "inner_product_backward_weights", x.handle, _describe_tag(transposed, _ANY),
            bias_handle, y.handle, forward,
        )  # fmt: skip
        super().__init__(
            (forward, to_data, to_weight), (x, y),
            (plain(x_shape, x_dtype), plain([rows, outputs], y_dtype)),
            _describe_strides(transposed, [1, outputs]), w_shape, bias if has_bias else None,
        )  # fmt: skip


def _workspace_places(forward: c_void_p, x: Descriptor) -> _Places:
    """Returns where a forward kernel leaves what its gradient needs."""
    workspace = library().c.dnnl_primitive_desc_query_md(forward, _Q_WORKSPACE, 0)
    return [(_WORKSPACE, Descriptor(c_void_p(workspace), x.shape))]


class BatchNorm:
    """Batch normalisation of buffers in a given layout.

    Attributes: train: returns y, mean_C and the biased variance_C of a batch (x, scale, shift), and
        with ReLU a workspace.
    """

    def __init__(self, x: Descriptor, epsilon: float, has_relu: bool = False) -> None:
        """Creates the kernels.  Args: has_relu: ReLU follows, in the same kernels."""
        per_channel, form = plain([x.shape[1]]), (x.handle, c_float(epsilon))
        flags = _SCALE | _SHIFT | (_FUSED_RELU if has_relu else 0)
        train, infer = (
            _describe("batch_normalization_forward", kind, x.handle, *form, flags | more)
            for kind, more in ((_FORWARD_TRAINING, 0), (_FORWARD_INFERENCE, _GLOBAL_STATS))
        )
        back = _describe(
            "batch_normalization_backward", _BACKWARD, x.handle, x.handle, *form, flags, train
        )
        workspaces = _workspace_places(train, x) if has_relu else []
        scale, shift, mean, variance, dscale, dshift = (
            (argument, per_channel)
            for argument in (_A_SCALE, _A_SHIFT, _MEAN, _VARIANCE, _D_SCALE, _D_SHIFT)
        )
        self.train = _Primitive(
            train, [(_SRC, x), scale, shift], [(_DST, x), mean, variance, *workspaces]
        )
        self._infer = _Primitive(infer, [(_SRC, x), scale, shift, mean, variance], [(_DST, x)])
        self._back = _Primitive(
            back,
            [(_SRC, x), scale, mean, variance, (_D_DST, x), *workspaces],
            [(_D_SRC, x), dscale, dshift],
        )

    def infer(
        self, x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor
    ) -> Tensor:
        """Returns y, computed from the running statistics; it takes the place of x."""
        return self._infer(x, scale, shift, mean, variance, into=x)[0]

    def gradient(
        self, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, dy: Tensor, in_place: bool,
        *workspaces: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """Returns dx, dscale_C and dshift_C of `train`.

        Args: in_place: dx may overwrite dy; workspaces: those of `train`.
        """
        return self._back(x, scale, mean, variance, dy, *workspaces, into=dy if in_place else None)


class ChannelAffine:
    """scale_C * x + shift_C of buffers in a given layout: batch norm with mean 0 and variance 1."""

    def __init__(self, x: Descriptor) -> None:
        per_channel, flags = plain([x.shape[1]]), _SCALE | _SHIFT | _GLOBAL_STATS
        form = (x.handle, x.handle, c_float(0.0), flags)
        forward = _describe("batch_normalization_forward", _FORWARD_TRAINING, *form)
        back = _describe("batch_normalization_backward", _BACKWARD, x.handle, *form, forward)
        scale, shift, mean, variance, dscale, dshift = (
            (argument, per_channel)
            for argument in (_A_SCALE, _A_SHIFT, _MEAN, _VARIANCE, _D_SCALE, _D_SHIFT)
        )
        self._forward = _Primitive(forward, [(_SRC, x), scale, shift, mean, variance], [(_DST, x)])
        self._back = _Primitive(
            back, [(_SRC, x), scale, mean, variance, (_D_DST, x)], [(_D_SRC, x), dscale, dshift]
        )
        self._mean_C, self._variance_C = paddle.zeros([x.shape[1]]), paddle.ones([x.shape[1]])

    def forward(self, x: Tensor, scale_C: Tensor, shift_C: Tensor) -> Tensor:
        """Returns the result."""
        return self._forward(x, scale_C, shift_C, self._mean_C, self._variance_C)[0]

    def gradient(self, x: Tensor, scale_C: Tensor, dy: Tensor) -> list[Tensor]:
        """Returns dx, dscale_C and dshift_C."""
        return self._back(x, scale_C, self._mean_C, self._variance_C, dy)


class LayerNorm:
    """Normalisation of each row of numbers [R, D].

    Attributes:
        forward: returns y, mean_R and variance_R of x, scale_D, shift_D.
        gradient: returns dx, dscale_D and dshift_D of x, scale_D, shift_D, mean_R, variance_R, dy.
    """

    def __init__(self, rows: int, width: int, epsilon: float) -> None:
        x, per_row, per_column = plain([rows, width]), plain([rows]), plain([width])
        form = (per_row.handle, c_float(epsilon), _SCALE | _SHIFT)
        forward = _describe(
            "layer_normalization_forward", _FORWARD_TRAINING, x.handle, x.handle, *form
        )
        back = _describe(
            "layer_normalization_backward", _BACKWARD, x.handle, x.handle, x.handle, *form, forward
        )
        scale, shift, dscale, dshift = (
            (argument, per_column) for argument in (_A_SCALE, _A_SHIFT, _D_SCALE, _D_SHIFT)
        )
        mean, variance = (_MEAN, per_row), (_VARIANCE, per_row)
        self.forward = _Primitive(forward, [(_SRC, x), scale, shift], [(_DST, x), mean, variance])
        self.gradient = _Primitive(
            back,
            [(_SRC, x), scale, shift, mean, variance, (_D_DST, x)],  # oneDNN insists on shift
            [(_D_SRC, x), dscale, dshift],
        )


class Softmax:
    """Softmax over the last axis, or its logarithm.

    Attributes:
        forward: returns y of x.
        gradient: returns dx of y, dy.
    """

    def __init__(self, shape: Sequence[int], is_log: bool = False) -> None:
        x, kind, axis = plain(shape), _LOG_SOFTMAX if is_log else _SOFTMAX, len(shape) - 1
        forward = _describe("softmax_forward", _FORWARD_TRAINING, kind, x.handle, x.handle, axis)
        back = _describe("softmax_backward", kind, x.handle, x.handle, x.handle, axis, forward)
        self.forward = _Primitive(forward, [(_SRC, x)], [(_DST, x)])
        self.gradient = _Primitive(back, [(_DST, x), (_D_DST, x)], [(_D_SRC, x)])


class Attention:
    """Attention, softmax(q k^T / sqrt(d) + bias) v by head: float32.

    Queries and keys lie side by side, [B, N, 2 H * d], values and the result are [B, N, H * d].
    Kernels step over the other heads, so none is copied out. They compute a tile at a time, some
    queries of one image, whose logits [H, n, m] stay in the processor's cache.
    """

    def __init__(self, shape: Sequence[int], heads: int, biased: int = 0) -> None:
        """Creates the kernels.

        Args: shape: [B, N, H * d] of the values.  biased: number M of the first tokens, to which
        the tokens after them do not attend; a bias [B, 1, M, N] is added to their logits.
        """
        self._shape = batch, tokens, width = tuple(shape)
        self._pairs_shape = [batch, tokens, 2 * width]
        rest = _AttentionTile(shape, heads, range(biased, tokens), has_bias=False)
        self._tiles = [rest]
        if biased:  # first, because its keys are all tokens
            self._tiles.insert(0, _AttentionTile(shape, heads, range(biased), has_bias=True))

    def forward(
        self, pairs: Tensor, values: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the result, and the softmax of each tile, which `gradient` needs."""
        y = paddle_api.allocate(self._shape, paddle.float32)
        shares = [paddle_api.allocate(tile.shape, paddle.float32) for tile in self._tiles]
        for tile, share in zip(self._tiles, shares, strict=True):
            buffers = [pairs, values, y, share] + ([bias] if tile.has_bias else [])
            for addresses in _image_addresses(*buffers):
                tile.forward(*addresses)
        return y, shares

    def gradient(
        self, pairs: Tensor, values: Tensor, shares: Sequence[Tensor], dy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of queries and keys, and of values."""
        dpairs = paddle_api.allocate(self._pairs_shape, paddle.float32)
        dvalues = paddle_api.allocate(self._shape, paddle.float32)
        for tile, share in zip(self._tiles, shares, strict=True):
            scratch = paddle_api.allocate(tile.shape[1:], paddle.float32)
            for addresses in _image_addresses(pairs, values, dy, share, dpairs, dvalues):
                tile.gradient(scratch.data_ptr(), *addresses)
        return dpairs, dvalues


class _AttentionTile:
    """Attention of one image for the tokens of a range.

    They attend to all tokens, if they have a bias, else to one another.

    Attributes: shape: [B, H, n, m] of the logits of all images.
    """

    def __init__(
        self, shape: Sequence[int], heads: int, queries: range, has_bias: bool
    ) -> None:  # fmt: skip
        batch, tokens, width = shape
        head_width, count = width // heads, len(queries)
        keys = range(tokens) if has_bias else queries
        self.has_bias, self.shape = has_bias, [batch, heads, count, len(keys)]
        form = [heads, count, len(keys)]
        # Distances to the first query and key, in bytes: of pairs, and of values and results.
        size = _DATA_TYPES["float32"][1]
        self._at_query, self._at_key = queries.start * width * size, keys.start * width * size
        self._half = width * size

        def rows(number: range, pitch: int) -> Descriptor:
            return _describe_strides([heads, len(number), head_width], [head_width, pitch, 1])

        def columns(number: range, pitch: int) -> Descriptor:
            return _describe_strides([heads, head_width, len(number)], [head_width, 1, pitch])

        paired, scale = 2 * width, head_width**-0.5
        pairs, bias = plain(form), plain([1, *form[1:]])
        flipped = _describe_strides([heads, form[2], count], [count * form[2], 1, form[2]])
        added = bias if has_bias else None
        # The second tile adds to the gradients of the keys and values of the first.
        adds = not has_bias and queries.start > 0
        self._logits = _product(
            rows(queries, paired), columns(keys, paired), pairs, scale=scale, added=added
        )
        self._mix = _product(pairs, rows(keys, width), rows(queries, width))
        self._dshares = _product(rows(queries, width), columns(keys, width), pairs)
        self._dvalues = _product(flipped, rows(queries, width), rows(keys, width), adds=adds)
        self._dqueries = _product(pairs, rows(keys, paired), rows(queries, paired), scale=scale)
        self._dkeys = _product(
            flipped, rows(queries, paired), rows(keys, paired), scale=scale, adds=adds
        )
        self._softmax = Softmax(form)

    def forward(self, pairs: int, values: int, y: int, shares: int, *bias: int) -> None:
        """Computes y and shares; arguments are addresses of one image's part of the buffers."""
        queries, keys = pairs + 2 * self._at_query, pairs + 2 * self._at_key + self._half
        self._logits.run(queries, keys, *bias, shares)
        self._softmax.forward.run(shares, shares)
        self._mix.run(shares, values + self._at_key, y + self._at_query)

    def gradient(
        self, scratch: int, pairs: int, values: int, dy: int, shares: int, dpairs: int, dvalues: int
    ) -> None:
        """Computes dpairs and dvalues; arguments as in `forward`.

        Args: scratch: address of the gradients of one image's logits.
        """
        first_query, first_key = 2 * self._at_query, 2 * self._at_key + self._half
        dy, at_key = dy + self._at_query, self._at_key
        self._dvalues.run(shares, dy, dvalues + at_key)
        self._dshares.run(dy, values + at_key, scratch)
        self._softmax.gradient.run(shares, scratch, scratch)
        self._dqueries.run(scratch, pairs + first_key, dpairs + first_query)
        self._dkeys.run(scratch, pairs + first_query, dpairs + first_key)


def _image_addresses(*buffers: Tensor) -> Iterator[tuple[int, ...]]:
    """Yields, for each image, the addresses of its part of float32 buffers [B, ...]."""
    starts = [buffer.data_ptr() for buffer in buffers]
    sizes = [math.prod(buffer.shape[1:]) * _DATA_TYPES["float32"][1] for buffer in buffers]
    for image in range(buffers[0].shape[0]):
        yield tuple(start + image * size for start, size in zip(starts, sizes, strict=True))


def _product(
    a: Descriptor, b: Descriptor, c: Descriptor, *,
    scale: float = 1.0, added: Descriptor | None = None, adds: bool = False,
) -> _Primitive:  # fmt: skip
    """Creates scale * a b of matrices in given layouts.

    Args: added: layout of a third operand, which is added.  adds: whether to add to what c holds.
    """
    lib = library()
    operations, attributes = _create("post_ops_create"), _create("primitive_attr_create")
    lib.check(
        lib.c.dnnl_post_ops_append_eltwise(operations, _LINEAR, c_float(scale), c_float(0.0)),
        "scale",
    )
    if added is not None:
        lib.check(lib.c.dnnl_post_ops_append_binary(operations, _BINARY_ADD, added.handle), "added")
    if adds:
        kind = _DATA_TYPES[c.dtype][0]
        lib.check(lib.c.dnnl_post_ops_append_sum(operations, c_float(1.0), c_int(0), kind), "adds")
    lib.check(lib.c.dnnl_primitive_attr_set_post_ops(attributes, operations), "post-operations")
    description = _create(
        "matmul_primitive_desc_create", lib.engine, a.handle, b.handle, None, c.handle, attributes
    )
    places = [(_SRC, a), (_WEIGHTS, b)]
    if added is not None:
        places.append((_find_second_operand(description), added))
    return _Primitive(description, places, [(_DST, c)])


def _find_second_operand(description: c_void_p) -> int:
    """Returns the execution argument of what the second post-operation adds.

    Its number depends on the version of oneDNN.
    """
    for base in _POST_OPERATIONS:
        argument = 2 * base | _SRC_1
        operand = library().c.dnnl_primitive_desc_query_md(description, _Q_EXECUTION, argument)
        if operand and library().c.dnnl_memory_desc_get_size(operand):
            return argument
    raise OneDNNError("oneDNN does not name the operand of a post-operation")


class Activation:
    """Activation function of buffers in a given layout."""

    def __init__(self, name: str, x: Descriptor) -> None:
        """Creates the kernels.

        Args: name: a value of `model.activation`.
        """
        kind, *alpha_beta = _ELTWISE[name]
        factors = [c_float(value) for value in alpha_beta]
        forward = _describe(
            "eltwise_forward", _FORWARD_TRAINING, kind, x.handle, x.handle, *factors
        )
        back = _describe("eltwise_backward", kind, x.handle, x.handle, x.handle, *factors, forward)
        self._forward = _Primitive(forward, [(_SRC, x)], [(_DST, x)])
        self._back = _Primitive(back, [(_SRC, x), (_D_DST, x)], [(_D_SRC, x)])

    def forward(self, x: Tensor, in_place: bool = False) -> Tensor:
        """Returns the activated buffer.  Args: in_place: it takes the place of x."""
        return self._forward(x, into=x if in_place else None)[0]

    def gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Returns dx."""
        return self._back(x, dy)[0]


class MapKernel:
    """Kernel from one feature map to another.

    Attributes:
        y: layout of the result.
        forward: returns y, and the workspace that `gradient` needs beside dy.
    """

    def __init__(
        self, kind: str, x: Descriptor, y: Descriptor,
        forward: Sequence[Any], back: Sequence[Any], needs_workspace: bool = False,
    ) -> None:  # fmt: skip
        """Creates the kernels.

        Args: forward, back: arguments of `dnnl_<kind>_forward_...` and `_backward_...`;
        needs_workspace: the gradient needs the choices of the forward kernel.
        """
        self.y = y
        described = _describe(f"{kind}_forward", _FORWARD_TRAINING, *forward)
        workspace_places = _workspace_places(described, x) if needs_workspace else []
        self.forward = _Primitive(described, [(_SRC, x)], [(_DST, y), *workspace_places])
        described = _describe(f"{kind}_backward", *back, described)
        self._back = _Primitive(described, [(_D_DST, y), *workspace_places], [(_D_SRC, x)])

    def gradient(self, dy: Tensor, *workspaces: Tensor) -> Tensor:
        """Returns dx."""
        return self._back(dy, *workspaces)[0]


def _pooling(
    kind: int, x: Descriptor, y: Descriptor, window: Sequence[int], padding: int, stride: int
) -> MapKernel:
    """Creates a pooling.

    Args: window: [y, x].
    """
    strides, pads = _dims([stride, stride]), _dims([padding, padding])
    form = (kind, x.handle, y.handle, strides, _dims(window), _dims([0, 0]), pads, pads)
    return MapKernel("pooling", x, y, form, form, needs_workspace=kind == _POOLING_MAX)


def max_pool(x: Descriptor, size: int, stride: int, padding: int) -> MapKernel:
    """Creates a max pooling over square windows; padding counts as less than any number."""
    batch, channels, *cells = x.shape
    height, width = ((n + 2 * padding - size) // stride + 1 for n in cells)
    assert x.block is not None
    y = layout((batch, channels, height, width), x.block, x.dtype)
    return _pooling(_POOLING_MAX, x, y, [size, size], padding, stride)


def mean_pool(x: Descriptor) -> MapKernel:
    """Creates the mean over all cells."""
    batch, channels, *size = x.shape
    assert x.block is not None
    y = layout((batch, channels, 1, 1), x.block, x.dtype)
    return _pooling(_POOLING_MEAN, x, y, size, 0, 1)


def upsample2x(x: Descriptor) -> MapKernel:
    """Creates the nearest-neighbour enlargement by 2."""
    batch, channels, height, width = x.shape
    assert x.block is not None
    y = layout((batch, channels, 2 * height, 2 * width), x.block, x.dtype)
    form = (_NEAREST, (c_float * 2)(2.0, 2.0), x.handle, y.handle)
    return MapKernel("resampling", x, y, form, form)


class Pad:
    """Zeros to the right of a map and below it.

    Attributes: y: layout of the result.
    """

    def __init__(self, x: Descriptor, right: int, below: int) -> None:
        batch, channels, height, width = x.shape
        assert x.block is not None
        self.y = layout((batch, channels, height + below, width + right), x.block, x.dtype)
        inside = _create(
            "memory_desc_create_submemory", self.y.handle, _dims(x.shape), _dims([0, 0, 0, 0])
        )
        piece = Descriptor(inside, x.shape, x.dtype)
        self._write = _reorder(x, piece)
        self._cut = Reorder(piece, x, is_part=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Returns the padded buffer, like `MapKernel.forward` without a workspace."""
        return self._write(x, into=paddle.zeros(self.y.tensor_shape, self.y.dtype))

    def gradient(self, dy: Tensor) -> Tensor:
        """Returns dx."""
        return self._cut(dy)


class Concat:
    """Concatenation along the channels, and the split of its gradient."""

    def __init__(self, parts: Sequence[Descriptor], concatenated: Descriptor) -> None:
        self.concatenated = concatenated
        handles = (c_void_p * len(parts))(*(part.handle for part in parts))
        description = _describe("concat", concatenated.handle, len(parts), 1, handles)
        sources = [(_FIRST_OF_MANY + at, part) for at, part in enumerate(parts)]
        self._forward = _Primitive(description, sources, [(_DST, concatenated)])
        self._split, first = [], 0
        for part in parts:
            inside = _create(
                "memory_desc_create_submemory", concatenated.handle, _dims(part.shape),
                _dims([0, first, 0, 0]),
            )  # fmt: skip
            piece = Descriptor(inside, part.shape, part.dtype)
            self._split.append(Reorder(piece, part, is_part=True))
            first += part.shape[1]

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the concatenated buffer."""
        return self._forward(*parts)[0]

    def gradient(self, dy: Tensor) -> list[Tensor]:
        """Splits the gradient."""
        return [split(dy) for split in self._split]


class Sum:
    """Sum of two buffers of a given layout."""

    def __init__(self, x: Descriptor) -> None:
        self._primitive: _Primitive | None = None
        if x.dtype == "float32":
            return  # Paddle adds; it cannot add bfloat16 on a CPU
        sources, ones = (c_void_p * 2)(x.handle, x.handle), (c_float * 2)(1.0, 1.0)
        description = _describe("sum", x.handle, 2, ones, sources)
        places = [(_FIRST_OF_MANY, x), (_FIRST_OF_MANY + 1, x)]
        self._primitive = _Primitive(description, places, [(_DST, x)])

    def __call__(self, first: Tensor, second: Tensor, in_place: bool = True) -> Tensor:
        """Returns the sum.  Args: in_place: it may overwrite `first`."""
        if self._primitive is None:
            return first.add_(second) if in_place else first + second
        return self._primitive(first, second, into=first if in_place else None)[0]
