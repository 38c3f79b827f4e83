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
from ppdist.data.checks.before_training import Checked, check_before_training, look_at_all
from ppdist.data.datasets.annotation_cache import read_on_host
from ppdist.data.datasets.build import check_same_classes, read_split, same_sets
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler, copies, difficulty, epoch_size
from ppdist.data.transforms.pipeline import require_outlines
from ppdist.data.types import Batch, DetectionSet, ImageRecord, ImagesUnavailable, Records
from ppdist.distributed import comm, heartbeat
from ppdist.distributed.agreement import equal_ranks
from ppdist.distributed.progress import Progress
from ppdist.engine.parts import ClassScores
from ppdist.engine.schedule_setup import ScheduleSetup

_LOGGER = logging.getLogger("ppdist.data")
_COMPARED_IMAGES = 64  # per set, by content; the others by file size
_PATHS_AT_ONCE = 10_000  # per chunk: a list of millions would take hundreds of megabytes
# Of the training images, that may turn out bad: more are no accident, but a copy that broke off.
BAD_SHARE = 0.001
_SHOWN = 20  # images of the blocklist in a message
# Passes the batches of a plan on, and looks at them.
Watch = Callable[[Iterator[Batch], TrainSampler], Iterator[Batch]]


def read_sets(config: DataConfig, num_classes: int, evaluate: bool) -> Checked:
    """Reads and checks the training and validation sets.  Collective.

    Args: evaluate: read the validation set, too.
    Raises: UserError, on every rank: they cannot be read or used.
    """
    train_set, val_set = read_on_host(
        lambda: read_unshared(config, num_classes, evaluate), absolute(config.root)
    )
    assert train_set is not None
    for dataset in (train_set, val_set):
        if dataset is not None:
            require_same_data(dataset, config)
    cores = max(1, int(available_cores()))  # rank 0 checks the images, the others wait
    # Twice as many: even with a local disk, a child waits for it half of the time.
    checked = check_before_training(config, train_set, val_set, workers=2 * cores)
    same = same_sets(config) if evaluate else ""
    return checked._replace(lines=(*checked.lines, same)) if same else checked


def read_unshared(
    config: DataConfig, num_classes: int, evaluate: bool
) -> tuple[DetectionSet, DetectionSet | None]:
    """Reads the training and validation sets on this process alone; images are not checked.

    Args: evaluate: read the validation set, too.
    Raises: UserError: they cannot be read or used.
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
    """Samples of an epoch over all ranks."""
    copies_N = copies(dataset, config, None)
    return len(dataset.records) if copies_N is None else epoch_size(copies_N)


class BatchSource:
    """Micro-batches of this rank, starting at any step.

    All ranks build one at the same time: those of a host share a cache.
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
            plain_size: that of `plain_epochs`.
            seed: of order and augmentation.
            watch: looks at the batches of a plan as it passes them on; None: nobody does.
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
            copies_N=copies(dataset, config.sampling, None),
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
        """Micro-batches of each step, from a step to the end of the run.

        Those of a step are to be taken before the next.  Ends earlier iterators.

        Args: scores: of the last evaluation; None: none yet.
        """
        plan = self._loader.plan = self._plan(first_step, scores)
        batches: Iterator[Batch] = iter(self._loader)
        if self._watch is not None:
            batches = self._watch(batches, plan)
        return (_of_step(batches, plan, step) for step in range(first_step, plan.end_step))

    def abort_waits(self) -> None:
        """Stops waiting for unavailable images because the run ends soon."""
        self._loader.abort_waits()

    def images_of(self, step: int, scores: ClassScores | None) -> list[int]:
        """Positions of this rank's images of a step, without opening them."""
        keys = itertools.chain(*self._plan(step, scores).micro_batches(step))
        return [key.index for key in keys if key.index >= 0]

    def path(self, index: int) -> str:
        """The file of an image."""
        return self._dataset.records[index].path

    def _plan(self, first_step: int, scores: ClassScores | None) -> TrainSampler:
        sampler = replace(self._sampler, start_step=first_step, parts=self.parts)
        if self.follows_scores and scores is not None:
            copies_N = copies(self._dataset, self._sampling, difficulty(scores).tolist())
            sampler = replace(sampler, copies_N=copies_N)
        return sampler


