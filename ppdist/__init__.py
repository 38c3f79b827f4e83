"""ppdist: distributed object-detector training on PaddlePaddle fleet (see docs/python.md).

The names of `__all__` are imported on first access, so `import ppdist` costs nothing.
"""

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    sys.exit("ppdist needs Linux.  On Windows, use it in WSL2: docs/start.md, Windows and macOS")
if not (3, 10) <= sys.version_info[:2] <= (3, 13):  # as in setup.py; Paddle supports no others
    sys.exit(f"ppdist needs Python 3.10 to 3.13, and this is {sys.version.split()[0]}")

if TYPE_CHECKING:
    from ppdist.api import Detector, Run, evaluate, export, train
    from ppdist.common.writers import MetricWriter
    from ppdist.config.experiment import load_config
    from ppdist.engine.callbacks import Callback
    from ppdist.predict.detections import Detections

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Detections",
    "Detector",
    "MetricWriter",
    "Run",
    "__version__",
    "evaluate",
    "export",
    "load_config",
    "train",
]
_HOMES = {
    "Callback": "ppdist.engine.callbacks",
    "Detections": "ppdist.predict.detections",
    "Detector": "ppdist.api",
    "MetricWriter": "ppdist.common.writers",
    "Run": "ppdist.api",
    "evaluate": "ppdist.api",
    "load_config": "ppdist.config.experiment",
    "train": "ppdist.api",
}  # `export` is handled below: the package has the name of the function


def __getattr__(name: str) -> Any:
    if name in __all__:
        process = importlib.import_module("ppdist.common.process")
        process.quiet_paddle()  # which some of these names import
        process.log_in_notebook()
    if name == "export":
        return importlib.import_module("ppdist.export")
    if name not in _HOMES:
        # `from ppdist import cli` calls this before it imports the module; only names that are not
        # ours are treated as names of other libraries.
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is None:
            # `from ppdist import YOLO` calls this first; it turns an AttributeError into its own.
            asking = importlib.import_module("inspect").currentframe().f_back
            imports = asking.f_code.co_name == "_handle_fromlist"
            migration = importlib.import_module("ppdist.config.migration")
            migration.refuse_name(__name__, name, imports=imports)
        raise AttributeError(f"module 'ppdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Export(ModuleType):
    """The package `ppdist.export`, callable as the public function of the same name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("ppdist.api").export(*args, **options)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "export" and type(value) is ModuleType:  # just imported
            value.__class__ = _Export
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
