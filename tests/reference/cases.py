"""The small cases: what five models of tiny width and their losses compute."""

from typing import Any, NamedTuple

import numpy as np
import paddle

from ppdist.config.loss import PPYOLOELossConfig, YOLOv5LossConfig
from ppdist.config.model import PPYOLOEConfig, YOLOv5ClsConfig, YOLOv5Config
from ppdist.losses.classification import ClassificationLoss
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.losses.yolov5 import YOLOv5Loss
from ppdist.models.base import ImageModel
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.yolov5 import YOLOv5, YOLOv5Classifier
from tests.reference import formulas
from tests.reference.formulas import CLASSES, CLS_CASE, EVAL_CASE, TRAIN_CASE, parity_image
from tests.reference.parity.reference import padded_truth, set_weights

NAMES = ("ppyoloe_crn", "ppyoloe_plus", "yolov5", "yolov5_p6", "yolov5_cls")
LABELS = np.array([3, 0])  # of the classifier's training images
CLS_TRAIN_CASE = (2, 64, 64, 4)


class Outcome(NamedTuple):
    """What a model and its loss say.

    outputs: by name, arrays of the evaluation image.
    losses: by name, of the training images with and without boxes in the second.
    """

    outputs: dict[str, np.ndarray]
    losses: dict[str, float]


def build(name: str) -> ImageModel:
    """The model of a case, weights by the formulas."""
    tiny = {"num_classes": CLASSES, "depth_multiple": 0.33, "width_multiple": 0.125}
    model: ImageModel
    if name.startswith("ppyoloe"):
        config = {"variant": name.removeprefix("ppyoloe_"), **tiny}
        model = PPYOLOE(PPYOLOEConfig.model_validate(config))
    elif name == "yolov5_cls":
        model = YOLOv5Classifier(YOLOv5ClsConfig.model_validate(tiny))
    else:
        size = {"size": "n6" if name == "yolov5_p6" else "n", "image_size": TRAIN_CASE[1:3]}
        model = YOLOv5(YOLOv5Config.model_validate({**size, **tiny}))
    set_weights(model, formulas)
    return model


def computed(name: str) -> Outcome:
    """Outputs and losses, float32."""
    model = build(name)
    model.eval()
    kind = "normal" if name.startswith("ppyoloe") else "unit"
    case = CLS_CASE if name == "yolov5_cls" else EVAL_CASE
    outputs = model(paddle.to_tensor(parity_image(kind, *case)))
    if name == "yolov5_cls":
        found = {"logits": outputs, "probabilities": model.decode(outputs)}
    else:
        found = dict(zip(("scores", "boxes"), model.decode(outputs)))
    model.train()
    case = CLS_TRAIN_CASE if name == "yolov5_cls" else TRAIN_CASE
    outputs = model(paddle.to_tensor(parity_image(kind, *case)))
    return Outcome({k: x.numpy() for k, x in found.items()}, _our_losses(model, outputs))


def _our_losses(model: ImageModel, outputs: Any) -> dict[str, float]:
    losses: dict[str, float] = {}
    if isinstance(model, YOLOv5Classifier):
        truth = paddle.zeros([2, 1, 4]), paddle.to_tensor(LABELS[:, None]), paddle.ones([2, 1])
        for smoothing in (0.0, 0.1):
            result = ClassificationLoss(smoothing)(outputs, *truth, 0)
            losses[f"smoothing {smoothing}"] = float(result.total) / float(result.normalizer)
        return losses
    for variant, empty in (("full", False), ("empty1", True)):
        truth = padded_truth(formulas.parity_targets(empty))
        if isinstance(model, YOLOv5):
            result = YOLOv5Loss.build(YOLOv5LossConfig(), model, 1)(outputs, *truth, 0)
            losses |= {f"{variant} {key}": float(x) for key, x in result.parts.items()}
            losses[f"{variant} total"] = float(result.total)
        else:
            for phase, static_steps in (("atss", 1), ("tal", 0)):
                criterion = PPYOLOELoss(
                    PPYOLOELossConfig(), num_classes=CLASSES, static_steps=static_steps
                )
                result, label = criterion(outputs, *truth, 0), f"{variant} {phase}"
                divisor = max(1.0, float(result.normalizer))
                losses |= {f"{label} {key}": float(x) / divisor for key, x in result.parts.items()}
                losses[f"{label} score_sum"] = float(result.normalizer)
                losses[f"{label} total"] = float(result.total) / divisor
    return losses
