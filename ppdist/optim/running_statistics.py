"""Running statistics of batch norm over the micro-batches and ranks of a step."""

import paddle
from paddle import Tensor, nn

from ppdist.distributed import collectives, paddle_api, ranks
from ppdist.distributed.sync_batch_norm import SyncBatchNorm2D
from ppdist.optim.flat_storage import FlatStorage


class RunningStatistics:
    """Running means and variances of a model's batch norms, updated once per step.

    Batch norm updates them in each micro-batch.  Here they get one update per step, by the mean of
    the statistics of its M micro-batches on all ranks:

        running <- rho * running + (1 - rho) / M * sum over micro-batches of statistic

    Attributes:
        spread: each micro-batch is spread over several ranks.
        meet: batch norms of all ranks communicate in the forward and backward passes.
    """

    def __init__(self, model: nn.Layer, spread: bool) -> None:
        """Collects the statistics of all batch norms that are not frozen.

        Args: spread: as above, if there are several ranks.
        """
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
        self._local_count = self._global_count = 0.0

    def begin_step(self) -> None:
        """Copies the statistics, for `undo`."""
        self._moved = 0.0
        if self._storage is not None:
            self._before = self._storage.gather().clone()

    def begin_pass(self, model: nn.Layer, real: bool) -> None:
        """Puts a model into the mode of a forward pass.

        A blank image must not enter running statistics.  Synchronised batch norms need all ranks in
        their collectives, so there a rank with a blank image takes part with weight 0.
        """
        training = real or self.spread
        if model.training != training:  # it walks through all layers, so not in each pass
            model.train() if training else model.eval()
        for layer in self._synced:
            layer.counts = real

    def end_pass(self, count: int) -> None:
        """Adds up the statistics of a micro-batch, one of `count` on this rank."""
        # With one micro-batch the layers have already applied the right update.
        if self._storage is not None and count > 1:
            self._moved = self._storage.gather() + self._moved
            self.undo()

    def end_passes(self, count: int) -> None:
        """Sets the statistics to the mean over this rank's micro-batches."""
        if isinstance(self._moved, Tensor):
            self._set(self._moved / count)

    def finite(self) -> Tensor | float:
        """Returns 1 if all statistics are finite, else 0; [] float32."""
        if self._storage is None:
            return 1.0
        return paddle.isfinite(self._storage.gather().sum()).astype("float32")

    def not_finite(self) -> list[str]:
        """Returns `running statistics` if some are not finite, for a message."""
        return [] if bool(self.finite()) else ["running statistics"]

    def undo(self) -> None:
        """Restores the statistics to those at the beginning of the step.

        Non-finite values would never recover, and a repeated step must not count twice.
        """
        if self._before is not None:
            self._set(self._before)

    def count(self, local: float, everywhere: float) -> None:
        """Counts the micro-batches of an applied step, on this rank and on all ranks."""
        self._local_count += local
        self._global_count += everywhere

    def average(self) -> None:
        """Averages statistics, weighted by micro-batches since the last time.  Collective.

        Without SyncBN each rank has updated them by its own micro-batches.  If no step was applied
        they are unchanged, and are not averaged, because a mean of equal values may round.
        """
        local_count, global_count = self._local_count, self._global_count
        self.forget()
        if self._storage is None or self.spread or ranks.world_size() == 1 or not global_count:
            return
        local_F = self._storage.gather()
        # Without the gaps, because the length of a message changes the order of sums over sockets.
        mean_F = paddle.gather(local_F, self._places)
        weight = local_count / global_count * ranks.world_size()
        if weight != 1.0:
            mean_F.scale_(weight)
        collectives.mean_tensors([mean_F])
        self._storage.scatter(paddle.assign(paddle.scatter(local_F, self._places, mean_F), local_F))

    def forget(self) -> None:
        """Resets the counts of micro-batches: all ranks hold the same statistics."""
        self._local_count = self._global_count = 0.0

    @paddle.no_grad()
    def _set(self, values_F: Tensor) -> None:
        """Replaces the values of all statistics."""
        assert self._storage is not None
        self._storage.scatter(paddle.assign(values_F, self._storage.gather()))
