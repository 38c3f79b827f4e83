"""Tensors one after another in one storage, for one kernel."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import paddle

from ppdist.distributed import collectives, paddle_api

BUCKET_BYTES = 1 << 20  # of one storage: a CPU has caches, and see `FlatStorage`
_BYTES = 4  # of a float32
_ALIGNED = 16  # elements, 64 bytes: the longest vector of a CPU


class FlatStorage:
    """Float32 tensors that lie in one storage.

    What is done in place to what `gather` gives is done to all of them: one operator that the host
    dispatches instead of one for each.  For small tensors, or few: `Tensor.numpy` copies the whole
    storage that a tensor lies in.

    An operator may give a tensor a storage of its own instead of writing into the one it has, as
    those do that an accelerator has no kernel for and Paddle runs on the CPU.  So `gather` looks
    first where each tensor lies, by its address, and `scatter` where its values do.
    """

    def __init__(self, tensors: Sequence[paddle.Tensor], aligned: bool = True) -> None:
        """
        Args:
            tensors: at least one, each once; in this order they will lie.
            aligned: each begins at a multiple of 64 bytes, as what Paddle allocates does, because
                some kernels sum in an order that depends on that; between them are zeros.
        """
        assert all(each.dtype == paddle.float32 and each.is_contiguous() for each in tensors)
        self.tensors = list(tensors)
        step = _ALIGNED if aligned else 1
        rooms = [-(-tensor.size // step) * step for tensor in self.tensors]
        self._gaps = [room - tensor.size for room, tensor in zip(rooms, self.tensors)]
        self._starts = [0, *accumulate(rooms[:-1])]
        self._lay_out()

    @paddle.no_grad()
    def _lay_out(self) -> None:
        pieces = []
        for gap, tensor in zip(self._gaps, self.tensors):
            pieces += [tensor.flatten(), *([paddle.zeros([gap])] if gap else [])]
        self._flat = paddle.concat(pieces)
        for start, tensor in zip(self._starts, self.tensors):
            paddle_api.share_buffer(paddle_api.part(self._flat, start, tensor.size), tensor)

    def places(self) -> paddle.Tensor:
        """Positions in `gather`'s result that are not gaps, int64."""
        owned = zip(self._starts, self.tensors)
        return paddle.concat([paddle.arange(start, start + each.size) for start, each in owned])

    def gather(self) -> paddle.Tensor:
        """The values themselves, [F]."""
        base = self._flat.data_ptr()
        if any(
            tensor.data_ptr() != base + _BYTES * start
            for tensor, start in zip(self.tensors, self._starts)
        ):
            self._lay_out()
        return self._flat

    @paddle.no_grad()
    def scatter(self, values_F: paddle.Tensor) -> None:
        """Gives all tensors what was done to `gather`'s values."""
        if all(
            tensor.data_ptr() == values_F.data_ptr() + _BYTES * start
            for tensor, start in zip(self.tensors, self._starts)
        ):
            return
        for start, tensor in zip(self._starts, self.tensors):
            own = values_F[start : start + tensor.size]
            paddle.assign(own.reshape(tensor.shape), tensor)


class FlatGradients:
    """Gradients of one step in few storages, where few operators reach them.

    Backward makes each anew, so each step they are copied once more.  Largest first, so that many
    lie beside others of their size and one operator takes the norm of each.

    Attributes:
        parameters: those that have a gradient, in the order of the model.
    """

    def __init__(self, parameters: Sequence[paddle.Tensor]) -> None:
        self.parameters = list(parameters)
        order = sorted(range(len(parameters)), key=lambda at: -parameters[at].size)
        largest_first = [self.parameters[at] for at in order]
        self._buckets = list(collectives.buckets(largest_first, BUCKET_BYTES))
        self._flats: list[paddle.Tensor] = []
        self._copies: list[list[paddle.Tensor]] = []
        # Of each bucket the runs of equal sizes, as matrices that will share its storage.
        self._runs = [
            [paddle.empty([len(list(run)), size]) for size, run in groupby(p.size for p in bucket)]
            for bucket in self._buckets
        ]
        self._order = paddle.to_tensor(sorted(range(len(order)), key=order.__getitem__))

    def are_of(self, parameters: Sequence[paddle.Tensor]) -> bool:
        """Whether these very parameters have a gradient."""
        same = all(ours is other for ours, other in zip(self.parameters, parameters))
        return same and len(self.parameters) == len(parameters)

    def release(self) -> None:
        """Holds nothing any more, so that backward has the memory."""
        self._flats.clear()
        self._copies.clear()
        for runs in self._runs:
            for run_PN in runs:
                paddle_api.release(run_PN)

    @paddle.no_grad()
    def collect(self) -> None:
        """Takes over the gradients of the parameters, float32."""
        self.release()
        for bucket in self._buckets:
            for parameter in bucket:
                if not parameter.grad.is_contiguous():  # that of a transposed one need not be
                    parameter.grad = parameter.grad.contiguous()
            copies, flat_F = paddle_api.coalesce([parameter.grad for parameter in bucket])
            self._flats.append(flat_F)
            self._copies.append(copies)
            for parameter, copy in zip(bucket, copies if len(bucket) > 1 else []):
                paddle_api.share_buffer(copy, parameter.grad)  # `grad = copy` would copy again

    @paddle.no_grad()
    def square(self) -> paddle.Tensor:
        """Square of the gradients' norm, [1]."""
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
        return paddle.gather(paddle.concat(dots), self._order).sum().reshape([1])

    @paddle.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiplies all, in place."""
        for bucket, copies, flat_F in zip(self._buckets, self._copies, self._flats):
            flat_F.scale_(factor)
            if copies[0].data_ptr() == flat_F.data_ptr():
                continue
            # This accelerator has no kernel of its own for one of these operators.
            starts = [0, *accumulate(parameter.size for parameter in bucket)]
            for parameter, start, stop in zip(bucket, starts, starts[1:]):
                parameter.grad = flat_F[start:stop].reshape(parameter.shape)
