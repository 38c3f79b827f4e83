"""The `data:` section read: one entrance to every annotation format.

    read_split -> reader of the format -> its part (`data.val_fraction`)
               -> subset (`data.*.limit`) -> DetectionSet

A part and a subset are the same in every run and on every rank.  Before training the splits must
agree on their classes, and their images must be on disk.

Here the configuration meets the data.  So of all readers this module alone knows storage: the set
carries the opener of its images to whoever reads them.
"""

import hashlib
import logging
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ppdist.common import plugin
from ppdist.common.addresses import absolute, folder_of, is_in_shard, is_remote
from ppdist.common.errors import DataError
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.annotation_cache import Read, Sources, kept_or_read
from ppdist.data.datasets.annotations import (
    Strictly,
    find_alike,
    folders_below,
    is_name_list,
    listed,
    look_anew,
    to_detection_set,
    unread_image,
)
from ppdist.data.datasets.coco import (
    OWN_CLASSES,
    KnownClasses,
    read_coco,
    read_coco_columns,
    read_index,
)
from ppdist.data.datasets.folder import classified_set, read_csv, read_folder
from ppdist.data.datasets.plausibility import check_boxes
from ppdist.data.datasets.voc import read_voc
from ppdist.data.datasets.yolo import label_folder, read_yolo
from ppdist.data.types import (
    Complain,
    DetectionSet,
    RawColumns,
    RawImage,
    RawObject,
    RawSet,
    Records,
    Split,
    keyed_generator,
)
from ppdist.storage import files as storage
from ppdist.storage import stores
from ppdist.storage.download import local_copy
from ppdist.storage.files import STORAGE

_LOGGER = logging.getLogger("ppdist.data")
_LONGEST_REQUEST_SECONDS = 20.0


def read_split(
    config: DataConfig,
    split: Split,
    num_classes: int | None = None,
    *,
    masks: bool = False,
    whole: bool = False,
    annotated: bool = True,
) -> DetectionSet:
    """Reads one split; every rank gets the same set.

    Args:
        num_classes: what the model has; the data must have as many, and an object.  None: any.
        masks: keep the outlines of objects.
        whole: all images, whatever the split's `limit`, also those without a box to use.
        annotated: False: a set without an object is taken, too.
    Raises: DataError: files missing or not of the format, boxes wrong, classes that do not fit.
    """
    _use_storage(config)
    _check_folder(config, split)

    def check(dataset: DetectionSet) -> None:
        check_files(dataset)
        if num_classes is not None:
            check_classes(dataset, num_classes)
            if annotated:
                check_objects(dataset)

    return _kept_or_read(config, split, masks, whole, check)


def read_annotations(config: DataConfig, split: Split, num_classes: int) -> DetectionSet:
    """As `read_split` with all images, but these need not be there."""
    _use_storage(config)

    def check(dataset: DetectionSet) -> None:
        check_classes(dataset, num_classes)

    return _kept_or_read(config, split, False, True, check)


def _kept_or_read(
    config: DataConfig,
    split: Split,
    masks: bool,
    whole: bool,
    check: Callable[[DetectionSet], None],
) -> DetectionSet:
    """Reads a split, from the cache if nothing it depends on changed.

    Raises: DataError: the split cannot be read, or as `check`.
    """
    read = partial(_read_split, config, split, masks, whole)
    fields = {"format", "train", "val", "test", "val_fraction", "class_names"}
    fields |= {"bad_boxes", "duplicate_boxes"}
    place = os.path.abspath(config.root), config.root
    settings = [*place, config.model_dump(include=fields), split, masks, whole]
    found, kept = kept_or_read(settings, read, anew=False)
    dataset = replace(found.dataset, opener=STORAGE)
    if kept:
        try:
            check(dataset)
        except DataError:  # reported for the current files
            found, _ = kept_or_read(settings, read, anew=True)
            dataset = replace(found.dataset, opener=STORAGE)
        else:
            for line in found.said:
                _LOGGER.warning(line)
            return dataset
    check(dataset)
    return dataset


