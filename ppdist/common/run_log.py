"""Log of a run, in three independent parts.

    RunRecords     metrics.jsonl (records.py)
    ConsoleHandler, ProgressBar, LogFileHandler    console and train.log (console.py)
    MetricWriters  VisualDL and trackers (writers.py)

metrics.jsonl is the source of truth; the others are views of it.  Only rank 0 writes, in threads:
no step waits for a terminal or a disk.  Logging never stops a training: a full disk or a closed
terminal costs lines, with one warning.
"""

import io
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppdist.common import json_lines
from ppdist.common.console import ConsoleHandler, EarlyLog, LogFileHandler, ProgressBar, console_on
from ppdist.common.eta import ETA, EVALUATION, duration
from ppdist.common.files import write_if_held
from ppdist.common.process import BARE, DETAIL, NOTE, say
from ppdist.common.records import RunRecords, commands, run_summary
from ppdist.common.trackers import TrackedRun, TrackerProcess, require_tracker
from ppdist.common.writers import MetricWriters, VisualDLWriter
from ppdist.runtime.writer_thread import TERMINAL, Screen, WriterThread

_LOGGER = logging.getLogger("ppdist")
_FILE_WIDTH = 120  # columns of a table in train.log
_SILENT_SECONDS = 60.0  # without a terminal: longest silence before a step is logged
_CLOSE_SECONDS, _STOPPED_SECONDS = 90.0, 10.0  # for files and trackers at the end
_HEADER_EVERY = 20  # rows of the growing table


