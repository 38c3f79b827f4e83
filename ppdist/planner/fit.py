"""The numbers of a step, fitted to rows that were measured.

Rows and rates come from the JSON of ppdist benchmark and ppdist doctor, or are typed in.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.planner.predict import Cluster, Job, Link, network_seconds, slowest_of

_GRID, _ZOOMS = 41, 4  # jitter is found to 1e-6
_ROUNDS, _SETTLED = 100, 1e-9  # seconds
_EXACT = 1e-6  # relative: all of it rounding


@dataclass(frozen=True)
class Row:
    """One measured step."""

    cards: int
    batch: int  # images of a card
    seconds: float
    known: float = 0.0  # of them on the network


@dataclass(frozen=True)
class Fit:
    """What fits the rows best, in relative error."""

    fixed_seconds: float
    image_seconds: float
    jitter: float
    parallel_seconds: float
    parameters: tuple[str, ...]  # those the rows could tell; the others are 0, or were given
    rows: tuple[Row, ...]

    def seconds(self, row: Row) -> float:
        """Of a step like that of the row."""
        compute = self.fixed_seconds + row.batch * self.image_seconds
        slowest = 1 + self.jitter * slowest_of(row.cards)
        return compute * slowest + self.parallel_seconds * (row.cards > 1) + row.known

    def error(self, row: Row) -> float:
        """Predicted / measured - 1."""
        return self.seconds(row) / row.seconds - 1

    @property
    def worst(self) -> float:
        """Largest error of a row, without its sign."""
        return max(abs(self.error(row)) for row in self.rows)


def fit(rows: Sequence[Row], jitter: float | None = None, parallel: float | None = None) -> Fit:
    """Fits the step-time model to measured rows.

    The model: (t0 + b t1) (1 + jitter c(N)) + delta [N > 1].  A parameter is left
    out if the rows cannot tell it from another: t0 needs two batch sizes, delta rows on one card
    and on several, jitter yet another number of cards.

    Args: jitter, parallel: given, so not fitted.
    Raises: ConfigError: no rows, or one that measured nothing.
    """
    apart = [row.known + (parallel or 0.0) * (row.cards > 1) for row in rows]
    if not rows or any(row.seconds <= off or row.batch < 1 for row, off in zip(rows, apart)):
        listed = ", ".join(
            f"{row.cards}x{row.batch}={1000 * row.seconds:g} ms (of these {1000 * off:.4g} ms)"
            for row, off in zip(rows, apart)
        )
        raise ConfigError(
            "the step cannot be fitted: expected rows of cards, batch per card and seconds "
            "above those of the network and the fixed cost of several cards, found "
            f"{listed or 'none'}; are links and --parameters those of these rows?",
            code="rows_do_not_fit",
        )
    given = {"jitter": jitter, "parallel": parallel}
    names = tuple(name for name in identifiable(rows) if given.get(name) is None)
    rest = [replace(row, known=off) for row, off in zip(rows, apart)]
    jitter = jitter or 0.0
    low, high = 0.0, 1.0
    for _ in range(_ZOOMS if "jitter" in names else 0):
        tried = np.linspace(low, high, _GRID)
        jitter = float(min(tried, key=lambda value: _linear(rest, names, value)[0]))
        step = float(tried[1] - tried[0])
        low, high = max(0.0, jitter - step), jitter + step
    fixed, image, delta = _linear(rest, names, jitter)[1]
    return Fit(fixed, image, jitter, parallel or delta, names, tuple(rows))


def fit_in_model(
    rows: Sequence[Row],
    job: Job,
    cluster: Cluster,
    jitter: float | None = None,
    parallel: float | None = None,
) -> Fit:
    """`fit` without the time the model gives to the network.

    So `step_time` of a row is the row.  How much of the network the backward pass hides depends on
    what is fitted: repeated until it converges.  It does: a step shorter by x hides less than x,
    and so is charged that much more.

    Args:
        job: its gradients and overlap are those of the rows.
        cluster: the links; rows fill one of its hosts after another.
    Raises: ConfigError: as `fit`; a row is faster than its all-reduce could be.
    """
    rows = [replace(row, known=0.0) for row in rows]
    for _ in range(_ROUNDS):
        fitted = fit(rows, jitter, parallel)
        known = [_communicating(row, fitted, job, cluster) for row in rows]
        if max(abs(new - row.known) for new, row in zip(known, rows)) < _SETTLED:
            break
        rows = [replace(row, known=new) for new, row in zip(known, rows)]
    return fitted


def fit_at_most(
    rows: Sequence[Row], job: Job, cluster: Cluster, jitter: float, parallel: float | None
) -> Fit:
    """`fit_in_model` with the largest jitter up to `jitter` that fits best.

    What was measured counts for more than what is assumed.
    """
    fits = []
    for tried in np.linspace(jitter, 0.0, _GRID):
        fits.append(fit_in_model(rows, job, cluster, float(tried), parallel))
        if fits[-1].worst < _EXACT:
            return fits[-1]
    least = min(fitted.worst for fitted in fits)
    return next(fitted for fitted in fits if fitted.worst < least + _EXACT)


def _communicating(row: Row, fitted: Fit, job: Job, cluster: Cluster) -> float:
    """Modelled seconds of the row on the network; rows fill one host after another."""
    hosts = min(cluster.hosts, math.ceil(row.cards / cluster.cards))
    of_row = replace(
        job,
        fixed_seconds=fitted.fixed_seconds,
        image_seconds=fitted.image_seconds,
        batch=row.batch,
    )
    return network_seconds(of_row, replace(cluster, hosts=hosts, cards=-(-row.cards // hosts)))


def identifiable(rows: Sequence[Row]) -> tuple[str, ...]:
    """The parameters that these rows can tell, no more than rows."""
    several = {row.cards for row in rows if row.cards > 1}
    alone = any(row.cards == 1 for row in rows)
    names = ["image"]
    if several and alone:
        names.append("parallel")
    if len({row.batch for row in rows}) > 1:
        names.append("fixed")
    if len(several) > 1:
        names.append("jitter")
    return tuple(names[: len(rows)])


def _linear(
    rows: Sequence[Row], names: Sequence[str], jitter: float
) -> tuple[float, tuple[float, float, float]]:
    """Least-squares (t0, t1, delta), none below 0, at a given jitter.

    Three columns at most, so every choice of those that may be above 0 is tried.

    Returns: (squared relative error, (t0, t1, delta)).
    """
    columns = {
        "fixed": [1 + jitter * slowest_of(row.cards) for row in rows],
        "image": [row.batch * (1 + jitter * slowest_of(row.cards)) for row in rows],
        "parallel": [float(row.cards > 1) for row in rows],
    }
    measured = np.array([row.seconds for row in rows])
    target = (measured - [row.known for row in rows]) / measured
    best = (float("inf"), (0.0, 0.0, 0.0))
    linear = [name for name in columns if name in names]
    for count in range(1, len(linear) + 1):
        for chosen in combinations(linear, count):
            matrix = np.array([columns[name] for name in chosen]).T / measured[:, None]
            values = np.linalg.lstsq(matrix, target, rcond=None)[0]
            error = float(((matrix @ values - target) ** 2).sum())
            if values.min() >= 0 and error < best[0] - 1e-18:
                found = dict(zip(chosen, map(float, values)))
                best = (error, (found.get("fixed", 0.0), found.get("image", 0.0),
                                found.get("parallel", 0.0)))  # fmt: skip
    return best


def left_out(rows: Sequence[Row]) -> list[float]:
    """Leave-one-out error of each row.

    It measures what the model predicts, not reproduces.  NaN if nothing is left to fit.
    """
    return [
        fit([*rows[:i], *rows[i + 1 :]]).error(row) if len(rows) > 1 else float("nan")
        for i, row in enumerate(rows)
    ]


# What the JSON files say.


@dataclass
class Measured:
    """Of all files together; None: no file says it."""

    rows: list[Row] = field(default_factory=list)
    card_input: float | None = None  # images a second of the loader of one card
    parameters: float | None = None
    on_cpu: bool = False  # where the backward pass hides nothing of the network


def read_benchmarks(paths: Sequence[Path]) -> Measured:
    """Reads reports of `ppdist benchmark train|scaling|loader`, in any number.

    Raises: ConfigError: a file is none of these.
    """
    measured = Measured()
    for path in paths:
        report = _read(path)
        kind = report.get("what")
        if kind not in ("train", "scaling", "loader"):
            raise ConfigError(
                f"found {kind!r}, expected train, scaling or loader: a file of "
                "ppdist benchmark train --json FILE",
                code="not_a_benchmark",
                where=f"{path}: what",
            )
        try:
            result, machine = report["result"], report["machine"]
            if kind == "train":
                _add_row(measured, result, machine, int(machine["ranks"]), None)
            elif kind == "scaling":
                for count in (key for key in result if key.isdecimal()):
                    rate = float(result[count]["images_per_second"])
                    _add_row(measured, result[count]["last_round"], machine, int(count), rate)
            else:
                measured.card_input = float(result["images_per_second"]) / int(machine["ranks"])
        except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError) as error:
            raise ConfigError(
                f"is not a report of ppdist benchmark {kind}: {error!r}",
                code="not_a_benchmark",
                where=str(path),
                fix="write it again with this version",
            ) from error
    return measured


def _add_row(measured: Measured, result: Any, machine: Any, ranks: int, rate: float | None) -> None:
    """Adds the first variant's step without its wait for data.

    The model adds that wait itself.

    Args: rate: images per second of all ranks, if measured over several runs.
    """
    variant = next(iter(result["variants"].values()))
    images = float(variant["images_per_step"])
    seconds = images / rate if rate else float(variant["step_seconds"])
    seconds -= float(variant["seconds"]["data"])
    measured.rows.append(Row(ranks, round(images / ranks), seconds))
    measured.on_cpu = machine["device"] == "cpu"
    if "parameters" in result:
        measured.parameters = float(result["parameters"])


def read_links(path: Path) -> tuple[Link | None, Link | None]:
    """The links that ppdist doctor measured: inside a host, and between hosts.

    That of the all-reduce is the slowest a ring met, so on several hosts it lies between them; the
    one inside is then the median of the pairs of ranks of one host.  None: not measured.

    Raises: ConfigError: the file is not such a report.
    """
    report = _read(path)
    try:
        ring = Link(float(report["latency_seconds"]), float(report["bandwidth_bytes_per_second"]))
        if len(set(report["hosts"])) == 1:
            return ring, None
        links = report.get("links", [])  # of earlier versions
        within = [link for link in links if len(set(link["hosts"])) == 1]
        if not within:
            return None, ring
        inside = Link(
            median(float(link["latency_seconds"]) for link in within),
            median(float(link["bytes_per_second"]) for link in within),
        )
        return inside, ring
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"is not a report of ppdist doctor --json FILE on two ranks or more: {error!r}; "
            "expected hosts, latency_seconds and bandwidth_bytes_per_second",
            code="not_a_doctor_report",
            where=str(path),
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read as JSON: {error}", code="not_json", where=str(path)
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"expected a JSON object, found {type(content).__name__}",
            code="not_json",
            where=str(path),
        )
    return content
