"""eval, predict, export and convert with -w alone: the weights know the rest."""

import json
import sys
from pathlib import Path

import pytest

from ppdist.cli import convert, eval, export, predict
from ppdist.config.experiment import load_config
from ppdist.config.parse import dump_yaml
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.engine.checkpoint import save_checkpoint
from ppdist.export.spec import read_spec
from ppdist.models.build import build_model
from ppdist.models.model_card import AGPL, card_of, read_card
from ppdist.models.weights import arrays_of, read_arrays
from tests.errors import raises
from tests.project import write_config

NAMES, IDS = ("disc", "box", "wedge"), (7, 8, 9)
CONFIG = """
data: {resize: letterbox}
nms: {score_threshold: 0.0}
device: cpu
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set, and checkpoints/step-00000007 of a run on it, AGPL's."""
    folder = tmp_path_factory.mktemp("alone")
    make_shapes(folder / "data", train=2, val=2, size=64, seed=0)
    config = load_config(write_config(folder, CONFIG))
    model = build_model(config.model)
    card = card_of(config, model, NAMES, IDS, licence=AGPL, source="fine-tuned from there")
    groups = {"model": arrays_of(model), "ema": arrays_of(model)}
    state = {"step": 7}
    save_checkpoint(folder / "checkpoints", 7, groups, state, dump_yaml(config), card.text())
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command in this process; what it printed, and its warnings."""

    def run(command, *arguments: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments)])
        assert command.main() == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def scores_in(out: str) -> str:
    """What `ppdist eval` prints before the next commands, which name its weights."""
    return out.partition("\npredict ")[0]


def test_a_checkpoint_is_evaluated_by_its_own_config(trained, call) -> None:
    alone, warned = call(eval, "-w", trained)
    given, _ = call(eval, "-c", trained / "cfg.yml", "-w", trained)
    assert "mAP" in alone and scores_in(alone) == scores_in(given) and AGPL not in warned


def test_a_converted_file_predicts_with_its_card(trained, call, tmp_path) -> None:
    file = tmp_path / "w.safetensors"
    _, warned = call(convert, "-w", trained, "--out", file)
    assert warned.count(AGPL) == 1  # where something is made of them
    found = read_card(file)
    assert (found.class_names, found.licence) == (NAMES, AGPL)
    assert found.source == "fine-tuned from there" and read_arrays(file).keys()
    results = []
    for weights in (file, trained):
        out = tmp_path / f"of-{weights.name}"
        source = trained / "data" / "images"
        _, warned = call(predict, "-w", weights, "--source", source, "--out", out)
        assert "made up" not in warned and AGPL not in warned
        results.append(json.loads((out / "detections.json").read_text()))
    assert results[0] == results[1]
    kinds = [(each["id"], each["name"]) for each in results[0]["categories"]]
    assert kinds == list(zip(IDS, NAMES))


def test_a_file_does_not_know_where_data_are(trained, call, tmp_path) -> None:
    file = tmp_path / "w.npz"
    call(convert, "-w", trained, "--out", file)
    with raises("weights_without_data") as error:
        call(eval, "-w", file)
    assert "-c CONFIG" in error.value.fix
    data = [f"data.root={trained / 'data'}", "data.class_names=[]", "device=cpu", "data.workers=0",
            *(f"data.{part}.annotations=annotations/instances_{part}.json"
              for part in ("train", "val"))]  # fmt: skip
    alone, _ = call(eval, "-w", file, "-o", *data)
    given, _ = call(eval, "-w", trained)
    assert "mAP" in alone and scores_in(alone) == scores_in(given)


@pytest.mark.slow
def test_an_export_keeps_names_licence_and_network(trained, call, tmp_path) -> None:
    call(export, "-w", trained, "--out", tmp_path / "out")
    spec = read_spec(tmp_path / "out")
    assert spec.licence == AGPL and spec.network["name"] == "yolov5"
    found = read_card(tmp_path / "out")
    assert found.model == read_card(trained).model and found.source == "fine-tuned from there"
