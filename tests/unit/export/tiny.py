"""A tiny detector and a tiny classifier, for tests of exports, and exports of them to read."""

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from ppdist.config.evaluate import NMSConfig
from ppdist.config.model import PPYOLOEConfig, YOLOv5ClsConfig
from ppdist.config.preprocess import ResizeSection
from ppdist.distributed.paddle_api import momentum, running_statistics, set_momentum
from ppdist.export.export import export_model
from ppdist.export.spec import InferenceSpec, InputSection
from ppdist.export.verify import unexplained_rows
from ppdist.lab.benchmark.latency import exportable_formats
from ppdist.models.base import ImageModel
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.yolov5 import YOLOv5Classifier
from tests.once import for_all_workers

SIZE = (64, 96)
FORMATS = exportable_formats()
NMS = NMSConfig(score_threshold=0.3)


def tiny_model(kind: type[PPYOLOE] = PPYOLOE, seed: int = 0, **options: Any) -> PPYOLOE:
    """A PP-YOLOE+ of width 1/8 whose scores and boxes depend on the image, in training mode.

    Most boxes lie inside the image: on a box that is all of it many a fault does not show.
    """
    paddle.seed(seed)
    options = {"width_multiple": 0.125, "depth_multiple": 0.33, **options}
    model = kind(PPYOLOEConfig(num_classes=3, **options))
    with paddle.no_grad():
        for layer in model.yolo_head.pred_cls:
            layer.weight.set_value(paddle.randn(layer.weight.shape) * 0.08)
            layer.bias.set_value(paddle.full(layer.bias.shape, -2.0))
        for layer in model.yolo_head.pred_reg:
            layer.weight.set_value(paddle.randn(layer.weight.shape) * 0.1)
            bins = layer.bias.shape[0] // 4  # near sides: else every box is the whole image
            layer.bias.set_value(-paddle.arange(bins, dtype="float32").tile([4]))
        norms = [x for x in model.sublayers() if isinstance(x, paddle.nn.BatchNorm2D)]
        for layer in norms:
            set_momentum(layer, 0.0)  # statistics of exactly this batch; fresh ones hide the image
        model.train()
        model(model.normalize(paddle.to_tensor(pictures(4, 128, 128))))
        for layer in norms:
            set_momentum(layer, 0.9)
            # A channel divided by little would make much of every rounding.
            variance = running_statistics(layer)[1]
            variance.set_value(variance.clip(min=0.2))
    return model


def tiny_spec(**changes: Any) -> InferenceSpec:
    names = changes.pop("class_names", ("red", "green", "blue"))
    return InferenceSpec(
        model="tiny", input=InputSection(**{"size": SIZE, **changes}), nms=NMS,
        class_names=names, category_ids=tuple(range(1, len(names) + 1)),
    )  # fmt: skip


def pictures(batch: int, height: int = SIZE[0], width: int = SIZE[1]) -> np.ndarray:
    rng = np.random.default_rng(7)
    small = rng.integers(0, 256, (batch, 3, height // 8, width // 8))
    return small.repeat(8, 2).repeat(8, 3).astype(np.float32)


def assert_same_boxes(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(got) == len(expected)
    for got_R6, expected_R6 in zip(got, expected):
        assert unexplained_rows(got_R6, expected_R6, NMS) == 0
        assert abs(len(got_R6) - len(expected_R6)) <= 1
    assert sum(map(len, expected)) >= 5


def tiny_classifier(kind: type[YOLOv5Classifier] = YOLOv5Classifier) -> YOLOv5Classifier:
    """Seven classes, width 1/8, with probabilities that depend on the image."""
    paddle.seed(0)
    model = kind(
        YOLOv5ClsConfig(width_multiple=0.125, depth_multiple=0.33, num_classes=7, dropout=0.5)
    )
    norms = [layer for layer in model.sublayers() if isinstance(layer, paddle.nn.BatchNorm2D)]
    momenta = [momentum(layer) for layer in norms]
    with paddle.no_grad():
        model.head.linear.weight.set_value(model.head.linear.weight * 5)
        for layer in norms:
            set_momentum(layer, 0.0)  # statistics of exactly this batch; fresh ones hide the image
        model(model.normalize(paddle.to_tensor(pictures(4, 128, 128))))
    for layer, value in zip(norms, momenta):
        set_momentum(layer, value)
    return model


def classifier_spec(**changes: object) -> InferenceSpec:
    names = tuple(f"kind {number}" for number in range(7))
    return InferenceSpec(
        task="classify", model="tiny", input=InputSection(**{"size": SIZE, **changes}),
        resize=ResizeSection(mode="centre_crop", interpolation="linear"),
        class_names=names, category_ids=tuple(range(7)),
    )  # fmt: skip


def exported_detector(factory: pytest.TempPathFactory, nms_in_graph: bool = True) -> Path:
    """`tiny_model` in all of FORMATS, made once for all tests; they only read it."""

    def make(folder: Path) -> None:
        export_model(tiny_model(), folder / "model", tiny_spec(), FORMATS, nms_in_graph)

    name = "detector-with-nms" if nms_in_graph else "detector-without-nms"
    return for_all_workers(factory, name, make) / "model"


def exported_classifier(factory: pytest.TempPathFactory) -> Path:
    """As exported_detector, of `tiny_classifier`."""

    def make(folder: Path) -> None:
        export_model(tiny_classifier(), folder / "model", classifier_spec(), FORMATS)

    return for_all_workers(factory, "classifier", make) / "model"


@paddle.no_grad()
def probabilities_of(model: ImageModel, images_B3HW: np.ndarray) -> np.ndarray:
    """What a classifier computes in dygraph, [B, C]."""
    model.eval()
    return model.predict(paddle.to_tensor(images_B3HW)).numpy()
