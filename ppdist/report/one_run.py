"""What the page shows of one run."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ppdist.common.logging import duration
from ppdist.report.charts import Chart, Point, Series, chart
from ppdist.report.evaluation import Scores, scores_of, share
from ppdist.report.run import Numbers, Run

_PARTS_OF_EVALUATION = {  # key of a record -> name of the curve, colour of style.css
    "mAP": ("mAP 0.50:0.95", 0),
    "mAP50": ("mAP 0.50", 1),
    "mAP75": ("mAP 0.75", 2),
    "top1": ("top 1", 0),
    "top5": ("top 5", 1),
}
_PARTS_OF_F1 = {"precision": ("precision", 0), "recall": ("recall", 1), "f1": ("F1", 2)}
_PLACES = (("step", ".0f"), ("epoch", ".1f"))
_SLOW = 1.1  # times the median
_MOST_RANKS = 8  # with a curve each; of more the fastest, the median, the slowest


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    name: str
    value: str
    beside: str = ""


@dataclass
class OneRun:
    """The page of one run; what is empty is not shown."""

    run: Run
    status: tuple[str, str]  # a word, and a sentence
    tiles: list[Tile] = field(default_factory=list)
    training: list[Chart] = field(default_factory=list)
    speed: list[Chart] = field(default_factory=list)
    slow_ranks: str = ""
    scores: Scores | None = None
    happened: list[str] = field(default_factory=list)


def show(run: Run) -> OneRun:
    """Works out everything the page of one run shows."""
    page = OneRun(run, status_of(run), list(_tiles(run)))
    page.training = training_charts([(run, "", "", 0, False)])
    page.speed = [each for each in (_throughput(run), _seconds(run), *_of_ranks(run)) if each]
    page.slow_ranks = slow_ranks(run)
    page.happened = list(_happened(run))
    page.scores = scores_of(run.evaluation) if run.evaluation else None
    return page


def status_of(run: Run) -> tuple[str, str]:
    """How the run stands: a word, and what it means."""
    if run.alone_evaluated:
        return "evaluated", "by tools/eval.py"
    of = f" of {run.total_steps}" if run.total_steps else ""
    if run.running:
        return "running", f"step {run.steps}{of}"
    if run.finished == "early_stopping":
        return "finished", f"stopped early after step {run.steps}{of}"
    if run.ended:
        return "finished", f"all {run.steps} steps"
    if not run.train and not run.evaluations:
        return "no records", "it has not yet written down a step"
    if run.finished == "signal":
        return "stopped", f"by a signal after step {run.steps}{of}; --resume goes on"
    return "not finished", f"last record at step {run.steps}{of}; --resume goes on"


def _tiles(run: Run) -> Iterator[Tile]:
    best, name = run.best, run.metric
    if run.alone_evaluated and run.evaluation:
        for key in ("mAP", "mAP50", "mAP75", "f1", "precision", "recall", "top1", "top5"):
            value = share(run.evaluation.metrics.get(key))
            if value is not None:
                yield Tile(key, f"{value:.4f}")
    elif best:
        at = [f"{unit} {best[unit]:{form}}" for unit, form in _PLACES if unit in best]
        yield Tile(f"best {name}", f"{best[name]:.4f}", ", ".join(at))
        for other in ("mAP", "mAP50", "top5"):
            if other in best and other != name:
                yield Tile(other, f"{best[other]:.4f}", "of the same evaluation")
        if "f1" in best:
            beside = f"precision {best.get('precision', math.nan):.3f}, recall "
            beside += f"{best.get('recall', math.nan):.3f}"
            if "confidence" in best:
                beside += f" at confidence {best['confidence']:.3g}"
            yield Tile("F1", f"{best['f1']:.3f}", beside)
    losses = [record for record in run.train if "loss" in record]
    if losses:
        measured = [record for record in run.evaluations if "val_loss" in record]
        beside = f"validation {measured[-1]['val_loss']:.3f}" if measured else "last record"
        yield Tile("training loss", f"{losses[-1]['loss']:.3f}", beside)
    speed = speed_of(run)
    if speed:
        ranks = run.derived_value("ranks")
        yield Tile(
            "images per second",
            f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}",
            f"median, {ranks} ranks" * bool(ranks),
        )
    seconds = seconds_of(run)
    if seconds:
        waiting = _waiting(run.train)
        waits = f"{waiting:.1%} of a step waits for data" if waiting is not None else ""
        yield Tile("time", duration(seconds), waits)


def speed_of(run: Run) -> float | None:
    """Images a second, the median of the records but the first, which holds what happens once."""
    name = "images_per_second"
    speeds = [record[name] for record in run.train if name in record]
    return statistics.median(speeds[1:] or speeds) if speeds else None


def seconds_of(run: Run) -> float | None:
    """From the first record to the last, with all between, pauses too."""
    return run.times[1] - run.times[0] if run.times else None


def _waiting(records: Sequence[Numbers]) -> float | None:
    both = [each for each in records if "data_seconds" in each and "step_seconds" in each]
    total = sum(each["step_seconds"] for each in both)
    return sum(each["data_seconds"] for each in both) / total if total > 0 else None


Drawn = tuple[Run, str, str, int, bool]  # a run, its name and its group's, colour, whether dashed


def training_charts(runs: Sequence[Drawn]) -> list[Chart]:
    """Losses, scores, rate and gradients over the epochs; of several runs over one another."""
    one = len(runs) == 1
    in_epochs = all(
        "epoch" in record for run, *_ in runs for record in [*run.train, *run.evaluations]
    )
    x = "epoch" if in_epochs else "step"

    def curves(kind: str, keys: dict[str, tuple[str, int]]) -> Iterator[Series]:
        for run, name, group, colour, dashed in runs:
            records = run.train if kind == "train" else run.evaluations
            for key, (label, own_colour) in keys.items():
                points: list[Point] = [(each[x], each.get(key)) for each in records]
                if one:
                    yield Series(label, points, own_colour)
                else:
                    yield Series(name, points, colour, dashed, group)

    def make(title: str, *series: Iterator[Series], **limits: Any) -> Chart | None:
        return chart(title, [each for part in series for each in part], x_label=x, **limits)

    train, val = {"loss": ("training", 0)}, {"val_loss": ("validation", 1)}
    charts = []
    if one:
        charts += [make("loss", curves("train", train), curves("evaluation", val))]
        charts += [make("parts of the loss", *_loss_parts(runs[0][0], curves))]
        scores = curves("evaluation", _PARTS_OF_EVALUATION)
        charts += [make("scores on the validation set", scores)]
        f1 = curves("evaluation", _PARTS_OF_F1)
        charts += [make("precision, recall, F1 at the best confidence", f1)]
    else:
        charts += [make("training loss", curves("train", train))]
        charts += [make("validation loss", curves("evaluation", val))]
        for key in dict.fromkeys([runs[0][0].metric, "mAP", "mAP50", "f1"]):
            charts += [make(key, curves("evaluation", {key: (key, 0)}))]
    rate = {"lr": ("learning rate", 0)}
    charts += [make("learning rate", curves("train", rate), from_zero=True)]
    norm = {"gradient_norm": ("gradient norm", 0)}
    charts += [make("gradient norm", curves("train", norm), from_zero=True)]
    if not one:
        speed = {"images_per_second": ("images per second", 0)}
        charts += [make("images per second", curves("train", speed), from_zero=True)]
    return [each for each in charts if each]


def _loss_parts(run: Run, curves: Any) -> Iterator[Iterator[Series]]:
    """Each part in one colour: training, and validation dashed."""
    parts = [key for key in (run.train[-1] if run.train else {}) if key.startswith("loss_")]
    for colour, part in enumerate(parts):
        name = part.removeprefix("loss_")
        yield curves("train", {part: (name, colour)})
        measured = {f"val_{part}": (f"{name}, validation", colour)}
        yield (replace(series, dashed=True) for series in curves("evaluation", measured))


def _over(run: Run, key: str) -> list[Point]:
    return [(record["step"], record.get(key)) for record in run.train]


def _throughput(run: Run) -> Chart | None:
    series = [Series("images per second", _over(run, "images_per_second"), 2)]
    return chart("images per second", series, x_label="step", from_zero=True)


def _seconds(run: Run) -> Chart | None:
    series = [
        Series("a step", _over(run, "step_seconds"), 0),
        Series("waiting for data", _over(run, "data_seconds"), 1),
    ]
    return chart("step time, s", series, x_label="step", from_zero=True)


def _of_ranks(run: Run) -> Iterator[Chart | None]:
    for key, what in (
        ("rank_own_seconds", "a step's own work"),
        ("rank_data_seconds", "waiting for data"),
    ):
        lists = _of_present_ranks(run, key)
        ranks = len(lists[-1][1]) if lists else 0
        if ranks < 2:
            continue
        if ranks <= _MOST_RANKS:
            series = [
                Series(f"rank {rank}", [(step, _known(each[rank])) for step, each in lists], rank)
                for rank in range(ranks)
            ]
        else:
            picks: dict[str, Callable[[list[float]], float]] = {
                "slowest": max,
                "median": statistics.median,
                "fastest": min,
            }
            series = [
                Series(name, [(step, _known(pick(each))) for step, each in lists], colour)
                for colour, (name, pick) in enumerate(picks.items())
            ]
        title = f"seconds of each rank: {what}"
        yield chart(title, series, x_label="step", from_zero=True)


def _of_present_ranks(run: Run, key: str) -> list[tuple[float, list[float]]]:
    """(step, a number for each rank) of the records with as many ranks as the last has: a run may
    be resumed on others."""
    lists = [(step, found[key]) for step, found in run.ranks if found.get(key)]
    return [each for each in lists if len(each[1]) == len(lists[-1][1])]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def slow_ranks(run: Run) -> str:
    """Which ranks work longer than the median one, usually; "" for a single rank."""
    lists = [seconds_W for _, seconds_W in _of_present_ranks(run, "rank_own_seconds")]
    ranks = len(lists[-1]) if lists else 0
    if ranks < 2:
        return ""
    ratios_W: list[list[float]] = [[] for _ in range(ranks)]
    for seconds_W in lists:
        middle = statistics.median_low(seconds_W)  # of two ranks the faster one
        for ratios, seconds in zip(ratios_W, seconds_W):
            if middle > 0 and math.isfinite(seconds):
                ratios.append(seconds / middle)
    usual = [(statistics.median(ratios), rank) for rank, ratios in enumerate(ratios_W) if ratios]
    slow = sorted((each for each in usual if each[0] > _SLOW), reverse=True)
    if not slow:
        return "All ranks take the same time for their own work of a step, within 10 %."
    named = ", ".join(f"rank {rank} {ratio:.2f}x" for ratio, rank in slow[:_MOST_RANKS])
    return f"Own work of a step, against the median rank: {named}."


def _happened(run: Run) -> Iterator[str]:
    for step, _ in run.starts[1:]:
        yield f"Started again, from step {step:.0f}."
    for came, went, why in run.rollbacks:
        yield f"Went back from step {came:.0f} to step {went:.0f}: {why}."
    if run.bad_images:
        yield f"{run.bad_images} images could not be used; others took their places."
