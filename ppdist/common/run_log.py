"""What a run says while it works: console, train.log, metrics.jsonl, metric writers.

    EarlyLog   the console until the folder of the run is its own
    RunLog     all of it; who trains, evaluates or saves calls this

metrics.jsonl is the truth; the others are views of it.  Only rank 0 writes, in threads: no step
waits for a terminal or a disk.  Nothing here ever stops a training: a full disk or a closed
terminal costs lines, with one warning.
"""

import io
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ppdist.common.errors import ConfigError
from ppdist.common.eta import ETA, EVALUATION, duration
from ppdist.common.files import replace_file, sync_path
from ppdist.common.process import BARE, DETAIL, NOTE, log_line, printable, say
from ppdist.common.records import commands, read_metrics, run_summary
from ppdist.common.trackers import TrackedRun, TrackerProcess, require_tracker
from ppdist.common.writer_thread import TERMINAL, Screen, WriterThread
from ppdist.common.writers import (
    MetricWriters,
    TensorBoardWriter,
    VisualDLWriter,
    append,
    require_tensorboardx,
)

_LOGGER = logging.getLogger("ppdist")
_FILE_WIDTH = 120  # columns of a table in train.log
_PLAIN_WIDTH = 80  # of the console where there is no terminal
_REFRESH_SECONDS = 0.2
_SILENT_SECONDS = 60.0  # without a terminal: a step is told where nothing was for so long
_OPENING_LINES = 6  # of warnings on the console before the first step
_WARNING_LINES = 2  # of each
_CLOSE_SECONDS, _HURRIED_SECONDS = 90.0, 10.0  # for files and trackers at the end
_HEADER_EVERY = 20  # rows of a table that grows


