"""YOLOv5 against the original detector."""

import re
from collections.abc import Collection, Iterator

import numpy as np
import paddle

from ppdist.common.errors import DataError
from ppdist.config.evaluate import NMSConfig
from ppdist.config.model import YOLOv5Config
from ppdist.losses.base import NOMINAL_BATCH
from ppdist.losses.nms import multiclass_nms
from ppdist.losses.yolov5 import Gains, Matches, YOLOv5Loss
from ppdist.models.outputs import YOLOv5Outputs
from ppdist.models.yolov5 import ANCHORS_PER_CELL, YOLOv5
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

NAME = re.compile(r"yolov5(?P<size>[nsmlx]6?)")
NAMES = "yolov5SIZE with SIZE of n s m l x n6 s6 m6 l6 x6"
# About ten times what 1e-7 noise on the weights does to the original (the folder's README).
FEATURES, SCORES, BOXES, LOSSES, STATISTICS = 2e-5, 2e-5, 1e-2, 1e-5, 2e-6
GRADIENTS = (2e-4, 2e-5)  # largest, median
TARGETS = 2e-5  # cells: rounding of boxes that go through other units
KEEP = 300  # boxes per image that NMS keeps in the references
NMS = re.compile(
    r"nms_conf(?P<score>[\d.]+)_iou(?P<iou>[\d.]+)(?P<multi>_multilabel)?_top(?P<best>\d+)"
)
# What our loss does, where the original could be told to do otherwise.
FIXED = {"cls_pw": 1.0, "obj_pw": 1.0, "fl_gamma": 0.0}


def build(name: str, num_classes: int = 80, keys: Collection[str] = ()) -> YOLOv5:
    """The model of a name that NAME matches, with fresh weights, whatever keys are known of it."""
    known = NAME.fullmatch(name)
    assert known is not None
    return YOLOv5(YOLOv5Config.model_validate({"size": known["size"], "num_classes": num_classes}))


def rebuild(reference: Reference) -> YOLOv5:
    """The model of a reference with the weights of the formulas."""
    predictions = reference.values["pred_xywh_obj_cls"]
    if predictions.ndim != 2 or predictions.shape[1] < 6:
        raise DataError(
            f"expected rows of 5 + classes, found {list(predictions.shape)}",
            code="reference_invalid",
            where="pred_xywh_obj_cls",
        )
    model = build(reference.model, predictions.shape[1] - 5)
    set_weights(model, reference.formulas)
    return model


def compare(model: YOLOv5, reference: Reference) -> Iterator[Measurement]:
    """Every comparison the reference has values for: inference, then training if it is there."""
    yield from compare_inference(model, reference)
    for variant in VARIANTS:
        if reference.values.starting(f"{variant}_"):
            yield from compare_training(model, reference, variant)


def compare_inference(model: YOLOv5, reference: Reference) -> Iterator[Measurement]:
    """Features, decoded predictions and kept boxes of the evaluation image."""
    values, formulas = reference.values, reference.formulas
    model.eval()
    image = paddle.to_tensor(formulas.parity_image("unit", *formulas.EVAL_CASE))
    with paddle.no_grad():
        backbone = model.backbone(image)
        neck = model.neck(backbone)
        outputs = model.head(neck)
        scores, boxes = model.decode(outputs)
    layers = values.json("layers_json")
    for prefix, features in (("backbone", backbone), ("neck", neck)):
        levels = len(setting(layers, prefix, list))
        yield differ("features", f"{prefix} levels", len(features), levels)
        yield from compare_features(prefix, features, values, FEATURES)
    yield differ("boxes", "strides", model.strides, values["stride"])
    anchors = model.head.anchors.numpy()
    yield Measurement("boxes", "anchors, cells", apart(anchors, values["anchors_grid"]), 1e-6)
    yield from _compare_predictions(model, outputs, scores.numpy()[0], boxes.numpy()[0], values)
    yield from _compare_kept(scores, boxes, values)


