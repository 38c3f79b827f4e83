"""PP-YOLOE and PP-YOLOE+ against PaddleDetection's."""

import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import paddle

from ppdist.common.errors import DataError
from ppdist.config.evaluate import NMSConfig
from ppdist.config.loss import PPYOLOELossConfig
from ppdist.config.model import PPYOLOEConfig
from ppdist.losses.nms import multiclass_nms
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.models.outputs import PPYOLOEOutputs
from ppdist.models.ppyoloe import PPYOLOE
from tests.reference.parity.measure import (
    Measurement,
    apart,
    compare_features,
    compare_gradients,
    compare_running,
    compare_statistics,
    compare_suppressed,
    differ,
    off,
    places,
)
from tests.reference.parity.reference import (
    VARIANTS,
    Reference,
    Values,
    gradients,
    official_state,
    padded_truth,
    set_weights,
    setting,
)

NAME = re.compile(r"ppyoloe(?P<plus>_plus)?_(?P<size>[tsmlx])")
NAMES = "ppyoloe_SIZE or ppyoloe_plus_SIZE with SIZE of t s m l x"
# About ten times what 1e-7 noise on the weights does to the original (the folder's README).
FEATURES, SCORES, BOXES, LOSSES, SOFT_LABELS, STATISTICS = 2e-5, 2e-5, 2e-3, 2e-5, 2e-4, 2e-6
GRADIENTS = (2e-3, 3e-5)  # largest, median
# What our model and loss do, where the original could be told to do otherwise.
FIXED: dict[str, dict[str, Any]] = {
    "head": {
        "fpn_strides": [32, 16, 8],
        "grid_cell_scale": 5.0,
        "grid_cell_offset": 0.5,
        "use_varifocal_loss": True,
        "reg_max": 16,
        "eval_size": None,
        "exclude_nms": False,
        "exclude_post_process": False,
    },
    "atss": {"force_gt_matching": False, "sm_use": False, "topk": 9},
    "tal": {"eps": 1e-9, "alpha": 1.0, "beta": 6.0},
    "nms": {"normalized": True, "nms_eta": 1.0},
}
TAKEN: dict[str, dict[str, type]] = {
    "head": {"loss_weight.class": float, "loss_weight.iou": float, "loss_weight.dfl": float},
    "atss": {},
    "tal": {"topk": int},
    "nms": {"score_threshold": float, "nms_threshold": float, "nms_top_k": int, "keep_top_k": int},
}
# Without a part in what is compared.
NOTES = {
    "head": {"static_assigner_epoch"},
    "nms": {"return_index", "return_rois_num", "trt", "cpu"},
}
LEVELS, AUXILIARY = 3, "aux_head."
BEST = 50  # rows of kept boxes in a file that has so many
PHASES = ("atss", "tal")


def build(name: str, num_classes: int = 80, keys: Collection[str] = ()) -> PPYOLOE:
    """The model of a name that NAME matches, with fresh weights.

    Args:
        keys: of the original, where they are known: t comes with an auxiliary head or without.
    """
    known = NAME.fullmatch(name)
    assert known is not None
    config = {
        "variant": "plus" if known["plus"] else "crn",
        "size": known["size"],
        "auxiliary": any(key.startswith(AUXILIARY) for key in keys),
    }
    return PPYOLOE(PPYOLOEConfig.model_validate({**config, "num_classes": num_classes}))


def rebuild(reference: Reference) -> PPYOLOE:
    """The model of a reference with the weights of the formulas."""
    values = reference.values
    config = _settings(values)
    # One auxiliary head reads all levels of the neck, which are equally wide for it alone.
    widths = {int(values[f"neck{level}_shape"][1]) for level in range(LEVELS)}
    keys = [AUXILIARY] if len(widths) == 1 else []
    model = build(reference.model, config["num_classes"], keys)
    set_weights(model, reference.formulas)
    return model


