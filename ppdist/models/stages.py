"""The stages of a model, from the image to the prediction: what freezing and layer decay count."""

import re
from collections.abc import Iterable

# Where a stage of a backbone begins; what follows in the state dict belongs to it, up to the next:
# `down3` begins what `stage3` goes on with, and pooling belongs to the last level.
_BEGINS = re.compile(r"(backbone\.(?:stem|stages\.\d+|down\d+))\.")
_NECKS = ("neck.", "aux_neck.")
NECK, HEAD = "neck", "head"


def stages_of(keys: Iterable[str]) -> dict[str, list[str]]:
    """State-dict keys by stage, in the order in which an image passes the stages.

        PP-YOLOE: backbone.stem, backbone.stages.0, ... neck, head
        YOLOv5:   backbone.stem, backbone.down2,    ... neck, head  (a classifier has no neck)

    Args: keys: of a model's state dict, in its order.
    """
    backbone: dict[str, list[str]] = {}
    neck: list[str] = []
    head: list[str] = []
    stage = "backbone"
    for key in keys:
        if key.startswith("backbone."):
            begins = _BEGINS.match(key)
            stage = begins[1] if begins else stage
            backbone.setdefault(stage, []).append(key)
        elif key.startswith(_NECKS):
            neck.append(key)
        else:
            head.append(key)
    stages = backbone | {NECK: neck, HEAD: head}
    return {name: found for name, found in stages.items() if found}
