"""Reading of the `data:` section: one entrance to every annotation format.

    read_split -> reader of the format -> its part (`data.val_fraction`)
               -> its classes (`data.classes`, `data.single_class`)
               -> subset (`data.*.limit`, `data.fraction`) -> DetectionSet

A part and a subset are the same in every run and on every rank.  Before training the splits must
agree on their classes, and their images must be on disk.

Only this module connects the configuration with the data.  So it is the only reader that knows
storage: the set carries the opener with which its images are read.
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
from ppdist.data.datasets.annotation_cache import ReadResult, Sources, load_or_read
from ppdist.data.datasets.annotations import (
    IssueLog,
    abbreviate,
    find_unsupported,
    folders_below,
    forget_folder_listings,
    is_class_list,
    report_similar_names,
    to_detection_set,
)
from ppdist.data.datasets.coco import (
    FILE_CLASSES,
    GivenClasses,
    read_coco,
    read_coco_columns,
    read_index,
)
from ppdist.data.datasets.folder import build_classified_set, read_csv, read_folder
from ppdist.data.datasets.plausibility import check_boxes
from ppdist.data.datasets.selection import select_classes, select_image_classes
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
    all_images: bool = False,
    annotated: bool = True,
) -> DetectionSet:
    """Reads one split; every rank gets the same set.

    Args:
        num_classes: number of classes of the model; the data must have as many classes, and an
            object.  None: neither is checked.
        masks: keeps the outlines of objects.
        all_images: keeps all images, even beyond the `limit` of the split or without a usable box.
        annotated: False: a set without an object is accepted, too.
    Raises: DataError: files are missing or of another format, a box is bad, or classes differ.
    """
    _configure_storage(config)
    _check_folder(config, split)

    def check(dataset: DetectionSet) -> None:
        check_files(dataset)
        if num_classes is not None:
            check_classes(dataset, num_classes)
            if annotated:
                check_objects(dataset)

    return _load_or_read(config, split, masks, all_images, check)


def read_annotations(config: DataConfig, split: Split, num_classes: int) -> DetectionSet:
    """Reads one split with all images like `read_split`, but the image files need not exist."""
    _configure_storage(config)

    def check(dataset: DetectionSet) -> None:
        check_classes(dataset, num_classes)

    return _load_or_read(config, split, False, True, check)


def _load_or_read(
    config: DataConfig,
    split: Split,
    masks: bool,
    all_images: bool,
    check: Callable[[DetectionSet], None],
) -> DetectionSet:
    """Reads a split, from the cache if nothing it depends on has changed.

    Raises: DataError: the split cannot be read, or `check` fails.
    """
    read = partial(_read_split, config, split, masks, all_images)
    fields = {"format", "train", "val", "test", "val_fraction", "class_names"}
    fields |= {"bad_boxes", "duplicate_boxes", "classes", "single_class", "fraction"}
    roots = os.path.abspath(config.root), config.root
    settings = [*roots, config.model_dump(include=fields), split, masks, all_images]
    result, from_cache = load_or_read(settings, read, force=False)
    dataset = replace(result.dataset, opener=STORAGE)
    if from_cache:
        try:
            check(dataset)
        except DataError:  # read again: the error must be about the current files
            result, _ = load_or_read(settings, read, force=True)
            dataset = replace(result.dataset, opener=STORAGE)
        else:
            for line in result.warnings:
                _LOGGER.warning(line)
            return dataset
    check(dataset)
    return dataset


def _configure_storage(config: DataConfig) -> None:
    # A worker gives a sign of life between requests, each of which takes at most twice its timeout.
    seconds = min(_LONGEST_REQUEST_SECONDS, config.worker_timeout_seconds / 3)
    stores.configure(int(config.store_cache_gib * 2**30), seconds)


def read_raw(config: DataConfig, split: Split, complain: Complain) -> RawSet:
    """Reads a split as it is in its files, with everything that conversion keeps.

    The objects of classified images have no location: box and size are 0, unknown.

    Args:
        complain: receives an issue for each faulty part of a file; if it returns, the part is left
            out.
    Raises: DataError: a file is missing or of another format; see also `check_boxes`.
    """
    _configure_storage(config)
    forget_folder_listings()
    _check_folder(config, split)
    if config.task == "classify":
        return replace(_classified_raw(_read_classified(config, split, complain)), opener=STORAGE)
    raw = _read_raw_split(config, split, complain, everything=True)
    check_boxes(RawColumns.of(raw, masks=False), config.format)
    return raw


def dataset_from_raw(
    config: DataConfig, split: Split, raw: RawSet, num_classes: int
) -> DetectionSet:
    """Converts a split of `read_raw` to a training set, checked as in `read_split`.

    Raises: DataError: a box is bad, or the classes differ from those of the model.
    """
    if config.task == "classify":
        labels = [(str(image.path), image.objects[0].label) for image in raw.images]
        dataset = build_classified_set(labels, raw.class_names, raw.source)
        dataset = select_image_classes(dataset, config.classes)
    else:
        columns = RawColumns.of(raw, masks=False)
        columns = select_classes(columns, config.classes, config.single_class)
        dataset = to_detection_set(columns, config.bad_boxes, duplicates=config.duplicate_boxes)
    dataset = replace(dataset, opener=raw.opener)
    dataset = _take_subset(config, split, dataset)
    check_classes(dataset, num_classes)
    check_objects(dataset)
    return dataset


def _check_folder(config: DataConfig, split: Split) -> None:
    _, folders = _find_folders(config, split)
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


def _find_folders(config: DataConfig, split: Split) -> tuple[Path, tuple[Path, ...]]:
    """Returns `data.root`, and the image folders of a split (YOLO: several)."""
    root = folder_of(config.root)
    folders = tuple(
        folder_of(config.root, name) for name in _split_section(config, split).image_folders
    )
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


_SINGLE_FILE_FORMATS = ("coco", "csv")  # formats with one file per split


def _require_few_files(config: DataConfig, split: Split) -> None:
    """Checks that a format neither reads many small files nor lists folders.

    Raises: DataError: it does one of these.
    """
    if config.format in _SINGLE_FILE_FORMATS or config.reader:
        return
    raise DataError(
        f"data.format {config.format} reads many small files or lists folders, which is slow in an "
        f"object store",
        code="store_format",
        where=f"data.{split}",
        fix="convert it on a disk: `ppdist data convert DATA --to coco --shards "
        "256MB --out DIR`, and upload that",
    )


def _split_section(config: DataConfig, split: Split) -> SplitConfig:
    section = {"train": config.train, "val": config.val, "test": config.test}[split]
    if section is None:
        raise DataError(
            f"there is no {split} split",
            code="split_missing",
            where=f"data.{split}",
            fix=f"set data.{split}.images and data.{split}.annotations in a configuration",
        )
    return section


def _read_split(config: DataConfig, split: Split, masks: bool, all_images: bool) -> ReadResult:
    """Reads a split from its files: only its part, and at most `data.*.limit` images of it."""
    strictly = IssueLog()
    forget_folder_listings()
    if config.task == "classify":
        dataset = _read_classified(config, split, strictly)
        warnings = strictly.report(dataset)
        dataset = replace(dataset, notes=(*dataset.notes, *warnings))
        dataset = select_image_classes(dataset, config.classes)
        if not all_images:
            dataset = _take_subset(config, split, dataset)
        return ReadResult(dataset, warnings, _collect_sources(config, split, ()))
    raw: RawSet | RawColumns
    if config.format == "coco":
        raw = _read_columns(config, split, strictly, masks)
    else:
        raw = _read_raw_split(config, split, strictly, everything=masks)
    notes = strictly.report(raw)
    columns = RawColumns.of(raw, masks=masks) if isinstance(raw, RawSet) else raw
    check_boxes(columns, config.format)
    dataset = to_detection_set(
        select_classes(columns, config.classes, config.single_class),
        config.bad_boxes,
        duplicates=config.duplicate_boxes,
        masks=masks,
        notes=notes,
        all_images=all_images,
    )
    for line in dataset.notes[len(notes) :]:
        _LOGGER.warning(line)
    folders: set[str] = set()  # folders of the files that were read
    if isinstance(raw, RawSet):
        folders.update(os.path.dirname(image.path) for image in raw.images)
        folders.update(os.path.dirname(image.where) for image in raw.images)
    elif strictly.has_kind("size_missing"):
        folders.update(map(os.path.dirname, raw.paths))
    if not all_images:
        dataset = _take_subset(config, split, dataset)
    return ReadResult(dataset, dataset.notes, _collect_sources(config, split, folders))


def _collect_sources(
    config: DataConfig, split: Split, read_folders: Collection[str]
) -> Sources | None:
    """Collects everything that the result of a split depends on.

    Args: read_folders: folders of the files that were read, which may be anywhere.
    Returns: None if they are unknown, as a plug-in reads the split, or if it is not on disk.
    """
    if config.reader:
        return None
    root, folders = _find_folders(config, split)
    if is_remote(root) or is_in_shard(root):
        return None
    naming, annotations = _annotation_files(config, split)
    lists = (file for file in root.iterdir() if is_class_list(file.name))
    files = {naming, *annotations, *lists, *root.glob("*.y*ml")}
    listings: set[str] = {str(root)}  # where lists of class names may appear
    contents = {*read_folders}
    if config.format == "coco":
        files, listings = {naming, *annotations}, set()
    elif config.format == "folder":
        for folder in (*folders, naming):
            listings.update(folders_below(folder))
    elif config.format in ("voc", "yolo"):
        label_sources = [*annotations, naming] if config.format == "voc" else [*annotations]
        label_sources += [root / "Annotations"] if config.format == "voc" else []
        for folder in (*folders, *label_sources):
            contents.update(folders_below(folder))
        if config.format == "yolo":
            contents.update(str(label_folder(Path(place), root)) for place in [*contents])
            parents = {parent for place in contents for parent in Path(place).parents}
            contents.update(str(parent) for parent in parents if parent.is_relative_to(root))
    files = {file for file in files if not file.is_dir()}
    if any(is_remote(file) or is_in_shard(file) for file in files):
        return None
    return Sources((*map(str, files), *sorted(listings)), tuple(sorted(contents)))


def _read_columns(config: DataConfig, split: Split, complain: Complain, masks: bool) -> RawColumns:
    """Reads a COCO split in columns, with what training needs."""
    _, (images,) = _find_folders(config, split)
    _, (annotations,) = _annotation_files(config, split)
    given_classes = _given_classes(config, split)
    columns = read_coco_columns(
        images, annotations, complain, given_classes=given_classes, masks=masks, opener=STORAGE
    )
    report_similar_names(columns.class_names, columns.source, complain)
    return columns.select_images(_select_part(config, split, columns.paths))


def _read_raw_split(
    config: DataConfig, split: Split, complain: Complain, *, everything: bool
) -> RawSet:
    if config.reader:
        raw = plugin.load(config.reader)(config, split, complain)
    else:
        raw = _read_builtin_format(config, split, complain, everything=everything)
    report_similar_names(raw.class_names, raw.source, complain)
    is_selected = _select_part(config, split, [str(image.path) for image in raw.images])
    images = [image for image, keep in zip(raw.images, is_selected) if keep]
    return replace(raw, images=images, opener=STORAGE)


def _read_builtin_format(
    config: DataConfig, split: Split, complain: Complain, *, everything: bool
) -> RawSet:
    root, (images, *more) = _find_folders(config, split)
    naming, annotations = _annotation_files(config, split)
    names = config.class_names
    if config.format == "coco":
        given_classes = _given_classes(config, split)
        return read_coco(
            images, annotations[0], complain, given_classes=given_classes, opener=STORAGE
        )
    if config.format == "yolo":
        return read_yolo(root, (images, *more), annotations, names, complain, opener=STORAGE)
    source = annotations[0] if annotations else images
    return read_voc(
        root, images, source, names, complain,
        naming=naming, everything=everything, opener=STORAGE,
    )  # fmt: skip


def _given_classes(config: DataConfig, split: Split) -> GivenClasses:
    """Returns the classes for a COCO file: data.class_names, or those of the training file.

    Raises: DataError: the training file is not COCO.
    """
    if config.class_names:
        return GivenClasses(config.class_names, "data.class_names")
    naming, (annotations,) = _annotation_files(config, split)
    naming = local_copy(naming)
    # The set is evaluated without its training set.
    if naming == annotations or not naming.is_file():
        return FILE_CLASSES
    return GivenClasses(read_index(naming)[1], str(naming))


def _read_classified(config: DataConfig, split: Split, complain: Complain) -> DetectionSet:
    root, (images,) = _find_folders(config, split)
    naming, tables = _annotation_files(config, split)
    if config.format == "folder":
        dataset = read_folder(root, images, config.class_names, naming_folder=naming)
    else:
        dataset = read_csv(root, images, tables[0], config.class_names, naming_table=naming)
    report_similar_names(dataset.class_names, dataset.source, complain)
    is_selected = _select_part(config, split, [record.path for record in dataset.records])
    records = [record for record, keep in zip(dataset.records, is_selected) if keep]
    return replace(dataset, records=records)


def _select_part(config: DataConfig, split: Split, paths: Sequence[str]) -> list[bool]:
    """Selects the images of a split from a set that `data.val_fraction` divides: [N] bool.

    Orders images by a digest of (seed, path below data.root); the first ones are for validation.
    So adding or removing an image moves at most one other image between the splits.
    """
    if config.val_fraction is None or split == "test":
        return [True] * len(paths)
    top = os.path.join(absolute(config.root), "")
    # Unlike a random number, a digest does not depend on the other images.
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
    """Returns the files that may name the classes, and the annotations of this split.

    The first is a file of the training split; the annotations are files or folders, and empty if
    they are found by the paths of the images.
    """
    if config.format == "folder":  # the folders of its images name the classes
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
    files = tuple(
        local_copy(folder_of(config.root, name))
        for name in _split_section(config, split).annotation_files
    )
    for annotations in files:
        if not annotations.exists():
            raise DataError(
                f"{annotations} does not exist",
                code="annotation_file_missing",
                where=f"data.{split}.annotations",
            )
        expected = _ANNOTATIONS.get(config.format, "file of image paths")
        if annotations.is_dir() and (config.format in _ANNOTATIONS or len(files) > 1):
            raise DataError(
                f"{annotations} is a folder; expected a {expected}",
                code="annotation_file_expected",
                where=f"data.{split}.annotations",
            )
    return naming, files


def _classified_raw(dataset: DetectionSet) -> RawSet:
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


_SEED = 0  # not that of the run, so that runs with other seeds use the same images


def _take_subset(config: DataConfig, split: Split, dataset: DetectionSet) -> DetectionSet:
    """Limits a split to the images of its `limit`, or of `data.fraction`."""
    if split == "train" and config.fraction < 1:
        count = max(1, round(config.fraction * len(dataset.records)))
        return limit_images(dataset, count, f"data.fraction {config.fraction:g}")
    return limit_images(dataset, _split_section(config, split).limit, f"data.{split}.limit")


def limit_images(dataset: DetectionSet, limit: int | None, key: str) -> DetectionSet:
    """Limits a set to the first `limit` images of `draw_order`.

    The choice depends only on the annotations.  The images keep their order, and the set keeps its
    classes, even those without an object.  A smaller set keeps all images.  Commands report the
    field `limited`, which describes the result.

    Args:
        limit: number of images; None: all images.
        key: configuration key of the limit, for the line in `limited`.
    """
    count = len(dataset.records)
    if limit is None:
        return dataset
    if limit >= count:
        note = f"{key}: {limit}, and there are {count} images: all of them are used"
        return replace(dataset, limited=note)
    records = Records.of(dataset.records)
    chosen = sorted(draw_order(records, len(dataset.class_names))[:limit].tolist())
    subset = Records(records[index] for index in chosen)
    before, after = (set(part.labels_O[~part.crowd_O].tolist()) for part in (records, subset))
    note = f"{key}: {limit} of {count} images"
    absent = [dataset.class_names[label] for label in sorted(before - after)]
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        note += f", without any object of {', '.join(absent[:5])}{more}"
    place_of = {index: place for place, index in enumerate(chosen)}
    indices = sorted(dataset.duplicates.keys() & place_of.keys())
    duplicates = {place_of[index]: dataset.duplicates[index] for index in indices}
    return replace(dataset, records=subset, limited=note, duplicates=duplicates)


def limit_notes(*sets: DetectionSet | None) -> list[str]:
    """Returns the lines about the limits of some sets."""
    return [dataset.limited for dataset in sets if dataset is not None and dataset.limited]


def draw_order(records: Records, num_classes: int) -> np.ndarray:
    """Draws an order of the images whose first few show every class.

    The order is random with a fixed seed, except that images which show every class come first:
    repeatedly the one with the most classes not covered yet (the earliest of equals).  That greedy
    choice needs at most 1 + ln C times the minimum (Johnson 1974, Approximation algorithms for
    combinatorial problems, theorem 4).  A larger limit keeps all images of a smaller one, so along
    a curve over the number of images, images are only added.

    Returns: [N] positions in records.
    """
    count = len(records)
    order_N = keyed_generator(_SEED, count).permutation(count)
    rank_N = np.empty(count, np.int64)
    rank_N[order_N] = np.arange(count)
    image_O = records.image_O
    counted_O = ~records.crowd_O
    # Distinct pairs (image, class), with images as positions in the drawn order, so that argmax
    # takes the earliest of the images that add most classes.
    pairs = np.unique(rank_N[image_O[counted_O]] * num_classes + records.labels_O[counted_O])
    places, labels = np.divmod(pairs, max(1, num_classes))
    first: list[int] = []
    while len(places):
        best_place = int(np.bincount(places).argmax())
        first.append(best_place)
        is_covered = np.isin(labels, labels[places == best_place])
        places, labels = places[~is_covered], labels[~is_covered]
    remaining = np.setdiff1d(np.arange(count), np.array(first, np.int64))
    return order_N[np.concatenate([np.array(first, np.int64), remaining])]


def check_files(dataset: DetectionSet) -> None:
    """Checks that every image exists.

    Lists each folder once, and looks up only images that are links.

    Raises: DataError: the set is empty, images do not exist, or a folder cannot be listed.
    """
    if not dataset.records:
        raise DataError("lists no image", code="no_images", where=dataset.source)
    names_by_folder: defaultdict[str, list[str]] = defaultdict(list)
    paths = Records.of(dataset.records).paths()
    for path in paths:
        folder, _, name = path.rpartition("/")  # three times as fast as os.path.split, and exact
        names_by_folder[folder].append(name)
    absent: set[str] = set()
    storage.forget_listings(names_by_folder)
    # A listing is a single request, even on a network disk; a stat call per image is not.
    for folder, names in names_by_folder.items():
        if is_remote(folder) or is_in_shard(folder):
            absent |= _missing_in_store(folder, names, dataset.source)
            continue
        is_link = _list_links(folder or "/", dataset.source)
        for name in names:
            link = is_link.get(name)
            if link is None or (link and _is_broken_link(f"{folder}/{name}")):
                absent.add(f"{folder}/{name}")
    if absent:
        first = [path for path in paths if path in absent][:3]
        unsupported = find_unsupported(first[0])
        hint = (
            f" (there is {os.path.basename(unsupported)}, a kind that is not read)"
            if unsupported
            else ""
        )
        raise DataError(
            f"{len(absent)} of {len(dataset.records)} images do not exist, first "
            f"{', '.join(first)}{hint}",
            code="image_missing",
            where=dataset.source,
            fix="check data.root and the images folder",
        )


def _missing_in_store(folder: str, names: Sequence[str], source: str) -> set[str]:
    """Returns the paths of listed images that the store does not have.

    Raises: DataError: the store or the index of the shards fails.  StorageError: it is unavailable.
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


