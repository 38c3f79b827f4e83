"""Moves the wall clock of this process, for Python and native code alike.

clock.c is compiled and preloaded; so the process is replaced by itself, with the same id.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ppdist.common.errors import ConfigError

_SOURCE = Path(__file__).with_name("clock.c")
_FOLDER = "PPDIST_FAULT_CLOCK"  # holds the library until it is loaded
COMPILER = shutil.which("cc")


def preload() -> None:
    """Replaces this process by itself with the library; returns once it has it.

    Raises: ConfigError: there is no C compiler.
    """
    folder = os.environ.pop(_FOLDER, None)
    if folder is not None:
        del os.environ["LD_PRELOAD"]  # of children
        shutil.rmtree(folder)
        return
    if COMPILER is None:
        raise ConfigError("it needs a C compiler, cc", code="fault_invalid", where="fault clock")
    folder = os.environ[_FOLDER] = tempfile.mkdtemp(prefix="ppdist-clock-")
    library = os.environ["LD_PRELOAD"] = os.path.join(folder, "clock.so")
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", library, str(_SOURCE), "-ldl"], check=True
    )
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def move(seconds: float) -> None:
    """From now on this process's clock is so many seconds ahead."""
    ctypes.CDLL(None).ppdist_move_clock(ctypes.c_long(round(seconds)))
