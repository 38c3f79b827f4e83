"""One process that prepares batches: as its rank sees it, and what runs in it."""

import ctypes
import gc
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cv2
import numpy as np

from ppdist.data.sample import SampleKey
from ppdist.data.samples import EXITED, Made, Samples

SLOTS = 2  # of a worker: one is filled while the rank takes out the other
LOOK_SECONDS = 1.0  # how often a waiting worker looks for its rank, and the rank for hung workers
_REAP_SECONDS = 1.0  # a killed process that waits for a dead disk may take for ever to end
_LENGTH = struct.Struct("<I")
# Paddle's handlers print C++ stacks, and the rank's own ask it to stop after a step.
_PLAIN_SIGNALS = ("SIGTERM", "SIGINT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Task:
    """A batch to be made.  stopped_at: records that were being read when its workers ended."""

    number: int
    keys: list[SampleKey]
    stopped_at: list[int] = field(default_factory=list)


class Result(NamedTuple):
    """made: without its arrays; shape: of the images in the slot, () in case of an error."""

    number: int
    shape: tuple[int, ...]
    small_arrays: tuple[np.ndarray, ...]
    made: Made


@dataclass(eq=False)
class Worker:
    """A process as its rank sees it.

    reading, beat: written by the process: the record it reads, when it last began to read one, or
    began or finished a batch (time.monotonic).  process: its id; 0 before it starts and once it is
    gone, when the id may be that of another process.  tasks: given and not yet done, with their
    slots, in the given order.
    """

    link: socket.socket
    slots: list[np.ndarray]
    reading: np.ndarray
    beat: np.ndarray
    process: int = 0
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    tasks: dict[int, tuple[Task, int]] = field(default_factory=dict)
    changed: float = 0.0
    inbox: "_Inbox" = field(default_factory=lambda: _Inbox())

    def give(self, task: Task) -> None:
        slot = self.free.pop()
        if not self.tasks:
            self.changed = time.monotonic()
        self.tasks[task.number] = task, slot
        with suppress(OSError):  # it has ended or hangs: noticed later, the task is on its list
            self.link.sendall(_packed((task.number, slot, task.keys)))

    def hear(self) -> tuple[bool, list[Result]]:
        """Whether it still lives, and the results that have arrived in whole."""
        try:
            content = self.link.recv(1 << 20)
        except OSError:
            content = b""
        self.changed = time.monotonic()
        return bool(content), self.inbox.messages(content)

    def busy_seconds(self) -> float:
        """How long it has been at its present task without a sign of life."""
        if not self.tasks:
            return 0.0
        return time.monotonic() - max(self.changed, float(self.beat[0]))

    def kill(self) -> None:
        """Whatever it does; no matter to one that is ending already."""
        if self.process:
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)

    def end(self) -> int:
        """Kills it; returns the signal it ended with, or EXITED."""
        self.link.close()
        self.kill()
        deadline = time.monotonic() + _REAP_SECONDS
        while self.process and time.monotonic() < deadline:
            try:
                process, status = os.waitpid(self.process, os.WNOHANG)
            except ChildProcessError:  # somebody else waited for it
                self.process = 0
                return EXITED
            if process:
                self.process = 0
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else EXITED
            time.sleep(0.002)
        return EXITED


class _Inbox:
    """Messages out of a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._content = bytearray()

    def messages(self, content: bytes) -> list[Any]:
        """Those that are complete with this piece."""
        self._content += content
        found = []
        while len(self._content) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._content)[0]
            if len(self._content) < end:
                break
            found.append(pickle.loads(memoryview(self._content)[_LENGTH.size : end]))
            del self._content[:end]
        return found


def _packed(message: Any) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def tie() -> Callable[[], object]:
    """What a worker calls first after its fork, so that the kernel kills it when its rank ends.

    By itself it looks for its rank between batches only, and may never come back from a decoder.
    Asked for before the fork, because the linker's lock may be another thread's at that moment.
    Does nothing where there is no prctl, and in threads other than the main one: the kernel takes
    the end of the thread that forks for the end of its process.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda: None
    words = [ctypes.c_ulong(word) for word in (signal.SIGKILL, 0, 0, 0)]
    return lambda: prctl(_PR_SET_PDEATHSIG, *words)


def work(samples: Samples, worker: Worker, link: socket.socket, rank: int) -> None:
    """Makes batches for as long as the rank lives; runs in the process of the worker."""
    os.setpgid(0, 0)  # a signal to the rank's group is for the rank: it still needs its workers
    for name in _PLAIN_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    gc.freeze()  # what is inherited stays shared, and none of it is finalized here
    cv2.setNumThreads(0)  # one thread a worker
    samples.reading, samples.beat = worker.reading, worker.beat
    link.settimeout(LOOK_SECONDS)
    inbox = _Inbox()
    while content := _received(link, rank):
        for number, slot, keys in inbox.messages(content):
            worker.beat[0] = time.monotonic()
            made = samples.batch(keys, worker.slots[slot])
            arrays, made = made.arrays, made._replace(arrays=None)
            shape = arrays.images_B3HW.shape if arrays else ()
            worker.beat[0] = time.monotonic()
            _send(link, _packed(Result(number, shape, arrays[1:] if arrays else (), made)), rank)


def _received(link: socket.socket, rank: int) -> bytes:
    """What the rank has sent; b"" when it is gone."""
    while os.getppid() == rank:
        with suppress(TimeoutError):
            return link.recv(1 << 16)
    return b""


def _send(link: socket.socket, content: bytes, rank: int) -> None:
    """Waits for as long as it takes: a rank may be busy with other things for minutes."""
    left = memoryview(content)
    while left and os.getppid() == rank:
        with suppress(TimeoutError):
            left = left[link.send(left) :]
