"""Gradients with fewer bytes on the wire: lower precision, lower rank, or only the largest entries.

What the last two do not send, each rank keeps and adds to its next gradient (error feedback), so
nothing is lost but delayed.  Biases and everything of normalisation layers (one axis) is averaged
in float32 by all of them: it is little and what it says is precise.
Not run on a GPU.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import paddle

from ppdist import dist
from ppdist.errors import CheckpointError
from ppdist.optim.averaging import Averaging, lost

_SAFE_FLOAT16 = 32768.0  # the largest power of two below its maximum, 65504


class LowPrecision(Averaging):
    """Half the bytes: cast, sum, cast back; the weights and their update stay float32.

    Every entry is rounded when cast, and again at each of the ranks that its sum passes:
    bfloat16 keeps 8 bits, float16 11 as long as entries are not far below the largest.
    """

    def __init__(self, dtype: Literal["bfloat16", "float16"]) -> None:
        self.dtype = dtype

    def gradients(self, gradients: Sequence[paddle.Tensor], factor: float) -> None:
        """See `Averaging`."""
        super().gradients([each for each in gradients if each.ndim < 2], factor)
        large = [each for each in gradients if each.ndim >= 2]
        scale = 1.0 / dist.world_size()
        if self.dtype == "float16":
            scale = _float16_scale(_square_of_all_ranks(gradients))
        low = [(each * scale).astype(self.dtype) for each in large]
        dist.sum_tensors(low)
        for gradient, total in zip(large, low):
            back = total.astype("float32") * (1.0 / (scale * dist.world_size()))
            paddle.assign(back, gradient)


def _float16_scale(square: float) -> float:
    """Power of two by which gradients fit float16, whatever the loss scale and objects of a step.

        |sum_r g_r| <= sum_r |g_r| <= sqrt(W * sum_r |g_r|^2)

    holds for every entry and for sums over some of the ranks too, so with this scale none of them
    overflows, and the largest lie as far above float16's smallest numbers as they can.

    Args: square: sum over ranks of the squared norms of their gradients.
    """
    bound = math.sqrt(dist.world_size() * square)
    if not math.isfinite(bound) or bound == 0.0:
        return 1.0  # not finite: neither will be what is sent, so no rank applies it
    return 2.0 ** max(-126, min(126, math.floor(math.log2(_SAFE_FLOAT16 / bound))))


def _square_of_all_ranks(gradients: Sequence[paddle.Tensor]) -> float:
    """Sum over ranks of the squared norm of their gradients.  Every rank calls it."""
    squares = [paddle.dot(each.flatten(), each.flatten()) for each in gradients]
    return dist.all_reduce_sum(paddle.stack(squares).sum().reshape([1])).item()


class _Feedback(Averaging):
    """Error feedback around what a subclass sends of large gradients.

    Attributes:
        rest: for each compressed gradient what this rank has not sent yet, [N, K] float32 with the
            gradient's first axis and all others, as its share of the mean loss's gradient: the sum
            over ranks is what the weights have not seen yet.
    """

    name: str  # of the arrays in a checkpoint

    def __init__(self, parameters: Mapping[str, paddle.Tensor], compressed: Sequence[bool]) -> None:
        """
        Args:
            parameters: by state-dict key, whose gradients `gradients` will get in this order.
            compressed: which of them have a part in this.
        """
        self._compressed = compressed
        chosen = {key: p for (key, p), yes in zip(parameters.items(), compressed) if yes}
        self.keys = list(chosen)
        self.rest = [paddle.zeros([p.shape[0], p.size // p.shape[0]]) for p in chosen.values()]

    def gradients(self, gradients: Sequence[paddle.Tensor], factor: float) -> None:
        """See `Averaging`.  All ranks look first whether those of all are finite: one that is not
        would stay in the rest, and spoil every later step."""
        assert len(gradients) == len(self._compressed), "a parameter has no gradient"
        if not math.isfinite(_square_of_all_ranks(gradients) * factor * factor):
            for gradient in gradients:
                gradient.scale_(math.nan)
            return
        chosen = list(zip(gradients, self._compressed))
        super().gradients([gradient for gradient, yes in chosen if not yes], factor)
        large = [gradient for gradient, yes in chosen if yes]
        for gradient, rest in zip(large, self.rest):
            rest.add_(gradient.reshape(rest.shape) * (factor / dist.world_size()))
        for gradient, mean in zip(large, self._exchange()):
            paddle.assign((mean / factor).reshape(gradient.shape), gradient)

    def _exchange(self) -> Iterator[paddle.Tensor]:
        """Sends some of each rest and takes it off; yields what all ranks sent of each, summed."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """`<name>/rest/<key>` -> [W, N, K]: W times the gradients in all, so use few ranks."""
        dist.barrier()  # ranks may be minutes apart, but a collective of gloo has 30 s:
        # one by one, too, because links are slow where this is used.
        gathered = [dist.all_gather(rest).numpy() for rest in self.rest]
        return {f"{self.name}/rest/{key}": each for key, each in zip(self.keys, gathered)}

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """As it was on the same number of ranks; on another, each gets an equal part of the sum.

        Of a gradient that was not compressed so (by a run that compressed none, or otherwise) it
        starts with nothing kept.  Returns, raises: see `Averaging`.
        """
        for key, rest in zip(self.keys, self.rest):
            saved_WNK = arrays.get(f"{self.name}/rest/{key}")
            if saved_WNK is None:
                continue
            if list(saved_WNK.shape[1:]) != list(rest.shape):
                raise CheckpointError(
                    f"the checkpoint holds what was kept of the gradient of {key} as a matrix "
                    f"{list(saved_WNK.shape[1:])}, the model has {list(rest.shape)}",
                    code="checkpoint_of_other_config",
                    fix="resume with the configuration the run was started with",
                )
            if len(saved_WNK) == dist.world_size():
                mine = saved_WNK[dist.rank()]
            else:
                mine = saved_WNK.sum(0) / dist.world_size()
            paddle.assign(paddle.to_tensor(mine.astype("float32")), rest)
        taken = {f"{self.name}/rest/{key}" for key in self.keys}
        return lost([each for each in arrays if "/rest/" in each and each not in taken])


class LowRank(_Feedback):
    """Sends each gradient, seen as a matrix [out, in * height * width], as a product of two thin
    ones (PowerSGD): one power iteration a step, which starts from the previous step's.

        M_r = gradient + rest             on rank r
        P = orthonormal(sum_r M_r Q)      [N, R], all-reduced
        Q = sum_r M_r^T P                 [K, R], all-reduced
        sum_r M_r is taken as P Q^T;      rest = M_r - P (M_r^T P)^T

    Every step is linear in M_r, so N ranks do what one would with the sum.
    Source: Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2.  Their rest is M_r - P Q^T,
    which has the same sum; ours leaves out what ranks differ in and all have sent.
    """

    name = "low_rank"

    def __init__(self, parameters: Mapping[str, paddle.Tensor], rank: int) -> None:
        """
        Args:
            rank: R; a gradient whose two factors would be larger than itself is sent as it is.
        """
        shapes = [(p.shape[0], p.size // max(1, p.shape[0])) for p in parameters.values()]
        smaller = [
            p.ndim > 1 and rank * (rows + columns) < rows * columns
            for p, (rows, columns) in zip(parameters.values(), shapes)
        ]
        super().__init__(parameters, smaller)
        draw = np.random.RandomState(0)  # the same on every rank
        self._q = [
            paddle.to_tensor(draw.standard_normal((rest.shape[1], rank)).astype("float32"))
            for rest in self.rest
        ]

    def _exchange(self) -> Iterator[paddle.Tensor]:
        products = [paddle.matmul(rest, q) for rest, q in zip(self.rest, self._q)]
        dist.sum_tensors(products)
        bases = [paddle.linalg.qr(product)[0] for product in products]
        own = [paddle.matmul(m, p, transpose_x=True) for m, p in zip(self.rest, bases)]
        self._q = [each.clone() for each in own]
        dist.sum_tensors(self._q)
        for rest, p, mine, q in zip(self.rest, bases, own, self._q):
            rest.subtract_(paddle.matmul(p, mine, transpose_y=True))
            yield paddle.matmul(p, q, transpose_y=True)

    def state(self) -> dict[str, np.ndarray]:
        """And `low_rank/q/<key>` -> [K, R], from which the next power iteration starts."""
        return super().state() | {
            f"low_rank/q/{key}": q.numpy() for key, q in zip(self.keys, self._q)
        }

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """See `_Feedback`; of another rank R it starts the power iteration anew."""
        warning = super().load(arrays)
        for key, q in zip(self.keys, self._q):
            saved = arrays.get(f"low_rank/q/{key}")
            if saved is not None and list(saved.shape) == list(q.shape):
                paddle.assign(paddle.to_tensor(saved), q)
        return warning


class TopK(_Feedback):
    """Sends the largest entries of each gradient plus rest, as position and value: 8 bytes each,
    to every other rank.

    Source: error feedback as in Stich et al. 2018, arXiv:1809.07599, algorithm 1; the share of
    each layer by itself as in Lin et al. 2018, arXiv:1712.01887 (DGC).
    """

    name = "topk"

    def __init__(self, parameters: Mapping[str, paddle.Tensor], fraction: float) -> None:
        """
        Args:
            fraction: of the entries of each gradient, at least one of each.
        """
        super().__init__(parameters, [each.ndim > 1 for each in parameters.values()])
        self.fraction = fraction

    def _exchange(self) -> Iterator[paddle.Tensor]:
        positions, values, start = [], [], 0
        for rest in self.rest:
            flat = rest.flatten()
            at = _largest(flat, math.ceil(self.fraction * flat.size))
            values.append(flat[at])
            positions.append((at + start).astype("int32"))
            paddle.assign(
                paddle.scatter(flat, at, paddle.zeros([at.size])).reshape(rest.shape), rest
            )
            start += flat.size
        message = paddle.concat([*positions, *(each.view("int32") for each in values)])
        count, total = message.size // 2, paddle.zeros([start])
        # Rank by rank, each without a position twice: the same order of sums on every rank.
        for sent in dist.all_gather(message):
            at, value = sent[:count].reshape([-1, 1]), sent[count:].view("float32")
            total = paddle.scatter_nd_add(total, at, value)
        yield from paddle.split(total, [rest.size for rest in self.rest])


def _largest(values_N: paddle.Tensor, count: int) -> paddle.Tensor:
    """Positions of the `count` entries of largest magnitude, in any order."""
    if dist.on_gpu():
        return paddle.topk(values_N.abs(), count, sorted=False)[1]
    # On a CPU Paddle's topk took five times as long.
    return paddle.to_tensor(np.argpartition(np.abs(values_N.numpy()), -count)[-count:])
