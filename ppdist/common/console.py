"""Output of a run to people: the console with its moving bar, and train.log.

    EarlyLog     the console until the run owns its output folder
    ProgressBar  the progress of the run, on a terminal

Lines are written in threads: no step waits for a terminal or a disk.
"""

import logging
import math
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ppdist.common import json_lines
from ppdist.common.files import append, write_if_held
from ppdist.common.process import log_line, printable, say
from ppdist.runtime.writer_thread import TERMINAL, Screen, WriterThread

_LOGGER = logging.getLogger("ppdist")
_PLAIN_WIDTH = 80  # of the console where there is no terminal
_REFRESH_SECONDS = 0.2
_OPENING_LINES = 6  # lines of all warnings on the console before the first step
_WARNING_LINES = 2  # lines per warning


def console_on(screen: Screen) -> Console:
    """Creates a plain-text console, also in Jupyter.

    In Jupyter, rich would draw tables as HTML and print the bar again at each update.
    """
    # rich itself would trust FORCE_COLOR, which Jupyter sets.
    is_terminal = screen.isatty()
    width = None if is_terminal else _PLAIN_WIDTH
    return Console(
        file=cast(TextIO, screen), width=width, force_terminal=is_terminal, force_jupyter=False
    )


class ProgressBar:
    """The progress bar of a run, for a console on a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        """Draws nothing yet.

        Args: total: optimizer steps of the run.
        """
        self._console, self._total = console, total
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._refreshed = 0.0

    def move(self, step: int, text: str) -> None:
        """Shows the progress of the run."""
        # The terminal is behind, so an update would be stale when it appears.
        if TERMINAL.waiting:
            return
        now = time.monotonic()
        if self._bar is None:
            self._bar = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
                auto_refresh=False,  # no thread: DataLoader workers are forked from this process
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        if now - self._refreshed >= _REFRESH_SECONDS or step == self._total:
            self._refreshed = now
            total = self._total
            self._bar.update(
                self._task, completed=step, total=total, description=text, refresh=True
            )

    def show(self, work: str, done: int = 0, total: int = 0) -> None:
        """Shows work between steps, such as an evaluation; 0 of 0: the bar does not move."""
        if self._bar is None or TERMINAL.waiting:
            return
        if total:
            self._bar.update(self._task, completed=done, total=total)
        self._bar.update(self._task, description=work, refresh=True)

    def end(self) -> None:
        """Removes the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@dataclass
class Opening:
    """Limits the lines of warnings on the console before the first step.

    Attributes:
        width: columns of the console.
        left: lines that may still be shown.
        warnings, notes: how many of each were not shown.
    """

    width: int
    left: int = _OPENING_LINES
    warnings: int = 0
    notes: int = 0

    def shorten(self, text: str, is_warning: bool = True) -> str:
        """Shortens a message; returns "" if it takes more lines than are left."""
        limit = _WARNING_LINES * self.width
        text = " ".join(text.split())
        if len(text) > limit:
            text = shorten_words(text, limit)
        lines = math.ceil(len(text) / self.width)
        if lines > self.left:
            if is_warning:
                self.warnings += 1
            else:
                self.notes += 1
            return ""
        self.left -= lines
        return text

    def describe_withheld(self) -> str:
        """Describes what was not shown: `2 more warnings, 3 notes`; "": nothing."""
        counts = {"more warning": self.warnings, "note": self.notes}
        return ", ".join(
            f"{number} {noun}{'s' * (number > 1)}" for noun, number in counts.items() if number
        )


def shorten_words(text: str, limit: int) -> str:
    """Shortens a message at a word boundary, but keeps the page or command at its end."""
    link = re.search(r" (`[^`]+`|\S*/\S+)$", text)
    tail = " ..." + (link[0] if link and len(link[0]) < limit // 2 else "")
    head = text[: limit - len(tail) + 1]
    return f"{(head.rpartition(' ')[0] or head[:-1]).rstrip(',;:')}{tail}"


class EarlyLog:
    """Rank 0's log until the run owns its output folder.

    The console shows messages meanwhile; `RunLog` copies them into train.log.  If an error ends the
    run before that, warnings that were shortened are printed in full.
    """

    def __init__(self, main: bool) -> None:
        """Opens the console.

        Args: main: True on rank 0; on other ranks the log does nothing.
        """
        self._main = main
        console = console_on(Screen(sys.stdout))
        self._to_console = ConsoleHandler(console)
        self._buffer = BufferingHandler(sys.maxsize)
        self.records: list[logging.LogRecord] = self._buffer.buffer
        self.opening = self._to_console.opening = Opening(console.width)

    def __enter__(self) -> "EarlyLog":
        if self._main:
            self._original = [*_LOGGER.handlers], _LOGGER.level, _LOGGER.propagate
            _LOGGER.handlers, _LOGGER.propagate = [self._to_console, self._buffer], False
            _LOGGER.setLevel(logging.INFO)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._main:
            return
        _LOGGER.handlers, level, _LOGGER.propagate = self._original
        _LOGGER.setLevel(level)
        for record in self.records if kind else ():
            if getattr(record, "cut", False):
                say(log_line(record))


class ConsoleHandler(logging.Handler):
    """A log handler that prints through rich, above a moving bar if there is one.

    Attributes: opening: while it is set, warnings are shortened.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.opening: Opening | None = None
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "detail", False):
            return
        is_warning = record.levelno >= logging.WARNING
        text = log_line(record)
        if json_lines.is_json():
            self._console.file.write(f"{text}\n")  # rich would wrap it
            return
        is_limited = is_warning or getattr(record, "note", False)
        if self.opening is not None and is_limited and not getattr(record, "whole", False):
            shortened = self.opening.shorten(text, is_warning)
            record.cut = shortened != text
            text = shortened
        if not text:
            return
        style = "yellow" if is_warning else ""
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class LogFileHandler(logging.Handler):
    """A log handler that hands lines of train.log to the thread that writes them."""

    def __init__(self, path: Path, files: WriterThread) -> None:
        super().__init__()
        self._path, self._files = path, files
        line = "%(asctime)s %(levelname)s %(message)s"
        self.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        # Control characters would move the cursor of a reader's terminal.
        line = f"{printable(self.format(record))}\n".encode("utf-8", "backslashreplace")
        write = partial(write_if_held, self._path.parent, partial(append, self._path, line))
        self._files.put(self._path.name, write, len(line), may_drop=True)
