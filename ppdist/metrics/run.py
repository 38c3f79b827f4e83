"""Reads a run's folder: its records, configuration, evaluation and log.

A folder may be written by a stranger, cut short, or of another version.  Unreadable parts are left
out and listed in `Run.problems`; they raise no error.
"""

import csv
import io
import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from ppdist.common import files
from ppdist.common.errors import ConfigError, UserError
from ppdist.common.files import write_text
from ppdist.common.records import MetricRecords, read_metrics, step_of
from ppdist.config.evaluate import METRIC_TEXTS
from ppdist.config.parse import leaves
from ppdist.config.yaml import Reader
from ppdist.storage.stores import copy_command

Numbers = dict[str, float]  # the finite numbers of a record of metrics.jsonl

_NOT_FINITE = "loss or gradient not finite"
_MOST_BYTES = 1 << 30  # largest file that is read: a training run writes no larger one
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (WARNING|ERROR|CRITICAL) (.*)$")
_SLACK_SECONDS = 120  # train.log lines up to this long before the first record belong to the run
_LOWER_IS_BETTER = ("val_loss",)
# The first of these that is recorded is the headline metric, unless evaluate.metric is set.
_HEADLINE_METRICS = ("mAP", "top1")


# Types of the parts of evaluation.json that are shown.


class Confusion(BaseModel):
    """A confusion matrix: rows are true classes, columns predicted ones.

    The last class of a detector is the background.
    With very many classes only the largest `cells` (row, column, count) and the row sums are
    stored.
    """

    counts: list[list[int]] = []
    cells: list[tuple[int, int, int]] = []
    true_counts: list[int] = []
    iou: float | None = None
    confidence: float | None = None

    @model_validator(mode="after")
    def _check_shape(self) -> "Confusion":
        if any(len(row) != len(self.counts) for row in self.counts):
            raise ValueError("it is not square")
        if any(not 0 <= at < len(self.true_counts) for cell in self.cells for at in cell[:2]):
            raise ValueError("a cell lies outside")
        return self


class _Errors(BaseModel):
    counts: dict[str, int]
    AP50_gain: dict[str, float | None] = {}


class _LeftOut(BaseModel):
    file: str
    why: str


class _Picture(BaseModel):
    model_config = ConfigDict(extra="allow")

    file: str


_PARTS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind)
    for name, kind in {
        "step": int,
        "images": int,
        "left_out": list[_LeftOut],
        "duplicate_boxes": int,
        "class_names": list[str],
        "metrics": dict[str, float | None],
        "per_class": list[dict[str, int | float | str | None]],
        "confusion": Confusion,
        "errors": _Errors,
        "worst": list[_Picture],
        "best": list[_Picture],
    }.items()
}


# The run's folder.


@dataclass
class LogWarning:
    """A warning in train.log, with the number of times it occurred."""

    first: str
    text: str
    count: int = 1


