"""Divides one split into several, so that each has its share of every class.

    images -> groups of one content -> parts (`divide`) -> files of the set's own format (`write`)

An annotation file is divided by its entries, which stay as they are; no image moves.
"""

import csv
import hashlib
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ppdist.config.data import DataConfig
from ppdist.data.formats.annotations import read_text
from ppdist.data.formats.names import read_list
from ppdist.data.formats.raw import Finding
from ppdist.data.sample import DetectionSet, keyed_generator
from ppdist.errors import ConfigError, DataError, UserError
from ppdist.files import make_parent, writing

_NAME = re.compile(r"[\w-]+")
_STREAM = 7  # of random numbers, beside those of training


def shares_of(texts: Sequence[str]) -> dict[str, float]:
    """Parts and their shares, from texts like `train=0.8`.

    Raises: ConfigError: not so, or fewer than two parts, or the shares do not make 1.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            shares[name] = float(number)
        except ValueError:
            shares[name] = 0.0
        if not _NAME.fullmatch(name) or not 0 < shares[name] < 1:
            raise ConfigError(
                "expected a name (letters, digits, - and _) and a share between 0 and 1, such as "
                "train=0.8",
                code="bad_parts",
                where=f"--parts {text}",
            )
    if len(shares) < max(2, len(texts)) or abs(sum(shares.values()) - 1) > 1e-6:
        raise ConfigError(
            "expected two parts or more, of different names, whose shares make 1, such as "
            "train=0.8 val=0.2",
            code="bad_parts",
            where=f"--parts {' '.join(texts)}",
        )
    return shares


def folds_of(count: int) -> dict[str, Collection[int]]:
    """For cross-validation: `fold1_train` and `fold1_val`, ... -> parts, see `write_parts`."""
    folds: dict[str, Collection[int]] = {}
    for fold in range(count):
        folds[f"fold{fold + 1}_train"] = {part for part in range(count) if part != fold}
        folds[f"fold{fold + 1}_val"] = {fold}
    return folds


def groups_of_one_content(paths: Sequence[str]) -> np.ndarray:
    """int64 [N]: images get the same number where their files hold the same bytes.

    Only files of the same length are read, so a set without copies costs one look at each entry.
    An image that is not there stands alone.
    """
    same_length: defaultdict[int, list[int]] = defaultdict(list)
    group_N = np.arange(len(paths))
    for index, path in enumerate(paths):
        if os.path.isfile(path):
            same_length[os.path.getsize(path)].append(index)
    for indices in same_length.values():
        first: dict[bytes, int] = {}
        for index in indices if len(indices) > 1 else ():
            digest = hashlib.blake2b(Path(paths[index]).read_bytes(), digest_size=16).digest()
            group_N[index] = first.setdefault(digest, index)
    return group_N


def divide(
    classes: Sequence[np.ndarray], group_N: np.ndarray, shares: Sequence[float], seed: int
) -> np.ndarray:
    """int64 [N]: the part each image goes to, a function of the arguments alone.

    The rarest class is dealt out first, then the rarest of what is left: each of its images to the
    part that lacks most of it, among equals the one that lacks most images.  As long as a class has
    no more images left than there are parts without any, they go to those; so the rarest class is
    in every part if it has an image for each.  Images of one group stay together.

    Args:
        classes: of each image, the classes it shows.
        group_N: see `groups_of_one_content`.
        shares: of the parts, each above 0, together 1.
    Source: Sechidis et al. 2011, "On the stratification of multi-label data", ECML PKDD,
        algorithm 1; ours are the groups, and that no part goes without a rare class.
    """
    share_P = np.asarray(shares, np.float64)
    groups, of_group_N = np.unique(group_N, return_inverse=True)
    weight_G = np.bincount(of_group_N, minlength=len(groups))
    shown = _classes_of_groups(classes, of_group_N, len(groups))
    count = 1 + max((int(labels[-1]) for labels in shown if len(labels)), default=-1)
    order_G = keyed_generator(seed, _STREAM).permutation(len(groups))
    showing: list[list[int]] = [[] for _ in range(count)]
    total_C, left_C = np.zeros(count), np.zeros(count, np.int64)
    for group in order_G.tolist():
        for label in shown[group].tolist():
            showing[label].append(group)
        total_C[shown[group]] += weight_G[group]
        left_C[shown[group]] += 1
    lacking_PC, lacking_P = share_P[:, None] * total_C, share_P * len(classes)
    without_PC = np.ones(lacking_PC.shape, bool)
    part_G = np.full(len(groups), -1, np.int64)

    def put(group: int, part: int) -> None:
        part_G[group] = part
        lacking_P[part] -= weight_G[group]
        lacking_PC[part, shown[group]] -= weight_G[group]
        without_PC[part, shown[group]] = False
        left_C[shown[group]] -= 1

    while left_C.any():
        rarest = int(np.where(left_C, left_C, len(groups) + 1).argmin())
        for group in showing[rarest]:
            if part_G[group] >= 0:
                continue
            lacking_P_of_class = lacking_PC[:, rarest]
            if left_C[rarest] <= without_PC[:, rarest].sum():
                lacking_P_of_class = np.where(without_PC[:, rarest], lacking_P_of_class, -np.inf)
            most_P = lacking_P_of_class >= lacking_P_of_class.max() - 1e-9
            put(group, int(np.where(most_P, lacking_P, -np.inf).argmax()))
    for group in order_G[part_G[order_G] < 0].tolist():
        put(group, int(lacking_P.argmax()))
    return part_G[of_group_N]


def _classes_of_groups(
    classes: Sequence[np.ndarray], of_group_N: np.ndarray, groups: int
) -> list[np.ndarray]:
    """The classes that any image of each group shows, each once, sorted."""
    found: list[set[int]] = [set() for _ in range(groups)]
    for group, labels in zip(of_group_N.tolist(), classes):
        found[group].update(labels.tolist())
    return [np.array(sorted(labels), np.int64) for labels in found]


def rows_of_parts(dataset: DetectionSet, part_N: np.ndarray, parts: int) -> list[list[str]]:
    """Rows of a table: all images, then those that show each class; in all, then in each part."""
    shown_CP = _shown(dataset, part_N, parts)
    sizes_P = np.bincount(part_N, minlength=parts)
    rows = [["any", *map(str, (len(part_N), *sizes_P))]]
    for name, count_P in zip(dataset.class_names, shown_CP):
        rows.append([name, *map(str, (count_P.sum(), *count_P))])
    return rows


def absent_classes(dataset: DetectionSet, part_N: np.ndarray, names: Sequence[str]) -> list[str]:
    """`CLASS in PART` where a part shows nothing of a class that another part shows."""
    return [
        f"{kind} in {part}"
        for kind, count_P in zip(dataset.class_names, _shown(dataset, part_N, len(names)))
        for part, count in zip(names, count_P)
        if count_P.any() and not count
    ]


def _shown(dataset: DetectionSet, part_N: np.ndarray, parts: int) -> np.ndarray:
    """int64 [C, parts]: images that show each class; crowds do not count."""
    shown_CP = np.zeros((len(dataset.class_names), parts), np.int64)
    for record, part in zip(dataset.records, part_N):
        shown_CP[np.unique(record.labels_M[~record.crowd_M]), part] += 1
    return shown_CP


def write_parts(
    config: DataConfig,
    dataset: DetectionSet,
    part_N: np.ndarray,
    wanted: Mapping[str, Collection[int]],
    out: Path | None,
) -> list[Path]:
    """Writes files of one part or several; entries and lines are those of the file that is divided.

    COCO: a JSON file with the same categories and everything else that stands beside them; VOC and
    YOLO: a list of images; CSV: the lines, with the header; a folder of classes becomes CSV files.

    Args:
        config: its `train` is what is divided.
        dataset: what was read from there.
        part_N: of each record, the number of its part.
        wanted: name -> numbers of the parts that its file holds, in their common order; a file is
            called like the one divided, `_` and the name.
        out: the folder; None: that of the file divided (of a folder: data.root).
    Raises: DataError: a file would be empty, the file has other images than the set, or a list
        could not name its labels; UserError: a file is there already, or cannot be written.
    """
    empty = [name for name, parts in wanted.items() if not np.isin(part_N, [*parts]).any()]
    if empty:
        raise DataError(
            f"{len(part_N)} images, copies of one another together, leave none for "
            f"{', '.join(empty)}: expected one for each part",
            code="empty_part",
            where=dataset.source,
            fix="give it a larger share, or make fewer parts",
        )
    root, source = Path(config.root), Path(config.root) / config.train.annotations
    if config.format == "folder" or source.is_dir():
        origin = Path(config.root) / config.train.images if config.format == "folder" else source
        folder, stem = out or root, origin.name
    else:
        folder, stem = out or source.parent, source.stem
    suffix = {"coco": ".json", "folder": ".csv", "csv": ".csv"}.get(config.format, ".txt")
    files = [folder / f"{stem}_{name}{suffix}" for name in wanted]
    there = [str(file) for file in files if file.exists()]
    if there:
        raise UserError(
            "is there already",
            code="file_exists",
            where=", ".join(there),
            fix="remove it, or choose --out",
        )
    texts = _texts(config, dataset, part_N, [*wanted.values()])
    for file, text in zip(files, texts):
        make_parent(file)
        with writing(file):
            file.write_text(text, encoding="utf-8")
    return files


def _texts(
    config: DataConfig, dataset: DetectionSet, part_N: np.ndarray, wanted: list[Collection[int]]
) -> list[str]:
    root, source = Path(config.root), Path(config.root) / config.train.annotations
    if config.format == "coco":
        part_of = {record.image_id: int(part) for record, part in zip(dataset.records, part_N)}
        content = json.loads(read_text(source, _quietly))
        return [_coco(content, part_of, parts) for parts in wanted]
    if config.format == "folder":
        images = Path(os.path.abspath(root / config.train.images))
        names = [dataset.class_names[int(record.labels_M[0])] for record in dataset.records]
        rows = [[os.path.relpath(r.path, images), name] for r, name in zip(dataset.records, names)]
        header, lines = "path,label\n", [_csv_line(row) for row in rows]
    elif config.format == "csv":
        header, lines = _csv_lines(source, len(dataset.records))
    elif source.is_dir():
        _require_labels_beside_images(config)
        header = ""
        lines = [os.path.relpath(record.path, os.path.abspath(root)) for record in dataset.records]
    else:
        header, lines = "", read_list(source, _quietly)
    if len(lines) != len(dataset.records):
        raise DataError(
            f"{len(lines)} lines for {len(dataset.records)} images: it cannot be divided line by "
            f"line",
            code="list_not_divisible",
            where=str(source),
            fix="`tools/data.py check` says what is wrong with it",
        )
    texts = [[line for line, of in zip(lines, part_N) if of in parts] for parts in wanted]
    return [header + "\n".join(text) + "\n" for text in texts]


def _quietly(finding: Finding) -> None:
    """What is odd about the text was said when the set was read."""


def _coco(content: dict[str, Any], part_of: dict[int, int], parts: Collection[int]) -> str:
    chosen = {image["id"] for image in content["images"] if part_of.get(image["id"]) in parts}
    images = [image for image in content["images"] if image["id"] in chosen]
    annotations = [entry for entry in content["annotations"] if entry.get("image_id") in chosen]
    changed = content | {"images": images, "annotations": annotations}
    return json.dumps(changed, ensure_ascii=False)


def _csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _csv_lines(table: Path, count: int) -> tuple[str, list[str]]:
    """(header, lines); a table has a header where it has one row more than images."""
    rows = [
        row
        for row in csv.reader(read_text(table, _quietly).splitlines())
        if any(map(str.strip, row))
    ]
    header = f"{_csv_line(rows.pop(0))}\n" if len(rows) == count + 1 else ""
    return header, [_csv_line(row) for row in rows]


def _require_labels_beside_images(config: DataConfig) -> None:
    """A list finds the labels of `images/a.jpg` in `labels/`, wherever the folder says they are."""
    *above, last = Path(config.train.images).parts
    expected = Path(*above, "labels") if last == "images" else None
    if Path(config.train.annotations) != expected:
        raise DataError(
            "a list of images finds their labels only in `labels` beside `images`",
            code="labels_not_beside_images",
            where=str(Path(config.root) / config.train.annotations),
            fix=f"rename the folders {config.train.images} and {config.train.annotations} so",
        )


def settings(
    config: DataConfig, dataset: DetectionSet, files: Sequence[Path], names: Sequence[str]
) -> str:
    """The lines of a configuration that use the first file to train and the second to evaluate.

    The names of the classes are written down where each part would else find its own.
    """
    root = os.path.abspath(config.root)
    data: dict[str, Any] = {"format": "csv" if config.format == "folder" else config.format}
    data["root"] = root
    if config.format != "coco":
        data["class_names"] = list(dataset.class_names)
    for key, file in zip(("train", "val"), files):
        place = os.path.abspath(file)
        inside = place.startswith(os.path.join(root, ""))
        annotations = os.path.relpath(place, root) if inside else place
        data[key] = {"images": config.train.images, "annotations": annotations}
    text = yaml.safe_dump(
        {"data": data}, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000
    )
    return text + "".join(f"# {name}: {file}\n" for name, file in zip(names[2:], files[2:]))