def _use_storage(config: DataConfig) -> None:
    # A worker says that it lives between requests; one takes twice its time at most.
    seconds = min(_LONGEST_REQUEST_SECONDS, config.worker_timeout_seconds / 3)
    stores.configure(int(config.store_cache_gib * 2**30), seconds)


def read_raw(config: DataConfig, split: Split, complain: Complain) -> RawSet:
    """A split as its files say it, with everything that conversion keeps.

    Of classified images every object is one without a place: box and size are 0, not known.

    Args:
        complain: gets what is wrong with parts of the files; if it returns, they are left out.
    Raises: DataError: a file is missing or as a whole not of the format, or as `check_boxes`.
    """
    _use_storage(config)
    look_anew()
    _check_folder(config, split)
    if config.task == "classify":
        return replace(_raw_of(_classified(config, split, complain)), opener=STORAGE)
    raw = _raw(config, split, complain, everything=True)
    check_boxes(RawColumns.of(raw, masks=False), config.format)
    return raw


def set_of_raw(config: DataConfig, split: Split, raw: RawSet, num_classes: int) -> DetectionSet:
    """What training uses of a split that `read_raw` read, checked as `read_split` does.

    Raises: DataError: boxes wrong, classes that do not fit.
    """
    if config.task == "classify":
        labels = [(str(image.path), image.objects[0].label) for image in raw.images]
        dataset = classified_set(labels, raw.class_names, raw.source)
    else:
        dataset = to_detection_set(raw, config.bad_boxes, duplicates=config.duplicate_boxes)
    dataset = replace(dataset, opener=raw.opener)
    dataset = limited(dataset, _section(config, split).limit, f"data.{split}.limit")
    check_classes(dataset, num_classes)
    check_objects(dataset)
    return dataset


def _check_folder(config: DataConfig, split: Split) -> None:
    _, folders = _places(config, split)
    keys = f"-o data.{split}.images=FOLDER"
    if config.task == "classify":
        fix = f"set {keys} to a folder that holds one folder of images per class"
    else:
        command = f"`ppdist train {shlex.quote(config.root)} --model NAME`"
        fix = f"set {keys} data.{split}.annotations=FILE, or let {command} find the files"
    for images in folders:
        if not (is_remote(images) or images.is_dir()):
            raise DataError(
                f"{images} is not a folder",
                code="image_folder_missing",
                where=f"data.{split}.images",
                fix=fix,
            )


def _places(config: DataConfig, split: Split) -> tuple[Path, tuple[Path, ...]]:
    """`data.root`, and the image folders of a split (YOLO: several)."""
    root = folder_of(config.root)
    folders = tuple(folder_of(config.root, name) for name in _section(config, split).image_folders)
    if any(map(is_remote, (root, *folders))):
        _require_few_files(config, split)
    if not (is_remote(root) or root.is_dir()):
        raise DataError(
            f"{root} is not a folder",
            code="data_root_missing",
            where="data.root",
            fix="set -o data.root=PATH",
        )
    return root, folders


_OF_STORES = ("coco", "csv")  # formats of one file a split


def _require_few_files(config: DataConfig, split: Split) -> None:
    """Rejects formats that read many small files or list folders.

    Raises: DataError: the format is one of them.
    """
    if config.format in _OF_STORES or config.reader:
        return
    raise DataError(
        f"data.format {config.format} reads many small files or lists folders, which is slow in an "
        f"object store",
        code="store_format",
        where=f"data.{split}",
        fix="convert it on a disk: `ppdist data convert DATA --to coco --shards "
        "256MB --out DIR`, and upload that",
    )


def _section(config: DataConfig, split: Split) -> SplitConfig:
    section = {"train": config.train, "val": config.val, "test": config.test}[split]
    if section is None:
        raise DataError(
            f"there is no {split} split",
            code="split_missing",
            where=f"data.{split}",
            fix=f"set data.{split}.images and data.{split}.annotations in a configuration",
        )
    return section


