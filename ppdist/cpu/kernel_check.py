"""Self-check of oneDNN's kernels, with its pass kept across runs.

The check (switch.py) takes a fifth of a small run's start, and its result depends only on this
processor, this Paddle, this code and the model.  A pass is kept in $XDG_CACHE_HOME or ~/.cache; a
failure never is.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from ppdist.common.keyed_cache import KeyedCache
from ppdist.common.machine import kernel_text
from ppdist.common.opener import of_stat

_MOST_BYTES = 16 << 20

_OF_KERNELS = ("ONEDNN_", "DNNL_", "OMP_", "KMP_", "MKL_", "FLAGS_")  # of variables for them
_OF_CORES = ("processor", "cpu MHz", "bogomips", "core id", "apicid", "initial apicid", "siblings")


def check_once(check: Callable[[], str | None], model: Any) -> str | None:
    """Runs a check unless it has passed here before.

    Args:
        check: returns None if all agree, else the reason.
        model: everything that defines the model, its code too, in types that JSON has.
    Returns: why it failed; None: it passed.
    """
    passed, key = KeyedCache.of_user("kernels", _MOST_BYTES), _key(model)
    if passed is not None and passed.get(key) is not None:
        return None
    reason = check()
    if reason is None and passed is not None:
        passed.put(key, b"passed")
    return reason


def _key(model: Any) -> str:
    libraries = sorted((Path(paddle.__file__).parent / "libs").glob("*dnn*"))
    facts = {
        "model": model,
        "paddle": paddle.__version__,
        "libraries": [[each.name, *of_stat(each.stat())] for each in libraries],
        "processor": _processor(),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(_OF_KERNELS)
        },
    }
    return json.dumps(facts, sort_keys=True)


def _processor() -> list[str]:
    """The first core as Linux describes it."""
    first = kernel_text(Path("/proc/cpuinfo")).partition("\n\n")[0]
    return [line for line in first.splitlines() if line.partition("\t")[0] not in _OF_CORES]