def compare(model: PPYOLOE, reference: Reference) -> Iterator[Measurement]:
    """Every comparison the reference has values for: inference, then training if it is there."""
    yield from compare_inference(model, reference)
    for variant in VARIANTS:
        for phase in PHASES:
            if reference.values.starting(f"{variant}_{phase}_"):
                yield from compare_training(model, reference, variant, phase)


def compare_inference(model: PPYOLOE, reference: Reference) -> Iterator[Measurement]:
    """Features, scores, boxes and kept boxes of the evaluation image."""
    values, formulas = reference.values, reference.formulas
    model.eval()
    image = paddle.to_tensor(formulas.parity_image("normal", *formulas.EVAL_CASE))
    with paddle.no_grad():
        backbone = model.backbone(image)
        neck = model.neck(backbone)
        scores, boxes = model.decode(model.yolo_head(neck))
    yield from compare_features("backbone", backbone, values, FEATURES)
    yield from compare_features("neck", neck, values, FEATURES)
    yield differ("scores", "predictions", scores.shape[1], values["num_anchors"])
    where = places(values, "anchor_idx")
    score_NC, box_N4 = scores.numpy()[0], boxes.numpy()[0]
    yield Measurement("scores", "scores", apart(score_NC[where], values["scores"]), SCORES)
    yield compare_statistics("scores", "scores", score_NC, values["scores_stat"], SCORES)
    yield Measurement("boxes", "boxes, px", apart(box_N4[where], values["boxes_xyxy"]), BOXES)
    yield compare_statistics("boxes", "boxes, px", box_N4, values["boxes_stat"], BOXES)
    nms = _settings(values)["nms"]
    settings = NMSConfig(
        score_threshold=nms["score_threshold"],
        iou_threshold=nms["nms_threshold"],
        candidates=nms["nms_top_k"],
        keep=nms["keep_top_k"],
    )
    rows, count = multiclass_nms(scores, boxes, settings)
    yield differ("NMS", "count", count.tolist(), values["nms_count"])
    stored = min(BEST, int(values["nms_count"].sum()))
    yield from compare_suppressed("", rows.numpy(), values["nms_top50"], stored, (SCORES, BOXES))


def compare_training(
    model: PPYOLOE, reference: Reference, variant: str, phase: str
) -> Iterator[Measurement]:
    """Losses, assignment, gradient norms and statistics of one training step."""
    values, formulas = reference.values, reference.formulas
    prefix = f"{variant}_{phase}"
    set_weights(model, formulas, statistics_only=True)
    model.train()
    model.clear_gradients()
    outputs = model(paddle.to_tensor(formulas.parity_image("normal", *formulas.TRAIN_CASE)))
    criterion = _criterion(_settings(values), phase)
    truth = padded_truth(formulas.parity_targets(VARIANTS[variant]))
    result = criterion(outputs, *truth, 0)
    divisor = max(1.0, float(result.normalizer))
    (result.total / divisor).backward()
    for name, value in {"loss": result.total, **result.parts}.items():
        error = off(value / divisor, values[f"{prefix}_{name}"])
        yield Measurement("losses", f"{variant} {phase} {name}", error, LOSSES)
    yield from _compare_assignment(prefix, model, criterion, outputs, truth, values)
    error = off(result.normalizer, values[f"{prefix}_score_sum"])
    yield Measurement("assignment", f"{prefix} sum of scores", error, SOFT_LABELS)
    yield from compare_gradients(
        f"{variant} {phase}",
        gradients(model),
        values["grad_names"],
        values[f"{prefix}_grad_l2"],
        GRADIENTS,
    )
    if variant == "full":
        names = {"mean": "_mean", "variance": "_variance"}
        yield from compare_running(phase, official_state(model), values, names, STATISTICS)


