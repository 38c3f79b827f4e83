"""Gradient exchanges that send fewer bytes, or less often, than a mean in float32.

    LowPrecision               bfloat16 or float16
    PowerSGD, TopKSparsify     fewer still: lower rank, or only the largest entries
    LocalSGD                   ranks make local steps between exchanges, for slow links

A `ShardedUpdater` (sharded_updater.py) keeps on each rank only a share of the optimizer state.

With PowerSGD and TopKSparsify, each rank keeps the part that it does not send and adds it to its
next gradient (error feedback), so that it is delayed, not lost.  Biases and the parameters of
normalisation layers (one axis) are averaged in float32: they are small, and sensitive to errors.
LowPrecision, PowerSGD and TopKSparsify were not run on a GPU.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import paddle

from ppdist.common.errors import CheckpointError
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import collectives, device, ranks, store
from ppdist.optim.exchange import DuringBackward, Exchange, multiple_from, warn_dropped

_SAFE_FLOAT16 = 32768.0  # the largest power of two below its maximum, 65504


class LowPrecision(Exchange):
    """Exchange of gradients in half the bytes: cast, sum, cast back.

    Every entry is rounded when cast, and again on each rank that its sum passes: bfloat16 keeps 8
    bits, float16 11 bits unless an entry is far below the largest.
    """

    def __init__(self, dtype: Literal["bfloat16", "float16"]) -> None:
        self.dtype = dtype

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """Averages gradients in low precision, those with one axis in float32; see `Exchange`."""
        super().average([gradient for gradient in gradients if gradient.ndim < 2], factor)
        large = [gradient for gradient in gradients if gradient.ndim >= 2]
        scale = 1.0 / ranks.world_size()
        if self.dtype == "float16":
            scale = float16_scale(_global_square(gradients))
        low = [(gradient * scale).astype(self.dtype) for gradient in large]
        collectives.sum_tensors(low)
        for gradient, total in zip(large, low):
            average = total.astype("float32") * (1.0 / (scale * ranks.world_size()))
            paddle.assign(average, gradient)


def float16_scale(square: float) -> float:
    """Computes the power of two that scales gradients into the range of float16.

        |sum_r g_r| <= sum_r |g_r| <= sqrt(W * sum_r |g_r|^2)

    holds for every entry, and for sums over some of the ranks, too.  So with this scale no sum
    overflows, and the largest entries lie as far above float16's smallest numbers as possible.

    Args: square: sum over ranks of the squared norms of their gradients.
    """
    bound = math.sqrt(ranks.world_size() * square)
    if not math.isfinite(bound) or bound == 0.0:
        return 1.0  # if not finite, the messages are not either, and no rank applies the step
    return 2.0 ** max(-126, min(126, math.floor(math.log2(_SAFE_FLOAT16 / bound))))


def _global_square(gradients: Sequence[paddle.Tensor]) -> float:
    """Sums the squared norms of the gradients over ranks.  Collective."""
    squares = [paddle.dot(gradient.flatten(), gradient.flatten()) for gradient in gradients]
    return collectives.all_reduce_sum(paddle.stack(squares).sum().reshape([1])).item()


class _Feedback(Exchange):
    """Error feedback around the part of large gradients that a subclass sends.

    Attributes:
        rest: for each compressed gradient, the part that this rank has not sent yet, [N, K]
            float32: the gradient's first axis, and all other axes.  It is scaled as this rank's
            share of the mean loss's gradient, so the sum over ranks is what the weights have not
            received yet.
    """

    name: str  # prefix of the arrays in a checkpoint

    def __init__(self, parameters: Mapping[str, paddle.Tensor], compressed: Sequence[bool]) -> None:
        """Starts with empty rests.

        Args:
            parameters: by state-dict key; `average` will get their gradients in this order.
            compressed: True for each parameter whose gradient is compressed.
        """
        self._compressed = compressed
        compressed_parameters = {
            key: p
            for (key, p), is_compressed in zip(parameters.items(), compressed)
            if is_compressed
        }
        self.keys = list(compressed_parameters)
        self.rest = [
            paddle.zeros([p.shape[0], p.size // p.shape[0]]) for p in compressed_parameters.values()
        ]

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """Adds the rests, sends a part, and replaces gradients by the mean of what ranks sent.

        All ranks first test whether all gradients are finite: a non-finite value would stay in the
        rest and spoil every later step.
        """
        assert len(gradients) == len(self._compressed), "a parameter has no gradient"
        multiple = factor()
        if not math.isfinite(_global_square(gradients) * multiple * multiple):
            # No rank may apply this step; nan in all gradients makes their norm nan, too.
            for gradient in gradients:
                gradient.scale_(math.nan)
            return
        pairs = list(zip(gradients, self._compressed))
        super().average(
            [gradient for gradient, is_compressed in pairs if not is_compressed], factor
        )
        large = [gradient for gradient, is_compressed in pairs if is_compressed]
        # In units of the mean loss: the factor changes from step to step, the rest outlives a step.
        for gradient, rest in zip(large, self.rest):
            rest.add_(gradient.reshape(rest.shape) * (multiple / ranks.world_size()))
        for gradient, mean in zip(large, self._exchange()):
            paddle.assign((mean / multiple).reshape(gradient.shape), gradient)

    def _exchange(self) -> Iterator[paddle.Tensor]:
        """Sends a part of each rest; yields the sum over ranks of what was sent."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Returns `<name>/rest/<key>` -> [W, N, K], W times the bytes of the gradients."""
        # Ranks may be minutes apart, but a collective of gloo has 30 s.  For the same reason the
        # rests are gathered one by one: links are slow where this is used.
        store.barrier()
        gathered = [collectives.all_gather(rest).numpy() for rest in self.rest]
        return {f"{self.name}/rest/{key}": rest for key, rest in zip(self.keys, gathered)}

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Restores the rest; if the number of ranks has changed, they share its sum equally.

        For a gradient that was not compressed in this way, the rest is 0.  Returns, raises: see
        `Exchange.load`.
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
                local_rest = saved_WNK[ranks.rank()]
            else:
                local_rest = saved_WNK.sum(0) / ranks.world_size()
            paddle.assign(paddle.to_tensor(local_rest.astype("float32")), rest)
        entries = {f"{self.name}/rest/{key}" for key in self.keys}
        return warn_dropped(
            [entry for entry in arrays if "/rest/" in entry and entry not in entries]
        )


