"""Validation of the model against published tables (reference_runs.py).

A row that was fitted is reproduced, any other is predicted.  `free` says how many numbers were
taken from the rows of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppdist.planner import reference_runs
from ppdist.planner.fit import Fit, Row, fit, left_out
from ppdist.planner.what_if import ANY_LINK, Cluster, Job, predict, step_time

_RETINANET_HOLDS = 64  # cards; beyond it systems differ by more than their number of cards


@dataclass(frozen=True)
class Outcome:
    """One row of a table."""

    name: str
    measured: float
    predicted: float
    fitted: bool  # its value went into a parameter
    required: bool = True  # the tolerance holds for it

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Table:
    """One published table, with the model's rows."""

    name: str
    unit: str
    tolerance: float
    outcomes: tuple[Outcome, ...]
    free: tuple[str, ...]  # each parameter with its value and the rows it was fitted on
    remarks: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """Largest error of the rows for which the tolerance holds."""
        return max(abs(outcome.error) for outcome in self.outcomes if outcome.required)

    @property
    def holds(self) -> bool:
        return self.worst <= self.tolerance


def backtest() -> list[Table]:
    """Every table."""
    throughput, fitted = _retinanet_throughput()
    return [_yolov5l(), _paddledetection(), throughput, _retinanet_minutes(fitted)]


def _flat(cards: int) -> Cluster:
    """Cards whose links play no part: none of the sources names them, and none is needed."""
    return Cluster(1, cards, ANY_LINK, ANY_LINK)


def _job(fitted: Fit, batch: int) -> Job:
    return Job(
        fixed_seconds=fitted.fixed_seconds,
        image_seconds=fitted.image_seconds,
        batch=batch,
        jitter=fitted.jitter,
        parallel_seconds=fitted.parallel_seconds,
    )


def _left_out(rows: Sequence[Row]) -> str:
    errors = ", ".join(f"{100 * error:+.1f}" for error in left_out(rows))
    return f"each row predicted from all others, all parameters refitted: {errors} %"


def _yolov5l() -> Table:
    """Seconds of one epoch on 1 to 8 A100."""
    batch, images = reference_runs.YOLOV5L_BATCH, reference_runs.YOLOV5L_IMAGES
    steps = {row: images / batch / row.cards for row in reference_runs.YOLOV5L}
    rows = [Row(row.cards, batch, row.seconds / count) for row, count in steps.items()]
    fitted = fit(rows)
    job = _job(fitted, batch)
    return Table(
        name="YOLOv5l, one COCO epoch, 16 images a card, A100",
        unit="s",
        tolerance=0.03,
        outcomes=tuple(
            Outcome(
                f"{row.cards} cards",
                row.seconds,
                step_time(job, _flat(row.cards)).seconds * count,
                fitted=True,
            )
            for row, count in steps.items()
        ),
        free=(
            f"step on one card {1000 * batch * fitted.image_seconds:.1f} ms",
            f"jitter {100 * fitted.jitter:.1f} %",
            f"data parallel {1000 * fitted.parallel_seconds:.1f} ms",
        ),
        remarks=(
            _left_out(rows),
            "the ring at 200 GB/s takes 1 to 2 ms behind 113 ms of backward: not bandwidth",
        ),
    )


def _paddledetection() -> Table:
    """Hours on 3 or 4 hosts, from those on one."""
    rows = reference_runs.PADDLEDETECTION
    # What one host of several read a second, where the input was the limit.
    read = {row: row.images_per_second * 8 * row.hours_on_one_host / row.hours / row.hosts
            for row in rows}  # fmt: skip
    waited = [row for row in rows if row.data == "Objects365" and row.model != "PP-YOLOE-x"]
    caps = {
        "Objects365": _one_rate([read[row] for row in waited]),
        "COCO": _one_rate([read[row] for row in rows if row.data == "COCO"]),
    }
    hours = [_hours(row, caps[row.data]) for row in rows]
    without = [_hours(row, None) / row.hours - 1 for row in rows]
    one = [_hours(row, _one_rate([read[r] for r in waited if r is not row])) for row in waited]
    efficiency = np.array([row.hours_on_one_host / row.hours / row.hosts for row in rows])
    constant = efficiency / _one_rate(efficiency.tolist()) - 1
    return Table(
        name="PaddleDetection, 8 images a card, hours on several hosts of 8 from those on one",
        unit="h",
        tolerance=0.15,
        outcomes=tuple(
            Outcome(
                f"{row.model} {row.data} {row.hosts} x 8",
                row.hours,
                value,
                fitted=row in waited or row.data == "COCO",
            )
            for row, value in zip(rows, hours)
        ),
        free=(
            f"images that one host of several can read, Objects365: {caps['Objects365']:.0f} a "
            "second, from the rows of s, l and m",
            f"the same, COCO: {caps['COCO']:.0f} a second, from its only row, which it reproduces",
        ),
        remarks=(
            "not fitted: every card draws an image size of its own (1.70 times the mean step on 8 "
            "cards, 1.85 on 32); it alone predicts PP-YOLOE-x",
            "s, l, m of Objects365, each by the rate of the other two: "
            + ", ".join(f"{100 * (h / row.hours - 1):+.1f}" for row, h in zip(waited, one))
            + " %",
            "without the two rates: " + ", ".join(f"{100 * e:+.1f}" for e in without) + " %",
            "one efficiency for all rows instead (1 parameter): "
            + ", ".join(f"{100 * e:+.1f}" for e in constant)
            + " %",
            "that the input was the limit is an explanation that fits, not one that was measured",
        ),
    )


def _one_rate(rates: Sequence[float]) -> float:
    """The rate r with the least sum of (rate / r - 1)^2: times go as 1 / r."""
    return float(np.square(rates).sum() / np.sum(rates))


def _hours(row: reference_runs.PaddleDetectionRow, host_input: float | None) -> float:
    """On `row.hosts`, from one host on which the cards waited for nothing but each other."""
    batch = reference_runs.PADDLEDETECTION_BATCH
    measured = batch / row.images_per_second
    alone = Job(0.0, 1.0, batch, own_sizes=reference_runs.PADDLEDETECTION_SIZES)
    slowest = step_time(alone, _flat(8)).seconds / batch  # of 8 cards / mean of one
    job = replace(alone, image_seconds=measured / batch / slowest, host_input=host_input)
    step = step_time(job, Cluster(row.hosts, 8, ANY_LINK, ANY_LINK)).seconds
    return row.hours_on_one_host * step / measured / row.hosts


def _retinanet_throughput() -> tuple[Table, Fit]:
    """Images a second of a card, and what was fitted."""
    rows = [
        Row(row.cards, row.total_batch // row.cards, row.total_batch / row.cards / rate)
        for row in reference_runs.RETINANET
        for rate in [row.images_per_second]
    ]
    ends = [row for row in rows if row.cards in (4, 64)]
    fitted = fit(ends)
    return (
        Table(
            name="MLPerf RetinaNet, H100, training images a second of a card",
            unit="img/s",
            tolerance=0.05,
            outcomes=tuple(
                Outcome(
                    f"{row.cards} cards x {row.batch} ({source.source})",
                    row.batch / row.seconds,
                    row.batch / step_time(_job(fitted, row.batch), _flat(row.cards)).seconds,
                    fitted=row in ends,
                    required=row.cards <= _RETINANET_HOLDS,
                )
                for row, source in zip(rows, reference_runs.RETINANET)
            ),
            free=(
                f"{1000 * fitted.fixed_seconds:.2f} ms a step",
                f"{1000 * fitted.image_seconds:.3f} ms an image, both from 4 and 64 cards",
            ),
            remarks=(
                "the number of cards itself plays no part: the batch of a card explains all "
                "(jitter and network are 0, which two rows cannot tell)",
                "4 to 64 cards: " + _left_out([r for r in rows if r.cards <= _RETINANET_HOLDS]),
                "512 and 768 cards are entries of an earlier round, with older software",
            ),
        ),
        fitted,
    )


def _retinanet_minutes(fitted: Fit) -> Table:
    """Minutes to the target, whole epochs and evaluations counted."""
    batches, epochs = np.array(reference_runs.RETINANET_EPOCHS).T
    slope, least = np.polyfit(batches, epochs, 1)
    job = replace(
        _job(fitted, 1),
        images=reference_runs.RETINANET_IMAGES,
        epochs=float(least),
        critical_batch=float(least / slope),
        whole_epochs=True,
    )
    first = reference_runs.RETINANET[0]
    of_first = predict(replace(job, batch=first.total_batch // first.cards), _flat(first.cards))
    evaluating = (60 * first.minutes - 3600 * of_first.hours) / of_first.epochs
    rate = reference_runs.RETINANET_VALIDATION / evaluating / first.cards
    job = replace(job, evaluation_images=reference_runs.RETINANET_VALIDATION, evaluation_rate=rate)
    outcomes = []
    for row in reference_runs.RETINANET:
        of_row = predict(replace(job, batch=row.total_batch // row.cards), _flat(row.cards))
        outcomes.append(
            Outcome(
                f"{row.cards} cards, batch {row.total_batch}, {of_row.epochs:.0f} epochs",
                row.minutes,
                60 * of_row.hours,
                fitted=row is first,
                required=row.cards <= _RETINANET_HOLDS,
            )
        )
    return Table(
        name="MLPerf RetinaNet, H100, minutes to 34.0 mAP",
        unit="min",
        tolerance=0.05,
        outcomes=tuple(outcomes),
        free=(f"evaluation {rate:.0f} images a second of a card, from 4 cards",),
        remarks=(
            f"epochs {least:.2f} (1 + B / {least / slope:.0f}), in whole ones: 2 parameters from "
            f"the {len(epochs)} reference convergence points up to batch 2560, not from these rows",
            "the 2 numbers of a step are those of the table above",
            "beyond 64 cards start-up and evaluation, which do not shrink, are missing",
        ),
    )
