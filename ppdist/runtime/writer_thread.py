"""Writer threads: no step waits for a terminal or a disk.

    WriterThread   runs queued writes, in order
    Screen         stdout or stderr, written by such a thread
    TERMINAL       the thread for both, one per process

Each run has a separate thread for its files: a blocked terminal must not keep records from the
disk.
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

_DROP_BYTES = 64 << 20  # most bytes queued for a disk; about a hundred images
_TERMINAL_BYTES, _TERMINAL_SECONDS = 1 << 20, 2.0


class WriterThread:
    """A thread that runs operations that may block, in order.

    `put` never waits, and is safe in any thread and inside a signal handler.  The queue is bounded:
    beyond `most_bytes`, items that may be dropped are dropped and counted.  Records are never
    dropped, because they are small.  A forked child has no such thread and writes immediately, as
    does this process if no more threads can be started.

    Attributes:
        dropped: number of dropped items, by name.
        failures: name and error of each failed write that has not been reported yet.
    """

    def __init__(self, most_bytes: int = _DROP_BYTES) -> None:
        self.dropped: Counter[str] = Counter()
        self.failures: deque[tuple[str, Exception]] = deque(maxlen=100)
        self._most_bytes = most_bytes
        self._queue: SimpleQueue[tuple[str, Callable[[], object], int]] = SimpleQueue()
        self._put, self._done = [0, 0], [0, 0]  # items and bytes; each has a single writer
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._starting = threading.Lock()  # never waited for: a signal may arrive during a start

    @property
    def waiting(self) -> int:
        """Returns the number of items not yet written."""
        return self._put[0] - self._done[0]

    @property
    def waiting_bytes(self) -> int:
        """Returns the size of the items not yet written, in bytes."""
        return self._put[1] - self._done[1]

    def put(
        self, name: str, write: Callable[[], object], size: int = 0, *, may_drop: bool = False
    ) -> None:
        """Queues a write.

        Args:
            name: name of the output, for warnings.
            write: performs the write; may block, and may raise.
            size: bytes that the write keeps in memory while it waits.
            may_drop: True if the write may be dropped, because it is not a record.
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
            except RuntimeError:
                # The system cannot start more threads, or the interpreter is shutting down.
                while not self._queue.empty():
                    self._write_next()
            finally:
                self._starting.release()

    def flush(self, seconds: float) -> bool:
        """Waits until the queue is written; returns False if the timeout passes first."""
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
        except Exception as error:
            # No error may end the thread: all later writes would be lost.
            self.failures.append((name, error))


class _Terminal(WriterThread):
    """The thread of the terminal; after a timeout, `flush` waits again only once output moves."""

    _stuck_after = -1

    def flush(self, seconds: float = _TERMINAL_SECONDS) -> bool:
        if self._stuck_after == self._done[0]:
            return False
        written = super().flush(seconds)
        self._stuck_after = -1 if written else self._done[0]
        return written


TERMINAL = _Terminal(_TERMINAL_BYTES)


class Screen(io.TextIOBase):
    """A stdout or stderr on which no writer waits; silent once it cannot be written.

    A stream without a file descriptor, such as a notebook's, is written directly.

    Attributes:
        problem: the error that made the screen silent; None while it is not silent.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Finds the descriptor of the stream.

        Args: stream: stdout or stderr; None if the process was started without it.
        """
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
        """Returns True if the stream can show a moving progress bar; False in Jupyter notebooks."""
        stream = self._stream
        if stream is None or stream.closed or type(stream).__module__.startswith("ipykernel"):
            return False
        return stream.isatty()

    def write(self, text: str) -> int:
        """Queues text for the terminal's thread; returns its length."""
        if self._stream is not None and self.problem is None and text:
            if self._handle is None:
                self._write(text)
            else:
                # Written by descriptor: data stuck in Python's own buffer would block the exit.
                data = text.encode(self.encoding, "backslashreplace")
                TERMINAL.put("terminal", lambda: self._write_bytes(data), len(data), may_drop=True)
        return len(text)

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self.problem = error

    def _write_bytes(self, data: bytes) -> None:
        assert self._handle is not None
        try:
            while data and self.problem is None:
                try:
                    data = data[os.write(self._handle, data) :]
                except BlockingIOError:  # another program made it non-blocking
                    select.select([], [self._handle], [])
        except OSError as error:
            self.problem = error


def _handle_of(stream: TextIO) -> int | None:
    """Flushes Python's buffer of a stream; returns its descriptor, or None if it has none."""
    buffer = getattr(stream, "buffer", None)
    if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return None
    # RuntimeError: reentrant flush, when a signal handler runs during a print.
    with suppress(OSError, ValueError, RuntimeError):
        stream.flush()
    return None if stream.closed else stream.fileno()
