"""Writes reference files of any size from OUR models, in the format of the originals' references.

They prove nothing about our numbers, only that the comparison reads files it has never seen and
notices what is tampered with.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.config.evaluate import NMSConfig
from ppdist.config.loss import PPYOLOELossConfig, YOLOv5LossConfig
from ppdist.losses.base import NOMINAL_BATCH
from ppdist.losses.classification import ClassificationLoss
from ppdist.losses.nms import multiclass_nms
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.losses.yolov5 import YOLOv5Loss
from ppdist.models.base import ImageModel
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.yolov5 import YOLOv5, YOLOv5Classifier
from tests.reference import formulas
from tests.reference.formulas import CLASSES, CLS_CASE, EVAL_CASE, TRAIN_CASE, parity_image
from tests.reference.parity import family_of
from tests.reference.parity.reference import gradients, official_state, padded_truth, set_weights

Arrays = dict[str, Any]
SAMPLES = 256
YOLO_NMS = {
    "nms_conf0.001_iou0.6_multilabel_top50": (0.001, 0.6, True),
    "nms_conf0.25_iou0.45_top50": (0.25, 0.45, False),
}


def write_folder(folder: Path, names: tuple[str, ...], training: bool = True) -> None:
    """The formulas, and a reference of each model; without `training` of inference only."""
    shutil.copy(formulas.__file__, folder / "parity_weights.py")
    for name in names:
        np.savez(folder / f"{name}.npz", **values_of(name, training))


def values_of(name: str, training: bool = True, keys: tuple[str, ...] = ()) -> Arrays:
    """All arrays of a model's reference, five classes; keys: of the original, as for `build`."""
    model = family_of(name).build(name, CLASSES, keys)
    set_weights(model, formulas)
    model.eval()
    if isinstance(model, PPYOLOE):
        values = _ppyoloe_inference(model, name)
        for variant, empty in (("full", False), ("empty1", True)) if training else ():
            for phase in ("atss", "tal"):
                values |= _ppyoloe_training(model, f"{variant}_{phase}", empty)
    elif isinstance(model, YOLOv5):
        values = _yolov5_inference(model)
        for variant, empty in (("full", False), ("empty1", True)) if training else ():
            values |= _yolov5_training(model, variant, empty)
    else:
        values = _classifier(model, training)
    return {key: np.asarray(value) for key, value in values.items()}


def _features(prefix: str, features: list[paddle.Tensor]) -> Arrays:
    values: Arrays = {}
    for level, feature in enumerate(features):
        x = feature.numpy().astype("float64")
        where = np.linspace(0, x.size - 1, SAMPLES).astype("int32")
        values |= {
            f"{prefix}{level}_shape": x.shape,
            f"{prefix}{level}_stat": [x.mean(), x.std()],
            f"{prefix}{level}_idx": where,
            f"{prefix}{level}_val": x.ravel()[where].astype("float32"),
        }
    return values


def _summary(x: np.ndarray) -> np.ndarray:
    return np.array([x.mean(), x.std(), x.min(), x.max()], "float32")


def _best(rows: paddle.Tensor) -> np.ndarray:
    """Best 50 rows [class, score, box] by falling score."""
    return rows.numpy()[np.argsort(-rows.numpy()[:, 1], kind="stable")][:50]


def _train_start(model: ImageModel) -> None:
    set_weights(model, formulas)
    model.train()
    model.clear_gradients()


def _after_backward(model: ImageModel, prefix: str) -> Arrays:
    norms = {
        key: np.linalg.norm(g.numpy().astype("float64")) for key, g in gradients(model).items()
    }
    return {"grad_names": list(norms), f"{prefix}_grad_l2": list(norms.values())}


def _running(model: ImageModel, layer: str, names: dict[str, str]) -> Arrays:
    state = official_state(model)
    values = {
        f"bn_after_forward_{key}": state[f"{layer}.{end}"].numpy() for key, end in names.items()
    }
    return {"bn_after_forward_key": layer, **values}


