"""Predicts time, cost and bottleneck of a training on N cards.

Needs no Paddle.

  predict   time, GPU-hours and limit of a training on HOSTSxCARDS, and what would help
  fit       the numbers of a step from measured rows

Measure what you can (ppdist benchmark train|scaling|loader|eval --json FILE, ppdist doctor
--json FILE); every number that was assumed is listed.  Accuracy is not predicted.
docs/planning.md explains the model.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppdist.cli import parser_of
from ppdist.common.files import make_parent, write_json
from ppdist.planner import tables
from ppdist.planner.fit import read_benchmarks
from ppdist.planner.options import add_cluster, add_job, add_rows, fit_rows, question
from ppdist.planner.what_if import PARTS, Prediction, clusters_up_to, predict, what_ifs


def parse() -> argparse.Namespace:
    parser = parser_of("plan", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict", help="a training on HOSTSxCARDS")
    add_rows(predicting)
    add_cluster(predicting)
    add_job(predicting)
    predicting.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as PNG")
    fitting = commands.add_parser("fit", help="the numbers of a step from measured rows")
    add_rows(fitting)
    for command in (predicting, fitting):
        command.add_argument("--json", type=Path, metavar="FILE", help="write it as JSON as well")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.json:
        make_parent(arguments.json)
    report = COMMANDS[arguments.command](arguments)
    if arguments.json:
        write_json(arguments.json, {"what": arguments.command, **report}, indent=1)
    return 0


def run_predict(arguments: argparse.Namespace) -> dict[str, Any]:
    asked = question(arguments)
    predictions = [predict(asked.job, cluster) for cluster in clusters_up_to(asked.cluster)]
    answer = predictions[-1]
    print(tables.growth(predictions))
    on = f"{answer.cluster} cards"
    if answer.hours:
        print(f"\n{on}: {tables.hours(answer.hours)}, {answer.gpu_hours:.1f} GPU-hours. Of these:")
        print(tables.spent(answer))
    print(f"\nLimit on {on}: {PARTS[answer.limit]}. What would help:")
    print(tables.helps(asked.job, answer))
    for title, lines in (("Assumed", asked.assumed), ("Not in these numbers", asked.missing)):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  - ")
    if arguments.plot:
        tables.plot_predictions(predictions, arguments.plot)
    return {
        "job": asdict(asked.job),
        "predictions": [plain(prediction) for prediction in predictions],
        "what_ifs": [
            {"change": name, **plain(changed)}
            for name, changed in what_ifs(asked.job, answer.cluster)
        ],
        "assumed": asked.assumed,
        "missing": asked.missing,
    }


def plain(prediction: Prediction) -> dict[str, Any]:
    """For JSON."""
    return {
        **asdict(prediction),
        "cluster": {"hosts": prediction.cluster.hosts, "cards": prediction.cluster.cards},
        "step_seconds": prediction.step.seconds,
        "gpu_hours": prediction.gpu_hours,
    }


def run_fit(arguments: argparse.Namespace) -> dict[str, Any]:
    found = fit_rows(read_benchmarks(arguments.benchmark), arguments.rows)
    print(tables.fitted(found))
    return {**asdict(found), "errors": [found.error(row) for row in found.rows]}


COMMANDS = {"predict": run_predict, "fit": run_fit}
