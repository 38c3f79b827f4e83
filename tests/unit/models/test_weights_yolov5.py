"""YOLOv5 weights under our keys and the original's: both ways, other class counts, other heads."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.model import YOLOv5ClsConfig, YOLOv5Config
from ppdist.models.build import build_model
from ppdist.models.weights import (
    arrays_of,
    load_weights,
    official_arrays_of,
    read_arrays,
    write_arrays,
)
from ppdist.models.yolov5 import YOLOv5, YOLOv5Classifier
from tests.errors import raises
from tests.unit.models.kept import built_once
from tests.unit.models.torch_lookalikes import FakeTorch

WIDTH = 0.0625


@built_once
def detector(seed: int, num_classes: int = 80, size: str = "n") -> YOLOv5:
    paddle.seed(seed)
    return build_model(YOLOv5Config(size=size, width_multiple=WIDTH, num_classes=num_classes))


@built_once
def classifier(seed: int, num_classes: int = 10) -> YOLOv5Classifier:
    paddle.seed(seed)
    config = YOLOv5ClsConfig(size="n", width_multiple=WIDTH, num_classes=num_classes)
    return build_model(config)


def assert_same(model: paddle.nn.Layer, other: paddle.nn.Layer) -> None:
    mine, theirs = arrays_of(model), arrays_of(other)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("build", [detector, classifier])
@pytest.mark.parametrize("name", ["w.pt", "w.pdparams", "w.npz", "w.safetensors"])
@pytest.mark.parametrize("form", [arrays_of, official_arrays_of])
def test_both_kinds_of_keys_load_from_every_kind_of_file(tmp_path, build, name, form) -> None:
    source, target = build(seed=1), build(seed=2)
    write_arrays(tmp_path / name, form(source))
    report = load_weights(target, tmp_path / name)
    assert_same(target, source)
    assert len(report.loaded) == len(source.state_dict())
    assert not report.fresh and not report.ignored


def test_official_form_has_original_keys_and_layout() -> None:
    model = classifier(seed=1)
    ours, official = arrays_of(model), official_arrays_of(model)
    np.testing.assert_array_equal(official["model.9.linear.weight"], ours["head.linear.weight"].T)
    assert official["model.9.linear.weight"].shape == (10, 1280)
    counters = [key for key in official if key.endswith("num_batches_tracked")]
    assert len(counters) == sum(key.endswith(".running_var") for key in official)
    assert all(official[key].dtype == np.int64 and official[key].shape == () for key in counters)


def test_half_precision_pickled_model_loads(tmp_path, monkeypatch) -> None:
    source, target = detector(seed=1), detector(seed=2)
    torch = FakeTorch(monkeypatch)
    halves = {key: value.astype("float16") if value.dtype == np.float32 else value
              for key, value in official_arrays_of(source).items()}  # fmt: skip
    checkpoint = {"epoch": -1, "model": torch.model(halves), "ema": None, "optimizer": None}
    report = load_weights(target, torch.save(tmp_path / "yolov5n.pt", checkpoint))
    assert len(report.loaded) == len(source.state_dict())
    for key, value in arrays_of(target).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, arrays_of(source)[key].astype("float16"))
    np.testing.assert_array_equal(target.anchors_LA2, source.anchors_LA2)  # exact in half as well


@pytest.mark.parametrize("form", [arrays_of, official_arrays_of])
def test_detector_and_classifier_share_backbone(tmp_path, form) -> None:
    write_arrays(tmp_path / "detector.npz", form(detector(seed=1)))
    target = classifier(seed=2)
    report = load_weights(target, tmp_path / "detector.npz")
    assert all(key.startswith("head.") for key in report.fresh)
    assert "backbone" in report.reason
    theirs = arrays_of(detector(seed=1))
    assert all(np.array_equal(arrays_of(target)[key], theirs[key]) for key in report.loaded)

    write_arrays(tmp_path / "classifier.npz", form(classifier(seed=1)))
    report = load_weights(detector(seed=2), tmp_path / "classifier.npz")
    assert "backbone.sppf" in report.reason
    assert not any(key.startswith("backbone.stage") for key in report.fresh)


def test_a_backbone_with_holes_is_an_error(tmp_path) -> None:
    arrays = {key: value for key, value in arrays_of(classifier(seed=1)).items()
              if key.startswith("backbone.") and "stage4.conv2" not in key}  # fmt: skip
    write_arrays(tmp_path / "w.npz", arrays)
    with raises("weights_shape_mismatch", "backbone.stage4.conv2.conv.weight"):
        load_weights(detector(seed=2), tmp_path / "w.npz")


def test_four_level_weights_do_not_fit_three_levels(tmp_path) -> None:
    write_arrays(tmp_path / "w.pt", official_arrays_of(detector(seed=1, size="n6")))
    with raises("weights_shape_mismatch"):
        load_weights(detector(seed=2), tmp_path / "w.pt")


def test_old_release_entries_ignored_and_named(tmp_path) -> None:
    arrays = official_arrays_of(detector(seed=1))
    write_arrays(tmp_path / "w.pt", {**arrays, "model.24.anchor_grid": np.ones([3, 1, 3, 1, 1, 2])})
    report = load_weights(detector(seed=2), tmp_path / "w.pt")
    assert report.ignored == ("model.24.anchor_grid",)


def test_lightning_prefix_precedes_original_prefix(tmp_path) -> None:
    source, target = detector(seed=1), detector(seed=2)
    arrays = {f"model.{key}": value for key, value in official_arrays_of(source).items()}
    write_arrays(tmp_path / "w.pt", {**arrays, "loss.gain": np.ones(1, "float32")})
    report = load_weights(target, tmp_path / "w.pt")
    assert_same(target, source)
    assert report.prefix == "model." and report.ignored == ("loss.gain",)


@pytest.mark.parametrize("build", [detector, classifier])
def test_weights_with_fused_bn_are_named_as_such(tmp_path, build) -> None:
    arrays = {key: value for key, value in official_arrays_of(build(seed=1)).items()
              if ".bn." not in key}  # fmt: skip
    biases = {key.replace("weight", "bias"): np.zeros(len(value), "float32")
              for key, value in arrays.items() if key.endswith(".conv.weight")}  # fmt: skip
    write_arrays(tmp_path / "w.pt", {**arrays, **biases})
    with raises("weights_folded"):
        load_weights(build(seed=2), tmp_path / "w.pt")


def test_a_bias_beside_a_batch_norm_is_not_dropped(tmp_path) -> None:
    arrays = official_arrays_of(detector(seed=1))
    write_arrays(tmp_path / "w.pt", {**arrays, "model.0.conv.bias": np.ones(8, "float32")})
    with raises("weights_of_other_architecture", "model.0.conv.bias"):
        load_weights(detector(seed=2), tmp_path / "w.pt")


def test_segmentation_model_named_and_gives_backbone(tmp_path) -> None:
    arrays = official_arrays_of(detector(seed=1))
    masks = {"model.24.proto.cv1.conv.weight": np.ones([4, 4, 3, 3], "float32")}
    write_arrays(tmp_path / "w.pt", {**arrays, **masks})
    with raises("weights_of_segmentation", "model.24.proto.cv1"):
        load_weights(detector(seed=2), tmp_path / "w.pt")
    assert "a backbone" in load_weights(classifier(seed=2), tmp_path / "w.pt").reason


def test_a_full_disk_leaves_the_older_file_in_place(tmp_path, monkeypatch) -> None:
    path = tmp_path / "w.pt"
    write_arrays(path, {"a": np.ones(3, "float32")})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with raises("file_unwritable", "w.pt", "No space left"):
        write_arrays(path, {"a": np.zeros(3, "float32")})
    np.testing.assert_array_equal(read_arrays(path)["a"], np.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["w.pt"]