def _of_step(batches: Iterator[Batch], plan: TrainSampler, step: int) -> Iterator[Batch]:
    """This rank's micro-batches of a step; blank ones from where its images stay away."""
    missing: Batch | None = None
    for number, share in zip(plan.numbers(step), plan.shares(step), strict=True):
        if missing is None:
            heartbeat.name_place("waiting for its images")
            try:
                batch = next(batches)
            except ImagesUnavailable as away:
                batch = missing = replace(away.blank, missing=away)
            heartbeat.name_place("")
        yield replace(batch, number=number, share=share)


class Blocklist:
    """Training images that cannot be used, the same on every rank.

    Attributes:
        known: position in the set's records -> why.
    """

    def __init__(self, dataset: DetectionSet) -> None:
        """
        Args:
            dataset: the training set; images already found unreadable count.
        Raises: DataError: there are too many already.
        """
        self.known = dict(dataset.unreadable)
        self._dataset = dataset
        self._stop_at_too_many()

    def add(self, found: Mapping[int, str]) -> list[str]:
        """Adds the images that the ranks found in a step.  Collective.

        Args: found: position -> why, of this rank.
        Returns: a line for each new one, the same on every rank.
        Raises: DataError, on every rank: there are too many now.
        """
        new: dict[int, str] = {}
        for of_rank in comm.all_gather_large_object([*found.items()]):
            new |= {index: why for index, why in of_rank if index not in self.known}
        self.known |= new
        self._stop_at_too_many()
        return [self._line(index) for index in sorted(new)]

    def _line(self, index: int) -> str:
        return f"{self._dataset.records[index].path}: {self.known[index]}"

    def _stop_at_too_many(self) -> None:
        images = len(self._dataset.records)
        allowed = max(1, math.floor(BAD_SHARE * images))
        if len(self.known) <= allowed:
            return
        shown = [f"  {self._line(index)}" for index in sorted(self.known)[:_SHOWN]]
        if len(self.known) > _SHOWN:
            shown.append(f"  and {len(self.known) - _SHOWN} more")
        lines = "\n".join(shown)
        raise DataError(
            f"{len(self.known)} of {images} images cannot be used, more than one in a "
            f"thousand ({allowed})",
            code="too_many_bad_images",
            where=f"{self._dataset.source}",
            fix=(f"`ppdist data check` lists them, its --fix writes a set without them:\n{lines}"),
        )


def require_same_data(dataset: DetectionSet, config: DataConfig) -> None:
    """Compares a set and its images across hosts.  Collective.

    Args: config: of this rank; `root` may differ between hosts.
    Raises: DataError, on every rank: sets or images differ; names the first difference.
    """
    if comm.world_size() == 1:
        return
    records = Records.of(dataset.records)
    top = os.path.join(absolute(config.root), "")
    differs = _other_records(dataset, records, config.root, top)
    if differs is None:
        differs = _other_images(records, top, _COMPARED_IMAGES, dataset.opener)
    if differs is None:
        return
    other, what = differs
    hosts_W = comm.all_gather_object(comm.host())
    raise DataError(
        f"differs between rank 0 (host {hosts_W[0]}) and rank {other} (host {hosts_W[other]}): "
        f"{what}",
        code="dataset_differs",
        where=f"{dataset.source}",
        fix="put the same files below data.root on every host",
    )


def fingerprint(dataset: DetectionSet, root: str) -> str:
    """A digest of a set: image names below `root`, sizes, order, objects."""
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


def _other_records(
    dataset: DetectionSet, records: Records, root: str, top: str
) -> tuple[int, str] | None:
    """First rank whose annotations differ from rank 0's, and where.  Collective."""
    classes = [list(dataset.class_names), list(dataset.category_ids)]
    found_W = comm.all_gather_object([classes, fingerprint(dataset, root)])
    groups = equal_ranks(found_W)
    if len(groups) == 1:
        return None
    other = groups[1][0]
    ours, theirs = found_W[0][0], found_W[other][0]
    if ours != theirs:
        return other, f"the classes are {ours[0]} and {theirs[0]}"
    return other, _first_difference(records, top, other)


