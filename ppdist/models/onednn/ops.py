"""oneDNN's C interface inside Paddle's CPU wheel, by ctypes.

Paddle's dygraph convolution on CPU is im2col and a single-threaded product at about 30 GFLOP/s; the
same wheel carries oneDNN (libdnnl), whose kernels do 5-8 times that on one core and use several.
Dygraph has no way to them, so this module is one: descriptors, layouts ("reorders") and the
primitives a convolutional detector needs.  `feature_maps.py` and `layers.py` build on them.

A *buffer* here is a Paddle tensor, float32 or bfloat16, whose memory holds an activation in the
layout that its descriptor says; Paddle's allocator owns it.  oneDNN likes channels in blocks of 8
or 16, or all of them side by side: such a layout without padding is a tensor
[B, C / block, H, W, block] to Paddle, any other one is flat.
Kernels use OMP_NUM_THREADS threads, and one where it is unset (Paddle sees to that; fleetrun sets
cores / processes).  Nothing is loaded before `Library()` is made; `OSError` there means: no such
library, stay eager.

Constants and signatures: oneDNN 3.x C interface, https://uxlfoundation.github.io/oneDNN (stable
through 3.x by its versioning policy; another major version is refused).
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import paddle
from paddle import Tensor

LEAKY_SLOPE = 0.1  # of negative inputs, as in YOLOv3 and the first YOLOv5

_MAX_DIMS = 12
_CPU, _IN_ORDER, _ANY = 1, 1, 1
_DATA_TYPES = {"float32": (3, 4), "bfloat16": (2, 2)}  # oneDNN's number, bytes
_FORWARD_TRAINING, _FORWARD_INFERENCE, _BACKWARD = 64, 96, 128
_CONVOLUTION_DIRECT, _POOLING_MAX, _POOLING_MEAN, _NEAREST = 0x1, 0x1FF, 0x3FF, 0x2FFF0
_TAGS = {8: (102, b"aBcd8b"), 16: (78, b"aBcd16b")}  # by channels of a block
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
_GLOBAL_STATS, _SCALE, _SHIFT = 1, 2, 4
# What a primitive descriptor is asked for.
_Q_IMPLEMENTATION = 8
_Q_SRC, _Q_DIFF_SRC, _Q_WEIGHTS, _Q_DIFF_WEIGHTS, _Q_DST, _Q_DIFF_DST, _Q_WORKSPACE = range(
    129, 136
)
# Execution arguments.
_SRC, _DST, _WEIGHTS, _BIAS, _MEAN, _VARIANCE, _A_SCALE, _A_SHIFT = 1, 17, 33, 41, 49, 50, 51, 52
_D_SRC, _D_DST, _D_WEIGHTS, _D_BIAS, _D_SCALE, _D_SHIFT = 129, 145, 161, 169, 255, 256
_WORKSPACE, _FIRST_OF_MANY = 64, 1024


class OneDNNError(RuntimeError):
    """A oneDNN call failed (unsupported shape, no memory); callers fall back to eager."""


class _Argument(ctypes.Structure):
    _fields_ = [("index", c_int), ("memory", c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [("major", c_int), ("minor", c_int), ("patch", c_int)]


class Library:
    """libdnnl, its CPU engine and an in-order stream; one per process, from `library()`.

    Raises: OSError: not there or not loadable; OneDNNError: not oneDNN 3.
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
        for tag, name in _TAGS.values():
            if self.c.dnnl_fmt_tag2str(tag) != name:
                raise OneDNNError(f"oneDNN's layout {tag} is not {name.decode()}")
        self.c.dnnl_primitive_execute.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
        self.engine = c_void_p()
        self.check(self.c.dnnl_engine_create(byref(self.engine), _CPU, c_size_t(0)), "engine")
        self.stream = c_void_p()
        self.check(self.c.dnnl_stream_create(byref(self.stream), self.engine, _IN_ORDER), "stream")
        _let_threads_sleep(folder)

    def check(self, status: int, what: str) -> None:
        if status != 0:
            raise OneDNNError(f"oneDNN {what}: status {status}")


