"""The data of a run: checked sets, micro-batches, blocklist."""

import hashlib
import itertools
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ppdist.common.addresses import absolute
from ppdist.common.errors import ConfigError, DataError, StorageError
from ppdist.common.files import digest_of_file
from ppdist.common.machine import available_cores
from ppdist.common.opener import Opener
from ppdist.config.data import DataConfig, SamplingConfig
from ppdist.data.checks.before_training import Checked, check_before_training, map_in_threads
from ppdist.data.datasets.annotation_cache import read_on_host
from ppdist.data.datasets.build import check_same_classes, describe_same_sets, read_split
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler, difficulty, epoch_size, expected_copies
from ppdist.data.transforms.pipeline import require_outlines
from ppdist.data.types import Batch, DetectionSet, ImageRecord, ImagesUnavailable, Records
from ppdist.distributed import comm, heartbeat
from ppdist.distributed.agreement import equal_ranks
from ppdist.distributed.progress import Progress
from ppdist.engine.parts import ClassScores
from ppdist.engine.schedule_setup import ScheduleSetup

_LOGGER = logging.getLogger("ppdist.data")
_COMPARED_IMAGES = 64  # per set, by content; all by file size
_PATHS_AT_ONCE = 10_000  # per chunk: a list of millions would take hundreds of megabytes
# Share of the training images that may be unusable: more suggest an interrupted copy.
BAD_SHARE = 0.001
_SHOWN = 20  # blocked images listed in a message
# Passes on the batches of a plan and observes them, for example to draw some of them.
Watch = Callable[[Iterator[Batch], TrainSampler], Iterator[Batch]]


def read_sets(config: DataConfig, num_classes: int, evaluate: bool) -> Checked:
    """Reads and checks the training and validation sets.  Collective.

    Args: evaluate: read the validation set, too.
    Raises: UserError, on every rank: a set cannot be read or used.
    """
    train_set, val_set = read_on_host(
        lambda: read_unshared(config, num_classes, evaluate), absolute(config.root)
    )
    assert train_set is not None
    for dataset in (train_set, val_set):
        if dataset is not None:
            require_same_data(dataset, config)
    cores = max(1, int(available_cores()))  # rank 0 checks the images, the others wait
    # Twice as many workers as cores: even with a local disk, a worker spends half of its time
    # waiting for it.
    checked = check_before_training(config, train_set, val_set, workers=2 * cores)
    warning = describe_same_sets(config) if evaluate else ""
    return checked._replace(lines=(*checked.lines, warning)) if warning else checked


def read_unshared(
    config: DataConfig, num_classes: int, evaluate: bool
) -> tuple[DetectionSet, DetectionSet | None]:
    """Reads the training and validation sets in this process alone; images are not checked.

    Args: evaluate: read the validation set, too.
    Raises: UserError: a set cannot be read or used.
    """
    if config.sampling.name == "difficulty" and not evaluate:
        raise ConfigError(
            "difficulty needs the scores of evaluations",
            code="evaluation_missing",
            where="data.sampling.name",
            fix="start with --eval, or set it to balanced",
        )
    masks = config.augment.needs_outlines
    train_set = read_split(config, "train", num_classes, masks=masks)
    require_outlines(train_set, config.augment)
    if not evaluate:
        return train_set, None
    val_set = read_split(config, "val", num_classes)
    check_same_classes(train_set, val_set)
    return train_set, val_set


def images_of_epoch(dataset: DetectionSet, config: SamplingConfig) -> int:
    """Counts the samples per epoch over all ranks."""
    copies_N = expected_copies(dataset, config, None)
    return len(dataset.records) if copies_N is None else epoch_size(copies_N)


