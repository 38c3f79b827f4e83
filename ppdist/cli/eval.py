"""Evaluates weights on a split of data: mAP, and each class.

ppdist eval -w RUN [--split test] [--out DIR]     the data that the run was trained with
ppdist eval DATA -w WEIGHTS                       other data: a data.yaml or a folder
ppdist eval -c cfg.yml -w WEIGHTS                 weights that do not record their model

Classes are compared by their names, whatever their order in the data and in the weights.
Sharded over the ranks of fleetrun; the numbers are the same on any number of ranks.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdist.cli import (
    OR_OF_WEIGHTS,
    add_data,
    load_config_of,
    make_parser,
    print_commands,
    print_table,
    weights_words,
)
from ppdist.common import errors, process

if TYPE_CHECKING:
    from ppdist.config.data import DataConfig, SplitConfig
    from ppdist.config.experiment import ExperimentConfig
    from ppdist.engine.evaluator import ClassificationEvaluator, Evaluator


def parse() -> argparse.Namespace:
    parser = make_parser("eval", __doc__)
    add_data(parser, config=OR_OF_WEIGHTS)
    parser.add_argument("-w", "--weights", required=True,
                        help="weight file, checkpoint, or name of published weights")  # fmt: skip
    parser.add_argument("--split", choices=["train", "val", "test"], default="val",
                        help="of the data (val)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="write metrics and number of images to this file")  # fmt: skip
    parser.add_argument("--save-detections", type=Path, metavar="FILE",
                        help="write COCO results here; of a classifier: the best five classes "
                        "of each image")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="write evaluation.json, detections.json and plots/ here")  # fmt: skip
    parser.add_argument("--at-least", metavar="METRIC=VALUE",
                        help="exit 2 when the metric is below the value")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    target = read_bound(arguments.at_least)
    with process.importing():
        from ppdist.common.files import make_folder, make_parent, write_json
        from ppdist.common.records import next_commands, step_of
        from ppdist.data.datasets.build import has_objects
        from ppdist.distributed import comm
        from ppdist.engine.run import prepare_evaluation
        from ppdist.metrics.analysis import analyse
        from ppdist.models.model_card import read_card_or_warn

    config = config_for(arguments)
    comm.init(config.device, config.distributed)

    def prepare() -> None:
        for file in (arguments.json, arguments.save_detections):
            if file and comm.is_main():
                make_parent(file)  # now, not only after the work is done
        if arguments.out and comm.is_main():
            make_folder(arguments.out)
        warn = process.warn if comm.is_main() else lambda _: None
        read_card_or_warn(arguments.weights, warn, derives=False)

    # On a set without annotations we can predict, but not compute or require metrics.
    ready = prepare_evaluation(
        config, Path(arguments.weights), split=arguments.split, prepare=prepare,
        annotated=not arguments.save_detections or bool(target),
    )  # fmt: skip
    evaluator = ready.evaluator
    for note in ready.notes if comm.is_main() else ():
        process.say(f"ppdist: {note}")
    if target:
        require_metric(target[0], evaluator.metrics)
    predictions: Any = evaluator.predict(ready.model)  # boxes, or a ranking of classes

    section = getattr(config.data, arguments.split)

    def report() -> dict[str, float]:
        if not has_objects(ready.dataset):  # such as the test images of a challenge
            evaluator.save(arguments.save_detections, predictions)
            reason = f"{ready.dataset.source} has no annotated objects, so nothing was measured"
            process.say(f"ppdist: {reason}; wrote {arguments.save_detections}")
            return {}
        metrics = evaluator.measure(predictions)
        step = step_of(Path(arguments.weights))
        analysis = analyse(evaluator.scored, predictions, step, config.evaluate.max_detections)
        if arguments.json:
            keys = {"images", "left_out", "duplicate_boxes"}  # the last one only for detectors
            extra = {key: value for key, value in analysis.items() if key in keys}
            extra |= {"split": arguments.split, "limit": section.limit}
            write_json(arguments.json, {**metrics, **extra})
        if arguments.save_detections:
            evaluator.save(arguments.save_detections, predictions)
        if arguments.out:
            write_out(arguments.out, analysis, evaluator, predictions, config.data, section)
        show(metrics, analysis)
        return metrics

    metrics = comm.run_on_main(report)
    if comm.is_main() and metrics:
        test = config.data.test is not None and arguments.split != "test" and not arguments.data
        image = evaluator.scored.first_readable
        print_commands(next_commands(weights_words(arguments), image, test=test))
    if target:
        judge(*target, metrics)
    return 0


def config_for(arguments: argparse.Namespace) -> "ExperimentConfig":
    """Loads the configuration of -c or of the weights, applied to DATA, then applies -o."""
    if not arguments.data:
        return load_config_of(arguments, needs_data=True)
    from ppdist.config.experiment import apply_overrides, load_config
    from ppdist.engine.recipe import with_data
    from ppdist.models.model_card import config_of_weights

    config = load_config(arguments.config) if arguments.config else None
    config = with_data(
        config or config_of_weights(arguments.weights), arguments.data, same_classes=True
    )
    config = apply_overrides(config, arguments.override)
    if config.data.val_fraction is not None and arguments.split == "val":
        process.say(
            f"ppdist: {arguments.data} has no validation split: evaluating on "
            f"{config.data.val_fraction:.0%} of its images, as in training; "
            "-o data.val_fraction=null evaluates on all"
        )
    return config


def show(metrics: Mapping[str, float], analysis: Mapping[str, Any]) -> None:
    """Prints the overall metrics, then the metrics of each class.

    Args: metrics: -1 for a metric without any object to measure, printed as a dash.
    """
    from ppdist.config.evaluate import METRIC_TEXTS
    from ppdist.metrics.analysis import class_table
    from ppdist.metrics.scored import duplicates_line

    def shown(value: float) -> str:
        if isinstance(value, int):  # a count
            return str(value)
        return "-" if value < 0 else f"{value:.4f}"

    images, left_out = analysis["images"], len(analysis["left_out"])
    unread = f" of {images + left_out} images: {left_out} could not be read"
    print(f"{images}{unread if left_out else ' images'}")
    if duplicates := analysis.get("duplicate_boxes"):
        print(duplicates_line(duplicates))
    overall = {
        f"{name}: {METRIC_TEXTS[name]}" if name in METRIC_TEXTS else name: value
        for name, value in metrics.items()
        if "/" not in name  # not of a class
    }
    print_table(["metric", "value"], [(name, shown(value)) for name, value in overall.items()])
    print(class_table(analysis))


def write_out(
    folder: Path,
    analysis: dict[str, Any],
    evaluator: "Evaluator | ClassificationEvaluator",
    predictions: Any,
    data: "DataConfig",
    split: "SplitConfig",
) -> None:
    """Writes evaluation.json, detections.json and the plots for the detections in `predictions`."""
    from ppdist.common.files import write_json
    from ppdist.viz.run_plots import draw_run

    write_json(folder / "evaluation.json", analysis)
    evaluator.save(folder / "detections.json", predictions)
    root = Path(data.root)
    draw_run(folder, image_folders=[root, *(root / name for name in split.image_folders)])
    process.say(f"ppdist: wrote {folder}")


def read_bound(at_least: str | None) -> tuple[str, float] | None:
    """Parses --at-least into (metric, minimum); returns None if it was not given."""
    if at_least is None:
        return None
    name, _, value = at_least.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise errors.ConfigError(
            "expected METRIC=VALUE, such as mAP50=0.8",
            code="option_invalid",
            where=f"--at-least {at_least}",
        ) from None


def require_metric(name: str, metrics: Sequence[str]) -> None:
    if name not in metrics:
        raise errors.ConfigError(
            f"no metric {name!r}",
            code="unknown_metric",
            where="--at-least",
            fix=f"choose one of {', '.join(metrics)}",
        )


def judge(name: str, floor: float, metrics: dict[str, float]) -> None:
    if metrics[name] < floor:
        raise errors.UserError(
            f"{name} is {metrics[name]:.4f}, below the required {floor:g}",
            code="metric_below_floor",
        )