class RunLog:
    """The log of one run; on other ranks than 0 every method does nothing.

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
        resume_step: int | None,
        *,
        every_steps: int = 20,
        visualdl: bool = True,
        tensorboard: bool = False,
        trackers: Sequence[tuple[str, Any]] = (),
        histograms: bool = False,
        early: "EarlyLog | None" = None,
    ) -> None:
        """Opens the files of the run.

        Args:
            output_dir: gets train.log, metrics.jsonl, vdl/.
            main: True on rank 0.
            total_steps: optimizer steps of the whole run.
            steps_per_epoch: optimizer steps.
            resume_step: the step that the restored checkpoint had finished.  Lines and points
                after it are dropped, because they will be made again.  None starts anew.
            every_steps: between two lines of progress.
            visualdl, tensorboard: write for them, too.
            trackers: (`package.module:Class` of its writer, its section) of each tracker.
            histograms: those who evaluate also write how weights and gradients are spread.
            early: what was said before: train.log has it, too, and until the first step the
                console is as short.
        Raises: ConfigError: output_dir cannot be made or written, or a package is missing.
        """
        self._main = main
        self._output_dir = output_dir
        self.histograms_wanted = main and histograms
        self._total_steps = total_steps
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._every_steps = every_steps
        self._is_open = False
        self._handlers_before = [*_LOGGER.handlers]
        self._level_before = _LOGGER.level
        self._propagate_before = _LOGGER.propagate
        self._eta = ETA(total_steps, steps_per_epoch)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._refreshed = 0.0
        self._rows = 0  # of the table that grows
        self._header = ""  # its
        self._warned: set[str] = set()
        self._files = WriterThread()
        self._close_seconds = _CLOSE_SECONDS
        self.writers = MetricWriters(self._files)  # of other ranks than 0 empty
        self._trackers: list[TrackerProcess] = []  # of them
        self._streams_before = sys.stdout, sys.stderr
        self._screen = Screen(sys.stdout)
        if not main:
            _LOGGER.setLevel(logging.WARNING)
            self._take_streams()
            return
        self._console = _console_on(self._screen)
        self._dropped_before = TERMINAL.dropped["terminal"]
        self._told = time.monotonic()  # when a console without a terminal had its last line
        self._metrics_path = output_dir / "metrics.jsonl"
        if tensorboard:
            require_tensorboardx()
        for _, tracker in trackers:
            require_tracker(tracker.name)
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            kept = _begin_metrics(self._metrics_path, resume_step)
        except OSError as error:
            raise ConfigError(
                f"output_dir: {output_dir} cannot be written: {error}",
                code="folder_unwritable",
            ) from error
        self.recorded_step = max((each["step"] for each in kept if "loss" in each), default=0)
        for record in kept:
            if record.get("eval_seconds") is not None:
                self._eta.remember(record["eval_seconds"])
        self._open_handlers(early)
        if visualdl:
            vdl = partial(VisualDLWriter, output_dir / "vdl", output_dir.name, resume_step)
            self.writers.open("VisualDL", vdl)
        if tensorboard:
            folder = output_dir / "tensorboard"
            self.writers.open("TensorBoard", partial(TensorBoardWriter, folder, resume_step))
        for target, tracker in trackers:
            self.writers.open(
                tracker.name, partial(self._start_tracker, target, tracker, resume_step)
            )

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def info(self, message: str) -> None:
        """One line to console and train.log."""
        if self._main:
            _LOGGER.info(message)

    def warning(self, message: str) -> None:
        """Like `info`, marked as a warning."""
        if self._main:
            _LOGGER.warning(message)

    def detail(self, message: str) -> None:
        """Like `info`, but to train.log only."""
        if self._main:
            _LOGGER.info(message, extra=DETAIL)

    def note(self, message: str) -> None:
        """Like `info`, but shortened on the console before the first step, as warnings are."""
        if self._main:
            _LOGGER.info(message, extra=NOTE)

    def headline(self, name: str, text: str) -> None:
        """One of the few lines that describe the run at its start."""
        if self._main:
            _LOGGER.info(f"{name:10}{text}", extra=BARE)

    def row(self, header: str, row: str) -> None:
        """A row of a table that grows with the run; repeats the header now and then."""
        if not self._main:
            return
        if header != self._header or self._rows % _HEADER_EVERY == 0:
            self._header, self._rows = header, 0
            _LOGGER.info(header, extra=BARE)
        self._rows += 1
        self._told = time.monotonic()
        _LOGGER.info(row, extra=BARE)

    def warn_once(self, what: str, error: Exception) -> None:
        """For what is written besides, and may fail each time."""
        if what not in self._warned:
            self._warned.add(what)
            said = f"{type(error).__name__}: {error}"
            self.warning(f"{what} cannot be written, continuing without it: {said}")

    def put(self, name: str, write: Callable[[], object], size: int = 0) -> None:
        """Writes another file of the run beside its steps; a failure is warned of once.

        Args: size: bytes that wait with it; what has any, such as a picture, may be dropped.
        """
        if self._main:
            self._files.put(name, write, size, may_drop=size > 0)

    def table(
        self, title: str, rows: Sequence[tuple[str, str, str]], on_console: bool = False
    ) -> None:
        """A table of (what, value, why) to train.log, and to the console where asked."""
        if not self._main:
            return
        table = Table("", "", "", title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*map(escape, row))
        plain = Console(file=io.StringIO(), width=_FILE_WIDTH, force_jupyter=False)
        plain.print(table)
        if on_console:
            self._console.print(table)
        self.detail("\n" + plain.file.getvalue().rstrip())  # type: ignore[attr-defined]

    def metrics(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl; the writers get its numbers.

        Args:
            record: flat; `step` is required, numbers go to the writers, too, other values stay
                in the line.  `time` (seconds since 1970) is added.  A number that is not finite is
                written as null, because JSON has no other way.
        """
        if not self._main:
            return
        self._tell_failures()
        record = {"time": round(time.time(), 3), **record}
        line = json.dumps({key: _jsonable(value) for key, value in record.items()}) + "\n"
        write = partial(append, self._metrics_path, line.encode())
        self._files.put("metrics.jsonl", write, len(line))
        self.writers.metrics(record)

    def sync(self, seconds: float = 30.0) -> bool:
        """Waits until the records so far are on the disk itself, for a checkpoint that follows.

        May be called from any thread.
        Args: seconds: the longest wait.
        Returns: False: the disk refused, or did not take them in time.
        """
        if not self._main:
            return True
        synced = []

        def sync() -> None:
            sync_path(self._metrics_path)
            sync_path(self._output_dir)  # where the name of a new file stands
            synced.append(True)

        self._files.put("metrics.jsonl", sync)
        return self._files.flush(seconds) and bool(synced)

    def flush(self, seconds: float = 30.0) -> bool:
        """Waits until all so far is in its files, and on the terminal where that takes it.

        Args: seconds: the longest wait.
        Returns: False: the disk takes nothing.
        """
        written = self._files.flush(seconds)
        TERMINAL.flush()
        return written

    def rollback(self, step: int) -> None:
        """Drops lines of metrics.jsonl and points after a step, because they are made again."""
        if not self._main:
            return
        self._files.put("metrics.jsonl", partial(_begin_metrics, self._metrics_path, step))
        self.writers.rollback(step)

    def images(self, tag: str, step: int, images_HW3: list[np.ndarray]) -> None:
        """Adds uint8 RGB images to the pages under `tag/0`, `tag/1`, ..."""
        self.writers.images(tag, step, images_HW3)

    def expect(
        self, evaluate_every: int, save_every: int, evaluation_images: int, images_per_step: int
    ) -> None:
        """What the run will spend its time on; see `ETA.expect`."""
        self._eta.expect(evaluate_every, save_every, evaluation_images, images_per_step)

    def spending(self, part: str, step: int) -> AbstractContextManager[None]:
        """Around an evaluation or a save between two steps; see `ETA.spending`."""
        if not self._main:
            return nullcontext()
        if part == EVALUATION:
            self.busy("evaluating")
        return self._eta.spending(part, step)

    def busy(self, what: str, done: int = 0, total: int = 0) -> None:
        """The bar says what a run does between or after its steps; without one nobody does.

        Args: done, total: parts of it; 0 of 0: not known, the bar stands where it is.
        """
        if self._bar is None or TERMINAL.waiting:
            return
        if total:
            self._bar.update(self._task, completed=done, total=total)
        self._bar.update(self._task, description=what, refresh=True)

    def progress(self, step: int, fields: dict[str, str], waited: float = 0.0) -> None:
        """Shows how far the run is; call it after every optimizer step.

        On a terminal a bar moves.  In train.log a line appears every `log.every_steps` steps and
        at the last; without a terminal also there, where it was silent for a minute.

        Args:
            step: optimizer steps done since the start of the run (also before a resume).
            fields: what to show beside it, such as {"loss": "2.31", "img/s": "41.8"}.
            waited: seconds of the step in which there were no images.
        """
        if not self._main:
            return
        self._end_opening()
        self._tell_failures()
        self._eta.stepped(step, waited)
        left = self.time_left(step)
        told = {**fields, **({"ETA": left} if left else {})}
        values = "  ".join(f"{name} {value}" for name, value in told.items())
        epoch = math.ceil(step / self._steps_per_epoch)
        epochs = math.ceil(self._total_steps / self._steps_per_epoch)
        if step % self._every_steps == 0 or step == self._total_steps:
            text = f"epoch {epoch}/{epochs}  step {step}/{self._total_steps}  {values}"
            if self._console.is_terminal or time.monotonic() - self._told < _SILENT_SECONDS:
                self.detail(text)
            else:
                self._told = time.monotonic()
                _LOGGER.info(text)
        if self._console.is_terminal:
            self._move_bar(step, f"{epoch}/{epochs}  {values}")

    def time_left(self, step: int) -> str:
        """`4m 07s`; "": it cannot be known yet, or the run is over."""
        left = self._eta.left(step) if self._main and step < self._total_steps else None
        return "" if left is None else duration(left)

    def closing_seconds(self) -> float:
        """What a step, an evaluation and a save may take now, on rank 0."""
        return self._eta.closing()

    def run_summary(self, outcome: Sequence[str] = ()) -> None:
        """The table at the end: how it went, where everything is, where the time went.

        Args: outcome: lines about what the run learned.
        """
        if self._main:
            self._end_bar()
            self.flush()
            rows = run_summary(self._output_dir, self._eta.seconds())
            self.table(f"{self._output_dir}", rows, on_console=True)
            for line in outcome:
                _LOGGER.info(line, extra=BARE)
            for command in commands(self._output_dir):  # a table would break them
                self.info(f"look at it: {command}")

    def hurry(self, seconds: float = 0.0) -> None:
        """Caps how long `close` waits: who stopped the run does not."""
        self._close_seconds = seconds + _HURRIED_SECONDS
        for tracker in self._trackers:
            tracker.hurry(seconds)

    def close(self) -> None:
        """Closes the files and gives the logger back as it was; the second call does nothing."""
        self._end_opening()
        self._end_bar()
        if self._is_open:
            self.writers.close()
            written = self._files.flush(self._close_seconds)
            self._tell_lost(written)
            self.flush(_HURRIED_SECONDS if written else 0.0)
            _LOGGER.handlers = self._handlers_before
            self._is_open = False
        sys.stdout, sys.stderr = self._streams_before
        _LOGGER.setLevel(self._level_before)
        _LOGGER.propagate = self._propagate_before

    def _tell_failures(self) -> None:
        """Warns of what could not be written, once of each kind."""
        while self._files.failures:
            self.warn_once(*self._files.failures.popleft())
        problem: object = self._screen.problem
        if problem is None and TERMINAL.dropped["terminal"] > self._dropped_before:
            problem = "it takes nothing"
        if problem is not None and "stdout" not in self._warned:
            self._warned.add("stdout")
            self.warning(f"stdout cannot be written, lines go to train.log alone: {problem}")

    def _tell_lost(self, written: bool) -> None:
        """What is missing at the end, and where.  Args: written: all that was to be."""
        self._tell_failures()
        lost = TERMINAL.dropped["terminal"] - self._dropped_before
        if lost and self._screen.problem is None:
            self.warning(f"the terminal took nothing for a while and lacks {lost} lines of this")
        if self._files.dropped:
            names = ", ".join(f"{count} of {name}" for name, count in self._files.dropped.items())
            self.warning(f"the disk took nothing for a while, and these were dropped: {names}")
        if not written:
            say(
                f"{self._output_dir}: the disk takes nothing; the last {self._files.waiting} lines "
                "and records of this run are not written"
            )

    def _take_streams(self) -> None:
        """Whoever prints without asking the log does not wait for a terminal, either."""
        sys.stdout, sys.stderr = cast(TextIO, self._screen), cast(TextIO, Screen(sys.stderr))

    def _open_handlers(self, early: "EarlyLog | None") -> None:
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.propagate = False
        self._take_streams()
        self._to_console = ConsoleHandler(self._console)
        if early is not None:
            self._to_console.opening = early.opening
        to_file = LogFileHandler(self._output_dir / "train.log", self._files)
        for record in early.records if early is not None else ():
            to_file.handle(record)
        _LOGGER.handlers = [self._to_console, to_file]
        self._is_open = True

    def _end_opening(self) -> None:
        """Called at the first step: from now on the console shows every message in full."""
        if not self._is_open or self._to_console.opening is None:
            return
        withheld, self._to_console.opening = self._to_console.opening.withheld, None
        if withheld:
            where = self._output_dir / "train.log"
            text = f"{withheld} more warning{'s' * (withheld > 1)}; full text: {where}"
            self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _start_tracker(self, target: str, config: Any, resume_step: int | None) -> TrackerProcess:
        folder = self._output_dir / "trackers" / config.name
        run = TrackedRun(config, folder, config.run or self._output_dir.name, resume_step)
        self._trackers.append(process := TrackerProcess(target, run))
        return process

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _move_bar(self, step: int, text: str) -> None:
        if TERMINAL.waiting:  # it is behind, so what it would get is old
            return
        now = time.monotonic()
        if self._bar is None:
            self._bar = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
                auto_refresh=False,  # no thread: DataLoader workers are forked beside us
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total_steps)
        if now - self._refreshed >= _REFRESH_SECONDS or step == self._total_steps:
            self._refreshed = now
            total = self._total_steps
            self._bar.update(
                self._task, completed=step, total=total, description=text, refresh=True
            )


