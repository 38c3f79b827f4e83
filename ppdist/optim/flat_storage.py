"""Tensors one after another in one storage, for one kernel."""

from collections.abc import Sequence
from itertools import accumulate

import paddle

_ELEMENT = 4  # bytes of a float32
_ALIGNED = 16  # elements, 64 bytes: the longest vector of a CPU


class FlatStorage:
    """Float32 tensors that keep their shapes and names, and lie in one storage.

    What is done to the flat values in place is done to all of them: an average over 400 tensors is
    3 operators instead of 1200, which the host would have to dispatch while the device waits.

    Each begins at a multiple of 64 bytes, as what Paddle allocates does, because some kernels sum
    in an order that depends on that; between them are zeros.

    An operator may give a tensor a storage of its own instead of writing into the one it has, as
    those do that an accelerator has no kernel for and Paddle runs on the CPU.  So `gather` looks
    first where each tensor lies, by its address, and `scatter` where its values do.
    """

    def __init__(self, tensors: Sequence[paddle.Tensor]) -> None:
        """Args: tensors: each once; in this order they will lie."""
        assert all(tensor.dtype == paddle.float32 for tensor in tensors)
        self.tensors = list(tensors)
        rooms = (-(-tensor.size // _ALIGNED) * _ALIGNED for tensor in self.tensors)
        self._bounds = [0, *accumulate(rooms)]
        self._flat = paddle.zeros([0])
        if self.tensors:
            self._lay_out()

    @paddle.no_grad()
    def _lay_out(self) -> None:
        pieces, zeros = [], paddle.zeros([_ALIGNED])
        for tensor in self.tensors:
            pieces += [tensor.flatten(), zeros[: -tensor.size % _ALIGNED]]
        self._flat = paddle.concat([piece for piece in pieces if piece.size])
        for start, tensor in zip(self._bounds, self.tensors):
            self._flat._slice(start, start + tensor.size)._share_buffer_to(tensor)

    def _values(self, first: int, last: int) -> paddle.Tensor:
        return self._flat._slice(self._bounds[first], self._bounds[last])

    def part(self, tensors: Sequence[paddle.Tensor]) -> slice:
        """Where these lie, which follow one another here as they do there."""
        if not tensors:
            return slice(0, 0)
        first = next(at for at, each in enumerate(self.tensors) if each is tensors[0])
        found = slice(first, first + len(tensors))
        assert all(a is b for a, b in zip(self.tensors[found], tensors, strict=True))
        return found

    def places(self, part: slice) -> paddle.Tensor:
        """Positions, in what `gather` gives of a part, of all that is no gap, int64."""
        first = self._bounds[part.start]
        owned = zip(self._bounds[part], self.tensors[part])
        return paddle.concat(
            [paddle.arange(at - first, at - first + each.size) for at, each in owned]
        )

    def gather(self, part: slice | None = None) -> paddle.Tensor:
        """The values themselves of a part, [F], or of all; at least one tensor."""
        first, last = (0, len(self.tensors)) if part is None else (part.start, part.stop)
        base, tensors = self._flat.data_ptr(), self.tensors[first:last]
        if any(
            tensor.data_ptr() != base + _ELEMENT * start
            for tensor, start in zip(tensors, self._bounds[first:last])
        ):
            self._lay_out()
        return self._flat if part is None else self._values(first, last)

    @paddle.no_grad()
    def scatter(self, values_F: paddle.Tensor, part: slice | None = None) -> None:
        """After something was done, in place, to what `gather` gave: all tensors hold it."""
        first, last = (0, len(self.tensors)) if part is None else (part.start, part.stop)
        if values_F.data_ptr() == self._flat.data_ptr() + _ELEMENT * self._bounds[first]:
            return
        for at in range(first, last):
            tensor, start = self.tensors[at], self._bounds[at] - self._bounds[first]
            own = values_F[start : start + tensor.size]
            paddle.assign(own.reshape(tensor.shape), tensor)
