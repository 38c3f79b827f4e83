"""The formula of the weights that stand beside the reference values."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType


def load_formulas(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("formulas", folder / "parity_weights.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
