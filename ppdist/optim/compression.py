"""Gradient exchanges that send fewer bytes, or less often, than a mean in float32.

    LowPrecision               bfloat16 or float16
    PowerSGD, TopKSparsify     fewer still: lower rank, or only the largest entries
    LocalSGD                   ranks step by themselves between exchanges, for slow links

Beside them a `ShardedUpdater` keeps on each rank the optimizer state of the parameters it updates.

What PowerSGD and TopKSparsify do not send, each rank keeps and adds to its next gradient (error
feedback), so nothing is lost but delayed.  Biases and everything of normalisation layers (one axis)
is averaged in float32: it is little and what it says is precise.  LowPrecision, PowerSGD
and TopKSparsify were not run on a GPU.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import paddle

from ppdist.common.errors import CheckpointError
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import collectives, device, ranks, store
from ppdist.optim.exchange import DuringBackward, Exchange, lost, multiple_from

_SAFE_FLOAT16 = 32768.0  # the largest power of two below its maximum, 65504


class LowPrecision(Exchange):
    """Sends gradients in half the bytes: cast, sum, cast back.

    Every entry is rounded when cast, and again at each of the ranks that its sum passes:
    bfloat16 keeps 8 bits, float16 11 as long as entries are not far below the largest.
    """

    def __init__(self, dtype: Literal["bfloat16", "float16"]) -> None:
        self.dtype = dtype

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """See `Exchange`."""
        super().average([gradient for gradient in gradients if gradient.ndim < 2], factor)
        large = [gradient for gradient in gradients if gradient.ndim >= 2]
        scale = 1.0 / ranks.world_size()
        if self.dtype == "float16":
            scale = float16_scale(_square_of_all_ranks(gradients))
        low = [(gradient * scale).astype(self.dtype) for gradient in large]
        collectives.sum_tensors(low)
        for gradient, total in zip(large, low):
            back = total.astype("float32") * (1.0 / (scale * ranks.world_size()))
            paddle.assign(back, gradient)


def float16_scale(square: float) -> float:
    """Power of two by which gradients fit float16.

        |sum_r g_r| <= sum_r |g_r| <= sqrt(W * sum_r |g_r|^2)

    holds for every entry and for sums over some of the ranks too, so with this scale none of them
    overflows, and the largest lie as far above float16's smallest numbers as they can.

    Args: square: sum over ranks of the squared norms of their gradients.
    """
    bound = math.sqrt(ranks.world_size() * square)
    if not math.isfinite(bound) or bound == 0.0:
        return 1.0  # not finite: so are the messages, and no rank applies the step
    return 2.0 ** max(-126, min(126, math.floor(math.log2(_SAFE_FLOAT16 / bound))))


def _square_of_all_ranks(gradients: Sequence[paddle.Tensor]) -> float:
    """Sum over ranks of the squared norm of their gradients.  Collective."""
    squares = [paddle.dot(gradient.flatten(), gradient.flatten()) for gradient in gradients]
    return collectives.all_reduce_sum(paddle.stack(squares).sum().reshape([1])).item()


class _Feedback(Exchange):
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
            parameters: by state-dict key, whose gradients `average` will get in this order.
            compressed: which of them have a part in this.
        """
        self._compressed = compressed
        chosen = {key: p for (key, p), yes in zip(parameters.items(), compressed) if yes}
        self.keys = list(chosen)
        self.rest = [paddle.zeros([p.shape[0], p.size // p.shape[0]]) for p in chosen.values()]

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """See `Exchange`.

        All ranks look first whether those of all are finite: one that is not would stay in the
        rest, and spoil every later step.
        """
        assert len(gradients) == len(self._compressed), "a parameter has no gradient"
        multiple = factor()
        if not math.isfinite(_square_of_all_ranks(gradients) * multiple * multiple):
            for gradient in gradients:
                gradient.scale_(math.nan)
            return
        chosen = list(zip(gradients, self._compressed))
        super().average([gradient for gradient, yes in chosen if not yes], factor)
        large = [gradient for gradient, yes in chosen if yes]
        for gradient, rest in zip(large, self.rest):
            rest.add_(gradient.reshape(rest.shape) * (multiple / ranks.world_size()))
        for gradient, mean in zip(large, self._exchange()):
            paddle.assign((mean / multiple).reshape(gradient.shape), gradient)

    def _exchange(self) -> Iterator[paddle.Tensor]:
        """Sends some of each rest; yields the sum of what ranks sent."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """`<name>/rest/<key>` -> [W, N, K], W times the gradients in all."""
        store.barrier()  # ranks may be minutes apart, but a collective of gloo has 30 s:
        # one by one, too, because links are slow where this is used.
        gathered = [collectives.all_gather(rest).numpy() for rest in self.rest]
        return {f"{self.name}/rest/{key}": rest for key, rest in zip(self.keys, gathered)}

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Restores the rest; other numbers of ranks share its sum equally.

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
            if len(saved_WNK) == ranks.world_size():
                mine = saved_WNK[ranks.rank()]
            else:
                mine = saved_WNK.sum(0) / ranks.world_size()
            paddle.assign(paddle.to_tensor(mine.astype("float32")), rest)
        taken = {f"{self.name}/rest/{key}" for key in self.keys}
        return lost([entry for entry in arrays if "/rest/" in entry and entry not in taken])


class PowerSGD(_Feedback):
    """Sends each gradient as a product of two thin matrices.

    The gradient is seen as a matrix [out, in * height * width]; one power iteration a step starts
    from the previous step's.

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
        collectives.sum_tensors(products)
        bases = [paddle.linalg.qr(product)[0] for product in products]
        own = [paddle.matmul(m, p, transpose_x=True) for m, p in zip(self.rest, bases)]
        self._q = [q.clone() for q in own]
        collectives.sum_tensors(self._q)
        for rest, p, mine, q in zip(self.rest, bases, own, self._q):
            rest.subtract_(paddle.matmul(p, mine, transpose_y=True))
            yield paddle.matmul(p, q, transpose_y=True)

    def state(self) -> dict[str, np.ndarray]:
        """And `low_rank/q/<key>` -> [K, R], from which the next power iteration starts."""
        return super().state() | {
            f"low_rank/q/{key}": q.numpy() for key, q in zip(self.keys, self._q)
        }

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """See `_Feedback`; of another rank R it restarts the power iteration."""
        warning = super().load(arrays)
        for key, q in zip(self.keys, self._q):
            saved = arrays.get(f"low_rank/q/{key}")
            if saved is not None and list(saved.shape) == list(q.shape):
                paddle.assign(paddle.to_tensor(saved), q)
        return warning


class TopKSparsify(_Feedback):
    """Sends the largest entries of each gradient plus rest.

    As position and value, 8 bytes each, to every other rank.

    Source: error feedback as in Stich et al. 2018, arXiv:1809.07599, algorithm 1; the share of
    each layer by itself as in Lin et al. 2018, arXiv:1712.01887 (DGC).
    """

    name = "topk"

    def __init__(self, parameters: Mapping[str, paddle.Tensor], fraction: float) -> None:
        """
        Args:
            fraction: of the entries of each gradient, at least one of each.
        """
        super().__init__(parameters, [parameter.ndim > 1 for parameter in parameters.values()])
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
        message = paddle.concat([*positions, *(value.view("int32") for value in values)])
        count, total = message.size // 2, paddle.zeros([start])
        # Rank by rank, each without a position twice: the same order of sums on every rank.
        for sent in collectives.all_gather(message):
            at, value = sent[:count].reshape([-1, 1]), sent[count:].view("float32")
            total = paddle.scatter_nd_add(total, at, value)
        yield from paddle.split(total, [rest.size for rest in self.rest])


def _largest(values_N: paddle.Tensor, count: int) -> paddle.Tensor:
    """Positions of the `count` entries of largest magnitude, in any order."""
    if device.on_accelerator():
        return paddle.topk(values_N.abs(), count, sorted=False)[1]
    # On a CPU Paddle's topk took five times as long.
    return paddle.to_tensor(np.argpartition(np.abs(values_N.numpy()), -count)[-count:])


class LocalSGD(Exchange):
    """Ranks apply their own gradients, and average weights every few steps.

        w_r <- w_r - lr * update(g_r)           each step, on each rank r
        w_r <- mean over ranks of w             after steps every, 2 * every, ... and the last one

    and the moments of the optimizer like w, so that momentum does not remember one rank's images.
    A rank's g_r is divided by the mean normalizer of all ranks, not its own: the mean over ranks of
    g_r is the gradient of the mean loss, however unevenly the objects fall.  Whatever is linear in
    the gradient (SGD, momentum, Nesterov, coupled weight decay) therefore makes `every` = 1 the
    synchronous step itself; Adam divides by the root of a moment, and clipping looks at the norm of
    single ranks, so these are near it only.

    The mean needs weights + moments on the wire once in `every` steps (momentum: 2 / every of what
    averaging gradients sends; AdamW: 3 / every).  Every rank holds the same state after a
    synchronised step and at no other time.
    Source: Stich 2019, arXiv:1805.09767, algorithm 1; moments as in Lin et al. 2020,
    arXiv:1808.07217 (global momentum); to be local only late in training (their post-local SGD),
    resume with another `every`.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        optimizer: paddle.optimizer.Optimizer,
        every: int,
        last: int,
    ) -> None:
        """
        Args:
            parameters: what the optimizer trains, float32, in the same order on every rank.
            every: steps from one synchronisation to the next.
            last: the number of steps of the run, whose end is synchronised in any case.
        """
        self.every = every
        self._parameters = parameters
        self._optimizer = optimizer
        self._last = last

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """They stay this rank's own."""

    def norm_square(self, local: paddle.Tensor) -> paddle.Tensor:
        """The mean square of all ranks' norms.  Collective.

        Not finite if one is not, and the same everywhere: all ranks clip alike, so none has more
        say than another, and all apply their gradients or none does.  It exceeds the norm of the
        averaged gradient, by sqrt(ranks) where the ranks' gradients have nothing in common.
        """
        return collectives.all_reduce_sum(local) / ranks.world_size()

    def synchronised(self, step: int) -> bool:
        """Whether weights and moments are equal on all ranks after a step."""
        return (step + 1) % self.every == 0 or step + 1 == self._last

    @paddle.no_grad()
    def finish(self, step: int) -> bool:
        """Averages weights and moments if this step is to be synchronised.  Collective."""
        synchronised = self.synchronised(step)
        if synchronised:
            collectives.mean_tensors([*self._parameters, *_moments(self._optimizer)])
        return synchronised


def _moments(optimizer: paddle.optimizer.Optimizer) -> list[paddle.Tensor]:
    """Velocities or moments, in the same order on every rank.

    Powers of beta (Adam) count updates, which are the same on all ranks.
    """
    state = optimizer.state_dict()
    return [
        value
        for name, value in state.items()
        if isinstance(value, paddle.Tensor) and "_pow_acc" not in name
    ]


def build_exchange(
    config: DistributedConfig,
    parameters: dict[str, paddle.Tensor],
    optimizer: paddle.optimizer.Optimizer,
    steps: int,
) -> Exchange:
    """The gradient exchange of a configuration and a device.

    Args:
        parameters: what the optimizer trains, by state-dict key.
        steps: of the whole run.
    """
    if ranks.world_size() == 1:
        return DuringBackward()
    if config.sync_every is not None:
        return LocalSGD([*parameters.values()], optimizer, config.sync_every, steps)
    if config.gradient_dtype != "float32":
        return LowPrecision(config.gradient_dtype)
    if config.gradient_rank is not None:
        return PowerSGD(parameters, config.gradient_rank)
    if config.topk_fraction is not None:
        return TopKSparsify(parameters, config.topk_fraction)
    # gloo overlaps nothing with backward, so nothing is lost by coming after it.
    return DuringBackward() if device.on_accelerator() else Exchange()


def last_step(max_steps: int | None, config: DistributedConfig) -> int | None:
    """The step at which the run can stop.

    `train.max_steps`, or the next at which the ranks hold the same weights.
    """
    if max_steps is None or config.sync_every is None or ranks.world_size() == 1:
        return max_steps
    return multiple_from(max_steps, config.sync_every)