def _compare_assignment(
    prefix: str,
    model: PPYOLOE,
    criterion: PPYOLOELoss,
    outputs: PPYOLOEOutputs,
    truth: tuple[paddle.Tensor, ...],
    values: Values,
) -> Iterator[Measurement]:
    slots = criterion.assign(outputs, *truth, 0)
    image, slot = np.nonzero(slots.is_positive_BS.numpy())
    anchor, box = (x.numpy()[image, slot] for x in (slots.anchor_BS, slots.box_BS))
    boxes_BN4 = model.decode(outputs)[1].detach().numpy()
    batch, count, _ = boxes_BN4.shape
    label_BN = np.full((batch, count), criterion.num_classes)
    label_BN[image, anchor] = truth[1].numpy()[image, box]
    score_BN = np.zeros((batch, count))
    score_BN[image, anchor] = slots.score_BS.numpy()[image, slot]
    box_BN4 = np.zeros((batch, count, 4))
    box_BN4[image, anchor] = truth[0].numpy()[image, box]

    where, want = places(values, f"{prefix}_assign_idx"), values[f"{prefix}_assign_label"]
    positive = want < criterion.num_classes
    label = prefix.replace("_", " ")
    everyone = values[f"{prefix}_num_pos"].sum()  # the file has every positive
    yield differ("assignment", f"{label} positives in the file", positive.sum(), everyone)
    wrong = int((label_BN.ravel()[where] != want).sum())
    yield Measurement("assignment", f"{label} labels", wrong, 0)
    found = (label_BN < criterion.num_classes).sum(axis=1)
    yield differ("assignment", f"{label} positives", found, values[f"{prefix}_num_pos"])
    histogram = np.stack(np.unique(label_BN, return_counts=True))
    yield differ("assignment", f"{label} histogram", histogram, values[f"{prefix}_label_hist"])
    error = apart(score_BN.ravel()[where], values[f"{prefix}_assign_score"])
    yield Measurement("assignment", f"{label} scores", error, SOFT_LABELS)
    target = box_BN4.reshape(-1, 4)[where][positive]
    error = apart(target, values[f"{prefix}_assign_box"][positive])
    yield Measurement("assignment", f"{label} boxes, px", error, 0)
    maps = zip(outputs.class_logits, model.strides)
    stride_N = np.concatenate([np.full(x.shape[2] * x.shape[3], stride) for x, stride in maps])
    distance = np.abs(boxes_BN4 - box_BN4)[image, anchor] / stride_N[anchor][:, None]
    error = off(distance.mean(), values[f"{prefix}_loss_l1"])
    yield Measurement("losses", f"{label} loss_l1", error, LOSSES)


def _settings(values: Values) -> dict[str, Any]:
    """The file's settings, none of which may ask for what we do not do."""
    config = values.json("config_json")
    setting(config, "num_classes", int)
    for section, taken in TAKEN.items():
        given = setting(config, section, dict)
        for key, kind in taken.items():
            setting(config, f"{section}.{key}", kind)
        for key, value in FIXED[section].items():
            if given.get(key, value) != value:
                raise DataError(
                    f"{section}.{key} is {given[key]}; this comparison knows {value} only",
                    code="reference_setting_unknown",
                    where="config_json",
                )
        known = {*(key.split(".")[0] for key in taken), *FIXED[section], *NOTES.get(section, ())}
        unknown = sorted(set(given) - known)
        if unknown:
            raise DataError(
                f"{section}.{unknown[0]} is {given[unknown[0]]}; this comparison does not know "
                "that setting",
                code="reference_setting_unknown",
                where="config_json",
            )
    return config


def _criterion(config: dict[str, Any], phase: str) -> PPYOLOELoss:
    weight = config["head"]["loss_weight"]
    settings = PPYOLOELossConfig(
        class_gain=weight["class"],
        box_gain=weight["iou"],
        dfl_gain=weight["dfl"],
        tal_topk=config["tal"]["topk"],
    )
    static_steps = 1 if phase == "atss" else 0
    return PPYOLOELoss(settings, num_classes=config["num_classes"], static_steps=static_steps)