def _list_links(folder: str, source: str) -> dict[str, bool]:
    """Lists a folder: name -> True for a link."""
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


def _is_broken_link(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it exists; reading it will report the cause
        return False
    return False


def check_classes(dataset: DetectionSet, num_classes: int) -> None:
    """Checks that the data have as many classes as the model.

    Raises: DataError: the numbers of classes differ.
    """
    class_count = len(dataset.class_names)
    if class_count != num_classes:
        fix = f"set model.num_classes: {class_count}"
        if dataset.class_names[:1] == ("0",) and all(0 not in r.labels_M for r in dataset.records):
            fix += "; nothing there is of class 0, and numbers of classes start at 0"
        raise DataError(
            f"model.num_classes is {num_classes} but {dataset.source} has {class_count} categories "
            f"({abbreviate(dataset.class_names)})",
            code="num_classes_differ",
            fix=fix,
        )


def check_objects(dataset: DetectionSet) -> None:
    """Checks that a set has an object to learn or to measure.

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
    """Returns True if anything but crowds is annotated."""
    return bool((~Records.of(dataset.records).crowd_O).any())


def describe_same_sets(config: DataConfig) -> str:
    """Returns a line if training and validation use the same data; "" if they do not."""
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
    """Checks that class numbers mean the same in both splits.

    Readers use the names of the training split for both; a plug-in's reader may not.

    Raises: DataError: the names differ.
    """
    if train.class_names != val.class_names:
        raise DataError(
            f"{train.source} and {val.source} have different classes "
            f"({abbreviate(train.class_names)} and {abbreviate(val.class_names)})",
            code="classes_differ",
            fix="use the same class names in the same order in both",
        )
