"""What a run's folder says, however incomplete, and which keys were set.

Everything in the folder is read as what it may be: written by a stranger, cut short, of another
version.  What cannot be read is left out and said so (`Run.problems`); nothing here raises for it.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticUndefined

from ppdist.common import files
from ppdist.common.errors import ConfigError, UserError
from ppdist.common.records import MetricRecords, read_metrics
from ppdist.config.base import leaves
from ppdist.config.experiment import experiment_of
from ppdist.config.yaml import Reader

Numbers = dict[str, float]  # of a record of metrics.jsonl: those that are finite

_NOT_FINITE = "loss or gradient not finite"
_MOST_OF_RANKS = 1000  # records: each has a number for every rank, and there may be many of both
_MOST_BYTES = 1 << 30  # of a file to read: what is larger was not written by a training
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (WARNING|ERROR|CRITICAL) (.*)$")
_SLACK_SECONDS = 120  # lines of train.log so long before the first record belong to its run
_LOWER_IS_BETTER = ("val_loss",)
_TELLING = ("mAP", "top1")  # which number of an evaluation is its headline, unless configured
Share = float | None  # null: nothing to measure
_MOST_CLASSES = 100_000


# evaluation.json: parts that cannot be read, of another version or by a stranger, are left out by
# themselves.


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ClassRow(_Part):
    """One class; of classifiers `images`, `precision` and the last two."""

    name: str
    objects: int | None = None
    images: int | None = None
    AP: Share = None
    AP50: Share = None
    AP75: Share = None
    AP_small: Share = None
    AP_medium: Share = None
    AP_large: Share = None
    AR100: Share = None
    VOC_11_point: Share = None
    VOC_area: Share = None
    precision: Share = None
    recall: Share = None
    f1: Share = None
    precision_at_25: Share = None
    recall_at_25: Share = None
    top1: Share = None
    top5: Share = None


class Confusion(_Part):
    """Confusion matrix: rows are true classes, columns predicted ones.

    For detectors the last row and column are background.  With very many classes only the largest
    `cells` (row, column, count) and the row sums are stored.
    """

    counts: list[list[int]] = []
    cells: list[tuple[int, int, int]] = []
    true_counts: list[int] = []
    iou: float | None = None
    confidence: float | None = None

    @model_validator(mode="after")
    def _is_square(self) -> "Confusion":
        if any(len(row) != len(self.counts) for row in self.counts):
            raise ValueError("it is not square")
        if any(not 0 <= at < len(self.true_counts) for cell in self.cells for at in cell[:2]):
            raise ValueError("a cell lies outside")
        return self


class Errors(_Part):
    """How many detections went wrong how, and what AP50 would gain without."""

    counts: dict[str, int]
    AP50_gain: dict[str, Share] = {}


class Picture(_Part):
    """One image, and how the model did on it."""

    file: str
    objects: int | None = None
    found: int | None = None
    missed: int | None = None
    wrong: int | None = None


class LeftOut(_Part):
    """An image that could not be read, and why."""

    file: str
    why: str


@dataclass
class Evaluation:
    """What evaluation.json holds; None or empty where a part is missing."""

    step: int | None = None
    images: int | None = None
    left_out: list[LeftOut] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    metrics: dict[str, Share] = field(default_factory=dict)
    per_class: list[ClassRow] = field(default_factory=list)
    confusion: Confusion | None = None
    errors: Errors | None = None
    worst: list[Picture] = field(default_factory=list)
    best: list[Picture] = field(default_factory=list)


def read_evaluation(content: Mapping[str, Any]) -> tuple[Evaluation, list[str]]:
    """Parses evaluation.json.

    Returns: what could be parsed, and a message for each part that could not.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, kind in get_type_hints(Evaluation).items():
        value = content.get(name)
        if value is None:
            continue
        try:
            part = TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(each) for each in (name, *first["loc"]))
            problems.append(f"{where}: {first['msg']}")
            continue
        found[name] = part[:_MOST_CLASSES] if isinstance(part, list) else part
    return Evaluation(**found), problems


# The folder.


@dataclass(frozen=True)
class Derived:
    """A number the run derived at start: what it is, and why."""

    key: str
    value: str
    why: str


@dataclass
class Warned:
    """A warning of train.log, as often as it came."""

    first: str
    text: str
    count: int = 1


