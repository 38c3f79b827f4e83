"""What is costly to make is made once for all workers of a test run."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def for_all_workers(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """A folder that `make` has filled; other workers wait for the first that asks."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # without workers the parent is that of other test runs, too
    folder, done = base / name, base / f"{name}.done"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder
