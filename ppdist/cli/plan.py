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

from ppdist.cli import parser_of, print_table
from ppdist.common.arguments import at_least
from ppdist.common.errors import ConfigError
from ppdist.common.files import make_parent, write_json
from ppdist.planner.fit import (
    Fit,
    Measured,
    Row,
    fit,
    fit_at_most,
    fit_in_model,
    identifiable,
    left_out,
    read_benchmarks,
    read_links,
)
from ppdist.planner.predict import (
    ANY_LINK,
    Cluster,
    Job,
    Link,
    Prediction,
    clusters_up_to,
    predict,
)

# What is assumed of cards where nothing says it; each use is listed with its source.
JITTER, PARALLEL_MS = 0.096, 12.2  # fitted to YOLOv5l on A100 (test_predict_published.py)
_OVERLAP = 0.9
_INSIDE = Link(2.5e-6, 200e9)  # NVLink of an A100 host
_HOP_SECONDS = 15e-6  # between hosts: a small all-reduce over 4 hosts takes some 60 us
_MISSED = 0.005  # of a row's seconds: worth saying


def parse() -> argparse.Namespace:
    parser = parser_of("plan", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict", help="a training on HOSTSxCARDS")
    fitting = commands.add_parser("fit", help="the numbers of a step from measured rows")
    # fmt: off
    for command in (predicting, fitting):
        command.add_argument("--benchmark", type=Path, nargs="+", default=[], metavar="FILE",
                             help="JSON of ppdist benchmark train, scaling, loader")
        command.add_argument("--rows", type=row, nargs="+", default=[], metavar="CARDSxBATCH=MS",
                             help="milliseconds of a step on so many cards with so many images "
                             "each, such as 1x16=169 2x16=192; rows fill one host after another")
        command.add_argument("--json", type=Path, metavar="FILE", help="write it as JSON as well")
    predicting.add_argument("--cards", type=hosts_and_cards, required=True, metavar="HOSTSxCARDS",
                            help="such as 4x8; 8 is one host of 8")
    predicting.add_argument("--doctor", type=Path, metavar="FILE",
                            help="JSON of ppdist doctor: the links it measured")
    predicting.add_argument("--link-gbits", type=positive, help="between hosts, Gb/s")
    predicting.add_argument("--inside-gbytes", type=positive,
                            help="between the cards of a host, GB/s")
    predicting.add_argument("--batch", type=at_least(1),
                            help="images of a card (as in the rows, if they all agree)")
    predicting.add_argument("--parameters", type=positive, metavar="MILLIONS",
                            help="of the model, where no report says it")
    predicting.add_argument("--images", type=at_least(1), default=0, help="of the training set")
    predicting.add_argument("--epochs", type=positive, default=0.0)
    # fmt: on
    return parser.parse_args()


def positive(text: str) -> float:
    """For `type=` of an option: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def hosts_and_cards(text: str) -> tuple[int, int]:
    """For `type=` of an option: HOSTSxCARDS, or the cards of one host."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected HOSTSxCARDS such as 4x8, or a number of cards, found {text!r}"
        )
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else (1, int(parts[0]))


def row(text: str) -> Row:
    """For `type=` of an option: CARDSxBATCH=MILLISECONDS."""
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
    report = COMMANDS[arguments.command](arguments)
    if arguments.json:
        write_json(arguments.json, {"what": arguments.command, **report}, indent=1)
    return 0


def run_predict(arguments: argparse.Namespace) -> dict[str, Any]:
    job, cluster, assumed = question(arguments)
    predictions = [predict(job, smaller) for smaller in clusters_up_to(cluster)]
    heads = ["cards", "batch", "step ms", "limit", "img/s", "efficiency", "hours", "GPU-hours"]
    print_table(heads, map(columns, predictions))
    answer = predictions[-1]
    parts = [f"{name} {1000 * part:.1f}" for name, part in asdict(answer.step).items()]
    print(f"{answer.cluster} cards, milliseconds of a step: {', '.join(parts)}")
    missing = ["accuracy", "evaluations, start-up, checkpoints, lost hosts", "latency of SyncBN"]
    missing += [] if answer.hours else ["hours: --images and --epochs"]
    missing += [] if job.card_input else ["waiting for images: ppdist benchmark loader --json"]
    if cluster.size > 1 and not job.parameters:
        missing.append("the network: --parameters, in millions")
    for title, lines in (("Assumed", assumed), ("Not in these numbers", missing)):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  - ")
    return {
        "job": asdict(job),
        "predictions": [plain(prediction) for prediction in predictions],
        "assumed": assumed,
        "missing": missing,
    }


