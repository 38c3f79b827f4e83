"""Command line of the planner: numbers measured, given or assumed."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppdist.common.arguments import at_least
from ppdist.common.errors import ConfigError
from ppdist.planner.fit import (
    Fit,
    Measured,
    Row,
    fit,
    fit_at_most,
    fit_in_model,
    identifiable,
    read_benchmarks,
    read_links,
)
from ppdist.planner.what_if import Cluster, Job, Link

# What is assumed of cards where nothing says it; each use is listed with its source.
_JITTER, _PARALLEL_MS = 0.096, 12.2  # fitted to YOLOv5l on A100 (test_what_if_published.py)
_INSIDE_GBYTES = 200.0  # NVLink of an A100 host
# A small all-reduce on a GPU takes some 15 us among 8 cards and 60 us across 4 hosts, which is 6
# and 4 hops.
_INSIDE_US, _ACROSS_US = 2.5, 15.0
# From the command to the first step, without images and for each; docs/dev/planning.md has how
# they were measured.
_STARTUP_SECONDS, _STARTUP_IMAGE_MS = 8.0, 0.84
_MISSED = 0.005  # of a row's seconds: worth saying


@dataclass(frozen=True)
class Question:
    """The question, and the basis of the answer."""

    job: Job
    cluster: Cluster
    fitted: Fit
    assumed: tuple[str, ...]
    missing: tuple[str, ...]  # parts the answer lacks


def number(text: str) -> float:
    """For `type=` of an option: 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, found {text!r}")
    return value


def positive(text: str) -> float:
    """For `type=` of an option: above 0."""
    if (value := number(text)) == 0:
        raise argparse.ArgumentTypeError("expected a number above 0, found 0")
    return value


def speeds(text: str) -> tuple[float, ...]:
    """Parses `1,1,0.5`, each above 0 and at most 1."""
    found = tuple(positive(word) for word in text.split(","))
    if max(found) > 1:
        raise argparse.ArgumentTypeError(
            f"{text}: measure the fastest card, so that none is above 1"
        )
    return found


