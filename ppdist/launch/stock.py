"""Paddle installs a `fleetrun` too; installing or removing Paddle later may replace ours."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from ppdist.launch.plan import LAUNCHER_VARIABLE


def started_by_stock_launcher(environment: Mapping[str, str] | None = None) -> str | None:
    """What to tell the user when Paddle's own launcher started this rank; None when ours did.

    Args:
        environment: of the rank; None for this process's own.
    """
    variables = os.environ if environment is None else environment
    # Both are set by every launcher of Paddle; ranks started by hand set the first alone.
    launched = "PADDLE_TRAINERS_NUM" in variables and "PADDLE_RANK_IN_NODE" in variables
    if not launched or LAUNCHER_VARIABLE in variables:
        return None
    text = (
        "started by Paddle's own launcher, not by ppdist's fleetrun: card ranges, exit codes and "
        "--max_restart work differently; use python tools/launch.py in place of fleetrun, or "
        "reinstall ppdist to get its fleetrun back"
    )
    endpoints = variables.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    if len({endpoint.rpartition(":")[0] for endpoint in endpoints}) > 1:
        text += (
            "; with several hosts Paddle's may take two of them for rank 0 or connect to 127.0.0.1 "
            "unless --host and GLOO_SOCKET_IFNAME are given"
        )
    return text


def whose_fleetrun(search_path: str | None = None) -> tuple[str, Path | None]:
    """(`ppdist`, `paddle`, `unknown` or `none`, file) of the fleetrun that a shell would start."""
    found = shutil.which("fleetrun", path=search_path)
    if found is None:
        return "none", None
    text = Path(found).read_text(encoding="utf-8", errors="replace")
    for owner, module in (("ppdist", "ppdist.launch"), ("paddle", "paddle.distributed")):
        if module in text:
            return owner, Path(found)
    return "unknown", Path(found)
