"""What a run was: its configuration, its software and its machine, beside what it leaves."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import paddle

from ppdist import dist
from ppdist.engine.preflight import digest, digests_of_code, versions
from ppdist.errors import ConfigError


def describe_run(output_dir: Path, config_yaml: str, command: list[str]) -> None:
    """Writes config.yml and environment.json; rank 0 only.

    Raises: ConfigError: nothing can be written there.
    """
    cards = paddle.device.cuda.device_count() if dist.on_gpu() else 0
    environment = {
        "command": command,
        **versions(),
        "cuda": paddle.version.cuda(),
        "python": sys.version.split()[0],
        "code": digest(json.dumps(digests_of_code())),  # also outside git
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "ranks": dist.world_size(),
        "cards_on_this_host": cards,
        "git_commit": _git_commit(),
    }
    text = json.dumps(environment, indent=1)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.yml").write_text(config_yaml, encoding="utf-8")
        (output_dir / "environment.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {output_dir}: {error}",
            code="folder_unwritable",
            where="output_dir",
        ) from error


def _git_commit() -> str | None:
    """Commit of the checkout this package runs from; None outside git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
