"""Are our numbers those of the original implementation?

A folder of references holds, per model, one .npz with outputs, losses, assignments and gradient
norms of the original, and `parity_weights.py`, the formulas of weights, images and targets.  This
module builds our model with the same weights and measures how far every number is off.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import paddle

from ppdist.errors import DataError
from ppdist.losses.ppyoloe import PPYOLOELoss, PPYOLOELossConfig
from ppdist.models.ppyoloe import PPYOLOE, PPYOLOEConfig, PPYOLOEOutputs
from ppdist.postprocess import NMSConfig, multiclass_nms

# About ten times what 1e-7 noise on the weights does to the original (its README).
FEATURES, SCORES, BOXES, LOSSES, SOFT_LABELS, STATISTICS = 2e-5, 2e-5, 2e-3, 2e-5, 2e-4, 2e-6
GRADIENTS, GRADIENTS_MEDIAN, GRADIENT_FLOOR = 2e-3, 3e-5, 1e-3
FORMULAS = "parity_weights.py"
KEYS = "ppyoloe_keys.json"


class Measurement(NamedTuple):
    """One compared quantity: how far off, and how far is allowed."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for nan


class Reference(NamedTuple):
    """One .npz of the folder with what is needed to rebuild its model."""

    name: str
    values: dict[str, np.ndarray]
    config: dict
    formulas: ModuleType


