"""The description of a run beside its results: config.yml, environment.json, hyper-parameters."""

import json
import os
import platform
import sys
from pathlib import Path

import paddle

from ppdist.common.child import output_of
from ppdist.common.errors import ConfigError
from ppdist.common.files import digest_of_text, replace_file
from ppdist.config.model import ModelConfig
from ppdist.config.parse import flattened
from ppdist.config.section import Section
from ppdist.distributed import comm, device
from ppdist.engine.preflight import digests_of_code, versions
from ppdist.engine.schedule_setup import ScheduleSetup


def hyper_parameters(
    model: ModelConfig, seed: int, schedule: ScheduleSetup
) -> dict[str, float | str]:
    """Returns the values for VisualDL's hyperparameters page, which compares runs.

    `settings` has all keys.  VisualDL can show no more than these seven and three metrics: with
    eleven columns its parallel coordinates view hangs (release 2.5.3, 1,440 pixels wide).
    """
    height, width = model.image_size
    keys = type(model).model_fields  # a plugin's model may have only one size
    return {
        "model": " ".join(str(getattr(model, key)) for key in ("name", "size") if key in keys),
        "image_size": f"{height} x {width}",
        "total_batch": schedule.total_batch,
        "lr": schedule.scaled.lr,
        "weight_decay": schedule.scaled.weight_decay,
        "epochs": schedule.total_steps / schedule.steps_per_epoch,
        "seed": seed,
    }


def settings(config: Section) -> dict[str, str]:
    """Lists every key in the form that -o accepts, one line per section."""
    texts: dict[str, list[str]] = {}
    for key, value in flattened(config).items():
        section = key.partition(".")[0] if "." in key else "run"
        text = value if isinstance(value, str) else json.dumps(value)
        texts.setdefault(section, []).append(f"{key}={text}")
    return {section: ",  ".join(lines) for section, lines in texts.items()}


def describe_run(output_dir: Path, config_yaml: str, command: list[str]) -> None:
    """Writes config.yml and environment.json; rank 0 only.

    Raises: ConfigError: the files cannot be written.
    """
    environment = {
        "command": command,
        **versions(),
        "cuda": paddle.version.cuda(),
        "python": sys.version.split()[0],
        "code": digest_of_text(json.dumps(digests_of_code())),  # also outside git
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "ranks": comm.world_size(),
        "device": device.kind(),
        "cards_on_this_host": device.card_count(),
        "git_commit": _read_git_commit(),
    }
    text = json.dumps(environment, indent=1)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        replace_file(output_dir / "config.yml", config_yaml.encode())
        replace_file(output_dir / "environment.json", text.encode())
    except OSError as error:
        raise ConfigError(
            f"cannot write to {output_dir}: {error.strerror or error}",
            code="folder_unwritable",
            where="output_dir",
            fix="give another folder: -o output_dir=PATH",
        ) from error


def _read_git_commit() -> str | None:
    """Returns the commit of the checkout this package runs from; None outside git."""
    try:
        output = output_of(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], 10)
    except OSError:
        return None
    return output[1].strip() or None if output is not None else None
