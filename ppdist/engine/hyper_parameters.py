"""What tells one run from another on pages that show several: its hyper-parameters, every key."""

import json

from ppdist.config.base import Section
from ppdist.config.model import ModelConfig
from ppdist.engine.derived import Derived
from ppdist.engine.preflight import flattened


def hyper_parameters(model: ModelConfig, seed: int, derived: Derived) -> dict[str, float | str]:
    """What runs are compared by on VisualDL's page of that name.

    These seven and three metrics are all that it can take: with eleven columns its view of parallel
    coordinates did not answer any more (release 2.5.3, 1,440 pixels wide).  `settings` has all.
    """
    height, width = model.image_size
    return {
        "model": f"{model.name} {model.size}",
        "image_size": f"{height} x {width}",
        "total_batch": derived.total_batch,
        "lr": derived.scaled.lr,
        "weight_decay": derived.scaled.weight_decay,
        "epochs": derived.total_steps / derived.steps_per_epoch,
        "seed": seed,
    }


def settings(config: Section) -> dict[str, str]:
    """Every key by its section, as -o takes them; on one line, because pages show texts so."""
    texts: dict[str, list[str]] = {}
    for key, value in flattened("", config.model_dump(mode="json")):
        section = key.partition(".")[0] if "." in key else "run"
        shown = value if isinstance(value, str) else json.dumps(value)
        texts.setdefault(section, []).append(f"{key}={shown}")
    return {section: ",  ".join(lines) for section, lines in texts.items()}