@dataclass
class Run:
    """A run; lists are in the order of the files.

    Attributes:
        train: records of steps.
        evaluations: records of evaluations.
        ranks: records of ranks, as they are in the file.
        derived: numbers derived from the configuration at start: key -> value as text, and reason.
        findings: code -> text of a finding about data and configuration at start.
        starts: the steps where processes began: more than one after restarts.
        rollbacks: (step from, step to, reason).
        bad_images: number of images that were replaced.
        finished: why the run ended, as its last record says; "": it has not ended.
        times: of the first and the last record, in seconds since 1970.
        config: dotted key -> value as in the YAML.
        evaluation: content of evaluation.json, without the invalid parts.
        problems: what could not be read.
        missing: names of missing files.
    """

    folder: Path
    name: str = ""
    train: list[Numbers] = field(default_factory=list)
    evaluations: list[Numbers] = field(default_factory=list)
    ranks: list[Mapping[str, Any]] = field(default_factory=list)
    derived: dict[str, tuple[str, str]] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    rollbacks: list[tuple[float, float, str]] = field(default_factory=list)
    bad_images: int = 0
    finished: str = ""
    times: tuple[float, float] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_tree: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    warnings: list[LogWarning] = field(default_factory=list)
    running: bool = False
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Returns the number of steps taken."""
        last = [records[-1]["step"] for records in (self.train, self.evaluations) if records]
        return int(max(last, default=0))

    @property
    def total_steps(self) -> int | None:
        """Returns the planned number of steps; None if it is not recorded."""
        return self.derived_count("steps")

    @property
    def is_evaluation(self) -> bool:
        """Returns True if the folder holds an evaluation of weights, without training."""
        return self.evaluation is not None and not (self.times or self.config or self.warnings)

    @property
    def metric(self) -> str:
        """Returns the name of the metric that ranks its evaluations; "" if there is none."""
        recorded = {key for record in self.measured for key in record}
        names = [str(self.config.get("evaluate.metric")), *_HEADLINE_METRICS]
        return next((name for name in names if name in recorded), "")

    @property
    def metric_text(self) -> str:
        """Returns that metric in words that users know."""
        return METRIC_TEXTS.get(self.metric, self.metric)

    @property
    def best(self) -> Numbers | None:
        """Returns the evaluation of checkpoints/best.

        If there is no such checkpoint: the evaluation with the best `metric`, in a tie the first.
        """
        name = self.metric
        measured = [record for record in self.measured if name in record]
        best_step = step_of(self.folder / "checkpoints" / "best")
        for record in reversed(measured):
            if best_step is not None and record.get("step") == best_step:
                return record
        sign = 1 if name in _LOWER_IS_BETTER else -1
        return min(measured, key=lambda record: sign * record[name], default=None)

    @property
    def measured(self) -> list[Numbers]:
        """Returns the recorded evaluations; if there are none, that in evaluation.json."""
        if self.evaluations or self.evaluation is None:
            return self.evaluations
        rows = self.evaluation.get("per_class") or ()
        per_class = {f"AP/{row.get('name')}": row.get("AP") for row in rows}
        return [finite_numbers({**(self.evaluation.get("metrics") or {}), **per_class})]

    @property
    def ended(self) -> bool:
        """Returns True if the run is complete, as far as its records show."""
        if self.finished:
            return self.finished != "signal"
        return self.total_steps is not None and self.steps >= self.total_steps

    def derived_value(self, key: str) -> str | None:
        """Returns a number derived at start, as text."""
        return self.derived[key][0] if key in self.derived else None

    def derived_count(self, key: str) -> int | None:
        """Returns a whole number derived at start."""
        text = self.derived_value(key) or ""
        return int(text) if text.isdecimal() else None

    def rank_seconds(self, *keys: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seconds of the ranks that the run has now.

        A resumed run may have had another number of ranks before.

        Returns: the steps [R] of the records that hold all keys, and the seconds [R, keys, ranks].
        """
        seconds_by_step = []
        for record in self.ranks:
            values = [record.get(key) for key in keys]
            try:
                seconds_KW = np.array(values, np.float64)
            except (ValueError, TypeError, OverflowError):  # ragged, or no numbers
                continue
            if seconds_KW.ndim == 2 and seconds_KW.size and np.isfinite(seconds_KW).all():
                seconds_by_step.append((record["step"], seconds_KW))
        shape = seconds_by_step[-1][1].shape if seconds_by_step else (len(keys), 0)
        current = [record for record in seconds_by_step if record[1].shape == shape]
        steps_R = np.array([step for step, _ in current], np.float64)
        return steps_R, np.array([seconds for _, seconds in current]).reshape(len(current), *shape)

    def add_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds the records of its metrics.jsonl."""
        metric_records = MetricRecords.of(records)
        self.train = [finite_numbers(record) for record in metric_records.steps]
        self.evaluations = [finite_numbers(record) for record in metric_records.evaluations]
        self.ranks, self.finished = metric_records.ranks, metric_records.finished
        self.starts = [record["step"] for record in metric_records.starts]
        findings = metric_records.starts[-1].get("findings") if metric_records.starts else None
        if isinstance(findings, dict):
            self.findings = {code: f"{text}" for code, text in findings.items()}
        for key, derived in (
            metric_records.starts[-1]["derived"].items() if metric_records.starts else ()
        ):
            if isinstance(derived, dict):
                value = derived.get("value")
                value_text = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
                self.derived[key] = value_text.strip('"'), str(derived.get("why", ""))
        self.rollbacks = [
            (record["returned_from_step"], record["step"], str(record.get("reason") or _NOT_FINITE))
            for record in metric_records.rollbacks
        ]
        replaced = [
            finite_numbers(record).get("bad_images", 0) for record in metric_records.bad_images
        ]
        self.bad_images = int(max(replaced, default=0))
        times = [
            values["time"] for record in records if "time" in (values := finite_numbers(record))
        ]
        self.times = (min(times), max(times)) if times else None


def finite_numbers(record: Mapping[str, Any]) -> Numbers:
    """Returns the values of a record that are finite numbers.

    COCO's -1, for an average over nothing, is not a number either.
    """
    numbers = {}
    for key, value in record.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        is_empty_mean = value < 0 and key.startswith(("mAP", "AP", "AR", "VOC"))
        if abs(value) < 1e300 and math.isfinite(value) and not is_empty_mean:
            numbers[key] = float(value)
    return numbers


def read_run(folder: Path, names: Collection[str] | None = None) -> Run:
    """Reads the files that a training run left in its output_dir.

    Args: names: names of the files to read; None: all.
    Raises: UserError: the folder does not exist or holds no run.
    """
    require_run(folder)
    run = Run(folder, folder.resolve().name)
    for name in _FILES if names is None else names:
        path, read = folder / name, _FILES[name]
        try:
            if not path.exists():
                run.missing.append(name)
            elif not path.is_file():  # a pipe would never end
                raise ValueError("it is not a file")
            elif path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is larger than 1 GiB")
            else:
                read(run, path)
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            run.problems.append(f"{name} cannot be read: {error}")
    # A training run holds the lock of its folder as long as it is alive.
    run.running = files.is_held(folder)
    return run


def require_run(folder: Path) -> None:
    """Requires the folder of a run.

    Raises: UserError: the folder does not exist or holds no run.
    """
    if not folder.is_dir():
        raise UserError(
            "no such folder; expected the output_dir of a run",
            code="run_not_found",
            where=str(folder),
            fix=copy_command(folder),
        )
    if not any((folder / name).is_file() for name in _FILES):
        raise UserError(
            f"no run: it holds none of {', '.join(_FILES)}; expected the output_dir of a "
            "training, or the --out folder of ppdist eval",
            code="run_not_found",
            where=str(folder),
        )


def _read_config(run: Run, path: Path) -> None:
    # Without includes: a run's file must not make us show other files.
    reader = Reader()
    tree = reader.read_alone(str(path)).plain()
    if not isinstance(tree, dict) or reader.problems:
        raise ValueError("it is not a configuration")
    run.config_tree, run.config = tree, dict(leaves(tree))


def _read_evaluation(run: Run, path: Path) -> None:
    """Reads evaluation.json, and leaves out parts that are invalid.

    Another version, or somebody else, may have written the file.
    """
    run.evaluation = _json_object(path)
    for name in _PARTS.keys() & run.evaluation.keys():
        if run.evaluation[name] is None:
            continue
        try:
            part = _PARTS[name].validate_python(run.evaluation[name])
            run.evaluation[name] = _PARTS[name].dump_python(part)
        except ValidationError as error:
            del run.evaluation[name]
            first = error.errors()[0]
            where = ".".join(str(key) for key in (name, *first["loc"]))
            run.problems.append(f"{path.name}: {where}: {first['msg']}")


def _json_object(path: Path) -> dict[str, Any]:
    # JSON knows neither NaN nor infinity; Python's reader takes them.
    content = json.loads(path.read_text("utf-8", "replace"), parse_constant=lambda _: None)
    if not isinstance(content, dict):
        raise ValueError("expected an object")
    return content


def _read_log(run: Run, path: Path) -> None:
    """Reads the warnings of this run.

    The log may begin with lines of an earlier run in the same folder.
    """
    began = run.times[0] - _SLACK_SECONDS if run.times else -math.inf
    all_warnings: dict[str, LogWarning] = {}
    recent_warnings: dict[str, LogWarning] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for match in filter(None, map(_LOG_LINE.match, file)):
            try:
                seconds = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
            except (ValueError, OverflowError):
                seconds = math.inf
            for warnings in [all_warnings, recent_warnings] if seconds >= began else [all_warnings]:
                warnings.setdefault(match[3], LogWarning(match[1], match[3], 0)).count += 1
    # No recent warning: perhaps the log was written in another time zone.
    run.warnings = list((recent_warnings or all_warnings).values())


def _read_environment(run: Run, path: Path) -> None:
    run.environment = _json_object(path)


def _read_metrics(run: Run, path: Path) -> None:
    run.add_records(read_metrics(path))


_FILES: dict[str, Callable[[Run, Path], None]] = {
    "metrics.jsonl": _read_metrics,
    "config.yml": _read_config,
    "environment.json": _read_environment,
    "train.log": _read_log,
    "evaluation.json": _read_evaluation,
}


# The history of a run: one row per epoch.


def history(output_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of each epoch of a run, in order.

    Also works while the run is still training.  Keys: `epoch`, `step` (its last), the means of
    `loss` and its parts, `lr`, `images_per_second`, `seconds`; and of an evaluation at its end
    `mAP`, `val_loss` and the like; `partial`, where the run was resumed in its middle from a
    checkpoint of an earlier version, so that steps are missing.  An epoch with only training or
    only evaluation records has only those keys.  An evaluation amid an epoch has a row of its own,
    whose `epoch` is a fraction.
    Raises: UserError: the folder is not that of a run.
    """
    file = output_dir / "metrics.jsonl"
    try:
        records = MetricRecords.of(read_metrics(file))
    except OSError as error:
        raise UserError(
            f"no history: {error.strerror}; expected the output_dir of a training",
            code="run_not_found",
            where=f"{file}",
        ) from error
    rows: dict[float, dict[str, Any]] = {}
    for record in records.epochs:
        values = record["epoch_end"]
        if isinstance(values.get("epoch"), int):
            epoch_row = {"epoch": values["epoch"], "step": record["step"], **values}
            rows.setdefault(values["epoch"], {}).update(epoch_row)
    ends = {row["step"]: epoch for epoch, row in rows.items()}
    for record in records.evaluations:
        place = round(float(record.get("epoch", 1)), 6)
        epoch = ends.get(record["step"], int(place) if place.is_integer() else place)
        row = rows.setdefault(epoch, {"epoch": epoch, "step": record["step"]})
        row_keys = {*row, "time"}
        row.update({key: value for key, value in record.items() if key not in row_keys})
    return [rows[epoch] for epoch in sorted(rows)]


def write_history(output_dir: Path, file: Path) -> None:
    """Writes the history as CSV with a header; unknown values are empty."""
    rows = history(output_dir)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(file, text.getvalue())
