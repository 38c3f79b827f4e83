"""What a run says while it works: console, train.log, metrics.jsonl, VisualDL, TensorBoard.

metrics.jsonl is the truth; the others are views of it.  Only rank 0 writes.
Nothing here ever stops a training run: a full disk costs log lines, with one warning.
"""

import io
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ppdist.closing import closing_rows, commands
from ppdist.config.output import LogConfig
from ppdist.curves import Curves
from ppdist.errors import ConfigError
from ppdist.outlets import ConsoleHandler, LogFileHandler, Screen
from ppdist.run_records import read_metrics
from ppdist.tensorboard_file import TensorBoardFile, require_tensorboardx
from ppdist.time_left import Meter, duration
from ppdist.visualdl_file import VisualDLFile, append_whole

_LOGGER = logging.getLogger("ppdist")
_PLAIN_WIDTH = 120  # columns of a table where there is no terminal
_REFRESH_SECONDS = 0.2


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
                after it are dropped, because they will be made again.  None starts anew: what an
                earlier run left is kept as metrics.previous.jsonl, evaluation.previous.json and
                plots.previous.
        Raises: ConfigError: output_dir cannot be made or written, or a package is missing.
        """
        self._main = main
        self._output_dir = output_dir
        self.histograms_wanted = main and config.histograms
        self._total_steps = total_steps
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._every_steps = config.every_steps
        self._handlers: list[logging.Handler] = []
        self._level_before = _LOGGER.level
        self._propagate_before = _LOGGER.propagate
        self._meter = Meter(total_steps, steps_per_epoch)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._refreshed = 0.0
        self._warned: set[str] = set()
        self.curves = Curves(self.warn_once)  # of other ranks than 0 empty
        if not main:
            _LOGGER.setLevel(logging.WARNING)
            return
        self._stdout_before, self._screen = sys.stdout, Screen(sys.stdout)
        width = None if self._screen.isatty() else _PLAIN_WIDTH
        self._console = Console(file=cast(TextIO, self._screen), width=width)
        self._metrics_path = output_dir / "metrics.jsonl"
        if config.tensorboard:
            require_tensorboardx()
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _set_aside(output_dir)
            kept = _begin_metrics(self._metrics_path, resume_step)
        except OSError as error:
            raise ConfigError(
                f"output_dir: {output_dir} cannot be written: {error}",
                code="folder_unwritable",
            ) from error
        for record in kept:
            if record.get("eval_seconds") is not None:
                self._meter.remember(record["eval_seconds"])
        self._open_handlers(output_dir)
        self._open_curves(config, resume_step)

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

    def warn_once(self, what: str, error: Exception) -> None:
        """For what is written besides, and may fail each time."""
        if what not in self._warned:
            self._warned.add(what)
            said = f"{type(error).__name__}: {error}"
            self.warning(f"{what} cannot be written, training goes on without it: {said}")

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
        """One line of metrics.jsonl, on its way to disk at return, and its points on the curves.

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
            self.warn_once("metrics.jsonl", error)
        self.curves.metrics(record)

    def go_back(self, step: int) -> None:
        """Drops lines of metrics.jsonl and points after a step, because they are made again."""
        if not self._main:
            return
        try:
            _begin_metrics(self._metrics_path, step)
        except OSError as error:
            self.warn_once("metrics.jsonl", error)
        self.curves.go_back(step)

    def images(self, tag: str, step: int, images_HW3: list[np.ndarray]) -> None:
        """Adds uint8 RGB images to the pages under `tag/0`, `tag/1`, ..."""
        self.curves.images(tag, step, images_HW3)

    def expect(
        self, evaluate_every: int, save_every: int, evaluation_images: int, images_per_step: int
    ) -> None:
        """What the run will spend its time on; see `Meter.expect`."""
        self._meter.expect(evaluate_every, save_every, evaluation_images, images_per_step)

    def spending(self, part: str, step: int) -> AbstractContextManager[None]:
        """Around an evaluation or a save between two steps; see `Meter.spending`."""
        return self._meter.spending(part, step) if self._main else nullcontext()

    def progress(self, step: int, fields: dict[str, str], waited: float = 0.0) -> None:
        """Shows how far the run is; call it after every optimizer step.

        On a terminal a bar moves.  Otherwise, and in train.log always, a line appears every
        `log.every_steps` steps and at the last.

        Args:
            step: optimizer steps done since the start of the run (also before a resume).
            fields: what to show beside it, such as {"loss": "2.31", "img/s": "41.8"}.
            waited: seconds of the step in which there were no images.
        """
        if not self._main:
            return
        self._meter.stepped(step, waited)
        text = self._line(step, fields)
        if step % self._every_steps == 0 or step == self._total_steps:
            if self._console.is_terminal:
                self._to_file_only(text)
            else:
                _LOGGER.info(text)
        if self._console.is_terminal:
            self._move_bar(step, text)

    def time_left(self, step: int) -> str:
        """` ETA 4m 07s`, or nothing where that cannot be known yet."""
        left = self._meter.left(step) if self._main and step < self._total_steps else None
        return "" if left is None else f"  ETA {duration(left)}"

    def closing(self) -> None:
        """The table at the end: how it went, where everything is, where the time went."""
        if self._main:
            rows = closing_rows(self._output_dir, self._meter.seconds())
            self.table(f"{self._output_dir}", rows)
            for command in commands(self._output_dir):  # a table would break them
                self.info(f"look at it: {command}")

    def close(self) -> None:
        """Closes the files and gives the logger back as it was; the second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.curves.close()
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
            self.warn_once("train.log", error)
            return
        _LOGGER.addHandler(self._handlers[1])

    def _open_curves(self, config: LogConfig, resume_step: int | None) -> None:
        folder = self._output_dir
        if config.visualdl:
            self.curves.open(
                "VisualDL", lambda: VisualDLFile(folder / "vdl", folder.name, resume_step)
            )
        if config.tensorboard:
            self.curves.open(
                "TensorBoard", lambda: TensorBoardFile(folder / "tensorboard", resume_step)
            )

    def _to_file_only(self, text: str) -> None:
        record = _LOGGER.makeRecord("ppdist", logging.INFO, "", 0, text, (), None)
        for handler in self._handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(record)

    def _line(self, step: int, fields: Mapping[str, str]) -> str:
        epoch = math.ceil(step / self._steps_per_epoch)
        epochs = math.ceil(self._total_steps / self._steps_per_epoch)
        values = "  ".join(f"{name} {value}" for name, value in fields.items())
        left = self.time_left(step)
        return f"epoch {epoch}/{epochs}  step {step}/{self._total_steps}  {values}{left}"

    def _move_bar(self, step: int, text: str) -> None:
        now = time.monotonic()
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


def _set_aside(output_dir: Path) -> None:
    """What an earlier run left that a new one would be taken for, in the place of what was set
    aside before.  Raises: OSError."""
    for name in ("metrics.jsonl", "evaluation.json", "plots"):
        path = output_dir / name
        previous = path.with_name(f"{path.stem}.previous{path.suffix}")
        if not path.exists():
            continue
        if previous.is_dir():
            shutil.rmtree(previous)
        path.replace(previous)


def _begin_metrics(path: Path, resume_step: int | None) -> list[dict[str, Any]]:
    """Returns: the records that stay."""
    if resume_step is None or not path.exists():
        return []
    kept = [record for record in read_metrics(path) if record.get("step", 0) <= resume_step]
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return kept


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
