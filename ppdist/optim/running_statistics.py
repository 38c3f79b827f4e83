"""Running statistics of batch norm over the micro-batches and ranks of a step."""

import paddle
from paddle import Tensor, nn

from ppdist.distributed import collectives, paddle_api, ranks
from ppdist.distributed.sync_batch_norm import SyncBatchNorm2D
from ppdist.optim.flat_storage import FlatStorage


class RunningStatistics:
    """Means and variances that a model's batch norms have seen, as the step moves them.

    Batch norm moves them in each micro-batch.  Here they make one update a step, by the mean over
    its M micro-batches, of whatever ranks, of what each was normalised by:

        running <- rho * running + (1 - rho) / M * sum over micro-batches of statistic

    Attributes:
        spread: each micro-batch is spread over several ranks.
        meet: batch norm of all ranks meets in forward and backward.
    """

    def __init__(self, model: nn.Layer, spread: bool) -> None:
        """Args: spread: as above, if there are several."""
        norms = (nn.BatchNorm1D, nn.BatchNorm2D)
        layers = [
            layer
            for layer in model.sublayers()
            if isinstance(layer, norms) and not paddle_api.normalises_by_running(layer)  # they stay
        ]
        tensors = [tensor for layer in layers for tensor in paddle_api.running_statistics(layer)]
        self._storage = FlatStorage(tensors) if tensors else None
        if self._storage is not None:
            self._places = self._storage.places()
        self._synced = [layer for layer in model.sublayers() if isinstance(layer, SyncBatchNorm2D)]
        self.spread = spread and ranks.world_size() > 1
        self.meet = bool(tensors) and self.spread
        self._before: Tensor | None = None
        self._moved: Tensor | float = 0.0
        # Micro-batches since the ranks held the same statistics: this rank's, all ranks'.
        self._counted = self._counted_everywhere = 0.0

    def begin_step(self) -> None:
        """Keeps them as they are, for `undo`."""
        self._moved = 0.0
        if self._storage is not None:
            self._before = self._storage.gather().clone()

    def begin_pass(self, model: nn.Layer, real: bool) -> None:
        """Puts a model into the mode of a forward pass.

        A blank image must not enter running statistics.  Synchronised ones need all ranks in their
        collectives, where such a rank then counts for nothing.
        """
        model.train() if real or self.spread else model.eval()
        for layer in self._synced:
            layer.counts = real

    def end_pass(self, count: int) -> None:
        """Takes what a micro-batch has moved, of `count` of this rank."""
        if self._storage is not None and count > 1:
            self._moved = self._storage.gather() + self._moved
            self.undo()

    def end_passes(self, count: int) -> None:
        """Moves them by the mean over this rank's micro-batches."""
        if isinstance(self._moved, Tensor):
            self._set(self._moved / count)

    def finite(self) -> Tensor | float:
        """1 if all are finite, else 0; [] float32."""
        if self._storage is None:
            return 1.0
        return paddle.isfinite(self._storage.gather().sum()).astype("float32")

    def not_finite(self) -> list[str]:
        """`running statistics` if some are not finite, to be named in a message."""
        return [] if bool(self.finite()) else ["running statistics"]

    def undo(self) -> None:
        """Puts them back to where the step began.

        Non-finite ones would stay so forever, and a step made again must not move them twice.
        """
        if self._before is not None:
            self._set(self._before)

    def count(self, local: float, everywhere: float) -> None:
        """Counts the micro-batches of an applied step, of this rank and of all."""
        self._counted += local
        self._counted_everywhere += everywhere

    def average(self) -> None:
        """Averages them over ranks, by their micro-batches since the last time.  Collective.

        Without SyncBN each rank has moved them by its own.  If no step was applied they are as they
        were, and a mean of equals may round.
        """
        counted, everywhere = self._counted, self._counted_everywhere
        self.forget()
        if self._storage is None or self.spread or ranks.world_size() == 1 or not everywhere:
            return
        local_F = self._storage.gather()
        # Without the gaps: what else is in a message changes the order of sums over sockets.
        mean_F = paddle.gather(local_F, self._places)
        weight = counted / everywhere * ranks.world_size()
        if weight != 1.0:
            mean_F.scale_(weight)
        collectives.mean_tensors([mean_F])
        self._storage.scatter(paddle.assign(paddle.scatter(local_F, self._places, mean_F), local_F))

    def forget(self) -> None:
        """Forgets the micro-batches counted: all ranks hold the same statistics."""
        self._counted = self._counted_everywhere = 0.0

    @paddle.no_grad()
    def _set(self, values_F: Tensor) -> None:
        assert self._storage is not None
        self._storage.scatter(paddle.assign(values_F, self._storage.gather()))
