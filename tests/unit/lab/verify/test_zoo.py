"""`verify zoo` on a tiny set, with stand-ins under the names of published files."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from ppdist.cli import verify as command
from ppdist.config.experiment import load_config
from ppdist.config.shipped import find_config
from ppdist.engine.build import build_model
from ppdist.lab.verify import zoo as module
from ppdist.lab.verify.zoo import (
    FAIL,
    NOT_COMPARED,
    NOT_RUN,
    PASS,
    format_row,
    protocol_config,
    verify_zoo,
)
from ppdist.models.model_card import config_of_weights
from ppdist.models.weights import arrays_of, official_arrays_of, write_arrays
from ppdist.models.zoo import zoo
from tests.unit.data.sets import write_coco
from tests.unit.engine.tiny import init_cpu

TINY = [
    "device=cpu", "model.num_classes=3", "model.width_multiple=0.1", "model.image_size=[64,64]",
    "data.format=coco", "data.class_names=[]", "data.workers=0", "data.val.images=images",
    "data.val.annotations=set.json", "model.depth_multiple=0.1", "train.cpu_kernels=plain",
]  # fmt: skip
FILES = [
    "yolov5n.pt",
    "ppyoloe_plus_crn_s_80e_coco.pdparams",
    "ppyoloe_plus_crn_s_30e_voc.pdparams",
]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    root = tmp_path_factory.mktemp("set")
    # Numbers do not tell classes apart: the stand-ins have three, not those that were published.
    write_coco(root, 4, categories=[{"id": n, "name": f"{n}"} for n in (1, 2, 3)])
    return [*TINY, f"data.root={root}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, overrides):
    """Stand-ins for published files, and what else lies in such a folder."""
    init_cpu()
    folder = tmp_path_factory.mktemp("zoo")
    for file in FILES:
        entry = module.published_weights(file)
        config = load_config(find_config(entry.config), overrides)
        model = build_model(config)
        arrays = official_arrays_of(model) if file.endswith(".pt") else arrays_of(model)
        write_arrays(folder / file, arrays)
    (folder / "CSPResNetb_s_pretrained.pdparams").write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    (folder / "yolov5s.pt").write_bytes(b"no weights")
    return folder


def test_a_folder_is_evaluated_by_each_protocol(folder, overrides):
    rows = {row.weights.rpartition("/")[2]: row for row in verify_zoo([f"{folder}"], overrides)}
    assert sorted(rows) == sorted(path.name for path in folder.iterdir())
    for file in FILES:
        row = rows[file]
        assert row.verdict == NOT_COMPARED and row.images == 4 and 0 <= row.measured <= 100
        assert "4 images" in row.why and row.published == zoo()[row.name].published
    assert "half a stride" in rows["yolov5n.pt"].protocol
    assert rows["ppyoloe_plus_crn_s_30e_voc.pdparams"].metric == "VOC_11_point"
    not_run = {name for name, row in rows.items() if row.verdict == NOT_RUN}
    assert not_run == {"notes.txt", "yolov5s.pt", "CSPResNetb_s_pretrained.pdparams"}
    assert f"{folder / 'yolov5s.pt'}: " in rows["yolov5s.pt"].why
    assert "4 images" in format_row(rows["yolov5n.pt"])
    assert "NOT RUN" in format_row(rows["notes.txt"])


@pytest.mark.slow
def test_figures_are_compared_on_the_protocols_data(folder, overrides, monkeypatch):
    entry = zoo()["yolov5n_coco"]
    protocol = replace(entry.protocol, images=4)

    def row(published, *more):
        fits = tuple(item for item in overrides if item.startswith("model."))
        here = replace(entry, protocol=protocol, published=published, overrides=fits)
        monkeypatch.setattr(module, "published_weights", lambda _: here)
        others = [item for item in overrides if item not in fits]
        return next(verify_zoo([f"{folder / 'yolov5n.pt'}"], [*others, *more]))

    measured = row(1.0).measured
    assert row(measured + 0.2).verdict == PASS
    assert row(measured + 0.5).verdict == FAIL
    other = row(measured, "nms.iou_threshold=0.5")
    assert other.verdict == NOT_COMPARED and "nms.iou_threshold" in other.why
    assert row(measured, "model.image_size=[96,96]").verdict == NOT_COMPARED


def test_a_protocol_is_the_published_one(overrides):
    yolov5 = protocol_config(zoo()["yolov5s6_coco"], [])
    assert yolov5.evaluate.rectangular and yolov5.evaluate.rectangular_pad == 0.5
    assert (yolov5.nms.score_threshold, yolov5.nms.iou_threshold) == (0.001, 0.65)
    assert yolov5.nms.multi_label and yolov5.model.image_size == (1280, 1280)
    ppyoloe = protocol_config(zoo()["ppyoloe_plus_s_coco"], [])
    assert not ppyoloe.evaluate.rectangular and ppyoloe.data.resize == "stretch"
    assert (ppyoloe.nms.score_threshold, ppyoloe.nms.iou_threshold) == (0.01, 0.7)


@pytest.mark.parametrize(
    ("name", "resize"),
    [
        ("rtdetr_r18_coco", "stretch"),  # PaddleDetection's
        ("rtdetr_r18_objects365_coco", "stretch_antialiased"),
        ("rtdetrv2_r18_coco", "stretch_antialiased"),
        ("dfine_s_coco", "stretch_antialiased"),
    ],
)
def test_images_are_resized_as_by_the_original(name, resize):
    assert protocol_config(zoo()[name], []).data.resize == resize
    assert config_of_weights(name).data.resize == resize


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["ppdist verify", "zoo", *words])
    return command.main()


def test_command_lists_and_evaluates_as_json(folder, overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PPDIST_WEIGHTS", f"{folder}")
    assert run(monkeypatch, "--json", f"{tmp_path / 'list.json'}") == 0
    listed = capsys.readouterr().out.splitlines()
    here = {text.split()[0] for text in listed if text.endswith(" yes")}
    assert {"yolov5n_coco", "ppyoloe_plus_s_coco"} <= here and len(listed) == len(zoo()) + 1
    assert len(json.loads((tmp_path / "list.json").read_text())) == len(zoo())
    words = ["yolov5n_coco", "-o", *overrides, "--json", f"{tmp_path / 'a.json'}"]
    assert run(monkeypatch, *words) == 0
    assert "published  28.0  AGPL-3.0" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "a.json").read_text())
    assert row["verdict"] == NOT_COMPARED and np.isfinite(row["measured"])
    assert run(monkeypatch, f"{folder / 'notes.txt'}") == 1
