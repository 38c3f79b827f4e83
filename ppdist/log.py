"""What a run says while it works: console, train.log, metrics.jsonl, VisualDL.

metrics.jsonl is the truth; VisualDL and the console are views of it.  Only rank 0 writes.
Nothing here ever stops a training run: a full disk costs log lines, with one warning.
"""

import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ppdist.config import Section
from ppdist.errors import ConfigError
from ppdist.outlets import ConsoleHandler, LogFileHandler, Screen
from ppdist.visualdl_file import VisualDLFile, append_whole

_LOGGER = logging.getLogger("ppdist")
_PLAIN_WIDTH = 120  # columns of a table where there is no terminal
_REFRESH_SECONDS = 0.2


class LogConfig(Section):
    """What a run says and how often."""

    every_steps: int = Field(
        default=20,
        ge=1,
        description="Optimizer steps between two lines of the log and of metrics.jsonl.",
    )
    visualdl: bool = Field(
        default=True,
        description="Write VisualDL curves and images to output_dir/vdl.",
    )
    images: int = Field(
        default=4,
        ge=0,
        description="How many validation images with true and predicted boxes each evaluation "
        "adds to VisualDL.",
    )


class RunLog:
    """The voice of one run; on other ranks than 0 every method does nothing.

    Messages of every module under the logger `ppdist` join this run's between construction and
    `close` (Paddle's own handlers would print them a second time, so they stop here).  Other
    ranks let warnings through to their stderr, which the launcher keeps in workerlog.N.
    """

    def __init__(
        self,
        output_dir: Path,
        main: bool,
        total_steps: int,
        steps_per_epoch: int,
        config: LogConfig,
        resume_step: int | None,
    ) -> None:
        """Opens the files of the run.

        Args:
            output_dir: gets train.log, metrics.jsonl, vdl/.
            main: True on rank 0.
            total_steps: optimizer steps of the whole run.
            steps_per_epoch: optimizer steps.
            resume_step: the step that the restored checkpoint had finished.  Lines and points
                after it are dropped, because they will be made again.  None starts anew: an
                earlier metrics.jsonl is kept as metrics.previous.jsonl.
        Raises: ConfigError: output_dir cannot be made or written.
        """
        self._main = main
        self._total_steps = total_steps
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._every_steps = config.every_steps
        self._handlers: list[logging.Handler] = []
        self._level_before = _LOGGER.level
        self._propagate_before = _LOGGER.propagate
        self._clock: tuple[int, float] | None = None  # step and time of the first progress call
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._refreshed = 0.0
        self._warned: set[str] = set()
        self._visualdl: VisualDLFile | None = None
        if not main:
            _LOGGER.setLevel(logging.WARNING)
            return
        self._stdout_before, self._screen = sys.stdout, Screen(sys.stdout)
        width = None if self._screen.isatty() else _PLAIN_WIDTH
        self._console = Console(file=cast(TextIO, self._screen), width=width)
        self._metrics_path = output_dir / "metrics.jsonl"
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            _begin_metrics(self._metrics_path, resume_step)
        except OSError as error:
            raise ConfigError(f"output_dir: {output_dir} cannot be written: {error}") from error
        self._open_handlers(output_dir)
        if config.visualdl:
            try:
                self._visualdl = VisualDLFile(output_dir / "vdl", output_dir.name, resume_step)
            except Exception as error:  # curves are not worth a run, whatever fails in making them
                self._warn_once("VisualDL", error)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def info(self, message: str) -> None:
        """One line to console and train.log."""
        if self._main:
            _LOGGER.info(message)

    def warning(self, message: str) -> None:
        """Like `info`, marked as a warning."""
        if self._main:
            _LOGGER.warning(message)

    def table(self, title: str, rows: list[tuple[str, str, str]]) -> None:
        """A table of (what, value, why) to console and train.log."""
        if not self._main:
            return
        table = Table("", "", "", title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        plain = Console(file=io.StringIO(), width=_PLAIN_WIDTH)
        plain.print(table, markup=False)
        self._console.print(table)
        self._to_file_only("\n" + plain.file.getvalue().rstrip())  # type: ignore[attr-defined]

    def metrics(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl, on its way to disk at return, and its VisualDL points.

        Args:
            record: flat; `step` is required, numbers become curves, other values stay in the
                line.  `time` (seconds since 1970) is added.  A number that is not finite is
                written as null, because JSON has no other way.
        """
        if not self._main:
            return
        record = {"time": round(time.time(), 3), **record}
        line = json.dumps({key: _jsonable(value) for key, value in record.items()})
        try:
            with io.FileIO(self._metrics_path, "ab") as file:
                append_whole(file, line.encode() + b"\n")
        except OSError as error:
            self._warn_once("metrics.jsonl", error)
        values = {
            _tag(key): float(value)
            for key, value in record.items()
            if key not in ("step", "epoch", "time") and _is_point(key, value)
        }
        self._to_visualdl(lambda file: file.add_scalars(int(record["step"]), values))

    def go_back(self, step: int) -> None:
        """Drops lines of metrics.jsonl and points after a step, because they are made again."""
        if not self._main:
            return
        try:
            _begin_metrics(self._metrics_path, step)
        except OSError as error:
            self._warn_once("metrics.jsonl", error)
        self._to_visualdl(lambda file: file.go_back(step))

    def images(self, tag: str, step: int, images_HW3: list[np.ndarray]) -> None:
        """Adds uint8 RGB images to VisualDL's Image page under `tag/0`, `tag/1`, ..."""
        self._to_visualdl(lambda file: file.add_images(step, tag, images_HW3))

    def progress(self, step: int, fields: dict[str, str]) -> None:
        """Shows how far the run is; call it after every optimizer step.

        On a terminal a bar moves.  Otherwise, and in train.log always, a line appears every
        `log.every_steps` steps and at the last.

        Args:
            step: optimizer steps done since the start of the run (also before a resume).
            fields: what to show beside it, such as {"loss": "2.31", "img/s": "41.8"}.
        """
        if not self._main:
            return
        now = time.monotonic()
        if self._clock is None:
            self._clock = (step, now)
        text = self._line(step, fields, now)
        if step % self._every_steps == 0 or step == self._total_steps:
            if self._console.is_terminal:
                self._to_file_only(text)
            else:
                _LOGGER.info(text)
        if self._console.is_terminal:
            self._move_bar(step, text, now)

    def close(self) -> None:
        """Closes the files and gives the logger back as it was; the second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._to_visualdl(VisualDLFile.close)
        self._visualdl = None
        if self._handlers:
            sys.stdout = self._stdout_before
        for handler in self._handlers:
            _LOGGER.removeHandler(handler)
            handler.close()
        self._handlers = []
        _LOGGER.setLevel(self._level_before)
        _LOGGER.propagate = self._propagate_before

    def _open_handlers(self, output_dir: Path) -> None:
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.propagate = False
        sys.stdout = self._screen  # also for whoever prints without asking the log
        self._handlers.append(ConsoleHandler(self._console, self._screen))
        _LOGGER.addHandler(self._handlers[0])
        try:
            self._handlers.append(LogFileHandler(output_dir / "train.log"))
        except OSError as error:
            self._warn_once("train.log", error)
            return
        _LOGGER.addHandler(self._handlers[1])

    def _to_visualdl(self, write: Callable[[VisualDLFile], None]) -> None:
        if self._visualdl is None:
            return
        try:
            write(self._visualdl)
        except Exception as error:  # curves are not worth a run, whatever fails in making them
            self._warn_once("VisualDL", error)

    def _to_file_only(self, text: str) -> None:
        record = _LOGGER.makeRecord("ppdist", logging.INFO, "", 0, text, (), None)
        for handler in self._handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(record)

    def _line(self, step: int, fields: dict[str, str], now: float) -> str:
        epoch = math.ceil(step / self._steps_per_epoch)
        epochs = math.ceil(self._total_steps / self._steps_per_epoch)
        values = "  ".join(f"{name} {value}" for name, value in fields.items())
        text = f"epoch {epoch}/{epochs}  step {step}/{self._total_steps}  {values}"
        assert self._clock is not None
        first_step, began = self._clock
        if step > first_step:  # the average over all since the start: it contains evaluations
            left = (now - began) / (step - first_step) * (self._total_steps - step)
            text += f"  ETA {duration(left)}"
        return text

    def _move_bar(self, step: int, text: str, now: float) -> None:
        if self._bar is None:
            self._bar = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                auto_refresh=False,  # no thread: DataLoader workers are forked beside us
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total_steps)
        if now - self._refreshed >= _REFRESH_SECONDS or step == self._total_steps:
            self._refreshed = now
            self._bar.update(self._task, completed=step, description=text, refresh=True)

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self.warning(f"{what} cannot be written, training goes on without it: {error}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; lines cut short by a crash or a full disk are left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def duration(seconds: float) -> str:
    """`1d 2h`, `2h 05m`, `4m 07s` or `9s`."""
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"


def _begin_metrics(path: Path, resume_step: int | None) -> None:
    if not path.exists():
        return
    if resume_step is None:
        path.replace(path.with_name("metrics.previous.jsonl"))
        return
    kept = [record for record in read_metrics(path) if record.get("step", 0) <= resume_step]
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_point(key: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return False
    nothing_to_measure = value < 0 and _tag(key).startswith(("eval/", "eval_per_class/"))
    return math.isfinite(value) and not nothing_to_measure


def _tag(key: str) -> str:
    """The VisualDL tag of a metric: its part before the slash is the group on the page.

    The page sorts groups by name and unfolds only the first.
    """
    if key.startswith("AP/"):
        return "eval_per_class/" + key.removeprefix("AP/")
    if "/" in key:
        return key
    if key.startswith(("mAP", "AP", "AR")):
        return f"eval/{key}"
    if key.endswith(("_seconds", "_per_second", "_mb", "_gb")):
        return f"train_speed/{key}"
    return f"train/{key}"
