"""Fits the step-time model to measured rows.

Rows and rates come from the JSON of ppdist benchmark and ppdist doctor, or are typed in.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.lab.planner.model import Link, slowest_of


@dataclass(frozen=True)
class Row:
    """A measured step on one host."""

    cards: int
    batch: int  # images per card
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The step-time model that fits the rows with the least relative error."""

    fixed_seconds: float
    image_seconds: float
    jitter: float
    parallel_seconds: float
    parameters: tuple[str, ...]  # the fitted ones; the others are 0 or arguments
    rows: tuple[Row, ...]

    def seconds(self, row: Row) -> float:
        """Predicts the seconds per step with the number of cards and the batch of a row."""
        compute = self.fixed_seconds + row.batch * self.image_seconds
        slowest = 1 + self.jitter * slowest_of(row.cards)
        return compute * slowest + self.parallel_seconds * (row.cards > 1)

    def error(self, row: Row) -> float:
        """Returns predicted / measured - 1."""
        return self.seconds(row) / row.seconds - 1


def fit(rows: Sequence[Row], jitter: float | None = None, parallel: float | None = None) -> Fit:
    """Fits the step-time model to measured rows.

    The model: (t0 + b t1) (1 + jitter c(N)) + delta [N > 1].  A parameter is left
    out if the rows cannot distinguish it from another: t0 needs two batch sizes, delta needs rows
    with one card and with several, jitter needs a third number of cards.

    Args: jitter, parallel: values to use instead of fitting them.
    Raises: ConfigError: there are no rows, or one has no images, or no time above `parallel`.
    """
    # A known cost of several cards is subtracted before the fit.
    seconds = [row.seconds - (parallel or 0.0) * (row.cards > 1) for row in rows]
    if not rows or min(seconds) <= 0 or min(row.batch for row in rows) < 1:
        row_texts = ", ".join(f"{r.cards}x{r.batch}={1000 * r.seconds:g} ms" for r in rows)
        raise ConfigError(
            "the step cannot be fitted: expected rows of cards, batch per card and seconds "
            f"above the fixed cost of several cards, found {row_texts or 'none'}",
            code="rows_do_not_fit",
        )
    given_parameters = {"jitter": jitter, "parallel": parallel}
    names = tuple(name for name in identifiable(rows) if given_parameters.get(name) is None)
    if "jitter" in names:
        from scipy.optimize import minimize_scalar  # slow to import; only a fit needs it

        # Every parameter but the jitter is linear, so only the jitter needs a search.
        jitter = minimize_scalar(
            lambda candidate: _fit_linear(rows, seconds, names, candidate)[1],
            bounds=(0, 1), method="bounded", options={"xatol": 1e-7},
        ).x  # fmt: skip
    coefficients = _fit_linear(rows, seconds, names, jitter or 0.0)[0]
    return Fit(
        coefficients.get("fixed", 0.0), coefficients["image"], float(jitter or 0.0),
        parallel or coefficients.get("parallel", 0.0), names, tuple(rows),
    )  # fmt: skip


def identifiable(rows: Sequence[Row]) -> tuple[str, ...]:
    """Lists the parameters that these rows can distinguish, at most one per row."""
    several = {row.cards for row in rows if row.cards > 1}
    names = ["image"]
    if several and any(row.cards == 1 for row in rows):
        names.append("parallel")
    if len({row.batch for row in rows}) > 1:
        names.append("fixed")
    if len(several) > 1:
        names.append("jitter")
    # At most as many unknowns as rows: more would fit anything.
    return tuple(names[: len(rows)])


def _fit_linear(
    rows: Sequence[Row], seconds: Sequence[float], names: Sequence[str], jitter: float
) -> tuple[dict[str, float], float]:
    """Fits the linear parameters by name at a given jitter, none below 0, in seconds; returns them
    and the relative error.
    """
    from scipy.optimize import nnls

    columns = {
        "fixed": [1 + jitter * slowest_of(row.cards) for row in rows],
        "image": [row.batch * (1 + jitter * slowest_of(row.cards)) for row in rows],
        "parallel": [float(row.cards > 1) for row in rows],
    }
    measured = np.array([row.seconds for row in rows])
    linear = [name for name in columns if name in names]
    matrix = np.array([columns[name] for name in linear]).T / measured[:, None]
    values, error = nnls(matrix, np.array(seconds) / measured)
    return dict(zip(linear, map(float, values))), float(error)


# Reading the JSON files.


@dataclass
class Measured:
    """The numbers from all files; None if no file has the number."""

    rows: list[Row] = field(default_factory=list)
    card_input: float | None = None  # images per second of the loader of one card
    parameters: float | None = None
    on_cpu: bool = False  # there the backward pass hides no network time


def read_benchmarks(paths: Sequence[Path]) -> Measured:
    """Reads any number of reports of `ppdist benchmark train|scaling|loader`.

    Raises: ConfigError: a file is not such a report.
    """
    measured = Measured()
    for path in paths:
        report = _read(path)
        try:
            result, machine = report["result"], report["machine"]
            kind = report["what"]
            if kind == "train":
                _add_row(measured, result, machine, int(machine["ranks"]), None)
            elif kind == "scaling":
                for count in result:
                    # The rate is the median of several runs; the parts are from the last run.
                    rate = float(result[count]["images_per_second"])
                    _add_row(measured, result[count]["last_round"], machine, int(count), rate)
            elif kind != "loader":
                raise ValueError(kind)
            else:
                measured.card_input = float(result["images_per_second"]) / int(machine["ranks"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"is no report of this version's benchmark of train, scaling or loader: {error!r}",
                code="not_a_benchmark",
                where=str(path),
            ) from error
    return measured


def _add_row(measured: Measured, result: Any, machine: Any, ranks: int, rate: float | None) -> None:
    """Adds the row of a step, without its wait for data.

    The model adds the wait itself.

    Args: rate: images per second of all ranks, if measured over several runs.
    """
    images = float(result["images_per_step"])
    seconds = images / rate if rate else float(result["step_seconds"])
    seconds -= float(result["seconds"]["data"])
    measured.rows.append(Row(ranks, round(images / ranks), seconds))
    measured.on_cpu = machine["device"] == "cpu"
    measured.parameters = float(result["parameters"])


def read_link(path: Path) -> Link:
    """Reads the link between hosts that ppdist doctor measured: the slowest one in its ring.

    Raises: ConfigError: the file is not such a report, or covers a single host.
    """
    report = _read(path)
    try:
        if len(set(report["hosts"])) == 1:
            raise ValueError("one host")
        return Link(float(report["latency_seconds"]), float(report["bandwidth_bytes_per_second"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"is not a report of ppdist doctor --json FILE on two hosts or more: {error!r}; "
            "expected hosts, latency_seconds and bandwidth_bytes_per_second",
            code="not_a_doctor_report",
            where=str(path),
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {**content}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot be read as a JSON object: {error}", code="not_json", where=str(path)
        ) from error
