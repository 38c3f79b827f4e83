"""Checks, counts and makes detection data.

tools/data.py check -c cfg.yml [-o k=v ...] [--decode]   both splits: can they be trained on?
tools/data.py stats -c cfg.yml [-o k=v ...] [--json F]   counts alone
tools/data.py synthetic --out DIR [--train N] [--val N]  a small made-up set in COCO format
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ppdist import errors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check both splits of a configuration")
    stats = commands.add_parser("stats", help="count both splits of a configuration")
    for command in (check, stats):
        command.add_argument("-c", "--config", required=True, help="YAML file of the experiment")
        command.add_argument(
            "-o", "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
        )
    check.add_argument("--decode", action="store_true", help="decode every image too (minutes)")
    stats.add_argument("--json", type=Path, metavar="FILE", help="write the counts here")
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
    else:
        stats(arguments)
    return 0


def check(arguments: argparse.Namespace) -> None:
    from ppdist.config import load_config
    from ppdist.data.check import check_images, check_same_classes, describe
    from ppdist.data.dataset import read_split

    config = load_config(arguments.config, arguments.override)
    train, val = (
        read_split(config.data, split, config.model.num_classes) for split in ("train", "val")
    )
    check_same_classes(train, val)
    damaged = []
    for name, dataset in (("train", train), ("val", val)):
        show(f"{name}: {dataset.source}", describe(dataset))
        damaged += check_images(dataset) if arguments.decode else []
    if damaged:
        lines = "\n".join(f"  {line}" for line in damaged)
        raise errors.DataError(f"{len(damaged)} images cannot be used:\n{lines}")
    decoded = "every image decodes" if arguments.decode else "images not decoded (--decode)"
    print(f"ok: both splits can be used; {decoded}")


def stats(arguments: argparse.Namespace) -> None:
    from ppdist.config import load_config
    from ppdist.data.check import describe
    from ppdist.data.dataset import read_split

    config = load_config(arguments.config, arguments.override)
    report = {}
    for split in ("train", "val"):
        dataset = read_split(config.data, split)
        report[split] = [(what.strip(), value) for what, value in describe(dataset)]
        show(f"{split}: {dataset.source}", describe(dataset))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


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
