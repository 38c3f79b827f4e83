"""Tensors one after another in one storage, for one kernel."""

from collections.abc import Sequence
from itertools import accumulate

import paddle

_BYTES = 4  # of a float32
_ALIGNED = 16  # elements, 64 bytes: the longest vector of a CPU


class FlatStorage:
    """Float32 tensors that keep their shapes and names, and lie in one storage.

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
        assert all(tensor.dtype == paddle.float32 for tensor in tensors)
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
            self._flat._slice(start, start + tensor.size)._share_buffer_to(tensor)

    def places(self) -> paddle.Tensor:
        """Positions, in what `gather` gives, of all that is no gap, int64."""
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
        """After something was done, in place, to what `gather` gave: all tensors hold it."""
        if all(
            tensor.data_ptr() == values_F.data_ptr() + _BYTES * start
            for tensor, start in zip(self.tensors, self._starts)
        ):
            return
        for start, tensor in zip(self._starts, self.tensors):
            own = values_F[start : start + tensor.size]
            paddle.assign(own.reshape(tensor.shape), tensor)


@paddle.no_grad()
def coalesce(tensors: Sequence[paddle.Tensor]) -> tuple[list[paddle.Tensor], paddle.Tensor]:
    """Copies float32 tensors into one storage, by one operator.

    Returns: the copies, which lie in it; all of it, [F], without gaps.
    """
    copies, flat_F = paddle._C_ops.coalesce_tensor(
        tensors, paddle.float32, True, False, False, 0.0, False, -1, -1, [], []
    )
    return copies, flat_F
