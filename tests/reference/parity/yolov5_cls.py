"""YOLOv5's classifier against the original."""

import re
from collections.abc import Collection, Iterator

import paddle

from ppdist.common.errors import DataError
from ppdist.config.loss import ClassificationLossConfig
from ppdist.config.model import YOLOv5ClsConfig
from ppdist.losses.classification import ClassificationLoss
from ppdist.models.yolov5 import YOLOv5Classifier
from tests.reference.parity.measure import (
    Measurement,
    apart,
    compare_features,
    compare_gradients,
    differ,
    off,
)
from tests.reference.parity.reference import Reference, gradients, set_weights, setting

NAME = re.compile(r"yolov5(?P<size>[nsmlx])_cls")
NAMES = "yolov5SIZE_cls with SIZE of n s m l x"
# About ten times what 1e-7 noise on the weights does to the original (the folder's README).
FEATURES, LOGITS, LOSSES = 2e-5, 2e-5, 1e-5
GRADIENTS = (2e-4, 2e-5)  # largest, median
TRAIN_SIZE_AND_SEED = (224, 224, 14)  # height, width, seed of the training images


def build(name: str, num_classes: int = 1000, keys: Collection[str] = ()) -> YOLOv5Classifier:
    """The model of a name that NAME matches, with fresh weights, whatever keys are known of it."""
    known = NAME.fullmatch(name)
    assert known is not None
    config = {"size": known["size"], "num_classes": num_classes}
    return YOLOv5Classifier(YOLOv5ClsConfig.model_validate(config))


def rebuild(reference: Reference) -> YOLOv5Classifier:
    """The model of a reference with the weights of the formulas."""
    logits = reference.values["logits"]
    if logits.ndim != 2:
        raise DataError(
            f"expected one row per image, found shape {list(logits.shape)}",
            code="reference_invalid",
            where="logits",
        )
    model = build(reference.model, logits.shape[1])
    set_weights(model, reference.formulas)
    return model


def compare(model: YOLOv5Classifier, reference: Reference) -> Iterator[Measurement]:
    """Every comparison the reference has values for: inference, then training if it is there."""
    yield from compare_inference(model, reference)
    if reference.values.starting("train_"):
        yield from compare_training(model, reference)


def compare_inference(model: YOLOv5Classifier, reference: Reference) -> Iterator[Measurement]:
    """Features, logits and the five best classes of the evaluation image."""
    values, formulas = reference.values, reference.formulas
    model.eval()
    image = paddle.to_tensor(formulas.parity_image("unit", *formulas.CLS_CASE))
    with paddle.no_grad():
        backbone = model.backbone(image)
        logits = model.head(backbone[-1])
        probabilities = model.decode(logits)
    layers = values.json("layers_json")
    levels = len(setting(layers, "backbone", list))
    yield differ("features", "backbone levels", len(backbone), levels)
    yield from compare_features("backbone", backbone, values, FEATURES)
    yield Measurement("scores", "logits", apart(logits.numpy(), values["logits"]), LOGITS)
    best = probabilities.numpy()[0].argsort(kind="stable")[::-1][:5]
    yield differ("scores", "five best classes", best, values["probs_top5"])


def compare_training(model: YOLOv5Classifier, reference: Reference) -> Iterator[Measurement]:
    """Logits, loss and gradient norms of one training step, without label smoothing."""
    values, formulas = reference.values, reference.formulas
    set_weights(model, formulas, statistics_only=True)
    model.train()
    model.clear_gradients()
    labels = values["train_labels"].astype("int64")
    if (
        labels.ndim != 1
        or not labels.size
        or not ((labels >= 0) & (labels < model.num_classes)).all()
    ):
        raise DataError(
            f"expected a list of labels 0..{model.num_classes - 1}",
            code="reference_invalid",
            where="train_labels",
        )
    image = formulas.parity_image("unit", len(labels), *TRAIN_SIZE_AND_SEED)
    logits = model(paddle.to_tensor(image))
    criterion = ClassificationLoss.build(ClassificationLossConfig(label_smoothing=0.0), model, 1)
    boxes = paddle.zeros([len(labels), 1, 4])  # nothing reads them
    mask = paddle.ones([len(labels), 1])
    result = criterion(logits, boxes, paddle.to_tensor(labels[:, None]), mask, 0)
    loss = result.total / result.normalizer
    loss.backward()
    error = apart(logits.detach().numpy(), values["train_logits"])
    yield Measurement("scores", "training logits", error, LOGITS)
    yield Measurement("losses", "loss", off(loss, values["train_loss"]), LOSSES)
    yield from compare_gradients(
        "training", gradients(model), values["grad_names"], values["train_grad_l2"], GRADIENTS
    )