class BatchSource:
    """Micro-batches of this rank, starting at any step.

    All ranks must build theirs at the same time: the ranks of a host share a cache.
    Attributes:
        follows_scores: the order of images depends on the scores of the last evaluation.
        parts: number of splits of a micro-batch, from the next `steps` on; see TrainSampler.
    """

    parts = 1

    def __init__(
        self,
        dataset: DetectionSet,
        config: DataConfig,
        schedule: ScheduleSetup,
        sizes: Sequence[tuple[int, int]],
        plain_size: tuple[int, int],
        seed: int,
        watch: Watch | None = None,
    ) -> None:
        """
        Args:
            sizes: (height, width) choices in pixels of multi-scale training.
            plain_size: (height, width) in pixels during the last `plain_epochs`.
            seed: seed of the order of images and of augmentation.
            watch: observes the batches of a plan as it passes them on; None: no observer.
        """
        self._dataset = dataset
        self._sampling = config.sampling
        self.follows_scores = config.sampling.name == "difficulty"
        plain = config.augment.plain_epochs
        self._sampler = TrainSampler(
            dataset_size=len(dataset.records),
            batches=schedule.batches,
            rank=comm.rank(),
            world=comm.world_size(),
            seed=seed,
            start_step=0,
            end_step=schedule.total_steps,
            sizes=sizes,
            copies_N=expected_copies(dataset, config.sampling, None),
            last_from=schedule.step_of_last(plain) if plain else None,
            last_size=plain_size,
        )
        self._watch = watch
        self._loader = TrainLoader(
            dataset,
            config,
            self._sampler,
            seed=seed,
            epochs=math.ceil(schedule.schedule_steps / schedule.steps_per_epoch),
            ranks_on_host=comm.local_size(),
        )

    def steps(self, first_step: int, scores: ClassScores | None) -> Iterator[Iterator[Batch]]:
        """Yields the micro-batches of each step, from a step to the end of the run.

        Consume all micro-batches of a step before moving on to the next step.  A new call
        invalidates earlier iterators.

        Args: scores: class scores from the last evaluation; None: there was none yet.
        """
        plan = self._loader.plan = self._plan(first_step, scores)
        batches: Iterator[Batch] = iter(self._loader)
        if self._watch is not None:
            batches = self._watch(batches, plan)
        return (_take_step(batches, plan, step) for step in range(first_step, plan.end_step))

    def abort_waits(self) -> None:
        """Stops waiting for unavailable images because the run ends soon."""
        self._loader.abort_waits()

    def images_of(self, step: int, scores: ClassScores | None) -> list[int]:
        """Returns the positions of this rank's images in a step, without opening the images."""
        keys = itertools.chain(*self._plan(step, scores).micro_batches(step))
        return [key.index for key in keys if key.index >= 0]  # below 0: padding

    def path(self, index: int) -> str:
        """Returns the path of an image."""
        return self._dataset.records[index].path

    def _plan(self, first_step: int, scores: ClassScores | None) -> TrainSampler:
        sampler = replace(self._sampler, start_step=first_step, parts=self.parts)
        if self.follows_scores and scores is not None:
            copies_N = expected_copies(self._dataset, self._sampling, difficulty(scores).tolist())
            sampler = replace(sampler, copies_N=copies_N)
        return sampler


def _take_step(batches: Iterator[Batch], plan: TrainSampler, step: int) -> Iterator[Batch]:
    """Yields this rank's micro-batches of a step; blank ones once its images are unavailable.

    A blank micro-batch keeps this rank's collectives in step with those of the other ranks.
    """
    missing: Batch | None = None
    for number, share in zip(plan.numbers(step), plan.shares(step), strict=True):
        if missing is None:
            heartbeat.name_place("waiting for its images")
            try:
                batch = next(batches)
            except ImagesUnavailable as outage:
                batch = missing = replace(outage.blank, missing=outage)
            heartbeat.name_place("")
        yield replace(batch, number=number, share=share)


class Blocklist:
    """Training images that cannot be used, the same on every rank.

    Attributes:
        reasons: position in the set's records -> the reason why the image is unusable.
    """

    def __init__(self, dataset: DetectionSet) -> None:
        """
        Args:
            dataset: the training set; images already found unreadable count.
        Raises: DataError: too many images are unusable already.
        """
        self.reasons = dict(dataset.unreadable)
        self._dataset = dataset
        self._refuse_too_many()

    def add(self, bad_images: Mapping[int, str]) -> list[str]:
        """Adds the unusable images of a step from all ranks.  Collective.

        Args: bad_images: position -> reason, for this rank's images.
        Returns: a line for each newly added image, the same on every rank.
        Raises: DataError, on every rank: there are now too many unusable images.
        """
        new_reasons: dict[int, str] = {}
        for rank_images in comm.all_gather_large_object([*bad_images.items()]):
            new_reasons |= {
                index: reason for index, reason in rank_images if index not in self.reasons
            }
        self.reasons |= new_reasons
        self._refuse_too_many()
        return [self._describe_image(index) for index in sorted(new_reasons)]

    def _describe_image(self, index: int) -> str:
        return f"{self._dataset.records[index].path}: {self.reasons[index]}"

    def _refuse_too_many(self) -> None:
        images = len(self._dataset.records)
        allowed = max(1, math.floor(BAD_SHARE * images))
        if len(self.reasons) <= allowed:
            return
        rows = [f"  {self._describe_image(index)}" for index in sorted(self.reasons)[:_SHOWN]]
        if len(self.reasons) > _SHOWN:
            rows.append(f"  and {len(self.reasons) - _SHOWN} more")
        lines = "\n".join(rows)
        raise DataError(
            f"{len(self.reasons)} of {images} images cannot be used, more than one in a "
            f"thousand ({allowed})",
            code="too_many_bad_images",
            where=f"{self._dataset.source}",
            fix=f"`ppdist data check DATA --fix DIR` writes a set without them:\n{lines}",
        )