def _read_split(config: DataConfig, split: Split, masks: bool, whole: bool) -> Read:
    """Reads a split from its files: its part, and of that at most `data.*.limit` images."""
    strictly = Strictly()
    look_anew()
    limit = None if whole else _section(config, split).limit
    key = f"data.{split}.limit"
    if config.task == "classify":
        dataset = _classified(config, split, strictly)
        said = strictly.report(dataset)
        dataset = replace(dataset, notes=(*dataset.notes, *said))
        return Read(limited(dataset, limit, key), said, _sources(config, split, ()))
    raw: RawSet | RawColumns
    if config.format == "coco":
        raw = _columns(config, split, strictly, masks)
    else:
        raw = _raw(config, split, strictly, everything=masks)
    notes = strictly.report(raw)
    columns = RawColumns.of(raw, masks=masks) if isinstance(raw, RawSet) else raw
    check_boxes(columns, config.format)
    dataset = to_detection_set(
        columns,
        config.bad_boxes,
        duplicates=config.duplicate_boxes,
        masks=masks,
        notes=notes,
        whole=whole,
    )
    for line in dataset.notes[len(notes) :]:
        _LOGGER.warning(line)
    beside: set[str] = set()  # folders of files that were read
    if isinstance(raw, RawSet):
        beside.update(os.path.dirname(image.path) for image in raw.images)
        beside.update(os.path.dirname(image.where) for image in raw.images)
    elif strictly.met("size_missing"):
        beside.update(map(os.path.dirname, raw.paths))
    dataset = limited(dataset, limit, key)
    return Read(dataset, dataset.notes, _sources(config, split, beside))


def _sources(config: DataConfig, split: Split, beside: Collection[str]) -> Sources | None:
    """What the result of a split depends on.

    Args: beside: folders of files that were read, which may lie anywhere.
    Returns: None: unknown: a plugin reads it, or it is not on disk.
    """
    if config.reader:
        return None
    root, folders = _places(config, split)
    if is_remote(root) or is_in_shard(root):
        return None
    naming, annotations = _annotation_files(config, split)
    lists = (file for file in root.iterdir() if is_name_list(file.name))
    files = {naming, *annotations, *lists, *root.glob("*.y*ml")}
    listings: set[str] = {str(root)}  # where names of classes may appear
    contents = {*beside}
    if config.format == "coco":
        files, listings = {naming, *annotations}, set()
    elif config.format == "folder":
        for folder in (*folders, naming):
            listings.update(folders_below(folder))
    elif config.format in ("voc", "yolo"):
        of_labels = [*annotations, naming] if config.format == "voc" else [*annotations]
        of_labels += [root / "Annotations"] if config.format == "voc" else []
        for folder in (*folders, *of_labels):
            contents.update(folders_below(folder))
        if config.format == "yolo":
            contents.update(str(label_folder(Path(place), root)) for place in [*contents])
            above = {each for place in contents for each in Path(place).parents}
            contents.update(str(each) for each in above if each.is_relative_to(root))
    files = {file for file in files if not file.is_dir()}
    if any(is_remote(file) or is_in_shard(file) for file in files):
        return None
    return Sources((*map(str, files), *sorted(listings)), tuple(sorted(contents)))


def _columns(config: DataConfig, split: Split, complain: Complain, masks: bool) -> RawColumns:
    """A split of COCO, as training reads it."""
    _, (images,) = _places(config, split)
    _, (annotations,) = _annotation_files(config, split)
    known = _known_classes(config, split)
    columns = read_coco_columns(
        images, annotations, complain, known=known, masks=masks, opener=STORAGE
    )
    find_alike(columns.class_names, columns.source, complain)
    return columns.of_images(_in_part(config, split, columns.paths))


def _raw(config: DataConfig, split: Split, complain: Complain, *, everything: bool) -> RawSet:
    if config.reader:
        raw = plugin.load(config.reader)(config, split, complain)
    else:
        raw = _raw_of_ours(config, split, complain, everything=everything)
    find_alike(raw.class_names, raw.source, complain)
    kept = _in_part(config, split, [str(image.path) for image in raw.images])
    images = [image for image, keep in zip(raw.images, kept) if keep]
    return replace(raw, images=images, opener=STORAGE)


