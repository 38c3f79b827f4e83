"""Checks, shows, converts and splits data sets of detection or classification.

ppdist data check DATA [--fast] [--json F] [--fix DIR]         what is wrong with both splits?
ppdist data stats DATA [--json F] [--plots DIR]                classes, box sizes, positions
ppdist data show DATA [--out F.png] [--eval] [--epoch N]       samples as the model sees them
ppdist data convert DATA --to coco|yolo --out DIR              the same set in another format
ppdist data convert DATA --to coco --shards 256MB --out DIR    images in tar shards, for stores
ppdist data convert FOLDER --to coco --out DIR                 of labelme, CVAT, KITTI, ..., too
ppdist data slice DATA --size 640 --out DIR                    large images cut, with their labels
ppdist data split DATA --parts train=0.8 val=0.2               divide one split, by classes
ppdist data split DATA --folds 5                               for cross-validation
ppdist data anchors DATA --model yolov5s                       anchors fitted to the training set
ppdist data synthetic --out DIR [--train N] [--val N]          a small made-up set, COCO format

DATA: a data.yaml (ultralytics, Roboflow), or a folder with COCO's JSON, Pascal VOC's XML or YOLO's
labels, as of `ppdist train DATA`; or -c cfg.yml in its place; both also with -o KEY=VALUE ...
"""

import argparse
import math
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ppdist.cli import RECIPE, add_data, load_experiment, make_parser, naming_data, print_table
from ppdist.common import errors, process
from ppdist.common.arguments import at_least, byte_count, share

if TYPE_CHECKING:
    from ppdist.config.experiment import ExperimentConfig
    from ppdist.data.checks.validate import Report
    from ppdist.data.types import RawSet

SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")
_MOST_CLASSES = 100  # the most that a table lists


