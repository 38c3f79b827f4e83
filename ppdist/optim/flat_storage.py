"""Tensors one after another in one storage, for one kernel."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import paddle

from ppdist.distributed import collectives, paddle_api

BUCKET_BYTES = 1 << 20  # of one storage: it should fit a CPU's cache, and see `FlatStorage`
_FLOAT32_BYTES = 4
_ALIGNED_ELEMENTS = 16  # 64 bytes: the longest vector of a CPU


class FlatStorage:
    """Float32 tensors that lie in one storage.

    An in-place operation on the result of `gather` changes all of them: the host dispatches one
    operator instead of one for each tensor.  It suits small tensors, or few of them, because
    `Tensor.numpy` copies the whole storage that contains a tensor.

    An operator may give a tensor a new storage instead of writing into the old one; operators do so
    if the accelerator has no kernel for them and Paddle runs them on the CPU.  So `gather` first
    checks the address of each tensor, and `scatter` the address of its values.
    """

    def __init__(self, tensors: Sequence[paddle.Tensor], aligned: bool = True) -> None:
        """Moves the tensors into one storage.

        Args:
            tensors: at least one, without duplicates; they are stored in this order.
            aligned: every tensor begins at a multiple of 64 bytes, as Paddle's allocations do,
                because some kernels sum in an order that depends on that; gaps are zeros.
        """
        assert all(x.dtype == paddle.float32 and x.is_contiguous() for x in tensors)
        self.tensors = list(tensors)
        step = _ALIGNED_ELEMENTS if aligned else 1
        rooms = [-(-tensor.size // step) * step for tensor in self.tensors]
        self._gaps = [room - tensor.size for room, tensor in zip(rooms, self.tensors)]
        self._starts = [0, *accumulate(rooms[:-1])]
        self._lay_out()

    @paddle.no_grad()
    def _lay_out(self) -> None:
        """Copies all tensors into a new storage, and makes them parts of it."""
        pieces = []
        for gap, tensor in zip(self._gaps, self.tensors):
            pieces += [tensor.flatten(), *([paddle.zeros([gap])] if gap else [])]
        self._flat = paddle.concat(pieces)
        for start, tensor in zip(self._starts, self.tensors):
            paddle_api.share_buffer(paddle_api.part(self._flat, start, tensor.size), tensor)

    def places(self) -> paddle.Tensor:
        """Returns the positions in `gather`'s result that are not gaps, int64."""
        pairs = zip(self._starts, self.tensors)
        return paddle.concat([paddle.arange(start, start + tensor.size) for start, tensor in pairs])

    def gather(self) -> paddle.Tensor:
        """Returns the values of all tensors, which they share, [F]."""
        base = self._flat.data_ptr()
        if any(
            tensor.data_ptr() != base + _FLOAT32_BYTES * start
            for tensor, start in zip(self.tensors, self._starts)
        ):
            self._lay_out()
        return self._flat

    @paddle.no_grad()
    def scatter(self, values_F: paddle.Tensor) -> None:
        """Copies the changed values of `gather` to all tensors that do not share them."""
        if all(
            tensor.data_ptr() == values_F.data_ptr() + _FLOAT32_BYTES * start
            for tensor, start in zip(self.tensors, self._starts)
        ):
            return
        for start, tensor in zip(self._starts, self.tensors):
            part_F = values_F[start : start + tensor.size]
            paddle.assign(part_F.reshape(tensor.shape), tensor)


class FlatGradients:
    """Gradients of one step in few storages, which few operators process.

    The backward pass allocates new gradients, so every step copies them.  The largest come first,
    so that gradients of equal size are neighbours and one operator takes their norms.

    Attributes:
        parameters: the parameters with a gradient, in the order of the model.
    """

    def __init__(self, parameters: Sequence[paddle.Tensor]) -> None:
        self.parameters = list(parameters)
        order = sorted(range(len(parameters)), key=lambda at: -parameters[at].size)
        largest_first = [self.parameters[at] for at in order]
        self._buckets = list(collectives.buckets(largest_first, BUCKET_BYTES))
        self._flats: list[paddle.Tensor] = []
        self._copies: list[list[paddle.Tensor]] = []
        # Runs of equal sizes in each bucket, as matrices that will share its storage.
        self._runs = [
            [paddle.empty([len(list(run)), size]) for size, run in groupby(p.size for p in bucket)]
            for bucket in self._buckets
        ]
        self._order = paddle.to_tensor(sorted(range(len(order)), key=order.__getitem__))

    def are_of(self, parameters: Sequence[paddle.Tensor]) -> bool:
        """Returns True if exactly these parameters have a gradient."""
        same = all(
            parameter is candidate for parameter, candidate in zip(self.parameters, parameters)
        )
        return same and len(self.parameters) == len(parameters)

    def release(self) -> None:
        """Releases all memory, so that the backward pass can use it."""
        self._flats.clear()
        self._copies.clear()
        for runs in self._runs:
            for run_PN in runs:
                paddle_api.release(run_PN)

    @paddle.no_grad()
    def collect(self) -> None:
        """Copies the gradients of the parameters, float32, into the storages."""
        self.release()
        for bucket in self._buckets:
            for parameter in bucket:
                if not parameter.grad.is_contiguous():  # such as that of a transposed parameter
                    parameter.grad = parameter.grad.contiguous()
            copies, flat_F = paddle_api.coalesce([parameter.grad for parameter in bucket])
            self._flats.append(flat_F)
            self._copies.append(copies)
            for parameter, copy in zip(bucket, copies if len(bucket) > 1 else []):
                paddle_api.share_buffer(copy, parameter.grad)  # `grad = copy` would copy again

    @paddle.no_grad()
    def square(self) -> paddle.Tensor:
        """Computes the square of the gradients' norm, [1]."""
        dots = []
        for bucket, flat_F, runs in zip(self._buckets, self._flats, self._runs):
            start = 0
            if len(bucket) == 1:
                paddle_api.share_buffer(flat_F, runs[0])
                dots.append(paddle.dot(runs[0], runs[0]))
                continue
            for run_PN in runs:
                paddle_api.share_buffer(paddle_api.part(flat_F, start, run_PN.size), run_PN)
                start += run_PN.size
                # dot: (g ** 2).sum() took 13 times as long on a CPU
                dots.append(paddle.dot(run_PN, run_PN))
        # Summed in the order of the model, so that the layout of buckets does not change the sum.
        return paddle.gather(paddle.concat(dots), self._order).sum().reshape([1])

    @paddle.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiplies all gradients by a factor, in place."""
        for bucket, copies, flat_F in zip(self._buckets, self._copies, self._flats):
            flat_F.scale_(factor)
            if copies[0].data_ptr() == flat_F.data_ptr():
                continue
            # The gradients no longer share the storage: this accelerator lacks a kernel for one of
            # the operators, and Paddle has allocated a new tensor.
            starts = [0, *accumulate(parameter.size for parameter in bucket)]
            for parameter, start, stop in zip(bucket, starts, starts[1:]):
                parameter.grad = flat_F[start:stop].reshape(parameter.shape)