def _raw_of_ours(
    config: DataConfig, split: Split, complain: Complain, *, everything: bool
) -> RawSet:
    root, (images, *more) = _places(config, split)
    naming, annotations = _annotation_files(config, split)
    names = config.class_names
    if config.format == "coco":
        known = _known_classes(config, split)
        return read_coco(images, annotations[0], complain, known=known, opener=STORAGE)
    if config.format == "yolo":
        return read_yolo(root, (images, *more), annotations, names, complain, opener=STORAGE)
    source = annotations[0] if annotations else images
    return read_voc(
        root, images, source, names, complain,
        naming=naming, everything=everything, opener=STORAGE,
    )  # fmt: skip


def _known_classes(config: DataConfig, split: Split) -> KnownClasses:
    """What names a COCO file's classes: data.class_names or the training file.

    Raises: DataError: that file is not COCO.
    """
    if config.class_names:
        return KnownClasses(config.class_names, "data.class_names")
    naming, (annotations,) = _annotation_files(config, split)
    naming = local_copy(naming)
    if naming == annotations or not naming.is_file():  # of a set that is evaluated alone
        return OWN_CLASSES
    return KnownClasses(read_index(naming)[1], str(naming))


def _classified(config: DataConfig, split: Split, complain: Complain) -> DetectionSet:
    root, (images,) = _places(config, split)
    naming, tables = _annotation_files(config, split)
    if config.format == "folder":
        dataset = read_folder(root, images, config.class_names, naming_folder=naming)
    else:
        dataset = read_csv(root, images, tables[0], config.class_names, naming_table=naming)
    find_alike(dataset.class_names, dataset.source, complain)
    kept = _in_part(config, split, [record.path for record in dataset.records])
    records = [each for each, keep in zip(dataset.records, kept) if keep]
    return replace(dataset, records=records)


def _in_part(config: DataConfig, split: Split, paths: Sequence[str]) -> list[bool]:
    """Which images of a set that `data.val_fraction` divides belong to a split.

    Images in the order of a digest of (seed, path below data.root): the first ones validate.  So an
    image that is added or removed moves one other from one split to the other at most.
    """
    if config.val_fraction is None or split == "test":
        return [True] * len(paths)
    top = os.path.join(absolute(config.root), "")
    digests = [
        hashlib.blake2b(
            os.fsencode(f"{_SEED} {absolute(path).removeprefix(top)}"), digest_size=8
        ).digest()
        for path in paths
    ]
    distinct = sorted(set(digests))  # an image that is listed twice stays in one split
    if len(distinct) == 1:  # the only image trains and validates
        return [True] * len(paths)
    held = set(distinct[: max(1, round(config.val_fraction * len(distinct)))])
    return [(digest in held) == (split == "val") for digest in digests]


_ANNOTATIONS = {"coco": "JSON file", "csv": "CSV file"}


def _annotation_files(config: DataConfig, split: Split) -> tuple[Path, tuple[Path, ...]]:
    """Files that may name the classes, and this split's annotations.

    The first are those of the training split; the others are files or folders, none where the
    images lead to them.
    """
    if config.format == "folder":  # of its images the folders name the classes
        return folder_of(config.root, config.train.image_folders[0]), ()
    for key, part in config.splits:
        if not part.annotation_files and config.format in _ANNOTATIONS:
            raise DataError(
                f"data.{key}.annotations is missing: format {config.format} needs it",
                code="missing_key",
            )
    first = (*config.train.annotation_files, *config.train.image_folders)[0]
    naming = folder_of(config.root, first)
    if config.format == "csv":
        naming = local_copy(naming)
    found = tuple(
        local_copy(folder_of(config.root, name))
        for name in _section(config, split).annotation_files
    )
    for annotations in found:
        if not annotations.exists():
            raise DataError(
                f"{annotations} does not exist",
                code="annotation_file_missing",
                where=f"data.{split}.annotations",
            )
        expected = _ANNOTATIONS.get(config.format, "file of image paths")
        if annotations.is_dir() and (config.format in _ANNOTATIONS or len(found) > 1):
            raise DataError(
                f"{annotations} is a folder; expected a {expected}",
                code="annotation_file_expected",
                where=f"data.{split}.annotations",
            )
    return naming, found