def _first_difference(records: Records, top: str, other: int) -> str:
    """Describes the first difference between ranks 0 and `other`.  Collective."""
    compared = comm.rank() in (0, other)
    counts_W = comm.all_gather_large_object(len(records))
    marks = [_mark(record, top) for record in records] if compared else []
    both_N = comm.all_gather_rows(np.array(marks, np.int64).reshape(-1, 1))[:, 0]
    ours_N, theirs_N = both_N[: counts_W[0]], both_N[counts_W[0] :]
    common = min(len(ours_N), len(theirs_N))
    differing = np.flatnonzero(ours_N[:common] != theirs_N[:common])
    first = int(differing[0]) if len(differing) else common
    record = records[first] if compared and first < len(records) else None
    told_W = comm.all_gather_large_object(
        None if record is None else [record.path.removeprefix(top), _columns(record)]
    )
    ours, theirs = told_W[0], told_W[other]
    counts = f"{counts_W[0]} and {counts_W[other]} images"
    if ours is None and theirs is None:
        return counts
    if ours is None or theirs is None:
        return f"{counts}, of which only one has {(ours or theirs)[0]}"
    if ours[0] != theirs[0]:
        return f"{counts}; in their order, image {first} is {ours[0]} and {theirs[0]}"
    column = next(name for name in ours[1] if ours[1][name] != theirs[1][name])
    return f"{ours[0]}: {column}: {ours[1][column]:.100} and {theirs[1][column]:.100}"


def _mark(record: ImageRecord, top: str) -> int:
    """Checksum of all compared fields of a record."""
    parts = [os.fsencode(record.path.removeprefix(top)), *_columns(record).values()]
    return zlib.crc32("\n".join(map(repr, parts)).encode())


def _columns(record: ImageRecord) -> dict[str, str]:
    """Compared fields of a record, except its name."""
    return {
        "size": f"{record.width} x {record.height}",
        "number of objects": f"{len(record.labels_M)}",
        "boxes": f"{record.boxes_M4.tolist()}",
        "classes of the objects": f"{record.labels_M.tolist()}",
        "crowds": f"{record.crowd_M.tolist()}",
    }


def _other_images(records: Records, top: str, count: int, opener: Opener) -> tuple[int, str] | None:
    """First rank whose image files differ from rank 0's, and where.  Collective.

    The first rank of each host reads them; a single host has nothing to compare.

    Args: count: evenly spaced images compared by content; the others only by size.
    """
    if comm.local_size() == comm.world_size():
        return None
    chosen_K = np.unique(len(records) * np.arange(count) // max(1, count))[: len(records)]
    reads = comm.local_rank() == 0
    found_M = np.zeros(0, np.int64)  # M: N sizes, K contents
    if reads:
        progress = Progress(_LOGGER, "comparing images across hosts", len(records) + len(chosen_K))
        found_M = np.concatenate(
            [
                look_at_all(lambda at: _size(records.path(at), opener), len(records), progress),
                look_at_all(lambda k: _content(records.path(chosen_K[k])), len(chosen_K), progress),
            ]
        )
    whole = hashlib.blake2b(found_M.tobytes(), digest_size=16).hexdigest()
    wholes_W = comm.all_gather_object(whole if reads else None)
    groups = equal_ranks([each or wholes_W[0] for each in wholes_W])
    if len(groups) == 1:
        return None
    other = groups[1][0]
    told = comm.rank() in (0, other)
    both_M = comm.all_gather_rows((found_M if told else found_M[:0]).reshape(-1, 1))[:, 0]
    ours_M, theirs_M = np.split(both_M, 2)
    differing = np.flatnonzero(ours_M != theirs_M)
    in_size = differing[differing < len(records)]
    if len(in_size):
        first = int(in_size[0])
        sizes = [f"{n} bytes" if n >= 0 else "absent" for n in (ours_M[first], theirs_M[first])]
        what = f"{sizes[0]} and {sizes[1]}"
        more = f" ({len(in_size)} images differ in size)" if len(in_size) > 1 else ""
    else:
        first = int(chosen_K[differing[0] - len(records)])
        what = "same size, but different content"
        more = f" ({len(differing)} of {len(chosen_K)} images differ)" if len(differing) > 1 else ""
    return other, f"{records.path(first).removeprefix(top)}: {what}{more}"


def _content(path: str) -> int:
    """Fingerprint of a file's content, or of its read error."""
    mark = hashlib.blake2b(digest_of_file(Path(path)).encode(), digest_size=8).digest()
    return int.from_bytes(mark, "little", signed=True)


def _size(path: str, opener: Opener) -> int:
    """Bytes of a file; -1 where there is none."""
    try:
        return opener.identity_of(path).bytes
    except (OSError, StorageError):  # its reader reports why
        return -1
