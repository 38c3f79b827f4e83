"""The test accelerator: device.cc compiled against the headers of the installed Paddle."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

KIND = "custom_cpu"
_SOURCE = Path(__file__).with_name("device.cc")


def build(folder: Path) -> Path:
    """Compiles the plug-in into a folder, which Paddle takes as CUSTOM_DEVICE_ROOT; returns it.

    A test is skipped where it cannot be built.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the test accelerator needs g++")
    paddle = Path(find_spec("paddle").origin).parent
    if not (paddle / "include/paddle/phi/backends/device_ext.h").is_file():
        pytest.skip("this Paddle ships no headers for custom devices")
    command = [
        compiler, "-std=c++17", "-O0", "-fPIC", "-shared", "-DPADDLE_WITH_CUSTOM_DEVICE",
        "-I", str(paddle / "include"), str(_SOURCE), "-o", str(folder / f"lib{KIND}.so"),
        "-L", str(paddle / "libs"), "-lphi_core",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def count(what: str) -> int:
    """What the plug-in of this process was asked for so far: see `counts` in device.cc."""
    asked = _library().custom_cpu_count
    asked.restype = ctypes.c_long
    found = asked(what.encode())
    assert found >= 0, f"the plug-in counts no {what}"
    return found


@contextmanager
def without_code() -> Iterator[None]:
    """Inside, the card gives zeros, as one does that the installed Paddle holds no code for."""
    _library().custom_cpu_without_code(True)
    try:
        yield
    finally:
        _library().custom_cpu_without_code(False)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / f"lib{KIND}.so"))


def card_environment(plugin: Path, card: int) -> dict[str, str]:
    """What a launcher tells a rank on a card of a plug-in, and where Paddle finds it."""
    return {
        "CUSTOM_DEVICE_ROOT": str(plugin),
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": KIND,
        f"FLAGS_selected_{KIND}s": str(card),
    }
