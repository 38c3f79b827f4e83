"""Averages the weights of several checkpoints and recomputes their batch-norm statistics.

Sources: Izmailov et al. 2018, arXiv:1803.05407 (SWA); Wortsman et al. 2022, arXiv:2203.05482 (model
soups).

The mean of two sets of weights computes different activations than either set, so the mean of
their running statistics does not fit it.  The statistics are recomputed from training images,
augmented as in the last epoch of training, because those of ordinary training also come from such
images (SWA, section 3.2).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from ppdist.common.errors import ConfigError, WeightsError
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.train import MicroBatches
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler, expected_copies
from ppdist.data.types import Batch, DetectionSet, SampleKey
from ppdist.distributed import comm, heartbeat, paddle_api
from ppdist.distributed.comm import evaluate_on_all_ranks
from ppdist.engine.build import build_schedule_setup
from ppdist.engine.data import images_of_epoch
from ppdist.engine.preflight import fetch_on_all_ranks
from ppdist.models.base import ImageModel, Targets
from ppdist.models.model_card import require_classes_of
from ppdist.models.weights import arrays_of, checkpoint_of, load_all_weights

_NORMS = (nn.BatchNorm1D, nn.BatchNorm2D)


def average(
    config: ExperimentConfig,
    model: ImageModel,
    paths: Sequence[Path],
    *,
    train_set: DetectionSet,
    images: int,
) -> int:
    """Loads averaged weights into the model, equal on every rank.

    Collective.

    Args: images: maximum number of training images for the batch-norm statistics.
    Returns: the number of images used for the statistics.
    Raises: WeightsError: a file is damaged or belongs to another model.  ConfigError: the training
        batch size is not known.  See `renew_statistics` for others.
    """
    epoch = LastEpoch(config, train_set, images)
    mean, same = average_weights(model, paths, train_set.class_names)
    set_weights(model, mean)
    renew_statistics(model, epoch, same)
    return epoch.images


def require_different(paths: Sequence[Path]) -> None:
    """Requires at least two distinct files, with links resolved.

    Raises: ConfigError: there are fewer than two files, or a file is repeated.
    """
    if len(paths) < 2:
        raise ConfigError(
            f"{len(paths)} given, expected two or more to average",
            code="weights_too_few",
            where="--weights",
        )
    first_path_of: dict[Path, Path] = {}
    for path in paths:
        earlier = first_path_of.setdefault(checkpoint_of(path).resolve(), path)
        if earlier is not path:
            raise ConfigError(
                f"{path} is the same as {earlier}",
                code="weights_repeated",
                where="--weights",
                fix="leave one out",
            )


def average_weights(
    model: ImageModel, paths: Sequence[Path], class_names: Sequence[str] = ()
) -> tuple[dict[str, np.ndarray], frozenset[str]]:
    """Averages the entries of checkpoints, in the dtypes of the first.  Collective.

    Entries that are learned or counted (parameters, running statistics) are averaged; constants
    (anchors) have to be the same in all checkpoints.  The average of equal numbers is exactly that
    number.

    Args: class_names: see `read_weights`.
    Returns: all entries, and the keys of the entries that are equal in all checkpoints.
    Raises: WeightsError: the constants of a checkpoint differ from those of the first.
    """
    first = read_weights(model, paths[0], class_names)
    averaged = {key for key, _ in model.named_parameters()}  # Paddle includes running statistics
    # In float64 the average of equal numbers is exactly that number.
    sums = {key: value.astype(np.float64) for key, value in first.items() if key in averaged}
    all_differing: set[str] = set()
    for path in paths[1:]:
        arrays = read_weights(model, path, class_names)
        differing = {key for key, value in arrays.items() if not np.array_equal(value, first[key])}
        for key in sorted(differing - set(sums)):
            raise WeightsError(
                f"{key} differs from that of {paths[0]} and cannot be averaged",
                code="weights_not_alike",
                where=str(path),
                fix=(
                    "give checkpoints of one run, or of runs that started from the same weights "
                    "(YOLOv5: with the same model.anchors)"
                ),
            )
        sums = {key: total + arrays[key] for key, total in sums.items()}
        all_differing |= differing
    means = {key: total / len(paths) for key, total in sums.items()}
    mean = {key: means.get(key, value).astype(value.dtype) for key, value in first.items()}
    return mean, frozenset(first) - all_differing


def read_weights(
    model: ImageModel, path: Path, class_names: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Reads all entries of a weight file or checkpoint into the model, and returns them.

    Collective.

    Args: class_names: names of the model's classes 0, 1, ...; () takes those in the file.
    Raises: WeightsError, on every rank: the file is missing, damaged, or of another model.
        ConfigError `classes_differ`: the classes differ.
    """

    def load() -> None:
        fix = "leave it out, or give data with the classes that the weights were trained on"
        names = require_classes_of(path, class_names, "the training set", fix)
        load_all_weights(model, path, names)

    fetch_on_all_ranks(path)
    comm.run_on_all_ranks(load)
    return arrays_of(model)


def set_weights(model: ImageModel, arrays: Mapping[str, np.ndarray]) -> None:
    """Loads the entries that `arrays_of` returned for an identical model into a model."""
    for key, value in model.state_dict().items():
        value.set_value(arrays[key])


# Running statistics of batch norm


