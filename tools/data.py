"""Checks and counts data, of detection or classification, and makes some.

tools/data.py check -c cfg.yml [-o k=v ...] [--decode]   both splits: can they be trained on?
tools/data.py stats -c cfg.yml [-o k=v ...] [--json F]   counts alone
tools/data.py anchors -c cfg.yml [-o k=v ...]            anchors (YOLOv5) fitted to the training set
tools/data.py synthetic --out DIR [--train N] [--val N]  a small made-up set in COCO format
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ppdist import errors

if TYPE_CHECKING:
    from ppdist.data.dataset import DataConfig
    from ppdist.data.sample import DetectionSet


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check both splits of a configuration")
    stats = commands.add_parser("stats", help="count both splits of a configuration")
    anchors = commands.add_parser("anchors", help="fit the anchors of a YOLOv5 to the training set")
    for command in (check, stats, anchors):
        command.add_argument("-c", "--config", required=True, help="YAML file of the experiment")
        command.add_argument(
            "-o", "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
        )
    check.add_argument("--decode", action="store_true", help="decode every image too (minutes)")
    stats.add_argument("--json", type=Path, metavar="FILE", help="write the counts here")
    anchors.add_argument(
        "--generations", type=int, default=1000, help="of the genetic refinement (1000)"
    )
    anchors.add_argument("--seed", type=int, help="of the fit (that of the configuration)")
    synthetic = commands.add_parser("synthetic", help="make textured shapes with known boxes")
    synthetic.add_argument("--out", type=Path, required=True, help="data.root to be")
    synthetic.add_argument("--train", type=int, default=160, help="training images (160)")
    synthetic.add_argument("--val", type=int, default=80, help="validation images (80)")
    synthetic.add_argument("--size", type=int, default=256, help="side in pixels (256)")
    synthetic.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.command == "synthetic":
        make(arguments)
    elif arguments.command == "check":
        check(arguments)
    elif arguments.command == "anchors":
        fit(arguments)
    else:
        stats(arguments)
    return 0


def check(arguments: argparse.Namespace) -> None:
    from ppdist.config import load_config
    from ppdist.data.check import check_images, check_same_classes, unused_classes
    from ppdist.data.dataset import read_split

    config = load_config(arguments.config, arguments.override)
    train, val = (
        read_split(config.data, split, config.model.num_classes) for split in ("train", "val")
    )
    check_same_classes(train, val)
    damaged = []
    for name, dataset in (("train", train), ("val", val)):
        show(f"{name}: {dataset.source}", counts(config.data, dataset))
        damaged += check_images(dataset) if arguments.decode else []
    if damaged:
        lines = "\n".join(f"  {line}" for line in damaged)
        raise errors.DataError(f"{len(damaged)} images cannot be used:\n{lines}")
    decoded = "every image decodes" if arguments.decode else "images not decoded (--decode)"
    print(f"ok: both splits can be used; {decoded}", flush=True)
    unused = unused_classes(train)
    if unused:
        kind = "image" if config.data.classifies else "object"
        names = ", ".join(unused[:10]) + (", ..." if len(unused) > 10 else "")
        print(
            f"ppdist: warning: {len(unused)} of {len(train.class_names)} classes have no {kind} in "
            f"the training split, so they cannot be learned: {names}",
            file=sys.stderr,
        )


def stats(arguments: argparse.Namespace) -> None:
    from ppdist.config import load_config
    from ppdist.data.dataset import read_split
    from ppdist.files import make_parent, write_json

    config = load_config(arguments.config, arguments.override)
    if arguments.json:
        make_parent(arguments.json)
    report = {}
    for split in ("train", "val"):
        dataset = read_split(config.data, split)
        rows = counts(config.data, dataset)
        report[split] = [(what.strip(), value) for what, value in rows]
        show(f"{split}: {dataset.source}", rows)
    if arguments.json:
        write_json(arguments.json, report, indent=1)


def counts(config: "DataConfig", dataset: "DetectionSet") -> list[tuple[str, str]]:
    from ppdist.data.check import describe, describe_classes

    return describe_classes(dataset) if config.classifies else describe(dataset)


def fit(arguments: argparse.Namespace) -> None:
    """Shows how well the configured anchors fit the training set, and fitted ones to paste."""
    from ppdist.config import load_config
    from ppdist.data.anchors import fit_anchors, refit, sizes_in_input
    from ppdist.data.dataset import read_split
    from ppdist.engine.experiment import build_model
    from ppdist.models.pretrained import load_weights

    config = load_config(arguments.config, arguments.override)
    if not hasattr(config.model, "anchors"):
        raise errors.ConfigError(f"model.name: {config.model.name} has no anchors; yolov5 has")
    model = build_model(config)
    if config.model.pretrained and not config.model.anchors:
        load_weights(model, config.model.pretrained)
    before_LA2, threshold = model.anchors_LA2, config.loss.anchor_threshold
    seed = config.seed if arguments.seed is None else arguments.seed
    dataset = read_split(config.data, "train", config.model.num_classes)
    size = config.model.image_size
    wh_N2 = sizes_in_input(dataset, size, config.data.resize)
    found = fit_anchors(
        wh_N2, before_LA2, threshold=threshold, generations=arguments.generations, seed=seed
    )
    print(f"train: {dataset.source}: {found.boxes} boxes in inputs of {size[0]} x {size[1]} pixels")
    table = Table("", "present", "fitted")
    for what, present, fitted in (
        ("best possible recall", found.recall_before, found.recall_after),
        ("ratio to the best anchor", found.fitness_before, found.fitness_after),
    ):
        table.add_row(what, f"{present:.4f}", f"{fitted:.4f}")
    for level, rows in enumerate(zip(before_LA2, found.anchors_LA2)):
        for present, fitted in zip(*rows):
            table.add_row(f"level {level}: width, height", sides(present), sides(fitted))
    Console().print(table)
    print("to use the fitted ones:\nmodel:\n  anchors:")
    for fitted_A2 in found.anchors_LA2:
        print(f"    - [{', '.join(f'[{sides(fitted)}]' for fitted in fitted_A2)}]")
    if config.model.anchors or not config.model.auto_anchor:
        why = "model.anchors" if config.model.anchors else "model.auto_anchor: false"
        print(f"training would keep the present anchors ({why})")
    else:
        print(
            f"training would find: {refit(wh_N2, before_LA2, threshold=threshold, seed=seed).told}"
        )


def sides(anchor: Iterable[float]) -> str:
    return ", ".join(f"{side:g}" for side in anchor)


def make(arguments: argparse.Namespace) -> None:
    from ppdist.data.synthetic import CLASS_NAMES, make_shapes

    if min(arguments.train, arguments.val) < 1 or arguments.size < 64:
        raise errors.DataError("--train and --val must be 1, --size 64, at least")
    make_shapes(
        arguments.out,
        train=arguments.train,
        val=arguments.val,
        size=arguments.size,
        seed=arguments.seed,
    )
    print(
        f"wrote {arguments.train} + {arguments.val} images of {', '.join(CLASS_NAMES)} to "
        f"{arguments.out}; use it with data.root={arguments.out} data.format=coco"
    )


def show(title: str, rows: list[tuple[str, str]]) -> None:
    print(title)  # not as the table's title, which would break a long path over two lines
    table = Table(show_header=False)
    for what, value in rows:
        table.add_row(what, value)
    Console().print(table)


if __name__ == "__main__":
    errors.run(main)
