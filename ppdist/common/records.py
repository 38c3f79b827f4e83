"""metrics.jsonl: writes it, reads it, and summarises a run from it.

RunRecords                   writes metrics.jsonl
read_metrics, MetricRecords  the records of a run, by kind
run_summary                  the table at the end
"""

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.common.eta import duration
from ppdist.common.files import append, replace_file, sync_path, text_of, write_if_held
from ppdist.runtime.writer_thread import WriterThread

Record = Mapping[str, Any]
_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl, without lines that a crash truncated.

    Raises: OSError: as `open_file`.
    """
    records = []
    for line in text_of(path, "replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # numbers of too many digits, lists too deep
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


class RunRecords:
    """The metrics.jsonl of a run, written by a thread.

    If another training run has taken the folder, each write raises instead.
    """

    def __init__(self, output_dir: Path, files: WriterThread) -> None:
        self.path = output_dir / _FILE
        self._folder, self._files = output_dir, files

    def begin(self, resume_step: int | None) -> list[dict[str, Any]]:
        """Creates the folder; returns the records in it that stay.

        Args: resume_step: last step whose records stay; None: no records stay.
        Raises: ConfigError: the folder cannot be created or written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                return _drop_after(self.path, resume_step)
            self.path.unlink(missing_ok=True)
            return []
        except OSError as error:
            raise ConfigError(
                f"output_dir: {self._folder} cannot be written: {error}", code="folder_unwritable"
            ) from error

    def write(self, record: Record) -> None:
        """Adds a record; non-finite numbers become null, because JSON has none."""
        line = json.dumps({key: _jsonable(value) for key, value in record.items()}) + "\n"
        self._put(partial(append, self.path, line.encode()), len(line))

    def roll_back(self, step: int) -> None:
        """Drops the records after a step."""
        self._put(partial(_drop_after, self.path, step))

    def forget(self, step: int, key: str) -> None:
        """Drops the records of a step that have this key."""

        def is_other(record: Record) -> bool:
            return record.get("step") != step or key not in record

        self._put(partial(_filter_records, self.path, is_other))

    def sync(self, seconds: float) -> bool:
        """Syncs the records so far to disk; False: the disk failed, or was too slow."""
        synced = []

        def sync() -> None:
            sync_path(self.path)
            sync_path(self._folder)  # it holds the name of a new file
            synced.append(True)

        self._files.put(_FILE, sync)
        return self._files.flush(seconds) and bool(synced)

    def _put(self, write: Callable[[], object], size: int = 0) -> None:
        self._files.put(_FILE, partial(write_if_held, self._folder, write), size)


def _drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops the records after a step; returns the others."""
    return _filter_records(path, lambda record: record.get("step", 0) <= step)


def _filter_records(path: Path, is_kept: Callable[[Record], bool]) -> list[dict[str, Any]]:
    """Keeps only the records that `is_kept` accepts; returns them."""
    if not path.exists():
        return []
    records = [record for record in read_metrics(path) if is_kept(record)]
    replace_file(path, "".join(json.dumps(record) + "\n" for record in records).encode(), sync=True)
    return records


def _jsonable(value: Any) -> Any:
    """Converts a value to one that JSON has; non-finite numbers become None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass
class MetricRecords:
    """The records of a metrics.jsonl by kind, without those that a rollback dropped.

    Attributes:
        steps: means over some training steps.
        epochs: means over the steps of each epoch; under `epoch_end`.
        evaluations: results on the whole validation set.
        ranks: seconds of each rank over the same steps as in `steps`.
        starts: starts of the run with its schedule; more than one after restarts.
        rollbacks: returns to earlier weights.
        bad_images: number of images replaced so far.
        finished: why the run ended; "": it has not, or was started again since.
    """

    steps: list[Record] = field(default_factory=list)
    epochs: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    ranks: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    rollbacks: list[Record] = field(default_factory=list)
    bad_images: list[Record] = field(default_factory=list)
    finished: str = ""

    @classmethod
    def of(cls, records: Sequence[Record]) -> "MetricRecords":
        """Sorts records by kind; skips unknown kinds and records without a step.

        A rollback drops the records before it whose step is later than its own.
        """
        by_kind = cls()
        for record in records:
            if _is_number(record.get("step")):
                by_kind._sort_in(record)
        return by_kind

    def _sort_in(self, record: Record) -> None:
        """Adds a record to the list of its kind; a rollback drops later steps."""
        if isinstance(record.get("derived"), Mapping):
            self.starts.append(record)
            self.finished = ""
        elif isinstance(record.get("finished"), str):
            self.finished = record["finished"]
        elif _is_number(record.get("returned_from_step")):
            self.rollbacks.append(record)
            for kind in (self.steps, self.epochs, self.evaluations, self.ranks):
                kind[:] = [earlier for earlier in kind if earlier["step"] <= record["step"]]
        elif isinstance(record.get("epoch_end"), Mapping):
            self.epochs.append(record)
        elif "eval_seconds" in record:
            self.evaluations.append(record)
        elif "rank_step_seconds" in record:
            self.ranks.append(record)
        elif "bad_images" in record:
            self.bad_images.append(record)
        elif "loss" in record:
            self.steps.append(record)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


# --- the end of a run -----------------------------------------------------------------------------


_SUMMARY_SCORES = ("mAP", "mAP50", "top1", "top5", "val_loss")