@dataclass
class Run:
    """A run; lists are in the order of the files.

    Attributes:
        train: records of steps.
        evaluations: records of evaluations.
        ranks: for records of ranks, at most 1000 of them, the step, and lists by what they hold.
        starts: (step, seconds since 1970) where a process began: more than one after restarts.
        rollbacks: (step from, step to, why).
        bad_images: how many were replaced; 0 where none.
        finished: why the run ended, as it says itself; "" while it has not.
        config: flat: dotted key -> value as YAML has it.
        problems: what could not be read.
        missing: names of files that are not there.
    """

    folder: Path
    name: str
    train: list[Numbers] = field(default_factory=list)
    evaluations: list[Numbers] = field(default_factory=list)
    ranks: list[tuple[float, dict[str, list[float]]]] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    starts: list[tuple[float, float]] = field(default_factory=list)
    rollbacks: list[tuple[float, float, str]] = field(default_factory=list)
    bad_images: int = 0
    finished: str = ""
    times: tuple[float, float] | None = None  # of the first and the last record
    config: dict[str, Any] = field(default_factory=dict)
    config_tree: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    warnings: list[Warned] = field(default_factory=list)
    running: bool = False
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How far it came."""
        last = [records[-1]["step"] for records in (self.train, self.evaluations) if records]
        return int(max(last, default=0))

    @property
    def total_steps(self) -> int | None:
        """How far it was to come; None: it does not say."""
        value = self.derived_value("steps")
        return int(value) if value and value.isdigit() else None

    @property
    def alone_evaluated(self) -> bool:
        """Whether this is no training: weights were evaluated."""
        return self.evaluation is not None and not (self.times or self.config or self.warnings)

    @property
    def metric(self) -> str:
        """Name of the metric that ranks its evaluations; "" if none."""
        wanted = self.config.get("evaluate.metric")
        have = {key for record in self.measured for key in record}
        names = [str(wanted), *_TELLING]
        return next((name for name in names if name in have), "")

    @property
    def best(self) -> Numbers | None:
        """The evaluation with the best `metric`, the first of equals."""
        name = self.metric
        measured = [record for record in self.measured if name in record]
        sign = 1 if name in _LOWER_IS_BETTER else -1
        return min(measured, key=lambda record: sign * record[name], default=None)

    @property
    def last(self) -> Numbers | None:
        """The last evaluation with a `metric`."""
        return next((each for each in reversed(self.measured) if self.metric in each), None)

    @property
    def measured(self) -> list[Numbers]:
        """Its evaluations; where no training tells of any, the one of evaluation.json."""
        if self.evaluations or self.evaluation is None:
            return self.evaluations
        per_class = {f"AP/{row.name}": row.AP for row in self.evaluation.per_class}
        return [numbers({**self.evaluation.metrics, **per_class})]

    @property
    def ended(self) -> bool:
        """Whether it came to its end, as far as its records say."""
        if self.finished:
            return self.finished != "signal"
        return self.total_steps is not None and self.steps >= self.total_steps

    def derived_value(self, key: str) -> str | None:
        """A number derived at start, as text."""
        return next((item.value for item in self.derived if item.key == key), None)


def read_run(folder: Path) -> Run:
    """Reads what a training left in its output_dir.

    Raises: UserError: as `require_run`.
    """
    require_run(folder)
    run = Run(folder=folder, name=folder.resolve().name)
    _read_metrics(run)
    _read_config(run)
    run.environment = _json_object(run, "environment.json") or {}
    found = _json_object(run, "evaluation.json")
    if found is not None:
        run.evaluation, problems = read_evaluation(found)
        run.problems += [f"evaluation.json: {problem}" for problem in problems]
    _read_log(run)
    if not run.alone_evaluated:  # ppdist eval leaves no more
        run.problems += [f"{name} is not there" for name in run.missing]
    run.running = files.is_held(folder)
    return run


def require_run(folder: Path) -> None:
    """Raises: UserError: the folder does not exist or holds no run."""
    if not folder.is_dir():
        raise UserError(
            "no such folder; expected the output_dir of a run",
            code="run_not_found",
            where=str(folder),
        )
    known = ("metrics.jsonl", "config.yml", "environment.json", "train.log", "evaluation.json")
    if not any((folder / name).is_file() for name in known):
        raise UserError(
            f"no run: it holds none of {', '.join(known)}; expected the output_dir of a "
            "training, or the --out folder of ppdist eval",
            code="run_not_found",
            where=str(folder),
        )


def numbers(record: Mapping[str, Any]) -> Numbers:
    """What of a record is a finite number.

    COCO's -1, for an average over nothing, is no number either.
    """
    found = {}
    for key, value in record.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        nothing = value < 0 and key.startswith(("mAP", "AP", "AR", "VOC"))
        if abs(value) < 1e300 and math.isfinite(value) and not nothing:
            found[key] = float(value)
    return found


def _read_metrics(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    if not _readable(run, path):
        return
    try:
        records = read_metrics(path)
    except OSError as error:
        run.problems.append(f"metrics.jsonl cannot be read: {error}")
        return
    found = MetricRecords.of(records)
    run.train = [numbers(record) for record in found.steps]
    run.evaluations = [numbers(record) for record in found.evaluations]
    for record in found.starts:
        run.starts.append((record["step"], numbers(record).get("time", math.nan)))
        run.derived = list(_derived(record["derived"]))
    run.rollbacks = [
        (record["returned_from_step"], record["step"], str(record.get("reason") or _NOT_FINITE))
        for record in found.rollbacks
    ]
    run.bad_images = max(
        (int(numbers(record).get("bad_images", 0)) for record in found.bad_images), default=0
    )
    run.finished = found.finished
    every = len(found.ranks) // _MOST_OF_RANKS + 1
    run.ranks = [(record["step"], _lists(record)) for record in found.ranks[::every]]
    times = [each["time"] for record in records if "time" in (each := numbers(record))]
    run.times = (min(times), max(times)) if times else None


def _derived(content: Mapping[str, Any]) -> Iterator[Derived]:
    for key, item in content.items():
        if isinstance(item, dict):
            value = item.get("value")
            shown = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
            yield Derived(key, shown.strip('"'), str(item.get("why", "")))


def _lists(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Per-rank lists of numbers in a record; non-numbers become nan."""
    found = {}
    for key, value in record.items():
        if key.startswith("rank_") and isinstance(value, list):
            found[key] = [
                float(item) if type(item) in (int, float) and abs(item) < 1e300 else math.nan
                for item in value
            ]
    return found