def hosts_and_cards(text: str) -> tuple[int, int]:
    """HOSTSxCARDS, or the cards of one host."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected HOSTSxCARDS such as 4x8, or a number of cards, found {text!r}"
        )
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else (1, int(parts[0]))


def row(text: str) -> Row:
    """CARDSxBATCH=MILLISECONDS."""
    shape, _, milliseconds = text.partition("=")
    cards, _, batch = shape.partition("x")
    try:
        found = Row(int(cards), int(batch), float(milliseconds) / 1000)
    except ValueError:
        found = Row(0, 0, 0.0)
    if found.cards < 1 or found.batch < 1 or not 0 < found.seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"expected CARDSxBATCH=MILLISECONDS such as 1x16=169, found {text!r}"
        )
    return found


def add_rows(parser: argparse.ArgumentParser) -> None:
    """What the step was measured to take."""
    group = parser.add_argument_group("the step, measured (one of the two, any number of each)")
    group.add_argument("--benchmark", type=Path, nargs="+", default=[], metavar="FILE",
                       help="JSON of ppdist benchmark train, scaling, loader, eval")  # fmt: skip
    group.add_argument("--rows", type=row, nargs="+", default=[], metavar="CARDSxBATCH=MS",
                       help="milliseconds of a step on so many cards with so many images each, "
                       "such as 1x16=169 2x16=192; rows fill one host after another")  # fmt: skip


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """How many cards, and what joins them."""
    group = parser.add_argument_group("the cluster")
    group.add_argument("--cards", type=hosts_and_cards, required=True, metavar="HOSTSxCARDS",
                       help="such as 4x8; 8 is one host of 8")  # fmt: skip
    group.add_argument("--doctor", type=Path, metavar="FILE",
                       help="JSON of ppdist doctor: the link it measured")  # fmt: skip
    group.add_argument("--link-gbits", type=positive, help="between hosts, Gb/s")
    group.add_argument("--link-us", type=number, help="of a hop between hosts, microseconds")
    group.add_argument("--inside-gbytes", type=positive,
                       help="between the cards of a host, GB/s")  # fmt: skip
    group.add_argument("--inside-us", type=number, help="of a hop inside a host, microseconds")


def add_job(parser: argparse.ArgumentParser) -> None:
    """The model and data to train."""
    step = parser.add_argument_group("a step")
    step.add_argument("--batch", type=at_least(1),
                      help="images of a card (as in the rows, if they all agree)")  # fmt: skip
    step.add_argument("--accumulate", type=at_least(1), default=1, help="micro-batches a step")
    step.add_argument("--parameters", type=positive, metavar="MILLIONS", help="of the model")
    step.add_argument("--gradient-dtype", choices=("float32", "bfloat16", "float16"),
                      default="float32", help="on the wire, in the rows too")  # fmt: skip
    step.add_argument("--overlap", type=number, help="part of the backward pass that hides "
                      "communication (0.9; 0 on CPU); always 0 but in float32")  # fmt: skip
    step.add_argument("--sync-bn", type=at_least(0), default=0, metavar="LAYERS",
                      help="batch norms synchronised over cards")  # fmt: skip
    step.add_argument("--jitter", type=number, help="deviation of a step's arithmetic / its mean")
    step.add_argument("--speeds", type=speeds, metavar="S,S,...", default=(), help="of each card, "
                      "that of the measured one 1: 1,1,0.5 are two and a slower one")  # fmt: skip
    step.add_argument("--parallel-ms", type=number, help="fixed cost of being several cards")
    images = parser.add_argument_group("images a second that can be read")
    images.add_argument("--card-input", type=positive, help="by the loader of one card")
    images.add_argument("--host-input", type=positive, help="by one host")
    images.add_argument("--total-input", type=positive, help="by all hosts, of shared storage")
    run = parser.add_argument_group("the training")
    run.add_argument("--images", type=at_least(1), default=0, help="of the training set")
    run.add_argument("--epochs", type=positive, default=0.0, help="at the reference batch")
    run.add_argument("--reference-batch", type=at_least(0),
                     help="total batch of --epochs; a smaller one needs as many")  # fmt: skip
    run.add_argument("--critical-batch", type=positive,
                     help="B_c: E(B) = E_min (1 + B / B_c); needs --reference-batch")  # fmt: skip
    run.add_argument("--whole-epochs", action="store_true",
                     help="round epochs to whole ones, 1 at least")  # fmt: skip
    run.add_argument("--eval-images", type=at_least(0), default=0, help="of the validation set")
    run.add_argument("--eval-rate", type=positive, help="images a second of one card")
    run.add_argument("--eval-every", type=at_least(1), default=1, help="epochs")
    run.add_argument("--eval-on-one", action="store_true", help="the other cards wait meanwhile")
    run.add_argument("--scoring-seconds", type=number, help="of an evaluation, on one rank")
    run.add_argument("--startup-seconds", type=number, help="from the command to the first step "
                     "(measured constants, by the images)")  # fmt: skip
    lost = parser.add_argument_group("hosts that fail, or are taken away (preemptible machines)")
    lost.add_argument("--host-mtbf", type=positive, metavar="HOURS",
                      help="mean time between failures of one; without it none fails")  # fmt: skip
    lost.add_argument("--away-minutes", type=number, default=0.0,
                      help="until a lost host, or another in its place, is there (0)")  # fmt: skip
    lost.add_argument("--restart-seconds", type=number,
                      help=f"from then to the next step ({_STARTUP_SECONDS:g})")  # fmt: skip
    lost.add_argument("--checkpoint-epochs", type=positive, default=1.0,
                      help="of training between checkpoints (1)")  # fmt: skip
    lost.add_argument("--checkpoint-seconds", type=number, default=0.0,
                      help="for which one holds up the steps (0)")  # fmt: skip
    lost.add_argument("--goes-on", action="store_true",
                      help="the others go on meanwhile: fleetrun --min_hosts")  # fmt: skip


def question(arguments: argparse.Namespace) -> Question:
    """Everything that `predict` was asked.

    Raises: ConfigError: nothing was measured, or what cannot be assumed is missing.
    """
    measured = read_benchmarks(arguments.benchmark)
    rows = _all_rows(measured, arguments.rows)
    assumed: list[str] = []
    cluster = _cluster(arguments, measured, assumed)
    unfitted = _job(arguments, measured, rows, cluster, assumed)
    fitted = _fitted(arguments, rows, unfitted, cluster, assumed)
    job = replace(
        unfitted,
        fixed_seconds=fitted.fixed_seconds,
        image_seconds=fitted.image_seconds,
        jitter=fitted.jitter,
        parallel_seconds=fitted.parallel_seconds,
    )
    return Question(job, cluster, fitted, tuple(assumed), tuple(_missing(job, fitted, cluster)))


def fit_rows(measured: Measured, rows: Sequence[Row]) -> Fit:
    """Of all rows there are.  Raises: ConfigError: there are none."""
    return fit(_all_rows(measured, rows))


def _all_rows(measured: Measured, rows: Sequence[Row]) -> list[Row]:
    if not measured.rows and not rows:
        raise ConfigError(
            "no step was measured",
            code="option_missing",
            fix=(
                "give --benchmark FILE (ppdist benchmark train -c cfg.yml --json FILE), or "
                "--rows 1xBATCH=MILLISECONDS"
            ),
        )
    return [*measured.rows, *rows]


def _cluster(arguments: argparse.Namespace, measured: Measured, assumed: list[str]) -> Cluster:
    hosts, cards = arguments.cards
    inside, across = read_links(arguments.doctor) if arguments.doctor else (None, None)
    inside = inside or _inside(arguments, measured, assumed)
    if hosts > 1 and not across and not arguments.link_gbits:
        raise ConfigError(
            "how fast is the link between the hosts? Give --link-gbits, or --doctor FILE of "
            "ppdist doctor on two hosts or more",
            code="option_missing",
            where=f"--cards {hosts}x{cards}",
        )
    if across is None:
        across = Link(_ACROSS_US * 1e-6, math.inf)
        if hosts > 1 and arguments.link_us is None:
            assumed.append(f"between hosts {_ACROSS_US:g} us a hop: --link-us or --doctor")
    inside = _given(inside, arguments.inside_gbytes, arguments.inside_us)
    gbytes = arguments.link_gbits and arguments.link_gbits / 8
    return Cluster(hosts, cards, inside, _given(across, gbytes, arguments.link_us))


def _given(link: Link, gbytes: float | None, us: float | None) -> Link:
    """The link, with what was given of it."""
    if gbytes:
        link = replace(link, bytes_per_second=gbytes * 1e9)
    return link if us is None else replace(link, latency_seconds=us * 1e-6)


def _inside(arguments: argparse.Namespace, measured: Measured, assumed: list[str]) -> Link:
    """Between the cards of a host, where no doctor measured it."""
    hosts, cards = arguments.cards
    unknown = {
        "--inside-gbytes": f"{_INSIDE_GBYTES:g} GB/s" * (not arguments.inside_gbytes),
        "--inside-us": f"{_INSIDE_US:g} us a hop" * (arguments.inside_us is None),
    }
    unknown = {option: said for option, said in unknown.items() if said and cards > 1}
    link = measured.inside(_gradient_bytes(arguments))
    if link:
        if unknown:
            assumed.append(
                f"inside a host {link.bytes_per_second / 1e9:.3g} GB/s, no latency apart, from the "
                "all-reduce of the benchmark: --inside-gbytes, --inside-us or --doctor"
            )
        return link
    if "--inside-gbytes" in unknown and not measured.hides_network:
        raise ConfigError(
            "the rows were measured on CPUs, none of them on several: how fast is the link "
            "inside a host? Give --doctor FILE of ppdist doctor, a report of "
            "ppdist benchmark on two processes, or --inside-gbytes and --inside-us",
            code="option_missing",
            where=f"--cards {hosts}x{cards}",
        )
    if unknown:
        assumed.append(
            f"inside a host {', '.join(unknown.values())} (NVLink of an A100 host): "
            f"{', '.join(unknown)} or --doctor"
        )
    return Link(_INSIDE_US * 1e-6, _INSIDE_GBYTES * 1e9)


def _gradient_bytes(arguments: argparse.Namespace) -> int:
    return 4 if arguments.gradient_dtype == "float32" else 2


def _fitted(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    job: Job,
    cluster: Cluster,
    assumed: list[str],
) -> Fit:
    """Fits the step and records its assumptions.

    Assumptions are settled first, so that a prediction for a measured row returns the measurement.
    """
    told = identifiable(rows)
    several = cluster.size > 1 or all(row.cards > 1 for row in rows)
    source = "as fitted to YOLOv5l on A100"
    parallel = None if arguments.parallel_ms is None else arguments.parallel_ms / 1000
    if several and parallel is None and "parallel" not in told:
        if all(row.cards == 1 for row in rows):
            parallel = _PARALLEL_MS / 1000
            assumed.append(f"data parallel {_PARALLEL_MS} ms a step, {source}: --parallel-ms, or a "
                           "row on 2 cards")  # fmt: skip
        else:
            assumed.append("no fixed cost of several cards: no row on one card tells it from "
                           "arithmetic: --parallel-ms, or such a row")  # fmt: skip
    if arguments.jitter is not None or "jitter" in told or not several:
        found = fit_in_model(rows, job, cluster, arguments.jitter, parallel)
    else:
        found = fit_at_most(rows, job, cluster, _JITTER, parallel)
        assumed.append(f"jitter {100 * _JITTER:.1f} %, {source}: --jitter, or rows on more cards")
        if found.jitter < _JITTER:
            assumed[-1] += f"; the rows leave room for {100 * found.jitter:.1f} % only"
    if found.worst > _MISSED:
        worst = max(found.rows, key=lambda row: abs(found.error(row)))
        assumed.append(f"rows that do not quite agree with each other or with what was given: "
                       f"{worst.cards}x{worst.batch} comes out {100 * found.error(worst):+.1f} % "
                       "off")  # fmt: skip
    return found


def _job(
    arguments: argparse.Namespace,
    measured: Measured,
    rows: Sequence[Row],
    cluster: Cluster,
    assumed: list[str],
) -> Job:
    """All but the numbers of a step, which `_fitted` finds."""
    batches = {row.batch for row in rows}
    if not arguments.batch and len(batches) > 1:
        raise ConfigError(
            f"the rows have {', '.join(map(str, sorted(batches)))} images a card: which is asked "
            "for? Give --batch",
            code="option_missing",
        )
    if arguments.critical_batch and arguments.reference_batch is None:
        raise ConfigError(
            "give --reference-batch too, the total batch at which --epochs are enough",
            code="option_missing",
            where=f"--critical-batch {arguments.critical_batch:g}",
        )
    gradient_bytes, overlap = _gradient_bytes(arguments), arguments.overlap
    if overlap is None:
        overlap = 0.9 if measured.hides_network and gradient_bytes == 4 else 0.0
        if cluster.size > 1 and overlap:
            assumed.append("the network hides behind 90 % of the backward pass: --overlap")
    if arguments.speeds and len(arguments.speeds) != cluster.size:
        raise ConfigError(
            f"{len(arguments.speeds)} speeds for {cluster.size} cards",
            code="shares_of_other_world",
            where="--speeds",
            fix="give one for each card",
        )
    parameters = arguments.parameters * 1e6 if arguments.parameters else measured.parameters
    scoring, startup = arguments.scoring_seconds, arguments.startup_seconds
    restart = arguments.restart_seconds
    if restart is None and arguments.host_mtbf:
        restart = _STARTUP_SECONDS
        assumed.append(f"a restart {restart:g} s, with images known: --restart-seconds")
    if startup is None:
        startup = 0.0
        if arguments.images and arguments.epochs:
            images = arguments.images + arguments.eval_images
            startup = _STARTUP_SECONDS + images * _STARTUP_IMAGE_MS / 1000
            assumed.append(
                f"start-up {startup:.0f} s: {_STARTUP_SECONDS:g} s, and {_STARTUP_IMAGE_MS:g} ms "
                "an image to read annotations like COCO's and look at headers, as on two cores "
                "with a local disk: --startup-seconds"
            )
    return Job(
        fixed_seconds=0.0,
        image_seconds=0.0,
        batch=arguments.batch or rows[0].batch,
        accumulate=arguments.accumulate,
        parameters=parameters or 0.0,
        gradient_bytes=gradient_bytes,
        overlap=overlap,
        sync_bn_layers=arguments.sync_bn,
        speeds=arguments.speeds,
        card_input=arguments.card_input or measured.card_input,
        host_input=arguments.host_input,
        total_input=arguments.total_input,
        images=arguments.images,
        epochs=arguments.epochs,
        reference_batch=arguments.reference_batch or 0,
        critical_batch=arguments.critical_batch,
        whole_epochs=arguments.whole_epochs,
        evaluation_images=arguments.eval_images,
        evaluation_rate=arguments.eval_rate or measured.evaluation_rate,
        scoring_seconds=measured.scoring_seconds if scoring is None else scoring,
        evaluate_every=arguments.eval_every,
        sharded_evaluation=not arguments.eval_on_one,
        startup_seconds=startup,
        host_hours=arguments.host_mtbf,
        away_seconds=60 * arguments.away_minutes,
        restart_seconds=restart or 0.0,
        checkpoint_seconds=arguments.checkpoint_seconds,
        checkpoint_epochs=arguments.checkpoint_epochs,
        goes_on=arguments.goes_on,
    )


def _missing(job: Job, fitted: Fit, cluster: Cluster) -> list[str]:
    """Lists what the answer leaves out."""
    missing = ["accuracy"]
    if not job.images or not job.epochs:
        missing.append("hours: --images and --epochs")
    elif not job.critical_batch:
        missing.append("the epochs that a larger batch needs more: --critical-batch")
    if not (job.evaluation_images and job.evaluation_rate) and job.images:
        missing.append("evaluation: --eval-images and --eval-rate")
    if not (job.card_input or job.host_input or job.total_input):
        missing.append("waiting for images: --card-input, or ppdist benchmark loader --json")
    if cluster.hosts > 1 and not job.host_hours:
        missing.append("hosts that fail or are taken away: --host-mtbf")
    if cluster.size > 1 and not job.parameters:
        missing.append("the network: --parameters, in millions")
    if job.batch != fitted.rows[0].batch and "fixed" not in fitted.parameters:
        missing.append(
            f"the fixed part of a step: all rows have {fitted.rows[0].batch} images a card, so "
            f"time was taken to grow with the images to {job.batch}"
        )
    return missing
