"""Looks at many image files, in child processes: a decoder that dies or hangs takes none of ours
with it, and the file is named."""

import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import cv2
from PIL import Image

from ppdist.data.check.look import Look, look

_AT_ONCE = 32  # files that a child is given at a time
_FATAL = (
    signal.SIGTERM,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
)
_TRIES = 2  # a child that dies once may have been another's victim (out of memory)


class ImageFile(NamedTuple):
    """path, and (width, height) in pixels as annotated, None where that is not known."""

    path: str
    size: tuple[int, int] | None


def scan(
    files: Sequence[ImageFile], *, decode: bool, workers: int, timeout: float = 60.0
) -> list[Look]:
    """A Look at each file, in their order, however many children crash or hang over it.

    Args:
        decode: see `look`.
        workers: child processes, at least 1.
        timeout: seconds after which a child that is at one file counts as hung.
    """
    looks: list[Look | None] = [None] * len(files)
    waiting = deque(range(len(files)))
    crashes: Counter[int] = Counter()
    children = [_Child(files, decode) for _ in range(min(max(workers, 1), -(-len(files) // 8)))]
    try:
        while any(child.busy for child in children) or waiting:
            for child in children:
                child.give(waiting)
            _collect(children, looks, timeout)
            for number, child in enumerate(children):
                if child.ended is None:
                    continue
                position, *rest = child.busy
                waiting.extendleft(reversed(rest))
                crashes[position] += 1
                if child.ended.code == "image_hangs_decoder" or crashes[position] == _TRIES:
                    text = f"{files[position].path}: {child.ended.text}"
                    looks[position] = Look((child.ended.code, text), passing=True)
                else:
                    waiting.appendleft(position)
                child.stop()
                children[number] = _Child(files, decode)
    finally:
        for child in children:
            child.stop()
    return [found for found in looks if found is not None]


class _End(NamedTuple):
    code: str
    text: str


class _Child:
    """A process that looks at the files whose positions it is given, one answer each."""

    def __init__(self, files: Sequence[ImageFile], decode: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.busy: deque[int] = deque()
        self.since = time.monotonic()
        self.ended: _End | None = None
        self._process = context.Process(
            target=_serve, args=(theirs, files, decode, os.getpid()), daemon=True
        )
        with warnings.catch_warnings():  # Python 3.12 warns of forking beside threads of Paddle's,
            warnings.simplefilter("ignore", DeprecationWarning)  # which a child never touches
            self._process.start()
        theirs.close()

    def give(self, waiting: deque[int]) -> None:
        """Hands it work from the front when it has none."""
        if self.busy or self.ended or not waiting:
            return
        self.busy.extend(waiting.popleft() for _ in range(min(_AT_ONCE, len(waiting))))
        self.since = time.monotonic()
        try:
            self.pipe.send(list(self.busy))
        except OSError:  # it ended while it waited; take() will find out
            return

    def take(self) -> tuple[int, Look] | None:
        """An answer; None, and `ended`, when the process is no more."""
        try:
            position, found = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.ended = _End("image_crashes_decoder", _how(self._process.exitcode))
            return None
        self.busy.popleft()
        self.since = time.monotonic()
        return position, found

    def stop(self) -> None:
        self._process.kill()
        self._process.join(1)  # one that waits for its disk for ever is left alone
        self.pipe.close()


def _collect(children: list[_Child], looks: list[Look | None], timeout: float) -> None:
    """Takes what the children have to say, or notes that one has been silent for too long."""
    ready = wait([child.pipe for child in children if child.busy], min(timeout, 1.0))
    for child in children:
        if child.pipe in ready:
            answer = child.take()
            if answer is not None:
                looks[answer[0]] = answer[1]
        elif child.busy and time.monotonic() - child.since > timeout:
            child.ended = _End("image_hangs_decoder", f"not decoded after {timeout:g} s")


def _how(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"decoding it ends the process with code {exitcode}"
    return f"decoding it kills the process ({signal.Signals(-exitcode).name})"


def _serve(
    pipe: "Connection[Any, Any]", files: Sequence[ImageFile], decode: bool, parent: int
) -> None:
    """What a child does, until its parent is gone."""
    for fatal in _FATAL:  # no stack trace of Paddle's or Python's, and no core file
        signal.signal(fatal, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its children
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what decoders print of damaged files
    warnings.simplefilter("ignore")
    cv2.setNumThreads(0)
    Image.MAX_IMAGE_PIXELS = None
    while os.getppid() == parent:
        if not pipe.poll(1.0):
            continue
        for position in pipe.recv():
            pipe.send((position, look(files[position].path, files[position].size, decode=decode)))
