"""Locks between processes that share the folder of a study."""

import os
from contextlib import suppress
from pathlib import Path

from ppdist.common.errors import ConfigError
from ppdist.common.files import FileLock


class StudyLock(FileLock):
    """A `FileLock`, without which the processes of a study cannot agree."""

    def try_acquire(self) -> bool:
        """Takes it if nobody has it.  Raises: ConfigError: the file system has no locks."""
        self.open()
        try:
            return super().try_acquire()
        except OSError as error:
            raise ConfigError(
                f"{self.path.parent} is on a file system without locks ({error.strerror}), with "
                "which the processes of a study agree",
                code="file_system_without_locks",
                where="--out",
                fix="take another",
            ) from error


class JournalLock(StudyLock):
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