def run_summary(output_dir: Path, seconds: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Summarises a run from its files, as rows (what, value, where or why).

    Args: seconds: wall time of this process by part.
    """
    try:
        records = read_metrics(output_dir / "metrics.jsonl")
    except OSError:
        records = []
    by_kind = MetricRecords.of(records)
    evaluations = {evaluation["step"]: evaluation for evaluation in by_kind.evaluations}
    checkpoints = output_dir / "checkpoints"
    rows = []
    for name in ("best", "last"):
        step = step_of(checkpoints / name)
        if step is not None:
            scores = _format_scores(evaluations.get(step, {})) or f"step {step}, not evaluated"
            rows.append((name, scores, f"checkpoints/{name}"))
    if len(evaluations) > 1:
        first, *_, last = sorted(evaluations)
        rows.append(
            ("first evaluation", _format_scores(evaluations[first]), f"step {first} of {last}")
        )
    rows += _loss_row(by_kind)
    rows += _list_files(output_dir)
    total = sum(seconds.values())
    parts = sorted(seconds.items(), key=lambda part_seconds: -part_seconds[1])
    shares = ", ".join(
        f"{part} {value / total:.0%}" for part, value in parts if value >= 0.005 * total > 0
    )
    rows.append(("time", duration(total), shares))
    return rows


def summarise_results(output_dir: Path) -> dict[str, Any]:
    """Summarises the records of a run as JSON: last step, losses, scores of `last` and `best`."""
    with suppress(OSError):
        by_kind = MetricRecords.of(read_metrics(output_dir / "metrics.jsonl"))
        scores = {record["step"]: record for record in by_kind.evaluations}
        steps = [record["step"] for record in by_kind.steps]
        results: dict[str, Any] = {
            "step": max(steps, default=0),
            "loss": by_kind.steps[-1]["loss"] if steps else None,
        }
        for name in ("best", "last"):
            path = output_dir / "checkpoints" / name
            if (step := step_of(path)) is not None:
                results[name] = {"checkpoint": str(path.absolute()), "step": step} | {
                    score: value
                    for score, value in scores.get(step, {}).items()
                    if score in _SUMMARY_SCORES
                }
        return results
    return {}


def _loss_row(records: MetricRecords) -> list[tuple[str, str, str]]:
    """Returns the row of the first and the last loss of the run; []: it has none.

    They come from the records of epochs, or from those of steps if no epoch has ended.
    """
    losses = [
        (record["epoch_end"]["loss"], f"in epoch {record['epoch_end'].get('epoch')}")
        for record in records.epochs
        if _is_number(record["epoch_end"].get("loss"))
    ] or [
        (record["loss"], f"at step {record['step']}")
        for record in records.steps
        if _is_number(record["loss"])
    ]
    if not losses:
        return []
    (first, begin), (last, end) = losses[0], losses[-1]
    change = "" if begin == end else f", from {loss_text(first)} {begin}"
    return [("training loss", loss_text(last), f"{end}{change}")]


def loss_text(value: float | None) -> str:
    """Formats a loss in six characters or fewer; None: ""."""
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}" if value < 1e4 else f"{value:.0e}"


def _format_scores(record: Mapping[str, Any]) -> str:
    values = [
        f"{name} {record[name]:.4f}" for name in _SUMMARY_SCORES if record.get(name) is not None
    ]
    return "  ".join(values)


def _list_files(output_dir: Path) -> list[tuple[str, str, str]]:
    candidates = (
        ("plots", "plots", "curves, matrices, worst and best images"),
        ("evaluation", "evaluation.json", "tables and curves of the best"),
        ("every number", "metrics.jsonl", "one JSON object a line"),
        ("this text", "train.log", ""),
    )
    return [(what, name, how) for what, name, how in candidates if (output_dir / name).exists()]


def visualdl_command(folder: Path) -> str:
    """Writes VisualDL's command for a folder, in English, without telemetry."""
    return f"visualdl --logdir {shlex.quote(str(folder))} --language en --disable-telemetry"


def commands(output_dir: Path) -> list[tuple[str, str]]:
    """Lists the commands that show the run: (name, command to copy) pairs."""
    rows = [("report", f"ppdist report {shlex.quote(str(output_dir))}")]
    if (output_dir / "vdl").exists():
        rows.append(("curves", visualdl_command(output_dir / "vdl")))
    if (output_dir / "trackers/tensorboard").exists():
        folder = shlex.quote(str(output_dir / "trackers/tensorboard"))
        rows.append(("curves", f"tensorboard --logdir {folder}"))
    return rows


def next_commands(weights: str, image: str = "", *, test: bool = False) -> list[tuple[str, str]]:
    """Lists the commands that use weights: (purpose, command to copy) pairs.

    Args:
        weights: the words that name them, such as `-w output/run`.
        image: path of an image to predict; "" if none is at hand.
        test: whether their data set has a test split.
    """
    source = shlex.quote(image) if os.path.isfile(image) else "IMAGES"
    return [
        ("predict", f"ppdist predict {weights} --source {source}"),
        *([("test", f"ppdist eval {weights} --split test")] if test else []),
        ("export", f"ppdist export {weights}"),
    ]


def extension(epochs: float, steps: int | None) -> list[str]:
    """Returns the option that trains a run longer: a half as much again, and enough of a short
    trial to see whether it learns."""
    if steps is None:
        return ["--epochs", f"+{max(10, round(epochs / 2))}"]
    return ["--steps", f"+{max(500, round(steps / 2))}"]


def step_of(checkpoint: Path) -> int | None:
    """Returns the step of a checkpoint or of a link to one, or None."""
    try:
        kind, _, step = checkpoint.resolve(strict=True).name.partition("-")
        return int(step) if kind == "step" else None
    except (OSError, ValueError):
        return None