def columns(prediction: Prediction) -> list[str]:
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


def plain(prediction: Prediction) -> dict[str, Any]:
    """For JSON."""
    return {
        **asdict(prediction),
        "cluster": {"hosts": prediction.cluster.hosts, "cards": prediction.cluster.cards},
        "step_seconds": prediction.step.seconds,
        "limit": prediction.step.limit,
        "gpu_hours": prediction.gpu_hours,
    }


def run_fit(arguments: argparse.Namespace) -> dict[str, Any]:
    fitted = fit(rows_of(read_benchmarks(arguments.benchmark), arguments.rows))
    print(
        f"fixed {1000 * fitted.fixed_seconds:.2f} ms a step, {1000 * fitted.image_seconds:.3f} ms "
        f"an image, jitter {100 * fitted.jitter:.1f} %, data parallel "
        f"{1000 * fitted.parallel_seconds:.1f} ms\n"
        f"{len(fitted.parameters)} parameters ({', '.join(fitted.parameters)}) from "
        f"{len(fitted.rows)} rows; 0: these rows cannot tell it"
    )
    heads = ["cards x batch", "measured ms", "fitted ms", "error", "from the other rows"]
    print_table(heads, [
        [
            f"{row.cards} x {row.batch}", f"{1000 * row.seconds:.1f}",
            f"{1000 * fitted.seconds(row):.1f}", f"{100 * fitted.error(row):+.1f} %",
            "" if math.isnan(alone) else f"{100 * alone:+.1f} %",
        ]
        for row, alone in zip(fitted.rows, left_out(fitted.rows))
    ])  # fmt: skip
    return {**asdict(fitted), "errors": [fitted.error(row) for row in fitted.rows]}


def rows_of(measured: Measured, rows: Sequence[Row]) -> list[Row]:
    """Returns all measured rows.  Raises: ConfigError: there are none."""
    if not measured.rows and not rows:
        raise ConfigError(
            "no step was measured",
            code="option_missing",
            fix="give --benchmark FILE (ppdist benchmark train -c cfg.yml --json FILE), or "
            "--rows 1xBATCH=MILLISECONDS",
        )
    return [*measured.rows, *rows]


# What `predict` was asked: measured, given or assumed.


def question(arguments: argparse.Namespace) -> tuple[Job, Cluster, list[str]]:
    """Returns the training, the cluster, and what was assumed.

    Raises: ConfigError: nothing was measured, or what cannot be assumed is missing.
    """
    measured = read_benchmarks(arguments.benchmark)
    rows = rows_of(measured, arguments.rows)
    batches = {row.batch for row in rows}
    if not arguments.batch and len(batches) > 1:
        raise ConfigError(
            f"the rows have {', '.join(map(str, sorted(batches)))} images a card: which is asked "
            "for? Give --batch",
            code="option_missing",
        )
    assumed: list[str] = []
    cluster = cluster_of(arguments, measured, assumed)
    parameters = arguments.parameters * 1e6 if arguments.parameters else measured.parameters
    if cluster.size > 1 and parameters and not measured.on_cpu:
        assumed.append(f"the network hides behind {100 * _OVERLAP:.0f} % of the backward pass")
    job = Job(
        fixed_seconds=0.0,
        image_seconds=0.0,
        batch=arguments.batch or rows[0].batch,
        parameters=parameters or 0.0,
        overlap=0.0 if measured.on_cpu else _OVERLAP,
        card_input=measured.card_input,
        images=arguments.images,
        epochs=arguments.epochs,
    )
    fitted = fitted_step(rows, job, cluster, measured.on_cpu, assumed)
    if job.batch not in batches and "fixed" not in fitted.parameters:
        assumed.append(
            f"a step's time grows with its images, to {job.batch} a card: all rows have "
            f"{rows[0].batch}"
        )
    job = replace(
        job,
        fixed_seconds=fitted.fixed_seconds,
        image_seconds=fitted.image_seconds,
        jitter=fitted.jitter,
        parallel_seconds=fitted.parallel_seconds,
    )
    return job, cluster, assumed


