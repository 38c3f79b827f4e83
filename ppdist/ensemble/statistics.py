"""Running statistics of batch norm for averaged weights.

The mean of two sets of weights computes other activations than either, so the mean of their running
statistics is that of neither.  They are made anew from training images, augmented as in the last
epoch of the training: a model is evaluated with statistics of such images otherwise, too.
Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import paddle
from paddle import nn

from ppdist.config import ExperimentConfig
from ppdist.data.loader import TrainLoader
from ppdist.data.sampler import TrainSampler, copies
from ppdist.data.types import Batch, DetectionSet, SampleKey
from ppdist.distributed import comm, heartbeat
from ppdist.distributed.comm import evaluate_on_all_ranks
from ppdist.engine.build import build_schedule_setup
from ppdist.engine.data import images_of_epoch
from ppdist.models.base import ImageModel

_NORMS = (nn.BatchNorm1D, nn.BatchNorm2D)


class LastEpoch:
    """Micro-batches of the last epoch of a training as one rank would make them; each is that of
    one rank here.

    Attributes:
        count: of micro-batches over all ranks.
        images: in them.
    """

    def __init__(self, config: ExperimentConfig, train_set: DetectionSet, images: int) -> None:
        """Every rank builds one at the same time: they share a cache.

        Args:
            config: of the training; a run whose length follows its number of ranks
                (`train.epochs_compensation: auto` without `train.total_batch`) is taken for one of
                as many as there are now.
            images: how many at most, to whole micro-batches.
        Raises: ConfigError: the batch of the training is not known (auto), or not to be had.
        """
        derived = build_schedule_setup(config, images_of_epoch(train_set, config.data.sampling))
        batch_size = derived.batch_size_per_card  # statistics depend on it
        self._sampler = TrainSampler(
            dataset_size=len(train_set.records),
            batch_size_per_card=batch_size,
            accumulate=1,
            rank=0,
            world=1,
            seed=config.seed,
            start_step=0,
            end_step=1,
            sizes=config.train.multi_scale or (config.model.image_size,),
            copies_N=copies(train_set, config.data.sampling, None),
        )
        augment = config.data.augment.with_epoch_scale(derived.phase_scale)
        epochs = math.ceil(derived.epochs * derived.epoch_scale - 1e-9)
        per_epoch = self._sampler.steps_per_epoch
        self._first = (epochs - 1) * per_epoch
        self.count = min(per_epoch, math.ceil(images / batch_size))
        self.images = min(self._sampler.epoch_size, self.count * batch_size)
        self._loader = TrainLoader(
            train_set,
            config.data.model_copy(update={"augment": augment}),
            self._sampler,
            seed=config.seed,
            epochs=epochs,
            ranks_on_host=comm.local_size(),
        )

    def share(self) -> list[int]:
        """Which of them are this rank's."""
        return list(range(comm.rank(), self.count, comm.world_size()))

    def batches(self) -> Iterator[Batch]:
        """This rank's, in the order of `share`; as often as it is called."""
        self._loader.plan = self._plan()
        return iter(self._loader)

    def _plan(self) -> "_Steps":
        return _Steps(self._sampler, [self._first + place for place in self.share()])


class _Steps:
    """The first micro-batches of some steps of a sampler."""

    def __init__(self, sampler: TrainSampler, steps: Sequence[int]) -> None:
        self._sampler, self._steps = sampler, steps

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for step in self._steps:
            yield self._sampler.micro_batches(step)[0]


def renew_statistics(
    model: ImageModel, epoch: LastEpoch, same: frozenset[str] = frozenset()
) -> None:
    """Makes running statistics anew; every rank calls it, and all get the same, bit for bit the
    same on any number of ranks.

        mean     = sum over micro-batches(images * mean of the batch) / images
        variance = likewise, of the variances within the batches, as training averages them

    Args:
        same: state-dict keys of what all members have alike; a layer of which this holds, together
            with the convolution beside it, keeps its statistics and computes with them (it was
            frozen in training).
    Raises: UserError, on every rank: an image cannot be read and data.bad_images is `error`.
        EvaluationFailed, on every rank: computing failed on some.
    """
    norms, kept = _settled(model, same)
    tensors = [tensor for layer in norms for tensor in (layer._mean, layer._variance)]
    if not tensors:
        return
    rows_K = evaluate_on_all_ranks(lambda: _measured(model, epoch, norms, kept)).value
    rows_K = comm.all_gather_rows(rows_K)
    rows_K = rows_K[np.argsort(rows_K[:, 0])].astype(np.float64)  # the order on one rank
    means = (rows_K[:, 1:2] * rows_K[:, 2:]).sum(axis=0) / rows_K[:, 1].sum()
    ends = np.cumsum([tensor.size for tensor in tensors])
    for tensor, values in zip(tensors, np.split(means.astype(np.float32), ends[:-1])):
        tensor.set_value(values.reshape(tensor.shape))


def _settled(model: ImageModel, same: frozenset[str]) -> tuple[list[nn.Layer], list[nn.Layer]]:
    """The layers whose statistics are to be made, and those that keep theirs."""
    keys = list(model.state_dict())
    norms: list[nn.Layer] = []
    kept: list[nn.Layer] = []
    for name, layer in model.named_sublayers():
        if isinstance(layer, _NORMS):
            block = f"{name.rpartition('.')[0] or name}."
            frozen = all(key in same for key in keys if key.startswith(block))
            (kept if frozen else norms).append(layer)
    return norms, kept


@paddle.no_grad()
def _measured(
    model: ImageModel, epoch: LastEpoch, norms: list[nn.Layer], kept: list[nn.Layer]
) -> np.ndarray:
    """Float32 rows of this rank's micro-batches: which, how many images, all means and variances
    one after the other."""
    momenta = [layer._momentum for layer in norms]
    model.train()
    for layer in model.sublayers():
        if layer in kept or isinstance(layer, nn.Dropout):
            layer.eval()
    rows = []
    try:
        for layer in norms:
            layer._momentum = 0.0  # what was before counts nothing
        for place, batch in zip(epoch.share(), epoch.batches()):
            heartbeat.alive()
            model(model.normalize(batch.images_B3HW))
            tensors = [tensor for layer in norms for tensor in (layer._mean, layer._variance)]
            flat = [tensor.numpy().ravel() for tensor in tensors]
            rows.append(np.concatenate([[place, len(batch.images_B3HW)], *flat]))
    finally:
        for layer, momentum in zip(norms, momenta):
            layer._momentum = momentum
        model.eval()
    width = 2 + sum(layer._mean.size + layer._variance.size for layer in norms)
    return np.array(rows, np.float32).reshape(-1, width)
