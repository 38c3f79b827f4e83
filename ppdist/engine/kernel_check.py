"""Self-check of oneDNN's kernels, kept from one start to the next.

The check (ppdist/models/onednn/convert.py) takes a fifth of a small run's start, and its answer
depends on nothing but this processor, this Paddle, this code and the model.  A pass is kept under
$XDG_CACHE_HOME or ~/.cache; a failure never is.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import paddle

from ppdist.common.files import digest_of_text, replace_file, user_cache
from ppdist.common.machine import kernel_text
from ppdist.engine.preflight import digests_of_code

_OF_KERNELS = ("ONEDNN_", "DNNL_", "OMP_", "KMP_", "MKL_", "FLAGS_")  # variables that choose them
_OF_CORES = ("processor", "cpu MHz", "bogomips", "core id", "apicid", "initial apicid", "siblings")


def check_once(check: Callable[[], str | None], model: Any) -> str | None:
    """What `check` says of a model, or None at once where it has passed here before.

    Args:
        check: None where all agree, else the reason.
        model: what JSON can hold of everything that makes the model.
    """
    file = _kept_in(model)
    if file is not None and file.exists():
        return None
    reason = check()
    if reason is None and file is not None:
        with suppress(OSError):  # then the next start checks again
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, b"")
    return reason


def _kept_in(model: Any) -> Path | None:
    folder = user_cache()
    if folder is None:
        return None
    libraries = sorted((Path(paddle.__file__).parent / "libs").glob("*dnn*"))
    facts = {
        "model": model,
        "code": digests_of_code(),
        "paddle": paddle.__version__,
        "libraries": [[each.name, each.stat().st_size, each.stat().st_mtime] for each in libraries],
        "processor": _processor(),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(_OF_KERNELS)
        },
    }
    name = digest_of_text(json.dumps(facts, sort_keys=True))
    return folder / "kernels" / name


def _processor() -> list[str]:
    """The first core as Linux describes it, without what differs from core to core."""
    first = kernel_text(Path("/proc/cpuinfo")).partition("\n\n")[0]
    return [line for line in first.splitlines() if line.partition("\t")[0] not in _OF_CORES]