def cluster_of(arguments: argparse.Namespace, measured: Measured, assumed: list[str]) -> Cluster:
    hosts, cards = arguments.cards
    inside, across = read_links(arguments.doctor) if arguments.doctor else (None, None)
    if hosts > 1 and not across and not arguments.link_gbits:
        raise ConfigError(
            "how fast is the link between the hosts? Give --link-gbits, or --doctor FILE of "
            "ppdist doctor on two hosts or more",
            code="option_missing",
            where=f"--cards {hosts}x{cards}",
        )
    if inside is None:
        # Ranks on CPUs sum in shared memory, whose time is in the fixed cost of several.
        inside = ANY_LINK if measured.on_cpu else _INSIDE
        if cards > 1 and not measured.on_cpu and not arguments.inside_gbytes:
            assumed.append("inside a host 200 GB/s, as NVLink of A100: --inside-gbytes or --doctor")
    if across is None:
        across = Link(_HOP_SECONDS, math.inf)
        if hosts > 1:
            assumed.append(f"between hosts {1e6 * _HOP_SECONDS:g} us a hop: --doctor")
    if arguments.inside_gbytes:
        inside = replace(inside, bytes_per_second=arguments.inside_gbytes * 1e9)
    if arguments.link_gbits:
        across = replace(across, bytes_per_second=arguments.link_gbits / 8 * 1e9)
    return Cluster(hosts, cards, inside, across)


def fitted_step(
    rows: Sequence[Row], job: Job, cluster: Cluster, on_cpu: bool, assumed: list[str]
) -> Fit:
    """Fits the step and records its assumptions.

    Assumptions are settled first, so that a prediction for a measured row returns the measurement.

    Raises: ConfigError: the rows of a CPU tell nothing of several ranks.
    """
    identified = identifiable(rows)
    several = cluster.size > 1 or all(row.cards > 1 for row in rows)
    source = "as fitted to YOLOv5l on A100"
    parallel = None
    if several and "parallel" not in identified:
        if any(row.cards > 1 for row in rows):
            assumed.append("no fixed cost of several cards: no row on one card tells it from "
                           "arithmetic")  # fmt: skip
        elif on_cpu:
            raise ConfigError(
                "the rows were measured on CPUs, none of them on several ranks",
                code="option_missing",
                where="--benchmark",
                fix="add a report of ppdist benchmark scaling -c cfg.yml --processes 1 2",
            )
        else:
            parallel = PARALLEL_MS / 1000
            assumed.append(f"data parallel {PARALLEL_MS} ms a step, {source}: a row on 2 cards")
    if "jitter" in identified or not several:
        fitted = fit_in_model(rows, job, cluster, None, parallel)
    else:
        fitted = fit_at_most(rows, job, cluster, JITTER, parallel)
        assumed.append(f"jitter {100 * JITTER:.1f} %, {source}: rows on more cards")
        if fitted.jitter < JITTER:
            assumed[-1] += f"; the rows leave room for {100 * fitted.jitter:.1f} % only"
    worst = max(fitted.rows, key=lambda row: abs(fitted.error(row)))
    if fitted.worst > _MISSED:
        assumed.append(
            "rows that do not quite agree with each other or with what was given: "
            f"{worst.cards}x{worst.batch} comes out {100 * fitted.error(worst):+.1f} % off"
        )
    return fitted


COMMANDS = {"predict": run_predict, "fit": run_fit}