def _let_threads_sleep(folder: Path) -> None:
    """Lets OpenMP's threads sleep 1 ms after a kernel instead of spinning for 200 on a core that a
    data loader or another rank could use.

    From one kernel of a step to the next takes less than 1 ms, and waking a thread 50 us: with two
    threads that sleep at once a step of YOLOv5n took 1.26 times as long on a quiet machine, in
    bfloat16 1.5 times, and 0.97 times where another process kept one of two cores busy.
    Paddle's wheel loads libiomp5, which then serves libdnnl's calls though that names libgomp.
    """
    for file in folder.glob("libiomp5.so*"):
        ctypes.CDLL(str(file)).kmp_set_blocktime(c_int(1))


@cache
def library() -> Library:
    return Library()


class Descriptor:
    """Shape, layout and dtype of a tensor.  Kept for the life of the process.

    Attributes:
        shape: what it means, [B, C, H, W] of an activation.
        tensor_shape: of the Paddle tensors that hold it.
        block: channels side by side in memory; 0: row-major; None: no layout of `layout`.
    """

    def __init__(self, handle: c_void_p, shape: Sequence[int], dtype: str = "float32") -> None:
        self.handle = handle
        self.shape = list(shape)
        self.dtype = dtype
        size = library().c.dnnl_memory_desc_get_size(handle)
        self.tensor_shape = [-(-size // _DATA_TYPES[dtype][1])]
        self.block: int | None = None

    def equals(self, other: "Descriptor") -> bool:
        return bool(library().c.dnnl_memory_desc_equal(self.handle, other.handle))

    def empty(self) -> Tensor:
        """A new uninitialised buffer of this layout."""
        return paddle.empty(self.tensor_shape, dtype=self.dtype)


def _dims(values: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * _MAX_DIMS)(*values)


def plain(shape: Sequence[int], dtype: str = "float32") -> Descriptor:
    """Row-major: the layout of every contiguous Paddle tensor."""
    return layout(tuple(shape), 0, dtype)


@cache
def layout(shape: tuple[int, ...], block: int, dtype: str = "float32") -> Descriptor:
    """The layout of tensors [B, C / block, H, W, block]; block 0: row-major, any shape."""
    if block and block != shape[1]:
        result = _tagged(shape, block, dtype)
    else:
        lib, handle = library(), c_void_p()
        order = [0, 2, 3, 1] if block else range(len(shape))  # from the slowest axis to the fastest
        strides, step = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis]
        status = lib.c.dnnl_memory_desc_create_with_strides(
            byref(handle), len(shape), _dims(shape), _DATA_TYPES[dtype][0], _dims(strides)
        )
        lib.check(status, f"descriptor {list(shape)}, block {block}")
        result = Descriptor(handle, shape, dtype)
    result.block, result.tensor_shape = block, list(shape)
    if block:
        batch, channels, height, width = shape
        result.tensor_shape = [batch, channels // block, height, width, block]
    return result


def _tagged(shape: Sequence[int], block: int, dtype: str) -> Descriptor:
    """Channels in blocks of this size, a row of `_TAGS`."""
    lib, handle = library(), c_void_p()
    status = lib.c.dnnl_memory_desc_create_with_tag(
        byref(handle), len(shape), _dims(shape), _DATA_TYPES[dtype][0], _TAGS[block][0]
    )
    lib.check(status, f"descriptor {list(shape)}, block {block}")
    return Descriptor(handle, shape, dtype)


def _named(chosen: Descriptor) -> Descriptor:
    """The same layout from `layout`, if it is one of those that need no padding."""
    shape = tuple(chosen.shape)
    if len(shape) != 4:
        return chosen
    blocks = [block for block in _TAGS if shape[1] % block == 0]
    for candidate in (layout(shape, block, chosen.dtype) for block in (0, *blocks, shape[1])):
        if candidate.equals(chosen):
            return candidate
    if shape[1] in blocks and _tagged(shape, shape[1], chosen.dtype).equals(chosen):
        return layout(shape, shape[1], chosen.dtype)  # one block of all channels: the same memory
    return chosen


def _any(shape: Sequence[int], dtype: str = "float32") -> c_void_p:
    """A descriptor that lets the primitive choose the layout."""
    lib, handle = library(), c_void_p()
    status = lib.c.dnnl_memory_desc_create_with_tag(
        byref(handle), len(shape), _dims(shape), _DATA_TYPES[dtype][0], _ANY
    )
    lib.check(status, f"descriptor {list(shape)}")
    return handle


class _Primitive:
    """A compiled kernel with its arguments in a fixed order; `run` takes their tensors."""

    def __init__(self, description: c_void_p, arguments: Sequence[tuple[int, Descriptor]]) -> None:
        lib = library()
        self.description = description
        self.handle = c_void_p()
        status = lib.c.dnnl_primitive_create(byref(self.handle), description)
        lib.check(status, "primitive")
        self.arguments = (_Argument * len(arguments))()
        self.memories = []
        for slot, (index, descriptor) in zip(self.arguments, arguments, strict=True):
            memory = c_void_p()
            status = lib.c.dnnl_memory_create(
                byref(memory), descriptor.handle, lib.engine, c_void_p(0)
            )
            lib.check(status, "memory")
            self.memories.append(memory)
            slot.index, slot.memory = index, memory.value

    def run(self, *tensors: Tensor) -> None:
        lib = library()
        for memory, tensor in zip(self.memories, tensors, strict=True):
            lib.c.dnnl_memory_set_data_handle(memory, tensor.data_ptr())
        status = lib.c.dnnl_primitive_execute(
            self.handle, lib.stream, len(self.arguments), self.arguments
        )
        lib.check(status, "execute")


def _layout(
    description: c_void_p, what: int, shape: Sequence[int], dtype: str = "float32"
) -> Descriptor:
    handle = library().c.dnnl_primitive_desc_query_md(description, what, 0)
    return _named(Descriptor(c_void_p(handle), shape, dtype))


def _is_compiled(description: c_void_p) -> bool:
    """Whether its kernel is made for this processor, and none of the general and slow ones."""
    name = c_char_p()
    library().c.dnnl_primitive_desc_query(description, _Q_IMPLEMENTATION, 0, byref(name))
    return (name.value or b"").startswith((b"jit", b"brg"))


class Reorder:
    """Copies between two layouts or dtypes of one shape; no copy at all where they are equal."""

    def __init__(self, source: Descriptor, target: Descriptor, of_whole: bool = False) -> None:
        """Args: of_whole: the source is a part of a larger buffer, so even an equal one is copied:
        of one image the first part lies as if it were alone."""
        self.target = target
        self.primitive: _Primitive | None = None
        if source.equals(target) and not of_whole:
            return
        lib, description = library(), c_void_p()
        status = lib.c.dnnl_reorder_primitive_desc_create(
            byref(description), source.handle, lib.engine, target.handle, lib.engine, None
        )
        lib.check(status, "reorder")
        self.primitive = _Primitive(description, [(_SRC, source), (_DST, target)])

    def __call__(self, buffer: Tensor) -> Tensor:
        """`buffer` in the target layout (itself, if nothing is to be done)."""
        if self.primitive is None:
            return buffer
        out = self.target.empty()
        self.primitive.run(buffer, out)
        return out


def _output_shape(
    x_shape: Sequence[int], w_shape: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    batch, _, *size = x_shape
    out_size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, padding, dilation, w_shape[2:], stride, strict=True)
    ]
    return [batch, w_shape[0], *out_size]


class Convolution:
    """The three kernels of a 2-D convolution of one shape, and the reorders around them.

    Args:
        x_shape [B, C, H, W]; w_shape [O, C / groups, kh, kw]; stride, padding, dilation [y, x].
        x_block: the layout in which x comes, and its gradient goes; see `layout`.
        keeps_layout: y goes, and its gradient comes, in oneDNN's layout where that has a name;
            else row-major.
        dtype: of the kernels; they sum products of bfloat16 in float32, and parameters and their
            gradients are float32 in any case.
        x_dtype, y_dtype: in which x comes, and y goes.
    Attributes:
        x, y: the layouts of the kernel; x_given, y_given: those outside.
    Raises: OneDNNError: oneDNN has no kernel for it.
    """

    def __init__(
        self, x_shape: Sequence[int], w_shape: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int], groups: int, has_bias: bool,
        x_block: int = 0, keeps_layout: bool = False,
        dtype: str = "float32", x_dtype: str = "float32", y_dtype: str = "float32",
    ) -> None:  # fmt: skip
        y_shape = _output_shape(x_shape, w_shape, stride, padding, dilation)
        grouped = list(w_shape) if groups == 1 else [groups, w_shape[0] // groups, *w_shape[1:]]
        self.w_shape, self.has_bias = list(w_shape), has_bias
        bias = plain([w_shape[0]])
        x_any, w_any, y_any = _any(x_shape, dtype), _any(grouped, dtype), _any(y_shape, dtype)
        bias_handle = bias.handle if has_bias else None
        pads = _dims(padding)
        window = (_dims(stride), _dims([d - 1 for d in dilation]), pads, pads)
        lib = library()
        forward, to_data, to_weight = c_void_p(), c_void_p(), c_void_p()
        status = lib.c.dnnl_convolution_forward_primitive_desc_create(
            byref(forward), lib.engine, _FORWARD_TRAINING, _CONVOLUTION_DIRECT,
            x_any, w_any, bias_handle, y_any, *window, None,
        )  # fmt: skip
        lib.check(status, "convolution")
        self.x = _layout(forward, _Q_SRC, x_shape, dtype)
        self.y = _layout(forward, _Q_DST, y_shape, dtype)
        # In the layouts of the forward kernel, which spares two reorders; in those that the kernel
        # likes best where only a slow one takes these.
        for x, y in ((self.x.handle, self.y.handle), (x_any, y_any)):
            status = lib.c.dnnl_convolution_backward_data_primitive_desc_create(
                byref(to_data), lib.engine, _CONVOLUTION_DIRECT, x, w_any, y, *window, forward, None
            )
            if status == 0 and _is_compiled(to_data):
                break
        lib.check(status, "convolution, gradient of data")
        status = lib.c.dnnl_convolution_backward_weights_primitive_desc_create(
            byref(to_weight), lib.engine, _CONVOLUTION_DIRECT,
            x_any, _any(grouped), bias_handle, y_any, *window, forward, None,
        )  # fmt: skip
        lib.check(status, "convolution, gradient of weights")

        w_forward = _layout(forward, _Q_WEIGHTS, grouped, dtype)
        self._forward = _Primitive(
            forward,
            [(_SRC, self.x), (_WEIGHTS, w_forward), (_DST, self.y)] + [(_BIAS, bias)] * has_bias,
        )
        w_data = _layout(to_data, _Q_WEIGHTS, grouped, dtype)
        dx = _layout(to_data, _Q_DIFF_SRC, x_shape, dtype)
        dy_data = _layout(to_data, _Q_DIFF_DST, y_shape, dtype)
        self._data = _Primitive(to_data, [(_D_DST, dy_data), (_WEIGHTS, w_data), (_D_SRC, dx)])
        x_weight = _layout(to_weight, _Q_SRC, x_shape, dtype)
        dy_weight = _layout(to_weight, _Q_DIFF_DST, y_shape, dtype)
        dw = _layout(to_weight, _Q_DIFF_WEIGHTS, grouped)
        self._weight = _Primitive(
            to_weight,
            [(_SRC, x_weight), (_D_DST, dy_weight), (_D_WEIGHTS, dw)]
            + [(_D_BIAS, bias)] * has_bias,
        )
        self._bias, self._dw = bias, dw
        self.x_given = layout(tuple(x_shape), x_block, x_dtype)
        block = self.y.block if keeps_layout else 0
        self.y_given = layout(tuple(y_shape), block or 0, y_dtype)
        w_plain = plain(grouped)
        self.x_in = Reorder(self.x_given, self.x)
        self.y_in, self.y_out = Reorder(self.y_given, self.y), Reorder(self.y, self.y_given)
        self._w_in, self._w_data_in = Reorder(w_plain, w_forward), Reorder(w_plain, w_data)
        self._dw_out = Reorder(dw, w_plain)
        self._x_to_weight, self._dx_out = Reorder(self.x, x_weight), Reorder(dx, self.x_given)
        self._y_to_weight, self._y_to_data = Reorder(self.y, dy_weight), Reorder(self.y, dy_data)
        self._dx = dx

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Buffer in layout `self.y` from a buffer in layout `self.x` and plain parameters."""
        y = self.y.empty()
        extra = [bias] if self.has_bias else []
        self._forward.run(x, self._w_in(weight), y, *extra)
        return y

    def weight_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        """Plain gradients of weight and bias from buffers in the layouts `self.x`, `self.y`."""
        dw = self._dw.empty()
        d_bias = [self._bias.empty()] if self.has_bias else []
        self._weight.run(self._x_to_weight(x), self._y_to_weight(dy), dw, *d_bias)
        return self._dw_out(dw).reshape(self.w_shape), d_bias[0] if d_bias else None

    def data_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Buffer in layout `self.x_given` from one in layout `self.y`."""
        dx = self._dx.empty()
        self._data.run(self._y_to_data(dy), self._w_data_in(weight), dx)
        return self._dx_out(dx)


class BatchNorm:
    """Batch normalisation of buffers in a given layout, with its own or with given statistics."""

    def __init__(self, layout: Descriptor, epsilon: float) -> None:
        self.layout = layout
        self.channels = plain([layout.shape[1]])
        lib, c = library(), self.channels
        train, infer, back = c_void_p(), c_void_p(), c_void_p()
        for handle, kind, flags in (
            (train, _FORWARD_TRAINING, _SCALE | _SHIFT),
            (infer, _FORWARD_INFERENCE, _SCALE | _SHIFT | _GLOBAL_STATS),
        ):
            status = lib.c.dnnl_batch_normalization_forward_primitive_desc_create(
                byref(handle), lib.engine, kind, layout.handle, layout.handle,
                c_float(epsilon), flags, None,
            )  # fmt: skip
            lib.check(status, "batch norm")
        status = lib.c.dnnl_batch_normalization_backward_primitive_desc_create(
            byref(back), lib.engine, _BACKWARD, layout.handle, layout.handle, layout.handle,
            c_float(epsilon), _SCALE | _SHIFT, train, None,
        )  # fmt: skip
        lib.check(status, "batch norm, gradient")
        common = [(_SRC, layout), (_A_SCALE, c), (_MEAN, c), (_VARIANCE, c)]
        self._train = _Primitive(train, [*common, (_A_SHIFT, c), (_DST, layout)])
        self._infer = _Primitive(infer, [*common, (_A_SHIFT, c), (_DST, layout)])
        self._back = _Primitive(
            back, [*common, (_D_DST, layout), (_D_SRC, layout), (_D_SCALE, c), (_D_SHIFT, c)]
        )

    def train(self, x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(y, mean_C, biased variance_C) of this batch."""
        y, mean, variance = self.layout.empty(), self.channels.empty(), self.channels.empty()
        self._train.run(x, scale, mean, variance, shift, y)
        return y, mean, variance

    def infer(
        self, x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor
    ) -> Tensor:
        y = self.layout.empty()
        self._infer.run(x, scale, mean, variance, shift, y)
        return y

    def gradient(
        self, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, dy: Tensor, in_place: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, dscale_C, dshift_C) of `train`.  Args: in_place: dx may take the place of dy."""
        dx = dy if in_place else self.layout.empty()
        dscale, dshift = self.channels.empty(), self.channels.empty()
        self._back.run(x, scale, mean, variance, dy, dx, dscale, dshift)
        return dx, dscale, dshift


class Activation:
    """An activation function of buffers in a given layout."""

    def __init__(self, name: str, layout: Descriptor) -> None:
        """Args: name: a value of `model.activation`."""
        self.layout = layout
        lib, forward, back = library(), c_void_p(), c_void_p()
        kind, alpha, beta = _ELTWISE[name]
        alpha_beta = c_float(alpha), c_float(beta)
        status = lib.c.dnnl_eltwise_forward_primitive_desc_create(
            byref(forward), lib.engine, _FORWARD_TRAINING, kind, layout.handle, layout.handle,
            *alpha_beta, None,
        )  # fmt: skip
        lib.check(status, name)
        status = lib.c.dnnl_eltwise_backward_primitive_desc_create(
            byref(back), lib.engine, kind, layout.handle, layout.handle, layout.handle,
            *alpha_beta, forward, None,
        )  # fmt: skip
        lib.check(status, f"{name}, gradient")
        self._forward = _Primitive(forward, [(_SRC, layout), (_DST, layout)])
        self._back = _Primitive(back, [(_SRC, layout), (_D_DST, layout), (_D_SRC, layout)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.layout.empty()
        self._forward.run(x, y)
        return y

    def gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        dx = self.layout.empty()
        self._back.run(x, dy, dx)
        return dx


def _pooling(
    kind: int, x: Descriptor, y: Descriptor, window: Sequence[int], padding: Sequence[int]
) -> tuple[c_void_p, c_void_p]:
    """Descriptions of pooling with stride 1 and of its gradient; window, padding: [y, x]."""
    lib, forward, back = library(), c_void_p(), c_void_p()
    pads = _dims(padding)
    windows = (_dims([1, 1]), _dims(window), _dims([0, 0]), pads, pads)
    status = lib.c.dnnl_pooling_forward_primitive_desc_create(
        byref(forward), lib.engine, _FORWARD_TRAINING, kind, x.handle, y.handle, *windows, None
    )
    lib.check(status, "pooling")
    status = lib.c.dnnl_pooling_backward_primitive_desc_create(
        byref(back), lib.engine, kind, x.handle, y.handle, *windows, forward, None
    )
    lib.check(status, "pooling, gradient")
    return forward, back


class MaxPool:
    """Max pooling of square windows, stride 1, as many cells out as in."""

    def __init__(self, x: Descriptor, size: int) -> None:
        forward, back = _pooling(_POOLING_MAX, x, x, [size, size], [size // 2, size // 2])
        self.layout = x
        workspace = library().c.dnnl_primitive_desc_query_md(forward, _Q_WORKSPACE, 0)
        self._workspace = Descriptor(c_void_p(workspace), x.shape)
        at = [(_WORKSPACE, self._workspace)]
        self._forward = _Primitive(forward, [(_SRC, x), (_DST, x), *at])
        self._back = _Primitive(back, [(_D_DST, x), (_D_SRC, x), *at])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y; where each maximum was, for `gradient`."""
        y, chosen = self.layout.empty(), self._workspace.empty()
        self._forward.run(x, y, chosen)
        return y, chosen

    def gradient(self, dy: Tensor, chosen: Tensor) -> Tensor:
        dx = self.layout.empty()
        self._back.run(dy, dx, chosen)
        return dx


class _Resize:
    """A linear kernel from a buffer of one size to another, so that its gradient needs dy alone."""

    def __init__(
        self, x: Descriptor, y: Descriptor, descriptions: tuple[c_void_p, c_void_p]
    ) -> None:
        """Args: descriptions: of the kernel and of its gradient."""
        self.x, self.y = x, y
        forward, back = descriptions
        self._forward = _Primitive(forward, [(_SRC, x), (_DST, y)])
        self._back = _Primitive(back, [(_D_DST, y), (_D_SRC, x)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.y.empty()
        self._forward.run(x, y)
        return y

    def gradient(self, dy: Tensor) -> Tensor:
        dx = self.x.empty()
        self._back.run(dy, dx)
        return dx


class MeanPool(_Resize):
    """The mean over all cells."""

    def __init__(self, x: Descriptor) -> None:
        batch, channels, height, width = x.shape
        assert x.block is not None
        y = layout((batch, channels, 1, 1), x.block, x.dtype)
        super().__init__(x, y, _pooling(_POOLING_MEAN, x, y, [height, width], [0, 0]))


class Upsample(_Resize):
    """Nearest-neighbour enlargement by 2."""

    def __init__(self, x: Descriptor, y: Descriptor) -> None:
        lib, forward, back = library(), c_void_p(), c_void_p()
        factors = (c_float * 2)(2.0, 2.0)
        status = lib.c.dnnl_resampling_forward_primitive_desc_create(
            byref(forward), lib.engine, _FORWARD_TRAINING, _NEAREST, factors, x.handle, y.handle,
            None,
        )  # fmt: skip
        lib.check(status, "upsampling")
        status = lib.c.dnnl_resampling_backward_primitive_desc_create(
            byref(back), lib.engine, _NEAREST, factors, x.handle, y.handle, forward, None
        )
        lib.check(status, "upsampling, gradient")
        super().__init__(x, y, (forward, back))


class Concat:
    """Concatenation along the channels, and its pieces again."""

    def __init__(self, parts: Sequence[Descriptor], whole: Descriptor) -> None:
        lib, forward = library(), c_void_p()
        handles = (c_void_p * len(parts))(*(part.handle for part in parts))
        status = lib.c.dnnl_concat_primitive_desc_create(
            byref(forward), lib.engine, whole.handle, len(parts), 1, handles, None
        )
        lib.check(status, "concatenation")
        self.whole = whole
        sources = [(_FIRST_OF_MANY + at, part) for at, part in enumerate(parts)]
        self._forward = _Primitive(forward, [*sources, (_DST, whole)])
        self._split, first = [], 0
        for part in parts:
            inside = c_void_p()
            status = lib.c.dnnl_memory_desc_create_submemory(
                byref(inside), whole.handle, _dims(part.shape), _dims([0, first, 0, 0])
            )
            lib.check(status, "part of a concatenation")
            piece = Descriptor(inside, part.shape, part.dtype)
            self._split.append(Reorder(piece, part, of_whole=True))
            first += part.shape[1]

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        y = self.whole.empty()
        self._forward.run(*parts, y)
        return y

    def gradient(self, dy: Tensor) -> list[Tensor]:
        return [split(dy) for split in self._split]


class Sum:
    """The sum of two buffers of a given layout."""

    def __init__(self, layout: Descriptor) -> None:
        self._primitive: _Primitive | None = None
        if layout.dtype == "float32":
            return  # Paddle's own, in place; it has none for bfloat16
        lib, description = library(), c_void_p()
        sources = (c_void_p * 2)(layout.handle, layout.handle)
        status = lib.c.dnnl_sum_primitive_desc_create(
            byref(description), lib.engine, layout.handle, 2, (c_float * 2)(1.0, 1.0), sources, None
        )
        lib.check(status, "sum")
        arguments = [(_FIRST_OF_MANY, layout), (_FIRST_OF_MANY + 1, layout), (_DST, layout)]
        self._primitive = _Primitive(description, arguments)

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """The sum; it may take the place of `first`."""
        if self._primitive is None:
            return first.add_(second)
        self._primitive.run(first, second, first)
        return first