class LastEpoch:
    """The micro-batches of the last epoch of training, as a single rank forms them.

    They are distributed over the ranks, each a whole micro-batch of one rank.

    Attributes:
        count: number of micro-batches over all ranks.
        images: number of images in them.
    """

    def __init__(self, config: ExperimentConfig, train_set: DetectionSet, images: int) -> None:
        """Plans the epoch.  Collective, because the ranks share a cache.

        Args:
            config: configuration of the training run; if the run's length depends on its number of
                ranks (`train.epochs_compensation: auto` without `train.total_batch`), the current
                number of ranks is assumed.
            images: maximum number of images, rounded up to whole micro-batches.
        Raises: ConfigError: the training batch size is not known (auto), or not possible.
        """
        schedule = build_schedule_setup(config, images_of_epoch(train_set, config.data.sampling))
        batch_size = schedule.batch_size_per_card  # statistics depend on it
        self._sampler = TrainSampler(
            dataset_size=len(train_set.records),
            batches=MicroBatches(batch_size, batch_size, spread=False),
            rank=0,
            world=1,
            seed=config.seed,
            start_step=0,
            end_step=1,
            sizes=config.train.multi_scale or (config.model.image_size,),
            copies_N=expected_copies(train_set, config.data.sampling, None),
        )
        augment = config.data.augment.with_epoch_scale(schedule.phase_scale)
        epochs = math.ceil(schedule.epochs * schedule.epoch_scale - 1e-9)
        per_epoch = self._sampler.steps_per_epoch
        # The sampler counts steps over all epochs, and augmentation depends on the epoch.
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
        """Returns the indices of this rank's micro-batches."""
        return list(range(comm.rank(), self.count, comm.world_size()))

    def batches(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches in the order of `share`; may be called repeatedly."""
        self._loader.plan = self.plan()
        return iter(self._loader)

    def plan(self) -> list[list[SampleKey]]:
        """Returns the samples of this rank's micro-batches."""
        steps = [self._first + index for index in self.share()]
        return [self._sampler.micro_batches(step)[0] for step in steps]


def renew_statistics(
    model: ImageModel, epoch: LastEpoch, same: frozenset[str] = frozenset()
) -> None:
    """Recomputes running statistics, bit for bit equal with any number of ranks.

        mean     = sum over micro-batches(images * mean of the batch) / images
        variance = likewise, from the variances within the batches, as training averages them

    Collective.

    Args:
        same: state-dict keys whose values are equal in all members.  A layer whose entries are all
            among them, with those of the convolution beside it, was frozen in training: it keeps
            its statistics and computes with them.
    Raises: UserError, on every rank: an image cannot be read and data.bad_images is `error`.
        EvaluationFailed, on every rank: the computation failed on a rank.
    """
    norms, frozen = _split_batch_norms(model, same)
    tensors = [tensor for layer in norms for tensor in paddle_api.running_statistics(layer)]
    if not tensors:
        return
    rows_K = evaluate_on_all_ranks(lambda: _measure_statistics(model, epoch, norms, frozen)).value
    rows_K = comm.all_gather_rows(rows_K)
    rows_K = rows_K[np.argsort(rows_K[:, 0])].astype(np.float64)  # the order on one rank
    means = (rows_K[:, 1:2] * rows_K[:, 2:]).sum(axis=0) / rows_K[:, 1].sum()
    ends = np.cumsum([tensor.size for tensor in tensors])
    for tensor, values in zip(tensors, np.split(means.astype(np.float32), ends[:-1])):
        tensor.set_value(values.reshape(tensor.shape))


def _split_batch_norms(
    model: ImageModel, same: frozenset[str]
) -> tuple[list[nn.Layer], list[nn.Layer]]:
    """Returns the batch-norm layers to be recomputed, and those that keep their statistics."""
    keys = list(model.state_dict())
    norms: list[nn.Layer] = []
    frozen_norms: list[nn.Layer] = []
    for name, layer in model.named_sublayers():
        if isinstance(layer, _NORMS):
            block = f"{name.rpartition('.')[0] or name}."
            is_frozen = all(key in same for key in keys if key.startswith(block))
            (frozen_norms if is_frozen else norms).append(layer)
    return norms, frozen_norms


@paddle.no_grad()
def _measure_statistics(
    model: ImageModel, epoch: LastEpoch, norms: list[nn.Layer], frozen: list[nn.Layer]
) -> np.ndarray:
    """Measures the batch-norm statistics of this rank's micro-batches, as float32 rows.

    Each row: index of the micro-batch, number of images, then all means and variances.
    """
    # The layers compute the statistics; with momentum 0 they hold those of the last batch.
    momenta = [paddle_api.momentum(layer) for layer in norms]
    model.train()
    for layer in model.sublayers():
        # Dropout would make the statistics random, and dependent on the number of ranks.
        if layer in frozen or isinstance(layer, nn.Dropout):
            layer.eval()
    rows = []
    try:
        for layer in norms:
            paddle_api.set_momentum(layer, 0.0)  # each batch's statistics replace the previous ones
        for index, batch in zip(epoch.share(), epoch.batches()):
            heartbeat.alive()
            images = model.normalize(batch.images_B3HW)
            model(*model.training_inputs(images, Targets.of(batch)))
            tensors = [tensor for layer in norms for tensor in paddle_api.running_statistics(layer)]
            flat = [tensor.numpy().ravel() for tensor in tensors]
            rows.append(np.concatenate([[index, len(batch.images_B3HW)], *flat]))
    finally:
        for layer, momentum in zip(norms, momenta):
            paddle_api.set_momentum(layer, momentum)
        model.eval()
    width = 2 + sum(
        statistic.size for layer in norms for statistic in paddle_api.running_statistics(layer)
    )
    return np.array(rows, np.float32).reshape(-1, width)
