"""Lease: of the hosts that share an output_dir, its holder trains."""

from contextlib import suppress
from pathlib import Path

from ppdist.common.files import FileLock

_FILE = "hosts.lock"


class Lease:
    """A lock in the common output_dir, which ends with its process or its host.

    When a host is switched off, a server of NFS gives the lock back after its own time, 90 s by
    default.

    Attributes:
        folder: the output_dir; None: not known yet.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._lock: FileLock | None = None

    def take(self) -> bool:
        """Whether this process holds it now."""
        if self._lock is None and self.folder is not None:
            lock = FileLock(self.folder / _FILE)
            with suppress(OSError):  # it cannot be reached, or has no locks
                if lock.try_acquire():
                    self._lock = lock
            if self._lock is None:
                lock.close()
        return self._lock is not None

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
