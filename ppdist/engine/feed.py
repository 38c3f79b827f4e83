"""The data of a run: its two sets, checked, and this rank's micro-batches from any step on."""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ppdist import dist
from ppdist.data.check.consistency import check_same_classes
from ppdist.data.check.preflight import Checked, check_before_training
from ppdist.data.cores import available_cores
from ppdist.data.dataset import DataConfig, read_split
from ppdist.data.loader import TrainLoader
from ppdist.data.records import Records
from ppdist.data.sample import Batch, DetectionSet
from ppdist.data.sampler import TrainSampler
from ppdist.data.sampling import SamplingConfig, copies, difficulty, epoch_size
from ppdist.data.train_samples import require_outlines
from ppdist.engine.derived import Derived
from ppdist.errors import ConfigError, DataError

ClassScores = Sequence[float | None]  # AP of each class; None where the set has no object of it


def read_sets(config: DataConfig, num_classes: int, evaluate: bool) -> Checked:
    """The training set, with `evaluate` the validation set, and what a look at their images found.

    Every rank calls it.

    Raises: UserError, on every rank: they cannot be read or used.
    """

    if config.sampling.name == "difficulty" and not evaluate:
        raise ConfigError(
            "data.sampling.name: difficulty goes by the scores of evaluations: start with --eval, "
            "or set it to balanced"
        )

    def read() -> tuple[DetectionSet, DetectionSet | None]:
        masks = config.augment.copy_paste > 0
        train_set = read_split(config, "train", num_classes, masks=masks)
        require_outlines(train_set, config.augment)
        if not evaluate:
            return train_set, None
        val_set = read_split(config, "val", num_classes)
        check_same_classes(train_set, val_set)
        return train_set, val_set

    train_set, val_set = dist.together(read)
    for dataset in (train_set, val_set):
        if dataset is not None:
            _require_the_same(dataset, config.root)
    cores = max(1, int(available_cores()))  # rank 0 looks at the images, the others wait
    return check_before_training(config, train_set, val_set, workers=cores)


def _require_the_same(dataset: DetectionSet, root: str) -> None:
    """Every rank calls it.  Raises: DataError, on every rank: hosts read different sets."""
    if dist.world_size() == 1:
        return
    records = Records.of(dataset.records)
    digest = hashlib.blake2b(digest_size=16)
    top = os.path.join(os.path.abspath(root), "")  # hosts may mount it at different places
    for index in range(len(records)):
        digest.update(os.fsencode(records.path(index).removeprefix(top) + "\n"))
    for column in (records.sizes_N2, records.counts_N, records.boxes_O4, records.labels_O):
        digest.update(np.ascontiguousarray(column).tobytes())
    found_W = dist.all_gather_objects([len(records), digest.hexdigest()])
    others = [rank for rank, found in enumerate(found_W) if found != found_W[0]]
    if others:
        counts = ", ".join(f"rank {rank} {found_W[rank][0]}" for rank in (0, *others[:5]))
        raise DataError(
            f"{dataset.source}: not the same on every rank (images: {counts}; or their names, "
            f"sizes or boxes differ): give every host the same files below data.root"
        )


def images_of_epoch(dataset: DetectionSet, config: SamplingConfig) -> int:
    """How many samples an epoch has over all ranks."""
    copies_N = copies(dataset, config, None)
    return len(dataset.records) if copies_N is None else epoch_size(copies_N)


class Feed:
    """Micro-batches of this rank.  Every rank builds one at the same time: they share a cache.

    Attributes:
        follows_scores: the order of images depends on the scores of the last evaluation.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        config: DataConfig,
        derived: Derived,
        sizes: Sequence[tuple[int, int]],
        seed: int,
    ) -> None:
        """
        Args:
            sizes: (height, width) choices in pixels of multi-scale training.
            seed: of order and augmentation.
        """
        self._dataset = dataset
        self._sampling = config.sampling
        self.follows_scores = config.sampling.name == "difficulty"
        self._sampler = TrainSampler(
            dataset_size=len(dataset.records),
            batch_size_per_card=derived.batch_size_per_card,
            accumulate=derived.accumulate_steps,
            rank=dist.rank(),
            world=dist.world_size(),
            seed=seed,
            start_step=0,
            end_step=derived.total_steps,
            sizes=sizes,
            copies_N=copies(dataset, config.sampling, None),
        )
        self._loader = TrainLoader(
            dataset,
            config,
            self._sampler,
            seed=seed,
            epochs=math.ceil(derived.schedule_steps / derived.steps_per_epoch),
            ranks_on_host=dist.local_size(),
        )

    def batches(self, first_step: int, scores: ClassScores | None) -> Iterator[Batch]:
        """The micro-batches from a step to the end of the run; those of an earlier call end.

        Args:
            scores: of the last evaluation, None before the first.
        """
        sampler = replace(self._sampler, start_step=first_step)
        if self.follows_scores and scores is not None:
            copies_N = copies(self._dataset, self._sampling, difficulty(scores).tolist())
            sampler = replace(sampler, copies_N=copies_N)
        self._loader.plan = sampler
        return iter(self._loader)
