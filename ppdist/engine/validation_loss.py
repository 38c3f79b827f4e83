"""The training loss over a whole validation set, from the forward passes of its evaluation."""

from typing import Any

import paddle

from ppdist.data.loader import EvalLoader
from ppdist.data.sample import Batch, SampleKey
from ppdist.engine.agreement import agreed
from ppdist.losses import Loss


class ValidationLoss:
    """What the loss of one step would be whose batch is the whole set, over all ranks.

    The images are those of the evaluation, not augmented; the objects those that training would
    learn of them, without crowds.  An auxiliary head, which only training has, has no part in it.

    Attributes:
        sums: over this rank's batches since `begin`, not normalised; see `normalised`.
    """

    def __init__(self, loss: Loss, loader: EvalLoader) -> None:
        """
        Args:
            loss: that of training.
            loader: gives this rank's share of the set.
        """
        self._loss = loss
        self._loader = loader
        self._totals: paddle.Tensor | None = None
        self._counted = False
        self._step = 0
        self.sums: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """Before the first batch; every rank calls it.

        Args: step: optimizer steps done; the loss is that of the last one.
        """
        self._step, self.sums = max(0, step - 1), {}
        if not self._counted:  # once: the set, the size of its inputs and the anchors stay
            counts_W = agreed(self._counts, say=lambda counts: counts).said_W
            totals = [sum(each) for each in zip(*filter(None, counts_W))]
            if totals:
                self._totals = paddle.to_tensor(totals, dtype="float32")
            self._counted = True

    def _counts(self) -> list[float]:
        """What the loss counts in the targets of this rank's share; nothing, where it counts
        nothing or there is no image."""
        summed: paddle.Tensor | None = None
        for keys in self._loader.plan:
            size = keys[0].height, keys[0].width
            count = self._loss.counts(*self._loader.learnable(keys), size)
            if count is None:
                return []
            summed = count if summed is None else summed + count
        return [] if summed is None else [float(each) for each in summed.numpy()]

    @paddle.no_grad()
    def add(self, outputs: Any, batch: Batch) -> None:
        """A batch of the loader, and what the model said of it in eval mode."""
        height, width = batch.images_B3HW.shape[2:]
        indices = batch.image_index_B.numpy().tolist()
        assert min(indices) >= 0, "EvalSampler pads nothing"
        keys = [SampleKey(0, index, height, width) for index in indices]
        truth = self._loader.learnable(keys)
        found = self._loss(outputs, *truth, self._step, self._totals)
        terms = {"normalizer": found.normalizer, "loss": found.total, **found.parts}
        for name, value in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)


def normalised(sums_W: list[dict[str, float]]) -> dict[str, float]:
    """`val_loss` and `val_loss_<part>` from the sums of each rank, empty where it has no images."""
    whole: dict[str, float] = {}
    for sums in sums_W:
        for name, value in sums.items():
            whole[name] = whole.get(name, 0.0) + value
    divisor = max(1.0, whole.pop("normalizer"))
    # A part that is no loss (train_top1 of a classifier) is measured as a metric anyway.
    losses = {name: value / divisor for name, value in whole.items() if name.startswith("loss")}
    return {f"val_{name}": value for name, value in losses.items()}