def compare_training(model: YOLOv5, reference: Reference, variant: str) -> Iterator[Measurement]:
    """Losses, matches, gradient norms and statistics of one training step."""
    values, formulas = reference.values, reference.formulas
    set_weights(model, formulas, statistics_only=True)
    model.train()
    model.clear_gradients()
    image = formulas.parity_image("unit", *formulas.TRAIN_CASE)
    outputs = model(paddle.to_tensor(image))
    size = image.shape[2], image.shape[3]
    criterion = _criterion(model, values)
    truth = padded_truth(formulas.parity_targets(VARIANTS[variant]))
    result = criterion(outputs, *truth, 0)
    # The original multiplies by the images of the batch, where ours multiplies by 64.
    loss = result.total * (len(image) / NOMINAL_BATCH)
    loss.backward()
    yield Measurement("losses", f"{variant} loss", off(loss, values[f"{variant}_loss"]), LOSSES)
    for name, want in zip(
        ("loss_box", "loss_obj", "loss_cls"), values[f"{variant}_lbox_lobj_lcls"], strict=True
    ):
        yield Measurement("losses", f"{variant} {name}", off(result.parts[name], want), LOSSES)
    levels = criterion.matches(*truth, size)
    yield from _compare_matches(variant, criterion, levels, size[1], values)
    yield from compare_gradients(
        variant, gradients(model), values["grad_names"], values[f"{variant}_grad_l2"], GRADIENTS
    )
    if variant == "full":
        names = {"running_mean": "running_mean", "running_var": "running_var"}
        yield from compare_running(variant, official_state(model), values, names, STATISTICS)


def _compare_predictions(
    model: YOLOv5, outputs: YOLOv5Outputs, score_NC: np.ndarray, box_N4: np.ndarray, values: Values
) -> Iterator[Measurement]:
    where, want = places(values, "anchor_idx"), values["pred_xywh_obj_cls"]
    yield differ("scores", "predictions", len(score_NC), values["num_anchors"])
    # decode() gives objectness times class; the two apart come from the raw maps.
    chance_NK = _sigmoid(_raw_predictions(outputs, 5 + model.num_classes)[:, 4:])
    error = apart(chance_NK[where], want[:, 4:])
    yield Measurement("scores", "objectness and classes", error, SCORES)
    error = apart(score_NC[where], want[:, 4:5] * want[:, 5:])
    yield Measurement("scores", "decoded scores", error, SCORES)
    xywh_N4 = np.concatenate(
        [(box_N4[:, :2] + box_N4[:, 2:]) / 2, box_N4[:, 2:] - box_N4[:, :2]], axis=1
    )
    yield Measurement("boxes", "boxes, px", apart(xywh_N4[where], want[:, :4]), BOXES)
    box, found, classes = values["pred_stat"]
    yield compare_statistics("boxes", "boxes, px", xywh_N4, box, BOXES)
    yield compare_statistics("scores", "objectness", chance_NK[:, 0], found, SCORES)
    yield compare_statistics("scores", "classes", chance_NK[:, 1:], classes, SCORES)


def _compare_kept(
    scores: paddle.Tensor, boxes: paddle.Tensor, values: Values
) -> Iterator[Measurement]:
    stored = [known for key in values if (known := NMS.fullmatch(key))]
    if not stored:
        raise DataError(
            "expected an array nms_confSCORE_iouIOU_topN, which is not in the file",
            code="reference_invalid",
        )
    for known in stored:
        settings = NMSConfig(
            score_threshold=float(known["score"]),
            iou_threshold=float(known["iou"]),
            candidates=scores.shape[1],
            keep=KEEP,
            multi_label=known["multi"] is not None,
        )
        rows, count = multiclass_nms(scores, boxes, settings)
        label = f"score {known['score']}, IoU {known['iou']}"
        wanted = int(values[f"nms_conf{known['score']}_count"])
        yield differ("NMS", f"{label}: count", count.tolist(), [wanted])
        want_K6 = values[known.group()][:, [5, 4, 0, 1, 2, 3]]
        best = min(int(known["best"]), wanted)
        yield from compare_suppressed(f"{label}: ", rows.numpy(), want_K6, best, (SCORES, BOXES))