def _ppyoloe_inference(model: PPYOLOE, name: str) -> Arrays:
    with paddle.no_grad():
        backbone = model.backbone(paddle.to_tensor(parity_image("normal", *EVAL_CASE)))
        neck = model.neck(backbone)
        scores, boxes = model.decode(model.yolo_head(neck))
    where = np.arange(0, scores.shape[1], 3)
    rows, count = multiclass_nms(scores, boxes, NMSConfig(score_threshold=0.2, keep=60))
    config = {
        "model": name,
        "num_classes": CLASSES,
        "head": {"fpn_strides": [32, 16, 8], "loss_weight": {"class": 1.0, "iou": 2.5, "dfl": 0.5}},
        "atss": {"topk": 9},
        "tal": {"topk": 13, "alpha": 1.0, "beta": 6.0},
        "nms": {
            "score_threshold": 0.2,
            "nms_threshold": 0.7,
            "nms_top_k": 1000,
            "keep_top_k": 60,
        },
    }
    return {
        "config_json": json.dumps(config),
        **_features("backbone", backbone),
        **_features("neck", neck),
        "num_anchors": scores.shape[1],
        "anchor_idx": where,
        "scores": scores.numpy()[0][where],
        "boxes_xyxy": boxes.numpy()[0][where],
        "scores_stat": _summary(scores.numpy()),
        "boxes_stat": _summary(boxes.numpy()),
        "nms_top50": _best(rows),
        "nms_count": count.numpy(),
    }


def _ppyoloe_training(model: PPYOLOE, prefix: str, empty: bool) -> Arrays:
    _train_start(model)
    outputs = model(paddle.to_tensor(parity_image("normal", *TRAIN_CASE)))
    truth = padded_truth(formulas.parity_targets(empty))
    criterion = PPYOLOELoss(
        PPYOLOELossConfig(), num_classes=CLASSES, static_steps=int(prefix.endswith("atss"))
    )
    result = criterion(outputs, *truth, 0)
    loss = result.total / max(1.0, float(result.normalizer))
    loss.backward()
    slots = [x.numpy() for x in criterion.assign(outputs, *truth, 0)]
    boxes = model.decode(outputs)[1].numpy()
    label = np.full(boxes.shape[:2], CLASSES)
    score, target = np.zeros(boxes.shape[:2], "float32"), np.zeros(boxes.shape, "float32")
    distance = []
    for image, slot in np.argwhere(slots[2]):
        cell, box = slots[0][image, slot], slots[1][image, slot]
        label[image, cell] = truth[1].numpy()[image, box]
        score[image, cell] = slots[3][image, slot]
        target[image, cell] = truth[0].numpy()[image, box]
        stride = 32 if cell < 8 else 16 if cell < 40 else 8  # 2 x 4, 4 x 8, 8 x 16 cells
        distance.append(np.abs(boxes[image, cell] - target[image, cell]) / stride)
    parts = {key: float(x) / max(1.0, float(result.normalizer)) for key, x in result.parts.items()}
    values = {
        "loss": float(loss),
        **parts,
        "loss_l1": np.mean(distance),
        "num_pos": (label < CLASSES).sum(1),
        "label_hist": np.stack(np.unique(label, return_counts=True)),
        "score_sum": score.sum(dtype="float64"),
        "assign_idx": np.arange(label.size),
        "assign_label": label.ravel(),
        "assign_box": target.reshape(-1, 4),
        "assign_score": score.ravel(),
    }
    statistics = _running(
        model, "backbone.stem.conv1.bn", {"mean": "_mean", "variance": "_variance"}
    )
    return {
        **{f"{prefix}_{key}": value for key, value in values.items()},
        **_after_backward(model, prefix),
        **(statistics if prefix.startswith("full") else {}),
    }


