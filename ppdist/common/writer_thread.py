"""Threads that write, so that nobody waits for a terminal or disk.

    WriterThread   writes what it is given, in order
    Screen         stdout or stderr, written by such a thread
    TERMINAL       the thread of both, in every process

Each run has one for its files.  A terminal has another: one that takes nothing must not keep
records from the disk.
"""

import io
import os
import select
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TextIO

_DROP_BYTES = 64 << 20  # of what waits for a disk; some hundred images
_TERMINAL_BYTES, _TERMINAL_SECONDS = 1 << 20, 2.0


class WriterThread:
    """A thread that does, in order, what may block.

    `put` never waits, and may be called in any thread and inside a signal handler.  What waits is
    bounded: beyond `most_bytes` that which may be dropped is dropped, and counted.  Records never
    are: they are small.  A copy of this process (fork) has no such thread and writes at once, as
    this one does where the system gives it none.

    Attributes:
        dropped: how many were dropped, by their name.
        failures: the name of what failed, and why; for whoever can tell it.
    """

    def __init__(self, most_bytes: int = _DROP_BYTES) -> None:
        self.dropped: Counter[str] = Counter()
        self.failures: deque[tuple[str, Exception]] = deque(maxlen=100)
        self._most_bytes = most_bytes
        self._queue: SimpleQueue[tuple[str, Callable[[], object], int]] = SimpleQueue()
        self._put, self._done = [0, 0], [0, 0]  # how many and how many bytes; one writer each
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._starting = threading.Lock()  # nobody waits for it: a signal may come amid a start

    @property
    def waiting(self) -> int:
        """How many are not written yet."""
        return self._put[0] - self._done[0]

    @property
    def waiting_bytes(self) -> int:
        """Their size."""
        return self._put[1] - self._done[1]

    def put(
        self, name: str, write: Callable[[], object], size: int = 0, *, may_drop: bool = False
    ) -> None:
        """Hands over something to write.

        Args:
            name: of what is written, for warnings.
            write: may block, and raise.
            size: bytes that it keeps in memory.
            may_drop: it is no record.
        """
        if os.getpid() != self._process:
            self._write(name, write)
            return
        if may_drop and self.waiting_bytes + size > self._most_bytes:
            self.dropped[name] += 1
            return
        self._put[0] += 1
        self._put[1] += size
        self._queue.put((name, write, size))
        if self._thread.ident is None and self._starting.acquire(blocking=False):
            try:
                if self._thread.ident is None:
                    self._thread.start()
            except RuntimeError:  # the system has no more threads; or the interpreter ends
                while not self._queue.empty():
                    self._write_next()
            finally:
                self._starting.release()

    def flush(self, seconds: float) -> bool:
        """Waits until everything so far is written, or so long.  Returns: whether it is."""
        if os.getpid() != self._process or self._thread.ident is None:
            return True
        done = threading.Event()
        self.put("", done.set)
        return done.wait(seconds)

    def _run(self) -> None:
        while True:
            self._write_next()

    def _write_next(self) -> None:
        name, write, size = self._queue.get()
        self._write(name, write)
        self._done[0] += 1
        self._done[1] += size

    def _write(self, name: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # the thread must live
            self.failures.append((name, error))


class _Terminal(WriterThread):
    """One that took nothing since somebody waited for it in vain is not waited for again."""

    _stuck_after = -1

    def flush(self, seconds: float = _TERMINAL_SECONDS) -> bool:
        if self._stuck_after == self._done[0]:
            return False
        written = super().flush(seconds)
        self._stuck_after = -1 if written else self._done[0]
        return written


TERMINAL = _Terminal(_TERMINAL_BYTES)


class Screen(io.TextIOBase):
    """stdout or stderr, never waited for; it falls silent when it cannot be written any more.

    A stream that is no file of the system, such as that of a notebook, is written directly.

    Attributes:
        problem: why it is silent; None while it is not.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Args: stream: None where the process was started without one."""
        self._stream = stream
        self.problem: Exception | None = None
        self._handle = None if stream is None else _handle_of(stream)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("there is no such stream")
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether a bar can move there; Jupyter says so of a page where none can."""
        stream = self._stream
        if stream is None or stream.closed or type(stream).__module__.startswith("ipykernel"):
            return False
        return stream.isatty()

    def write(self, text: str) -> int:
        if self._stream is not None and self.problem is None and text:
            if self._handle is None:
                self._write(text)
            else:
                # By the handle: a buffer of Python's that waits would be in the way at the end.
                data = text.encode(self.encoding, "backslashreplace")
                TERMINAL.put("terminal", lambda: self._write_bytes(data), len(data), may_drop=True)
        return len(text)

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: somebody closed it
            self.problem = error

    def _write_bytes(self, data: bytes) -> None:
        assert self._handle is not None
        try:
            while data and self.problem is None:
                try:
                    data = data[os.write(self._handle, data) :]
                except BlockingIOError:  # another program has made it so
                    select.select([], [self._handle], [])
        except OSError as error:
            self.problem = error


def _handle_of(stream: TextIO) -> int | None:
    """The system's number of a stream that is a file; what Python has buffered is written first."""
    buffer = getattr(stream, "buffer", None)
    if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return None
    with suppress(OSError, ValueError, RuntimeError):  # the last: a signal came amid a print
        stream.flush()
    return None if stream.closed else stream.fileno()
