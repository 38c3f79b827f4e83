"""The YOLOv5 classifier: keys, logits, head, normalisation, oneDNN, static graph."""

import json
from pathlib import Path

import numpy as np
import paddle

from ppdist.config.model import YOLOv5ClsConfig, YOLOv5Config
from ppdist.distributed.paddle_api import epsilon, momentum, normalise_by_running
from ppdist.models.build import build_model
from ppdist.models.yolov5 import YOLOv5Classifier
from tests.reference.parity.reference import read_formulas, set_weights


def tiny(**changes: object) -> YOLOv5Classifier:
    paddle.seed(0)
    config = {"size": "n", "width_multiple": 0.125, "num_classes": 7, **changes}
    return build_model(YOLOv5ClsConfig.model_validate(config))


def test_small_model_has_published_parameter_count() -> None:
    assert build_model(YOLOv5ClsConfig()).parameter_count() == 5_453_480


def test_keys_shapes_and_logits_are_the_original_s(shared_dir: Path) -> None:
    formulas = read_formulas(shared_dir / "parity")
    listed = json.loads((shared_dir / "parity" / "yolov5_keys.json").read_text())["yolov5s_cls"]
    model = build_model(YOLOv5ClsConfig())
    official, state = model.official_keys(), model.state_dict()
    assert [official[key] for key in state] == [k for k in listed if "num_batches" not in k]
    set_weights(model, formulas)
    model.eval()
    with paddle.no_grad():
        logits = model(paddle.to_tensor(formulas.parity_image("unit", *formulas.CLS_CASE)))
    with np.load(shared_dir / "parity" / "yolov5s_cls.npz") as archive:
        np.testing.assert_allclose(logits.numpy(), archive["logits"], rtol=0, atol=2e-5)
        best = model.decode(logits).topk(5)[1].numpy()[0]
        assert best.tolist() == archive["probs_top5"].tolist()


def test_backbone_is_detector_backbone_without_sppf() -> None:
    detector = build_model(YOLOv5Config(size="n", width_multiple=0.125))
    mine = {k: tuple(v.shape) for k, v in tiny().state_dict().items() if k.startswith("backbone.")}
    theirs = {k: tuple(v.shape) for k, v in detector.backbone.state_dict().items()}
    assert len(mine) > 100
    assert mine == {f"backbone.{k}": v for k, v in theirs.items() if not k.startswith("sppf.")}


def test_only_the_head_s_norm_has_paddle_s_own_constants() -> None:
    model = tiny()
    assert (momentum(model.head.conv.bn), epsilon(model.head.conv.bn)) == (0.9, 1e-5)
    norm = model.backbone.stage5.conv3.bn
    assert (momentum(norm), epsilon(norm)) == (0.97, 1e-3)


def test_probabilities_are_the_softmax_in_float32() -> None:
    logits = paddle.to_tensor([[0.0, 1.0, 3.0]], dtype="bfloat16")
    got = tiny().decode(logits)
    assert got.dtype == paddle.float32
    e = np.exp([0.0, 1.0, 3.0])
    np.testing.assert_allclose(got.numpy()[0], e / e.sum(), rtol=1e-6)


def test_pixels_are_normalised_by_imagenet_statistics() -> None:
    image = paddle.full([1, 3, 2, 2], 255, dtype="uint8")
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    got = tiny().normalize(image).numpy()[0, :, 0, 0]
    np.testing.assert_allclose(got, (1 - mean) / std, rtol=1e-5)


def test_dropout_acts_in_training_alone() -> None:
    model = tiny(dropout=0.5)
    images = paddle.rand([2, 3, 64, 96])
    for norm in (x for x in model.sublayers() if isinstance(x, paddle.nn.BatchNorm2D)):
        normalise_by_running(norm)  # so that only dropout can change the outputs
    model.train()
    assert not np.array_equal(model(images).numpy(), model(images).numpy())
    model.eval()
    assert model(images).shape == [2, 7]
    assert np.array_equal(model(images).numpy(), model(images).numpy())
