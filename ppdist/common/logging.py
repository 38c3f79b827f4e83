"""What a run says while it works: console, train.log, metrics.jsonl, metric writers.

    EarlyLog                     the console until the folder of the run is its own
    RunLog                       all of it; who trains, evaluates or saves calls this
    ETA                          how long the rest of the run takes
    read_metrics, MetricRecords  metrics.jsonl again, by kind of record
    run_summary                  the table at the end

metrics.jsonl is the truth; the others are views of it.  Only rank 0 writes.  Nothing here ever
stops a training: a full disk or a closed terminal costs lines, with one warning.
"""

import io
import json
import logging
import logging.handlers
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO, cast

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ppdist.common.errors import ConfigError
from ppdist.common.files import replace_file
from ppdist.common.process import BARE, DETAIL, NOTE, log_line, printable, say
from ppdist.common.trackers import TrackedRun, TrackerProcess, require_tracker
from ppdist.common.writers import (
    MetricWriters,
    TensorBoardWriter,
    VisualDLWriter,
    append_whole,
    require_tensorboardx,
)

_LOGGER = logging.getLogger("ppdist")
_FILE_WIDTH = 120  # columns of a table in train.log
_PLAIN_WIDTH = 80  # of the console where there is no terminal
_REFRESH_SECONDS = 0.2
_SILENT_SECONDS = 60.0  # without a terminal: a step is told where nothing was for so long
_OPENING_LINES = 6  # of warnings on the console before the first step
_WARNING_LINES = 2  # of each
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
        self._handlers: list[logging.Handler] = []
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
        self.writers = MetricWriters(self.warn_once)  # of other ranks than 0 empty
        self._trackers: list[TrackerProcess] = []  # of them
        if not main:
            _LOGGER.setLevel(logging.WARNING)
            return
        self._stdout_before, self._screen = sys.stdout, Screen(sys.stdout)
        self._console = _console_on(self._screen)
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
        for record in kept:
            if record.get("eval_seconds") is not None:
                self._eta.remember(record["eval_seconds"])
        self._open_handlers(early)
        self._open_writers(visualdl, tensorboard, resume_step)
        for target, tracker in trackers:
            self._open_tracker(target, tracker, resume_step)

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
        """One line of metrics.jsonl, on its way to disk at return; the writers get its numbers.

        Args:
            record: flat; `step` is required, numbers go to the writers, too, other values stay
                in the line.  `time` (seconds since 1970) is added.  A number that is not finite is
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
        self.writers.metrics(record)

    def rollback(self, step: int) -> None:
        """Drops lines of metrics.jsonl and points after a step, because they are made again."""
        if not self._main:
            return
        try:
            _begin_metrics(self._metrics_path, step)
        except OSError as error:
            self.warn_once("metrics.jsonl", error)
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
        if self._bar is None:
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
            rows = run_summary(self._output_dir, self._eta.seconds())
            self.table(f"{self._output_dir}", rows, on_console=True)
            for line in outcome:
                _LOGGER.info(line, extra=BARE)
            for command in commands(self._output_dir):  # a table would break them
                self.info(f"look at it: {command}")

    def hurry(self, seconds: float = 0.0) -> None:
        """`close` shall wait for trackers so long at most: who stopped the run does not."""
        for tracker in self._trackers:
            tracker.hurry(seconds)

    def close(self) -> None:
        """Closes the files and gives the logger back as it was; the second call does nothing."""
        self._end_opening()
        self._end_bar()
        self.writers.close()
        if self._handlers:
            sys.stdout, _LOGGER.handlers = self._stdout_before, self._handlers_before
        for handler in self._handlers:
            handler.close()
        self._handlers = []
        _LOGGER.setLevel(self._level_before)
        _LOGGER.propagate = self._propagate_before

    def _open_handlers(self, early: "EarlyLog | None") -> None:
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.propagate, _LOGGER.handlers = False, []
        sys.stdout = self._screen  # also for whoever prints without asking the log
        self._to_console = ConsoleHandler(self._console, self._screen)
        if early is not None:
            self._to_console.opening = early.opening
        self._handlers.append(self._to_console)
        _LOGGER.addHandler(self._to_console)
        try:
            self._handlers.append(LogFileHandler(self._output_dir / "train.log"))
        except OSError as error:
            self.warn_once("train.log", error)
            return
        for record in early.records if early is not None else ():
            self._handlers[1].handle(record)
        _LOGGER.addHandler(self._handlers[1])

    def _end_opening(self) -> None:
        """Called at the first step: from now on the console shows every message in full."""
        if not self._handlers or self._to_console.opening is None:
            return
        withheld, self._to_console.opening = self._to_console.opening.withheld, None
        if withheld:
            where = self._output_dir / "train.log"
            text = f"{withheld} more warning{'s' * (withheld > 1)}; full text: {where}"
            self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _open_writers(self, visualdl: bool, tensorboard: bool, resume_step: int | None) -> None:
        folder = self._output_dir
        if visualdl:
            self.writers.open(
                "VisualDL", lambda: VisualDLWriter(folder / "vdl", folder.name, resume_step)
            )
        if tensorboard:
            self.writers.open(
                "TensorBoard", lambda: TensorBoardWriter(folder / "tensorboard", resume_step)
            )

    def _open_tracker(self, target: str, config: Any, resume_step: int | None) -> None:
        folder = self._output_dir / "trackers" / config.name
        run = TrackedRun(config, folder, config.run or self._output_dir.name, resume_step)

        def start() -> TrackerProcess:
            process = TrackerProcess(target, run)
            self._trackers.append(process)
            return process

        self.writers.open(config.name, start)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _move_bar(self, step: int, text: str) -> None:
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


class Screen(io.TextIOBase):
    """stdout, which falls silent when it cannot be written any more.

    Attributes:
        problem: why it is silent; None while it is not.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Args: stream: None where the process was started without one."""
        self._stream = stream
        self.problem: Exception | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("there is no stdout")
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether a bar can move there; Jupyter says so of a page where none can."""
        stream = self._stream
        if stream is None or stream.closed or type(stream).__module__.startswith("ipykernel"):
            return False
        return stream.isatty()

    def write(self, text: str) -> int:
        if self._stream is None or self.problem is not None:
            return len(text)
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: somebody closed it
            if isinstance(error, UnicodeError):
                raise
            self.problem = error
        return len(text)

    def flush(self) -> None:
        if self._stream is None or self.problem is not None:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self.problem = error


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
        self.records: list[logging.LogRecord] = []
        screen = Screen(sys.stdout)
        console = _console_on(screen)
        self._to_console = ConsoleHandler(console, screen)
        self._keeper = _Keeper(self.records)
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
        for record in filter(self._to_console.was_cut, self.records if kind else ()):
            say(log_line(record))


