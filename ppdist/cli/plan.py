"""Predicts speed, cost and bottleneck of a training on N cards.

Needs no Paddle.

  predict   steps, images a second, GPU-hours and limit of a training on HOSTSxCARDS
  fit       the numbers of a step from measured rows

Measure first (ppdist benchmark train|scaling|loader --json FILE, ppdist doctor --json FILE);
every number that was assumed is listed.  Accuracy is not predicted.  docs/planning.md explains
the model.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ppdist.cli import make_parser, print_table
from ppdist.common.arguments import at_least
from ppdist.common.errors import ConfigError
from ppdist.common.files import make_parent, write_json
from ppdist.lab.planner.fit import (
    Fit,
    Measured,
    Row,
    fit,
    identifiable,
    read_benchmarks,
    read_link,
)
from ppdist.lab.planner.model import Cluster, Job, Link, Prediction, clusters_up_to, predict

# Assumed where there is no measurement; every use is reported with its source.
JITTER, PARALLEL_MS = 0.096, 12.2  # fitted to YOLOv5l on A100 (test_model_published.py)
_OVERLAP = 0.9
_HOP_SECONDS = 15e-6  # between hosts: a small all-reduce over 4 hosts takes about 60 us
_NOTABLE_ERROR = 0.005  # relative error of a fitted row that is worth a note


def parse() -> argparse.Namespace:
    parser = make_parser("plan", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict", help="a training on HOSTSxCARDS")
    fitting = commands.add_parser("fit", help="the numbers of a step from measured rows")
    # fmt: off
    for command in (predicting, fitting):
        command.add_argument("--benchmark", type=Path, nargs="+", default=[], metavar="FILE",
                             help="JSON of ppdist benchmark train, scaling, loader")
        command.add_argument("--rows", type=cards_row, nargs="+", default=[],
                             metavar="CARDSxBATCH=MS",
                             help="milliseconds of a step on so many cards with so many images "
                             "each, on one host, such as 1x16=169 2x16=192")
        command.add_argument("--json", type=Path, metavar="FILE", help="write it as JSON as well")
    predicting.add_argument("--cards", type=cluster_size, required=True, metavar="HOSTSxCARDS",
                            help="such as 4x8; 8 is one host of 8")
    predicting.add_argument("--doctor", type=Path, metavar="FILE",
                            help="JSON of ppdist doctor on all hosts: the link between them")
    predicting.add_argument("--link-gbits", type=above_zero, help="between hosts, Gb/s")
    predicting.add_argument("--batch", type=at_least(1),
                            help="images of a card (as in the rows, if they all agree)")
    predicting.add_argument("--parameters", type=above_zero, metavar="MILLIONS",
                            help="of the model, where no report says it")
    predicting.add_argument("--images", type=at_least(1), default=0, help="of the training set")
    predicting.add_argument("--epochs", type=above_zero, default=0.0)
    # fmt: on
    return parser.parse_args()


def above_zero(text: str) -> float:
    """Parses a number above 0, for `type=` of an option."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def cluster_size(text: str) -> tuple[int, int]:
    """Parses HOSTSxCARDS, or the number of cards of a single host, for `type=` of an option."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected HOSTSxCARDS such as 4x8, or a number of cards, found {text!r}"
        )
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else (1, int(parts[0]))


def cards_row(text: str) -> Row:
    """Parses CARDSxBATCH=MILLISECONDS, for `type=` of an option."""
    shape, _, milliseconds = text.partition("=")
    cards, _, batch = shape.partition("x")
    try:
        measured = Row(int(cards), int(batch), float(milliseconds) / 1000)
    except ValueError:
        measured = Row(0, 0, 0.0)
    if measured.cards < 1 or measured.batch < 1 or not 0 < measured.seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"expected CARDSxBATCH=MILLISECONDS such as 1x16=169, found {text!r}"
        )
    return measured


def main() -> int:
    arguments = parse()
    if arguments.json:
        make_parent(arguments.json)
    measured = read_benchmarks(arguments.benchmark)
    measured.rows += arguments.rows
    if not measured.rows:
        raise ConfigError(
            "no step was measured",
            code="option_missing",
            fix="give --benchmark FILE (ppdist benchmark train -c cfg.yml --json FILE), or "
            "--rows 1xBATCH=MILLISECONDS",
        )
    report = COMMANDS[arguments.command](arguments, measured)
    if arguments.json:
        write_json(arguments.json, {"what": arguments.command, **report}, indent=1)
    return 0


def run_predict(arguments: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    job, cluster, assumed = describe_job(arguments, measured)
    predictions = [predict(job, smaller) for smaller in clusters_up_to(cluster)]
    heads = ["cards", "batch", "step ms", "limit", "img/s", "efficiency", "hours", "GPU-hours"]
    print_table(heads, map(format_columns, predictions))
    answer = predictions[-1]
    parts = [f"{name} {1000 * part:.1f}" for name, part in asdict(answer.step).items()]
    print(f"{answer.cluster} cards, ms per step: {', '.join(parts)}")
    print("Assumed:", *assumed, sep="\n  - ")
    return {
        "job": asdict(job),
        "predictions": [
            {
                **asdict(prediction),
                "cluster": {"hosts": prediction.cluster.hosts, "cards": prediction.cluster.cards},
                "step_seconds": prediction.step.seconds,
                "limit": prediction.step.limit,
                "gpu_hours": prediction.gpu_hours,
            }
            for prediction in predictions
        ],
        "assumed": assumed,
    }


def format_columns(prediction: Prediction) -> list[str]:
    step, limit = prediction.step, prediction.step.limit
    return [
        str(prediction.cluster),
        str(prediction.total_batch),
        f"{1000 * step.seconds:.1f}",
        f"{limit} {100 * getattr(step, limit) / step.seconds:.0f} %",
        f"{prediction.images_per_second:.1f}",
        f"{100 * prediction.efficiency:.0f} %",
        f"{prediction.hours:.1f}" if prediction.hours else "",
        f"{prediction.gpu_hours:.1f}" if prediction.hours else "",
    ]


def run_fit(arguments: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    fitted = fit(measured.rows)
    print(
        f"fixed {1000 * fitted.fixed_seconds:.2f} ms a step, {1000 * fitted.image_seconds:.3f} ms "
        f"an image, jitter {100 * fitted.jitter:.1f} %, data parallel "
        f"{1000 * fitted.parallel_seconds:.1f} ms\n"
        f"{len(fitted.parameters)} parameters ({', '.join(fitted.parameters)}) from "
        f"{len(fitted.rows)} rows; 0: these rows cannot tell it"
    )
    print_table(["cards x batch", "measured ms", "fitted ms", "error"], [
        [
            f"{row.cards} x {row.batch}", f"{1000 * row.seconds:.1f}",
            f"{1000 * fitted.seconds(row):.1f}", f"{100 * fitted.error(row):+.1f} %",
        ]
        for row in fitted.rows
    ])  # fmt: skip
    return {**asdict(fitted), "errors": [fitted.error(row) for row in fitted.rows]}


# The input of `predict`: measured, from options, or assumed.


def describe_job(
    arguments: argparse.Namespace, measured: Measured
) -> tuple[Job, Cluster, list[str]]:
    """Returns the training job, the cluster, and a list of what was assumed.

    Raises: ConfigError: a number is missing for which there is no assumption.
    """
    batches = {row.batch for row in measured.rows}
    if not arguments.batch and len(batches) > 1:
        raise ConfigError(
            f"the rows have {', '.join(map(str, sorted(batches)))} images a card: which is asked "
            "for? Give --batch",
            code="option_missing",
        )
    assumed = [] if measured.card_input else ["no wait for images: ppdist benchmark loader --json"]
    cluster = cluster_of(arguments, assumed)
    parameters = arguments.parameters * 1e6 if arguments.parameters else measured.parameters
    if cluster.hosts > 1 and not parameters:
        assumed.append("no time on the network: --parameters, in millions")
    elif cluster.hosts > 1 and not measured.on_cpu:
        assumed.append(f"the network hides behind {100 * _OVERLAP:.0f} % of the backward pass")
    job = Job(
        fixed_seconds=0.0,
        image_seconds=0.0,
        batch=arguments.batch or measured.rows[0].batch,
        parameters=parameters or 0.0,
        overlap=0.0 if measured.on_cpu else _OVERLAP,
        card_input=measured.card_input,
        images=arguments.images,
        epochs=arguments.epochs,
    )
    fitted = fit_step(measured.rows, cluster, assumed)
    if job.batch not in batches and "fixed" not in fitted.parameters:
        assumed.append(f"a step's time grows with its images, to {job.batch} a card")
    return (
        replace(
            job,
            fixed_seconds=fitted.fixed_seconds,
            image_seconds=fitted.image_seconds,
            jitter=fitted.jitter,
            parallel_seconds=fitted.parallel_seconds,
        ),
        cluster,
        assumed,
    )


def cluster_of(arguments: argparse.Namespace, assumed: list[str]) -> Cluster:
    hosts, cards = arguments.cards
    if hosts == 1:
        return Cluster(hosts, cards)
    if arguments.doctor:
        across = read_link(arguments.doctor)
    elif arguments.link_gbits:
        across = Link(_HOP_SECONDS, math.inf)
        assumed.append(f"between hosts {1e6 * _HOP_SECONDS:g} us a hop: --doctor")
    else:
        raise ConfigError(
            "how fast is the link between the hosts? Give --link-gbits, or --doctor FILE of "
            "ppdist doctor on two hosts or more",
            code="option_missing",
            where=f"--cards {hosts}x{cards}",
        )
    if arguments.link_gbits:
        across = replace(across, bytes_per_second=arguments.link_gbits / 8 * 1e9)
    return Cluster(hosts, cards, across)


def fit_step(rows: Sequence[Row], cluster: Cluster, assumed: list[str]) -> Fit:
    """Fits the step-time model and appends what it assumed to `assumed`."""
    identified = identifiable(rows)
    several = cluster.size > 1 or all(row.cards > 1 for row in rows)
    # With rows for one card only, the cost of using several cards has to be assumed.
    jitter = parallel = None
    if several and "jitter" not in identified:
        jitter = JITTER
        assumed.append(f"jitter {100 * JITTER:.1f} %, as of YOLOv5l on A100: rows on more cards")
    if several and "parallel" not in identified:
        parallel = 0.0 if any(row.cards > 1 for row in rows) else PARALLEL_MS / 1000
        assumed.append(f"data parallel {1000 * parallel:g} ms a step: rows on 1 and 2 cards")
    fitted = fit(rows, jitter, parallel)
    worst = max(fitted.rows, key=lambda row: abs(fitted.error(row)))
    if abs(fitted.error(worst)) > _NOTABLE_ERROR:
        assumed.append(
            "rows that do not quite agree with each other or with what was given: "
            f"{worst.cards}x{worst.batch} comes out {100 * fitted.error(worst):+.1f} % off"
        )
    return fitted


COMMANDS = {"predict": run_predict, "fit": run_fit}
