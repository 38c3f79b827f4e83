"""Local SGD: ranks step by themselves and meet only now and then, for slow links."""

from collections.abc import Sequence

import paddle

from ppdist import dist
from ppdist.optim.averaging import Averaging


class LocalSGD(Averaging):
    """Each rank applies its own gradient; every few steps all take the mean of their weights.

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

    def gradients(self, gradients: Sequence[paddle.Tensor], factor: float) -> None:
        """They stay this rank's own."""

    def norm(self, own: float) -> float:
        """The root of the mean square of all ranks' norms.  Every rank calls it.

        Not finite if one is not, and the same everywhere: all ranks clip alike, so none has more
        say than another, and all apply their gradients or none does.  It exceeds the norm of the
        averaged gradient, by sqrt(ranks) where the ranks' gradients have nothing in common.
        """
        squares = dist.all_reduce_sum(paddle.to_tensor([own * own], dtype="float32"))
        return (squares.item() / dist.world_size()) ** 0.5

    def synchronised(self, step: int) -> bool:
        """Whether weights and moments are the same on all ranks after a step (0-based)."""
        return (step + 1) % self.every == 0 or step + 1 == self._last

    @paddle.no_grad()
    def updated(self, step: int) -> None:
        """Averages weights and moments if this step is to be synchronised.  Every rank calls it."""
        if self.synchronised(step):
            dist.mean_tensors([*self._parameters, *_moments(self._optimizer)])


def _moments(optimizer: paddle.optimizer.Optimizer) -> list[paddle.Tensor]:
    """Velocities or moments, in the same order on every rank; none before the first update.

    Powers of beta (Adam) count updates, which are the same on all ranks.
    """
    state = optimizer.state_dict()
    return [
        value
        for name, value in state.items()
        if isinstance(value, paddle.Tensor) and "_pow_acc" not in name
    ]