class RunLog:
    """The log of one run; does nothing on ranks other than 0.

    From construction to `close`, all messages under the logger `ppdist` go into this log, and no
    further (Paddle's own handlers would print them a second time).  Other ranks print warnings on
    their stderr, which the launcher writes to workerlog.N.
    """

    def __init__(
        self,
        output_dir: Path,
        main: bool,
        total_steps: int,
        steps_per_epoch: int,
        resume_step: int | None,
        *,
        every_steps: int = 20,
        visualdl: bool = True,
        trackers: Sequence[tuple[str, Any]] = (),
        early: "EarlyLog | None" = None,
    ) -> None:
        """Opens the files of the run.

        Args:
            output_dir: gets train.log, metrics.jsonl, vdl/.
            main: True on rank 0.
            total_steps: optimizer steps of the whole run.
            steps_per_epoch: optimizer steps.
            resume_step: last finished step of the restored checkpoint.  Lines and points after it
                are dropped, because the run writes them again.  None: a new run.
            every_steps: steps between two progress lines.
            visualdl: also write VisualDL's file.
            trackers: for each tracker, `package.module:Class` of its writer, and its section.
            early: earlier messages, which are copied to train.log; their limit on console lines
                holds until the first step.
        Raises: ConfigError: output_dir cannot be made or written, or a package is missing.
        """
        self._main = main
        self._output_dir = output_dir
        self._total_steps = total_steps
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._every_steps = every_steps
        self._is_open = False
        self._handlers_before = [*_LOGGER.handlers]
        self._level_before = _LOGGER.level
        self._propagate_before = _LOGGER.propagate
        self.eta = ETA(total_steps)
        self._bar: ProgressBar | None = None
        self._rows = 0  # of the growing table
        self._header = ""  # of the growing table
        self._warned: set[str] = set()
        self._files = WriterThread()
        self._close_seconds = _CLOSE_SECONDS
        self.writers = MetricWriters(self._files)  # empty on ranks other than 0
        self._trackers: list[TrackerProcess] = []  # the writers that are trackers
        self._streams_before = sys.stdout, sys.stderr
        self._screen = Screen(sys.stdout)
        self._records = RunRecords(output_dir, self._files)
        if not main:
            _LOGGER.setLevel(logging.WARNING)
            self._replace_streams()
            return
        self._console = console_on(self._screen)
        if self._console.is_terminal and not json_lines.is_json():
            self._bar = ProgressBar(self._console, total_steps)
        self._dropped_before = TERMINAL.dropped["terminal"]
        self._last_line_at = time.monotonic()  # on a console without a terminal
        for _, tracker in trackers:
            require_tracker(tracker.name)
        records = self._records.begin(resume_step)
        self.recorded_step = max(
            (record["step"] for record in records if "loss" in record), default=0
        )
        for record in records:
            if record.get("eval_seconds") is not None:
                self.eta.remember(record["eval_seconds"])
        self._open_handlers(early)
        if visualdl:
            vdl = partial(VisualDLWriter, output_dir / "vdl", output_dir.name, resume_step)
            self.writers.open("VisualDL", vdl)
        for target, tracker in trackers:
            folder, run_name = output_dir / "trackers" / tracker.name, output_dir.name
            run = TrackedRun(tracker, folder, run_name, resume_step)
            self.writers.open(tracker.name, partial(self._start_tracker, target, run))

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def info(self, message: str) -> None:
        """Logs one line to console and train.log."""
        if self._main:
            _LOGGER.info(message)

    def warning(self, message: str, code: str = "") -> None:
        """Logs one line, as `info`, marked as a warning; `code` is for JSON lines."""
        if self._main:
            _LOGGER.warning(message, extra={"code": code})

    def detail(self, message: str) -> None:
        """Logs one line to train.log only."""
        if self._main:
            _LOGGER.info(message, extra=DETAIL)

    def note(self, message: str) -> None:
        """Logs like `info`; before the first step the line is shortened like a warning."""
        if self._main:
            _LOGGER.info(message, extra=NOTE)

    def headline(self, name: str, text: str) -> None:
        """Logs one of the few lines that describe the run at its start."""
        if self._main:
            line = f"{name}: {text}" if json_lines.is_json() else f"{name:10}{text}"
            _LOGGER.info(line, extra=BARE)

    def row(self, header: str, row: str, text: str = "") -> None:
        """Adds a row to the run's table, sometimes with its header.

        Args: text: header and row in one line, for a log that has no columns.
        """
        if not self._main:
            return
        if json_lines.is_json():
            _LOGGER.info(text or row)
            return
        if header != self._header or self._rows % _HEADER_EVERY == 0:
            self._header, self._rows = header, 0
            _LOGGER.info(header, extra=BARE)
        self._rows += 1
        self._last_line_at = time.monotonic()
        _LOGGER.info(row, extra=BARE)

    def warn_once(self, output: str, error: Exception) -> None:
        """Warns only once about an optional output that may fail at every write."""
        if output not in self._warned:
            self._warned.add(output)
            message = f"{type(error).__name__}: {error}"
            self.warning(f"{output} cannot be written, continuing without it: {message}")

    def put(self, name: str, write: Callable[[], object], size: int = 0) -> None:
        """Writes another file in the background, until `close`; warns once of failures.

        Args: size: bytes that wait in memory; a file with any, such as a picture, may be dropped.
        """
        # Pictures of batches may still be drawn after `close`.
        if self._is_open:
            guarded_write = partial(write_if_held, self._output_dir, write)
            self._files.put(name, guarded_write, size, may_drop=size > 0)

    def table(
        self, title: str, rows: Sequence[tuple[str, str, str]], on_console: bool = False
    ) -> None:
        """Logs a table of (what, value, why), optionally on the console."""
        if not self._main:
            return
        table = Table("", "", "", title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*map(escape, row))
        plain = Console(file=io.StringIO(), width=_FILE_WIDTH, force_jupyter=False)
        plain.print(table)
        if on_console and json_lines.is_json():
            for what, value, reason in rows:
                _LOGGER.info(f"{what}: {value}" + (f" ({reason})" if reason else ""), extra=BARE)
        elif on_console:
            self._console.print(table)
        self.detail("\n" + plain.file.getvalue().rstrip())  # type: ignore[attr-defined]

    def metrics(self, record: dict[str, Any]) -> None:
        """Writes a record to metrics.jsonl and to the metric writers.

        Args:
            record: flat; `step` is required.  Numbers also go to the writers, other values only
                into the line.  `time` (seconds since 1970) is added.  Non-finite numbers become
                null, because JSON has none.
        """
        if not self._main:
            return
        self._warn_of_failures()
        record = {"time": round(time.time(), 3), **record}
        self._records.write(record)
        self.writers.metrics(record)

    def sync(self, seconds: float = 30.0) -> bool:
        """Syncs the records so far to disk, before the checkpoint that follows.

        Safe in any thread.

        Args: seconds: the timeout.
        Returns: False: the disk failed, or was too slow.
        """
        return not self._main or self._records.sync(seconds)

    def flush(self, seconds: float = 30.0) -> bool:
        """Waits until the log is written, except to a blocked terminal.

        Args: seconds: the timeout.
        Returns: False: the disk is blocked.
        """
        is_written = self._files.flush(seconds)
        TERMINAL.flush()
        return is_written

    def rollback(self, step: int) -> None:
        """Drops records and points after a step, because they are made again."""
        if not self._main:
            return
        self._records.roll_back(step)
        self.writers.rollback(step, partial(write_if_held, self._output_dir))

    def forget(self, step: int, key: str) -> None:
        """Drops the records of a step that have this key, because the run makes them again."""
        if not self._main:
            return

        self._records.forget(step, key)

    def images(self, tag: str, step: int, images_HW3: list[np.ndarray]) -> None:
        """Adds uint8 RGB images under `tag/0`, `tag/1`, ..."""
        self.writers.images(tag, step, images_HW3)

    def spending(self, part: str, step: int) -> AbstractContextManager[None]:
        """Returns a context that times an evaluation, a save or plots; see `ETA.spending`."""
        if not self._main:
            return nullcontext()
        if part == EVALUATION:
            self.busy("evaluating")
        return self.eta.spending(part, step)

    def busy(self, work: str, done: int = 0, total: int = 0) -> None:
        """Shows on the bar the work that the run does between steps.

        Args: done, total: parts of the work; 0 of 0: unknown, the bar does not move.
        """
        if self._bar is not None:
            self._bar.show(work, done, total)

    def progress(self, step: int, fields: dict[str, str], waited: float = 0.0) -> None:
        """Shows the progress of the run; call it after every optimizer step.

        A terminal shows a moving bar.  train.log gets a line every `log.every_steps` steps and at
        the last; a console without a terminal gets that line as well after a minute of silence.

        Args:
            step: optimizer steps since the start of the run (including those before a resume).
            fields: values to show beside it, such as {"loss": "2.31", "img/s": "41.8"}.
            waited: seconds that the step waited for images.
        """
        json_lines.note_step(step)
        if not self._main:
            return
        self._end_opening()
        self._warn_of_failures()
        self.eta.record_step(step, waited)
        time_left = self.time_left(step)
        shown = {**fields, **({"ETA": time_left} if time_left else {})}
        values = "  ".join(f"{name} {value}" for name, value in shown.items())
        epoch = math.ceil(step / self._steps_per_epoch)
        epochs = math.ceil(self._total_steps / self._steps_per_epoch)
        if step % self._every_steps == 0 or step == self._total_steps:
            text = f"epoch {epoch}/{epochs}  step {step}/{self._total_steps}  {values}"
            is_silent = time.monotonic() - self._last_line_at >= _SILENT_SECONDS
            if not json_lines.is_json() and (self._console.is_terminal or not is_silent):
                self.detail(text)
            else:
                self._last_line_at = time.monotonic()
                _LOGGER.info(text)
        if self._bar is not None:
            self._bar.move(step, f"{epoch}/{epochs}  {values}")

    def time_left(self, step: int) -> str:
        """Returns the time left as `4m 07s`; "": unknown, or the run is over."""
        seconds = self.eta.seconds_left(step) if self._main and step < self._total_steps else None
        return "" if seconds is None else duration(seconds)

    def closing_seconds(self) -> float:
        """Returns the seconds that a step, an evaluation and a save may take."""
        return self.eta.closing_seconds()

    def run_summary(
        self, outcome: Sequence[str] = (), following: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Logs the final table: results, files, and where the time went.

        Args:
            outcome: lines about the results of the run.
            following: next steps for the user: (purpose, command to copy) pairs.
        """
        if self._main:
            if self._bar is not None:
                self._bar.end()
            self.flush()
            rows = run_summary(self._output_dir, self.eta.seconds())
            self.table(f"{self._output_dir}", rows, on_console=True)
            for line in outcome:
                _LOGGER.info(line, extra=BARE)
            for name, command in (*commands(self._output_dir), *following):
                # A table would wrap the commands, so that they could not be copied.
                self.headline(name, command)

    def limit_close(self, seconds: float = 0.0) -> None:
        """Limits how long `close` waits after a request to stop."""
        self._close_seconds = seconds + _STOPPED_SECONDS
        for tracker in self._trackers:
            tracker.limit_close(seconds)

    def close(self) -> None:
        """Closes the files and restores the logger; a second call does nothing."""
        self._end_opening()
        if self._bar is not None:
            self._bar.end()
        if self._is_open:
            self.writers.close()
            written = self._files.flush(self._close_seconds)
            self._report_lost(written)
            self.flush(_STOPPED_SECONDS if written else 0.0)
            _LOGGER.handlers = self._handlers_before
            self._is_open = False
        sys.stdout, sys.stderr = self._streams_before
        _LOGGER.setLevel(self._level_before)
        _LOGGER.propagate = self._propagate_before

    def _warn_of_failures(self) -> None:
        """Warns of failed writes, once per kind."""
        while self._files.failures:
            name, error = self._files.failures.popleft()
            # That error ends the run, which reports it.
            if getattr(error, "code", "") != "output_dir_lost":
                self.warn_once(name, error)
        problem: object = self._screen.problem
        if problem is None and TERMINAL.dropped["terminal"] > self._dropped_before:
            problem = "it is blocked"
        if problem is not None and "stdout" not in self._warned:
            self._warned.add("stdout")
            self.warning(f"cannot write to stdout; lines only go to train.log: {problem}")

    def _report_lost(self, written: bool) -> None:
        """Reports the lines and records that were lost, at the end of the run.

        Args: written: whether the files are complete.
        """
        # Only now may a broken pipe be noticed.
        TERMINAL.flush()
        self._warn_of_failures()
        lost = TERMINAL.dropped["terminal"] - self._dropped_before
        if lost and self._screen.problem is None:
            self.warning(f"the terminal was blocked for a while and missed {lost} of these lines")
        if self._files.dropped:
            names = ", ".join(f"{count} of {name}" for name, count in self._files.dropped.items())
            self.warning(f"the disk was blocked for a while, and these were dropped: {names}")
        if not written:
            say(
                f"{self._output_dir}: the disk is blocked; the last {self._files.waiting} lines "
                "and records of this run are lost"
            )

    def _replace_streams(self) -> None:
        """Replaces stdout and stderr, so that plain prints do not block either."""
        sys.stdout, sys.stderr = cast(TextIO, self._screen), cast(TextIO, Screen(sys.stderr))

    def _open_handlers(self, early: "EarlyLog | None") -> None:
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.propagate = False
        self._replace_streams()
        self._to_console = ConsoleHandler(self._console)
        if early is not None:
            self._to_console.opening = early.opening
        to_file = LogFileHandler(self._output_dir / "train.log", self._files)
        for record in early.records if early is not None else ():
            to_file.handle(record)
        _LOGGER.handlers = [self._to_console, to_file]
        self._is_open = True

    def _end_opening(self) -> None:
        """Ends the limit of `Opening` at the first step."""
        if not self._is_open or self._to_console.opening is None:
            return
        opening, self._to_console.opening = self._to_console.opening, None
        if withheld := opening.describe_withheld():
            text = f"{withheld}: see {self._output_dir / 'train.log'}"
            style = "yellow" if opening.warnings else ""
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _start_tracker(self, target: str, run: TrackedRun) -> TrackerProcess:
        """Starts the process of a tracker."""
        self._trackers.append(process := TrackerProcess(target, run))
        return process
