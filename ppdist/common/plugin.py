"""Imports plug-ins, which a configuration names as `package.module:Name` (see config/plugins.py).

A package is found where it is installed or on PYTHONPATH, never through the current folder.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

from ppdist.common.errors import ConfigError


def is_plugin(name: object) -> bool:
    """Returns True if a name refers to a part of another package."""
    return isinstance(name, str) and ":" in name


def load(target: str) -> Any:
    """Imports the object that `package.module:Name` names.

    Raises: ConfigError: it belongs to another package, and cannot be imported.
    """
    module, _, name = target.partition(":")
    package = package_of(target)
    try:
        with _without_current_folder():
            return reduce(getattr, name.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:
        # Importing a plug-in runs the code of another package.
        if package == __name__.partition(".")[0]:
            raise
        raise ConfigError(
            f"{target} cannot be imported: {type(error).__name__}: {error}",
            code="plugin_failed",
            where=f"plugin {package}",
            fix="install or repair that package, or put its folder on PYTHONPATH",
        ) from error


def package_of(target: str) -> str:
    """Returns the name of the top-level package in `package.module:Name`."""
    return target.partition(":")[0].partition(".")[0]


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Hides the current folder where Python put it first, as `python -m` and `python` do."""
    first = None if getattr(sys.flags, "safe_path", False) else sys.path[0]
    listed = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if first is None or os.path.realpath(first) != os.path.realpath("") or first in listed:
        yield
        return
    del sys.path[0]
    try:
        yield
    finally:
        sys.path.insert(0, first)