def read_references(folder: Path) -> list[Reference]:
    """All PP-YOLOE references of a folder; runs its parity_weights.py, so trust the folder.

    Raises: DataError: no folder, no formulas, or no reference of this family in it.
    """
    if not (folder / FORMULAS).is_file():
        raise DataError(f"{folder}: expected a folder of parity references with {FORMULAS} in it")
    spec = importlib.util.spec_from_file_location("parity_weights", folder / FORMULAS)
    assert spec is not None and spec.loader is not None
    formulas = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(formulas)
    found = []
    for path in sorted(folder.glob("ppyoloe*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            values = {key: archive[key] for key in archive.files}
        config = json.loads(str(values["config_json"]))
        found.append(Reference(path.stem, values, config, formulas))
    if not found:
        raise DataError(f"{folder}: no ppyoloe*.npz in it")
    return found


def compare(reference: Reference) -> Iterator[Measurement]:
    """Every comparison the reference has values for: inference, then training if it is there."""
    model = build(reference)
    yield from compare_inference(model, reference)
    for variant in ("full", "empty1"):
        for phase in ("atss", "tal"):
            if f"{variant}_{phase}_loss" in reference.values:
                yield from compare_training(model, reference, variant, phase)


def compare_keys(folder: Path, sizes: str = "smlx") -> Iterator[Measurement]:
    """Our state-dict keys and shapes against the official ones: 0 differences per model.

    Yields nothing where the folder has no list of keys.
    """
    if not (folder / KEYS).is_file():
        return
    official = json.loads((folder / KEYS).read_text(encoding="utf-8"))
    for name, shapes in official.items():
        if name[-1] not in sizes:
            continue
        ours = {key: list(value.shape) for key, value in _model(name, 80).state_dict().items()}
        different = [key for key in {*ours, *shapes} if ours.get(key) != shapes.get(key)]
        yield Measurement(f"{name} keys and shapes", len(different), 0)


def build(reference: Reference) -> PPYOLOE:
    """The model of a reference with the weights of the formulas."""
    model = _model(reference.config["model"], reference.config["num_classes"])
    set_weights(model, reference)
    return model


def set_weights(model: PPYOLOE, reference: Reference) -> None:
    """(Re)sets every weight and statistic to its formula."""
    for key, tensor in model.state_dict().items():
        value = reference.formulas.parity_value(key, tensor.shape)
        if value is not None:
            tensor.set_value(value)


def compare_inference(model: PPYOLOE, reference: Reference) -> Iterator[Measurement]:
    """Features, scores, boxes and kept boxes of the evaluation image."""
    values, formulas = reference.values, reference.formulas
    model.eval()
    image = paddle.to_tensor(formulas.parity_image("normal", *formulas.EVAL_CASE))
    with paddle.no_grad():
        backbone = model.backbone(image)
        neck = model.neck(backbone)
        scores, boxes = model.decode(model.yolo_head(neck))
    for group, features in (("backbone", backbone), ("neck", neck)):
        for level, feature in enumerate(features):
            want = values[f"{group}{level}_val"]
            got = feature.numpy().ravel()[values[f"{group}{level}_idx"]]
            error = np.abs(got - want).max() / np.abs(want).max()
            yield Measurement(f"{group}{level} / largest", float(error), FEATURES)
    where = values["anchor_idx"]
    yield Measurement("scores", _apart(scores.numpy()[0][where], values["scores"]), SCORES)
    yield Measurement("boxes, px", _apart(boxes.numpy()[0][where], values["boxes_xyxy"]), BOXES)
    nms = reference.config["nms"]
    settings = NMSConfig(
        score_threshold=nms["score_threshold"],
        iou_threshold=nms["nms_threshold"],
        candidates=nms["nms_top_k"],
        keep=nms["keep_top_k"],
    )
    rows, count = multiclass_nms(scores, boxes, settings)
    missed = abs(int(count.numpy()[0]) - int(values["nms_count"][0]))
    yield Measurement("NMS count", missed, 0)
    yield Measurement("NMS top rows", _rows_missed(rows.numpy(), values["nms_top50"]), 0)


def compare_training(
    model: PPYOLOE, reference: Reference, variant: str, phase: str
) -> Iterator[Measurement]:
    """Losses, assignment, gradient norms and statistics of one training step."""
    values = {
        key.removeprefix(f"{variant}_{phase}_"): value for key, value in reference.values.items()
    }
    set_weights(model, reference)
    model.train()
    model.clear_gradients()
    formulas = reference.formulas
    outputs = model(paddle.to_tensor(formulas.parity_image("normal", *formulas.TRAIN_CASE)))
    criterion = _criterion(reference, phase)
    truth = _truth(formulas.parity_targets(variant == "empty1"))
    result = criterion(outputs, *truth, 0)
    divisor = max(1.0, float(result.normalizer))
    (result.total / divisor).backward()
    label = f"{variant} {phase}"
    for name, value in {"loss": result.total, **result.parts}.items():
        error = abs(float(value) / divisor / float(values[name]) - 1)
        yield Measurement(f"{label} {name}, relative", error, LOSSES)
    yield from _compare_assignment(label, model, criterion, outputs, truth, values)
    yield from _compare_gradients(label, model, values)
    if variant == "full":
        state, key = model.state_dict(), str(values["bn_after_forward_key"])
        for ours, theirs in (("_mean", "mean"), ("_variance", "variance")):
            want = values[f"bn_after_forward_{theirs}"]
            error = np.abs(state[f"{key}.{ours}"].numpy() / want - 1).max()
            yield Measurement(f"{label} running {theirs}, relative", float(error), STATISTICS)


def _compare_assignment(
    label: str,
    model: PPYOLOE,
    criterion: PPYOLOELoss,
    outputs: PPYOLOEOutputs,
    truth: tuple[paddle.Tensor, ...],
    values: dict[str, np.ndarray],
) -> Iterator[Measurement]:
    slots = criterion.assign(outputs, *truth, 0)
    image, slot = np.nonzero(slots.taken_BS.numpy())
    anchor, box = (x.numpy()[image, slot] for x in (slots.anchor_BS, slots.box_BS))
    boxes_BN4 = model.decode(outputs)[1].detach().numpy()
    batch, count, _ = boxes_BN4.shape
    label_BN = np.full((batch, count), criterion.num_classes)
    label_BN[image, anchor] = truth[1].numpy()[image, box]
    score_BN = np.zeros((batch, count))
    score_BN[image, anchor] = slots.score_BS.numpy()[image, slot]
    box_BN4 = np.zeros((batch, count, 4))
    box_BN4[image, anchor] = truth[0].numpy()[image, box]

    where, want = values["assign_idx"], values["assign_label"]
    positive = want < criterion.num_classes
    wrong = int((label_BN.ravel()[where] != want).sum())
    yield Measurement(f"{label} assigned labels", wrong, 0)
    found = (label_BN < criterion.num_classes).sum(axis=1)
    yield Measurement(f"{label} positives", int(np.abs(found - values["num_pos"]).sum()), 0)
    histogram = np.stack(np.unique(label_BN, return_counts=True))
    equal = histogram.shape == values["label_hist"].shape and (histogram == values["label_hist"])
    yield Measurement(f"{label} label histogram", float(not np.all(equal)), 0)
    error = _apart(score_BN.ravel()[where], values["assign_score"])
    yield Measurement(f"{label} assigned scores", error, SOFT_LABELS)
    error = _apart(box_BN4.reshape(-1, 4)[where][positive], values["assign_box"][positive])
    yield Measurement(f"{label} assigned boxes, px", error, 0)
    maps = zip(outputs.class_logits, model.strides)
    stride_N = np.concatenate([np.full(x.shape[2] * x.shape[3], stride) for x, stride in maps])
    apart = np.abs(boxes_BN4 - box_BN4)[image, anchor] / stride_N[anchor][:, None]
    error = abs(float(apart.mean()) / float(values["loss_l1"]) - 1)
    yield Measurement(f"{label} loss_l1, relative", error, LOSSES)


def _compare_gradients(
    label: str, model: PPYOLOE, values: dict[str, np.ndarray]
) -> Iterator[Measurement]:
    trainable = {key: p for key, p in model.named_parameters() if not p.stop_gradient}
    names = [str(name) for name in values["grad_names"]]
    yield Measurement(f"{label} trainable keys", len(set(trainable) ^ set(names)), 0)
    got = np.array([_length(trainable[name].grad) for name in names])
    want = values["grad_l2"]
    error = np.abs(got - want) / np.maximum(want, GRADIENT_FLOOR * want.max())
    yield Measurement(f"{label} gradient norms, largest", float(error.max()), GRADIENTS)
    yield Measurement(f"{label} gradient norms, median", float(np.median(error)), GRADIENTS_MEDIAN)


def _model(name: str, num_classes: int) -> PPYOLOE:
    known = re.fullmatch(r"ppyoloe(?P<plus>_plus)?_(?P<size>[tsmlx])", name)
    if known is None:
        raise DataError(f"{name}: expected ppyoloe_SIZE or ppyoloe_plus_SIZE, SIZE in t s m l x")
    return PPYOLOE(
        PPYOLOEConfig.model_validate(
            {
                "variant": "plus" if known["plus"] else "crn",
                "size": known["size"],
                "num_classes": num_classes,
            }
        )
    )


def _criterion(reference: Reference, phase: str) -> PPYOLOELoss:
    config = reference.config
    weight, atss, tal = config["head"]["loss_weight"], config["atss"], config["tal"]
    settings = PPYOLOELossConfig(
        class_gain=weight["class"],
        box_gain=weight["iou"],
        dfl_gain=weight["dfl"],
        atss_topk=atss["topk"],
        tal_topk=tal["topk"],
        tal_alpha=tal["alpha"],
        tal_beta=tal["beta"],
    )
    static_steps = 1 if phase == "atss" else 0
    return PPYOLOELoss(settings, num_classes=config["num_classes"], static_steps=static_steps)


def _truth(targets: dict[str, np.ndarray]) -> tuple[paddle.Tensor, ...]:
    return (
        paddle.to_tensor(targets["gt_bbox"]),
        paddle.to_tensor(targets["gt_class"][..., 0].astype("int64")),
        paddle.to_tensor(targets["pad_gt_mask"][..., 0]),
    )


def _rows_missed(got_R6: np.ndarray, want_K6: np.ndarray) -> int:
    """How many wanted rows [class, score, box] have no partner of their own among ours."""
    free = np.ones(len(got_R6), bool)
    missed = 0
    for row in want_K6:
        near = free & (got_R6[:, 0] == row[0]) & (np.abs(got_R6[:, 1] - row[1]) <= SCORES)
        near &= np.abs(got_R6[:, 2:] - row[2:]).max(axis=1) <= BOXES
        if near.any():
            free[int(near.argmax())] = False
        else:
            missed += 1
    return missed


def _apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max(initial=0.0))


def _length(gradient: paddle.Tensor | None) -> float:
    return 0.0 if gradient is None else float(np.linalg.norm(gradient.numpy().astype("float64")))
