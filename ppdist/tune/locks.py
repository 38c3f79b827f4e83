"""Locks between processes that share the folder of a study.

They belong to a process and end with it, however it ends: nobody has to find out whether the holder
of a stale lock file still lives.
"""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from ppdist.common.errors import ConfigError


class FileLock:
    """A POSIX lock on a file of its own.  It must be opened by this class alone: such a lock ends
    when its process closes the file anywhere.  One process, one thread, one object a file.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Waits for it."""
        while not self.try_acquire():
            time.sleep(0.02)
        return True

    def try_acquire(self) -> bool:
        """Takes it if nobody has it.  Raises: ConfigError: the file system has no locks."""
        if self._handle is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise ConfigError(
                f"{self._path.parent} is on a file system without locks ({error.strerror}), with "
                "which the processes of a study agree",
                code="file_system_without_locks",
                where="--out",
                fix="take another",
            ) from error
        return True

    def release(self) -> None:
        assert self._handle is not None
        fcntl.lockf(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives it back, if it was taken."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> "FileLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class JournalLock(FileLock):
    """What Optuna takes before it adds lines to its journal; its own lock files outlive a killed
    process.

    Whoever has it first cuts off a line that a crash or a full disk left without its end: Optuna
    would append the next to it, and read neither.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(journal.with_suffix(".lock"))
        self._journal = journal

    def acquire(self) -> bool:
        super().acquire()
        with suppress(FileNotFoundError), self._journal.open("rb+") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        return True
