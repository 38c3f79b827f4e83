"""Lease: of the hosts that share an output_dir, its holder trains."""

from contextlib import suppress
from pathlib import Path

from ppdist.common.files import FileLock

_FILE = "hosts.lock"


class Lease:
    """A lock in the common output_dir, which ends with its process.

    When a host is switched off, a server of NFS gives the lock back after its own time, 90 s by
    default.
    """

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def take(self, output_dir: str) -> bool:
        """Whether this process holds it now."""
        folder = Path(output_dir)
        if self._lock is None and folder.is_dir():  # else it is another host's name for it
            lock = FileLock(folder / _FILE)
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