def _begin_metrics(path: Path, resume_step: int | None) -> list[dict[str, Any]]:
    """Returns: the records that stay."""
    if resume_step is None:
        path.unlink(missing_ok=True)
        return []
    if not path.exists():
        return []
    kept = [record for record in read_metrics(path) if record.get("step", 0) <= resume_step]
    replace_file(path, "".join(json.dumps(record) + "\n" for record in kept).encode(), sync=True)
    return kept


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- console and train.log ------------------------------------------------------------------------


def _console_on(screen: Screen) -> Console:
    """Plain text in Jupyter, too, which shows rich's tables as HTML and each move of a bar anew."""
    is_terminal = screen.isatty()  # FORCE_COLOR, which Jupyter sets, makes rich think so anywhere
    width = None if is_terminal else _PLAIN_WIDTH
    return Console(
        file=cast(TextIO, screen), width=width, force_terminal=is_terminal, force_jupyter=False
    )


class Opening:
    """Limits warnings on the console before the first step; train.log has them in full."""

    def __init__(self, width: int) -> None:
        """Args: width: columns of the console."""
        self._width = width
        self._left = _OPENING_LINES
        self.withheld = 0

    def short(self, text: str) -> str:
        """The beginning of a message; "": no room is left."""
        most = _WARNING_LINES * self._width
        text = " ".join(text.split())
        if len(text) > most:
            text = f"{text[: most - 4]} ..."
        lines = math.ceil(len(text) / self._width)
        if lines > self._left:
            self.withheld += 1
            return ""
        self._left -= lines
        return text


