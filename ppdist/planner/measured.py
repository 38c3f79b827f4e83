"""What the JSON files of tools/benchmark.py and tools/doctor.py say, for the model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ppdist.common.errors import ConfigError
from ppdist.planner.fit import Row
from ppdist.planner.network import Link

_EXPECTED = {
    "train": "tools/benchmark.py train --json FILE",
    "doctor": "tools/doctor.py --json FILE",
}


@dataclass
class Measured:
    """Of all files together; None: no file says it."""

    rows: list[Row] = field(default_factory=list)
    card_input: float | None = None  # images a second of the loader of one card
    evaluation_rate: float | None = None  # images a second of one card
    scoring_seconds: float = 0.0
    parameters: float | None = None
    hides_network: bool = True  # False: on CPU, where nothing overlaps

    def inside(self, gradient_bytes: int) -> Link | None:
        """The link by which a ring would take as long as the most ranks were measured to take for
        their gradients, on one host; latency is in its bandwidth.  None: not measured (on GPUs it
        is not told apart from the step).

        Args: gradient_bytes: of each parameter, in those measurements.
        """
        reduced = [row for row in self.rows if row.known]
        if not reduced or not self.parameters:
            return None
        row = max(reduced, key=lambda row: row.cards)
        sent = 2 * (row.cards - 1) / row.cards * gradient_bytes * self.parameters
        return Link(0.0, sent / row.known)


def read_benchmarks(paths: Sequence[Path]) -> Measured:
    """Reads reports of `tools/benchmark.py train|scaling|loader|eval`, in any number.

    Raises: ConfigError: a file is none of these.
    """
    measured = Measured()
    for path in paths:
        report = _read(path)
        what = report.get("what")
        try:
            result, machine = report["result"], report["machine"]
            if what == "train":
                _add_row(measured, result, machine, int(machine["ranks"]), None)
            elif what == "scaling":
                for count in (key for key in result if key.isdecimal()):
                    rate = float(result[count]["images_per_second"])
                    _add_row(measured, result[count]["last_round"], machine, int(count), rate)
            elif what == "loader":
                measured.card_input = float(result["images_per_second"]) / int(machine["ranks"])
            elif what == "eval":
                finding, ranks = float(result["seconds_of_detection"]), int(machine["ranks"])
                measured.evaluation_rate = int(result["images"]) / finding / ranks
                measured.scoring_seconds = max(0.0, float(result["seconds"]) - finding)
            else:
                raise ConfigError(
                    f"found {what!r}, expected train, scaling, loader or eval: a file of "
                    f"{_EXPECTED['train']}",
                    code="not_a_benchmark",
                    where=f"{path}: what",
                )
        except (KeyError, TypeError, ValueError, StopIteration, ZeroDivisionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"is not a report of tools/benchmark.py {what}: {error!r}",
                code="not_a_benchmark",
                where=str(path),
                fix="write it again with this version",
            ) from error
    return measured


def _add_row(measured: Measured, result: Any, machine: Any, ranks: int, rate: float | None) -> None:
    """The first variant's step without its wait for data, which the model adds itself.

    Args: rate: images a second of all ranks, where it was measured over several runs.
    """
    variant = next(iter(result["variants"].values()))
    images = float(variant["images_per_step"])
    seconds = images / rate if rate else float(variant["step_seconds"])
    on_cpu = machine["device"] == "cpu"
    # On CPU the gradients are summed after the backward pass, so their time is in the step whole.
    known = float(result.get("gradient_all_reduce_seconds", 0.0)) if on_cpu else 0.0
    seconds -= float(variant["seconds"]["data"])
    measured.rows.append(Row(ranks, round(images / ranks), seconds, known))
    measured.hides_network = not on_cpu
    if "parameters" in result:
        measured.parameters = float(result["parameters"])


def read_links(path: Path) -> tuple[Link | None, Link | None]:
    """The links that tools/doctor.py measured: inside a host, and between hosts.

    That of the all-reduce is the slowest a ring met, so on several hosts it lies between them; the
    one inside is then the median of the pairs of ranks of one host.  None: not measured.

    Raises: ConfigError: the file is not such a report.
    """
    report = _read(path)
    try:
        ring = Link(float(report["latency_seconds"]), float(report["bandwidth_bytes_per_second"]))
        if len(set(report["hosts"])) == 1:
            return ring, None
        within = [link for link in report["links"] if len(set(link["hosts"])) == 1]
        if not within:
            return None, ring
        inside = Link(
            median(float(link["latency_seconds"]) for link in within),
            median(float(link["bytes_per_second"]) for link in within),
        )
        return inside, ring
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"is not a report of {_EXPECTED['doctor']} on two ranks or more: {error!r}; expected "
            "hosts, links, latency_seconds and bandwidth_bytes_per_second",
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