def _raw_of(dataset: DetectionSet) -> RawSet:
    images = [
        RawImage(
            path=Path(record.path),
            image_id=record.image_id,
            width=0,
            height=0,
            objects=[RawObject((0.0, 0.0, 0.0, 0.0), int(record.labels_M[0]), record.path)],
            where=record.path,
        )
        for record in dataset.records
    ]
    return RawSet(images, dataset.class_names, dataset.category_ids, dataset.source)


_SEED = 0  # not the run's: runs with other seeds are compared on the same images


def limited(dataset: DetectionSet, limit: int | None, key: str) -> DetectionSet:
    """The first `limit` images of `draw_order`.

    They depend on the annotations alone.  The images keep their order in the files, and the set its
    classes, also those without an object.  Of a set of as many images or fewer all are taken.
    Readers for a user report its `limited`, which tells what was done.

    Args:
        limit: images; None: all.
        key: of the configuration, for that line.
    """
    count = len(dataset.records)
    if limit is None:
        return dataset
    if limit >= count:
        note = f"{key}: {limit}, and there are {count} images: all of them are used"
        return replace(dataset, limited=note)
    records = Records.of(dataset.records)
    chosen = sorted(draw_order(records, len(dataset.class_names))[:limit].tolist())
    few = Records(records[index] for index in chosen)
    before, after = (set(each.labels_O[~each.crowd_O].tolist()) for each in (records, few))
    note = f"{key}: {limit} of {count} images"
    absent = [dataset.class_names[label] for label in sorted(before - after)]
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        note += f", without any object of {', '.join(absent[:5])}{more}"
    place_of = {index: place for place, index in enumerate(chosen)}
    indices = sorted(dataset.duplicates.keys() & place_of.keys())
    duplicates = {place_of[index]: dataset.duplicates[index] for index in indices}
    return replace(dataset, records=few, limited=note, duplicates=duplicates)


def limits(*sets: DetectionSet | None) -> list[str]:
    """What there is to say about the limits of some sets."""
    return [dataset.limited for dataset in sets if dataset is not None and dataset.limited]


def draw_order(records: Records, num_classes: int) -> np.ndarray:
    """An order of the images in which few show every class.

    A random order drawn from a fixed seed, in which those images come first that show every class:
    again and again the one with the most classes not seen so far (the earliest of equals).  That
    greedy choice needs at most 1 + ln C times the fewest possible (Johnson 1974, Approximation
    algorithms for combinatorial problems, theorem 4).  A smaller limit takes images of a larger
    one, so curves over the number of images add images and take none away.

    Returns: [N] positions in records.
    """
    count = len(records)
    order_N = keyed_generator(_SEED, count).permutation(count)
    rank_N = np.empty(count, np.int64)
    rank_N[order_N] = np.arange(count)
    image_O = records.image_O
    counted_O = ~records.crowd_O
    # Pairs (image, class), each once; images by their place in the drawn order, so that the first
    # of several that show as many new classes is the earliest.
    pairs = np.unique(rank_N[image_O[counted_O]] * num_classes + records.labels_O[counted_O])
    places, labels = np.divmod(pairs, max(1, num_classes))
    first: list[int] = []
    while len(places):
        best = int(np.bincount(places).argmax())
        first.append(best)
        seen = np.isin(labels, labels[places == best])
        places, labels = places[~seen], labels[~seen]
    rest = np.setdiff1d(np.arange(count), np.array(first, np.int64))
    return order_N[np.concatenate([np.array(first, np.int64), rest])]


