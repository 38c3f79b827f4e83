"""Evaluates weights on the validation split: tools/eval.py -c cfg.yml -w WEIGHTS [--json FILE]

Sharded over the ranks of fleetrun; the numbers are the same on any number of ranks.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ppdist import errors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--config", required=True, help="YAML file of the experiment")
    parser.add_argument("-w", "--weights", required=True, help="weight file or checkpoint")
    parser.add_argument("-o", "--override", nargs="+", action="extend", default=[],
                        metavar="KEY=VALUE", help="overrides of config keys")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics here")
    parser.add_argument("--save-detections", type=Path, metavar="FILE",
                        help="write COCO results here; of a classifier: the best five classes "
                        "of each image")  # fmt: skip
    parser.add_argument("--at-least", metavar="METRIC=VALUE",
                        help="exit 2 when the metric is below the value")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    bound = read_bound(arguments.at_least)
    from ppdist import dist
    from ppdist.config import load_config
    from ppdist.data.dataset import read_split
    from ppdist.data.sample import DetectionSet
    from ppdist.engine.experiment import build_evaluator, build_model, speed_up_cpu
    from ppdist.files import make_parent, write_json
    from ppdist.inference import load_all_weights

    config = load_config(arguments.config, arguments.override)
    dist.init(config.device, config.distributed)
    model = build_model(config)

    def load() -> DetectionSet:
        for file in (arguments.json, arguments.save_detections):
            if file and dist.is_main():
                make_parent(file)  # not only when the work is done
        load_all_weights(model, Path(arguments.weights))
        return read_split(config.data, "val", config.model.num_classes)

    evaluator = build_evaluator(config, dist.together(load), model)
    slow = speed_up_cpu(config, [model])
    if slow and dist.is_main():
        print(f"ppdist: {slow}", file=sys.stderr)
    if bound:
        require_metric(bound[0], evaluator.metrics)
    found = evaluator.predict(model)

    def report() -> dict[str, float]:
        metrics = evaluator.measure(found)
        print(json.dumps(metrics, indent=1))
        if arguments.json:
            write_json(arguments.json, metrics)
        if arguments.save_detections:
            evaluator.save(arguments.save_detections, found)
        return metrics

    metrics = dist.on_main(report)
    if bound:
        judge(*bound, metrics)
    return 0


def read_bound(at_least: str | None) -> tuple[str, float] | None:
    """(metric, least value) of --at-least; None without one."""
    if at_least is None:
        return None
    name, _, value = at_least.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise errors.ConfigError(
            f"--at-least {at_least}: expected METRIC=VALUE, such as mAP50=0.8"
        ) from None


def require_metric(name: str, metrics: Sequence[str]) -> None:
    if name not in metrics:
        raise errors.ConfigError(f"--at-least: no metric {name!r}; there is {', '.join(metrics)}")


def judge(name: str, floor: float, metrics: dict[str, float]) -> None:
    if metrics[name] < floor:
        raise errors.UserError(f"{name} is {metrics[name]:.4f}, below the {floor:g} asked for")


if __name__ == "__main__":
    errors.run(main)
