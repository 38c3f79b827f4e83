"""The wheel of this clone, for tests of what is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.forked import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
_FOLDERS = ("ppdist", "configs")
_FILES = ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "LICENSE", "NOTICE")


def built_wheel(folder: Path) -> Path:
    """Builds it of a copy, because setuptools leaves build/ and *.egg-info where it builds."""
    copy = folder / "clone"
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, copy)
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, copy]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("ppdist-*.whl")
    return wheel