def check_files(dataset: DetectionSet) -> None:
    """Checks that every image exists.

    It takes one listing per folder, and a look-up only of each image that is a link.

    Raises: DataError: no image is listed, listed ones do not exist, or a folder cannot be listed.
    """
    if not dataset.records:
        raise DataError("lists no image", code="no_images", where=dataset.source)
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    paths = Records.of(dataset.records).paths()
    for path in paths:
        folder, _, name = path.rpartition("/")  # a third of os.path.split's time, and exact
        wanted[folder].append(name)
    absent: set[str] = set()
    storage.forget_listings(wanted)
    for folder, names in wanted.items():
        if is_remote(folder) or is_in_shard(folder):
            absent |= _absent_in_store(folder, names, dataset.source)
            continue
        is_link = _listing(folder or "/", dataset.source)
        for name in names:
            link = is_link.get(name)
            if link is None or (link and _leads_nowhere(f"{folder}/{name}")):
                absent.add(f"{folder}/{name}")
    if absent:
        first = [path for path in paths if path in absent][:3]
        unread = unread_image(first[0])
        hint = f" (there is {os.path.basename(unread)}, a kind that is not read)" if unread else ""
        raise DataError(
            f"{len(absent)} of {len(dataset.records)} images do not exist, first "
            f"{', '.join(first)}{hint}",
            code="image_missing",
            where=dataset.source,
            fix="check data.root and the images folder",
        )


def _absent_in_store(folder: str, names: Sequence[str], source: str) -> set[str]:
    """Paths of listed images that the store does not have.

    Raises: DataError: the store or the index of the shards refuses.  StorageError: it is away.
    """
    try:
        absent = storage.list_absent(folder, names)
    except OSError as error:
        where = error.filename or folder
        raise DataError(
            f"the images that {source} lists cannot be found: {error.strerror or error}",
            code="folder_unreadable",
            where=f"{where}",
        ) from error
    return {f"{folder}/{name}" for name in absent or ()}


def _listing(folder: str, source: str) -> dict[str, bool]:
    """Maps names in a folder to whether each is a link."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise DataError(
            f"the folder of images that {source} lists cannot be listed: {error.strerror or error}",
            code="folder_unreadable",
            where=folder,
            fix="give this user the right to read it",
        ) from error


def _leads_nowhere(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # there is something: who reads it will say what is wrong
        return False
    return False


def check_classes(dataset: DetectionSet, num_classes: int) -> None:
    """Checks that the data have as many classes as the model.

    Raises: DataError.
    """
    found = len(dataset.class_names)
    if found != num_classes:
        fix = f"set model.num_classes: {found}"
        if dataset.class_names[:1] == ("0",) and all(0 not in r.labels_M for r in dataset.records):
            fix += "; nothing there is of class 0, and numbers of classes start at 0"
        raise DataError(
            f"model.num_classes is {num_classes} but {dataset.source} has {found} categories "
            f"({listed(dataset.class_names)})",
            code="num_classes_differ",
            fix=fix,
        )


def check_objects(dataset: DetectionSet) -> None:
    """Checks that there is something to learn or to measure.

    Raises: DataError: no object in any image.
    """
    if not has_objects(dataset):
        raise DataError(
            f"none of its {len(dataset.records)} images has an object",
            code="objects_missing",
            where=dataset.source,
            fix="check that the annotations belong to these images; to save detections of images "
            "without annotations, use `ppdist eval -w RUN --save-detections FILE`",
        )


def has_objects(dataset: DetectionSet) -> bool:
    """Whether anything but crowds is annotated."""
    return bool((~Records.of(dataset.records).crowd_O).any())


def same_sets(config: DataConfig) -> str:
    """Warning that training and validation use the same data; else ""."""
    if config.val_fraction is not None:
        return ""
    root = folder_of(config.root)
    train, val = (
        [
            [os.path.realpath(root / name) for name in names]
            for names in (part.annotation_files or part.image_folders, part.image_folders)
        ]
        for part in (config.train, config.val)
    )
    folders = config.format == "folder" or os.path.isdir(train[0][0])
    if train != val if folders else train[0] != val[0]:
        return ""
    return (
        f"{', '.join(train[0])}: both data.train and data.val: scores say how well training images "
        f"are remembered, nothing about others; `ppdist data split` divides a set"
    )


def check_same_classes(train: DetectionSet | RawSet, val: DetectionSet | RawSet) -> None:
    """Checks that both splits mean the same by each class number.

    Readers take the names of the training split for both; a format of another package may not.

    Raises: DataError: the names differ.
    """
    if train.class_names != val.class_names:
        raise DataError(
            f"{train.source} and {val.source} have different classes "
            f"({listed(train.class_names)} and {listed(val.class_names)})",
            code="classes_differ",
            fix="use the same class names in the same order in both",
        )
