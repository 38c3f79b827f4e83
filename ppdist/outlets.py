"""Where the lines of a run go: the console and train.log.  Neither ever stops the run.

Whoever reads stdout may go away (`| head`, a closed terminal), and the disk may be full or gone.
A line that cannot be written is lost, and the other outlet says so once.
"""

import contextlib
import io
import logging
import logging.handlers
import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console

from ppdist.errors import printable


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
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

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


class ConsoleHandler(logging.Handler):
    """Prints through rich, above a moving bar if there is one."""

    def __init__(self, console: Console, screen: Screen) -> None:
        """Args: screen: the file of the console."""
        super().__init__()
        self._console, self._screen = console, screen
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        style = "" if record.levelno < logging.WARNING else "yellow"
        self._console.print(
            f"{clock} {mark}{printable(record.getMessage())}",
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
        self.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # its folder is gone
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if self._said:
            return
        self._said = True
        problem = sys.exc_info()[1]
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be gone, too
            print(f"{self.baseFilename} cannot be written: {problem}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # said before; its last lines have no room
            super().close()


class _Lines(logging.Formatter):
    """Without what moves a terminal's cursor when somebody reads the file there."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
