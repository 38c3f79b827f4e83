"""A teacher's run folder, and a config that learns from it."""

from pathlib import Path

import numpy as np

from ppdist.config.parse import dump_yaml
from ppdist.engine.build import build_model
from ppdist.engine.checkpoint import save_checkpoint
from ppdist.models.model_card import ModelCard
from ppdist.models.weights import arrays_of
from tests.unit.engine.tiny import freeze_statistics, init_cpu, tiny_config

LARGER = {
    "ppyoloe": "model.width_multiple=0.25",
    "yolov5": "model.width_multiple=0.125",
    "dfine": "model.size=s",  # which has a level more
}
ALL = ("distill.logits={}", "distill.features={}", "distill.boxes={}")


def write_teacher(
    folder: Path,
    *overrides: str,
    model: str = "ppyoloe",
    seen: bool = True,
    more: str = "",
    names: tuple[str, ...] = (),
) -> Path:
    """The output_dir of a run with one checkpoint, its weights shaped by a few images or none.

    Args: more: lines of its config.yml.  names: of its classes; (): it has no model card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    init_cpu()
    config = tiny_config(folder, [LARGER[model], "seed=5", *overrides], model)
    teacher = build_model(config)
    if seen:
        freeze_statistics(teacher)
    draw = np.random.default_rng(0)
    for key, weights in teacher.named_parameters():
        # It says something else in every cell, and is sure of it here and there.
        if "pred" in key or "score_head" in key:
            bias = -2.0 if any(name in key for name in ("cls", "predict", "score")) else 0.0
            shift = bias if key.endswith("bias") else 0.0
            inputs = weights.shape[1:] if weights.ndim == 4 else weights.shape[:-1]
            width = int(np.prod(inputs)) ** -0.5
            weights.set_value((shift + draw.normal(0, width, weights.shape)).astype("float32"))
    state = {"step": 1}
    text, card = dump_yaml(config) + more, ModelCard(class_names=names).text() if names else ""
    save_checkpoint(folder / "checkpoints", 1, {"ema": arrays_of(teacher)}, state, text, card)
    return folder


def distilled_config(folder: Path, teacher: Path, *overrides: str, model: str = "ppyoloe"):
    return tiny_config(folder, [f"distill.teacher={teacher}", *ALL, *overrides], model)