class _Keeper(logging.Handler):
    """Keeps records."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


class ConsoleHandler(logging.Handler):
    """Prints through rich, above a moving bar if there is one.

    opening: while it is there, warnings are short.
    """

    def __init__(self, console: Console, screen: Screen) -> None:
        """Args: screen: the file of the console."""
        super().__init__()
        self.opening: Opening | None = None
        self._console, self._screen = console, screen
        self._said = False
        self._cut: set[int] = set()  # identities of records

    def was_cut(self, record: logging.LogRecord) -> bool:
        """Whether the console showed only part of a record."""
        return id(record) in self._cut

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "detail", False):
            return
        warns = record.levelno >= logging.WARNING
        text = log_line(record)
        if self.opening is not None and (warns or getattr(record, "note", False)):
            short = self.opening.short(text)
            if short != text:
                self._cut.add(id(record))
            text = short
        if not text:
            return
        style = "yellow" if warns else ""
        self._console.print(
            text,
            style=style,
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        if self._screen.problem is not None and not self._said:
            self._said = True
            logging.getLogger(record.name).warning(
                "stdout cannot be written, lines go to train.log alone: %s", self._screen.problem
            )


class LogFileHandler(logging.handlers.WatchedFileHandler):
    """A file that is made again after it was removed, or says once that it cannot be written."""

    _said = False

    def __init__(self, path: Path) -> None:
        """Raises: OSError: it cannot be opened."""
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(
            _PrintableFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
        )

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # its folder is gone
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if self._said:
            return
        self._said = True
        say(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}")

    def close(self) -> None:
        with suppress(OSError):  # said before; its last lines have no room
            super().close()


class _PrintableFormatter(logging.Formatter):
    """Without what moves a terminal's cursor when somebody reads the file there."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


# --- time left ------------------------------------------------------------------------------------


EVALUATION, SAVING, IMAGES, TRAINING = "evaluation", "saving", "waiting for images", "training"
_KEPT_STEPS = 2000  # steps whose seconds are remembered; the later half counts
_FEWEST_STEPS = 50  # unless the run is younger, so many count
_LAST_PARTS = 3  # evaluations, saves, first steps of epochs: they change as the model learns
_STALL = 10.0  # a step that takes more times the median than this met something that passes
# Until the first evaluation an image of it is taken to cost this part of one of training.  Seen on
# CPUs, YOLOv5 n and s and PP-YOLOE s: 0.2 to 2.4 in the first evaluation (an untrained model scores
# everything everywhere), mostly 0.6 in later ones.
_EVALUATION_COST = 0.5