def require_same_data(dataset: DetectionSet, config: DataConfig) -> None:
    """Compares a set and its images across hosts.  Collective.

    Args: config: this rank's configuration; `root` may differ between hosts.
    Raises: DataError, on every rank: sets or images differ; the message names the first difference.
    """
    if comm.world_size() == 1:
        return
    records = Records.of(dataset.records)
    top = os.path.join(absolute(config.root), "")
    # Annotations first: images are compared by position, which requires equal lists.
    mismatch = _find_differing_records(dataset, records, config.root, top)
    if mismatch is None:
        mismatch = _find_differing_images(records, top, _COMPARED_IMAGES, dataset.opener)
    if mismatch is None:
        return
    rank, difference = mismatch
    hosts_W = comm.all_gather_object(comm.host())
    raise DataError(
        f"differs between rank 0 (host {hosts_W[0]}) and rank {rank} (host {hosts_W[rank]}): "
        f"{difference}",
        code="dataset_differs",
        where=f"{dataset.source}",
        fix="put the same files below data.root on every host",
    )


def fingerprint(dataset: DetectionSet, root: str) -> str:
    """Returns a digest of a set: image names below `root`, sizes, order, objects."""
    records = Records.of(dataset.records)
    top = os.path.join(absolute(root), "")
    content = hashlib.blake2b(digest_size=16)
    for begin in range(0, len(records), _PATHS_AT_ONCE):
        paths = records.paths(begin, begin + _PATHS_AT_ONCE)
        names = "".join(path.removeprefix(top) + "\n" for path in paths)
        content.update(os.fsencode(names))
    columns = records.sizes_N2, records.counts_N, records.boxes_O4, records.labels_O
    for column in (*columns, records.crowd_O):
        content.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)  # no copy
    return content.hexdigest()


def _find_differing_records(
    dataset: DetectionSet, records: Records, root: str, top: str
) -> tuple[int, str] | None:
    """Finds the first rank whose annotations differ from rank 0's.  Collective.

    Args: top: the absolute `root`, which is not part of image names.
    Returns: the rank and a description of the first difference; None if all are equal.
    """
    classes = [list(dataset.class_names), list(dataset.category_ids)]
    summaries_W = comm.all_gather_object([classes, fingerprint(dataset, root)])
    groups = equal_ranks(summaries_W)
    if len(groups) == 1:
        return None
    rank = groups[1][0]
    main_classes, rank_classes = summaries_W[0][0], summaries_W[rank][0]
    if main_classes != rank_classes:
        return rank, f"the classes are {main_classes[0]} and {rank_classes[0]}"
    return rank, _describe_first_difference(records, top, rank)


def _describe_first_difference(records: Records, top: str, rank: int) -> str:
    """Describes the first difference between the records of rank 0 and `rank`.  Collective."""
    compared = comm.rank() in (0, rank)
    counts_W = comm.all_gather_large_object(len(records))
    marks = [_checksum(record, top) for record in records] if compared else []
    all_marks_N = comm.all_gather_rows(np.array(marks, np.int64).reshape(-1, 1))[:, 0]
    main_N, rank_N = all_marks_N[: counts_W[0]], all_marks_N[counts_W[0] :]
    common_count = min(len(main_N), len(rank_N))
    differing = np.flatnonzero(main_N[:common_count] != rank_N[:common_count])
    first = int(differing[0]) if len(differing) else common_count
    record = records[first] if compared and first < len(records) else None
    images_W = comm.all_gather_large_object(
        None if record is None else [record.path.removeprefix(top), _describe_fields(record)]
    )
    main_image, rank_image = images_W[0], images_W[rank]
    counts = f"{counts_W[0]} and {counts_W[rank]} images"
    if main_image is None and rank_image is None:
        return counts
    if main_image is None or rank_image is None:
        return f"{counts}, of which only one has {(main_image or rank_image)[0]}"
    if main_image[0] != rank_image[0]:
        return f"{counts}; in their order, image {first} is {main_image[0]} and {rank_image[0]}"
    column = next(name for name in main_image[1] if main_image[1][name] != rank_image[1][name])
    values = f"{main_image[1][column]:.100} and {rank_image[1][column]:.100}"
    return f"{main_image[0]}: {column}: {values}"


