"""Model cards: written beside weights, read back from every kind, bounded."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ppdist.common.manifest import CARD_NOTE
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.model import PPYOLOEConfig, RTDETRConfig, YOLOv5Config
from ppdist.config.parse import parse_plain, parse_tree
from ppdist.config.yaml import Place, tree_of
from ppdist.engine.checkpoint import save_checkpoint
from ppdist.models.build import build_model
from ppdist.models.model_card import (
    AGPL,
    ModelCard,
    average_of,
    card_of,
    config_of_weights,
    origin,
    read_card,
    require_fit,
)
from ppdist.models.weights import (
    ClassNames,
    arrays_of,
    check_arrays,
    load_all_weights,
    load_weights,
    official_arrays_of,
    write_arrays,
)
from tests.errors import raises
from tests.unit.models.torch_lookalikes import FakeTorch

ARRAYS = {"a": np.ones([2, 3], "float32")}
NAMES = ("cat", "dög \u2028?")


def experiment(resize: str = "letterbox", **model: object) -> ExperimentConfig:
    data = {"root": "r", "train": {}, "val": {}, "resize": resize}
    section = {"name": "yolov5", "size": "n", "width_multiple": 0.0625, "num_classes": 2, **model}
    return parse_plain({"data": data, "model": section}, "test", (), ExperimentConfig)


def card(resize: str = "letterbox") -> ModelCard:
    config = experiment(resize)
    given = {"licence": "Apache-2.0", "source": "trained from scratch on pets"}
    names = [name.replace("?", "\ud800") for name in NAMES]  # half a character
    return card_of(config, build_model(config.model), names, (3, 9), **given)


@pytest.mark.parametrize("name", ["w.safetensors", "w.npz"])
def test_a_card_travels_in_a_weight_file(tmp_path, name) -> None:
    written = card()
    write_arrays(tmp_path / name, ARRAYS, {CARD_NOTE: written.text()})
    check_arrays(tmp_path / name, ARRAYS)  # no array more
    found = read_card(tmp_path / name)
    assert found == written and found.class_names == NAMES
    assert found.normalised.std == (1, 1, 1) and found.resize.mode == "letterbox"


@pytest.mark.parametrize("resize", ["letterbox", "stretch", "stretch_antialiased"])
def test_the_config_of_a_card_is_the_one_of_training(tmp_path, resize) -> None:
    write_arrays(tmp_path / "w.npz", ARRAYS, {CARD_NOTE: card(resize).text()})
    config = config_of_weights(tmp_path / "w.npz", ["data.root=mine"])
    assert config.model == experiment().model and config.data.resize == resize
    assert config.data.class_names == NAMES and config.data.root == "mine"
    assert config.loss.name == "yolov5"


@pytest.mark.parametrize(
    "section",
    [{"name": "yolov5_cls", "size": "n", "width_multiple": 0.0625, "num_classes": 2},
     {"name": "ppyoloe", "width_multiple": 0.125, "num_classes": 2, "one_to_one": True}],
)  # fmt: skip
def test_every_model_comes_back_from_its_card(tmp_path, section) -> None:
    of_images = section["name"] == "yolov5_cls"
    data = {"root": "r", "train": {}, "val": {}, "format": "folder" if of_images else "coco"}
    tree = tree_of({"data": data, "model": section}, Place("test"))
    config = parse_tree(tree, ExperimentConfig, ())
    written = card_of(config, build_model(config.model), ("a", "b"), (0, 1))
    write_arrays(tmp_path / "w.npz", ARRAYS, {CARD_NOTE: written.text()})
    found = config_of_weights(tmp_path / "w.npz")
    assert found.model == config.model and found.suppression == config.suppression
    assert written.task == config.model.task and (written.nms is None) == of_images


@pytest.mark.parametrize("name", ["w.pdparams", "w.pt", "w.npz", "w.safetensors"])
def test_weights_without_a_card_have_none(tmp_path, name) -> None:
    write_arrays(tmp_path / name, ARRAYS)
    assert read_card(tmp_path / name) is None
    with raises("weights_without_card"):
        config_of_weights(tmp_path / name)


def test_an_altered_card_of_a_checkpoint_is_damage(tmp_path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": ARRAYS}, {"step": 1}, "", card().text())
    assert read_card(path) == card()
    (path / "model_card.json").write_text(ModelCard().text())
    with raises("checkpoint_damaged"):
        read_card(path)
    (path / "model_card.json").unlink()
    with raises("checkpoint_damaged"):
        read_card(path)


def pickled(torch: FakeTorch, **state: object) -> object:
    model = torch.model({"model.0.conv.weight": np.ones(3, "float32")})
    rows = {"nc": 3, "depth_multiple": 0.33, "width_multiple": 0.25}
    model.yaml = {**rows, "head": [[[17, 20, 23], 1, "Detect", ["nc", "anchors"]]]}
    model.names = {0: "a", 1: "b", 2: "c"}
    for key, value in state.items():
        setattr(model, key, value)
    return model


def test_a_pickled_yolov5_says_names_size_and_licence(tmp_path, monkeypatch) -> None:
    torch = FakeTorch(monkeypatch)
    content = {"model": pickled(torch), "ema": None, "opt": {"imgsz": 416}}
    torch.save(tmp_path / "best.pt", content)
    found = read_card(tmp_path / "best.pt")
    assert found.class_names == ("a", "b", "c") and found.licence == AGPL
    assert (found.model["size"], found.model["width_multiple"]) == ("n", None)
    assert found.model["num_classes"] == 3 and found.image_size == (416, 416)
    assert found.resize.mode == "letterbox" and found.nms.iou_threshold == 0.6
    assert config_of_weights(tmp_path / "best.pt").model.num_classes == 3


def test_a_pt_is_loaded_and_tuned_by_what_it_says(tmp_path, monkeypatch) -> None:
    section = {"name": "yolov5", "size": "n", "width_multiple": 0.0625, "num_classes": 3}
    source = build_model(YOLOv5Config.model_validate(section))
    torch = FakeTorch(monkeypatch)
    model = torch.model(official_arrays_of(source))
    rows = {"nc": 3, "depth_multiple": 0.33, "width_multiple": 0.0625}
    model.yaml = {**rows, "head": [[[17, 20, 23], 1, "Detect", ["nc", "anchors"]]]}
    model.names = ["cat", "dog", "bus"]
    torch.save(tmp_path / "w.pt", {"model": model, "ema": None})
    found = read_card(tmp_path / "w.pt")
    config = config_of_weights(tmp_path / "w.pt")
    assert config.model.image_size == (640, 640)  # where nobody says
    load_all_weights(build_model(config.model), tmp_path / "w.pt")
    names = ClassNames(found.class_names, ("bus", "cow"))
    target = build_model(config.model.model_copy(update={"num_classes": 2}))
    assert load_weights(target, tmp_path / "w.pt", names).by_name.startswith("1 of 2 classes")
    mine, theirs = (arrays_of(each)["head.predict4.weight"] for each in (target, source))
    assert np.array_equal(mine.reshape(3, 7, -1)[:, 5], theirs.reshape(3, 8, -1)[:, 7])


@pytest.mark.parametrize(
    "state",
    [{"names": ["a", 3]}, {"names": 5}, {"yaml": ["x"]}, {"yaml": {"head": [[]]}},
     {"yaml": {"head": [[[1, 2, 3], 1, "Segment"]]}}, {"names": {"x": "y"}}],
)  # fmt: skip
def test_odd_pickled_models_say_less(tmp_path, monkeypatch, state) -> None:
    torch = FakeTorch(monkeypatch)
    torch.save(tmp_path / "w.pt", {"model": pickled(torch, **state), "opt": {"imgsz": "big"}})
    found = read_card(tmp_path / "w.pt")
    assert found.licence == AGPL
    assert found.model is None or found.class_names == ()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 100_000, '{"class_names": [1]}', '{"version": 2}', '{"licence": null}',
     '{"model": 5}', json.dumps({"source": "x" * 2000}), " " * (1 << 22) + "{}"],
)  # fmt: skip
def test_cards_of_strangers_are_refused(tmp_path, text) -> None:
    write_arrays(tmp_path / "w.safetensors", ARRAYS, {CARD_NOTE: text})
    with raises("model_card_invalid"):
        read_card(tmp_path / "w.safetensors")


def test_the_config_of_a_stranger_is_checked(tmp_path) -> None:
    text = json.dumps({"model": {"name": "yolov5", "pretrained": "x", "size": {"_BASE_": "/etc"}}})
    write_arrays(tmp_path / "w.npz", ARRAYS, {CARD_NOTE: text})
    with raises("bad_value", "w.npz: model card", "model.size"):
        config_of_weights(tmp_path / "w.npz")


def test_keys_of_later_versions_are_left_out(tmp_path) -> None:
    write_arrays(tmp_path / "w.npz", ARRAYS, {CARD_NOTE: '{"mood": 1, "licence": "MIT"}'})
    assert read_card(tmp_path / "w.npz") == ModelCard(licence="MIT")


@pytest.mark.parametrize("name", ["w.safetensors", "w.npz", "w.pt"])
def test_broken_files_end_with_a_code(tmp_path, name) -> None:
    with raises("weights_not_found"):
        read_card(tmp_path / name)
    (tmp_path / name).write_bytes(b"\xff" * 64)
    with raises("weights_damaged"):
        read_card(tmp_path / name)
    with raises("weights_format"):  # before anything else is read
        read_card((tmp_path / name).rename(tmp_path / "README.md"))


def test_an_average_keeps_the_licences_of_its_members(tmp_path) -> None:
    paths = [tmp_path / f"{name}.npz" for name in "abc"]
    for path, licence in zip(paths, ("", AGPL, "MIT")):
        text = ModelCard(licence=licence, source="from there").text()
        write_arrays(path, ARRAYS, {CARD_NOTE: text})
    warned: list[str] = []
    expected = ("AGPL-3.0 AND MIT", "average of 3 weights; from there")
    assert average_of(paths, warned.append) == expected and len(warned) == 1


def test_a_licence_stays_with_what_is_tuned_from_it(tmp_path) -> None:
    assert origin("pets", None, None)[0] == ""
    start = tmp_path / "yolov5n.pt"
    start.touch()
    licence, source = origin("pets", start, ModelCard(licence=AGPL, source="made there"))
    assert licence == AGPL
    assert "yolov5n.pt (AGPL-3.0)" in source
    licence, again = origin("cats", tmp_path, SimpleNamespace(licence=licence, source=source))
    assert licence == AGPL and again.endswith(source)


@pytest.mark.parametrize("name", ["yolov5n_coco", "cspresnet_s_imagenet", "yolov5s_cls_imagenet"])
def test_published_weights_that_may_fit_are_taken(name) -> None:
    require_fit(YOLOv5Config(size="n"), name)


def test_both_versions_of_rtdetr_are_one_network() -> None:
    require_fit(RTDETRConfig(variant="rtdetrv2", size="r50"), "rtdetr_r50_objects365_coco")
    require_fit(RTDETRConfig(size="r50"), "rtdetrv2_r50_coco")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (YOLOv5Config(size="n"), "ppyoloe_plus_s_coco"),
        (YOLOv5Config(size="n"), "yolov5s_coco"),
        (PPYOLOEConfig(size="m"), "ppyoloe_plus_s_coco"),
        (PPYOLOEConfig(body="yolov5"), "ppyoloe_plus_s_coco"),
        (RTDETRConfig(variant="dfine", size="l"), "rtdetr_l_coco"),
    ],
)
def test_published_weights_of_another_detector_are_refused(model, name) -> None:
    with raises("weights_of_other_architecture"):
        require_fit(model, name)


def test_refused_weights_come_with_those_that_fit() -> None:
    with raises("weights_of_other_architecture", "that fit (yolov5n_coco)"):
        require_fit(YOLOv5Config(size="n"), "ppyoloe_plus_s_coco")