def parse() -> argparse.Namespace:
    parser = make_parser("data", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser("check", help="find what is wrong with both splits")
    check.add_argument("--fast", action="store_true", help="headers of the images only")
    check.add_argument("--json", type=Path, metavar="FILE", help="write everything found here")
    check.add_argument("--fix", type=Path, metavar="DIR", help="write a clean copy there")
    check.add_argument("--workers", type=at_least(0), default=0, metavar="N",
                       help="processes (0: one per core)")  # fmt: skip
    stats = commands.add_parser("stats", help="count both splits")
    stats.add_argument("--json", type=Path, metavar="FILE", help="write the counts here")
    stats.add_argument("--plots", type=Path, metavar="DIR", help="write classes.png there")
    show = commands.add_parser("show", help="draw samples as the model sees them")
    show.add_argument("--out", type=Path, default=Path("samples.png"), metavar="FILE",
                      help="the PNG file (samples.png)")  # fmt: skip
    show.add_argument("--eval", action="store_true", help="inputs of evaluation, not of training")
    show.add_argument("--epoch", type=at_least(0), default=0, metavar="N",
                      help="counted from 0, as data.augment.combine_epochs (0)")  # fmt: skip
    show.add_argument("--count", type=at_least(1), default=16, metavar="N",
                      help="how many samples (16)")  # fmt: skip
    anchors = commands.add_parser("anchors", help="fit the anchors of a YOLOv5 to the training set")
    anchors.add_argument("--generations", type=at_least(0), default=1000, metavar="N",
                         help="of the genetic refinement (1000)")  # fmt: skip
    anchors.add_argument("--seed", type=at_least(0), metavar="N",
                         help="of the fit (that of the configuration)")  # fmt: skip
    add_data(check)
    for command, recipe in ((stats, RECIPE), (show, RECIPE), (anchors, "yolov5s")):
        add_data(command, recipe=recipe)
    convert = commands.add_parser("convert", help="write the set in another format")
    convert.add_argument("--to", required=True, type=writable_format, choices=("coco", "yolo"),
                         help="the format to write")  # fmt: skip
    convert.add_argument("--out", type=Path, required=True, metavar="DIR", help="data.root to be")
    convert.add_argument("--shards", type=byte_count, metavar="SIZE",
                         help="images in tar shards of that size, 256MB")  # fmt: skip
    tiles = commands.add_parser("slice", help="cut large images into a set of tiles")
    tiles.add_argument("--size", type=at_least(32), required=True, metavar="PIXELS",
                       help="side of a tile")  # fmt: skip
    tiles.add_argument("--out", type=Path, required=True, metavar="DIR", help="data.root to be")
    tiles.add_argument("--to", default="coco", type=writable_format, choices=("coco", "yolo"),
                       help="the format to write (coco)")  # fmt: skip
    tiles.add_argument("--overlap", type=share, default=0.2, metavar="PART",
                       help="of neighbours, of their side, below 1 (0.2)")  # fmt: skip
    tiles.add_argument("--visible", type=share, default=0.1, metavar="PART",
                       help="least part of an object's box that a tile shows (0.1)")  # fmt: skip
    tiles.add_argument("--empty", type=share, default=1.0, metavar="PART",
                       help="of the training tiles without an object, how many stay (1: all); "
                       "those of validation do")  # fmt: skip
    tiles.add_argument("--seed", type=at_least(0), default=0, metavar="N",
                       help="of that choice (0)")  # fmt: skip
    for command in (check, convert):
        command.add_argument("--image-files", default="copy", choices=("copy", "link", "none"),
                             help="in what is written: copies (the default), links, or paths as "
                             "they are")  # fmt: skip
    split = commands.add_parser("split", help="divide the training split, classes evenly")
    into = split.add_mutually_exclusive_group(required=True)
    into.add_argument("--parts", nargs="+", metavar="NAME=SHARE", help="whose shares make 1")
    into.add_argument("--folds", type=at_least(2), metavar="K", help="each validated once")
    split.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of chance (0)")
    split.add_argument("--out", type=Path, metavar="DIR",
                       help="folder of the new files (that of the annotations)")  # fmt: skip
    for command in (convert, split, tiles):
        add_data(command)
    synthetic = commands.add_parser("synthetic", help="make textured shapes with known boxes")
    synthetic.add_argument("--out", type=Path, required=True, metavar="DIR", help="data.root to be")
    for name, minimum, default, meaning in (
        ("--train", 1, 160, "training images"),
        ("--val", 1, 80, "validation images"),
        ("--size", 64, 256, "side in pixels"),
        ("--seed", 0, 0, "of everything"),
    ):
        synthetic.add_argument(
            name,
            type=at_least(minimum),
            default=default,
            metavar="N",
            help=f"{meaning} ({default})",
        )
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    command = COMMANDS[arguments.command]
    if "data" not in arguments:  # it makes a set
        return command(arguments)
    with naming_data(arguments):
        return command(arguments)


def load(arguments: argparse.Namespace) -> "ExperimentConfig":
    return load_experiment(arguments, f"data {arguments.command}")


def check(arguments: argparse.Namespace) -> int:
    from ppdist.common.files import make_folder, make_parent, write_json

    config = load(arguments)
    if arguments.json:
        make_parent(arguments.json)
    if arguments.fix:
        if config.data.task == "classify":
            raise errors.ConfigError(
                f"data.format {config.data.format} has no boxes to fix",
                code="no_boxes_to_fix",
                where="--fix",
            )
        # Checked before the data set is read, which may take minutes.
        make_folder(arguments.fix)
        if any(arguments.fix.iterdir()):
            raise errors.ConfigError(
                "is not empty",
                code="folder_not_empty",
                where=f"--fix {arguments.fix}",
                fix="choose a new folder",
            )
    report = check_splits(config, fast=arguments.fast, workers=arguments.workers)
    print(*describe_splits(report), *describe_problems(report), sep="\n")
    if arguments.json:
        write_json(arguments.json, report.as_json(), indent=1)
    if arguments.fix:
        write_fixed(arguments, config.data.format, report)
    return verdict(config, report)


def check_splits(config: "ExperimentConfig", *, fast: bool, workers: int = 0) -> "Report":
    """Validates both splits.

    Args:
        fast: read image headers only, decode nothing.
        workers: number of processes; 0 starts one per core.
    """
    from ppdist.common.machine import available_cores
    from ppdist.data.checks.validate import validate

    workers = workers or max(1, int(available_cores()))
    return validate(config.data, decode=not fast, workers=workers)


def describe_splits(report: "Report") -> list[str]:
    """Returns a line for each split: its source and its number of images."""
    return [
        f"{split}: {validated.raw.source}: {len(validated.raw.images)} images"
        for split, validated in report.splits.items()
    ]


def describe_problems(report: "Report", *, brief: bool = False) -> list[str]:
    """Returns a line for each kind of problem, errors first, each followed by examples.

    Args: brief: give examples of errors only.
    """
    lines = []
    for row in report.rows():
        counts = ", ".join(f"{count} in {split}" for split, count in row.counts.items())
        meaning = row.kind.meaning
        lines.append(f"{row.kind.severity}: {row.name}: {counts}: {meaning}; {row.what_follows}")
        if brief and row.kind.severity != "error":
            continue
        remaining = row.count - len(row.examples)
        for example in (*row.examples, *([f"and {remaining} more"] if remaining else [])):
            lines.append(f"  {example.removesuffix(f': {meaning}')}")
    return lines


def verdict(config: "ExperimentConfig", report: "Report") -> int:
    """Prints what of the data does not suit the configuration, and the verdict on both splits.

    Returns: the exit code.
    """
    from ppdist.data.datasets.build import dataset_from_raw
    from ppdist.engine.suitability import findings_of

    if report.errors:
        print(describe_verdict(report), file=sys.stderr)
        return 2
    sets = [
        dataset_from_raw(config.data, split, report.splits[split].raw, config.model.num_classes)
        for split in SPLITS
    ]
    for finding in findings_of(config, *sets):
        print(f"warning: {finding.text}")
    print(describe_verdict(report))
    return 0


def describe_verdict(report: "Report") -> str:
    """Says whether the splits are usable."""
    if report.errors:
        return f"{report.errors} error{'s' * (report.errors != 1)}: training stops, or loses images"
    coverage = "every image decodes" if report.decoded else "only image headers were checked"
    return f"ok: both splits can be used; {coverage}"


def writable_format(word: str) -> str:
    """Checks that `convert` can write this format; used as `type=` of an option."""
    if word == "voc":
        raise argparse.ArgumentTypeError(
            "Pascal VOC is read, but no longer written: use coco, which keeps everything; "
            "`ppdist predict --source IMAGES --format voc` still writes detections so"
        )
    return word


def write_fixed(arguments: argparse.Namespace, data_format: str, report: "Report") -> None:
    """Writes the fixed copy (COCO unless the data set is YOLO) and prints what was fixed."""
    from ppdist.data.checks.clean_copy import clean_copy
    from ppdist.data.datasets.convert import Format, conversion_section

    files = arguments.image_files
    written: Format = "yolo" if data_format == "yolo" else "coco"
    if written != data_format:
        print(f"fixed: data.format {data_format} is not written: the copy is {written.upper()}")
    cleaned = clean_copy(report, written, arguments.fix, images=files)
    for line in cleaned.lines:
        print(f"fixed: {line}")
    say_how_to_train(arguments.fix)
    print(conversion_section(cleaned.raws, written, arguments.fix, images=files), end="")


def say_how_to_train(out: Path) -> None:
    """Prints how to train on a folder just written, then its `data:` section."""
    from ppdist.data.datasets.layout import find_layout

    print(f"wrote {out}")
    with suppress(errors.UserError):  # images elsewhere or in shards need the section
        find_layout(str(out))
        print(f"to train: `ppdist train {shlex.quote(str(out))} --model yolov5n`")
    print("in a configuration, to use it:")


def read_splits(arguments: argparse.Namespace) -> "dict[str, RawSet]":
    """Reads the splits of DATA or -c unchanged, including formats of other tools."""
    from ppdist.data.datasets.annotations import IssueLog
    from ppdist.data.datasets.build import read_raw
    from ppdist.data.datasets.foreign import detect_tool, read_foreign

    strictly = IssueLog()
    raws: dict[str, RawSet]
    if arguments.data and detect_tool(Path(arguments.data)):
        raws = read_foreign(Path(arguments.data), strictly)
    else:
        config = load(arguments).data
        raws = {split: read_raw(config, split, strictly) for split in SPLITS}
    strictly.report(*raws.values())
    return raws


def slice_images(arguments: argparse.Namespace) -> int:
    from ppdist.data.datasets.convert import conversion_section, list_targets, remove_on_failure
    from ppdist.data.datasets.convert import convert as write
    from ppdist.data.datasets.tiles import slice_set

    kind, out = arguments.to, arguments.out
    if arguments.overlap == 1:
        raise errors.ConfigError(
            "expected 0 to below 1", code="option_invalid", where=f"--overlap {arguments.overlap:g}"
        )
    tiles: dict[str, RawSet] = {}
    written: list[Path] = []
    with remove_on_failure(written):
        for split, raw in read_splits(arguments).items():
            empty = arguments.empty if split == "train" else 1.0
            tiles[split], lines = slice_set(
                raw, arguments.size, arguments.overlap,
                visible=arguments.visible, empty=empty, seed=arguments.seed,
            )  # fmt: skip
            lines += write(tiles[split], kind, out, images="copy", split=split)
            written += list_targets(out, kind, "copy", split)
            counts = [sum(len(image.objects) for image in of.images) for of in (raw, tiles[split])]
            print(f"{split}: {raw.source}: {len(raw.images)} images, {counts[0]} objects; "
                  f"{len(tiles[split].images)} tiles, {counts[1]} objects")  # fmt: skip
            print("".join(f"  lost or changed: {line}\n" for line in lines), end="")
    say_how_to_train(out)
    print(conversion_section(tiles, kind, out, images="copy"), end="")
    return 0


def convert(arguments: argparse.Namespace) -> int:
    from ppdist.data.datasets.convert import conversion_section, list_targets, remove_on_failure
    from ppdist.data.datasets.convert import convert as write

    kind, files = arguments.to, arguments.image_files
    if arguments.shards and (kind != "coco" or files != "copy"):
        raise errors.ConfigError(
            "--shards goes with --to coco and copies of the images: COCO's JSON keeps every "
            "annotation, and one file is fast in any store",
            code="options_conflict",
        )
    raws = read_splits(arguments)
    written: list[Path] = []
    # A copy that fails halfway would look like a complete data set.
    with remove_on_failure(written):
        for split, raw in raws.items():
            lines = write(
                raw, kind, arguments.out, images=files, split=split, shard_bytes=arguments.shards
            )
            written += list_targets(arguments.out, kind, files, split)
            objects = sum(len(image.objects) for image in raw.images)
            print(f"{split}: {raw.source}: {len(raw.images)} images, {objects} objects")
            print("".join(f"  lost or changed: {line}\n" for line in lines), end="")
    say_how_to_train(arguments.out)
    print(conversion_section(raws, kind, arguments.out, images=files), end="")
    return 0


def stats(arguments: argparse.Namespace) -> int:
    from ppdist.common.files import make_folder, make_parent, write_json
    from ppdist.data.checks.statistics import class_rows, collect_objects, overview_lines, summarize
    from ppdist.data.datasets.build import check_same_classes, read_split
    from ppdist.engine.suitability import findings_of

    config = load(arguments)
    if arguments.json:
        make_parent(arguments.json)
    if arguments.plots:
        make_folder(arguments.plots)
    sets = {split: read_split(config.data, split) for split in ("train", "val")}
    check_same_classes(*sets.values())
    boxes = config.data.task == "detect"
    objects = {
        split: collect_objects(dataset, config.model.image_size, config.data.resize)
        for split, dataset in sets.items()
    }
    report = {
        split: summarize(dataset, objects[split], boxes=boxes) for split, dataset in sets.items()
    }
    for split, dataset in sets.items():
        print(f"{split}: {dataset.source}" + (f" ({dataset.limited})" if dataset.limited else ""))
    for finding in findings_of(config, sets["train"], sets["val"]):
        print(f"warning: {finding.text}")
    overviews = zip(*(overview_lines(counts) for counts in report.values()))
    print_table(["", *sets], [[quantity, train, val] for (quantity, train), (_, val) in overviews])
    columns = [
        f"{quantity}, {split}" for split in sets for quantity in ("objects", "images")[not boxes :]
    ]
    print_table(["id", "class", *columns], class_rows([*report.values()], _MOST_CLASSES))
    if arguments.json:
        write_json(arguments.json, report, indent=1)
    if arguments.plots:
        from ppdist.viz.plots import plot_classes

        path = arguments.plots / "classes.png"
        plot_classes(objects, sets["train"].class_names, path, boxes=boxes)
        print(f"wrote {path}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    from ppdist.common.files import make_parent, write_whole
    from ppdist.data.datasets.build import read_split
    from ppdist.engine.build import build_model, with_epochs
    from ppdist.viz.dataset import evaluation_pictures, png, training_pictures
    from ppdist.viz.draw import grid

    config = load(arguments)
    if arguments.out.suffix.lower() != ".png":
        raise errors.ConfigError(
            "the picture is a PNG file; expected a name ending in .png",
            code="bad_suffix",
            where=f"--out {arguments.out}",
        )
    make_parent(arguments.out)
    split = SPLITS[arguments.eval]
    masks = not arguments.eval and config.data.augment.needs_outlines
    dataset = read_split(config.data, split, config.model.num_classes, masks=masks)
    if config.train.steps is not None:
        config = with_epochs(config, len(dataset.records), config.train.micro_batches(1))
    epochs = math.ceil(config.train.epochs)
    augment = config.data.augment.with_epoch_scale(config.train.phases_factor)
    if arguments.epoch >= epochs:
        raise errors.ConfigError(
            f"the run has {epochs} (train.epochs, or as many as train.steps make), counted from 0; "
            f"expected {epochs - 1} at most",
            code="epoch_beyond_run",
            where=f"--epoch {arguments.epoch}",
        )
    if arguments.eval:
        pictures = evaluation_pictures(
            dataset,
            config.data,
            image_size=config.model.image_size,
            shape_multiple=(
                build_model(config).size_multiple if config.evaluate.rectangular else None
            ),
            shape_pad=config.evaluate.rectangular_pad,
            count=arguments.count,
        )
    else:
        pictures = training_pictures(
            dataset,
            config.data.model_copy(update={"augment": augment}),
            sizes=config.train.multi_scale or (config.model.image_size,),
            batch_size=config.train.images_per_card,
            seed=config.seed,
            epochs=epochs,
            epoch=arguments.epoch,
            count=arguments.count,
        )
    write_whole(arguments.out, png(grid(pictures)))
    source = "evaluation" if arguments.eval else f"epoch {arguments.epoch} (of 0 to {epochs - 1})"
    print(f"wrote {len(pictures)} samples of {split}, as in {source}, to {arguments.out}")
    return 0


def split(arguments: argparse.Namespace) -> int:
    from ppdist.data.datasets.build import read_split
    from ppdist.data.datasets.convert import (
        data_section,
        divide,
        find_absent_classes,
        group_by_content,
        make_folds,
        parse_shares,
        table_of_parts,
        write_parts,
    )

    if arguments.folds:
        shares = {f"fold{fold + 1}": 1 / arguments.folds for fold in range(arguments.folds)}
        parts_of_list = make_folds(arguments.folds)
    else:
        shares = parse_shares(arguments.parts)
        parts_of_list = {name: {part} for part, name in enumerate(shares)}
    config = load(arguments).data.model_copy(update={"val_fraction": None})  # the whole set
    dataset = read_split(config, "train", all_images=True)
    # Duplicates stay in one split: otherwise validation images would also be trained on.
    group_N = group_by_content([record.path for record in dataset.records])
    classes = [record.labels_M[~record.crowd_M] for record in dataset.records]
    part_N = divide(classes, group_N, [*shares.values()], arguments.seed)
    files = write_parts(config, dataset, part_N, parts_of_list, arguments.out)
    print(f"{dataset.source}: images of each class")
    part_titles = [f"{name} ({part:.4g})" for name, part in shares.items()]
    print_table(["class", "all", *part_titles], table_of_parts(dataset, part_N, len(shares)))
    copies = len(group_N) - len(set(group_N.tolist()))
    if copies:
        print(f"{copies} images are duplicates; each stays in the same part as its original")
    for file in files:
        print(f"wrote {file}")
    section = data_section(config, dataset, files, [*parts_of_list])
    print(f"to train and evaluate with them:\n{section}", end="")
    absent = find_absent_classes(dataset, part_N, [*shares])
    if absent:
        process.warn(f"no image of {', '.join(absent)}")
    return 0


def anchors(arguments: argparse.Namespace) -> int:
    """Prints how well the anchors fit the training set, and fitted anchors if they fit better."""
    from ppdist.data.checks.statistics import fit_anchors, refit_if_needed, sizes_in_input
    from ppdist.data.datasets.build import read_split
    from ppdist.engine.build import build_model
    from ppdist.models.weights import load_weights

    config: Any = load(arguments)  # the model must have anchors, see below
    if not hasattr(config.model, "anchors"):
        raise errors.ConfigError(
            f"{config.model.name} has no anchors; only yolov5 has",
            code="model_without_anchors",
            where="model.name",
        )
    model = build_model(config)
    if config.model.pretrained and not config.model.anchors:
        # Pretrained weights include anchors, which apply unless the configuration sets others.
        load_weights(model, config.model.pretrained)
    before_LA2, threshold = model.anchors_LA2, model.anchor_threshold
    seed = config.seed if arguments.seed is None else arguments.seed
    dataset = read_split(config.data, "train", config.model.num_classes)
    size = config.model.image_size
    wh_N2 = sizes_in_input(dataset, size, config.data.resize)
    fit = fit_anchors(
        wh_N2, before_LA2, threshold=threshold, generations=arguments.generations, seed=seed
    )
    print(f"train: {dataset.source}: {fit.boxes} boxes in inputs of {size[0]} x {size[1]} pixels")
    rows = [
        [quantity, f"{present:.4f}", f"{fitted:.4f}"]
        for quantity, present, fitted in (
            ("best possible recall", fit.recall_before, fit.recall_after),
            ("ratio to the best anchor", fit.fitness_before, fit.fitness_after),
        )
    ]
    for level, level_anchors in enumerate(zip(before_LA2, fit.anchors_LA2)):
        for present_2, fitted_2 in zip(*level_anchors):
            rows.append(
                [f"level {level}: width, height", format_sides(present_2), format_sides(fitted_2)]
            )
    print_table(["", "present", "fitted"], rows)
    print("to use the fitted ones:\nmodel:\n  anchors:")
    for fitted_A2 in fit.anchors_LA2:
        print(f"    - [{', '.join(f'[{format_sides(fitted)}]' for fitted in fitted_A2)}]")
    if config.model.anchors:
        print("training would keep the present anchors (model.anchors)")
    else:
        refit = refit_if_needed(wh_N2, before_LA2, threshold=threshold, seed=seed)
        print(f"training would find: {refit.message}")
    return 0


def format_sides(anchor: Iterable[float]) -> str:
    return ", ".join(f"{side:g}" for side in anchor)


def synthetic(arguments: argparse.Namespace) -> int:
    from ppdist.data.datasets.synthetic import CLASS_NAMES, make_shapes

    make_shapes(
        arguments.out,
        train=arguments.train,
        val=arguments.val,
        size=arguments.size,
        seed=arguments.seed,
    )
    print(
        f"wrote {arguments.train} + {arguments.val} images of {', '.join(CLASS_NAMES)} to "
        f"{arguments.out}; to train: `ppdist train {shlex.quote(str(arguments.out))} "
        "--model yolov5n`"
    )
    return 0


COMMANDS = {
    "check": check, "stats": stats, "show": show, "convert": convert, "split": split,
    "slice": slice_images,
    "anchors": anchors, "synthetic": synthetic,
}  # fmt: skip