class PowerSGD(_Feedback):
    """Exchange of each gradient as a product of two thin matrices.

    The gradient counts as a matrix [out, in * height * width]; one power iteration in a step starts
    from the result of the previous step.

        M_r = gradient + rest             on rank r
        P = orthonormal(sum_r M_r Q)      [N, R], all-reduced
        Q = sum_r M_r^T P                 [K, R], all-reduced
        sum_r M_r is taken as P Q^T;      rest = M_r - P (M_r^T P)^T

    Every operation is linear in M_r, so N ranks compute what one rank would with the sum.
    Source: Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2.  Their rest is M_r - P Q^T,
    which has the same sum over ranks; ours does not keep differences between ranks that have been
    sent.
    """

    name = "low_rank"

    def __init__(self, parameters: Mapping[str, paddle.Tensor], rank: int) -> None:
        """Draws the first factors.

        Args:
            rank: R; a gradient that is smaller than its two factors is sent as it is.
        """
        shapes = [(p.shape[0], p.size // max(1, p.shape[0])) for p in parameters.values()]
        is_worth_it = [
            p.ndim > 1 and rank * (rows + columns) < rows * columns
            for p, (rows, columns) in zip(parameters.values(), shapes)
        ]
        super().__init__(parameters, is_worth_it)
        draw = np.random.RandomState(0)  # the same on every rank
        self._q = [
            paddle.to_tensor(draw.standard_normal((rest.shape[1], rank)).astype("float32"))
            for rest in self.rest
        ]

    def _exchange(self) -> Iterator[paddle.Tensor]:
        """Sends the two factors of each rest; see the class."""
        products = [paddle.matmul(rest, q) for rest, q in zip(self.rest, self._q)]
        collectives.sum_tensors(products)
        # All ranks orthonormalise the same sum, so they get the same P without a message.
        bases = [paddle.linalg.qr(product)[0] for product in products]
        local_factors = [paddle.matmul(m, p, transpose_x=True) for m, p in zip(self.rest, bases)]
        self._q = [q.clone() for q in local_factors]
        collectives.sum_tensors(self._q)
        for rest, p, local_factor, q in zip(self.rest, bases, local_factors, self._q):
            rest.subtract_(paddle.matmul(p, local_factor, transpose_y=True))
            yield paddle.matmul(p, q, transpose_y=True)

    def state(self) -> dict[str, np.ndarray]:
        """Returns the rests, and `low_rank/q/<key>` -> [K, R], where the next iteration starts."""
        # Q is the same on all ranks, so one copy is enough.
        return super().state() | {
            f"low_rank/q/{key}": q.numpy() for key, q in zip(self.keys, self._q)
        }

    def load(self, arrays: dict[str, np.ndarray]) -> str:
        """Restores the rests; with another rank R it restarts the power iteration."""
        warning = super().load(arrays)
        for key, q in zip(self.keys, self._q):
            saved = arrays.get(f"low_rank/q/{key}")
            if saved is not None and list(saved.shape) == list(q.shape):
                paddle.assign(paddle.to_tensor(saved), q)
        return warning


class TopKSparsify(_Feedback):
    """Exchange of the largest entries of each gradient plus rest.

    They are sent as position and value, 8 bytes each, to every other rank.

    Source: error feedback as in Stich et al. 2018, arXiv:1809.07599, algorithm 1; the same fraction
    of every layer as in Lin et al. 2018, arXiv:1712.01887 (DGC).
    """

    name = "topk"

    def __init__(self, parameters: Mapping[str, paddle.Tensor], fraction: float) -> None:
        """Selects the gradients that are compressed.

        Args:
            fraction: share of the entries of each gradient that is sent, at least one entry.
        """
        super().__init__(parameters, [parameter.ndim > 1 for parameter in parameters.values()])
        self.fraction = fraction

    def _exchange(self) -> Iterator[paddle.Tensor]:
        """Sends the largest entries of each rest; see the class."""
        positions, values, start = [], [], 0
        for rest in self.rest:
            flat = rest.flatten()
            positions_K = _largest(flat, math.ceil(self.fraction * flat.size))
            values.append(flat[positions_K])
            positions.append((positions_K + start).astype("int32"))
            paddle.assign(
                paddle.scatter(flat, positions_K, paddle.zeros([positions_K.size])).reshape(
                    rest.shape
                ),
                rest,
            )
            start += flat.size
        # One message: positions, then values, whose bits travel as integers.
        message = paddle.concat([*positions, *(value.view("int32") for value in values)])
        count, total = message.size // 2, paddle.zeros([start])
        # Rank by rank, because a rank has no position twice: sums have the same order on every
        # rank.
        for message_of_rank in collectives.all_gather(message):
            positions_K1 = message_of_rank[:count].reshape([-1, 1])
            value_K = message_of_rank[count:].view("float32")
            total = paddle.scatter_nd_add(total, positions_K1, value_K)
        yield from paddle.split(total, [rest.size for rest in self.rest])


def _largest(values_N: paddle.Tensor, count: int) -> paddle.Tensor:
    """Returns the positions of the `count` entries of largest magnitude, in any order."""
    if device.on_accelerator():
        return paddle.topk(values_N.abs(), count, sorted=False)[1]
    # On a CPU Paddle's topk took five times as long.
    return paddle.to_tensor(np.argpartition(np.abs(values_N.numpy()), -count)[-count:])


class LocalSGD(Exchange):
    """Local steps: ranks apply their own gradients, and average weights every few steps.

        w_r <- w_r - lr * update(g_r)           each step, on each rank r
        w_r <- mean over ranks of w             after steps every, 2 * every, ... and the last one

    The moments of the optimizer are averaged like w, so that momentum does not depend on one rank's
    images.  A rank's g_r is divided by the mean normalizer of all ranks, not its own: so the mean
    over ranks of g_r is the gradient of the mean loss, however unevenly the objects are
    distributed. For updates that are linear in the gradient (SGD, momentum, Nesterov, coupled
    weight decay), `every` = 1 therefore gives exactly the synchronous step; Adam divides by the
    root of a moment, and clipping uses the norms of single ranks, so with these it is only close to
    it.

    Once in `every` steps weights and moments are sent (momentum: 2 / every of the bytes of
    averaging gradients; AdamW: 3 / every).  Ranks hold the same state only after a synchronised
    step.
    Source: Stich 2019, arXiv:1805.09767, algorithm 1; moments as in Lin et al. 2020,
    arXiv:1808.07217 (global momentum).  For their post-local SGD, local only late in training,
    resume with another `every`.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        optimizer: paddle.optimizer.Optimizer,
        every: int,
        last: int,
    ) -> None:
        """Sets the steps that are synchronised.

        Args:
            parameters: the trained parameters, float32, in the same order on every rank.
            every: steps from one synchronisation to the next.
            last: number of steps in the run; the last step is always synchronised.
        """
        self.every = every
        self._parameters = parameters
        self._optimizer = optimizer
        self._last = last

    def average(self, gradients: Sequence[paddle.Tensor], factor: Callable[[], float]) -> None:
        """Leaves each rank its own gradients."""

    def norm_square(self, local: paddle.Tensor) -> paddle.Tensor:
        """Averages the squared norms of all ranks.  Collective.

        The result is the same on all ranks, and not finite if one norm is not: all ranks clip by
        the same norm, so that they have equal weight, and all apply their gradients or none
        does.  It exceeds the norm of the averaged gradient, by sqrt(ranks) if the gradients are
        uncorrelated.
        """
        return collectives.all_reduce_sum(local) / ranks.world_size()

    def synchronised(self, step: int) -> bool:
        """Returns True if weights and moments are equal on all ranks after a step."""
        return (step + 1) % self.every == 0 or step + 1 == self._last

    @paddle.no_grad()
    def finish(self, step: int) -> bool:
        """Averages weights and moments if this step is synchronised.  Collective."""
        synchronised = self.synchronised(step)
        if synchronised:
            collectives.mean_tensors([*self._parameters, *_moments(self._optimizer)])
        return synchronised


def _moments(optimizer: paddle.optimizer.Optimizer) -> list[paddle.Tensor]:
    """Returns velocities or moments, in the same order on every rank.

    Powers of beta (Adam) are left out: they count updates, which are the same on all ranks.
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
    """Builds the gradient exchange for a configuration and a device.

    Args:
        parameters: the trained parameters, by state-dict key.
        steps: number of steps in the run.
    """
    if ranks.world_size() == 1:
        return DuringBackward()
    if config.local_sgd_steps is not None:
        return LocalSGD([*parameters.values()], optimizer, config.local_sgd_steps, steps)
    if config.gradient_dtype != "float32":
        return LowPrecision(config.gradient_dtype)
    if config.gradient_rank is not None:
        return PowerSGD(parameters, config.gradient_rank)
    if config.topk_fraction is not None:
        return TopKSparsify(parameters, config.topk_fraction)
    # gloo cannot overlap messages with backward, so an exchange after it costs no time.
    return DuringBackward() if device.on_accelerator() else Exchange()


def last_step(max_steps: int | None, config: DistributedConfig) -> int | None:
    """Returns the step at which the run may stop.

    This is `train.max_steps`, or the next step at which the ranks hold the same weights.
    """
    if max_steps is None or config.local_sgd_steps is None or ranks.world_size() == 1:
        return max_steps
    return multiple_from(max_steps, config.local_sgd_steps)