def _read_config(run: Run) -> None:
    path = run.folder / "config.yml"
    if not _readable(run, path):
        return
    try:
        # Alone: what a run wrote names no other files, which would be none of ours to show.
        reader = Reader()
        tree = reader.read_alone(str(path)).plain()
    except (ConfigError, OSError, RecursionError) as error:
        run.problems.append(f"config.yml cannot be read: {error}")
        return
    if isinstance(tree, dict) and not reader.problems:
        run.config_tree, run.config = tree, dict(leaves(tree))
    else:
        run.problems.append("config.yml: not a configuration")


def _json_object(run: Run, name: str) -> dict[str, Any] | None:
    path = run.folder / name
    if not _readable(run, path):
        return None
    try:
        # JSON knows neither NaN nor infinity; Python's reader takes them.
        content = json.loads(path.read_text("utf-8", "replace"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError) as error:
        run.problems.append(f"{name} cannot be read: {error}")
        return None
    if not isinstance(content, dict):
        run.problems.append(f"{name}: expected an object")
        return None
    return content


def _read_log(run: Run) -> None:
    """Reads the warnings of this run from train.log.

    Lines of an earlier run in the same folder precede them.
    """
    path = run.folder / "train.log"
    if not _readable(run, path):
        return
    began = run.times[0] - _SLACK_SECONDS if run.times else -math.inf
    every: dict[str, Warned] = {}
    recent: dict[str, Warned] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                found = _LOG_LINE.match(line)
                if found is None:
                    continue
                for warned in [every, recent] if _seconds(found[1]) >= began else [every]:
                    if found[3] in warned:
                        warned[found[3]].count += 1
                    else:
                        warned[found[3]] = Warned(found[1], found[3])
    except OSError as error:
        run.problems.append(f"train.log cannot be read: {error}")
    # None since it began: perhaps written in another time zone.
    run.warnings = list((recent or every).values())


def _seconds(clock: str) -> float:
    try:
        return time.mktime(time.strptime(clock, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return math.inf


def _readable(run: Run, path: Path) -> bool:
    """Whether a file should be read.

    A missing file is noted; a file over 1 GiB is a problem.
    """
    try:
        if not path.is_file():
            run.missing.append(path.name)
            return False
        if path.stat().st_size > _MOST_BYTES:
            run.problems.append(f"{path.name} is larger than 1 GiB and was not read")
            return False
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read: {error}")
        return False
    return True


class Setting(NamedTuple):
    """A key, its value and default as YAML; "" without default."""

    key: str
    value: str
    default: str


def written(value: object) -> str:
    """A value on one line, nearly as YAML has it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def settings_of(tree: Mapping[str, Any]) -> tuple[list[Setting], str]:
    """Compares a configuration with the defaults of this version.

    Returns: the keys that differ, in the order of the file; and "", or why none could be compared.
    """
    if not tree:
        return [], "there is no configuration"
    try:
        config = experiment_of(tree)
    except ConfigError as error:
        return [], f"{error}"
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return [], f"another version wrote it: {where}: {first['msg']}"
    return list(_changed(config, tree)), ""


def _changed(config: BaseModel, tree: Mapping[str, Any]) -> Iterator[Setting]:
    differing = dict(leaves(config.model_dump(mode="json", exclude_defaults=True)))
    for key, value in leaves(tree):
        if key in differing:
            yield Setting(key, written(value), _default(config, key.split(".")))


def _default(config: BaseModel, path: list[str]) -> str:
    section: Any = config
    for part in path[:-1]:
        section = getattr(section, part, None)
    field = type(section).model_fields.get(path[-1]) if isinstance(section, BaseModel) else None
    value = PydanticUndefined if field is None else field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    return written(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)