def _compare_matches(
    variant: str, criterion: YOLOv5Loss, matches: Matches, width: int, values: Values
) -> Iterator[Measurement]:
    """Rows (image, anchor, row, column, class), box and anchor of every match, in one order."""
    counts, labels = [], []
    for level in range(len(criterion.strides)):
        is_positive_BAS = matches.is_positive_LBAS[level].numpy()
        image, anchor, slot = np.nonzero(is_positive_BAS)
        cell_BS = matches.cell_LBS[level].numpy()
        row, column = np.divmod(cell_BS[image, slot], width // criterion.strides[level])
        label = matches.label_BS.numpy()[image, slot]
        got_Q5 = np.stack([image, anchor, row, column, label], axis=1)
        box_Q4 = matches.target_LBS4[level].numpy()[image, slot]
        anchor_Q2 = criterion.anchors_LA2[level].numpy()[anchor]
        counts.append(len(got_Q5))
        labels.append(label)

        prefix = f"{variant}_bt{level}"
        want_Q5, want_Q4 = values[f"{prefix}_b_a_gj_gi_cls"], values[f"{prefix}_box"]
        mine, theirs = _sorted(got_Q5, box_Q4), _sorted(want_Q5, want_Q4)
        same = differ("assignment", f"{prefix} rows", got_Q5[mine], want_Q5[theirs])
        yield same
        if same.passed:
            error = apart(box_Q4[mine], want_Q4[theirs])
            yield Measurement("assignment", f"{prefix} boxes, cells", error, TARGETS)
            error = apart(anchor_Q2[mine], values[f"{prefix}_anchor"][theirs])
            yield Measurement("assignment", f"{prefix} anchors, cells", error, TARGETS)
    yield differ("assignment", f"{variant} matches", counts, values[f"{variant}_num_pos"])
    histogram = np.stack(np.unique(np.concatenate(labels), return_counts=True))
    yield differ("assignment", f"{variant} histogram", histogram, values[f"{variant}_label_hist"])


def _criterion(model: YOLOv5, values: Values) -> YOLOv5Loss:
    """The loss with the file's gains, which are scaled to image, classes and levels already."""
    settings = values.json("hyp_json")
    box, objects, classes, threshold, smoothing, *_ = (
        setting(settings, key, float)
        for key in ("box", "obj", "cls", "anchor_t", "label_smoothing", *FIXED)
    )
    for key, value in FIXED.items():
        if settings[key] != value:
            raise DataError(
                f"{key} is {settings[key]}; this comparison knows {value} only",
                code="reference_setting_unknown",
                where="hyp_json",
            )
    return YOLOv5Loss(
        Gains(box=box, object=objects, classes=classes),
        num_classes=model.num_classes,
        strides=model.strides,
        anchors_LA2=model.head.anchors,
        threshold=threshold,
        label_smoothing=smoothing,
    )


def _sorted(rows_Q5: np.ndarray, box_Q4: np.ndarray) -> np.ndarray:
    """Order by class, image, anchor, row, column, and where all are equal by box."""
    image, anchor, row, column, label = rows_Q5.transpose()
    return np.lexsort([box_Q4[:, 2], column, row, anchor, image, label])


def _raw_predictions(outputs: YOLOv5Outputs, width: int) -> np.ndarray:
    """Logits [N, width] of the first image: level by level, anchor by anchor, row by row."""
    levels = [maps.numpy()[0].reshape(ANCHORS_PER_CELL, width, -1) for maps in outputs.logits]
    return np.concatenate([level.transpose(0, 2, 1).reshape(-1, width) for level in levels])


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * logits.astype("float64"))
