"""Fuses detections or averages weights of several models.

ppdist ensemble fuse|average ...

fuse: the boxes of several models, input sizes and mirrored images become one set of boxes.
average: checkpoints of one architecture become one set of weights.  Both are sharded over the
ranks of fleetrun; the results are the same on any number of ranks.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist.cli import add_config, make_parser
from ppdist.common import errors, process
from ppdist.common.arguments import at_least, share
from ppdist.lab.ensemble.wbf import IOU

if TYPE_CHECKING:
    from ppdist.config.experiment import ExperimentConfig
    from ppdist.data.types import DetectionSet
    from ppdist.lab.ensemble.fuse import Member
    from ppdist.models.base import ImageModel

IMAGES = 2048


def parse() -> argparse.Namespace:
    parser = make_parser("ensemble", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="fuse|average")
    add_fuse(commands.add_parser("fuse", help="boxes of several models and sizes as one set"))
    add_average(commands.add_parser("average", help="checkpoints of one architecture as one"))
    return parser.parse_args()


def add_fuse(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    parser.add_argument("--model", required=True, nargs="+", action="extend",
                        metavar="CONFIG:WEIGHTS",
                        help="a YAML file and weights (a file, a checkpoint, a run)")
    parser.add_argument("-o", "--override", nargs="+", action="extend", default=[],
                        metavar="KEY=VALUE", help="overrides of keys of all YAML files")
    parser.add_argument("--scales", type=parse_scales, default=(1.0,), metavar="S,S,...",
                        help="input sizes beside model.image_size, such as 0.83,1,1.2 (1)")
    parser.add_argument("--flip", action="store_true", help="look at mirrored images, too")
    parser.add_argument("--iou", type=share, default=IOU,
                        help=f"overlap above which boxes are taken for one ({IOU})")
    parser.add_argument("--keep", type=at_least(1), default=300, help="boxes of an image (300)")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR",
                        help="gets detections.json and scores.json")
    # fmt: on


def add_average(parser: argparse.ArgumentParser) -> None:
    add_config(parser, required=True)
    # fmt: off
    parser.add_argument("--weights", required=True, nargs="+", action="extend", type=Path,
                        metavar="PATH", help="checkpoints, runs or weight files, two or more")
    parser.add_argument("--images", type=at_least(1), default=IMAGES, metavar="N",
                        help="training images for the statistics of batch norm, an epoch at most "
                        f"({IMAGES})")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE",
                        help="weight file to write (.pdparams, .safetensors, ...)")
    # fmt: on


def parse_scales(text: str) -> tuple[float, ...]:
    """Parses comma-separated numbers from 0.1 to 10, for `type=` of an option."""
    try:
        factors = tuple(float(word) for word in text.split(","))
    except ValueError:
        factors = ()
    if not factors or not all(0.1 <= scale <= 10 for scale in factors):
        raise argparse.ArgumentTypeError(
            f"expected comma-separated numbers between 0.1 and 10, found {text!r}"
        )
    return factors


def main() -> int:
    arguments = parse()
    COMMANDS[arguments.command](arguments)
    return 0


def fuse(arguments: argparse.Namespace) -> None:
    models = [split_model(text) for text in arguments.model]
    from ppdist.common.files import make_folder
    from ppdist.data.datasets.build import limit_notes
    from ppdist.distributed import comm
    from ppdist.engine.recipe import load_config_with_data
    from ppdist.lab.ensemble import fuse as fusing

    out = arguments.out
    files = [config for config, _ in models]
    configs = [load_config_with_data(file, arguments.override) for file in files]
    comm.init(configs[0].device, configs[0].distributed)
    comm.run_on_main(lambda: make_folder(out))  # now, not only after the work is done
    dataset = comm.run_on_all_ranks(lambda: fusing.read_common_set(files, configs))
    for line in limit_notes(dataset):
        tell(line)
    max_detections = max(config.evaluate.max_detections for config in configs)
    members = []
    for config, (_, weights) in zip(configs, models):
        members += members_of_model(config, weights, dataset, arguments)
    agnostic = any(config.suppression.class_agnostic for config in configs)
    fused_R7 = fusing.fuse_members(members, arguments.iou, arguments.keep, agnostic)

    def write() -> None:
        print(
            json.dumps(
                fusing.write_fused(out, dataset, members, fused_R7, max_detections), indent=1
            )
        )
        tell(f"{len(fused_R7)} boxes of {len(members)} members in {out / 'detections.json'}")

    comm.run_on_main(write)


def members_of_model(
    config: "ExperimentConfig",
    weights: Path,
    dataset: "DetectionSet",
    arguments: argparse.Namespace,
) -> "list[Member]":
    """Returns a member for each view of a model.  Collective."""
    from ppdist.distributed import comm
    from ppdist.engine.preflight import fetch_on_all_ranks
    from ppdist.lab.ensemble import fuse as fusing
    from ppdist.lab.ensemble.wbf import view_iou
    from ppdist.models.model_card import names_for
    from ppdist.models.weights import load_all_weights

    def load() -> str:
        return load_all_weights(model, weights, names_for(weights, dataset.class_names))

    model = build_fast_model(config)
    fetch_on_all_ranks(weights)
    if class_note := comm.run_on_all_ranks(load):
        tell(f"{weights}: {class_note}")
    # The suppression within a view must be stricter than the fusion; see `view_iou`.
    suppression_iou = view_iou(arguments.iou, config.suppression.iou_threshold)
    members = []
    for member in fusing.members_of_model(
        config, model, str(weights), dataset,
        scales=arguments.scales, flip=arguments.flip, suppression_iou=suppression_iou,
    ):  # fmt: skip
        tell(f"{member.name}: {member.boxes} boxes")
        members.append(member)
    return members


def split_model(text: str) -> tuple[str, Path]:
    config, colon, weights = text.partition(":")
    if not (config and colon and weights):
        raise errors.ConfigError(
            "expected CONFIG:WEIGHTS, such as cfg.yml:output/cfg/checkpoints/best",
            code="option_invalid",
            where=f"--model {text}",
        )
    return config, Path(weights)


def average(arguments: argparse.Namespace) -> None:
    from ppdist.common.manifest import CARD_NOTE
    from ppdist.data.datasets.build import limit_notes, read_split
    from ppdist.distributed import comm
    from ppdist.engine.recipe import load_config_with_data
    from ppdist.lab.ensemble import model_soup
    from ppdist.models.model_card import average_of, card_of
    from ppdist.models.weights import arrays_of, check_writable, write_arrays

    config = load_config_with_data(arguments.config, arguments.override)
    model_soup.require_different(arguments.weights)
    comm.init(config.device, config.distributed)
    comm.run_on_main(lambda: check_writable(arguments.out))
    model = build_fast_model(config)
    train_set = comm.run_on_all_ranks(
        lambda: read_split(config.data, "train", config.model.num_classes)
    )
    for line in limit_notes(train_set):
        tell(line)
    images = model_soup.average(
        config, model, arguments.weights, train_set=train_set, images=arguments.images
    )

    def write() -> None:
        licence, source = average_of(arguments.weights, process.warn)
        card = card_of(
            config, model, train_set.class_names, train_set.category_ids,
            licence=licence, source=source,
        )  # fmt: skip
        write_arrays(arguments.out, arrays_of(model), {CARD_NOTE: card.text()})
        tell(
            f"the average of {len(arguments.weights)}, with statistics of {images} images, is in "
            f"{arguments.out}"
        )

    comm.run_on_main(write)


def build_fast_model(config: "ExperimentConfig") -> "ImageModel":
    """Builds the configured model and enables the oneDNN layers on CPU.  Collective."""
    from ppdist.engine.build import build_model, speed_up_cpu

    model = build_model(config)
    notice = speed_up_cpu(config, [model])
    if notice:
        tell(notice)
    return model


def tell(text: str) -> None:
    """Prints a line on rank 0 only."""
    from ppdist.distributed import comm

    if comm.is_main():
        process.say(f"ppdist: {text}")


COMMANDS = {"fuse": fuse, "average": average}