def _yolov5_inference(model: YOLOv5) -> Arrays:
    with paddle.no_grad():
        backbone = model.backbone(paddle.to_tensor(parity_image("unit", *EVAL_CASE)))
        neck = model.neck(backbone)
        outputs = model.head(neck)
        scores, boxes = model.decode(outputs)
    raw = [x.numpy()[0].reshape(3, 5 + CLASSES, -1).transpose(0, 2, 1) for x in outputs.logits]
    chance = 1 / (1 + np.exp(-np.concatenate([x.reshape(-1, 5 + CLASSES) for x in raw])))
    low, high = np.split(boxes.numpy()[0], 2, axis=1)
    decoded = np.concatenate([(low + high) / 2, high - low, chance[:, 4:]], axis=1)
    where = np.arange(0, len(decoded), 7)
    values = {
        "layers_json": json.dumps({"backbone": [0] * len(backbone), "neck": [0] * len(neck)}),
        **_features("backbone", backbone),
        **_features("neck", neck),
        "num_anchors": len(decoded),
        "anchor_idx": where,
        "pred_xywh_obj_cls": decoded[where],
        "pred_stat": [_summary(decoded[:, part]) for part in np.s_[:4, 4:5, 5:]],
        "stride": np.array(model.strides, "float32"),
        "anchors_grid": model.head.anchors.numpy(),
    }
    for key, (score, iou, multi_label) in YOLO_NMS.items():
        settings = NMSConfig(
            score_threshold=score, iou_threshold=iou, candidates=9999, multi_label=multi_label
        )
        rows, count = multiclass_nms(scores, boxes, settings)
        values[key] = _best(rows)[:, [2, 3, 4, 5, 1, 0]]
        values[f"nms_conf{score}_count"] = int(count.numpy()[0])
    return values


def _yolov5_training(model: YOLOv5, variant: str, empty: bool) -> Arrays:
    _train_start(model)
    outputs = model(paddle.to_tensor(parity_image("unit", *TRAIN_CASE)))
    model.image_size = TRAIN_CASE[1:3]
    criterion = YOLOv5Loss.build(YOLOv5LossConfig(), model, 1)
    truth = padded_truth(formulas.parity_targets(empty))
    result = criterion(outputs, *truth, 0)
    loss = result.total * (2 / NOMINAL_BATCH)
    loss.backward()
    values: Arrays = {}
    labels = []
    levels = criterion.matches(*truth, TRAIN_CASE[1:3])
    for level, matches in enumerate(levels):
        image, anchor, slot = np.nonzero(matches.is_positive_BAS.numpy())
        row, column = np.divmod(matches.cell_BS.numpy()[image, slot], 128 // model.strides[level])
        labels.append(matches.label_BS.numpy()[image, slot])
        rows = np.stack([image, anchor, row, column, labels[-1]], axis=1)
        order = np.random.default_rng(0).permutation(len(rows))
        prefix = f"{variant}_bt{level}"
        values[f"{prefix}_b_a_gj_gi_cls"] = rows[order]
        values[f"{prefix}_box"] = matches.target_BS4.numpy()[image, slot][order]
        values[f"{prefix}_anchor"] = model.head.anchors.numpy()[level][anchor][order]
    gains = criterion.gains
    hyp = {"box": gains.box, "obj": gains.object, "cls": gains.classes, "anchor_t": 4.0}
    hyp |= {"label_smoothing": 0.0, "cls_pw": 1.0, "obj_pw": 1.0, "fl_gamma": 0.0}
    names = {"running_mean": "running_mean", "running_var": "running_var"}
    return {
        **values,
        "hyp_json": json.dumps(hyp),
        f"{variant}_loss": float(loss),
        f"{variant}_lbox_lobj_lcls": [float(x) for x in result.parts.values()],
        f"{variant}_num_pos": [len(x) for x in labels],
        f"{variant}_label_hist": np.stack(np.unique(np.concatenate(labels), return_counts=True)),
        **_after_backward(model, variant),
        **(_running(model, "model.0.bn", names) if variant == "full" else {}),
    }


def _classifier(model: YOLOv5Classifier, training: bool) -> Arrays:
    with paddle.no_grad():
        backbone = model.backbone(paddle.to_tensor(parity_image("unit", *CLS_CASE)))
        logits = model.head(backbone[-1]).numpy()
    values = {
        "layers_json": json.dumps({"backbone": [4, 6, 8], "neck": []}),
        **_features("backbone", backbone),
        "logits": logits,
        "probs_top5": np.argsort(-logits[0])[:5],
    }
    if training:
        _train_start(model)
        labels = np.array([1, 4])
        logits = model(paddle.to_tensor(parity_image("unit", 2, 224, 224, 14)))
        truth = paddle.zeros([2, 1, 4]), paddle.to_tensor(labels[:, None]), paddle.ones([2, 1])
        loss = ClassificationLoss(0.0)(logits, *truth, 0).total / 2
        loss.backward()
        values |= {
            "train_labels": labels,
            "train_loss": float(loss),
            "train_logits": logits.numpy(),
        }
        values |= _after_backward(model, "train")
    return values
