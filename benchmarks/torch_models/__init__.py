"""Our detectors' layers in torch, with our names, to step beside ours (`benchmarks.beside_torch`).

Each file has a family, written as its trainers in torch write it: channels last, torch's fused
attention, deformable attention by `grid_sample`.  Only a process that measures torch imports them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from benchmarks.torch_models.ppyoloe import PPYOLOE
from benchmarks.torch_models.rtdetr import RTDETR
from benchmarks.torch_models.yolov5 import YOLOv5

_FAMILIES: dict[str, type[nn.Module]] = {"yolov5": YOLOv5, "ppyoloe": PPYOLOE, "rtdetr": RTDETR}
_STATISTICS = {"_mean": "running_mean", "_variance": "running_var"}
_NOT_LAYERS = {"head.anchors", "yolo_head.proj_conv.weight"}  # constants of ours


def build_model(
    family: str, variant: str, size: str, classes: int, weights: Mapping[str, np.ndarray]
) -> nn.Module:
    """Builds a model with weights of ours, channels last.

    Args: family, variant, size: `model.name`, `.variant` and `.size` of a recipe.
    Raises: RuntimeError: ours has other layers.
    """
    model = _FAMILIES[family](variant, size, classes)
    state = {}
    for key in weights.keys() - _NOT_LAYERS:
        module, _, last = key.rpartition(".")
        state[f"{module}.{_STATISTICS.get(last, last)}"] = torch.from_numpy(weights[key])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):  # Paddle's is [in, out]
            state[f"{name}.weight"] = state[f"{name}.weight"].T
    missing, unknown = model.load_state_dict(state, strict=False)
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    if missing or unknown:
        raise RuntimeError(f"other layers than ours: {[*missing, *unknown][:5]}")
    return model.to(memory_format=torch.channels_last)
