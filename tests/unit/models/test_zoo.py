"""Weights by name: the manifest, the cache, mirrors, offline, and ranks that decide together."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.common import retry
from ppdist.common.errors import UserError
from ppdist.config.experiment import load_config
from ppdist.config.model import YOLOv5Config
from ppdist.config.shipped import find_config
from ppdist.models import zoo as module
from ppdist.models.build import build_model
from ppdist.models.model_card import config_of_weights, licence_warning, read_card
from ppdist.models.weights import load_weights, official_arrays_of, write_arrays
from ppdist.models.zoo import local_weights, similar_names, zoo
from tests.errors import raises
from tests.file_server import serving

CONTENT = bytes(range(256)) * 64
NAME, FILE = "yolov5n_coco", "yolov5n.pt"


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A mirror; the cache is a folder of the test."""
    monkeypatch.setattr(retry, "_START_SECONDS", 0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    for name in ("http_proxy", "HTTP_PROXY", "PPDIST_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serving() as found:
        monkeypatch.setenv("PPDIST_WEIGHTS", found.url)
        found.files[f"/{FILE}"] = CONTENT
        yield found


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "ppdist" / "weights"


def code_of(call):
    with pytest.raises(UserError) as error:
        call()
    return error.value.code


# --- the manifest --------------------------------------------------------------------------------


def test_every_entry_says_where_from_and_for_what():
    files = [entry.file for entry in zoo().values()]
    assert len({*files}) == len(files), "the name of a file tells which it is"
    for name, entry in zoo().items():
        assert re.fullmatch(r"https://[\w./-]+\.(pdparams|pth?)", entry.url)
        assert entry.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert entry.source.home.startswith("https://") and entry.source.licence
        given = [entry.published, entry.metric, entry.protocol]
        assert all(given) or not any(given), name
        assert entry.published is None or 0 < entry.published < 100
        assert Path(name).name == name and "." not in name, "never taken for a path"


def test_every_entry_fits_a_config_and_its_protocol():
    for entry in zoo().values():
        overrides = [*entry.overrides, *(entry.protocol.overrides if entry.protocol else ())]
        config = load_config(find_config(entry.config), overrides)
        size = re.search(r"_(b\d|r\d+|[tnsmlx])_|yolov5([nsmlx]6?)", entry.name)
        named = size[1] or size[2]
        assert config.model.size == {"b0": "s", "b2": "m", "b4": "l", "b5": "x"}.get(named, named)
        if config.model.name == "rtdetr" and "imagenet" not in entry.name:
            assert config.model.variant == entry.name.partition("_")[0]
        if config.model.name == "ppyoloe":
            plus = "plus" in entry.file or "obj365" in entry.file or "Netb_t" in entry.file
            assert (config.model.variant == "plus") == plus


@pytest.mark.parametrize(
    ("name", "metric", "published"),
    [("ppyoloe_plus_s_coco", "mAP", 43.7), ("yolov5s_coco", "mAP", 37.4),
     ("dfine_s_coco", "mAP", 48.5), ("rtdetr_r18_coco", "mAP", 46.5),
     ("ppyoloe_plus_s_objects365", "mAP50", 18.1), ("yolov5s_cls_imagenet", "top1", 71.5)],
)  # fmt: skip
def test_published_figures_are_the_publishers(name, metric, published):
    assert (zoo()[name].metric, zoo()[name].published) == (metric, published)


# --- one process ---------------------------------------------------------------------------------


def test_a_name_is_downloaded_once_and_noted(server, cache):
    for _ in range(2):
        assert local_weights(NAME) == cache / FILE
    assert len(server.asked) == 1 and (cache / FILE).read_bytes() == CONTENT
    note = json.loads((cache / f"{FILE}.json").read_text())
    assert note["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert note["licence"] == "AGPL-3.0" and note["url"] == f"{server.url}/{FILE}"


def test_other_paths_stay_what_they_are(server, tmp_path, monkeypatch):
    assert local_weights("x/yolov5n.pt") == Path("x/yolov5n.pt")
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert local_weights(NAME) == Path(NAME), "a folder of the user's wins"
    assert not server.asked


@pytest.mark.parametrize("kind", [str, Path])
def test_a_published_address_is_its_name(server, cache, kind):
    """As users of PaddleDetection write it, whose server has two names."""
    server.files["/ppyoloe_plus_crn_s_80e_coco.pdparams"] = CONTENT
    place = "bcebos.com/models/ppyoloe_plus_crn_s_80e_coco.pdparams"
    for url in (f"https://paddledet.bj.{place}", f"https://bj.{place}".replace(
            "com/", "com/v1/paddledet/")):  # fmt: skip
        assert local_weights(kind(url)) == cache / "ppyoloe_plus_crn_s_80e_coco.pdparams"
    other = kind("https://example.org/yolov5n.pt")
    assert local_weights(other) == Path(other)
    with raises("weights_not_found", "docs/model_zoo.md"):
        load_weights(tiny_model(), other)
    assert len(server.asked) == 1


def test_a_published_checksum_is_held(server, cache, monkeypatch):
    entry = replace(zoo()[NAME], sha256=hashlib.sha256(b"other").hexdigest())
    monkeypatch.setattr(module, "zoo", lambda: {NAME: entry})
    assert code_of(lambda: local_weights(NAME)) == "download_damaged"
    assert not (cache / FILE).exists()


def test_a_cached_file_that_changed_is_refused(server, cache):
    local_weights(NAME)
    (cache / FILE).write_bytes(CONTENT[:-1])
    assert code_of(lambda: local_weights(NAME)) == "weights_damaged"


def test_a_mirror_folder_and_files_put_by_hand(server, cache, tmp_path, monkeypatch):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    monkeypatch.setenv("PPDIST_WEIGHTS", f"{mirror}")
    with raises("weights_not_in_mirror") as error:
        local_weights(NAME)
    assert zoo()[NAME].url in error.value.fix and f"{cache}" in error.value.fix
    cache.mkdir(parents=True)
    (cache / FILE).write_bytes(CONTENT)
    assert local_weights(NAME) == cache / FILE
    (mirror / FILE).write_bytes(CONTENT)
    assert local_weights(NAME) == mirror / FILE
    assert not server.asked


def test_offline_takes_what_is_there_alone(server, cache, monkeypatch):
    monkeypatch.setenv("PPDIST_OFFLINE", "1")
    assert code_of(lambda: local_weights(NAME)) == "weights_offline"
    monkeypatch.setenv("PPDIST_OFFLINE", "0")
    local_weights(NAME)
    monkeypatch.setenv("PPDIST_OFFLINE", "1")
    assert local_weights(NAME) == cache / FILE


def test_a_cache_that_is_read_only_serves_what_it_has(server, cache, monkeypatch):
    local_weights(NAME)
    monkeypatch.setattr("ppdist.common.files.os.access", lambda *_: False)
    assert local_weights(NAME) == cache / FILE
    assert code_of(lambda: local_weights("yolov5s_coco")) == "folder_unwritable"


def test_no_home_is_one_message(server, monkeypatch):
    monkeypatch.setattr(module, "user_cache", lambda: None)
    assert code_of(lambda: local_weights(NAME)) == "cache_missing"


def test_a_name_nearly_right_is_answered_with_names(server):
    with raises("weights_not_found") as error:
        load_weights(tiny_model(), "yolov5n_cocoo")
    assert "yolov5n_coco" in error.value.fix
    assert not server.asked


def tiny_model(seed=0):
    paddle.seed(seed)
    return build_model(YOLOv5Config(size="n", width_multiple=0.05, num_classes=3))


def stand_in(folder, model):
    """A file as ultralytics publishes it, of random weights."""
    write_arrays(folder / FILE, official_arrays_of(model))
    return (folder / FILE).read_bytes()


def test_a_file_that_is_not_here_is_answered_with_its_name(tmp_path):
    with raises("weights_not_found", "its name: yolov5s_coco"):
        load_weights(build_model(YOLOv5Config(num_classes=80)), tmp_path / "yolov5s.pt")


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("yolov8n.pt", "YOLOv8"), ("yolo11n.pt", "YOLO11"), ("best.pt", ""), ("yolov5nu.pt", "")],
)
def test_weights_of_another_yolo_are_answered(tmp_path, name, theirs):
    answer = similar_names(tmp_path / name)
    assert ("not supported" in answer) == bool(theirs) and theirs in answer


@pytest.mark.parametrize(
    ("name", "code"), [("README.md", "weights_format"), ("fake.pt", "weights_damaged")]
)
def test_what_is_no_file_of_weights_is_said_at_once(tmp_path, name, code):
    (tmp_path / name).write_bytes(b"hello" * 100)
    with raises(code, name):
        config_of_weights(tmp_path / name, ())


def test_weights_load_by_name_and_name_their_licence(server, tmp_path):
    trained = tiny_model()
    server.files[f"/{FILE}"] = stand_in(tmp_path, trained)
    model = tiny_model(seed=1)
    load_weights(model, NAME)
    for key, value in trained.state_dict().items():
        np.testing.assert_array_equal(model.state_dict()[key], value)
    for weights in (NAME, tmp_path / FILE):  # by its name, and by that of the published file
        card = read_card(weights)
        assert card.licence == "AGPL-3.0" and "github.com/ultralytics" in card.source
        assert card.class_names[:2] == ("person", "bicycle") and len(card.class_names) == 80
        assert "come under AGPL-3.0" in licence_warning(weights, card)


@pytest.mark.parametrize("name", ["ppyoloe_plus_s_coco", "yolov5m_cls_imagenet"])
def test_a_name_alone_brings_its_config(server, name):
    found = config_of_weights(name, ["output_dir=x"])
    wanted = load_config(find_config(zoo()[name].config), zoo()[name].overrides)
    assert found.model == wanted.model and found.data.resize == wanted.data.resize
    assert found.suppression == wanted.suppression and found.model.task == wanted.model.task
    assert len(found.data.class_names) in (0, found.model.num_classes)
    evaluated = config_of_weights(name, ["data.root=x"], needs_data=True)
    assert evaluated.data.val == wanted.data.val and evaluated.data.root == "x"
    assert not server.asked, "ranks that have not joined yet download nothing"


def test_permissive_weights_warn_of_nothing(server):
    server.files["/CSPResNetb_s_pretrained.pdparams"] = CONTENT
    card = read_card("cspresnet_s_imagenet")
    assert card.licence == "Apache-2.0" and not licence_warning("x", card)
    assert read_card(local_weights("cspresnet_s_imagenet")) == card