class ETA:
    """Wall seconds of one process by part, and how long the rest of the run takes.

        left = steps * step + epochs * what their first step takes longer
               + evaluations * evaluation + saves * save          (each of what is still to come)

    Every part is measured as the run goes: an average over everything since the start would be
    wrong until the first evaluation was seen, and again after each.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: clock: seconds from any point in time."""
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._clock = clock
        self._began = clock()
        self._every = {EVALUATION: 0, SAVING: 0}  # optimizer steps; 0: never
        self._evaluation_steps = 0.0  # what one evaluation is taken to cost before it was seen
        self._remembered: float | None = None
        self._seconds: dict[str, float] = {}
        self._within: list[str] = []  # parts that are running, the innermost last
        self._switched = self._began
        self._last: tuple[int, float] | None = None  # the last step, and seconds outside of others
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._first_steps: deque[float] = deque(maxlen=_LAST_PARTS)
        self._parts = {part: deque[float](maxlen=_LAST_PARTS) for part in self._every}
        self._done_at = dict.fromkeys(self._every, 0)  # the step after which it last was done

    def expect(
        self, evaluate_every: int, save_every: int, evaluation_images: int, images_per_step: int
    ) -> None:
        """What comes between steps.

        Args:
            evaluate_every, save_every: optimizer steps; 0: never.  Both also come at the end.
            evaluation_images: in one evaluation.
            images_per_step: of all ranks.
        """
        self._every = {EVALUATION: evaluate_every, SAVING: save_every}
        self._evaluation_steps = _EVALUATION_COST * evaluation_images / max(1, images_per_step)

    def remember(self, evaluation_seconds: float) -> None:
        """What an evaluation took before the run was resumed; it counts until one is seen."""
        self._remembered = evaluation_seconds

    @contextmanager
    def spending(self, part: str, step: int) -> Iterator[None]:
        """Around a part that comes between steps; one may stand within another.

        Args: step: optimizer steps done.
        """
        before = self._book().get(part, 0.0)
        self._within.append(part)
        try:
            yield
        finally:
            seconds = self._book()
            self._within.pop()
            self._parts[part].append(seconds[part] - before)
            self._done_at[part] = step

    def stepped(self, step: int, waited: float) -> None:
        """A step was made.

        Args:
            step: optimizer steps done.
            waited: seconds of it in which there were no images.
        """
        self._book()
        self._seconds[IMAGES] = self._seconds.get(IMAGES, 0.0) + waited
        outside = self._clock() - self._began - sum(map(self._seconds.get, self._every, (0.0, 0.0)))
        if self._last is not None and step == self._last[0] + 1:
            first = (step - 1) % self._steps_per_epoch == 0
            kind = self._first_steps if first and self._steps_per_epoch > 1 else self._steps
            kind.append(outside - self._last[1])
        self._last = step, outside

    def left(self, step: int) -> float | None:
        """Seconds until the end; None: too few steps were made to say.

        Args: step: optimizer steps done.
        """
        if not self._steps:
            return None
        each = self._step_seconds()
        seconds = (self._total_steps - step) * each
        if self._first_steps:
            begun = math.ceil(step / self._steps_per_epoch)
            epochs = math.ceil(self._total_steps / self._steps_per_epoch) - begun
            seconds += epochs * max(0.0, fmean(self._first_steps) - each)
        for part, taken in self._parts.items():
            unseen = self._unseen_evaluation(each) if part == EVALUATION else 0.0
            seconds += self._times(part, step) * (fmean(taken) if taken else unseen)
        return seconds

    def closing(self) -> float:
        """Seconds that a step, an evaluation and a save may take now: the longest of late."""
        each = self._step_seconds() if self._steps else 0.0
        seconds = 2 * each + max(self._parts[SAVING], default=0.0)
        if not self._every[EVALUATION]:
            return seconds
        # A first evaluation takes up to five times of what is guessed, see _EVALUATION_COST.
        unseen = self._remembered or 5 * self._unseen_evaluation(each)
        return seconds + max(self._parts[EVALUATION], default=unseen)

    def seconds(self) -> dict[str, float]:
        """Wall seconds since the start by part; `training` is what no other part took."""
        booked = dict(self._book())
        return {TRAINING: self._clock() - self._began - sum(booked.values()), **booked}

    def _unseen_evaluation(self, step_seconds: float) -> float:
        if self._remembered is not None:
            return self._remembered
        return self._evaluation_steps * step_seconds

    def _step_seconds(self) -> float:
        recent = list(self._steps)[-max(_FEWEST_STEPS, len(self._steps) // 2) :]
        most = _STALL * median(recent)
        return fmean(min(each, most) for each in recent)

    def _times(self, part: str, step: int) -> int:
        """How often a part still comes, at this step included if it was not done yet."""
        every = self._every[part]
        if not every:
            return 0
        since = max(step - 1, self._done_at[part])
        if since >= self._total_steps:
            return 0
        return math.ceil(self._total_steps / every) - since // every

    def _book(self) -> dict[str, float]:
        """Books the seconds since the last time to the part that was running."""
        now = self._clock()
        if self._within:
            part = self._within[-1]
            self._seconds[part] = self._seconds.get(part, 0.0) + now - self._switched
        self._switched = now
        return self._seconds


def duration(seconds: float) -> str:
    """`1d 2h`, `2h 05m`, `4m 07s` or `9s`."""
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"


# --- metrics.jsonl, read again --------------------------------------------------------------------


Record = Mapping[str, Any]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; lines cut short by a crash or a full disk are left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # also of too many digits, and too deep
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


@dataclass
class MetricRecords:
    """metrics.jsonl by kind of record, without what a rollback took back.

    Attributes:
        steps: means over some training steps.
        epochs: means over the steps of each; under `epoch_end`.
        evaluations: of the whole validation set.
        ranks: seconds of each rank over the same steps as in `steps`.
        starts: with what the run derived; more than one after restarts.
        rollbacks: to earlier weights.
        bad_images: how many images were replaced so far.
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
        """Sorts them; those without a step, or of no known kind, are left out.

        A rollback takes back what stands before it and lies beyond its step.
        """
        found = cls()
        for record in records:
            if _is_number(record.get("step")):
                found._take(record)
        return found

    def _take(self, record: Record) -> None:
        if isinstance(record.get("derived"), Mapping):
            self.starts.append(record)
            self.finished = ""
        elif isinstance(record.get("finished"), str):
            self.finished = record["finished"]
        elif _is_number(record.get("returned_from_step")):
            self.rollbacks.append(record)
            for kind in (self.steps, self.epochs, self.evaluations, self.ranks):
                kind[:] = [each for each in kind if each["step"] <= record["step"]]
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
    """(what, value, where or why) from what a run has left; what is not there has no row.

    Args: seconds: wall time of this process by part.
    """
    try:
        records = read_metrics(output_dir / "metrics.jsonl")
    except OSError:
        records = []
    found = MetricRecords.of(records)
    evaluations = {each["step"]: each for each in found.evaluations}
    checkpoints = output_dir / "checkpoints"
    rows = []
    for name in ("best", "last"):
        step = step_of(checkpoints / name)
        if step is not None:
            scores = _scores(evaluations.get(step, {})) or f"step {step}, not evaluated"
            rows.append((name, scores, f"checkpoints/{name}"))
    if len(evaluations) > 1:
        first, *_, last = sorted(evaluations)
        rows.append(("first evaluation", _scores(evaluations[first]), f"step {first} of {last}"))
    losses = [each for each in found.steps if each["loss"] is not None]
    if losses:
        first_loss, last_loss = losses[0], losses[-1]
        change = f"from {first_loss['loss']:.4g} at step {first_loss['step']}"
        rows.append(("training loss", f"{last_loss['loss']:.4g}", change))
    rows += _places(output_dir)
    total = sum(seconds.values())
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{part} {value / max(total, 1e-9):.0%}" for part, value in parts if value)
    rows.append(("time", duration(total), shares))
    return rows


def _scores(record: Mapping[str, Any]) -> str:
    values = [
        f"{name} {record[name]:.4f}" for name in _SUMMARY_SCORES if record.get(name) is not None
    ]
    return "  ".join(values)


def _places(output_dir: Path) -> list[tuple[str, str, str]]:
    candidates = (
        ("plots", "plots", "curves, matrices, worst and best images"),
        ("evaluation", "evaluation.json", "tables and curves of the best"),
        ("every number", "metrics.jsonl", "one JSON object a line"),
        ("this text", "train.log", ""),
    )
    return [(what, name, how) for what, name, how in candidates if (output_dir / name).exists()]


def visualdl_command(folder: Path) -> str:
    """What shows the curves in this folder, in English, and tells nobody."""
    return f"visualdl --logdir {shlex.quote(str(folder))} --language en --disable-telemetry"


def commands(output_dir: Path) -> list[str]:
    """What shows the run, ready to be copied."""
    found = [f"ppdist report {shlex.quote(str(output_dir))}"]
    if (output_dir / "vdl").exists():
        found.append(visualdl_command(output_dir / "vdl"))
    if (output_dir / "tensorboard").exists():
        found.append(f"tensorboard --logdir {shlex.quote(str(output_dir / 'tensorboard'))}")
    return found


def step_of(checkpoint: Path) -> int | None:
    """The step of a checkpoint, or of one that a link names; None: it is none, or not there."""
    try:
        kind, _, step = checkpoint.resolve(strict=True).name.partition("-")
        return int(step) if kind == "step" else None
    except (OSError, ValueError):
        return None