class EarlyLog:
    """Rank 0's log until the run owns its output folder.

    The console shows messages meanwhile; `RunLog` copies them into train.log.  If an error ends the
    run before there is a train.log, warnings that were cut are printed in full.
    """

    def __init__(self, main: bool) -> None:
        """Args: main: True on rank 0; on others this does nothing."""
        self._main = main
        console = _console_on(Screen(sys.stdout))
        self._to_console = ConsoleHandler(console)
        self._keeper = BufferingHandler(sys.maxsize)
        self.records: list[logging.LogRecord] = self._keeper.buffer
        self.opening = self._to_console.opening = Opening(console.width)

    def __enter__(self) -> "EarlyLog":
        if self._main:
            self._before = [*_LOGGER.handlers], _LOGGER.level, _LOGGER.propagate
            _LOGGER.handlers, _LOGGER.propagate = [self._to_console, self._keeper], False
            _LOGGER.setLevel(logging.INFO)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._main:
            return
        _LOGGER.handlers, level, _LOGGER.propagate = self._before
        _LOGGER.setLevel(level)
        for record in self.records if kind else ():
            if getattr(record, "cut", False):
                say(log_line(record))


class ConsoleHandler(logging.Handler):
    """Prints through rich, above a moving bar if there is one.

    opening: while it is there, warnings are short.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.opening: Opening | None = None
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "detail", False):
            return
        warns = record.levelno >= logging.WARNING
        text = log_line(record)
        if self.opening is not None and (warns or getattr(record, "note", False)):
            short = self.opening.short(text)
            record.cut = short != text
            text = short
        if not text:
            return
        style = "yellow" if warns else ""
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class LogFileHandler(logging.Handler):
    """Hands lines of train.log to the thread that writes them."""

    def __init__(self, path: Path, files: WriterThread) -> None:
        super().__init__()
        self._path, self._files = path, files
        self.setFormatter(
            _PrintableFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
        )

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        write = partial(append, self._path, line)
        self._files.put(self._path.name, write, len(line), may_drop=True)


class _PrintableFormatter(logging.Formatter):
    """Without what moves a terminal's cursor when somebody reads the file there."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