def _checksum(record: ImageRecord, top: str) -> int:
    """Returns a checksum of all compared fields of a record."""
    parts = [os.fsencode(record.path.removeprefix(top)), *_describe_fields(record).values()]
    return zlib.crc32("\n".join(map(repr, parts)).encode())


def _describe_fields(record: ImageRecord) -> dict[str, str]:
    """Returns the compared fields of a record as text, except its name."""
    return {
        "size": f"{record.width} x {record.height}",
        "number of objects": f"{len(record.labels_M)}",
        "boxes": f"{record.boxes_M4.tolist()}",
        "classes of the objects": f"{record.labels_M.tolist()}",
        "crowds": f"{record.crowd_M.tolist()}",
    }


def _find_differing_images(
    records: Records, top: str, count: int, opener: Opener
) -> tuple[int, str] | None:
    """Finds the first rank whose image files differ from rank 0's.  Collective.

    The first rank of each host reads the files; with a single host there is nothing to compare.

    Args: count: number of evenly spaced images to compare by content; all are compared by size.
    Returns: see `_find_differing_records`.
    """
    if comm.local_size() == comm.world_size():
        return None
    chosen_K = np.unique(len(records) * np.arange(count) // max(1, count))[: len(records)]
    reads = comm.local_rank() == 0
    marks_M = np.zeros(0, np.int64)  # M: N sizes, K contents
    if reads:
        progress = Progress(_LOGGER, "comparing images across hosts", len(records) + len(chosen_K))
        marks_M = np.concatenate(
            [
                map_in_threads(
                    lambda n: _count_bytes(records.path(n), opener), len(records), progress
                ),
                map_in_threads(
                    lambda k: _digest(records.path(chosen_K[k])), len(chosen_K), progress
                ),
            ]
        )
    digest = hashlib.blake2b(marks_M.tobytes(), digest_size=16).hexdigest()
    digests_W = comm.all_gather_object(digest if reads else None)
    groups = equal_ranks([rank_digest or digests_W[0] for rank_digest in digests_W])
    if len(groups) == 1:
        return None
    rank = groups[1][0]
    sent_M = marks_M if comm.rank() in (0, rank) else marks_M[:0]
    all_marks_M = comm.all_gather_rows(sent_M.reshape(-1, 1))[:, 0]
    main_M, rank_M = np.split(all_marks_M, 2)
    differing = np.flatnonzero(main_M != rank_M)
    in_size = differing[differing < len(records)]
    if len(in_size):
        first = int(in_size[0])
        sizes = [f"{n} bytes" if n >= 0 else "absent" for n in (main_M[first], rank_M[first])]
        difference = f"{sizes[0]} and {sizes[1]}"
        more = f" ({len(in_size)} images differ in size)" if len(in_size) > 1 else ""
    else:
        first = int(chosen_K[differing[0] - len(records)])
        difference = "same size, but different content"
        more = f" ({len(differing)} of {len(chosen_K)} images differ)" if len(differing) > 1 else ""
    return rank, f"{records.path(first).removeprefix(top)}: {difference}{more}"


def _digest(path: str) -> int:
    """Returns a digest of a file's content, or of its read error, as a signed 64-bit integer."""
    mark = hashlib.blake2b(digest_of_file(Path(path)).encode(), digest_size=8).digest()
    return int.from_bytes(mark, "little", signed=True)


def _count_bytes(path: str, opener: Opener) -> int:
    """Returns the size of a file in bytes; -1: it cannot be found."""
    try:
        return opener.identity_of(path).bytes
    except (OSError, StorageError):  # whoever reads the file reports why
        return -1
